"""Steps that are measured, and steps that are profiled for another device; see also test_profiling.py."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.gpu_specs import gpu
from lightning_protrain.profiler.records import ModelProfile
from lightning_protrain.strategy.profile_step import profile_training_step, streamable
from tests.support.models import LanguageModel, ParityModule, fit, zoo
from tests.support.parity import Result, differences, snapshot
from tests.support.profiled_runs import Profiling


def test_what_cannot_be_traced_is_measured_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    runs = []
    for callbacks in ([], [Profiling("num_x=3")]):
        torch.manual_seed(0)
        module = zoo()["moe"]()
        with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
            fit(module, callbacks=callbacks)
        runs.append(Result(tuple(module.losses), snapshot(module)))
    assert differences(*runs) == []
    profile = callbacks[0].profile
    assert "_local_scalar_dense" in profile.measured
    assert profile.saved_bytes > 0
    mixed = replace(profile, parameters=tuple(replace(use, casts=("bfloat16",)) for use in profile.parameters))
    assert streamable(mixed, module, "bfloat16") == frozenset()  # another batch may use them otherwise
    assert sum(line.startswith("The training step is measured on 'cpu'") for line in caplog.messages) == 1


@pytest.mark.parametrize(("name", "kernel"), [(None, "flash_cpu"), ("RTX 3090", "math"), ("T4", "efficient")])
def test_a_gpu_that_is_not_here_has_its_own_kernels(name: str | None, kernel: str) -> None:
    hardware = None if name is None else gpu(name, 64 << 30, 8)
    found: list[ModelProfile] = []

    class Elsewhere(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            found.append(profile_training_step(trainer, describe_model(pl_module), "x", hardware))

    fit(Attending(), callbacks=[Elsewhere()])
    assert found[0].attention == ((kernel, 2),)


class Attending(ParityModule):
    """Heads of seven elements in float32: tensor cores of Ampere cannot take them."""

    def __init__(self) -> None:
        super().__init__(LanguageModel([HeadsOfSeven(), HeadsOfSeven()]))


class HeadsOfSeven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 3 * 14)
        self.back = nn.Linear(14, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, 7)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return hidden + self.back(mixed.transpose(1, 2).flatten(2))
