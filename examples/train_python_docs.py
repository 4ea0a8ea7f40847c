"""Train a small Llama on Python's docstrings with a fraction of the device memory that its states would take."""

from __future__ import annotations

import argparse

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
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--device-memory", default="112MiB")
    parser.add_argument("--dataset", default="stdlib", help="or a .jsonl file")
    parser.add_argument("--cache-dir", default=None)
    args = parser.parse_args()

    L.seed_everything(0)
    shape = {"hidden_size": args.hidden_size, "num_hidden_layers": args.num_layers}
    more = {"intermediate_size": 3 * args.hidden_size, "num_attention_heads": 8, "max_position_embeddings": 512}
    model = CausalLMModule(config={"model_type": "llama", **shape, **more}, learning_rate=1e-3, warmup_steps=10)
    data = ChatDataModule(args.dataset, vocab_size=260, max_length=96, batch_size=6, cache_dir=args.cache_dir)
    trainer = L.Trainer(
        strategy=ProTrainStrategy(device_memory=args.device_memory),
        devices=1,
        max_epochs=1,
        max_steps=args.max_steps,
        val_check_interval=args.max_steps,
        limit_val_batches=20,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PlanMonitor(), SampleCompletion(["What does `os.path.join` do?"]), InitialValidation()],
    )
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
