"""Places of weights, and layers that keep things beside the weight which belong to one memory or the other.

[Note: Two states]
The 8-bit layer of bitsandbytes keeps codes and scales in an object, `layer.state`, that its autograd function holds for
backward. As the weight is two parameters, so this is two objects: one of the host, which is there at rest, and one of
the device, whose tensors lie in the chunk.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_protrain.companions import accept_companions, has_companions, prepare_weights
from lightning_protrain.profiler.records import ModelLayout, UnitInfo
from lightning_protrain.runtime.slot import Site, Slot

# Repacks the weight for a kernel of the CPU that evaluates only: in memory of its own.
_REPACKS = "support_avx512bf16_for_cpu"


@dataclass(eq=False)
class QuantisedSite(Site):
    """A place of a weight with companions, see [Note: Two states].

    Attributes:
        host: The user's parameter.
    """

    host: nn.Parameter = field(kw_only=True)
    _of_host: dict[str, Any] = field(init=False, default_factory=dict)
    _of_device: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """The layer's state as it is belongs to the host."""
        prepare_weights(self.module)
        kept = vars(self.module)
        if "CB" in vars(self.host) and "state" in kept:
            self._of_device["state"] = copy.copy(kept["state"])
        if _REPACKS in kept:
            self._of_device[_REPACKS] = False
        self._of_host = {name: kept[name] for name in self._of_device}

    def exchange(self, old: nn.Parameter, new: nn.Parameter) -> None:
        held = self.module._parameters.get(self.name)
        if held is not None and held.untyped_storage()._cdata == old.untyped_storage()._cdata:
            old = held  # PEFT reads such a weight and registers another parameter of the same memory.
        super().exchange(old, new)
        if self.module._parameters.get(self.name) is new:
            vars(self.module).update(self._of_host if new is self.host else self._of_device)


def make_site(module: nn.Module, name: str, slot: Slot) -> Site:
    """The place `module._parameters[name]` of an offloaded parameter."""
    if has_companions(slot.host):
        slot.hooks.append(accept_companions(module))
        return QuantisedSite(module, name, host=slot.host)
    return Site(module, name)


def sites_of(model: nn.Module, layout: ModelLayout, slots: dict[int, Slot]) -> dict[str, list[tuple[Site, Slot]]]:
    """Every place where an offloaded parameter is registered, under the innermost unit around it that needs it."""
    by_name: dict[str, UnitInfo] = {unit.name: unit for unit in layout.units}
    found: dict[str, list[tuple[Site, Slot]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            slot = slots.get(id(parameter))
            if slot is None:
                continue
            owner = _innermost(path, slot.fqn, by_name)
            assert owner is not None, f"{slot.fqn} is registered in {path!r} outside every unit that needs it"
            found.setdefault(owner, []).append((make_site(module, name, slot), slot))
    return found


def _innermost(path: str, fqn: str, units: dict[str, UnitInfo]) -> str | None:
    while True:
        if path in units and fqn in units[path].parameters:
            return path
        if not path:
            return None
        path = path.rpartition(".")[0]
