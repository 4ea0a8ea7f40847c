"""A dict is the same after it was split, written and joined; references and tensors come back bit for bit."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_protrain.checkpoint import serialize as tensors_module
from lightning_protrain.checkpoint.atomic import Files, open_draft
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
from lightning_protrain.checkpoint.serialize import (
    DTYPES,
    TENSORS,
    WEIGHTS,
    Payload,
    can_hold,
    digest_of,
    flat_bytes,
    join,
    read_tensors,
    shared_names,
    split,
    stored_bytes,
    write_tensors,
)
from tests.checkpoint.contents import content, same
from tests.checkpoint.strange_tensors import STRANGE, strided


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


def _loaded(source: str | None, weights: dict[str, Tensor]) -> dict[str, Any]:
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
    checkpoint = _loaded(str(tmp_path), names)
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


def test_weights_of_other_shapes_and_dtypes_with_the_same_bytes_are_found(tmp_path: Path) -> None:
    zeros = {
        "token": torch.zeros(1, 1, 4),
        "bias": torch.zeros(4),
        "router.bias": torch.zeros(8, dtype=torch.bfloat16),
        "absent.bias": torch.zeros(2, 2),
    }
    save_file({name: each for name, each in zeros.items() if name != "absent.bias"}, tmp_path / "model.safetensors")
    references = {name: of(each) for name, each in zeros.items()}
    assert len({each.digest for each in references.values()}) == 1
    assert held(references, zeros, str(tmp_path)) == {references["bias"].digest}
    found = resolve(references, str(tmp_path))
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in zeros.items()
    }
    without = {name: each for name, each in zeros.items() if name != "router.bias"}
    save_file(without, tmp_path / "model.safetensors")
    assert held(references, zeros, str(tmp_path)) == set(), "one of them would be lost"


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
        with pytest.raises(ValueError, match="but this model has other weights"):
            References(None, pair, ()).refuse_others({"a": tied, "b": tied}, digest, "x")


def test_a_source_that_is_gone_or_another_one_is_an_error_and_nothing_is_changed(tmp_path: Path) -> None:
    checkpoint = _loaded(str(tmp_path / "gone"), tensors())
    with pytest.raises(ValueError, match=r"cannot be found: .*gone.*Restore it"):
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
    checkpoint = _loaded(None, tensors())
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
    checkpoint = _loaded(str(tmp_path), tensors())
    with pytest.raises(ValueError, match="differ there or are missing"):
        fill(checkpoint, "x")
    monkeypatch.setattr(Reference, "is_of", lambda *_: True)
    fill(checkpoint, "x")
    assert any(not torch.equal(checkpoint["state_dict"][name], each) for name, each in tensors().items())


def _write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    with open_draft(folder / "x", "run", Files()) as draft:
        with draft.create("file") as file:
            write_tensors(file, tensors)
        path = folder / f"file-{draft.identity}"
        (draft.folder / "file").rename(path)
    return path


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def _random(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    size = torch.tensor([], dtype=dtype).element_size()
    return torch.randint(256, (*shape, size), dtype=torch.uint8).view(dtype).reshape(shape)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 4), max_size=3)), max_size=6)
)
def test_every_bit_of_every_dtype_comes_back(tmp_path_factory: pytest.TempPathFactory, kinds: list) -> None:
    tensors = {f"{number}.x": _random(dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)}
    path = _write(tmp_path_factory.mktemp("files"), tensors)
    for loaded in (read_tensors(path), load_file(path)):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
            assert _bits(loaded[name]) == _bits(tensor)


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    save_file(tensors, tmp_path / "file")
    assert all(torch.equal(read_tensors(tmp_path / "file")[name], tensors[name]) for name in tensors)


def test_what_is_shared_is_written_once_and_shared_again(tmp_path: Path) -> None:
    tied = torch.randn(100, 100)
    tensors = {"embed": tied, "other": torch.randn(4), "head": tied, "part": tied[:50], "turned": tied.T}
    assert shared_names(tensors) == {"head": "embed"}
    path = _write(tmp_path, tensors)
    loaded = read_tensors(path)
    assert loaded["embed"] is loaded["head"]
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    size = path.stat().st_size
    assert 100_016 < size <= stored_bytes(tensors)
    # Anybody's reader has the tensor under its first name.
    assert sorted(load_file(path)) == ["embed", "other", "part", "turned"]


def test_views_of_one_flat_buffer_are_written_without_the_rest_of_it(tmp_path: Path) -> None:
    flat = torch.arange(100_000.0)
    tensors = {"a": flat[10:20].view(2, 5), "b": flat[20:30], "c": flat[::1000]}
    path = _write(tmp_path, tensors)
    assert path.stat().st_size < 2000
    assert all(torch.equal(read_tensors(path)[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", STRANGE)
def test_strange_layouts_are_written_with_their_values(tmp_path: Path, name: str) -> None:
    tensor = STRANGE[name]
    assert can_hold(tensor)
    path = _write(tmp_path, {"a": tensor})
    for loaded in (read_tensors(path), load_file(path)):
        assert (loaded["a"].dtype, loaded["a"].shape) == (tensor.dtype, tensor.shape)
        assert loaded["a"].tolist() == tensor.tolist()


@given(strided())
def test_bytes_of_any_layout_are_those_of_a_copy(tensor: Tensor) -> None:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert flat_bytes(tensor).tolist() == copy.reshape(-1).view(torch.uint8).tolist()


def test_what_lies_in_order_is_not_copied() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)
    single = torch.empty(4)[::2][1:]
    assert flat_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert flat_bytes(single).data_ptr() == single.data_ptr()


def test_what_was_loaded_may_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, {"a": torch.ones(10_000)})
    before = path.read_bytes()
    read_tensors(path)["a"].zero_()
    assert path.read_bytes() == before
    kept = read_tensors(path)["a"]
    path.unlink()
    assert kept.sum() == 10_000


def test_no_second_copy_of_all_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors that are not contiguous are copied to be written; the former copy goes before the next one is made.
    alive: list[int] = []
    most: list[int] = []

    def watched(tensor: Tensor) -> Tensor:
        made = flat_bytes(tensor)
        alive.append(1)
        most.append(len(alive))
        weakref.finalize(made, alive.pop)
        return made

    monkeypatch.setattr(tensors_module, "flat_bytes", watched)
    _write(tmp_path, {str(number): torch.randn(50, 50).T for number in range(6)})
    assert most == [1] * 6
    assert alive == []


@pytest.mark.parametrize(
    ("tensor", "held"),
    [
        (torch.ones(2), True),
        (torch.ones(2).requires_grad_(), False),
        (nn.Parameter(torch.ones(2)), False),
        (torch.ones(2, dtype=torch.complex64), False),
        (torch.ones(2).to_sparse(), False),
        (torch.ones(2, device="meta"), False),
    ],
    ids=range(6),
)
def test_what_the_format_can_hold(tensor: Tensor, held: bool) -> None:
    assert can_hold(tensor) is held


@pytest.mark.parametrize("shared", ['{"a": "none"}', "[]", "{", '{"a": ["x"]}', '"x"', "[" * 10_000])
def test_names_that_share_nothing_are_refused(tmp_path: Path, shared: str) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "file", metadata={"shared": shared})
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        read_tensors(tmp_path / "file")
