"""Plans of models of many sizes, batches and GPUs, in figures that a change of the planner should not move unseen.

Written anew by `python -m tests.support.goldens`, for a change that is meant to move them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from lightning_protrain.models.published import find_config
from lightning_protrain.models.repeated_blocks import Method
from lightning_protrain.planner.plan import Plan
from lightning_protrain.plans import TrainingOptions, answers_for
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware

PATH = Path(__file__).parent.parent / "planner" / "goldens.json"
MODELS: dict[str, tuple[str, Method]] = {
    "8B full": ("meta-llama/Llama-3.1-8B", "full"),
    "8B LoRA": ("meta-llama/Llama-3.1-8B", "lora"),
    "32B LoRA": ("Qwen/Qwen3-32B", "lora"),
}
BATCHES = ((1, 4096), (4, 4096), (1, 16384))
GPUS = ("RTX 4090", "A100 80GB SXM", "H100 SXM")


def predictions(model: str, batch: tuple[int, int]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name of each case of a model and a batch, and the predicted bytes and seconds of its plan."""
    name, method = MODELS[model]
    samples, length = batch
    hardware = DryRunHardware(GPUS, host_memory="256GiB", host_cores=16)
    options = TrainingOptions(method, "bf16-mixed", samples, length, "torch.optim.AdamW")
    for gpu, plan in answers_for(find_config(name), options, hardware).items():
        case = f"{model}, {samples} x {length}, {gpu}"
        assert isinstance(plan, Plan), f"{case}: {plan}"
        assert plan.prediction is not None
        yield (
            case,
            {
                "device_bytes": plan.prediction.device_bytes,
                "host_bytes": plan.prediction.host_bytes,
                "seconds": plan.prediction.step_seconds,
            },
        )


if __name__ == "__main__":
    made = dict(each for model, batch in product(MODELS, BATCHES) for each in predictions(model, batch))
    PATH.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
