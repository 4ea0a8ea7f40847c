"""Chunks: parameters that share one device storage and are fetched and released together.

[Note: Two parameters]
Every offloaded parameter is two `nn.Parameter` objects. The *host* one is the user's own object, registered whenever
nobody computes: its data lies in host memory, it takes the gradient, optimizers and callbacks hold it. The *device
parameter* is of the same tensor subclass, lies in the chunk's device storage and is registered only while its unit
computes, so that autograd and every kernel see a device tensor. Both keep their identity from `apply_plan` to
`Runtime.remove`.

[Note: One storage]
Autograd may keep views of a device parameter after its unit has ended (a transposed weight, a tensor on a custom
function's `ctx`). A chunk therefore keeps one storage object for life: releasing it is `resize_(0)`, fetching it again
is `resize_(n)` and one copy, after which every saved view is right again. The copy goes through a tensor with a version
counter of its own: the device parameters' counters do not move, or autograd would report an in-place change.

[Note: Versions]
A fetch in forward gives the values that the host has now. If they have changed since the fetch before, the device
parameter's version moves as well, so that a graph made with the old values raises in backward exactly as it does
without offloading. A fetch in backward must give the values of the forward: anything else raises here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_protrain.device.device import Device
from lightning_protrain.device.host import Job
from lightning_protrain.device.quant_state import attach_companions, move_companions, packed_nbytes, place_companions
from lightning_protrain.planner.plan import ChunkPlan, Plan, Sharding, chunk_offsets, gathers_gradients
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.comm.shared_memory import Share, share_chunks
from lightning_protrain.runtime.low_precision import DeviceParam, ParamUses, low_precision_class
from lightning_protrain.runtime.param import (
    OffloadedParam,
    Ownership,
    changed_before_backward,
    dense_like,
    in_block,
    in_storage,
    refuse_changed_by_others,
)
from lightning_protrain.runtime.shadow import ShadowWeight


class ChunkState(Enum):
    """Where the bytes of an offloaded chunk are."""

    HOST = auto()
    IN_FLIGHT = auto()
    LIVE = auto()


class Chunk:
    """An offloaded chunk.

    Args:
        plan: What it holds.
        parameters: The user's parameters, in the order of `plan.parameters`.
        device: Where it is fetched to.
        share: What this rank holds of it; None: all.
        gathers_gradients: Whether its gradients leave in one copy, see [Note: Small gradients].
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
        self._share = share
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
        self._source = torch.frombuffer(self._buffer, dtype=torch.uint8)[: self.nbytes]
        self._storage = torch.UntypedStorage(self.nbytes, device=device.torch_device)
        self._target = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        self._target.set_(self._storage, 0, (self.nbytes,), (1,))
        self.params = [
            self._make_param(fqn, parameter, offset)
            for fqn, parameter, offset in zip(plan.parameters, parameters, offsets, strict=True)
        ]
        self._device.resize(self._storage, 0)

    def fetch(self, after: Job | None = None) -> None:
        """Issues the upload; `wait` must be called before its bytes are used.

        Args:
            after: The step of the chunk that is still pending: the upload comes after it. `wait` then comes after the
                end of the step, too.

        Raises:
            RuntimeError: A host parameter has been given another dtype or shape.
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
            if self._low_dtype is not None:
                self._renew_copies()
        self._device.resize(self._storage, self.nbytes)
        self._fence = self._latest = self._device.upload(self._source, self._target, after)
        self.state = ChunkState.IN_FLIGHT
        self._device.counters.uploads += 1
        self._device.counters.add_live(self.nbytes)

    def wait(self, in_backward: bool) -> None:
        """Makes the compute stream wait for the bytes; fetches again what has changed on the host since.

        Raises:
            RuntimeError: A weight has changed between a forward and its backward, see [Note: Versions].
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
        if self._share is not None and changed:
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
        """The pending step has ended: an upload that came after it has read what is there before anybody looks."""
        if self._reads_stepped:
            with below_guard():
                for param in self.params:
                    # A copy that the step has not made is an old one, if somebody has touched the weight.
                    param.read_version = param.version if param.shadow is None or param.shadow.is_current else -1
            self._reads_stepped = False

    def release(self) -> None:
        """Frees the device storage; the views of it that autograd holds come back to life with the next fetch."""
        if self.state is ChunkState.HOST:
            return
        if self._fence is not None:
            # A prefetch nobody used: its copy must end before the compute stream gives the memory to somebody else.
            self._arrive()
        self._device.resize(self._storage, 0)
        self.state = ChunkState.HOST
        self._device.counters.add_live(-self.nbytes)

    @property
    def source(self) -> Tensor:
        """What is streamed, in host memory: bytes, one-dimensional."""
        return self._source

    @property
    def share(self) -> Share | None:
        """What this rank holds of it, where the ranks of a node have one copy between them; None: all of it."""
        return self._share

    def part(self) -> None:
        """After `detach`, when nothing of it is page-locked any more: what was shared is this rank's own."""
        if self._share is not None:
            self._share.memory.part()

    def owner(self, param: OffloadedParam) -> int | None:
        """Which rank of a node writes a parameter, as `local_rank`; None: every rank does."""
        return None if self._share is None else self._share.owners[self.params.index(param)]

    def publish(self) -> None:
        """After an optimizer step of a shared chunk: what this rank owns is there for the ranks of the node."""
        if self._low_dtype is not None:
            self._renew_copies()

    def _arrive(self) -> None:
        """Makes the compute stream wait for what has been fetched."""
        self._device.wait(self._fence)
        self._fence = None

    def _land_latest(self) -> None:
        """Waits for the upload before: it may still read what is written over now."""
        self._device.land(self._latest)

    def _looking(self) -> AbstractContextManager[None]:
        """To look at weights is no touch of them where they are watched for long, see [Note: Shadow copies]."""
        return nullcontext() if self._low_dtype is None else below_guard()

    def _renew_copies(self) -> None:
        with below_guard():
            shadows = [param.shadow for param in self.params if param.shadow is not None]
            outdated = [shadow for shadow in shadows if not shadow.is_current]
            if outdated:
                self._land_latest()
            for shadow in outdated:
                shadow.renew()

    def write_back(self) -> None:
        """Copies device parameters that the forward changed to the host: in place, or by a new `data`."""
        start = self._storage.data_ptr()
        with below_guard():  # Only descriptions are read; without it each costs a look at the class of the parameter.
            changed = [
                param
                for param in self.params
                if param.device_param._version != param.device_version
                or (param.device_param.data_ptr() != start + param.offset and param.device_param.numel())
            ]
        for param in changed:
            left = param.device_param.numel() and param.device_param.data_ptr() != start + param.offset
            if self._share is not None:
                raise RuntimeError(
                    f"{param.fqn!r} was changed in a forward, by each rank in its own way, and the ranks of this node "
                    'share it. Make its chunk resident (`num_persistent_chunks`), or set sharding="replicate".'
                )
            if param.shadow is not None:
                dtype = param.shadow.values.dtype
                raise RuntimeError(
                    f"{param.fqn!r} was changed in a forward and is streamed in {dtype}: the change would "
                    "lose precision. Make its chunk resident (`num_persistent_chunks`), or change it after the step."
                )
            self._device.land(self._device.download(param.device_param.detach(), param.host.data))
            if left:
                place = in_storage(self._storage, param.offset, param.host)
                place.copy_(param.device_param.detach())
                param.device_param.data = place
            param.device_version = param.device_param._version

    def detach(self) -> None:
        """Takes every hook off and releases the storage for good; the host parameters stay as they are."""
        for param in self.params:
            for hook in (*param.hooks, *param.mirrored.values()):
                hook.remove()
            param.hooks.clear()
            param.mirrored.clear()
            param.drop_gradient()
            if param.shadow is not None:
                param.shadow.forget_gradient()
        self.release()

    def _make_param(self, fqn: str, host: nn.Parameter, offset: int) -> OffloadedParam:
        whole = in_storage(self._storage, offset, dense_like(host), self._low_dtype or host.dtype)
        kind = DeviceParam if type(host) is nn.Parameter else type(host)
        kind = kind if self._low_dtype is None else low_precision_class(type(host))
        device_param: Any = torch.Tensor._make_subclass(kind, whole, host.requires_grad)
        device_param.__dict__.update(host.__dict__)
        param = OffloadedParam(
            fqn, host, device_param, offset, seen_version=host._version, device_version=device_param._version
        )
        if self._share is not None:
            param.ownership = Ownership(self._share.owns(self.plan.parameters.index(fqn)))
        if self._low_dtype is None:
            self._adopt(param, self._share is None or self._share.memory.fills)
            attach_companions(host, device_param, lambda begin, like: in_storage(self._storage, offset + begin, like))
        else:
            device_param.uses = uses = ParamUses(fqn, host, whole.device, whole.dtype)
            values = in_block(self._buffer, offset, whole, self._low_dtype)
            param.shadow = ShadowWeight(host, values, uses, param.owned)
            if self._share is not None:
                self._share.memory.adopt(host)
            param.pointer = host.data_ptr()
            self._device.note_host(host)
        return param

    def _adopt(self, param: OffloadedParam, fills: bool = True) -> None:
        """Copies the data of the host parameter into the chunk and points it there, at a storage of its own.

        Args:
            param: Of the parameter.
            fills: False: what lies in the chunk already is taken.
        """
        host = param.host
        if host.numel():
            data = in_block(self._buffer, param.offset, param.device_param, host.dtype)
            if fills:
                data.copy_(host.detach())
            host.data = data
        place_companions(host, lambda begin, like: in_block(self._buffer, param.offset + begin, like))
        param.pointer = host.data_ptr()

    def _rebind(self, param: OffloadedParam) -> None:
        """Follows a host parameter whose `data` was re-pointed (`param.data = other`)."""
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
        self._land_latest()
        with torch.inference_mode(False):  # The parameter outlives the evaluation that noticed.
            self._adopt(param)
        param.seen_version = -1  # Other values, although the version says nothing of it.


