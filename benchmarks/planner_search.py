"""Benchmark of the search for a plan: its time, and its result compared with the best of all plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from benchmarks.families import LLAMA, Family, Size
from benchmarks.largest import FAMILIES, GIB, SEQUENCE, learn, problem_of
from benchmarks.report import table
from lightning_protrain.config import Knobs
from lightning_protrain.planner.candidates import packings
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.search import find_any
from lightning_protrain.profiler.gpu_specs import gpu
from lightning_protrain.profiler.records import ParameterInfo
from tests.planner.brute import Candidate, all_candidates, fastest

T = TypeVar("T")
# Time of a search in the paper (arXiv 2406.08334), on its machine and with its models.
PAPER_SECONDS = 0.06
REPEATS = 3
MACHINE = "A100 80GB SXM"
SMALLER_BYTES = 36 * GIB
# Host memory is not limited, because it would exclude most of these models.
HOST_BYTES, CORES = 64 << 40, 32
SIZES = {size.name: size for size in LLAMA}
# By name: the model, and sequences in a batch. The loss of several is computed in slices, each of which calls the head,
# so that the head's chunk is used more than once.
MODELS = {
    "32 blocks": (SIZES["Llama 2 7B"], 1),
    "80 blocks": (SIZES["Llama 3.1 70B"], 1),
    "32 blocks, head used 8 times": (SIZES["Llama 2 7B"], 8),
}
# Bytes to divide weights into: the same model with weights in about 25 pieces to a block, which stand for many experts,
# gives about 2,000 chunks. Each piece is a parameter of its own, so that each chunk has one of them.
DIVIDED = {"80 blocks": 76 << 20}
# The training loops that these are searched for: what the host's work runs behind, micro-batches, clipping.
LOOPS = {
    "overlap off": Training("off"),
    "overlap backward": Training("backward"),
    "overlap forward": Training("forward"),
    "overlap forward, clipping": Training("forward", clips=True),
    "overlap forward, clipping, 3 micro-batches": Training("forward", 3, clips=True),
}
# Those for which all plans can be tried.
TRIED = {
    f"{layers} blocks{', head used 8 times' if batch > 1 else ''}": (
        Size("", 0.0, 1024, 2816, layers, 16, 16, 32000),
        batch,
    )
    for layers, batch in ((4, 1), (8, 1), (12, 1), (8, 8))
}
# Processor time that a search of these may take, in seconds, in every training loop.
TARGETS = {"80 blocks": 2.0}
HEADER = (
    "model", "device GiB", "sizes of chunks", "chunks", "candidates", "evaluated", "CPU s", "of the paper's",
    "target: CPU s",
)  # fmt: skip
PEER_HEADER = (
    "model", "chunks", "candidates", "plans", "tried all: CPU s", "search: CPU s", "time found / best",
)  # fmt: skip


@dataclass(frozen=True)
class Search:
    """One search.

    Attributes:
        model: Name of the model.
        device_bytes: Budget of device memory.
        sizes: Number of tried sizes of chunks.
        chunks: Minimum and maximum number of chunks.
        candidates: Number of plans that an enumeration would try, for one number of buffers.
        evaluations: Number of predictions of a step.
        seconds: Processor time of each repetition.
        target: Maximum processor time; None if there is no target.
    """

    model: str
    device_bytes: int
    sizes: int
    chunks: tuple[int, int]
    candidates: int
    evaluations: int
    seconds: tuple[float, ...]
    target: float | None = None


@dataclass(frozen=True)
class Trial:
    """A search, and an enumeration of all plans of the same problem.

    Attributes:
        model: Name of the model.
        chunks: Number of chunks.
        plans: Number of enumerated plans, with all numbers of buffers.
        all_seconds: Processor time of the enumeration.
        seconds: Median processor time of the search.
        candidates: Number of plans for one number of buffers.
        ratio: Predicted step of the plan that the search found, relative to the best plan that fits.
    """

    model: str
    chunks: int
    plans: int
    all_seconds: float
    seconds: float
    candidates: int
    ratio: float


def problem_for(size: Size, batch: int, sequence: int = SEQUENCE) -> Problem:
    """Return the search problem for a Llama in mixed precision, all weights trained."""
    family: Family = FAMILIES["Llama"]
    known = learn(family.config(size, sequence), "full", "bf16-mixed", batch, sequence)
    return replace(problem_of(known, gpu(MACHINE, HOST_BYTES, CORES)), host_bytes=None)


def divided(problem: Problem, piece_bytes: int) -> Problem:
    """Return the problem with weights divided by rows into pieces of at most `piece_bytes`, each a separate chunk."""
    pieces = {info.fqn: _pieces(info, piece_bytes) for info in problem.layout.parameters}

    def names(fqns: Iterable[str]) -> tuple[str, ...]:
        return tuple(piece.fqn for fqn in fqns for piece in pieces[fqn])

    def casts(entries: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        shares = ((pieces[fqn], nbytes / sum(piece.numel for piece in pieces[fqn])) for fqn, nbytes in entries)
        return tuple((piece.fqn, round(share * piece.numel)) for parts, share in shares for piece in parts)

    layout, profile = problem.layout, problem.profile
    units = tuple(replace(unit, parameters=names(unit.parameters)) for unit in layout.units)
    calls = tuple(replace(call, saved_casts=casts(call.saved_casts)) for call in profile.calls)
    uses = tuple(replace(use, fqn=piece.fqn) for use in profile.parameters for piece in pieces[use.fqn])
    segments = tuple(
        replace(segment, casts=casts(segment.casts), gradients=names(segment.gradients)) for segment in profile.segments
    )
    return replace(
        problem,
        layout=replace(layout, parameters=tuple(piece for parts in pieces.values() for piece in parts), units=units),
        profile=replace(profile, calls=calls, parameters=uses, segments=segments),
        chunk_bytes=(piece_bytes,),
    )


def _pieces(info: ParameterInfo, piece_bytes: int) -> list[ParameterInfo]:
    count = min(-(-info.streamed_nbytes // piece_bytes), info.shape[0] if len(info.shape) > 1 else 1)
    rows = [info.shape[0] * number // count for number in range(count + 1)] if count > 1 else []
    return [
        replace(
            info,
            fqn=f"{info.fqn}.{number}",
            sites=tuple(f"{site}.{number}" for site in info.sites),
            shape=(end - start, *info.shape[1:]),
            nbytes=info.nbytes // info.shape[0] * (end - start),
        )
        for number, (start, end) in enumerate(pairwise(rows))
    ] or [info]


def measure(name: str, problem: Problem, target: float | None = None) -> Search:
    """Search several times; `target` is the maximum processor time in seconds, or None."""
    found, seconds = timed(lambda: find_any(problem, Knobs()), REPEATS)
    packed = packings(problem, Knobs())
    counts = [len(packing.chunks) for packing in packed]
    assert problem.device_bytes is not None
    return Search(
        name,
        problem.device_bytes,
        len(packed),
        (min(counts), max(counts)),
        num_candidates(problem),
        found.evaluations,
        seconds,
        target,
    )


def try_all(name: str, problem: Problem) -> Trial:
    """Search, and try all plans."""
    found, seconds = timed(lambda: find_any(problem, Knobs()), REPEATS)
    (plans, least), (all_seconds,) = timed(lambda: _tried(problem), 1)
    return Trial(
        name,
        len(packings(problem, Knobs())[0].chunks),
        len(plans),
        all_seconds,
        statistics.median(seconds),
        num_candidates(problem),
        found.seconds / least,
    )


def tight(problem: Problem) -> Problem:
    """Return the problem with a device budget halfway between the minimum and the maximum of all plans."""
    taken = [candidate.device for candidate in all_candidates(replace(problem, device_bytes=None), Knobs())]
    return replace(problem, device_bytes=(min(taken) + max(taken)) // 2)


def num_candidates(problem: Problem) -> int:
    """Return the number of choices of swapped blocks, steps, resident chunks and moved inputs, over all chunk sizes."""
    return sum(
        (len(packing.chunks) + 1) * sum(1 + packing.most_inputs(*pair) for pair in packing.policies_allowed(Knobs()))
        for packing in packings(problem, Knobs())
    )


def timed(work: Callable[[], T], repeats: int) -> tuple[T, tuple[float, ...]]:
    """Return the result and the processor time of each repeat."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        result = work()
        seconds.append(time.process_time() - begin)
    return result, tuple(seconds)


