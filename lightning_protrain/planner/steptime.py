"""How long a step of a plan takes, and why (paper, equations 2 to 7)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lightning_protrain.planner.activity import Columns, Seconds
from lightning_protrain.planner.averages import averages_of
from lightning_protrain.planner.clock import passes, simulate
from lightning_protrain.planner.columns import columns_of
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.training import Training
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

__all__ = ["Columns", "StepTime", "Training", "columns_of", "simulate", "step_time"]

# What the host does, and what the links carry.
HOST = ("land", "add", "norm", "scale", "host_step")
LINKS = (
    "upload_forward",
    "late_forward",
    "upload_backward",
    "late_backward",
    "download",
    "stall",
    "drain",
    "landed",
    "carry",
    "ready",
    "ready_behind",
    "swap_out",
    "swap_in",
)


@dataclass(frozen=True)
class StepTime:
    """What one optimizer step takes, all its micro-batches together; seconds.

    `compute + link_exposed + host_exposed + network_exposed == seconds == forward + backward`, but for rounding.

    Attributes:
        seconds: From one step to the next.
        forward: Of them, from the beginning of forwards to their end.
        backward: The rest: backwards, and what of the optimizer step no forward runs beside.
        host_exposed: What a host that takes no time would save on one rank.
        link_exposed: What a link that takes no time would save then.
        compute: The device's computation, the optimizer step of resident chunks included.
        upload: How long the link towards the device is busy, hidden or not.
        download: The same towards the host.
        host: How long the host computes, hidden or not.
        network_exposed: What training on one rank would save; negative where averages spare the host more.
        network: How long gradients are summed over ranks, hidden or not.
    """

    seconds: float
    forward: float
    backward: float
    host_exposed: float
    link_exposed: float
    compute: float
    upload: float
    download: float
    host: float
    network_exposed: float = 0.0
    network: float = 0.0

    @property
    def bound(self) -> Literal["compute", "link", "host", "network"]:
        """Who is busy longest: what would have to be faster for a much faster step."""
        longest: Literal["compute", "link", "host", "network"] = "compute"
        link = max(self.upload, self.download)
        if max(link, self.host) > self.compute:
            longest = "link" if link >= self.host else "host"
        return longest if self.network <= max(self.compute, link, self.host) else "network"


def step_time(
    profile: ModelProfile,
    layout: ModelLayout,
    plan: Plan,
    hardware: HardwareProfile,
    training: Training,
    network: Network | None = None,
) -> StepTime:
    """Predicts what one optimizer step takes when the run has settled.

    Args:
        profile: One step with its backward.
        layout: The model.
        plan: A whole plan.
        hardware: The machine.
        training: How the plan is used.
        network: How gradients are summed over ranks; None: there is one.

    Raises:
        ValueError: The profile has no segments, or is one of another model than the layout or the plan; or the rate of
            the machine for a dtype is not known.
    """
    columns = columns_of(profile, layout, plan, hardware, training)
    averages = averages_of(profile, layout, plan, hardware, training.accumulate > 1, network)
    without_host = _without(columns, HOST)
    without_links = _without(without_host, LINKS)
    (seconds,), (forward,) = passes(columns, training, hardware.asynchronous, averages)
    alone = float(passes(columns, training, hardware.asynchronous)[0][0]) if averages is not None else float(seconds)
    unhindered, compute = (simulate(part, training, hardware.asynchronous)[0] for part in (without_host, without_links))
    again = training.accumulate
    landed = columns.land + (again - 1) * columns.add if again > 1 else columns.land
    return StepTime(
        seconds=float(seconds),
        forward=float(forward),
        backward=float(seconds - forward),
        network_exposed=float(seconds) - alone,
        host_exposed=alone - float(unhindered),
        link_exposed=float(unhindered - compute),
        compute=float(compute),
        upload=again * _total(columns.upload_forward, columns.upload_backward, columns.swap_in),
        download=again * _total(columns.download, columns.swap_out),
        host=_total(landed, columns.host_step) + training.clips * _total(columns.norm, columns.scale),
        network=0.0 if averages is None else float(averages.sent[0]),
    )


def _without(columns: Columns, names: tuple[str, ...]) -> Columns:
    nothing: dict[str, Any] = {name: np.zeros((1, 1)) for name in names}
    return replace(columns, **nothing)


def _total(*parts: Seconds) -> float:
    return float(sum(part.sum() for part in parts))
