"""8-bit block-wise optimizer steps in tiles: codebooks, states and rules.

**Quantising.** bitsandbytes keeps each moment as an 8-bit code: the nearest of 256 values, after a division by the
largest element of its block (Dettmers et al., arXiv 2110.02861, section 2). Its CPU code looks up one element at a
time. This module works on whole tiles and gets the same bits from a table. The *place* of a code in the table is the
quotient plus one, times 65535 and truncated to an integer. The table is built by asking the library for the codes at
both ends of each place. Its quantiser is monotonic, so all elements in between have the same code. The table is then
tested at the places where codes change, in blocks of many scales. If bitsandbytes gives other codes than the table
(another version, another CPU), the table is dropped and bitsandbytes runs the step itself.

**Passes.** The library makes four float32 copies of a parameter and looks up each element on its own. Here a step is
some thirty passes of PyTorch over a tile that stays in the cache. First a table of all pairs of codes gives the
moments, two at a time. Then the library's own rule runs operation by operation, so that each operation rounds like the
library. At last the table of places gives the codes of the new moments. Blocks with only zeros, infinities or NaN fall
outside of that table. A tile with such a block goes through two more passes, which give its elements the library's
codes.

**The library's step.** Some states and rules have no table (32-bit states, norms of whole parameters, derived classes),
so the library steps them itself. It makes several float32 copies of a parameter, gigabytes for an embedding. If its
rule works element by element, it therefore gets tiles of whole blocks. It would also replace weights and gradients that
are not contiguous by contiguous copies. Ours must stay in their chunk, so the library gets stand-ins for them.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.runtime.optim.fused import NO_CLIP, Clip


def without_lock(f):
    return f


def codebook_of(values: Tensor) -> Codebook | None:
    """Return the tables for codes that mean `values`; None: the library's quantiser does not fit them."""
    if values.device.type != "cpu" or values.dtype != torch.float32 or values.numel() != 256:
        return None
    return _tables(values.detach().contiguous().numpy().tobytes())


@cache
def _tables(content: bytes) -> Codebook | None:
    values = torch.frombuffer(bytearray(content), dtype=torch.float32)
    ascending = bool((values[1:] > values[:-1]).all())
    if not ascending:
        return None
    low = _lowest()
    high = torch.cat([low[1:] - 1, torch.tensor([_ORDER_OF_ONE])])
    at_low, at_high = (_codes_of(_from_order(order), values) for order in (low, high))
    if not torch.equal(at_low[high >= low], at_high[high >= low]):
        return None
    neighbours = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(-1, 2)
    pairs = values[neighbours.long()].contiguous().view(torch.int64).view(-1)
    tables = Codebook(values, pairs, at_low)
    return tables if _agrees(tables) else None


_ODD = [0.0, -0.0, 1e-45, -1e-40, 5e-41, 2e-39, 1.0, -3.0, 3e38, math.inf, -math.inf, math.nan]
# Floats from -1 to 1 are ordered by their bits; 0.0 has order 0.
_ORDER_OF_ONE = 0x3F800000


def _from_order(order: Tensor) -> Tensor:
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order < 0, -magnitude, magnitude)


@cache
def _lowest() -> Tensor:
    """Return the order (bits as an integer) of the least float that falls on each place, shape (PLACES,)."""
    low = torch.full((PLACES,), -_ORDER_OF_ONE)
    high = torch.full((PLACES,), _ORDER_OF_ONE)
    wanted = torch.arange(PLACES)
    while bool((low < high).any()):
        middle = torch.div(low + high, 2, rounding_mode="floor")
        reached = _from_order(middle).add_(1.0).mul_(65535.0).long() >= wanted
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return low


