"""The part of a strategy that lets ranks wait for each other where one that fails, is gone or has ended is named."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_protrain.distributed.evaluation import each_once, evaluate_as_ever, evaluate_each_once
from lightning_protrain.distributed.finite import FiniteLosses
from lightning_protrain.distributed.rank_sync import (
    SigtermNote,
    meet_in_epochs,
    meet_no_more,
    refuse_uneven,
    validation_place,
)
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.comm.rank_health import is_of_collective


class MeetingStrategy(ParallelStrategy):
    """Ranks meet before each batch and behind the last one of an epoch; those that leave tell the others why.

    Who they are is set by the strategy that mixes this in, in `setup_environment`.

    Args:
        args, kwargs: Of the next class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks: RankMesh | None = None
        self._sigterm = SigtermNote()
        self._losses = FiniteLosses()

    @property
    def ranks(self) -> RankMesh | None:
        """Who trains together; None if there is one rank, or before the processes have met."""
        return self._ranks

    def on_train_start(self) -> None:
        """Refuses epochs of different lengths before the first batch."""
        module = self.lightning_module
        if module is not None:
            self._losses.begin(module.trainer)
        if self._ranks is not None and module is not None:
            refuse_uneven(module.trainer.num_training_batches)
            meet_in_epochs(module.trainer, self._meet_before_batch, self._meet)
            self._sigterm.wait_for_others()

    def _meet_before_batch(self) -> None:
        """Waits until all ranks are about to train the same batch; if one is told to end, all do.

        Raises:
            SIGTERMException: One is.
            ValueError: Losses of some rank are not finite any more.
        """
        module = self.lightning_module
        assert module is not None
        assert self._ranks is not None
        trainer = module.trainer
        what = f"batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready} of epoch {trainer.current_epoch}"
        self._ranks.rank_health.doing = self._describe_step(trainer, what)
        told_to_end, why = trainer.received_sigterm or self._sigterm.received, self._losses.why_to_stop()
        if self._meet(what, told_to_end or bool(why)):
            self._stop_if(why, f"the reason to end at {what}")
            raise SIGTERMException

    def _stop_if(self, why: str, place: str) -> None:
        """Ends the fit on all ranks if one of them has a reason in its losses or weights.

        Args:
            why: The reason of this rank; empty: it has none.
            place: Where the ranks meet.

        Raises:
            ValueError: A rank has one.
        """
        if self._meet(place, bool(why)):
            raise ValueError(why or "The loss or a trained weight of another rank is not finite. Training stops.")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Ends a fit whose losses are not finite any more; several ranks have seen to it when they met."""
        if self._ranks is None and (why := self._losses.why_to_stop()):
            raise ValueError(why)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward, and takes down the loss."""
        if self.lightning_module is not None:
            self._losses.watch(closure_loss, self.lightning_module.trainer)
        return super().backward(closure_loss, *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Writes a checkpoint whose trained weights are finite; every rank calls it."""
        self.refuse_spoiled(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def refuse_spoiled(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuses a checkpoint that would follow on good ones; every rank calls it.

        Raises:
            ValueError: In a fit, trained weights are not finite.
        """
        module = self.lightning_module
        if module is not None and self._losses.watches:
            trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            self._stop_if(self._losses.why_not_to_save(checkpoint, trained), "a checkpoint")

    def _describe_step(self, trainer: Trainer, batch: str) -> str:
        """What this rank is about to do, for errors here and on other ranks.

        Args:
            trainer: That fits.
            batch: That comes next: `"batch 3 of epoch 0"`.
        """
        return f"Training at step {trainer.global_step}"

    @property
    def evaluates_together(self) -> bool:
        """Whether each batch of an evaluation has collectives, so that ranks need as many of them."""
        return False

    def process_dataloader(self, dataloader: object) -> object:
        """Leave samples out that an evaluation on several ranks would count twice, see [Note: Each sample once]."""
        dataloader = super().process_dataloader(dataloader)
        if self._ranks is None or self.lightning_module is None:
            return dataloader
        return each_once(dataloader, self.lightning_module.trainer)

    def on_validation_start(self) -> None:
        """Wait for all ranks in a fit: metrics do, and name nobody."""
        if self.lightning_module is not None and (place := validation_place(self.lightning_module.trainer)):
            self._meet(place)
        self._evaluate_each_once()

    def on_test_start(self) -> None:
        """Begin an evaluation, see [Note: Each sample once]."""
        self._evaluate_each_once()

    def on_predict_start(self) -> None:
        """Begin a prediction, see [Note: Forwards together]."""
        self._evaluate_each_once()

    def _evaluate_each_once(self) -> None:
        if self._ranks is not None and self.lightning_module is not None:
            together = self._ranks if self.evaluates_together else None
            evaluate_each_once(self.lightning_module.trainer, together)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum of a tensor over all ranks; anything else comes back as it is.

        The mean of integers is a float64: Lightning rounds it down, and weighs what is logged by such means of sizes.
        """
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]  # The next class has it.

    def on_train_end(self) -> None:
        """Waits for the last epoch of all ranks.

        Raises:
            ValueError: Losses of some rank were not finite in the end.
        """
        self._stop_if(self._losses.why_to_stop(wait=True), "the end of training")
        self._losses.end()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        self._meet("a barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank `src` has."""
        self._meet("a broadcast")
        return super().broadcast(obj, src)  # type: ignore[safe-super]  # The next class has it.

    def _meet(self, what: str, flag: bool = False) -> bool:
        """Waits until all ranks are at the same point, see [Note: Attendance], and says whether one has a flag set."""
        if self._ranks is None:
            return flag
        return self._ranks.meet(what, flag)

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Who was missing, if `error` is one of a collective that nobody has explained; else `error`."""
        if self._ranks is None or not is_of_collective(error):
            return error
        return self._ranks.rank_health.explain()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Within it a collective that fails names who was missing, once.

        Raises:
            RuntimeError: It failed.
        """
        try:
            yield
        except RuntimeError as error:
            if self._ranks is None or self._ranks.rank_health.has_explained(error):
                raise
            if (explained := self.explain(error)) is error:
                raise
            raise explained from error

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one is missing, and the user who was missing here."""
        super().on_exception(exception)
        if self._ranks is not None:
            rank_health = self._ranks.rank_health
            if is_of_collective(exception) and not rank_health.has_explained(exception):
                exception.add_note(str(rank_health.explain()))  # Of a user's collective, or a metric's.
            at = rank_health.doing[0].lower() + rank_health.doing[1:]
            rank_health.leave(f"failed ({at}) with {type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """The loops and the signals of the Trainer are as they were."""
        self._sigterm.close()
        self._losses.end()
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            meet_no_more(module.trainer)
            evaluate_as_ever(module.trainer)
        super().teardown()
