"""The predicted memory and time of a plan, to compare with a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, Self, get_args, get_origin, get_type_hints

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
        bound: Resource that limits the step: `"compute"`, `"link"`, `"host"`, `"network"`, or with several devices of a
            host `"host memory"`.
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
        """Parse the result of `dataclasses.asdict`.

        Raises:
            ValueError: The content is no prediction.
        """
        prediction: Prediction = read(cls, "prediction", content)
        if not prediction.phases:
            raise ValueError(f"The plan's prediction.phases is []: there is no phase. {_AGAIN}")
        return prediction


_AGAIN = "Make the plan again."


_NAMES = {
    bool: "true or false",
    int: "a whole number from 0 on",
    float: "a number from 0 on",
    str: "a string",
    tuple: "a list",
    Mapping: "an object",
}


def read(kind: Any, where: str, value: Any) -> Any:
    """Return a value of a plan's JSON text as the type of a field.

    Args:
        kind: The annotation of the field. A dataclass or NamedTuple must have exactly its fields.
        where: Name of the value in messages.
        value: What the JSON parser returned.

    Raises:
        ValueError: The value has another type, or a number is negative or not finite.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        return None if value is None else read(inner[0], where, value)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = _hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            fields = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"The plan's {where} has the fields {fields}, not {sorted(hints)}. {_AGAIN}")
        return kind(**{name: read(hint, f"{where}.{name}", value[name]) for name, hint in hints.items()})
    if origin is tuple and type(value) is list:
        return tuple([read(inner[0], f"{where}[{index}]", item) for index, item in enumerate(value)])
    if origin is Mapping and type(value) is dict:
        return {name: read(inner[1], f"{where}[{name!r}]", item) for name, item in value.items()}
    is_choice = origin is None and issubclass(kind, StrEnum)
    if is_choice and value in list(kind):
        return kind(value)
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is kind and (kind not in (int, float) or 0 <= value < math.inf):
        return value
    expected = f"one of {', '.join(kind)}" if is_choice else _NAMES[origin or kind]
    raise ValueError(f"The plan's {where} is {value!r}, not {expected}. {_AGAIN}")


_hints = cache(get_type_hints)
