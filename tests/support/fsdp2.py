"""Modules and comparisons with DDP for tests of `ProTrainFSDP2Strategy`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import peft
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from tests.support.models import HIDDEN, VOCABULARY, Mlp, ParityModule, token_batches, variants, zoo
from tests.support.ranks import trainer_on_rank

RANKS = 2
# Some blocks of the tiny models have so many parameters, and so have some layers inside them.
SMALL = 600
CLIPPED = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"}
# Two orders of summing a norm differ by a rounding of the gradients, which a few steps of AdamW carry on.
BOUND = 3e-6


class Uneven(nn.Module):
    """No repeated list, no two modules of a class but layers; more ranks than rows in places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, bias=False, batch_first=True)
        self.first = Mlp()
        self.scale = nn.Parameter(torch.ones(1))
        self.second = nn.GRU(HIDDEN, HIDDEN + 1, batch_first=True)
        self.head = nn.Linear(HIDDEN + 1, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(self.second(self.scale * self.first(hidden))[0])


class Flat(L.LightningModule):
    """The layers are attributes of the LightningModule itself, and its steps call them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.middle = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.bias = nn.Parameter(torch.zeros(3 * HIDDEN))
        self.head = nn.Linear(3 * HIDDEN, VOCABULARY)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.head(F.silu(self.middle(self.embedding(tokens)) + self.bias))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return token_batches()


def seeded(build: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        return build()

    return make


def lora() -> ParityModule:
    module = zoo()["frozen"]()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
    module.network = peft.get_peft_model(module.network.bfloat16(), config)  # The adapters are of float32.
    return module


MODELS: dict[str, Callable[[], Any]] = {
    **{name: zoo()[name] for name in ("tied", "frozen", "unused", "lstm", "dropout", "reused")},
    "full": variants()["val"],
    "lora": lora,
    "uneven": seeded(lambda: ParityModule(Uneven())),
    "flat": seeded(Flat),
}


class Case(NamedTuple):
    """A module, and the way in which it is trained."""

    model: str
    policy: str
    checkpointing: bool
    accumulate: int
    clip: bool

    def strategy(self, **options: Any) -> ProTrainFSDP2Strategy:
        arguments = {"min_num_params": SMALL, "activation_checkpointing": self.checkpointing, **options}
        return ProTrainFSDP2Strategy(self.policy, **arguments)  # type: ignore[arg-type]

    def options(self) -> dict[str, Any]:
        return {"accumulate_grad_batches": self.accumulate, **(CLIPPED if self.clip else {})}


class Trained(NamedTuple):
    """Losses of a rank; weights on rank 0; names of parameters and modules."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    names: list[str]


def train(rank: int, module: Any, kind: Callable[..., Any], **options: Any) -> tuple[Trained, L.Trainer]:
    trainer = trainer_on_rank(rank, RANKS, kind, **{"max_epochs": 1, **options})
    torch.manual_seed(rank)  # Only rank 0's weights may count, and dropout differs between ranks.
    trainer.fit(module)
    names = [name for name, _ in itertools.chain(module.named_parameters(), module.named_modules())]
    return Trained(module.losses, trainer.strategy.lightning_module_state_dict(), names), trainer


def largest_difference(ours: Trained, theirs: Trained, rank: int) -> float:
    """0.0 if bitwise equal."""
    assert ours.names == theirs.names
    assert len(ours.losses) == len(theirs.losses) > 0
    pairs = list(zip(ours.losses, theirs.losses, strict=True))
    if rank == 0:
        assert list(ours.weights) == list(theirs.weights)
        assert not any(isinstance(value, DTensor) for value in ours.weights.values())
        pairs += [(ours.weights[name], value) for name, value in theirs.weights.items()]
    return max(float((one.float() - other.float()).abs().max()) for one, other in pairs)


# Strategies by a short name.
KINDS: dict[str, Callable[..., Any]] = {
    "ddp": partial(DDPStrategy, find_unused_parameters=True),
    "fsdp2": partial(ProTrainFSDP2Strategy, policy="size", min_num_params=SMALL),
    "offloaded": partial(ProTrainFSDP2Strategy, cpu_offload=True, activation_checkpointing=True),
    "parts": partial(ProTrainFSDP2Strategy, save_distributed_checkpoint=True),
}
