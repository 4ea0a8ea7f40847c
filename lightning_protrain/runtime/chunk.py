"""Chunks: parameters that share one device storage and are fetched and released together.

[Note: Two parameters]
Every offloaded parameter is two `nn.Parameter` objects. The *host parameter* is the user's own object. Its data lies in
host memory, it takes the gradient, and optimizers and callbacks hold it. It is registered except while its block
computes. The *device parameter* has the same tensor subclass and lies in the chunk's device storage. It is registered
only while its block computes, so that autograd and every kernel see a device tensor. Both keep their identity from
`apply_plan` to `Runtime.remove`.

[Note: One storage]
Autograd may keep views of a device parameter after its block has ended (a transposed weight, a tensor on a custom
function's `ctx`). A chunk therefore keeps one storage object for life: releasing it is `resize_(0)`, fetching it again
is `resize_(n)` and one upload, after which every saved view is valid again. The upload goes through a tensor with a
version counter of its own. So the device parameters' counters do not move, and autograd reports no in-place change.

[Note: Versions]
A fetch in forward uploads the values that the host has now. If they have changed since the previous fetch, the device
parameter's version is incremented too: a graph made with the old values then raises in backward, as it does without
offloading. A fetch in backward must upload the values of the forward; the runtime raises if the weight has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from lightning_protrain.device.device import Device
from lightning_protrain.device.host import Job, in_block
from lightning_protrain.planner.plan import ChunkPlan, Plan, Sharding, chunk_offsets, gathers_gradients
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.progress import bar
from lightning_protrain.quant_state import attach_companions, move_companions, packed_nbytes, place_companions
from lightning_protrain.runtime.access_guard import below_guard, can_be_watched
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.comm.shared_memory import Share, share_chunks
from lightning_protrain.runtime.low_precision import DeviceParam, ParamUses, low_precision_class
from lightning_protrain.runtime.param import (
    OffloadedParam,
    Ownership,
    changed_before_backward,
    dense_like,
    in_storage,
    refuse_changed_by_others,
)
from lightning_protrain.runtime.shadow import ShadowWeight


class ChunkState(Enum):
    """Location of the bytes of an offloaded chunk: host memory, on their way to the device, or on the device."""

    HOST = auto()
    IN_FLIGHT = auto()
    LIVE = auto()


class Chunk:
    """A chunk of parameters in host memory that is fetched to the device and released as one.

    Args:
        plan: The parameters and size of the chunk.
        parameters: The user's parameters, in the order of `plan.parameters`.
        device: Device that the chunk is fetched to.
        share: This rank's view of a chunk that the ranks of its node share; None: the rank has a copy of its own.
        gathers_gradients: Whether its gradients are downloaded in one transfer, see [Note: Small gradients].

    Attributes:
        state: Location of the bytes.
        prefetched: Whether the chunk was fetched ahead and no block has used it since.
        nbytes: Size of the chunk as it is streamed, bytes.
        params: The parameters, in the order of `plan.parameters`.
        source: Host memory that is streamed, shape (nbytes,), uint8.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        parameters: Sequence[nn.Parameter],
        device: Device,
        share: Share | None = None,
        gathers_gradients: bool = False,
    ) -> None:
        self.plan = plan
        self.share = share
        self.state = ChunkState.HOST
        self.prefetched = False
        self.gathers_gradients = gathers_gradients
        self._reads_stepped = False
        self._device = device
        self._fence: Any = None
        self._latest: Any = None
        self._low_dtype: torch.dtype | None = getattr(torch, plan.streamed_dtype) if plan.streamed_dtype else None
        low_size = self._low_dtype.itemsize if self._low_dtype is not None else 0
        sizes = [low_size * parameter.numel() or packed_nbytes(parameter) for parameter in parameters]
        offsets, self.nbytes = chunk_offsets(sizes)
        assert self.nbytes == plan.nbytes, f"chunk of {plan.unit!r} has {self.nbytes} bytes, planned {plan.nbytes}"
        self._buffer = (device.host if share is None else share.memory).empty(self.nbytes)
        self.source = torch.frombuffer(self._buffer, dtype=torch.uint8)[: self.nbytes]
        self._storage = torch.UntypedStorage(self.nbytes, device=device.torch_device)
        self._target = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        self._target.set_(self._storage, 0, (self.nbytes,), (1,))
        # Reads of other weights wait for pending steps.
        self._may_be_watched = self._low_dtype is None and any(map(can_be_watched, parameters))
        self.params = [
            self._make_param(fqn, parameter, offset)
            for fqn, parameter, offset in zip(plan.parameters, parameters, offsets, strict=True)
        ]
        self._device.resize(self._storage, 0)

    def fetch(self, after: Job | None = None) -> None:
        """Issue the upload; call `wait` before its bytes are used.

        Args:
            after: Pending optimizer step of the chunk, which the upload follows; None: no step is pending. With a
                pending step, call `wait` only after the step has ended.

        Raises:
            RuntimeError: A host parameter has another dtype, shape or device than planned.
        """
        assert self.state is ChunkState.HOST
        self._reads_stepped = after is not None
        if after is None:
            with self._looking():
                for param in self.params:
                    host = param.host
                    if host.data_ptr() != param.pointer:
                        self._rebind(param)
                    param.read_version = param.version
            self.renew_copies()
        self._device.resize(self._storage, self.nbytes)
        self._fence = self._latest = self._device.upload(self.source, self._target, after)
        self.state = ChunkState.IN_FLIGHT
        self._device.counters.uploads += 1
        self._device.counters.add_live(self.nbytes)

    def wait(self, in_backward: bool) -> None:
        """Make the compute stream wait for the upload, and fetch again if the host weights have changed since.

        Raises:
            RuntimeError: If a weight has changed between a forward and its backward, see [Note: Versions].
        """
        self.note_step()
        changed = []
        outdated = False
        with self._looking():
            for param in self.params:
                host = param.host
                version = param.version
                repointed = host.data_ptr() != param.pointer
                if repointed or version != param.seen_version:
                    changed.append(param)
                if repointed or version != param.read_version:
                    outdated = True
        if self.share is not None and changed:
            refuse_changed_by_others(changed)
        if changed and in_backward:
            raise changed_before_backward(changed[0])
        if outdated and self.state is not ChunkState.HOST:
            self.release()
            self.fetch()
        for param in changed:
            torch.autograd.graph.increment_version(param.device_param)
            param.note_seen()
            with below_guard():
                param.device_version = param.device_param._version
        if self.state is ChunkState.IN_FLIGHT:
            self._arrive()
            self.state = ChunkState.LIVE

    def note_step(self) -> None:
        """Note that the pending step has ended, so an upload that followed it has read the stepped values."""
        if self._reads_stepped:
            with below_guard():
                for param in self.params:
                    # If the weight was accessed, its shadow copy may be outdated: fetch again.
                    param.read_version = param.version if param.shadow is None or param.shadow.is_current else -1
            self._reads_stepped = False

    def release(self) -> None:
        """Free the device storage; saved views are valid again after the next fetch, see [Note: One storage]."""
        if self.state is ChunkState.HOST:
            return
        if self._fence is not None:
            # Nobody used this prefetch: the upload must end before the allocator gives the memory to other work.
            self._arrive()
        self._device.resize(self._storage, 0)
        self.state = ChunkState.HOST
        self._device.counters.add_live(-self.nbytes)

    def masters(self) -> list[Tensor]:
        """Return the full-precision weights of shadow copies; none if the ranks of the node share them."""
        with below_guard():  # An access would wait for pending steps.
            shadows = [param.shadow for param in self.params if param.shadow is not None and self.share is None]
            return [shadow.host.detach() for shadow in shadows]

    def owner(self, param: OffloadedParam) -> int | None:
        """Return the `local_rank` that writes a parameter; None: every rank writes its own."""
        return None if self.share is None else self.share.owners[self.params.index(param)]

    def _arrive(self) -> None:
        """Make the compute stream wait for the upload."""
        self._device.wait(self._fence)
        self._fence = None

    def _looking(self) -> AbstractContextManager[None]:
        """Return a context in which reading weights does not invalidate shadow copies, nor passes their class."""
        return nullcontext() if self._may_be_watched else below_guard()

    def renew_copies(self) -> None:
        """Cast the weights whose shadow copies are not current, before a fetch or after an optimizer step."""
        if self._low_dtype is None:
            return
        with below_guard():
            shadows = [param.shadow for param in self.params if param.shadow is not None]
            outdated = [shadow for shadow in shadows if not shadow.is_current]
            if outdated:
                self._device.wait_host(self._latest)  # It may still read memory that is about to be written.
            for shadow in outdated:
                shadow.renew()

    def write_back(self) -> None:
        """Copy device parameters that the forward changed (in place or by a new `data`) to the host.

        Raises:
            RuntimeError: The ranks of a node share the weight, or it is streamed in low precision.
        """
        start = self._storage.data_ptr()
        with below_guard():  # Only metadata is read; the guard would make every read slow.
            changed = [
                param
                for param in self.params
                if param.device_param._version != param.device_version
                or (param.device_param.data_ptr() != start + param.offset and param.device_param.numel())
            ]
        for param in changed:
            left = param.device_param.numel() and param.device_param.data_ptr() != start + param.offset
            if self.share is not None:
                raise RuntimeError(
                    f"{param.fqn!r} was changed in a forward, and the ranks of this node share it: each rank would "
                    "change it in its own way. Make its chunk resident (`num_persistent_chunks`), or set "
                    'sharding="replicate".'
                )
            if param.shadow is not None:
                dtype = param.shadow.values.dtype
                raise RuntimeError(
                    f"{param.fqn!r} was changed in a forward and is streamed in {dtype}: the change would "
                    "lose precision. Make its chunk resident (`num_persistent_chunks`), or change it after the step."
                )
            self._device.wait_host(self._device.download(param.device_param.detach(), param.host.data))
            if left:
                place = in_storage(self._storage, param.offset, param.host)
                place.copy_(param.device_param.detach())
                param.device_param.data = place
            param.device_version = param.device_param._version

    def detach(self) -> None:
        """Remove every hook and free device and host memory for good; the host parameters stay as they are.

        The uploads must have ended. Host memory stays allocated as long as host parameters lie in it.
        """
        for param in self.params:
            for hook in (*param.hooks, *param.mirrored.values()):
                hook.remove()
            param.hooks.clear()
            param.mirrored.clear()
            param.drop_gradient()
            param.forget_passing()
            if param.shadow is not None:
                param.shadow.forget_gradient()
                param.shadow.values = torch.empty(0, dtype=param.shadow.values.dtype)
        self.release()
        self._buffer, self.source = memoryview(b""), torch.empty(0, dtype=torch.uint8)

    def _make_param(self, fqn: str, host: nn.Parameter, offset: int) -> OffloadedParam:
        whole = in_storage(self._storage, offset, dense_like(host), self._low_dtype or host.dtype)
        kind = DeviceParam if type(host) is nn.Parameter else type(host)
        kind = kind if self._low_dtype is None else low_precision_class(type(host))
        device_param: Any = torch.Tensor._make_subclass(kind, whole, host.requires_grad)
        device_param.__dict__.update(host.__dict__)
        param = OffloadedParam(
            fqn, host, device_param, offset, seen_version=host._version, device_version=device_param._version
        )
        if self.share is not None:
            param.ownership = Ownership(self.share.owns(self.plan.parameters.index(fqn)))
        if self._low_dtype is None:
            self._adopt(param, self.share is None or self.share.memory.fills)
            attach_companions(host, device_param, lambda begin, like: in_storage(self._storage, offset + begin, like))
        else:
            device_param.uses = uses = ParamUses(fqn, host, whole.device, whole.dtype)
            values = in_block(self._buffer, offset, whole, self._low_dtype)
            param.shadow = ShadowWeight(host, values, uses, param.owned)
            if self.share is not None:
                self.share.memory.adopt(host)
            param.pointer = host.data_ptr()
            self._device.note_host(host)
        return param

    def _adopt(self, param: OffloadedParam, fills: bool = True) -> None:
        """Point the parameter to the chunk's host memory, and copy its data there unless the chunk already holds it."""
        host = param.host
        if host.numel():
            data = in_block(self._buffer, param.offset, param.device_param, host.dtype)
            if fills:
                data.copy_(host.detach())
            host.data = data
        place_companions(host, lambda begin, like: in_block(self._buffer, param.offset + begin, like))
        param.pointer = host.data_ptr()

    def _rebind(self, param: OffloadedParam) -> None:
        """Adopt the new memory of a host parameter whose `data` was re-pointed (`param.data = other`).

        Raises:
            RuntimeError: The parameter has another dtype, shape or device than planned.
        """
        host, device_param = param.host, param.device_param
        planned = getattr(torch, self.plan.dtype)
        if host.dtype != planned or host.shape != device_param.shape or host.device.type != "cpu":
            raise RuntimeError(
                f"{param.fqn!r} has become {host.dtype}{list(host.shape)} on {host.device}; the plan placed it as "
                f"{planned}{list(device_param.shape)} in host memory. Change weights in place, or before fit."
            )
        if param.shadow is not None:
            param.shadow.invalidate()
            param.pointer, param.seen_version = host.data_ptr(), -1
            self._device.note_host(host)
            return
        self._device.wait_host(self._latest)
        with torch.inference_mode(False):  # The new data outlives an evaluation that runs now.
            self._adopt(param)
        param.seen_version = -1  # The values are new, although the version has not moved.


