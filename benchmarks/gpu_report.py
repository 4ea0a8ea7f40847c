"""The table of a GPU run, and what its results change: a page, a sentence, a calibration. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def publish(folders: Sequence[Path], root: Path) -> None:
    """Write what is made from results: docs/gpu.md, the README's sentence and the calibration."""
    raise NotImplementedError
