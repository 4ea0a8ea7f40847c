"""Evaluate a model under a memory budget: loss, perplexity and accuracy, each token of each row counted once."""

from __future__ import annotations

import lightning as L

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainStrategy


def main(model: str = "models/my-model", data: str = "data/chats.jsonl", device_memory: str = "auto") -> None:
    trainer = L.Trainer(strategy=ProTrainStrategy(device_memory=device_memory), devices=1, logger=False)
    # To evaluate a checkpoint of a run: test(..., ckpt_path="checkpoints/epoch=0-step=500.ckpt").
    (found,) = trainer.test(
        CausalLMModule(model),
        ChatDataModule(data, tokenizer=model, max_length=2048, batch_size=4, val_fraction=0.5),
        verbose=False,
    )
    for name, value in found.items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    main()
