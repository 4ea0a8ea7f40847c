"""Tests of correctness, predictions and speed (relative to other systems) on a GPU, within a time limit.

    python -m benchmarks.gpu --minutes 25 --json out.json
    python -m benchmarks.gpu --minutes 9 --json more.json --only offload "auto, clipped"
    python -m benchmarks.gpu --device cpu --minutes 3 --json out.json
    python -m benchmarks.gpu --page out.json > docs/gpu.md

The most valuable parts run first. Each part runs in its own process, which is killed at its time limit, and its result
is written before the next part begins. No part needs a network, git, or packages beyond those of the strategy; parts
whose package is not installed are skipped. On a CPU, the same parts run with tiny sizes, to test this program.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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

from benchmarks.report import table
from benchmarks.systems import SYSTEMS
from benchmarks.transfers import TransferProbe
from lightning_protrain.config import parse_bytes
from lightning_protrain.device.device import open_device
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.profiler.hardware import profile_hardware
from lightning_protrain.strategy.protrain import ProTrainStrategy

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "lightning", "transformers", "peft", "bitsandbytes", "torchao", "deepspeed", "torchmetrics")
TAIL = 4000  # Characters of a failed part's output that are kept.


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: Name of the case.
        system: `"protrain"`, or one of `SYSTEMS`.
        hidden: Hidden size of a Llama.
        layers: Number of its blocks.
        batch: Sequences in a step.
        sequence: Tokens of a sequence.
        vocabulary: Size of the vocabulary.
        options: Arguments of `ProTrainStrategy`.
        memory: Maximum device memory, e.g. `"22GiB"`; None means all of it.
        precision: As in the Trainer.
        clip: Maximum norm of the gradients; None does not clip.
        lora: True trains only adapters.
        checkpointed: True checkpoints all blocks in systems without a plan.
        steps: Number of timed steps, after two for warm-up.
    """

    name: str
    system: str = "protrain"
    hidden: int = 2560
    layers: int = 32
    batch: int = 8
    sequence: int = 2048
    vocabulary: int = 32_000
    options: Mapping[str, Any] | None = None
    memory: str | None = None
    precision: str = "bf16-mixed"
    clip: float | None = None
    lora: bool = False
    checkpointed: bool = False
    steps: int = 5


@dataclass(frozen=True)
class Part:
    """A part of the program.

    Attributes:
        name: Name of the part.
        minutes: Time limit.
        run: Takes the device; returns the results.
    """

    name: str
    minutes: float
    run: Callable[[str], dict[str, Any]]


# --- the parts --------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Return properties of the machine."""
    nodes = Path("/sys/devices/system/node")
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared_memory_bytes": shared.free if shared else 0,
        "numa_nodes": len([*nodes.glob("node[0-9]*")]) if nodes.is_dir() else 1,
        "packages": {name: _version(name) for name in PACKAGES},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory}
        if shutil.which("nvidia-smi"):
            found["nvidia_smi"] = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    return found


def hardware(device: str) -> dict[str, Any]:
    """Return the measured hardware profile."""
    opened = open_device(torch.device(device), print)
    try:
        return json.loads(profile_hardware(opened, [torch.float32, torch.bfloat16]).to_json())
    finally:
        opened.close()


def tests(device: str, *paths: str) -> dict[str, Any]:
    """Run tests of the repository, and return their numbers."""
    # Tests of the device read its free memory, which other processes would change.
    several = device == "cuda" and len(paths) > 1 and importlib.util.find_spec("xdist")
    parallel = ["-n", "4"] if several else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, *paths]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": run.returncode, "counts": lines[-1] if lines else run.stderr[-TAIL:], "failed": failed}


def train(device: str, case: Case) -> dict[str, Any]:
    """Train a case; print the prediction before the first step, and return the measurements."""
    torch.manual_seed(0)
    module = Llama(case, device)
    seen = Measured(case, device)
    limit = parse_bytes(case.memory) if case.memory else None
    if device == "cuda" and limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    strategy: Any = SYSTEMS[case.system].strategy() if case.system != "protrain" else None
    if strategy is None:
        strategy = ProTrainStrategy(**{"device_memory": limit or "auto", "monitor": False, **(case.options or {})})
    tokens = torch.randint(case.vocabulary, ((case.steps + 3) * case.batch, case.sequence))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=device,
        devices=1,
        precision=case.precision,  # type: ignore[arg-type]
        gradient_clip_val=case.clip,
        max_steps=case.steps + 3,
        max_epochs=-1,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=case.batch))
    return seen.result()


