"""Blocks: modules whose chunks come and go together, and the order in which they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.low_precision import ParamUses
from lightning_protrain.runtime.param import OffloadedParam, ParamLocation
from lightning_protrain.runtime.prefetch_schedule import Timeline


class BlockOrder:
    """Units in the order of their forwards, then in that of their backwards.

    Args:
        forward: The units whose forwards run.
        backward: The units whose backwards follow.

    Attributes:
        timeline: When each chunk is needed, forward and backward.
    """

    def __init__(self, forward: Sequence[Block], backward: Sequence[Block]) -> None:
        self.forward = list(forward)
        self.backward = list(backward)
        needs = [unit.chunks for unit in forward]
        self.timeline = Timeline(needs + [unit.chunks if unit.backward_reads else () for unit in backward])
        self._positions: dict[Block, list[int]] = {}
        for position, unit in enumerate(forward):
            self._positions.setdefault(unit, []).append(position)

    def is_of(self, forward: Sequence[Block], backward: Sequence[Block]) -> bool:
        """Whether these are its units."""
        return self.forward == forward and self.backward == backward

    def behind(self, unit: Block, position: int) -> int:
        """The position behind the next forward of `unit` from `position` on; `position` itself if there is none."""
        positions = self._positions.get(unit, ())
        found = bisect_left(positions, position)
        return positions[found] + 1 if found < len(positions) else position


_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(eq=False)
class Block:
    """A module whose chunks come and go together, see [Note: Unit].

    Attributes:
        name: Fully qualified name.
        module: The module.
        chunks: Indices of the offloaded chunks it needs.
        sites: Where its offloaded parameters are registered inside it.
        policy: What happens to its activations.
        backward_reads: Whether its backward reads weights (that of an embedding does not).
        swap_bytes: Host bytes that one call of it may swap; 0: it swaps nothing.
        depth: How many of its forwards are running.
        num_calls: How many of its calls in this scope autograd may go back through.
        first_call: Number of the first of them.
        recomputes_itself: Whether its forward checkpoints a part of itself; None: it has not run with gradients yet.
        params: The parameters of `sites`, each once.
    """

    name: str
    module: nn.Module
    chunks: tuple[int, ...]
    sites: tuple[tuple[ParamLocation, OffloadedParam], ...]
    policy: BlockPolicy
    backward_reads: bool = True
    swap_bytes: int = 0
    depth: int = 0
    num_calls: int = 0
    first_call: int | None = None
    recomputes_itself: bool | None = None
    params: tuple[OffloadedParam, ...] = field(init=False)
    _pairs: tuple[tuple[OffloadedParam, nn.Parameter, nn.Parameter], ...] = field(init=False, repr=False)
    _shown: list[nn.Parameter] = field(init=False, default_factory=list)
    _uses: tuple[ParamUses, ...] = field(init=False, repr=False)
    _has_fast_path: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """A tied parameter has several sites."""
        self.params = tuple(dict.fromkeys(param for _, param in self.sites))
        self._uses = tuple(param.uses for param in self.params if param.uses is not None)
        self._has_fast_path = any(isinstance(module, _FAST_PATHS) for module in self.module.modules())
        self._pairs = tuple((param, param.host, param.device_param) for param in self.params)

    def follow(self) -> None:
        """Brings flags and gradient hooks of the host parameters to the device parameters, where they have changed."""
        behind = []
        with below_guard():  # Only descriptions are read; without it each costs a look at the class of the parameter.
            for param, host, device_param in self._pairs:
                hooks = host._backward_hooks
                if (
                    host.requires_grad is not device_param.requires_grad
                    or param.mirrored
                    or (hooks and (len(hooks) != 1 or param.own_hook not in hooks))
                ):
                    behind.append(param)
        for param in behind:
            param.follow()

    def register_device_params(self) -> None:
        """Registers what the unit should compute with in place of the host parameters.

        Raises:
            RuntimeError: As `OffloadedParam.show`; nothing is registered then.
        """
        # The fast paths of evaluation are not taken with weights of a class of our own, nor under autocast on CUDA.
        whole = self._has_fast_path and not torch.is_autocast_enabled()
        self._shown = [param.device_param if param.copy is None else param.show(whole) for _, param in self.sites]
        for (site, param), shown in zip(self.sites, self._shown, strict=True):
            site.exchange(param.host, shown)
        for uses in self._uses:
            uses.shown = True

    def register_hosts(self) -> None:
        """Registers the host parameters again, where something else is; does nothing if nothing has been."""
        for (site, param), shown in zip(self.sites, self._shown, strict=bool(self._shown)):
            site.exchange(shown, param.host)
        self._shown = []

    def end_uses(self) -> None:
        """After `register_hosts`: what was at hand of weights in full precision goes.

        Raises:
            RuntimeError: As `ParamUses.end`.
        """
        for uses in self._uses:
            uses.end()

    def forget_uses(self) -> None:
        """Backward has summed gradients of the uses before, or begins to compute the same again."""
        for uses in self._uses:
            uses.number = 0
