"""Batches against what their rows say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_protrain.data.batches.loader import WEIGHT_UNITS, BatchRow, BatchRows, Collator, is_packed
from lightning_protrain.data.batches.pack import pack, single_blocks
from tests.support.encoded_rows import encoded


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


def test_weights_are_zero_where_nothing_is_trained() -> None:
    weighted = encoded(6, weights=np.full(6, 0.5, np.float32), trained=np.array([1, 1, 0, 0, 1, 1], bool))
    plain = encoded(4, 1, trained=np.ones(4, bool))
    batch = Collator(0, 8, weighted=True)([BatchRow((weighted,)), BatchRow((plain,))])
    weights = batch["loss_weights"]
    assert weights.dtype == torch.int64, "what is no float is not rounded when a batch is cast to half precision"
    assert (weights / WEIGHT_UNITS).tolist() == [[0, 0.5, 0, 0, 0.5, 0.5, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="weights, which would be lost"):
        Collator(0, 8)([BatchRow((weighted,))])


def test_images_follow_one_after_the_other() -> None:
    two = encoded(5, images=2, extras={"pixel_values": torch.ones(2, 3, 4, 4), "mm_token_type_ids": torch.ones(1, 5)})
    one = encoded(3, images=1, extras={"pixel_values": torch.full((1, 3, 2, 4), 2.0)})
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


def test_kinds_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="cannot share a batch"):
        Collator(0, 8)([*_alone(3), BatchRow((encoded(3),), True)])