def _codes_of(quotients: Tensor, values: Tensor) -> Tensor:
    """Return the library's codes of elements in blocks whose largest element is one."""
    blocks = torch.nn.functional.pad(quotients, (0, -quotients.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    blocks = torch.nn.functional.pad(blocks, (1, 0), value=1.0)
    codes, _ = torch.ops.bitsandbytes.quantize_blockwise(blocks, values.clone(), BLOCK)
    return codes[:, 1:].reshape(-1)[: quotients.numel()].clone()


def _agrees(tables: Codebook) -> bool:
    """Return whether the tables give the library's bits at places where codes change, also in odd tiles."""
    generator = torch.Generator().manual_seed(0)
    changes = 1 + (tables.codes[1:] != tables.codes[:-1]).nonzero().view(-1)
    edges = _from_order(_lowest()[changes])[: BLOCK - 1]
    given = torch.ones(4096, BLOCK, dtype=torch.float32)
    given[:, 1 : 1 + edges.numel()] = edges
    given *= 10 ** (torch.rand(4096, 1, generator=generator, dtype=torch.float32) * 60 - 30)
    odd = torch.tensor(_ODD, dtype=torch.float32)
    for row in range(odd.numel()):
        given[row, : row + 1] = odd[: row + 1]
        given[-1 - row] = odd[row]
    codes, scale = torch.ops.bitsandbytes.quantize_blockwise(given, tables.values.clone(), BLOCK)
    found, scales = quantise(given.view(-1), tables)
    back = torch.ops.bitsandbytes.dequantize_blockwise(codes, scale, tables.values.clone(), BLOCK, torch.float32)
    own = tables.values[codes.long()] * scale[:, None]
    same = torch.equal(scales, scale) and torch.equal(own.view(torch.int32), back.view(torch.int32))
    return same and torch.equal(found, codes.view(-1))


# Elements of a block, which share one scale.
BLOCK = 256
# Elements of a tile, whole blocks: smaller tiles fit a smaller cache, but their calls cost more than that saves.
TILE = 1 << 17
# Float32 scratch for each element of a tile: two moments, two rows of places, a cast gradient.
_ROWS = 5
# Number of states of each rule that this module implements.
STATES = {"adam": 2, "lion": 1, "momentum": 1, "rmsprop": 1, "adagrad": 1}
PLACES = 2 * 65535 + 1


class Codebook(NamedTuple):
    """The values of codes, and the codes of values.

    Attributes:
        values: Value of each code, shape (256,), float32.
        pairs: Values of each pair of neighbouring codes, two float32 in one integer, shape (65536,), int64.
        codes: Code of each place, shape (PLACES,), uint8.
    """

    values: Tensor
    pairs: Tensor
    codes: Tensor


class Adam8bitSettings(NamedTuple):
    """The hyperparameters of one step of one parameter, in the form that TorchScript reads fastest.

    Attributes:
        size: Factor of the update.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Value added to the square root.
        root: Divisor of the square root.
        decay: Factor of the weight before the update.
        weight_decay: Fraction of the weight that is added to the gradient.
        first: Whether this is the first step.
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
    def of(cls, name: str, config: Mapping[str, Any], step: int) -> Adam8bitSettings:
        """Return the settings for a rule.

        Args:
            name: Name of the rule, one of `STATES`.
            config: The optimizer's settings for the parameter.
            step: Number of the step, from 1.
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
    """Memory for one tile of one thread."""

    def __init__(self, tile: int) -> None:
        # Not the default: `precision="bf16-true"` changes that while the model computes.
        memory = torch.empty(_ROWS, tile, dtype=torch.float32)
        values, places = memory[:2].view(-1), memory[2:4].view(-1)
        self.floats = [values, places, memory[4], torch.empty(2 * (tile // BLOCK), dtype=torch.float32)]
        self.integers = [places.view(torch.int32), places.view(torch.int64), values.view(torch.int64)]


class CutScratch(NamedTuple):
    """Views of scratch for tiles of N elements of S states in blocks of E elements, made once for many tiles.

    Attributes:
        rows: Values of each state, shape (N,).
        words: Values of each state, two in one integer, shape (N / 2,), int64; empty unless blocks are whole.
        parts: Values of each state by block, shape (N / E, E).
        blocks: Values of all states by block, shape (S, N / E, E).
        scale: Scales of all states, shape (S, N / E).
        scales: Scales of each state, shape (N / E,).
        factors: Scales of all states, shape (S, N / E, 1).
        spare: Spare values in the memory for places of the last state, shape (N,).
        spare_part: Spare values by block, shape (N / E, E).
        other: Spare values in the memory for places of the first of two states, shape (N,).
        cast: Cast gradient, shape (N,).
        all_places: Places of all states by block, shape (S, N / E, E), int32.
        places: Places of each state, shape (N,), int32.
        halves: Indices of pairs of codes, shape (N / 2,), int64.
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


class QuantisedStates(NamedTuple):
    """The quantised states of one parameter with N elements.

    Attributes:
        codes: Codes of each state, shape (N,), uint8.
        scales: Largest absolute element of each block for each state, shape (N / 256,), float32.
        tables: Codebook of each state.
    """

    codes: list[Tensor]
    scales: list[Tensor]
    tables: list[Codebook]


def step(
    name: str,
    tensors: list[Tensor],
    moments: QuantisedStates,
    settings: Adam8bitSettings,
    scratch: Scratch,
    part: tuple[int, int],
    clip: tuple[list[float], list[Tensor]],
) -> None:
    """Step a range of elements of a parameter in tiles.

    Args:
        name: Name of the rule, one of `STATES`.
        tensors: Weight, gradient, and the shadow copy if there is one, each of shape (N,).
        moments: States of the parameter.
        settings: Hyperparameters of the step.
        scratch: Memory of the present thread.
        part: First element, and the element behind the last: multiples of `BLOCK`, or N.
        clip: Clipping of the gradient before the step, see `Clip.arguments`.
    """
    words = [code[: code.numel() // BLOCK * BLOCK].view(torch.uint16) for code in moments.codes]
    pairs, values, codes = ([table[at] for table in moments.tables] for at in (1, 0, 2))
    compiled()(
        name, tensors, moments.codes, words, moments.scales, pairs, values, codes, scratch.floats, scratch.integers,
        part[0], part[1], settings, clip[0], clip[1],
    )  # fmt: skip


@cache
def compiled() -> Callable[..., None]:
    """Return the compiled walk over tiles, which runs without Python's lock."""
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
    settings: Adam8bitSettings,
    bounds: list[float],
    coefficients: list[Tensor],
) -> None:
    """Step tile by tile, in the subset of Python that TorchScript compiles, see [Note: Walk]."""
    states = len(codes)
    while begin < end:
        # Whole tiles first, then the remaining whole blocks, then the last elements.
        count = min(floats[2].numel(), end - begin)
        if count > 256:
            count -= count % 256
        each = min(count, 256)
        number = (end - begin) // count
        cut = _cut(floats, integers, states, count, each)
        # Split each tensor into all its views at once: one view at a time would cost twice as much.
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


def _cut(floats: list[Tensor], integers: list[Tensor], states: int, count: int, each: int) -> CutScratch:
    """Return views of scratch for tiles of `count` elements in blocks of `each` elements."""
    tile, blocks, half = floats[2].numel(), count // each, count // 2 if each == 256 else 0
    both = floats[0].narrow(0, 0, states * count).view(states, blocks, each)
    scale = floats[3].narrow(0, 0, states * blocks).view(states, blocks)
    index = integers[0].narrow(0, 0, states * count).view(states, blocks, each)
    spare = floats[1].narrow(0, tile, count)
    return CutScratch(
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


def _update(name: str, weight: Tensor, gradient: Tensor, cut: CutScratch, settings: Adam8bitSettings) -> None:
    """Apply the library's rule, operation by operation."""
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


def _largest(cut: CutScratch, positive: bool) -> bool:
    """Write the largest absolute element of each block to `cut.scale`, and return whether the tile is odd.

    A tile is odd if some block has only zeros or tiny values, infinities or NaN.

    Args:
        cut: Scratch that holds the new states.
        positive: Whether the last state has no negative elements.
    """
    for k in range(len(cut.parts)):
        if k + 1 == len(cut.parts) and positive:
            torch.amax(cut.parts[k], [1], False, out=cut.scales[k])
        else:
            torch.abs(cut.parts[k], out=cut.spare_part)
            torch.amax(cut.spare_part, [1], False, out=cut.scales[k])
    low, high = torch.aminmax(cut.scale)
    # The reciprocal of a smaller number would be infinite.
    odd = not (float(low) >= 2.9387359e-39 and float(high) < math.inf)
    if odd:
        known = torch.nan_to_num(cut.blocks, 0.0, math.inf, -math.inf)
        torch.amax(known.abs_(), [2], False, out=cut.scale)
    return odd


def _quotients(cut: CutScratch, odd: bool) -> None:
    """Turn the elements of all states into their places, as floats; overwrites `scale`.

    A quotient is at most one and an ulp, and adding one rounds that to two.
    """
    cut.scale.reciprocal_()
    cut.blocks.mul_(cut.factors)
    if odd:
        torch.fmax(cut.blocks, torch.full([], -1.0, dtype=torch.float32), out=cut.blocks)
        torch.fmin(cut.blocks, torch.full([], 1.0, dtype=torch.float32), out=cut.blocks)
    cut.blocks.add_(1.0).mul_(65535.0)


def quantise(given: Tensor, tables: Codebook, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes and largest elements of blocks, as the walk computes them.

    Args:
        given: Whole blocks, or less than one block, shape (N,).
        tables: Codebook.
        positive: Whether no element is negative.
    """
    each = min(BLOCK, given.numel())
    scratch = Scratch(max(given.numel(), BLOCK))
    cut = _cut(scratch.floats, scratch.integers, 1, given.numel(), each)
    cut.rows[0].copy_(given)
    odd = _largest(cut, positive)
    scales = cut.scales[0].clone()
    _quotients(cut, odd)
    return torch.index_select(tables.codes, 0, cut.rows[0].int()), scales


# Elements of a tile that the library steps, whole blocks: larger tiles are not faster.
OWN_TILE = 1 << 18
# Tiles of one call: some milliseconds of work, so that threads end together and rarely take Python's lock.
_TILES_PER_CALL = 8
# Tables that all parameters share.
SHARED = ("qmap1", "qmap2")
_METHODS = ("step", "update_step", "init_state", "get_config")


def is_blockwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of bitsandbytes, whatever the bits of its states."""
    names = ((base.__module__.partition(".")[0], base.__name__) for base in type(optimizer).__mro__)
    return ("bitsandbytes", "Optimizer8bit") in names


def is_unchanged(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of bitsandbytes whose derived classes, if any, do not change the step."""
    methods = [inspect.unwrap(getattr(type(optimizer), name, is_blockwise)) for name in _METHODS]
    return is_blockwise(optimizer) and all(method.__module__.startswith("bitsandbytes.") for method in methods)


class BlockwiseStep:
    """A step of host parameters one by one, valid during one step of their optimizer.

    The result is bitwise that of the optimizer's own step on the CPU.

    Args:
        optimizer: Optimizer of bitsandbytes, with all its groups.
        tile: Elements of a tile.
        own_tile: Elements of a tile that the library steps.
    """

    def __init__(self, optimizer: Optimizer, tile: int = TILE, own_tile: int = OWN_TILE) -> None:
        self._tile = tile
        self._own_tile = own_tile
        self._groups = optimizer.param_groups
        self._places = {
            id(parameter): (index, at)
            for index, group in enumerate(optimizer.param_groups)
            for at, parameter in enumerate(group["params"])
        }
        self._kind: Any = type(optimizer)
        # Without this flag the library would warn that CPU states are not paged; they are in host memory anyway.
        # The library moves its code tables to the device of the parameter whose states it makes. Meanwhile the main
        # thread may step resident parameters, which are on another device.
        own = {"name2qmap": dict(vars(optimizer)["name2qmap"])}
        self._optimizer = self._copy(vars(optimizer), _cpu_paged_warned=True, **own)
        self._scratch = threading.local()

    def config(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's settings for a parameter.

        `GlobalOptimManager` finds overrides by group and index in the group. While groups are split or shortened, the
        indices change, so the parameter is looked up at its place in the user's groups.
        """
        found: dict[str, Any] = self._optimizer.get_config(*self._places[id(parameter)], group)
        return found

    def calls(
        self,
        group: Mapping[str, Any],
        parameter: Tensor,
        gradient: Tensor,
        copy: Tensor | None = None,
        clip: Clip = NO_CLIP,
    ) -> list[Callable[[], None]]:
        """Return calls that step a parameter, in any order on any thread; increment its step counter.

        Args:
            group: Hyperparameters of its group.
            parameter: Weight in host memory, one of the optimizer's parameters.
            gradient: Gradient of the same shape. It is clipped in place if it has the dtype of the weight.
            copy: Shadow copy to write the new weight to; it may be the memory of the gradient. None: there is none.
            clip: Clipping of the gradient before the step.
        """
        state = self._optimizer.state[parameter]
        if not state:
            self._optimizer.init_state(group, parameter, *self._places[id(parameter)])
        config = self.config(parameter, group)
        tensors = [parameter.detach(), gradient] if copy is None else [parameter.detach(), gradient, copy]
        moments = self._moments(tensors, state, config)
        if moments is None:
            return [partial(self._own, group, parameter, gradient, copy, clip)]
        state["step"] += 1
        compiled()  # Compile before several threads need it.
        settings = Adam8bitSettings.of(self._optimizer.optimizer_name, config, state["step"])
        flat, numel = [tensor.view(-1) for tensor in tensors], parameter.numel()
        share = _TILES_PER_CALL * self._tile
        ranges = [(begin, min(begin + share, numel)) for begin in range(0, numel, share)]
        return [
            partial(
                self._walk,
                flat,
                moments,
                settings,
                part,
                (
                    [clip.bound] if clip.bound is not None else [],
                    [clip.coefficient] if clip.coefficient is not None else [],
                ),
            )
            for part in ranges
        ]

    def step(self, group, parameter, gradient, copy=None, clip=NO_CLIP):
        for call in self.calls(group, parameter, gradient, copy, clip):
            call()

    def _walk(
        self, tensors: list[Tensor], moments: QuantisedStates, settings: Adam8bitSettings, part: Any, clip: Any
    ) -> None:
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = Scratch(self._tile)
        step(self._optimizer.optimizer_name, tensors, moments, settings, self._scratch.memory, part, clip)

    def _moments(
        self, tensors: list[Tensor], state: Mapping[str, Any], config: Mapping[str, Any]
    ) -> QuantisedStates | None:
        """Return the states in the form that the tables need; None: the tables do not cover them."""
        number = STATES.get(self._optimizer.optimizer_name, 0)
        numel = tensors[0].numel()
        if not number or not self._by_element({**config, "max_unorm": 0}) or not isinstance(config["lr"], float | int):
            return None
        names = [f"{name}{index}" for name in ("state", "absmax", "qmap") for index in range(1, number + 1)]
        found = [state[name] for name in names if isinstance(state.get(name), Tensor)]
        if len(found) < len(names) or not _is_plain((*tensors, *found)):
            return None
        codes, scales = found[:number], found[number : 2 * number]
        kept = all(
            code.dtype == torch.uint8 and code.numel() == numel and not code.storage_offset() % 2
            and scale.dtype == torch.float32 and scale.numel() == -(-numel // BLOCK)
            for code, scale in zip(codes, scales, strict=True)
        )  # fmt: skip
        tables = [table for table in map(codebook_of, found[2 * number :]) if table is not None]
        if not kept or len(tables) < number:
            return None
        return QuantisedStates([code.view(-1) for code in codes], [scale.view(-1) for scale in scales], tables)

    def _own(
        self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, copy: Tensor | None, clip: Clip
    ) -> None:
        """Run the library's own step, see the module docstring."""
        state = self._optimizer.state[parameter]
        weight, gradient = parameter.detach(), gradient.to(parameter.dtype)
        clip.apply([gradient])
        tensors = [value for name, value in state.items() if isinstance(value, Tensor) and name not in SHARED]
        if self._by_element(self.config(parameter, group)) and _is_plain((weight, gradient, *tensors)):
            counted = state["step"] + 1
            for begin in range(0, weight.numel(), self._own_tile):
                part = weight.view(-1)[begin : begin + self._own_tile]
                kept = _part(state, begin, part.numel(), weight.numel())
                self._step(group, parameter, part, gradient.view(-1)[begin : begin + self._own_tile], kept)
            state["step"] = counted
        else:
            part = weight.contiguous()
            self._step(group, parameter, part, gradient, state)
            if part.data_ptr() != weight.data_ptr():
                weight.copy_(part)
        if copy is not None:
            copy.copy_(weight)

    def _by_element(self, config: Mapping[str, Any]) -> bool:
        """Return whether the library's rule works on one element of a parameter at a time."""
        # Older versions have 8-bit states without blocks, and clip by the norm of a parameter over its latest steps.
        alone = config.get("block_wise", True) and config.get("percentile_clipping", 100) >= 100
        known = is_unchanged(self._optimizer) and self._optimizer.optimizer_name in STATES
        return bool(known and alone and not config["max_unorm"])

    def _step(
        self, group: Mapping[str, Any], parameter: Tensor, part: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        part.grad = gradient
        own = self._copy(vars(self._optimizer), state={part: state})
        self._kind.update_step(own, group, part, *self._places[id(parameter)])

    def _copy(self, attributes: Mapping[str, Any], **changed: Any) -> Any:
        """Return an optimizer with the same attributes, except those that replace methods during a step."""
        made = object.__new__(self._kind)
        vars(made).update({name: value for name, value in attributes.items() if name not in _METHODS})
        vars(made).update(changed, param_groups=self._groups)
        return made


def _is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Return whether the tensors are contiguous in host memory."""
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        for tensor in tensors
    )


def _part(state: Mapping[str, Any], begin: int, count: int, numel: int) -> dict[str, Any]:
    """Return the state of a range of elements, as views of the whole state."""
    found = dict(state)
    for name, value in state.items():
        if not isinstance(value, Tensor) or name in SHARED:
            continue
        each = 1 if value.numel() == numel else BLOCK
        found[name] = value.view(-1)[begin // each : -(-(begin + count) // each)]
    return found
