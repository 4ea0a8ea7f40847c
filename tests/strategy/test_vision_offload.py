"""Models that read images, under offload: with batches that have none, and in less memory than they would like."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch

from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU
from tests.support.models import fit
from tests.support.network_batches import IMAGE_TOKEN, Batch
from tests.support.networks import NetworkModule, networks
from tests.support.plans import alternating, kept

NETWORKS = networks()
NAMES = ["llava", "gemma3", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"]
# Which batches have images; the first is the one that is profiled.
ORDERS = {"text first": (False, True, False), "images first": (True, False, True), "text alone": (False, False, False)}
OF_TEXT = ("input_ids", "attention_mask", "labels", "token_type_ids")
TOWER = ("vision_tower.", "visual.")


def without_images(batch: Batch) -> Batch:
    """Return the rows with text tokens in place of images."""
    ids = batch["input_ids"]
    words = {**batch, "input_ids": torch.where(ids >= IMAGE_TOKEN, 3, ids)}
    if "token_type_ids" in batch:
        words["token_type_ids"] = torch.zeros_like(ids)
    return {key: value for key, value in words.items() if key in OF_TEXT}


def make(name: str, order: str) -> NetworkModule:
    """A module whose tower is deeper than its language model is wide, so that it is worth streaming."""
    batches = NETWORKS[name].batches()
    mixed = [one if has else without_images(one) for one, has in zip(batches, ORDERS[order], strict=True)]
    return NetworkModule(NETWORKS[name].build(), mixed)


def assert_same(plain: NetworkModule, found: NetworkModule) -> None:
    assert len(plain.losses) == len(found.losses) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain.losses, found.losses, strict=True))
    weights = found.state_dict()
    assert [key for key, value in plain.state_dict().items() if not torch.equal(value, weights[key])] == []


def in_the_tower(name: str) -> bool:
    return any(part in name for part in TOWER)


@pytest.mark.parametrize(
    ("name", "order", "plan"),
    [(*each, plan) for each, plan in zip(product(NAMES, ORDERS), cycle(["offload", "kept", "alternating", "kept"]))],
)
def test_batches_of_text_alone(name: str, order: str, plan: str) -> None:
    plain, found = make(name, order), make(name, order)
    fit(plain)
    made: Any = {"offload": lambda _: "offload", "kept": kept, "alternating": alternating}[plan](found)
    fit(found, strategy=ProTrainStrategy(plan=made, monitor=False))
    assert_same(plain, found)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "order"), list(product(["llava", "qwen2.5-vl"], ORDERS)))
def test_a_search_with_a_batch_of_either_kind(name: str, order: str) -> None:
    """The plan reserves memory for the vision tower even if the profiled batch does not run it."""
    plain, found = make(name, order), make(name, order)
    fit(plain)
    states = 16 * sum(parameter.numel() for parameter in plain.parameters())
    strategy = ProTrainStrategy(device_memory=int(1.1 * states), hardware=CPU, monitor=False)
    fit(found, strategy=strategy)
    assert_same(plain, found)
    assert strategy.plan is not None
    assert strategy.plan.num_offloaded_chunks > 0
    assert strategy.plan.prediction is not None
    if order != "images first":
        before = strategy.plan.prediction.device_bytes
        assert before <= int(1.1 * states)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_the_tower_counts_where_the_profiled_batch_leaves_it_out(name: str) -> None:
    """One budget, two first batches: with text first no less is streamed than if the tower were not there."""
    found = {}
    for order in ("text first", "text alone"):
        one = make(name, order)
        states = 16 * sum(parameter.numel() for parameter in one.parameters())
        strategy = ProTrainStrategy(device_memory=2 * states, hardware=CPU, monitor=False)
        fit(one, strategy=strategy)
        assert strategy.plan is not None
        found[order] = strategy.plan
    towers = [
        {fqn for chunk in plan.chunks for fqn in chunk.parameters if in_the_tower(fqn)} for plan in found.values()
    ]
    assert towers[0] == towers[1] != set()
    assert found["text first"].chunks == found["text alone"].chunks


def test_a_budget_far_below_the_states_streams_the_model() -> None:
    one = make("llava", "images first")
    states = 16 * sum(parameter.numel() for parameter in one.parameters())
    strategy = ProTrainStrategy(device_memory=states // 3, hardware=CPU, monitor=False)
    fit(one, strategy=strategy)
    plan = strategy.plan
    assert plan is not None
    assert plan.prediction is not None
    assert plan.prediction.device_bytes <= states // 3
    streamed = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
    assert any(in_the_tower(fqn) for fqn in streamed)
