"""What a checkpoint, or a folder of them, holds, as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lightning_protrain.checkpoint.discovery import Listing, find, line_of
from lightning_protrain.checkpoint.manifest import MANIFEST, Manifest, is_remains
from lightning_protrain.checkpoint.verifying import read_manifest, verify


def inspect(path: Path, check: bool = False) -> tuple[str, bool]:
    """Describes a checkpoint, or all checkpoints of a folder, newest first.

    Args:
        path: Either.
        check: Whether every byte is read.

    Returns:
        The text, and whether nothing was found to be wrong.

    Raises:
        ValueError: There is no checkpoint.
    """
    if is_remains(path):
        lines, good = _one(path, check)
        return "\n".join(lines), good
    listing = find(path)
    if not listing.found and not listing.broken:
        raise ValueError(f"{path} is no checkpoint, and holds none: there is no {MANIFEST}.")
    lines = list(_table(listing))
    good = not listing.broken
    for each in listing.found if check else ():
        faults = verify(each.path)
        good = good and not faults
        lines += [f"{each.path.name}: {fault}" for fault in faults] or [f"{each.path.name}: every byte is right"]
    return "\n".join(lines), good


def _table(listing: Listing) -> Iterator[str]:
    seen: dict[str, set[str]] = {}
    for each in listing.found:  # Newest first: the first of a run is its head.
        run = each.manifest.run
        if run not in seen:
            of_run = Listing(tuple(other for other in listing.found if other.manifest.run == run))
            seen[run] = {other.manifest.identity for other in line_of(of_run)}
        hidden = "" if each.manifest.identity in seen[run] else ", left behind when the run went back"
        yield f"{each.path.name}: {_summary(each.manifest)}{hidden}"
    for path, what in listing.broken:
        yield f"{path.name}: {what}"


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
            f"  {frozen['weights']} frozen weights are references to {frozen['source'] or 'an unknown source'}, which "
            f"saves {frozen['nbytes']} bytes ({frozen['nbytes'] / 1e9:.3f} GB)"
        )
    faults = verify(folder) if check else []
    lines += [str(fault) for fault in faults]
    if check and not faults:
        lines.append("every byte is right")
    return lines, not faults
