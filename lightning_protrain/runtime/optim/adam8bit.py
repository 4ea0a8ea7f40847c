"""The host step of bitsandbytes' optimizers in tiles, bitwise as the library's own CPU step.

bitsandbytes keeps each moment as an 8-bit code: the nearest of 256 values, after a division by the largest element of
its block of 256 elements (Dettmers et al., arXiv 2110.02861, section 2). The library's CPU step makes several float32
copies of a parameter, gigabytes for an embedding, and spends two thirds of its time on the search for codes. So the
step takes tiles of whole blocks, which stay in the cache. Every operation on a tile runs on the intra-op threads of
PyTorch.

[Note: Code tables]
Adam and Lion with 8-bit states look up new codes in a table. The *place* of an element in the table is its quotient
plus one, times 65535 and truncated to an integer. The library's quantiser is monotonic, so bisection finds the least
quotient of each code. The table is right if that quotient is also the least of its place. Then the table is tested in
blocks of many scales. If the library gives other codes than the table (another version, another CPU), it makes the
whole step itself. Moments and weights are computed by the library's operations, in the same order, so every rounding is
the same.

[Note: Own step]
The library itself steps other rules, 32-bit states and derived classes, in tiles if its rule works element by element.
The library would replace weights and gradients that are not contiguous by contiguous copies. They must stay in their
chunk, so the library gets stand-ins.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.runtime.optim.fused import NO_CLIP, Clip

# Elements of a block, which share one scale; elements of a tile for each thread, whole blocks.
BLOCK, TILE = 256, 1 << 17
PLACES = 2 * 65535 + 1
# Floats from -1 to 1 are ordered by their bits; 0.0 has order 0.
_ORDER_OF_ONE = 0x3F800000
_ODD = (0.0, -0.0, 1e-45, -1e-40, 5e-41, 2e-39, 1.0, -3.0, 3e38, math.inf, -math.inf, math.nan)
# Tables that all parameters share.
SHARED = ("qmap1", "qmap2")
_METHODS = ("step", "update_step", "init_state", "get_config")


def table_of(values: Tensor) -> Tensor | None:
    """Return the code of each place, shape (PLACES,), uint8, see [Note: Code tables]; None: no table fits the library.

    Args:
        values: Value of each code, shape (256,), float32.
    """
    if values.device.type != "cpu" or values.dtype != torch.float32 or values.numel() != 256:
        return None
    return _table(values.detach().contiguous().numpy().tobytes())


@cache
def _table(content: bytes) -> Tensor | None:
    values = torch.frombuffer(bytearray(content), dtype=torch.float32)
    low, high = torch.full((255,), -_ORDER_OF_ONE), torch.full((255,), _ORDER_OF_ONE)
    for _ in range(32):
        middle = (low + high) // 2
        codes, _ = _quantised(torch.nn.functional.pad(_from_order(middle), (1, 0), value=1.0), values)
        reached = codes[1:] >= torch.arange(1, 256)
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    least, before = (_places(_from_order(order)).to(torch.int32) for order in (low, low - 1))
    table = torch.bucketize(torch.arange(PLACES, dtype=torch.int32), least, right=True).to(torch.uint8)
    blocks = torch.nn.functional.pad(_from_order(low), (1, 0), value=1.0).repeat(4096, 1)
    powers = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float32) * 60 - 30
    blocks *= 10**powers
    for row, value in enumerate(_ODD):
        blocks[row, : row + 1] = torch.tensor(_ODD[: row + 1], dtype=torch.float32)
        blocks[-1 - row] = value
    expected, scale = _quantised(blocks, values)
    codes, scales, memory = torch.empty_like(expected), torch.empty_like(scale), torch.empty_like(blocks).repeat(3, 1)
    quantise(blocks.view(-1), table, (codes.view(-1), scales), memory.view(3, -1))
    fits = bool((least > before).all()) and torch.equal(scales, scale) and torch.equal(codes, expected)
    return table if fits else None


def _from_order(order: Tensor) -> Tensor:
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order < 0, -magnitude, magnitude)


def _quantised(blocks: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the library's codes and scales of float32 elements."""
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(blocks, values, BLOCK)
    return codes, scales


def _places(quotients: Tensor) -> Tensor:
    """Return the places of quotients before truncation; overwrite `quotients`."""
    return quotients.add_(1.0).mul_(65535.0)


