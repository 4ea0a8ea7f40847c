"""The table of a GPU run, and what its results change: a page, a sentence, a calibration. Does not import torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import table

GIB = 1 << 30
HEAD = (
    f"{'part':20} {'status':12} {'s':>4} {'step':>7} {'predicted':>9} {'ratio':>6} {'peak':>6} {'reserved':>8} "
    f"{'predicted':>9} {'ratio':>6} {'hidden':>6} {'host':>5} {'loss +-':>8}"
)


def table_of(parts: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Return a table of all parts, with seconds and GiB.

    Args:
        parts: Outcomes of the parts by name.
        earlier: Outcomes of earlier stages: losses are compared with those of the part that ends with "plain".
    """
    plain = {name: part for name, part in {**earlier, **parts}.items() if name.endswith(" plain")}
    lines = [HEAD]
    for name, part in parts.items():
        result = part.get("result", {})
        row = f"{name:20} {part['status'][:12]:12} {part.get('seconds', 0):4.0f} "
        if "measured" in result:
            row += " ".join(_cells(result, losses_of(plain.get(f"{name.rsplit(' ', 1)[0]} plain"))))
        elif "counts" in result:
            row += str(result["counts"])[:150]
        elif "packages" in result:
            row += f"{result.get('gpu', 'CPU')}, {result['cores']} cores, {result['memory_bytes'] / GIB:.0f} GiB"
        elif "flops" in result:
            rates = ", ".join(f"{kind} {rate / 1e12:.1f}" for kind, rate in result["flops"].items())
            row += (
                f"up {result['upload'] / 1e9:.1f}, down {result['download'] / 1e9:.1f} GB/s (both at once "
                f"{result['upload_beside'] / 1e9:.1f}, {result['download_beside'] / 1e9:.1f}), {rates} TFLOP/s, "
                f"host step {result['host_step'] / 1e9:.2f} G/s"
            )
        lines.append(row)
        lines += [f"    {line[:220]}" for line in result.get("failed", ())[:12]]
    return "\n".join(lines)


def losses_of(part: Mapping[str, Any] | None) -> Sequence[float]:
    """Return the losses of an outcome; empty without a result."""
    return (part or {}).get("result", {}).get("measured", {}).get("losses", ())


def _cells(result: Mapping[str, Any], plain: Sequence[float]) -> Iterator[str]:
    measured, predicted = result["measured"], result.get("predicted") or {}
    step, told = measured["step_seconds"], predicted.get("step_seconds")
    peak, held = measured.get("peak_bytes"), predicted.get("device_bytes")
    hidden, reserved = result.get("hidden_share"), measured.get("reserved_bytes")
    yield f"{step:7.3f}"
    yield f"{told:9.3f}" if told else f"{'-':>9}"
    yield f"{step / told:6.2f}" if told else f"{'-':>6}"
    yield f"{peak / GIB:6.2f}" if peak else f"{'-':>6}"
    yield f"{reserved / GIB:8.2f}" if reserved else f"{'-':>8}"
    yield f"{held / GIB:9.2f}" if held else f"{'-':>9}"
    yield f"{peak / held:6.3f}" if held and peak else f"{'-':>6}"
    yield f"{hidden:6.0%}" if hidden is not None else f"{'-':>6}"
    yield f"{measured['host_peak_bytes'] / GIB:5.1f}"
    pairs = [*zip(measured["losses"], plain, strict=False)]
    yield f"{max(abs(one - other) for one, other in pairs):8.1g}" if pairs else f"{'-':>8}"


