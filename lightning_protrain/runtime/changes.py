"""Changes of weights that would give wrong gradients, or other weights on other ranks: they are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_protrain.runtime.slot import Slot


def changed_before_backward(slot: Slot) -> RuntimeError:
    """The error for a weight that its backward finds changed, see [Note: Versions] in chunk.py."""
    now, before = slot.host._version, slot.seen_version
    # No version tells of other memory; where it has been followed already, none is known.
    how = f"version {now}, the forward used {before}" if now > before >= 0 else "`data` is other memory now"
    return RuntimeError(
        f"{slot.fqn!r} was changed between a forward and its backward ({how}): the gradient would be wrong. Step "
        "optimizers and change weights after backward."
    )


def refuse_changed_by_others(changed: Sequence[Slot]) -> None:
    """What ranks share may be written to by the rank that owns it only: each of them would do it once more."""
    for slot in changed:
        if not slot.owned and slot.changed_here:
            raise RuntimeError(
                f"{slot.fqn!r} was changed between steps on a rank that does not own it: ranks of this machine share "
                "it, so each of them would change it once more, and while others read it. Set "
                'sharding="replicate" where callbacks or hooks write to weights.'
            )
