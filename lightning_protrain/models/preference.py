"""PreferenceModule: training on preferences, with the losses DPO, IPO, ORPO, SimPO and KTO."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_protrain.data.batches.loader import IGNORE_INDEX, Batch
from lightning_protrain.data.batches.token_cache import CACHE_DIR
from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.models.loading import StoredModel
from lightning_protrain.models.loss import token_logps
from lightning_protrain.models.metrics import NonFinite
from lightning_protrain.models.module import CausalLMModule, NumberCheck, check_numbers
from lightning_protrain.models.preference_loss import KTOLoss, LossName, Objective, PairScores, RowMean
from lightning_protrain.models.reference import ReferenceTable, digests_of, gathered, key_of, refusal, row_digests
from lightning_protrain.progress import bar
from lightning_protrain.strategy.profile_step import SyntheticData

NUMBERS: tuple[NumberCheck, ...] = (
    ("beta", lambda beta: beta > 0, "be above 0"),
    ("label_smoothing", lambda share: 0 <= share < 0.5, "be at least 0 and below 0.5"),
    ("simpo_gamma", lambda gamma: gamma >= 0, "not be negative"),
    ("desirable_weight", lambda weight: weight >= 0, "not be negative"),
    ("undesirable_weight", lambda weight: weight >= 0, "not be negative"),
)
# Splits whose rows need a reference, by function of the Trainer.
_SPLITS = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}
# Key of the reference in checkpoints.
REFERENCE = "preference_reference"


class PreferenceModule(CausalLMModule):
    """Training of a causal language model on preferences: pairs of completions, or completions with a label.

    A batch has `input_ids`, `labels` and `attention_mask`, int64 [2n, length], padded on the right. Labels are not
    shifted, and -100 outside of the completion. Further entries:

    - `pair_ids`, int64 [n]: number of each pair in its split; -1 marks a filler, which counts as nothing.
    - Pairs (all losses but KTO): row 2i is the chosen completion, row 2i + 1 the rejected one.
    - Examples with a label (KTO): row 2i is the completion, row 2i + 1 the same prompt with the completion of another
      example, for the KL term; `desirable`, int64 [n], is 1 or 0.
    - `trained_tokens`, int64 scalar, added by the loader: number of pairs or examples of this rank's accumulation
      window, without fillers. The loss of an optimizer step is the mean over those of all ranks.

    DPO, IPO and KTO compare the model with a reference, which takes no memory, see [Note: Reference] in reference.py.
    With `lora` it is the model without adapters, which runs in each step. Otherwise it is the model as it is when a fit
    begins: its log-probabilities are computed before the first step, and the data module must have two methods.
    `pair_count(split)` returns the number of pairs or examples of the split "train", "validation" or "test";
    `pair_batches(split)` this rank's batches of all of them, in any order, as many batches on every rank. Rows 2i + 1
    of KTO must then be the same in every epoch.

    Args:
        model: As in `CausalLMModule`.
        loss: `dpo`, `ipo`, `orpo`, `simpo` or `kto`.
        beta: Strength of the reference in DPO, IPO (tau in the paper) and KTO, weight of the odds ratio in ORPO (lambda
            in the paper), scale of the margin in SimPO.
        label_smoothing: Assumed fraction of swapped pairs in DPO and SimPO.
        simpo_gamma: Margin that SimPO demands between chosen and rejected rewards.
        desirable_weight: Weight of desirable examples in KTO.
        undesirable_weight: Weight of undesirable examples in KTO.
        precompute_ref_log_probs: True computes the reference before training with `lora`, too. It is faster if there
            are several epochs, or several runs with the same data.
        disable_dropout: True trains without dropout, also without that of `lora`.
        kwargs: Further arguments of `CausalLMModule`, but `metrics`; `learning_rate` is 1e-6 by default.

    Raises:
        ValueError: As in `CausalLMModule`; also if the loss is unknown, or an argument that it does not read is given.
    """

    usual_learning_rate = 1e-6

    def __init__(
        self,
        model: str | None = None,
        *,
        loss: LossName = "dpo",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        simpo_gamma: float = 0.5,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        precompute_ref_log_probs: bool = False,
        disable_dropout: bool = True,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("metrics") is not None:
            raise ValueError("PreferenceModule takes no `metrics`: they read tokens, and it scores rows. Leave it out.")
        super().__init__(model, **kwargs)
        check_numbers(self.hparams, NUMBERS)
        self._reference: ReferenceTable | None = None
        self._reference_is_checked = False
        self._reference_is_of_fit = False  # Weights of that time may be gone.

    @cached_property
    def objective(self) -> Objective:
        """The loss with its settings."""
        return Objective.of(self.hparams)

    def _standard_metrics(self, nonfinite: NonFinite) -> dict[str, Any]:
        names = ["rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected"]
        if self.objective.has_pairs:
            names = ["loss", "rewards_accuracy", "rewards_margin", *names]
        metrics: dict[str, Any] = {} if self.objective.has_pairs else {"loss": KTOLoss(self.objective, nonfinite)}
        return metrics | {name: RowMean(nonfinite) for name in names}

    def _build(self, load: Any = StoredModel.load) -> Any:
        model = super()._build(load)
        if self.hparams["disable_dropout"]:
            for module in model.modules():
                # Some models call the function, with a number of their own: OPT's `dropout` and `layerdrop`.
                names = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
                for name in names + ["p"] * isinstance(module, nn.Dropout):
                    setattr(module, name, 0.0)
        return model

    # Steps

    def _training_loss(self, batch: Batch) -> tuple[Tensor, int | Tensor, Tensor | None]:
        """Return the summed loss of the pairs or examples that are no fillers, their number, and the router loss."""
        live = self._live(batch)
        count = live.sum()
        if self.objective.has_pairs:
            scores, router_loss = self._score_pairs(batch)
            losses = scores.losses
            margins = scores.chosen_rewards - scores.rejected_rewards
            shares = {"rewards_accuracy": (margins > 0).to(margins.dtype), "rewards_margin": margins}
            for name, values in shares.items():
                mean = torch.where(live, values, 0.0).sum() / count.clamp(min=1)
                self.log(f"train_{name}", mean, batch_size=len(live))  # of this rank, without a collective
        else:
            _, ratios, mismatched, router_loss = self._score_examples(batch)
            sums = torch.stack([torch.where(live, mismatched, 0.0).sum(), count.to(mismatched.dtype)])
            if self._trainer is not None:
                sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
            losses = self.objective.of_examples(ratios, sums[0] / sums[1].clamp(min=1), batch["desirable"] == 1)
        return torch.where(live, losses, 0.0).sum(), count, router_loss

    def _evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        live = self._live(batch)
        if self.objective.has_pairs:
            scores, _ = self._score_pairs(batch)
            margins = scores.chosen_rewards - scores.rejected_rewards
            values = {
                "loss": scores.losses,
                "rewards_accuracy": torch.where(margins.isnan(), margins, (margins > 0).to(margins.dtype)),
                "rewards_margin": margins,
                "rewards_chosen": scores.chosen_rewards,
                "rewards_rejected": scores.rejected_rewards,
                "logps_chosen": scores.chosen_logps,
                "logps_rejected": scores.rejected_logps,
            }
            rows = dict.fromkeys(values, live)
        else:
            logps, ratios, mismatched, _ = self._score_examples(batch)
            desirable = batch["desirable"] == 1
            metrics["loss"].update(batch["pair_ids"][live], ratios[live], mismatched[live], desirable[live])
            values, rows = {}, {}
            for kind, of_kind in (("chosen", live & desirable), ("rejected", live & ~desirable)):
                values |= {f"rewards_{kind}": self.objective.beta * ratios, f"logps_{kind}": logps}
                rows |= {f"rewards_{kind}": of_kind, f"logps_{kind}": of_kind}
        for name, value in values.items():
            metrics[name].update(torch.where(rows[name], value.double(), 0.0).sum(), rows[name].sum())

    def predict_step(self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score each row, like `CausalLMModule.predict_step`."""
        tokens, labels, _ = self._token_logps(batch)
        return {"loss_sum": -tokens.sum(1), "num_tokens": _num_tokens(labels)}

    # Scores of rows

    def _score_pairs(self, batch: Batch) -> tuple[PairScores, Tensor | None]:
        """Return the scores of all pairs, fillers included, and the router loss."""
        reference = self._reference_logps(batch)
        labels, nll = batch["labels"], None
        if self.objective.loss == "orpo":  # The likelihood is that of the whole chosen row, as in TRL.
            is_scored = batch["attention_mask"].bool()
            is_scored[1::2] = labels[1::2] != IGNORE_INDEX
            batch = {**batch, "labels": torch.where(is_scored, batch["input_ids"], IGNORE_INDEX)}
        tokens, scored, router_loss = self._token_logps(batch)
        if self.objective.loss == "orpo":
            nll = -tokens[0::2].sum(1) / _num_tokens(scored)[0::2].clamp(min=1)
        is_completion = F.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1))
        # A filler has no tokens. Without a value in place of its 0, the gradient of ORPO would be NaN.
        live = (batch["pair_ids"] >= 0).repeat_interleave(2)
        logps = torch.where(live, torch.where(is_completion, tokens, 0.0).sum(1), -1.0)
        return self.objective.of_pairs(logps, _num_tokens(labels), reference, nll), router_loss

    def _score_examples(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return log-probabilities of examples, their differences from the reference and those of mismatched ones, [n].

        The last value is the router loss. Mismatched completions have no gradients.
        """
        reference = self._reference_logps(batch)
        assert reference is not None
        with torch.no_grad():
            mismatched = self._token_logps(_rows(batch, 1))[0].sum(1) - reference[1::2]
        # Autocast would reuse weights that it has cast without gradients.
        torch.clear_autocast_cache()
        tokens, _, router_loss = self._token_logps(_rows(batch, 0))
        logps = tokens.sum(1)
        return logps.detach(), logps - reference[0::2], mismatched, router_loss

    def _token_logps(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probabilities as in `token_logps`, the labels of the batch, and the router loss."""
        scores, head, router_loss = self._scores(batch)
        labels = batch["labels"]
        chunk_tokens = self.hparams["loss_chunk_tokens"] or max(labels.numel(), 1)
        return token_logps(scores, head, labels, chunk_tokens), labels, router_loss

    def _live(self, batch: Batch) -> Tensor:
        """Return which pairs or examples are no fillers, bool [n].

        Raises:
            ValueError: If the batch has rows of another kind than the loss reads.
        """
        if "pair_ids" not in batch or ("desirable" in batch) is self.objective.has_pairs:
            raise ValueError(self._refusal_of_rows("a batch"))
        if "loss_weights" in batch:
            raise ValueError(f"loss={self.objective.loss!r} does not read weights of messages. Remove them.")
        return batch["pair_ids"] >= 0

    def _refusal_of_rows(self, where: str) -> str:
        rows = "rows with `chosen` and `rejected`" if self.objective.has_pairs else "rows with `label`, true or false"
        other = 'loss="kto"' if self.objective.has_pairs else "another loss"
        return f"loss={self.objective.loss!r} trains on {rows}, but {where} has others. Give such rows, or {other}."

    def check_objective(self, objective: str | None) -> None:
        """Raise ValueError if the data is for another loss, as in `CausalLMModule`."""
        if objective not in (None, "pairs" if self.objective.has_pairs else "unpaired"):
            raise ValueError(self._refusal_of_rows("the data"))

    def check_evaluated(self, objective: str | None) -> None:
        """Raise ValueError if an `Evaluator` cannot score its data, as in `CausalLMModule`."""
        self.check_objective(objective)
        if self._has_table:
            raise ValueError(
                f"loss={self.objective.loss!r} has a reference for training and validation rows only, so an Evaluator "
                'cannot score others. Give them as a split "validation", or train with `lora` (without '
                "`precompute_ref_log_probs`), `orpo` or `simpo`."
            )

    # The reference

    @property
    def _switches_adapters(self) -> bool:
        """True if the model without adapters is the reference, and runs in each step."""
        return self._base_is_reference and not self.hparams["precompute_ref_log_probs"]

    @property
    def _base_is_reference(self) -> bool:
        """True if switching the adapters off gives the model that training begins from."""
        lora = self.hparams["lora"]
        # These change frozen weights: at the start by a decomposition, or in training.
        changes = ("pissa", "olora")
        return (
            lora is not None
            and not str(lora.get("init_lora_weights", True)).startswith(changes)
            and lora.get("bias", "none") == "none"
        )

    @property
    def _has_table(self) -> bool:
        return self.objective.has_reference and not self._switches_adapters

    def _reference_logps(self, batch: Batch) -> Tensor | None:
        """Return the log-probability of each row's completion under the reference, [2n]; None if the loss has none."""
        if not self.objective.has_reference:
            return None
        if self._switches_adapters:
            with self._as_reference(), torch.no_grad():
                logps = self._token_logps(batch)[0].sum(1)
            torch.clear_autocast_cache()
            return logps
        if "reference_logps" not in batch:
            raise ValueError(
                "The batch has no `reference_logps`: the reference is known only in steps of a Trainer. Let a Trainer "
                "call the step."
            )
        return batch["reference_logps"]

    @property
    def _is_planned_without_data(self) -> bool:
        source = None if self._trainer is None else self.trainer.fit_loop._data_source.instance
        return isinstance(getattr(source, "dataset", None), SyntheticData)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Let the model be the reference: in eval mode, and without adapters if they can be switched off.

        PEFT's `disable_adapter` would also freeze the adapters, which changes what a step and its plan rely on.
        """
        modules = list(self._built().modules())
        training = [module for module in modules if module.training]
        adapted = [module for module in modules if self._base_is_reference and hasattr(module, "_disable_adapters")]
        try:
            for module in training:
                module.training = False
            for module in adapted:
                module._disable_adapters = True
            yield
        finally:
            for module in training:
                module.training = True
            for module in adapted:
                module._disable_adapters = False

    def setup(self, stage: str) -> None:
        """Check the model as in `CausalLMModule`, and that the reference can be computed.

        Raises:
            ValueError: As in `CausalLMModule`, or if the data module cannot list the pairs of a split.
        """
        super().setup(stage)
        # Lightning says that the module's hook is called, and not the hook that the data module inherits.
        warnings.filterwarnings("ignore", "You have overridden `on_before_batch_transfer` in `LightningModule`")
        self._reference_is_checked = False
        datamodule = getattr(self.trainer, "datamodule", None)
        is_new = stage == "fit" and self.trainer.global_step == 0  # A resumed checkpoint gives its reference later.
        if is_new or not self._reference_is_of_fit:
            self._reference = None
        lists = hasattr(datamodule, "pair_batches") or stage == "predict" or self._is_planned_without_data
        if self._has_table and not lists:
            name = "there is no data module" if datamodule is None else f"{type(datamodule).__name__} cannot list them"
            raise ValueError(
                f"loss={self.objective.loss!r} computes the reference of all rows before training, but {name}. Give a "
                "data module with `pair_count` and `pair_batches`, such as ChatDataModule, or train with `lora`."
            )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Add `reference_logps`, float32 [2n], if the reference was computed before training.

        A synthetic batch, with which a run without data is planned, becomes pairs.
        """
        if self._is_planned_without_data and "pair_ids" not in batch:  # A synthetic batch has a sample for each pair.
            batch = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}
            batch = {name: value.repeat_interleave(2, 0) for name, value in batch.items()}
            batch["pair_ids"] = torch.arange(len(batch["labels"]) // 2)
            batch |= {} if self.objective.has_pairs else {"desirable": torch.ones_like(batch["pair_ids"])}
        is_scored = self._has_table and not (self._trainer is not None and self.trainer.predicting)
        if not is_scored or not isinstance(batch, Mapping) or "pair_ids" not in batch:
            return batch
        if self._reference is None:  # The step is profiled before the weights can run; nothing trains on this value.
            logps = torch.full((len(batch["labels"]),), math.nan)
        else:
            logps = self._reference.look_up(batch)
        return {**batch, "reference_logps": logps}

    # The sanity check is before `on_train_start`, and a strategy may load a checkpoint after `on_fit_start`.

    def on_train_start(self) -> None:
        """Compute the reference unless that has happened."""
        self._prepare_reference()

    on_validation_start = on_test_start = on_train_start

    def _prepare_reference(self) -> None:
        """Make sure that the table has all rows of the run: it is that of the checkpoint, cached, or computed now.

        Raises:
            ValueError: If the run is resumed, and rows are missing in the checkpoint.
        """
        if not self._has_table or self._reference_is_checked:
            return
        datamodule: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        assert self.trainer.state.fn is not None
        splits = [split for split in _SPLITS[self.trainer.state.fn.value] if datamodule.pair_count(split)]
        device = self.trainer.strategy.root_device
        with failing_together("Preparing the reference"), isolate_rng():
            digests = gathered(digests_of(_listing(datamodule, splits)), device)
            known = self._reference or (ReferenceTable.empty() if self.trainer.global_step else None)
            if known is not None and (missing := known.missing(digests)):
                raise ValueError(refusal(missing, len(digests), "the data"))
            self._reference = known or self._load_or_compute(datamodule, splits, digests)
            self._reference_is_of_fit = known is not None or self.trainer.state.fn == "fit"
        self._reference_is_checked = True

    def _load_or_compute(self, datamodule: Any, splits: Sequence[str], digests: Tensor) -> ReferenceTable:
        trainer = self.trainer
        settings = {"precision": trainer.precision, "base": self._base_is_reference}
        weights = self.state_dict()
        if self._base_is_reference:  # Adapters begin at random, and are switched off.
            for name, weight in self.named_parameters(remove_duplicate=False):
                if weight.requires_grad:
                    weights.pop(name, None)
        key = trainer.strategy.broadcast(key_of(weights, digests, settings))
        folder = getattr(datamodule, "cache_dir", CACHE_DIR) / "reference" / key
        table = trainer.strategy.broadcast(ReferenceTable.load(folder) if trainer.is_global_zero else None)
        if table is None:
            table = self._compute_reference(datamodule, splits)
            if trainer.is_global_zero:
                table.save(folder)
        return table

    def _compute_reference(self, datamodule: Any, splits: Sequence[str]) -> ReferenceTable:
        strategy, device = self.trainer.strategy, self.trainer.strategy.root_device
        digests, logps = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0)]
        with self._as_reference(), torch.no_grad():
            for split in splits:
                for batch in bar(datamodule.pair_batches(split), f"Reference of {split}", unit="batch"):
                    is_live = (batch["pair_ids"] >= 0).repeat_interleave(2)
                    there = strategy.batch_to_device(self.trainer.precision_plugin.convert_input(batch), device)
                    loss_sum = strategy.predict_step(there, 0)["loss_sum"]
                    digests.append(row_digests(batch)[is_live])
                    logps.append(-loss_sum.float().cpu()[is_live])
        return ReferenceTable.of(gathered(torch.cat(digests), device), gathered(torch.cat(logps), device))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the reference that was computed before training."""
        if self._reference is not None:
            checkpoint[REFERENCE] = self._reference.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the reference of the run that is resumed."""
        if REFERENCE in checkpoint:
            self._reference = ReferenceTable(**checkpoint[REFERENCE])
            self._reference_is_of_fit = True


def _listing(datamodule: Any, splits: Sequence[str]) -> Iterator[Batch]:
    for split in splits:
        yield from bar(datamodule.pair_batches(split), f"Listing pairs of {split}", unit="batch")


def _num_tokens(labels: Tensor) -> Tensor:
    return (labels[:, 1:] != IGNORE_INDEX).sum(1)


def _rows(batch: Batch, first: int) -> Batch:
    """Return every second row of the entries that have a value for each row."""
    rows = len(batch["labels"])
    return {name: value[first::2] if value.dim() and len(value) == rows else value for name, value in batch.items()}
