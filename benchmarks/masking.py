"""Benchmark of the time to find and mask the turns of conversations.

    python -m benchmarks.masking
    python -m benchmarks.masking --rounds 30 --results masking

Everything runs on one core, in this process. For each shape of conversation, three methods alternate round by round and
must return the same mask: our scan and mask, a scan in plain Python, and numpy with a Python loop over turns.

The second measurement is the fraction of masking in the preparation of conversations, in processor time. Docstrings of
the standard library, in short rows or many in one long row, are rendered, tokenized and masked.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import table, write_result
from lightning_protrain.data.batches.encode import ChatEncoder
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.data.chat.check_turns import UntrainableError
from lightning_protrain.data.chat.marker_search import lay_out
from lightning_protrain.data.chat.markers import Marker, Markers, RoleMarkers
from lightning_protrain.data.chat.mask import MaskOptions, find_turns, mask_turns, trained_tokens
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.chat.turns import scan
from lightning_protrain.data.conversation import Conversation
from lightning_protrain.data.sources.load import stdlib_conversations

HEADER = (
    "conversations",
    "turns",
    "ours [ms]",
    "plain Python [ms]",
    "turn by turn [ms]",
    "x Python",
    "x turn by turn",
    "met",
)
PREPARATION = (
    "rows",
    "tokens a row",
    "encode [us/row]",
    "mask alone [us/row]",
    "mask with checks [us/row]",
    "mask alone",
    "mask with checks",
    "met",
)
# Maximum fraction of masking in the preparation.
SHARE = 0.05
BATCH = 512
NEWLINE = 198
OPTIONS = MaskOptions()
MILLION = 1_000_000
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """A kind of conversation: `rows` rows of `length` tokens, turns of about `turn` tokens."""

    name: str
    family: str
    turn: int
    rows: int
    length: int

    @property
    def wanted_ms(self) -> float:
        """Target of the time, milliseconds."""
        return 30.0 if self.rows * self.length > MILLION // 2 else 0.5


def _million(family: str, turn: int, length: int) -> Shape:
    return Shape(f"{family}, turns of {turn}, 1M tokens", family, turn, MILLION // length, length)


SHAPES = (
    _million("chatml", 100, 4096),
    _million("chatml", 20, 4096),
    _million("chatml", 1000, 8192),
    _million("llama3", 100, 4096),
    _million("llama3", 20, 4096),
    _million("llama3", 1000, 8192),
    Shape("chatml, turns of 100, 8 x 4096", "chatml", 100, 8, 4096),
    Shape("llama3, turns of 100, 8 x 4096", "llama3", 100, 8, 4096),
)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one shape: the best and the median of the rounds."""

    shape: str
    turns: int
    ours: tuple[float, float]
    plain: tuple[float, float]
    loop: tuple[float, float]
    wanted: float

    @property
    def met(self) -> bool:
        """True if the target is met, and with a million tokens also the target relative to plain Python."""
        return self.ours[0] < self.wanted and (self.wanted < 1 or self.plain[0] >= 20 * self.ours[0])


def markers_of(family: str) -> Markers:
    """Return the markers of ChatML or Llama 3 without tails, which the other methods do not support."""
    if family == "chatml":
        starts = {"system": (8948,), "user": (872,), "assistant": (77091,)}
        prefix, suffix, ends = (151644,), (NEWLINE,), (151645,)
    else:
        starts = {"system": (9125,), "user": (882,), "assistant": (78191,), "ipython": (23799,), "tool": (14506,)}
        prefix, suffix, ends = (128006,), (128007, 271), (128009,)
    end = (Marker("end", ends),)
    roles = [
        RoleMarkers(name, (Marker(name, (*prefix, *token, *suffix)),), end, False, False, True)
        for name, token in starts.items()
    ]
    return Markers(family, tuple(roles), (), frozenset())


