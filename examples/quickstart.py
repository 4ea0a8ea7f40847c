"""Train a small Llama on questions for capitals with a fraction of the device memory that its states would take."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L

from lightning_protrain import (
    CausalLMModule,
    ChatDataModule,
    InitialValidation,
    PlanMonitor,
    ProTrainStrategy,
    SampleCompletion,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--max-epochs", type=int, default=4)
    parser.add_argument("--device-memory", default="96MiB")
    parser.add_argument("--dataset", default=str(Path(__file__).with_name("data") / "capitals.jsonl"))
    parser.add_argument("--cache-dir", default=None)
    args = parser.parse_args()

    L.seed_everything(0)
    shape = {"hidden_size": args.hidden_size, "num_hidden_layers": args.num_layers}
    more = {"intermediate_size": 3 * args.hidden_size, "num_attention_heads": 8, "max_position_embeddings": 512}
    model = CausalLMModule(config={"model_type": "llama", **shape, **more}, learning_rate=3e-4, warmup_steps=10)
    sizes = {"vocab_size": 600, "max_length": 64, "batch_size": 4, "val_fraction": 0.09}
    data = ChatDataModule(args.dataset, cache_dir=args.cache_dir, **sizes)
    trainer = L.Trainer(
        strategy=ProTrainStrategy(device_memory=args.device_memory),
        devices=1,
        max_epochs=args.max_epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PlanMonitor(), SampleCompletion(["What is the capital of Italy?"], 12), InitialValidation()],
    )
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
