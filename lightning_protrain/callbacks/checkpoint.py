"""ProTrainCheckpoint: a ModelCheckpoint whose checkpoints are folders, and whose memory is what these folders say.

[Note: Memory]
Nothing is remembered from run to run but what the manifests say. The best checkpoint is the best of the line that the
run continues (see [Note: Lines] in checkpoint/manifest.py), so it survives a restart and a move of the folder. What a
run has left behind by going back to an earlier checkpoint is hidden, and not removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_protrain.callbacks import occasions
from lightning_protrain.callbacks.failures import failing_together
from lightning_protrain.callbacks.occasions import accumulates, tries_only, validates
from lightning_protrain.callbacks.ranks import gather, refuse_different
from lightning_protrain.checkpoint.discovery import Found, find, line_of, newest_good
from lightning_protrain.checkpoint.manifest import MANIFEST, Manifest
from lightning_protrain.checkpoint.names import check_run
from lightning_protrain.checkpoint.randomness import capture, restore
from lightning_protrain.checkpoint.ranking import Ranking
from lightning_protrain.checkpoint.retention import sweep
from lightning_protrain.checkpoint.space import check_space, check_writable
from lightning_protrain.checkpoint.verifying import Fault, verify_files
from lightning_protrain.checkpoint_io import ProTrainCheckpointIO

_DEFAULT_RUN = "run"
_ACCUMULATING = "accumulating"
_RANDOMNESS = "random_states"


class ProTrainCheckpoint(ModelCheckpoint):
    """Saves and keeps checkpoints that survive a crash, and finds the newest and the best again.

    With a metric every evaluation counts: the best one so far is saved when it is found, whatever the other triggers
    say. The newest checkpoint is always kept, so `save_last` makes no copy. `fit(ckpt_path="last")` takes the newest
    one of which every byte is right, says which ones it has skipped, and never begins anew in silence.

    Args:
        dirpath, filename, monitor, verbose, save_last, save_top_k, save_on_exception, save_weights_only, mode: As in
            `ModelCheckpoint`. `save_top_k` never counts the newest, the best and the one resumed from: these stay.
        auto_insert_metric_name, every_n_train_steps, train_time_interval, every_n_epochs: As in `ModelCheckpoint`.
        save_on_train_epoch_end: As in `ModelCheckpoint`.
        enable_version_counter: As in `ModelCheckpoint`; without it a checkpoint of the same name is replaced.
        run: Begins the names of the checkpoints; several runs in one folder never touch each other's. None: one run.
        min_delta: By how much a score must be better than the best one.

    Raises:
        ValueError: A name or number that cannot be; more in `setup`, before anything is trained.
    """

    def __init__(self, *args: Any, run: str | None = None, min_delta: float = 0.0, **kwargs: Any) -> None:
        self._known_best: str | None = None
        super().__init__(*args, **kwargs)
        self.run = check_run(_DEFAULT_RUN if run is None else run)
        self._prefix = None if run is None else run
        self.ranking = Ranking(self.monitor, self.mode, min_delta)  # type: ignore[arg-type]
        self._due = False
        self._parent: Manifest | None = None
        self._randomness: list[Any] | None = None
        self._resumed_from: str | None = None
        # Step and score of the latest evaluation.
        self._evaluated: tuple[int, float | None] | None = None

    @property
    def state_key(self) -> str:
        # Other triggers do not make it another callback.
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint of this run; before a fit, the best one that its folder has."""
        if self._known_best is None and self.dirpath:
            best = self._best_of(line_of(find(Path(self.dirpath), self.run)))
            return "" if best is None else str(best.path)
        return self._known_best or ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._known_best = path or None

    def state_dict(self) -> dict[str, Any]:
        """Nothing that a manifest does not say better, see [Note: Memory]."""
        return {"monitor": self.monitor, "mode": self.mode, "run": self.run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing, see [Note: Memory]."""

    # --- before and after training ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sees to it that checkpoints can be written and read.

        Raises:
            ValueError: They cannot, or another process is writing this run.
            OSError: The disk has not even room for the weights.
        """
        super().setup(trainer, pl_module, stage)
        checkpoints = trainer.strategy.checkpoint_io
        if type(checkpoints) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = checkpoints = ProTrainCheckpointIO()
        if not isinstance(checkpoints, ProTrainCheckpointIO):
            raise ValueError(
                f"ProTrainCheckpoint saves through ProTrainCheckpointIO, and the Trainer has "
                f"{type(checkpoints).__name__}. Take that plugin away, or use Lightning's ModelCheckpoint."
            )
        if checkpoints.run not in (_DEFAULT_RUN, self.run):
            raise ValueError(
                f"ProTrainCheckpoint(run={self.run!r}) and ProTrainCheckpointIO(run={checkpoints.run!r}): one Trainer "
                "writes one run."
            )
        checkpoints.run = self.run
        checkpoints.together = failing_together
        if stage != "fit" or tries_only(trainer):
            return
        with failing_together(f"Preparing {self._root} for checkpoints"):
            if trainer.is_global_zero:
                check_writable(self._root, self.run, checkpoints.files)
                checkpoints.hold(self._root)
                sweep(self._root, self.run, checkpoints.files)
                check_space(self._root, sum(parameter.nbytes for parameter in pl_module.parameters()))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on it is known what the run continues from.

        Raises:
            ValueError: The ranks have loaded different checkpoints.
        """
        checkpoints = _io(trainer)
        # Without a checkpoint to resume from, a second fit goes on where the first one has ended.
        parent = checkpoints.parent if trainer.ckpt_path else trainer.strategy.broadcast(self._parent)
        name = None if parent is None else f"step {parent.step}, identity {parent.identity}"
        refuse_different(name, f"The ranks have loaded different checkpoints from {trainer.ckpt_path}")
        parent = checkpoints.parent = parent if parent is not None and parent.run == self.run else None
        self._resumed_from = None if parent is None else parent.identity
        line = [] if parent is None else line_of(find(self._root, self.run), parent)
        self._remember(trainer.strategy.broadcast(line))
        self._last_global_step_saved = 0 if parent is None else parent.step
        self._due = False

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        root = Path(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        newest = newest_good(root, self.run, _usable)
        if newest.chosen is None:
            return super()._find_last_checkpoints(trainer)
        if newest.skipped:
            rank_zero_warn(newest.message())
        return {str(newest.chosen.path)}

    # --- random numbers -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The generators of this rank; `_write` puts those of the others beside them."""
        checkpoint[_RANDOMNESS] = [capture(trainer.strategy.root_device)]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps them for when training starts: what is drawn until then does not count."""
        self._randomness = checkpoint.get(_RANDOMNESS)

    def _restore_randomness(self, trainer: Trainer) -> None:
        states, self._randomness = self._randomness, None
        if states is None:
            if trainer.ckpt_path:
                rank_zero_warn("The checkpoint has no states of random numbers: from here on other ones are drawn.")
        elif len(states) != trainer.world_size:
            rank_zero_warn(
                f"The checkpoint has the random numbers of {len(states)} ranks, and there are {trainer.world_size}: "
                "from here on other ones are drawn."
            )
        else:
            for name in restore(states[trainer.global_rank], trainer.strategy.root_device):
                rank_zero_warn(f"The checkpoint was not saved on {name}, whose random numbers are other ones.")

    # --- when to save -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The time between saves begins, and random numbers go on.

        Raises:
            ValueError: The checkpoint has something else in their place.
        """
        self._last_time_checked = time.monotonic()
        self._restore_randomness(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Saves if steps or time say so: at the end of the step, and after the evaluation that follows on it."""
        every, stepped = self._every_n_train_steps, not accumulates(trainer)
        steps = stepped and every >= 1 and trainer.global_step % every == 0
        self._due = self._time_is_up(trainer) or self._due or steps
        if self._due and stepped and not occasions.validates_next(trainer):
            self._due = False
            step_metrics = trainer.fit_loop._results.metrics(on_step=True)["callback"]
            fresh = not validates(trainer) and (self.monitor is None or self.monitor in step_metrics)
            found = (self._score(trainer, step_metrics), True) if fresh else self._measured_now(trainer)
            self._save_now(trainer, *found)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what is best so far, and what was to be saved after this evaluation.

        Raises:
            ValueError: The metric does not exist.
        """
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or tries_only(trainer):
            return
        beside = occasions.is_measured_beside(self.monitor, trainer)
        better = not beside and self._is_better(trainer)
        score, fresh = self._measured_now(trainer)
        epoch = not self._save_on_train_epoch_end and self._epoch_is_due(trainer)
        due = (self._due or epoch) and not accumulates(trainer)
        if due:
            self._due = False
        if better or due:
            self._save_now(trainer, score, fresh, again=better)

    def on_evaluated(self, trainer: Trainer, names: Collection[str]) -> None:
        """Saves what is best so far, if it is measured by an `Evaluator`."""
        if self.monitor in names and not tries_only(trainer) and self._is_better(trainer):
            self._save_now(trainer, *self._measured_now(trainer), again=True)

    def _is_better(self, trainer: Trainer) -> bool:
        """Notes an evaluation that has just ended, and says whether it is the best so far."""
        score = self._score(trainer, trainer.callback_metrics)
        self._evaluated = trainer.global_step, score
        best = None if self.best_model_score is None else float(self.best_model_score)
        return trainer.strategy.broadcast(self.ranking.is_better(score, best)) and self.save_top_k != 0

    def _measured_now(self, trainer: Trainer) -> tuple[float | None, bool]:
        """The score of the weights as they are, and whether they have been evaluated."""
        step, score = self._evaluated or (-1, None)
        return (score, True) if step == trainer.global_step else (None, False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves if epochs say so and no evaluation has seen to it."""
        if tries_only(trainer) or not self._epoch_is_due(trainer):
            return
        if not validates(trainer) and not occasions.is_measured_beside(self.monitor, trainer):
            self._save_now(trainer, self._score(trainer, trainer.callback_metrics), fresh=True)
        elif self._save_on_train_epoch_end or not validates(trainer):
            self._save_now(trainer, *self._measured_now(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves at the end of a step, if asked to; not on several ranks, of which others may not have failed."""
        try:
            if self._should_save_on_exception(trainer) and trainer.world_size == 1 and not accumulates(trainer):
                self._save_now(trainer, None, fresh=False)
        except (OSError, RuntimeError, ValueError) as error:  # The exception that ends the run is the one to be seen.
            rank_zero_warn(f"No checkpoint could be saved on {type(exception).__name__}: {error}")
        finally:
            self.teardown(trainer, pl_module, "fit")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what `save_last` promises, if nothing was saved at all."""
        if self.save_last and not self._last_checkpoint_saved and self._resumed_from is None:
            self._save_now(trainer, None, fresh=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Others may write this run now."""
        if isinstance(trainer.strategy.checkpoint_io, ProTrainCheckpointIO):
            trainer.strategy.checkpoint_io.teardown()

    # --- saving -------------------------------------------------------------------------------------------------------

    def _save_now(self, trainer: Trainer, score: float | None, fresh: bool, again: bool = False) -> None:
        if tries_only(trainer) or (self.save_top_k == 0 and not self.save_last):
            return
        if self._last_global_step_saved == trainer.global_step and not again:
            return
        candidates = self._monitor_candidates(trainer)
        path = trainer.strategy.broadcast(self._path(candidates, fresh))
        record = {**self.ranking.record(score), "callback": self.state_key}
        if accumulates(trainer):
            record[_ACCUMULATING] = True
        self._write(trainer, path, record)
        self._parent = _io(trainer).parent
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = self.last_model_path = path
        if score is not None:
            self.current_score = torch.tensor(score, dtype=torch.float64)
        if self.verbose:
            rank_zero_info(f"Step {trainer.global_step}: saved {path}" + ("" if score is None else f", score {score}"))
        self._keep(trainer)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _write(self, trainer: Trainer, path: str, record: dict[str, Any]) -> None:
        """What `Trainer.save_checkpoint` does, but that all ranks fail if one does."""
        doing = f"Saving {path}"
        with failing_together(doing):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
        if trainer.world_size > 1 and _RANDOMNESS in checkpoint:
            checkpoint[_RANDOMNESS] = gather(checkpoint[_RANDOMNESS][0])
        with failing_together(doing):
            trainer.strategy.save_checkpoint(checkpoint, path, storage_options=record)

    def _keep(self, trainer: Trainer) -> None:
        """Removes what nobody wants any more, and remembers the rest."""
        kept: list[Found] = []
        with failing_together(f"Removing checkpoints from {self._root}"):
            if trainer.is_global_zero:
                checkpoints = _io(trainer)
                assert checkpoints.parent is not None
                line = line_of(find(self._root, self.run), checkpoints.parent)
                mine = [each for each in line if each.manifest.record.get("callback") == self.state_key]
                protected = [] if self._resumed_from is None else [self._resumed_from]
                gone = self.ranking.surplus(mine, self.save_top_k, protected)
                for each in gone:
                    checkpoints.remove_checkpoint(each.path)
                kept = [each for each in line if each not in gone]
        self._remember(trainer.strategy.broadcast(kept))

    def _remember(self, line: list[Found]) -> None:
        best = self._best_of(line)
        scores = {str(each.path): self.ranking.score_of(each.manifest) for each in line}
        self.best_k_models = {path: torch.tensor(score) for path, score in scores.items() if score is not None}
        self._known_best = "" if best is None else str(best.path)
        score = None if best is None else self.ranking.score_of(best.manifest)
        self.best_model_score = None if score is None else torch.tensor(score, dtype=torch.float64)
        self.last_model_path = str(line[0].path) if line else ""

    def _best_of(self, line: list[Found]) -> Found | None:
        if self.monitor is None:
            return line[0] if line else None
        return self.ranking.best(line)

    def _path(self, candidates: dict[str, Tensor], fresh: bool) -> str:
        """A name of which every number was measured at this step."""
        filename = self.filename
        fields = set(re.findall(r"\{([^:}]+)", filename or ""))
        if not fresh and fields - {"epoch", "step"}:
            filename = "{epoch}-{step}"
        format_name: Callable[..., str] = self._format_checkpoint_name
        stem = format_name(filename, candidates, self._prefix, self.auto_insert_metric_name).replace(os.sep, "_")
        path = self._root / f"{stem}{self.FILE_EXTENSION}"
        version = self.STARTING_VERSION
        while self._enable_version_counter and os.path.lexists(path):
            path = self._root / f"{stem}{self.CHECKPOINT_JOIN_CHAR}v{version}{self.FILE_EXTENSION}"
            version += 1
        return str(path)

    def _score(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> float | None:
        if self.monitor is None:
            return None
        with failing_together(f"Looking for {self.monitor!r}"):
            if self.monitor not in metrics:
                raise ValueError(
                    f"monitor={self.monitor!r}: no metric of that name was logged, but {sorted(metrics) or 'none'}. "
                    "Log it in validation_step, or monitor another one."
                )
        score = float(trainer.strategy.broadcast(metrics[self.monitor].item()))
        if not self.ranking.record(score):
            rank_zero_warn(f"{self.monitor} is {score} at step {trainer.global_step}: that is never the best.")
        return score

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        return self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _time_is_up(self, trainer: Trainer) -> bool:
        if self._train_time_interval is None:
            return False
        now, before = time.monotonic(), self._last_time_checked
        up = before is not None and now - before >= self._train_time_interval.total_seconds()
        if trainer.strategy.broadcast(up):
            self._last_time_checked = now
            return True
        return False

    @property
    def _root(self) -> Path:
        assert self.dirpath is not None
        return Path(self.dirpath)


def _usable(each: Found) -> list[Fault]:
    if each.manifest.record.get(_ACCUMULATING):
        return [Fault(MANIFEST, "it was saved between two steps, while gradients were being accumulated")]
    return verify_files(each.path, each.manifest)


def _io(trainer: Trainer) -> ProTrainCheckpointIO:
    checkpoints = trainer.strategy.checkpoint_io
    assert isinstance(checkpoints, ProTrainCheckpointIO)
    return checkpoints