def conversations(shape: Shape, seed: int = 0) -> Ids:
    """Return rows with a system turn and turns of user and assistant, cut at the end of a row: [rows, length]."""
    rng = np.random.default_rng(seed)
    roles = markers_of(shape.family).roles
    rows = []
    for _ in range(shape.rows):
        row: list[int] = []
        order = itertools.chain([roles[0]], itertools.cycle(roles[1:3]))
        while len(row) < shape.length:
            role = next(order)
            size = max(1, int(rng.normal(shape.turn, shape.turn / 4)))
            row += [*role.starts[0].ids, *rng.integers(1000, 70_000, size).tolist(), *role.ends[0].ids, NEWLINE]
        rows.append(row[: shape.length])
    return np.array(rows, dtype=np.int64)


def ours(ids: Ids, markers: Markers) -> NDArray[np.bool_]:
    """Mask with the package."""
    rows = lay_out(ids)
    return trained_tokens(rows, scan(rows, markers), markers, OPTIONS).reshape(ids.shape)


def plain(rows: Sequence[Sequence[int]], markers: Markers) -> list[list[bool]]:
    """Mask token by token, in Python lists."""
    starts = [(list(role.starts[0].ids), role.role == "assistant") for role in markers.roles]
    end = markers.roles[0].ends[0].ids[0]
    masks = []
    for ids in rows:
        trained = [False] * len(ids)
        at, size, inside = 0, len(ids), False
        while at < size:
            token = ids[at]
            for start, wanted in starts:
                if token == start[0] and ids[at : at + len(start)] == start:
                    inside, at = wanted, at + len(start)
                    break
            else:
                trained[at] = inside
                inside = inside and token != end
                at += 1
        masks.append(trained)
    return masks


def loop_over_turns(ids: Ids, markers: Markers) -> NDArray[np.bool_]:
    """Find starts and ends of turns with numpy, and mask in a loop over turns."""
    starts = [(np.array(role.starts[0].ids), role.role == "assistant") for role in markers.roles]
    end = markers.roles[0].ends[0].ids[0]
    trained = np.zeros(ids.shape, dtype=bool)
    for row, mask in zip(ids, trained, strict=True):
        begins = np.flatnonzero(row == starts[0][0][0]).tolist()
        ends = np.flatnonzero(row == end)
        for begin, following in zip(begins, [*begins[1:], row.size], strict=True):
            for start, wanted in starts:
                content = begin + start.size
                if wanted and np.array_equal(row[begin:content], start):
                    at = np.searchsorted(ends, content)
                    stop = int(ends[at]) + 1 if at < ends.size else row.size
                    mask[content : min(stop, following)] = True
    return trained


def measure(shape: Shape, rounds: int, slow_rounds: int) -> Timing:
    """Time the three methods alternately; the slow ones run in fewer rounds."""
    markers = markers_of(shape.family)
    ids = conversations(shape)
    rows = ids.tolist()
    masks = (ours(ids, markers), np.array(plain(rows, markers)), loop_over_turns(ids, markers))
    if not all((mask == masks[0]).all() for mask in masks):
        raise ValueError(f"{shape.name}: the scans do not agree, so their times say nothing.")
    runs = (partial(ours, ids, markers), partial(plain, rows, markers), partial(loop_over_turns, ids, markers))
    times: list[list[float]] = [[], [], []]
    for number in range(rounds):
        for taken, run in zip(times, runs if number < slow_rounds else runs[:1], strict=False):
            taken.append(_milliseconds(run))
    best = [(min(taken), statistics.median(taken)) for taken in times]
    return Timing(shape.name, scan(lay_out(ids), markers).start.size, best[0], best[1], best[2], shape.wanted_ms)


def render(timings: Sequence[Timing]) -> str:
    """Return the table: best and, in brackets, median."""
    lines = []
    for entry in timings:
        cells = [f"{best:.3g} ({median:.3g})" for best, median in (entry.ours, entry.plain, entry.loop)]
        ratios = [f"{other[0] / entry.ours[0]:.1f}" for other in (entry.plain, entry.loop)]
        lines.append((entry.shape, f"{entry.turns:,}", *cells, *ratios, "yes" if entry.met else "no"))
    return table(HEADER, lines)


