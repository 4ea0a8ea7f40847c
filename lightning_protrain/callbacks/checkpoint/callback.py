"""`ProTrainCheckpoint`: a `ModelCheckpoint` whose checkpoints are folders.

The callback reads its state from the manifests of the checkpoints. So the state survives a restart, and the folder may
be moved. Checkpoints of other steps than those of the present run are set aside, see [Note: Order] in
checkpoint/manifest.py.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_protrain.callbacks.checkpoint.frozen import Frozen
from lightning_protrain.callbacks.checkpoint.resume import (
    ACCUMULATING,
    ResumedFit,
    choose,
    newest_listed,
    newest_usable,
    remove_all,
    usable,
)
from lightning_protrain.callbacks.checkpoint.saving_points import EvaluationScores, PendingSave, StepEndCheckpoint
from lightning_protrain.callbacks.checkpoint.setup import DEFAULT_RUN, install_io, installed_io, prepare_folder
from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.checkpoint.atomic import free_path, set_aside
from lightning_protrain.checkpoint.discover import (
    FoundCheckpoint,
    Ranking,
    find_checkpoints,
    newest_good,
    pointed,
)
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.manifest import Manifest, check_run
from lightning_protrain.checkpoint.save import Snapshot
from lightning_protrain.rank_store import RankStore
from lightning_protrain.trainer_events import (
    accumulates,
    is_fast_dev_run,
    is_from_evaluator,
    validates,
    validates_next,
)

# Key in the record of a checkpoint that a callback has saved: the state key of the callback.
_CALLBACK = "callback"
# Seconds that a rank with an exception waits for the others, to save with them.
_PATIENCE = 2.0


class ProTrainCheckpoint(StepEndCheckpoint):
    """Saves checkpoints that survive a crash, keeps the newest and the best, and resumes from the newest intact one.

    If `monitor` is set, every evaluation that gives a new best score saves a checkpoint, in addition to the other
    triggers. The last step of the fit is saved, wherever the fit ends. The links `last` and `best` in the folder name
    the newest checkpoint and, if `monitor` is set, the best one. `fit(ckpt_path="last")` resumes from the newest intact
    checkpoint, and warns of damaged ones. If all checkpoints are damaged, it raises an error.

    Args:
        dirpath, filename, monitor, mode, verbose: As in `ModelCheckpoint`.
        save_last: False does not save the last step of the fit, unless another trigger does. True saves it even with
            `save_top_k=0` or without triggers.
        save_on_exception, save_weights_only: As in `ModelCheckpoint`.
        save_top_k: As in `ModelCheckpoint`. The newest checkpoint, the best one, and the one from which the run was
            resumed are never removed.
        auto_insert_metric_name, every_n_train_steps, train_time_interval, every_n_epochs: As in `ModelCheckpoint`.
        save_on_train_epoch_end: As in `ModelCheckpoint`.
        enable_version_counter: As in `ModelCheckpoint`; False replaces a checkpoint of the same name.
        run: Prefix of checkpoint names, which separates several runs in one folder; None means a single run.
        min_delta: Minimum improvement over the best score.
        allow_drift: Keys of `TERMS` in checkpoint/contract.py that may differ between checkpoint and resumed run. With
            `"optimizer"`, optimizer and learning rate schedule restart.
        weights_and_counters_only: True resumes only weights, steps and epochs.
        save_on_preemption: True saves and ends the run at the end of the step if any rank gets SIGTERM, SIGHUP,
            SLURM's signal or Ctrl-C; a second Ctrl-C ends it at once.
        asynchronous: True copies the states to host memory, and writes them to disk while training continues.
        frozen: `"store"` saves frozen weights; `"reference"` saves only a reference to them; `"auto"` saves a reference
            for weights that are bitwise in the pretrained model, and stores the others.

    Raises:
        ValueError: If a name or number is not allowed.
    """

    needs_whole_checkpoints = True

    def __init__(
        self,
        *args: Any,
        run: str | None = None,
        min_delta: float = 0.0,
        allow_drift: Collection[str] = (),
        weights_and_counters_only: bool = False,
        save_on_preemption: bool = True,
        asynchronous: bool = False,
        frozen: Frozen = "auto",
        **kwargs: Any,
    ) -> None:
        self._known_best: str | None = None
        super().__init__(*args, asynchronous=asynchronous, frozen=frozen, **kwargs)
        self.save_on_preemption = save_on_preemption
        self.run = check_run(DEFAULT_RUN if run is None else run)
        self._prefix = None if run is None else run
        self.ranking = Ranking(self.monitor, self.mode, min_delta)  # type: ignore[arg-type]
        self._scores = EvaluationScores(self.ranking)
        # Checkpoint that `ckpt_path="last"` found on this rank; None with a single rank.
        self._listed: str | None = None
        self._due = False
        # State of Lightning's epoch progress at the end of the latest batch.
        self._epoch: dict[str, Any] | None = None
        self._snapshot = Snapshot(free_host_bytes)
        self._parent: Manifest | None = None
        # Identities of checkpoints that this fit does not continue; its first save sets them aside.
        self._later: set[str] = set()
        self._resumption = ResumedFit(allow_drift, weights_and_counters_only, self._frozen)
        self._resumed_from: str | None = None

    @property
    def state_key(self) -> str:
        # Unlike in `ModelCheckpoint`, the key does not depend on the triggers.
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint of this run; before a fit, of the best one in its folder."""
        if self._known_best is None and self.dirpath:
            best = self._best_of(find_checkpoints(Path(self.dirpath), self.run).found)
            return "" if best is None else str(best.path)
        return self._known_best or ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._known_best = path or None

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that identify the callback; its state is in the manifests."""
        return {"monitor": self.monitor, "mode": self.mode, "run": self.run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the state of the callback is in the manifests."""

    # --- before and after training ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that checkpoints can be written and read.

        Raises:
            ValueError: If checkpoints cannot be written, or another process writes checkpoints of this run.
            OSError: If the free space on the disk is too small for the weights.
        """
        super().setup(trainer, pl_module, stage)
        self._exchange = self._scores.exchange = RankStore.open(self.state_key)
        self._exchange.doing = "Training"  # A rank that saves for long is no reason for a warning.
        checkpoints = install_io(trainer, self.run, self._exchange)
        checkpoints.choose = functools.partial(choose, self._exchange, trainer.global_rank, self._listed, self.run)
        checkpoints.accept = functools.partial(self._resumption.accept, trainer)
        if stage == "fit":
            self._resumption.begin(trainer, self._exchange)
        if stage == "fit" and not is_fast_dev_run(trainer):
            prepare_folder(trainer, self._frozen.stored_bytes(pl_module), self._root, self._exchange)
            if self.save_on_preemption:
                self._preemption.shield_workers(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the checkpoint that the run continues, and compare its contract with this run.

        Raises:
            ValueError: If ranks have loaded different checkpoints, or the contract differs.
        """
        checkpoints = installed_io(trainer)
        # A second fit without `ckpt_path` continues the first one.
        parent = checkpoints.parent if trainer.ckpt_path else self._exchange.broadcast(self._parent, "Resuming")
        name = None if parent is None else f"step {parent.step}, identity {parent.identity}"
        names = self._exchange.gather(name, "Resuming")
        if len(set(names)) > 1:
            loaded = ", ".join(f"rank {rank}: {its_name}" for rank, its_name in enumerate(names))
            raise ValueError(f"The ranks have loaded different checkpoints from {trainer.ckpt_path}: {loaded}.")
        parent = checkpoints.parent = parent if parent is not None and parent.run == self.run else None
        self._resumed_from = None if parent is None else parent.identity
        step = -1 if parent is None else parent.step
        present = self._exchange.broadcast(self._present(), "Resuming")
        later = (checkpoint.manifest for checkpoint in present if checkpoint.manifest.step > step)
        self._later = {manifest.identity for manifest in later if _CALLBACK in manifest.record}
        self._remember([checkpoint for checkpoint in present if checkpoint.manifest.step <= step])
        self._scores.begin(known=bool(self.best_k_models))
        self._resumption.check(trainer, pl_module)
        self._last_global_step_saved = 0 if parent is None else parent.step
        self._due, self._epoch = False, None

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        root = Path(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        if trainer.world_size > 1:  # The process group does not exist yet; `choose` verifies the checkpoint later.
            listed = newest_listed(root, self.run)
            self._listed = None if listed is None else str(listed)
            return self._find_others(trainer, root) if listed is None else {str(listed)}
        newest = newest_good(root, self.run, usable)
        if newest.chosen is None:
            return self._find_others(trainer, root)
        if newest.skipped:
            rank_zero_warn(newest.message())
        return {str(newest.chosen.path)}

    def _find_others(self, trainer: Trainer, root: Path) -> set[str]:
        """Return what `ModelCheckpoint` finds; inform the user if there is nothing to resume from."""
        others = super()._find_last_checkpoints(trainer)
        if not others:
            rank_zero_info(f"There is no checkpoint of this run in {root}: the run starts from its first step.")
        return others

    # --- states to save and load --------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of this rank; `_write` adds the states of the other ranks."""
        self._resumption.save(trainer, checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove the hooks for loading weights, which Lightning has loaded by now."""
        self._resumption.loaded()

    # --- when to save -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of `train_time_interval`, and restore the random states.

        Raises:
            ValueError: If the checkpoint has invalid random states.
        """
        self._last_time_checked = time.monotonic()
        self._resumption.restore(trainer)
        if self._saves(trainer):
            self._frozen.prepare(trainer)
        self._listen(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the loader that the epoch has begun."""
        self._resumption.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Refuse to train on if the evaluation has logged metrics, but not `monitor`.

        Raises:
            ValueError: If no evaluation has logged `monitor`.
        """
        self._scores.refuse_unknown(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save if a trigger is due at the end of a step; if validation follows, save after it."""
        self._epoch = trainer.fit_loop.epoch_progress.state_dict()
        every, stepped = self._every_n_train_steps, not accumulates(trainer)
        steps = stepped and every >= 1 and trainer.global_step % every == 0
        ends = stepped and self._agree(trainer)
        self._due = self._time_is_up(trainer) or self._due or steps or ends
        if self._due and stepped and not validates_next(trainer):
            self._due = False
            step_metrics = trainer.fit_loop._results.metrics(on_step=True)["callback"]
            fresh = not validates(trainer) and (self.monitor is None or self.monitor in step_metrics)
            score = self._scores.read(trainer, step_metrics) if fresh else None
            score_and_due = (score, score is not None or self.monitor is None) if fresh else self._scores.now(trainer)
            self._save_now(trainer, *score_and_due)
            self._leave(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the score is a new best, or a save was postponed until after this validation."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or is_fast_dev_run(trainer):
            return
        beside = is_from_evaluator(self.monitor, trainer)
        better = not beside and self._is_better(trainer)
        score, fresh = self._scores.now(trainer)
        epoch = not self._save_on_train_epoch_end and self._epoch_is_due(trainer)
        stepped = not accumulates(trainer)
        ends = stepped and self._agree(trainer)
        due = self._due or epoch or ends
        self._due, due = due and not stepped, due and stepped
        if better or due:
            self._save_now(trainer, score, fresh, again=better)
        if due:
            self._leave(trainer)

    def on_evaluated(self, trainer: Trainer, names: Collection[str]) -> None:
        """Save if an `Evaluator` has logged a new best score."""
        if self.monitor in names and not is_fast_dev_run(trainer) and self._is_better(trainer):
            self._save_now(trainer, *self._scores.now(trainer), again=True)

    def _is_better(self, trainer: Trainer) -> bool:
        best = None if self.best_model_score is None else float(self.best_model_score)
        under_way = None if self._pending is None else self._pending.score
        if self.ranking.is_better(under_way, best):
            best = under_way
        return self._scores.note(trainer, best) and self.save_top_k != 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if `every_n_epochs` requires it and `on_validation_end` has not saved."""
        if is_fast_dev_run(trainer) or not self._epoch_is_due(trainer):
            return
        if not validates(trainer) and not is_from_evaluator(self.monitor, trainer):
            score = self._scores.read(trainer, trainer.callback_metrics)
            self._save_now(trainer, score, fresh=score is not None or self.monitor is None)
        elif self._should_save_on_train_epoch_end(trainer) or not validates(trainer):
            self._save_now(trainer, *self._scores.now(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save if `save_on_exception` is set and all ranks are at the end of one step."""
        try:
            if self._should_save_on_exception(trainer):
                where = trainer.global_step, accumulates(trainer)
                steps = self._exchange.gather(where, f"Ending at step {where[0]}", patience=_PATIENCE)
                if set(steps) == {(where[0], False)}:
                    self._save_now(trainer, None, fresh=False)
        except (OSError, RuntimeError, ValueError) as error:  # Do not hide the exception that ended the run.
            rank_zero_warn(f"No checkpoint could be saved on {type(exception).__name__}: {error}")
        finally:
            self._exchange.sign_off(f"has failed with {type(exception).__name__}: {exception}")
            self._close(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless a setting of the user excludes it; warn of what is not saved."""
        triggers = self._every_n_epochs, self._every_n_train_steps, self._train_time_interval is not None
        if self._due or self.save_last or (self.save_last is None and any(triggers)):
            self._save_now(trainer, *self._scores.now(trainer), at_end=True)
        self._settle(trainer)
        if is_fast_dev_run(trainer):
            return
        if self._last_global_step_saved == trainer.global_step:
            self._scores.warn_at_end(trainer)
        else:
            newest = f"the newest is {self.last_model_path}" if self.last_model_path else "there is no checkpoint"
            why = "save_last=False" if self.save_last is False else "every_n_epochs=0 and no other trigger is set"
            rank_zero_warn(
                f"The last step of this run, {trainer.global_step}, is not saved, because "
                f"{why if self.save_top_k else 'save_top_k=0'}; {newest}. To save it, set save_last=True."
            )
        links = [str(link) for link in map(self._link, ("last", "best")) if pointed(link) is not None]
        if links and trainer.is_global_zero:
            rank_zero_info(f"Checkpoints of this run: {' and '.join(links)}.")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inform the user if a finished run was resumed and no batch was trained."""
        if trainer.ckpt_path and self._epoch is None and not is_fast_dev_run(trainer):
            rank_zero_info(
                f"{trainer.ckpt_path} is the end of its run, at step {trainer.global_step}: nothing was left to train. "
                f"{self._resumption.how_to_continue(trainer)}"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the lock of the run, and restore the signal handlers."""
        self._close(trainer)
        RankStore.rest()
        self._preemption.restore()

    def _close(self, trainer: Trainer) -> None:
        self._exchange.sign_off("has ended")
        self._preemption.close()
        self._agreement.close()
        if isinstance(trainer.strategy.checkpoint_io, ProTrainCheckpointIO):
            trainer.strategy.checkpoint_io.teardown()
        self._pending = None
        self._snapshot.release()

    # --- saving -------------------------------------------------------------------------------------------------------

    def _save_now(
        self, trainer: Trainer, score: float | None, fresh: bool, again: bool = False, at_end: bool = False
    ) -> None:
        """Save, unless this step has been saved; all ranks must call it.

        `fresh` is as in `_path`. `at_end` drops the gradients of an incomplete accumulation.
        """
        if not self._saves(trainer):
            return
        if self._last_global_step_saved == trainer.global_step and not again:
            return
        self._settle(trainer)
        if self._later:
            self._set_aside(trainer)
        candidates = self._monitor_candidates(trainer)
        if (epoch := self._epoch_of_batch(trainer)) is not None:
            candidates["epoch"] = torch.tensor(epoch["current"]["completed"])
        path = self._exchange.broadcast(self._path(candidates, fresh), f"Saving step {trainer.global_step}")
        record = {**self.ranking.record(score), _CALLBACK: self.state_key}
        within_step = accumulates(trainer) and not at_end
        if within_step:
            record[ACCUMULATING] = True
        behind = self.asynchronous and not self._preemption.is_agreed
        self._write(trainer, path, record, behind)
        if not within_step:
            self._last_global_step_saved = trainer.global_step
        job = None
        if behind and trainer.is_global_zero:
            job = installed_io(trainer).writer.submit(lambda: self._prune(trainer))
        self._pending = PendingSave(path, trainer.global_step, score, job)
        if not behind:
            self._settle(trainer)

    def _write(self, trainer: Trainer, path: str, record: dict[str, Any], behind: bool) -> None:
        """Save like `Trainer.save_checkpoint`, but fail on all ranks if it fails on one."""
        doing = f"Saving {path}"
        with self._exchange.together(doing):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
            if (epoch := self._epoch_of_batch(trainer)) is not None and not trainer.is_last_batch:
                # Lightning counts the epoch as complete if `max_steps` ends it, and would skip its rest on resuming.
                checkpoint["epoch"] = epoch["current"]["completed"]
                checkpoint["loops"]["fit_loop"]["epoch_progress"] = epoch
            self._frozen.take_out(trainer, checkpoint, record)
        self._resumption.gather(checkpoint, doing)
        with self._exchange.together(doing), installed_io(trainer).copying(self._snapshot if behind else None):
            trainer.strategy.save_checkpoint(checkpoint, path, storage_options=record)

    def _epoch_of_batch(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return the epoch progress at the end of the latest batch; None before the first batch of an epoch ends."""
        epoch = self._epoch
        same = epoch is not None and epoch["current"]["ready"] == trainer.fit_loop.epoch_progress.current.ready
        return epoch if same else None

    def _settle(self, trainer: Trainer) -> None:
        """Wait for the pending save, if there is one; all ranks must call it at the same point."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        rest: Sequence[FoundCheckpoint] = ()
        doing = f"Saving {pending.path}"
        with self._exchange.together(doing):
            if trainer.is_global_zero:
                rest = self._prune(trainer) if pending.job is None else installed_io(trainer).writer.settle(pending.job)
        self._parent = installed_io(trainer).parent
        self._last_checkpoint_saved = pending.path
        if pending.score is not None:
            self.current_score = torch.tensor(pending.score, dtype=torch.float64)
        if self.verbose:
            score = "" if pending.score is None else f", score {pending.score}"
            rank_zero_info(f"Step {pending.step}: saved {pending.path}{score}")
        self._remember(self._exchange.broadcast(rest, doing))
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _present(self) -> Sequence[FoundCheckpoint]:
        return find_checkpoints(self._root, self.run).found

    def _set_aside(self, trainer: Trainer) -> None:
        """Rename the checkpoints that this fit does not continue; all ranks must call it."""
        later, self._later, names = self._later, set(), []
        with self._exchange.together(f"Saving step {trainer.global_step}"):
            if trainer.is_global_zero:
                names = set_aside(self._root, self.run, later, installed_io(trainer).files)
        if names:
            step = self._last_global_step_saved
            begin = f"goes on from step {step}" if self._resumed_from else "starts again"
            rank_zero_info(
                f"Run {self.run!r} in {self._root} {begin}, so its later checkpoints were renamed: {', '.join(names)}. "
                "Remove them if you do not need them."
            )

    def _prune(self, trainer: Trainer) -> Sequence[FoundCheckpoint]:
        """Link `last` and `best`, remove surplus checkpoints, and return the rest; may run on the writer thread."""
        checkpoints, line = installed_io(trainer), self._present()
        checkpoints.point(self._link("last"), newest_usable(line))
        if self.monitor is not None:
            best = self.ranking.best(line)
            checkpoints.point(self._link("best"), None if best is None else best.path)
        protected = [] if self._resumed_from is None else [self._resumed_from]
        mine = [checkpoint for checkpoint in line if checkpoint.manifest.record.get(_CALLBACK) == self.state_key]
        remove_all(self.ranking.surplus(mine, self.save_top_k, protected), checkpoints.remove_now)
        return self._present()

    def _link(self, name: str) -> Path:
        return self._root / (name if self._prefix is None else f"{self._prefix}{self.CHECKPOINT_JOIN_CHAR}{name}")

    def _remember(self, line: Sequence[FoundCheckpoint]) -> None:
        best = self._best_of(line)
        scores = {str(checkpoint.path): self.ranking.score_of(checkpoint.manifest) for checkpoint in line}
        self.best_k_models = {path: torch.tensor(score) for path, score in scores.items() if score is not None}
        self._known_best = "" if best is None else str(best.path)
        score = None if best is None else self.ranking.score_of(best.manifest)
        self.best_model_score = None if score is None else torch.tensor(score, dtype=torch.float64)
        self.last_model_path = str(line[0].path) if line else ""

    def _best_of(self, line: Sequence[FoundCheckpoint]) -> FoundCheckpoint | None:
        if self.monitor is None:
            return line[0] if line else None
        return self.ranking.best(line)

    def _path(self, candidates: dict[str, Tensor], fresh: bool) -> str:
        """Return the path of a new checkpoint: only epoch and step if the metrics are not fresh (of other weights)."""
        filename = self.filename
        fields = set(re.findall(r"\{([^:}]+)", filename or ""))
        if not fresh and fields - {"epoch", "step"}:
            filename = "{epoch}-{step}"
        format_name: Callable[..., str] = self._format_checkpoint_name
        stem = format_name(filename, candidates, self._prefix, self.auto_insert_metric_name).replace(os.sep, "_")
        path = self._root / f"{stem}{self.FILE_EXTENSION}"
        if self._enable_version_counter:
            path = free_path(path, self.CHECKPOINT_JOIN_CHAR, self.STARTING_VERSION)
        return str(path)

    @property
    def _root(self) -> Path:
        assert self.dirpath is not None
        return Path(self.dirpath)