class Llama(L.LightningModule):
    """A Llama with random weights and AdamW, trained on random tokens.

    Args:
        case: Sizes and training options.
        device: Device on which weights are drawn, because a GPU draws them much faster.
    """

    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        self._system = SYSTEMS.get(case.system, SYSTEMS["plain Lightning"])
        self._is_sharded = False
        config = transformers.LlamaConfig(
            vocab_size=case.vocabulary,
            hidden_size=case.hidden,
            intermediate_size=case.hidden * 27 // 8 // 16 * 16,
            num_hidden_layers=case.layers,
            num_attention_heads=max(case.hidden // 128, 1),
            max_position_embeddings=case.sequence,
            use_cache=False,
        )
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        model = model.to_empty(device="cpu").to(torch.bfloat16 if case.precision == "bf16-true" else torch.float32)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # Its tables are not parameters.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                values = torch.empty_like(weight, device=device)
                weight.copy_(values.fill_(1.0) if "norm" in name else values.normal_(0.0, 0.02))
        if case.checkpointed:
            for block in model.model.layers:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if case.lora:
            peft = importlib.import_module("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        self.model: nn.Module = model
        self.seen: Measured | None = None  # From the begin of training on.

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of tokens (B, S)."""
        if self.seen is not None:
            self.seen.begin_step()
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        if self.seen is not None:
            self.seen.losses.append(loss.detach())
        return loss

    def configure_model(self) -> None:
        if self._system.shard is not None and not self._is_sharded:
            self._system.shard(self.model)
            self._is_sharded = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._system.optimizer(weight for weight in self.parameters() if weight.requires_grad)


class Measured(L.Callback):
    """A callback that times steps, and reads counters of the allocator and the strategy at the end.

    `training_step` calls it: hooks of callbacks between two steps would keep gradients out of the memory of copies.

    Args:
        case: The case.
        device: Device that trains.

    Attributes:
        losses: Loss of each step, on the device.
    """

    def __init__(self, case: Case, device: str) -> None:
        self._case, self._device = case, device
        self._begins: list[float] = []
        self.losses: list[Tensor] = []
        self._result: dict[str, Any] = {}
        self._probe = TransferProbe() if device == "cuda" else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.seen = self  # type: ignore[assignment]
        plan = getattr(trainer.strategy, "plan", None)
        prediction = plan.prediction if plan is not None else None
        if prediction is not None:
            self._result["predicted"] = {
                "device_bytes": prediction.device_bytes,
                "host_bytes": prediction.host_bytes,
                "step_seconds": prediction.step_seconds,
                "busy": dict(prediction.busy),
                "bound": prediction.bound,
            }
        if plan is not None:
            counts = {policy: sum(block.policy == policy for block in plan.blocks) for policy in ("keep", "checkpoint")}
            self._result["plan"] = {
                "chunks": len(plan.chunks),
                "offloaded": plan.num_offloaded_chunks,
                "buffers": plan.num_chunk_buffers,
                "blocks": len(plan.blocks),
                **counts,
                "states_bytes": plan.memory.total,
            }
        print(json.dumps({"before the first step": self._result}), flush=True)

    def begin_step(self) -> None:
        """Note the time, once the device has ended the step before."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            if len(self._begins) == 2:
                torch.cuda.reset_peak_memory_stats()
        if len(self._begins) == self._case.steps + 2 and self._probe is not None:
            self._probe.start()
        self._begins.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        losses = [float(loss) for loss in self.losses]  # This waits for the device.
        seconds = [end - begin for begin, end in pairwise([*self._begins, time.perf_counter()])]
        timed = seconds[2 : self._case.steps + 2]
        tokens = self._case.batch * self._case.sequence
        found: dict[str, Any] = {
            "step_seconds": statistics.median(timed),
            "all_step_seconds": seconds[1:],
            "tokens_per_second": tokens / statistics.median(timed),
            "losses": losses,
        }
        if self._device == "cuda":
            stats = torch.cuda.memory_stats()
            found |= {
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "allocation_retries": stats["num_alloc_retries"],
            }
        if self._probe is not None:
            found["hidden_share"] = self._probe.stop()
        if isinstance(trainer.strategy, ProTrainStrategy):
            found["counters"] = asdict(trainer.strategy.counters)
        self._result["measured"] = found

    def result(self) -> dict[str, Any]:
        """Return predictions, measurements and their ratios."""
        predicted, measured = self._result.get("predicted"), self._result["measured"]
        ratios: dict[str, float] = {}
        if predicted is not None:
            ratios["step"] = measured["step_seconds"] / predicted["step_seconds"]
            ratios["step over the busiest resource"] = measured["step_seconds"] / max(predicted["busy"].values())
            if "peak_bytes" in measured:
                ratios["peak"] = measured["peak_bytes"] / predicted["device_bytes"]
        return {"case": asdict(self._case), **self._result, "measured over predicted": ratios}


# --- what runs, in the order of value ---------------------------------------------------------------------------------


def parts_of(device: str) -> Iterator[Part]:
    """Return the parts in the order in which they run, the most valuable first."""
    tiny = device == "cpu"
    yield Part("machine", 0.5, machine)
    first = "tests/cuda/test_cuda_device.py"
    yield Part("tests of the device", 2, functools.partial(_tests, [first]))
    if not tiny:
        yield Part("tests", 6, functools.partial(_tests, ["tests/cuda", "--deselect", first]))
    yield Part("hardware", 1, hardware)
    for case in (*speed_cases(tiny), *memory_cases(tiny)):
        yield Part(case.name, 1 if tiny else 4, functools.partial(_train, case))


def _tests(paths: Sequence[str], device: str) -> dict[str, Any]:
    return tests(device, *paths)


def _train(case: Case, device: str) -> dict[str, Any]:
    return train(device, case)


def speed_cases(tiny: bool) -> list[Case]:
    """Return cases that compare a 3B Llama in 22 GiB with other systems, and a model that fits with plain Lightning."""
    large = Case("", memory="22GiB", checkpointed=False)
    small = Case("", hidden=1536, layers=16, batch=4, steps=8)
    if tiny:
        large = replace(large, hidden=64, layers=4, batch=2, sequence=32, vocabulary=256, memory="2MiB", steps=2)
        small = replace(small, hidden=64, layers=2, batch=2, sequence=32, vocabulary=256, steps=2)
    peers = [] if tiny else ["FSDP2 with CPUOffloadPolicy", "torchao CPUOffloadOptimizer", "DeepSpeed ZeRO-3 Offload"]
    cases = [replace(large, name="auto"), replace(large, name="auto, clipped", clip=1.0)]
    cases += [replace(large, name=name, system=name, clip=_clip(name), checkpointed=True) for name in peers]
    cases += [replace(large, name="offload", options={"plan": "offload"})]
    cases += [
        replace(small, name="plain", system="plain Lightning"),
        replace(small, name="resident", options={"plan": "resident"}),
    ]
    return cases


def _clip(system: str) -> float | None:
    return 1.0 if SYSTEMS[system].clips else None


def memory_cases(tiny: bool) -> list[Case]:
    """Return cases whose peak of memory is predicted, with a tight budget."""
    case = Case("", hidden=2048, layers=16, batch=4, sequence=2048, memory="10GiB", steps=2)
    if tiny:
        case = replace(case, hidden=64, layers=4, batch=2, sequence=32, vocabulary=256, memory="2MiB", steps=1)
    cases = [
        replace(case, name="memory: bf16-true", precision="bf16-true"),
        replace(case, name="memory: fp32", precision="32-true", batch=1),
        replace(case, name="memory: swap", options={"num_swap_blocks": 2, "num_checkpoint_blocks": 2}, memory=None),
    ]
    if importlib.util.find_spec("peft"):
        cases.append(replace(case, name="memory: LoRA", precision="bf16-true", lora=True))
    return cases


# --- running them -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Run the parts, or one of them, or write the page of a result."""
    args = _parse(arguments)
    if args.page:
        print(page(json.loads(args.page.read_text(encoding="utf-8"))))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device. `--device cpu` tries the program itself with tiny sizes.")
    if args.part:
        part = next(part for part in parts_of(args.device) if part.name == args.part)
        args.json.write_text(json.dumps(part.run(args.device)), encoding="utf-8")
        return
    end = time.monotonic() + 60 * args.minutes
    document: dict[str, Any] = {"device": args.device, "minutes": args.minutes, "parts": {}}
    for part in parts_of(args.device):
        if part.name not in (args.only or [part.name]):
            continue
        left = end - time.monotonic()
        if left < 5:
            outcome: dict[str, Any] = {"status": "no time left"}
        else:
            outcome = run_part(part, args.device, min(60 * part.minutes, left))
        document["parts"][part.name] = outcome
        print(f"{part.name}: {outcome['status']}, {outcome.get('seconds', 0):.0f} s", flush=True)
        _write(args.json, document)


def run_part(part: Part, device: str, seconds: float) -> dict[str, Any]:
    """Run a part in its own process for at most `seconds`; return its status and results."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", "--device", device, "--part", part.name]
        began = time.monotonic()
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, "--json", str(result)], cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                status = "done" if process.wait(seconds) == 0 and result.is_file() else "failed"
            except subprocess.TimeoutExpired:
                status = "out of time"
            finally:
                _end(process)
        outcome: dict[str, Any] = {"status": status, "seconds": time.monotonic() - began}
        if status == "done":
            outcome["result"] = json.loads(result.read_text(encoding="utf-8"))
        else:
            outcome["output"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write a file atomically."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- the page ---------------------------------------------------------------------------------------------------------


def page(document: dict[str, Any]) -> str:
    """Return a Markdown page with the results."""
    parts: dict[str, Any] = document["parts"]
    about = parts.get("machine", {}).get("result", {})
    where = about.get("gpu") or f"a CPU with {about.get('cores', '?')} cores"
    title = "On a GPU" if "gpu" in about else "Dry run of the GPU benchmark"
    lines = [f"# {title}", "", f"Measured on {where}, {about.get('date', 'no date')}.", ""]
    if "gpu" not in about:
        lines += [
            "These figures are of tiny models: they show that the program runs.",
            "",
        ]
    lines += ["    python -m benchmarks.gpu --minutes 25 --json out.json", ""]
    runs = {name: part for name, part in parts.items() if "case" in part.get("result", {})}
    header = ("run", "step", "predicted", "measured / predicted", "peak", "reserved", "peak / predicted", "hidden")
    lines += ["## Steps and memory", "", table(header, [_row(name, part["result"]) for name, part in runs.items()]), ""]
    others = [(name, part) for name, part in parts.items() if name not in runs]
    rows = [[name, part["status"], f"{part.get('seconds', 0):.0f} s", _says(part)] for name, part in others]
    lines += ["## All other parts", "", table(("part", "status", "time", "result"), rows)]
    return "\n".join(lines)


def _row(name: str, result: dict[str, Any]) -> list[str]:
    measured, predicted, ratios = result["measured"], result.get("predicted"), result["measured over predicted"]

    def size(key: str) -> str:
        return short_bytes(measured[key]) if key in measured else "-"

    return [
        name,
        short_seconds(measured["step_seconds"]),
        short_seconds(predicted["step_seconds"]) if predicted else "-",
        f"{ratios['step']:.2f}" if "step" in ratios else "-",
        size("peak_bytes"),
        size("reserved_bytes"),
        f"{ratios['peak']:.3f}" if "peak" in ratios else "-",
        f"{measured['hidden_share']:.0%}" if measured.get("hidden_share") is not None else "-",
    ]


def _says(part: dict[str, Any]) -> str:
    result = part.get("result", {})
    return str(result.get("counts") or result.get("name") or result.get("gpu") or "")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="a CPU only tests the program")
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of the program")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--only", nargs="+", help="names of the parts to run; default: all")
    parser.add_argument("--part", help="name of a part to run alone")
    parser.add_argument("--page", type=Path, help="print the page of a JSON file")
    args = parser.parse_args(arguments)
    if not args.page and not args.json:
        parser.error("name a file with --json")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
