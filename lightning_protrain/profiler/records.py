"""Frozen records of a model and of hardware, the input of the planner. Imports neither torch nor this package."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from mmap import PAGESIZE
from typing import Any, NamedTuple


@dataclass(frozen=True)
class ParameterInfo:
    """One `nn.Parameter`; a tied parameter has one record.

    Attributes:
        fqn: First fully qualified name in `named_parameters()`, called its first name below.
        sites: All fully qualified names; `sites[0] == fqn`.
        shape: Shape of the stored tensor.
        dtype: Name of the dtype without the `torch.` prefix, e.g. `"float32"`.
        nbytes: Size in bytes, with the companions of a quantised weight, see [Note: Companions] in
            quant_state.py.
        trainable: True if the parameter requires gradients.
        streamed_dtype: Two-byte dtype in which the parameter is streamed to the device, if the step only reads a cast
            of it; None means its own dtype.
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
        """Size on the device when the parameter is streamed, bytes."""
        return self.nbytes if self.streamed_dtype is None else 2 * self.numel


@dataclass(frozen=True)
class UnitInfo:
    """A module whose parameters are fetched and released together.

    [Note: Unit]
    A *unit* is the smallest module whose parameters are fetched and released together. Every block is a unit with all
    parameters of its subtree. Outside blocks, every module that directly owns parameters (an embedding, a norm, a head)
    is a unit, with two exceptions. Parameters of a module that is never called (`ParameterList`, `ModuleDict`) belong
    to the nearest enclosing module that is called. A library module that reads its children's weights without calling
    them (`MultiheadAttention`, a DoRA layer) is one unit with its subtree.

    The root module has the empty name. Its direct parameters stay fetched while any part of the model runs. If a model
    has no blocks, the root is the only block, with all parameters.

    Attributes:
        name: First fully qualified module name; `""` is the root.
        is_block: True if the unit has an activation policy.
        parameters: First names of all parameters that the unit needs, in `named_parameters()` order. A tied parameter
            is listed in several units.
        encloses: Names of units inside this unit, if it is not a block but contains blocks.
    """

    name: str
    is_block: bool
    parameters: tuple[str, ...]
    encloses: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelLayout:
    """The parameters and units of a model.

    Attributes:
        parameters: All parameters in `named_parameters()` order, tied ones once.
        units: All units in `named_modules()` order.
        buffer_bytes: Size of all buffers, which stay on the device, bytes.
        lends_copies: True if gradients of parameters with a `streamed_dtype` are stored in the host memory of the copy
            that is streamed.
        passes_gradients: True if a plan may give other gradients host memory from their download until their step.
    """

    parameters: tuple[ParameterInfo, ...]
    units: tuple[UnitInfo, ...]
    buffer_bytes: int
    lends_copies: bool = False
    passes_gradients: bool = False

    @cached_property
    def blocks(self) -> tuple[UnitInfo, ...]:
        """Units with an activation policy, in order."""
        return tuple(unit for unit in self.units if unit.is_block)

    @cached_property
    def low(self) -> frozenset[str]:
        """First names of the parameters with a `streamed_dtype`."""
        return frozenset(info.fqn for info in self.parameters if info.streamed_dtype is not None)

    @cached_property
    def by_name(self) -> dict[str, ParameterInfo]:
        """All parameters by their first names."""
        return {info.fqn: info for info in self.parameters}

    @cached_property
    def known(self) -> dict[tuple[object, ...], Any]:
        """Cache for results of the planner on groups of these parameters."""
        return {}

    def parameter(self, fqn: str) -> ParameterInfo:
        """Return the parameter with the first name `fqn`; raise KeyError if there is none."""
        return self.by_name[fqn]

    def streaming(self, names: Collection[str], dtype: str) -> ModelLayout:
        """Return a copy of the layout in which the parameters `names` are streamed in `dtype`."""
        infos = (replace(info, streamed_dtype=dtype if info.fqn in names else None) for info in self.parameters)
        return replace(self, parameters=tuple(infos))


