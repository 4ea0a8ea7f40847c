"""Train on two ranks that share one copy of the streamed weights: two GPUs, or two processes on the CPU."""

from __future__ import annotations

import lightning as L

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainStrategy


def main(
    model: str = "models/my-model",
    data: str = "data/chats.jsonl",
    device_memory: str = "auto",
    max_steps: int = 1000,
) -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=ProTrainStrategy(device_memory=device_memory, sharding="shard"),
        devices=2,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        CausalLMModule(model, learning_rate=1e-5),
        ChatDataModule(data, tokenizer=model, max_length=1024, batch_size=2),  # two rows on each rank
    )
    if trainer.is_global_zero:
        print(f"train_loss {float(trainer.callback_metrics['train_loss']):.4f} on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
