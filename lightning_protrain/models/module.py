"""CausalLMModule: training of any causal language model of transformers, with or without images."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric, MetricCollection
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from lightning_protrain.checkpoint.consolidation import load_folder
from lightning_protrain.checkpoint.discover import pointed, resolve
from lightning_protrain.checkpoint.references import fill
from lightning_protrain.config import check_kinds, is_valid, plural
from lightning_protrain.data.batches.loader import IGNORE_INDEX, WEIGHT_UNITS, Batch, TokenWindow, is_packed
from lightning_protrain.distributed.failures import SharedFailure
from lightning_protrain.models.bnb import check_quantization, quantize_without_memory, require_installed
from lightning_protrain.models.loading import (
    StoredModel,
    build_model,
    check_config,
    check_media,
    check_packing,
    check_positions,
    check_source,
    load_once,
    names_vocab_size,
    num_positions,
    read_config,
    vocab_size_of,
    without_masks,
)
from lightning_protrain.models.lora import base_of, lora_config, with_lora, with_rows
from lightning_protrain.models.loss import chunked_cross_entropy, has_plain_head, labelled
from lightning_protrain.models.metrics import (
    NonFinite,
    Perplexity,
    RatioMetric,
    TokenAccuracy,
    TokenLoss,
    metrics_by_name,
    scalars,
    try_metrics,
    update_with_logits,
)
from lightning_protrain.models.metrics import PositionScores as PositionScores  # public, for `metrics`
from lightning_protrain.models.optimizer import choose_optimizer


def learning_rate_factor(step: int, warmup: int, num_steps: int | None, floor: float) -> float:
    """Return the learning rate of an optimizer step as a fraction of the peak.

    Args:
        step: Number of optimizer steps before this one.
        warmup: Number of linear warm-up steps; the last one has the peak rate.
        num_steps: Total number of steps; None keeps the peak rate after the warm-up.
        floor: Fraction of the peak at and after the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if num_steps is None:
        return 1.0
    progress = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


# A hyperparameter, a check of its value, and what it must do.
NumberCheck: TypeAlias = tuple[str, Callable[[Any], bool], str]
NUMBERS: tuple[NumberCheck, ...] = (
    ("learning_rate", lambda rate: rate > 0, "be above 0"),
    ("weight_decay", lambda decay: decay >= 0, "not be negative"),
    ("betas", lambda two: len(two) == 2 and all(0 <= beta < 1 for beta in two), "be two numbers from 0 to below 1"),
    (
        "warmup_steps",
        lambda steps: 0 <= steps < 1 or (steps >= 1 and float(steps).is_integer()),
        "be a number of steps, or a fraction of all steps",
    ),
    ("min_learning_rate_ratio", lambda ratio: 0 <= ratio <= 1, "lie between 0 and 1"),
    ("loss_chunk_tokens", lambda tokens: tokens is None or tokens >= 1, "be at least 1, or None"),
)


def check_numbers(given: Mapping[str, Any], checks: Sequence[NumberCheck] = NUMBERS) -> None:
    """Raise ValueError if a hyperparameter is out of range."""
    for name, check, must in checks:
        if not is_valid(check, given[name]):
            raise ValueError(f"{name} is {given[name]!r}; it must {must}.")


class TokenScores(NamedTuple):
    """Sums over the scored tokens of a batch, named like the arguments of the metrics.

    Attributes:
        loss_sum: Sum of the losses in nats, a float64 scalar.
        num_correct: Number of tokens to which the model gives the highest probability, an int64 scalar.
        num_tokens: Number of scored tokens.
    """

    loss_sum: Tensor
    num_correct: Tensor
    num_tokens: int


