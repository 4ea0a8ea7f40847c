"""All ranks go on from the same checkpoint: the newest one of which each rank finds every byte right that it reads."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_protrain.callbacks.exchange import Exchange
from lightning_protrain.callbacks.keeping import ACCUMULATING, usable
from lightning_protrain.checkpoint.consolidation import verify_rank
from lightning_protrain.checkpoint.discover import Found, Newest, find, line_of, newest_good
from lightning_protrain.checkpoint.verifying import Fault


def newest_listed(root: Path, run: str) -> Path | None:
    """The newest checkpoint by its manifest alone, before the ranks know of each other; None: there is none."""
    listing = find(root, run)
    line = [each for each in line_of(listing) if not each.manifest.record.get(ACCUMULATING)]
    if line:
        return line[0].path
    return listing.broken[0][0] if listing.broken else None


def choose(exchange: Exchange, rank: int, path: Path, listed: str | None, run: str) -> tuple[Path, bool]:
    """What all ranks load: the newest good one, if what is to be loaded was found by `newest_listed`.

    Args:
        exchange: With the other ranks.
        rank: Of this rank.
        path: What is to be loaded.
        listed: What `newest_listed` has found on this rank, if it was asked.
        run: Name of the run.

    Returns:
        The checkpoint, and whether all that this rank reads of it is verified.
    """
    if listed != str(path):
        return path, False
    newest = newest_of_all(exchange, rank, path.parent, run)
    if newest.skipped:
        rank_zero_warn(newest.message())
    return (path, False) if newest.chosen is None else (newest.chosen.path, True)


def newest_of_all(exchange: Exchange, rank: int, root: Path, run: str) -> Newest:
    """What rank 0 has found and all ranks have verified; every rank calls it.

    Raises:
        ValueError: There are checkpoints and none of them is good.
        RuntimeError: The same, raised on another rank.
    """
    doing = f"Looking for the newest checkpoint in {root}"
    newest: Newest | None = None
    with exchange.together(doing):
        if rank == 0:
            try:
                newest = newest_good(root, run, lambda each: _verify(exchange, each, doing))
            finally:
                exchange.broadcast(None, doing)
        else:
            while (path := exchange.broadcast(None, doing)) is not None:
                exchange.gather([f"{fault} (on rank {rank})" for fault in verify_rank(path, rank)], doing)
    found: Newest | None = exchange.broadcast(newest, doing)
    assert found is not None
    return found


def _verify(exchange: Exchange, each: Found, doing: str) -> list[Fault]:
    if each.manifest.record.get(ACCUMULATING):
        return usable(each)
    exchange.broadcast(each.path, doing)
    own = [f"{fault} (on rank 0)" for fault in verify_rank(each.path, 0)]
    told = [fault for faults in exchange.gather(own, doing) for fault in faults]
    return [Fault(*fault.split(": ", 1)) for fault in told]
