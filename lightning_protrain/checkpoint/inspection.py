"""Text that describes a checkpoint or a folder of checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lightning_protrain.checkpoint.discover import ASIDE, find_checkpoints
from lightning_protrain.checkpoint.manifest import MANIFEST, Manifest, is_remains, parse_reserved
from lightning_protrain.checkpoint.verification import read_manifest, verify


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
    lines = [f"{checkpoint.path.name}: {_summary(checkpoint.manifest)}" for checkpoint in listing.found]
    lines += [f"{folder.name}: {what}" for folder, what in listing.broken]
    good = not listing.broken
    for checkpoint in listing.found if check else ():
        faults = verify(checkpoint.path)
        good, name = good and not faults, checkpoint.path.name
        lines += [f"{name}: {fault}" for fault in faults] or [f"{name}: all bytes verified"]
    for name in sorted(os.listdir(path)):
        reserved = parse_reserved(name)
        if name.endswith(ASIDE):
            lines.append(f"{name}: set aside, {_gigabytes(path / name)}; remove it if you do not need it")
        elif reserved is not None and (reserved.state != "old" or os.path.lexists(path / reserved.name)):
            what = "being written, or left by an interrupted save or removal"
            lines.append(f"{name}: {what}, {_gigabytes(path / name)}; the next save of its run removes it")
    return "\n".join(lines), good


def _gigabytes(path: Path) -> str:
    return f"{sum(file.lstat().st_size for file in [path, *path.rglob('*')] if not file.is_dir()) / 1e9:.3f} GB"


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