def render(searches: Sequence[Search], trials: Sequence[Trial]) -> str:
    """Return both tables."""
    lines = [
        (
            row.model,
            f"{row.device_bytes / GIB:.0f}",
            row.sizes,
            f"{row.chunks[0]} to {row.chunks[1]}" if row.sizes > 1 else row.chunks[0],
            f"{row.candidates:,}",
            f"{row.evaluations:,}",
            f"{statistics.median(row.seconds):.3f} ({min(row.seconds):.3f} to {max(row.seconds):.3f})",
            f"{statistics.median(row.seconds) / PAPER_SECONDS:.1f}",
            "" if row.target is None else f"{row.target:g}",
        )
        for row in searches
    ]
    peers = [
        (
            row.model,
            row.chunks,
            f"{row.candidates:,}",
            f"{row.plans:,}",
            f"{row.all_seconds:.2f}",
            f"{row.seconds:.3f}",
            f"{row.ratio:.7f}",
        )
        for row in trials
    ]
    return f"{table(HEADER, lines)}\n\n{table(PEER_HEADER, peers)}"


def run(
    models: Sequence[str] = tuple(MODELS), tried: Sequence[str] = tuple(TRIED), sequence: int = SEQUENCE
) -> tuple[str, dict[str, Any]]:
    """Return the tables and their rows.

    Args:
        models: Keys of `MODELS`.
        tried: Keys of `TRIED`.
        sequence: Tokens in a sequence.
    """
    searches = []
    for name in models:
        problem = problem_for(*MODELS[name], sequence)
        for sizes in ((None,), problem.chunk_bytes):
            for device_bytes in (problem.device_bytes, SMALLER_BYTES):
                searches.append(measure(name, replace(problem, device_bytes=device_bytes, chunk_bytes=sizes)))
        if name in DIVIDED:
            parts = divided(problem, DIVIDED[name])
            for loop, training in LOOPS.items():
                for device_bytes in (problem.device_bytes, SMALLER_BYTES):
                    each = replace(parts, training=training, device_bytes=device_bytes)
                    searches.append(measure(f"{name}, divided, {loop}", each, TARGETS.get(name)))
    trials = []
    for name in tried:
        problem = tight(replace(problem_for(*TRIED[name], sequence), chunk_bytes=(None,)))
        trials.append(try_all(name, problem))
    rows = {"searches": [vars(row) for row in searches], "trials": [vars(row) for row in trials]}
    return render(searches, trials), rows


def _tried(problem: Problem) -> tuple[list[Candidate], float]:
    """Return all plans, and the shortest predicted step of those that fit."""
    plans = list(all_candidates(problem, Knobs()))
    return plans, fastest(problem, plans)
