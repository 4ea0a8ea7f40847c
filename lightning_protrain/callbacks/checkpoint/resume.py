"""Resumes a fit: chooses a checkpoint, checks its contract, and restores random states and the position in the data."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.hooks import RemovableHandle

from lightning_protrain.callbacks.checkpoint.frozen import FrozenWeights, accept_quantised, drop_missing
from lightning_protrain.callbacks.checkpoint.loaders import ResumableLoader, ResumableSource
from lightning_protrain.callbacks.checkpoint.run_signature import (
    data_signature,
    dtype_signature,
    model_signature,
    optimizer_signature,
    trainer_signature,
)
from lightning_protrain.checkpoint.consolidation import verify_rank
from lightning_protrain.checkpoint.contract import CONTRACT, allowing, check_drift, compare, describe, refusal
from lightning_protrain.checkpoint.discover import (
    FoundCheckpoint,
    Newest,
    find_checkpoints,
    newest_good,
)
from lightning_protrain.checkpoint.manifest import MANIFEST, RANK_STATES
from lightning_protrain.checkpoint.rank_state import (
    DATA,
    OTHERS,
    RANDOM,
    capture,
    rescale,
    restore,
    state_of_rank,
    without_duplicates,
)
from lightning_protrain.checkpoint.references import References
from lightning_protrain.checkpoint.verification import Fault, verify_files
from lightning_protrain.connections import CONVERTERS
from lightning_protrain.rank_store import RankStore

# Key in the record of a checkpoint that was saved between two optimizer steps, during gradient accumulation.
ACCUMULATING = "accumulating"


def remove_all(surplus: Sequence[FoundCheckpoint], remove: Callable[[Path], None]) -> None:
    """Remove checkpoints; warn of those that cannot be removed.

    Args:
        surplus: The checkpoints.
        remove: Function that removes a checkpoint.
    """
    for checkpoint in surplus:
        try:
            remove(checkpoint.path)
        except OSError as error:
            warnings.warn(
                f"The old checkpoint {checkpoint.path} could not be removed: {error}. The next save tries again.",
                stacklevel=2,
            )


def usable(checkpoint: FoundCheckpoint) -> list[Fault]:
    """Return the reasons why a run cannot resume from a checkpoint; empty if it can."""
    if checkpoint.manifest.record.get(ACCUMULATING):
        return [Fault(MANIFEST, "it was saved between two steps, while gradients were being accumulated")]
    return verify_files(checkpoint.path, checkpoint.manifest)


_CALLBACKS = "callbacks"
# Maximum size of a state that is saved for each rank, bytes. Larger states are assumed to be equal on all ranks.
MOST_COMPARED = 1 << 20


def small_states(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, bytes]:
    """Return the serialized states of callbacks and of the data module, by key; they may differ between ranks.

    Args:
        trainer: The Trainer; with a single rank the result is empty.
        checkpoint: Lightning's checkpoint dict of this rank.
    """
    if trainer.world_size == 1:
        return {}
    states = {f"{_CALLBACKS}/{key}": state for key, state in checkpoint.get(_CALLBACKS, {}).items()}
    data = _data_key(trainer)
    if data in checkpoint:
        states[data] = checkpoint[data]
    found = {}
    for key, state in states.items():
        if _tensor_bytes(state) <= MOST_COMPARED:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            found[key] = buffer.getvalue()
    return found


def restore_own_states(trainer: Trainer, content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the states of this rank; put its states of callbacks and data module into the checkpoint dict.

    Args:
        trainer: Trainer that resumes.
        content: Checkpoint dict, changed in place; its progress is converted to the present number of ranks.
        name: Name of the checkpoint, for messages.
    """
    states, now = content.get(RANK_STATES) or [], trainer.world_size
    of_rank = state_of_rank(states, trainer.global_rank, now, trainer.strategy.root_device)
    if of_rank is None:
        return None
    for key, state in of_rank.get(OTHERS, {}).items():
        loaded = torch.load(io.BytesIO(state), weights_only=True)
        if key.startswith(f"{_CALLBACKS}/"):
            content[_CALLBACKS] = {**content[_CALLBACKS], key.removeprefix(f"{_CALLBACKS}/"): loaded}
        else:
            content[key] = loaded
    if len(states) != now:
        loops, exact = rescale(content["loops"]["fit_loop"], len(states), now)
        content["loops"] = {**content["loops"], "fit_loop": loops}
        rank_zero_warn(
            f"{name} was saved with world_size={len(states)} and is resumed with {now}. Weights and "
            "optimizers are unchanged. "
            f"An optimizer step now has {now}/{len(states)} of the samples. New ranks draw their own random numbers."
            + ("" if exact else " The position in the epoch is between two batches: some samples are trained twice.")
        )
    return of_rank


