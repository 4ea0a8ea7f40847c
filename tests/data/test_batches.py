"""Rows are sampled, packed and collated: every row once, alike on all ranks, and each segment by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_protrain.data.batches import pack as pack_module
from lightning_protrain.data.batches.loader import WEIGHT_UNITS, BatchRow, BatchRows, Collator, is_packed
from lightning_protrain.data.batches.pack import pack, single_blocks
from lightning_protrain.data.batches.sampler import EpochSampler, ShareSampler
from lightning_protrain.models.loading import PACKING_MODEL_TYPES, check_packing
from tests.support.encoded_rows import encoded
from tests.support.tiny_networks import VOCAB, tiny_config

_LENGTHS = np.random.default_rng(0).integers(1, 100, 103)


def _sampler(count: int = 103, **options: Any) -> EpochSampler:
    return EpochSampler(single_blocks(_LENGTHS[:count]), **{"batch_size": 4, **options})


@given(
    count=st.integers(1, 103),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    group_by_length=st.booleans(),
    packed=st.booleans(),
)
def test_every_row_is_trained_once(
    count: int,
    batch_size: int,
    world_size: int,
    epoch: int,
    group_by_length: bool,
    packed: bool,
) -> None:
    blocks = single_blocks(_LENGTHS[:count])
    if packed:
        blocks = pack(_LENGTHS[:count], 100, alone=np.arange(count) % 5 == 0)
    ranks = []
    for rank in range(world_size):
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "group_by_length": group_by_length}
        sampler = EpochSampler(blocks, batch_size, **options)
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


SEGMENTS = [7, 1, 9, 3]
OWN = {"gemma3_text": {"sliding_window": 4}, "mistral": {"sliding_window": 4}, "qwen3": {"use_sliding_window": False}}


@given(
    st.lists(st.tuples(st.integers(1, 32), st.booleans()), min_size=1, max_size=80),
    st.integers(0, 3),
    st.integers(1, 100),
)
def test_every_example_is_in_one_block_that_is_not_too_long(
    rows: list[tuple[int, bool]], seed: int, window: int
) -> None:
    lengths, alone = (np.array(column) for column in zip(*rows, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module, "WINDOW", window)
        blocks = pack(lengths, 32, alone=alone, seed=seed)
    assert sorted(blocks.examples.tolist()) == list(range(len(rows)))
    for index in range(len(blocks)):
        members = blocks[index]
        assert len(members)
        assert lengths[members].sum() == blocks.lengths[index] <= 32
        assert alone[members].any() != blocks.packed[index]
        assert blocks.packed[index] or len(members) == 1


def test_rows_are_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 600, 5000)
    blocks = pack(lengths, 1024)
    assert len(blocks) <= 1.02 * np.ceil(lengths.sum() / 1024)
    assert blocks.packed.all()
    assert lengths.sum() / (len(blocks) * blocks.lengths.max()) > 0.98


def test_blocks_depend_on_the_seed_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    first, again, other = (pack(lengths, 64, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.examples, again.examples)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.examples, other.examples)


def test_without_packing_a_row_is_an_example() -> None:
    blocks = single_blocks(np.array([3, 5, 4]))
    assert [blocks[index].tolist() for index in range(3)] == [[0], [1], [2]]
    assert not blocks.packed.any()
    with pytest.raises(IndexError):
        blocks[3]


@pytest.mark.parametrize(
    ("lengths", "message"), [([3, 9], r"Example 1 has 9 tokens .* max_length=8"), ([0, 3], "Example 0 has 0 tokens")]
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(np.array(lengths), 8)


def _largest_difference(model_type: str, attention: str) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_config(model_type, **OWN.get(model_type, {})))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    ids = torch.randint(3, VOCAB, (2, sum(SEGMENTS)))
    positions = torch.cat([torch.arange(length) for length in SEGMENTS]).repeat(2, 1)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(SEGMENTS, dim=1)]
    return (packed - torch.cat(alone, dim=1)).abs().max().item()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_segments_see_only_themselves(model_type: str, attention: str) -> None:
    assert _largest_difference(model_type, attention) < 1e-6


@pytest.mark.sample(10)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(PACKING_MODEL_TYPES))
def test_all_models_of_the_list_keep_segments_apart(model_type: str) -> None:
    assert _largest_difference(model_type, "eager") < 1e-5


@pytest.mark.parametrize("model_type", ["falcon", "opt", "qwen3_next", "mamba"])
def test_models_that_look_across_segments_are_refused(model_type: str) -> None:
    assert _largest_difference(model_type, "eager") > 1e-3, "it may join the list"
    with pytest.raises(ValueError, match=f"'{model_type}' is not known to"):
        check_packing(AutoConfig.for_model(model_type))


def _alone(*lengths: int) -> list[BatchRow]:
    return [BatchRow((encoded(length, seed),)) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize(("longest", "length"), [(7, 8), (8, 8), (9, 16), (18, 20), (20, 20)])
def test_padded_rows(longest: int, length: int) -> None:
    rows = _alone(5, longest)
    batch = Collator(pad_token_id=1, max_length=20)(rows)
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert batch["input_ids"].shape == (2, length)
    for index, row in enumerate(rows):
        (example,) = row.segments
        assert batch["input_ids"][index].tolist() == [*example.input_ids.tolist(), *[1] * (length - len(example))]
        assert batch["attention_mask"][index].tolist() == [1] * len(example) + [0] * (length - len(example))
        scored = batch["labels"][index] != -100
        assert scored.sum() == example.num_trained
        assert torch.equal(batch["labels"][index][scored], batch["input_ids"][index][scored])
    assert not is_packed(batch)


def test_packed_rows() -> None:
    first, second, third = encoded(3), encoded(4, 1, trained=np.ones(4, bool)), encoded(6, 2)
    batch = Collator(pad_token_id=1, max_length=64)([BatchRow((first, second), True), BatchRow((third,), True)])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 0, 1]]
    assert batch["input_ids"][0].tolist() == [*first.input_ids.tolist(), *second.input_ids.tolist(), 1]
    assert batch["labels"][0, 3:].tolist() == [-100, *second.input_ids[1:].tolist(), -100]
    assert (batch["labels"] != -100).sum() == sum(part.num_trained for part in (first, second, third))
    assert is_packed(batch)
    short, long = BatchRow((encoded(3),), True), BatchRow((encoded(8), encoded(8, 1)), True)
    places = Collator(pad_token_id=1, max_length=64)([short, long])["position_ids"]
    assert places[0].tolist() == [0, 1, 2, *[0, 1, 2] * 4, 0]  # no position beyond those of a conversation


def test_weights_are_zero_where_nothing_is_trained() -> None:
    weighted = encoded(6, weights=np.full(6, 0.5, np.float32), trained=np.array([1, 1, 0, 0, 1, 1], bool))
    plain = encoded(4, 1, trained=np.ones(4, bool))
    batch = Collator(0, 8, weighted=True)([BatchRow((weighted,)), BatchRow((plain,))])
    weights = batch["loss_weights"]
    assert weights.dtype == torch.int64, "what is no float is not rounded when a batch is cast to half precision"
    assert (weights / WEIGHT_UNITS).tolist() == [[0, 0.5, 0, 0, 0.5, 0.5, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0]]
    with pytest.raises(AssertionError, match="weights of an example would be lost"):
        Collator(0, 8)([BatchRow((weighted,))])


def test_images_follow_one_after_the_other() -> None:
    two = encoded(
        5,
        media=("image", "image"),
        extras={"pixel_values": torch.ones(2, 3, 4, 4), "mm_token_type_ids": torch.ones(1, 5)},
    )
    one = encoded(3, media=("image",), extras={"pixel_values": torch.full((1, 3, 2, 4), 2.0)})
    none = encoded(4)
    batch = Collator(0, 8)([BatchRow((two,)), BatchRow((none,)), BatchRow((one,))])
    assert batch["pixel_values"].shape == (3, 3, 4, 4)
    assert (batch["pixel_values"][:2] == 1).all()
    assert (batch["pixel_values"][2, :, :2] == 2).all()
    assert (batch["pixel_values"][2, :, 2:] == 0).all()
    assert batch["mm_token_type_ids"].tolist() == [[1] * 5 + [0] * 3, [0] * 8, [0] * 8]


def test_rows_of_blocks_and_the_untrained_ones() -> None:
    examples = [encoded(length, length) for length in (3, 4, 5, 6)]
    rows = BatchRows(examples, pack(np.array([3, 4, 5, 6]), 9, alone=np.array([False, False, False, True])))
    assert sorted(len(part) for row in range(len(rows)) for part in rows[row].segments) == [3, 4, 5, 6]
    assert [rows[row].packed for row in range(len(rows))] == [True] * (len(rows) - 1) + [False]
    assert sum(part.num_trained for part in rows[~0].segments) == 0
    assert [len(part) for part in rows[~0].segments] == [len(part) for part in rows[0].segments]
    with pytest.raises(IndexError):
        BatchRows(examples, single_blocks(np.array([3, 4, 5, 6])))[4]
