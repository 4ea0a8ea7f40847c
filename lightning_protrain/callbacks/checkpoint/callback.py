"""ProTrainCheckpoint: a ModelCheckpoint whose checkpoints are folders.

The callback keeps no memory of its own from run to run: everything comes from the manifests in the folder. The best
checkpoint is the best one of the lineage that the run continues (see [Note: Lineage] in checkpoint/manifest.py), so it
survives a restart and a move of the folder. Checkpoints that a run has left behind by resuming from an earlier one are
hidden, but not removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_protrain.callbacks.checkpoint.frozen import Frozen
from lightning_protrain.callbacks.checkpoint.rendezvous import BOUND, Rendezvous
from lightning_protrain.callbacks.checkpoint.resume import (
    ACCUMULATING,
    ResumedFit,
    choose,
    free_path,
    newest_listed,
    prune,
    usable,
)
from lightning_protrain.callbacks.checkpoint.saving_points import EvaluationScores, PendingSave, StepEndCheckpoint
from lightning_protrain.callbacks.checkpoint.setup import DEFAULT_RUN, install_io, installed_io, prepare_folder
from lightning_protrain.callbacks.trainer_events import (
    accumulates,
    is_fast_dev_run,
    is_from_evaluator,
    validates,
    validates_next,
)
from lightning_protrain.checkpoint.discover import FoundCheckpoint, Ranking, find_checkpoints, lineage_of, newest_good
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.manifest import Manifest, check_run
from lightning_protrain.checkpoint.save import Snapshot
from lightning_protrain.distributed.ranks import refuse_unequal
from lightning_protrain.profiler.cgroup_limits import free_host_bytes


class ProTrainCheckpoint(StepEndCheckpoint):
    """Saves and keeps checkpoints that survive a crash, and finds the newest and the best one again.

    If a metric is monitored, every evaluation counts: a new best checkpoint is saved when it is found, whatever the
    other triggers say. The newest checkpoint is always kept, so `save_last` makes no copy; it saves the last step of
    the fit if no other trigger does. `fit(ckpt_path="last")` resumes from the newest checkpoint without a fault, names
    those that it skips, and never silently starts anew.

    Args:
        dirpath, filename, monitor, mode, verbose: As in `ModelCheckpoint`.
        save_last, save_on_exception, save_weights_only: As in `ModelCheckpoint`.
        save_top_k: As in `ModelCheckpoint`. The newest and best checkpoint and the one resumed from are never removed.
        auto_insert_metric_name, every_n_train_steps, train_time_interval, every_n_epochs: As in `ModelCheckpoint`.
        save_on_train_epoch_end: As in `ModelCheckpoint`.
        enable_version_counter: As in `ModelCheckpoint`; without it, a checkpoint of the same name is replaced.
        run: Prefix of the checkpoint names; several runs in one folder never touch each other's checkpoints. None means
            a single run.
        min_delta: Minimum improvement over the best score.
        allow_drift: Keys of `TERMS` in checkpoint/contract.py that may differ from the resumed checkpoint. With
            `"optimizer"`, the optimizer and its schedule begin anew.
        weights_and_counters_only: True resumes only weights, steps and epochs, and begins everything else anew.
        replay: True finds the place in the data by drawing the trained batches again. None does so for loaders with a
            length and without a position, unless the data module saves a state.
        save_on_preemption: True ends the run with a checkpoint at the end of the step after SIGTERM, SLURM's signal,
            SIGHUP or Ctrl-C on any rank; a second Ctrl-C ends it at once.
        asynchronous: True copies the states to host memory and writes them while training continues.
        frozen: `"store"` saves frozen weights; `"reference"` saves only a reference to them; `"auto"` does so for
            weights that their source has.

    Raises:
        ValueError: If a name or number is not allowed; `setup` checks more before training.
    """

    def __init__(
        self,
        *args: Any,
        run: str | None = None,
        min_delta: float = 0.0,
        allow_drift: Collection[str] = (),
        weights_and_counters_only: bool = False,
        replay: bool | None = None,
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
        self._exchange = Rendezvous(None)
        # Checkpoint that "last" has found on this rank, if there are several ranks.
        self._listed: str | None = None
        self._due = False
        # Lightning's count of epochs at the end of the latest batch.
        self._epoch: dict[str, Any] | None = None
        self._snapshot = Snapshot(free_host_bytes)
        self._parent: Manifest | None = None
        self._resumption = ResumedFit(allow_drift, weights_and_counters_only, replay, self._frozen)
        self._resumed_from: str | None = None

    @property
    def state_key(self) -> str:
        # Triggers are not part of the key: with other triggers it is still the same callback.
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def best_model_path(self) -> str:
        """Best checkpoint of this run; before a fit, the best one in its folder."""
        if self._known_best is None and self.dirpath:
            best = self._best_of(lineage_of(find_checkpoints(Path(self.dirpath), self.run)))
            return "" if best is None else str(best.path)
        return self._known_best or ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._known_best = path or None

    def state_dict(self) -> dict[str, Any]:
        """Return only what identifies the callback: everything else is in the manifests."""
        return {"monitor": self.monitor, "mode": self.mode, "run": self.run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: everything is in the manifests."""

    # --- before and after training ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that checkpoints can be written and read.

        Raises:
            ValueError: If they cannot, or another process is writing this run.
            OSError: If the disk has not even room for the weights.
        """
        super().setup(trainer, pl_module, stage)
        self._exchange = self._scores.exchange = Rendezvous.open(self.state_key)
        checkpoints = install_io(trainer, self.run, self._exchange)
        rank, exchange = trainer.global_rank, self._exchange
        checkpoints.choose = lambda path: choose(exchange, rank, path, self._listed, self.run)
        checkpoints.accept = lambda content, name: self._resumption.accept(trainer, content, name)
        if stage == "fit":
            self._resumption.begin(trainer, self._exchange)
        if stage == "fit" and not is_fast_dev_run(trainer):
            prepare_folder(trainer, self._frozen.stored_bytes(pl_module), self._root, self._exchange)
            if self.save_on_preemption:
                self._preemption.shield_workers(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the checkpoint that the run continues from, and compare its terms with this run.

        Raises:
            ValueError: If the ranks have loaded different checkpoints, or the terms differ.
        """
        checkpoints = installed_io(trainer)
        # Without `ckpt_path`, a second fit continues where the first one has ended.
        parent = checkpoints.parent if trainer.ckpt_path else self._exchange.broadcast(self._parent, "Resuming")
        name = None if parent is None else f"step {parent.step}, identity {parent.identity}"
        refuse_unequal(
            self._exchange.gather(name, "Resuming"),
            f"The ranks have loaded different checkpoints from {trainer.ckpt_path}",
        )
        parent = checkpoints.parent = parent if parent is not None and parent.run == self.run else None
        self._resumed_from = None if parent is None else parent.identity
        line = [] if parent is None else lineage_of(find_checkpoints(self._root, self.run), parent)
        self._remember(self._exchange.broadcast(line, "Resuming"))
        self._scores.begin(known=bool(self.best_k_models))
        self._resumption.check(trainer, pl_module)
        self._last_global_step_saved = 0 if parent is None else parent.step
        self._due, self._epoch = False, None

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        root = Path(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        if trainer.world_size > 1:  # The ranks are not connected yet; `choose` verifies the checkpoint.
            listed = newest_listed(root, self.run)
            self._listed = None if listed is None else str(listed)
            return super()._find_last_checkpoints(trainer) if listed is None else {str(listed)}
        newest = newest_good(root, self.run, usable)
        if newest.chosen is None:
            return super()._find_last_checkpoints(trainer)
        if newest.skipped:
            rank_zero_warn(newest.message())
        return {str(newest.chosen.path)}

    # --- what goes on in a resumed run --------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of this rank; `_write` adds those of the other ranks."""
        self._resumption.save(trainer, checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove the hooks for loading weights: the weights are loaded."""
        self._resumption.loaded()

    # --- when to save -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the time between saves, and restore the random states.

        Raises:
            ValueError: If the checkpoint has invalid random states.
        """
        self._last_time_checked = time.monotonic()
        self._resumption.restore(trainer)
        if self._saves(trainer):
            self._frozen.prepare(trainer)
        self._listen(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that random numbers drawn from here on belong to the epoch."""
        self._resumption.begin_epoch()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save at the end of a step if steps or time require it, or after the validation that follows this step."""
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
            found = (score, score is not None or self.monitor is None) if fresh else self._scores.now(trainer)
            self._save_now(trainer, *found)
            self._leave(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a new best checkpoint, and any save that was postponed until after this validation.

        Raises:
            ValueError: If the metric does not exist.
        """
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or is_fast_dev_run(trainer):
            return
        beside = is_from_evaluator(self.monitor, trainer)
        better = not beside and self._is_better(trainer)
        score, fresh = self._scores.now(trainer)
        epoch = not self._save_on_train_epoch_end and self._epoch_is_due(trainer)
        stepped = not accumulates(trainer)
        ends = stepped and self._agree(trainer)
        due = (self._due or epoch or ends) and stepped
        if due:
            self._due = False
        if better or due:
            self._save_now(trainer, score, fresh, again=better)
        if due:
            self._leave(trainer)

    def on_evaluated(self, trainer: Trainer, names: Collection[str]) -> None:
        """Save a new best checkpoint if an `Evaluator` measures the metric."""
        if self.monitor in names and not is_fast_dev_run(trainer) and self._is_better(trainer):
            self._save_now(trainer, *self._scores.now(trainer), again=True)

    def _is_better(self, trainer: Trainer) -> bool:
        best = None if self.best_model_score is None else float(self.best_model_score)
        under_way = None if self._pending is None else self._pending.score
        if self.ranking.is_better(under_way, best):
            best = under_way
        return self._scores.note(trainer, best) and self.save_top_k != 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if epochs require it and no validation has done so."""
        if is_fast_dev_run(trainer) or not self._epoch_is_due(trainer):
            return
        if not validates(trainer) and not is_from_evaluator(self.monitor, trainer):
            score = self._scores.read(trainer, trainer.callback_metrics)
            self._save_now(trainer, score, fresh=score is not None or self.monitor is None)
        elif self._save_on_train_epoch_end or not validates(trainer):
            self._save_now(trainer, *self._scores.now(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save at the end of a step if `save_on_exception` is set and all ranks end at the same step."""
        try:
            if self._should_save_on_exception(trainer):
                where = trainer.global_step, accumulates(trainer)
                steps = self._exchange.gather(where, f"Ending at step {where[0]}", patience=BOUND / 4)
                if set(steps) == {(where[0], False)}:
                    self._save_now(trainer, None, fresh=False)
        except (OSError, RuntimeError, ValueError) as error:  # The user must see the exception that ends the run.
            rank_zero_warn(f"No checkpoint could be saved on {type(exception).__name__}: {error}")
        finally:
            self._close(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if `save_last` is set."""
        if self.save_last:
            self._save_now(trainer, *self._scores.now(trainer))
        self._settle(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the user if a finished run was resumed and nothing was left to train."""
        if trainer.ckpt_path and self._epoch is None and not is_fast_dev_run(trainer):
            rank_zero_info(
                f"{trainer.ckpt_path} is the end of its run, at step {trainer.global_step}: nothing was left to train. "
                "To continue, raise max_steps or max_epochs."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the lock of the run, and restore the signal handlers."""
        self._close(trainer)
        self._preemption.restore()

    def _close(self, trainer: Trainer) -> None:
        self._exchange.close()
        self._preemption.close()
        self._agreement.close()
        if isinstance(trainer.strategy.checkpoint_io, ProTrainCheckpointIO):
            trainer.strategy.checkpoint_io.teardown()
        self._pending = None
        self._snapshot.release()

    # --- saving -------------------------------------------------------------------------------------------------------

    def _save_now(self, trainer: Trainer, score: float | None, fresh: bool, again: bool = False) -> None:
        if not self._saves(trainer):
            return
        if self._last_global_step_saved == trainer.global_step and not again:
            return
        self._settle(trainer)
        candidates = self._monitor_candidates(trainer)
        if (epoch := self._epoch_of_batch(trainer)) is not None:
            candidates["epoch"] = torch.tensor(epoch["current"]["completed"])
        path = self._exchange.broadcast(self._path(candidates, fresh), f"Saving step {trainer.global_step}")
        record = {**self.ranking.record(score), "callback": self.state_key}
        if accumulates(trainer):
            record[ACCUMULATING] = True
        behind = self.asynchronous and not self._preemption.is_agreed
        self._write(trainer, path, record, behind)
        self._last_global_step_saved = trainer.global_step
        job = (
            installed_io(trainer).writer.submit(lambda: self._prune(trainer))
            if behind and trainer.is_global_zero
            else None
        )
        self._pending = PendingSave(path, trainer.global_step, score, job)
        if not behind:
            self._settle(trainer)

    def _write(self, trainer: Trainer, path: str, record: dict[str, Any], behind: bool) -> None:
        """Save like `Trainer.save_checkpoint`, but fail on all ranks if it fails on one."""
        doing = f"Saving {path}"
        with self._exchange.together(doing):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
            if (epoch := self._epoch_of_batch(trainer)) is not None and not trainer.is_last_batch:
                # Lightning counts an epoch that `max_steps` has ended as complete, and would skip the rest of it.
                checkpoint["epoch"] = epoch["current"]["completed"]
                checkpoint["loops"]["fit_loop"]["epoch_progress"] = epoch
            self._frozen.take_out(trainer, checkpoint, record)
        self._resumption.gather(checkpoint, doing)
        with self._exchange.together(doing), installed_io(trainer).copying(self._snapshot if behind else None):
            trainer.strategy.save_checkpoint(checkpoint, path, storage_options=record)

    def _epoch_of_batch(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return the count of epochs after the latest batch; None before the first batch of this epoch has ended."""
        epoch = self._epoch
        same = epoch is not None and epoch["current"]["ready"] == trainer.fit_loop.epoch_progress.current.ready
        return epoch if same else None

    def _settle(self, trainer: Trainer) -> None:
        """Finish the save that is under way, if there is one; every rank calls it at the same point."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        kept: list[FoundCheckpoint] = []
        doing = f"Saving {pending.path}"
        with self._exchange.together(doing):
            if trainer.is_global_zero:
                kept = self._prune(trainer) if pending.job is None else installed_io(trainer).writer.settle(pending.job)
        self._parent = installed_io(trainer).parent
        self._last_checkpoint_saved = pending.path
        if pending.score is not None:
            self.current_score = torch.tensor(pending.score, dtype=torch.float64)
        if self.verbose:
            score = "" if pending.score is None else f", score {pending.score}"
            rank_zero_info(f"Step {pending.step}: saved {pending.path}{score}")
        self._remember(self._exchange.broadcast(kept, doing))
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _prune(self, trainer: Trainer) -> list[FoundCheckpoint]:
        """Remove surplus checkpoints and return the remaining ones; may run on another thread."""
        checkpoints = installed_io(trainer)
        assert checkpoints.parent is not None
        protected = [] if self._resumed_from is None else [self._resumed_from]
        return prune(
            self._root,
            checkpoints.parent,
            self.state_key,
            self.ranking,
            self.save_top_k,
            protected,
            checkpoints.remove_now,
        )

    def _remember(self, line: list[FoundCheckpoint]) -> None:
        best = self._best_of(line)
        scores = {str(each.path): self.ranking.score_of(each.manifest) for each in line}
        self.best_k_models = {path: torch.tensor(score) for path, score in scores.items() if score is not None}
        self._known_best = "" if best is None else str(best.path)
        score = None if best is None else self.ranking.score_of(best.manifest)
        self.best_model_score = None if score is None else torch.tensor(score, dtype=torch.float64)
        self.last_model_path = str(line[0].path) if line else ""

    def _best_of(self, line: list[FoundCheckpoint]) -> FoundCheckpoint | None:
        if self.monitor is None:
            return line[0] if line else None
        return self.ranking.best(line)

    def _path(self, candidates: dict[str, Tensor], fresh: bool) -> str:
        """Return the path to save to; without fresh metrics its name has only the epoch and the step."""
        filename = self.filename
        fields = set(re.findall(r"\{([^:}]+)", filename or ""))
        if not fresh and fields - {"epoch", "step"}:
            filename = "{epoch}-{step}"
        format_name: Callable[..., str] = self._format_checkpoint_name
        stem = format_name(filename, candidates, self._prefix, self.auto_insert_metric_name).replace(os.sep, "_")
        path = self._root / f"{stem}{self.FILE_EXTENSION}"
        return str(
            free_path(path, self.CHECKPOINT_JOIN_CHAR, self.STARTING_VERSION) if self._enable_version_counter else path
        )

    @property
    def _root(self) -> Path:
        assert self.dirpath is not None
        return Path(self.dirpath)
