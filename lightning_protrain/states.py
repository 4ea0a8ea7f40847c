"""The part of a strategy that saves and loads weights and optimizer states, whoever of the ranks holds them.

[Note: Reading rows]
Where machines divide weights, a module may leave its parameters on the meta device, on all ranks, and say how they are
read: `load_rows(name, begin, end)` gives rows of one. When the plan is known, the first rank of each machine reads the
rows that its machine holds, one weight after the other, and every rank what is whole on every machine. So no rank ever
has the whole model. `loading.stored_rows` reads so from safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_protrain.consensus import refuse_uneven
from lightning_protrain.divided import attach, refuse_combinations, refuse_divided, whole_on_first
from lightning_protrain.outline import read_rows
from lightning_protrain.overlap import OverlapChoice
from lightning_protrain.owned_states import drop_states, gather_states
from lightning_protrain.parallel import DataParallelStrategy
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.runtime.comm import Ranks
from lightning_protrain.runtime.eightbit import load_by_reference
from lightning_protrain.runtime.local_rows import replace_parameters
from lightning_protrain.runtime.optimizer import move_state_beside_parameters
from lightning_protrain.runtime.rows import can_be_divided, row_ranges
from lightning_protrain.torn import refuse_torn
from lightning_protrain.wishes import Wishes


class StatesStrategy(DataParallelStrategy):
    """Checkpoints are the same whoever steps which weights, and has which rows of them.

    Args:
        arguments: As of `DataParallelStrategy`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runtime: Runtime | None = None
        # What makes the model save and load whole weights; it stays after the run, as its DTensors do.
        self._whole: list[Any] = []
        # Whether each machine has read its rows in this run: then no weight is without values any more.
        self._has_read = False

    def setup_environment(self) -> None:
        self._has_read, self._own = False, frozenset()
        super().setup_environment()

    def own_shardings(self) -> tuple[Sharding, ...]:
        """As before; refuses a model that an earlier run has divided among machines."""
        if self.lightning_module is not None:
            refuse_divided(self.lightning_module)
        return super().own_shardings()

    def among_ranks(self, wishes: Wishes, sharding: Sharding) -> Wishes:
        """As before, where each machine may read its own rows alone."""
        return replace(super().among_ranks(wishes, sharding), rows=self.reads_rows)

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
        """As before; nobody waits for what each machine reads for itself, see [Note: Reading rows]."""
        return frozenset() if self.reads_rows else super().find_waiting(model, ranks)

    def equalise(self, model: nn.Module, plan: Plan) -> None:
        """As before; reads what this machine holds, where machines divide weights."""
        if self.ranks is not None and self.reads_rows:
            offloaded = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
            divided = {fqn: one for fqn, one in model.named_parameters() if fqn in offloaded and can_be_divided(one)}
            number, machine = self.ranks.num_machines, self.ranks.machine
            rows = {fqn: row_ranges(one.shape[0], number)[machine] for fqn, one in divided.items()}
            read: Any = model.load_rows
            found = read_rows(model, read, rows, self.ranks.local_rank == 0)
            self._has_read, self._own = True, frozenset(rows) & found
        super().equalise(model, plan)

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
        """Whether each machine reads the rows that it holds, and nothing else, see [Note: Reading rows]."""
        model = self.lightning_module
        if not self.divides_weights or model is None or not callable(getattr(model, "load_rows", None)):
            return False
        return any(parameter.is_meta for parameter in model.parameters())

    def replace_divided(self, model: LightningModule, runtime: Runtime) -> None:
        """After the plan has been applied: optimizers have the DTensors, and the model saves whole weights."""
        if runtime.replaced:
            replace_parameters(self.optimizers if model.trainer.state.fn == TrainerFn.FITTING else (), runtime.replaced)
            assert self.ranks is not None
            self._whole = attach(model, self.ranks)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None:
            counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
            self._refuse_uneven(counts, "validation")

    def on_test_start(self) -> None:
        super().on_test_start()
        if self.lightning_module is not None:
            self._refuse_uneven(self.lightning_module.trainer.num_test_batches, "test")

    def on_predict_start(self) -> None:
        super().on_predict_start()
        if self.lightning_module is not None:
            self._refuse_uneven(self.lightning_module.trainer.num_predict_batches, "prediction")

    def _refuse_uneven(self, counts: Any, kind: str) -> None:
        """Ranks that fetch together need as many batches each."""
        if self._runtime is not None and self._runtime.replaced:
            for count in counts:
                refuse_uneven(count, kind)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._finish_updates()
        if not self._whole:
            return super().lightning_module_state_dict()
        module, ranks = self.lightning_module, self.ranks
        assert module is not None
        assert ranks is not None
        while self._whole:
            self._whole.pop().remove()
        try:
            state = super().lightning_module_state_dict()
        finally:
            self._whole = attach(module, ranks)
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