@dataclass(frozen=True)
class ParameterUse:
    """The uses of a parameter in the forward and loss of one step.

    Attributes:
        fqn: First name of the parameter.
        casts: Target dtype of each cast of the whole parameter, such as by autocast.
        direct_uses: Number of other operations that read the parameter or a view of it.
        saves: Number of times that autograd saved the parameter or a view of it.
        dtype_reads: Number of times that code read the parameter's dtype.
    """

    fqn: str
    casts: tuple[str, ...] = ()
    direct_uses: int = 0
    saves: int = 0
    dtype_reads: int = 0

    @property
    def uses(self) -> int:
        """Number of operations that read the parameter."""
        return len(self.casts) + self.direct_uses


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit's forward. Bytes count each storage once and in full, without parameters and buffers.

    Attributes:
        name: Name of the unit.
        saved_bytes: Bytes that autograd saves during the call, without inputs of the unit.
        saved_casts: Casts of parameters in `saved_bytes`: first name of the parameter, and bytes of the cast.
        swap_bytes: Host memory for swapping the call's activations, bytes: all saved tensors, including inputs, in
            whole pages. Storages of less than a page do not count; other small ones do, although they stay.
    """

    name: str
    saved_bytes: int
    saved_casts: tuple[tuple[str, int], ...]
    swap_bytes: int

    def swap_bytes_without(self, streamed: frozenset[str]) -> int:
        """Return `swap_bytes` without casts of the parameters `streamed`, which are streamed in autocast's dtype."""
        if not streamed:
            return self.swap_bytes
        return self.swap_bytes - sum([swapped_bytes(nbytes) for fqn, nbytes in self.saved_casts if fqn in streamed])


@dataclass(frozen=True)
class OperationCost:
    """A group of operations of equal cost.

    Attributes:
        flops: FLOPs of one operation; 0 if it is limited by memory bandwidth.
        nbytes: Bytes that one operation reads and writes.
        dtype: Dtype of the multiplied tensors, or of the first tensor if `flops` is 0; without the `torch.` prefix.
        count: Number of operations.
        is_product: True for operations of a forward that make products, see [Note: Products] in profiler/op_kinds.py.
        is_idle: True for operations of a forward after its last saved tensor, where PyTorch ends a recomputation.
    """

    flops: int
    nbytes: int
    dtype: str
    count: int = 1
    is_product: bool = False
    is_idle: bool = False


class Storage(NamedTuple):
    """An activation that a forward makes, frees or saves; unsaved ones of equal times are one record.

    Times are numbers of operations of the forward, from 1. 0 means before the forward. One more than all operations
    means after it.

    Attributes:
        nbytes: Size, bytes.
        made: Operation that makes it.
        freed: First operation at which only autograd references it.
        gone: First operation at which nothing references it.
        is_product: True if it is a product, see [Note: Products] in profiler/op_kinds.py.
        is_saved: True if autograd saves it in this forward.
        is_input: True if it is saved and an input of the unit.
        is_cast: True if it is a saved copy of a parameter in another dtype, and no earlier segment saves it.
        is_alone: True if it is alive when backward begins, only this segment saves it, and no other unit takes it.
        uses: How long more than autograd references a saved activation: 0 while the unit runs; 1 until a time within
            the next call of a unit; 2 for longer.
    """

    nbytes: int
    made: int = 0
    freed: int = 0
    gone: int = 0
    is_product: bool = False
    is_saved: bool = False
    is_input: bool = False
    is_cast: bool = False
    is_alone: bool = False
    uses: int = 0


@dataclass(frozen=True)
class Forward:
    """The forward of one segment, in a step in which every block keeps its activations.

    Attributes:
        live_bytes: Bytes of live activations at its begin: tensors that operations have made.
        operations: Its operations.
        storages: Activations that it makes, frees or saves.
        last_saved: Number of operations before the last tensor is saved.
    """

    live_bytes: int = 0
    operations: tuple[OperationCost, ...] = ()
    storages: tuple[Storage, ...] = ()
    last_saved: int = 0


