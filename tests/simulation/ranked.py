"""Ranks that train together on simulated devices, and the reference for their results."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.rank_store import RankStore
from lightning_protrain.runtime.apply import RunOptions, apply_plan
from lightning_protrain.runtime.comm import step_sync
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.step import fused_host_step
from tests.runtime.applied import ROWS, WIDTH, Net
from tests.support.plans import kept
from tests.support.simulated.collectives import SimulatedGroup
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.network import SimulatedNetwork
from tests.support.simulated.streams import SimulatedWorker

MAX_NORM = 0.5


class Skipping(Net):
    """A model that skips its last block if `skip` is true."""

    def forward(self, hidden: Tensor, skip: bool = False) -> Tensor:
        hidden = self.inp(hidden)
        for block in self.blocks[:-1] if skip else self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@dataclass(frozen=True)
class Case:
    """A run of several ranks.

    Attributes:
        plan: Makes the plan from the model; `sharding` replaces its sharding.
        sharding: Whether ranks share offloaded chunks.
        nodes: Number of nodes.
        node_size: Ranks of each node.
        accumulate: Number of micro-batches in a step.
        clips: Whether the norm of gradients is bounded.
        overlap: Phase during which the host steps the optimizer.
        reduce_dtype: Dtype in which gradients of offloaded chunks are sent; None: their own.
        skips: Whether some batches skip the last block, on different ranks in different steps.
        num_steps: Number of optimizer steps.
    """

    plan: Callable[[nn.Module], Plan] = kept
    sharding: Sharding = Sharding.REPLICATE
    nodes: int = 1
    node_size: int = 2
    accumulate: int = 1
    clips: bool = False
    overlap: Overlap = Overlap.OFF
    reduce_dtype: torch.dtype | None = None
    skips: bool = True
    num_steps: int = 3

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.node_size

    def loss(self, model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
        """Return the loss of one rank's micro-batch."""
        seed = 100 * step + 10 * micro + rank
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        # In the last step nobody uses that block.
        skip = self.skips and (step == self.num_steps - 1 or (rank + step + micro) % 3 == 1)
        outputs: Tensor = model(batch, skip)
        return outputs.square().mean()


@dataclass
class Trained:
    """The result of one rank.

    Attributes:
        values: Losses, gradients of the last step and weights by name.
        device: Device of the rank.
        ends: Virtual time at which each step has ended.
    """

    values: dict[str, Tensor]
    device: SimulatedDevice
    ends: list[float] = field(default_factory=list)


def network() -> Skipping:
    """Return the model, which has equal weights on every rank."""
    torch.manual_seed(0)
    return Skipping()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# --- plainly ----------------------------------------------------------------------------------------------------------


def train_plainly(case: Case) -> dict[str, Tensor]:
    """Return the reference: one model for each rank, whose gradients are summed in the order of ranks."""
    models = [network() for _ in range(case.world_size)]
    optimizers = [optimizer_of(model) for model in models]
    plan, seen = case.plan(models[0]), {}
    offloaded = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
    for step in range(case.num_steps):
        for rank, model in enumerate(models):
            for micro in range(case.accumulate):
                loss = case.loss(model, rank, step, micro)
                seen[f"loss {rank} {step} {micro}"] = loss.detach()
                loss.backward()
        for name, *parameters in zip(
            dict(models[0].named_parameters()), *(m.parameters() for m in models), strict=True
        ):
            total = _average(case, [parameter.grad for parameter in parameters], parameters[0], name in offloaded)
            for parameter in parameters:
                parameter.grad = total if total is None else total.clone()
        for model, optimizer in zip(models, optimizers, strict=True):
            if case.clips:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if step < case.num_steps - 1:
                optimizer.zero_grad()
    seen |= {f"grad {n}": p.grad.clone() for n, p in models[0].named_parameters() if p.grad is not None}
    return seen | {name: value.detach().clone() for name, value in models[0].state_dict().items()}


def _average(case: Case, grads: Sequence[Tensor | None], like: Tensor, offloaded: bool) -> Tensor | None:
    if offloaded and all(grad is None for grad in grads):
        return None
    parts = [torch.zeros_like(like) if grad is None else grad * (1.0 / case.world_size) for grad in grads]
    if not offloaded:
        return sum(parts[1:], parts[0])
    parts = [part.to(case.reduce_dtype or part.dtype) for part in parts]
    if case.sharding is Sharding.SHARD:
        nodes = [parts[begin : begin + case.node_size] for begin in range(0, case.world_size, case.node_size)]
        parts = [sum(node[1:], node[0]) for node in nodes]
    return sum(parts[1:], parts[0]).to(like.dtype)


# --- on simulated devices ---------------------------------------------------------------------------------------------


class Together(RankStore):
    """Whoever waits for another rank lets it go on."""

    def __init__(self, network: SimulatedNetwork, device: SimulatedDevice, rank: int) -> None:
        super().__init__(dist.HashStore(), rank, network.world_size)
        self._network = network
        self._device = device

    def wait_for_rank(self, rank: int, reached: Callable[[], bool], is_there: Callable[[], bool], what: str) -> None:
        worker = self._device.worker
        if self._device.host_stream is not worker.stream:
            worker.drain()  # A thread would go on while this one waits, and the other rank may wait for it.
        self._network.wait(self._rank, reached, what)

    def naming(self, collective: Callable[[], object]) -> None:
        collective()


