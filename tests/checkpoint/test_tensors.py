"""Files of tensors are those of the library, bit for bit of every dtype, and what is shared is there once."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_protrain.checkpoint import serialize as tensors_module
from lightning_protrain.checkpoint.atomic import Files, open_draft
from lightning_protrain.checkpoint.serialize import (
    DTYPES,
    can_hold,
    flat_bytes,
    read_tensors,
    shared_names,
    stored_bytes,
    write_tensors,
)
from tests.checkpoint.strange_tensors import STRANGE, strided


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
