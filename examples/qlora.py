"""Train adapters on weights that are quantised to four bits while they are read (QLoRA); needs the extra `bnb`."""

from __future__ import annotations

import lightning as L

from lightning_protrain import CausalLMModule, ChatDataModule, PlanMonitor, SavePretrained

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


def main(model: str = "models/my-model", data: str = "data/chats.jsonl", max_steps: int = 1000) -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="protrain",
        devices=1,
        precision="bf16-mixed",
        max_steps=max_steps,
        accumulate_grad_batches=8,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PlanMonitor(), SavePretrained("adapters")],
    )
    trainer.fit(
        CausalLMModule(model, quantization=FOUR_BITS, dtype="bfloat16", lora={"r": 16}, learning_rate=2e-4),
        ChatDataModule(data, tokenizer=model, max_length=2048, batch_size=1),
    )


if __name__ == "__main__":
    main()
