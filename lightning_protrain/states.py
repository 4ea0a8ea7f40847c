"""The part of a strategy that saves and loads weights and optimizer states, whoever of the ranks holds them.

[Note: Reading rows]
Where machines divide weights, or may have to, a module may leave its parameters on the meta device, on all ranks, and
say how they are read: `load_rows(name, begin, end)` gives rows of one. When the plan is known, the first rank of each
machine reads what its machine holds of offloaded weights, one after the other, and every rank what it has for itself.
So no rank ever has the whole model where machines divide it. `loading.stored_rows` reads so from safetensors. What an
earlier run has divided is read from the rows that it has left on each machine, so the same model may be trained, tested
and trained again.

[Note: Divided at need]
Machines divide as little as they can, see `Parallelism.ways`: a way is left for the next one when the plan that is made
under it does not fit the hosts. Before that, weights are left where they are if they may not fit whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.distributed.ranks import gather
from lightning_protrain.divided import WholeWeights, refuse_combinations, whole_on_first
from lightning_protrain.earlier import EarlierRows, divided_by_run, forget_values, refuse_divided
from lightning_protrain.outline import read_rows
from lightning_protrain.overlap import OverlapChoice
from lightning_protrain.owned_states import drop_states, gather_states
from lightning_protrain.parallel import DataParallelStrategy
from lightning_protrain.parallelism import Parallelism
from lightning_protrain.planner.memory import HostTooSmall
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.planning import Case
from lightning_protrain.profiler.limits import free_host_bytes
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.runtime.comm import Ranks
from lightning_protrain.runtime.eightbit import load_by_reference
from lightning_protrain.runtime.local_rows import replace_parameters
from lightning_protrain.runtime.optimizer import move_state_beside_parameters
from lightning_protrain.runtime.rows import can_be_divided, row_ranges
from lightning_protrain.torn import refuse_torn
from lightning_protrain.wishes import Wishes

# Of the memory of a host: what a model may take by its size to be loaded whole before there is a plan. The rest is for
# chunks on their way. One that is left without need is read whole when the plan is there.
SHARE_OF_WHOLE = 0.8
_T = TypeVar("_T")


class StatesStrategy(DataParallelStrategy):
    """Checkpoints are the same whoever steps which weights, and has which rows of them.

    Args:
        arguments: As of `DataParallelStrategy`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runtime: Runtime | None = None
        # What makes the model save and load whole weights; it stays after the run, as its DTensors do.
        self._whole: WholeWeights | None = None
        # Whether each machine has read its rows in this run: then no weight is without values any more.
        self._has_read = False
        # What an earlier run has divided, until this one has read it.
        self._earlier: EarlierRows | None = None
        # Weights whose rows are read, until they are where the plan has them.
        self._unplaced: frozenset[str] = frozenset()
        # Who trains together, whatever they divide; and bytes of a host that the user allows.
        self._undivided: Ranks | None = None
        self._host_bytes: int | None = None
        # Whether the first rank of each machine has loaded a model, of which the others may have outlines.
        self._is_loaded = False

    def setup_environment(self) -> None:
        self._has_read, self._is_loaded, self._own = False, False, frozenset()
        super().setup_environment()
        self._undivided, ways = self._ranks, self._wanted.ways(self.num_nodes)
        # What an earlier run has divided stays so.
        divided = self.lightning_module is not None and divided_by_run(self.lightning_module)
        self._go(next((way for way in ways if divided and way.shard_weights == "world"), ways[0]))

    def _go(self, way: Parallelism) -> None:
        """Divides what `way` says; every rank calls it."""
        self._parallelism, self._ranks = way, self._undivided
        if self._ranks is not None and way.shard_weights == "world":
            self._ranks = self._ranks.dividing_weights(self._timeout)
        elif self._ranks is not None and way.shard_optimizer == "world":
            self._ranks = self._ranks.dividing_steps(self._timeout)

    def divide_more(
        self, error: HostTooSmall, describe: Callable[[Sharding], Case]
    ) -> tuple[tuple[Sharding, ...], Case]:
        """Divides more among machines, see [Note: Divided at need]; every rank calls it.

        Args:
            error: Why they have to.
            describe: What the plan depends on under a sharding.

        Returns:
            Who may hold offloaded chunks then, and what the plan depends on.

        Raises:
            HostTooSmall: It, where they divide all that they may, or cannot divide more.
        """
        ways, module = self._wanted.ways(self.num_nodes), self.lightning_module
        further = ways[ways.index(self._parallelism) + 1 :]
        if module is not None and module.trainer.state.fn != TrainerFn.FITTING:
            further = tuple(way for way in further if way.shard_weights == "world")  # Nothing is stepped.
        if not further or self._ranks is None:
            raise error
        self._go(further[0])
        what = "weights" if further[0].shard_weights == "world" else "optimizer steps and their states"
        rank_zero_info(f"The hosts are too small for all of it on each machine, so machines divide {what}.")
        try:
            shardings = self.own_shardings()
            return shardings, describe(shardings[0])
        except ValueError as why:
            raise HostTooSmall(f"{error} Machines cannot divide {what}: {why}") from error

    def leave_weights(self, make: Callable[[], _T | None]) -> _T | None:
        """A model that stays without values until it is known who holds what; every rank calls it.

        Args:
            make: Makes it on the meta device; None: its rows cannot be read.

        Returns:
            None: It cannot be left so, or need not be.
        """
        may = any(way.shard_weights == "world" for way in self._wanted.ways(self.num_nodes))
        module = self.lightning_module
        if not may or self._ranks is None or module is None:
            return make() if self.divides_weights else None
        with failing_together("Looking at the weights"):
            model = make()
        if self.divides_weights or not isinstance(model, nn.Module):
            return model
        weights = sum(each.nbytes for each in model.parameters())
        # Gradients and two moments, if machines divide those.
        states = 3 * weights / self.num_nodes if module.trainer.state.fn == TrainerFn.FITTING else 0
        free = SHARE_OF_WHOLE * (self._host_bytes or free_host_bytes())
        return model if self._ranks.meet("the size of the weights", weights + states > free) else None

    def load_once(self, load: Callable[[], Any], outline: Callable[[], Any]) -> Any:
        """As before; what is loaded is not read by rows."""
        self._is_loaded = True
        return super().load_once(load, outline)

    def own_shardings(self) -> tuple[Sharding, ...]:
        """As before; refuses a model that an earlier run has divided otherwise, or takes its rows to read from them."""
        if (module := self.lightning_module) is not None:
            refuse_divided(module, self.num_nodes if self.divides_weights else 1)
            if divided_by_run(module):
                self._earlier = EarlierRows(module)
        return super().own_shardings()

    def among_ranks(self, wishes: Wishes, sharding: Sharding) -> Wishes:
        """As before, where each machine may read its own rows alone."""
        return replace(super().among_ranks(wishes, sharding), rows=self.divides_weights and self.reads_rows)

    def allowed_overlap(self, choice: OverlapChoice) -> OverlapChoice:
        """What dividing weights leaves of a choice of overlap.

        Raises:
            ValueError: Weights shall be divided, and something else is given that is not built for that.
        """
        module = self.lightning_module
        if not self.divides_weights or module is None:
            return choice
        refuse_combinations(module, module.trainer, self.optimizers, choice)
        return "off"

    def find_waiting(self, model: nn.Module, ranks: Ranks) -> frozenset[str]:
        """As before; nobody waits for what is read for every rank, see [Note: Reading rows].

        Raises:
            ValueError: Some ranks have what others read; raised on all.
        """
        reads = gather(self.reads_rows)
        if len(set(reads)) > 1:
            raise ValueError(
                f"Rank {reads.index(True)} leaves weights to `load_rows`, rank {reads.index(False)} has values of all. "
                "Leave them on the meta device on all ranks, or on none."
            )
        return frozenset() if self.reads_rows else super().find_waiting(model, ranks)

    def equalise(self, model: nn.Module, plan: Plan) -> None:
        """As before; reads what this machine holds, where weights have been left for that."""
        if self.ranks is not None and self.reads_rows:
            shared = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
            if plan.sharding is not Sharding.SHARD:
                shared = set()
            number, machine = (self.ranks.num_machines, self.ranks.machine) if self.divides_weights else (1, 0)
            divided = {fqn: one for fqn, one in model.named_parameters() if fqn in shared and can_be_divided(one)}
            rows = {fqn: row_ranges(one.shape[0], number)[machine] for fqn, one in divided.items()}
            self._has_read = True
            self._unplaced = frozenset(fqn for fqn, each in model.named_parameters() if each.is_meta)
            resident = {fqn for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters}
            how = rows, self.ranks.local_rank == 0, self.root_device, resident
            found = read_rows(model, self._reader(model, self.ranks, rows), *how)
            self._earlier, self._own = None, found
        super().equalise(model, plan)

    def _reader(self, model: Any, ranks: Ranks, divided: Mapping[str, Any]) -> Callable[[str, int, int], Tensor]:
        def read(fqn: str, begin: int, end: int) -> Tensor:
            if self._earlier is not None and fqn in self._earlier:
                return self._earlier.read(fqn, divided, ranks)
            found: Tensor = model.load_rows(fqn, begin, end)
            return found

        return read

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights that have no values yet cannot take those of a checkpoint; Lightning asks before and after set-up."""
        return self._has_read or self.reads_rows

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._runtime is not None and self._runtime.replaced and self.ranks is not None:
            self._runtime.note_loaded()
            self.ranks.meet("the weights of a checkpoint")

    @property
    def reads_rows(self) -> bool:
        """Whether each rank reads what it holds, see [Note: Reading rows]."""
        model = self.lightning_module
        if model is None or self._ranks is None:
            return False
        has_files = callable(getattr(model, "load_rows", None)) and not self._is_loaded
        if has_files and any(parameter.is_meta for parameter in model.parameters()):
            return True
        return self._earlier is not None or bool(divided_by_run(model) and self._runtime is None)

    def replace_divided(self, model: LightningModule, runtime: Runtime) -> None:
        """After the plan has been applied: optimizers have the DTensors, and the model saves whole weights."""
        self._unplaced, self._whole = frozenset(), None
        WholeWeights.take_off(model)
        if runtime.replaced:
            replace_parameters(self.optimizers if model.trainer.state.fn == TrainerFn.FITTING else (), runtime.replaced)
            assert self.ranks is not None
            self._whole = WholeWeights(model, self.ranks)

    def undo_reading(self) -> None:
        """After a set-up that has failed: weights are as they were, or known to have no values any more."""
        (unplaced, self._unplaced), (earlier, self._earlier) = (self._unplaced, frozenset()), (self._earlier, None)
        if (module := self.lightning_module) is not None:
            forget_values(module, unplaced)
            if earlier is not None:
                earlier.put_back(module)

    @property
    def evaluates_together(self) -> bool:
        """Whether ranks fetch rows of each other, so that they need as many batches each."""
        return self._runtime is not None and bool(self._runtime.replaced)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._finish_updates()
        if self._whole is None:
            return super().lightning_module_state_dict()
        module, ranks = self.lightning_module, self.ranks
        assert module is not None
        assert ranks is not None
        self._whole.remove()
        try:
            state = super().lightning_module_state_dict()
        finally:
            self._whole = WholeWeights(module, ranks)
        return whole_on_first(module, state, ranks)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, whole on rank 0, whoever steps what; every rank calls it."""
        self._finish_updates()
        owners = self._runtime.owners if self._runtime is not None else self._owners
        if self._ranks is None or not owners:
            return Strategy.optimizer_state(self, optimizer)
        return gather_states(optimizer, owners, self._ranks)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads whole states; what another rank owns is forgotten here."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_by_reference(optimizer, state)
            if self._ranks is not None and self._runtime is not None:
                drop_states(optimizer, self._runtime.owners, self._ranks)
                self._runtime.updates.rows.divide_states(optimizer)
        move_state_beside_parameters(self.optimizers)

    def _finish_updates(self) -> None:
        """Before weights or optimizer states are saved; raises where they belong to no step, see [Note: Torn]."""
        refuse_torn(self.lightning_module)
        if self._runtime is not None:
            self._runtime.updates.refuse_torn()  # Before it waits for what will never come.
            self._runtime.updates.finish_all()
            self._runtime.updates.refuse_torn()
