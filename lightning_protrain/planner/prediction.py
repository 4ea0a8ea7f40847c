"""The predicted memory and time of a plan, to compare with a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from lightning_protrain.planner.plots import plot_phases

# A warning is given if the measured peak exceeds the predicted peak by more than this fraction.
TOLERANCE = 0.05
# Key of `PhasePrediction.device`: buckets in which ranks sum the gradients of offloaded chunks.
GRADIENT_BUCKETS = "gradient_buckets"
# Key of `PhasePrediction.host`: the copy of a checkpoint that is written during training.
CHECKPOINT_COPY = "checkpoint_copy"
# Key of `PhasePrediction.host` if ranks share the weights: additional memory of the node's other ranks.
OTHER_RANKS = "other_ranks"


@dataclass(frozen=True)
class PhasePrediction:
    """The memory of one phase of a run at its peak.

    Attributes:
        name: `"loading"`, `"forward"`, `"backward"`, `"step"`, `"evaluation"`.
        unit: The unit that runs at the peak; empty if no unit runs.
        device: Bytes on the device by term.
        host: Bytes on the host by term.
    """

    name: str
    unit: str
    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Sum of all terms on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Sum of all terms on the host."""
        return sum(self.host.values())


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and time of a plan.

    Attributes:
        hardware: Name of the device.
        budget: Bytes that the device may hold.
        phases: Memory of each phase.
        step_seconds: Seconds of one optimizer step, with all its micro-batches.
        busy: Seconds of the step in which each resource works: `"compute"`, `"upload"`, `"download"`, `"host"`, and
            with several ranks `"network"`, which sums gradients.
        bound: Resource that limits the step: `"compute"`, `"link"`, `"host"` or `"network"`.
        samples: Samples of one micro-batch; 0 means unknown.
        tokens: Tokens of one micro-batch; 0 means unknown.
        accumulate: Number of micro-batches in a step.
        advice: Sentences for the user.
        alone_seconds: Seconds of the step if only one of several ranks ran; None if there is one rank.
        alpha: Fragmentation factor of the device's allocator; None if it has none, or the factor is unknown.
    """

    hardware: str
    budget: int
    phases: tuple[PhasePrediction, ...]
    step_seconds: float
    busy: Mapping[str, float]
    bound: str
    samples: int = 0
    tokens: int = 0
    accumulate: int = 1
    advice: tuple[str, ...] = ()
    alone_seconds: float | None = None
    alpha: float | None = None

    @property
    def device_bytes(self) -> int:
        """Peak device memory over all phases, bytes."""
        return max(phase.device_bytes for phase in self.phases)

    @property
    def host_bytes(self) -> int:
        """Peak host memory over all phases, bytes."""
        return max(phase.host_bytes for phase in self.phases)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of one device; None if the number of tokens is unknown."""
        return self.accumulate * self.tokens / self.step_seconds if self.tokens else None

    def among_ranks(self, buckets: int) -> Self:
        """Return the prediction with `buckets` bytes of all-reduce buffers on the device."""

        def among(phase: PhasePrediction) -> PhasePrediction:
            own = {term: nbytes for term, nbytes in phase.device.items() if term != GRADIENT_BUCKETS}
            sums = {GRADIENT_BUCKETS: buckets} if buckets and phase.name == "backward" else {}
            return replace(phase, device={**own, **sums})

        return replace(self, phases=tuple(map(among, self.phases)))

    def with_advice(self, *sentences: str) -> Self:
        """Return the prediction with more sentences for the user."""
        return replace(self, advice=(*self.advice, *sentences))

    def plot(self, ax: Any | None = None) -> tuple[Any, Any]:
        """Draw the memory of each phase beside the budget with matplotlib, and return the figure and its axes.

        Args:
            ax: Axes to draw on; None: make a figure.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (extra `plots`).
        """
        rate = self.tokens_per_second
        tokens = "" if rate is None else f", {rate:,.0f} tokens per second"
        title = f"{self.hardware}: a step takes {self.step_seconds:.3g} s{tokens}, bound by {self.bound}"
        return plot_phases({phase.name: phase.device for phase in self.phases}, self.budget, title, ax)

    @classmethod
    def from_dict(cls, content: object) -> Prediction:
        """Parse the result of `dataclasses.asdict`; files of earlier versions lack `alone_seconds` and `alpha`.

        Raises:
            ValueError: The content is no prediction.
        """
        content = {"alone_seconds": None, "alpha": None, **content} if isinstance(content, dict) else content
        entry = _object("prediction", content, {field.name for field in fields(cls)})
        alone, alpha = entry["alone_seconds"], entry["alpha"]
        phases = _list("phases", entry["phases"])
        if not phases:
            raise ValueError(f"The plan's prediction.phases is {phases!r}: there is no phase. {_AGAIN}")
        return cls(
            hardware=_text("hardware", entry["hardware"]),
            budget=_count("budget", entry["budget"]),
            phases=tuple(_phase(index, phase) for index, phase in enumerate(phases)),
            step_seconds=_number("step_seconds", entry["step_seconds"]),
            busy={name: _number(f"busy[{name!r}]", value) for name, value in _mapping("busy", entry["busy"]).items()},
            bound=_text("bound", entry["bound"]),
            samples=_count("samples", entry["samples"]),
            tokens=_count("tokens", entry["tokens"]),
            accumulate=_count("accumulate", entry["accumulate"]),
            advice=tuple(_text("advice", sentence) for sentence in _list("advice", entry["advice"])),
            alone_seconds=None if alone is None else _number("alone_seconds", alone),
            alpha=None if alpha is None else _number("alpha", alpha),
        )


_AGAIN = "Make the plan again."


def _phase(index: int, content: object) -> PhasePrediction:
    where = f"phases[{index}]"
    entry = _object(f"prediction.{where}", content, {field.name for field in fields(PhasePrediction)})
    sides = {
        side: {
            name: _count(f"{where}.{side}[{name!r}]", value)
            for name, value in _mapping(f"{where}.{side}", entry[side]).items()
        }
        for side in ("device", "host")
    }
    return PhasePrediction(_text(f"{where}.name", entry["name"]), _text(f"{where}.unit", entry["unit"]), **sides)


def _object(where: str, content: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(content, dict) or set(content) != names:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"The plan's {where} has the fields {found}, not {sorted(names)}. {_AGAIN}")
    return content


def _mapping(where: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"The plan's prediction.{where} is {content!r}, not an object. {_AGAIN}")
    return content


def _list(where: str, content: object) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"The plan's prediction.{where} is {content!r}, not a list. {_AGAIN}")
    return content


def _text(where: str, value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"The plan's prediction.{where} is {value!r}, not a string. {_AGAIN}")
    return value


def _count(where: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"The plan's prediction.{where} is {value!r}, not a number from 0 on. {_AGAIN}")
    return value


def _number(where: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        raise ValueError(f"The plan's prediction.{where} is {value!r}, not a number from 0 on. {_AGAIN}")
    return float(value)  # type: ignore[arg-type]
