"""Models, precisions, and the comparison of a profile with a real step."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import ModelProfile, castable
from tests.profiler.models import CASES, TEXT, tokens
from tests.profiler.real_run import Context, RealRun

PRECISIONS: dict[str, Context] = {
    "32-true": nullcontext,
    "bf16-mixed": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


def check_against_real_run(model: nn.Module, step: Callable[[], object], context: Context) -> ModelProfile:
    layout = describe_model(model)
    profile = profile_model(model, layout, step, context)
    real = RealRun(model, layout)
    torch.manual_seed(0)
    real.run(step, context)
    assert [[call.name, call.saved_bytes] for call in profile.calls] == real.calls
    assert profile.saved_bytes == sum(real.saved.values())
    assert castable(profile, "bfloat16") == real.castable()
    assert {use.fqn: use.uses for use in profile.parameters if use.uses} == dict(real.uses)
    return profile


def loss_of(outputs: Any) -> Tensor:
    """A loss that is large outside all blocks, whatever the model gives."""
    values = (
        outputs
        if isinstance(outputs, Tensor)
        else next(leaf for leaf in tree_leaves(outputs) if leaf.is_floating_point())
    )
    return F.mse_loss(values.float().tanh(), torch.ones_like(values).float())


PADDED = {"input_ids": tokens().repeat(2, 1), "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])}


HEADS = TEXT | {"head_dim": 8}


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**HEADS)), PADDED | {"labels": PADDED["input_ids"]}),
    "gemma": (lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**HEADS)), PADDED),
    "gemma3": (lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**HEADS, sliding_window=4)), PADDED),
    "classifier": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3)),
        PADDED | {"labels": torch.tensor([0, 2])},
    ),
    "eager": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, attn_implementation="eager")), PADDED),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2)),
            *(nn.InstanceNorm2d(8), nn.GELU(), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3), nn.PReLU()),
            *(nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3)),
        ),
        {"input": torch.ones(2, 3, 16, 16)},
    ),
    "recurrent": (
        lambda: nn.Sequential(nn.GRU(8, 8, 2, dropout=0.1, bidirectional=True)),
        {"input": torch.ones(5, 2, 8)},
    ),
} | {name: (case.build, case.inputs()) for name, case in CASES.items()}


BATCHED = sorted(MODELS.keys() - {"convolutions", "recurrent", "mlp", "lstm", "zamba2"})


def photograph(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a step might change."""
    held: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            items = (
                list(value.items()) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
            )
            held[f"{name}:{key}"] = [id(part) for part in tree_leaves(items)], type(value)
        held[f"{name}:keys"] = list(vars(module))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state = tensor.detach().clone().view(torch.uint8) if tensor.dim() else tensor.item()
        held[name] = state.tolist() if isinstance(state, Tensor) else state, tensor._version, tensor.data_ptr()
        held[f"{name}:"] = tensor.requires_grad, id(tensor.grad), type(tensor), len(tensor._backward_hooks or ())
    numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
    return held | {"random": (torch.get_rng_state().tolist(), random.getstate(), numbers)}
