"""Activation checkpointing of blocks, full and selective.

[Note: Selective recomputation]
A block may keep its products, see [Note: Products]. When its forward runs again, in the middle of backward,
each product is found in place of being computed, and is let go then: who still needs it is autograd. Where the graph is
to be gone through once more (`retain_graph`), it stays. Where backward comes to the block in parts (from one of its
outputs, later from another), what has been let go is computed. Both runs are watched operation by operation, in Python;
not what a backward inside of the forward (`torch.autograd.grad`) does. PyTorch compiles nothing that is watched so.

What stays must not change: a product that is written to in place, in the block or by whoever gets it, is refused.

[Note: Recomputation]
`torch.utils.checkpoint` in its non-reentrant form keeps what the block is given and nothing of what it computes. When
backward asks for the first saved tensor, the block's forward runs again, in the middle of backward and perhaps not to
its end. Random states and buffers are those of before the forward meanwhile: dropout repeats bit for bit, and running
statistics do not count a batch twice. (`torch.utils.checkpoint` would read the random state of a GPU once for each
tensor that the block is given.) So are settings that are made around the forward alone: autocast and the default device
(`torch.utils.checkpoint` sees to both), the default dtype, and the kernels that attention may take. A
key-value cache that the block is given (a tuned prefix lies in one) is filled once. What else a forward leaves behind
(a counter on the module, an attribute) it leaves twice.
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

from lightning_protrain.device.op_kinds import is_product
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.profiler.records import ModelLayout


class KeptOutputs:
    """The products of one call of a block, in the order in which they are made.

    Args:
        name: Of the block, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: list[tuple[Any, Any]] = []
        self._next = 0

    def rewind(self) -> None:
        """The forward begins to run again."""
        self._next = 0

    def keep(self, func: Any, made: Any) -> None:
        """Keeps what `func` has made, without its history."""
        self._made.append((func, tree_map_only(Tensor, _Kept, made)))

    def find(self, func: Any) -> Any:
        """What `func` made in its turn; None: it has been let go.

        Raises:
            ValueError: It was another one's turn, or what it made has been changed since.
        """
        index, self._next = self._next, self._next + 1
        earlier, kept = self._made[index] if index < len(self._made) else (None, None)
        if earlier is not func:
            raise ValueError(
                f"{self.name!r} is recomputed, and does not call the operations that it called before: {func} in place "
                f"of {earlier or 'none'}. Let its forward do the same every time, or keep all its activations."
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._made[index] = func, None
        return tree_map_only(_Kept, self._get, kept)

    def _get(self, kept: _Kept) -> Tensor:
        if kept.tensor._version != kept.version:
            raise ValueError(
                f"{self.name!r} keeps its products for its recomputation, and one of them, of shape "
                f"{tuple(kept.tensor.shape)}, has been changed in place since. Change it out of place (`x = x + y` for "
                "`x += y`), or checkpoint the block as a whole (`num_checkpoint_blocks`)."
            )
        return _alias(kept.tensor)


class _Kept:
    """A tensor as it is now."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = _alias(tensor)
        self.version = tensor._version


class _Watching(TorchDispatchMode):
    """Around a run of a forward.

    Args:
        products: Of the call.
    """

    def __init__(self, products: KeptOutputs) -> None:
        super().__init__()
        self._products = products
        self._backward = -1

    def __enter__(self) -> Self:
        self._backward = torch._C._current_graph_task_id()
        super().__enter__()
        return self

    def _makes_product(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Another backward, which has begun since, may not run in both runs, or not in the same order."""
        if not isinstance(func, torch._ops.OpOverload) or torch._C._current_graph_task_id() != self._backward:
            return False
        return is_product(func, args, kwargs)


class KeepOutputs(_Watching):
    """Around the first run of a forward; its products are kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Part of `TorchDispatchMode`."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._makes_product(func, args, kwargs):
            self._products.keep(func, made)
        return made


class ReuseOutputs(_Watching):
    """Around the run in backward; its products are found."""

    def __enter__(self) -> Self:
        self._products.rewind()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Part of `TorchDispatchMode`."""
        kwargs = kwargs or {}
        found = self._products.find(func) if self._makes_product(func, args, kwargs) else None
        return func(*args, **kwargs) if found is None else found


class NestedContexts:
    """One context inside of another; they may be entered again when they have ended.

    Args:
        outer: Entered first.
        inner: Entered then.
    """

    def __init__(self, outer: Any, inner: Any) -> None:
        self._contexts = outer, inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and versions without the history; autograd gives that to the tensor itself later."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def checkpoint(
    function: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    module: nn.Module,
    name: str,
    selective: bool = False,
) -> Any:
    """Call `function`, the forward of `module`, and drop its activations, see [Note: Recomputation].

    Args:
        function: The forward.
        inputs: Its positional and its keyword arguments.
        module: The module whose forward it is.
        name: Name of the module, for messages.
        selective: Whether products are kept, see [Note: Selective recomputation].

    Raises:
        ValueError: The forward changes a tensor that it is given: it would run again on the changed values. Or the
            module is compiled.
    """
    refuse_compiled(module, name)
    leaves, structure = tree_flatten(inputs)
    # The first run gets the caller's own containers, which it may fill; the second gets them as they were.
    own = [inputs]

    def run(*values: Any) -> Any:
        positional, keywords = own.pop() if own else tree_unflatten(list(map(_earlier, values)), structure)
        return function(*positional, **keywords)

    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in given]
    contexts = _contexts(_EarlierState(module, leaves), name, selective)
    kept = map(_earlier, leaves)
    outputs = torch.utils.checkpoint.checkpoint(
        run, *kept, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
    )
    if versions != [tensor._version for tensor in given]:
        raise ValueError(
            f"{name!r} is checkpointed and changes a tensor that it is given in place: it cannot run again on the same "
            "values. Change it out of place (`x = x + y` for `x += y`), or keep its activations "
            "(`num_checkpoint_blocks`)."
        )
    return outputs


