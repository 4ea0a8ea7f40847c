"""Functions of `torch.cuda` and its neighbours that a PyTorch without CUDA lacks."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.storage
import torch.utils._device
from torch.distributed import distributed_c10d
from torch.nn import functional as F

NAME, CAPABILITY = "Stand-in GPU", (8, 9)


def install(device: ModuleType, number: int, nbytes: int) -> None:
    """Make PyTorch see `number` devices of `nbytes` each."""
    logging.disable(logging.WARNING)  # Kernels that could be faster are not asked for.
    with contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401  It then has its kernels for the CPU, which the device runs, too.
    logging.disable(logging.NOTSET)
    device.set_devices(number, nbytes)
    _put(torch.cuda, **_devices(device, number, nbytes), **_streams(device), **_memory(device, nbytes))
    _put(torch.cuda, **_random(device, number))
    _put(torch.cuda.random, **_random(device, number))
    _put(torch.cuda.streams, **_streams(device))
    _put(torch.cuda.memory, **_memory(device, nbytes))
    torch.version.cuda = torch.version.cuda or "12.9"
    torch.Tensor.record_stream = lambda tensor, stream: device.record_stream(tensor, stream)  # type: ignore[method-assign]
    _storages(device)
    _attention()
    _process_groups(device)


def _put(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


def _devices(device: ModuleType, number: int, nbytes: int) -> dict[str, Any]:
    index = functools.partial(_index, device)

    class On:
        """`torch.cuda.device`."""

        def __init__(self, given: Any) -> None:
            self.idx = -1 if given is None else index(given)

        def __enter__(self) -> None:
            self.before = device.exchange_device(self.idx)

        def __exit__(self, *error: object) -> None:
            device.exchange_device(self.before)

    def select(given: Any) -> None:
        if index(given) >= number:
            raise RuntimeError("CUDA error: invalid device ordinal")
        device.exchange_device(index(given))

    def properties(given: Any = None) -> SimpleNamespace:
        if index(given) >= number:
            raise AssertionError("Invalid device id")
        major, minor = CAPABILITY
        pci = {"pci_bus_id": index(given), "pci_device_id": 0, "pci_domain_id": 0}
        sizes = {"L2_cache_size": 2**26, "shared_memory_per_block": 2**15, "regs_per_multiprocessor": 2**16}
        threads = {"multi_processor_count": 128, "warp_size": 32, "max_threads_per_multi_processor": 1536}
        return SimpleNamespace(
            name=NAME, total_memory=nbytes, major=major, minor=minor, is_integrated=False, **pci, **sizes, **threads
        )

    fixed: dict[str, Any] = {"is_available": True, "device_count": number, "is_initialized": True, "init": None}
    fixed |= {"_is_compiled": True, "_lazy_init": None, "_is_in_bad_fork": False, "is_current_stream_capturing": False}
    fixed |= {"get_device_capability": CAPABILITY, "get_arch_list": ["sm_89"], "is_bf16_supported": True}
    fixed |= {"_sleep": None}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 0 if device.pin(address, size) else 712,
        cudaHostUnregister=lambda address: 0 if device.unpin(address) else 713,
    )
    torch.cuda.nccl.version = lambda: (2, 27, 5)  # type: ignore[assignment]
    _put(torch._C, _cuda_exchangeDevice=device.exchange_device, _cuda_maybeExchangeDevice=device.exchange_device)
    _put(torch._C, _cuda_getDevice=device.device, _cuda_getDeviceCount=lambda: number, _cuda_isInBadFork=False)
    _put(torch._C, _cuda_getCurrentRawStream=device.stream)
    _put(torch._C, _cuda_set_sync_debug_mode=device.set_wait_mode, _cuda_get_sync_debug_mode=device.wait_mode)
    return {name: _constant(value) for name, value in fixed.items()} | {
        "current_device": device.device,
        "set_device": select,
        "synchronize": lambda given=None: device.synchronize(index(given)),
        "device": On,
        "device_of": lambda tensor: On(tensor.device if tensor.is_cuda else None),
        "_lazy_call": lambda call, **options: call(),
        "get_device_properties": properties,
        "get_device_name": lambda given=None: properties(given).name,
        "can_device_access_peer": lambda one, other: one != other,
        "cudart": lambda: cudart,
        "_initialized": True,
    }


def _index(device: ModuleType, given: Any = None) -> int:
    """Return the index of a device given as torch.device, name or number; None and -1: the current one."""
    index = given if isinstance(given, int) else None if given is None else torch.device(given).index
    return int(device.device()) if index is None or index < 0 else index


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _streams(device: ModuleType) -> dict[str, Any]:
    index = functools.partial(_index, device)

    class Event:
        """An event; the first `query` finds that a GPU is not there yet, unless the host has waited for it."""

        def __init__(self, enable_timing: bool = False, **options: Any) -> None:
            self.enable_timing, self.seconds = enable_timing, 0.0
            self.point: list[int] = []
            self.asked = False

        def record(self, stream: Any = None) -> None:
            stream = stream or current()
            self.seconds, self.asked = time.perf_counter(), False
            self.point = device.record(stream.device_index, stream.stream_id)

        def query(self) -> bool:
            if not (self.asked or device.host_knows(self.point)):
                self.asked = True
                return False
            self.synchronize()
            return True

        def wait(self, stream: Any = None) -> None:
            stream = stream or current()
            device.wait(stream.device_index, stream.stream_id, self.point)

        def synchronize(self) -> None:
            device.host_wait(self.point)

        def elapsed_time(self, end: Event) -> float:
            if not (self.enable_timing and end.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            return (end.seconds - self.seconds) * 1000

    class Stream:
        def __init__(self, given: Any = None, priority: int = 0, number: int | None = None) -> None:
            self.device_index, self.priority = index(given), priority
            self.stream_id = self.cuda_stream = device.new_stream() if number is None else number
            self.device = torch.device("cuda", self.device_index)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def query(self) -> bool:
            self.synchronize()
            return True

        def wait_event(self, event: Event) -> None:
            event.wait(self)

        def wait_stream(self, stream: Stream) -> None:
            self.wait_event(stream.record_event())

        def synchronize(self) -> None:
            self.record_event().synchronize()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and hash(self) == hash(other)

        def __hash__(self) -> int:
            return hash((self.device_index, self.stream_id))

    def current(given: Any = None) -> Stream:
        return Stream(index(given), number=device.stream(index(given)))

    class Within:
        """`torch.cuda.stream`: selects a stream and its device."""

        def __init__(self, stream: Stream | None) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.before = device.exchange_device(self.stream.device_index)
                self.last = device.exchange_stream(self.stream.device_index, self.stream.stream_id)

        def __exit__(self, *error: object) -> None:
            if self.stream is not None:
                device.exchange_stream(self.stream.device_index, self.last)
                device.exchange_device(self.before)

    return {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": Within,
        "stream": Within,
        "current_stream": current,
        "default_stream": lambda given=None: Stream(index(given), number=0),
        "set_stream": lambda stream: device.exchange_stream(stream.device_index, stream.stream_id),
    }


def _memory(device: ModuleType, nbytes: int) -> dict[str, Any]:
    index = functools.partial(_index, device)

    def allocated(given: Any = None) -> int:
        return int(device.allocated(index(given)))

    def peak(given: Any = None) -> int:
        return int(device.peak(index(given)))

    def stats(given: Any = None) -> dict[str, int]:
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        sizes = {f"{kind}.all.current": allocated(given) for kind in kinds}
        return {"num_alloc_retries": 0, "num_ooms": 0} | sizes | {f"{kind}.all.peak": peak(given) for kind in kinds}

    return {
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda given=None: device.reset_peak(index(given)),
        "memory_stats": stats,
        "mem_get_info": lambda given=None: (nbytes - allocated(given), nbytes),
        "empty_cache": _constant(None),
        "set_per_process_memory_fraction": lambda part, given=None: device.limit(index(given), int(part * nbytes)),
    }


def _random(device: ModuleType, number: int) -> dict[str, Any]:
    generators = tuple(device.default_generator(each) for each in range(number))

    def state(given: Any = "cuda") -> torch.Tensor:
        return generators[_index(device, given)].get_state()

    def set_state(value: torch.Tensor, given: Any = "cuda") -> None:
        generators[_index(device, given)].set_state(value.cpu())

    return {
        "default_generators": generators,
        "get_rng_state": state,
        "set_rng_state": set_state,
        "get_rng_state_all": lambda: [state(each) for each in range(number)],
        "set_rng_state_all": lambda values: [set_state(value, each) for each, value in enumerate(values)],
        "manual_seed": lambda seed: generators[device.device()].manual_seed(int(seed)),
        "manual_seed_all": lambda seed: [each.manual_seed(int(seed)) for each in generators],
        "initial_seed": lambda: generators[device.device()].initial_seed(),
    }


def _storages(device: ModuleType) -> None:
    """Let Python make, copy and resize storages of the device."""
    kind: Any = torch.UntypedStorage
    new, resize, copy, move = kind.__new__, kind.resize_, kind.copy_, torch._utils._to

    def on_device(given: Any) -> bool:
        return given is not None and torch.device(given).type == "cuda"

    def of(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def new_(cls: Any, *args: Any, **options: Any) -> Any:
        if not on_device(options.get("device")):
            return new(cls, *args, **options)
        return torch.empty(*args, dtype=torch.uint8, device=options["device"]).untyped_storage()

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if not on_device(storage.device):
            return resize(storage, nbytes)
        device.resize_storage(of(storage), nbytes)
        return storage

    def copy_(storage: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: Any = None) -> Any:
        if not on_device(storage.device) and not on_device(source.device):
            return copy(storage, source, non_blocking)
        of(storage).copy_(of(source))
        return storage

    def to(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if not on_device(device) or storage.device == device:
            return move(storage, device, non_blocking)
        return new_(kind, storage.nbytes(), device=device).copy_(storage.untyped())

    kind.__new__, kind.resize_, kind.copy_ = new_, resize_, copy_
    _put(torch._utils, _to=to)
    _put(torch.storage, _to=to)


def _attention() -> None:
    """Compute attention of the device by its formula; PyTorch looks for fused kernels of CUDA, which are not there."""
    real = F.scaled_dot_product_attention

    @functools.wraps(real)
    def attention(query: Any, key: Any, value: Any, *given: Any, **options: Any) -> Any:
        if type(query) is not torch.Tensor or not query.is_cuda:
            return real(query, key, value, *given, **options)
        options |= dict(zip(("attn_mask", "dropout_p", "is_causal"), given, strict=False))
        return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, **options)[0]

    F.scaled_dot_product_attention = attention
    torch._C._nn.scaled_dot_product_attention = attention


def _process_groups(device: ModuleType) -> None:
    """Add NCCL, whose collectives gloo computes."""

    class Options(SimpleNamespace):
        _timeout: Any = None

    class ProcessGroupNCCL(device.Nccl):  # type: ignore[misc,name-defined]
        def __init__(self, store: dist.Store, rank: int, size: int, options: Any = None, timeout: Any = None) -> None:
            limit = timeout or options._timeout
            super().__init__(dist.ProcessGroupGloo(store, rank, size, timeout=limit), limit.total_seconds())

    ProcessGroupNCCL.Options = Options
    initialise = distributed_c10d.init_process_group

    @functools.wraps(initialise)
    def init_process_group(*args: Any, device_id: Any = None, **options: Any) -> None:
        initialise(*args, **options)  # A group of a device would be split by NCCL.

    for module in (distributed_c10d, dist):
        _put(module, ProcessGroupNCCL=ProcessGroupNCCL, is_nccl_available=lambda: True)
        _put(module, init_process_group=init_process_group)
    _put(distributed_c10d, _NCCL_AVAILABLE=True)
    _put(torch._C._distributed_c10d, ProcessGroupNCCL=ProcessGroupNCCL)
