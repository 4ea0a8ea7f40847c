"""Benchmark of the time from the start of a command to its first step, and of the time of imports.

    python -m benchmarks.start
    python -m benchmarks.start --config configs/quickstart.yaml --launches 5 --results start

Each launch is a process that imports the command line and runs `fit` until the first step of training or evaluation.
Modules that are imported later count as imports too. The rest of the time is the config, data, tokenizer, model,
profiles of machine and model, the search, and placing the weights.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.report import ROOT, table, write_result

WANTED = 5.0
FIRST_STEPS = ("training_step", "validation_step")


class FirstStepError(BaseException):
    """Ends a run before its first step; derives from BaseException so that Lightning does not catch it."""


class Imports:
    """Timer of imports."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self._depth = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of imports within this context."""
        statement, function = builtins.__import__, importlib.import_module
        builtins.__import__, importlib.import_module = self._counting(statement), self._counting(function)
        try:
            yield
        finally:
            builtins.__import__, importlib.import_module = statement, function

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._import(real, args, kwargs)

    def _import(self, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            return real(*args, **kwargs)
        known, begun, cpu_begun = len(sys.modules), time.perf_counter(), time.process_time()
        self._depth = 1
        try:
            return real(*args, **kwargs)
        finally:
            self._depth = 0
            if len(sys.modules) > known:
                self.seconds += time.perf_counter() - begun
                self.cpu_seconds += time.process_time() - cpu_begun


def launch(config: str) -> dict[str, float]:
    """Run `fit` until its first step in this process, and return the times in seconds."""
    imports, begun, cpu_begun = Imports(), time.perf_counter(), time.process_time()
    with imports.counted():
        from lightning_protrain import cli
        from lightning_protrain.strategy.protrain import ProTrainStrategy

        def stop(*_: Any, **__: Any) -> None:
            raise FirstStepError

        for name in FIRST_STEPS:
            setattr(ProTrainStrategy, name, stop)
        sys.argv = ["lightning-protrain", "fit", "--config", config]
        try:
            cli.main()
        except FirstStepError:
            pass
        else:
            raise RuntimeError(f"{config} came to its end without a step.")
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    return {
        "seconds": seconds - imports.seconds,
        "cpu_seconds": cpu_seconds - imports.cpu_seconds,
        "imports": imports.seconds,
        "cpu_imports": imports.cpu_seconds,
    }


def main(arguments: Sequence[str]) -> None:
    """Run all launches and print the medians."""
    parser = argparse.ArgumentParser(description="The start of a run.")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--child", action="store_true", help="run one launch in this process, and print JSON")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    options = parser.parse_args(arguments)
    if options.child:
        print("\n" + json.dumps(launch(options.config)))
        return
    command = [sys.executable, "-m", "benchmarks.start", "--child", "--config", options.config]
    rows = []
    for _ in range(options.launches):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    text = render(rows)
    print(text)
    if options.results:
        print(write_result(options.results, "benchmarks.start", arguments, {"launches": rows}, text))


def render(rows: Sequence[dict[str, float]]) -> str:
    """Return a table of medians, minima and maxima."""
    lines = []
    for what, name, cpu_name, wanted in (
        ("to the first step, imports apart", "seconds", "cpu_seconds", WANTED),
        ("imports", "imports", "cpu_imports", None),
    ):
        columns = [sorted(row[key] for row in rows) for key in (name, cpu_name)]
        shown = [f"{statistics.median(each):.2f} s ({each[0]:.2f} to {each[-1]:.2f})" for each in columns]
        met = "-" if wanted is None else ("yes" if columns[0][-1] < wanted else "no")
        lines.append((what, *shown, "-" if wanted is None else f"< {wanted:g} s", met))
    return table(("what", "elapsed", "processor time", "wanted", "met"), lines)


if __name__ == "__main__":
    main(sys.argv[1:])
