"""Runs that FSDP2 would not train, or not as their user means it, are refused before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_protrain.callbacks.save_pretrained import SavePretrained

PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed")


def refuse_precision(plugin: Precision | None) -> None:
    """Only what Lightning itself makes of these names.

    Raises:
        ValueError: Another precision, or another plugin.
    """
    if plugin is None:
        return
    if type(plugin) not in (Precision, HalfPrecision, MixedPrecision) or plugin.precision not in PRECISIONS:
        raise ValueError(
            f"precision={plugin.precision!r} ({type(plugin).__name__}) is not supported by "
            f'strategy="protrain_fsdp2". Set Trainer(precision=...) to one of {", ".join(map(repr, PRECISIONS))}.'
        )


def refuse_run(trainer: Trainer, model: LightningModule, sync_batchnorm: bool) -> None:
    """Of a fit.

    Raises:
        ValueError: Manual optimization, a callback that needs whole weights, or `sync_batchnorm`.
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
        optimizers: Those of the model.
        cpu_offload: Whether shards are on the host.

    Raises:
        ValueError: The kernels of bitsandbytes take no DTensor; capturable steps take none on the host.
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
    """Of a model that the strategy has not sharded itself.

    Raises:
        ValueError: A module is sharded already.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{name!r} is sharded already. Take fully_shard out of configure_model, or use ModelParallelStrategy, "
                "which leaves it to you."
            )
