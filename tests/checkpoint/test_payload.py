"""A dict is the same after it was split, written, read and joined; what could not be read again is refused before."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_protrain.checkpoint.atomic import Files, open_draft
from lightning_protrain.checkpoint.serialize import TENSORS, WEIGHTS, Payload, join, read_tensors, split
from tests.checkpoint.contents import content, same
from tests.checkpoint.strange_tensors import STRANGE


def _round(content: dict[str, Any], folder: Path, map_location: Any = None) -> dict[str, Any]:
    with open_draft(folder / "x", "run", Files()) as draft:
        split(content).write(draft)
        return join(draft.folder, map_location)


CONTENTS: dict[str, Any] = {
    "lightning": content(3),
    "nothing": {},
    "values": {"a": None, "b": True, "c": 1.5, "d": "x", "e": b"y", "f": [1, (2, 3)], 5: {6: 7}, "g": {1, 2}},
    "tensors": {"a": [torch.ones(2), (torch.zeros(0, 3), torch.tensor(4))], 5: torch.ones(1, dtype=torch.bfloat16)},
    "others": {"a": torch.ones(2, dtype=torch.complex64), "b": torch.ones(2).to_sparse()},
    "names": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)},
    "numbers": {"state_dict": {1: torch.ones(1), "1": torch.zeros(1)}},
    "rng": {"torch": torch.get_rng_state(), "python": (3, tuple(range(625)), None)},
    "dtypes": {"a": torch.float32, "b": torch.device("cpu"), "c": torch.Size([1, 2])},
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and one.is_sparse:
        return same(one.to_dense(), other.to_dense())
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    return same(one, other)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_dict_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    before = CONTENTS[name]
    assert _same(_round(before, tmp_path), before)


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("key", ["state_dict", "other"])
def test_strange_layouts_come_back_with_their_values(tmp_path: Path, name: str, key: str) -> None:
    found = _round({key: {"a": STRANGE[name]}}, tmp_path)[key]["a"]
    assert found.dtype == STRANGE[name].dtype
    assert torch.equal(found, STRANGE[name])
    # It can be written to, and takes no more than its elements.
    assert torch.equal(found.clone().zero_(), torch.zeros_like(found))
    assert found.untyped_storage().nbytes() - found.storage_offset() * found.element_size() <= found.nbytes


@pytest.mark.parametrize("turned", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_the_order_in_memory_comes_back(tmp_path: Path, turned: tuple[int, ...]) -> None:
    tensor = torch.arange(24.0).view(2, 3, 4).permute(turned)
    found = _round({"a": tensor, "b": tensor[:, :2]}, tmp_path)
    assert found["a"].stride() == tensor.stride()
    assert torch.equal(found["b"], tensor[:, :2])


def test_weights_are_a_file_for_everybody_and_the_rest_is_small(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.BatchNorm1d(50))
    moments = {"exp_avg": torch.randn(50, 50)}
    with open_draft(tmp_path / "x", "run", Files()) as draft:
        payload = split({"state_dict": model.state_dict(), "optimizer_states": [{"state": {0: moments}}]})
        payload.write(draft)
        assert read_tensors(draft.folder / WEIGHTS).keys() == model.state_dict().keys()
        assert list(read_tensors(draft.folder / TENSORS)) == ["optimizer_states.0.state.0.exp_avg"]
        assert (draft.folder / "state.pt").stat().st_size < 5000
        written = sum(entry.size for entry in draft.entries.values())
        assert written <= payload.nbytes < written + 5000


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    before = nn.BatchNorm1d(3).state_dict()
    after = _round({"state_dict": before}, tmp_path)["state_dict"]
    assert type(after) is OrderedDict
    assert after._metadata == before._metadata


def test_strides_and_shared_tensors_are_kept(tmp_path: Path) -> None:
    tied, turned = torch.randn(3, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    after = _round({"state_dict": {"a": tied, "b": tied}, "x": [turned, turned]}, tmp_path)
    assert after["state_dict"]["a"] is after["state_dict"]["b"]
    assert after["x"][0] is after["x"][1]
    assert after["x"][0].stride() == turned.stride()
    assert torch.equal(after["x"][0], turned)


@pytest.mark.parametrize("keep", [False, True])
def test_what_an_optimizer_keeps_needs_no_file(tmp_path: Path, keep: bool) -> None:
    with open_draft(tmp_path / "x", "run", Files()) as draft:
        split({"state_dict": {"a": torch.ones(9)}, "x": [torch.ones(9)]}).write(draft)
        loaded = join(draft.folder, keep=keep)
        for name in (WEIGHTS, TENSORS):  # Nobody may do this; it shows what is mapped.
            path = draft.folder / name
            path.write_bytes(bytes(path.stat().st_size))
    assert (loaded["state_dict"]["a"].sum(), loaded["x"][0].sum()) == (0, 9 if keep else 0)


@pytest.mark.parametrize(
    "map_location", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, {"cuda:0": "cpu"}, lambda storage, place: storage]
)
def test_tensors_are_where_they_were_asked_for(tmp_path: Path, map_location: Any) -> None:
    assert same(_round(content(1), tmp_path, map_location), content(1))
    meta = _round(content(1), tmp_path, "meta")
    assert meta["state_dict"]["bias"].is_meta


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (timedelta(1), "datetime.timedelta"),
        (Path("x"), "pathlib"),
        (np.float64(1.0), "numpy"),
        (np.arange(3), "numpy.ndarray"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (lambda: 1, "builtins.function"),
    ],
    ids=range(6),
)
def test_what_could_not_be_read_again_is_named_and_refused(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"checkpoint's callbacks\.Mine\.1 has the type {kind}"):
        split({"state_dict": {}, "callbacks": {"Mine": [1, value]}})


def test_tensors_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"state_dict\.a has no values: it is on the meta device"):
        split({"state_dict": {"a": torch.ones(2, device="meta")}})


def test_a_dict_with_the_mark_of_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.b has the key 'lightning_protrain\.tensor'"):
        split({"a": {"b": {"lightning_protrain.tensor": "x"}}})


@pytest.mark.parametrize(
    "mark", [{"lightning_protrain.tensor": "a", "file": "/etc/passwd"}, {"lightning_protrain.tensor": []}]
)
def test_a_mark_that_leads_nowhere_is_refused(tmp_path: Path, mark: Any) -> None:
    with open_draft(tmp_path / "x", "run", Files()) as draft:
        split({"a": torch.ones(1)}).write(draft)
        torch.save({"a": mark}, draft.folder / "state.pt")
        with pytest.raises(ValueError, match="the tensor a is missing from the tensor files"):
            join(draft.folder)


def test_nothing_is_copied_when_it_is_split() -> None:
    weight = torch.ones(5)
    payload = split({"state_dict": {"a": weight}})
    assert isinstance(payload, Payload)
    assert payload.weights["a"] is weight
