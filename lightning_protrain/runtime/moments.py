"""Moments of 8 bits in host memory, and steps that go through them tile by tile.

[Note: Passes]
The library makes four copies of a parameter in float32 and looks each element up on its own. Here a step is some thirty
passes of PyTorch over a tile that stays in the cache: moments from codes, two at a time by a table of all pairs; the
library's own rule, operation by operation, so that every rounding is its; and the codes of the new moments by a table,
see [Note: Quantiser] in `codes`.

[Note: Odd tiles]
Blocks of nothing but zeros, infinities and what is not a number leave the table. Such a tile goes through two more
passes, which put its elements where the library does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_protrain.runtime.kernels import without_lock

# Elements that share one scale.
BLOCK = 256
# Elements of a tile, whole blocks: smaller ones fit a smaller cache, but the calls cost more than they save.
TILE = 1 << 17
# Float32 of scratch for each element of a tile: two moments, two rows of places, a cast gradient.
_ROWS = 5
# States of each rule that is known here.
STATES = {"adam": 2, "lion": 1, "momentum": 1, "rmsprop": 1, "adagrad": 1}
PLACES = 2 * 65535 + 1


class Tables(NamedTuple):
    """What codes mean.

    Attributes:
        values: Of each code, (256,), float32.
        pairs: Of two codes as they lie in memory, two values in an integer, (65536,), int64.
        codes: Of each place, see [Note: Quantiser] in `codes`, (131071,), uint8.
    """

    values: Tensor
    pairs: Tensor
    codes: Tensor


class Settings(NamedTuple):
    """The hyperparameters of one step of one parameter, as TorchScript reads them fastest.

    Attributes:
        size: What the update is multiplied by.
        beta1: Of the first moment.
        beta2: Of the second one.
        eps: Added to the root.
        root: What the root is divided by.
        decay: What the weight is multiplied by first.
        weight_decay: What of the weight is added to the gradient.
        first: Whether it is the first step.
    """

    size: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    root: float = 1.0
    decay: float = 1.0
    weight_decay: float = 0.0
    first: bool = False

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], step: int) -> Settings:
        """Those of a rule of `STATES`.

        Args:
            name: Of the rule.
            config: What the optimizer says for the parameter.
            step: Its number, from 1.
        """
        lr, weight_decay = config["lr"], config["weight_decay"]
        beta1, beta2 = config["betas"][0], config["betas"][1]
        if name == "adam":
            decay = 1.0 - lr * weight_decay if weight_decay > 0.0 else 1.0
            return cls(-lr / (1.0 - beta1**step), beta1, beta2, config["eps"], math.sqrt(1.0 - beta2**step), decay)
        if name == "lion":
            return cls(-lr, beta1, beta2, decay=1.0 - lr * weight_decay if weight_decay > 0.0 else 1.0)
        return cls(-lr, beta1, beta2, config["eps"], weight_decay=weight_decay, first=step == 1)


class Scratch:
    """Memory for one tile, of one thread."""

    def __init__(self, tile: int) -> None:
        # Not the default: `precision="bf16-true"` changes that while the model computes.
        memory = torch.empty(_ROWS, tile, dtype=torch.float32)
        values, places = memory[:2].view(-1), memory[2:4].view(-1)
        self.floats = [values, places, memory[4], torch.empty(2 * (tile // BLOCK), dtype=torch.float32)]
        self.integers = [places.view(torch.int32), places.view(torch.int64), values.view(torch.int64)]


class Cut(NamedTuple):
    """Scratch for tiles of N elements of S states in blocks of E, cut once for many of them.

    Attributes:
        rows: Each state, (N,).
        words: Each state, two elements in an integer, (N / 2,), int64; none behind the last whole block.
        parts: Each state, (N / E, E).
        blocks: All states, (S, N / E, E).
        scale: Of all states, (S, N / E).
        scales: Of each state, (N / E,).
        factors: The same, (S, N / E, 1).
        spare: (N,), where the places of the last state are.
        spare_part: (N / E, E).
        other: (N,), where the places of the first of two states are.
        cast: (N,).
        all_places: Places of all states, (S, N), int32.
        places: Of each state, (N,), int32.
        halves: Places of pairs, (N / 2,), int64.
    """

    rows: list[Tensor]
    words: list[Tensor]
    parts: list[Tensor]
    blocks: Tensor
    scale: Tensor
    scales: list[Tensor]
    factors: Tensor
    spare: Tensor
    spare_part: Tensor
    other: Tensor
    cast: Tensor
    all_places: Tensor
    places: list[Tensor]
    halves: Tensor


class Moments(NamedTuple):
    """The states of one parameter.

    Attributes:
        codes: Of each state, flat, (N,), uint8.
        scales: Of each state, the largest of each block, (N / 256,), float32.
        tables: Of each state.
    """

    codes: list[Tensor]
    scales: list[Tensor]
    tables: list[Tables]


def step(
    name: str,
    tensors: list[Tensor],
    moments: Moments,
    settings: Settings,
    scratch: Scratch,
    part: tuple[int, int],
    clip: tuple[list[float], list[Tensor]],
) -> None:
    """Steps some elements of a parameter, see [Note: Passes].

    Args:
        name: The rule, one of `STATES`.
        tensors: Weight, gradient, and the copy of the new weight if there is one: flat, (N,).
        moments: Their states.
        settings: Their hyperparameters.
        scratch: Of the thread.
        part: The first element, and the one behind the last: multiples of `BLOCK`, or the end.
        clip: What is done to the gradient first, see `Clip.arguments`.
    """
    words = [code[: code.numel() // BLOCK * BLOCK].view(torch.uint16) for code in moments.codes]
    pairs, values, codes = ([table[at] for table in moments.tables] for at in (1, 0, 2))
    compiled()(
        name, tensors, moments.codes, words, moments.scales, pairs, values, codes, scratch.floats, scratch.integers,
        part[0], part[1], settings, clip[0], clip[1],
    )  # fmt: skip


@cache
def compiled() -> Callable[..., None]:
    """The walk over tiles, which needs no Python's lock."""
    return without_lock(_walk)