def _data_key(trainer: Trainer) -> str:
    data = getattr(trainer, "datamodule", None)
    return "" if data is None else type(data).__qualname__


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(_tensor_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_tensor_bytes(value) for value in state)
    return 0


def newest_listed(root: Path, run: str) -> Path | None:
    """Return the newest checkpoint, according to its manifest without reading its files; None if there is none."""
    listing = find_checkpoints(root, run)
    newest = newest_usable(listing.found)
    return newest if newest is not None or not listing.broken else listing.broken[0][0]


def newest_usable(line: Sequence[FoundCheckpoint]) -> Path | None:
    """Return the newest checkpoint that was not saved within a step; None if there is none."""
    return next((checkpoint.path for checkpoint in line if not checkpoint.manifest.record.get(ACCUMULATING)), None)


def choose(exchange: RankStore, rank: int, listed: str | None, run: str, path: Path) -> tuple[Path, bool]:
    """Return the checkpoint that all ranks load: `path`, or the newest intact one if `path` equals `listed`.

    Args:
        exchange: Exchange with the other ranks.
        rank: Number of this rank.
        listed: Result of `newest_listed` on this rank; None if it was not called.
        run: Name of the run.
        path: Checkpoint that Lightning would load.

    Returns:
        The checkpoint, and True if the files that this rank reads have been verified.
    """
    if listed != str(path):
        return path, False
    newest = newest_of_all(exchange, rank, path.parent, run)
    if newest.skipped:
        rank_zero_warn(newest.message())
    return (path, False) if newest.chosen is None else (newest.chosen.path, True)


def newest_of_all(exchange: RankStore, rank: int, root: Path, run: str) -> Newest:
    """Return the newest checkpoint that all ranks have verified; all ranks must call it.

    Raises:
        ValueError: If there are checkpoints, but no intact one.
        RuntimeError: If another rank has failed.
    """
    doing = f"Looking for the newest checkpoint in {root}"
    newest: Newest | None = None
    with exchange.together(doing):
        if rank == 0:
            try:
                newest = newest_good(root, run, lambda checkpoint: _verify(exchange, checkpoint, doing))
            finally:
                exchange.broadcast(None, doing)
        else:
            while (path := exchange.broadcast(None, doing)) is not None:
                exchange.gather([f"{fault} (on rank {rank})" for fault in verify_rank(path, rank)], doing)
    of_all: Newest | None = exchange.broadcast(newest, doing)
    assert of_all is not None
    return of_all


def _verify(exchange: RankStore, checkpoint: FoundCheckpoint, doing: str) -> list[Fault]:
    if checkpoint.manifest.record.get(ACCUMULATING):
        return usable(checkpoint)
    exchange.broadcast(checkpoint.path, doing)
    faults_of_rank_0 = [f"{fault} (on rank 0)" for fault in verify_rank(checkpoint.path, 0)]
    every = [fault for faults in exchange.gather(faults_of_rank_0, doing) for fault in faults]
    return [Fault(*fault.split(": ", 1)) for fault in every]