# --- what is made from committed results ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The newest outcome of each part, from folders of results.

    Attributes:
        parts: Outcomes by name of the part.
        files: The GPU of each file, and its outcomes by name of the part, in order.
        gpus: Names of the GPUs that they were measured on.
        dates: First and last date.
        runs: Files with their date, commit, GPU and command, in order.
    """

    parts: Mapping[str, Any]
    files: tuple[tuple[str, Mapping[str, Any]], ...]
    gpus: tuple[str, ...]
    dates: tuple[str, str]
    runs: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, folders: Iterable[Path]) -> Results:
        """Read results; later files replace outcomes of earlier ones, unless only the earlier part has a result."""
        parts: dict[str, Any] = {}
        runs, files = [], []
        for file in (file for folder in folders for file in sorted(folder.glob("*.json"))):
            document = json.loads(file.read_text(encoding="utf-8"))
            files.append((document["gpu"], document["parts"]))
            for name, part in document["parts"].items():
                if "result" in part or name not in parts or "result" not in parts[name]:
                    parts[name] = part | {"file": file.name}
            runs.append(
                (
                    f"{file.parent.name}/{file.name}",
                    *(str(document[key]) for key in ("date", "commit", "gpu", "command")),
                )
            )
        dates = sorted(run[1] for run in runs)
        return cls(
            parts, tuple(files), tuple(dict.fromkeys(run[3] for run in runs)), (dates[0], dates[-1]), tuple(runs)
        )

    def ratio(self, name: str, what: str) -> float | None:
        """Return measured over predicted `"step"` or `"peak"` of a part, or None."""
        return self._result(name).get("measured over predicted", {}).get(what)

    def step(self, name: str) -> float | None:
        """Return the median step time of a part, seconds, or None."""
        return _step_seconds(self.parts.get(name))

    def over(self, name: str, other: str) -> float | None:
        """Return the step time of a part over that of another one, on the latest GPU that ran both, or None."""
        seconds: dict[str, dict[str, float]] = {}
        for gpu, parts in self.files:
            ran = {part: step for part in (name, other) if (step := _step_seconds(parts.get(part)))}
            seconds[gpu] = seconds.pop(gpu, {}) | ran
        both = [steps for steps in seconds.values() if len(steps) == 2]
        return both[-1][name] / both[-1][other] if both else None

    def shown(self, name: str, key: str) -> Any:
        """Return an entry of a part's result, or None."""
        return self._result(name).get(key)

    def _result(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.parts.get(name, {}).get("result", {})
        return found


def _step_seconds(part: Mapping[str, Any] | None) -> float | None:
    found: float | None = (part or {}).get("result", {}).get("measured", {}).get("step_seconds")
    return found


@dataclass(frozen=True)
class Goal:
    """A figure with its bounds.

    Attributes:
        what: The figure, in words.
        value: Returns the figure; None if it was not measured.
        least: Lower bound.
        most: Upper bound.
    """

    what: str
    value: Callable[[Results], float | None]
    least: float = 0.0
    most: float = math.inf

    def row(self, results: Results) -> tuple[str, str, str, str]:
        """Return the figure, its bounds, its value and whether it is within the bounds."""
        found = self.value(results)
        bounds = f"at most {self.most:g}" if not self.least else f"at least {self.least:g}"
        if self.least and self.most < math.inf:
            bounds = f"{self.least:g} to {self.most:g}"
        met = "not measured" if found is None else "yes" if self.least <= found <= self.most else "no"
        return self.what, bounds, "-" if found is None else f"{found:.3g}", met


TRAINED = {
    "3b auto": "3B with all weights in 22 GiB",
    "8b lora auto": "8B LoRA in 12 GiB",
    "8b qlora auto": "8B QLoRA in 6 GiB",
    "memory: bf16-true": "1B (bf16-true) in 10 GiB",
    "memory: fp32": "1B (float32) in 10 GiB",
    "memory: LoRA": "1B LoRA in 4 GiB",
}
GOALS = (
    Goal(
        "3B in 22 GiB: step of FSDP2 with CPU offload over ours", lambda found: found.over("3b fsdp2", "3b auto"), 1.5
    ),
    Goal(
        "8B LoRA: step in 12 GiB over plain on the whole card",
        lambda found: found.over("8b lora auto", "8b lora plain"),
        most=1.15,
    ),
    Goal(
        "8B QLoRA: step in 6 GiB over plain on the whole card",
        lambda found: found.over("8b qlora auto", "8b qlora plain"),
        most=1.3,
    ),
    Goal("everything resident: step over plain", lambda found: found.over("resident", "resident plain"), most=1.03),
    *(
        Goal(f"{text}: {what} measured / predicted", partial(Results.ratio, name=name, what=what), *bounds)
        for name, text in TRAINED.items()
        for what, bounds in (("step", (0.85, 1.15)), ("peak", (0.90, 1.00)))
    ),
    *(
        Goal(
            f"{text}: share of uploads hidden behind computing",
            partial(Results.shown, name=name, key="hidden_share"),
            0.8,
        )
        for name, text in TRAINED.items()
        if not name.startswith("memory")
    ),
)


def page(found: Results) -> str:
    """Return docs/gpu.md."""
    lines = ["# On a GPU", "", f"Measured on {_gpus(found)}, {_span(found.dates)}. This page is made by", ""]
    lines += ["    python -m benchmarks.gpu publish", ""]
    lines += ["from these files of `benchmarks/results`; of each part the newest result counts:", ""]
    lines += [table(("file", "date", "commit", "GPU", "command"), found.runs), ""]
    lines += ["## Goals", "", table(("figure", "goal", "measured", "met"), [goal.row(found) for goal in GOALS]), ""]
    runs = {name: part["result"] for name, part in found.parts.items() if "measured" in part.get("result", {})}
    lines += [
        "## Steps and memory",
        "",
        "Times in seconds, memory in GiB. `peak` is what tensors took, `reserved` what the allocator held, with holes",
        "between tensors, which predictions count. `loss` is the largest difference from the losses of plain",
        "Lightning, whose kernels sum in another order. Figures of different files come from different sessions and",
        "commits. A goal about two runs compares those of one GPU.",
        "",
        table(
            ("run", *_COLUMNS, "file"),
            [
                (name, *map(str.strip, _cells(result, _plain(name, found.parts))), found.parts[name]["file"])
                for name, result in runs.items()
            ],
        ),
        "",
    ]
    for name, result in runs.items():
        if "lanes" in result:
            lines += _lanes(name, result)
    lines += ["## All other parts", ""]
    rest = [(name, part) for name, part in found.parts.items() if name not in runs]
    rows = [(name, part["status"], _says(part.get("result", {}))) for name, part in rest]
    return "\n".join([*lines, table(("part", "status", "result"), rows), ""])


_COLUMNS = (
    *("step", "predicted", "ratio", "peak", "reserved", "predicted", "ratio"),
    *("hidden", "host", "loss"),
)


def _lanes(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### One step in lanes: {name}", "")
    rows = [
        (lane, *(f"{seconds[key]:.3f}" if seconds[key] else "-" for key in ("predicted", "recorded", "traced")))
        for lane, seconds in result["lanes"].items()
        if any(seconds.values())
    ]
    yield from (table(("seconds of work", "predicted", "recorded by the strategy", "seen by the profiler"), rows), "")


def _plain(name: str, parts: Mapping[str, Any]) -> Sequence[float]:
    return losses_of(parts.get(f"{name.rsplit(' ', 1)[0]} plain"))


def sentence(found: Results) -> str:
    """Return the README's sentence: what ran on which GPU, when, and what did not."""
    ran = [text for name, text in TRAINED.items() if found.step(name)]
    not_run = [text for name, text in TRAINED.items() if not found.step(name)]
    text = f"Run on {_gpus(found)} ({_span(found.dates)}): {_listed(ran)}; [figures](docs/gpu.md)."
    return f"{text} Not run on a GPU yet: {_listed([*not_run, 'several ranks with NCCL'])}."


# Rates of a hardware profile that dry runs take over: those of the GPU and its link.
_RATES = ("upload", "download", "upload_beside", "download_beside", "memory", "device_step")


def calibrate(found: Results) -> dict[str, Any]:
    """Return what GPU runs have measured, for `lightning_protrain/profiler/calibration.json`.

    It has the rates of each measured GPU, by its name in the catalogue, and for each dtype of weights the largest
    fragmentation factor of the newest runs that never hold all logits: `CausalLMModule`, for which dry runs plan, does
    not, and logits of all tokens are so large that they leave holes between other tensors.
    """
    from lightning_protrain.profiler.gpu_specs import find

    gpus: dict[str, Any] = {}
    alpha: dict[str, float] = {}
    for result in (part.get("result", {}) for _, parts in found.files for part in parts.values()):
        if "flops" in result:
            rates = {name: float(f"{result[name]:.3g}") for name in _RATES}
            products = {dtype: float(f"{rate:.3g}") for dtype, rate in result["flops"].items()}
            products |= {"float16": products["bfloat16"]} if "bfloat16" in products else {}
            gpus[find(result["name"]).name] = rates | {"flops": products}
    for result in (part.get("result", {}) for part in found.parts.values()):
        case, factor = result.get("case", {}), result.get("measured", {}).get("alpha")
        if factor is not None and case["system"] == "protrain" and case.get("loss_chunk_tokens") is not None:
            dtype = "uint8" if case["four_bits"] else "bfloat16" if case["precision"] == "bf16-true" else "float32"
            alpha[dtype] = max(alpha.get(dtype, 0.0), round(factor, 2))
    return {"gpus": gpus, "alpha": alpha}


def publish(root: Path, results: Path) -> None:
    """Write what is made from all results: docs/gpu.md, the README's sentence and the calibration of dry runs.

    Args:
        root: Folder of the repository.
        results: Folder with the folders of results, of which those that end with `-gpu` count.
    """
    found = Results.read(sorted(results.glob("*-gpu")))
    calibration = json.dumps(calibrate(found), indent=1) + "\n"
    (root / "lightning_protrain" / "profiler" / "calibration.json").write_text(calibration, encoding="utf-8")
    (root / "docs" / "gpu.md").write_text(page(found), encoding="utf-8")
    readme = root / "README.md"
    before, mark, rest = readme.read_text(encoding="utf-8").partition(MARK)
    _, end, after = rest.partition("\n")
    readme.write_text(f"{before}{mark}{sentence(found)}{end}{after}", encoding="utf-8")


# The sentence of the README follows this mark.
MARK = "<!-- gpu --> "


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1] if words else "nothing")))


def _gpus(found: Results) -> str:
    return _listed([f"one {gpu}" for gpu in found.gpus])


def _span(dates: tuple[str, str]) -> str:
    return dates[0] if dates[0] == dates[1] else f"{dates[0]} to {dates[1]}"


def _says(result: Mapping[str, Any]) -> str:
    return str(result.get("counts") or result.get("gpu") or result.get("name") or "")
