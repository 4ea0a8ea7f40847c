"""Restores the position in the training data when a fit resumes, with bitwise equal batches and random numbers.

The progress of Lightning's loops has the number of trained batches of the epoch. How the position is restored depends
on the loaders:

- *stateful*: all loaders have `state_dict` and `load_state_dict`, like torchdata's `StatefulDataLoader`. The loaders
  restore their positions.
- *replayed*: loaders have a length, but no state; or Lightning distributes their shuffled order to ranks. The random
  states of the beginning of the epoch are restored, and the trained batches are drawn again and discarded. So order and
  random numbers of worker processes are as before.
- *placed*: the data module has a state. Nothing is done here.

The iterator must be created with the random states of the checkpoint and the order of the resumed epoch, but Lightning
creates it before it loads the checkpoint. So `ResumableLoader` creates it when the first batch is drawn. If the data
has no length, Lightning prefetches one batch, which is not trained yet when a checkpoint is saved. So the state before
the latest batch is saved, too, and a resumed fit draws that batch again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.checkpoint.rank_state import capture, restore
from lightning_protrain.config import plural

Kind = Literal["stateful", "replayed", "placed", "nowhere"]
_ADVICE = (
    "Resume with the data of the saved run, or start the data from the beginning with "
    "ProTrainCheckpoint(weights_and_counters_only=True)."
)


class ResumableLoader(CombinedLoader):
    """The training loaders of a fit, with a position that can be saved and restored.

    Args:
        loaders: Loaders in any form that a Trainer accepts.
        trainer: Trainer of the fit.
        saved: Result of `place` in the checkpoint; None if the fit is not resumed.

    Attributes:
        random_state: Random states of the checkpoint, for the first batch of a resumed fit; None if there are none.
        random_after: Random states after the first batch, if Lightning drew it before training started.
        epoch_begins: True after `on_train_epoch_start`; then random states are not restored any more.
    """

    def __init__(self, loaders: Any, trainer: Trainer, saved: dict[str, Any] | None) -> None:
        combined = isinstance(loaders, CombinedLoader)
        super().__init__(loaders.iterables if combined else loaders, loaders._mode if combined else "max_size_cycle")
        self._trainer = trainer
        self._saved = saved
        # Random states before the creation of this epoch's iterator, and before its first batch.
        self._begun: list[Any] = []
        self.random_state: dict[str, Any] | None = None
        self.random_after: dict[str, Any] | None = None
        self.epoch_begins = False
        self._drawn = 0
        # True if the data may have fewer batches than were trained; then the epoch is over.
        self._may_end = False
        # Positions and random states before the latest batch; None if the data has a length.
        self._ahead: tuple[list[Any], dict[str, Any]] | None = None

    @property
    def kind(self) -> Kind:
        """Method of restoring the position; with "nowhere", a fit cannot resume within an epoch."""
        stateful = [isinstance(loader, _Stateful) for loader in self.flattened]
        distributed = any(_inner_samplers(loader) for loader in self.flattened)
        if all(stateful) and not distributed:
            return "stateful"
        data = getattr(self._trainer, "datamodule", None)
        if data is not None and is_overridden("state_dict", data):
            return "placed"
        mixed = any(stateful) and not all(stateful)
        return "nowhere" if self._has_no_length or mixed else "replayed"

    @property
    def _has_no_length(self) -> bool:
        limits = self._limits or [float("inf")] * len(self.flattened)
        pairs = zip(self.flattened, limits, strict=True)
        return any(sized_len(loader) is None and limit == float("inf") for loader, limit in pairs)

    def place(self) -> dict[str, Any]:
        """Return the position and random states of this rank, for a checkpoint."""
        positions, ahead = super()._state_dicts() if self.kind == "stateful" else [], None
        if self._ahead is not None and self._drawn > self._trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            positions, ahead = self._ahead
        return {
            "lengths": list(map(_length, self.flattened)),
            "begun": self._begun,
            "generators": self._generator_states(),
            "positions": positions,
            "ahead": ahead,
        }

    def refuse_other_length(self, name: str, trained: int, same: bool) -> None:
        """Raise ValueError if a fit resumes within an epoch, and the length of the data has changed.

        Args:
            name: Name of the checkpoint, for messages.
            trained: Number of trained batches of the epoch.
            same: False accepts a changed length.
        """
        saved, limit = self._saved or {}, self._trainer.fit_loop.max_batches
        self._may_end = not same or "moved" in saved  # The length depends on the number of ranks.
        if self._may_end:
            return
        lengths = list(map(_length, self.flattened))
        changed = [(was, now) for was, now in zip(saved.get("lengths", ()), lengths, strict=False) if was != now]
        if changed:
            raise ValueError(
                f"{name} was saved after batch {trained} of an epoch of {plural(changed[0][0], 'batch', 'batches')}, "
                f"and the data of this run has {changed[0][1]}. {_ADVICE}"
            )
        if trained >= limit:
            raise ValueError(
                f"{name} was saved after batch {trained} of an epoch, and an epoch of this run ends after {limit}. "
                f"{_ADVICE}"
            )

    def __iter__(self) -> ResumableLoader:
        if self._saved is not None:
            self._iterator = _SUPPORTED_MODES[self._mode]["iterator"](self.flattened, self._limits)
            return self
        self._begun = [self._states()]
        self._drawn, self._ahead = 0, None
        super().__iter__()
        return self

    def __next__(self) -> Any:
        if self._saved is not None:
            if self._has_no_length and self.random_state is None:
                return self._draw_early(self._saved)
            self._resume(self._saved)
        return self._draw()

    def _draw(self) -> Any:
        if len(self._begun) == 1:
            self._begun.append(self._states())
        if self._has_no_length:
            self._ahead = super()._state_dicts() if self.kind == "stateful" else [], capture(self._device)
        batch = super().__next__()
        self._drawn += 1
        return batch

    def _draw_early(self, saved: dict[str, Any]) -> Any:
        """Draw the first batch before training has started; do not change the present random states."""
        with self._kept_randomness():
            if saved["ends"]:
                restore(saved["now"], self._device)
                self._resume(saved, 0)
                batch = self._draw()
                self.random_after = capture(self._device)
            else:
                self._resume(saved, saved["ready"])
                restore(saved["ahead"], self._device)
                batch = self._draw()
        return batch

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        # Lightning passes the positions of rank 0; `_saved` has those of this rank.
        if self._saved is None:
            super()._load_state_dicts(states)

    def _state_dicts(self) -> list[dict[str, Any]]:
        # Without `ProTrainCheckpoint`, a loader restored at the end of an epoch would yield no batch in the next epoch.
        return [] if self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch else super()._state_dicts()

    def _resume(self, saved: dict[str, Any], trained: int | None = None) -> None:
        self._saved = None
        if self.random_state is not None and not self.epoch_begins:
            # Since training started, Lightning may have drawn random numbers to create a validation iterator.
            restore(self.random_state, self._device)
        loop = self._trainer.fit_loop
        trained = loop.epoch_loop.batch_progress.current.ready if trained is None else trained
        for loader in self.flattened:
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        kind = self.kind
        if kind == "stateful" and "moved" in saved:
            kind = "replayed"  # The number of ranks has changed, so the positions are not valid.
        if kind == "stateful" and saved["positions"]:
            super()._load_state_dicts(saved["positions"])
        if trained and kind == "replayed" and len(saved["begun"]) == 2:
            with self._kept_randomness():
                self._replay_epoch(saved["begun"], trained)
            return
        if trained or kind == "stateful":
            with self._kept_randomness():  # Creating the iterator draws numbers, which the saved run had drawn before.
                super().__iter__()
        self._begun, self._drawn = saved["begun"], trained
        if not trained:
            # The epoch of the checkpoint is over, so the loaders' generators continue from their saved states.
            self._set_generators(saved["generators"])
            iter(self)

    def _replay_epoch(self, begun: list[Any], trained: int) -> None:
        self._restore(begun[0])
        super().__iter__()
        self._restore(begun[1])
        for number in range(trained):
            try:
                super().__next__()
            except StopIteration as end:
                if self._may_end:
                    raise
                raise ValueError(
                    f"The checkpoint was saved after batch {trained} of this epoch, but the data of this run ends "
                    f"after {number}. {_ADVICE}"
                ) from end
        self._begun, self._drawn = begun, trained
        rank_zero_info(
            f"Drew {plural(trained, 'batch', 'batches')} of this epoch again without training; the "
            f"epoch continues with the next batch."
        )

    # --- random states ------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._trainer.strategy.root_device

    @contextmanager
    def _kept_randomness(self) -> Iterator[None]:
        before = capture(self._device)
        try:
            yield
        finally:
            restore(before, self._device)

    def _states(self) -> dict[str, Any]:
        return {"random": capture(self._device), "generators": self._generator_states()}

    def _restore(self, states: dict[str, Any]) -> None:
        restore(states["random"], self._device)
        self._set_generators(states["generators"])

    def _generators(self) -> list[torch.Generator]:
        generators: dict[int, torch.Generator] = {}
        for loader in self.flattened:
            for holder in [*_samplers(loader), *_inner_samplers(loader)]:
                generator = getattr(holder, "generator", None)
                if isinstance(generator, torch.Generator):
                    generators[id(generator)] = generator
        return list(generators.values())

    def _generator_states(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)


def _length(loader: Any) -> int | None:
    """Return the number of batches of an epoch; None for a stream, whose epoch the Trainer may lengthen."""
    return None if getattr(loader, "is_stream", False) else sized_len(loader)


def _samplers(loader: Any) -> list[Any]:
    """Return a loader and its samplers, each of which may have a generator."""
    batches = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _inner_samplers(loader: Any) -> list[Any]:
    """Return the samplers that Lightning has wrapped in order to distribute their indices to ranks.

    The state of a loader does not include the state of such a sampler.
    """
    inner = [getattr(getattr(sampler, "dataset", None), "_sampler", None) for sampler in _samplers(loader)]
    return [sampler for sampler in inner if sampler is not None]


class ResumableSource(_DataLoaderSource):
    """Replaces Lightning's source of training loaders, to wrap the loaders into a `ResumableLoader`.

    Args:
        source: Lightning's source.
        trainer: Trainer of the fit.

    Attributes:
        saved: Result of `ResumableLoader.place` in the checkpoint; None if the fit is not resumed.
        made: `ResumableLoader` that was created last; None if there is none.
    """

    def __init__(self, source: _DataLoaderSource, trainer: Trainer) -> None:
        super().__init__(source.instance, source.name)
        self.saved: dict[str, Any] | None = None
        self.made: ResumableLoader | None = None
        self._trainer = trainer

    def dataloader(self) -> ResumableLoader:
        """Return a `ResumableLoader` with the loaders of Lightning's source."""
        saved, self.saved = self.saved, None
        self.made = ResumableLoader(super().dataloader(), self._trainer, saved)
        return self.made
