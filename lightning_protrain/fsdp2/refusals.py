"""Errors for models and Trainers that FSDP2 does not support, with advice."""

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

from lightning_protrain.fsdp2.units import ShardUnits, owners_of
from lightning_protrain.runtime.optim.fused import KERNELS
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW

PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed")


def refuse_precision(plugin: Precision | None) -> None:
    """Raise ValueError for a precision plugin other than Lightning's own for one of PRECISIONS."""
    if plugin is None:
        return
    if type(plugin) not in (Precision, HalfPrecision, MixedPrecision) or plugin.precision not in PRECISIONS:
        raise ValueError(
            f"precision={plugin.precision!r} ({type(plugin).__name__}) is not supported by "
            f'strategy="protrain_fsdp2". Set Trainer(precision=...) to one of {", ".join(map(repr, PRECISIONS))}.'
        )


def refuse_run(trainer: Trainer, model: LightningModule, sync_batchnorm: bool, saves_shards: bool) -> None:
    """Raise ValueError for manual optimization, `sync_batchnorm`, or a callback that needs whole weights.

    Args:
        trainer: The Trainer.
        model: The module.
        sync_batchnorm: Whether the Trainer was asked for it.
        saves_shards: Whether each rank saves its shards, which a callback with `needs_whole_checkpoints` cannot write.
    """
    if not model.automatic_optimization:
        raise ValueError(
            'automatic_optimization=False: strategy="protrain_fsdp2" gathers weights for a whole training_step, but a '
            'backward within it would free them. Use strategy="ddp", or automatic optimization.'
        )
    if sync_batchnorm:
        raise ValueError('sync_batchnorm=True is not supported by strategy="protrain_fsdp2". Remove it.')
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if getattr(callback, "needs_whole_weights", False):
            raise ValueError(
                f'{type(callback).__name__} needs whole weights, but strategy="protrain_fsdp2" leaves a shard on each '
                "rank. Remove the callback, and export a checkpoint after the run."
            )
        if saves_shards and getattr(callback, "needs_whole_checkpoints", False):
            raise ValueError(
                f"{type(callback).__name__} writes whole checkpoints. With save_distributed_checkpoint=True use "
                "ModelCheckpoint in its place, or leave save_distributed_checkpoint out."
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} keeps a second, whole copy of the weights, which cannot be averaged with "
                'the shards of strategy="protrain_fsdp2". Remove the callback.'
            )


def refuse_optimizers(optimizers: Iterable[Optimizer], cpu_offload: bool = False) -> None:
    """Raise ValueError for SplitAdamW, an optimizer of bitsandbytes, or `capturable=True` on the host.

    Args:
        optimizers: Optimizers of the model.
        cpu_offload: True if shards are on the host.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, SplitAdamW):
            raise ValueError(
                f'{name} keeps float32 masters beside bfloat16 weights, but strategy="protrain_fsdp2" shards float32 '
                'weights. Use torch.optim.AdamW with precision "bf16-mixed", or strategy="protrain".'
            )
        if any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(optimizer).__mro__):
            raise ValueError(
                f"{name} is an optimizer of bitsandbytes, which cannot step the shards of "
                'strategy="protrain_fsdp2". Use torch.optim.AdamW, or strategy="protrain".'
            )
        if cpu_offload and any(group.get("capturable") for group in optimizer.param_groups):
            raise ValueError(
                f"{name} has capturable=True, which steps on a GPU, but cpu_offload=True steps on the host. Remove one "
                "of the two."
            )


def fuse_host_steps(optimizers: Iterable[Optimizer]) -> None:
    """Choose PyTorch's fused kernel for shards on the host, where the user chose no implementation.

    On the host, PyTorch's default is a loop over many operations, which takes 8.75 times as long with AdamW.

    Args:
        optimizers: Optimizers of the model, whose groups are changed.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups if type(optimizer) in KERNELS else ():
            if group.get("fused") is None and not group.get("foreach") and not group.get("differentiable"):
                group["fused"] = True


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError if the user has sharded a module."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{name!r} is sharded already. Remove fully_shard from configure_model, or use ModelParallelStrategy, "
                "which shards only in configure_model."
            )


def refuse_unshardable(model: nn.Module, units: ShardUnits, waiting: Collection[str] = ()) -> None:
    """Raise ValueError if FSDP2 cannot shard a model.

    Args:
        model: The model to shard.
        units: FSDP units of the model.
        waiting: Names of parameters that may be on the meta device, because another rank sends their values.

    Raises:
        ValueError: If a parameter has no values, no dimensions or quantised values, or two trainable parameters of one
            unit have different dtypes.
    """
    chosen = {id(model.get_submodule(name)) for name in units.names}
    first: dict[tuple[str, ...], tuple[str, torch.dtype]] = {}
    for name, owners in owners_of(model, chosen).items():
        parameter = model.get_parameter(name)
        if parameter.is_meta and name not in waiting:
            raise ValueError(
                f"{name!r} is on the meta device, so it has no values. Build the model on the CPU; each rank takes its "
                "shards from there."
            )
        if parameter.ndim == 0:
            raise ValueError(
                f"{name!r} has no dimension, so it cannot be sharded. Give it the shape (1,): "
                "nn.Parameter(value.reshape(1))."
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                f"{name!r} has quantised values ({parameter.dtype}), which FSDP2 would separate from their scales. Use "
                'strategy="protrain".'
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
    """Explain the error that PyTorch raises if a weight is used within this context while it is not gathered."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            "A weight was used while it was not gathered: a module reads the weight of another module instead of "
            "calling that module, or calls its `forward` directly. Call the module itself, or give policy='none' or a "
            "larger min_num_params."
        ) from error
