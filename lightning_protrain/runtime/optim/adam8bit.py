"""8-bit block-wise optimizer steps by tiles: codebooks, states and rules.

[Note: Quantiser]
bitsandbytes keeps each moment as a code of 8 bits, the nearest of 256 values after a division by the largest of its
block (Dettmers et al., arXiv 2110.02861, section 2). Its own code on the CPU looks each element up on its own. The same
bits come from whole tiles: the quotient, plus one, times 65535 and cut off to an integer, is the place of the code in a
table. The table is asked of the library, at both ends of what falls on each place; its quantiser never falls where its
argument grows, so in between it cannot be another one. Then it is tried where codes change, in blocks of many scales.
Where the library says something else (another version, another machine), there is no table and its own code steps.

[Note: Passes]
The library makes four copies of a parameter in float32 and looks each element up on its own. Here a step is some thirty
passes of PyTorch over a tile that stays in the cache: moments from codes, two at a time by a table of all pairs; the
library's own rule, operation by operation, so that every rounding is its; and the codes of the new moments by a table,
see [Note: Quantiser] in `codes`.

[Note: Odd tiles]
Blocks of nothing but zeros, infinities and what is not a number leave the table. Such a tile goes through two more
passes, which put its elements where the library does.

[Note: Places]
bitsandbytes finds what `GlobalOptimManager` overrides for a parameter by its group and its place in that group. Here
parameters are stepped in other groups, or some are left out. So each is looked up where it is in the groups that the
user knows: else one would get what is meant for another.

[Note: Own step]
What the tables do not know (states of 32 bits, norms of whole parameters, classes that others derive) the library steps
itself. It makes several copies of a parameter in float32, which for an embedding are gigabytes, so where its rule goes
element by element it is given tiles: no block lies in two of them. It also makes weights and gradients contiguous, in
memory of their own, while theirs has to stay in its chunk: it is given stand-ins for those that are not.
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

from lightning_protrain.runtime.optim.fused import NO_CLIP, Clip, without_lock


def codebook_of(values: Tensor) -> Codebook | None:
    """Return the tables for codes that mean `values`.

    None if the library quantises differently, see [Note: Quantiser].
    """
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
# Floats from -1 to 1 are counted by their bits, 0 from 0.
_ORDER_OF_ONE = 0x3F800000


def _from_order(order: Tensor) -> Tensor:
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order < 0, -magnitude, magnitude)


@cache
def _lowest() -> Tensor:
    """Return the least float that falls on each place, as its order, (131071,)."""
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
    """Return True if the tables give the library's bits where codes change, at many scales and for odd values."""
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


# Elements that share one scale.
BLOCK = 256
# Elements of a tile, whole blocks: smaller ones fit a smaller cache, but the calls cost more than they save.
TILE = 1 << 17
# Float32 of scratch for each element of a tile: two moments, two rows of places, a cast gradient.
_ROWS = 5
# States of each rule that is known here.
STATES = {"adam": 2, "lion": 1, "momentum": 1, "rmsprop": 1, "adagrad": 1}
PLACES = 2 * 65535 + 1


class Codebook(NamedTuple):
    """Tables that translate codes.

    Attributes:
        values: Value of each code, (256,), float32.
        pairs: Values of two codes as they lie in memory, both in one integer, (65536,), int64.
        codes: Code of each place, see [Note: Quantiser], (131071,), uint8.
    """

    values: Tensor
    pairs: Tensor
    codes: Tensor


