"""The figures of `profile_model`, measured independently on a real step with real tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_protrain.profiler.records import ModelLayout

Context = Callable[[], AbstractContextManager[Any]]


def storages(values: object) -> dict[int, int]:
    """Bytes by address of the storage."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in leaves}


class RealRun(TorchDispatchMode):
    """Records a profile's figures in a real step; keeps every tensor, so that no address is used twice."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        super().__init__()
        self.model, self.layout = model, layout
        self.names: dict[int, str] = {}
        for info in layout.parameters:
            self.names[model.get_parameter(info.fqn).untyped_storage()._cdata] = info.fqn
        self.states = {**storages(list(model.buffers())), **storages(list(model.parameters()))}
        self.kept: list[object] = []
        self.running: list[tuple[str, dict[int, int], dict[int, int]]] = []
        self.calls: list[list[Any]] = []
        self.saved: dict[int, int] = {}
        self.uses: Counter[str] = Counter()
        self.casts: Counter[str] = Counter()
        self.saves: Counter[str] = Counter()
        self.dtype_reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.kept.append((args, kwargs, result))
        aliases = storages(result) if not func._schema.is_mutable else {}
        for key in storages((args, kwargs)).keys() & self.names.keys() - aliases.keys():
            self.uses[self.names[key]] += 1
            # A weight of these models is only ever cast whole, and its view is not.
            self.casts[self.names[key]] += func is torch.ops.aten._to_copy.default and args[0]._base is None
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)
        ((key, nbytes),) = storages(tensor).items()
        self.saves[self.names.get(key, "")] += 1
        if key not in self.states:
            self.saved[key] = nbytes
            for _, inputs, saved in self.running:
                if key not in inputs:
                    saved[key] = nbytes
        return tensor

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        inputs = {key: nbytes for key, nbytes in storages((args, kwargs)).items() if key not in self.states}
        self.running.append((name, inputs, {}))
        self.calls.append([name])

    def _leave(self) -> None:
        name, _, saved = self.running.pop()
        call = next(call for call in reversed(self.calls) if call == [name])
        call.append(sum(saved.values()))

    def run(self, step: Callable[[], object], context: Context) -> None:
        with ExitStack() as stack:
            for unit in self.layout.units:
                module = self.model.get_submodule(unit.name)
                enter = module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=unit.name: self._enter(name, args, kwargs), with_kwargs=True
                )
                leave = module.register_forward_hook(lambda *_: self._leave())
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
            with _DtypeReads(self), self, context(), hooks:
                step()

    def castable(self) -> set[str]:
        once = {fqn for fqn, count in self.casts.items() if count == 1 == self.uses[fqn]}
        return {fqn for fqn in once if not self.saves[fqn] and not self.dtype_reads[fqn]}


class _DtypeReads(TorchFunctionMode):
    def __init__(self, run: RealRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16)
        if func == torch.Tensor.dtype.__get__ or func in casts:  # a new object at every look
            self.run.dtype_reads[self.run.names.get(args[0].untyped_storage()._cdata, "")] += 1
        return func(*args, **(kwargs or {}))
