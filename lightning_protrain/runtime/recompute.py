"""Activation checkpointing of blocks, full and selective.

[Note: Selective recomputation]
A block may keep its products, see [Note: Products]. When its forward runs again, in the middle of backward, each
product is reused instead of computed. Then it is released, because autograd holds the products that are still needed.
If the graph is retained (`retain_graph`), the product is kept. If backward reaches the block in parts (from one output,
later from another), products that have been released are computed again. A dispatch mode intercepts every operation of
both runs in Python, except those of a backward inside of the forward (`torch.autograd.grad`). PyTorch does not compile
intercepted code.

A kept product must not change. Writing to one in place, inside the block or outside, is refused.

Full recomputation uses the non-reentrant form of `torch.utils.checkpoint`, which keeps the inputs of the block and none
of its activations. When backward asks for the first saved tensor, the block's forward runs again, up to the last saved
tensor. Meanwhile random states and buffers have their values from before the first forward: dropout repeats bit for
bit, and running statistics do not count a batch twice. (`torch.utils.checkpoint` would read the random state of a GPU
once for each input tensor.) Settings made only around the forward are restored as well: autocast and the default device
by `torch.utils.checkpoint`, the default dtype and the enabled attention kernels here. A key-value cache among the
inputs (a tuned prefix lies in one) is filled once. Other side effects of a forward (a counter on the module, an
attribute) happen twice.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.profiler.blocks import compiled_parameters, modules_in
from lightning_protrain.profiler.op_kinds import is_product
from lightning_protrain.profiler.records import ModelLayout


class KeptOutputs:
    """The products of one call of a block, in the order in which they are made.

    Args:
        name: Name of the block, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: list[tuple[Any, Any]] = []
        self._next = 0

    def rewind(self) -> None:
        """Hand out the kept results from the first one again, when the recomputation of the forward begins."""
        self._next = 0

    def keep(self, func: Any, made: Any) -> None:
        """Keep the result of `func`, without its history."""
        self._made.append((func, tree_map_only(Tensor, _Kept, made)))

    def find(self, func: Any) -> Any:
        """Return the kept result of the next product, which `func` must have made; None: it has been released.

        Raises:
            ValueError: Another function made the next product, or the product has changed since.
        """
        index, self._next = self._next, self._next + 1
        earlier, outputs = self._made[index] if index < len(self._made) else (None, None)
        if earlier is not func:
            raise ValueError(
                f"{self.name!r} is recomputed, and does not call the operations that it called before: {func} in place "
                f"of {earlier or 'none'}. Let its forward do the same every time, or keep all its activations."
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._made[index] = func, None
        return tree_map_only(_Kept, self._get, outputs)

    def _get(self, kept: _Kept) -> Tensor:
        if kept.tensor._version != kept.version:
            raise ValueError(
                f"{self.name!r} is checkpointed selectively and keeps its products; one of them, of shape "
                f"{tuple(kept.tensor.shape)}, was changed in place. Change it out of place (`x = x + y` for "
                "`x += y`), or checkpoint the block as a whole (`num_checkpoint_blocks`)."
            )
        return _alias(kept.tensor)


class _Kept:
    """A tensor and its version when it was kept."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = _alias(tensor)
        self.version = tensor._version


class _Watching(TorchDispatchMode):
    """A dispatch mode around a run of a forward."""

    def __init__(self, products: KeptOutputs) -> None:
        super().__init__()
        self._products = products
        self._backward = -1

    def __enter__(self) -> Self:
        self._backward = torch._C._current_graph_task_id()
        super().__enter__()
        return self

    def _makes_product(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether `func` makes a product, outside of any backward that the forward itself runs.

        Such a backward may run in only one of the two runs, or in another order.
        """
        if not isinstance(func, torch._ops.OpOverload) or torch._C._current_graph_task_id() != self._backward:
            return False
        return is_product(func, args, kwargs)


class KeepOutputs(_Watching):
    """A dispatch mode around the first run of a forward, which keeps its products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep its result if it is a product."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._makes_product(func, args, kwargs):
            self._products.keep(func, made)
        return made


class ReuseOutputs(_Watching):
    """A dispatch mode around the run in backward, which reuses the kept products."""

    def __enter__(self) -> Self:
        self._products.rewind()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the kept product of an operation, or run the operation."""
        kwargs = kwargs or {}
        product = self._products.find(func) if self._makes_product(func, args, kwargs) else None
        return func(*args, **kwargs) if product is None else product


class _NestedContexts:
    """Nested contexts, the outer one first, which may be entered again after they have ended."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias that shares memory and versions but has no history; autograd adds a history to `tensor` later."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def checkpoint(
    function: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    module: nn.Module,
    name: str,
    selective: bool = False,
) -> Any:
    """Call `function`, the forward of `module`, and drop its activations, see the module docstring.

    Args:
        function: Forward of the module.
        inputs: Positional and keyword arguments of the forward.
        module: Module of the forward.
        name: Name of the module, for messages.
        selective: Whether products are kept, see [Note: Selective recomputation].

    Raises:
        ValueError: The forward changes an input tensor in place, so it would run again on changed values; or the
            module is compiled.
    """
    refuse_compiled(module, name)
    leaves, structure = tree_flatten(inputs)
    # The first run gets the caller's own containers, which it may fill; the second gets copies made before.
    first = [inputs]

    def run(*values: Any) -> Any:
        positional, keywords = first.pop() if first else tree_unflatten(list(map(_earlier, values)), structure)
        return function(*positional, **keywords)

    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in tensors]
    contexts = _contexts(_EarlierState(module, leaves), name, selective)
    earlier = map(_earlier, leaves)
    outputs = checkpoint_call(run, *earlier, preserve_rng_state=False, context_fn=lambda: contexts)
    if versions != [tensor._version for tensor in tensors]:
        raise ValueError(
            f"{name!r} is checkpointed and changes a tensor that it is given in place: it cannot run again on the same "
            "values. Change it out of place (`x = x + y` for `x += y`), or keep its activations "
            "(`num_checkpoint_blocks`)."
        )
    return outputs


def checkpoint_call(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call `function` in the non-reentrant form of `torch.utils.checkpoint`.

    An exception of the first run is raised after `torch.utils.checkpoint` has returned. Passing through it, the
    exception would leave the hooks for saved tensors on in torch 2.11, for as long as its traceback lives.

    Args:
        function: Function of `inputs`.
        inputs: Positional arguments.
        options: Options of `torch.utils.checkpoint.checkpoint`.
    """
    raised: list[BaseException] = []
    first = [True]

    def run(*values: Any) -> Any:
        if not first:
            return function(*values)
        first.clear()
        try:
            return function(*values)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)
            return None

    outputs = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False, **options)
    if raised:
        raise raised.pop()
    return outputs


