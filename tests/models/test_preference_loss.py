"""The preference losses, their rewards and gradients are those of TRL's trainers on the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain import PreferenceModule
from lightning_protrain.data.batches.loader import Batch
from tests.support.module_runs import VOCAB
from tests.support.preference_runs import built, collate, pairs

pytest.importorskip("trl")

import datasets
import tokenizers
import transformers
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def moved(module: PreferenceModule) -> PreferenceModule:
    """The module with other weights, so that it differs from its reference."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    return module


def with_reference(batch: Batch, model: Any) -> Batch:
    """The batch as the Trainer's hook gives it, with log-probabilities of another model."""
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    tokens = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return {**batch, "reference_logps": (tokens * (targets >= 0)).sum(1)}


def tokenizer() -> Any:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, VOCAB)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def make(kind: Any, config: Any, folder: Path, model: Any, columns: dict[str, Any], **options: Any) -> Any:
    """A trainer of TRL; its data set is a placeholder, as the test gives it batches."""
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    rest = {"ref_model": options.pop("ref_model")} if "ref_model" in options else {}
    data = datasets.Dataset.from_dict({name: [value] * 2 for name, value in columns.items()})
    arguments = config(output_dir=str(folder), disable_dropout=True, **quiet, **options)
    return kind(model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), **rest)


def dpo(folder: Path, module: PreferenceModule, reference: Any, batch: Batch, **options: Any) -> tuple[Tensor, Any]:
    columns = {"prompt": "w2 w3", "chosen": "w4", "rejected": "w5"}
    trainer = make(DPOTrainer, DPOConfig, folder, module.model, columns, ref_model=reference, **options)
    order = [*range(0, len(batch["labels"]), 2), *range(1, len(batch["labels"]), 2)]
    inputs = {name: batch[name][order] for name in ("input_ids", "attention_mask")}
    inputs["completion_mask"] = (batch["labels"][order] >= 0).long()
    return trainer._compute_loss(module.model, inputs, False), means(trainer._metrics["train"])


def means(metrics: Any) -> dict[str, float]:
    """The metrics of TRL under the names of the module."""
    names = {"rewards/accuracies": "rewards_accuracy", "rewards/margins": "rewards_margin"}
    return {
        names.get(name, name.replace("/", "_")): float(torch.as_tensor(value).float().mean())
        for name, value in metrics.items()
        if name.startswith(("rewards/", "logps/"))
    }


def kto(folder: Path, module: PreferenceModule, reference: Any, batch: Batch, **options: Any) -> tuple[Tensor, Any]:
    columns = {"prompt": "w2 w3", "completion": "w4", "label": True}
    trainer = make(KTOTrainer, KTOConfig, folder, module.model, columns, ref_model=reference, **options)
    inputs: dict[str, Tensor] = {"label": batch["desirable"] == 1}
    for prefix, start in (("", 0), ("KL_", 1)):
        inputs |= {f"{prefix}{name}": batch[name][start::2] for name in ("input_ids", "attention_mask")}
        inputs[f"{prefix}completion_mask"] = (batch["labels"][start::2] >= 0).long()
    return trainer._compute_loss(module.model, inputs, False), means(trainer._metrics["train"])


def without_reference(kind: Any, config: Any) -> Any:
    def score(folder: Path, module: PreferenceModule, _: Any, batch: Batch, **options: Any) -> tuple[Tensor, Any]:
        columns = {"prompt": "w2 w3", "chosen": "w4", "rejected": "w5"}
        trainer = make(kind, config, folder, module.model, columns, **options)
        inputs = {
            f"{side}_{name}": batch[name][start::2]
            for side, start in (("chosen", 0), ("rejected", 1))
            for name in ("input_ids", "attention_mask", "labels")
        }
        loss, metrics = trainer.get_batch_loss_metrics(module.model, inputs, "train")
        return loss, means(metrics)

    return score


simpo = without_reference(CPOTrainer, CPOConfig)
orpo = without_reference(ORPOTrainer, ORPOConfig)
# Name: trainer of TRL, its options, options of the module, and the pairs of a batch (None: all).
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int | None]] = {
    "dpo": (dpo, {"beta": 0.3}, {}, None),
    # Without a batch to sort, this loss of TRL is DPO with smoothing; its "sigmoid" ignores `label_smoothing`.
    "dpo smoothed": (dpo, {"loss_type": ["aot"], "label_smoothing": 0.2}, {"label_smoothing": 0.2}, 1),
    "ipo": (dpo, {"loss_type": ["ipo"]}, {"loss": "ipo"}, None),
    "simpo": (
        simpo,
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.1},
        {"loss": "simpo", "simpo_gamma": 1.0, "label_smoothing": 0.1},
        None,
    ),
    # TRL takes the likelihood over the tokens of a batch.
    "orpo": (orpo, {"beta": 0.2}, {"loss": "orpo"}, 1),
    "kto": (
        kto,
        {"desirable_weight": 1.5, "undesirable_weight": 0.5},
        {"loss": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_rewards_and_gradients_are_those_of_trl(name: str, tmp_path: Path) -> None:
    score, options, ours, size = CASES[name]
    chosen, loss_name = pairs(4, seed=6), ours.get("loss", "dpo")
    reference, theirs = built().model.eval(), moved(built())
    made = {"per_device_train_batch_size": 2} if score is kto else {}
    batches = [collate(chosen[start : start + (size or 4)], loss_name) for start in range(0, 4, size or 4)]
    found = [score(tmp_path, theirs, reference, batch, **made, **options) for batch in batches]
    expected = torch.stack([loss for loss, _ in found]).mean()
    expected.backward()

    module = moved(built(**ours, beta=options.get("beta", 0.1)))
    batch = with_reference(collate(chosen, loss_name), reference)
    loss = module.training_step(batch)
    loss.backward()

    torch.testing.assert_close(loss, expected, **CLOSE)
    gradients = {key: weight.grad for key, weight in theirs.model.named_parameters()}
    for key, weight in module.model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients.pop(key), **CLOSE, msg=key)
    assert not gradients
    if loss_name == "kto":
        assert module._score_examples(batch)[2].mean() > 0.1  # TRL clamps the KL term at 0.
    module._evaluate(batch, module.val_metrics)
    values = {key.removeprefix("val_"): float(value) for key, value in module.val_metrics.compute().items()}
    assert values.pop("loss") == pytest.approx(loss.item(), abs=1e-5)
    for key, value in values.items():
        assert value == pytest.approx(sum(metrics[key] for _, metrics in found) / len(found), abs=1e-5), key
