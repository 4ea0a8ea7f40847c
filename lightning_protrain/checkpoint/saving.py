"""Saves a dict as the next checkpoint of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_protrain.checkpoint.digests import DEFAULT
from lightning_protrain.checkpoint.discovery import Listing, find
from lightning_protrain.checkpoint.draft import open_draft
from lightning_protrain.checkpoint.files import Files
from lightning_protrain.checkpoint.manifest import Manifest
from lightning_protrain.checkpoint.payload import Payload, split
from lightning_protrain.checkpoint.space import check_space


class Place(NamedTuple):
    """Of a save in its run, see [Note: Lines]."""

    sequence: int
    branch: int
    lineage: tuple[tuple[int, int], ...]


def next_place(listing: Listing, parent: Manifest | None) -> Place:
    """Where the next save belongs.

    Args:
        listing: All checkpoints of the run.
        parent: The one that the run has saved or resumed from last; None: it has begun anew.
    """
    manifests = [each.manifest for each in listing.found]
    if parent is not None:
        manifests.append(parent)
    sequence = 1 + max((each.sequence for each in manifests), default=-1)
    newest = listing.found[0].manifest if listing.found else parent
    if parent is not None and newest is not None and parent.identity == newest.identity:
        return Place(sequence, parent.branch, parent.lineage)
    branch = 1 + max((each.branch for each in manifests), default=-1)
    return Place(sequence, branch, () if parent is None else (*parent.lineage, (parent.branch, parent.step)))


def save_folder(
    content: Mapping[str, Any],
    target: Path,
    run: str,
    step: int,
    files: Files,
    parent: Manifest | None = None,
    digest: str = DEFAULT,
    record: Mapping[str, Any] | None = None,
) -> Manifest:
    """Saves `content` as a checkpoint; it is durable when this returns, and nothing has changed if it raises.

    Args:
        content: As `split` takes it.
        target: What the checkpoint will be called; its folder is there. What has that name is replaced.
        run: Name of the run; the caller has its lock.
        step: Optimizer steps made.
        files: What writes.
        parent: As in `next_place`.
        digest: Algorithm, see `Digest`.
        record: Anything else that JSON can hold.

    Raises:
        ValueError: What cannot be saved, or a name that cannot be one.
        OSError: The disk is full (found before anything is written, if it can be), or fails.
    """
    return save_payload(split(content), target, run, step, files, parent, digest, record)


def save_payload(
    payload: Payload,
    target: Path,
    run: str,
    step: int,
    files: Files,
    parent: Manifest | None = None,
    digest: str = DEFAULT,
    record: Mapping[str, Any] | None = None,
) -> Manifest:
    """The second half of `save_folder`, for what is split already.

    Raises:
        ValueError: A name that cannot be one.
        OSError: As there.
    """
    parent = parent if parent is not None and parent.run == run else None
    check_space(target.parent, payload.nbytes)
    place = next_place(find(target.parent, run), parent)
    with open_draft(target, run, files, digest) as draft:
        payload.write(draft)
        manifest = Manifest(
            run=run,
            step=step,
            sequence=place.sequence,
            identity=draft.identity,
            files=dict(draft.entries),
            branch=place.branch,
            lineage=place.lineage,
            world_size=max(len(payload.ranks), 1),
            record=dict(record or {}),
        )
        draft.publish(manifest)
    return manifest
