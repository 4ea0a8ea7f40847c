"""Activations on the host: what is planned for them, and for those that are too small, is what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_protrain.config import Knobs
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.candidates import packings
from lightning_protrain.planner.infeasible import NoFeasiblePlan
from lightning_protrain.planner.memory import host_terms
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.search import search
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.runtime.hooks import find_tensors
from tests.runtime.applied import WIDTH, Block, Net, applied
from tests.support.machines import CPU

DEPTH, TOKENS = 8, 256


class Transient(Block):
    """Takes far more memory in forward than in backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            wide = hidden.repeat(1, 40).amax(1, keepdim=True)
        return super().forward(hidden) + wide


def llama() -> tuple[nn.Module, Callable[[], Tensor]]:
    """A language model that trains its norms alone, so that gradients take no memory."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=DEPTH, use_cache=False, **sizes))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" in name)
    tokens = torch.arange(TOKENS).view(1, -1) % 64
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def transient() -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model whose peak is a recomputation."""
    model, batch = Net([Transient() for _ in range(DEPTH)]), torch.randn(512, WIDTH)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model, lambda: model(batch).square().mean()


MODELS = {"llama": llama, "transient": transient}


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that operations make and that swaps bring back, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def count(self, storage: torch.UntypedStorage) -> None:
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in find_tensors((args, kwargs))}
        for tensor in find_tensors(result):
            if tensor.untyped_storage()._cdata not in given:
                self.count(tensor.untyped_storage())
        return result


class Counting(CPUDevice):
    """Counts what is swapped in."""

    def __init__(self, peak: Peak) -> None:
        super().__init__(torch.device("cpu"))
        self.peak = peak

    def swap_in(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Sequence[None]:
        for _, target in copies:
            self.peak.count(target.untyped_storage())
        return super().swap_in(copies)


def problem_of(model: nn.Module, step: Callable[[], Tensor]) -> tuple[Problem, Knobs]:
    """Return the problem of a model whose chunks stay on the device, and the knobs for that."""
    layout = describe_model(model)
    problem = Problem(profile_model(model, layout, step), layout, CPU, Training(), 0.0, None, None, chunk_bytes=(None,))
    return problem, Knobs(num_persistent_chunks=len(packings(problem, Knobs())[0].chunks), num_swap_blocks=0)


def inputs_of(plan: Plan) -> list[bool]:
    """Return for each block whether its inputs go to the host."""
    return [block.policy is BlockPolicy.CHECKPOINT and block.swap_bytes > 0 for block in plan.blocks]


def smallest(problem: Problem, knobs: Knobs, moved: bool) -> int:
    """Return the device bytes of the smallest plan, with inputs on the host or without."""
    packing = packings(problem, knobs)[0]
    points = [point for point in packing.points(knobs) if moved or not point.num_inputs]
    return min(packing.device_bytes(point, 0) for point in points)


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_that_only_inputs_on_the_host_meet(name: str) -> None:
    torch.manual_seed(0)
    model, step = MODELS[name]()
    problem, knobs = problem_of(model, step)
    without, least = (smallest(problem, knobs, moved) for moved in (False, True))
    plans = [search(replace(problem, device_bytes=budget), knobs) for budget in (without - 1, least)]
    with pytest.raises(NoFeasiblePlan):
        search(replace(problem, device_bytes=least - 1), knobs)
    for plan in plans:
        assert any(inputs_of(plan)[:-1])
        assert not inputs_of(plan)[-1]  # The last block would gain nothing.
        check(problem, plan, model, step)


def check(problem: Problem, plan: Plan, model: nn.Module, step: Callable[[], Tensor]) -> None:
    """Compare a step under a plan with the predicted memory, and its gradients with those of a plain step."""
    step().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    timeline, peak = memory_timeline(problem, plan), Peak()
    device = Counting(peak)
    with applied(model, lambda _: plan, device) as state:
        with peak:
            state.step(step).backward()
        found = [parameter.grad for parameter in model.parameters()]
        planned = sum(block.swap_bytes for block in plan.blocks)
        assert device.counters.swapped_out_bytes == planned == device.host.allocated_bytes
        assert host_terms(problem.layout, plan, 0.0)["swapped_activations"] == planned
    phases = [timeline.phase(name).device for name in ("forward", "backward")]
    terms = [device["activations"] + device["swapped_activations"] for device in phases]
    assert max(terms) <= peak.peak <= max(terms) + phases[1]["gradients"]
    pairs = zip(expected, found, strict=True)
    assert all(one is other is None or torch.equal(one, other) for one, other in pairs)
    model.zero_grad()


class Adapted(Block):
    """Saves many small activations beside large ones."""

    def forward(self, hidden: Tensor) -> Tensor:
        few = hidden[:2048, :1].contiguous()
        return super().forward(hidden) + sum((few - index).exp() for index in range(40)).mean()


def test_what_is_too_small_to_be_swapped_is_predicted() -> None:
    model, batch = Net([Adapted() for _ in range(4)]), torch.randn(1 << 17, WIDTH)
    step = lambda: model(batch).mean()  # noqa: E731
    problem, knobs = problem_of(model, step)
    plan = search(problem, replace(knobs, num_swap_blocks=3, num_checkpoint_blocks=0))
    assert [block.policy for block in plan.blocks] == [*3 * [BlockPolicy.SWAP], BlockPolicy.KEEP]
    timeline, peak = memory_timeline(problem, plan), Peak()
    device = Counting(peak)
    with applied(model, lambda _: plan, device) as state, peak:
        state.step(step).backward()
    # Of each block: its input, the norm's statistics and output, and the twice as wide output of tanh.
    assert device.counters.swapped_out_bytes == 3 * (4 * batch.nbytes + 2 * batch.nbytes // WIDTH)
    phases = [timeline.phase(name).device for name in ("forward", "backward")]
    predicted = max(phase["activations"] + phase["swapped_activations"] for phase in phases)
    assert 0.98 * predicted <= peak.peak <= predicted
