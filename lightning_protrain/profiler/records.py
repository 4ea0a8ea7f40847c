"""Frozen records of a model and of hardware: the input of the planner. Imports nothing of ours and no torch."""

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
        fqn: First fully qualified name under which `named_parameters()` lists it.
        sites: Every fully qualified name, tied ones included; `sites[0] == fqn`.
        shape: Its shape; for a subclass with packed elements, that of the stored tensor.
        dtype: Name of its dtype without the `torch.` prefix, e.g. `"float32"`.
        nbytes: Bytes of its elements, plus the companions of a quantised weight, see [Note: Companions] in
            device/quant_state.py.
        trainable: True if it required gradients when the model was described.
        streamed_dtype: Two-byte dtype in which it is streamed to the device; None means its own dtype. A float32 weight
            whose only use is a cast by autocast is cast on the host instead.
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
    A *unit* is the smallest module whose parameters are fetched and released together. Every block is a unit with all
    parameters of its subtree. Every other module that directly owns parameters outside all blocks (an embedding, a
    norm, a head) is a unit of its own.

    A module that is never called (`ParameterList`, `ModuleDict`) hands its parameters to the nearest called module
    around it, in the end to the root. A library's composite that reads its children's weights without calling them
    (`MultiheadAttention`, a DoRA layer) is one unit with its subtree. The empty name is the root: its direct parameters
    are needed whenever any part of the model runs. A model without blocks is one block, the root, with all parameters.

    Attributes:
        name: First fully qualified module name; `""` is the root.
        is_block: True if it carries an activation policy.
        parameters: First names of all parameters that the unit needs, in `named_parameters()` order. A tied parameter
            is listed by every unit that needs it.
        encloses: Names of units inside this one (a container with its own parameters around blocks).
    """

    name: str
    is_block: bool
    parameters: tuple[str, ...]
    encloses: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelLayout:
    """The states of a model, as the planner needs them.

    Attributes:
        parameters: All parameters in `named_parameters()` order, tied ones once.
        units: All units in `named_modules()` order, which stands for execution order until a step has been recorded.
        buffer_bytes: Bytes of all registered buffers; they stay on the device.
        lends_copies: True if gradients of offloaded parameters that are streamed in another dtype use the host memory
            of these copies.
    """

    parameters: tuple[ParameterInfo, ...]
    units: tuple[UnitInfo, ...]
    buffer_bytes: int
    lends_copies: bool = False

    @cached_property
    def blocks(self) -> tuple[UnitInfo, ...]:
        """Units that carry an activation policy, in order."""
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
        """Cache of the planner for groups of these parameters, by the names in each group."""
        return {}

    def parameter(self, fqn: str) -> ParameterInfo:
        """Return the parameter whose first name is `fqn`.

        Raises:
            KeyError: If no parameter has that first name.
        """
        return self.by_name[fqn]

    def streaming(self, names: Collection[str], dtype: str) -> ModelLayout:
        """Return the layout with the parameters `names` streamed in `dtype`."""
        infos = (replace(info, streamed_dtype=dtype if info.fqn in names else None) for info in self.parameters)
        return replace(self, parameters=tuple(infos))


@dataclass(frozen=True)
class ParameterUse:
    """The uses of a parameter in the forward and loss of one step, without backward.

    Attributes:
        fqn: Its first fully qualified name.
        casts: Dtype of every conversion of the whole parameter, as autocast issues it.
        direct_uses: Number of other operations that read the parameter or a view of it.
        saves: Number of times that autograd saved the parameter, or a view of it, for backward.
        dtype_reads: Number of times that code read the parameter's dtype, and may have based a decision on it.
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
    """One call of a unit's forward. All bytes count a storage once and in full; parameters and buffers do not count.

    Attributes:
        name: Name of the unit.
        order: Index among all calls of the step, by entry; calls may be nested.
        saved_bytes: Bytes that autograd saves for backward between entry and exit, without the unit's inputs.
        saved_casts: Part of `saved_bytes` that is a copy of a parameter in another dtype: first name and bytes.
        input_bytes: Bytes of its input tensors, saved or not.
        output_bytes: Bytes of its returned tensors.
        flops: FLOPs of matrix products, attention, convolutions and recurrent layers.
        peak_bytes: Peak of the live bytes above those at entry.
        swap_bytes: Host bytes for swapping the call: everything that autograd saves, including inputs, each version of
            a storage once and in whole pages. Storages of less than a page stay on the device.
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
        """Return `saved_bytes` if the parameters `streamed` arrive in autocast's dtype, so that no cast copies them."""
        return self.saved_bytes - sum(nbytes for fqn, nbytes in self.saved_casts if fqn in streamed)

    def swap_bytes_without(self, streamed: frozenset[str]) -> int:
        """Return `swap_bytes` if the parameters `streamed` arrive in autocast's dtype, so that no cast copies them."""
        if not streamed:
            return self.swap_bytes
        return self.swap_bytes - sum([swapped_bytes(nbytes) for fqn, nbytes in self.saved_casts if fqn in streamed])


