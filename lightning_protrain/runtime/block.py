"""Blocks: modules whose chunks come and go together, and the order in which they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.low_precision import ParamUses
from lightning_protrain.runtime.param import OffloadedParam, ParamLocation, locations_of
from lightning_protrain.runtime.prefetch_schedule import Timeline


class BlockOrder:
    """Blocks in the order of their forwards, then in that of their backwards.

    Args:
        forward: The blocks whose forwards run.
        backward: The blocks whose backwards follow.

    Attributes:
        timeline: When each chunk is needed, forward and backward.
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
        """Return whether these are its blocks."""
        return self.forward == forward and self.backward == backward

    def behind(self, block: Block, position: int) -> int:
        """Return the position behind the next forward of `block` from `position` on; `position` if there is none."""
        positions = self._positions.get(block, ())
        found = bisect_left(positions, position)
        return positions[found] + 1 if found < len(positions) else position


_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(eq=False)
class Block:
    """A module whose chunks come and go together.

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
        self._uses = tuple(param.shadow.uses for param in self.params if param.shadow is not None)
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
        self._shown = [param.device_param if param.shadow is None else param.show(whole) for _, param in self.sites]
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


def make_blocks(model: nn.Module, plan: Plan, layout: ModelLayout, chunks: Sequence[Chunk]) -> list[Block]:
    """Find the blocks that the runtime must know: those with offloaded chunks, or with an activation policy.

    If one block swaps, all blocks are among them: its copies overlap with what its neighbours compute.
    """
    swaps = any(block.swap_bytes for block in plan.blocks)
    params = {id(param.host): param for chunk in chunks for param in chunk.params}
    sites = locations_of(model, layout, params)
    blocks: list[Block] = []
    for info in layout.units:
        needed = tuple(
            index for index, chunk in enumerate(chunks) if not set(info.parameters).isdisjoint(chunk.plan.parameters)
        )
        planned = plan.block(info.name) if info.is_block else BlockPlan(info.name, BlockPolicy.KEEP)
        module = model.get_submodule(info.name)
        if needed or planned.policy is not BlockPolicy.KEEP or (swaps and info.is_block):
            reads = type(module).forward is not nn.Embedding.forward
            own = tuple(sites.get(info.name, ()))
            block = Block(info.name, module, needed, own, planned.policy, reads, planned.swap_bytes)
            blocks += _split_root(block, chunks) if block.name == "" else [block]
    return blocks


def _split_root(root: Block, chunks: Sequence[Chunk]) -> list[Block]:
    """Split the root into blocks, one for each outermost callable child; see [Note: Root]."""
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
