"""Attaches the runtime to modules; no other file does, and one handle removes every hook."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.profiler.blocks import is_compiled
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.block import Block, has_forward
from lightning_protrain.runtime.direct_reads import DirectReads
from lightning_protrain.runtime.executor import Executor
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.recompute import checkpoint
from lightning_protrain.runtime.slices import ForwardReplacement, SlicedForward
from lightning_protrain.runtime.step_context import BlockCall, in_backward


class Interception(ForwardReplacement):
    """The forward of a block: fetches its chunks, and treats its activations as its policy says.

    Unlike a pair of forward hooks it also covers exceptions and early stops: the host parameters are always registered
    again.

    Args:
        block: Block whose forward is replaced.
        executor: Fetches the block's chunks.
        watch: Checks outputs that are views.
    """

    def __init__(self, block: Block, executor: Executor, watch: ViewWatch) -> None:
        super().__init__(block.name, block.module)
        self.block = block
        self._executor = executor
        self._watch = watch
        self._swap = executor.swap

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward() or not torch.is_grad_enabled():
            return self._compute(*args, **kwargs)
        block, executor = self.block, self._executor
        number = executor.context.begin_call(block)
        received = histories((args, kwargs))
        with self._swapping(number, (args, kwargs)):
            if block.policy in (BlockPolicy.CHECKPOINT, BlockPolicy.SELECTIVE):
                selective = block.policy is BlockPolicy.SELECTIVE
                outputs = checkpoint(self._compute, (args, kwargs), block.module, block.name, selective)
            else:
                outputs = self._compute(*args, **kwargs)
        if (block.chunks or self._swap is not None) and block.backward_reads:
            hook_outputs(outputs, received, BlockCall(block, number, executor.context.num_calls), executor, self._watch)
        return outputs

    @property
    def is_running(self) -> bool:
        """True while the block runs its forward."""
        return self.block.depth > 0

    @contextmanager
    def _looking_for_checkpoints(self) -> Iterator[None]:
        """Find out, in the first call with gradients, whether the forward checkpoints a part of itself.

        The signs are that gradients are off inside, or that hooks of `torch.utils.checkpoint` pack saved tensors.
        """
        block = self.block
        if block.recomputes_itself is not None or in_backward() or not torch.is_grad_enabled():
            yield
            return
        block.recomputes_itself = False
        if any(map(is_compiled, block.module.modules())):  # A graph recomputes by itself; hooks would recompile it.
            yield
            return
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def look(*_: Any) -> None:
            inside = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if inside != around or not torch.is_grad_enabled():
                block.recomputes_itself = True

        handles = [module.register_forward_pre_hook(look) for module in {site.module for site, _ in block.sites}]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _swapping(self, number: int, inputs: Any) -> AbstractContextManager[None]:
        if self._swap is None:
            return nullcontext()
        block, earlier = self.block, self._swap.given_before(find_tensors(inputs))
        stay = earlier if block.policy is BlockPolicy.CHECKPOINT else frozenset()
        return self._swap.call(block.name, block.module, number, block.swap_bytes, stay)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        self._executor.enter(self.block)
        reads = self._executor.direct.allowed() if in_backward() else nullcontext()
        try:
            with self._looking_for_checkpoints(), reads:
                outputs = self._forward(*args, **kwargs)
            refuse_weights(outputs, self.block)
            return outputs
        finally:
            self._executor.exit(self.block)


def slice_forwards(model: nn.Module, plan: Plan, blocks: Iterable[Block]) -> list[SlicedForward]:
    """Make the modules that the plan names run on slices of the tokens, and mark the blocks they are in."""
    sliced = [SlicedForward(name, model.get_submodule(name), plan.slice_tokens) for name in plan.sliced]
    for forward in sliced:
        forward.put_on()
    for block in blocks:
        inside = f"{block.name}." if block.name else ""
        if any(f"{name}.".startswith(inside) for name in plan.sliced):
            block.recomputes_itself = True
    return sliced


class DirectCall(ForwardReplacement):
    """A method of a module around streamed weights that it may read, see [Note: Direct reads].

    Args:
        name: Name of the module.
        module: The module.
        method: `"forward"` or `"generate"`, which moves prompts to the device of the first weight.
        reads: Answers the reads.
    """

    def __init__(self, name: str, module: nn.Module, method: str, reads: DirectReads) -> None:
        super().__init__(name, module, method)
        self._reads = reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._reads.allowed():
            return self._forward(*args, **kwargs)


def direct_calls(model: nn.Module, executor: Executor, intercepted: Iterable[Interception]) -> list[DirectCall]:
    """Return replacements for the modules around weights that may be read directly, except intercepted ones."""
    inside = {id(module) for each in intercepted for module in each.block.module.modules() if each.block.name}
    inside |= {id(each.block.module) for each in intercepted}
    paths = [fqn.split(".") for fqn in executor.direct.names]
    around = dict.fromkeys(".".join(path[:end]) for path in paths for end in range(len(path)))
    outer = [(name, module) for name in around if id(module := model.get_submodule(name)) not in inside]
    reads = executor.direct
    calls = [DirectCall(name, module, "forward", reads) for name, module in outer if has_forward(module)]
    able = [(name, module) for name, module in outer if callable(getattr(type(module), "generate", None))]
    return [*calls, *(DirectCall(name, module, "generate", reads) for name, module in able)]


class Interceptions:
    """All interceptions of a model, which are removed together.

    They are also off while `copy.deepcopy` copies a module that contains an intercepted one. So the copy is a whole
    model in host memory, as without a plan.

    Args:
        model: Model that the plan is applied to.
        replacements: Replacements of forwards; of the same module, the inner one first.
        caching: Configurations of the model whose `use_cache` is off while the plan is applied.
    """

    def __init__(self, model: nn.Module, replacements: Sequence[ForwardReplacement], caching: list[Any]) -> None:
        self._each = replacements
        self._caching = caching
        names = [replacement.name for replacement in replacements]
        parts = [name.split(".") for name in names if name]
        around = dict.fromkeys(".".join(names[:end]) for names in parts for end in range(len(names) + 1))
        modules = [model.get_submodule(name) for name in (around or dict.fromkeys(names))]
        self._around = [(module, functools.partial(self._copy, module)) for module in modules]
        self._put_on()

    def __len__(self) -> int:
        """Return the number of replaced forwards."""
        return len(self._each)

    def remove(self) -> None:
        """Restore the forward of every module; safe to call again."""
        self._take_off()
        self._each, self._caching, self._around = (), [], []

    def _put_on(self) -> None:
        for config in self._caching:
            config.use_cache = False
        for replacement in self._each:
            replacement.put_on()
        for module, copier in self._around:
            module.__dict__["__deepcopy__"] = copier

    def _take_off(self) -> None:
        for config in self._caching:
            config.use_cache = True
        for replacement in reversed(self._each):
            replacement.take_off()
        for module, _ in self._around:
            module.__dict__.pop("__deepcopy__", None)

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if (running := next((forward.name for forward in self._each if forward.is_running), None)) is not None:
            raise ValueError(f"The model cannot be copied within the forward of {running!r}. Copy it after the step.")
        self._take_off()
        try:
            for tensor in (*module.parameters(), *module.buffers()):  # Copy resident tensors straight to the host.
                if tensor.device.type != "cpu" and type(tensor) in (Tensor, nn.Parameter):
                    there = tensor.detach().cpu()
                    memo[id(tensor)] = (
                        nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
                    )
            return copy.deepcopy(module, memo).cpu()
        finally:
            self._put_on()


def refuse_weights(outputs: Any, block: Block) -> None:
    """Refuse outputs in memory that is freed after the call.

    Raises:
        ValueError: An output is one of the block's weights or a view of one.
    """
    if not block.params:
        return
    with below_guard():  # Only metadata is read; the guard would make every read slow.
        storages = {param.device_param.untyped_storage()._cdata for param in block.params}
        for tensor in find_tensors(outputs):
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.untyped_storage()._cdata in storages:
                raise ValueError(
                    f"{block.name!r} returns one of its weights, or a view of it, and is streamed: the memory may be "
                    "freed before it is read. Return `weight.clone()`, or make its chunk resident "
                    "(`num_persistent_chunks`)."
                )


def histories(inputs: Any) -> dict[int, Any]:
    """Return the autograd node of each tensor in `inputs`, by identity; an in-place change of a tensor changes it."""
    return {id(tensor): tensor.grad_fn for tensor in find_tensors(inputs)}


def hook_outputs(outputs: Any, received: dict[int, Any], call: BlockCall, executor: Executor, watch: ViewWatch) -> None:
    """Register hooks on the outputs of a call, so that autograd announces its backward, see [Note: Calls].

    Args:
        outputs: Return value of the call; tensors inside it are found.
        received: Result of `histories` for the inputs before the call: an input that is returned unchanged is no
            output of this call.
        call: The call, which has just ended.
        executor: Is told when the gradient of an output arrives.
        watch: Checks outputs that are views.
    """
    awaited = False
    for tensor in find_tensors(outputs):
        if tensor.grad_fn is not None and tensor.grad_fn is not received.get(id(tensor)):
            tensor.register_hook(lambda _: executor.before_backward(call))
            if tensor._is_view():
                watch.add(tensor, call.block.name)
            awaited = True
    if awaited:
        executor.context.await_gradient(call)


def hook_gradients(executor: Executor) -> None:
    """Register hooks on offloaded parameters, so that autograd hands their gradients to the executor."""
    with below_guard():  # Otherwise low-precision device parameters report the dtype of their weights.
        for chunk in executor.context.chunks:
            for param in chunk.params:
                if param.device_param.is_floating_point() or param.device_param.is_complex():
                    _hook_gradient(param, executor)


def _hook_gradient(param: OffloadedParam, executor: Executor) -> None:
    host, device_param = param.host, param.device_param
    trained = host.requires_grad
    host.requires_grad_(True)
    device_param.requires_grad_(True)
    param.hooks.append(device_param.register_post_accumulate_grad_hook(lambda _: executor.take_gradient(param)))
    direct = host.register_hook(lambda _: executor.before_direct_gradient(param))
    param.own_hook = direct.id
    param.hooks.append(direct)
    host.requires_grad_(trained)
    device_param.requires_grad_(trained)


class ViewWatch:
    """A check for outputs that are views and are changed in place.

    Autograd then rebuilds the history of the view, which silently removes the hook on the output: the block would run
    its backward without weights.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], int, str]] = []

    def add(self, tensor: Tensor, name: str) -> None:
        """Watch an output of the block called `name`."""
        self._seen.append((weakref.ref(tensor), tensor._version, name))

    def check(self) -> None:
        """Refuse in-place changes of the outputs since the latest check.

        Raises:
            ValueError: An output was changed in place.
        """
        seen, self._seen = self._seen, []
        for reference, version, name in seen:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise ValueError(
                    f"An output of {name!r} is a view and was changed in place afterwards, which removes the hook that "
                    "brings its weights back for backward. Change it out of place (`x = x + y` for `x += y`), or "
                    "return `output.clone()` from the block."
                )


def find_tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """Return all tensors inside `value`: in containers, dataclasses and attributes of other objects.

    Modules and classes are skipped. Because an argument may refer to half of the program, no object is entered twice,
    and objects are entered to at most `depth` levels.
    """
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    _find_inside(value, depth, set(), tensors)
    return tensors


def _find_inside(value: Any, depth: int, seen: set[int], tensors: list[Tensor]) -> None:
    if value is None or isinstance(value, (int, float, str, bytes, type, torch.nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        inner = value
    else:
        depth -= 1
        inner = list(vars(value).values()) if depth >= 0 and hasattr(value, "__dict__") else ()
    for item in inner:
        if isinstance(item, Tensor):
            tensors.append(item)
        else:
            _find_inside(item, depth, seen, tensors)
