"""Runs small modules with and without an applied plan, and compares the runs bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice, Device
from lightning_protrain.planner.plan import ChunkPlan, Plan, chunk_offsets
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan
from lightning_protrain.runtime.chunk import Chunk, ChunkState
from tests.support.plans import alternating, kept, place, preset, selective
from tests.support.simulated.device import SimulatedDevice

WIDTH = 8
ROWS = 4

# Plans by name; each takes a module. All but `offload` have the fewest chunk buffers that can work.
PLANS: dict[str, Callable[[nn.Module], Plan]] = {
    "kept": kept,
    "checkpointed": lambda module: place(module, checkpointed=lambda index: True),
    "alternating": alternating,
    "selective": selective,
    "small chunks": lambda module: place(module, chunk_bytes=1),
    "offload": lambda module: preset(module, "offload"),
}
each_plan = pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)


def in_turns(last: Sequence[Any], *factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of `factors`, each with the next of the `last` ones: every pair of two values occurs."""
    places = itertools.product(*(range(len(factor)) for factor in factors))
    return [(*(f[at] for f, at in zip(factors, place, strict=True)), last[sum(place) % len(last)]) for place in places]


class Block(nn.Module):
    """A residual MLP: (ROWS, WIDTH) to (ROWS, WIDTH)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Net(nn.Module):
    """A linear layer, blocks of any kind, and a head."""

    def __init__(self, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inp(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batches(count: int = 4) -> list[Tensor]:
    """Always the same inputs, (ROWS, WIDTH) each."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


@dataclass
class Applied:
    """A model with a plan applied to it.

    Attributes:
        sentences: Messages of the runtime to the user.
    """

    model: nn.Module
    plan: Plan
    runtime: Runtime
    device: Device
    sentences: list[str] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.runtime._chunks

    @property
    def num_live(self) -> int:
        return sum(chunk.state is not ChunkState.HOST for chunk in self.chunks)

    def step(self, function: Callable[..., Any], *args: Any, training: bool = True) -> Any:
        return self.runtime.run_step(function, args, {}, training)


@contextmanager
def applied(
    model: nn.Module,
    make: Callable[[nn.Module], Plan] = kept,
    device: Device | None = None,
    spare_host_bytes: int = 0,
) -> Iterator[Applied]:
    """Apply the plan of `make`, by default on the CPU, and remove it at the end."""
    device = device or CPUDevice(torch.device("cpu"))
    sentences: list[str] = []
    plan = make(model)
    layout = describe_model(model)
    runtime = apply_plan(model, plan, layout, device, RunOptions(sentences.append, spare_host_bytes=spare_host_bytes))
    try:
        yield Applied(model, plan, runtime, device, sentences)
    finally:
        runtime.remove()


StepFunction = Callable[[nn.Module, Tensor, int], Tensor | None]


def mean_square(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    """The usual step function: a loss of the outputs alone."""
    return model(batch).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    model: nn.Module,
    step: StepFunction,
    state: Applied | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    accumulate: int = 1,
    num_steps: int = 4,
    inputs: Sequence[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Trains and returns everything that must be equal: losses, last gradients and state dict, cloned."""
    torch.manual_seed(3)
    stepper = optimizer(model)
    seen: dict[str, Tensor] = {}
    for index, batch in enumerate(batches(num_steps) if inputs is None else inputs):
        if state is None:
            loss = step(model, batch, index)
        else:
            loss = state.step(step, model, batch, index)
        if loss is not None:
            seen[f"loss {index}"] = loss.detach().clone()
            loss.backward()
        if (index + 1) % accumulate == 0:
            seen |= {f"grad {index} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            if state is not None:
                state.runtime.settle()
            stepper.step()
            if state is not None:
                state.runtime.refresh()
            stepper.zero_grad()
    return seen | {name: value.detach().clone() for name, value in model.state_dict().items()}


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of what is not bitwise equal."""
    missing = sorted(expected.keys() ^ found.keys())
    return missing + [name for name, value in expected.items() if name in found and not _same(value, found[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other)


def assert_parity(
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], Plan],
    step: StepFunction = mean_square,
    **options: Any,
) -> Applied:
    """Trains what `build` builds twice, plainly and with the plan, and compares; within the bounds of the plan."""
    results = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = build()
        if plain:
            results.append(train(model, step, **options))
        else:
            with applied(model, make) as state:
                results.append(train(model, step, state, **options))
                assert state.device.counters.peak_live_bytes <= state.plan.memory.chunk_buffers
                assert state.num_live == 0
                assert state.device.counters.live_bytes == 0
    different = differences(*results)
    assert not different, different
    return state


def assert_same(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module, Applied | None], dict[str, Tensor]],
    make: Callable[[nn.Module], Plan] = kept,
    device: Device | None = None,
) -> Applied:
    """Run what `build` builds plainly and with the plan, on a simulated device if it is one, and compare."""
    torch.manual_seed(0)
    expected = run(build(), None)
    torch.manual_seed(0)
    model = build()
    with applied(model, make, device) as state, device if isinstance(device, SimulatedDevice) else nullcontext():
        different = differences(expected, run(model, state))
    assert not different, different
    return state


def poison_released_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills a chunk's device memory with NaN before it is freed, so that nothing profits from what was left there."""
    release = Chunk.release

    def poisoned(chunk: Chunk) -> None:
        if chunk.state is not ChunkState.HOST:
            chunk._storage.fill_(255)
        release(chunk)

    monkeypatch.setattr(Chunk, "release", poisoned)


def chunk_of(*parameters: nn.Parameter) -> tuple[Chunk, CPUDevice]:
    """A chunk of parameters, as of one unit, on the CPU."""
    device = CPUDevice(torch.device("cpu"))
    names = tuple(f"p{index}" for index in range(len(parameters)))
    _, nbytes = chunk_offsets([parameter.nbytes for parameter in parameters])
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    return Chunk(ChunkPlan(names, "unit", dtype, True, nbytes, False), parameters, device), device


def live(chunk: Chunk) -> Chunk:
    """Brings a chunk to the device and waits for it."""
    if chunk.state is ChunkState.HOST:
        chunk.fetch()
    chunk.wait(in_backward=False)
    return chunk
