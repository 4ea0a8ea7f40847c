"""Packs parameters into chunks. Pure: names and numbers in, names and numbers out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_protrain.planner.plan import ALIGNMENT, ChunkPlan, chunk_offsets
from lightning_protrain.profiler.records import ModelLayout, ParameterInfo


def users_of(layout: ModelLayout) -> dict[str, tuple[str, ...]]:
    """Names of the units that need each parameter, in execution order, by its first name."""
    users: dict[str, tuple[str, ...]] = {info.fqn: () for info in layout.parameters}
    for unit in layout.units:
        own = (unit.name,)  # One object for all that nobody else needs.
        for fqn in unit.parameters:
            users[fqn] += own
    return users


def pack_chunks(layout: ModelLayout, chunk_bytes: int | None = None) -> tuple[ChunkPlan, ...]:
    """Puts every parameter into one chunk, all of them offloaded.

    A chunk holds parameters of one dtype (on the host and on the device), all trainable or all frozen, that the same
    units need: so it never straddles units, and a tied parameter lies apart from what only its first unit needs.

    Args:
        layout: The model.
        chunk_bytes: The most bytes of a chunk, alignment included (S_chunk in the paper); a parameter that is larger
            than that gets a chunk of its own. `None`: no limit.

    Returns:
        Chunks in execution order of the units that own them.

    Raises:
        ValueError: `chunk_bytes` is below 1.
    """
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; give a positive number of bytes, or None for no limit.")
    users = users_of(layout)
    chunks: list[ChunkPlan] = []
    # Alike units are divided alike.
    parts: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for unit in layout.units:
        groups: dict[tuple[str, str | None, bool, tuple[str, ...]], list[ParameterInfo]] = {}
        latest, group = None, []
        for fqn in unit.parameters:
            used_by = users[fqn]
            if used_by[0] == unit.name:
                info = layout.by_name[fqn]
                kind = (info.dtype, info.streamed_dtype, info.trainable, used_by)
                if kind != latest:
                    latest, group = kind, groups.setdefault(kind, [])
                group.append(info)
        for (dtype, streamed, trainable, _), infos in groups.items():
            sizes = tuple([info.streamed_nbytes for info in infos])
            if sizes not in parts:
                parts[sizes] = list(_split(sizes, chunk_bytes))
            names = tuple([info.fqn for info in infos])
            chunks += [
                ChunkPlan(names[begin:end], unit.name, dtype, trainable, nbytes, False, streamed)
                for begin, end, nbytes in parts[sizes]
            ]
    return tuple(chunks)


def with_residency(layout: ModelLayout, chunk: ChunkPlan, resident: bool) -> ChunkPlan:
    """The same chunk, resident (in the dtype of its parameters) or streamed."""
    infos = [layout.by_name[fqn] for fqn in chunk.parameters]
    _, nbytes = chunk_offsets([info.nbytes if resident else info.streamed_nbytes for info in infos])
    streamed_dtype = None if resident else infos[0].streamed_dtype
    return ChunkPlan(chunk.parameters, chunk.unit, chunk.dtype, chunk.trainable, nbytes, resident, streamed_dtype)


def _split(sizes: Sequence[int], chunk_bytes: int | None) -> Iterator[tuple[int, int, int]]:
    """The first parameter, the one after the last, and the bytes of each chunk that parameters of these bytes fill."""
    begin = filled = 0
    for index, nbytes in enumerate(sizes):
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if index > begin and chunk_bytes is not None and filled + size > chunk_bytes:
            yield begin, index, filled
            begin, filled = index, 0
        filled += size
    yield begin, len(sizes), filled


def chunks_of(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> dict[str, tuple[int, ...]]:
    """Indices of all chunks that each unit needs, those of tied parameters it does not own included."""
    index_of = {fqn: index for index, chunk in enumerate(chunks) for fqn in chunk.parameters}
    return {unit.name: tuple(sorted({index_of[fqn] for fqn in unit.parameters})) for unit in layout.units}
