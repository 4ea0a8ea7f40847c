"""ProTrainFSDP2Strategy: Lightning's ModelParallelStrategy, extended to shard the model with FSDP2 itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.model_parallel import _METADATA_FILENAME, _is_sharded_checkpoint
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_protrain.config import (
    Checkpointing,
    FSDPOptions,
    OnNonFinite,
    Policy,
    ShardingStrategy,
    hide_noise,
    plural,
)
from lightning_protrain.connections import reader_of
from lightning_protrain.device.topology import PeerAccess, peers_found
from lightning_protrain.distributed.meta_init import (
    find_waiting,
    load_on_first,
    make_room,
    returning_memory,
    send_attributes,
)
from lightning_protrain.distributed.rank_sync import (
    RankSync,
    for_mean,
    length_is_known,
    refuse_other_models,
)
from lightning_protrain.fsdp2.planning import FSDPSession
from lightning_protrain.fsdp2.refusals import (
    explained,
    fuse_host_steps,
    refuse_optimizers,
    refuse_precision,
    refuse_run,
    refuse_sharded,
    refuse_unshardable,
)
from lightning_protrain.fsdp2.state_dicts import (
    describe_tensors,
    has_optimizer_states,
    load_optimizer_parts,
    load_parts,
    load_sharded,
    load_sharded_optimizers,
    spread,
    whole_optimizer_state,
    whole_states,
)
from lightning_protrain.fsdp2.units import (
    ShardUnits,
    choose_checkpointed,
    choose_units,
    num_checkpointed,
)
from lightning_protrain.planner.fsdp_memory import FSDPMemory, FSDPRanks
from lightning_protrain.runtime.comm.collectives import RankMesh, find_meeting
from lightning_protrain.runtime.recompute import checkpoint, refuse_own_checkpointing, stop_caching
from lightning_protrain.strategy.precision import LostUpdates


def let_recompute(module: nn.Module, name: str) -> Callable[[], None]:
    """Checkpoint a module inside all of its hooks, and return a function that undoes this."""
    of_instance, forward = module.__dict__.get("forward"), module.forward

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, (args, kwargs), module, name)

    def undo() -> None:
        del module.__dict__["forward"]
        if of_instance is not None:
            module.__dict__["forward"] = of_instance

    module.__dict__["forward"] = recomputing
    return undo


def release_parameters(optimizers: Sequence[Optimizer], model: nn.Module) -> Callable[[], None]:
    """Remove the whole parameters from optimizers, and return a function that inserts the shards.

    Optimizers would otherwise keep the whole parameters in memory while the model is sharded.

    Args:
        optimizers: Optimizers of the model; their states are sharded like the parameters.
        model: Model of these optimizers, which is sharded before the returned function is called.

    Raises:
        ValueError: If an optimizer has a tensor that is not a parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"{type(optimizer).__name__} has a tensor of shape {tuple(parameter.shape)} that is not a "
                    "parameter of the model. Make the optimizer in configure_optimizers, from self.parameters()."
                )
    states = [optimizer.state_dict() if optimizer.state else None for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:  # In place, because LBFGS has a second reference to the list.
            group["params"][:] = [names[id(parameter)] for parameter in group["params"]]

    def put_back() -> None:
        for optimizer, content in zip(optimizers, states, strict=True):
            for group in optimizer.param_groups:
                group["params"][:] = [model.get_parameter(name) for name in group["params"]]
            if content is not None:
                load_optimizer_parts(optimizer, content)

    return put_back


@contextmanager
def evaluating() -> Generator[None, None, None]:
    """Disable gradients without creating inference tensors, because training uses buffers gathered in evaluation."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def make_mesh(ranks: FSDPRanks, device: torch.device) -> DeviceMesh:
    """Return the mesh for `fully_shard`: one dimension, or (copies, shards); every rank calls it.

    Args:
        ranks: Number of ranks and shards; ranks with consecutive numbers are on one node.
        device: Device of this rank.
    """
    if ranks.divisor == ranks.num_ranks:
        return init_device_mesh(device.type, (ranks.num_ranks,), mesh_dim_names=("shard",))
    copies = ranks.num_ranks // ranks.divisor
    return init_device_mesh(device.type, (copies, ranks.divisor), mesh_dim_names=("replicate", "shard"))


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Return a policy that gathers weights in autocast's dtype, and reduces gradients in the dtype of the weights."""
    if precision != "bf16-mixed":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # Autocast casts inputs. FSDP2 would also cast targets.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


_T = TypeVar("_T")
# Methods of a LightningModule, other than `forward`, that compute with its weights.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "generate")


class ProTrainFSDP2Strategy(ModelParallelStrategy):
    """Shards weights, gradients and optimizer states over all ranks with FSDP2, without the user's `configure_model`.

    Names of parameters and modules do not change, and any Trainer can load the checkpoints.

    Args:
        policy: Modules that are gathered and freed one by one. `"transformer"` takes the elements of the model's
            repeated lists, `"size"` modules with at least `min_num_params` parameters, from the bottom up, and `"none"`
            only the whole model.
        min_num_params: Minimum number of parameters for `policy="size"`, and of checkpointed modules if the model has
            no repeated list.
        activation_checkpointing: Number of blocks that are checkpointed, from the first one on: a number, `"all"` (or
            True), `"none"` (or False), or `"auto"`, which means as few as device memory allows.
        cpu_offload: True keeps shards of weights, gradients and optimizer states on the host, and steps them there.
        sync_each_batch: True reduces gradients after every micro-batch. False reduces them once for each optimizer
            step; until then, each rank keeps whole gradients.
        save_distributed_checkpoint: True saves the shards of each rank, which only this strategy and
            `ModelParallelStrategy` can load. False saves one whole checkpoint on rank 0. This strategy loads both.
        on_nonfinite: See `ProTrainStrategy`.
        process_group_backend, timeout: As in `ModelParallelStrategy`.
        sharding_strategy: `"FULL_SHARD"` shards over all ranks. With `"HYBRID_SHARD"`, each node has a copy that is
            sharded over its ranks. `"auto"` takes `"HYBRID_SHARD"` if there are several nodes with enough memory.
        device_mesh: Number of copies, and number of ranks that shard each copy; None means as `sharding_strategy`.
        device_memory: Maximum memory of each rank's device, such as `"22GiB"`, or bytes. `"auto"` means most of the
            free memory of the GPU with the least; no limit on the CPU.

    Raises:
        ValueError: If a value is out of range. `setup` raises further errors before it shards the model.
    """

    strategy_name = "protrain_fsdp2"

    def __init__(
        self,
        policy: Policy = "transformer",
        min_num_params: int = 100_000_000,
        activation_checkpointing: Checkpointing = "auto",
        cpu_offload: bool = False,
        sync_each_batch: bool = False,
        save_distributed_checkpoint: bool = False,
        on_nonfinite: OnNonFinite = "stop",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        sharding_strategy: ShardingStrategy = "auto",
        device_mesh: tuple[int, int] | None = None,
        device_memory: str | int = "auto",
    ) -> None:
        options = FSDPOptions(
            policy=policy,
            min_num_params=min_num_params,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
            sync_each_batch=sync_each_batch,
            sharding_strategy=sharding_strategy,
            device_mesh=device_mesh,
            device_memory=device_memory,
        )
        if not isinstance(save_distributed_checkpoint, bool):
            raise ValueError(f"save_distributed_checkpoint={save_distributed_checkpoint!r}: give True or False.")
        if cpu_offload and process_group_backend is not None and "gloo" not in process_group_backend:
            raise ValueError(
                f"process_group_backend={process_group_backend!r} cannot send host tensors, but cpu_offload=True keeps "
                'gradients on the host, whose norm ranks sum. Remove it, or give "cpu:gloo,cuda:nccl".'
            )
        hide_noise()
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._lost_updates = LostUpdates()
        self._sync = RankSync(on_nonfinite, every_batch=True)
        self.session = FSDPSession(options, self._sync)
        self._peers = PeerAccess("unknown")
        self._undo: list[Callable[[], object]] = []
        # Loads the weights of a sharded checkpoint after the model has been sharded.
        self._waiting: Callable[[], None] | None = None
        self._has_stepped = False
        # True if this batch only accumulates gradients.
        self._accumulates = False
        # True if the number of batches is unknown on some rank.
        self._is_open_ended = False

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        refuse_precision(plugin)
        self._precision_plugin = plugin

    # --- set-up and teardown ------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        """Return a context that makes weights in host memory, or on the meta device in a dry run."""
        nowhere = nullcontext() if self.session.dry_run is None else torch.device("meta")
        with super().tensor_init_context(empty_init), nowhere:
            yield

    def load_once(self, load: Callable[[], _T], outline: Callable[[], _T]) -> _T:
        """Return `load()` on the first rank of a node, and `outline()` on the others; every rank calls it."""
        self.session.loads_once = True
        if self.session.dry_run is not None:
            return outline()
        with returning_memory():
            if self.ranks is None or self.ranks.local_size == 1:
                return load()
            return load_on_first(self.ranks, load, outline)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of DistributedSampler: number of ranks, and index of this rank."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:  # Otherwise there is no other process to start.
            super()._configure_launcher()

    def setup_environment(self) -> None:
        if self.session.dry_run is not None:  # A dry run has a single process.
            super(ModelParallelStrategy, self).setup_environment()
            return
        self.session.meshes(self._all_ranks)  # Raise an error for a wrong mesh before ranks wait for each other.
        # The base class would make a tensor-parallel group of the ranks of a node. Here, `setup` makes the mesh.
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()
        if self.world_size > 1:
            self._sync.mesh = find_meeting(self.local_rank, self.num_processes, self._timeout)
            if self.lightning_module is not None:
                self._sync.sigterm.listen(self.lightning_module.trainer)

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend in (None, "nccl") and self.root_device.type == "cuda":
            # The norm of offloaded gradients and tensors in module attributes are sent from host memory.
            return "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()

    @property
    def _all_ranks(self) -> FSDPRanks:
        return FSDPRanks(self.num_nodes, self.num_processes)

    @property
    def memory(self) -> FSDPMemory | None:
        """Predicted memory of the last fit; None before a fit, or if an evaluation has sharded the model."""
        return self.session.memory

    @property
    def peers(self) -> PeerAccess:
        """The links between the GPUs of a node; see docs/fsdp2.md."""
        return self._peers

    def _setup_distributed(self) -> None:
        self.set_world_ranks()
        meeting, num_ranks = cast(ClusterEnvironment, self.cluster_environment), self.num_nodes * self.num_processes
        ways = peers_found(meeting, self.global_rank, num_ranks, self.root_device, self.parallel_devices, self._timeout)
        with ways as peers:
            super()._setup_distributed()
        if peers.link != "unknown":  # In a second run the process group exists, and the answer stays.
            self._peers = peers

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, if it is not sharded yet, and make the optimizers.

        Raises:
            ValueError: The model or the Trainer uses what FSDP2 does not support, or the model does not fit. Then
                nothing has been moved.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        model = self.lightning_module
        assert model is not None
        session, options = self.session, self.session.options
        fitting = trainer.state.fn == TrainerFn.FITTING
        is_sharded = isinstance(model, FSDPModule)
        names: tuple[str, ...] = ()
        if fitting:
            refuse_run(trainer, model, self._layer_sync is not None, self._save_distributed_checkpoint)
            names = choose_checkpointed(model, options.min_num_params)
        count = num_checkpointed(options, names, model) if fitting else 0
        if count:
            refuse_own_checkpointing(model)
        elif count is None and any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules()):
            count = 0
        if not is_sharded:
            refuse_sharded(model)
            waiting = frozenset(name for name, _ in model.named_parameters())
            if self.session.dry_run is None:
                refuse_other_models(describe_tensors(model))
                waiting = find_waiting(model, self.ranks) if self.ranks is not None else frozenset()
            units = choose_units(model, options.policy, options.min_num_params)
            refuse_unshardable(model, units, waiting)
            self.precision_plugin.convert_module(model)
        if fitting:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers, options.cpu_offload)
            if options.cpu_offload and self.root_device.type != "cpu":
                fuse_host_steps(self.optimizers)
        if fitting and not is_sharded:
            problem = session.describe(trainer, self.root_device, names, units, self._all_ranks)
            if session.dry_run is not None:
                session.answer(trainer, self.root_device, problem, count)
                raise _TunerExitException
            session.decide(trainer, self.root_device, problem, count)
        put_back = release_parameters(self.optimizers, model) if fitting else None
        if not is_sharded:
            if waiting:
                make_room(model, waiting)
                send_attributes(model, waiting)
            # In an evaluation, the memory of a later fit is unknown.
            memory, meshes = session.memory, session.meshes(self._all_ranks)
            self._shard(model, units, meshes[-1] if memory is None else memory.ranks)
        load, self._waiting = self._waiting, None
        if load is not None:
            load()
        self.model = model
        self.model_to_device()
        self.barrier()
        if put_back is not None:
            put_back()
            self._recompute(model, session.checkpointed(names, count, self.root_device))
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move metric states to the device; FSDP2 has moved parameters and buffers."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)
        _update_properties(self.lightning_module, device=self.root_device)

    def teardown(self) -> None:
        """Restore the forward methods of blocks; weights stay sharded."""
        while self._undo:
            self._undo.pop()()
        self._sync.close()
        super().teardown()

    def _shard(self, model: LightningModule, units: ShardUnits, ranks: FSDPRanks) -> None:
        for name, fqn in units.left_out.items():
            rank_zero_info(f"{name!r} is not a separate FSDP unit, because it shares {fqn!r} with another unit.")
        if self._peers.link != "unknown":
            rank_zero_info(self._peers.describe())
        rank_zero_info(
            f"FSDP2: {plural(len(units.names), 'unit')} and the rest of the model, {ranks.describe()}."
            if ranks.num_ranks > 1
            else "FSDP2 on one rank: nothing is sharded, and weights, gradients and optimizer states are whole."
        )
        options: dict[str, Any] = {
            "mesh": make_mesh(ranks, self.root_device),
            "mp_policy": mixed_precision(self.precision_plugin.precision),
            "offload_policy": OffloadPolicy(),
        }
        if self.session.options.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        placed: set[int] = set()
        for module in (*map(model.get_submodule, units.names), model):
            # Shard unit by unit, so that the device has at most one whole unit at a time.
            fresh = [t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, DTensor)]
            spread([tensor for tensor in fresh if id(tensor) not in placed], self.root_device)
            placed.update(id(buffer) for buffer in module.buffers())
            fully_shard(module, **options)
        for step in _STEPS:
            if hasattr(model, step):
                register_fsdp_forward_method(model, step)

    def _recompute(self, model: LightningModule, names: tuple[str, ...]) -> None:
        if not names:
            return
        for name in names:
            self._undo.append(let_recompute(model.get_submodule(name), name))
        for config in stop_caching(model):
            self._undo.append(partial(setattr, config, "use_cache", True))
        rank_zero_info(
            f"Activation checkpointing: backward recomputes the activations of {plural(len(names), 'module')}."
        )

    # --- running ------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> RankMesh | None:
        """The ranks that train together; None for a single rank, or before the process group exists."""
        return self._sync.mesh

    def on_train_start(self) -> None:
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            self._lost_updates = LostUpdates()
            self._sync.begin_training(trainer)
            self._lost_updates.begin_batch(trainer)
            self._is_open_ended = self._sync.meet("the first epoch", not length_is_known(trainer))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._sync.check_losses()
        if self.lightning_module is not None:
            self._lost_updates.begin_batch(self.lightning_module.trainer)

    def on_train_end(self) -> None:
        if self.lightning_module is not None:
            self._lost_updates.end(self.lightning_module.trainer)
        self._sync.end_training()

    def on_validation_start(self) -> None:
        if self.lightning_module is not None:
            self._sync.begin_evaluation(self.lightning_module.trainer, isinstance(self.model, FSDPModule))

    on_test_start = on_predict_start = on_validation_start

    def process_dataloader(self, dataloader: object) -> object:
        """Remove samples that an evaluation on several ranks would count twice, see [Note: Each sample once]."""
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        return dataloader if module is None else self._sync.each_once(dataloader, module.trainer)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum of a tensor over all ranks; return other values unchanged."""
        return super().reduce(for_mean(tensor, reduce_op), group, reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self._sync.meet("a barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        return self._sync.broadcast(obj, src)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = cast(LightningModule, self.lightning_module).trainer
        if self._is_open_ended and (trainer.accumulate_grad_batches > 1 or trainer.num_training_batches < math.inf):
            # A rank whose epoch ends early would step, while other ranks accumulate. Detect this before collectives.
            batch = f"batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
            self._sync.meet(f"{batch} without a step" if self._accumulates else f"{batch} with a step")
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
        with self._sync.explaining(), explained():
            return step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.lightning_module is not None:
            self._sync.losses.watch(closure_loss, self.lightning_module.trainer)
        with self._sync.explaining():
            return super().backward(closure_loss, *args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._sync.report_failure(exception)
        # After an error within a step, weights are still gathered. The next step must not use them.
        reset = getattr(self.model, "reset_iter_state", None)  # Since torch 2.12.
        if self._has_stepped and reset is not None:
            reset()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._sync.explaining():  # Clipping by norm is a collective.
            result = super().optimizer_step(*args, **kwargs)
        self._free()  # A forward between backward and step may have gathered weights, which are outdated now.
        return result

    def on_validation_end(self) -> None:
        self._free()

    on_test_end = on_predict_end = on_validation_end

    def _free(self) -> None:
        """Free the root's gathered parameters, which FSDP2 frees only in backward."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without a reduction, for all micro-batches of a step except the last one."""
        model = cast(FSDPModule, self.model)
        model.set_requires_gradient_sync(self.session.options.sync_each_batch)
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
            model.set_requires_gradient_sync(True)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict for a checkpoint: whole on rank 0 and empty on other ranks, or this rank's shards."""
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
        self._sync.refuse_spoiled(checkpoint, self.lightning_module)
        if self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = self.broadcast(filepath)
        super(ModelParallelStrategy, self).save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a whole checkpoint, memory-mapped if possible, or only the metadata of a sharded checkpoint.

        The tensors of a sharded checkpoint are read after the model has been sharded.
        """
        path = Path(self.broadcast(checkpoint_path))
        if _is_sharded_checkpoint(path):
            metadata = torch.load(path / _METADATA_FILENAME, map_location="cpu", weights_only=weights_only)
            states = {"optimizer_states": path} if has_optimizer_states(path) else {}
            return {**metadata, **states, "state_dict": path}
        checkpoints = reader_of(path, self.checkpoint_io)
        if checkpoints is not self.checkpoint_io:
            return checkpoints.load_checkpoint(path, weights_only=weights_only)
        if type(self.checkpoint_io) is TorchCheckpointIO and path.is_file():
            return cast(dict[str, Any], torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only))
        return super(ModelParallelStrategy, self).load_checkpoint(path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        model, states = self.lightning_module, checkpoint["state_dict"]
        assert model is not None
        if not isinstance(states, Path):
            if not any(parameter.is_meta for parameter in model.parameters()):  # Otherwise rank 0 sends the values.
                load_parts(model, states, strict)
        elif isinstance(model, FSDPModule):
            load_sharded(model, states, strict)
        else:  # Load after sharding, so that each rank reads only its shards.
            self._waiting = partial(load_sharded, model, states, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states, model = checkpoint["optimizer_states"], self.lightning_module
        assert model is not None
        if isinstance(states, Path):
            load_sharded_optimizers(model, self.optimizers, states)
            return
        for optimizer, content in zip(self.optimizers, states, strict=False):
            load_optimizer_parts(optimizer, content)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `"protrain_fsdp2"` if it is not registered yet."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="FSDP2 that shards by itself")
