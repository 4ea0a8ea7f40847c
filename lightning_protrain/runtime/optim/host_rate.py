"""Measures how long an optimizer's step takes on the host, beside PyTorch's fused AdamW.

PyTorch has fused CPU kernels for a few optimizers. Others are loops over many operations (NAdam takes 5 times as long
for each element), or compute something else (Muon multiplies matrices: 40 to 270 times). So the optimizer's host step
runs on scratch weights of the shapes that it trains. Large weights are measured at a smaller size.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from math import prod
from typing import Any

import torch
from torch import Tensor, get_num_threads, nn
from torch.optim import LBFGS, AdamW, Optimizer, SparseAdam
from torch.utils.flop_counter import FlopCounterMode

from lightning_protrain.device.host import HostWorker
from lightning_protrain.progress import waiting
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, kernel_of, trial_of

# Elements of a scratch weight. The step of a large weight gets new pages from the system for each temporary. With fewer
# than 8 million elements, the C library would reuse memory, and the step would look faster. Matrix products hide this.
MOST_ELEMENTS, MOST_OF_PRODUCTS = 1 << 24, 1 << 22
# A step with at least this many FLOPs for each element multiplies matrices: the number grows with the sides of the
# matrix.
PRODUCTS = 64
# Shapes to measure for each group, those with the most elements first; scratch weights of a small shape, which are
# stepped together; timed steps, of which the fastest counts.
MOST_SHAPES, MOST_WEIGHTS, REPEATS = 3, 64, 4
# Measurements of this process, because many models, depths and lengths are planned with one optimizer.
_MEASURED: dict[tuple[object, ...], float] = {}
_clock = time.perf_counter


def host_slowdown(optimizers: Iterable[Optimizer], worker: HostWorker) -> float:
    """Return the time of a host step for each element in multiples of fused AdamW's, averaged over all elements.

    An optimizer that cannot be measured (it needs a closure, or raises) counts as AdamW; if it raises, warn.

    Args:
        optimizers: Optimizers of the run; neither they nor random states change.
        worker: Steps offloaded parameters; the measurements run on it.
    """
    total, elements = 0.0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts = Counter[tuple[int, ...]]()
            for parameter in group["params"]:
                counts[tuple(parameter.shape)] += parameter.numel()
            numel = counts.total()
            if numel:
                total += numel * _slowdown(optimizer, group, counts, worker)
                elements += numel
    return total / elements if elements else 1.0


def _slowdown(
    optimizer: Optimizer, group: Mapping[str, Any], counts: Counter[tuple[int, ...]], worker: HostWorker
) -> float:
    if kernel_of(optimizer, group, fuse=True) is not None or isinstance(optimizer, LBFGS | SparseAdam):
        return 1.0
    some = counts.most_common(MOST_SHAPES)

    def measure() -> float:
        with torch.random.fork_rng(devices=()):
            adamw = AdamW([torch.empty(1)], fused=True)
            known = _seconds(adamw, adamw.param_groups[0], (MOST_ELEMENTS,), torch.float32)
            dtype = group["params"][0].dtype
            took = sum(share * _full_seconds(optimizer, group, shape, dtype) for shape, share in some)
        return took / sum(share for _, share in some) / known

    with waiting(f"Measuring the step of {type(optimizer).__name__} on the host"):
        slowdowns: list[float] = []
        job = worker.submit(lambda: slowdowns.append(measure()))
        error = job.exception()
    if error is not None:
        warnings.warn(
            f"The host step of {type(optimizer).__name__} is planned as AdamW's, because a step of it on scratch "
            f"weights raised {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return 1.0
    return slowdowns[0]


def _full_seconds(optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Return the seconds per element of a weight; for large matrix products, extrapolated from two smaller sizes."""
    scale = _scale(shape, MOST_OF_PRODUCTS)
    part = _divided(shape, 2 * scale)

    def flops() -> float:
        with FlopCounterMode(display=False) as counted:
            next(_times(optimizer, group, part, dtype, 1))
        return counted.get_total_flops()

    if _once((flops.__name__, *_kind(optimizer, group), part, dtype), flops) < PRODUCTS * prod(part):
        return _seconds(optimizer, group, _divided(shape, _scale(shape, MOST_ELEMENTS)), dtype)
    seconds = _seconds(optimizer, group, _divided(shape, scale), dtype)
    if scale == 1:
        return seconds
    return seconds + 2 * (scale - 1) * max(seconds - _seconds(optimizer, group, part, dtype), 0.0)


def _scale(shape: tuple[int, ...], most: int) -> int:
    """Return the power of two by which both sides are divided so that at most `most` elements are left."""
    scale = 1
    while prod(_divided(shape, scale)) > most:
        scale *= 2
    return scale


def _divided(shape: tuple[int, ...], scale: int) -> tuple[int, ...]:
    """Return the shape with the last two sides divided by `scale`, or the only side by its square; at least 1.

    Of stacked matrices, such as experts, one is left.
    """
    if len(shape) < 2:
        return tuple(max(side // scale**2, 1) for side in shape)
    return (*(1 for _ in shape[:-2]), *(max(side // scale, 1) for side in shape[-2:]))


def _seconds(optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Return the seconds of a step for each element of weights of one shape."""
    number = min(max(MOST_OF_PRODUCTS // max(prod(shape), 1), 1), MOST_WEIGHTS)

    def fastest() -> float:
        times = _times(optimizer, group, shape, dtype, number)
        return min(next(times) for _ in range(REPEATS)) / (number * max(prod(shape), 1))

    return _once((fastest.__name__, *_kind(optimizer, group), shape, dtype), fastest)


def _once(key: tuple[object, ...], measure: Callable[[], float]) -> float:
    if key not in _MEASURED:
        _MEASURED[key] = measure()
    return _MEASURED[key]


def _kind(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all that the time of a step depends on, beside the weights: the class, its options, and the threads."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    fixed = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}
    arguments = getattr(getattr(optimizer, "args", None), "__dict__", ())  # Of bitsandbytes.
    return type(optimizer), repr(options), repr(fixed), repr(arguments), get_num_threads()


def _times(
    optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, number: int
) -> Iterator[float]:
    """Step weights of one shape with states of their own, and return an iterator of times of further steps, seconds."""
    weights: list[Tensor] = [nn.Parameter(torch.full(shape, 0.01, dtype=dtype)) for _ in range(number)]
    for weight in weights:
        weight.grad = torch.randn(shape).to(dtype)
    trial = trial_of(optimizer)
    trial.param_groups = [{**group, "params": weights}]
    vars(trial).update(initialized=False)  # Of bitsandbytes: its first step applies overrides.
    updates = [(group, [ParamUpdate(weight, weight.grad) for weight in weights if weight.grad is not None])]

    def timed() -> float:
        began = _clock()
        host.step(trial, updates)
        return _clock() - began

    with closing(HostStep()) as host:
        timed()  # It makes the states.
        yield from iter(timed, None)
