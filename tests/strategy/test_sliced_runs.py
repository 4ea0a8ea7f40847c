"""A run that fits in no other way runs row-wise modules on slices of the tokens; any other run does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.logical import PeakOfStep
from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.search import NoFeasiblePlan
from lightning_protrain.strategy import profile_step
from tests.support.machines import CPU
from tests.support.models import HuggingFaceModule, fit

TOKENS = 4096


class Long(HuggingFaceModule):
    """A Llama on sequences of TOKENS tokens, whose MLPs take most memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=32, max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=1, **sizes)
        super().__init__(LlamaForCausalLM(config))
        self.batch = [torch.randint(32, (1, TOKENS), generator=torch.Generator().manual_seed(1))]

    def train_dataloader(self) -> DataLoader[list[Tensor]]:
        return DataLoader([self.batch, self.batch], batch_size=None)  # type: ignore[arg-type]


def strategy(budget: int | str) -> ProTrainStrategy:
    return ProTrainStrategy(device_memory=budget, hardware=CPU, monitor=False)


def least_of_all() -> int:
    """The least budget that the refusal of a smaller one asks for."""
    with pytest.raises(NoFeasiblePlan) as refused:
        fit(Long(), strategy=strategy("1KiB"))
    found = re.search(r"\((\d+) bytes\)", str(refused.value))
    assert found is not None
    return int(found[1])


@cache
def least() -> int:
    """The least budget without slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_step, "LEAST_SLICE", TOKENS)
        return least_of_all()


def test_a_run_that_fits_is_not_sliced() -> None:
    under = strategy(least())
    fit(Long(), strategy=under, max_steps=1)
    assert under.plan is not None
    assert (under.plan.sliced, under.plan.slice_tokens) == ((), 0)


def test_a_run_that_does_not_fit_otherwise_is_sliced() -> None:
    expected, module, counted = Long(), Long(), PeakOfStep()
    fit(expected)
    under = strategy(int(0.6 * least()))
    fit(module, strategy=under, callbacks=[counted])
    plan = under.plan
    assert plan is not None
    assert plan.slice_tokens == profile_step.LEAST_SLICE
    assert "model.layers.1.mlp" in str(plan.sliced)
    assert "at most 1,024 tokens at a time" in str(plan)
    assert plan.prediction is not None
    assert 0.95 * plan.prediction.device_bytes <= counted.peak <= plan.prediction.device_bytes
    assert_close(module.losses, expected.losses, rtol=1e-5, atol=0)
    assert_close(module.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_sliced_run_is_rehearsed() -> None:
    under = ProTrainStrategy(device_memory=int(0.6 * least()), hardware=CPU, monitor=False, rehearse=True)
    fit(Long(), strategy=under)
    assert under.plan is not None
    assert under.plan.sliced
    assert under.plan.prediction is not None


@pytest.mark.slow
def test_a_refusal_says_what_is_needed_with_slices() -> None:
    needed = least_of_all()
    assert needed < 0.6 * least()
    fit(Long(), strategy=strategy(needed), max_steps=1)


@pytest.mark.parametrize("make", [lambda: strategy(10 * least()), lambda: strategy("auto")], ids=["roomy", "auto"])
def test_slices_are_not_profiled_without_need(
    make: Callable[[], ProTrainStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_step, "Slices", None)
    fit(Long(), strategy=make(), max_steps=1)
