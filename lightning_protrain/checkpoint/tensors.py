"""Weights as safetensors, one tensor at a time: what is written needs no second copy, what is read is mapped.

The format is public: https://github.com/huggingface/safetensors#format. The library writes a file from tensors that are
all in memory at once; here each is fetched, digested and written before the next one is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_protrain.checkpoint.draft import DraftFile

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Where a file keeps which further names its tensors have.
SHARED = "shared"
_METADATA = "__metadata__"


def can_hold(tensor: Tensor) -> bool:
    """Whether the format has this kind of tensor: plain, dense, with values, of a dtype it knows."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPES
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def write_tensors(file: DraftFile, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file in the format of safetensors; a tensor with several names is written once.

    Args:
        file: New.
        tensors: `can_hold` each of them. On any device; one at a time is copied to the host.
    """
    assert sys.byteorder == "little"
    shared = shared_names(tensors)
    # The widest first, so that each is aligned.
    names = sorted((name for name in tensors if name not in shared), key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {_METADATA: {"format": "pt", **({SHARED: json.dumps(shared)} if shared else {})}}
    end = 0
    for name in names:
        assert name != _METADATA
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in names:
        file.write(flat_bytes(tensors[name]).numpy())


def flat_bytes(tensor: Tensor) -> Tensor:
    """Its elements in row-major order, as bytes (nbytes,) in host memory; a view where they lie like that."""
    plain = tensor.detach().as_subclass(Tensor).to("cpu").resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous, whatever strides it has; only with a stride of 1 can it be viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped: bytes are read when they are needed, and changes are not written back.

    Raises:
        ValueError: It is no such file.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            shared = json.loads((file.metadata() or {}).get(SHARED, "{}"))
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                tensors[name] = file.get_tensor(name)
        for name, kept in shared.items():
            tensors[name] = tensors[kept]
    except (SafetensorError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of tensors: {error}") from error
    return tensors


def shared_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of tensors that are one and the same memory, with the name under which it is written."""
    first: dict[object, str] = {}
    shared = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_neg())
        kept = first.setdefault(place, name)
        if kept != name:
            shared[name] = kept
    return shared


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What a file of them takes, to the header."""
    shared = shared_names(tensors)
    return sum(tensor.nbytes + len(name) + 128 for name, tensor in tensors.items() if name not in shared)
