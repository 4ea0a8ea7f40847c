"""Log-probabilities of completions under a reference model, computed once, and found by the tokens of a row.

[Note: Reference]
The reference is the model as it is when a fit begins. Without adapters, its weights are gone after the first step. So
the log-probability of each row is computed before, and kept: on disk, for later runs with equal weights and rows, and
in checkpoints, for a resumed run. A row is found by a digest of its tokens and labels, not by its number: a changed row
is noticed, wherever it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from lightning.pytorch.utilities import rank_zero_warn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_protrain.checkpoint.serialize import digest_of, side_by_side
from lightning_protrain.config import plural
from lightning_protrain.data.batches.loader import Batch
from lightning_protrain.data.batches.token_cache import make_folder

_FILE = "logps.safetensors"


@dataclass(frozen=True, eq=False)
class ReferenceTable:
    """Log-probabilities of rows, on the host.

    Attributes:
        digests: Digests of the rows in ascending order, int64 [rows].
        logps: Summed log-probability of each row's completion in nats, float32 [rows].
    """

    digests: Tensor
    logps: Tensor

    @classmethod
    def of(cls, digests: Tensor, logps: Tensor) -> ReferenceTable:
        """Return the table of rows in any order; of equal rows, the first one counts."""
        ordered, first = np.unique(digests.numpy(), return_index=True)
        return cls(torch.from_numpy(ordered), logps[torch.from_numpy(first)].clone())

    @classmethod
    def empty(cls) -> ReferenceTable:
        """Return a table without rows."""
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0))

    @classmethod
    def load(cls, folder: Path) -> ReferenceTable | None:
        """Return the table that `save` wrote; None if it is missing or damaged."""
        if not folder.is_dir():
            return None
        try:
            return cls(**load_file(folder / _FILE))
        except (OSError, SafetensorError, TypeError) as error:
            rank_zero_warn(f"The reference in {folder} is damaged ({error}) and is computed again.")
            return None

    def save(self, folder: Path) -> None:
        """Write the table to a new folder; warn if that is not possible."""
        try:
            make_folder(folder, lambda staging: save_file(self.state(), staging / _FILE))
        except OSError as error:
            rank_zero_warn(
                f"The reference cannot be written to {folder.parent} ({error}): the next run computes it again. Free "
                "disk space, or set `cache_dir` of the data module."
            )

    def state(self) -> dict[str, Tensor]:
        """Return the attributes by name, for a checkpoint."""
        return {"digests": self.digests, "logps": self.logps}

    def missing(self, digests: Tensor) -> int:
        """Return how many of the digests the table does not have."""
        return int((self._at(digests) < 0).sum())

    def look_up(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probability of each row of a batch on the host, float32 [rows]; 0 for rows of fillers.

        Raises:
            ValueError: If the table does not have a row.
        """
        digests = row_digests(batch)
        places = self._at(digests)
        is_filler = (batch["pair_ids"] < 0).repeat_interleave(2)
        unknown = int(((places < 0) & ~is_filler).sum())
        if unknown:
            raise ValueError(refusal(unknown, len(digests), "this batch"))
        return torch.where(is_filler, 0.0, self.logps[places.clamp(min=0)])

    def _at(self, digests: Tensor) -> Tensor:
        """Return the place of each digest in the table, -1 if the table does not have it."""
        if not len(self.digests):
            return torch.full_like(digests, -1)
        places = torch.searchsorted(self.digests, digests).clamp(max=len(self.digests) - 1)
        return torch.where(self.digests[places] == digests, places, -1)


def refusal(unknown: int, rows: int, where: str) -> str:
    """Return the message that `unknown` of all `rows` at a place, such as "this batch", have no reference."""
    return (
        f"{unknown} of {plural(rows, 'row')} of {where} have no log-probability of the reference model: they were not "
        "in the training and validation data when the run began, and its weights of that time are gone. Resume with "
        "the same data and tokenizer, or begin a new run from this model."
    )


def row_digests(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a digest of each row's tokens and labels without the padding, int64 [rows].

    Args:
        batch: Batch on the host with `input_ids`, `labels` and `attention_mask`, padded on the right.
    """
    lengths = batch["attention_mask"].sum(1).tolist()
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    rows = (
        xxhash.xxh3_64(ids[row, :length].tobytes() + labels[row, :length].tobytes()).digest()
        for row, length in enumerate(lengths)
    )
    return torch.from_numpy(np.frombuffer(b"".join(rows), dtype="<i8").astype(np.int64))


def digests_of(batches: Iterable[Batch]) -> Tensor:
    """Return the digests of all rows of batches that are no fillers, int64 [rows]."""
    parts = [row_digests(batch)[(batch["pair_ids"] >= 0).repeat_interleave(2)] for batch in batches]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def gathered(values: Tensor, device: torch.device) -> Tensor:
    """Return the values [rows] of all ranks, one after the other, on the host; their numbers may differ.

    Args:
        values: Values of this rank, on the host.
        device: Device of the collective.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return values
    return torch.cat(gather_all_tensors(values.to(device))).cpu()


def key_of(weights: Mapping[str, Any], digests: Tensor, settings: Mapping[str, Any]) -> str:
    """Return a digest of all that a table depends on.

    Args:
        weights: State dict of the reference model; of sharded weights, the shard of this rank counts.
        digests: Digests of all rows of all ranks, in any order.
        settings: Everything else, such as the precision; the `repr` of each value must be complete.
    """

    def digest(name: str) -> tuple[str, ...]:
        weight = weights[name]
        if not isinstance(weight, Tensor):
            return name, repr(weight)
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return name, str(local.dtype), str(tuple(weight.shape)), digest_of(local)

    rows = hashlib.sha256(digests.unique().numpy().tobytes()).hexdigest()
    terms = (side_by_side(digest, sorted(weights)), rows, sorted(settings.items()))
    return hashlib.sha256(repr(terms).encode()).hexdigest()[:32]
