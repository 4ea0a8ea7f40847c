"""Stores measurements of a configuration, so that the next run begins with them.

The file is in the format of `profiler/cache_files.py`, beside those of the hardware. A configuration is the hardware,
the model, the training loop, the batch size, the number of ranks, and the versions of PyTorch and of this package.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.config import __version__, format_bytes
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.profiler.cache_files import file_of, read_content, write_content
from lightning_protrain.profiler.records import HardwareProfile, ModelProfile

FORMAT = 2
# A plan for thousands of weights has a few hundred thousand characters.
MOST_CHARACTERS = 1 << 24


@dataclass(frozen=True)
class RehearsalCache:
    """Measurements of one configuration from earlier runs.

    Attributes:
        path: File of the measurements.
        key: The configuration.
        hardware: Rates that a rehearsal has corrected; None: no rehearsal has run.
        alpha: Measured fragmentation factor; None: use the default for the dtypes.
        most_device_bytes: Maximum device memory of a plan; None: no run has failed.
        plan: Plan that was rehearsed and kept; None: no such plan.
    """

    path: Path
    key: Mapping[str, Any]
    hardware: HardwareProfile | None = None
    alpha: float | None = None
    most_device_bytes: int | None = None
    plan: Plan | None = None

    @classmethod
    def read(cls, folder: Path, machine: Mapping[str, Any], request: PlanRequest) -> Self:
        """Return the measurements of a configuration; warn if the file cannot be read.

        Args:
            folder: Folder of the files.
            machine: Properties of device and host, as JSON values.
            request: Request with the profile of a step.
        """
        key = _key(machine, request)
        return cls(file_of(folder, "rehearsal", key), key).present()

    def present(self) -> Self:
        """Return the measurements that the file has now; empty without a readable file."""
        try:
            content = read_content(self.path, dict(self.key), "rehearsal", MOST_CHARACTERS)
            hardware, plan = content["hardware"], content["plan"]
            return replace(
                self,
                hardware=None if hardware is None else HardwareProfile.from_json(json.dumps(hardware)),
                alpha=content["alpha"],
                most_device_bytes=content["most_device_bytes"],
                plan=None if plan is None else Plan.from_json(json.dumps(plan)),
            )
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warnings.warn(
                f"{self.path} is ignored. Delete it. Reading it raised {type(error).__name__}: {error}", stacklevel=2
            )
        return replace(self, hardware=None, alpha=None, most_device_bytes=None, plan=None)

    def keep(self, **changes: Any) -> None:
        """Write these attributes to the file, and leave the others in it unchanged."""
        changed = replace(self.present(), **changes)
        hardware, plan = changed.hardware, changed.plan
        content = {
            "hardware": None if hardware is None else json.loads(hardware.to_json()),
            "alpha": changed.alpha,
            "most_device_bytes": changed.most_device_bytes,
            "plan": None if plan is None else json.loads(plan.to_json()),
        }
        try:
            write_content(self.path, dict(self.key), "rehearsal", content)
        except OSError as error:
            warnings.warn(
                f"The next run will not know what this one has measured, as {self.path} cannot be written: {error}",
                stacklevel=2,
            )

    def if_feasible(self, request: PlanRequest) -> Self:
        """Return the measurements, without the maximum device memory if no plan fits it.

        A run fails with a batch that is larger than others, too, and those may train with any plan.
        """
        if self.most_device_bytes is None:
            return self
        limited = replace(request, node=replace(request.node, most_device_bytes=self.most_device_bytes))
        return self if limited.can_fit() else replace(self, most_device_bytes=None)

    def applied_to(self, request: PlanRequest) -> PlanRequest:
        """Return the request with the stored measurements; every rank calls it."""
        node, workload, hardware = request.node, request.workload, self.hardware
        if self.most_device_bytes is not None:
            budget = request.budget()
            node = replace(node, most_device_bytes=self.most_device_bytes)
            if budget is not None and budget > self.most_device_bytes:
                rank_zero_info(
                    f"device_memory is {format_bytes(self.most_device_bytes)} in place of {format_bytes(budget)}: an "
                    f"earlier run of this configuration ran out of memory. Delete {self.path} to forget it."
                )
        if hardware is not None:
            workload = replace(workload, measured_alpha=self.alpha)
            measure = node.measure

            def known(profile: ModelProfile) -> HardwareProfile:
                now = measure(profile)
                if now.flops.keys() != hardware.flops.keys():
                    return now
                return replace(hardware, device_bytes=now.device_bytes, host_bytes=now.host_bytes)

            node = replace(node, measure=known, is_rehearsed=True)
        return replace(request, node=node, workload=workload)


def _key(machine: Mapping[str, Any], request: PlanRequest) -> dict[str, Any]:
    """Return the configuration of a request, as JSON values."""
    workload, ranks = request.workload, request.ranks
    assert workload.profile is not None
    assert workload.training is not None
    return {
        "format": FORMAT,
        "machine": dict(machine),
        "model": hashlib.sha256(repr(workload.layout).encode()).hexdigest(),
        "knobs": [*asdict(request.options.knobs).values(), request.options.min_num_params],
        "batch": [workload.profile.samples, workload.profile.tokens],
        "training": asdict(workload.training),
        "streamed": [workload.low_dtype, len(workload.streamed)],
        "state_bytes": workload.state_bytes,
        "optimizers": [*workload.optimizers, workload.foreach],
        "ranks": [ranks.num_nodes, ranks.ranks_per_node],
        "version": __version__,
    }
