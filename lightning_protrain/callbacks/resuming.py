"""What a resumed fit takes up besides weights and optimizers, and what it has to be for that."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.hooks import RemovableHandle

from lightning_protrain.callbacks.exchange import Exchange
from lightning_protrain.callbacks.frozen import FrozenWeights, drop_missing
from lightning_protrain.callbacks.loaders import ResumableLoader, ResumableSource
from lightning_protrain.callbacks.rank_states import small_states, take_own
from lightning_protrain.callbacks.terms import data_terms, dtype_terms, model_terms, optimizer_terms, trainer_terms
from lightning_protrain.checkpoint.contract import check_terms, compare, describe, refusal
from lightning_protrain.checkpoint.rank_state import DATA, OTHERS, RANDOM, capture, restore, without_copies
from lightning_protrain.checkpoint.references import References
from lightning_protrain.checkpoint.serialize import RANK_STATES
from lightning_protrain.companions import accept_companions

CONTRACT = "contract"


class Resumption:
    """Holds a fit to the contract of its checkpoint, and goes on with its random numbers and its data.

    Args:
        allow_drift: Terms of the contract that may have changed.
        weights_and_counters_only: Whether nothing else is taken from a checkpoint.
        replay: As for `ResumableLoader`.
        frozen: Knows the frozen weights of the module; None: it is asked for none.

    Raises:
        ValueError: A term that there is not.
    """

    def __init__(
        self,
        allow_drift: Collection[str] = (),
        weights_and_counters_only: bool = False,
        replay: bool | None = None,
        frozen: FrozenWeights | None = None,
    ) -> None:
        self._allowed = check_terms(allow_drift, "allow_drift")
        self._only = weights_and_counters_only
        self._replay = replay
        self._frozen = FrozenWeights("store") if frozen is None else frozen
        self._clear()

    def _clear(self) -> None:
        self._exchange = Exchange(None)
        self._contract: dict[str, Any] = {}
        self._content: dict[str, Any] | None = None
        self._references = References(None, {}, ())
        self._name = ""
        self._randomness: Any = None
        self._source: ResumableSource | None = None
        self._handles: list[RemovableHandle] = []

    # --- before the fit -----------------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, exchange: Exchange) -> None:
        """A fit is set up; nothing is loaded, no loader is made.

        Args:
            trainer: Whose fit it is.
            exchange: With the other ranks.
        """
        self._clear()
        self._exchange = exchange
        self._source = ResumableSource(trainer.fit_loop._data_source, trainer, self._replay)
        trainer.fit_loop._data_source = self._source

    def accept(self, trainer: Trainer, content: dict[str, Any], name: str) -> None:
        """A checkpoint is read, and nothing of it is in place.

        Args:
            trainer: About to fit, or to evaluate.
            content: Of the checkpoint; what is not to be taken is taken out.
            name: The checkpoint, for messages.

        Raises:
            ValueError: It is one of another model.
        """
        module = trainer.lightning_module
        assert module is not None
        self._references = References.from_content(content, name) or References(None, {}, ())
        saved, now = self._references.view(content["state_dict"]), module.state_dict()
        whole = module.strict_loading and not is_overridden("on_load_checkpoint", module)
        before = {"model": model_terms(saved, None if whole else now)}
        after = {"model": model_terms(now, None if whole else saved)}
        fits = trainer.state.fn == TrainerFn.FITTING
        contract = content.get(CONTRACT) or {}
        if fits and not self._only:
            before, after = {**before, **contract}, {**after, **trainer_terms(trainer)}
        refused, _ = compare(before, after, self._allowed)
        if any(drift.term == "model" for drift in refused):
            raise ValueError(refusal(refused, name))
        if self._references.weights:
            self._refer(module, name, fits)
        self._handles += [accept_companions(each) for each in module.modules() if _is_quantised(each)]
        if not fits:
            return
        if self._only:
            _keep_weights_and_counters(trainer, content)
        # For `check`: Lightning hands the same dict to optimizers and loops.
        self._content, self._name = content, name
        content["contract"] = {**contract, "dtype": dtype_terms(saved, now)}
        own = take_own(trainer, content, name)
        if own is not None:
            assert self._source is not None
            self._randomness = own[RANDOM]
            if own[DATA] is not None:
                progress = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
                ready, ends = progress["current"]["ready"], progress["is_last_batch"]
                self._source.saved = {**own[DATA], "now": own[RANDOM], "ready": ready, "ends": ends}

    def _refer(self, module: LightningModule, name: str, fits: bool) -> None:
        same_roles = fits and not self._only and "optimizer" not in self._allowed
        self._frozen.accept(module, self._references, name, same_roles)
        hook = drop_missing(self._references.weights.keys())
        self._handles.append(module.register_load_state_dict_post_hook(hook))

    def loaded(self) -> None:
        """The weights of the model are in place."""
        while self._handles:
            self._handles.pop().remove()

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is set up, the weights are in place, and nothing else is.

        Raises:
            ValueError: The terms have changed, or the data cannot be found again; the message has all of it.
        """
        self.loaded()
        self._contract = {**trainer_terms(trainer), **optimizer_terms(trainer, pl_module)}
        content, self._content = self._content, None
        if content is None:
            return
        # Loaders may depend on the epoch.
        trainer.fit_loop.load_state_dict(content["loops"]["fit_loop"])
        trainer.fit_loop.setup_data()
        with self._exchange.together(f"Comparing {self._name} with this run"):
            if self._only:
                self._start_anew(trainer, content)
                return
            self._refuse_lost_place(trainer)
            saved = self._references.view(content["state_dict"])
            current = {**self.contract(), "dtype": dtype_terms(pl_module.state_dict(), saved)}
            refused, passed = compare(content[CONTRACT], current, self._allowed)
            if refused:
                raise ValueError(refusal(refused, self._name))
            progress = trainer.fit_loop.epoch_loop.batch_progress
            if self._loader is not None and progress.current.ready and not progress.is_last_batch:
                same = not any(drift.term in ("data", "batch_size") for drift in passed)
                self._loader.refuse_other_length(self._name, progress.current.ready, same)
            if passed:
                rank_zero_warn(f"{self._name} was saved under other terms, which is allowed:\n{describe(passed)}")
            if any(drift.term == "optimizer" for drift in passed):
                self._start_anew(trainer, content)

    def contract(self) -> dict[str, Any]:
        """The terms of this fit, as far as they are known."""
        loader = self._loader
        return {**self._contract, **({} if loader is None else data_terms(loader.flattened))}

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
            f"{self._name} was saved after batch {progress.current.ready} of an epoch, and this data cannot be found "
            "again there: it has neither a length, without which it may be endless, nor a position. Give its loader "
            "`state_dict` and `load_state_dict` (torchdata's StatefulDataLoader has them), or a `__len__`; or begin "
            "the data anew with ProTrainCheckpoint(weights_and_counters_only=True)."
        )

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Adds the contract, and what only this rank has."""
        checkpoint[CONTRACT] = self.contract()
        place = None if self._loader is None else self._loader.place()
        own = {RANDOM: capture(trainer.strategy.root_device), DATA: place, OTHERS: small_states(trainer, checkpoint)}
        checkpoint[RANK_STATES] = [own]

    def gather(self, checkpoint: dict[str, Any], doing: str) -> None:
        """Puts what the other ranks have beside it; all ranks call it.

        Args:
            checkpoint: What `save` was given.
            doing: For messages.
        """
        if RANK_STATES in checkpoint:
            states = self._exchange.gather(checkpoint[RANK_STATES][0], doing)
            checkpoint[RANK_STATES] = without_copies(states)

    # --- when training starts -----------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """The hooks at the begin of an epoch are called."""
        if self._loader is not None:
            self._loader.epoch_begins = True

    def restore(self, trainer: Trainer) -> None:
        """Goes on with the random numbers of the checkpoint, if there was one: what was drawn until now does not count.

        Raises:
            ValueError: The checkpoint has something else in their place.
        """
        state, self._randomness = self._randomness, None
        if self._loader is not None:
            state = self._loader.random_after or state
            self._loader.random_state = state
        if state is not None:
            for name in restore(state, trainer.strategy.root_device):
                rank_zero_warn(f"The checkpoint was not saved on {name}, whose random numbers are other ones.")
        elif trainer.ckpt_path and not self._only:
            rank_zero_warn("The checkpoint has no states of random numbers: from here on other ones are drawn.")


def _is_quantised(module: Any) -> bool:
    weight = vars(module)["_parameters"].get("weight")
    return weight is not None and "quant_state" in vars(weight)


def _keep_weights_and_counters(trainer: Trainer, content: dict[str, Any]) -> None:
    kind = type(trainer.precision_plugin).__qualname__
    for name in (RANK_STATES, CONTRACT, kind):
        content.pop(name, None)
    # Lightning asks for these; `check` has fresh states for them.
    content.update(callbacks={}, optimizer_states=[], lr_schedulers=[])
    data = getattr(trainer, "datamodule", None)
    if data is not None:
        content.pop(type(data).__qualname__, None)
