"""Benchmark of saving and loading checkpoints, relative to a plain write of the same bytes, and of fits that save.

    python -m benchmarks.checkpoint --results checkpoint

There are four measurements, in rounds in which all subjects run once in a random order:

- Saving: the same tensors (weights and two moments) as one plain synced file, as a checkpoint folder, with `torch.save`
  without and with a sync, and with `torch.distributed.checkpoint`. A rate of 0.9 means 1 / 0.9 of the time of the plain
  file.
- Training: fits without saving, with saves in the background, and with blocking saves. A window of steps whose first
  step saves is compared with the next window, which does not save.
- Pause: additional time of a step that saves.
- Loading: bytes read from the disk with an empty page cache, of the whole checkpoint and by one of several ranks. The
  states of each rank have the size of one tensor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.pairs import Ratio, median_ratio
from benchmarks.report import quiet, table, write_result
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.consolidation import load_folder
from lightning_protrain.checkpoint.save import NewCheckpoint, save_payload
from lightning_protrain.checkpoint.serialize import RANK_STATES, WEIGHTS, files_for, read_tensors, split
from lightning_protrain.checkpoint.verification import verify

MEBIBYTE = 1 << 20
PIECE = 4 * MEBIBYTE
# Elapsed and processor time in seconds; for a step, processor time of the training thread.
Spent = tuple[float, float]
RATE, STEP = 0.9, 1.05
PARTS = ("saves", "reads", "fits")
SAVED = ("saved by", "seconds", "CPU seconds", "rate / plain (95 %)", "wanted", "met")
TRAINED = (
    "saves",
    "step / without (95 %)",
    "wanted",
    "met",
    "its CPU time / without",
    "pause of a step that saves, ms",
)
READ = ("loaded", "MiB of its files", "share of all files", "MiB read from the disk", "share of all files, read")
# Numbers of ranks that save a checkpoint, of which one rank loads its part.
RANKS = (2, 4)


class Read(NamedTuple):
    """One load: name, bytes of the files that it needs, bytes of all files, and bytes read from the disk or None."""

    name: str
    files: int
    whole: int
    disk: int | None


def content(mebibytes: int, tensors: int) -> dict[str, Any]:
    """Return a checkpoint of `mebibytes` MiB, a third weights and two thirds moments, in `tensors` tensors each."""
    size = max(mebibytes * MEBIBYTE // 12 // tensors, 1)
    names = range(tensors)
    state = {name: {"step": torch.tensor(1.0), "exp_avg": _random(size), "exp_avg_sq": _random(size)} for name in names}
    weights = {f"layers.{name}.weight": _random(size) for name in names}
    return {"global_step": 1, "state_dict": weights, "optimizer_states": [{"state": state, "param_groups": []}]}


def _random(size: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (size,), dtype=torch.int32).view(torch.float32)


def _bytes_of(made: dict[str, Any]) -> list[memoryview]:
    moments = made["optimizer_states"][0]["state"].values()
    tensors = [*made["state_dict"].values(), *(each[key] for each in moments for key in ("exp_avg", "exp_avg_sq"))]
    return [memoryview(tensor.view(torch.uint8).numpy()) for tensor in tensors]


def write_plain(made: dict[str, Any], path: Path) -> None:
    """Write the bytes of the tensors to one file, in order, and sync it."""
    with path.open("wb", buffering=0) as file:
        for data in _bytes_of(made):
            for begin in range(0, data.nbytes, PIECE):
                file.write(data[begin : begin + PIECE])
        os.fsync(file.fileno())


def _torch_save(made: dict[str, Any], path: Path) -> None:
    torch.save(made, path)


def _torch_save_synced(made: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(made, file)
        file.flush()
        os.fsync(file.fileno())


def _dcp(made: dict[str, Any], path: Path) -> None:
    dcp.save(made, checkpoint_id=path, no_dist=True)


def _ours(made: dict[str, Any], path: Path) -> None:
    save_payload(split(made), path, NewCheckpoint("run", 1), Files())


SAVERS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "plain write, synced": write_plain,
    "lightning_protrain": _ours,
    "torch.save, not synced": _torch_save,
    "torch.save, synced": _torch_save_synced,
    "torch.distributed.checkpoint": _dcp,
}


def measure_saves(made: dict[str, Any], folder: Path, rounds: int) -> dict[str, list[Spent]]:
    """Return the times of each saver in each round, after one round for warm-up."""
    times: dict[str, list[Spent]] = {name: [] for name in SAVERS}
    chance = random.Random(0)
    for number in range(rounds + 1):
        for name in chance.sample(list(SAVERS), len(SAVERS)):
            os.sync()
            begin, busy = time.perf_counter(), time.process_time()
            SAVERS[name](made, folder / "saved")
            spent = time.perf_counter() - begin, time.process_time() - busy
            if number:
                times[name].append(spent)
            _remove(folder / "saved")
    return times


class Net(L.LightningModule):
    """A model of square layers with AdamW: maps (B, width) to a loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(L.Callback):
    """A callback that records the end of each step, including saves."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.ends.append((time.perf_counter(), time.thread_time()))


HOW: dict[str, dict[str, Any] | None] = {"none": None, "behind": {"asynchronous": True}, "at once": {}}


def measure_fit(how: str, folder: Path, width: int, depth: int, batch: int, every: int, windows: int) -> list[Spent]:
    """Return the time of each step of a fit that saves at the first step of every other window."""
    options = HOW[how]
    steps = 2 * every * (windows + 2)
    torch.manual_seed(0)
    clock = Clock()
    callbacks: list[L.Callback] = [clock]
    if options is not None:
        callbacks.append(ProTrainCheckpoint(folder / "fit", every_n_train_steps=2 * every, **options))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=options is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [torch.randn(batch, width)] * steps
    trainer.fit(Net(width, depth), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    _remove(folder / "fit")
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(clock.ends)]


def measure_fits(folder: Path, fits: int, **sizes: int) -> dict[str, list[list[Spent]]]:
    """Return the times of steps of several fits, by method of saving; methods alternate."""
    times: dict[str, list[list[Spent]]] = {how: [] for how in HOW}
    chance = random.Random(0)
    for _ in range(fits):
        for how in chance.sample(list(HOW), len(HOW)):
            os.sync()
            times[how].append(measure_fit(how, folder, **sizes))
    return times


def measure_reads(made: dict[str, Any], folder: Path) -> list[Read]:
    """Measure loads of a checkpoint of one rank, and loads by one rank of a checkpoint of several ranks."""
    target, found = folder / "saved", []
    own = next(iter(made["state_dict"].values()))
    for ranks in (1, *RANKS):
        states = {RANK_STATES: [{"own": own + rank} for rank in range(ranks)]} if ranks > 1 else {}
        save_payload(split({**made, **states}), target, NewCheckpoint("run", 1), Files())
        sizes = {path.name: path.stat().st_size for path in target.iterdir()}
        for name, names, load in _loads(target, ranks, sizes):
            for path in target.iterdir():
                _forget(path)
            before = _read_bytes()
            load()
            after = _read_bytes()
            disk = None if before is None or after is None else after - before
            found.append(Read(name, sum(sizes[each] for each in names), sum(sizes.values()), disk))
        _remove(target)
    return found


def _loads(target: Path, ranks: int, names: Collection[str]) -> list[tuple[str, Collection[str], Callable[[], object]]]:
    """Return methods of loading a checkpoint: name, files that it needs, function."""

    def weights() -> object:
        assert verify(target, {WEIGHTS}) == []
        return [tensor.sum() for tensor in read_tensors(target / WEIGHTS).values()]

    if ranks == 1:
        everything = "everything", names, lambda: load_folder(target, keep=True)
        return [everything, ("weights alone", [WEIGHTS], weights)]
    return [
        (f"one rank of {ranks}", files_for(names, ranks - 1), lambda: load_folder(target, keep=True, rank=ranks - 1))
    ]


def _forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_bytes() -> int | None:
    # Bytes that the storage layer has read for this process, see https://docs.kernel.org/filesystems/proc.html
    counts = Path("/proc/self/io")
    if not counts.is_file():
        return None
    lines = dict(line.split(": ") for line in counts.read_text(encoding="ascii").splitlines())
    return int(lines["read_bytes"])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def rate(times: Sequence[Spent], plain: Sequence[Spent]) -> Ratio:
    """Return the rate of a saver, relative to the plain write of the same round."""
    return median_ratio([peer[0] / own[0] for own, peer in zip(times, plain, strict=True)])


def windows_of(steps: Sequence[Spent], every: int) -> list[tuple[list[Spent], list[Spent]]]:
    """Return pairs of windows (with a save, without), except the first pair, in which memory is allocated."""
    begins = range(4 * every - 1, len(steps) - 2 * every + 1, 2 * every)
    return [(list(steps[at : at + every]), list(steps[at + every : at + 2 * every])) for at in begins]


def step_ratio(fits: Sequence[Sequence[Spent]], every: int, which: int = 0) -> Ratio:
    """Return the ratio of times of windows with and without a save, elapsed (0) or processor time (1)."""
    pairs = [pair for fit in fits for pair in windows_of(fit, every)]
    return median_ratio([sum(step[which] for step in own) / sum(step[which] for step in peer) for own, peer in pairs])


def pause(fits: Sequence[Sequence[Spent]], every: int) -> float:
    """Return the median additional time of a step that saves, milliseconds."""
    pairs = [pair for fit in fits for pair in windows_of(fit, every)]
    saving = [own[0][0] for own, _ in pairs]
    others = [step[0] for own, peer in pairs for step in (*own[1:], *peer)]
    return 1e3 * (statistics.median(saving) - statistics.median(others))


def _save_rows(times: dict[str, list[Spent]]) -> list[list[str]]:
    rows = []
    for name, own in times.items():
        ratio = rate(own, times["plain write, synced"])
        wanted = name == "lightning_protrain"
        seconds, busy = (f"{statistics.median(each[which] for each in own):.3f}" for which in (0, 1))
        met = ("yes" if ratio.lower >= RATE else "no") if wanted else ""
        rows.append([name, seconds, busy, str(ratio), f">= {RATE}" if wanted else "", met])
    return rows


def _fit_rows(times: dict[str, list[list[Spent]]], every: int) -> list[list[str]]:
    rows = []
    for how, fits in times.items():
        ratio = step_ratio(fits, every)
        wanted = how == "behind"
        met = ("yes" if ratio.upper <= STEP else "no") if wanted else ""
        busy = str(step_ratio(fits, every, 1))
        rows.append([how, str(ratio), f"<= {STEP}" if wanted else "", met, busy, f"{pause(fits, every):.0f}"])
    return rows


def _read_rows(found: list[Read]) -> list[list[str]]:
    rows = []
    for name, files, whole, disk in found:
        read = ("-", "-") if disk is None else (f"{disk / MEBIBYTE:.1f}", f"{disk / whole:.2f}")
        rows.append([name, f"{files / MEBIBYTE:.1f}", f"{files / whole:.2f}", *read])
    return rows


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes = {name: getattr(args, name) for name in ("width", "depth", "batch", "every", "windows")}
    texts: list[str] = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as place, quiet():
        folder, made = Path(place), content(args.mebibytes, args.tensors)
        try:
            if "saves" in args.part:
                saves = measure_saves(made, folder, args.rounds)
                texts.append(f"{args.mebibytes} MiB in {3 * args.tensors} tensors, {args.rounds} rounds.")
                texts.append(table(SAVED, _save_rows(saves)))
                peer = saves["plain write, synced"]
                results["saves"] = {
                    name: {"rate": asdict(rate(own, peer)), "spent": own} for name, own in saves.items()
                }
            if "reads" in args.part:
                results["reads"] = measure_reads(made, folder)
                texts.append(table(READ, _read_rows(results["reads"])))
            if "fits" in args.part:
                fits = measure_fits(folder, args.fits, **sizes)
                texts += [_about_fits(fits["none"], args), table(TRAINED, _fit_rows(fits, args.every))]
                results["fits"] = {
                    how: {"ratio": asdict(step_ratio(own, args.every)), "steps": own} for how, own in fits.items()
                }
        finally:
            torch.set_num_threads(threads)
    text = "\n\n".join(texts)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.results:
        print(write_result(args.results, "benchmarks.checkpoint", arguments, results, text))


def _about_fits(fits: list[list[Spent]], args: argparse.Namespace) -> str:
    states = 12 * args.depth * args.width**2 / MEBIBYTE
    step = 1e3 * statistics.median(step[0] for fit in fits for step in fit)
    return (
        f"{states:.0f} MiB of states, one thread, steps of {step:.0f} ms, windows of {args.every} steps, {args.fits} x "
        f"{args.windows} pairs of windows."
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--mebibytes", type=int, default=192, help="size of the checkpoint, MiB")
    parser.add_argument("--tensors", type=int, default=16, help="number of weights, and of each moment")
    parser.add_argument("--rounds", type=int, default=24, help="saves of each kind")
    parser.add_argument("--width", type=int, default=768, help="width of the trained model")
    parser.add_argument("--depth", type=int, default=4, help="number of layers of the trained model")
    parser.add_argument("--batch", type=int, default=1024, help="samples of a step")
    parser.add_argument(
        "--every", type=int, default=20, help="steps of a window; every second window begins with a save"
    )
    parser.add_argument("--windows", type=int, default=6, help="pairs of windows in a fit")
    parser.add_argument("--fits", type=int, default=2, help="fits of each kind")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints; default: folder for temporary files")
    parser.add_argument("--json", type=Path, help="file for all times")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    numbers = ("mebibytes", "tensors", "rounds", "width", "depth", "batch", "every", "windows", "fits")
    if min(getattr(args, name) for name in numbers) < 1:
        parser.error("give positive numbers")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
