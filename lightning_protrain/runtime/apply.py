"""Applies a plan to a model and removes it again; `apply_plan` lists all that is done to the model, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from lightning_protrain.device.device import Device, TransferCounters
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.block import Block, has_forward, make_blocks
from lightning_protrain.runtime.chunk import make_chunks, place_resident
from lightning_protrain.runtime.comm.collectives import Collectives, RankMesh
from lightning_protrain.runtime.executor import Executor
from lightning_protrain.runtime.hooks import (
    Interception,
    Interceptions,
    ViewWatch,
    direct_calls,
    histories,
    hook_gradients,
    hook_outputs,
    refuse_weights,
    slice_forwards,
)
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.recompute import refuse_compiled_blocks, stop_caching
from lightning_protrain.runtime.step_context import BlockCall, StepContext
from lightning_protrain.runtime.swap import ActivationSwap


def refuse_additions(model: nn.Module) -> RemovableHandle:
    """Refuse new modules with new weights in the model, until the returned handle is removed.

    Such weights would be in no chunk and in no optimizer. Registering such a module raises ValueError.
    """
    # Weak keys: the identity of a deleted module may be given to a new one.
    paths = WeakKeyDictionary({module: path for path, module in model.named_modules()})
    parameters = {id(parameter) for parameter in model.parameters()}

    def check(parent: nn.Module, name: str, added: Any) -> None:
        if parent not in paths or not isinstance(added, nn.Module) or added in paths:
            return
        new = next((each for each, value in added.named_parameters() if id(value) not in parameters), None)
        if new is not None:
            path = ".".join(part for part in (paths[parent], name) if part)
            raise ValueError(
                f"{path!r} ({type(added).__name__}, with {new!r}) is added while a plan is applied: it would be in no "
                "chunk and in no optimizer. Add adapters and layers before fit, in `configure_model` or before the "
                "Trainer is called."
            )

    return register_module_module_registration_hook(check)


T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions:
    """Options of a runtime beyond its plan.

    Attributes:
        log_once: Shows a sentence to the user.
        manual: Whether backward and optimizers run inside of steps (manual optimization). If so, the root module's
            own parameters stay registered as host parameters during training steps.
        spare_host_bytes: Host memory that swapped blocks may take beyond the plan, bytes, see [Note: Growth].
        ranks: Ranks that train together, each with the same model and plan; None: a single rank.
        reduce_dtype: Dtype in which ranks sum gradients; None: the dtype of their weights.
    """

    log_once: Callable[[str], None]
    manual: bool = False
    spare_host_bytes: int = 0
    ranks: RankMesh | None = None
    reduce_dtype: torch.dtype | None = None


def apply_plan(model: nn.Module, plan: Plan, layout: ModelLayout, device: Device, options: RunOptions) -> Runtime:
    """Place the model as the plan says; no name, no module and no parameter object changes.

    Args:
        model: Model that `layout` describes; its parameters are in host memory.
        plan: Plan that has been checked against `layout`.
        layout: Structure of the model.
        device: Device that the model trains on.
        options: Options of the runtime.

    Returns:
        The handle that runs steps and removes the plan.

    Raises:
        ValueError: A parameter has no data yet (meta device), a plan is already applied, or a module is compiled so
            that streaming, swapping or recomputation would be traced. Or the plan slices a module that is not there.
    """
    _refuse_missing(model, plan)
    refuse_meta(model)
    _refuse_applied(model)
    refuse_compiled_blocks(model, plan, layout, device.torch_device)
    place_resident(model, plan, device)
    ranks = options.ranks
    communicator = Collectives(ranks, device, options.reduce_dtype) if ranks is not None else None
    chunks = make_chunks(model, plan, layout, device, ranks)
    blocks = make_blocks(model, plan, layout, chunks)
    buffers = plan.gradient_buffers if layout.passes_gradients else 0
    async_step = AsyncStep(chunks, device, communicator, buffers)
    context = StepContext(blocks, chunks, device, options.log_once)
    executor = Executor(context, plan, async_step, _make_swap(context, model, options), communicator)
    if device.torch_device.type != "cpu":
        outside = {fqn for unit in layout.units if not unit.is_block for fqn in unit.parameters}
        executor.direct.add(param for chunk in chunks for param in chunk.params if param.fqn in outside)
    hook_gradients(executor)
    if device.host.locks and communicator is None:
        executor.grads.reserve(layout.lends_copies)
    watch = ViewWatch()
    sliced = slice_forwards(model, plan, blocks)  # Before the interceptions, which are around the slices.
    intercepted = [Interception(block, executor, watch) for block in blocks if has_forward(block.module)]
    recomputes = any(block.policy in (BlockPolicy.CHECKPOINT, BlockPolicy.SELECTIVE) for block in plan.blocks)
    caching = stop_caching(model) if recomputes or plan.sliced else []
    direct = direct_calls(model, executor, intercepted)
    interceptions = Interceptions(model, [*sliced, *intercepted, *direct], caching)
    if communicator is not None:
        communicator.meet()  # Wait until the other ranks have written the shared weights,
        async_step.publishing.publish()  # and then until they have written the shadow copies.
        shared = (chunk.share for chunk in chunks if chunk.share is not None)
        if (share := next(shared, None)) is not None:
            share.memory.lock()  # All chunks share one memory.
    if chunks:
        chunks[0].params[0].hooks.append(refuse_additions(model))
    return Runtime(plan, executor, interceptions, watch, options.manual)


class Runtime:
    """The handle of an applied plan.

    Attributes:
        plan: The applied plan.
        async_step: Optimizer steps that run behind backward or forward.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        interceptions: Interceptions,
        watch: ViewWatch,
        manual: bool,
    ) -> None:
        self.plan = plan
        self.async_step = executor.async_step
        self._manual = manual
        self._device = executor.context.device
        self._chunks = executor.context.chunks
        self._executor = executor
        self._interceptions = interceptions
        self._watch = watch

    @property
    def counters(self) -> TransferCounters:
        """Counters of transferred bytes and copies."""
        return self._device.counters

    @property
    def num_hooks(self) -> int:
        """Number of replaced forwards and of parameters with gradient hooks; 0 for a wholly resident plan."""
        return len(self._interceptions) + sum(len(chunk.params) for chunk in self._chunks)

    def run_step(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool,
    ) -> T:
        """Run a `training_step`, `validation_step` or the like in a scope, see [Note: Scopes].

        Parameters that belong to the root module and to no block stay on the device during the whole step.

        Args:
            function: The step.
            args: Positional arguments of the step.
            kwargs: Keyword arguments of the step.
            training: Whether backward follows.
        """
        if not self._interceptions and not self._chunks:
            return function(*args, **kwargs)
        executor = self._executor
        if not training:
            self.async_step.finish_all()
        root = None if training and self._manual else executor.root
        with executor.scope(training):
            outputs = function(*args, **kwargs) if root is None else self._with_root(root, function, args, kwargs)
        if training:
            self._watch.check()
        return outputs

    @property
    def owners(self) -> dict[int, int]:
        """Owner of each weight that ranks share, as `local_rank`, by the identity of the parameter."""
        owners = {id(param.host): chunk.owner(param) for chunk in self._chunks for param in chunk.params}
        return {parameter: owner for parameter, owner in owners.items() if owner is not None}

    def keep_from_forks(self, states: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Keep optimizer states and master weights on the host from forked processes, see [Note: Forks] in host.py.

        Args:
            states: Returns the states on the host.
        """
        chunks = self._chunks
        if chunks:
            self._device.keep_from_forks(
                lambda: [*(weight for chunk in chunks for weight in chunk.masters()), *states()]
            )

    @contextmanager
    def backward(self, averages: bool = False) -> Generator[None]:
        """Run a backward in this context, on one thread, see [Note: One thread].

        When the context ends, all gradients are on the host, even if autograd did not report the end of backward.

        Args:
            averages: Whether gradients are averaged over the ranks, see [Note: Reduction]; equal on all ranks.

        Raises:
            RuntimeError: Backward read a weight that is not on the device, because no hook announced the read.
        """
        if averages and (reduction := self._executor.grads.reduction) is not None:
            reduction.begin()
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in ("data is not allocated yet", "storage of size 0")):
                raise
            raise RuntimeError(
                "Backward needed a weight that is not on the device: it belongs to a block none of whose outputs take "
                "part in the loss (values handed out some other way), or backward runs through a backward. Return the "
                "values from the block, or make it resident (`num_persistent_chunks`)."
            ) from error
        self._executor.end_backward()

    @property
    def averages_chunks(self) -> bool:
        """True if gradients of chunks are averaged over ranks."""
        trained = (param.host.requires_grad for chunk in self._chunks for param in chunk.params)
        return self._executor.grads.reduction is not None and any(trained)

    def after_chunks(self, issue: Callable[[], None], at_end: bool = False) -> None:
        """Issue collectives behind those of chunks, see [Note: One group at a time] in runtime/comm/collectives.py.

        Args:
            issue: Issues collectives and makes the current stream wait for them; called within the present backward.
            at_end: True if autograd has called all hooks of this backward.
        """
        reduction = self._executor.grads.reduction
        assert reduction is not None

        def behind_others() -> None:
            with reduction.communicator.behind_others():
                issue()

        if at_end:
            self._executor.end_backward()
        self._executor.after_chunks(behind_others)

    def release_reserved(self) -> None:
        """Return memory of gradients to the system for optimizer states, see [Note: Gradients in passing]."""
        self._executor.grads.release_reserved()

    def settle(self) -> None:
        """Release the chunks before an optimizer writes weights, so that no upload of this rank reads them."""
        self._executor.settle()

    def refresh(self) -> None:
        """Drop outdated copies of weights on the device, after an optimizer step.

        If ranks share weights, also tell the other ranks which weights this rank has stepped.
        """
        self.async_step.shadows.invalidate_stepped()
        self.async_step.publishing.publish()
        self._executor.refresh()

    def reset(self) -> None:
        """Return to a clean state after an exception in the middle of a step."""
        self.async_step.abandon()
        self._executor.reset()

    def remove(self) -> None:
        """Remove the plan from the model; safe to call again.

        If a CUDA device has failed, each of its calls raises. Everything is removed all the same, and the last error
        is raised with the earlier ones as its context.
        """
        with ExitStack() as parts:  # Callbacks run from the last to the first, even if some raise.
            parts.callback(setattr, self, "_chunks", ())
            parts.callback(self._executor.direct.close)
            if self._executor.swap is not None:
                parts.callback(self._executor.swap.close)
            for chunk in self._chunks:
                if chunk.share is not None:
                    parts.callback(chunk.share.memory.make_private)  # By then nothing of the chunk is page-locked.
            parts.callback(self._device.close)
            parts.callback(self._executor.grads.close)
            for chunk in self._chunks:
                parts.callback(chunk.detach)
            parts.callback(self._interceptions.remove)
            parts.callback(self.async_step.close)
            parts.callback(self.reset)

    def _with_root(self, root: Block, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        executor = self._executor
        number = executor.context.begin_call(root) if torch.is_grad_enabled() else None
        received = histories((args, kwargs))
        executor.enter(root)
        try:
            outputs = function(*args, **kwargs)
            refuse_weights(outputs, root)
        finally:
            executor.exit(root)
        if number is not None:
            hook_outputs(outputs, received, BlockCall(root, number, executor.context.num_calls), executor, self._watch)
        return outputs


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model whose weights have no values yet.

    Raises:
        ValueError: A parameter is on the meta device.
    """
    for fqn, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{fqn!r} is on the meta device: it has no values to train. Load or initialise the weights in "
                "`configure_model` before fit."
            )


def _refuse_missing(model: nn.Module, plan: Plan) -> None:
    present = {name for name, _ in model.named_modules(remove_duplicate=False)}
    missing = [name for name in plan.sliced if name not in present]
    if missing:
        raise ValueError(
            f"The plan runs {missing[0]!r} on slices of the tokens, but the model has no such module ({len(missing)} "
            f"of the plan's {len(plan.sliced)} are missing). It was made for another model: make the plan again, or "
            "load that model."
        )


def _refuse_applied(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), Interception):
            raise ValueError(f"A plan is applied to {name!r} already. Remove it first (end the fit that applied it).")


def _make_swap(context: StepContext, model: nn.Module, options: RunOptions) -> ActivationSwap | None:
    blocks = context.blocks
    if not any(block.swap_bytes for block in blocks):
        return None
    device_params = [param.device_param for block in blocks for param in block.params]
    weights = [*model.parameters(), *model.buffers(), *device_params]
    return ActivationSwap(context.device, weights, options.log_once, options.spare_host_bytes)