def make_chunks(
    model: nn.Module, plan: Plan, layout: ModelLayout, device: Device, ranks: RankMesh | None
) -> list[Chunk]:
    """Copy the weights of offloaded chunks into host memory: the rank's own, or memory that the ranks share.

    Args:
        model: Model whose parameters are pointed to that memory.
        plan: Says which chunks are offloaded, and whether ranks share them.
        layout: Structure of the model.
        device: Device that chunks are fetched to.
        ranks: Ranks that train together; None: a single rank.
    """
    parameters = dict(model.named_parameters())
    gathering = gathers_gradients(layout, plan.chunks)
    offloaded = [(chunk, gathers) for chunk, gathers in zip(plan.chunks, gathering, strict=True) if not chunk.resident]
    plans = tuple(chunk for chunk, _ in offloaded)
    shares: Sequence[Share | None] = [None] * len(plans)
    if ranks is not None and plan.sharding is Sharding.SHARD and plans:
        shares = share_chunks(plans, parameters, ranks, device)
    pairs = bar([*zip(offloaded, shares, strict=True)], "Placing weights in host memory", unit="chunk")
    return [
        Chunk(chunk, [parameters[fqn] for fqn in chunk.parameters], device, share, gathers)
        for (chunk, gathers), share in pairs
    ]


def place_resident(model: nn.Module, plan: Plan, device: Device) -> None:
    """Move resident parameters and all buffers to the device; parameter objects keep their identity."""
    target, parameters = device.torch_device, dict(model.named_parameters())
    for chunk in plan.chunks:
        for fqn in chunk.parameters if chunk.resident else ():
            parameter = parameters[fqn]
            if parameter.device != target:
                parameter.data = parameter.detach().as_subclass(torch.Tensor).to(target)
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(target)
            move_companions(parameter, target)
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if next(module.parameters(), None) is None:
            # Metrics and the like keep tensors that are no buffers; their own `to` moves them.
            module.to(target)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != target:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(target))
