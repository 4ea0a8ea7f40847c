"""Parameters as numbers, their places in the layout: names are looked up once, for all ways of packing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.profiler.records import ModelLayout, ModelProfile, Segment

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Parameters:
    """Those of a layout in its order, (M,).

    Attributes:
        number: Where each stands, by its first name.
        numel: Elements.
        own: Bytes in its own dtype.
        low: Whether it is streamed in another dtype.
        shared: Whether several modules or units need it.
    """

    number: dict[str, int]
    numel: Integers
    own: Integers
    low: Flags
    shared: Flags

    @classmethod
    def of(cls, layout: ModelLayout) -> Parameters:
        """Those of this layout."""
        infos = layout.parameters
        users = Counter(chain.from_iterable(unit.parameters for unit in layout.units))
        return cls(
            number={info.fqn: number for number, info in enumerate(infos)},
            numel=np.array([info.numel for info in infos], dtype=np.int64),
            own=np.array([info.nbytes for info in infos], dtype=np.int64),
            low=np.array([info.streamed_dtype is not None for info in infos], dtype=np.bool_),
            shared=np.array([len(info.sites) > 1 or users[info.fqn] > 1 for info in infos], dtype=np.bool_),
        )

    def numbers(self, names: Iterable[str]) -> Integers:
        """Of these."""
        return np.fromiter(map(self.number.__getitem__, names), dtype=np.int64)


@dataclass(frozen=True)
class Casts:
    """Copies of parameters in another dtype in several lists, one list after the other, (E,).

    Attributes:
        lists: Which list each is in, rising.
        numbers: Of the parameters.
        nbytes: Of the copies.
    """

    lists: Integers
    numbers: Integers
    nbytes: Integers

    @classmethod
    def of(cls, parameters: Parameters, lists: Sequence[Sequence[tuple[str, int]]]) -> Casts:
        """Those of lists of first names and bytes."""
        names, nbytes = zip(*chain.from_iterable(lists), strict=True) if any(lists) else ((), ())
        which = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
        return cls(which, parameters.numbers(names), np.array(nbytes, dtype=np.int64))


@dataclass(frozen=True)
class Named:
    """What a profile says of parameters.

    Attributes:
        parameters: Those of the layout.
        gradients: Numbers of the parameters that get gradients, in the order in which they land, (G,).
        positions: Index of the segment in whose backward each does, falling, (G,).
        parts: Which part of that has been computed then, (G,).
        casts: Copies that are saved, by segment.
        calls: Those of each call of a block.
    """

    parameters: Parameters
    gradients: Integers
    positions: Integers
    parts: Floats
    casts: Casts
    calls: Casts

    @classmethod
    def of(cls, profile: ModelProfile, layout: ModelLayout) -> Named:
        """What this profile says."""
        parameters, segments, blocks = Parameters.of(layout), profile.segments, {block.name for block in layout.blocks}
        backwards = segments[::-1]
        counts = [len(segment.gradients) for segment in backwards]
        gradients = parameters.numbers(chain.from_iterable(segment.gradients for segment in backwards))
        return cls(
            parameters=parameters,
            gradients=gradients,
            positions=np.repeat(np.arange(len(segments))[::-1], counts),
            parts=_parts(backwards, counts, parameters.numel[gradients].tolist()),
            casts=Casts.of(parameters, [segment.casts for segment in segments]),
            calls=Casts.of(parameters, [call.saved_casts for call in profile.calls if call.name in blocks]),
        )


def come_together(gradients: Sequence[str], numels: Sequence[int]) -> list[float]:
    """Which part of a segment's backward has been computed when each of its gradients is there.

    Args:
        gradients: First names of their parameters.
        numels: Elements of each.
    """
    modules = [fqn.rpartition(".")[0] for fqn in gradients]
    sums = list(accumulate(numels))
    ends = dict(zip(modules, sums, strict=True))
    whole = max([1, *sums[-1:]])
    return [ends[module] / whole for module in modules]


def _parts(segments: Sequence[Segment], counts: Sequence[int], numels: Sequence[int]) -> Floats:
    bounds = pairwise(accumulate(counts, initial=0))
    parts = [
        come_together(segment.gradients, numels[begin:end])
        for segment, (begin, end) in zip(segments, bounds, strict=True)
    ]
    return np.array([*chain.from_iterable(parts)])
