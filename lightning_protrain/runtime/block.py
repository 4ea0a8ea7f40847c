"""Blocks: modules whose chunks are fetched and released together, and the order in which they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.profiler.blocks import is_compiled
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.low_precision import ParamUses
from lightning_protrain.runtime.param import OffloadedParam, ParamLocation, locations_of
from lightning_protrain.runtime.prefetch_schedule import Timeline


class BlockOrder:
    """The blocks in the order of their forwards, then in the order of their backwards.

    Args:
        forward: Blocks in the order in which their forwards run.
        backward: Blocks in the order in which their backwards run.

    Attributes:
        timeline: Positions at which each chunk is needed, forward and backward.
    """

    def __init__(self, forward: Sequence[Block], backward: Sequence[Block]) -> None:
        self.forward = list(forward)
        self.backward = list(backward)
        needs = [block.chunks for block in forward]
        self.timeline = Timeline(needs + [block.chunks if block.backward_reads else () for block in backward])
        self._positions: dict[Block, list[int]] = {}
        for position, block in enumerate(forward):
            self._positions.setdefault(block, []).append(position)

    def is_of(self, forward: Sequence[Block], backward: Sequence[Block]) -> bool:
        """Return whether the order consists of exactly these blocks."""
        return self.forward == forward and self.backward == backward

    def behind(self, block: Block, position: int) -> int:
        """Return the position behind the first forward of `block` at or after `position`; without one, `position`."""
        positions = self._positions.get(block, ())
        place = bisect_left(positions, position)
        return positions[place] + 1 if place < len(positions) else position


_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(eq=False)
class Block:
    """A module whose chunks are fetched and released together.

    Attributes:
        name: Fully qualified name.
        module: The module.
        chunks: Indices of the offloaded chunks it needs.
        sites: Places inside the module where offloaded parameters of the block are registered.
        policy: Activation policy.
        backward_reads: Whether its backward reads weights; False for an embedding.
        swap_bytes: Planned host memory for the swapped activations of one call, bytes; 0: it swaps nothing.
        depth: Number of its forwards that are running, nested in each other.
        num_calls: Number of its calls in the present scope, such as a `training_step`, that backward may reach.
        first_call: Number of the first of these calls, see [Note: Calls]; None: there is none.
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
    _streamed: list[bool] = field(init=False, default_factory=list)
    _without_shadow: list[bool] = field(init=False, repr=False)
    _uses: tuple[ParamUses, ...] = field(init=False, repr=False)
    _has_fast_path: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Derive the lookups of the hot path; a tied parameter has several sites."""
        self.params = tuple(dict.fromkeys(param for _, param in self.sites))
        self._uses = tuple(param.shadow.uses for param in self.params if param.shadow is not None)
        self._without_shadow = [param.shadow is None for _, param in self.sites]
        self._has_fast_path = any(isinstance(module, _FAST_PATHS) for module in self.module.modules())
        self._pairs = tuple((param, param.host, param.device_param) for param in self.params)

    def follow(self) -> None:
        """Copy flags and gradient hooks that changed on host parameters to the device parameters."""
        behind = []
        with below_guard():  # Only metadata is read; the guard would make every read slow.
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

    def register_device_params(self, again: bool = False) -> None:
        """Register the parameters to compute with in place of the host parameters.

        Args:
            again: True registers what the latest call has: a recomputation in backward begins outside of autocast.

        Raises:
            RuntimeError: See `OffloadedParam.show`; nothing is registered in that case.
        """
        # PyTorch's fast evaluation paths reject parameter subclasses, and do not run under autocast on CUDA.
        whole = self._has_fast_path and not torch.is_autocast_enabled()
        streamed = self._streamed if again else self._without_shadow
        params = [param for _, param in self.sites]
        self._shown = [
            param.device_param if known else param.show(whole) for param, known in zip(params, streamed, strict=True)
        ]
        if self.recomputes_itself is not False:
            self._streamed = [shown is param.device_param for param, shown in zip(params, self._shown, strict=True)]
        for (site, param), shown in zip(self.sites, self._shown, strict=True):
            site.exchange(param.host, shown)
        for uses in self._uses:
            uses.shown = True

    def register_hosts(self) -> None:
        """Register the host parameters again; do nothing if they are registered."""
        for (site, param), shown in zip(self.sites, self._shown, strict=bool(self._shown)):
            site.exchange(shown, param.host)
        self._shown = []

    def end_uses(self) -> None:
        """Drop full-precision weights that stood in for shadow copies; call after `register_hosts`.

        Raises:
            RuntimeError: See `ParamUses.end`.
        """
        for uses in self._uses:
            uses.end()

    def forget_uses(self) -> None:
        """Reset the use counts after backward has summed the gradients, or before a recomputation repeats the uses."""
        for uses in self._uses:
            uses.number = 0


def make_blocks(model: nn.Module, plan: Plan, layout: ModelLayout, chunks: Sequence[Chunk]) -> list[Block]:
    """Return the blocks that the runtime handles: those with offloaded chunks or an activation policy.

    If any block swaps, return all blocks: the transfers of one block overlap with the computation of its neighbours.
    If any chunk is offloaded, also return the first unit: entering it starts the first uploads, which then overlap
    with the computation of resident units.
    """
    swaps = any(block.swap_bytes for block in plan.blocks)
    params = {id(param.host): param for chunk in chunks for param in chunk.params}
    sites = locations_of(model, layout, params)
    blocks: list[Block] = []
    first = _first_unit(model, layout) if chunks else None
    for info in layout.units:
        needed = tuple(
            index for index, chunk in enumerate(chunks) if not set(info.parameters).isdisjoint(chunk.plan.parameters)
        )
        planned = plan.block(info.name) if info.is_block else BlockPlan(info.name, BlockPolicy.KEEP)
        module = model.get_submodule(info.name)
        if needed or planned.policy is not BlockPolicy.KEEP or (swaps and info.is_block) or info.name == first:
            reads = type(module).forward is not nn.Embedding.forward
            locations = tuple(sites.get(info.name, ()))
            block = Block(info.name, module, needed, locations, planned.policy, reads, planned.swap_bytes)
            blocks += _split_root(block, chunks) if block.name == "" else [block]
    return blocks


def _first_unit(model: nn.Module, layout: ModelLayout) -> str | None:
    """Return the name of the first unit whose forward can be intercepted; None: there is no such unit."""
    traced = [part for part in model.modules() if is_compiled(part) or isinstance(part, torch.jit.ScriptModule)]
    inside = {id(module) for part in traced for module in part.modules()}
    units = {info.name: model.get_submodule(info.name) for info in layout.units if info.name}
    return next((name for name, module in units.items() if has_forward(module) and id(module) not in inside), None)


def _split_root(root: Block, chunks: Sequence[Chunk]) -> list[Block]:
    """Split the root into one block for each outermost callable child, and one for parameters of the root itself.

    A step is user code: it may clip gradients, call `zero_grad` or keep parameters, and must see the host parameters.
    So the children fetch the weights. Only the root's own parameters, which a step may use anywhere, have their device
    parameters registered throughout the step.
    """
    paths = {id(module): path for path, module in root.module.named_modules()}
    groups: dict[str, list[tuple[ParamLocation, OffloadedParam]]] = {}
    for site, param in root.sites:
        parts = paths[id(site.module)].split(".")
        prefixes = (".".join(parts[: end + 1]) for end in range(len(parts)))
        owner = next((path for path in prefixes if path and has_forward(root.module.get_submodule(path))), "")
        groups.setdefault(owner, []).append((site, param))
    blocks = []
    for path, sites in groups.items():
        used = {param for _, param in sites}
        needed = tuple(index for index in root.chunks if not used.isdisjoint(chunks[index].params))
        module = root.module.get_submodule(path)
        reads = type(module).forward is not nn.Embedding.forward
        blocks.append(Block(path, module, needed, tuple(sites), root.policy, reads))
    return blocks


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called."""
    return type(module).forward is not nn.Module.forward
