"""Frozen records of a model and of a machine: the input of the planner. Imports nothing of ours and no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from mmap import PAGESIZE
from typing import Any


@dataclass(frozen=True)
class ParameterInfo:
    """One `nn.Parameter`, however many names it has.

    Attributes:
        fqn: The first fully qualified name under which `named_parameters()` lists it.
        sites: Every fully qualified name, tied ones included; `sites[0] == fqn`.
        shape: Its shape, that of the stored tensor where a subclass packs its elements.
        dtype: Name of its dtype without the `torch.` prefix, e.g. `"float32"`.
        nbytes: Bytes of its elements, and of what a quantised weight needs beside them, see [Note: Companions].
        trainable: `requires_grad` when the model was described.
        streamed_dtype: The dtype of two bytes in which it goes to the device when it is streamed; None: its own. A
            float32 weight that autocast would cast there in its only use is cast on the host.
    """

    fqn: str
    sites: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    trainable: bool
    streamed_dtype: str | None = None

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def streamed_nbytes(self) -> int:
        """Bytes of its elements on the device when it is streamed."""
        return self.nbytes if self.streamed_dtype is None else 2 * self.numel


@dataclass(frozen=True)
class UnitInfo:
    """A module whose parameters are fetched and released together.

    [Note: Unit]
    A *unit* is the smallest thing whose parameters come and go as one. Every block is a unit with all parameters of
    its subtree; every other module that directly owns parameters outside all blocks (an embedding, a norm, a head) is
    a unit of its own. A module that is never called (`ParameterList`, `ModuleDict`) hands its parameters to the nearest
    module around it that is, lastly to the root; a library's composite that reads its children's weights without
    calling them (`MultiheadAttention`, a DoRA layer) is one unit with its subtree. The empty name is the root: its
    direct parameters are needed whenever any step of the model runs. A model without blocks is one block, the root,
    with all parameters.

    Attributes:
        name: Fully qualified module name, the first if it has several; `""` is the root.
        is_block: Whether it carries an activation policy.
        parameters: First names of all parameters the unit needs, in `named_parameters()` order; a tied parameter is
            listed by every unit that needs it.
        encloses: Names of units inside this one (a container with parameters of its own around blocks).
    """

    name: str
    is_block: bool
    parameters: tuple[str, ...]
    encloses: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelLayout:
    """Everything the planner needs to know about a model's states.

    Attributes:
        parameters: All parameters in `named_parameters()` order, tied ones once.
        units: All units in the order in which `named_modules()` meets them, which stands for execution order until a
            step has been recorded.
        buffer_bytes: Bytes of all registered buffers; they stay on the device.
        lends_copies: Whether gradients of offloaded parameters that are streamed in another dtype lie in the host
            memory of these copies.
    """

    parameters: tuple[ParameterInfo, ...]
    units: tuple[UnitInfo, ...]
    buffer_bytes: int
    lends_copies: bool = False

    @cached_property
    def blocks(self) -> tuple[UnitInfo, ...]:
        """The units that carry an activation policy, in order."""
        return tuple(unit for unit in self.units if unit.is_block)

    @cached_property
    def low(self) -> frozenset[str]:
        """First names of the parameters that are streamed in another dtype than their own."""
        return frozenset(info.fqn for info in self.parameters if info.streamed_dtype is not None)

    @cached_property
    def by_name(self) -> dict[str, ParameterInfo]:
        """All parameters by their first names."""
        return {info.fqn: info for info in self.parameters}

    @cached_property
    def known(self) -> dict[tuple[object, ...], Any]:
        """What the planner has worked out of groups of these parameters, by the names in each group."""
        return {}

    def parameter(self, fqn: str) -> ParameterInfo:
        """The parameter whose first name is `fqn`.

        Raises:
            KeyError: No parameter has that first name.
        """
        return self.by_name[fqn]

    def streaming(self, names: Collection[str], dtype: str) -> ModelLayout:
        """The same model with the parameters `names` streamed in `dtype`."""
        infos = (replace(info, streamed_dtype=dtype if info.fqn in names else None) for info in self.parameters)
        return replace(self, parameters=tuple(infos))


@dataclass(frozen=True)
class ParameterUse:
    """How one step's forward and loss use a parameter; what happens in backward is not counted.

    Attributes:
        fqn: Its first fully qualified name.
        casts: For every conversion of the whole parameter to another dtype, as autocast issues it, that dtype's name.
        direct_uses: Operations that read it, or a view of it, in any other way.
        saves: How often autograd saved the parameter itself, or a view of it, for backward.
        dtype_reads: How often code asked for its dtype, upon which it may have decided something.
    """

    fqn: str
    casts: tuple[str, ...] = ()
    direct_uses: int = 0
    saves: int = 0
    dtype_reads: int = 0

    @property
    def uses(self) -> int:
        """Operations that read it."""
        return len(self.casts) + self.direct_uses


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit's forward. All bytes count a storage once, and in full, and none of parameters or buffers.

    Attributes:
        name: The unit.
        order: Its place among all calls of the step, by entry; calls may lie inside others.
        saved_bytes: What autograd saves for backward between entry and exit, except what the unit was given.
        saved_casts: The part of `saved_bytes` that is a copy of a parameter in another dtype: first name and bytes.
        input_bytes: The tensors it is given, saved or not.
        output_bytes: The tensors it returns.
        flops: Floating-point operations of matrix products, attention, convolutions and recurrent layers.
        peak_bytes: The most that was alive at one time, less what was alive at entry.
        swap_bytes: What swapping the call takes on the host: all that autograd saves, what the unit was given too, each
            version of a storage once and in whole pages; less than a page stays on the device.
    """

    name: str
    order: int
    saved_bytes: int
    saved_casts: tuple[tuple[str, int], ...]
    input_bytes: int
    output_bytes: int
    flops: int
    peak_bytes: int
    swap_bytes: int

    def saved_bytes_without(self, streamed: frozenset[str]) -> int:
        """`saved_bytes` if the parameters `streamed` are at hand in the other dtype, so that no cast copies them."""
        return self.saved_bytes - sum(nbytes for fqn, nbytes in self.saved_casts if fqn in streamed)

    def swap_bytes_without(self, streamed: frozenset[str]) -> int:
        """The same for `swap_bytes`."""
        if not streamed:
            return self.swap_bytes
        return self.swap_bytes - sum([swapped_bytes(nbytes) for fqn, nbytes in self.saved_casts if fqn in streamed])