@torch.no_grad()
def token_scores(
    hidden: Tensor, head: nn.Module, labels: Tensor, chunk_tokens: int = 1024, metrics: Sequence[Metric] = ()
) -> TokenScores:
    """Score the labelled tokens without gradients, a slice of tokens at a time.

    Args:
        hidden: As in `chunked_cross_entropy`, like the next arguments and the errors.
        head: Maps hidden states to logits.
        labels: Token ids, not shifted.
        chunk_tokens: Maximum number of tokens in a slice.
        metrics: Metrics to update with the logits of each slice by `update_with_logits`, except with a slice whose
            loss is NaN or infinite.
    """
    selected, targets, places = labelled(hidden, labels, chunk_tokens)
    positions = F.pad(positions_in_turn(labels)[:, 1:], (0, 1)).flatten().index_select(0, places)
    loss_sum = torch.zeros((), dtype=torch.float64, device=hidden.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    # Splitting zero tokens gives one empty slice. The head runs on it, so that every rank fetches the same weights.
    for part, expected, position in zip(
        *(tensor.split(chunk_tokens) for tensor in (selected, targets, positions)), strict=True
    ):
        logits = head(part).float()  # [tokens, vocab]
        part_sum = F.cross_entropy(logits, expected, reduction="none").double().sum()
        loss_sum += part_sum
        num_correct += (logits.argmax(-1) == expected).sum()
        if metrics and len(expected) and part_sum.isfinite():
            for metric in metrics:
                update_with_logits(metric, logits, expected, position)
    return TokenScores(loss_sum, num_correct, targets.numel())


def positions_in_turn(labels: Tensor) -> Tensor:
    """Return the position of each labelled token within its run of labelled tokens, from 0; -1 at other tokens.

    Args:
        labels: Token ids, [batch, seq]; `IGNORE_INDEX` marks tokens without a label.
    """
    places = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    last_without = torch.where(labels == IGNORE_INDEX, places, -1).cummax(1).values
    return places - last_without - 1


_Module = TypeVar("_Module", bound=LightningModule)


def load_module(
    kind: type[_Module],
    folder: str | os.PathLike[str],
    map_location: Any = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> _Module:
    """Make a module with the weights and hyperparameters of a checkpoint folder, such as `best_model_path`.

    The folder is verified, and nothing in it is executed. Frozen weights that the checkpoint does not store are read
    from the model that it was trained from.

    Args:
        kind: Class of the module.
        folder: The checkpoint.
        map_location: As in `torch.load`; None means the host.
        strict: True requires equal names of weights in checkpoint and module; None means the module's
            `strict_loading`.
        kwargs: Arguments of the module that override hyperparameters in the checkpoint.

    Raises:
        ValueError: If the checkpoint is damaged or has quantised weights, or frozen weights are missing or differ.
        FileNotFoundError: If the checkpoint does not exist.
        RuntimeError: If the weights do not match the module.
    """
    place = resolve(Path(os.path.abspath(folder)))
    content = load_folder(place, map_location)
    settings = content.setdefault(kind.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if isinstance(settings, Mapping) and settings.get("quantization") is not None:
        raise ValueError(
            f"{place} has adapters of quantised weights, which only a Trainer can load: give it as `ckpt_path`, or "
            "write the whole model with `lightning-protrain merge`."
        )
    fill(content, str(place))
    settings.update(kwargs)
    module = cast(_Module, _load_state(kind, content, strict=strict, **kwargs))
    devices = {value.device for value in content["state_dict"].values() if isinstance(value, Tensor)}
    return module.to(devices.pop()) if len(devices) == 1 else module


class RestorableModule(LightningModule):
    """A LightningModule whose `load_from_checkpoint` accepts folders of ProTrainCheckpoint as well as `.ckpt` files."""

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a `.ckpt` file like LightningModule, or a folder like `load_module`.

        Raises:
            ValueError: As in `load_module`, or if `hparams_file` is given for a folder.
        """
        is_path = isinstance(checkpoint_path, (str, os.PathLike))
        if not is_path or not (pointed(Path(checkpoint_path)) or Path(checkpoint_path)).is_dir():
            load = super().load_from_checkpoint
            return load(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)
        if hparams_file is not None:
            raise ValueError(
                f"{checkpoint_path} is a folder that contains hyperparameters: to override them, give arguments "
                f"instead of hparams_file={str(hparams_file)!r}."
            )
        return load_module(cls, checkpoint_path, map_location, strict, **kwargs)


def _refuse_monitors(trainer: Trainer, metrics: MetricCollection) -> None:
    """Raise ValueError if a callback chooses or stops by a validation metric, because there are no validation rows."""
    names = {str(name) for name in metrics.keys()}  # noqa: SIM118 (not a dict)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(callback, Checkpoint | EarlyStopping) and monitor in names:
            raise ValueError(
                f"{type(callback).__name__} has monitor={monitor!r}, but there are no validation rows, because "
                'val_fraction is 0. Set val_fraction above 0, give a split "validation", or remove `monitor`.'
            )


def _settle_packing(config: PretrainedConfig, datamodule: Any) -> None:
    """Raise ValueError if the data is packed and the model cannot keep it apart; unpack it if nobody asked for it."""
    if getattr(datamodule, "packs", getattr(datamodule, "packing", False)):
        try:
            check_packing(config)
        except ValueError:
            if datamodule.packing is not None:
                raise
            datamodule.packing = False


# The head's matrix product uses fast kernels if the vocabulary size is a multiple of 64.
VOCAB_MULTIPLE = 64
OWN_METRICS: dict[str, type[RatioMetric]] = {"loss": TokenLoss, "perplexity": Perplexity, "accuracy": TokenAccuracy}
# Maximum number of new tokens that are named in the output.
_SHOWN = 8
# Entries of a batch that the model does not take; those of pairs are explained in models/preference.py.
NOT_OF_THE_MODEL = ("labels", "loss_weights", "trained_tokens", "pair_ids", "desirable", "reference_logps")


class CausalLMModule(RestorableModule):
    """Next-token training of a causal language model, loaded from a folder or built from a config.

    The model is built in `configure_model`, on the device and in the dtype that the strategy chooses. Its parameters
    are named `model.<name in transformers>`. A batch is a dict with `input_ids` and `labels` ([batch, seq], not
    shifted; -100 marks tokens that are not scored). It may have further inputs of the model, such as `attention_mask`
    or `position_ids`, and two optional entries for the loss:

    - `trained_tokens`, added by TrainLoader: makes the loss of an optimizer step the mean over the tokens of all its
      batches on all ranks.
    - `loss_weights` ([batch, seq], int64 in units of 1 / WEIGHT_UNITS): weights of the tokens in training.

    Args:
        model: Folder, GGUF file or Hugging Face id of a pretrained model; `package://NAME/FILE` is a file of an
            installed package. Exactly one of `model` and `config` must be given.
        config: Keys of a config of transformers with `model_type`, for a model with random weights.
        learning_rate: Peak learning rate; None means 3e-4.
        weight_decay: Weight decay, for parameters of two and more dimensions.
        betas: Moment decays, for optimizers that have them.
        warmup_steps: Optimizer steps of linear warm-up; below 1, a fraction of all steps. 1 and 1.0 mean one step.
        min_learning_rate_ratio: Learning rate at the last step, as a fraction of the peak.
        loss_chunk_tokens: Maximum number of tokens whose logits exist at the same time; None means no limit.
        attn_implementation: Attention implementation, e.g. `sdpa` or `flash_attention_2`; None lets transformers
            choose.
        dtype: Dtype of the weights as loaded or built; `auto` takes the dtype of the pretrained model.
        lora: Arguments of `peft.LoraConfig`, e.g. `{r: 16, lora_alpha: 32}`, to train only adapters, by default in all
            linear layers but the head. None trains all weights.
        nonfinite: Treatment of batches with a NaN or infinite loss in validation and test. `exclude` skips them and
            warns; `error` ends the run on all ranks; `keep` passes them to the metrics.
        vocab_size: Number of embedding rows. None takes it from the model or the config, or else from the datamodule's
            tokenizer, rounded up to a multiple of 64. New rows of a pretrained model are the mean of the old rows; rows
            of tokens that the model does not have, or that are `new_tokens` of the datamodule, are trained with `lora`
            too.
        allow_pickle: True allows unpickling weights from `.bin` files if `model` has no safetensors files.
        quantization: Arguments of `transformers.BitsAndBytesConfig`, e.g. `{load_in_4bit: true}`, to quantise the
            frozen weights; requires `model` and `lora`. None does not quantise.
        metrics: Further metrics of validation and test, such as `{"top5": MulticlassAccuracy(num_classes=32000,
            top_k=5)}`, logged as `val_top5` and `test_top5`: torchmetrics by name, or a MetricCollection. Each gets the
            labelled tokens of a slice as `update(preds, target)`: logits, float32 [tokens, vocab], and token ids, int64
            [tokens]. If `update` has an argument `position`, it also gets the position of each token in its trained
            turn. Metrics are copied. They are not saved among the hyperparameters: give them again to
            `load_from_checkpoint`.
        optimizer: A short name, such as `split_adamw`, a class path, or a mapping `{class_path: ..., init_args: ...}`,
            whose `weight_decay` and `betas` override the module's. None means AdamW.

    Raises:
        ValueError: If not exactly one of `model` and `config` is given, a number is out of range, `model_type` or a
            key is unknown, the optimizer cannot be made, or a metric cannot be logged by its name. `setup` raises it if
            a metric cannot be computed.
    """

    model: Any  # A PreTrainedModel or PeftModel; None until `configure_model`.
    # Of None. On the command line, a default of `__init__` would go over to a subclass that is chosen in its place.
    usual_learning_rate = 3e-4

    def __init__(
        self,
        model: str | None = None,
        config: dict[str, Any] | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int | float = 0.03,
        min_learning_rate_ratio: float = 0.1,
        loss_chunk_tokens: int | None = 1024,
        attn_implementation: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
        vocab_size: int | None = None,
        lora: dict[str, Any] | None = None,
        nonfinite: NonFinite = "exclude",
        allow_pickle: bool = False,
        quantization: dict[str, Any] | None = None,
        metrics: dict[str, Metric] | MetricCollection | None = None,
        optimizer: str | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_kinds(str | os.PathLike, "a folder, a GGUF file or a name on the Hugging Face Hub", model=model)
        check_kinds(Mapping, "a mapping", config=config, lora=lora, quantization=quantization)
        if (model is None) == (config is None):
            raise ValueError(f"Give exactly one of model and config; model is {model!r} and config is {config!r}.")
        model = None if model is None else os.fspath(model)  # A path is stored as text among the hyperparameters.
        if config is not None:
            check_config(config)
        if lora is not None:
            lora_config(lora)
        if quantization is not None:
            check_quantization(quantization, lora)
        choose_optimizer(optimizer)
        self.save_hyperparameters(ignore="metrics")
        if learning_rate is None:
            self.hparams["learning_rate"] = self.usual_learning_rate
        check_numbers(self.hparams)
        self.model, self._is_new = None, False
        self._num_tokenizer_tokens: int | None = None
        self._new_tokens: dict[int, str] = {}  # Rows to train with adapters, and their tokens.
        self._window: TokenWindow | None = None
        # Compute groups would save little, and Lightning resets metrics one by one.
        standard = self._standard_metrics(nonfinite)
        named = metrics_by_name(metrics, standard)
        self._user_metrics = tuple(named)
        every = MetricCollection(standard | named, compute_groups=False)
        every.persistent(False)  # A state_dict has only the model.
        self.val_metrics = every.clone(prefix="val_")
        self.test_metrics = every.clone(prefix="test_")

    def _standard_metrics(self, nonfinite: NonFinite) -> dict[str, Any]:
        """Return the metrics of validation and test that are always logged, by name."""
        return {name: kind(nonfinite) for name, kind in OWN_METRICS.items()}

    # Building the model

    def setup(self, stage: str) -> None:
        """Check that the model fits the datamodule, before anything is allocated.

        Raises:
            ValueError: If the model has fewer embeddings than the tokenizer has tokens or fewer positions than a row
                has tokens, does not support packed rows, or does not accept the media in the data, or a metric of the
                user cannot be computed.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        tokenizer: Any = getattr(datamodule, "tokenizer", None)
        self._num_tokenizer_tokens = None if tokenizer is None else len(tokenizer)
        new = getattr(datamodule, "new_tokens", [])
        self._new_tokens = dict(zip(tokenizer.convert_tokens_to_ids(new), new, strict=True)) if new else {}
        config = self._resolve_config()
        _settle_packing(config, datamodule)
        self.check_objective(getattr(datamodule, "objective", None))
        with_media: list[Any] = getattr(datamodule, "rows_with_media", list)()
        if (limit := getattr(datamodule, "limit_length", None)) is not None:
            limit(num_positions(config))
        longest = getattr(datamodule, "longest_row", int)()
        check_positions(config, longest, self.hparams["model"] is None, bool(with_media))
        if stage == "fit" and not getattr(datamodule, "validates", True):
            _refuse_monitors(self.trainer, self.val_metrics)
        for row in with_media:
            check_media(config, row)
        vocab_size = self.hparams["vocab_size"] or vocab_size_of(config)
        try_metrics({name: self.val_metrics[name] for name in self._user_metrics}, vocab_size)

    def check_objective(self, objective: str | None) -> None:
        """Raise ValueError if the module has another loss than the data is for; None: the data does not say."""
        if objective in ("pairs", "unpaired"):
            raise ValueError(
                "The rows of the data are preferences, which PreferenceModule trains: set the class of the model. To "
                "train on the answers of one column as conversations, choose with `format` and `fields` of the data."
            )

    def check_evaluated(self, objective: str | None) -> None:
        """Raise ValueError if an `Evaluator` cannot score its data; the argument is `objective` of the data."""
        self.check_objective(objective)

    def configure_model(self) -> None:
        """Build the model or load its weights; do nothing if the model exists."""
        if self.model is None:
            # Without a Trainer, the caller may load weights next.
            self._is_new = self._trainer is not None and self.hparams["model"] is None
            self.model = load_once(self._trainer, self._build, partial(self._build, StoredModel.outline))
            if self._new_tokens and self.hparams["lora"] is not None:
                shown = ", ".join([*self._new_tokens.values()][:_SHOWN]) + ", ..." * (len(self._new_tokens) > _SHOWN)
                rank_zero_info(f"The rows of {plural(len(self._new_tokens), 'new token')} are trained: {shown}.")

    def _build(self, load: Callable[[StoredModel], PreTrainedModel] = StoredModel.load) -> Any:
        config, hparams = self._resolve_config(), self.hparams
        options = {name: hparams[name] for name in ("dtype", "attn_implementation")}
        if hparams["model"] is None or (load is StoredModel.load and torch.get_default_device().type == "meta"):
            if hparams["vocab_size"] is not None:
                config.get_text_config().vocab_size = hparams["vocab_size"]
            model = build_model(config, **options)
            if hparams["quantization"] is not None:
                quantize_without_memory(model, hparams["quantization"])
        else:
            options |= {name: hparams[name] for name in ("vocab_size", "allow_pickle", "quantization")}
            model = load(StoredModel(hparams["model"], config, **options))
        without_masks(model)
        if hparams["loss_chunk_tokens"] is not None and not has_plain_head(model):
            rank_zero_warn(
                f"{model.config.model_type!r} with these settings may compute its logits outside its head: "
                "the logits of all tokens of a batch exist at once, and loss_chunk_tokens limits only their copies."
            )
        if hparams["lora"] is not None:  # A checkpoint must know which rows are trained.
            hparams["lora"] = with_rows(model, hparams["lora"], self._new_tokens)
            model = with_lora(model, hparams["lora"])
        # from_pretrained returns a model in eval mode, and Lightning keeps the mode of each module.
        return model.train()

    def _resolve_config(self) -> PretrainedConfig:
        """Return the config of the model to build, with its vocabulary size set and checked against the tokenizer."""
        if self.model is not None:
            config = self.model.config
        elif self.hparams["model"] is not None:
            config = read_config(self.hparams["model"])
        else:
            if self.hparams["vocab_size"] is None and not names_vocab_size(self.hparams["config"]):
                self._take_vocab_size_of_tokenizer()
            config = AutoConfig.for_model(**self.hparams["config"])
        vocab_size = vocab_size_of(config)
        if self.model is None and self.hparams["model"] is not None:
            self._find_new_tokens(vocab_size)
        if self.model is None and self.hparams["vocab_size"] is not None:
            vocab_size = self.hparams["vocab_size"]
        if self._num_tokenizer_tokens is not None and self._num_tokenizer_tokens > vocab_size:
            raise ValueError(
                f"The tokenizer of the datamodule has {plural(self._num_tokenizer_tokens, 'token')}, but the model has "
                f"{plural(vocab_size, 'embedding')}. Set vocab_size of the model to at least "
                f"{self._num_tokenizer_tokens}, or "
                "give the datamodule the tokenizer of the model."
            )
        return config

    def _find_new_tokens(self, num_rows: int) -> None:
        """Add to `_new_tokens` the tokens for which the pretrained model has no rows; set `vocab_size` if needed."""
        number = self._num_tokenizer_tokens or 0
        if self._new_tokens and number > num_rows and self.hparams["vocab_size"] is None:
            self.hparams["vocab_size"] = number
        datamodule = getattr(self._trainer, "datamodule", None)
        text_of = getattr(getattr(datamodule, "tokenizer", None), "convert_ids_to_tokens", str)
        self._new_tokens |= {row: str(text_of(row)) for row in range(num_rows, number)}

    def _take_vocab_size_of_tokenizer(self) -> None:
        if self._num_tokenizer_tokens is None:
            raise ValueError(
                "The number of embeddings is unknown: set vocab_size, or give the datamodule a `tokenizer`."
            )
        # Stored among the hyperparameters, so that a checkpoint can be loaded without a tokenizer.
        self.hparams["vocab_size"] = math.ceil(self._num_tokenizer_tokens / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move and cast like any module, but keep the dtype of non-persistent buffers.

        transformers keeps rotary frequencies in float32 for weights of any dtype. In bfloat16, angles at late positions
        would differ from those of the exported model.
        """
        buffers_before = [
            (module._buffers, name, buffer)
            for module in self.modules()
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers[name]) is not None
        ]
        applied = super()._apply(fn, recurse)
        for buffers, name, before in buffers_before:
            now = buffers[name]
            if now is not None and now.dtype != before.dtype:
                buffers[name] = before.to(now.device)
        return applied

    def on_fit_start(self) -> None:
        """Set the model to train mode, because Lightning keeps a model in eval mode."""
        self._built().train()
        self._window = None
        if self._is_new and self.trainer.ckpt_path is None:
            rank_zero_info("Training from random weights: `config` was given without `model`.")
        self._is_new = False

    def _built(self) -> Any:
        if self.model is None:
            raise ValueError("The model is not built yet: call configure_model() first, or let a Trainer do it.")
        return self.model

    # Steps

    def forward(self, **batch: Tensor) -> Any:
        """Run the model of transformers; its output has `logits` of shape [batch, seq, vocab]."""
        return self._built()(**batch, use_cache=False)

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """Return the mean loss over the labelled tokens, plus the router loss if the model has a router."""
        loss_sum, count, router_loss = self._training_loss(batch)
        if "trained_tokens" in batch and self._trainer is not None:
            loss = self._share_of_window(loss_sum, batch, batch_idx)
        else:
            loss = loss_sum / (count or 1)
            self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss if router_loss is None else loss + router_loss

    def _training_loss(self, batch: Batch) -> tuple[Tensor, int | Tensor, Tensor | None]:
        """Return the sum of the weighted token losses, the sum of the weights (1 by default), and the router loss."""
        scores, head, router_loss = self._scores(batch)
        labels, weights = batch["labels"], batch.get("loss_weights")
        if weights is None:
            return *self._token_loss(scores, head, labels), router_loss
        loss_sum, _ = self._token_loss(scores, head, labels, weights.float() / WEIGHT_UNITS)
        return loss_sum, weights[:, 1:][labels[:, 1:] != IGNORE_INDEX].sum() / WEIGHT_UNITS, router_loss

    def _share_of_window(self, loss_sum: Tensor, batch: Batch, batch_idx: int) -> Tensor:
        """Return the share of this batch in the mean loss over all tokens of an optimizer step.

        The share is multiplied by the number of micro-batches and ranks, because Lightning and data parallelism divide
        by these numbers.
        """
        self._window = TokenWindow.at(batch_idx, batch, self.trainer, self._window)
        share = self._window.add(loss_sum)
        if not self.trainer.fit_loop.epoch_loop._should_accumulate():
            self.log("train_loss", self._window.loss, prog_bar=True, reduce_fx="sum", sync_dist=True)
        return share * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def validation_step(self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        """Add the batch to `val_metrics`, which sum over all dataloaders."""
        self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        """Add the batch to `test_metrics`, which sum over all dataloaders."""
        self._evaluate(batch, self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score each sequence.

        Returns:
            `loss_sum`, float32 [batch], the summed loss of each sequence in nats, and `num_tokens`, int64 [batch].
        """
        scores, head, _ = self._scores(batch)
        rows = [
            self._token_loss(row, head, labels)
            for row, labels in zip(scores.split(1), batch["labels"].split(1), strict=True)
        ]
        return {
            "loss_sum": torch.stack([loss_sum for loss_sum, _ in rows]),
            "num_tokens": torch.tensor([num_tokens for _, num_tokens in rows], device=scores.device),
        }

    def configure_callbacks(self) -> list[Callback]:
        """Return a callback that ends all ranks if the evaluation fails on one.

        Lightning calls this before it prepares data, which may take long, so a single process refuses a wrong `model`
        here. Several ranks refuse it when they load the model: if one rank ended now, the others would wait for it.
        """
        session = getattr(self.trainer.strategy, "session", None)
        if self.trainer.world_size == 1 and getattr(session, "dry_run", None) is None:  # A dry run needs no weights.
            self.check_model()
        # Reuse the callback of an earlier run: Lightning would print a message if it were replaced.
        has_one = any(isinstance(callback, SharedFailure) for callback in getattr(self.trainer, "callbacks", ()))
        return [] if has_one else [SharedFailure()]

    def check_model(self) -> None:
        """Raise ValueError if `model` names no weights that can be trained, or bitsandbytes is needed and missing."""
        if self.hparams["quantization"] is not None:
            require_installed()
        if self.model is None and self.hparams["model"] is not None:
            check_source(self.hparams["model"], self.hparams["allow_pickle"])

    # Metrics are logged at the end of the epoch, not in the step: a rank without batches must join the all-reduce.

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`, `val_perplexity`, `val_accuracy` and the user's metrics, over all tokens of all ranks."""
        self._log(self.val_metrics, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Log `test_loss`, `test_perplexity`, `test_accuracy` and the user's metrics, over all tokens of all ranks."""
        self._log(self.test_metrics, prog_bar=False)

    def _log(self, metrics: MetricCollection, prog_bar: bool) -> None:
        # Remove old values, in case the metric is None this time.
        for name in map(str, metrics.keys()):
            self.trainer.callback_metrics.pop(name, None)
        every: dict[str, Any] = dict(metrics.items(keep_base=True, copy_state=False))
        theirs = {name: every.pop(name) for name in self._user_metrics}
        self.log_dict({f"{metrics.prefix}{name}": metric for name, metric in every.items()}, prog_bar=prog_bar)
        if not theirs or every["loss"].compute() is None:  # No rank has a token.
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* was called before the ``update`` method")  # A rank without a token.
            values = MetricCollection(theirs, prefix=metrics.prefix, compute_groups=False).compute()
        # All ranks have the same value. Without a reduction, Lightning would recommend one.
        self.log_dict(scalars(values), prog_bar=prog_bar, reduce_fx="max", sync_dist=True)
        for metric in theirs.values():
            metric.reset()

    def _evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        scores, head, _ = self._scores(batch)
        labels = batch["labels"]
        chunk_tokens = self.hparams["loss_chunk_tokens"] or max(labels.numel(), 1)
        theirs = [metrics[name] for name in self._user_metrics]
        scored = token_scores(scores, head, labels, chunk_tokens, theirs)
        # With a non-finite loss the predicted token is arbitrary. NaN makes the accuracy treat the batch like the loss.
        num_correct = torch.where(scored.loss_sum.isfinite(), scored.num_correct.double(), math.nan)
        sums = {"loss_sum": scored.loss_sum, "num_correct": num_correct, "num_tokens": scored.num_tokens}
        for name in OWN_METRICS:
            metrics[name].update(**metrics[name]._filter_kwargs(**sums))

    def _scores(self, batch: Batch) -> tuple[Tensor, nn.Module, Tensor | None]:
        """Return the input of the loss, the module that maps it to logits, and the router loss or None.

        For models of `has_plain_head`, return the hidden states [batch, seq, hidden] and the head. For others, return
        the logits [batch, seq, vocab] and the identity.
        """
        model = self._built()
        inputs = {name: value for name, value in batch.items() if name not in NOT_OF_THE_MODEL}
        if "flash" in str(model.config._attn_implementation) and is_packed(inputs):
            # Flash attention supports packed rows only at batch size 1.
            inputs = {name: value.reshape(1, -1) for name, value in inputs.items()}
        base = base_of(model)
        if self.hparams["loss_chunk_tokens"] is not None and has_plain_head(base):
            hidden = base.base_model(**inputs, use_cache=False)[0]
            return hidden.reshape(*batch["labels"].shape, -1), base.get_output_embeddings(), None
        output = model(**inputs, use_cache=False)
        logits = output.logits.reshape(*batch["labels"].shape, -1)
        has_router = getattr(model.config, "output_router_logits", False)
        return logits, nn.Identity(), model.config.router_aux_loss_coef * output.aux_loss if has_router else None

    def _token_loss(
        self, scores: Tensor, head: nn.Module, labels: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, int]:
        chunk_tokens = self.hparams["loss_chunk_tokens"] or max(labels.numel(), 1)
        return chunked_cross_entropy(scores, head, labels, chunk_tokens, weights=weights)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | list[int] | None = None) -> Tensor:
        """Generate greedily from prompts, in eval mode.

        Args:
            input_ids: Prompts of equal length, [batch, seq].
            max_new_tokens: Maximum number of generated tokens.
            eos_token_id: Token, or list of tokens, that ends a sequence; None means the end token of the model.

        Returns:
            Prompts and continuations, [batch, seq + new]; sequences that end early are padded with the end token.
        """
        model = self._built()
        eos = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        first_eos = eos[0] if isinstance(eos, list) else eos
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            return model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                eos_token_id=eos,
                pad_token_id=0 if first_eos is None else first_eos,
            )
        finally:
            for module in training:
                module.training = True

    # Optimization

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, and a schedule of linear warm-up and cosine decay.

        Weight decay applies to parameters of two and more dimensions, including embeddings, but not to biases and
        normalization layers. AdamW uses PyTorch's fused kernel. If the total number of steps is unknown, the learning
        rate stays constant after the warm-up.

        Raises:
            ValueError: If all parameters are frozen, or if the warm-up is a fraction of an unknown number of steps.
        """
        named = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        if not named:
            raise ValueError("All parameters of the model are frozen: there is nothing to train.")
        hparams = self.hparams
        choice = choose_optimizer(hparams["optimizer"])
        optimizer = choice.make(named, hparams["learning_rate"], hparams["weight_decay"], hparams["betas"])
        num_steps, warmup = self._schedule_steps()
        floor = self.hparams["min_learning_rate_ratio"]
        # Checkpoints do not store the arguments of a partial: a resumed run with more steps follows its own schedule.
        factor = partial(learning_rate_factor, warmup=warmup, num_steps=num_steps, floor=floor)
        scheduler = LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _schedule_steps(self) -> tuple[int | None, int]:
        """Return the total number of optimizer steps (None if unknown) and the number of warm-up steps."""
        if self.trainer.max_steps == 0:
            return 0, 0
        estimate = self.trainer.estimated_stepping_batches
        num_steps = int(estimate) if math.isfinite(estimate) and estimate > 0 else None
        warmup = self.hparams["warmup_steps"]
        if num_steps is None:
            if 0 < warmup < 1:
                raise ValueError(
                    f"warmup_steps is the fraction {warmup} of an unknown number of steps: set max_steps of the "
                    "trainer, or give warmup_steps as a number of steps."
                )
            rank_zero_warn("The number of steps is unknown: the learning rate stays constant after the warm-up.")
            return None, int(warmup)
        steps = round(warmup * num_steps) if warmup < 1 else int(warmup)
        if warmup == 1.0 and isinstance(warmup, float):
            rank_zero_warn("warmup_steps is 1.0, which means one step; a fraction of all steps is below 1.")
        if steps >= max(num_steps, 2):
            rank_zero_warn(
                f"warmup_steps is {steps}, but the run has {plural(num_steps, 'step')}: the learning rate only rises, "
                f"up to {num_steps / steps:.0%} of learning_rate. Lower warmup_steps."
            )
        return num_steps, steps
