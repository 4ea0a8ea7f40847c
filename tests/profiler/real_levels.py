"""Levels of activations in a real step with real tensors, cut where modules are called and their gradients arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.recompute import KeepOutputs, KeptOutputs, ReuseOutputs
from tests.profiler.real_run import Context


@dataclass
class Window:
    """A part of the step between two cuts: bytes at its beginning, the peak, and the operations within."""

    unit: str
    call: int
    live: int
    peak: int = 0
    operations: int = 0
    nbytes: int = 0
    gradients: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peak = max(self.peak, self.live)


class RealLevels(TorchDispatchMode):
    """Runs a step and its backward."""

    def __init__(self, model: nn.Module, layout: ModelLayout, keep_gradients: bool = False) -> None:
        super().__init__()
        self.model, self.layout, self.keep_gradients = model, layout, keep_gradients
        self.alive: dict[StorageWeakRef, int] = {}
        self.gradients: list[Tensor | None] = []
        self.depth = self.calls = 0
        self.ignoring = False
        self.going_back = False
        self.forward = [Window("", -1, 0)]
        self.backward: list[Window] = []
        self.after = 0

    def level(self) -> int:
        self.alive = {reference: nbytes for reference, nbytes in self.alive.items() if not reference.expired()}
        return sum(self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.ignoring:
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {leaf.untyped_storage()._cdata for leaf in given}
        for leaf in made:
            if leaf.untyped_storage()._cdata not in known:
                self.alive[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        window = (self.backward if self.going_back else self.forward)[-1]
        window.peak = max(window.peak, self.level())
        if made + given and not func.is_view:
            window.operations += 1
            window.nbytes += sum(leaf.nbytes for leaf in made + given)
        return result

    @contextmanager
    def ignored(self) -> Iterator[None]:
        self.ignoring = True
        yield
        self.ignoring = False

    def _enter(self, name: str, *_: Any) -> None:
        self.depth += 1
        if self.depth == 1:
            self.forward.append(Window(name, self.calls, self.level()))
            self.calls += 1

    def _leave(self, name: str, module: Any, args: Any, outputs: Any) -> None:
        self.depth -= 1
        if self.depth:
            return
        call = self.forward[-1].call
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._arrive, name, call))
        self.forward.append(Window("", -1, self.level()))

    def _arrive(self, name: str, call: int, gradient: Tensor) -> None:
        del gradient
        if all(window.call != call for window in self.backward):
            self.gradients.clear()
            self.backward.append(Window(name, call, self.level()))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if self.keep_gradients:
            self.gradients.append(parameter.grad)
        parameter.grad = None
        for window in self.backward:
            window.gradients = [fqn for fqn in window.gradients if fqn != name]
        self.backward[-1].gradients.append(name)

    def run(self, step: Callable[[], Tensor], context: Context) -> None:
        """The step, and backward from what it returns."""
        with ExitStack() as stack:
            for unit in self.layout.units:
                module = self.model.get_submodule(unit.name)
                if not unit.encloses:
                    enter = module.register_forward_pre_hook(partial(self._enter, unit.name))
                    stack.callback(enter.remove)
                    stack.callback(module.register_forward_hook(partial(self._leave, unit.name)).remove)
            for info in self.layout.parameters:
                parameter = self.model.get_parameter(info.fqn)
                if parameter.requires_grad:
                    parameter.grad = None
                    hook = parameter.register_post_accumulate_grad_hook(partial(self._accumulated, info.fqn))
                    stack.callback(hook.remove)
            with self:
                with context():
                    loss = step()
                gradient = torch.ones_like(loss)
                self.going_back = True
                self.backward.append(Window("", -1, self.level()))
                loss.backward(gradient)
                self.gradients.clear()
                self.after = self.level()


@contextmanager
def checkpointed(module: nn.Module) -> Iterator[None]:
    """In this context, the forward of a module keeps only its inputs."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    yield
    del module.forward


@contextmanager
def selected(module: nn.Module) -> Iterator[None]:
    """In this context, the forward of a module keeps only its inputs and its products."""
    forward = module.forward

    def contexts() -> tuple[KeepOutputs, ReuseOutputs]:
        products = KeptOutputs("block")
        return KeepOutputs(products), ReuseOutputs(products)

    module.forward = lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )
    yield
    del module.forward


@contextmanager
def swapped(module: nn.Module, real: RealLevels) -> Iterator[None]:
    """In this context, tensors that autograd saves in a module move to memory that is not counted.

    Tensors smaller than a page stay.
    """
    forward = module.forward
    stay = {tensor.untyped_storage()._cdata for tensor in [*real.model.parameters(), *real.model.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in stay or storage.nbytes() < PAGESIZE:
            return tensor
        with real.ignored():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor.detach())

    def swapping(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    module.forward = swapping
    yield
    del module.forward
