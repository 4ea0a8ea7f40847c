"""Random problems for the search, small ones for tests and large ones for benchmarks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.profiler.records import (
    Backward,
    Forward,
    HardwareProfile,
    ModelLayout,
    ModelProfile,
    OperationCost,
    ParameterInfo,
    ParameterUse,
    Segment,
    Storage,
    UnitCall,
    UnitInfo,
)
from tests.planner.layouts import forward_of

PAGE = 4096
TRAININGS = [
    Training(overlap, accumulate, clips)
    for overlap, clips in (("off", False), ("off", True), ("backward", False), ("forward", False), ("forward", True))
    for accumulate in (1, 2)
]


def random_layout(source: random.Random, num_blocks: int, chunks_per_block: int, tied: bool, low: bool) -> ModelLayout:
    """Embedding, blocks of several parameters (a chunk each, if chunks are small), and a head."""
    infos: list[ParameterInfo] = []

    def parameter(fqn: str, numel: int, sites: tuple[str, ...] = ()) -> str:
        trainable, streamed = source.random() < 0.8, "bfloat16" if low and source.random() < 0.5 else None
        shape = (numel // 4, 4) if source.random() < 0.7 else (numel,)
        infos.append(ParameterInfo(fqn, (fqn, *sites), shape, "float32", 4 * numel, trainable, streamed))
        return fqn

    units = [UnitInfo("embed", False, (parameter("embed.w", 4096, ("head.w",) if tied else ()),))]
    for index in range(num_blocks):
        name = f"layers.{index}"
        count = max(chunks_per_block + (source.random() < 0.2), 1)
        names = [parameter(f"{name}.w{part}", 4 * source.randint(1, 2000)) for part in range(count)]
        units.append(UnitInfo(name, True, tuple(names)))
    units.append(UnitInfo("head", False, ("embed.w",) if tied else (parameter("head.w", 2048),)))
    if source.random() < 0.2:  # Weights of a module around all others.
        units.insert(0, UnitInfo("", False, (parameter("scale", 64),), tuple(unit.name for unit in units)))
        order = {fqn: place for place, unit in enumerate(units) for fqn in unit.parameters}
        infos.sort(key=lambda info: order[info.fqn])
    return ModelLayout(tuple(infos), tuple(units), source.randint(0, 5000))


def random_profile(source: random.Random, layout: ModelLayout) -> ModelProfile:
    """One step through the units of `layout` in order, activations of blocks kept."""
    scale = source.choice([0, 1, 10, 100])
    segments: list[Segment] = []
    calls: list[UnitCall] = []
    live = 0
    whole: set[str] = set()
    for unit in layout.units:
        if unit.encloses:
            continue
        saved, given = source.randint(0, 9) * PAGE * scale, source.randint(0, 2) * PAGE
        casts = tuple(
            (fqn, 2 * layout.parameter(fqn).numel)
            for fqn in unit.parameters
            if layout.parameter(fqn).streamed_dtype and layout.parameter(fqn).numel * 2 <= saved
        )[:1]
        cast = sum(nbytes for _, nbytes in casts)
        swapped = max(saved + given, cast + PAGE) if source.random() < 0.9 else 0
        swapped = -(-swapped // PAGE) * PAGE
        cost = (OperationCost(source.randint(0, 10**6), source.randint(1, 10**5), "float32"),)
        cost += (OperationCost(0, source.randint(1, 10**5), "float32"),) * source.randint(0, 2)
        products = source.choice([None, 0, saved // 3, saved // 2, saved])
        temporaries = [source.randint(0, 5 * PAGE * scale) for _ in range(3)]
        peak = live + saved + 1 + source.randint(0, 5 * PAGE * scale)
        gradients = tuple(fqn for fqn in unit.parameters if layout.parameter(fqn).trainable and fqn not in whole)
        whole.update(gradients)
        own = sum(layout.parameter(fqn).nbytes for fqn in gradients)
        segments.append(
            Segment(
                unit.name,
                Forward(live, (replace(cost[0], is_product=True), *cost[1:]), last_saved=5),
                Backward(live + saved, peak, cost * 2, peak_with_gradients=peak + source.randint(0, own)),
                given,
                casts,
                gradients,
                keeps_products=products is not None,
                input_swap_bytes=given if unit.is_block else 0,
            )
        )
        shared, idle = source.randint(0, PAGE), source.randint(0, products or 0)
        storages = storages_of(temporaries, saved, min(saved, shared), (products or 0) - idle, idle)
        segments[-1] = replace(segments[-1], forward=replace(segments[-1].forward, storages=storages))
        live += saved
        calls.append(UnitCall(unit.name, saved, casts, swapped))
        if source.random() < 0.1:
            segments.append(Segment("", forward_of(live, live + PAGE, 0, cost), Backward(live, live + PAGE, cost)))
    uses = tuple(ParameterUse(info.fqn) for info in layout.parameters)
    return ModelProfile(tuple(calls), uses, live, 0, tuple(segments))


def storages_of(temporaries: Sequence[int], saved: int, shared: int, products: int, idle: int) -> tuple[Storage, ...]:
    """Return activations of a forward of 6 operations that saves so many bytes, some of them also in other segments."""
    own = partial(Storage, gone=7, is_saved=True)
    kinds = (
        own(products, 1, 2, is_product=True, is_alone=True),
        own(idle, 6, 7, is_product=True, is_alone=True),
        own(max(saved - products - idle - shared, 0), 3, 5, is_alone=True),
        own(min(shared, saved - products - idle), 4, 5),
    )
    return (*kinds, *(Storage(nbytes, at, at + 1, at + 1) for at, nbytes in zip((2, 4, 6), temporaries, strict=True)))


def random_hardware(source: random.Random) -> HardwareProfile:
    """A machine whose links, host and device are of about the same speed, one of them sometimes far from it."""
    speed = [10 ** source.uniform(-1, 1) for _ in range(4)]
    upload, download = 2e6 * speed[0], 2e6 * speed[0] * source.uniform(0.5, 1.0)
    return HardwareProfile(
        name="random",
        upload=upload,
        download=download,
        upload_beside=upload * source.uniform(0.6, 1.0),
        download_beside=download * source.uniform(0.6, 1.0),
        flops={"float32": 1e8 * speed[1]},
        memory=1e8 * speed[1],
        device_step=1e7 * speed[2],
        host_step=1e6 * speed[2],
        host_memory=1e7 * speed[3],
        device_bytes=1 << 40,
        host_bytes=1 << 40,
        asynchronous=source.random() < 0.8,
    )


def random_problem(seed: int, most_blocks: int = 8, most_chunks: int = 12) -> Problem:
    """A problem without budgets; `replace` gives it some."""
    source = random.Random(seed)
    num_blocks = source.randint(1, most_blocks)
    per_block = source.randint(1, max(1, min(3, (most_chunks - 2) // num_blocks)))
    layout = random_layout(source, num_blocks, per_block, source.random() < 0.3, source.random() < 0.4)
    layout = replace(layout, lends_copies=seed % 2 == 0)
    return Problem(
        profile=random_profile(source, layout),
        layout=layout,
        hardware=random_hardware(source),
        training=source.choice(TRAININGS),
        state_bytes=source.choice([0.0, 8.0]),
        device_bytes=None,
        host_bytes=None,
        alpha=source.choice([1.0, 1.1]),
        foreach=source.random() < 0.3,
        chunk_bytes=source.choice([(None,), (1,), (None, 8192), (8192, 1)]),
    )


def with_repeats(source: random.Random, problem: Problem) -> Problem:
    """Return the problem with units that are called several times: in a row, with code between, or out of order."""
    segments: list[Segment] = []
    for segment in problem.profile.segments:
        # Gradients are whole after the first call, which is the last in backward.
        again = replace(segment, gradients=())
        segments.append(segment)
        for _ in range(source.choice([0, 0, 0, 1, 2, 7]) if segment.unit else 0):
            if source.random() < 0.4:
                segments.append(Segment("", replace(segment.forward), replace(segment.backward)))
            segments.append(again)
        if source.random() < 0.05:
            segments.append(replace(source.choice(segments), gradients=()))
    return replace(problem, profile=replace(problem.profile, segments=tuple(segments)))


def large_problem(num_blocks: int, chunks_per_block: int) -> Problem:
    """A transformer of equal blocks, each of so many chunks, on a machine on which a plan has to choose."""
    infos: list[ParameterInfo] = []
    units: list[UnitInfo] = []
    for name, count in [("embed", 2), *((f"layers.{i}", chunks_per_block) for i in range(num_blocks)), ("head", 2)]:
        names = tuple(f"{name}.m{part}.w" for part in range(count))
        infos += [ParameterInfo(fqn, (fqn,), (1 << 12, 1 << 10), "float32", 1 << 24, True) for fqn in names]
        units.append(UnitInfo(name, name.startswith("layers"), names))
    segments, saved, live = [], 48 << 20, 0
    for unit in units:
        cost = (OperationCost(2 * 4096 * (len(unit.parameters) << 22), 1 << 20, "float32"),)
        kept = saved if unit.is_block else 1 << 20
        forward, peak = forward_of(live, live + 2 * kept, kept, cost), live + 3 * kept
        back = Backward(live, peak, cost * 2, peak_with_gradients=peak + (1 << 24))
        live += kept
        segment = Segment(unit.name, forward, back, 1 << 20, (), unit.parameters[::-1], keeps_products=False)
        segments.append(replace(segment, input_swap_bytes=(1 << 20) * unit.is_block))
    calls = [UnitCall(unit.name, saved, (), saved) for unit in units]
    uses = tuple(ParameterUse(info.fqn) for info in infos)
    rates = {"upload": 25e9, "download": 25e9, "upload_beside": 20e9, "download_beside": 20e9}
    machine = HardwareProfile(
        name="large", **rates, flops={"float32": 150e12}, memory=1.5e12,
        device_step=5e10, host_step=2e9, host_memory=1e11, device_bytes=1 << 40, host_bytes=1 << 44,
    )  # fmt: skip
    return Problem(
        profile=ModelProfile(tuple(calls), uses, live, 0, tuple(segments)),
        layout=ModelLayout(tuple(infos), tuple(units), 0),
        hardware=machine,
        training=Training("backward"),
        state_bytes=8.0,
        device_bytes=20 << 30,
        host_bytes=None,
        chunk_bytes=(1,),
    )


def with_tied_head(problem: Problem) -> Problem:
    """Return the problem with a last unit that uses the weights of the first one."""
    layout, profile = problem.layout, problem.profile
    (*others, head), own = layout.units, layout.units[0].parameters
    infos = [
        replace(info, sites=(info.fqn, f"{head.name}.{info.fqn}")) if info.fqn in own else info
        for info in layout.parameters
        if info.fqn not in head.parameters
    ]
    return replace(
        problem,
        layout=ModelLayout(tuple(infos), (*others, replace(head, parameters=own)), layout.buffer_bytes),
        profile=replace(
            profile,
            parameters=tuple(ParameterUse(info.fqn) for info in infos),
            segments=(*profile.segments[:-1], replace(profile.segments[-1], gradients=())),
        ),
    )


def with_calls_of_the_head(problem: Problem, count: int) -> Problem:
    """Return the problem with `count` calls of the last unit, and code between them."""
    *others, head = problem.profile.segments
    again = (Segment("", head.forward, head.backward), replace(head, gradients=())) * (count - 1)
    return replace(problem, profile=replace(problem.profile, segments=(*others, head, *again)))


def with_budgets(problem: Problem, device: int | None, host: int | None) -> Problem:
    """Return the problem with other budgets."""
    return replace(problem, device_bytes=device, host_bytes=host)


def random_network(seed: int, problem: Problem) -> Network:
    """Return a network for one or several nodes, on which sums take 0.01 to 10 times as long as a backward."""
    source = random.Random(seed)
    machine, segments = problem.hardware, problem.profile.segments
    backward = sum(machine.seconds(segment.backward.operations) for segment in segments)
    nbytes = sum(info.nbytes for info in problem.layout.parameters if info.trainable)

    def route() -> Route:
        whole = backward * 10 ** source.uniform(-2, 1)
        return Route(source.choice([0.0, whole * source.uniform(0, 0.05)]), max(nbytes, 1) / max(whole, 1e-9))

    element = source.choice([None, 2])
    if source.random() < 0.4:
        return Network(route(), element=element)
    return Network(route(), route(), source.choice([None, route()]), source.randint(2, 8), element)
