"""Benchmark of the fragmentation of PyTorch's caching allocator on a CUDA device, by dtype of the weights.

    python -m benchmarks.fragmentation
    python -m benchmarks.fragmentation --dtype bfloat16 uint8 --tokens 4x2048 --hidden 2048 --layers 8

For each dtype, a Llama-like model trains a few steps with AdamW. The program prints the ratio of the peaks of
`memory_reserved` and `memory_allocated`, and the constant in `lightning_protrain.planner.problem` by which the planner
multiplies activations. That constant also corrects predictions, so it may be below 1, unlike the ratio. uint8 means
weights of 4 bits (NF4, with adapters of rank 16), and requires bitsandbytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import table
from benchmarks.step_overhead import parse_tokens
from lightning_protrain.planner.problem import alpha_for_dtype

# float32 weights are trained under bfloat16 autocast, as in `bf16-mixed`.
DTYPES = ("float32", "bfloat16", "uint8")
COLUMNS = ("weights", "allocated", "reserved", "factor", "constant")
VOCABULARY, RANK = 32_000, 16


@dataclass(frozen=True)
class Peaks:
    """Peaks of memory, bytes.

    Attributes:
        allocated: Memory of tensors, as rounded by the allocator.
        reserved: Memory that the allocator has taken from the device.
    """

    allocated: int
    reserved: int

    @property
    def factor(self) -> float:
        """Ratio of reserved and allocated bytes."""
        return self.reserved / self.allocated


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    if not torch.cuda.is_available():
        print("fragmentation measures the allocator of a CUDA device and there is none.", file=sys.stderr)
        sys.exit(2)
    rows = []
    for dtype in args.dtype:
        if dtype == "uint8" and importlib.util.find_spec("bitsandbytes") is None:
            print("Weights of 4 bits need bitsandbytes: `pip install lightning-protrain[bnb]`.", file=sys.stderr)
            continue
        rows.append(row(dtype, measure(dtype, args)))
    print(torch.cuda.get_device_name())
    print(table(COLUMNS, rows))


def row(dtype: str, peaks: Peaks) -> list[str]:
    """Return one row of the table."""
    sizes = [f"{nbytes / 2**30:.3f} GiB" for nbytes in (peaks.allocated, peaks.reserved)]
    return [dtype, *sizes, f"{peaks.factor:.3f}", f"{alpha_for_dtype(dtype):.2f}"]


def measure(dtype: str, args: argparse.Namespace) -> Peaks:
    """Return the peaks of a few training steps, starting with an empty cache."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    model = build(dtype, args.hidden, args.layers).cuda().train()
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        ids = torch.randint(VOCABULARY, args.tokens, device="cuda")
        with _context(dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Peaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def build(dtype: str, hidden: int, layers: int) -> nn.Module:
    """Return a Llama-like model whose weights have `dtype`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 128, 1),
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM._from_config(
        config, dtype=torch.bfloat16 if dtype == "uint8" else _dtype(dtype)
    )
    if dtype == "uint8":
        _pack(model)
        return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    return model


def _pack(model: nn.Module) -> None:
    """Replace the linear layers, except the head, by layers with 4-bit weights."""
    import bitsandbytes

    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and not name.endswith("lm_head"):
            packed: Any = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, False, torch.bfloat16, quant_type="nf4"
            )
            packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, packed)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _context(dtype: str) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == "bfloat16" else torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=list(DTYPES), help="default: all")
    parser.add_argument("--tokens", type=parse_tokens, default=(4, 2048), help="sequences x tokens, e.g. 4x2048")
    parser.add_argument("--hidden", type=int, default=2048, help="width, a multiple of 128")
    parser.add_argument("--layers", type=int, default=12, help="blocks")
    parser.add_argument("--steps", type=int, default=4, help="training steps")
    args = parser.parse_args(arguments)
    if min(args.hidden, args.layers, args.steps, *args.tokens) < 1 or args.hidden % 128:
        parser.error("give positive numbers, and a width that is a multiple of 128")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
