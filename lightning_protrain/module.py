"""A LightningModule that trains any causal language model of transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MetricCollection
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_protrain.loss import chunked_cross_entropy, has_plain_head
from lightning_protrain.metrics import Perplexity, TokenLoss

Batch = dict[str, Tensor]
# A vocabulary of a multiple of 64 rows keeps the matrix products of the head on the fast kernels.
VOCAB_MULTIPLE = 64


class CausalLMModule(LightningModule):
    """Next-token training of a causal language model, loaded from a folder or built from a config.

    The model is built in `configure_model`, where the strategy says on which device and in which dtype. Its parameters
    are named `model.<name in transformers>`. A batch is a dict with `input_ids` and `labels` ([batch, seq]; -100 marks
    tokens that are not scored; not shifted), and whatever else the model takes, such as `attention_mask` or
    `position_ids`.

    Args:
        model: Folder or Hugging Face id of a pretrained model. Exactly one of `model` and `config` is given.
        config: Keys of a config of transformers with `model_type`, for a model with random weights.
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of AdamW, for parameters of two and more dimensions.
        betas: Moment decays of AdamW.
        warmup_steps: Optimizer steps of linear warm-up; below 1, a fraction of all steps.
        min_learning_rate_ratio: Learning rate at the last step over the peak.
        loss_chunk_tokens: Most tokens whose logits exist at the same time; None holds the logits of all tokens.
        attn_implementation: Attention of transformers, e.g. `sdpa` or `flash_attention_2`; None lets it choose.
        dtype: Dtype of the weights as loaded or built; `auto` takes that of the checkpoint.
        vocab_size: Rows of the embedding. None: what the model or the config says, else the size of the tokenizer of
            the datamodule, rounded up to a multiple of 64.

    Raises:
        ValueError: If not exactly one of `model` and `config` is given, if a number is out of its range, or if the
            config has an unknown `model_type` or key.
    """

    model: PreTrainedModel | None

    def __init__(
        self,
        model: str | None = None,
        config: dict[str, Any] | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int | float = 0.03,
        min_learning_rate_ratio: float = 0.1,
        loss_chunk_tokens: int | None = 1024,
        attn_implementation: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        if (model is None) == (config is None):
            raise ValueError(f"Give exactly one of model and config; model is {model!r} and config is {config!r}.")
        if config is not None:
            _check_config(config)
        _check_numbers(learning_rate, weight_decay, warmup_steps, min_learning_rate_ratio, loss_chunk_tokens)
        self.save_hyperparameters()
        self.model = None
        self._num_tokenizer_tokens: int | None = None
        # No compute groups: the two metrics hold two scalars each, and Lightning resets them one by one.
        metrics = MetricCollection({"loss": TokenLoss(), "perplexity": Perplexity()}, compute_groups=False)
        self.val_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")

    # Building the model

    def setup(self, stage: str) -> None:
        """Read the size of the datamodule's tokenizer and check it against the model, before anything is allocated.

        Raises:
            ValueError: If the tokenizer has more tokens than the model has embeddings.
        """
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        self._num_tokenizer_tokens = None if tokenizer is None else len(tokenizer)
        self._resolve_config()

    def configure_model(self) -> None:
        """Build the model or load its weights; does nothing where there is one already."""
        if self.model is not None:
            return
        config = self._resolve_config()
        dtype = self.hparams["dtype"]
        options = {"dtype": dtype, "attn_implementation": self.hparams["attn_implementation"]}
        if self.hparams["model"] is None or torch.get_default_device().type == "meta":
            # Where tensors have no memory there is nothing to load.
            known = config.dtype if self.hparams["model"] is not None else None
            options["dtype"] = known if dtype == "auto" else getattr(torch, dtype)
            model = AutoModelForCausalLM.from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(self.hparams["model"], **options)
            vocab_size = self.hparams["vocab_size"]
            if vocab_size not in (None, _vocab_size(model.config)):
                model.resize_token_embeddings(vocab_size)
        # from_pretrained returns a model in eval mode, and Lightning keeps the modes that it finds.
        self.model = model.train()
        if self.hparams["loss_chunk_tokens"] is not None and not has_plain_head(model):
            rank_zero_warn(
                f"{model.config.model_type!r} with these settings is not known to make its logits by its head alone: "
                "the logits of all tokens of a batch are held at once, and loss_chunk_tokens bounds only their copies."
            )

    def _resolve_config(self) -> PretrainedConfig:
        """Return the config of the model to be, with its vocabulary settled and checked against the tokenizer."""
        if self.model is not None:
            config = self.model.config
        elif self.hparams["model"] is not None:
            config = AutoConfig.from_pretrained(self.hparams["model"])
        else:
            if self.hparams["vocab_size"] is None and "vocab_size" not in self.hparams["config"]:
                self._take_vocab_size_of_tokenizer()
            config = AutoConfig.for_model(**self.hparams["config"])
        vocab_size = _vocab_size(config)
        if self.model is None and self.hparams["vocab_size"] is not None:
            vocab_size = self.hparams["vocab_size"]
            if self.hparams["model"] is None:
                config.get_text_config().vocab_size = vocab_size
        if self._num_tokenizer_tokens is not None and self._num_tokenizer_tokens > vocab_size:
            raise ValueError(
                f"The tokenizer of the datamodule has {self._num_tokenizer_tokens} tokens, but the model has "
                f"{vocab_size} embeddings. Set vocab_size of the model to at least {self._num_tokenizer_tokens}, or "
                "give the datamodule the tokenizer of the model."
            )
        return config

    def _take_vocab_size_of_tokenizer(self) -> None:
        if self._num_tokenizer_tokens is None:
            raise ValueError(
                "Nothing says how many embeddings the model has: set vocab_size, or give the trainer a datamodule "
                "with a `tokenizer`."
            )
        # Among the hyperparameters, so that a checkpoint can be loaded where there is no tokenizer.
        self.hparams["vocab_size"] = math.ceil(self._num_tokenizer_tokens / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def on_fit_start(self) -> None:
        """Put the model into train mode: Lightning leaves a model in eval mode where it is."""
        self._built().train()

    def _built(self) -> PreTrainedModel:
        if self.model is None:
            raise ValueError("The model is not built yet: call configure_model() first, or let a Trainer do it.")
        return self.model

    # Steps

    def forward(self, **batch: Tensor) -> Any:
        """Run the model of transformers on a batch.

        Returns:
            The output of transformers, with `logits` [batch, seq, vocab].
        """
        return self._built()(**batch, use_cache=False)

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """Return the mean loss over the labelled tokens, plus the loss of the router where the model has one."""
        scores, head, router_loss = self._scores(batch)
        loss_sum, num_tokens = self._token_loss(scores, head, batch["labels"])
        loss = loss_sum / max(num_tokens, 1)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss if router_loss is None else loss + router_loss

    def validation_step(self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        """Add the batch to `val_loss` and `val_perplexity`; several dataloaders are added up."""
        self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        """Add the batch to `test_loss` and `test_perplexity`; several dataloaders are added up."""
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
            "num_tokens": torch.tensor([num_tokens for _, num_tokens in rows]),
        }

    # Logged at the end, not in the step: a rank whose shard is empty must take part in the reduction.

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss` and `val_perplexity`, exact over all tokens of all ranks."""
        self.log_dict(self.val_metrics, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Log `test_loss` and `test_perplexity`, exact over all tokens of all ranks."""
        self.log_dict(self.test_metrics)

    def _evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        scores, head, _ = self._scores(batch)
        metrics.update(*self._token_loss(scores, head, batch["labels"]))

    def _scores(self, batch: Batch) -> tuple[Tensor, nn.Module, Tensor | None]:
        """Return what the loss is computed from, what maps that to logits, and the loss of the router if any.

        With a plain head: hidden states [batch, seq, hidden] and the head. Else the model's own forward makes the
        logits [batch, seq, vocab], which nothing maps any further.
        """
        model = self._built()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if self.hparams["loss_chunk_tokens"] is not None and has_plain_head(model):
            return model.base_model(**inputs, use_cache=False)[0], model.get_output_embeddings(), None
        output = model(**inputs, use_cache=False)
        if not getattr(model.config, "output_router_logits", False):
            return output.logits, nn.Identity(), None
        return output.logits, nn.Identity(), model.config.router_aux_loss_coef * output.aux_loss

    def _token_loss(self, scores: Tensor, head: nn.Module, labels: Tensor) -> tuple[Tensor, int]:
        chunk_tokens = self.hparams["loss_chunk_tokens"] or max(labels.numel(), 1)
        return chunked_cross_entropy(scores, head, labels, chunk_tokens)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | None = None) -> Tensor:
        """Continue prompts greedily, in eval mode.

        Args:
            input_ids: Prompts of the same length, [batch, seq].
            max_new_tokens: Most tokens added.
            eos_token_id: The token that ends a sequence; None takes that of the model.

        Returns:
            Prompts and continuations, [batch, seq + new]; what ended early is filled up with the end token.
        """
        model = self._built()
        eos = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        first_eos = eos[0] if isinstance(eos, list) else eos
        with _eval_mode(model):
            return model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                eos_token_id=eos,
                pad_token_id=0 if first_eos is None else first_eos,
            )

    # Optimization

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW and a schedule of linear warm-up and cosine decay, stepped with the optimizer.

        Parameters of two and more dimensions decay (embeddings are among them), norms and biases do not; frozen ones
        are left out. The groups carry the names of their parameters. Without an end of training (`max_steps` and the
        length of an epoch unknown), the rate stays constant after the warm-up.

        Raises:
            ValueError: If all parameters are frozen, or if the warm-up is a fraction of an unknown number of steps.
        """
        named = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        if not named:
            raise ValueError("All parameters of the model are frozen: there is nothing to train.")
        decayed = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
        others = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": self.hparams["weight_decay"], "name": "decay"},
            {"params": others, "weight_decay": 0.0, "name": "no_decay"},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.hparams["learning_rate"],
            betas=tuple(self.hparams["betas"]),
        )
        num_steps, warmup = self._schedule_steps()
        floor = self.hparams["min_learning_rate_ratio"]
        # A plain function has no state: a resumed run with another number of steps follows its own schedule.
        scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, num_steps, floor))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _schedule_steps(self) -> tuple[int | None, int]:
        """Return the number of optimizer steps, None if unknown, and how many of them warm up."""
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
        return num_steps, round(warmup * num_steps) if warmup < 1 else int(warmup)


