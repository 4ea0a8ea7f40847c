"""AdamW for bfloat16 weights, whose float32 masters are split into the weight and 16 further bits."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_protrain.runtime.optim.fused import FusedRule
from lightning_protrain.runtime.optim.split_numbers import (
    BLOCK,
    PAGE,
    Codes,
    CodeScratch,
    codes_of,
    dequantise,
    fresh_remainder,
    hash_of,
    join,
    quantise,
    random_bits,
    round_stochastically,
    sequence,
    sums,
    sums_of,
)
from lightning_protrain.runtime.optim.threads import StepThreads

Moments = Literal["float32", "bfloat16", "8bit"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
# Elements of a tile, whole pages: on the host (see benchmarks/LOG.md), and on accelerators, where launches are slow.
TILE, DEVICE_TILE = 4 * PAGE, 1 << 22
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Uses of random bits: to round a weight, and a second moment; for the first remainder.
_WEIGHT, _SECOND, _FIRST = range(3)


class SplitAdamW(Optimizer):
    """AdamW for bfloat16 weights, at the quality of float32 masters, see [Note: Split masters].

    For each bfloat16 parameter, the state has `remainder` (2 bytes for each element), `exp_avg` and `exp_avg_sq` (4, 2
    or 1 bytes each). The update is that of `torch.optim.AdamW(fused=True)` on the masters. Float32 weights are their
    own masters.

    Args:
        params: Parameters or groups, in bfloat16 or float32.
        lr: Learning rate.
        betas: Decays of the first and second moment.
        eps: Value added to the square root of the second moment.
        weight_decay: Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).
        moments: Format of the moments: `"float32"`, `"bfloat16"`, or `"8bit"`, see [Note: 8-bit moments].
        masters: Whether weights have masters. False: weights are rounded stochastically, see [Note: Random bits].
        seed: Seed of the random bits.

    Raises:
        ValueError: An option is out of range, or a weight is not contiguous, or neither bfloat16 nor float32.
    """

    # Class with which this one exchanges checkpoints: `split_states.adapt` converts them in both directions.
    interchangeable_with = AdamW

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Moments = "float32",
        masters: bool = True,
        seed: int = 0,
    ) -> None:
        if moments not in _DTYPES:
            known = ", ".join(map(repr, get_args(Moments)))
            raise ValueError(f"SplitAdamW has no moments={moments!r}. Choose one of {known}.")
        ranges = {
            "lr": (lr, lr >= 0.0),
            "betas": (betas, all(0.0 <= beta < 1.0 for beta in betas)),
            "eps": (eps, eps >= 0.0),
            "weight_decay": (weight_decay, weight_decay >= 0.0),
        }
        for name, (value, fits) in ranges.items():
            if not fits:
                raise ValueError(f"{name}={value!r} is out of range for SplitAdamW.")
        self.moments, self.masters, self.seed = moments, masters, seed
        self._numbers: dict[int, int] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        dtypes = [parameter.dtype for group in self.param_groups for parameter in group["params"]]
        if wide := dtypes.count(torch.float32):
            warnings.warn(
                f"{wide} of {len(dtypes)} parameters of SplitAdamW are float32, and stay so. To split weights, "
                'set Trainer(precision="bf16-true").',
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _refuse_weight(parameter)
            self._numbers.setdefault(id(parameter), len(self._numbers))

    def __getstate__(self) -> dict[str, Any]:
        settings = {"moments": self.moments, "masters": self.masters, "seed": self.seed}
        return {**super().__getstate__(), **settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        self._numbers = {id(parameter): number for number, parameter in enumerate(every)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        calls: dict[torch.device, list[Callable[[], None]]] = {}
        memory, threads = TileMemory(), StepThreads()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, tile = _gradient(parameter), tile_of(parameter.device, threads.width)
                made = self.begin(group, parameter)
                for begin in range(0, parameter.numel(), tile):
                    place = slice(begin, min(begin + tile, parameter.numel()))
                    calls.setdefault(parameter.device, []).append(partial(memory.step, made, place, gradient[place]))
        for device, some in calls.items():
            if device.type == "cpu":
                with closing(threads):
                    threads.make(some)
            else:
                for call in some:
                    call()
        return loss

    def begin(self, group: Mapping[str, Any], parameter: Tensor) -> SplitStep:
        """Return the step of one parameter, which may be made in tiles in any order; increment its step counter.

        Args:
            group: Hyperparameters of its group.
            parameter: One of the optimizer's parameters.
        """
        state, device = self.state[parameter], parameter.device
        if not state:
            state.update(self._first_state(parameter))
        state["step"] += 1
        count = int(state["step"])
        number = self._numbers.get(id(parameter), 0)
        tables = tuple(codes_of(name == "exp_avg", device) for name in _MOMENTS if self.moments == "8bit")
        return SplitStep(
            weight=parameter.detach().view(-1),
            moments=[state[name].view(-1) for name in _MOMENTS],
            scales=[state[_scale(name)] for name in _MOMENTS if self.moments == "8bit"],
            tables=tables,
            remainder=state["remainder"].view(-1) if "remainder" in state else None,
            sums=state.get("sums"),
            keys=[hash_of(self.seed, count, number, use) for use in (_WEIGHT, _SECOND)],
            count=state["step"] if device.type == "cpu" else torch.full((), count, dtype=torch.float32, device=device),
            settings={**FusedRule.of("adam", group).settings, "amsgrad": False, "maximize": False},
        )

    def master(self, parameter: Tensor) -> Tensor:
        """Return the float32 master of a parameter, see `master_of`."""
        return master_of(parameter.detach(), self.state.get(parameter, {}))

    def _first_state(self, parameter: Tensor) -> dict[str, Any]:
        _refuse_weight(parameter)
        weight, made = parameter.detach(), {"step": torch.zeros((), dtype=torch.float32)}
        for name in _MOMENTS:
            made[name] = torch.zeros_like(weight, dtype=_DTYPES[self.moments])
            if self.moments == "8bit":
                made[name].fill_(codes_of(name == "exp_avg", torch.device("cpu")).zero)
                made[_scale(name)] = weight.new_zeros(-(-weight.numel() // BLOCK), dtype=torch.float32)
        return made | self._remainder(parameter, {})

    def _remainder(self, parameter: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight, remainder, known = parameter.detach(), given.get("remainder"), given.get("sums")
        if not self.masters or weight.dtype != torch.bfloat16:
            return {}
        if remainder is None:
            remainder = fresh_remainder(weight, hash_of(self.seed, 0, self._numbers.get(id(parameter), 0), _FIRST))
        return {
            "remainder": remainder.to(weight.device).contiguous(),
            "sums": sums_of(weight) if known is None else known.to(weight.device),
        }

    # --- state dicts --------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of AdamW; moments in another format are converted.

        Raises:
            ValueError: The state is that of another kind of optimizer, or of other parameters.
        """
        for group in state_dict["param_groups"]:
            if option := next((name for name in ("amsgrad", "maximize") if group.get(name)), None):
                raise ValueError(f"The loaded optimizer has {option}=True, which SplitAdamW cannot do. Use AdamW.")
        states = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(order, every, strict=True):
            if states.get(index):
                self.state[parameter] = self._adopted(parameter, states[index])

    def _adopted(self, parameter: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        refuse_other_state(given, parameter.shape)
        device = parameter.device
        made = {"step": torch.as_tensor(given["step"]).to("cpu", torch.float32)}
        for name in _MOMENTS:
            is_coded = _scale(name) in given
            if given[name].dtype == _DTYPES[self.moments] and is_coded == (self.moments == "8bit"):
                made |= {key: given[key].to(device).contiguous() for key in (name, _scale(name)) if key in given}
                continue
            values = float32_moment(given, name).to(device)
            made[name] = torch.empty_like(parameter, dtype=_DTYPES[self.moments])
            if self.moments != "8bit":
                made[name].copy_(values)
                continue
            made[_scale(name)] = values.new_zeros(-(-values.numel() // BLOCK))
            table, scratch = codes_of(name == "exp_avg", device), CodeScratch.empty(values.numel(), device)
            quantise(values.clone().view(-1), table, scratch, made[name].view(-1), made[_scale(name)])
        return made | self._remainder(parameter, given)


def refuse_other_state(given: Mapping[str, Any], shape: torch.Size) -> None:
    """Raise ValueError if the state of a parameter is not that of an AdamW, or of another shape."""
    missing = [name for name in ("step", *_MOMENTS) if name not in given]
    if missing:
        raise ValueError(
            f"The loaded state of the optimizer has no {missing[0]!r}, only {', '.join(map(repr, given))}, so it was "
            "not made by AdamW or SplitAdamW. Resume with the optimizer that made it."
        )
    for name in (*_MOMENTS, *(["remainder"] if "remainder" in given else [])):
        if given[name].shape != shape:
            raise ValueError(f"The loaded {name!r} has the shape {list(given[name].shape)}, its weight {list(shape)}.")


def master_of(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Return the float32 master of a weight; without a remainder, this is the weight in float32.

    If weights of a page have changed since the last step, the page counts as without remainders, see [Note: Split
    masters].

    Args:
        weight: The weight.
        state: State of the weight in SplitAdamW.
    """
    if "remainder" not in state or weight.dtype != torch.bfloat16:
        return weight.float()
    weight, remainder = weight.contiguous(), state["remainder"].to(weight.device).contiguous()
    changed = (sums_of(weight) != state["sums"].to(weight.device)).nonzero().flatten().tolist()
    if changed:
        remainder = remainder.clone()
        for page in changed:
            remainder.view(-1)[page * PAGE : (page + 1) * PAGE] = 0
    return join(weight, remainder)


def float32_moment(given: Mapping[str, Any], name: str) -> Tensor:
    """Return a moment of a state of AdamW or SplitAdamW in float32, contiguous.

    Args:
        given: State of one parameter.
        name: `"exp_avg"` or `"exp_avg_sq"`.
    """
    moment = given[name].contiguous()
    if _scale(name) not in given:
        return moment.float()
    table, scratch = codes_of(name == "exp_avg", moment.device), CodeScratch.empty(moment.numel(), moment.device)
    values = torch.empty(moment.shape, dtype=torch.float32, device=moment.device)
    dequantise(moment.view(-1), given[_scale(name)], table, scratch, values.view(-1))
    return values


def tile_of(device: torch.device, width: int = 1) -> int:
    """Return the number of elements of a tile, whole pages, for threads that compute on `width` cores each."""
    return TILE * width if device.type == "cpu" else DEVICE_TILE


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter, flat.

    Raises:
        ValueError: The gradient is sparse.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ValueError(f"SplitAdamW does not step sparse gradients (shape {list(parameter.shape)}). Use SparseAdam.")
    return gradient.detach().reshape(-1)


def _scale(name: str) -> str:
    return f"{name}_scale"


def _refuse_weight(parameter: Tensor) -> None:
    shape = list(parameter.shape)
    if not parameter.is_contiguous():
        raise ValueError(
            f"SplitAdamW steps contiguous weights, not one of shape {shape} and strides {parameter.stride()}."
        )
    if parameter.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"SplitAdamW steps bfloat16 and float32 weights, not {str(parameter.dtype).removeprefix('torch.')} (shape "
            f'{shape}). Set Trainer(precision="bf16-true").'
        )


@dataclass(frozen=True)
class TileScratch:
    """Memory for a tile of N elements.

    Attributes:
        master: float32, shape (N,).
        bits: The memory of `master` as int32.
        gradient: float32, shape (N,).
        moments: Two of float32, shape (N,).
        spare: int32, shape (N,).
        random: Memory and `sequence` for random bits, three of int32, shape (N / 2,) rounded up.
        codes: Memory for codes.
        sixteen: The number 16 as a tensor; PyTorch would turn a Python number into a new tensor for each shift.
    """

    master: Tensor
    bits: Tensor
    gradient: Tensor
    moments: list[Tensor]
    spare: Tensor
    random: list[Tensor]
    codes: CodeScratch
    sixteen: Tensor


class SplitScratch:
    """Memory for a tile on a device.

    Args:
        device: The device.
        size: Elements of the tile.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self.size = size
        # Not in the default dtype: `precision="bf16-true"` changes that while the model computes.
        self._rows = torch.empty(4, size, dtype=torch.float32, device=device)
        self._codes = CodeScratch.empty(size, device)
        self._sequence = sequence(size // 2, device)
        self._sixteen = torch.tensor(16, dtype=torch.int32, device=device)
        self._cuts: dict[int, TileScratch] = {}

    def cut(self, number: int) -> TileScratch:
        """Return memory for `number` elements."""
        if number not in self._cuts:
            master, gradient, first, second = (row[:number] for row in self._rows)
            half, places = -(-number // 2), self._codes.places.view(torch.int32)
            self._cuts[number] = TileScratch(
                master=master,
                bits=master.view(torch.int32),
                gradient=gradient,
                moments=[first, second],
                spare=places[:number],
                random=[places[number:][:half], places[:half], self._sequence[:half]],
                codes=self._codes.cut(number),
                sixteen=self._sixteen,
            )
        return self._cuts[number]


@dataclass(frozen=True)
class SplitStep:
    """One step of a parameter with N elements, in the order in which they lie in memory.

    Attributes:
        weight: bfloat16 or float32, shape (N,).
        moments: First and second moment, shape (N,).
        scales: Scales of 8-bit moments, shape (N / 256,) rounded up; empty for other formats.
        tables: Codes of 8-bit moments; empty for other formats.
        remainder: Lower bits of the masters, int16, shape (N,); None: there are none.
        sums: Sums of the weights after the last step, shape (pages,), int64; None: there are no remainders.
        keys: Keys of the random bits for the weight and for the second moment.
        count: Number of the step, float32, on the device of the weight.
        settings: Hyperparameters of the fused kernel.
    """

    weight: Tensor
    moments: list[Tensor]
    scales: list[Tensor]
    tables: tuple[Codes, ...]
    remainder: Tensor | None
    sums: Tensor | None
    keys: list[int]
    count: Tensor
    settings: dict[str, Any]

    def step(self, scratch: SplitScratch, place: slice, gradient: Tensor) -> None:
        """Step some elements.

        Args:
            scratch: Memory for as many elements.
            place: Whole pages, except at the end of the parameter.
            gradient: Gradient of these elements, in any floating dtype.
        """
        begin, end = place.start, place.stop
        cut, weight = scratch.cut(end - begin), self.weight[begin:end]
        cut.gradient.copy_(gradient)
        master = weight if weight.dtype == torch.float32 else cut.master
        if self.remainder is not None:
            self._join(begin, end, cut)
        elif master is not weight:
            master.copy_(weight)
        moments = [self._moment(index, begin, end, cut) for index in range(2)]
        first, second = moments
        torch._fused_adamw_([master], [cut.gradient], [first], [second], [], [self.count], **self.settings)
        for index, values in enumerate(moments):
            self._keep(index, values, begin, end, cut)
        if self.remainder is not None:
            self._split(begin, end, cut)
        elif master is not weight:
            self._round(master, weight, begin, _WEIGHT, cut)

    def _pages(self, begin: int, end: int) -> slice:
        return slice(begin // PAGE, -(-end // PAGE))

    def _join(self, begin: int, end: int, cut: TileScratch) -> None:
        assert self.remainder is not None
        assert self.sums is not None
        remainder, known = self.remainder[begin:end], self.sums[self._pages(begin, end)]
        cut.bits.copy_(self.weight[begin:end].view(torch.int16))
        same = sums(cut.bits) == known
        if same.device.type != "cpu" or not bool(same.all()):  # Do not wait for an accelerator.
            whole = remainder.numel() // PAGE * PAGE
            remainder[:whole].view(-1, PAGE).mul_(same[: whole // PAGE, None])
            remainder[whole:].mul_(same[-1])
        cut.bits.mul_(1 << 16).add_(cut.spare.copy_(remainder))

    def _split(self, begin: int, end: int, cut: TileScratch) -> None:
        assert self.remainder is not None
        assert self.sums is not None
        self.remainder[begin:end].copy_(cut.bits)  # The lower 16 bits.
        cut.bits.add_(0x8000).bitwise_right_shift_(cut.sixteen)
        self.sums[self._pages(begin, end)] = sums(cut.bits)
        self.weight[begin:end].view(torch.int16).copy_(cut.bits)

    def _moment(self, index: int, begin: int, end: int, cut: TileScratch) -> Tensor:
        moment, values = self.moments[index][begin:end], cut.moments[index]
        if moment.dtype == torch.float32:
            return moment
        if self.tables:
            scales = self.scales[index][begin // BLOCK : -(-end // BLOCK)]
            return dequantise(moment, scales, self.tables[index], cut.codes, values)
        return values.copy_(moment)

    def _keep(self, index: int, values: Tensor, begin: int, end: int, cut: TileScratch) -> None:
        moment = self.moments[index][begin:end]
        if self.tables:
            scales = self.scales[index][begin // BLOCK : -(-end // BLOCK)]
            quantise(values, self.tables[index], cut.codes, moment, scales)
        elif index == 1 and moment.dtype == torch.bfloat16:
            self._round(values, moment, begin, _SECOND, cut)
        elif moment.dtype != torch.float32:
            moment.copy_(values)

    def _round(self, values: Tensor, out: Tensor, begin: int, use: int, cut: TileScratch) -> None:
        bits, spare, numbers = cut.random
        random = random_bits(begin, bits, spare, numbers, self.keys[use])
        round_stochastically(values, random[: values.numel()], cut.spare, out)


class TileMemory(threading.local):
    """Memory for tiles, separate for each thread."""

    def __init__(self) -> None:
        self._scratch: dict[torch.device, SplitScratch] = {}

    def step(self, made: SplitStep, place: slice, gradient: Tensor) -> None:
        """Make the step of some elements; the arguments are those of `SplitStep.step`."""
        device, size = made.weight.device, place.stop - place.start
        if device not in self._scratch or self._scratch[device].size < size:
            self._scratch[device] = SplitScratch(device, max(size, tile_of(device)))
        made.step(self._scratch[device], place, gradient)
