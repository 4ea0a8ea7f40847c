"""Refuses models that FSDP2 cannot train, says what to change, and explains errors of FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.fsdp2.units import ShardUnits, owners_of

PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed")


def refuse_precision(plugin: Precision | None) -> None:
    """Refuse a precision plugin, unless it is Lightning's own for one of the names in PRECISIONS.

    Raises:
        ValueError: The precision or the plugin is another one.
    """
    if plugin is None:
        return
    if type(plugin) not in (Precision, HalfPrecision, MixedPrecision) or plugin.precision not in PRECISIONS:
        raise ValueError(
            f"precision={plugin.precision!r} ({type(plugin).__name__}) is not supported by "
            f'strategy="protrain_fsdp2". Set Trainer(precision=...) to one of {", ".join(map(repr, PRECISIONS))}.'
        )


def refuse_run(trainer: Trainer, model: LightningModule, sync_batchnorm: bool) -> None:
    """Refuse a fit that FSDP2 cannot run.

    Raises:
        ValueError: Manual optimization, a callback that needs whole weights, or `sync_batchnorm` is used.
    """
    if not model.automatic_optimization:
        raise ValueError(
            'automatic_optimization=False: strategy="protrain_fsdp2" gathers weights around a whole training_step, and '
            'a backward pass within it would free them. Use strategy="ddp", or automatic optimization.'
        )
    if sync_batchnorm:
        raise ValueError('sync_batchnorm=True is not supported by strategy="protrain_fsdp2". Leave it out.')
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SavePretrained):
            raise ValueError(
                'SavePretrained writes weights that are whole, and strategy="protrain_fsdp2" leaves each rank a part. '
                "Remove the callback, and export a checkpoint after the run."
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} keeps a second, whole copy of the weights, which cannot be averaged with "
                'the parts that strategy="protrain_fsdp2" leaves on each rank. Remove the callback.'
            )


def refuse_optimizers(optimizers: Iterable[Optimizer], cpu_offload: bool = False) -> None:
    """Refuse optimizers that cannot step shards.

    Args:
        optimizers: Optimizers of the model.
        cpu_offload: True if shards are on the host.

    Raises:
        ValueError: The optimizer's kernels do not support DTensor: those of bitsandbytes, or capturable ones on the
            host.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(optimizer).__mro__):
            raise ValueError(
                f"{name} is an optimizer of bitsandbytes, which cannot step the parts of weights "
                'that strategy="protrain_fsdp2" leaves on each rank. Use torch.optim.AdamW, or strategy="protrain".'
            )
        if cpu_offload and any(group.get("capturable") for group in optimizer.param_groups):
            raise ValueError(
                f"{name} has capturable=True, which steps on a GPU, and cpu_offload=True steps on the host. Leave one "
                "of the two out."
            )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model that the user has sharded.

    Raises:
        ValueError: A module is sharded already.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{name!r} is sharded already. Take fully_shard out of configure_model, or use ModelParallelStrategy, "
                "which leaves it to you."
            )


def refuse_unshardable(model: nn.Module, units: ShardUnits, waiting: Collection[str] = ()) -> None:
    """Refuse a model that FSDP2 cannot shard, before anything is moved.

    Args:
        model: The model to shard.
        units: FSDP units of the model.
        waiting: Names of parameters that need no values on this rank.

    Raises:
        ValueError: A parameter has no memory, no dimensions or quantised values, or two trainable parameters of one
            unit have different dtypes.
    """
    chosen = {id(model.get_submodule(name)) for name in units.names}
    first: dict[tuple[str, ...], tuple[str, torch.dtype]] = {}
    for name, owners in owners_of(model, chosen).items():
        parameter = model.get_parameter(name)
        if parameter.is_meta and name not in waiting:
            raise ValueError(
                f"{name!r} has no memory (meta device), and nothing says what its values are. Build the model on the "
                "CPU; each rank takes its parts from there."
            )
        if parameter.ndim == 0:
            raise ValueError(
                f"{name!r} has no dimension, so it cannot be sharded. Make it one of shape (1,): "
                "nn.Parameter(value.reshape(1))."
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                f"{name!r} has quantised values ({parameter.dtype}), which FSDP2 would cut apart from what scales "
                'them. Use strategy="protrain".'
            )
        if not parameter.requires_grad:
            continue
        other, dtype = first.setdefault(tuple(owners), (name, parameter.dtype))
        if parameter.dtype != dtype:
            raise ValueError(
                f"{other!r} ({dtype}) and {name!r} ({parameter.dtype}) are trained in one FSDP unit, which reduces "
                "gradients of one dtype. Convert one of them, or freeze it."
            )


@contextmanager
def explained() -> Generator[None]:
    """Explain the error if a weight is used within this context while it is not gathered."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            "A weight was used while it was not gathered: some module reads the weight of another one instead of "
            "calling it, or calls its `forward` directly. Call the module itself, or give policy='none' or a larger "
            "min_num_params."
        ) from error
