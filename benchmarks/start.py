"""Measures the time of a command line to its first step, and the part of imports in it.

    python -m benchmarks.start
    python -m benchmarks.start --config configs/quickstart.yaml --launches 5 --results start

Each launch is a process of its own. It imports the command line, runs `fit` until the strategy is asked for its first
step of training or evaluation, and ends. Modules that are imported later count as imports too. The rest is the start:
parsing the config, data, tokenizer, model, profiling the machine and the model, the search, and placing the weights.
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
    """Ends a run where its first step would begin; nothing catches it on the way."""


class Imports:
    """Seconds in the outermost imports of modules that were not there."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self._depth = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within it they are counted."""
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
    """Run `fit` to its first step, in this process."""
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
    """Launch one after the other and print the median."""
    parser = argparse.ArgumentParser(description="The start of a run.")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--child", action="store_true", help="one launch in this process; prints JSON last")
    parser.add_argument("--results", help="name of the folder in which the result is kept")
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
    """One table: medians, and the least and the most."""
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
