"""The training data of a fit, of which a resumed one finds the place again, to the bit.

[Note: Place]
Where an epoch goes on is what the progress of Lightning's loops says. How it is found depends on the loaders:

- *stateful*: all have `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`. They go where they were.
- *replayed*: plain ones with a length, and stateful ones whose shuffled order Lightning deals out to ranks. The epoch
  is begun again with the random numbers that it was begun with, and the batches that were trained are drawn and thrown
  away. So the order is the same whoever has drawn it (a sampler, the global generator, a generator of its own), and
  worker processes are where they were, with their random numbers.
- *placed*: by a data module that saves its own state. Nothing is done for them.

Lightning makes the first iterator of a fit before it has read the checkpoint's random numbers, and with the order of
the first epoch. In a resumed fit it is made when the first batch is drawn, when all that is known. Of data without a
length it draws that batch at once, and is one batch ahead from then on: so the place before the latest one is kept, and
that batch is drawn with the random numbers with which it was drawn, or would have been.
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

Kind = Literal["stateful", "replayed", "placed", "nowhere"]
_AS_IT_WAS = (
    "Give the run the data that it was saved with, or begin the data anew with "
    "ProTrainCheckpoint(weights_and_counters_only=True)."
)


class ResumableLoader(CombinedLoader):
    """The loaders of a fit; see [Note: Place].

    Args:
        loaders: As a Trainer takes them.
        trainer: Whose fit it is.
        saved: What `place` has said when the checkpoint was taken; None: nothing is resumed.
        replay: Whether plain loaders are replayed; None: unless the data module saves a state.

    Attributes:
        random_state: What the first batch of a resumed fit is drawn with; None: with what there is.
        random_after: The same, where the first batch had to be drawn before training started.
        epoch_begins: Whether hooks at the begin of an epoch have been called since: what they draw counts.
    """

    def __init__(self, loaders: Any, trainer: Trainer, saved: dict[str, Any] | None, replay: bool | None) -> None:
        combined = isinstance(loaders, CombinedLoader)
        super().__init__(loaders.iterables if combined else loaders, loaders._mode if combined else "max_size_cycle")
        self._trainer = trainer
        self._saved = saved
        self._replay = replay
        # Random states when the iterator of this epoch was made, and when its first batch was drawn.
        self._begun: list[Any] = []
        self.random_state: dict[str, Any] | None = None
        self.random_after: dict[str, Any] | None = None
        self.epoch_begins = False
        self._drawn = 0
        # Whether the data may be shorter than what was trained of it: the epoch is over then.
        self._may_end = False
        # Positions and random states before the latest batch, of data without a length.
        self._ahead: tuple[list[Any], dict[str, Any]] | None = None

    @property
    def kind(self) -> Kind:
        """How the place is found, see [Note: Place]; `"nowhere"`: in the middle of an epoch not at all."""
        stateful = [isinstance(loader, _Stateful) for loader in self.flattened]
        dealt_out = any(_inner_samplers(loader) for loader in self.flattened)
        if all(stateful) and not dealt_out and self._replay is not True:
            return "stateful"
        data = getattr(self._trainer, "datamodule", None)
        saves = data is not None and is_overridden("state_dict", data)
        if self._replay is False or (saves and self._replay is None):
            return "placed"
        mixed = any(stateful) and not all(stateful)
        if self._has_no_length or (mixed and self._replay is None):
            return "nowhere"
        return "replayed"

    @property
    def _has_no_length(self) -> bool:
        limits = self._limits or [float("inf")] * len(self.flattened)
        pairs = zip(self.flattened, limits, strict=True)
        return any(sized_len(loader) is None and limit == float("inf") for loader, limit in pairs)

    def place(self) -> dict[str, Any]:
        """What it takes to be found again: random states and positions of this rank, as plain values and tensors."""
        positions, ahead = super()._state_dicts() if self.kind == "stateful" else [], None
        if self._ahead is not None and self._drawn > self._trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            positions, ahead = self._ahead
        return {
            "lengths": [sized_len(loader) for loader in self.flattened],
            "begun": self._begun,
            "generators": self._generator_states(),
            "positions": positions,
            "ahead": ahead,
        }

    def refuse_other_length(self, name: str, trained: int, same: bool) -> None:
        """Refuse to go on in the middle of an epoch of data that is not as long as what the checkpoint was taken in.

        Args:
            name: The checkpoint, for the message.
            trained: Batches of the epoch that were trained.
            same: Whether the data is to have the length that it had.

        Raises:
            ValueError: The data is shorter than what was trained of it, or has another length than it had.
        """
        saved, limit = self._saved or {}, self._trainer.fit_loop.max_batches
        self._may_end = not same or "moved" in saved  # Another number of ranks has loaders of another length.
        if self._may_end:
            return
        lengths = [sized_len(loader) for loader in self.flattened]
        changed = [(was, now) for was, now in zip(saved.get("lengths", ()), lengths, strict=False) if was != now]
        if changed:
            raise ValueError(
                f"{name} was saved after batch {trained} of an epoch of {changed[0][0]} batches, and the data of this "
                f"run has {changed[0][1]}. {_AS_IT_WAS}"
            )
        if trained >= limit:
            raise ValueError(
                f"{name} was saved after batch {trained} of an epoch, and an epoch of this run ends after {limit}. "
                f"{_AS_IT_WAS}"
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
        """The first batch, before training has started; see [Note: Place]."""
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
        # Lightning has the positions of rank 0 only; this one has those of its own rank.
        if self._saved is None:
            super()._load_state_dicts(states)

    def _state_dicts(self) -> list[dict[str, Any]]:
        # At the end of an epoch others would go on with no batch at all, and count that as an epoch.
        return [] if self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch else super()._state_dicts()

    def _resume(self, saved: dict[str, Any], trained: int | None = None) -> None:
        self._saved = None
        if self.random_state is not None and not self.epoch_begins:
            # Lightning may have made an iterator of the validation since training started.
            restore(self.random_state, self._device)
        loop = self._trainer.fit_loop
        trained = loop.epoch_loop.batch_progress.current.ready if trained is None else trained
        for loader in self.flattened:
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        kind = self.kind
        if kind == "stateful" and "moved" in saved:
            kind = "replayed"  # Positions are those of another number of ranks.
        if kind == "stateful" and saved["positions"]:
            super()._load_state_dicts(saved["positions"])
        if trained and kind == "replayed" and len(saved["begun"]) == 2:
            with self._kept_randomness():
                self._replay_epoch(saved["begun"], trained)
            return
        if trained or kind == "stateful":
            with self._kept_randomness():  # What an iterator draws when it is made has been drawn before.
                super().__iter__()
        self._begun, self._drawn = saved["begun"], trained
        if not trained:
            # The epoch that the checkpoint was taken in is over; loaders are as they were then.
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
                    f"{trained} batches of this epoch were trained, and the data of this run ends after {number}. "
                    f"{_AS_IT_WAS}"
                ) from end
        self._begun, self._drawn = begun, trained
        rank_zero_info(f"{trained} batches of the epoch were drawn again without training: it goes on where it was.")

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
        found: dict[int, torch.Generator] = {}
        for loader in self.flattened:
            for holder in [*_samplers(loader), *_inner_samplers(loader)]:
                generator = getattr(holder, "generator", None)
                if isinstance(generator, torch.Generator):
                    found[id(generator)] = generator
        return list(found.values())

    def _generator_states(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)


def _samplers(loader: Any) -> list[Any]:
    """A loader, and whatever of it may hold a generator."""
    batches = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _inner_samplers(loader: Any) -> list[Any]:
    """Samplers whose order Lightning deals out to ranks; positions of their loaders say nothing of them."""
    found = [getattr(getattr(each, "dataset", None), "_sampler", None) for each in _samplers(loader)]
    return [each for each in found if each is not None]


class ResumableSource(_DataLoaderSource):
    """Where Lightning gets the loaders of a fit from: those of the user, in a `ResumableLoader`.

    Args:
        source: That of the user.
        trainer: Whose fit it is.
        replay: As for `ResumableLoader`.

    Attributes:
        saved: Of the checkpoint that is being resumed from.
        made: The latest one.
    """

    def __init__(self, source: _DataLoaderSource, trainer: Trainer, replay: bool | None) -> None:
        super().__init__(source.instance, source.name)
        self.saved: dict[str, Any] | None = None
        self.made: ResumableLoader | None = None
        self._trainer = trainer
        self._replay = replay

    def dataloader(self) -> ResumableLoader:
        """Asks for the loaders."""
        saved, self.saved = self.saved, None
        self.made = ResumableLoader(super().dataloader(), self._trainer, saved, self._replay)
        return self.made
