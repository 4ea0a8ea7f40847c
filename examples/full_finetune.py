"""Train all weights of a model in less memory than they take with their optimizer states; run it again to resume."""

from __future__ import annotations

import lightning as L

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainCheckpoint, ProTrainStrategy


def main(
    model: str = "models/my-model", data: str = "data/chats.jsonl", device_memory: str = "auto", max_steps: int = 1000
) -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=ProTrainStrategy(device_memory=device_memory),
        devices=1,
        precision="bf16-mixed",
        max_steps=max_steps,
        val_check_interval=0.5,  # of an epoch
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[ProTrainCheckpoint("checkpoints", monitor="val_loss", save_last=True)],
    )
    trainer.fit(
        CausalLMModule(model, learning_rate=1e-5),
        ChatDataModule(data, tokenizer=model, max_length=2048, batch_size=1, packing=True),
        ckpt_path="last",  # the newest undamaged checkpoint; from the beginning if there is none
    )
    # The model as transformers reads it: lightning-protrain export checkpoints models/trained --take best


if __name__ == "__main__":
    main()
