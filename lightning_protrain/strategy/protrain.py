"""ProTrainStrategy: the glue between Lightning and the stages profile, plan, place and run. No tensor arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_protrain.callbacks.plan_monitor import PlanMonitor
from lightning_protrain.device.device import Device, TransferCounters
from lightning_protrain.distributed.ddp import DDPOptions, GradSync
from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.distributed.finite import FiniteLosses, OnNonFinite
from lightning_protrain.distributed.launch import StartMethod
from lightning_protrain.planner.answers import REMOVED
from lightning_protrain.planner.constraints import Knobs
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout
from lightning_protrain.runtime.apply import apply_plan
from lightning_protrain.runtime.optim.step import check_one_device, move_state_beside_parameters
from lightning_protrain.runtime.recompute import refuse_own_checkpointing
from lightning_protrain.strategy.checks import explain_missing_weight, mark_partially_stepped, refuse_partially_stepped
from lightning_protrain.strategy.dry_run import DryRunStrategy
from lightning_protrain.strategy.overlap import (
    OverlapChoice,
    OverlapPlan,
    check_choice,
    plan_overlap,
    step_is_followed_by_forward,
)
from lightning_protrain.strategy.parallel_options import Parallelism, ShardingChoice, refuse_removed
from lightning_protrain.strategy.plan_options import PlanChoice, make_plan_request, read_plan_spec
from lightning_protrain.strategy.plan_session import (
    PlanSession,
    answers,
    describe_session,
    plan_jointly,
    say_if_one_block,
)


class ProTrainStrategy(DryRunStrategy):
    """Trains models whose states do not fit the device, exactly as if they did (ProTrain, arXiv 2406.08334).

    Args:
        plan: `"resident"`: everything on the device, no hook installed. `"offload"`: every chunk streamed, every block
            checkpointed, the smallest footprint. `"auto"`: resident if it fits, else the fastest plan that does. Or a
            `Plan`, or the path of one saved with `Plan.save`.
        device_memory: Bytes that the device may hold (`"22GiB"`, a number). `"auto"`: most of what a GPU has free, that
            of the rank with the least; no limit on the CPU.
        host_memory: The same for offloaded states on the host. `"auto"`: what the machine with the least has available.
        num_persistent_chunks: How many chunks, from the first, stay on the device.
        num_chunk_buffers: How many offloaded chunks may be on the device at one time.
        num_swap_blocks: How many blocks swap their activations; a batch is profiled for it.
        num_checkpoint_blocks: How many blocks recompute their activations; the others keep or swap all of them.
        num_keep_offloaded_blocks: How many blocks keep their activations although their chunks are offloaded.
        chunk_bytes: The most bytes of one chunk; None: one chunk for all weights of a block that go together.
        blocks: Their names or classes; `"size"`: modules of at least `min_num_params`; None: repeated `nn.ModuleList`s.
        min_num_params: From this size on a module is a block under `"size"`, and a module outside all blocks stays on
            the device under `"auto"` if it fits.
        overlap_optimizer: Behind what the host steps the optimizer: `"backward"`, `"forward"`, `"off"`; `"auto"`: the
            first of these that is exact (see docs/runtime.md), `"off"` on the CPU.
        forbid_keep_offload_with_fused_lora: Whether no block may keep its activations while its chunks are offloaded.
        sharding: Who holds offloaded chunks where several ranks train: `"replicate"`: each rank all of them; `"shard"`:
            the ranks of a machine together one copy, of which each steps its part; `"resident"`: nothing is offloaded;
            `"auto"`: the faster one of `"shard"` and `"replicate"` that fits; if nothing is searched for, the first.
        reduce_dtype: In which gradients of offloaded chunks are summed over ranks; None: in that of their weights.
        adapter_grad_sync: Who averages gradients of resident weights where few are trained: `"ddp"`, or one `"flat"`
            tensor; `"auto"`: the second, unless the devices are linked directly.
        find_unused_parameters, static_graph, ddp_comm_hook, ddp_comm_state: As in `DDPStrategy`, for resident weights.
        hardware: What device and host can do; None: it is measured once and kept, see docs/hardware.md.
        on_nonfinite: What happens if two batches in a row have a loss that is NaN or infinite: `"stop"` ends the fit,
            and writes no checkpoint of weights that are not finite; `"warn"` reports it.
        monitor: Whether a fit without a `PlanMonitor` among its callbacks gets one, which gives loggers nothing.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout, start_method: As in `DDPStrategy`.
        removed: Keywords of earlier versions; each is refused with what to use in its place.

    Raises:
        ValueError: A value out of range; more under `setup`, before anything is placed.
    """

    strategy_name = "protrain"
    removed_arguments = REMOVED

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
        on_nonfinite: OnNonFinite = "stop",
        monitor: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        **removed: object,
    ) -> None:
        refuse_removed(removed)
        ddp = DDPOptions(find_unused_parameters, static_graph, ddp_comm_hook, ddp_comm_state)
        processes = parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend
        parallelism = Parallelism(sharding, reduce_dtype, adapter_grad_sync, ddp)
        super().__init__(parallelism, accelerator, *processes, timeout, start_method)
        counts = num_swap_blocks, num_checkpoint_blocks, num_keep_offloaded_blocks
        knobs = Knobs(num_persistent_chunks, num_chunk_buffers, *counts, chunk_bytes)
        if forbid_keep_offload_with_fused_lora:
            knobs = knobs.without_keep_offloaded()
        choice = self.allowed_plan(read_plan_spec(plan))
        self._plan_request = make_plan_request(
            choice, knobs, blocks, min_num_params, device_memory, host_memory, hardware
        )
        self._losses = FiniteLosses(on_nonfinite)
        self._monitor = PlanMonitor(log=False) if monitor else None
        check_choice(overlap_optimizer)
        self._overlap_choice = overlap_optimizer
        self._overlap = OverlapPlan()
        self._handles: list[RemovableHandle] = []
        self._plan: Plan | None = None
        self._device: Device | None = None
        self._counters = TransferCounters()
        self._device_failed = False
        self._budget: int | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the present or the latest run; None before the first `setup`."""
        return self._plan

    @property
    def counters(self) -> TransferCounters:
        """What has been moved since the latest `setup`; all zero before it."""
        return self._counters

    @property
    def budget(self) -> int | None:
        """Bytes that the plan had to fit into; None without a limit."""
        return self._budget

    @property
    def overlap(self) -> OverlapPlan:
        """How the host's optimizer steps are overlapped in the present or the latest run; off before the first one."""
        return self._overlap

    @property
    def measured_peak_bytes(self) -> int | None:
        """The most that the device had allocated since the latest `setup`; None where it does not count."""
        return self._device.peak_bytes() if self._device is not None else None

    @property
    def num_hooks(self) -> int:
        """Places where the model is attached to; 0 for a resident plan."""
        return self._runtime.num_hooks if self._runtime is not None else 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: the device, the runtime and the other ranks."""
        own = dict.fromkeys(("_device", "_runtime", "_ranks", "_flat"))
        return {**super().__getstate__(), **own, "_handles": []}

    # --- set-up and teardown ------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Weights are made in host memory: the plan says later which of them the device ever sees.
        nowhere = nullcontext() if self._machines is None else torch.device("meta")
        with _EmptyInit(enabled=bool(empty_init)), self.precision_plugin.tensor_init_context(), nowhere:
            yield

    def setup(self, trainer: Trainer) -> None:
        """Plans and places the model.

        Raises:
            ValueError: The plan does not fit, is not one for this model, or the model does what the plan has to do.
        """
        model = self.lightning_module
        assert self.accelerator is not None
        assert model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            refuse_partially_stepped(model)
            refuse_own_checkpointing(model)
        self.precision_plugin.open(self.root_device.type)
        self.model = self.precision_plugin.convert_module(model)
        self._device = self.open_device()
        self._counters = self._device.counters
        shardings = self.own_shardings()
        self.end_outlines(shardings[0])
        if fitting:
            self.setup_optimizers(trainer)
        case = self._describe(trainer, model, shardings[0])
        if self._machines is not None:
            self._answers.update(answers(case, self._machines, self._clusters, self.reduce_dtype))
            raise _TunerExitException
        self.compare_ranks(case.layout, model, self._plan_request.choice)
        case, plan = plan_jointly(case, model, self.ranks, shardings, self.root_device, self.reduce_dtype)
        self._budget = case.budget()
        say_if_one_block(plan, case.layout)
        self.equalise(model, plan)
        self._place(model, plan, case.layout, case.spare_host_bytes(plan))
        self.setup_precision_plugin()
        if fitting:
            self.replicate(model, plan, self._runtime)
            if self._monitor is not None:
                self._monitor.join(trainer)
            check_one_device(self.optimizers)
            move_state_beside_parameters(self.optimizers)
            for optimizer in self.optimizers:
                self._handles.append(optimizer.register_state_dict_pre_hook(lambda _: self._finish_async_step()))
            if any(chunk.trainable and not chunk.resident for chunk in plan.chunks):
                rank_zero_info(self._overlap.describe(self._device.worker.threads or torch.get_num_threads()))

    def _describe(self, trainer: Trainer, model: LightningModule, sharding: Sharding) -> PlanSession:
        """What the plan depends on, with the overlap that there may be."""
        assert self._device is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            on_gpus = any(any(under.values()) for under in (self._machines or {}).values())
            kind = "cuda" if on_gpus else self.root_device.type
            self._overlap = plan_overlap(self._overlap_choice, trainer, model, self.optimizers, kind)
        optimizers, elsewhere = self.optimizers if fitting else None, self._machines is not None
        plan_request = (
            self._plan_request if self._machines is not None else self.among_ranks(self._plan_request, sharding)
        )
        how = self._device, self.precision_plugin, optimizers, self._overlap, elsewhere
        with failing_together("Profiling a training step"):  # Rank 0 does.
            return describe_session(plan_request, trainer, model, *how)

    def teardown(self) -> None:
        """Takes the plan off the model; may be called again if it raises."""
        while self._handles:
            self._handles.pop().remove()
        module = self.lightning_module
        if module is not None and module._trainer is not None and self._monitor is not None:
            self._monitor.leave(module.trainer)
        self.precision_plugin.attach(None)
        if self._runtime is not None and self._device_failed:
            # Nothing can be moved off such a device, and the error of trying would hide the cause.
            with suppress(RuntimeError):
                self._runtime.remove()
            mark_partially_stepped(module, self._runtime.async_step.partially_stepped)
            self._runtime, self._device_failed = None, False
            with suppress(RuntimeError):
                super().teardown()
            return
        if self._runtime is not None:
            self._runtime.remove()
            mark_partially_stepped(module, self._runtime.async_step.partially_stepped)
            self._runtime = None
        elif self._device is not None:
            self._device.close()
        if module is not None and any(parameter.is_meta for parameter in module.parameters()):
            # It was refused, so nothing has been placed; moving it to the CPU would raise over the refusal.
            return
        super().teardown()

    def _place(self, model: LightningModule, plan: Plan, layout: ModelLayout, spare: int) -> None:
        assert self._device is not None
        self._device.forget_peak()  # What profiling has taken before is not the plan's.
        if not plan.num_offloaded_chunks:
            model.to(self.root_device)
        self._plan = plan
        how = self._device, rank_zero_info, not model.automatic_optimization, spare, self._ranks, self.reduce_dtype
        self._runtime = apply_plan(model, plan, layout, *how)
        self.precision_plugin.attach(self._runtime.async_step, self._device.worker.threads)
        _update_properties(model, device=self.root_device)

    # --- running ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.equalise_buffers()
        # A backward that the user calls in the step runs on this thread too, see [Note: One thread].
        with torch.autograd.set_multithreading_enabled(False):
            return self._run_step(super().training_step, args, kwargs, training=True)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(self.past_ddp("validation_step"), args, kwargs, training=False)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(self.past_ddp("test_step"), args, kwargs, training=False)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(self.past_ddp("predict_step"), args, kwargs, training=False)

    def _run_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
        assert self._runtime is not None
        return self._runtime.run_step(step, args, kwargs, training)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward; all gradients are on the host, or with their resident parameters, when it returns.

        Raises:
            RuntimeError: A weight was needed that the runtime could not know of.
        """
        assert self._runtime is not None
        if self.averages:
            self._runtime.begin_averages()
        try:
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        except RuntimeError as error:
            if (explained := explain_missing_weight(self.explain(error))) is error:
                raise
            raise explained from error
        self._runtime.end_backward()
        self.average_resident()
        return loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """One step of one optimizer, whole, over resident and offloaded parameters, see [Note: Host step]."""
        assert self._runtime is not None
        assert self.lightning_module is not None
        runtime, overlap = self._runtime, self._overlap
        runtime.async_step.arm(optimizer, overlap.overlap, overlap.clip_value, overlap.take_norms, overlap.lends)

        def settled() -> Any:
            result = closure()
            runtime.settle()
            return result

        result = super().optimizer_step(optimizer, settled, model, **kwargs)
        runtime.refresh()
        if not step_is_followed_by_forward(self.lightning_module.trainer):
            runtime.async_step.finish_all()
        runtime.async_step.finish_aliased()
        return result

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._runtime is not None:
            try:
                self._runtime.reset()
            except RuntimeError as error:  # A device that has failed says so at every call: the first error counts.
                exception.add_note(f"After it, the runtime could not be reset: {error}")
                self._device_failed = True

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers `"protrain"` and `"protrain_spawn"`; a second call changes nothing."""
        names = {"protrain": {}, "protrain_spawn": {"start_method": "spawn"}}
        for name, arguments in names.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="Chunks streamed from host memory", **arguments)