def ranks_of(case: Case, network: SimulatedNetwork, device: SimulatedDevice, rank: int) -> RankMesh:
    """Return the groups of ranks that `find_ranks` would make."""
    size, world = case.node_size, range(case.world_size)
    first = rank - rank % size
    members = {"node": range(first, first + size), "peers": world[rank % size :: size]}
    group = partial(SimulatedGroup, network=network, device=device, rank=rank)
    groups = {name: group(name, members=each) for name, each in members.items()} if case.nodes > 1 else {}
    return RankMesh(
        rank,
        case.world_size,
        rank % size,
        size,
        Together(network, device, rank),
        group("meeting", members=world),
        group("everyone", members=world),
        **groups,
    )


class _OfThread(threading.local):
    """State of the rank that a thread plays: its part of the default group, and threads that its runtime makes."""

    device: SimulatedDevice

    def __init__(self, network: SimulatedNetwork) -> None:
        self.rank = -1
        self._network = network
        self._num_calls = 0

    def all_gather_object(self, told: list[Any], value: Any) -> None:
        self._num_calls += 1
        told[:] = self._network.exchange(f"object {self._num_calls}", self.rank, range(len(told)), value)

    def new_worker(self, threads: int = 1) -> SimulatedWorker:
        return self.device.new_worker("waiter")


def train(
    case: Case,
    rates: Rates | None = None,
    seed: int | None = None,
    build: Callable[[], nn.Module] = network,
) -> list[Trained]:
    """Trains on one simulated device for each rank.

    Args:
        case: The run.
        rates: Rates of each device.
        seed: Seed of the order in which streams work; None: each stream works as late as possible.
        build: Makes the model.
    """
    network = SimulatedNetwork(case.world_size)
    with pytest.MonkeyPatch.context() as patch:
        own = _OfThread(network)
        patch.setattr(dist, "all_gather_object", own.all_gather_object)
        patch.setattr(step_sync, "HostWorker", own.new_worker)

        def run(rank: int) -> Trained:
            own.rank = rank
            own.device = SimulatedDevice(rates) if seed is None else SimulatedDevice(rates, _hurry(seed + rank))
            return _train_rank(case, network, rank, own.device, build)

        return network.run(run)


def _train_rank(
    case: Case, network: SimulatedNetwork, rank: int, device: SimulatedDevice, build: Callable[[], nn.Module]
) -> Trained:
    trained = Trained({}, device)
    with device:
        model = build()
        plan = replace(case.plan(model), sharding=case.sharding)
        ranks = ranks_of(case, network, device, rank)
        layout = describe_model(model)
        options = RunOptions(lambda _: None, ranks=ranks, reduce_dtype=case.reduce_dtype)
        runtime = apply_plan(model, plan, layout, device, options)
        for chunk in runtime._chunks:
            device.note_host(chunk.source)  # By itself, also in memory that ranks share.
        resident = {fqn for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters}
        alone = [parameter for name, parameter in model.named_parameters() if name in resident]
        for parameter in alone:
            device.set_place(parameter, "device")  # On a GPU it would be there.
        ddp = SimulatedGroup("ddp", network, device, rank, range(case.world_size))
        optimizer = optimizer_of(model)
        for step in range(case.num_steps):

            def closure(micro: int, step: int = step) -> None:
                loss = runtime.run_step(case.loss, (model, rank, step, micro), {}, True)
                trained.values[f"loss {rank} {step} {micro}"] = loss.detach().clone()
                if micro == 0:
                    optimizer.zero_grad()
                with runtime.backward(averages=micro == case.accumulate - 1):
                    loss.backward()

            def last(step: int = step) -> None:
                closure(case.accumulate - 1, step)
                _average_resident(alone, ddp)
                if case.clips:
                    runtime.async_step.clip_norm(model.parameters(), MAX_NORM)
                runtime.settle()

            for micro in range(case.accumulate - 1):
                closure(micro)
            runtime.async_step.arm(optimizer, case.overlap, None, case.clips)
            with fused_host_step(optimizer, last, "cpu", runtime.async_step.launch) as final:
                optimizer.step(final)
            runtime.refresh()
            trained.ends.append(device.elapsed)
        runtime.async_step.finish_all()
        trained.values |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        runtime.remove()
        trained.values |= {name: value.detach().clone() for name, value in model.state_dict().items()}
    return trained


def _average_resident(parameters: Sequence[nn.Parameter], group: SimulatedGroup) -> None:
    """Average the gradients of resident parameters, as DDP does."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.mul_(1.0 / group.size())
        dist.all_reduce(parameter.grad, group=group)


def _hurry(seed: int) -> Callable[[int], int | None]:
    chance = random.Random(seed)
    often = chance.random()
    return lambda count: chance.randrange(count) if chance.random() < often else None


def assert_exact(case: Case, found: list[Trained]) -> None:
    """Every rank has come to what plain training comes to, bit for bit."""
    expected = train_plainly(case)
    owned: set[str] = set()
    for trained in found:
        for name, value in trained.values.items():
            assert torch.equal(expected[name], value), name
        owned |= trained.values.keys()
    assert owned == expected.keys()
