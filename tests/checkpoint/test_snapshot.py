"""A snapshot is a copy to the bit, shares what was shared, and takes no more memory than it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.save import NewCheckpoint, Snapshot, save_payload
from lightning_protrain.checkpoint.serialize import DTYPES, Payload, join, split
from tests.checkpoint.contents import content, load, same


def _snapshot() -> Snapshot:
    return Snapshot(lambda: 1 << 40)


def _overwrite(payload: Payload) -> None:
    for tensors in (payload.weights, payload.tensors):
        for tensor in tensors.values():
            tensor.zero_()


def _bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_what_is_saved_of_a_snapshot_is_what_it_was_taken_of(tmp_path: Path) -> None:
    snapshot = _snapshot()
    for step in (1, 2):
        payload = split(content(step))
        copied = snapshot.take(payload)
        _overwrite(payload)
        save_payload(copied, tmp_path / f"step={step}", NewCheckpoint("run", step), Files())
        assert same(load(tmp_path / f"step={step}"), content(step))


def test_without_a_copy_later_writes_are_saved(tmp_path: Path) -> None:
    payload = split(content(1))
    _overwrite(payload)
    save_payload(payload, tmp_path / "step=1", NewCheckpoint("run", 1), Files())
    assert not same(load(tmp_path / "step=1"), content(1))


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 4), max_size=3)), max_size=6)
)
def test_every_bit_of_every_dtype_is_copied(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors: dict[str, Tensor] = {}
    for number, (dtype, shape) in enumerate(kinds):
        size, most = torch.tensor([], dtype=dtype).element_size(), 2 if dtype == torch.bool else 256
        tensors[str(number)] = torch.randint(most, (*shape, size), dtype=torch.uint8).view(dtype).reshape(shape)
    copies = _snapshot().take(Payload(tensors, {}, b"state")).weights
    for name, tensor in tensors.items():
        copied = copies[name]
        assert (copied.dtype, copied.shape, copied.is_contiguous()) == (tensor.dtype, tensor.shape, True)
        assert _bits(copied) == _bits(tensor)


def test_turned_and_strided_tensors_are_copied_in_their_order() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    copies = _snapshot().take(Payload({}, {"turned": tensor.T, "every": tensor[:, ::2]}, b"")).tensors
    assert torch.equal(copies["turned"], tensor.T)
    assert torch.equal(copies["every"], tensor[:, ::2])


def test_what_is_tied_is_copied_once() -> None:
    tied = torch.randn(100)
    snapshot = _snapshot()
    payload = Payload({"a": tied, "b": tied, "c": torch.randn(100)}, {}, b"")
    assert snapshot.needed(payload) == 2 * 448  # 400 bytes, aligned.
    copies = snapshot.take(payload).weights
    assert copies["a"] is copies["b"]
    assert snapshot.nbytes == 2 * 448


def test_its_memory_is_used_again_and_given_back() -> None:
    snapshot = _snapshot()
    payload = Payload({"a": torch.randn(1000)}, {}, b"")
    place = snapshot.take(payload).weights["a"].data_ptr()
    assert snapshot.needed(payload) == 0
    assert snapshot.take(payload).weights["a"].data_ptr() == place
    larger = Payload({"a": torch.randn(2000)}, {}, b"")
    assert snapshot.needed(larger) == 8000
    snapshot.take(larger)
    assert snapshot.nbytes == 8000
    snapshot.release()
    assert snapshot.nbytes == 0


def test_nothing_is_a_snapshot_too() -> None:
    taken = _snapshot().take(Payload({}, {"empty": torch.empty(0, 3)}, b"x"))
    assert taken.tensors["empty"].shape == (0, 3)
    assert taken.state == b"x"


def test_what_is_no_tensor_is_taken_as_it_is() -> None:
    payload = Payload({"w": torch.ones(2)}, {}, b"state", (b"rank 0", b"rank 1"))
    taken = _snapshot().take(payload)
    assert (taken.state, taken.ranks, taken.nbytes) == (payload.state, payload.ranks, payload.nbytes)


def test_copies_have_their_places_in_the_dict(tmp_path: Path) -> None:
    made = {"state_dict": {"w": torch.ones(3, 2).T}, "other": [torch.zeros(2), {"deep": torch.ones(1)}]}
    save_payload(_snapshot().take(split(made)), tmp_path / "x", NewCheckpoint("run", 0), Files())
    loaded = join(tmp_path / "x")
    assert same(loaded, made)
    assert loaded["state_dict"]["w"].stride() == made["state_dict"]["w"].stride()  # type: ignore[call-overload]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_child_has_no_memory_of_its_own_of_it() -> None:
    snapshot, read = _snapshot(), os.pipe()
    first = snapshot.take(Payload({"a": torch.ones(10)}, {}, b""))
    back = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read[0], 1)
        os.write(back[1], bytes([int(first.weights["a"][0].item())]))
        os._exit(0)
    snapshot.take(Payload({"a": torch.full((10,), 7.0)}, {}, b""))
    os.write(read[1], b"x")
    assert os.read(back[0], 1) == b"\x07"
    os.waitpid(child, 0)
