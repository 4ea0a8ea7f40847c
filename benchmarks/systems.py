"""Other systems that keep model states in host memory, to compare with on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.optim import AdamW, Optimizer

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]
LEARNING_RATE = 1e-4


def _fused_adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of `CausalLMModule`; the host steps with the same kernel in all systems."""
    # `fused` is set in the group: after AdamW(fused=True), Lightning refuses clipping under mixed precision.
    return AdamW([{"params": [*parameters], "fused": True}], lr=LEARNING_RATE)


@dataclass(frozen=True)
class System:
    """A system, for `python -m benchmarks.gpu`.

    Attributes:
        strategy: Makes the strategy for the Trainer, given the type of the device.
        optimizer: Makes the optimizer for parameters.
        shard: Shards a model before its optimizer is made; None does nothing.
        requires: Package that must be installed; None for none.
    """

    strategy: Callable[[str], Strategy | str]
    optimizer: OptimizerMaker = _fused_adam
    shard: Callable[[nn.Module], None] | None = None
    requires: str | None = None


def _deepspeed(device: str) -> Strategy:
    strategies = importlib.import_module("lightning.pytorch.strategies")
    return strategies.DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)


def _deepspeed_adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    adam = importlib.import_module("deepspeed.ops.adam")
    return adam.DeepSpeedCPUAdam(parameters, lr=LEARNING_RATE)


def _torchao_adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    optim = importlib.import_module("torchao.optim")
    # Gradients of a model whose states do not fit have to leave the device, too.
    made = optim.CPUOffloadOptimizer(list(parameters), AdamW, offload_gradients=True, lr=LEARNING_RATE, fused=True)
    if not hasattr(made, "state"):  # Lightning asks every optimizer for both.
        made.state, made.defaults = {}, {}
    return made


class _FSDP2(ModelParallelStrategy):
    """FSDP2 whose weights stay on the host: Lightning would move them to the device, which FSDP2 then refuses."""

    def model_to_device(self) -> None:
        _update_properties(self.lightning_module, device=self.root_device)


def _fsdp2(device: str) -> Strategy:
    # Gradients are on the CPU, so their norm is reduced there.
    backend = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    return _FSDP2(data_parallel_size=1, tensor_parallel_size=1, process_group_backend=backend)


def _shard(model: nn.Module) -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    policies = {
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available()),
        # It sends weights in two-byte dtypes, like ProTrain; gradients are summed in float32.
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.model.layers:
        fsdp.fully_shard(block, **policies)
    fsdp.fully_shard(model, **policies)


PLAIN = "plain Lightning"
SYSTEMS = {
    PLAIN: System(lambda device: "auto"),
    "DeepSpeed ZeRO-3 Offload": System(_deepspeed, _deepspeed_adam, requires="deepspeed"),
    # It steps during the download of gradients, before their norm is known.
    "torchao CPUOffloadOptimizer": System(lambda device: "auto", _torchao_adam, requires="torchao"),
    "FSDP2 with CPUOffloadPolicy": System(_fsdp2, shard=_shard),
}
