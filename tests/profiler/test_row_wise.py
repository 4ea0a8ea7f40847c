"""Which modules compute every token alone is found from what they do, not from their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.fake_mode import MetaMode
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.row_wise import Slices, is_row_wise
from lightning_protrain.runtime.slices import run_in_slices
from tests.support.models import BATCH, SEQUENCE, zoo

WIDTH = 16


class Function(nn.Module):
    """A module that computes a function of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Any:
        return self.function(hidden)


class Counting(nn.Module):
    """A module that writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.add_(1)
        return hidden + self.seen


def lora(dropout: float) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["0"], lora_dropout=dropout)
    return peft.get_peft_model(nn.Sequential(nn.Linear(WIDTH, WIDTH)), config).base_model.model[0]


def llama(kind: Any) -> nn.Module:
    return kind(LlamaConfig(hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=2))


def tokens_behind(hidden: Tensor) -> Tensor:
    """The token before, as in RWKV."""
    return hidden + F.pad(hidden, (0, 0, 1, -1))


def heads(hidden: Tensor) -> Tensor:
    return hidden.view(*hidden.shape[:-1], 4, WIDTH // 4).transpose(1, 2)


ROW_WISE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 3),
    "linear in four bits": lambda: bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32).to("cpu"),
    "lora": lambda: lora(0.0),
    "mlp": lambda: llama(LlamaMLP),
    "rms norm": lambda: LlamaRMSNorm(WIDTH),
    "fused rms norm": lambda: nn.RMSNorm(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "activation": lambda: nn.GELU(),
    "softmax of columns": lambda: nn.Softmax(dim=-1),
    "gate": lambda: Function(lambda hidden: F.silu(hidden[..., : WIDTH // 2]) * hidden.chunk(2, -1)[1]),
    "idle dropout": lambda: nn.Dropout(0.0),
    "heads and back": lambda: Function(lambda hidden: heads(hidden).transpose(1, 2).flatten(2)),
    "gate of each token": lambda: Function(lambda hidden: hidden * hidden.mean(-1, keepdim=True)),
}
MIXING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "lora with dropout": lambda: lora(0.1),
    "batch norm": lambda: Function(lambda hidden: F.batch_norm(hidden.mT, None, None, training=True).mT),
    "a buffer that changes": Counting,
    "attention": lambda: Function(lambda hidden: F.scaled_dot_product_attention(hidden, hidden, hidden)),
    "scores": lambda: Function(lambda hidden: hidden @ hidden.mT @ hidden),
    "convolution": lambda: Function(lambda hidden: F.avg_pool1d(hidden.mT, 3, 1, 1).mT),
    "the token before": lambda: Function(tokens_behind),
    "the next token": lambda: Function(lambda hidden: hidden.roll(1, 1)),
    "sum of tokens": lambda: Function(lambda hidden: hidden - hidden.mean(1, keepdim=True)),
    "sum of samples": lambda: Function(lambda hidden: hidden - hidden.mean(0, keepdim=True)),
    "sum of all": lambda: Function(lambda hidden: hidden / hidden.sum()),
    "softmax of tokens": lambda: nn.Softmax(dim=1),
    "running sum": lambda: Function(lambda hidden: hidden.cumsum(1)),
    "reversed tokens": lambda: Function(lambda hidden: hidden.flip(1)),
    "positions": lambda: Function(lambda hidden: hidden + torch.arange(hidden.shape[1])[:, None]),
    "choice of tokens": lambda: Function(lambda hidden: hidden[hidden[..., 0] > 0]),
    "first token": lambda: Function(lambda hidden: hidden + hidden[:, :1]),
    "rows of another shape": lambda: Function(lambda hidden: hidden.reshape(WIDTH, -1).t().reshape(hidden.shape)),
    "fewer tokens": lambda: Function(lambda hidden: hidden[:, ::2]),
    "several results": lambda: Function(lambda hidden: (hidden, hidden)),
    "heads": lambda: Function(heads),
    "random numbers": lambda: Function(lambda hidden: hidden + torch.rand_like(hidden)),
}


def found(module: nn.Module, shape: tuple[int, ...] = (2, 6, WIDTH)) -> bool:
    mode = MetaMode([*module.parameters(), *module.buffers()])
    with mode:
        return is_row_wise(module.forward, torch.empty(shape), mode)


@pytest.mark.parametrize("make", ROW_WISE.values(), ids=ROW_WISE)
def test_modules_that_compute_each_token_alone_are_found(make: Callable[[], nn.Module]) -> None:
    assert found(make().train())


@pytest.mark.parametrize("make", MIXING.values(), ids=MIXING)
def test_modules_that_do_anything_else_are_not_taken(make: Callable[[], nn.Module]) -> None:
    assert not found(make().train())


def test_tokens_without_samples_are_rows_too() -> None:
    assert found(nn.Linear(WIDTH, 3), (6, WIDTH))
    assert found(nn.LayerNorm(WIDTH // 4), (2, 6, 4, WIDTH // 4))
    assert not found(nn.Softmax(dim=0), (6, WIDTH))


SLICED = {
    "tied": [
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("post_attention_layernorm", "mlp"),
    ],
    "dropout": ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj"],
    "unused": [""],
    "lstm": ["out"],
    "moe": ["router", "experts.4"],
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SLICED)
def test_the_outermost_modules_of_a_block_are_sliced(name: str) -> None:
    module = zoo()[name]()
    layout = describe_model(module)
    batch = next(iter(module.train_dataloader()))
    profile = profile_model(
        module, layout, partial(module.training_step, batch, 0), slices=Slices(run_in_slices, 99, 5)
    )
    block = next(segment for segment in profile.segments if segment.unit == layout.blocks[-1].name)
    assert list(block.sliced) == SLICED[name]
    assert profile.slice_tokens == 5
    assert not block.keeps_products
    whole = profile_model(
        module, layout, partial(module.training_step, batch, 0), slices=Slices(run_in_slices, 99, BATCH * SEQUENCE)
    )
    assert (whole.sliced, whole.slice_tokens) == ((), 0)
