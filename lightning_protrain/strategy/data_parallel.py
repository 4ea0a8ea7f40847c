"""The part of a strategy that knows that several ranks train one model, and not how its weights are streamed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_protrain.checkpoint.io import reader_of
from lightning_protrain.distributed.ddp import FlatAverage, GradSync, chooses_flat, ignored_by_user, without_sync, wrap
from lightning_protrain.distributed.launch import ProcessStrategy
from lightning_protrain.distributed.meetings import MeetingStrategy
from lightning_protrain.distributed.meta_init import find_waiting, load_on_first, returning_memory, send_values
from lightning_protrain.distributed.rank_sync import refuse_differences, refuse_others, say_if_weights_differ
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.planner.presets import Preset
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.apply import Runtime, refuse_meta
from lightning_protrain.runtime.comm.collectives import make_rank_mesh
from lightning_protrain.runtime.comm.rank_health import naming_wait
from lightning_protrain.strategy.overlap import writes_averages
from lightning_protrain.strategy.parallel_options import Parallelism
from lightning_protrain.strategy.plan_options import PlanRequest
from lightning_protrain.strategy.precision import ProTrainPrecision, as_protrain_precision

# Of one message.
_BUFFER_BYTES = 250 << 20
_T = TypeVar("_T")


class DataParallelStrategy(MeetingStrategy, ProcessStrategy):
    """Each rank trains on its own part of the data; gradients are averaged once in an optimizer step.

    Args:
        parallelism: What the user says of several ranks.
        processes: As in `ProcessStrategy`.
    """

    def __init__(self, parallelism: Parallelism, *processes: Any) -> None:
        super().__init__(*processes)
        self._forward_redirection = _DDPForwardRedirection()
        self._parallelism = parallelism
        self._flat: FlatAverage | None = None
        # Who has stepped parameters that ranks share, by identity: a checkpoint may be saved after the run, too.
        self._owners: dict[int, int] = {}
        # Whether the next training step begins with the buffers of rank 0: after one that has averaged gradients.
        self._stale_buffers = True
        # Whether the backward that comes next ends with averages.
        self._averages = True
        # Whether some ranks have outlines of what their first one has loaded; and what of the model nobody else has.
        self._has_outlines = False
        self._waiting: frozenset[str] = frozenset()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed:
            with naming_wait("the other ranks to make process groups"):
                self._ranks = make_rank_mesh(self.local_rank, self.num_processes, self._timeout)
            if (module := self.lightning_module) is not None:
                refuse_differences(self._parallelism.settings(module.trainer))
                self._sigterm.listen(module.trainer)

    @property
    def precision_plugin(self) -> ProTrainPrecision:
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision = as_protrain_precision(plugin)

    @property
    def averages(self) -> bool:
        """Whether the backward that comes next ends with averages over the ranks."""
        return self._averages and self._ranks is not None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients of offloaded chunks are summed; None: in that of their weights."""
        name = self._parallelism.reduce_dtype
        return None if name is None else getattr(torch, name)

    def allowed_plan(self, choice: Plan | Preset) -> Plan | Preset:
        """What `sharding="resident"` leaves of a choice of a plan.

        Raises:
            ValueError: The plan offloads something.
        """
        if self._parallelism.sharding != "resident":
            return choice
        if choice == "offload" or (isinstance(choice, Plan) and choice.num_offloaded_chunks):
            raise ValueError(
                'sharding="resident" keeps everything on the device, and the plan offloads. Set plan="resident" or '
                '"auto", or another sharding.'
            )
        return "resident" if choice == "auto" else choice

    @property
    def may_shard(self) -> bool:
        """Whether the ranks of a machine would share what is offloaded."""
        return self._parallelism.sharding in ("auto", "shard")

    def model_to_device(self) -> None:
        """Does nothing: the model is placed as the plan says."""

    def shardings(self, local_size: int) -> tuple[Sharding, ...]:
        """Who may hold offloaded chunks: the first, if nothing is searched for.

        Args:
            local_size: Ranks of each machine.
        """
        if not self.may_shard or local_size == 1:
            return (Sharding.REPLICATE,)
        return (Sharding.SHARD, Sharding.REPLICATE) if self._parallelism.sharding == "auto" else (Sharding.SHARD,)

    def own_shardings(self) -> tuple[Sharding, ...]:
        """The same for the ranks of this run; every rank calls it.

        Raises:
            ValueError: Weights shall be shared that each rank would write to, or statistics of batches.
        """
        if self._parallelism.sharding == "shard" and self._ranks is None:
            rank_zero_info('sharding="shard": there is one rank, which holds everything, as under "replicate".')
        if self._ranks is not None and self._layer_sync is not None:
            raise ValueError('sync_batchnorm=True is not supported by strategy="protrain". Leave it out.')
        found = self.shardings(self.num_processes if self._ranks is not None else 1)
        module = self.lightning_module
        name = writes_averages(module.trainer) if module is not None else ""
        if Sharding.SHARD not in found or not self._meet("the callbacks", bool(name)):
            return found
        why = f"{name or 'a callback'} writes averages over weights on every rank, and those would be shared"
        if self._parallelism.sharding == "shard":
            raise ValueError(f'sharding="shard": {why}. Set sharding="replicate".')
        rank_zero_info(f'sharding="auto" takes "replicate": {why} under "shard".')
        return (Sharding.REPLICATE,)

    def load_once(self, load: Callable[[], _T], outline: Callable[[], _T]) -> _T:
        """What `load` gives, or `outline` where another rank's weights will be shared; every rank calls it."""
        with returning_memory():
            if self._ranks is None or self._ranks.local_size == 1 or not self.may_shard:
                return load()
            self._has_outlines = True
            return load_on_first(self._ranks, load, outline)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what a checkpoint holds; before it is compared with the weights of this rank, it has them.

        Raises:
            ValueError: Lightning has not written it.
        """
        self.end_outlines()
        checkpoints = reader_of(checkpoint_path, self.checkpoint_io)
        if checkpoints is not self.checkpoint_io:
            return checkpoints.load_checkpoint(checkpoint_path, weights_only=weights_only)
        content: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if "pytorch-lightning_version" not in content:
            keys = ", ".join(map(str, list(content)[:4]))
            raise ValueError(f"{checkpoint_path} is no checkpoint of Lightning: it has the keys {keys}.")
        return content

    def end_outlines(self, sharding: Sharding = Sharding.REPLICATE) -> None:
        """Gives every rank all weights, unless they will be shared; every rank calls it."""
        ranks, module = self._ranks, self.lightning_module
        if self._has_outlines and sharding is not Sharding.SHARD and ranks is not None and module is not None:
            self._has_outlines = False
            with naming_wait("the weights of rank 0"):
                send_values(module, ranks, find_waiting(module, ranks), self.root_device)

    def among_ranks(self, plan_request: PlanRequest, sharding: Sharding) -> PlanRequest:
        """What the user says about a plan, for the ranks of this machine: they share one copy, or each has its own."""
        return plan_request.among(sharding, max(self.num_processes, 1), self.world_size)

    def compare_ranks(self, layout: ModelLayout, model: nn.Module, choice: Plan | str) -> None:
        """Before a plan is made: all ranks train the same; every rank calls it.

        Args:
            layout: Of the model.
            model: With the weights of this rank.
            choice: What this rank was given as a plan.

        Raises:
            ValueError: Ranks differ; raised on all.
        """
        if self._ranks is None:
            return
        refuse_others(layout, self.root_device.type, self.precision_plugin.precision, choice, self.optimizers)
        self._waiting, self._has_outlines = find_waiting(model, self._ranks), False
        if not self._waiting:
            say_if_weights_differ(model, ignored_by_user(model))

    def equalise(self, model: nn.Module, plan: Plan) -> None:
        """Before the plan is applied: all ranks have the weights and buffers of rank 0.

        What the ranks of one node share is taken from its first rank, so nobody else needs it.

        Raises:
            ValueError: A weight has no values; or the plan offloads one that is trained and that DDP is to ignore.
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
                send_values(model, self._ranks, waiting, self.root_device, shared, resident, ignored - waiting)
        refuse_meta(model)

    def equalise_buffers(self) -> None:
        """Before a training step: buffers are those of rank 0, as DDP has it where something is wrapped in it."""
        module, ranks = self.lightning_module, self._ranks
        stale, self._stale_buffers = self._stale_buffers, self._averages
        if ranks is None or module is None or not stale or isinstance(self.model, DistributedDataParallel):
            return
        ignored = ignored_by_user(module)
        buffers = [buffer for name, buffer in module.named_buffers() if buffer.numel() and name not in ignored]
        if buffers:
            dist._broadcast_coalesced(ranks.everyone, buffers, _BUFFER_BYTES, 0)

    def replicate(self, model: LightningModule, plan: Plan, runtime: Runtime | None) -> None:
        """After the plan has been applied: sees to the gradients of resident parameters, see [Note: One owner]."""
        parameters = dict(model.named_parameters())
        resident = [fqn for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters]
        averaged = [parameters[fqn] for fqn in resident if fqn not in ignored_by_user(model)]
        mine = [parameter for parameter in averaged if parameter.requires_grad]
        self._owners = runtime.owners if runtime is not None else {}
        if self._ranks is None or not mine:
            return
        linked, ddp = self.peers is not None and self.peers.link == "nvlink", self._parallelism.ddp
        choice: GradSync = self._parallelism.adapter_grad_sync if ddp.comm_hook is None else "ddp"
        if chooses_flat(choice, mine, model, linked):
            self._flat = FlatAverage(mine)
        else:
            with naming_wait("the other ranks to wrap resident weights in DDP"):
                self.model = wrap(model, mine, self.root_device, ddp)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Within it nothing is averaged: the micro-batch does not end an optimizer step."""
        self._averages = False
        try:
            with without_sync(self.model):
                yield
        finally:
            self._averages = True

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Under manual optimization DDP learns here that a backward follows."""
        super().pre_backward(closure_loss)
        module = self.lightning_module
        if isinstance(self.model, DistributedDataParallel) and module is not None and not module.automatic_optimization:
            prepare_for_backward(self.model, closure_loss)

    def average_resident(self) -> None:
        """After a backward: what DDP does not average."""
        if self._averages and self._flat is not None:
            self._flat.average()

    def past_ddp(self, name: str) -> Callable[..., Any]:
        """A step of evaluation: ranks may have different numbers of batches, and DDP would wait for them."""

        def step(*args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.forward_context():
                return getattr(self.lightning_module, name)(*args, **kwargs)

        return step

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or sum of a tensor over all ranks; anything else comes back as it is."""
        if isinstance(tensor, Tensor) and group is None:
            self._meet("a reduction")
        return super().reduce(tensor, group, reduce_op)

    def teardown(self) -> None:
        """The model is the user's alone again."""
        self._flat = None
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()
