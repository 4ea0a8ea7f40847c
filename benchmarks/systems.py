"""Other systems that keep model states in host memory, to compare with on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.optim import AdamW, Optimizer

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class System:
    """A system, for `python -m benchmarks.gpu`.

    Attributes:
        strategy: Makes the strategy for the Trainer.
        optimizer: Makes the optimizer for parameters.
        shard: Shards a model before its optimizer is made; None does nothing.
        requires: Package that must be installed; None for none.
        clips: True if the system can clip gradients by norm.
    """

    strategy: Callable[[], Strategy | str]
    optimizer: OptimizerMaker = field(default=partial(AdamW, lr=LEARNING_RATE))
    shard: Callable[[nn.Module], None] | None = None
    requires: str | None = None
    clips: bool = True

    @property
    def is_installed(self) -> bool:
        """True if the required package is installed."""
        return self.requires is None or importlib.util.find_spec(self.requires) is not None


def _deepspeed() -> Strategy:
    strategies = importlib.import_module("lightning.pytorch.strategies")
    return strategies.DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)


def _deepspeed_adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    adam = importlib.import_module("deepspeed.ops.adam")
    return adam.DeepSpeedCPUAdam(parameters, lr=LEARNING_RATE)


def _torchao_adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    optim = importlib.import_module("torchao.optim")
    return optim.CPUOffloadOptimizer(parameters, AdamW, lr=LEARNING_RATE, fused=True)


def _fsdp2() -> Strategy:
    # Gradients are on the CPU, so their norm is reduced there.
    return ModelParallelStrategy(
        data_parallel_size=1, tensor_parallel_size=1, process_group_backend="cuda:nccl,cpu:gloo"
    )


def _shard(model: nn.Module) -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    policies = {
        "offload_policy": fsdp.CPUOffloadPolicy(),
        # It sends weights in two-byte dtypes, like ProTrain; gradients are summed in float32.
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.model.layers:
        fsdp.fully_shard(block, **policies)
    fsdp.fully_shard(model, **policies)


SYSTEMS = {
    "plain Lightning": System(lambda: "auto"),
    "DeepSpeed ZeRO-3 Offload": System(_deepspeed, _deepspeed_adam, requires="deepspeed"),
    # It steps during the download of gradients, before their norm is known.
    "torchao CPUOffloadOptimizer": System(lambda: "auto", _torchao_adam, requires="torchao", clips=False),
    "FSDP2 with CPUOffloadPolicy": System(_fsdp2, shard=_shard),
}
