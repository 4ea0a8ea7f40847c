"""Text that describes a checkpoint or a folder of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from lightning_protrain.checkpoint.atomic import leftovers
from lightning_protrain.checkpoint.discover import Listing, find_checkpoints
from lightning_protrain.checkpoint.manifest import MANIFEST, Manifest, is_remains
from lightning_protrain.checkpoint.verification import read_manifest, verify

# Remark on checkpoints outside the lineage of the newest one of their run.
ABANDONED = ", abandoned"


def inspect(path: Path, check: bool = False) -> tuple[str, bool]:
    """Describe a checkpoint, or all checkpoints of a folder, newest first.

    Args:
        path: A checkpoint, or a folder of checkpoints.
        check: True verifies every file.

    Returns:
        The text, and True if no fault was found.

    Raises:
        ValueError: If `path` is not a checkpoint and contains none.
    """
    if is_remains(path):
        lines, good = _one(path, check)
        return "\n".join(lines), good
    listing = find_checkpoints(path)
    if not listing.found and not listing.broken:
        raise ValueError(f"{path} is not a checkpoint, and contains none: there is no {MANIFEST}.")
    lines = list(_table(listing))
    good = not listing.broken
    for each in listing.found if check else ():
        faults = verify(each.path)
        good = good and not faults
        lines += [f"{each.path.name}: {fault}" for fault in faults] or [f"{each.path.name}: all bytes verified"]
    lines += [
        f"{left.name}: being written, or left by an interrupted save or removal, {nbytes / 1e9:.3f} GB"
        for left, _, nbytes in leftovers(path)
    ]
    if any(ABANDONED in line or "interrupted" in line for line in lines):
        lines.append(f"To remove abandoned and interrupted checkpoints: lightning-protrain prune {quote(str(path))}")
    return "\n".join(lines), good


def _table(listing: Listing) -> Iterator[str]:
    heads: dict[str, Manifest] = {}
    for each in listing.found:  # The first checkpoint of each run is its newest.
        head = heads.setdefault(each.manifest.run, each.manifest)
        yield f"{each.path.name}: {_summary(each.manifest)}{_left(each.manifest, head)}"
    for path, what in listing.broken:
        yield f"{path.name}: {what}"


def _left(manifest: Manifest, head: Manifest) -> str:
    """Return a remark if the checkpoint is outside the lineage of `head`, the newest of its run; else an empty text."""
    if manifest.is_on_line_of(head):
        return ""
    branches = {branch for branch, _ in head.lineage} | {head.branch}
    if branches.isdisjoint({branch for branch, _ in manifest.lineage} | {manifest.branch}):
        return f"{ABANDONED}: a later run in this folder started from scratch"
    return f"{ABANDONED}: the run was resumed from an earlier checkpoint"


def _summary(manifest: Manifest) -> str:
    size = sum(entry.size for entry in manifest.files.values())
    score = manifest.record.get("score")
    scored = "" if score is None else f", {manifest.record.get('monitor')} {score}"
    return f"run {manifest.run}, step {manifest.step}{scored}, {size / 1e9:.3f} GB in {len(manifest.files)} files"


def _one(folder: Path, check: bool) -> tuple[list[str], bool]:
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)], False
    lines = [f"{folder.name}: {_summary(manifest)}"]
    lines += [f"  {name}: {entry.size} bytes, {entry.digest}" for name, entry in sorted(manifest.files.items())]
    lines += [f"  {name}: {json.dumps(value)}" for name, value in sorted(manifest.record.items())]
    frozen = manifest.record.get("frozen")
    if isinstance(frozen, dict):
        lines.append(
            f"  {frozen['weights']} frozen weights ({frozen['nbytes']} bytes, {frozen['nbytes'] / 1e9:.3f} GB) are not "
            f"stored but refer to {frozen['source'] or 'an unknown source'}"
        )
    faults = verify(folder) if check else []
    lines += [str(fault) for fault in faults]
    if check and not faults:
        lines.append("all bytes verified")
    return lines, not faults
