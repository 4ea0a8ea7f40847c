"""The order as a pure function: every row once, alike on all ranks, from any batch on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.data.batches.pack import pack, single_blocks
from lightning_protrain.data.batches.sampler import EpochSampler, ShareSampler

_LENGTHS = np.random.default_rng(0).integers(1, 100, 103)


def _sampler(count: int = 103, **options: Any) -> EpochSampler:
    return EpochSampler(single_blocks(_LENGTHS[:count]), **{"batch_size": 4, **options})


@given(
    count=st.integers(1, 103),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    group_by_length=st.booleans(),
    packed=st.booleans(),
)
def test_every_row_is_trained_once(
    count: int,
    batch_size: int,
    world_size: int,
    epoch: int,
    shuffle: bool,
    group_by_length: bool,
    packed: bool,
) -> None:
    blocks = single_blocks(_LENGTHS[:count])
    if packed:
        blocks = pack(_LENGTHS[:count], 100, alone=np.arange(count) % 5 == 0)
    options: dict[str, Any] = {"shuffle": shuffle, "group_by_length": group_by_length, "group_steps": 2}
    ranks = []
    for rank in range(world_size):
        sampler = EpochSampler(blocks, batch_size, rank=rank, world_size=world_size, **options)
        ranks.append(sampler.batches(epoch))
        assert len(ranks[-1]) == len(sampler)
        assert all(0 < len(batch) <= batch_size for batch in ranks[-1])
    trained = [row for batches in ranks for batch in batches for row in batch if row >= 0]
    assert sorted(trained) == list(range(len(blocks)))
    for step in zip(*ranks, strict=True):
        rows = [row if row >= 0 else ~row for batch in step for row in batch]
        assert len(set(blocks.packed[rows])) == 1
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = [_sampler(seed=seed).batches(epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]
    assert [row for batch in _sampler(shuffle=False).batches(7) for row in batch] == list(range(103))


def test_grouping_saves_padding_and_keeps_the_order_random() -> None:
    def padding(batches: list[list[int]]) -> int:
        return sum(int((_LENGTHS[batch].max() - _LENGTHS[batch]).sum()) for batch in batches)

    grouped = _sampler(group_by_length=True).batches(0)
    assert padding(grouped) < 0.2 * padding(_sampler().batches(0))
    means = [_LENGTHS[batch].mean() for batch in grouped]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.6
    assert grouped != _sampler(group_by_length=True).batches(1)


def test_grouped_ranks_have_like_lengths_at_every_step() -> None:
    ranks = [_sampler(100, group_by_length=True, rank=rank, world_size=2).batches(0) for rank in range(2)]
    gaps = [abs(_LENGTHS[one].max() - _LENGTHS[other].max()) for one, other in zip(*ranks, strict=True)]
    assert np.mean(gaps) < 5


@pytest.mark.parametrize("position", [0, 1, 11, 26])
def test_it_goes_on_where_the_state_says(position: int) -> None:
    first = _sampler(seed=3)
    first.set_epoch(2)
    first.position = position
    second = _sampler(seed=3)
    second.load_state_dict(first.state_dict())
    assert list(second) == _sampler(seed=3).batches(2)[position:]
    second.set_epoch(2)
    assert second.position == position
    second.set_epoch(3)
    assert list(second) == _sampler(seed=3).batches(3)


@pytest.mark.parametrize("options", [{"seed": 1}, {"batch_size": 5}, {"world_size": 2}, {"count": 102}])
def test_other_batches_are_refused_in_mid_epoch_only(options: dict[str, int]) -> None:
    first = _sampler()
    first.position = 5
    with pytest.raises(ValueError, match=r"after batch 5 of epoch 0.* was .* and is .*Resume with the same data"):
        _sampler(**options).load_state_dict(first.state_dict())
    for position in (0, len(first)):
        first.position = position
        _sampler(**options).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2 is none of 2 ranks"),
        ({"seed": -1}, "seed=-1"),
        ({"count": 0}, "no rows to train on"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _sampler(**options)


@given(count=st.integers(1, 60), batch_size=st.integers(1, 9), world_size=st.integers(1, 5))
def test_every_row_is_evaluated_once_in_as_many_batches_on_every_rank(
    count: int, batch_size: int, world_size: int
) -> None:
    shares = [ShareSampler(range(count), batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    indices = [list(share) for share in shares]
    assert sorted(index for share in indices for index in share if index >= 0) == list(range(count))
    assert all(share == sorted(share, key=lambda index: (index < 0, index)) for share in indices), "in their order"
    assert all(index % world_size == rank for rank, share in enumerate(indices) for index in share if index >= 0)
    assert len({-(-len(share) // batch_size) for share in shares}) == 1
    for share in indices:
        # A row that is not scored stands alone in the last batch, where there would be none.
        assert share.count(~0) == (~0 in share) == (len(share) % batch_size == 1 % batch_size and share[-1] == ~0)


def test_a_share_of_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        ShareSampler(range(3), 2, rank=2, world_size=2)
