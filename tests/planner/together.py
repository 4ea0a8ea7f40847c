"""Steps of several ranks on the virtual clock, to hold predictions against."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_protrain.planner.plan import Sharding
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan
from lightning_protrain.runtime.comm import step_sync
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.step import fused_host_step
from tests.planner import virtual
from tests.simulation import ranked
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.network import SimulatedNetwork


def rates_of(case: virtual.Case, ratio: float) -> Rates:
    """A machine of the case's proportions.

    Args:
        case: Machine, plan and training loop.
        ratio: Time of all gradients on the network over the time that a backward computes.
    """
    layout, profile = virtual.profile_of(case.num_blocks, case.num_tokens, case.tied)
    nbytes = sum(info.nbytes for info in layout.parameters)
    _, backward = virtual.computing(profile)
    return replace(virtual.rates_of(case, layout, profile), network=nbytes / (ratio * backward), latency=0.0)


def measure(case: virtual.Case, ratio: float, sharding: Sharding, num_steps: int = 4) -> float:
    """Virtual seconds of one step of two ranks when the run has settled."""
    network = SimulatedNetwork(2)
    rates = rates_of(case, ratio)
    among = ranked.Case(sharding=sharding, node_size=2)
    with pytest.MonkeyPatch.context() as patch:
        own = ranked._OfThread(network)
        patch.setattr(dist, "all_gather_object", own.all_gather_object)
        patch.setattr(step_sync, "HostWorker", own.new_worker)

        def run(rank: int) -> list[float]:
            own.rank = rank
            own.device = SimulatedDevice(rates)
            return _train(case, among, network, rank, own.device, num_steps)

        found = network.run(run)
    return max(ends[-1] - ends[-2] for ends in found)


def _train(
    case: virtual.Case, among: ranked.Case, network: SimulatedNetwork, rank: int, device: SimulatedDevice, steps: int
) -> list[float]:
    layout, profile = virtual.profile_of(case.num_blocks, case.num_tokens, case.tied)
    gpt = virtual.model_of(case)
    plan = replace(virtual.plan_of(case, layout, profile), sharding=among.sharding)
    ranks = ranked.ranks_of(among, network, device, rank)
    ends: list[float] = []
    with device:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            runtime = apply_plan(gpt, plan, layout, device, RunOptions(lambda _: None, ranks=ranks))
        for chunk in runtime._chunks:
            device.note_host(chunk.source)  # By itself, also in memory that ranks share.
        resident = {fqn for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters}
        groups = [[p for name, p in gpt.named_parameters() if (name in resident) is kind] for kind in (True, False)]
        for parameter in groups[0]:
            device.set_place(parameter, "device")
        optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], fused=True)
        for _ in range(steps):
            _step(case, gpt, runtime, optimizer)
            ends.append(device.compute_stream().time)
        runtime.async_step.finish_all()
        runtime.remove()
    return ends


def _step(case: virtual.Case, gpt: nn.Module, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    training = case.training

    def forward_and_backward(index: int) -> None:
        last = index == training.accumulate - 1
        loss: Any = runtime.run_step(gpt, (virtual.tokens(case.num_tokens),), {}, True)
        if index == 0:
            optimizer.zero_grad()
        with runtime.backward(averages=last):
            loss.backward()

    def closure() -> None:
        forward_and_backward(training.accumulate - 1)
        runtime.settle()

    for index in range(training.accumulate - 1):
        forward_and_backward(index)
    runtime.async_step.arm(optimizer, Overlap(training.overlap), None, training.clips)
    with fused_host_step(optimizer, closure, "cpu", runtime.async_step.launch) as final:
        optimizer.step(final)
    runtime.refresh()