def learning_rate_factor(step: int, warmup: int, num_steps: int | None, floor: float) -> float:
    """Return the learning rate of an optimizer step over the peak.

    Args:
        step: Optimizer steps taken before this one.
        warmup: Steps of linear warm-up; the last of them is the first at the peak.
        num_steps: Steps in all; None holds the peak after the warm-up.
        floor: The factor at and after the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if num_steps is None:
        return 1.0
    progress = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, and afterwards each back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _vocab_size(config: PretrainedConfig) -> int:
    return config.get_text_config().vocab_size


def _check_config(config: dict[str, Any]) -> None:
    """Refuse a config that transformers would not know, or whose misspelt keys it would silently keep."""
    model_type = config.get("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = get_close_matches(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=5, cutoff=0.4)
        raise ValueError(f"model_type {model_type!r} is no causal model of transformers. Near: {_listed(near)}.")
    defaults = AutoConfig.for_model(model_type)
    for key in config:
        if not hasattr(defaults, key):
            near = get_close_matches(key, vars(defaults), n=5)
            raise ValueError(f"{key!r} is no key of the config of {model_type!r}. Near: {_listed(near)}.")


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _check_numbers(
    learning_rate: float,
    weight_decay: float,
    warmup_steps: float,
    min_learning_rate_ratio: float,
    loss_chunk_tokens: int | None,
) -> None:
    if learning_rate <= 0:
        raise ValueError(f"learning_rate is {learning_rate}; it must be above 0.")
    if weight_decay < 0:
        raise ValueError(f"weight_decay is {weight_decay}; it must not be negative.")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; it must be a number of steps or a fraction of them.")
    if not 0 <= min_learning_rate_ratio <= 1:
        raise ValueError(f"min_learning_rate_ratio is {min_learning_rate_ratio}; it must lie between 0 and 1.")
    if loss_chunk_tokens is not None and loss_chunk_tokens < 1:
        raise ValueError(f"loss_chunk_tokens is {loss_chunk_tokens}; it must be at least 1, or None.")