@dataclass(frozen=True)
class OperationCost:
    """Operations of one size.

    Attributes:
        flops: Floating-point operations of one of them; 0 for those that only move bytes.
        nbytes: Bytes that one of them reads and writes.
        dtype: Of what it multiplies, without the `torch.` prefix; of its first tensor if `flops` is 0.
        count: How many there are.
    """

    flops: int
    nbytes: int
    dtype: str
    count: int = 1


@dataclass(frozen=True)
class Pass:
    """One way through a segment, forward or backward; see [Note: Segment].

    Attributes:
        live_bytes: Activations when it begins: all tensors that operations have made, but for gradients of parameters.
        peak_bytes: The most there are within it; a gradient of a parameter counts until it is accumulated.
        operations: What is computed.
        peak_without_casts: As `peak_bytes`, but for the segment's own copies of parameters in another dtype; 0: not
            known.
        unsaved_peak: As `peak_bytes`, if autograd saved nothing in it but what it was given; 0: not known.
        unsaved_peak_without_casts: Both.
        selective_peak: As `peak_bytes`, if the products are kept in place of what autograd saves; 0: not known.
        selective_peak_without_casts: That and `peak_without_casts`.
        again_peak: As `peak_bytes`, if the products are there from the begin; 0: not known.
        again_peak_without_casts: That and `peak_without_casts`.
        recomputed_operations: The part of `operations` that a recomputation comes to, of a forward: PyTorch ends it
            where autograd saves last; None: all.
        again_operations: The part of those that makes no products.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    operations: tuple[OperationCost, ...] = ()
    peak_without_casts: int = 0
    unsaved_peak: int = 0
    unsaved_peak_without_casts: int = 0
    selective_peak: int = 0
    selective_peak_without_casts: int = 0
    again_peak: int = 0
    again_peak_without_casts: int = 0
    recomputed_operations: tuple[OperationCost, ...] | None = None
    again_operations: tuple[OperationCost, ...] = ()

    @property
    def recomputed(self) -> tuple[OperationCost, ...]:
        """What is computed when the forward runs again."""
        return self.operations if self.recomputed_operations is None else self.recomputed_operations


@dataclass(frozen=True)
class Segment:
    """A stretch of the step that no unit divides.

    [Note: Segment]
    A step is cut where units begin and end: a *segment* is one call of a unit that encloses no other (a block, an
    embedding, a norm, a head), or what runs between two of them (masks, the loss), which belongs to the root. Backward
    goes through the same segments, from the last to the first. All figures are those of a step that keeps every
    activation; a block that does not is accounted for by what that frees from the end of its forward to its backward.

    Attributes:
        unit: Name of the unit; `""` for what runs between two of them.
        forward: Forward.
        backward: Backward; empty where there is none.
        peak_with_gradients: `backward.peak_bytes`, if the gradients that are accumulated within it stay.
        checkpoint_saving: Bytes that checkpointing frees: all that autograd saves in it but what the unit was given,
            less what it was given and would not be kept otherwise.
        swap_saving: Bytes that swapping frees: all that autograd saves and that takes at least a page, what it was
            given too unless an earlier segment holds it.
        input_bytes: What the unit is given, without what an earlier segment was given.
        casts: The part of what is saved that is a copy of a parameter in another dtype: first name and bytes.
        gradients: First names of the parameters whose gradient is whole at the end of its backward.
        held_bytes: All that checkpointing it keeps of what it was given and that would not be kept otherwise. In
            `checkpoint_saving` such a tensor counts for the first segment that is given it alone.
        product_bytes: Bytes of its products, see [Note: Products]; None: they are written to, or a part of the unit is
            compiled, and they cannot be kept.
        idle_product_bytes: Those that a recomputation does not come to: autograd saves nothing after them.
        asked_live: Activations when its backward first asks for something saved; 0: not known.
        between: Whether it lies between two calls; where the root is a block, its calls have no name either.
    """

    unit: str
    forward: Pass
    backward: Pass = Pass()
    peak_with_gradients: int = 0
    checkpoint_saving: int = 0
    swap_saving: int = 0
    input_bytes: int = 0
    casts: tuple[tuple[str, int], ...] = ()
    gradients: tuple[str, ...] = ()
    held_bytes: int = 0
    product_bytes: int | None = None
    idle_product_bytes: int = 0
    asked_live: int = 0
    between: bool = False


@dataclass(frozen=True)
class ModelProfile:
    """What one step, forward and loss, does.

    Attributes:
        calls: Every call of a unit, by entry.
        parameters: Every parameter of the layout, in its order.
        outside_saved_bytes: What autograd saves while no block runs (embedding, head, loss) and no block saves too.
        outside_saved_casts: The part of `outside_saved_bytes` that is a copy of a parameter in another dtype.
        saved_bytes: All that autograd saves, every storage once in the whole step.
        flops: As in `UnitCall`, of the whole step.
        peak_bytes: The most that was alive at one time.
        segments: Forward and backward in the order of forward; empty if the step ran no backward.
        samples: Of the batch: the first dimension of its tensors; 0: not known.
        tokens: Of the batch: elements of its `input_ids`; 0: not known.
        attention: How often forward ran each kernel of `scaled_dot_product_attention`: `"flash"`, `"efficient"` and
            `"cudnn"` of a CUDA device, `"flash_cpu"`, or `"math"`, which any device has.
        measured: Why the step ran with real tensors on the real device; empty: it was traced for its shapes.
    """

    calls: tuple[UnitCall, ...]
    parameters: tuple[ParameterUse, ...]
    outside_saved_bytes: int
    outside_saved_casts: tuple[tuple[str, int], ...]
    saved_bytes: int
    flops: int
    peak_bytes: int
    segments: tuple[Segment, ...] = ()
    samples: int = 0
    tokens: int = 0
    attention: tuple[tuple[str, int], ...] = ()
    measured: str = ""

    def swap_bytes(self, streamed: frozenset[str] = frozenset()) -> dict[str, int]:
        """Host bytes that one call of each unit swaps, the largest of its calls.

        Args:
            streamed: Parameters that are at hand in the other dtype, as in `UnitCall.saved_bytes_without`.
        """
        most: dict[str, int] = {}
        for call in self.calls:
            most[call.name] = max(most.get(call.name, 0), call.swap_bytes_without(streamed))
        return most


def swapped_bytes(nbytes: int) -> int:
    """Host bytes that a storage of `nbytes` takes when it is swapped: whole pages, or 0 if it is less than one."""
    return -(-nbytes // PAGESIZE) * PAGESIZE if nbytes >= PAGESIZE else 0


def castable(profile: ModelProfile, dtype: str) -> frozenset[str]:
    """Parameters of which a step sees nothing but one copy in `dtype`: it makes no difference who makes the copy.

    Their only use is one cast to `dtype`, autograd saves none of them, and no code asks for their dtype.

    Args:
        profile: One step.
        dtype: Name of a dtype without the `torch.` prefix, e.g. `"bfloat16"`.
    """
    return frozenset(
        use.fqn
        for use in profile.parameters
        if use.casts == (dtype,) and not (use.direct_uses or use.saves or use.dtype_reads)
    )


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