def _walk(
    name: str,
    tensors: list[Tensor],
    codes: list[Tensor],
    words: list[Tensor],
    scales: list[Tensor],
    pairs: list[Tensor],
    values: list[Tensor],
    places: list[Tensor],
    floats: list[Tensor],
    integers: list[Tensor],
    begin: int,
    end: int,
    settings: Settings,
    bounds: list[float],
    coefficients: list[Tensor],
) -> None:
    """In the part of Python that TorchScript knows, see [Note: Walk] in `kernels`."""
    states = len(codes)
    while begin < end:
        # Whole tiles first, then the other whole blocks, then what is left.
        count = min(floats[2].numel(), end - begin)
        if count > 256:
            count -= count % 256
        each = min(count, 256)
        number = (end - begin) // count
        cut = _cut(floats, integers, states, count, each)
        # All views of a tensor at once: cut one by one, they would cost twice as much.
        weights = [tensor.narrow(0, begin, number * count).split(count) for tensor in tensors]
        code = [tensor.narrow(0, begin, number * count).split(count) for tensor in codes]
        scale = [tensor.narrow(0, begin // 256, number * (count // each)).split(count // each) for tensor in scales]
        pair = count // 2 if each == 256 else 0
        half = [tensor.narrow(0, begin // 2 if pair else 0, number * pair).split(max(pair, 1)) for tensor in words]
        for at in range(number):
            weight, gradient = weights[0][at], weights[1][at]
            if gradient.dtype != weight.dtype:
                gradient = cut.cast.copy_(gradient) if weight.dtype == torch.float32 else gradient.to(weight.dtype)
            for bound in bounds:
                gradient.clamp_min_(-bound)
                gradient.clamp_max_(bound)
            for coefficient in coefficients:
                gradient.mul_(coefficient)
            for k in range(states):
                if pair:
                    cut.halves.copy_(half[k][at])
                    torch.index_select(pairs[k], 0, cut.halves, out=cut.words[k])
                else:
                    cut.places[0].copy_(code[k][at])
                    torch.index_select(values[k], 0, cut.places[0], out=cut.rows[k])
                cut.scales[k].copy_(scale[k][at])
            cut.blocks.mul_(cut.factors)
            _update(name, weight, gradient, cut, settings)
            if len(tensors) > 2:
                weights[2][at].copy_(weight)
            odd = _largest(cut, states > 1)
            for k in range(states):
                scale[k][at].copy_(cut.scales[k])
            _quotients(cut, odd)
            cut.all_places.copy_(cut.blocks)
            for k in range(states):
                torch.index_select(places[k], 0, cut.places[k], out=code[k][at])
        begin += number * count


def _cut(floats: list[Tensor], integers: list[Tensor], states: int, count: int, each: int) -> Cut:
    """Scratch for tiles of `count` elements in blocks of `each`."""
    tile, blocks, half = floats[2].numel(), count // each, count // 2 if each == 256 else 0
    both = floats[0].narrow(0, 0, states * count).view(states, blocks, each)
    scale = floats[3].narrow(0, 0, states * blocks).view(states, blocks)
    index = integers[0].narrow(0, 0, states * count).view(states, blocks, each)
    spare = floats[1].narrow(0, tile, count)
    return Cut(
        rows=[floats[0].narrow(0, k * count, count) for k in range(states)],
        words=[integers[2].narrow(0, k * half, half) for k in range(states)],
        parts=[both[k] for k in range(states)],
        blocks=both,
        scale=scale,
        scales=[scale[k] for k in range(states)],
        factors=scale.unsqueeze(2),
        spare=spare,
        spare_part=spare.view(blocks, each),
        other=floats[1].narrow(0, 0, count),
        cast=floats[2].narrow(0, 0, count),
        all_places=index,
        places=[integers[0].narrow(0, k * count, count) for k in range(states)],
        halves=integers[1].narrow(0, 0, half),
    )


def _update(name: str, weight: Tensor, gradient: Tensor, cut: Cut, settings: Settings) -> None:
    """The rule of the library, operation by operation."""
    first, spare, size = cut.rows[0], cut.spare, settings.size
    beta1, beta2 = settings.beta1, settings.beta2
    low = weight.dtype != torch.float32
    if gradient.dtype != torch.float32:
        gradient = cut.cast.copy_(gradient)
    whole = cut.other.copy_(weight) if low else weight
    if settings.decay != 1.0:
        whole.mul_(settings.decay)
    if name == "adam":
        second = cut.rows[1]
        first.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        torch.sqrt(second, out=spare)
        spare.div_(settings.root).add_(settings.eps)
        whole.addcdiv_(first, spare, value=size)
    elif name == "lion":
        torch.mul(first, beta1, out=spare)
        spare.add_(gradient.mul(1.0 - beta1))
        whole.add_(spare.sign_(), alpha=size)
        first.mul_(beta2).add_(gradient, alpha=1.0 - beta2)
    else:
        gradient = torch.add(gradient, whole, alpha=settings.weight_decay)
        if name == "momentum":
            if settings.first:
                first.copy_(gradient)
            else:
                first.mul_(beta1).add_(gradient)
            whole.add_(first, alpha=size)
        else:
            if name == "rmsprop":
                first.mul_(beta1).addcmul_(gradient, gradient, value=1.0 - beta1)
            else:
                first.addcmul_(gradient, gradient, value=1.0)
            torch.sqrt(first, out=spare)
            whole.addcdiv_(gradient, spare.add_(settings.eps), value=size)
    if low:
        weight.copy_(whole)


def _largest(cut: Cut, positive: bool) -> bool:
    """Largest values of blocks; whether a tile is an odd one, see [Note: Odd tiles].

    Args:
        cut: Its states; their largest values are written to `scale`.
        positive: Whether the last state has none that are negative.
    """
    for k in range(len(cut.parts)):
        if k + 1 == len(cut.parts) and positive:
            torch.amax(cut.parts[k], [1], False, out=cut.scales[k])
        else:
            torch.abs(cut.parts[k], out=cut.spare_part)
            torch.amax(cut.spare_part, [1], False, out=cut.scales[k])
    low, high = torch.aminmax(cut.scale)
    # The reciprocal of what is smaller would be infinite.
    odd = not (float(low) >= 2.9387359e-39 and float(high) < math.inf)
    if odd:
        known = torch.nan_to_num(cut.blocks, 0.0, math.inf, -math.inf)
        torch.amax(known.abs_(), [2], False, out=cut.scale)
    return odd


def _quotients(cut: Cut, odd: bool) -> None:
    """Places of all elements, as floats; overwrites `scale`.

    A quotient is at most one and an ulp, and adding one rounds that to two.
    """
    cut.scale.reciprocal_()
    cut.blocks.mul_(cut.factors)
    if odd:
        torch.fmax(cut.blocks, torch.full([], -1.0, dtype=torch.float32), out=cut.blocks)
        torch.fmin(cut.blocks, torch.full([], 1.0, dtype=torch.float32), out=cut.blocks)
    cut.blocks.add_(1.0).mul_(65535.0)


def quantise(given: Tensor, tables: Tables, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and largest values of blocks, as the walk makes them.

    Args:
        given: Whole blocks, or less than one, (N,).
        tables: What codes mean.
        positive: Whether none is negative.
    """
    each = min(BLOCK, given.numel())
    scratch = Scratch(max(given.numel(), BLOCK))
    cut = _cut(scratch.floats, scratch.integers, 1, given.numel(), each)
    cut.rows[0].copy_(given)
    odd = _largest(cut, positive)
    scales = cut.scales[0].clone()
    _quotients(cut, odd)
    return torch.index_select(tables.codes, 0, cut.rows[0].int()), scales