def quantise(values: Tensor, table: Tensor, out: tuple[Tensor, Tensor], memory: Tensor) -> None:
    """Quantise values, and overwrite them.

    Args:
        values: Whole blocks, or less than one block, shape (N,), float32.
        table: Code of each place.
        out: Receives the codes, shape (N,), uint8, and the largest absolute value of each block, shape (N / 256,).
        memory: Overwritten, shape (3, N), float32, contiguous and from the beginning of its storage.
    """
    codes, scales = out
    blocks = values.view(len(scales), -1)
    places, spare = memory[:2].view(-1).view(torch.int64).view_as(blocks), memory[2].view_as(blocks)
    torch.amax(torch.abs(blocks, out=spare), 1, out=scales)
    low, high = torch.aminmax(scales)
    # The reciprocal of a smaller scale would be infinite. The library ignores NaN.
    odd = not (float(low) >= 2.9387359e-39 and float(high) < math.inf)
    if odd:
        torch.amax(blocks.nan_to_num(0.0, math.inf, -math.inf).abs_(), 1, out=scales)
    blocks.mul_(scales.reciprocal()[:, None])
    if odd:
        blocks.nan_to_num_(-1.0, math.inf, -math.inf).clamp_(-1.0, 1.0)
    # By way of int32 is faster than straight to int64. `take` and `index_select` are slower, or run on one thread.
    places.copy_(spare.view(torch.int32).copy_(_places(blocks)))
    torch.gather(table.expand(len(blocks), -1), 1, places, out=codes.view_as(blocks))


def _adam(weight: Tensor, gradient: Tensor, moments: list[Tensor], spare: Tensor, config: Mapping[str, Any]) -> None:
    (first, second), (beta1, beta2), step = moments, config["betas"][:2], config["step"]
    first.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    root = torch.sqrt(second, out=spare[0]).div_(math.sqrt(1.0 - beta2**step)).add_(config["eps"])
    weight.addcdiv_(first, root, value=-config["lr"] / (1.0 - beta1**step))


def _lion(weight: Tensor, gradient: Tensor, moments: list[Tensor], spare: Tensor, config: Mapping[str, Any]) -> None:
    (moment,), (beta1, beta2) = moments, config["betas"][:2]
    update = torch.mul(moment, beta1, out=spare[0]).add_(torch.mul(gradient, 1.0 - beta1, out=spare[1]))
    weight.add_(update.sign_(), alpha=-config["lr"])
    moment.mul_(beta2).add_(gradient, alpha=1.0 - beta2)


