"""Where the ranks of a fit meet: before each batch, and behind the last one of an epoch.

[Note: Behind the last batch]
A rank that has trained its last batch goes on to what users do there: metrics of a validation, hooks at the end of the
epoch. These gather values by collectives of their own, and a rank that has more batches would never join them: both
would wait until the process group gives up. So ranks meet first, where the one that trains on is named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.states import TrainerFn


def meet_in_epochs(trainer: Trainer, before_batch: Callable[[], None], meet: Callable[[str], object]) -> None:
    """Lets a rank meet others in the fit that begins; see [Note: Behind the last batch].

    Args:
        trainer: That fits.
        before_batch: Called before each batch.
        meet: Called with the place, behind the last batch of an epoch.
    """
    loop = trainer.fit_loop
    # Lightning's own asks rank 0 only, waits for the device, and goes on when it fails.
    loop.epoch_loop._broadcast_sigterm_tensor = before_batch  # type: ignore[method-assign]
    loop.on_advance_end = functools.partial(_end_epoch, loop, meet)  # type: ignore[method-assign]


def meet_no_more(trainer: Trainer) -> None:
    """After a fit: its loops are as they were."""
    vars(trainer.fit_loop).pop("on_advance_end", None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def validation_place(trainer: Trainer) -> str:
    """Where a rank is that begins to validate; empty: not within a fit, or before its first batch."""
    if not trainer.validating or trainer.state.fn != TrainerFn.FITTING:
        return ""
    trained = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return f"validation after batch {trained} of epoch {trainer.current_epoch}"


def length_is_known(trainer: Trainer) -> bool:
    """Whether all loaders of a fit that has begun say how many batches they have; a limit says it of none."""
    loaders = trainer.fit_loop._combined_loader
    assert loaders is not None
    return all(sized_len(each) is not None for each in loaders.flattened)


def _end_epoch(loop: _FitLoop, meet: Callable[[str], object]) -> None:
    meet(f"the end of epoch {loop.trainer.current_epoch}")
    type(loop).on_advance_end(loop)
