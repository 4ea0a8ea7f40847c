"""Numbers of fewer bits than float32: split masters, stochastic rounding, and 8-bit codes, on flat tensors.

[Note: Split masters]
A float32 number is 16 upper bits, which are a bfloat16 number, and 16 lower bits. The weight is the master rounded to
bfloat16, half away from zero, and the *remainder* is the signed integer that restores the master:
`bits(master) = (bits(weight) << 16) + remainder`. This is exact for every float32 number, and takes 4 bytes where a
master beside its weight takes 6. The optimizer keeps a sum of the weights for each page of `PAGE` elements. If the sum
differs at the next step, somebody has changed weights of the page, and their remainders mean nothing: they become zero.
The first remainder is random. A bfloat16 weight has lost its lower bits, and zeros would put every master in the middle
of the numbers that round to its weight. Then no weight would change before its master had moved by half a unit in the
last place: after 28 steps with a learning rate of 1e-5, SmolLM2-135M would have a loss of 3.64 instead of 3.12.

[Note: Random bits]
Rounding to nearest loses updates below half a unit in the last place: of weights without a master, and of second
moments in bfloat16 (with a decay of 0.999 they would stop growing after some 300 steps). These are rounded
stochastically: a number between two neighbours becomes the upper one with the probability that keeps its expectation.
The random bits are a hash of the seed, the step, the index of the parameter and that of the element. So they do not
depend on tiles, threads, ranks, devices, or the plan.

[Note: 8-bit moments]
Blocks of 256 elements share a float32 scale, and each element has the code of one of 256 values between -1 and 1, those
of bitsandbytes (Dettmers et al., arXiv 2110.02861). The code is looked up by the bfloat16 number nearest to the
quotient, which is finer than the codes everywhere. A second moment above zero never gets the code of zero, as its
update would then be divided by `eps` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Elements whose weights have one sum, an even number of blocks; elements of a block, which share a scale.
PAGE, BLOCK = 1 << 16, 256
# Odd factors: of the sequence of numbers that are hashed (2^32 over the golden ratio), and of the hash.
_SEQUENCE, _MIX = -0x61C8864F, 0x7FEB352D


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 masters of bfloat16 weights, of the same shape."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(remainder)
    return bits.view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight and the remainder (int16) of a float32 master, of the same shape."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # The lower 16 bits, as a signed integer.
    weight = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weight, remainder


def sums(bits: Tensor) -> Tensor:
    """Return the sum of each page, shape (pages,), int64.

    Args:
        bits: 16-bit integers as int32, shape (N,), contiguous and at the beginning of its storage.
    """
    whole = bits.numel() // PAGE * PAGE
    pages = bits[:whole].view(torch.int64).view(-1, PAGE // 2).sum(1)
    if whole == bits.numel():
        return pages
    rest = torch.nn.functional.pad(bits[whole:], (0, bits.numel() % 2))
    return torch.cat([pages, rest.clone().view(torch.int64).sum().view(1)])


def sums_of(weight: Tensor) -> Tensor:
    """Return the sums of the pages of a weight with flat memory, see [Note: Split masters]; shape (pages,), int64."""
    flat = weight.view(torch.int16).view(-1)
    parts = [sums(part.to(torch.int32)) for part in flat.split(64 * PAGE)] if flat.numel() else []
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=weight.device)


def hash_of(*numbers: int) -> int:
    """Return a hash of integers, a signed number of 32 bits."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ number) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            mixed = ((mixed ^ (mixed >> shift)) * factor + 0x9E3779B9 * (factor == 1)) & 0xFFFFFFFF
    return _signed(mixed)


def sequence(number: int, device: torch.device) -> Tensor:
    """Return the numbers whose hashes are the random bits of `2 * number` elements, int32, shape (number,)."""
    return torch.arange(number, dtype=torch.int32, device=device).mul_(_SEQUENCE)


