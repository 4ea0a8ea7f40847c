"""Tensors of every dtype with strides, offsets and shared memory."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

# What slices, broadcasts and complex numbers make of strides and bits.
STRANGE = {
    "one of a stride": torch.arange(4.0)[::2][1:],
    "one of a stride, bool": torch.tensor([True, False, True])[::2][1:],
    "one of a stride, bfloat16": torch.arange(8.0).bfloat16().as_strided((1, 1, 1), (3, 5, 7), 4),
    "one corner": torch.arange(16.0).view(4, 4)[1::2, 1::2][:1, :1],
    "stride 0": torch.ones(1, dtype=torch.float64).as_strided((1,), (0,)),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "scalar, expanded": torch.tensor(3.0).expand(1),
    "scalar, expanded more": torch.tensor(3.0).expand(2, 3),
    "row, expanded": torch.arange(3).expand(4, 3),
    "windows": torch.arange(10).unfold(0, 4, 1),
    "empty": torch.ones(0),
    "empty, expanded": torch.ones(0, 3).expand(2, 0, 3),
    "column": torch.arange(12.0).view(3, 4)[:, 1:2],
    "flipped bits": torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
    "flipped bit of one": torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag[::2][1:],
    "real part": torch.complex(torch.arange(3.0), torch.ones(3)).real[2:],
}


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """Draw a tensor with any strides, including 0, on a storage of a few numbers."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    dtype = draw(st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    return torch.arange(40).to(dtype).as_strided(shape, strides, draw(st.integers(0, 9)))