def _contexts(
    earlier: _EarlierState, name: str, selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first run and of the second."""
    if not selective:
        return nullcontext(), earlier
    products = KeptOutputs(name)
    return KeepOutputs(products), _NestedContexts(earlier, ReuseOutputs(products))


def _earlier(value: Any) -> Any:
    """Return a snapshot of a key-value cache of transformers, safe from later filling; return other values as given."""
    if value is None or isinstance(value, (Tensor, int, float, str)):
        return value
    if not any(
        base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in type(value).__mro__
    ):
        return value
    copied = copy.copy(value)
    for name, held in vars(value).items():
        if isinstance(held, list):
            held = [copy.copy(layer) for layer in held]
        vars(copied)[name] = dict(held) if isinstance(held, dict) else _earlier(held)
    return copied


# Pairs of functions that read and write a process-wide setting which `torch.utils.checkpoint` does not restore.
_ATTENTION = torch.backends.cuda  # Its switches apply to the CPU too.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_ATTENTION.flash_sdp_enabled, _ATTENTION.enable_flash_sdp),
    (_ATTENTION.mem_efficient_sdp_enabled, _ATTENTION.enable_mem_efficient_sdp),
    (_ATTENTION.math_sdp_enabled, _ATTENTION.enable_math_sdp),
    (_ATTENTION.cudnn_sdp_enabled, _ATTENTION.enable_cudnn_sdp),
)


class _EarlierState:
    """A context in which buffers, modes (`training`), settings and random states are those of its construction.

    So are tensors that stand in for weights.

    Changes inside the context are dropped on exit. The module uses copies of its buffers meanwhile. If the old values
    were written into the buffers themselves, autograd would report an in-place change of tensors that it has saved.

    Args:
        given: Inputs of the module: random states of the CPU and of each GPU with one of these tensors are restored.
    """

    def __init__(self, module: nn.Module, given: Iterable[Any]) -> None:
        owners = [*modules_in(module)]
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (owner._buffers, name, buffer)
            for owner in owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._earlier = {id(buffer): buffer.clone() for _, _, buffer in self._places}
        # What `torch.func.functional_call` puts in the place of weights.
        self._places += [
            (owner._parameters, name, weight)
            for owner in owners
            for name, weight in vars(owner)["_parameters"].items()
            if type(weight) is torch.Tensor
        ]
        self._now: list[torch.Tensor | None] = []
        self._modes = self._modes_now = [(owner, owner.training) for owner in owners]
        self._tensors = one_of_each_device(given)
        self._random = self._random_now = self._random_states()
        self._settings = self._settings_now = _settings()

    def __enter__(self) -> None:
        self._random_now = self._random_states()
        _set_random_states(self._random)
        self._settings_now = _settings()
        _set_settings(self._settings)
        self._modes_now = [(owner, owner.training) for owner, _ in self._modes]
        _set_modes(self._modes)
        self._now = [table[name] for table, name, _ in self._places]
        copies = {key: buffer.clone() for key, buffer in self._earlier.items()}
        for table, name, value in self._places:
            table[name] = copies.get(id(value), value)

    def __exit__(self, *exception: object) -> None:
        for (table, name, _), value in zip(self._places, self._now, strict=True):
            table[name] = value
        _set_modes(self._modes_now)
        _set_random_states(self._random_now)
        _set_settings(self._settings_now)

    def _random_states(self) -> tuple[Any, ...]:
        of_host = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (users draw from it)
        return (*of_host, get_device_states(*self._tensors) if self._tensors else ([], []))


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


def _set_settings(values: list[Any]) -> None:
    for (_, make), value in zip(_SETTINGS, values, strict=True):
        make(value)


def one_of_each_device(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return one empty tensor for each accelerator that holds a tensor of `values`, for `get_device_states`."""
    devices = dict.fromkeys(value.device for value in values if isinstance(value, torch.Tensor))
    return [torch.empty(0, device=device) for device in devices if device.type not in ("cpu", "meta")]


def _set_random_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    devices, of_devices = states[3]
    if devices:
        set_device_states(devices, of_devices)


def refuse_own_checkpointing(model: nn.Module) -> None:
    """Refuse the user's gradient checkpointing: blocks that the plan recomputes would be recomputed twice.

    Raises:
        ValueError: If the user has switched gradient checkpointing on.
    """
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"Gradient checkpointing is switched on in {name!r}, but the plan decides which blocks are "
                "checkpointed. Remove the call (`model.gradient_checkpointing_disable()`)."
            )