def make_chunks(
    model: nn.Module, plan: Plan, layout: ModelLayout, device: Device, ranks: RankMesh | None
) -> list[Chunk]:
    """Copy the weights of offloaded chunks into host memory of their own, or into memory that the ranks share.

    Args:
        model: Its parameters are pointed there.
        plan: Says which chunks are offloaded, and whether ranks share one copy.
        layout: What the model is made of.
        device: Where chunks are fetched to.
        ranks: Who trains together; None: a single rank.
    """
    parameters = dict(model.named_parameters())
    gathering = gathers_gradients(layout, plan.chunks)
    offloaded = [(chunk, gathers) for chunk, gathers in zip(plan.chunks, gathering, strict=True) if not chunk.resident]
    plans = tuple(chunk for chunk, _ in offloaded)
    shares: Sequence[Share | None] = [None] * len(plans)
    if ranks is not None and plan.sharding is Sharding.SHARD and plans:
        shares = share_chunks(plans, parameters, ranks, device.host)
    pairs = tqdm([*zip(offloaded, shares, strict=True)], "Placing weights in host memory", delay=2, leave=False)
    return [
        Chunk(chunk, [parameters[fqn] for fqn in chunk.parameters], device, share, gathers)
        for (chunk, gathers), share in pairs
    ]


def place_resident(model: nn.Module, plan: Plan, device: Device) -> None:
    """Bring resident parameters and all buffers to the device; objects keep their identity."""
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
            # Metrics and the like keep tensors that are no buffers and move them in a `to` of their own.
            module.to(target)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != target:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(target))
