"""All placements give the weights that DDP gives on the same data, on two and four gloo ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain import ProTrainStrategy
from tests.support.plans import half
from tests.support.ranks import run_ranks, trainer_on_rank, values

STEPS, WIDTH, VOCABULARY = 10, 16, 23


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Language(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Module(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Language(tied=kind == "tied")
        if kind == "half frozen":
            for parameter in (*self.model.embedding.parameters(), *self.model.layers[:2].parameters()):
                parameter.requires_grad_(False)
        if kind == "lora":
            from peft import LoraConfig, inject_adapter_in_model  # Takes seconds, and scripts import this file.

            inject_adapter_in_model(LoraConfig(r=2, target_modules=["up", "down"]), self.model)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(VOCABULARY, (256, 9), generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(tokens), batch_size=2)


class Case(NamedTuple):
    kind: str
    placement: str
    accumulate: int
    clip: float | None

    def __str__(self) -> str:
        return "-".join(map(str, self))


KINDS = ("full", "half frozen", "tied", "lora")
PLACEMENTS = ("resident", "replicate", "shard", "shard half", "auto half", "ddp flat")
# Every pair of values of two factors.
CASES = [
    Case(kind, placement, (1, 3)[(k + p) % 2], (None, 0.1)[(k // 2 + p // 2 + p // 4) % 2])
    for (k, kind), (p, placement) in itertools.product(enumerate(KINDS), enumerate(PLACEMENTS))
]


def strategy_of(placement: str, module: nn.Module, **process: Any) -> ProTrainStrategy:
    process = {"monitor": False, **process}  # Its tables take a third of the time.
    if placement == "ddp flat":
        return ProTrainStrategy(plan="resident", adapter_grad_sync="flat", **process)
    sharding, _, part = placement.partition(" ")
    if sharding == "resident":
        return ProTrainStrategy(sharding="resident", adapter_grad_sync="ddp", **process)
    plan: Any = half(module) if part else "offload"
    return ProTrainStrategy(sharding=sharding, plan=plan, adapter_grad_sync="ddp", **process)


class Found(NamedTuple):
    weights: dict[str, Tensor]
    states: dict[Any, Any]
    collectives: int
    sent: int


def train(rank: int, world_size: int, case: Case, seed: int = 0) -> tuple[dict[str, Tensor], L.Trainer]:
    # What `torch.manual_seed` seeds beside this it has no device for, and formats the stack.
    torch.default_generator.manual_seed(seed)
    module = Module(case.kind)
    options: dict[str, Any] = {"accumulate_grad_batches": case.accumulate, "max_steps": STEPS}
    if case.clip is not None:
        options["gradient_clip_val"] = case.clip
    if case.placement != "ddp":
        options["kind"] = lambda **process: strategy_of(case.placement, module, **process)
    trainer = trainer_on_rank(rank, world_size, **options)
    trainer.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, trainer


def train_all(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    torch.set_num_threads(1)
    wrong, expected = [], {}
    for case in cases:
        plain = case._replace(placement="ddp")
        if plain not in expected:
            expected[plain], _ = train(rank, world_size, plain)
        found, trainer = train(rank, world_size, case)
        assert trainer.global_step == STEPS
        if list(found) != list(expected[plain]):
            wrong.append(f"{case}: names")
        for name, value in expected[plain].items():
            if not torch.equal(value, found[name]):
                wrong.append(f"{case}: {name} {float((value - found[name]).abs().max()):.1e}")
                break
    return wrong


def test_every_pair_of_two_factors_is_trained() -> None:
    factors = (KINDS, PLACEMENTS, (1, 3), (None, 0.1))
    for one, two in itertools.combinations(range(len(factors)), 2):
        assert {(case[one], case[two]) for case in CASES} == set(itertools.product(factors[one], factors[two]))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_weights_of_ddp(kind: str, tmp_path: Path) -> None:
    found = values(run_ranks(train_all, 2, tmp_path, 2, [case for case in CASES if case.kind == kind]))
    assert found == [[], []]
