"""The file that `lightning-protrain plan --json` writes: plans by name of the machine, null where none fits."""

from __future__ import annotations


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