def random_bits(begin: int, bits: Tensor, spare: Tensor, numbers: Tensor, key: int) -> Tensor:
    """Return 16 random bits for each element, int16, shape (2 * N,), in the memory of `bits`; see [Note: Random bits].

    Args:
        begin: Index of the first element, even.
        bits: Memory, int32, shape (N,).
        spare: Memory, int32, shape (N,).
        numbers: Result of `sequence` for N numbers.
        key: Hash of all that the bits depend on beside the index.
    """
    torch.add(numbers, _signed(begin // 2 * _SEQUENCE + key), out=bits)
    for shift, factor in ((15, _MIX), (16, 1)):
        torch.bitwise_right_shift(bits, shift, out=spare)  # The shift repeats the sign bit.
        bits.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            bits.mul_(factor)
    return bits.view(torch.int16)


def fresh_remainder(weight: Tensor, key: int) -> Tensor:
    """Return random remainders, of zero for weights of zero; int16, contiguous, with the shape of the weight.

    Args:
        weight: bfloat16, contiguous.
        key: As in `random_bits`.
    """
    remainder, size = torch.empty_like(weight, dtype=torch.int16), 64 * PAGE
    numbers = sequence(min(size, weight.numel() + 1) // 2, weight.device)
    flat = zip(remainder.view(-1).split(size), weight.view(torch.int16).view(-1).split(size), strict=True)
    for index, (part, bits) in enumerate(flat):
        some = numbers[: -(-part.numel() // 2)]
        random = random_bits(index * size, torch.empty_like(some), torch.empty_like(some), some, key)[: part.numel()]
        part.copy_(random.masked_fill(bits.bitwise_and(0x7FFF) == 0, 0))
    return remainder


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def round_stochastically(values: Tensor, random: Tensor, spare: Tensor, out: Tensor) -> None:
    """Round float32 numbers to bfloat16 by random bits; overwrite `values`.

    Args:
        values: Numbers, float32, shape (N,).
        random: Random bits, int16, shape (N,).
        spare: Memory, int32, shape (N,).
        out: Receives the rounded numbers, bfloat16, shape (N,).
    """
    bits = values.view(torch.int32)
    bits.add_(spare.copy_(random).bitwise_and_(0xFFFF)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits)


class Codes(NamedTuple):
    """The values of 8-bit codes, and the codes of values.

    Attributes:
        values: Value of each code, ascending, shape (256,), float32.
        codes: Code of each bfloat16 number, by its bits as an unsigned integer, shape (65536,), uint8.
        zero: The code of zero.
    """

    values: Tensor
    codes: Tensor
    zero: int


@cache
def codes_of(signed: bool, device: torch.device) -> Codes:
    """Return the codes of signed or of positive numbers, see [Note: 8-bit moments]."""
    if device.type != "cpu":
        known = codes_of(signed, torch.device("cpu"))
        return Codes(known.values.to(device), known.codes.to(device), known.zero)
    decades = []
    for exponent in range(-6, 1):  # Each decade has twice as many values as the one below it, at equal distances.
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + 6 + (not signed)) + 1, dtype=torch.float32)
        decades.append((edges[:-1] + edges[1:]) / 2 * 10.0**exponent)
    above = torch.cat([*decades, torch.ones(1, dtype=torch.float32)])
    zeros = torch.zeros(1, dtype=torch.float32)
    values = torch.cat([*(-decade for decade in decades if signed), zeros, above]).sort().values
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.bucketize(every.nan_to_num(0.0), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    zero = int((values == 0).nonzero())
    if not signed:
        codes[every > 0] = codes[every > 0].clamp_min(zero + 1)
    return Codes(values, codes, zero)


class CodeScratch(NamedTuple):
    """Memory for the codes of a tile of N elements.

    Attributes:
        places: int64, shape (N,).
        spare: float32, shape (N,), in the memory of `places`.
        low: bfloat16, shape (N,).
    """

    places: Tensor
    spare: Tensor
    low: Tensor

    @classmethod
    def empty(cls, number: int, device: torch.device) -> CodeScratch:
        """Return memory for a tile of `number` elements."""
        places = torch.empty(number, dtype=torch.int64, device=device)
        low = torch.empty(number, dtype=torch.bfloat16, device=device)
        return cls(places, places.view(torch.float32)[:number], low)

    def cut(self, number: int) -> CodeScratch:
        """Return memory for the first `number` elements."""
        return CodeScratch(self.places[:number], self.spare[:number], self.low[:number])


def _cut(values: Tensor, codes: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield values by block, codes, and scales as a column: of all whole blocks, and of the rest."""
    whole = values.numel() // BLOCK * BLOCK
    if whole == values.numel():
        yield values.view(-1, BLOCK), codes, scales[:, None]
        return
    if whole:
        yield values[:whole].view(-1, BLOCK), codes[:whole], scales[:-1, None]
    yield values[whole:].view(1, -1), codes[whole:], scales[-1:, None]


def dequantise(codes: Tensor, scales: Tensor, table: Codes, scratch: CodeScratch, out: Tensor) -> Tensor:
    """Write the values of codes, and return them.

    Args:
        codes: Codes, uint8, shape (N,); the first element begins a block.
        scales: Largest absolute value of each block, float32.
        table: Values of the codes.
        scratch: Memory.
        out: Receives the values, float32, shape (N,).
    """
    places = scratch.places.copy_(codes)
    for (blocks, _, scale), (at, *_) in zip(_cut(out, codes, scales), _cut(places, codes, scales), strict=True):
        # `take` and a gather from one row are slower, and `index_select` runs on one thread.
        torch.gather(table.values.expand(len(at), -1), 1, at, out=blocks).mul_(scale)
    return out


def quantise(values: Tensor, table: Codes, scratch: CodeScratch, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and scales of values, which are overwritten; shapes as for `dequantise`."""
    spare = scratch.spare
    for blocks, _, scale in _cut(values, codes, scales):
        torch.amax(torch.abs(blocks, out=spare[: blocks.numel()].view(blocks.shape)), 1, keepdim=True, out=scale)
        blocks.mul_(scale.clamp_min(1e-38).reciprocal_())
    places = scratch.places.copy_(scratch.low.copy_(values).view(torch.uint16))
    for blocks, part, _ in _cut(places, codes, scales):
        torch.gather(table.codes.expand(len(blocks), -1), 1, blocks, out=part.view(blocks.shape))
