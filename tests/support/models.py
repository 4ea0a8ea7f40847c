"""Tiny, deterministic LightningModules for parity tests: each has one trait that makes streaming its weights hard.

Every factory seeds before it builds, so that two instances with the same arguments have the same weights, and the data
is fixed. `zoo()` holds what any plan must train bitwise like plain Lightning; `variants()` what other tests need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.support.trainers import QUIET

VOCABULARY = 32
HIDDEN = 16
SEQUENCE = 8
NUM_SAMPLES = 28
BATCH = 2

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}

ModuleFactory = Callable[..., "ParityModule"]


def token_batches(seed: int = 1234) -> DataLoader:
    """Fourteen batches of two sequences of eight tokens, (B, S) int64, always the same."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, SEQUENCE), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=False)


class ParityModule(L.LightningModule):
    """Predicts the next token with `network`, which maps (B, S) tokens to (B, S, V) logits, and records every loss."""

    def __init__(self, network: nn.Module, optimizer: str = "adamw", lr: float = 0.01) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.lr = lr
        self.losses: list[Tensor] = []

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.network(tokens)

    def loss(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self.logits(tokens, batch_idx)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0], batch_idx)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer]
        return kind([p for p in self.parameters() if p.requires_grad], lr=self.lr, **options)

    def train_dataloader(self) -> DataLoader:
        return token_batches()


class HuggingFaceModule(ParityModule):
    """`network` is a causal language model of transformers."""

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=tokens, use_cache=False).logits


class LanguageModel(nn.Module):
    """An embedding, a ModuleList of blocks of any kind, and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, order: list[int] | None = None) -> Tensor:
        """Logits (B, S, V); `order` names the blocks to run, all of them unless told."""
        hidden = self.embedding(tokens)
        for index in range(len(self.blocks)) if order is None else order:
            hidden = self.blocks[index](hidden)
        return self.head(self.norm(hidden))


class Wide(nn.Module):
    """A block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Mlp(nn.Module):
    """A residual MLP: (B, S, H) to (B, S, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.silu(self.up(self.norm(hidden))))


class MlpWithSpare(Mlp):
    """Has a layer that no step ever calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(HIDDEN, HIDDEN)


HAS_BF16_LSTM = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def skip_without_bf16_lstm(hidden: Tensor) -> None:
    """Skips a test that reaches an LSTM in bfloat16, where oneDNN has none for this processor."""
    lowered = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    if not HAS_BF16_LSTM and (lowered or hidden.dtype == torch.bfloat16):
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")


class Lstm(nn.Module):
    """`nn.LSTM` keeps its weights in `_flat_weights` too, beside `_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        skip_without_bf16_lstm(hidden)
        return hidden + self.out(self.lstm(hidden)[0])


class Experts(nn.Module):
    """Routes every token to one of the experts, a ModuleList inside the block; some get no token in some steps."""

    def __init__(self, num_experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        gates, chosen = self.router(hidden).softmax(-1).max(-1)  # (B, S) each
        mixed = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            routed = chosen == index
            if routed.any():
                mixed = mixed.index_put((routed,), expert(hidden[routed]) * gates[routed].unsqueeze(-1))
        return hidden + mixed


class BatchNormMlp(Mlp):
    """Has buffers that every forward in training mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.batch_norm(super().forward(hidden).flatten(0, 1)).view_as(hidden)


class UnusedModule(ParityModule):
    """Skips its third block on odd steps."""

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.network(tokens, order=[0, 1, 3] if batch_idx % 2 else [0, 1, 2, 3])


class ReusedModule(ParityModule):
    """Runs its second block twice in every step."""

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.network(tokens, order=[0, 1, 1, 2])


class MultiOptimizerModule(ParityModule):
    """Optimizes by hand: one optimizer for the blocks, one for the rest."""

    def __init__(self, network: nn.Module, optimizer: str = "adamw", lr: float = 0.01) -> None:
        super().__init__(network, optimizer, lr)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch[0], batch_idx)
        self.losses.append(loss.detach().clone())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer]
        inner = list(self.network.blocks.parameters())
        outer = [p for name, p in self.named_parameters() if ".blocks." not in name]
        return kind(inner, lr=self.lr, **options), torch.optim.SGD(outer, lr=self.lr)


class ValidationModule(ParityModule):
    """Validates, and logs `val_loss` for callbacks that watch it."""

    def __init__(self, network: nn.Module, optimizer: str = "adamw", lr: float = 0.01) -> None:
        super().__init__(network, optimizer, lr)
        self.val_losses: list[Tensor] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch[0], batch_idx)
        self.val_losses.append(loss.detach().clone())
        self.log("val_loss", loss)

    def val_dataloader(self) -> DataLoader:
        return token_batches(seed=4321)


def _llama(num_layers: int, tied: bool) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2 * SEQUENCE,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 3, "n_head": 2, "n_positions": 2 * SEQUENCE}
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=1)).train()


def _frozen_llama() -> nn.Module:
    """The first of four blocks and the embedding get no gradient at all; the third passes one through."""
    model = _llama(num_layers=4, tied=False)
    for module in (model.model.embed_tokens, model.model.layers[0], model.model.layers[2]):
        module.requires_grad_(False)
    return model


def _factory(kind: type[ParityModule], build: Callable[[], nn.Module]) -> ModuleFactory:
    def make(optimizer: str = "adamw", lr: float = 0.01, seed: int = 0) -> ParityModule:
        torch.manual_seed(seed)
        return kind(build(), optimizer=optimizer, lr=lr)

    return make


def _blocks(block: type[nn.Module], count: int = 3) -> Callable[[], nn.Module]:
    return lambda: LanguageModel([block() for _ in range(count)])


def zoo() -> dict[str, ModuleFactory]:
    """Factories by trait: `factory(optimizer="adamw" | "sgd" | "adagrad", lr=0.01, seed=0)`."""
    return {
        "tied": _factory(HuggingFaceModule, lambda: _llama(num_layers=3, tied=True)),
        "frozen": _factory(HuggingFaceModule, _frozen_llama),
        "unused": _factory(UnusedModule, lambda: LanguageModel([Mlp(), MlpWithSpare(), Mlp(), Mlp()])),
        "lstm": _factory(ParityModule, _blocks(Lstm, count=2)),
        "moe": _factory(ParityModule, _blocks(Experts, count=2)),
        "reused": _factory(ReusedModule, _blocks(Mlp)),
        "dropout": _factory(HuggingFaceModule, _gpt2),
    }


def variants() -> dict[str, ModuleFactory]:
    """More factories, for tests of one feature each."""
    return {
        "buffers": _factory(ParityModule, _blocks(BatchNormMlp)),
        "multi_optimizer": _factory(MultiOptimizerModule, _blocks(Mlp)),
        "val": _factory(ValidationModule, _blocks(Mlp)),
    }


def fit(module: L.LightningModule, *, seed: int = 0, ckpt_path: str | None = None, **options: Any) -> L.Trainer:
    """Trains `module` on one CPU process, silently and without files; `options` go to the Trainer.

    The generator is seeded right before, so that what was drawn while building the trainer does not matter.
    """
    trainer = L.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **QUIET, **options})
    torch.manual_seed(seed)
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer
