"""Parts of `benchmarks.gpu`: random Llamas under the strategy and other systems, with measured steps and memory."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.beside import beside
from benchmarks.systems import LEARNING_RATE, PLAIN, SYSTEMS
from benchmarks.transfers import DeviceTrace
from lightning_protrain.config import parse_bytes
from lightning_protrain.device.device import open_device
from lightning_protrain.models.lora import base_of
from lightning_protrain.models.loss import chunked_cross_entropy
from lightning_protrain.models.optimizer import choose_optimizer
from lightning_protrain.planner.memory_timeline import measured_alpha
from lightning_protrain.profiler.hardware import profile_hardware
from lightning_protrain.runtime.optim.threads import MOST_THREADS
from lightning_protrain.strategy.protrain import ProTrainStrategy

PACKAGES = (
    "torch",
    "lightning",
    "transformers",
    "peft",
    "bitsandbytes",
    "torchao",
    "deepspeed",
    "torchmetrics",
    "numpy",
)
GIB = 1 << 30
WARM_UP, TRACED = 2, 2  # Steps before and after the timed ones.
Finish = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        system: `"protrain"`, or one of `SYSTEMS`.
        hidden: Hidden size of a Llama.
        layers: Number of its blocks.
        batch: Sequences in a step.
        sequence: Tokens of a sequence.
        vocabulary: Size of the vocabulary.
        options: Arguments of `ProTrainStrategy`.
        memory: Limit of the allocator, e.g. `"22GiB"`; None: no limit beyond the device.
        precision: As in the Trainer.
        clip: Maximum norm of the gradients; None does not clip.
        lora: True trains only adapters.
        four_bits: True quantises the blocks' weights to four bits.
        intermediate: Size of the feed-forward layers; None: 27/8 of the hidden size.
        key_value_heads: Number of heads of keys and values; None: as many as of queries.
        optimizer: As in `CausalLMModule`; None: AdamW.
        loss_chunk_tokens: Tokens whose logits exist at the same time; None: all.
        accumulate: Micro-batches of a step.
        checkpointed: True checkpoints all blocks in systems without a plan.
        steps: Number of timed steps.
    """

    system: str = "protrain"
    hidden: int = 2560
    layers: int = 32
    batch: int = 8
    sequence: int = 2048
    vocabulary: int = 32_000
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: str | None = None
    precision: str = "bf16-mixed"
    clip: float | None = None
    lora: bool = False
    four_bits: bool = False
    intermediate: int | None = None
    key_value_heads: int | None = None
    optimizer: str | Mapping[str, Any] | None = None
    loss_chunk_tokens: int | None = None
    accumulate: int = 1
    checkpointed: bool = False
    steps: int = 4

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.accumulate * self.batch * self.sequence

    def of(self, system: str) -> Case:
        """Return the case for another system: it checkpoints all blocks, and no plan limits its memory."""
        return replace(self, system=system, options={}, memory=None, checkpointed=True, steps=3)

    def tiny(self) -> Case:
        """Return the case with sizes for a CPU."""
        memory = "4MiB"
        options = dict(self.options) | ({"device_memory": memory} if "device_memory" in self.options else {})
        sizes = {"hidden": 128, "layers": 4, "batch": 2, "sequence": 32, "vocabulary": 256, "steps": 1}
        several = {"accumulate": min(self.accumulate, 2), "intermediate": self.intermediate and 384}
        heads = self.key_value_heads and 1
        return replace(
            self, **sizes, **several, key_value_heads=heads, memory=memory if self.memory else None, options=options
        )


# A budget is the plan's alone, so that a peak above the prediction is seen. "capped" also limits the allocator.
_3B = Case(options={"device_memory": "22GiB"})
_8B = Case(hidden=4096, batch=4, lora=True, precision="bf16-true", options={"device_memory": "12GiB"})
_8B_4BIT = replace(_8B, batch=2, precision="bf16-mixed", four_bits=True, options={"device_memory": "6GiB"})
_1B = Case(hidden=2048, layers=16, batch=4, memory="10GiB", options={"device_memory": "10GiB"}, steps=2)
# Qwen2.5-7B as LLMQ trains it: weights and moments in bfloat16, on a card of 80 GB.
_7B = Case(
    hidden=3584,
    layers=28,
    intermediate=18_944,
    key_value_heads=4,
    vocabulary=152_064,
    batch=4,
    sequence=1024,
    accumulate=8,
    loss_chunk_tokens=1024,
    precision="bf16-true",
    steps=3,
    optimizer={"class_path": "split_adamw_bf16", "init_args": {"masters": False}},
    options={"device_memory": "78GiB"},
)
# Llama 3.1 8B as in configs/full-8b-24gb.yaml, and a long text.
_LLAMA = Case(
    hidden=4096,
    intermediate=14_336,
    key_value_heads=8,
    vocabulary=128_256,
    loss_chunk_tokens=1024,
    precision="bf16-true",
    steps=1,
)
_SMALL = Case(hidden=1536, layers=16, batch=4, steps=8)
CASES: dict[str, Case] = {
    "3b auto": _3B,
    "3b plain": _3B.of(PLAIN),
    "3b fsdp2": replace(_3B.of("FSDP2 with CPUOffloadPolicy"), steps=2),  # It takes long to build and to begin.
    "3b torchao": _3B.of("torchao CPUOffloadOptimizer"),
    "3b deepspeed": _3B.of("DeepSpeed ZeRO-3 Offload"),
    "3b capped": replace(_3B, memory="22GiB", steps=3),
    "3b clipped": replace(_3B, clip=1.0, steps=3),
    "3b offload": replace(_3B, options={"plan": "offload"}, steps=3),
    "8b lora auto": _8B,
    "8b lora plain": _8B.of(PLAIN),
    "8b qlora auto": _8B_4BIT,
    "8b qlora plain": _8B_4BIT.of(PLAIN),
    "memory: bf16-true": replace(_1B, precision="bf16-true"),
    "memory: fp32": replace(_1B, precision="32-true", batch=1),
    "memory: LoRA": replace(_1B, lora=True, precision="bf16-true", memory="4GiB", options={"device_memory": "4GiB"}),
    "memory: swap": replace(
        _1B, memory=None, options={"device_memory": "10GiB", "num_swap_blocks": 2, "num_checkpoint_blocks": 2}
    ),
    "7b whole": _7B,
    # A step of it takes half a minute, so it is not rehearsed.
    "8b masters": replace(
        _LLAMA,
        optimizer="split_adamw_8bit",
        clip=1.0,
        options={"device_memory": "22GiB", "host_memory": "56GiB", "rehearse": False},
    ),
    "8b long": replace(_LLAMA, lora=True, batch=1, sequence=49_152, options={"device_memory": "22GiB"}),
    "resident": replace(_SMALL, options={"plan": "resident"}),
    "resident plain": replace(_SMALL, system=PLAIN),
}


# --- the model --------------------------------------------------------------------------------------------------------


def build(case: Case, device: str) -> nn.Module:
    """Return a Llama on the host; its random weights are drawn on the device, which is much faster."""
    config = transformers.LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate or case.hidden * 27 // 8 // 16 * 16,
        num_hidden_layers=case.layers,
        num_attention_heads=max(case.hidden // 128, 1),
        num_key_value_heads=case.key_value_heads,
        max_position_embeddings=case.sequence,
        use_cache=False,
    )
    dtype = torch.bfloat16 if case.precision == "bf16-true" or case.four_bits else torch.float32
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if case.four_bits and isinstance(module, nn.Linear) and ".layers." in name:
            model.set_submodule(name, _in_four_bits(module, device))
            continue
        for key, weight in module._parameters.items():
            if weight is not None:
                values = _drawn(weight, device, dtype, 1.0 if "norm" in name else None)
                module._parameters[key] = nn.Parameter(values.cpu())
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # Its tables are not parameters.
    if case.checkpointed:
        for block in model.model.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if not case.lora:
        return model
    model.is_loaded_in_4bit = case.four_bits
    peft = importlib.import_module("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))


def _drawn(weight: Tensor, device: str, dtype: torch.dtype, value: float | None = None) -> Tensor:
    values = torch.empty(weight.shape, device=device, dtype=dtype)
    return values.normal_(0.0, 0.02) if value is None else values.fill_(value)


def _in_four_bits(linear: nn.Linear, device: str) -> nn.Module:
    bnb = importlib.import_module("bitsandbytes")
    kinds = {"compress_statistics": True, "quant_type": "nf4"}
    sizes = (linear.in_features, linear.out_features)
    made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, device="meta", **kinds)
    values = _drawn(linear.weight, device, torch.bfloat16)
    made.weight = bnb.nn.Params4bit(values, requires_grad=False, **kinds).to(device).to("cpu")
    return made


class Llama(L.LightningModule):
    """A Llama with random weights and AdamW, trained on random tokens.

    Args:
        case: Sizes and training options.
        device: Device on which weights are drawn.
    """

    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        self._case, self._system = case, SYSTEMS.get(case.system, SYSTEMS[PLAIN])
        self._is_sharded = False
        self.model = build(case, device)
        self.seen: Measured | None = None  # From the begin of training on.

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of tokens (B, S)."""
        if self.seen is not None:
            self.seen.begin_step()
        loss = self._loss(batch[0])
        if self.seen is not None:
            self.seen.losses.append(loss.detach())
        return loss

    def _loss(self, tokens: Tensor) -> Tensor:
        if self._case.loss_chunk_tokens is None:
            found: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return found
        base = base_of(self.model)
        hidden = base.base_model(input_ids=tokens)[0]
        total, count = chunked_cross_entropy(hidden, base.get_output_embeddings(), tokens, self._case.loss_chunk_tokens)
        return total / count

    def configure_model(self) -> None:
        if self._system.shard is not None and not self._is_sharded:
            self._system.shard(self.model)
            self._is_sharded = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [(name, weight) for name, weight in self.named_parameters() if weight.requires_grad]
        if self._case.optimizer is not None:
            return choose_optimizer(self._case.optimizer).make(trained, LEARNING_RATE, 0.0, (0.9, 0.95))
        return self._system.optimizer(weight for _, weight in trained)


# --- one run ----------------------------------------------------------------------------------------------------------


class Measured(L.Callback):
    """A callback that times steps, and reads the counters of the allocator and the strategy.

    With `finish`, it also traces two more steps, if the strategy trains on a GPU and the case times several steps.

    `training_step` calls it: hooks of callbacks between two steps would keep gradients out of the memory of copies.

    Args:
        case: The case.
        device: Device that trains.
        finish: Called with the result at the end of training; it may end the process, so that the Trainer does not move
            gigabytes of states to the host.

    Attributes:
        losses: Loss of each step, on the device.
    """

    def __init__(self, case: Case, device: str, finish: Finish | None = None) -> None:
        self._case, self._device, self._finish = case, device, finish
        self._begins: list[float] = []
        self._micro_batches = 0
        self.losses: list[Tensor] = []
        self._result: dict[str, Any] = {}
        self._trace = DeviceTrace() if self._traces() else None
        self._strategy: Any = None

    @property
    def num_steps(self) -> int:
        """Number of steps to train."""
        return WARM_UP + self._case.steps + (TRACED if self._trace is not None else 0)

    def _traces(self) -> bool:
        several = self._case.steps > 1
        return self._finish is not None and self._device == "cuda" and self._case.system == "protrain" and several

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.seen = self  # type: ignore[assignment]
        self._strategy = trainer.strategy
        plan = getattr(trainer.strategy, "plan", None)
        if plan is not None and plan.prediction is not None:
            self._result["predicted"] = {
                "device_bytes": plan.prediction.device_bytes,
                "host_bytes": plan.prediction.host_bytes,
                "step_seconds": plan.prediction.step_seconds,
                "busy": dict(plan.prediction.busy),
                "bound": plan.prediction.bound,
                "alpha": plan.prediction.alpha,
            }
        if plan is not None:
            policies = [block.policy.value for block in plan.blocks]
            self._result["plan"] = {
                "chunks": len(plan.chunks),
                "offloaded": plan.num_offloaded_chunks,
                "buffers": plan.num_chunk_buffers,
                "blocks": {policy: policies.count(policy) for policy in sorted(set(policies))},
            }
        print(json.dumps({"before the first step": self._result}), flush=True)

    def begin_step(self) -> None:
        """Note the time, once the device has ended the step before, at the first micro-batch of a step."""
        self._micro_batches += 1
        if (self._micro_batches - 1) % self._case.accumulate:
            return
        if self._device == "cuda":
            torch.cuda.synchronize()
            if len(self._begins) == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
        if len(self._begins) == WARM_UP + self._case.steps:
            self._read_memory()
            if self._trace is not None:
                self._trace.start(self._strategy)
        self._begins.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        seconds = [end - begin for begin, end in pairwise([*self._begins, time.perf_counter()])]
        timed = seconds[WARM_UP : WARM_UP + self._case.steps]
        if self._trace is None:
            self._read_memory()
        self._result["measured"] |= {
            "step_seconds": statistics.median(timed),
            "all_step_seconds": seconds,
            "tokens_per_second": self._case.tokens / statistics.median(timed),
            "losses": [float(loss) for loss in self.losses],
        }
        if self._trace is not None:
            print(json.dumps({"before the trace is read": self._result}), flush=True)
            self._result |= self._trace.stop(self._strategy, TRACED)
        if self._finish is not None:
            self._finish(self.result())

    def _read_memory(self) -> None:
        found: dict[str, Any] = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if self._device == "cuda":
            found |= {
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"],
            }
        if isinstance(self._strategy, ProTrainStrategy):
            found["counters"] = asdict(self._strategy.counters)
            request, plan = self._strategy.session.request, self._strategy.plan
            if "reserved_bytes" in found and request is not None and plan is not None and plan.prediction is not None:
                found["alpha"] = measured_alpha(request.here(), plan, found["reserved_bytes"])
        self._result["measured"] = found

    def result(self) -> dict[str, Any]:
        """Return predictions, measurements and their ratios."""
        predicted, measured = self._result.get("predicted"), self._result["measured"]
        ratios: dict[str, float] = {}
        if predicted is not None:
            ratios["step"] = measured["step_seconds"] / predicted["step_seconds"]
            if "peak_bytes" in measured:
                ratios["peak"] = measured["peak_bytes"] / predicted["device_bytes"]
        return {"case": asdict(self._case), **self._result, "measured over predicted": ratios}


def train(device: str, case: Case, finish: Finish | None = None) -> dict[str, Any]:
    """Train a case; print the prediction before the first step, and return the measurements.

    Args:
        device: `"cuda"` or `"cpu"`.
        case: What to train.
        finish: Called with the result at the end of training, before the Trainer cleans up.
    """
    torch.manual_seed(0)
    module, seen = Llama(case, device), Measured(case, device, finish)
    limit = parse_bytes(case.memory) if case.memory else None
    if device == "cuda" and limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    if case.system == "protrain":
        strategy: Any = ProTrainStrategy(monitor=False, **case.options)
    else:
        strategy = SYSTEMS[case.system].strategy(device)
    tokens = torch.randint(case.vocabulary, (seen.num_steps * case.accumulate * case.batch, case.sequence))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=device,
        devices=1,
        precision=case.precision,  # type: ignore[arg-type]
        gradient_clip_val=case.clip,
        accumulate_grad_batches=case.accumulate,
        max_steps=seen.num_steps,
        max_epochs=-1,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=case.batch))
    return seen.result()


# --- small parts ------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Return properties of the machine."""
    nodes, huge = Path("/sys/devices/system/node"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "numa_nodes": len([*nodes.glob("node[0-9]*")]) if nodes.is_dir() else 1,
        "huge_pages": huge.read_text().strip() if huge.is_file() else None,
        "packages": {name: _version(name) for name in PACKAGES},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory}
        if shutil.which("nvidia-smi"):
            run = subprocess.run(["nvidia-smi", "-q", "-d", "PCI"], capture_output=True, text=True, check=False)
            found["pci"] = [line.strip() for line in run.stdout.splitlines() if "Generation" in line or "Width" in line]
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def hardware(device: str) -> dict[str, Any]:
    """Return the measured hardware profile, and the rate at which host memory is page-locked."""
    index = 0 if device == "cuda" else None
    opened = open_device(torch.device(device, index), print)
    try:
        began, size = time.perf_counter(), 4 * GIB if device == "cuda" else 1 << 20
        block = opened.host.empty(size)
        locking = size / (time.perf_counter() - began)
        del block
        found: dict[str, Any] = json.loads(profile_hardware(opened, [torch.float32, torch.bfloat16]).to_json())
        return found | {"locking": locking}
    finally:
        opened.close()


def host_beside(device: str) -> dict[str, Any]:
    """Return what `benchmarks.beside` measures, with a line of the step's own number of threads."""
    found = beside(device)
    said = [
        f"{name} {one['alone'] / 1e9:.2f} alone, {one['beside'] / 1e9:.2f} beside, loop {one['loop']:.2f}"
        for name, numbers in found.items()
        for one in [numbers[str(MOST_THREADS)]]
    ]
    return {"counts": "; ".join(said), "rates": found}


WAYS: dict[str, dict[str, Any]] = {
    "offload": {"plan": "offload"},
    "resident": {"plan": "resident"},
    "auto": {"rehearse": True, "device_memory": "120MiB"},
    "forward": {"plan": "offload", "overlap_optimizer": "forward"},
}


def smoke_cases(device: str) -> dict[str, Case]:
    """Return small cases, one for each way of training that is compared with plain Lightning."""
    case = Case(hidden=512, layers=6, sequence=128, vocabulary=512, batch=4, steps=2)
    budget = "120MiB"
    if device == "cpu":
        case, budget = replace(case, hidden=128, layers=3, sequence=32, batch=2, steps=1), "4MiB"
    cases = {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        for way, options in WAYS.items():
            given = options | ({"device_memory": budget} if "device_memory" in options else {})
            cases[f"{precision}, {way}"] = replace(case, precision=precision, options=given)
    wide = WAYS["auto"] | {"device_memory": budget if device == "cuda" else "24MiB"}
    return cases | {
        "clipped, offload": replace(case, clip=0.1, options=WAYS["offload"]),
        "GQA, auto": replace(case, hidden=512, key_value_heads=2, options=wide),
        "LoRA, offload": replace(case, lora=True, precision="bf16-true", options=WAYS["offload"]),
    }


# Losses in bfloat16 differ from plain Lightning's by the rounding of kernels that the device chooses by address.
CLOSE = 0.02


def smoke(device: str, save: Finish) -> dict[str, Any]:
    """Train small cases in each way, and return the largest difference of a loss from plain Lightning, or the error.

    Args:
        device: `"cuda"` or `"cpu"`.
        save: Called with the results so far after each case.
    """
    runs: dict[str, dict[str, Any]] = {}
    plain: dict[str, list[float]] = {}
    for name, case in smoke_cases(device).items():
        began, peer = time.perf_counter(), repr(replace(case, system=PLAIN, options={}))
        try:
            if peer not in plain:
                plain[peer] = train(device, replace(case, system=PLAIN, options={}))["measured"]["losses"]
            losses = train(device, case)["measured"]["losses"]
            worst = max(abs(one - other) for one, other in zip(losses, plain[peer], strict=True))
            runs[name] = {"worst": worst, "equal": losses == plain[peer]}
        except Exception as error:  # noqa: BLE001 the other cases are run all the same
            traceback.print_exc()
            runs[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        runs[name]["seconds"] = time.perf_counter() - began
        _free(device)
        save(_summary(runs))
    return _summary(runs)


def _summary(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ran = {name: run for name, run in runs.items() if "worst" in run}
    equal = sum(run["equal"] for run in ran.values())
    worst = max((run["worst"] for run in ran.values()), default=math.nan)
    failed = [f"{name}: {run['error'].splitlines()[0]}" for name, run in runs.items() if "error" in run]
    failed += [f"{name}: differs by {run['worst']:.2g}" for name, run in ran.items() if not run["worst"] <= CLOSE]
    counts = f"{len(ran)} of {len(runs)} ran, {equal} bitwise, worst loss difference {worst:.2g}"
    return {"counts": counts, "failed": failed, "runs": runs}


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def run_part(name: str, device: str, save: Finish) -> None:
    """Run a part by name.

    Args:
        name: `"machine"`, `"hardware"`, `"host beside"`, `"smoke"`, or a key of `CASES`.
        device: `"cuda"` or `"cpu"`.
        save: Called with the result, and with results before the part has ended.
    """
    if name in CASES:
        train(device, CASES[name] if device == "cuda" else CASES[name].tiny(), save)
    elif name == "smoke":
        save(smoke(device, save))
    else:
        save({"machine": machine, "hardware": hardware, "host beside": host_beside}[name](device))
