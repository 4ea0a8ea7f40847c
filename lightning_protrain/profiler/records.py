"""Frozen records of what a model is made of: the input of the planner. Imports nothing of ours and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class ParameterInfo:
    """One `nn.Parameter`, however many names it has.

    Attributes:
        fqn: The first fully qualified name under which `named_parameters()` lists it.
        sites: Every fully qualified name, tied ones included; `sites[0] == fqn`.
        shape: Its shape, that of the stored tensor where a subclass packs its elements.
        dtype: Name of its dtype without the `torch.` prefix, e.g. `"float32"`.
        nbytes: Bytes of its elements.
        trainable: `requires_grad` when the model was described.
    """

    fqn: str
    sites: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    trainable: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class UnitInfo:
    """A module whose parameters are fetched and released together.

    [Note: Unit]
    A *unit* is the smallest thing whose parameters come and go as one. Every block is a unit with all parameters of
    its subtree; every other module that directly owns parameters outside all blocks (an embedding, a norm, a head) is
    a unit of its own. A module that is never called (`ParameterList`, `ModuleDict`) hands its parameters to the nearest
    module around it that is, lastly to the root; a library's composite that reads its children's weights without
    calling them (`MultiheadAttention`, a DoRA layer) is one unit with its subtree. The empty name is the root: its
    direct parameters are needed whenever any step of the model runs. A model without blocks is one block, the root,
    with all parameters.

    Attributes:
        name: Fully qualified module name, the first if it has several; `""` is the root.
        is_block: Whether it carries an activation policy.
        parameters: First names of all parameters the unit needs, in `named_parameters()` order; a tied parameter is
            listed by every unit that needs it.
        encloses: Names of units inside this one (a container with parameters of its own around blocks).
    """

    name: str
    is_block: bool
    parameters: tuple[str, ...]
    encloses: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelLayout:
    """Everything the planner needs to know about a model's states.

    Attributes:
        parameters: All parameters in `named_parameters()` order, tied ones once.
        units: All units in the order in which `named_modules()` meets them, which stands for execution order until a
            step has been recorded.
        buffer_bytes: Bytes of all registered buffers; they stay on the device.
    """

    parameters: tuple[ParameterInfo, ...]
    units: tuple[UnitInfo, ...]
    buffer_bytes: int

    @property
    def blocks(self) -> tuple[UnitInfo, ...]:
        """The units that carry an activation policy, in order."""
        return tuple(unit for unit in self.units if unit.is_block)

    @cached_property
    def _by_name(self) -> dict[str, ParameterInfo]:
        return {info.fqn: info for info in self.parameters}

    def parameter(self, fqn: str) -> ParameterInfo:
        """The parameter whose first name is `fqn`.

        Raises:
            KeyError: No parameter has that first name.
        """
        return self._by_name[fqn]
