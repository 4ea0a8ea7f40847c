"""Print the plan of a model without allocating the model: `python inspect_plan.py --device-memory 24GiB`."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_protrain.callbacks.plan_monitor import render_plan
from lightning_protrain.config import parse_bytes
from lightning_protrain.planner.memory import StatesProblem
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.profiler.blocks import describe_model

ADAM_BYTES = 8  # two moments in fp32 for each trainable element


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--device-memory", type=parse_bytes, default="24GiB", help="for model states")
    args = parser.parse_args()

    config = AutoConfig.for_model(
        "llama",
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 11 // 4,
        num_attention_heads=args.hidden_size // 64,
        num_hidden_layers=args.num_layers,
        vocab_size=args.vocab_size,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layout = describe_model(model)
    plan = make_plan(StatesProblem(layout, ADAM_BYTES, device_bytes=args.device_memory))
    console = Console()
    console.print(f"{model.num_parameters() / 1e9:.2f} billion parameters, {len(layout.blocks)} blocks")
    console.print(render_plan(plan, args.device_memory))


if __name__ == "__main__":
    main()
