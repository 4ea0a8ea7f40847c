"""What a fit is known by, as values that can be saved and compared."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from lightning_protrain.callbacks.checkpoint.run_signature import (
    data_signature,
    dtype_signature,
    model_signature,
    optimizer_signature,
)
from lightning_protrain.data.batches.pack import single_blocks
from lightning_protrain.data.batches.sampler import EpochSampler


def _dataset(count: int = 6) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)), torch.ones(count, 2))


def test_a_model_is_known_by_names_and_shapes() -> None:
    state = nn.Linear(2, 3).state_dict()
    assert model_signature(state) == {"weight": [3, 2], "bias": [3]}
    assert model_signature(state, ["weight", "x"]) == {"weight": [3, 2]}
    assert dtype_signature(state, state) == {"weight": "torch.float32", "bias": "torch.float32"}


def test_companions_of_quantised_weights_are_no_weights() -> None:
    names = ["a.weight", "a.weight.absmax", "a.weight.quant_map", "a.weight.nested_absmax", "a.weight.nested_quant_map"]
    state = dict.fromkeys([*names, "a.weight.quant_state.bitsandbytes__nf4"], torch.zeros(1))
    assert list(model_signature(state)) == ["a.weight"]
    # Names like theirs are weights like others where they belong to none.
    assert list(model_signature({"absmax": torch.zeros(1), "b.absmax": torch.zeros(2)})) == ["absmax", "b.absmax"]


def _optimizer_terms(schedule: Any, *, last: bool = False) -> Any:
    module: Any = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    config = SimpleNamespace(scheduler=schedule(optimizer), interval="step", frequency=1)
    return optimizer_signature(SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[config]), module)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda o: CosineAnnealingLR(o, 10), lambda o: CosineAnnealingLR(o, 11)),
        (lambda o: CosineAnnealingLR(o, 10), lambda o: LambdaLR(o, lambda step: 1.0)),
        (lambda o: LambdaLR(o, lambda step: min(step, 10)), lambda o: LambdaLR(o, lambda step: min(step, 20))),
        (lambda o: ReduceLROnPlateau(o, patience=3), lambda o: ReduceLROnPlateau(o, patience=4)),
    ],
)
def test_schedules_are_known_by_what_they_do(one: Any, other: Any) -> None:
    assert _optimizer_terms(one) == _optimizer_terms(one)
    assert _optimizer_terms(one) != _optimizer_terms(other)
    json.dumps(_optimizer_terms(one))


def test_an_optimizer_is_known_by_class_and_names() -> None:
    [terms] = _optimizer_terms(lambda o: CosineAnnealingLR(o, 10))["optimizer"]
    assert terms == {"class": "torch.optim.sgd.SGD", "groups": [["weight", "bias"]]}


@pytest.mark.parametrize(
    ("loader", "size", "shuffled"),
    [
        (DataLoader(_dataset(), batch_size=3), 3, False),
        (DataLoader(_dataset(), batch_size=2, shuffle=True), 2, True),
        (DataLoader(_dataset(), batch_sampler=BatchSampler(DistributedSampler(_dataset(), 2, 0), 2, False)), 2, True),
        (DataLoader(_dataset(), sampler=WeightedRandomSampler([1.0], 1)), 1, None),
        (DataLoader(_dataset(), batch_sampler=[[0, 1], [2]]), None, None),
    ],
)
def test_data_is_known_by_rows_order_and_content(loader: Any, size: int | None, shuffled: bool | None) -> None:
    terms = data_signature([loader])
    assert terms["batch_size"] == (None if size is None else [size])
    [known] = terms["data"]
    assert known["rows"] == 6
    assert known.get("shuffled") is shuffled
    assert known["fingerprint"] != data_signature([DataLoader(_dataset(7))])["data"][0]["fingerprint"]
    json.dumps(terms)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4)[::2][:1],
        torch.ones(()).expand(3),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(0, 2),
        torch.eye(3).to_sparse(),
    ],
    ids=["one of a stride", "expanded", "conjugate", "empty", "sparse"],
)
def test_tensors_of_any_layout_have_a_fingerprint(tensor: Tensor) -> None:
    [known] = data_signature([DataLoader(TensorDataset(tensor))])["data"]
    assert known["fingerprint"].startswith("crc32:")


def test_a_dataset_says_what_it_is_by_a_fingerprint() -> None:
    for name in ("fingerprint", "_fingerprint"):
        dataset = _dataset()
        setattr(dataset, name, "abc")
        assert data_signature([DataLoader(dataset)])["data"][0]["fingerprint"] == "abc"


def test_a_sampler_says_more() -> None:
    def terms(**options: Any) -> dict[str, Any]:
        given = {"batch_size": 2, "seed": 1, **options}
        return data_signature(
            [SimpleNamespace(sampler=EpochSampler(single_blocks(torch.arange(1, 9).numpy()), **given))]
        )

    assert terms() == terms(world_size=2)
    assert terms()["batch_size"] == [2]
    assert terms(batch_size=3)["data"] == terms()["data"]
    assert terms(seed=2)["data"] != terms()["data"]


def test_of_what_says_nothing_its_length_is_known() -> None:
    assert data_signature([[1, 2, 3]]) == {"batch_size": None, "data": [{"batches": 3}]}
    assert data_signature([iter([1, 2, 3])]) == {"batch_size": None, "data": None}