@dataclass(frozen=True)
class Backward:
    """The backward of one segment, in a step in which every block keeps its activations.

    A gradient of a parameter is a live activation until it has been accumulated.

    Attributes:
        live_bytes: Bytes of live activations at its begin.
        peak_bytes: Peak of live activations; 0: there is no backward.
        operations: Its operations.
        peak_with_gradients: Peak if gradients of parameters are not freed after their accumulation.
        cast_bytes: Difference of the peak without the casts that the segment's forward saves.
        asked_live: Live activations when a saved tensor is first unpacked, bytes; 0 means unknown.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    operations: tuple[OperationCost, ...] = ()
    peak_with_gradients: int = 0
    cast_bytes: int = 0
    asked_live: int = 0


@dataclass(frozen=True)
class Segment:
    """A part of the step: one call of a unit, or the code between two calls.

    A call is a segment if the unit encloses no other unit (a block, an embedding, a norm, a head). Code between two
    such calls (masks, the loss) belongs to the root. Backward runs the segments in reverse order. The figures do not
    depend on a plan: the planner replays them for each activation policy.

    Attributes:
        unit: Name of the unit; `""` for code between two calls.
        forward: Forward pass.
        backward: Backward pass; empty if the step runs no backward.
        input_bytes: Bytes of the unit's inputs that are not inputs of an earlier segment.
        casts: Saved casts of parameters: first name of the parameter, and bytes of the cast.
        gradients: First names of the parameters whose gradient is complete after the backward pass.
        lost_inputs: Bytes of inputs that are freed before the segment's backward begins.
        first_lost_inputs: Those of `lost_inputs` that no earlier segment has.
        keeps_products: False if its products cannot be kept: they are changed in place, or a part of the unit is
            compiled or sliced.
        between: True for code between two calls. `unit == ""` alone is ambiguous if the root is a block.
        sliced: Modules that ran on slices of the tokens, see [Note: Slices] in row_wise.py. Names are relative to the
            unit; `""` is the unit itself.
        input_swap_bytes: Host memory for the inputs of a block, bytes: those that no earlier block was given, in whole
            pages. 0 if moving them frees nothing, because one of them is small or used elsewhere.
    """

    unit: str
    forward: Forward
    backward: Backward = Backward()
    input_bytes: int = 0
    casts: tuple[tuple[str, int], ...] = ()
    gradients: tuple[str, ...] = ()
    lost_inputs: int = 0
    first_lost_inputs: int = 0
    keeps_products: bool = True
    between: bool = False
    sliced: tuple[str, ...] = ()
    input_swap_bytes: int = 0


# Fewest tokens of a mask or of attention scores that a profile names.
LEAST_SQUARE = 1024


@dataclass(frozen=True)
class ModelProfile:
    """The profile of one step: forward, loss and backward.

    Attributes:
        calls: Every call of a unit, in order of their begin.
        parameters: Uses of each parameter, in the order of the layout.
        saved_bytes: Bytes that autograd saves in the whole step; each storage counts once.
        flops: FLOPs of matrix products, attention, convolutions and recurrent layers in forward.
        segments: Segments in the order of forward; empty if the step ran no backward.
        samples: Number of samples in the batch; 0 means unknown.
        tokens: Number of elements of the batch's `input_ids`; 0 means unknown.
        attention: Number of forward calls by kernel of `scaled_dot_product_attention`: `"flash"`, `"efficient"`,
            `"cudnn"`, `"flash_cpu"` or `"math"`.
        measured: Reason why the step was run with real tensors; empty if it was traced.
        absent: Units that never run, because they process media and the data has none.
        slice_tokens: Maximum number of tokens of a slice, see [Note: Slices] in row_wise.py; 0: nothing was sliced.
        squares: Sizes of the last two dimensions of tensors of at least four, such as masks and attention scores, if
            they are equal and at least `LEAST_SQUARE`; each with the bytes of the largest such tensor.
    """

    calls: tuple[UnitCall, ...]
    parameters: tuple[ParameterUse, ...]
    saved_bytes: int
    flops: int
    segments: tuple[Segment, ...] = ()
    samples: int = 0
    tokens: int = 0
    attention: tuple[tuple[str, int], ...] = ()
    measured: str = ""
    absent: tuple[str, ...] = ()
    slice_tokens: int = 0
    squares: tuple[tuple[int, int], ...] = ()

    @property
    def sliced(self) -> tuple[str, ...]:
        """Names of the modules that ran on slices of the tokens."""
        return tuple(
            ".".join(filter(None, (segment.unit, name))) for segment in self.segments for name in segment.sliced
        )

    def swap_bytes(self, streamed: frozenset[str] = frozenset()) -> dict[str, int]:
        """Return the host memory for swapping one call of each unit, bytes; the maximum of several calls.

        Args:
            streamed: First names of parameters that are streamed in autocast's dtype, and so not cast on the device.
        """
        if streamed not in self._swapped:
            most: dict[str, int] = {}
            for call in self.calls:
                most[call.name] = max(most.get(call.name, 0), call.swap_bytes_without(streamed))
            self._swapped[streamed] = most
        return dict(self._swapped[streamed])

    @cached_property
    def input_swap_bytes(self) -> dict[str, int]:
        """Host memory for the inputs of each unit that is called once, bytes, see `Segment.input_swap_bytes`."""
        calls = Counter(segment.unit for segment in self.segments)
        return {one.unit: one.input_swap_bytes for one in self.segments if calls[one.unit] == 1}

    @cached_property
    def _swapped(self) -> dict[frozenset[str], dict[str, int]]:
        """Cache of `swap_bytes`, which the search calls often."""
        return {}


def swapped_bytes(nbytes: int) -> int:
    """Return the host memory for swapping a storage of `nbytes`: whole pages, or 0 if it is smaller than a page."""
    return -(-nbytes // PAGESIZE) * PAGESIZE if nbytes >= PAGESIZE else 0


def least_swapped(swap_bytes: int) -> int:
    """Return the size of the smallest storage that is swapped by a call with `swap_bytes` of host memory.

    Each storage costs the host time, and all smaller ones together are a small part of what the call saves.
    """
    return max(PAGESIZE, swap_bytes // 1024)


def castable(profile: ModelProfile, dtype: str) -> frozenset[str]:
    """Return the first names of parameters that can be cast on the host: a step only reads one cast to `dtype` of them.

    Args:
        profile: Profile of one step.
        dtype: Name of a dtype without the `torch.` prefix, e.g. `"bfloat16"`.
    """
    return frozenset(
        use.fqn
        for use in profile.parameters
        if use.casts == (dtype,) and not (use.direct_uses or use.saves or use.dtype_reads)
    )


FORMAT = 2


@dataclass(frozen=True)
class HardwareProfile:
    """The performance and free memory of a device and its host.

    Attributes:
        name: Maker's name of the device.
        upload: Bytes per second from page-locked host memory to the device.
        download: Bytes per second from the device to page-locked host memory.
        upload_beside: Bytes per second of uploads while downloads run.
        download_beside: Bytes per second of downloads while uploads run.
        flops: FLOP/s of matrix products, by name of the dtype without `torch.`.
        memory: Memory bandwidth of the device, bytes per second read and written.
        device_step: Elements per second of an optimizer step on the device.
        host_step: Elements per second of an optimizer step on the host, on all cores of one rank.
        host_memory: Memory bandwidth of the host, bytes per second read and written.
        device_bytes: Free memory of the device, bytes.
        host_bytes: Free memory of the host, bytes.
        asynchronous: True if copies run while the device computes, as on a GPU.
        launch: Seconds of the host to launch one operation; the device waits if its operations take less. 0: unknown.
        host_beside: Fraction of `host_step` that is left while copies use the host's memory, too. 1: `host_step` is
            already that rate.

    Raises:
        ValueError: If a figure is not finite, or not above zero (`launch`: below zero).
    """

    name: str
    upload: float
    download: float
    upload_beside: float
    download_beside: float
    flops: Mapping[str, float]
    memory: float
    device_step: float
    host_step: float
    host_memory: float
    device_bytes: int
    host_bytes: int
    asynchronous: bool = True
    launch: float = 0.0
    host_beside: float = 1.0

    def __post_init__(self) -> None:
        """Check every figure: with a zero or NaN, the planner would refuse or accept every plan."""
        _check_others(self.name, self.flops, self.asynchronous)
        for name in _RATES:
            _check_figure(name, getattr(self, name), int | float, "a finite number")
        for name in _BYTES:
            _check_figure(name, getattr(self, name), int, "a whole number of bytes")
        for dtype, rate in self.flops.items():
            _check_figure(f"flops[{dtype!r}]", rate, int | float, "a finite number")
        _check_figure("host_beside", self.host_beside, int | float, "a finite number")
        if self.launch != 0:
            _check_figure("launch", self.launch, int | float, "a finite number")

    def rates(self) -> dict[str, float]:
        """Return all rates by name; the rate of matrix products is called `flops in DTYPE`."""
        products = {f"flops in {dtype}": rate for dtype, rate in self.flops.items()}
        return {**products, **{name: getattr(self, name) for name in _RATES}}

    def seconds(self, operations: tuple[OperationCost, ...]) -> float:
        """Return the predicted time of operations on the device, seconds.

        An operation takes the longer of the time of its arithmetic and of its memory traffic. All operations take at
        least as long as the host needs to launch them.

        Raises:
            ValueError: If the rate of a dtype is unknown.
        """
        total, count, rates, memory = 0.0, 0, self.flops, self.memory
        for cost in operations:
            seconds = cost.nbytes / memory
            if cost.flops:
                if cost.dtype not in rates:
                    raise ValueError(
                        f"The hardware profile of {self.name!r} has no rate for {cost.dtype}, only for "
                        f"{', '.join(self.flops)}. Use another precision, or measure the hardware again."
                    )
                arithmetic = cost.flops / rates[cost.dtype]
                if arithmetic > seconds:
                    seconds = arithmetic
            total += cost.count * seconds
            count += cost.count
        return max(total, count * self.launch)

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({"format": FORMAT, **content, "flops": dict(self.flops)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Parse the text of `to_json`.

        Raises:
            ValueError: If the text is not a JSON object or has another format version, or if a field is missing,
                unknown or invalid.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"A hardware profile must be JSON: {error}. {_AGAIN}") from error
        if not isinstance(content, dict):
            raise ValueError(f"A hardware profile must be a JSON object, not {type(content).__name__}. {_AGAIN}")
        written = content.pop("format", None)
        if type(written) is not int or written != FORMAT:
            raise ValueError(f"The hardware profile has format {written!r}, but this version reads {FORMAT}. {_AGAIN}")
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - content.keys()), sorted(content.keys() - names)
        if missing or unknown:
            raise ValueError(f"The hardware profile lacks {missing} and has unknown fields {unknown}. {_AGAIN}")
        return cls(**content)


_AGAIN = "Measure the hardware again."
_BYTES = ("device_bytes", "host_bytes")
_OTHERS = ("name", "flops", "asynchronous", "launch", "host_beside")
_RATES = tuple(field.name for field in fields(HardwareProfile) if field.name not in (*_BYTES, *_OTHERS))


def _check_figure(name: str, value: Any, kind: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"HardwareProfile.{name}={value!r}: give {what} above zero. {_AGAIN}")


def _check_others(name: Any, flops: Any, asynchronous: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"HardwareProfile.name={name!r}: give the name of the device.")
    if not isinstance(flops, Mapping) or not flops:
        raise ValueError(
            f"HardwareProfile.flops={flops!r}: give the rate of matrix products in at least one dtype. {_AGAIN}"
        )
    if not isinstance(asynchronous, bool):
        raise ValueError(f"HardwareProfile.asynchronous={asynchronous!r}: give True or False.")
