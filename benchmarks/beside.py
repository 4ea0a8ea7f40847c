"""The host's optimizer step beside a thread that trains on the device: how long both take, by the number of threads.

Part "host beside" of `benchmarks.gpu`. Kernels of blocks are launched from Python, with recomputation, while the worker
steps weights of 128 MiB and more, one after the other. An optimizer step whose threads take the cores or Python's lock
of the launching thread makes the loop slower.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_protrain import SplitAdamW
from lightning_protrain.device.device import Device, open_device
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, hyperparameters
from lightning_protrain.runtime.optim.threads import StepThreads

# Numbers of threads that step, which share the cores, and seconds of each measurement.
NUMBERS, SECONDS = (8, 5, 3, 2, 1), 1.5
OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[list[nn.Parameter]], Optimizer]]] = {
    "AdamW": (torch.float32, lambda weights: AdamW([{"params": weights, "fused": True}], lr=1e-5)),
    "SplitAdamW, 8 bits": (torch.bfloat16, lambda weights: SplitAdamW(weights, lr=1e-5, moments="8bit")),
}


def beside(device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return by optimizer and number of threads the rates of the host alone and beside the loop, and the loop's factor.

    Rates are in elements per second. The factor is the time of an iteration beside the host's step over that alone.

    Args:
        device: `"cuda"`, or `"cpu"` with tiny sizes.
    """
    opened = open_device(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"), print)
    try:
        iterate = _loop(opened)
        alone = _seconds(iterate, SECONDS)
        return {name: _of_optimizer(opened, name, iterate, alone) for name in OPTIMIZERS}
    finally:
        opened.close()


def _loop(device: Device) -> Callable[[], None]:
    """Return a forward and a backward of recomputed blocks, which waits for the device."""
    small = device.torch_device.type == "cpu"
    hidden, tokens = (64, 16) if small else (2560, 16_384)
    parts = [nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, hidden), nn.GELU()) for _ in range(12)]
    blocks = [block.to(device.torch_device, torch.bfloat16) for block in parts]
    given = torch.randn(tokens, hidden, device=device.torch_device, dtype=torch.bfloat16)

    def iterate() -> None:
        out: Tensor = given
        for block in blocks:
            for _ in range(4):
                out = out + checkpoint(block, out, use_reentrant=False)
        out.square().mean().backward()
        device.synchronize()

    iterate()
    return iterate


def _of_optimizer(device: Device, name: str, iterate: Callable[[], None], alone: float) -> dict[str, dict[str, float]]:
    dtype, make = OPTIMIZERS[name]
    numel = 1 << 16 if device.torch_device.type == "cpu" else 1 << 25

    def tensor(dtype: torch.dtype) -> Tensor:
        return device.host.empty_like(torch.empty(numel, dtype=dtype)).normal_(0.0, 0.02)

    weights = [nn.Parameter(tensor(dtype)) for _ in range(4)]
    gradients = [tensor(torch.bfloat16) for _ in weights]
    optimizer = make(weights)
    group = hyperparameters(optimizer.param_groups[0])
    updates = [
        ParamUpdate(weight, gradient, gradient if dtype == torch.float32 else None)
        for weight, gradient in zip(weights, gradients, strict=True)
    ]
    found = {}
    for number in NUMBERS:
        cores = device.worker.threads or 1
        split = PropertyMock(return_value=(min(number, cores), max(cores // number, 1)))
        with patch.object(StepThreads, "split", split), closing(HostStep(cores)) as host:
            given = [(group, [update]) for update in updates]
            step = functools.partial(_step, device, host, optimizer, given)
            step()  # Makes the states.
            rate = len(weights) * numel / _seconds(step, SECONDS / 2)
            ended, steps = threading.Event(), list[float]()
            feeder = threading.Thread(target=_feed, args=(step, steps, ended))
            feeder.start()
            factor = _seconds(iterate, SECONDS) / alone
            ended.set()
            feeder.join()
            took = sum(steps) / len(steps)
            found[str(number)] = {"alone": rate, "beside": len(weights) * numel / took, "loop": factor}
    return found


def _step(
    device: Device, host: HostStep, optimizer: Optimizer, given: Iterable[tuple[dict[str, Any], list[ParamUpdate]]]
) -> None:
    for part in given:
        device.worker.submit(functools.partial(host.step, optimizer, [part])).result()


def _feed(step: Callable[[], None], steps: list[float], ended: threading.Event) -> None:
    while not (steps and ended.is_set()):
        began = time.perf_counter()
        step()
        steps.append(time.perf_counter() - began)


def _seconds(call: Callable[[], object], least: float) -> float:
    """Return the mean time of calls over at least `least` seconds."""
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < least:
        call()
        calls += 1
    return passed / calls
