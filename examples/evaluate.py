"""Evaluate a model under a memory budget: loss, accuracy and loss by position, each token of each row counted once."""

from __future__ import annotations

import lightning as L
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoConfig

from lightning_protrain import CausalLMModule, ChatDataModule, PositionScores, ProTrainStrategy


def main(model: str = "models/my-model", data: str = "data/chats.jsonl", device_memory: str = "auto") -> None:
    vocab_size = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    metrics = {
        "top5": MulticlassAccuracy(num_classes=vocab_size, top_k=5, average="micro"),
        "positions": PositionScores(num_buckets=4, bucket_size=4),
    }
    trainer = L.Trainer(strategy=ProTrainStrategy(device_memory=device_memory), devices=1, logger=False)
    # To evaluate a checkpoint of a run: test(..., ckpt_path="checkpoints/epoch=0-step=500.ckpt").
    (found,) = trainer.test(
        CausalLMModule(model, metrics=metrics),
        ChatDataModule(data, tokenizer=model, max_length=2048, batch_size=4, val_fraction=0.5),
        verbose=False,
    )
    for name in ("loss", "perplexity", "accuracy", "top5"):
        print(f"{name} {found[f'test_{name}']:.4f}")
    for first in (0, 4, 8, 12):
        if f"test_loss_{first}" in found:
            loss, accuracy = found[f"test_loss_{first}"], found[f"test_accuracy_{first}"]
            print(f"from token {first} of an answer: loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
