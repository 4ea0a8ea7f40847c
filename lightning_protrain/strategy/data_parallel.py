"""Gives ranks that train one model equal weights, and averages their gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_protrain.config import GradSync, Parallelism, Preset
from lightning_protrain.device.device import Device
from lightning_protrain.distributed.ddp import (
    FlatAverage,
    behind_chunks,
    chooses_flat,
    ignored_by_user,
    without_sync,
    wrap,
)
from lightning_protrain.distributed.meta_init import (
    NamesByUse,
    find_waiting,
    load_on_first,
    returning_memory,
    send_values,
)
from lightning_protrain.distributed.rank_sync import RankSync, refuse_others, say_if_weights_differ
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.rank_store import naming_wait
from lightning_protrain.runtime.apply import Runtime, refuse_meta
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.strategy.overlap import writes_averages

# Maximum size of one broadcast message.
_BUFFER_BYTES = 250 << 20
_T = TypeVar("_T")


class DataParallel:
    """Data parallelism: ranks train on different data, and average gradients once in an optimizer step.

    Args:
        options: The user's options for several ranks.
        sync: Connects the ranks.
    """

    def __init__(self, options: Parallelism, sync: RankSync) -> None:
        self.options = options
        self._sync = sync
        self._flat: FlatAverage | None = None
        # True if the next training step has to broadcast rank 0's buffers, as after every step that averages gradients.
        self._stale_buffers = True
        # True if the next backward averages gradients.
        self._averages = True
        # True if some ranks hold outlines of weights that the first rank of their node has loaded. Names of weights
        # without values on some rank.
        self._has_outlines = False
        self._waiting: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the flat average, which belongs to this process."""
        return {**vars(self), "_flat": None}

    @property
    def _ranks(self) -> RankMesh | None:
        return self._sync.mesh

    # --- options of the user ------------------------------------------------------------------------------------------

    @property
    def averages(self) -> bool:
        """True if the next backward averages gradients over the ranks."""
        return self._averages and self._ranks is not None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients of offloaded chunks are summed; None means the dtype of the weights."""
        name = self.options.reduce_dtype
        return None if name is None else getattr(torch, name)

    def allowed_plan(self, choice: Plan | Preset) -> Plan | Preset:
        """Return the choice of a plan, with `"auto"` replaced by `"resident"` under `sharding="resident"`.

        Raises:
            ValueError: `sharding="resident"`, but the plan offloads chunks.
        """
        if self.options.sharding != "resident":
            return choice
        if choice == "offload" or (isinstance(choice, Plan) and choice.num_offloaded_chunks):
            raise ValueError(
                'sharding="resident" keeps everything on the device, and the plan offloads. Set plan="resident" or '
                '"auto", or another sharding.'
            )
        return "resident" if choice == "auto" else choice

    def shardings(self, local_size: int) -> tuple[Sharding, ...]:
        """Return the shardings that the options allow, the preferred one first.

        Args:
            local_size: Number of ranks on each node.
        """
        if not self._may_shard or local_size == 1:
            return (Sharding.REPLICATE,)
        return (Sharding.SHARD, Sharding.REPLICATE) if self.options.sharding == "auto" else (Sharding.SHARD,)

    def own_shardings(
        self, trainer: Trainer | None, local_size: int, layer_sync: LayerSync | None = None
    ) -> tuple[Sharding, ...]:
        """Return the shardings that this run may use, given its ranks and callbacks; every rank calls it.

        Args:
            trainer: Trainer; its callbacks may write to weights.
            local_size: Number of ranks on this node.
            layer_sync: Layer sync that `sync_batchnorm=True` has set.

        Raises:
            ValueError: `sync_batchnorm=True` is set, or `sharding="shard"` although a callback writes averages to
                weights.
        """
        if self._ranks is not None and layer_sync is not None:
            raise ValueError('sync_batchnorm=True is not supported by strategy="protrain". Leave it out.')
        if self.options.sharding == "shard" and self._ranks is None:
            rank_zero_info('sharding="shard": there is one rank, which holds everything, as under "replicate".')
        shardings = self.shardings(local_size if self._ranks is not None else 1)
        name = writes_averages(trainer) if trainer is not None else ""
        if Sharding.SHARD not in shardings or not self._sync.meet("the callbacks", bool(name)):
            return shardings
        why = f"{name or 'a callback'} writes averages over weights on every rank, and those would be shared"
        if self.options.sharding == "shard":
            raise ValueError(f'sharding="shard": {why}. Set sharding="replicate".')
        rank_zero_info(f'sharding="auto" takes "replicate": {why} under "shard".')
        return (Sharding.REPLICATE,)

    @property
    def _may_shard(self) -> bool:
        """True if the ranks of a node may share the offloaded chunks."""
        return self.options.sharding in ("auto", "shard")

    # --- equal weights ------------------------------------------------------------------------------------------------

    def load_once(self, load: Callable[[], _T], outline: Callable[[], _T]) -> _T:
        """Return `load()`, or `outline()` on ranks that will share another rank's weights; every rank calls it."""
        with returning_memory():
            if self._ranks is None or self._ranks.local_size == 1 or not self._may_shard:
                return load()
            self._has_outlines = True
            return load_on_first(self._ranks, load, outline)

    def end_outlines(
        self, module: nn.Module | None, device: torch.device, sharding: Sharding = Sharding.REPLICATE
    ) -> None:
        """Give every rank all weights, except ranks that will share them; every rank calls it."""
        ranks = self._ranks
        if self._has_outlines and sharding is not Sharding.SHARD and ranks is not None and module is not None:
            self._has_outlines = False
            with naming_wait("the weights of rank 0"):
                send_values(module, ranks, find_waiting(module, ranks), device)

    def compare(
        self,
        layout: ModelLayout,
        model: nn.Module,
        settings: tuple[str, str, Plan | str],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Check that all ranks train the same model with the same settings; every rank calls it before planning.

        Args:
            layout: Layout of the model.
            model: Model that holds the weights of this rank.
            settings: Device type, precision, and the plan that this rank was given.
            optimizers: Optimizers of the model.

        Raises:
            ValueError: Ranks differ; raised on all ranks.
        """
        if self._ranks is None:
            return
        kind, precision, choice = settings
        refuse_others(layout, kind, precision, choice, optimizers)
        self._waiting, self._has_outlines = find_waiting(model, self._ranks), False
        if not self._waiting:
            say_if_weights_differ(model, ignored_by_user(model))

    def equalise(self, model: nn.Module, plan: Plan, device: torch.device) -> None:
        """Give all ranks the weights and buffers of rank 0, before the plan is applied.

        Only the first rank of a node needs the shared weights.

        Raises:
            ValueError: A weight has no values, or the plan offloads a trained weight that DDP must ignore.
        """
        if self._ranks is not None:
            ignored = ignored_by_user(model)
            averaged = (chunk for chunk in plan.chunks if chunk.trainable and not chunk.resident)
            if both := sorted(ignored.intersection(fqn for chunk in averaged for fqn in chunk.parameters)):
                raise ValueError(
                    f"{both[0]!r} is in _ddp_params_and_buffers_to_ignore, and the plan offloads it: gradients of "
                    'offloaded weights are averaged over the ranks. Set plan="resident", or do not ignore it.'
                )
            resident = {fqn for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters}
            shares = plan.sharding is Sharding.SHARD
            shared = {fqn for chunk in plan.chunks if shares for fqn in chunk.parameters} - resident
            waiting, self._waiting = self._waiting, frozenset()
            with naming_wait("the weights of rank 0"):
                names = NamesByUse(shared, resident, ignored - waiting)
                send_values(model, self._ranks, waiting, device, names)
        refuse_meta(model)

    def equalise_buffers(self, module: nn.Module | None, wrapped: nn.Module | None) -> None:
        """Broadcast rank 0's buffers before a training step; DDP does so itself for a module that it wraps.

        Args:
            module: The user's module.
            wrapped: `module`, or DDP around it.
        """
        stale, self._stale_buffers = self._stale_buffers, self._averages
        if self._ranks is None or module is None or not stale or isinstance(wrapped, DistributedDataParallel):
            return
        ignored = ignored_by_user(module)
        buffers = [buffer for name, buffer in module.named_buffers() if buffer.numel() and name not in ignored]
        if buffers:
            dist._broadcast_coalesced(self._ranks.everyone, buffers, _BUFFER_BYTES, 0)

    # --- averaged gradients -------------------------------------------------------------------------------------------

    def replicate(self, model: LightningModule, runtime: Runtime, device: torch.device) -> nn.Module | None:
        """Prepare to average gradients of resident parameters, after the plan has been applied.

        Args:
            model: Model with the plan applied.
            runtime: Runtime of the plan.
            device: Device of the model.

        Returns:
            DDP around the model; None if DDP is not used.
        """
        parameters = dict(model.named_parameters())
        resident = [fqn for chunk in runtime.plan.chunks if chunk.resident for fqn in chunk.parameters]
        averaged = [parameters[fqn] for fqn in resident if fqn not in ignored_by_user(model)]
        mine = [parameter for parameter in averaged if parameter.requires_grad]
        if self._ranks is None or not mine:
            return None
        peers, ddp = self._sync.peers, self.options.ddp
        linked = peers is not None and peers.link == "nvlink"
        choice: GradSync = self.options.adapter_grad_sync if ddp.comm_hook is None else "ddp"
        if chooses_flat(choice, mine, model, linked):
            self._flat = FlatAverage(mine)
            return None
        if runtime.averages_chunks:
            ddp = behind_chunks(ddp, runtime, device)
        with naming_wait("the other ranks to wrap resident weights in DDP"):
            return wrap(model, mine, device, ddp)

    @contextmanager
    def block_sync(self, wrapped: nn.Module | None) -> Generator[None]:
        """Average no gradients within this context, because the micro-batch does not end an optimizer step."""
        self._averages = False
        try:
            with without_sync(wrapped):
                yield
        finally:
            self._averages = True

    def average_resident(self, device: Device) -> None:
        """Average resident gradients in one flat tensor after a backward, if DDP does not average them."""
        if self._averages and self._flat is not None:
            with device.span("network", "averages"):
                self._flat.average()

    def close(self) -> None:
        """Stop averaging after a run."""
        self._flat = None