def refuse_compiled(module: nn.Module, name: str, around: bool = False) -> None:
    """Refuse a compiled module, whose graph would trace streaming and recomputation.

    Args:
        module: Module that is streamed, swapped or checkpointed, or contains such a module.
        name: Name of the module, for the message.
        around: Whether it contains such a module, so that its `forward` and `training_step` must not be compiled.

    Raises:
        ValueError: The user has compiled the module, in place or not.
    """
    steps = [vars(module).get(step) for step in ("forward", "training_step")] if around else []
    traced = any(hasattr(step, "_torchdynamo_orig_callable") for step in steps)
    if traced or module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        raise ValueError(
            f"{name or type(module).__name__!r} is compiled (`module.compile()` or `torch.compile`), and the plan "
            "streams, swaps or checkpoints it or what is inside of it. Compile the forward of each block in its place, "
            "`module.forward = torch.compile(module.forward)`, which leaves that outside of the graph, or give "
            'plan="resident".'
        )


def refuse_cuda_graphs(module: nn.Module, name: str) -> None:
    """Refuse forwards that are replayed as CUDA graphs, because streamed weights change their addresses.

    Args:
        module: Module with streamed weights.
        name: Name of the module, for the message.

    Raises:
        ValueError: The user has compiled the module, or one inside of it, with CUDA graphs.
    """
    for inner, submodule in module.named_modules(prefix=name):
        for compiled in (vars(submodule).get("forward"), submodule._compiled_call_impl):
            config: dict[str, Any] = getattr(compiled, "get_compiler_config", dict)() or {}
            if config.get("triton.cudagraphs"):
                raise ValueError(
                    f"The forward of {inner!r} is compiled with CUDA graphs "
                    '(`torch.compile(mode="reduce-overhead")` or "max-autotune"), which read weights at the '
                    'addresses of the capture, but the plan streams its weights. Compile it with mode="default" or '
                    '"max-autotune-no-cudagraphs", or give plan="resident".'
                )


def stop_caching(model: nn.Module) -> list[Any]:
    """Switch key-value caches off, because a block that runs twice would fill its cache twice.

    Returns:
        The configurations whose `use_cache` was on and has to be set back.
    """
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    return caching


def refuse_compiled_blocks(model: nn.Module, plan: Plan, layout: ModelLayout, device: torch.device) -> None:
    """Refuse a plan that streams, swaps or recomputes a compiled module or a module inside one.

    Raises:
        ValueError: The plan does so, or streams a weight of a TorchScript module, or streams a weight that a compiled
            forward reads in low precision.
    """
    offloaded = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(
            unit_name.startswith(f"{name}.") for unit_name in offloaded
        ):
            raise ValueError(
                f"{name!r} is a module of TorchScript, whose weights cannot be streamed. Train the module that it was "
                'made of, and script that after fit, or give plan="resident".'
            )
    low = {
        id(model.get_parameter(fqn)): fqn for chunk in plan.chunks if chunk.streamed_dtype for fqn in chunk.parameters
    }
    for parameter in compiled_parameters(model) if low else ():
        if id(parameter) in low:
            raise ValueError(
                f"The plan streams {low[id(parameter)]!r} in two bytes, but a compiled forward reads it as "
                f"{str(parameter.dtype).removeprefix('torch.')}. Make the plan again with the compiled model."
            )
    changed = {block.name for block in plan.blocks if block.policy is not BlockPolicy.KEEP or block.swap_bytes}
    units = [unit for unit in layout.units if unit.name in changed or not offloaded.isdisjoint(unit.parameters)]
    parts = [unit.name.split(".") for unit in units]
    around = dict.fromkeys(".".join(names[:end]) for names in parts for end in range(len(names)))
    for name in around:
        refuse_compiled(model.get_submodule(name), name, around=True)
    for unit in units:
        refuse_compiled(model.get_submodule(unit.name), unit.name)
        if device.type == "cuda" and not offloaded.isdisjoint(unit.parameters):
            refuse_cuda_graphs(model.get_submodule(unit.name), unit.name)