@dataclass(frozen=True)
class Preparation:
    """Processor time of the preparation of rows, microseconds per row, the minimum over rounds.

    Attributes:
        rows: Description of the rows.
        tokens: Mean number of tokens in a row.
        encode: Time of rendering, tokenizing and masking, with all checks.
        alone: Time of finding and masking turns.
        checked: Time of finding and masking turns, and of checking them against the messages.
    """

    rows: str
    tokens: float
    encode: float
    alone: float
    checked: float

    @property
    def met(self) -> bool:
        """True if the fraction of masking is below the maximum."""
        return self.checked < SHARE * self.encode


def prepare(name: str, rows: Sequence[Conversation], encoder: ChatEncoder, rounds: int) -> Preparation:
    """Time the preparation of conversations."""
    parts = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    best = [math.inf] * 3
    tokens = 0
    for _ in range(rounds):
        times = [0.0] * 3
        tokens = 0
        for part in parts:
            begin = time.process_time()
            rendered = [encoder.renderer.render(row) for row in part]
            ids = [np.asarray(row, dtype=np.int32) for row in encoder.renderer.encode(rendered)]
            encoded = time.process_time()
            results = encoder.mask(part, rendered, ids)
            checked = time.process_time()
            mask_turns(find_turns(ids, encoder.markers, encoder.options), encoder.markers, encoder.options, None)
            alone = time.process_time()
            for result in results:
                if isinstance(result, UntrainableError):
                    raise ValueError(f"{name}: a row is not trained, so the times say nothing: {result}") from result
                encoder.cut(result)
            done = time.process_time()
            tokens += sum(map(len, ids))
            steps = (checked - begin + done - alone, alone - checked, checked - encoded)
            times = [time_ + step for time_, step in zip(times, steps, strict=True)]
        best = [min(pair) for pair in zip(best, times, strict=True)]
    return Preparation(name, tokens / len(rows), *(value / len(rows) * 1e6 for value in best))


def preparations(rounds: int) -> list[Preparation]:
    """Return the measurements of short and of long rows."""
    short = stdlib_conversations()[:4096]
    long = [
        Conversation(messages=[message for row in short[at : at + 40] for message in row["messages"]])
        for at in range(0, len(short) - 39, 40)
    ]
    encoder = ChatEncoders(train_tokenizer(short, 32_000), None).encoder(ChatSettings(max_length=1 << 20))
    return [prepare("short", short, encoder, rounds), prepare("long", long, encoder, rounds)]


def render_preparation(entries: Sequence[Preparation]) -> str:
    """Return the table: times, and fractions of the preparation."""
    lines = []
    for entry in entries:
        times = [f"{value:.3g}" for value in (entry.encode, entry.alone, entry.checked)]
        shares = [f"{value / entry.encode:.1%}" for value in (entry.alone, entry.checked)]
        lines.append((entry.rows, f"{entry.tokens:.0f}", *times, *shares, "yes" if entry.met else "no"))
    return table(PREPARATION, lines)


def main(arguments: Sequence[str]) -> None:
    """Measure all shapes and print the tables."""
    parser = argparse.ArgumentParser(description="How long it takes to mask conversations.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of our method; ten times as many for a batch")
    parser.add_argument("--slow-rounds", type=int, default=10, help="rounds of the other two methods")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    options = parser.parse_args(arguments)
    timings = [
        measure(shape, options.rounds * (1 if shape.wanted_ms > 1 else 10), options.slow_rounds) for shape in SHAPES
    ]
    prepared = preparations(options.slow_rounds)
    text = render(timings) + "\n" + render_preparation(prepared)
    print(text)
    if options.results:
        rows: list[dict[str, Any]] = [{**asdict(entry), "met": entry.met} for entry in timings]
        shares = [{**asdict(entry), "met": entry.met} for entry in prepared]
        write_result(options.results, "benchmarks.masking", arguments, {"rows": rows, "preparation": shares}, text)


def _milliseconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    main(sys.argv[1:])
