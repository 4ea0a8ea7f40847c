"""Tables of the quantiser of bitsandbytes on the CPU, asked of the library itself.

[Note: Quantiser]
bitsandbytes keeps each moment as a code of 8 bits, the nearest of 256 values after a division by the largest of its
block (Dettmers et al., arXiv 2110.02861, section 2). Its own code on the CPU looks each element up on its own. The same
bits come from whole tiles: the quotient, plus one, times 65535 and cut off to an integer, is the place of the code in a
table. The table is asked of the library, at both ends of what falls on each place; its quantiser never falls where its
argument grows, so in between it cannot be another one. Then it is tried where codes change, in blocks of many scales.
Where the library says something else (another version, another machine), there is no table and its own code steps.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lightning_protrain.runtime.moments import BLOCK, PLACES, Tables, quantise


def tables_of(values: Tensor) -> Tables | None:
    """The tables for codes that mean `values`; None: the library's quantiser is another one, see [Note: Quantiser]."""
    if values.device.type != "cpu" or values.dtype != torch.float32 or values.numel() != 256:
        return None
    return _tables(values.detach().contiguous().numpy().tobytes())


@cache
def _tables(content: bytes) -> Tables | None:
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
    tables = Tables(values, pairs, at_low)
    return tables if _agrees(tables) else None


_ODD = [0.0, -0.0, 1e-45, -1e-40, 5e-41, 2e-39, 1.0, -3.0, 3e38, math.inf, -math.inf, math.nan]
# Floats from -1 to 1 are counted by their bits, 0 from 0.
_ORDER_OF_ONE = 0x3F800000


def _from_order(order: Tensor) -> Tensor:
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order < 0, -magnitude, magnitude)


@cache
def _lowest() -> Tensor:
    """The least float that falls on each place, as its order, (131071,)."""
    low = torch.full((PLACES,), -_ORDER_OF_ONE)
    high = torch.full((PLACES,), _ORDER_OF_ONE)
    wanted = torch.arange(PLACES)
    while bool((low < high).any()):
        middle = torch.div(low + high, 2, rounding_mode="floor")
        reached = _from_order(middle).add_(1.0).mul_(65535.0).long() >= wanted
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return low


def _codes_of(quotients: Tensor, values: Tensor) -> Tensor:
    """What the library makes of elements in blocks whose largest is one."""
    blocks = torch.nn.functional.pad(quotients, (0, -quotients.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    blocks = torch.nn.functional.pad(blocks, (1, 0), value=1.0)
    codes, _ = torch.ops.bitsandbytes.quantize_blockwise(blocks, values.clone(), BLOCK)
    return codes[:, 1:].reshape(-1)[: quotients.numel()].clone()


def _agrees(tables: Tables) -> bool:
    """Whether they give the library's bits where codes change, in blocks of many scales, and for odd ones."""
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
