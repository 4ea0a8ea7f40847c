from __future__ import annotations

import pytest
import torch

from lightning_protrain.runtime.param import dense_like, in_block, in_storage

SHAPES = [(), (3,), (2, 3), (0, 4), (2, 1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_memories_hold_the_same_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].view(shape)
    block = memoryview(bytearray(256))
    storage = torch.UntypedStorage(256).fill_(0)
    host, device = in_block(block, 64, like), in_storage(storage, 64, like)
    for view in (host, device):
        assert (view.shape, view.dtype, view.stride()) == (like.shape, dtype, like.stride())
        view.copy_(like)
    assert torch.equal(host, device)
    assert bytes(storage.tolist()) == bytes(block)
    assert host.untyped_storage().nbytes() <= max(host.nbytes, 8)


def test_another_dtype_may_be_asked_for() -> None:
    like = torch.ones(2, 3)
    assert in_block(memoryview(bytearray(64)), 0, like, torch.bfloat16).dtype is torch.bfloat16
    assert in_storage(torch.UntypedStorage(64), 0, like, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3), (3, 1)),
        (torch.empty(2, 3).t(), (1, 3)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (1, 12, 4)),
        (torch.empty(2, 6)[:, ::2], (3, 1)),
        (torch.empty(3).expand(2, 3), (3, 1)),
        (torch.empty(2, 1, 3), (3, 3, 1)),
    ],
)
def test_strides_are_kept_where_nothing_lies_between(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    found = dense_like(tensor)
    assert found.is_meta
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, stride, tensor.dtype)