class Adam8bitSettings(NamedTuple):
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
    def of(cls, name: str, config: Mapping[str, Any], step: int) -> Adam8bitSettings:
        """Return the settings of a rule of `STATES`.

        Args:
            name: Name of the rule.
            config: The optimizer's config for the parameter.
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
    """Memory for one tile, of one thread."""

    def __init__(self, tile: int) -> None:
        # Not the default: `precision="bf16-true"` changes that while the model computes.
        memory = torch.empty(_ROWS, tile, dtype=torch.float32)
        values, places = memory[:2].view(-1), memory[2:4].view(-1)
        self.floats = [values, places, memory[4], torch.empty(2 * (tile // BLOCK), dtype=torch.float32)]
        self.integers = [places.view(torch.int32), places.view(torch.int64), values.view(torch.int64)]


class CutScratch(NamedTuple):
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


class QuantisedStates(NamedTuple):
    """The states of one parameter.

    Attributes:
        codes: Of each state, flat, (N,), uint8.
        scales: Of each state, the largest of each block, (N / 256,), float32.
        tables: Of each state.
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
    """Step some elements of a parameter, see [Note: Passes].

    Args:
        name: The rule, one of `STATES`.
        tensors: Weight, gradient, and the copy of the new weight if there is one: flat, (N,).
        moments: Optimizer states of the parameter.
        settings: Hyperparameters of the step.
        scratch: Scratch memory of the thread.
        part: The first element, and the one behind the last: multiples of `BLOCK`, or the end.
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
    """Return the walk over tiles in TorchScript, which runs without the GIL."""
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


def _cut(floats: list[Tensor], integers: list[Tensor], states: int, count: int, each: int) -> CutScratch:
    """Scratch for tiles of `count` elements in blocks of `each`."""
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
    """Apply the rule of the library, operation by operation."""
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


def _quotients(cut: CutScratch, odd: bool) -> None:
    """Places of all elements, as floats; overwrites `scale`.

    A quotient is at most one and an ulp, and adding one rounds that to two.
    """
    cut.scale.reciprocal_()
    cut.blocks.mul_(cut.factors)
    if odd:
        torch.fmax(cut.blocks, torch.full([], -1.0, dtype=torch.float32), out=cut.blocks)
        torch.fmin(cut.blocks, torch.full([], 1.0, dtype=torch.float32), out=cut.blocks)
    cut.blocks.add_(1.0).mul_(65535.0)


def quantise(given: Tensor, tables: Codebook, positive: bool = False) -> tuple[Tensor, Tensor]:
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


# Elements of a tile that the library steps, whole blocks: larger ones are not faster.
OWN_TILE = 1 << 18
# Of one call: some milliseconds, so that threads end together and Python's lock is seldom taken.
_TILES_PER_CALL = 8
# Tables that all parameters share.
SHARED = ("qmap1", "qmap2")
_METHODS = ("step", "update_step", "init_state", "get_config")


def is_blockwise(optimizer: Optimizer) -> bool:
    """Return True if the optimizer is one of bitsandbytes, whatever the bits of its states."""
    names = ((base.__module__.partition(".")[0], base.__name__) for base in type(optimizer).__mro__)
    return ("bitsandbytes", "Optimizer8bit") in names


def is_unchanged(optimizer: Optimizer) -> bool:
    """Return True if a bitsandbytes optimizer steps as the library does: its class overrides nothing."""
    methods = [inspect.unwrap(getattr(type(optimizer), name, is_blockwise)) for name in _METHODS]
    return is_blockwise(optimizer) and all(method.__module__.startswith("bitsandbytes.") for method in methods)


class BlockwiseStep:
    """Steps parameters in host memory one by one, for the time of one step of their optimizer.

    The result is bitwise that of the optimizer's own step on the CPU.

    Args:
        optimizer: One of bitsandbytes, with all its groups.
        tile: Elements of a tile, see [Note: Passes] in `moments`.
        own_tile: Elements of a tile that the library steps, see [Note: Own step].
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
        # Pages would be in host memory, too: there is nothing to warn of.
        self._optimizer = self._copy(vars(optimizer), _cpu_paged_warned=True)
        self._scratch = threading.local()

    def config(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's config for a parameter, see [Note: Places]."""
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
        """Return calls that step a parameter, for any thread and in any order; this method advances its step counter.

        Args:
            group: The hyperparameters of its group.
            parameter: The weight in host memory, a parameter of the optimizer.
            gradient: Gradient of the same shape; written only in the dtype of the weight, if it is to be clipped.
            copy: Receives the new weight in its own dtype; it may share memory with the gradient.
            clip: Clipping of the gradient before the step, in place.
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
        compiled()  # Here, before several threads want it.
        settings = Adam8bitSettings.of(self._optimizer.optimizer_name, config, state["step"])
        flat, numel = [tensor.view(-1) for tensor in tensors], parameter.numel()
        share = _TILES_PER_CALL * self._tile
        ranges = [(begin, min(begin + share, numel)) for begin in range(0, numel, share)]
        return [partial(self._walk, flat, moments, settings, part, clip.arguments) for part in ranges]

    def _walk(
        self, tensors: list[Tensor], moments: QuantisedStates, settings: Adam8bitSettings, part: Any, clip: Any
    ) -> None:
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = Scratch(self._tile)
        step(self._optimizer.optimizer_name, tensors, moments, settings, self._scratch.memory, part, clip)

    def _moments(
        self, tensors: list[Tensor], state: Mapping[str, Any], config: Mapping[str, Any]
    ) -> QuantisedStates | None:
        """Return the states as the tables need them; None if the tables cannot be used."""
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
        """Step with the library's code, see [Note: Own step]."""
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
        """Return True if the library's rule looks at one element of a parameter at a time."""
        # Older versions have 8 bits without blocks, and clip by the norm of a parameter over its last steps.
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
        """One with the same attributes, but for those that stand for methods while a step runs."""
        made = object.__new__(self._kind)
        vars(made).update({name: value for name, value in attributes.items() if name not in _METHODS})
        vars(made).update(changed, param_groups=self._groups)
        return made


def _is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Return True if the tensors are contiguous and in host memory."""
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        for tensor in tensors
    )


def _part(state: Mapping[str, Any], begin: int, count: int, numel: int) -> dict[str, Any]:
    """Return views of the state of some elements."""
    found = dict(state)
    for name, value in state.items():
        if not isinstance(value, Tensor) or name in SHARED:
            continue
        each = 1 if value.numel() == numel else BLOCK
        found[name] = value.view(-1)[begin // each : -(-(begin + count) // each)]
    return found