# Rules after the decay of weights, by the library's names; all rules that work element by element.
_RULES = {"adam": _adam, "lion": _lion}
_BY_ELEMENT = (*_RULES, "momentum", "rmsprop", "adagrad")


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
        tile: Elements of a tile, whole blocks.
    """

    def __init__(self, optimizer: Optimizer, tile: int = TILE) -> None:
        self._size = tile
        self._memory = threading.local()
        self._groups = optimizer.param_groups
        self._indices = {
            id(parameter): (index, at)
            for index, group in enumerate(optimizer.param_groups)
            for at, parameter in enumerate(group["params"])
        }
        self._kind: Any = type(optimizer)
        # Without this flag the library would warn that CPU states are not paged; they are in host memory anyway.
        # The library moves its code tables to the device of the parameter whose states it makes. Meanwhile the main
        # thread may step resident parameters, which are on another device.
        tables = {"name2qmap": dict(vars(optimizer)["name2qmap"])}
        self._optimizer = self._copy(vars(optimizer), _cpu_paged_warned=True, **tables)

    def config(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's settings for a parameter.

        `GlobalOptimManager` finds overrides by group and index in the group. While groups are split or shortened, the
        indices change, so the parameter is looked up at its place in the user's groups.
        """
        config: dict[str, Any] = self._optimizer.get_config(*self._indices[id(parameter)], group)
        return config

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
        state, weight = self._optimizer.state[parameter], parameter.detach()
        if not state:
            self._optimizer.init_state(group, parameter, *self._indices[id(parameter)])
        config, before = self.config(parameter, group), dict(state)
        tensors = [weight, gradient] if copy is None else [weight, gradient, copy]
        states = [value for name, value in state.items() if isinstance(value, Tensor) and name not in SHARED]
        if not self._by_element(config) or not _is_plain([*tensors, *states]):
            return [partial(self._step_whole, group, parameter, tensors, clip)]
        state["step"] += 1
        step = partial(self._step, group, parameter)
        if tables := self._tables(state, config):
            step = partial(self._look_up, tables, {**config, "step": state["step"]})
        flat = [tensor.view(-1) for tensor in tensors]
        return [partial(self._tile, flat, before, clip, step, part) for part in self._tiles(weight.numel())]

    def _tile(
        self, flat: list[Tensor], state: Mapping[str, Any], clip: Clip, step: Callable[..., None], part: Any
    ) -> None:
        (begin, end), numel = part, flat[0].numel()
        weight, gradient, *copies = [tensor[begin:end] for tensor in flat]
        rows = self._scratch(end - begin)
        if gradient.dtype != weight.dtype:
            gradient = rows[4].view(weight.dtype)[: end - begin].copy_(gradient)
        clip.apply([gradient])
        parts = {
            name: value.view(-1)[begin:end] if value.numel() == numel else value[begin // BLOCK : -(-end // BLOCK)]
            for name, value in state.items()
            if isinstance(value, Tensor) and name not in SHARED
        }
        step([weight, gradient], {**state, **parts}, rows)
        for copy in copies:
            copy.copy_(weight)

    def _scratch(self, numel: int) -> Tensor:
        """Return memory of this thread, shape (5, N), float32."""
        # Keep the memory: to get new pages from the system would take as long as the step. Name the dtype:
        # `precision="bf16-true"` changes the default while the model computes.
        memory: Tensor | None = getattr(self._memory, "rows", None)
        if memory is None or memory.numel() < 5 * numel:
            memory = self._memory.rows = torch.empty(5 * numel, dtype=torch.float32)
        return memory[: 5 * numel].view(5, -1)

    def _tables(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> list[Tensor]:
        """Return the table of each moment; empty: the library makes the step."""
        is_known = self._optimizer.optimizer_name in _RULES and isinstance(config["lr"], float | int)
        values = [state[name] for name in SHARED if name in state and is_known]
        tables = [table for table in map(table_of, values) if table is not None]
        return tables if len(tables) == len(values) and state["state1"].dtype == torch.uint8 else []

    def _look_up(
        self,
        tables: list[Tensor],
        config: Mapping[str, Any],
        tile: list[Tensor],
        state: Mapping[str, Any],
        rows: Tensor,
    ) -> None:
        """Step a tile by the library's rule and by tables, see [Note: Code tables].

        The tile has weight and clipped gradient, shape (N,). `rows` is overwritten, shape (5, N), float32.
        """
        weight, gradient = (
            tensor if tensor.dtype == torch.float32 else row.copy_(tensor)
            for tensor, row in zip(tile, (rows[0], rows[3]), strict=False)
        )
        if config["weight_decay"] > 0.0:
            weight.mul_(1.0 - config["lr"] * config["weight_decay"])
        moments = [tuple(state[f"{name}{at + 1}"] for name in ("state", "absmax", "qmap")) for at in range(len(tables))]
        values = [torch.ops.bitsandbytes.dequantize_blockwise(*moment, BLOCK, torch.float32) for moment in moments]
        _RULES[self._optimizer.optimizer_name](weight, gradient, values, rows[1:3], config)
        if weight is not tile[0]:
            tile[0].copy_(weight)
        for new, table, (codes, scales, _) in zip(values, tables, moments, strict=True):
            quantise(new, table, (codes, scales), rows[:3])

    def _step_whole(self, group: Mapping[str, Any], parameter: Tensor, tensors: Sequence[Tensor], clip: Clip) -> None:
        """Have the library step a whole parameter, see [Note: Own step]."""
        weight, gradient, *copies = tensors
        gradient = gradient.to(weight.dtype)
        clip.apply([gradient])
        part = weight.contiguous()
        self._step(group, parameter, [part, gradient], self._optimizer.state[parameter])
        if part.data_ptr() != weight.data_ptr():
            weight.copy_(part)
        for copy in copies:
            copy.copy_(weight)

    def _tiles(self, numel: int) -> Iterable[tuple[int, int]]:
        """Return the ranges of tiles, and of the elements behind the last whole block."""
        whole = numel // BLOCK * BLOCK
        return pairwise(sorted({*range(0, whole, self._size), whole, numel, 0}))

    def _by_element(self, config: Mapping[str, Any]) -> bool:
        """Return whether the library's rule works on one element of a parameter at a time."""
        # Older versions have 8-bit states without blocks, and clip by the norm of a parameter over its latest steps.
        alone = config.get("block_wise", True) and config.get("percentile_clipping", 100) >= 100
        known = is_unchanged(self._optimizer) and self._optimizer.optimizer_name in _BY_ELEMENT
        return bool(known and alone and not config["max_unorm"])

    def _step(
        self, group: Mapping[str, Any], parameter: Tensor, tile: list[Tensor], state: Any, _: Tensor | None = None
    ) -> None:
        part, part.grad = tile[0], tile[1]
        optimizer = self._copy(vars(self._optimizer), state={part: state})
        self._kind.update_step(optimizer, group, part, *self._indices[id(parameter)])

    def _copy(self, attributes: Mapping[str, Any], **changed: Any) -> Any:
        """Return an optimizer with the same attributes, except those that replace methods during a step."""
        made = object.__new__(self._kind)
        vars(made).update({name: value for name, value in attributes.items() if name not in _METHODS})
        vars(made).update(changed, param_groups=self._groups)
        return made


def _is_plain(tensors: Sequence[Any]) -> bool:
    """Return whether all are tensors that are contiguous in host memory."""
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        for tensor in tensors
    )
