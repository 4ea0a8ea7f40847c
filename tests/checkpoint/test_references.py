"""References are resolved by bytes, from memory or from a folder, and never from something that only looks the same."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_protrain.checkpoint.references import (
    FROZEN,
    Reference,
    References,
    fill,
    held,
    listed,
    resolve,
    take_out,
)
from lightning_protrain.checkpoint.serialize import digest_of


def of(tensor: Tensor) -> Reference:
    return Reference(str(tensor.dtype), tuple(tensor.shape), digest_of(tensor))


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(4, 3, generator=generator),
        "layers.1.weight": torch.randn(4, 3, generator=generator).bfloat16(),
        "scale": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
    }


def content(source: str | None, weights: dict[str, Tensor]) -> dict[str, Any]:
    references = References(source, {name: of(each) for name, each in weights.items()}, ("head",))
    return {"state_dict": OrderedDict(head=torch.ones(2)), FROZEN: references.to_content()}


def test_content_comes_back() -> None:
    weights = {name: of(each) for name, each in tensors().items()}
    references = References("here", weights, ("a", "b"))
    assert References.from_content({FROZEN: references.to_content()}, "x") == references
    assert References.from_content({}, "x") is None
    assert {name: each.nbytes for name, each in weights.items()} == {n: t.nbytes for n, t in tensors().items()}


@pytest.mark.parametrize(
    "broken",
    [3, {}, {"weights": {"a": []}}, {"source": None, "trainable": [], "weights": {"a": ["torch.no", [1], ""]}}],
)
def test_what_are_no_references_is_refused(broken: Any) -> None:
    with pytest.raises(ValueError, match="x: the references to frozen weights are invalid"):
        References.from_content({FROZEN: broken}, "x")


def test_memory_with_the_same_weights_is_taken_and_any_other_is_named() -> None:
    references = References("here", {name: of(each) for name, each in tensors().items()}, ())
    references.refuse_others(tensors(), digest_of, "x")
    for name, tensor in tensors().items():
        others = {"nothing": None, "shape": torch.zeros(1, 1, 1), "meta": torch.empty_like(tensor, device="meta")}
        if tensor.numel():
            others["bits"] = tensor + 1
        for other in others.values():
            with pytest.raises(ValueError, match=f"the model in 'here'.*: {name} "):
                references.refuse_others({**tensors(), name: other}, digest_of, "x")


def test_a_wider_weight_in_memory_is_compared_as_it_will_be() -> None:
    saved = torch.randn(9).bfloat16()
    assert of(saved).is_of(saved.float(), digest_of)
    assert not of(saved).is_of(saved.float() * 2, digest_of)
    assert not of(saved).is_of(saved.view(torch.int16), digest_of)


def test_keys_are_taken_out_and_the_kind_stays() -> None:
    state: Any = OrderedDict(a=1, b=2)
    state._metadata = {"": {"version": 1}}
    rest: Any = take_out(state, ["a"])
    assert list(rest.items()) == [("b", 2)]
    assert rest._metadata == state._metadata
    assert list(state) == ["a", "b"]


@pytest.mark.parametrize("prefix", ["", "model.", "model.base_model.model."])
def test_a_source_fills_what_is_missing(prefix: str, tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model-1.safetensors")
    names = {f"{prefix}{name}".replace("0.weight", "0.base_layer.weight"): each for name, each in tensors().items()}
    names[f"{prefix}tied.weight"] = tensors()["layers.0.weight"]
    checkpoint = content(str(tmp_path), names)
    fill(checkpoint, "x")
    assert FROZEN not in checkpoint
    state = checkpoint["state_dict"]
    assert type(state) is OrderedDict
    assert state.keys() == {"head", *names}
    assert all(torch.equal(state[name], each) for name, each in names.items())


def test_a_source_in_another_dtype_is_cast_as_the_model_was(tmp_path: Path) -> None:
    wide = torch.randn(5, 5)
    save_file({"a": wide}, tmp_path / "model.safetensors")
    weights = {"a": of(wide.bfloat16())}
    assert torch.equal(resolve(weights, str(tmp_path))["a"], wide.bfloat16())
    assert held(weights, {"a": wide.bfloat16()}, str(tmp_path)) == {weights["a"].digest}
    assert held(weights, {"a": wide.bfloat16() + 1}, str(tmp_path)) == set()


def test_what_is_listed_is_known_by_name_and_shape(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    meta = torch.device("meta")
    weights = {f"model.{name}": torch.empty_like(each, device=meta) for name, each in tensors().items()}
    assert listed(weights, str(tmp_path)) == set(weights)
    others = {"layers.0.weight": torch.empty(5, 3, device=meta), "layers.9.weight": torch.empty(4, 3, device=meta)}
    assert listed(others, str(tmp_path)) == set()
    with pytest.raises(FileNotFoundError):
        listed(weights, str(tmp_path / "gone"))


def test_a_weight_with_two_names_is_compared_once_but_with_both_references() -> None:
    tied = torch.ones(3)
    same, other = of(tied), of(tied + 1)
    asked: list[Tensor] = []

    def digest(tensor: Tensor) -> str:
        asked.append(tensor)
        return digest_of(tensor)

    References(None, {"a": same, "b": same}, ()).refuse_others({"a": tied, "b": tied}, digest, "x")
    assert len(asked) == 1
    for pair in ({"a": same, "b": other}, {"a": other, "b": same}, {"a": other, "b": other}):
        with pytest.raises(ValueError, match="those of this model differ"):
            References(None, pair, ()).refuse_others({"a": tied, "b": tied}, digest, "x")


def test_a_source_that_is_gone_or_another_one_is_an_error_and_nothing_is_changed(tmp_path: Path) -> None:
    checkpoint = content(str(tmp_path / "gone"), tensors())
    with pytest.raises(ValueError, match=r"cannot be found any more: .*gone.*Put the model back"):
        fill(checkpoint, "x")
    save_file({**tensors(), "scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"but scale \(of 4\) differ there or are missing"):
        fill(checkpoint, "x", source=tmp_path)
    assert list(checkpoint["state_dict"]) == ["head"]
    assert FROZEN in checkpoint
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        fill(checkpoint, "x", source=tmp_path)


def test_a_source_that_was_never_known(tmp_path: Path) -> None:
    checkpoint = content(None, tensors())
    with pytest.raises(ValueError, match="of an unknown source"):
        fill(checkpoint, "x")
    save_file(tensors(), tmp_path / "model.safetensors")
    fill(checkpoint, "x", source=tmp_path)
    assert checkpoint["state_dict"].keys() == {"head", *tensors()}


def test_one_flipped_byte_in_the_source_is_found_and_names_alone_would_miss_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    checkpoint = content(str(tmp_path), tensors())
    with pytest.raises(ValueError, match="differ there or are missing"):
        fill(checkpoint, "x")
    monkeypatch.setattr(Reference, "is_of", lambda *_: True)
    fill(checkpoint, "x")
    assert any(not torch.equal(checkpoint["state_dict"][name], each) for name, each in tensors().items())
