"""ProTrainFSDP2Strategy: Lightning's ModelParallelStrategy that shards a model with FSDP2 by itself."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.model_parallel import _is_sharded_checkpoint
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_protrain.checkpoint_io import reader_of
from lightning_protrain.consensus import refuse_other_models
from lightning_protrain.epochs import length_is_known
from lightning_protrain.finite import FiniteLosses, OnNonFinite
from lightning_protrain.fsdp_refusals import refuse_optimizers, refuse_precision, refuse_run, refuse_sharded
from lightning_protrain.fsdp_state import (
    describe_tensors,
    load_optimizer_parts,
    load_parts,
    spread,
    whole_optimizer_state,
    whole_states,
)
from lightning_protrain.fsdp_steps import evaluating, explained, let_recompute, mixed_precision, point_to_parts
from lightning_protrain.fsdp_units import POLICIES, Policy, choose_checkpointed, choose_units, refuse_unshardable
from lightning_protrain.meetings import MeetingStrategy
from lightning_protrain.peers import PeerAccess, peers_found
from lightning_protrain.runtime.comm import find_meeting
from lightning_protrain.runtime.recompute import refuse_own_checkpointing, stop_caching

# Methods of a LightningModule that compute with its weights, besides `forward`.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "generate")


class ProTrainFSDP2Strategy(MeetingStrategy, ModelParallelStrategy):
    """Shards weights, gradients and optimizer states over all ranks with FSDP2, without the user's `configure_model`.

    No name of a parameter or module changes, and checkpoints are those of a plain Trainer.

    Args:
        policy: Which modules are gathered and freed one by one: `"transformer"`: the elements of the repeated lists of
            the model. `"size"`: modules of at least `min_num_params` parameters, from the bottom up. `"none"`: only the
            model as a whole.
        min_num_params: For `"size"`, and for checkpointing where the model has no repeated list.
        activation_checkpointing: Whether blocks recompute their activations in the backward pass.
        cpu_offload: Whether parts of weights, gradients and optimizer states are held on the host, where they are
            stepped too.
        sync_each_batch: Whether gradients are reduced after every micro-batch of an accumulation. If not, once for an
            optimizer step, and each rank holds whole gradients until then.
        save_distributed_checkpoint: Whether each rank saves its parts, which only this strategy and
            `ModelParallelStrategy` load. If not, rank 0 saves one whole checkpoint.
        on_nonfinite: As in `ProTrainStrategy`.
        process_group_backend, timeout: As in `ModelParallelStrategy`.

    Raises:
        ValueError: An argument out of its range; more under `setup`, before anything is sharded.
    """

    strategy_name = "protrain_fsdp2"

    def __init__(
        self,
        policy: Policy = "transformer",
        min_num_params: int = 100_000_000,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        sync_each_batch: bool = False,
        save_distributed_checkpoint: bool = False,
        on_nonfinite: OnNonFinite = "stop",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: give one of {', '.join(map(repr, POLICIES))}.")
        if type(min_num_params) is not int or min_num_params < 1:
            raise ValueError(f"min_num_params={min_num_params!r}: give a positive number of parameters.")
        for name, value in (
            ("activation_checkpointing", activation_checkpointing),
            ("cpu_offload", cpu_offload),
            ("sync_each_batch", sync_each_batch),
            ("save_distributed_checkpoint", save_distributed_checkpoint),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: give True or False.")
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._losses = FiniteLosses(on_nonfinite)
        self._policy = policy
        self._min_num_params = min_num_params
        self._activation_checkpointing = activation_checkpointing
        self._cpu_offload = cpu_offload
        self._sync_each_batch = sync_each_batch
        self._peers = PeerAccess("unknown")
        self._undo: list[Callable[[], object]] = []
        self._has_stepped = False
        # Whether gradients are added up in this batch; and whether some rank does not know how many there are.
        self._accumulates = False
        self._is_open_ended = False

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        refuse_precision(plugin)
        self._precision_plugin = plugin

    # --- set-up and teardown ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        # One mesh over all ranks; the base would make the ranks of a node one tensor-parallel group.
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()
        if self.world_size > 1:
            self._ranks = find_meeting(self.local_rank, self.num_processes, self._timeout)
            if self.lightning_module is not None:
                self._sigterm.listen(self.lightning_module.trainer)

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self._cpu_offload and self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"  # The norm of offloaded gradients is reduced on the host.
        return super()._get_process_group_backend()

    @property
    def peers(self) -> PeerAccess:
        """How GPUs of one machine reach each other, as far as it is known; see docs/fsdp2.md."""
        return self._peers

    def _setup_distributed(self) -> None:
        self.set_world_ranks()
        meeting, num_ranks = cast(ClusterEnvironment, self.cluster_environment), self.num_nodes * self.num_processes
        ways = peers_found(meeting, self.global_rank, num_ranks, self.root_device, self.parallel_devices, self._timeout)
        with ways as found:
            super()._setup_distributed()
        if found.link != "unknown":  # In a second run there is a group, and nobody is asked again.
            self._peers = found

    def setup(self, trainer: Trainer) -> None:
        """Shards the model, the first time, and makes the optimizers.

        Raises:
            ValueError: The model or the Trainer does what cannot be sharded; nothing has been moved then.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        model = self.lightning_module
        assert model is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        recomputed: tuple[str, ...] = ()
        if fitting:
            refuse_run(trainer, model, self._layer_sync is not None)
            if self._activation_checkpointing:
                refuse_own_checkpointing(model)
                recomputed = choose_checkpointed(model, self._min_num_params)
        known: list[tuple[weakref.ref[nn.Parameter], str]] = []
        if not isinstance(model, FSDPModule):
            known = [(weakref.ref(parameter), name) for name, parameter in model.named_parameters()]
            self._shard(model)
        self.model = model
        self.model_to_device()
        self.barrier()
        if fitting:
            if recomputed:
                self._recompute(model, recomputed)
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
            point_to_parts(self.optimizers, model, known)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Moves the states of metrics, which are no buffers; FSDP2 has placed what is one."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)
        _update_properties(self.lightning_module, device=self.root_device)

    def teardown(self) -> None:
        """Gives blocks their forward back; weights stay sharded."""
        while self._undo:
            self._undo.pop()()
        super().teardown()

    def _shard(self, model: LightningModule) -> None:
        refuse_sharded(model)
        refuse_other_models(describe_tensors(model))
        self.precision_plugin.convert_module(model)
        units = choose_units(model, self._policy, self._min_num_params)
        refuse_unshardable(model, units)
        for name, fqn in units.left_out.items():
            rank_zero_info(f"{name!r} is no FSDP unit of its own: it shares {fqn!r} with another one.")
        num_ranks = self.num_nodes * self.num_processes
        if self._peers.link != "unknown":
            rank_zero_info(self._peers.describe())
        rank_zero_info(
            f"FSDP2: {len(units.names)} units and the rest of the model over {num_ranks} ranks."
            if num_ranks > 1
            else "FSDP2 on one rank: nothing is sharded, and weights, gradients and optimizer states are whole."
        )
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": mixed_precision(self.precision_plugin.precision),
            "offload_policy": self._offload_policy(),
        }
        placed: set[int] = set()
        for module in (*map(model.get_submodule, units.names), model):
            # Unit by unit, so that the device never holds more than one whole unit.
            fresh = [t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, DTensor)]
            spread([tensor for tensor in fresh if id(tensor) not in placed], self.root_device)
            placed.update(id(buffer) for buffer in module.buffers())
            fully_shard(module, **options)
        for step in _STEPS:
            if hasattr(model, step):
                register_fsdp_forward_method(model, step)

    def _offload_policy(self) -> OffloadPolicy:
        if not self._cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")

    def _recompute(self, model: LightningModule, names: tuple[str, ...]) -> None:
        for name in names:
            self._undo.append(let_recompute(model.get_submodule(name), name))
        for config in stop_caching(model):
            self._undo.append(functools.partial(setattr, config, "use_cache", True))
        rank_zero_info(f"Activation checkpointing: {len(names)} modules recompute their activations.")

    # --- running ------------------------------------------------------------------------------------------------------

    @property
    def evaluates_together(self) -> bool:
        return isinstance(self.model, FSDPModule)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.lightning_module is not None:
            self._is_open_ended = self._meet("the first epoch", not length_is_known(self.lightning_module.trainer))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = cast(LightningModule, self.lightning_module).trainer
        if self._is_open_ended and (trainer.accumulate_grad_batches > 1 or trainer.num_training_batches < math.inf):
            # A rank steps with its last batch, where others may accumulate; up to a limit, it does not even know of it.
            batch = f"batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
            self._meet(f"{batch} without a step" if self._accumulates else f"{batch} with a step")
        return self._run(super().training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with evaluating():
            return self._run(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with evaluating():
            return self._run(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with evaluating():
            return self._run(super().predict_step, args, kwargs)

    def _run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._has_stepped = True
        with self.explaining(), explained():
            return step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.explaining():
            return super().backward(*args, **kwargs)

    def _describe_step(self, trainer: Trainer, batch: str) -> str:
        # Every batch has collectives, also those that end no step.
        return f"{super()._describe_step(trainer, batch)} in {batch}"

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # Left in the middle of a step, weights would be seen gathered, and the next step would take it for its own.
        reset = getattr(self.model, "reset_iter_state", None)  # Not before torch 2.12.
        if self._has_stepped and reset is not None:
            reset()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.explaining():  # A norm to clip by is one of all ranks.
            result = super().optimizer_step(*args, **kwargs)
        self._free()  # A forward between backward and step has gathered what is old now.
        return result

    def on_validation_end(self) -> None:
        self._free()

    on_test_end = on_predict_end = on_validation_end

    def _free(self) -> None:
        """Without a backward pass nothing frees what the model itself holds, and others would see it gathered."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around each micro-batch of an accumulation but the last: gradients are added up, and not reduced."""
        model = cast(FSDPModule, self.model)
        model.set_requires_gradient_sync(self._sync_each_batch)
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
            model.set_requires_gradient_sync(True)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return self._save_distributed_checkpoint

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._save_distributed_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole on rank 0 and empty on the others; every rank's parts with `save_distributed_checkpoint`."""
        if self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return whole_states(self.lightning_module.state_dict(keep_vars=True), self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return whole_optimizer_state(plain, self.is_global_zero)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.refuse_spoiled(checkpoint)
        path = self.broadcast(filepath)
        super(ModelParallelStrategy, self).save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint; whole ones are not copied into the memory of every rank where files can be mapped.

        Raises:
            ValueError: It was saved in parts, and this strategy saves whole ones.
        """
        if self._save_distributed_checkpoint:
            return super().load_checkpoint(checkpoint_path, weights_only)
        path = Path(self.broadcast(checkpoint_path))
        if _is_sharded_checkpoint(path):
            raise ValueError(
                f"{path} was saved in parts. Give save_distributed_checkpoint=True, or make one file of it with "
                f"python -m lightning.pytorch.utilities.consolidate_checkpoint {path}."
            )
        if type(self.checkpoint_io) is TorchCheckpointIO and path.is_file():
            return cast(dict[str, Any], torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only))
        checkpoints = reader_of(path, self.checkpoint_io)
        if checkpoints is not self.checkpoint_io:
            return checkpoints.load_checkpoint(path, weights_only=weights_only)
        return super(ModelParallelStrategy, self).load_checkpoint(path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._save_distributed_checkpoint:
            return
        assert self.lightning_module is not None
        load_parts(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._save_distributed_checkpoint:
            return
        for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_optimizer_parts(optimizer, states)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers `"protrain_fsdp2"`; a second call changes nothing."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="FSDP2 that shards by itself")
