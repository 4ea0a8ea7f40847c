"""The predicted memory of evaluation is reached, and never exceeded, by a forward without gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.models import Subject
from benchmarks.planner import CPU, plan_of, profile_of
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.profiler.row_wise import Slices
from lightning_protrain.runtime.slices import SlicedForward, run_in_slices


class MadeBytes(TorchDispatchMode):
    """Counts the storages that operations make and that are still referenced."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata)
        return made

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


@pytest.mark.sample(2)
@pytest.mark.parametrize("slices", [None, Slices(run_in_slices, 99, 8)], ids=["whole", "sliced"])
@pytest.mark.parametrize(
    ("name", "least"), [("llama", 0.8), ("qwen3", 0.8), ("lora", 0.8), ("gemma2", 0.8), ("t5", 0.6), ("mixtral", 0.99)]
)
def test_no_forward_without_gradients_takes_more(name: str, least: float, slices: Slices | None) -> None:
    module = Subject(name)
    layout, profile = profile_of(module, "fp32", slices)
    problem = Problem(profile, layout, CPU, Training(), 8.0, None, None)
    predicted = memory_timeline(problem, plan_of(layout, profile, "resident-checkpoint")).phase("evaluation")
    for sliced in profile.sliced:
        SlicedForward(sliced, module.get_submodule(sliced), profile.slice_tokens).put_on()
    with torch.no_grad(), MadeBytes([*module.parameters(), *module.buffers(), *module.batch.values()]) as made:
        module.training_step(module.batch, 0)
    assert least * predicted.device["activations"] <= made.peak <= predicted.device["activations"]
