"""ProTrainStrategy connects Lightning with the stages profile, plan, place and run. No tensor arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator, MPSAccelerator
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info, rank_zero_module
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle

from lightning_protrain.config import (
    DDPOptions,
    GradSync,
    Knobs,
    LaunchOptions,
    OnNonFinite,
    OverlapChoice,
    Parallelism,
    PlanOptions,
    Rehearse,
    ShardingChoice,
    StartMethod,
    hide_noise,
)
from lightning_protrain.device.device import Device, TransferCounters
from lightning_protrain.device.topology import PeerAccess
from lightning_protrain.distributed import launch
from lightning_protrain.distributed.rank_sync import RankSync
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout
from lightning_protrain.report.plan_monitor import PlanMonitor
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan
from lightning_protrain.strategy.data_parallel import DataParallel
from lightning_protrain.strategy.overlap import NO_OVERLAP, OverlapPlan, step_is_followed_by_forward
from lightning_protrain.strategy.plan_session import PlanChoice, PlanSession, read_plan_choice
from lightning_protrain.strategy.precision import LostUpdates, ProTrainPrecision, as_protrain_precision
from lightning_protrain.strategy.sharded_states import ShardedStates, bytes_on, mark_partially_stepped

_T = TypeVar("_T")


def _number(name: str, alone: int) -> property:
    """Make the property `name` of the strategy: from the cluster environment if there are several ranks, else `alone`.

    A run of one process does not read the cluster environment, like `SingleDeviceStrategy`: SLURM may not have set its
    variables.
    """

    def read(strategy: ProTrainStrategy) -> int:
        if name in strategy._numbers or not strategy.is_distributed:
            return strategy._numbers.get(name, alone)
        return int(getattr(ParallelStrategy, name).fget(strategy))

    def write(strategy: ProTrainStrategy, number: int) -> None:
        strategy._numbers[name] = number

    return property(read, write)


class ProTrainStrategy(ParallelStrategy):
    """Trains models whose states do not fit the device, with exactly the results of a device that is large enough.

    Implements ProTrain (arXiv 2406.08334).

    Args:
        plan: `"resident"`: everything on the device, no hooks. `"offload"`: every chunk streamed, every block
            checkpointed, the smallest footprint. `"auto"`: resident if that fits, else the fastest plan that fits. Or a
            `Plan`, or the path of a plan saved with `Plan.save`.
        device_memory: Bytes that the device may hold (`"22GiB"`, a number). `"auto"`: most of a GPU's free memory, on
            the rank with the least; no limit on the CPU.
        host_memory: Bytes of host memory for offloaded states. `"auto"`: the free memory of the node with the least.
        num_persistent_chunks: Number of chunks, counted from the first, that stay on the device.
        num_chunk_buffers: Number of offloaded chunks that may be on the device at the same time.
        num_swap_blocks: Number of blocks that swap their activations; needs a profile of a batch.
        num_checkpoint_blocks: Number of blocks that recompute activations; the other blocks keep or swap all of them.
        num_keep_offloaded_blocks: Number of blocks with offloaded chunks that keep their activations.
        chunk_bytes: Maximum size of a chunk; None: one chunk for each block and kind of weights.
        blocks: Names or classes of the blocks; `"size"`: modules of at least `min_num_params` parameters; None: the
            elements of repeated `nn.ModuleList`s.
        min_num_params: Minimum number of parameters of a block under `blocks="size"`. Under `plan="auto"`, modules of
            this size outside all blocks stay on the device if they fit.
        overlap_optimizer: Phase during which the host steps the optimizer: `"backward"`, the next `"forward"`, or none
            (`"off"`). `"auto"`: the first of these that is exact (see docs/how/overlap.md); `"off"` on the CPU.
        forbid_keep_offload_with_fused_lora: True to let no block with offloaded chunks keep its activations.
        sharding: Placement of offloaded chunks on several ranks. `"replicate"`: each rank holds all of them. `"shard"`:
            the ranks of a node share one copy, and each rank steps its part. `"resident"`: nothing is offloaded.
            `"auto"`: the faster of `"shard"` and `"replicate"` that fits; `"shard"` without a search.
        reduce_dtype: Dtype in which ranks sum gradients of offloaded chunks; None means the dtype of the weights.
        adapter_grad_sync: How ranks average gradients of resident weights if few weights are trained: in the buckets of
            `"ddp"`, or as one `"flat"` tensor. `"auto"`: `"flat"`, unless NVLink connects the devices.
        find_unused_parameters, static_graph, ddp_comm_hook, ddp_comm_state: As in `DDPStrategy`, for resident weights.
        hardware: Rates of device and host; None measures them once and caches them, see docs/hardware.md.
        rehearse: True to rehearse a plan from the search before training, and to search again with the measurements,
            see docs/how/rehearsal.md; `"auto"`: on a GPU. The results of training do not change, bit for bit.
        on_nonfinite: What happens if two batches in a row have a loss that is NaN or infinite. `"stop"` ends the fit,
            and refuses checkpoints with weights that are not finite; `"warn"` reports it.
        monitor: True to add a `PlanMonitor` that logs nothing to a fit without one.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in `DDPStrategy`.
        process_group_backend, timeout, start_method: As in `DDPStrategy`.

    Raises:
        ValueError: A value is out of range. `setup` raises further errors, before anything is placed.
    """

    strategy_name = "protrain"

    world_size = _number("world_size", 1)
    global_rank = _number("global_rank", 0)
    local_rank = _number("local_rank", 0)
    node_rank = _number("node_rank", 0)
    _has_trainer = False

    # A data module may leave the sizes of a micro-batch to this strategy, see [Note: Open sizes].
    chooses_sizes = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        plan: PlanChoice = "auto",
        device_memory: str | int = "auto",
        host_memory: str | int = "auto",
        num_persistent_chunks: int | None = None,
        num_chunk_buffers: int | None = None,
        num_swap_blocks: int | None = None,
        num_checkpoint_blocks: int | None = None,
        num_keep_offloaded_blocks: int | None = None,
        chunk_bytes: int | None = None,
        blocks: Sequence[str | type[nn.Module]] | Literal["size"] | None = None,
        min_num_params: int = 100_000_000,
        overlap_optimizer: OverlapChoice = "auto",
        forbid_keep_offload_with_fused_lora: bool = False,
        sharding: ShardingChoice = "auto",
        reduce_dtype: Literal["float32", "bfloat16"] | None = None,
        adapter_grad_sync: GradSync = "auto",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_state: object = None,
        hardware: HardwareProfile | None = None,
        rehearse: Rehearse = "auto",
        on_nonfinite: OnNonFinite = "stop",
        monitor: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
    ) -> None:
        hide_noise()
        self._numbers: dict[str, int] = {}
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._launch = LaunchOptions(process_group_backend, timeout, start_method)
        self.num_nodes = 1  # The Trainer sets it.
        self._forward_redirection = _DDPForwardRedirection()
        ddp = DDPOptions(find_unused_parameters, static_graph, ddp_comm_hook, ddp_comm_state)
        self._lost_updates = LostUpdates()
        self._sync = RankSync(on_nonfinite)
        self._dp = DataParallel(Parallelism(sharding, reduce_dtype, adapter_grad_sync, ddp), self._sync)
        self._states = ShardedStates(self._sync)
        knobs = Knobs(
            num_persistent_chunks,
            num_chunk_buffers,
            num_swap_blocks,
            num_checkpoint_blocks,
            num_keep_offloaded_blocks,
            chunk_bytes,
        )
        if forbid_keep_offload_with_fused_lora:
            knobs = knobs.without_keep_offloaded()
        choice = self._dp.allowed_plan(read_plan_choice(plan))
        options = PlanOptions(knobs, blocks, min_num_params, device_memory, host_memory, overlap_optimizer, rehearse)
        self.session = PlanSession(choice, options, hardware)
        self._monitor = PlanMonitor(log=False) if monitor else None
        self._overlap = NO_OVERLAP
        self._handles: list[RemovableHandle] = []
        self._plan: Plan | None = None
        self._runtime: Runtime | None = None
        self._device: Device | None = None
        self._counters = TransferCounters()
        # The error that ends the run; errors during its clean-up become notes of it, see `_noting`.
        self._failure: BaseException | None = None
        self._budget: int | None = None
        self._shapes: list[tuple[int, ...]] = []  # Shapes of the present micro-batch's tensors, for messages.

    @property
    def plan(self) -> Plan | None:
        """The plan of the present or latest run; None before the first `setup`."""
        return self._plan

    @property
    def counters(self) -> TransferCounters:
        """Bytes and calls of transfers since the latest `setup`; zero before the first `setup`."""
        return self._counters

    @property
    def budget(self) -> int | None:
        """Maximum device memory of the plan, bytes; None without a limit."""
        return self._budget

    @property
    def device(self) -> Device | None:
        """Device of this rank, which also copies to and from the host; None before `setup` has opened it."""
        return self._device

    @property
    def overlap(self) -> OverlapPlan:
        """Overlap of the host's optimizer steps in the present or latest run; off before the first run."""
        return self._overlap

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak of the device memory of this run since `setup`, bytes; None if the device does not count it."""
        return self._device.peak_bytes() if self._device is not None else None

    @property
    def allocator_stats(self) -> Mapping[str, int]:
        """Peak of reserved bytes and number of allocation retries, by name; empty if the device does not count them."""
        return self._device.allocator_stats() if self._device is not None else {}

    @property
    def num_hooks(self) -> int:
        """Number of places at which hooks are attached to the model; 0 for a resident plan."""
        return self._runtime.num_hooks if self._runtime is not None else 0

    @property
    def peers(self) -> PeerAccess | None:
        """The links between the devices of a node, see [Note: Peer-to-peer]; None if unknown."""
        return self._sync.peers

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the objects of this process: the device, the runtime and the connections to other ranks."""
        unset = dict.fromkeys(("_device", "_runtime", "_failure"))
        return {**super().__getstate__(), **unset, "_handles": [], "_lost_updates": LostUpdates()}

    # --- processes ----------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.num_nodes * self.num_processes > 1

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend that the user has set; None: the default of the device."""
        return self._launch.backend

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def accelerator(self) -> Accelerator | None:
        return self._own_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator

    @property
    def _accelerator(self) -> Accelerator | None:
        # A Trainer first reads this attribute of a strategy that it receives; another Trainer may already use the
        # strategy.
        if self._has_trainer:
            raise ValueError(
                "This ProTrainStrategy belongs to another Trainer already. Make a new one for each Trainer, or give "
                'strategy="protrain".'
            )
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        if isinstance(accelerator, MPSAccelerator):
            raise ValueError(
                'strategy="protrain" does not run on accelerator="mps": host and device share one memory there, so '
                'nothing can be offloaded. Use accelerator="cpu", or strategy="auto" on MPS.'
            )
        self._own_accelerator = accelerator

    @property
    def precision_plugin(self) -> ProTrainPrecision:
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision = as_protrain_precision(plugin)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of ranks and index of this rank over all nodes, for a sampler; the base class counts one node only."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        self._has_trainer = True
        self._launcher = launch.choose_launcher(self, self._launch.start_method, self.num_nodes, self.num_processes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment the rank of this process and the number of processes."""
        processes = max(self.num_processes, 1)
        rank = self.node_rank * processes + self.local_rank
        launch.set_world_ranks(self.cluster_environment, rank, self.num_nodes * processes)

    def setup_environment(self) -> None:
        """Open the device, and the process groups if there are several processes."""
        super().setup_environment()
        if not self.is_distributed:
            return
        assert self.cluster_environment is not None
        self.set_world_ranks()
        devices = self.parallel_devices or ()
        place = launch.ProcessPlace(self.global_rank, self.world_size, self.local_rank, devices)
        self._sync.connect(self.cluster_environment, place, self._launch)
        if (module := self.lightning_module) is not None:
            self._sync.begin_run(self._dp.options, module.trainer)

    def open_device(self) -> Device:
        """Open the device of this rank, with its part of the node's cores."""
        return launch.open_shared_device(self.root_device, self.parallel_devices, self.local_rank, self._say_of_rank)

    def _say_of_rank(self, sentence: str) -> None:
        """Show a message that may be true of this rank only, such as one on its node or device."""
        # The logger that `rank_zero_info` uses.
        rank_zero_module.log.info(rank_prefixed_message(sentence, self.global_rank if self.is_distributed else None))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum of a tensor over all ranks; return other values unchanged."""
        return self._sync.reduce(tensor, group, reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self._sync.meet("a barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        return self._sync.broadcast(obj, src)

    # --- what others ask of the ranks ---------------------------------------------------------------------------------

    def shardings(self, local_size: int) -> tuple[Sharding, ...]:
        """Return the shardings of offloaded chunks that are allowed with `local_size` ranks on each node."""
        return self._dp.shardings(local_size)

    def load_once(self, load: Callable[[], _T], outline: Callable[[], _T]) -> _T:
        """Return `load()`, or `outline()` on ranks that will share another rank's weights; every rank calls it."""
        return self._dp.load_once(load, outline)

    # --- set-up and teardown ------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Make weights in host memory, because only the plan tells which weights go to the device.
        nowhere = nullcontext() if self.session.dry_run is None else torch.device("meta")
        with _EmptyInit(enabled=bool(empty_init)), self.precision_plugin.tensor_init_context(), nowhere:
            yield

    def setup(self, trainer: Trainer) -> None:
        """Plan and place the model.

        Raises:
            ValueError: The plan does not fit, is for another model, or the model does itself what the plan must do.
        """
        model = self.lightning_module
        assert self.accelerator is not None
        assert model is not None
        self.accelerator.setup(trainer)
        self._failure = None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._states.refuse_untrainable(model)
        self.precision_plugin.open(self.root_device.type)
        self.model = self.precision_plugin.convert_module(model)
        self._device = self.open_device()
        self._device.exclude_others(bytes_on(self.root_device, model))
        self._counters = self._device.counters
        shardings = self._dp.own_shardings(trainer, self.num_processes, self._layer_sync)
        self._dp.end_outlines(model, self.root_device, shardings[0])
        if fitting:
            with self.session.provisional(trainer):
                self.setup_optimizers(trainer)
        self._states.adapt(model, self.optimizers if fitting else ())
        optimizers = self.optimizers if fitting else None
        described = self.session.describe(trainer, self._device, optimizers)
        mesh, reduce_dtype = self._sync.mesh, self._dp.reduce_dtype
        if fitting and self.session.choose_sizes(described, mesh, shardings, reduce_dtype):
            trainer.fit_loop._combined_loader = None
            self.setup_optimizers(trainer)
            self._states.adapt(model, self.optimizers)
            optimizers = self.optimizers
            described = self.session.describe(trainer, self._device, optimizers)
        if fitting:
            self._overlap = described.overlap
        if self.session.dry_run is not None:
            self.session.answer(described, reduce_dtype)
            raise _TunerExitException
        layout, settings = described.workload.layout, (self.root_device.type, self.precision_plugin.precision)
        self._dp.compare(layout, model, (*settings, self.session.choice), self.optimizers)
        request, plan = self.session.agree(described, mesh, shardings, reduce_dtype)
        self._budget = request.budget()
        if fitting:
            _refuse_unstreamed(trainer, plan, self.root_device)
        self._dp.equalise(model, plan, self.root_device)
        place = partial(self._place, model, layout, optimizers or ())
        request, plan = self.session.apply(trainer, request, plan, place)
        self._plan, self._budget = plan, request.budget()
        self.setup_precision_plugin()
        if fitting:
            self._prepare_fit(trainer, model, plan)

    def _prepare_fit(self, trainer: Trainer, model: LightningModule, plan: Plan) -> None:
        """Prepare what only training needs, after the plan has been applied."""
        assert self._runtime is not None
        assert self._device is not None
        self._states.begin(self.optimizers, self._runtime)
        self.model = self._dp.replicate(model, self._runtime, self.root_device) or self.model
        if self._monitor is not None:
            self._monitor.join(trainer)
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_state_dict_pre_hook(lambda _: self._finish_async_step()))
        if any(chunk.trainable and not chunk.resident for chunk in plan.chunks):
            rank_zero_info(self._overlap.describe(self._device.worker.threads or torch.get_num_threads()))

    def teardown(self) -> None:
        """Remove the plan from the model; if this raises, it can be called again."""
        while self._handles:
            self._handles.pop().remove()
        module = self.lightning_module
        trainer = module.trainer if module is not None and module._trainer is not None else None
        if trainer is not None and self._monitor is not None:
            self._monitor.detach(trainer)
        self._dp.close()
        if isinstance(self.model, DistributedDataParallel):
            self.model = module
        self._sync.close()
        try:
            with self._noting():
                self._remove()
            if module is None or not any(parameter.is_meta for parameter in module.parameters()):
                # With parameters on the meta device nothing was placed, and moving the model would raise a second
                # error.
                with self._noting():
                    super().teardown()
        finally:
            self._failure = None

    def _remove(self) -> None:
        """Remove the plan from the model, and close the device."""
        self.precision_plugin.attach(None)
        self._states.release()
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            if self._device is not None:
                self._device.close()
            return
        try:
            runtime.remove()
        finally:
            mark_partially_stepped(self.lightning_module, runtime.async_step.partially_stepped)

    @contextmanager
    def _noting(self) -> Generator[None]:
        """Add an error within this context as a note to the exception that ends the run, if there is such an exception.

        A failed CUDA device raises at every call, but only the first error tells the cause.
        """
        try:
            yield
        except RuntimeError as error:
            if self._failure is None:
                raise
            self._failure.add_note(f"Cleaning up after it raised {type(error).__name__}: {error}")

    def _place(
        self,
        model: LightningModule,
        layout: ModelLayout,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        spare_host_bytes: int,
    ) -> tuple[Runtime, Device, Callable[[], AbstractContextManager[None]]]:
        """Apply a plan instead of the present one, if there is one."""
        assert self._device is not None
        if self._runtime is not None:
            self._remove()
            model.cpu()
            others_bytes = self._device.others_bytes
            self._device = self.open_device()
            self._device.others_bytes = others_bytes
            self._counters = self._device.counters
        # The memory of profiling and of an earlier plan is not the plan's.
        self._device.trim()
        self._device.forget_peak()
        if not plan.num_offloaded_chunks:
            model.to(self.root_device)
        options = RunOptions(
            log_once=rank_zero_info,
            manual=not model.automatic_optimization,
            spare_host_bytes=spare_host_bytes,
            ranks=self._sync.mesh,
            reduce_dtype=self._dp.reduce_dtype,
        )
        self._runtime = apply_plan(model, plan, layout, self._device, options)
        self.precision_plugin.attach(self._runtime.async_step, self._device.worker.threads)
        if model.automatic_optimization:  # Otherwise the module may step without the strategy.
            self._states.reserve(model, plan, optimizers)
        _update_properties(model, device=self.root_device)
        unreserved = partial(self._states.unreserved, model, plan, optimizers)
        return self._runtime, self._device, unreserved

    # --- running ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._dp.equalise_buffers(self.lightning_module, self.model)
        # Run a backward that the user calls within the step on this thread, too, see [Note: One thread].
        with torch.autograd.set_multithreading_enabled(False):
            return self._run_step(super().training_step, args, kwargs, training=True)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(self._past_ddp("validation_step"), args, kwargs, training=False)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(self._past_ddp("test_step"), args, kwargs, training=False)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(self._past_ddp("predict_step"), args, kwargs, training=False)

    def _past_ddp(self, name: str) -> Callable[..., Any]:
        """Return an evaluation step that bypasses DDP, because ranks may have different numbers of batches."""

        def step(*args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.forward_context():
                return getattr(self.lightning_module, name)(*args, **kwargs)

        return step

    def _run_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
        assert self._runtime is not None
        assert self._device is not None
        with self._device.span("compute", "forward"):
            return self._runtime.run_step(step, args, kwargs, training)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; when it returns, all gradients are on the host or with their resident parameters.

        Raises:
            RuntimeError: Backward read a weight that was not on the device.
        """
        assert self._runtime is not None
        assert self.lightning_module is not None
        self._sync.losses.watch(closure_loss, self.lightning_module.trainer)
        assert self._device is not None
        span = self._device.span("compute", "backward")
        with span, self._sync.explaining(), self._runtime.backward(self._dp.averages):
            try:
                loss = super().backward(closure_loss, optimizer, *args, **kwargs)
            except CheckpointError as error:
                error.add_note(
                    "A block that the plan recomputes in backward did not repeat its forward. If the module calls "
                    "torch.utils.checkpoint around streamed blocks, remove the call; if the step has changed "
                    "`requires_grad` of the block's weights between forward and backward, do so before the forward or "
                    'after backward. Or give plan="resident".'
                )
                raise
        self._dp.average_resident(self._device)
        return loss

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Tell DDP that a backward follows (manual optimization only)."""
        super().pre_backward(closure_loss)
        module = self.lightning_module
        if isinstance(self.model, DistributedDataParallel) and module is not None and not module.automatic_optimization:
            prepare_for_backward(self.model, closure_loss)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Average no gradients within this context, because the micro-batch does not end an optimizer step."""
        with self._dp.block_sync(self.model):
            yield

    def model_to_device(self) -> None:
        """Do nothing: the plan places the model."""

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step one optimizer once, for resident and offloaded parameters, see [Note: Host step]."""
        assert self._runtime is not None
        assert self.lightning_module is not None
        assert self._device is not None
        runtime, overlap, device = self._runtime, self._overlap, self._device
        runtime.async_step.arm(optimizer, overlap.overlap, overlap.clip_value, overlap.take_norms, overlap.lends)

        with ExitStack() as stepping:

            def settled() -> Any:
                result = closure()
                self._states.release()
                runtime.settle()
                # On a GPU, the host's worker records its own steps.
                lane: Literal["host", "compute"] = "host" if self.root_device.type == "cpu" else "compute"
                stepping.enter_context(device.span(lane, "optimizer step"))
                stepping.enter_context(runtime.async_step.noting_exhaustion())
                return result

            result = super().optimizer_step(optimizer, settled, model, **kwargs)
        runtime.refresh()
        if not step_is_followed_by_forward(self.lightning_module.trainer):
            runtime.async_step.finish_all()
        runtime.async_step.finish_aliased()
        return result

    # --- meeting of ranks ---------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        if self.lightning_module is not None:
            self._lost_updates = LostUpdates()
            self._sync.begin_training(self.lightning_module.trainer)
            self._lost_updates.begin_batch(self.lightning_module.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._sync.check_losses()
        if self.lightning_module is not None:
            self._lost_updates.begin_batch(self.lightning_module.trainer, self._finish_async_step)
        self._shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]

    def on_train_end(self) -> None:
        if self.lightning_module is not None:
            self._finish_async_step()
            self._lost_updates.end(self.lightning_module.trainer)
        self._sync.end_training()

    def on_validation_start(self) -> None:
        if self.lightning_module is not None:
            self._sync.begin_evaluation(self.lightning_module.trainer)

    on_test_start = on_predict_start = on_validation_start

    def process_dataloader(self, dataloader: object) -> object:
        """Remove samples that an evaluation on several ranks would count twice, see [Note: Each sample once]."""
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        return dataloader if module is None else self._sync.each_once(dataloader, module.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this rank fails, and abandon the runtime."""
        super().on_exception(exception)
        if (explained := self.session.explain(exception, self._plan, self._device, self._shapes)) is not None:
            exception.add_note(explained)
        self._sync.report_failure(exception)
        self._failure = exception
        if self._runtime is not None:
            with self._noting():
                self._runtime.reset()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint, unless trained weights in it are NaN or infinite; every rank calls it."""
        self._sync.refuse_spoiled(checkpoint, self.lightning_module)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, after weights on the meta device have been loaded.

        Raises:
            ValueError: The file is not a checkpoint of Lightning.
        """
        self._dp.end_outlines(self.lightning_module, self.root_device)
        return self._states.read(checkpoint_path, weights_only, self.checkpoint_io, super().load_checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        with self._states.loading(self.lightning_module, checkpoint):
            super().load_model_state_dict(checkpoint, strict)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._finish_async_step()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, complete on rank 0 even if ranks step different parameters.

        Every rank calls it.
        """
        self._finish_async_step()
        gathered = self._states.gather(optimizer)
        return super().optimizer_state(optimizer) if gathered is None else gathered

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._runtime is not None:
            self._runtime.release_reserved()
        self._states.load(self.optimizers, checkpoint["optimizer_states"], self._runtime is not None)

    def _finish_async_step(self) -> None:
        self._states.finish(self.lightning_module, self._runtime)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `"protrain"` and `"protrain_spawn"`; a second call changes nothing."""
        names = {"protrain": {}, "protrain_spawn": {"start_method": "spawn"}}
        for name, arguments in names.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="Chunks streamed from host memory", **arguments)


def _refuse_unstreamed(trainer: Trainer, plan: Plan, device: torch.device) -> None:
    """Raise ValueError if streamed weights would be traced, or pruned on a GPU, which needs them there at any time."""
    if plan.does_anything and any(vars(logger).get("_log_graph") for logger in trainer.loggers):
        raise ValueError(
            "`log_graph=True` of a logger traces the model, whose blocks are streamed or recomputed. Leave it out, or "
            'give plan="resident".'
        )
    pruning = any(isinstance(callback, ModelPruning) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if pruning and device.type != "cpu" and not all(chunk.resident for chunk in plan.chunks):
        raise ValueError(
            'ModelPruning cannot prune weights that are streamed to a GPU. Give plan="resident", or prune the model '
            "after training."
        )