class ResumedFit:
    """Checks a fit against the contract of its checkpoint, and restores random states and the position in the data.

    Args:
        allow_drift: Terms of the contract that may have changed.
        weights_and_counters_only: True resumes only weights, steps and epochs.
        frozen: Treatment of frozen weights; None saves and loads them like other weights.

    Raises:
        ValueError: If a term is unknown.
    """

    def __init__(
        self,
        allow_drift: Collection[str] = (),
        weights_and_counters_only: bool = False,
        frozen: FrozenWeights | None = None,
    ) -> None:
        self._allowed = check_drift(allow_drift)
        self._only = weights_and_counters_only
        self._frozen = FrozenWeights("store") if frozen is None else frozen
        self._clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return ResumedFit, (self._allowed, self._only, self._frozen)  # A copy has no fit under way.

    def _clear(self) -> None:
        self._exchange = RankStore(None)
        self._contract: dict[str, Any] = {}
        self._content: dict[str, Any] | None = None
        self._references = References(None, {}, ())
        self._name = ""
        self._randomness: Any = None
        self._source: ResumableSource | None = None
        self._handles: list[RemovableHandle] = []

    # --- before the fit -----------------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, exchange: RankStore) -> None:
        """Prepare a fit, before it loads a checkpoint or creates loaders.

        Args:
            trainer: Trainer of the fit.
            exchange: Exchange with the other ranks.
        """
        self._clear()
        self._exchange = exchange
        self._source = ResumableSource(trainer.fit_loop._data_source, trainer)
        trainer.fit_loop._data_source = self._source

    def accept(self, trainer: Trainer, content: dict[str, Any], name: str) -> None:
        """Check a checkpoint before Lightning restores any part of it.

        Args:
            trainer: Trainer that is about to fit or to evaluate.
            content: Checkpoint dict; parts that must not be restored are removed from it.
            name: Name of the checkpoint, for messages.

        Raises:
            ValueError: If the checkpoint belongs to another model.
        """
        module = trainer.lightning_module
        assert module is not None
        self._references = References.from_content(content, name) or References(None, {}, ())
        saved, now = self._references.view(content["state_dict"]), module.state_dict()
        whole = module.strict_loading and not is_overridden("on_load_checkpoint", module)
        model = model_signature(saved, None if whole else now)
        differences = compare({"model": model}, {"model": model_signature(now, None if whole else saved)})
        if differences and "model" not in self._allowed:
            raise ValueError(refusal(differences, name))
        fits = trainer.state.fn == TrainerFn.FITTING
        if self._references.weights:
            self._refer(module, name, fits)
        self._handles += accept_quantised(module)
        if not fits:
            return
        if self._only:
            _keep_weights_and_counters(trainer, content)
        # Keep the dict for `check`: Lightning restores optimizers and loops from it later.
        self._content, self._name = content, name
        content[CONTRACT] = {**(content.get(CONTRACT) or {}), "dtype": dtype_signature(saved, now)}
        of_rank = restore_own_states(trainer, content, name)
        if of_rank is not None:
            assert self._source is not None
            self._randomness = of_rank[RANDOM]
            if of_rank[DATA] is not None:
                progress = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
                ready, ends = progress["current"]["ready"], progress["is_last_batch"]
                self._source.saved = {**of_rank[DATA], "now": of_rank[RANDOM], "ready": ready, "ends": ends}

    def _refer(self, module: LightningModule, name: str, fits: bool) -> None:
        same_roles = fits and not self._only and "optimizer" not in self._allowed
        self._frozen.accept(module, self._references, name, same_roles)
        hook = drop_missing(self._references.weights.keys())
        self._handles.append(module.register_load_state_dict_post_hook(hook))

    def loaded(self) -> None:
        """Remove the hooks for loading weights, after the weights have been loaded."""
        while self._handles:
            self._handles.pop().remove()

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the contracts of checkpoint and run, after weights are loaded and before optimizers are restored.

        Raises:
            ValueError: If a term has changed, or the position in the data cannot be restored.
        """
        self.loaded()
        self._contract = {**trainer_signature(trainer), **optimizer_signature(trainer, pl_module)}
        content, self._content = self._content, None
        if content is None:
            return
        # Restore the epoch first, because loaders may depend on it.
        trainer.fit_loop.load_state_dict(content["loops"]["fit_loop"])
        trainer.fit_loop.setup_data()
        with self._exchange.together(f"Comparing {self._name} with this run"):
            if self._only:
                self._start_anew(trainer, content)
                return
            self._refuse_lost_place(trainer)
            saved = self._references.view(content["state_dict"])
            current = {**self.contract(), "dtype": dtype_signature(pl_module.state_dict(), saved)}
            differences = compare(content[CONTRACT], current)
            refused = {term: lines for term, lines in differences.items() if term not in self._allowed}
            if refused:
                raise ValueError(refusal(refused, self._name))
            progress = trainer.fit_loop.epoch_loop.batch_progress
            if self._loader is not None and progress.current.ready and not progress.is_last_batch:
                same = differences.keys().isdisjoint(("data", "batch_size"))
                self._loader.refuse_other_length(self._name, progress.current.ready, same)
            if differences:
                rank_zero_warn(
                    f"{self._name} differs from this run in terms that allow_drift permits:\n{describe(differences)}"
                )
            if "optimizer" in differences:
                self._start_anew(trainer, content)
            for convert in CONVERTERS:  # The strategy "protrain" has done so before.
                convert(content, pl_module, trainer.optimizers)

    def how_to_continue(self, trainer: Trainer) -> str:
        """Return a sentence that says how to train on after the end of a run."""
        limits = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
        done = {"max_steps": trainer.global_step, "max_epochs": trainer.current_epoch}
        reached = [name for name, most in limits.items() if most is not None and -1 < most <= done[name]]
        raised = " and ".join(f"{name} above {limits[name]}" for name in reached) or "max_steps or max_epochs"
        depends = f", and {allowing(['lr_schedule'])}, because its end moves" if trainer.lr_scheduler_configs else ""
        return f"To continue, raise {raised}{depends}."

    def contract(self) -> dict[str, Any]:
        """Return the contract of this fit, as far as it is known."""
        loader = self._loader
        return {**self._contract, **({} if loader is None else data_signature(loader.flattened))}

    @property
    def _loader(self) -> ResumableLoader | None:
        return None if self._source is None else self._source.made

    def _start_anew(self, trainer: Trainer, content: dict[str, Any]) -> None:
        content["optimizer_states"] = [optimizer.state_dict() for optimizer in trainer.optimizers]
        content["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]

    def _refuse_lost_place(self, trainer: Trainer) -> None:
        loader, progress = self._loader, trainer.fit_loop.epoch_loop.batch_progress
        if loader is None or loader.kind != "nowhere" or progress.is_last_batch or not progress.current.ready:
            return
        raise ValueError(
            f"{self._name} was saved after batch {progress.current.ready} of an epoch, but a loader of this run has "
            "neither a length nor a state, or only some loaders have a state, so the position cannot be restored. Give "
            "each loader `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader has them), or each a "
            "`__len__` and no state; or start the data from the beginning with "
            "ProTrainCheckpoint(weights_and_counters_only=True)."
        )

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Add the contract and the states of this rank to a checkpoint."""
        checkpoint[CONTRACT] = self.contract()
        place = None if self._loader is None else self._loader.place()
        states = {RANDOM: capture(trainer.strategy.root_device), DATA: place, OTHERS: small_states(trainer, checkpoint)}
        checkpoint[RANK_STATES] = [states]

    def gather(self, checkpoint: dict[str, Any], doing: str) -> None:
        """Add the states of the other ranks to a checkpoint; all ranks must call it.

        Args:
            checkpoint: Checkpoint dict, after `save`.
            doing: Description of the task, for messages.
        """
        if RANK_STATES in checkpoint:
            states = self._exchange.gather(checkpoint[RANK_STATES][0], doing)
            checkpoint[RANK_STATES] = without_duplicates(states)

    # --- when training starts -----------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Tell the loader that the epoch has begun, so that random states are not restored any more."""
        if self._loader is not None:
            self._loader.epoch_begins = True

    def restore(self, trainer: Trainer) -> None:
        """Restore the random states of the checkpoint, if there is one.

        Raises:
            ValueError: If the checkpoint has invalid random states.
        """
        state, self._randomness = self._randomness, None
        if self._loader is not None:
            state = self._loader.random_after or state
            self._loader.random_state = state
        if state is not None:
            for name in restore(state, trainer.strategy.root_device):
                rank_zero_warn(
                    f"The checkpoint has no random state of {name}: random numbers differ from an uninterrupted run."
                )
        elif trainer.ckpt_path and not self._only:
            rank_zero_warn("The checkpoint has no random states: random numbers differ from an uninterrupted run.")


def _keep_weights_and_counters(trainer: Trainer, content: dict[str, Any]) -> None:
    kind = type(trainer.precision_plugin).__qualname__
    for name in (RANK_STATES, CONTRACT, kind, _data_key(trainer)):
        content.pop(name, None)
    # Lightning requires these keys; `check` fills them with initial states.
    content.update(callbacks={}, optimizer_states=[], lr_schedulers=[])