def _contexts(
    earlier: _EarlierState, name: str, selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Those of the first run and of the second."""
    if not selective:
        return nullcontext(), earlier
    products = KeptOutputs(name)
    return KeepOutputs(products), NestedContexts(earlier, ReuseOutputs(products))


def _earlier(value: Any) -> Any:
    """A key-value cache of transformers as it is now, whatever it is filled with later; anything else itself."""
    if not any(
        base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in type(value).__mro__
    ):
        return value
    found = copy.copy(value)
    for name, held in vars(value).items():
        if isinstance(held, list):
            held = [copy.copy(layer) for layer in held]
        vars(found)[name] = dict(held) if isinstance(held, dict) else _earlier(held)
    return found


# Pairs of what reads and what makes a setting of the process: those that `torch.utils.checkpoint` does not restore.
_ATTENTION = torch.backends.cuda  # Its switches count for the CPU too.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_ATTENTION.flash_sdp_enabled, _ATTENTION.enable_flash_sdp),
    (_ATTENTION.mem_efficient_sdp_enabled, _ATTENTION.enable_mem_efficient_sdp),
    (_ATTENTION.math_sdp_enabled, _ATTENTION.enable_math_sdp),
    (_ATTENTION.cudnn_sdp_enabled, _ATTENTION.enable_cudnn_sdp),
)


class _EarlierState:
    """Within it, buffers, settings and random states are those of when this was made.

    What happens to them inside is forgotten. Copies stand in for the buffers: to write the old values back would look
    to autograd like a change of what the recomputation has saved.

    Args:
        module: Its buffers.
        given: What it is given: random states are those of the CPU, and of each GPU that a tensor of these is on.
    """

    def __init__(self, module: nn.Module, given: Iterable[Any]) -> None:
        self._places = [
            (owner._buffers, name, buffer)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._earlier = {id(buffer): buffer.clone() for _, _, buffer in self._places}
        self._now: list[torch.Tensor | None] = []
        self._tensors = one_of_each_device(given)
        self._random = self._random_now = self._random_states()
        self._settings = self._settings_now = _settings()

    def __enter__(self) -> None:
        self._random_now = self._random_states()
        _set_random_states(self._random)
        self._settings_now = _settings()
        _set_settings(self._settings)
        self._now = [buffers[name] for buffers, name, _ in self._places]
        copies = {key: buffer.clone() for key, buffer in self._earlier.items()}
        for buffers, name, buffer in self._places:
            buffers[name] = copies[id(buffer)]

    def __exit__(self, *exception: object) -> None:
        for (buffers, name, _), buffer in zip(self._places, self._now, strict=True):
            buffers[name] = buffer
        _set_random_states(self._random_now)
        _set_settings(self._settings_now)

    def _random_states(self) -> tuple[Any, ...]:
        own = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (users draw from it)
        return (*own, get_device_states(*self._tensors) if self._tensors else ([], []))


def _settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


def _set_settings(values: list[Any]) -> None:
    for (_, make), value in zip(_SETTINGS, values, strict=True):
        make(value)


def one_of_each_device(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return an empty tensor on each device of some tensors that has a random state of its own."""
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
    """The plan decides which blocks are checkpointed, and where weights are; twice would be done twice.

    Raises:
        ValueError: The user has switched gradient checkpointing on.
    """
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"Gradient checkpointing is switched on in {name!r}, but the plan decides which blocks are "
                "checkpointed. Remove the call (`model.gradient_checkpointing_disable()`)."
            )


def refuse_compiled(module: nn.Module, name: str, around: bool = False) -> None:
    """Refuse a compiled module: it would have streaming and recomputation traced, too.

    Args:
        module: One that is streamed, swapped or checkpointed, or has such a one inside of it.
        name: Of the module, for the message.
        around: Whether such a one is inside of it, so that its forward must not be compiled either.

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
    """Refuse forwards that are replayed as CUDA graphs: weights that are streamed come to other addresses.

    Args:
        module: One with weights that are streamed.
        name: Of the module, for the message.

    Raises:
        ValueError: The user has compiled it, or a module inside of it, with CUDA graphs.
    """
    for inner, each in module.named_modules(prefix=name):
        for compiled in (vars(each).get("forward"), each._compiled_call_impl):
            config: dict[str, Any] = getattr(compiled, "get_compiler_config", dict)() or {}
            if config.get("triton.cudagraphs"):
                raise ValueError(
                    f"The forward of {inner!r} is compiled with CUDA graphs "
                    '(`torch.compile(mode="reduce-overhead")` or "max-autotune"), which read weights where they were '
                    'when it was captured, and the plan streams its weights. Compile it with mode="default" or '
                    '"max-autotune-no-cudagraphs", or give plan="resident".'
                )


def stop_caching(model: nn.Module) -> list[Any]:
    """Switches key-value caches off, which a block that runs twice would fill twice.

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
    """Refuse compiled modules where a plan has work to do: blocks that it streams or recomputes, modules around them.

    Raises:
        ValueError: One of them is compiled, or a module of TorchScript.
    """
    offloaded = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(each.startswith(f"{name}.") for each in offloaded):
            raise ValueError(
                f"{name!r} is a module of TorchScript, whose weights cannot be streamed. Train the module that it was "
                'made of, and script that after fit, or give plan="resident".'
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
