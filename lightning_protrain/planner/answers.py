"""The file that `lightning-protrain plan --json` writes: plans by name of the machine, null where none fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ELSEWHERE = (
    'Leave it out. Where the hosts are too small for that, strategy="protrain_fsdp2" with cpu_offload=True shards '
    "parameters, gradients and optimizer states over all ranks."
)
# What this version has no more, by the name of the keyword, and what to do instead.
REMOVED: Mapping[str, str] = {
    "gather": "has been taken out: each rank uploads whole chunks, from the one copy of its node. Leave it out.",
    "shard_optimizer": f"has been taken out: each node steps all offloaded weights. {_ELSEWHERE}",
    "shard_weights": f"has been taken out: each node holds all offloaded weights. {_ELSEWHERE}",
}


def only_plan(content: object) -> object:
    """The content of the one plan in such a file; anything else as it is.

    Args:
        content: Of a JSON file.

    Raises:
        ValueError: A file with several plans, or with none.
    """
    if not isinstance(content, dict) or not content:
        return content
    if not all(plan is None or (isinstance(plan, dict) and "format" in plan) for plan in content.values()):
        return content
    plans = {name: plan for name, plan in content.items() if plan is not None}
    if not plans:
        raise ValueError(f"There is no plan that fits {_shown(content)}: the file has null in its place.")
    if len(plans) > 1:
        raise ValueError(
            f"The file has plans for several machines: {_shown(plans)}. Write one with the machine's `--gpu` alone, or "
            "without `--gpu` for this one, or save one of them as a file of its own."
        )
    return next(iter(plans.values()))


def _shown(plans: dict[str, object]) -> str:
    return ", ".join(map(repr, plans))


def without_removed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan without those that an earlier version wrote for what has been taken out.

    Raises:
        ValueError: The plan uses it.
    """
    memory, prediction = content.get("memory"), content.get("prediction")
    if content.get("gathered_by", 1) != 1 or (isinstance(memory, dict) and memory.get("gathers_for_others", 0)):
        raise ValueError(f'The plan was made with gather="device", which {REMOVED["gather"]} Make the plan again.')
    if isinstance(prediction, dict) and "exchange" in (prediction.get("busy") or ()):
        raise ValueError(
            f'The plan was made with shard_optimizer="world", which {REMOVED["shard_optimizer"]} Make the plan again.'
        )
    content = {name: value for name, value in content.items() if name != "gathered_by"}
    if isinstance(memory, dict):
        content["memory"] = {name: value for name, value in memory.items() if name != "gathers_for_others"}
    return content
