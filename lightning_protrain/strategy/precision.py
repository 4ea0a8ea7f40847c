"""Precision plugin of the strategy: Lightning's plugins set dtypes and autocast; the runtime clips and steps.

[Note: Lost updates]
A bfloat16 number has 8 significant bits. An update below half a unit in the last place leaves the weight as it is, and
Adam's updates are about as large as the learning rate: with a rate of 1e-5, a weight of 0.01 does not change. A sample
of weights before and after one optimizer step shows how many updates are lost. An update counts if the optimizer's
state says that there was one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.optim.bnb_optimizers import in_tiles, mean_state_bytes, refuse_without_host_step
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW
from lightning_protrain.runtime.optim.step import fused_host_step, on_host_threads

PrecisionName = Literal["64-true", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]
_MIXED = ("bf16-mixed", "16-mixed")
_TRUE = ("bf16-true", "16-true")
_NAMES = get_args(PrecisionName)

# Number of parameters, and of elements of each, in the sample.
MOST_PARAMETERS, MOST_ELEMENTS = 64, 1024
# The sample is taken before the first step with at least this fraction of the full learning rate.
WARM = 0.5
# Warn if at least this fraction of the updates is lost.
MANY = 0.5
LOW_DTYPES = ("bfloat16", "float16")
_WIDER = (
    'Train float32 weights (precision "bf16-mixed"), or keep float32 masters beside bfloat16 weights '
    '(CausalLMModule(optimizer="split_adamw"), or SplitAdamW, with precision "bf16-true"), or give'
)
# Maximum number of sampled steps: the step of a gradient overflow updates no weight, so the next step is sampled.
TRIES = 10


class ProTrainPrecision(Precision):
    """Computes as Lightning's plugin of the same name; docs/how/precision.md tells where each dtype is used.

    Args:
        precision: `"32-true"`; `"64-true"`, `"bf16-true"`, `"16-true"`: everything in that dtype; `"bf16-mixed"`:
            float32 weights with autocast; `"16-mixed"`: autocast in float16, with a gradient scaler.
        scaler: Gradient scaler for `"16-mixed"`; None: PyTorch's default scaler.

    Attributes:
        scaler: Gradient scaler; None if gradients are not scaled.
    """

    def __init__(self, precision: PrecisionName = "32-true", scaler: torch.amp.GradScaler | None = None) -> None:
        if precision not in _NAMES:
            raise ValueError(_refusal(precision, "ProTrainPrecision"))
        self.precision = precision
        self.scaler = scaler
        # Autocast needs the type of the device, which is known once the strategy opens the device.
        self._base = DoublePrecision() if precision == "64-true" else Precision()
        if precision in _TRUE:
            self._base = HalfPrecision(precision)  # type: ignore[arg-type]
        self._async_step: AsyncStep | None = None
        self._threads: int | None = None
        self._device_type = "cpu"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_async_step": None}  # A copy steps on the host without a thread.

    @property
    def low_dtype(self) -> torch.dtype | None:
        """Dtype in which autocast computes; None without autocast."""
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision)

    @property
    def low_dtype_name(self) -> str | None:
        """Name of `low_dtype` without the `torch.` prefix; None without autocast."""
        return str(self.low_dtype).removeprefix("torch.") if self.low_dtype is not None else None

    def open(self, device_type: str) -> None:
        """Prepare to compute on `device_type`; call it before computing."""
        if self.precision in _MIXED and not isinstance(self._base, MixedPrecision):
            self._base = MixedPrecision(self.precision, device_type, self.scaler)  # type: ignore[arg-type]
            self.scaler = self._base.scaler
        self._device_type = device_type

    def attach(self, async_step: AsyncStep | None, threads: int | None = None) -> None:
        """Let `async_step` clip and step from now on.

        Args:
            async_step: The asynchronous step; None: clip and step as Lightning does.
            threads: Number of OpenMP threads for steps of host parameters on this thread; None: leave it unchanged.
        """
        self._async_step, self._threads = async_step, threads

    # --- numbers ------------------------------------------------------------------------------------------------------

    def state_bytes(self, optimizers: Iterable[Optimizer]) -> float:
        """Return the bytes of optimizer state, with masters, for each trained element, averaged over all elements."""
        return mean_state_bytes(optimizers)

    def host_step_refusal(self, optimizers: Iterable[Optimizer]) -> str:
        """Return why an optimizer cannot step weights in host memory; empty if all can."""
        try:
            refuse_without_host_step(optimizers)
        except ValueError as error:
            return str(error)
        return ""

    # --- computing ----------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._base.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        return self._base.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self._base.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._base.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._base.module_init_context()

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Return the context of a step: autocast, or a default dtype."""
        with self._base.forward_context():
            yield

    def state_dict(self) -> dict[str, Any]:
        return self._base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base.load_state_dict(state_dict)

    # --- stepping -----------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(tensor if self.scaler is None else self.scaler.scale(tensor), module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step the optimizer, except for parameters that the host steps after clipping, see [Note: Overlap].

        Raises:
            ValueError: The optimizer is fused and there is a scaler; it would have to unscale on two devices at once.
        """
        if self.scaler is None:
            prepared = partial(self._wrap_closure, model, optimizer, closure)
            with in_tiles(optimizer), self._fused(optimizer, prepared) as final:
                return optimizer.step(closure=final, **kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f'{type(optimizer).__name__} is fused and precision="16-mixed" scales gradients, which are on two '
                'devices. Leave `fused` out, or use precision="bf16-mixed".'
            )
        result = closure()
        skipped = result is None and model.automatic_optimization
        if not skipped:
            with _scale_on_host(self.scaler), on_host_threads(optimizer, self._threads):
                self.scaler.unscale_(optimizer)
            if self._async_step is not None:
                overflows = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
                self._async_step.agree_on_overflow(overflows)
        self._after_closure(model, optimizer)
        if skipped:
            return result
        with in_tiles(optimizer), self._fused(optimizer, lambda: None) as split:
            split()
            result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def _fused(self, optimizer: Optimizer, closure: Callable[[], Any]) -> AbstractContextManager[Callable[[], Any]]:
        """Step host parameters with the fused kernel, except those that the asynchronous step handles itself."""
        if (async_step := self._async_step) is None:
            return fused_host_step(optimizer, closure, self._device_type)
        return fused_host_step(
            optimizer,
            closure,
            self._device_type,
            stepped=async_step.launch,
            threads=self._threads,
            then=async_step.publishing.end_step,
        )

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each gradient value to the bound."""
        if self._async_step is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self._async_step.clip_value(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the total norm of all gradients."""
        if self._async_step is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self._async_step.clip_norm(self.main_params(optimizer), clip_val)


@contextmanager
def _scale_on_host(scaler: torch.amp.GradScaler) -> Generator[None]:
    """Keep the gradient scale in host memory within this context; PyTorch copies it to each gradient's device.

    PyTorch does not wait for the opposite copy, from a GPU to gradients on the host: these would be divided by whatever
    the memory held before the copy.
    """
    there = scaler._scale
    if there is not None:
        scaler._scale = there.cpu()
    try:
        yield
    finally:
        scaler._scale = there


def as_protrain_precision(plugin: Precision | None) -> ProTrainPrecision:
    """Return the strategy's precision plugin in place of Lightning's.

    Args:
        plugin: The plugin that the Trainer made of its `precision` flag, or that the user gave.

    Raises:
        ValueError: The strategy does not support this precision.
    """
    if isinstance(plugin, ProTrainPrecision):
        return plugin
    if plugin is None or type(plugin) is Precision:
        return ProTrainPrecision()
    # Exactly these classes: derived classes may do anything.
    if type(plugin) is MixedPrecision:
        return ProTrainPrecision(cast(PrecisionName, plugin.precision), plugin.scaler)
    if type(plugin) in (HalfPrecision, DoublePrecision):
        return ProTrainPrecision(cast(PrecisionName, plugin.precision))
    raise ValueError(_refusal(plugin.precision, type(plugin).__name__))


def _refusal(precision: object, name: str) -> str:
    return (
        f'precision={precision!r} ({name}) is not supported by strategy="protrain". Set Trainer(precision=...) to one '
        f"of {', '.join(map(repr, _NAMES))}, or use another strategy."
    )


class _Part(NamedTuple):
    """Some elements of a parameter before a step."""

    optimizer: Optimizer
    parameter: Tensor
    values: Tensor


class LostUpdates:
    """A check of the first full step of a run, see [Note: Lost updates]."""

    def __init__(self) -> None:
        self._sample: list[_Part] = []
        self._at, self._tries = -1, 0

    def begin_batch(self, trainer: Trainer, finish: Callable[[], object] = lambda: None) -> None:
        """Warn if a step has ended since the sample was taken, or take the sample; call it before every batch.

        Args:
            trainer: Trainer with its weights at rest.
            finish: Waits for steps of the optimizer that still run.
        """
        # Lightning's search for a learning rate begins with tiny ones.
        if self._tries > TRIES or any(isinstance(callback, _LRCallback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return
        if self._sample and trainer.global_step > self._at:
            finish()
            self.end(trainer)
        if not self._sample and self._tries <= TRIES and all(map(_is_warm, trainer.optimizers)):
            finish()
            self._sample, self._at = list(_sample(trainer.optimizers)), trainer.global_step
            self._tries += 1 if self._sample else TRIES + 1

    def end(self, trainer: Trainer) -> None:
        """Warn if a step has ended since the sample was taken; call it at the end of training."""
        if not self._sample or trainer.global_step <= self._at:
            return
        lost, counted, dtypes = 0, 0, dict[str, int]()
        for part in self._sample:
            same = _elements(part.parameter) == part.values
            updated = _updated(part, same)
            still = int((same & updated).sum())
            lost, counted = lost + still, counted + int(updated.sum())
            name = str(part.parameter.dtype).removeprefix("torch.")
            dtypes[name] = dtypes.get(name, 0) + still
        self._sample = []
        if not counted:
            return
        self._tries = TRIES + 1
        if lost >= MANY * counted:
            dtype = max(dtypes, key=lambda name: dtypes[name])
            rates = sorted({group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups})
            wider = _WIDER if dtype in LOW_DTYPES else "Give"
            rank_zero_warn(
                f"{100 * lost / counted:.0f} % of the updates are lost: a step left {lost:,} of {counted:,} in a "
                f"sample of weights unchanged, because the update is below half a unit in the last place of {dtype}. "
                f"The learning rate is {' and '.join(f'{float(rate):.3g}' for rate in rates)}. {wider} a larger "
                "learning rate."
            )


def _is_warm(optimizer: Optimizer) -> bool:
    """Return True if a learning rate is at least `WARM` of its initial value, the full rate of most schedules."""
    rates = [(float(group.get("lr") or 0.0), float(group.get("initial_lr") or 0.0)) for group in optimizer.param_groups]
    return any(rate > 0 and rate >= WARM * full for rate, full in rates)


def _sample(optimizers: Sequence[Optimizer]) -> Iterator[_Part]:
    """Yield a sample of the weights of all optimizers that may lose updates."""
    pairs = [
        (optimizer, parameter)
        for optimizer in optimizers
        if not _keeps_small_updates(optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.is_floating_point() and parameter.numel()
    ]
    for optimizer, parameter in pairs[:: -(-len(pairs) // MOST_PARAMETERS) or 1]:
        yield _Part(optimizer, parameter, _elements(parameter).clone())


def _keeps_small_updates(optimizer: Optimizer) -> bool:
    """Return True for SplitAdamW, and for an optimizer with an option that says that it rounds stochastically.

    The masters of SplitAdamW move where its weights do not. Without masters it rounds stochastically: a small update
    changes some weights by more.
    """
    if isinstance(optimizer, SplitAdamW):
        return True
    options: Mapping[str, Any] = {**vars(optimizer), **getattr(optimizer, "defaults", {})}
    return any("stochastic" in name and bool(value) for name, value in options.items())


def _elements(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, always the same, on the host."""
    with below_guard():  # No step is pending, and reading invalidates no shadow copy.
        local = tensor.detach()
        if hasattr(local, "to_local"):  # A DTensor: the part of this rank.
            local = local.to_local()
        flat = local.reshape(-1)
        return flat[:: -(-flat.numel() // MOST_ELEMENTS) or 1].cpu()


def _updated(part: _Part, same: Tensor) -> Tensor:
    """Return a mask of the elements that the optimizer has updated, according to its state."""
    state = part.optimizer.state.get(part.parameter, {})
    tensors = [
        value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1 and not name.startswith("qmap")
    ]
    for value in tensors:
        if value.is_floating_point() and value.shape == part.parameter.shape:
            return _elements(value) != 0
    if any(value.is_floating_point() and bool(value.any()) for value in tensors):
        return torch.ones_like(same)
    # Without a state, an element that did not change may have had no gradient.
    return torch.full_like(same, fill_value=not tensors and not bool(same.all()))
