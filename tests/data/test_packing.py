"""Packing as a partition, and packed rows against rows of their own on the models themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_protrain.data.batches.pack import PACKING_MODEL_TYPES, check_packing, pack, single_blocks
from tests.support.tiny_networks import VOCAB, tiny_config

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
    blocks = pack(lengths, 32, alone=alone, seed=seed, window=window)
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
    assert blocks.fill > 0.98


def test_blocks_depend_on_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    first, again = (pack(lengths, 64, seed=1, epoch=2) for _ in range(2))
    assert np.array_equal(first.examples, again.examples)
    assert np.array_equal(first.offsets, again.offsets)
    for other in ({"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}):
        assert not np.array_equal(first.examples, pack(lengths, 64, **other).examples)


def test_without_packing_a_row_is_an_example() -> None:
    blocks = single_blocks(np.array([3, 5, 4]))
    assert [blocks[index].tolist() for index in range(3)] == [[0], [1], [2]]
    assert not blocks.packed.any()
    with pytest.raises(IndexError):
        blocks[3]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 9], {}, r"Example 1 has 9 tokens .* max_length=8"),
        ([0, 3], {}, "Example 0 has 0 tokens"),
        ([3], {"window": 0}, "window=0"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(np.array(lengths), 8, **options)


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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(PACKING_MODEL_TYPES))
def test_all_models_of_the_list_keep_segments_apart(model_type: str) -> None:
    assert _largest_difference(model_type, "eager") < 1e-5


@pytest.mark.parametrize("model_type", ["falcon", "opt", "qwen3_next", "mamba"])
def test_models_that_look_across_segments_are_refused(model_type: str) -> None:
    assert _largest_difference(model_type, "eager") > 1e-3, "it may join the list"
    with pytest.raises(ValueError, match=f"'{model_type}' is not known to"):
        check_packing(AutoConfig.for_model(model_type))
