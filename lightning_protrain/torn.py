"""Modules whose weights were left torn by a run that has ended, see [Note: Torn] in runtime/updates.py.

A run ends with its strategy taken off, and the weights stay: another fit, or a `save_checkpoint` of the same Trainer,
would take them for those of a step. So the reason stays with the module until trained weights are loaded into it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_REASON = "_protrain_torn"
_WATCHED = "_protrain_torn_watched"


def mark_torn(module: nn.Module | None, reason: str | None) -> None:
    """Says that the weights of a module belong to no step, until `load_state_dict` replaces all that are trained.

    Args:
        module: The module; None: there is none.
        reason: Why; None: they do belong to one.
    """
    if module is None or reason is None:
        return
    setattr(module, _REASON, why_torn(module) or reason)
    if _WATCHED not in vars(module):
        setattr(module, _WATCHED, True)
        module.register_load_state_dict_post_hook(_loaded)


def why_torn(module: nn.Module) -> str | None:
    """Why the weights belong to no step; None as long as they do."""
    reason: str | None = vars(module).get(_REASON)
    return reason


def refuse_torn(module: nn.Module | None) -> None:
    """Lets nobody save or train such a module.

    Raises:
        RuntimeError: Its weights belong to no step.
    """
    reason = why_torn(module) if module is not None else None
    if reason is not None:
        raise RuntimeError(
            f"The weights of this {type(module).__name__} are torn by an earlier run: {reason}, so some are from "
            "before that step and some from after it. They can be neither saved nor trained on: resume from a "
            "checkpoint (`fit(..., ckpt_path=...)`), call `load_state_dict` of this module, or make it anew."
        )


def _loaded(module: nn.Module, incompatible: Any) -> None:
    """A hook behind `load_state_dict`: frozen weights were never stepped."""
    missing = set(incompatible.missing_keys)
    if all(name not in missing for name, weight in module.named_parameters() if weight.requires_grad):
        vars(module).pop(_REASON, None)