@dataclass(frozen=True)
class OperationCost:
    """A group of operations of equal size.

    Attributes:
        flops: FLOPs of one operation; 0 if it only moves bytes.
        nbytes: Bytes that one operation reads and writes.
        dtype: Dtype of the multiplied tensors, without the `torch.` prefix; of the first tensor if `flops` is 0.
        count: Number of these operations.
    """

    flops: int
    nbytes: int
    dtype: str
    count: int = 1


@dataclass(frozen=True)
class Pass:
    """One pass through a segment, forward or backward; 0 is an unknown peak.

    Attributes:
        live_bytes: Live activations at the beginning: all tensors that operations have made, except gradients of
            parameters.
        peak_bytes: Peak of the live activations within it; a gradient of a parameter counts until it is accumulated.
        operations: Operations of the pass.
        peak_without_casts: `peak_bytes` without the segment's own copies of parameters in another dtype.
        unsaved_peak: `peak_bytes` if autograd saved nothing but the segment's inputs.
        unsaved_peak_without_casts: `unsaved_peak` without casts.
        selective_peak: `peak_bytes` if the products are kept in place of what autograd saves.
        selective_peak_without_casts: `selective_peak` without casts.
        again_peak: `peak_bytes` if the products exist from the beginning.
        again_peak_without_casts: `again_peak` without casts.
        recomputed_operations: Part of a forward's `operations` that a recomputation runs: PyTorch ends it at the last
            saved tensor. None means all.
        again_operations: Part of `recomputed_operations` that makes no products.
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
        """Operations that run when the forward is recomputed."""
        return self.operations if self.recomputed_operations is None else self.recomputed_operations


@dataclass(frozen=True)
class Segment:
    """A part of the step that contains no begin or end of a unit.

    A step is cut where units begin and end. A segment is one call of a unit that encloses no other (a block, an
    embedding, a norm, a head), or the code between two such calls (masks, the loss), which belongs to the root.
    Backward goes through the segments in reverse order. All figures are those of a step that keeps every activation.
    For a block with another policy, the planner subtracts the bytes that it frees from the end of its forward to its
    backward.

    Attributes:
        unit: Name of the unit; `""` for code between two calls.
        forward: Forward pass.
        backward: Backward pass; empty if there is none.
        peak_with_gradients: `backward.peak_bytes` if gradients that are accumulated within the pass are not freed.
        checkpoint_saving: Bytes that checkpointing frees: everything that autograd saves in it except inputs, less the
            inputs that would not be kept otherwise.
        swap_saving: Bytes that swapping frees: everything that autograd saves in storages of at least a page, including
            inputs unless an earlier segment holds them.
        input_bytes: Bytes of the unit's inputs, without those that an earlier segment had as inputs.
        casts: Part of the saved bytes that is a copy of a parameter in another dtype: first name and bytes.
        gradients: First names of the parameters whose gradient is complete at the end of its backward.
        held_bytes: All inputs that checkpointing it keeps and that would not be kept otherwise. In `checkpoint_saving`,
            such a tensor counts only for the first segment that has it as an input.
        product_bytes: Bytes of its products, see [Note: Products] in device/op_kinds.py. None means that they cannot be
            kept, because they are changed in place or a part of the unit is compiled.
        idle_product_bytes: Bytes of products that a recomputation does not reach, because autograd saves nothing after
            them.
        asked_live: Live activations when its backward first asks for a saved tensor; 0 means unknown.
        between: True for code between two calls. If the root is a block, its calls have no name either.
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
    """Forward, loss and backward of one step.

    Attributes:
        calls: Every call of a unit, by entry.
        parameters: Every parameter of the layout, in its order.
        outside_saved_bytes: Bytes that autograd saves while no block runs (embedding, head, loss), unless a block saves
            them too.
        outside_saved_casts: Part of `outside_saved_bytes` that is a copy of a parameter in another dtype.
        saved_bytes: All bytes that autograd saves, every storage once in the whole step.
        flops: FLOPs of the whole step, as in `UnitCall`.
        peak_bytes: Peak of the live bytes.
        segments: Segments in the order of forward; empty if the step ran no backward.
        samples: Number of samples: the first dimension of the batch's tensors; 0 means unknown.
        tokens: Number of elements of the batch's `input_ids`; 0 means unknown.
        attention: Number of forward runs of each kernel of `scaled_dot_product_attention`: `"flash"`, `"efficient"` and
            `"cudnn"` of a CUDA device, `"flash_cpu"`, or `"math"`, which any device has.
        measured: Reason why the step ran with real tensors on the real device; empty if it was traced.
        absent: Units that no batch runs, because they read media and the data has none.
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
    absent: tuple[str, ...] = ()

    def swap_bytes(self, streamed: frozenset[str] = frozenset()) -> dict[str, int]:
        """Return the host bytes that one call of each unit swaps; of several calls, the largest.

        Args:
            streamed: Parameters that arrive in autocast's dtype, as in `UnitCall.saved_bytes_without`.
        """
        if streamed not in self._swapped:
            most: dict[str, int] = {}
            for call in self.calls:
                most[call.name] = max(most.get(call.name, 0), call.swap_bytes_without(streamed))
            self._swapped[streamed] = most
        return dict(self._swapped[streamed])

    @cached_property
    def _swapped(self) -> dict[frozenset[str], dict[str, int]]:
        """Cache of `swap_bytes`, which a search calls very often."""
        return {}


def swapped_bytes(nbytes: int) -> int:
    """Return the host bytes for a swapped storage of `nbytes`: whole pages, or 0 if it is smaller than a page."""
    return -(-nbytes // PAGESIZE) * PAGESIZE if nbytes >= PAGESIZE else 0


def castable(profile: ModelProfile, dtype: str) -> frozenset[str]:
    """Return the parameters that a step reads only through one cast to `dtype`, so that they can be cast on the host.

    Their only use is one cast to `dtype`, autograd saves none of them, and no code reads their dtype.

    Args:
        profile: Profile of one step.
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
        name: Maker's name of the device.
        upload: Bytes per second from page-locked host memory to the device, alone.
        download: Bytes per second from the device to page-locked host memory, alone.
        upload_beside: Bytes per second of uploads while downloads run.
        download_beside: Bytes per second of downloads while uploads run.
        upload_pageable: Bytes per second from host memory that is not page-locked.
        download_pageable: Bytes per second to host memory that is not page-locked.
        flops: FLOP/s of matrix products, by name of the dtype without `torch.`.
        memory: Bytes per second that the device reads and writes in its own memory.
        device_step: Elements per second of an optimizer step on the device.
        host_step: Elements per second of an optimizer step on the host, on all cores of one rank.
        host_memory: Bytes per second that the host reads and writes in simple arithmetic.
        device_bytes: Free memory of the device, bytes.
        host_bytes: Free memory of the host, bytes.
        asynchronous: True if copies run beside computation, so that their sources stay allocated until the copy ends.

    Raises:
        ValueError: A figure is not finite, or not above zero.
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
        """Check every figure: a zero or NaN would exclude every plan, or accept any."""
        _check_others(self.name, self.flops, self.asynchronous)
        for name in _RATES:
            _check_figure(name, getattr(self, name), int | float, "a finite number")
        for name in _BYTES:
            _check_figure(name, getattr(self, name), int, "a whole number of bytes")
        for dtype, rate in self.flops.items():
            _check_figure(f"flops[{dtype!r}]", rate, int | float, "a finite number")

    def rates(self) -> dict[str, float]:
        """Return all rates by their names, those of matrix products by their dtypes."""
        products = {f"flops in {dtype}": rate for dtype, rate in self.flops.items()}
        return {**products, **{name: getattr(self, name) for name in _RATES}}

    def seconds(self, operations: tuple[OperationCost, ...]) -> float:
        """Return the device's time for operations: the longer of each operation's arithmetic and memory traffic.

        Raises:
            ValueError: The rate of a dtype is unknown.
        """
        total, rates, memory = 0.0, self.flops, self.memory
        for cost in operations:
            seconds = cost.nbytes / memory
            if cost.flops:
                if cost.dtype not in rates:
                    raise ValueError(
                        f"The hardware profile of {self.name!r} has no rate for {cost.dtype}, only "
                        f"for {', '.join(self.flops)}. "
                        "Use a precision that computes in one of these, or measure the hardware again."
                    )
                arithmetic = cost.flops / rates[cost.dtype]
                if arithmetic > seconds:
                    seconds = arithmetic
            total += cost.count * seconds
        return total

    def to_json(self) -> str:
        """Return the profile as JSON text that `from_json` reads back."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({"format": FORMAT, **content, "flops": dict(self.flops)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Parse the text of `to_json`.

        Raises:
            ValueError: If it is no JSON object, has another format, missing or unknown fields, or an invalid figure.
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
        raise ValueError(
            f"HardwareProfile.flops={flops!r}: give the rate of matrix products in at least one dtype. {_AGAIN}"
        )
    if not isinstance(asynchronous, bool):
        raise ValueError(f"HardwareProfile.asynchronous={asynchronous!r}: give True or False.")
