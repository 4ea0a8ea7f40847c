"""The frozen record of what a machine can do: the other input of the planner. Imports nothing of ours and no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_protrain.profiler.records import OperationCost

FORMAT = 1


@dataclass(frozen=True)
class HardwareProfile:
    """One device and the host beside it.

    Attributes:
        name: Of the device, as its maker calls it.
        upload: Bytes per second from page-locked host memory to the device, alone.
        download: The same from the device.
        upload_beside: Bytes per second of uploads while downloads run.
        download_beside: The other way round.
        upload_pageable: Bytes per second from host memory that is not page-locked.
        download_pageable: The same from the device.
        flops: Floating-point operations per second of matrix products, by name of the dtype without `torch.`.
        memory: Bytes per second that the device reads and writes in its own memory.
        device_step: Elements per second of an optimizer step on the device.
        host_step: The same on the host, on all cores that one rank has.
        host_memory: Bytes per second that the host reads and writes in simple arithmetic.
        device_bytes: Memory of the device that is free for us.
        host_bytes: Memory of the host that is free for us.
        asynchronous: Whether copies run beside computation, so that what is copied is held meanwhile.

    Raises:
        ValueError: A figure is no finite number above zero: what is not known is no figure.
    """

    name: str
    upload: float
    download: float
    upload_beside: float
    download_beside: float
    upload_pageable: float
    download_pageable: float
    flops: Mapping[str, float]
    memory: float
    device_step: float
    host_step: float
    host_memory: float
    device_bytes: int
    host_bytes: int
    asynchronous: bool = True

    def __post_init__(self) -> None:
        """Checks every figure: a zero or NaN would rule out every plan, or let any pass."""
        _check_others(self.name, self.flops, self.asynchronous)
        for name in _RATES:
            _check_figure(name, getattr(self, name), int | float, "a finite number")
        for name in _BYTES:
            _check_figure(name, getattr(self, name), int, "a whole number of bytes")
        for dtype, rate in self.flops.items():
            _check_figure(f"flops[{dtype!r}]", rate, int | float, "a finite number")

    def seconds(self, operations: tuple[OperationCost, ...]) -> float:
        """How long the device takes for them: each as long as its arithmetic or its bytes, whichever is longer.

        Raises:
            ValueError: Nothing is known about a dtype.
        """
        total, rates, memory = 0.0, self.flops, self.memory
        for cost in operations:
            seconds = cost.nbytes / memory
            if cost.flops:
                if cost.dtype not in rates:
                    raise ValueError(
                        f"How fast {self.name!r} multiplies {cost.dtype} is not known, only {', '.join(self.flops)}. "
                        "Measure the hardware again, or use another precision."
                    )
                arithmetic = cost.flops / rates[cost.dtype]
                if arithmetic > seconds:
                    seconds = arithmetic
            total += cost.count * seconds
        return total

    def to_json(self) -> str:
        """The profile as JSON text that `from_json` reads back to an equal one."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({"format": FORMAT, **content, "flops": dict(self.flops)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Reads what `to_json` has written.

        Raises:
            ValueError: No JSON object, another format, fields too many or too few, or a figure that is none.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"A hardware profile must be JSON: {error}. {_AGAIN}") from error
        if not isinstance(content, dict):
            raise ValueError(f"A hardware profile must be a JSON object, not {type(content).__name__}. {_AGAIN}")
        written = content.pop("format", None)
        if type(written) is not int or written != FORMAT:
            raise ValueError(f"A hardware profile of format {written!r}; this version reads {FORMAT}. {_AGAIN}")
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - content.keys()), sorted(content.keys() - names)
        if missing or unknown:
            raise ValueError(f"A hardware profile without {missing} and with the unknown {unknown}. {_AGAIN}")
        return cls(**content)


_AGAIN = "Measure the hardware again."
_BYTES = ("device_bytes", "host_bytes")
_RATES = tuple(
    field.name for field in fields(HardwareProfile) if field.name not in (*_BYTES, "name", "flops", "asynchronous")
)


def _check_figure(name: str, value: Any, kind: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"HardwareProfile.{name}={value!r}: give {what} above zero. {_AGAIN}")


def _check_others(name: Any, flops: Any, asynchronous: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"HardwareProfile.name={name!r}: give the name of the device.")
    if not isinstance(flops, Mapping) or not flops:
        raise ValueError(f"HardwareProfile.flops={flops!r}: give the rate of products in one dtype or more. {_AGAIN}")
    if not isinstance(asynchronous, bool):
        raise ValueError(f"HardwareProfile.asynchronous={asynchronous!r}: give True or False.")
