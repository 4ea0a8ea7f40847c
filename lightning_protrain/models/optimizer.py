"""The optimizer of CausalLMModule: a short name, a class path, or a class path with arguments."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_protrain.config import check_kinds
from lightning_protrain.models.bnb import is_installed

# Class path and arguments of each short name.
SHORT_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("torch.optim.AdamW", {}),
    "split_adamw": ("lightning_protrain.SplitAdamW", {}),
    "split_adamw_bf16": ("lightning_protrain.SplitAdamW", {"moments": "bfloat16"}),
    "split_adamw_8bit": ("lightning_protrain.SplitAdamW", {"moments": "8bit"}),
    "adamw8bit": ("bitsandbytes.optim.AdamW8bit", {}),
    "paged_adamw8bit": ("bitsandbytes.optim.PagedAdamW8bit", {}),
    "lion": ("bitsandbytes.optim.Lion", {}),
    "lion8bit": ("bitsandbytes.optim.Lion8bit", {}),
    "adafactor": ("torch.optim.Adafactor", {}),
    "sgd": ("torch.optim.SGD", {}),
}
_NO_MUON = (
    "Muon steps matrices alone, and embeddings, the head and normalization layers need another optimizer. "
    "Choose another one, or return both from configure_optimizers of a module of your own."
)


@dataclass(frozen=True)
class OptimizerChoice:
    """A class of optimizers with the arguments that the user chose.

    Attributes:
        kind: The class.
        arguments: Arguments beside the parameters.
    """

    kind: type[Optimizer]
    arguments: Mapping[str, Any]

    def make(
        self, named: Iterable[tuple[str, Tensor]], learning_rate: float, weight_decay: float, betas: Iterable[float]
    ) -> Optimizer:
        """Return the optimizer, with weight decay for parameters of two and more dimensions.

        `weight_decay` and `betas` are passed if the class has these arguments and the user has not chosen them.

        Args:
            named: Parameters with their names.
            learning_rate: Learning rate.
            weight_decay: Weight decay of the group `decay`.
            betas: Moment decays.
        """
        known, arguments = _arguments_of(self.kind), dict(self.arguments)
        if "betas" in known:
            arguments.setdefault("betas", tuple(betas))
        settings: dict[str, Any] = {}
        # `fused` is set in the groups: after AdamW(fused=True), Lightning refuses clipping under mixed precision.
        if self.kind in (AdamW, Adam, SGD) and not {"fused", "foreach", "differentiable"} & set(arguments):
            settings["fused"] = True
        decays: list[dict[str, Any]] = [{}, {}]
        if "weight_decay" in known:
            decays = [{"weight_decay": arguments.setdefault("weight_decay", weight_decay)}, {"weight_decay": 0.0}]
        listed = list(named)
        parts = [[pair for pair in listed if pair[1].ndim >= 2], [pair for pair in listed if pair[1].ndim < 2]]
        groups = [
            {"params": part, **decay, "name": name, **settings}
            for part, decay, name in zip(parts, decays, ("decay", "no_decay"), strict=True)
            if part
        ]
        return cast(Any, self.kind)(groups, lr=learning_rate, **arguments)


def choose_optimizer(given: str | Mapping[str, Any] | None) -> OptimizerChoice:
    """Return the optimizer that `CausalLMModule(optimizer=...)` names; None means AdamW.

    The class makes a trial optimizer of two tiny weights, so that it refuses bad values at once.

    Raises:
        ValueError: If the name is unknown, the class cannot be imported or is no optimizer, or does not take the
            arguments.
    """
    check_kinds(str | Mapping, "a name or a mapping with class_path", optimizer=given)
    mapping: Mapping[str, Any] = (
        given if isinstance(given, Mapping) else {"class_path": "adamw" if given is None else given}
    )
    path, init_args = mapping.get("class_path"), mapping.get("init_args") or {}
    if not isinstance(path, str) or not isinstance(init_args, Mapping) or set(mapping) - {"class_path", "init_args"}:
        raise ValueError(
            f"optimizer={dict(mapping)!r}: give the keys class_path, a text, and init_args, a mapping, and no others."
        )
    path, defaults = SHORT_NAMES.get(path, (path, {}))
    kind = _imported(path)
    known = _arguments_of(kind)
    if "lr" in init_args:
        raise ValueError("`optimizer` has lr in init_args. Give it as learning_rate, which the schedule scales.")
    if "lr" not in known:
        raise ValueError(
            f"{kind.__name__} has no argument lr, which the schedule scales. Return it from "
            "configure_optimizers of a module of your own."
        )
    for name in init_args:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no argument {name!r}, only {', '.join(known)}.")
    choice = OptimizerChoice(kind, {**defaults, **init_args})
    trial = [(name, nn.Parameter(torch.zeros(shape, device="cpu"))) for name, shape in (("a", (2, 2)), ("b", (2,)))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of the dtype of the trial's weights.
            choice.make(trial, 1e-3, 0.0, (0.9, 0.95))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`optimizer` is refused: {kind.__name__}({_shown(choice.arguments)}) says {error}") from error
    return choice


def _imported(path: str) -> type[Optimizer]:
    """Return the class of a class path."""
    module, _, name = path.rpartition(".")
    if path in ("muon", "torch.optim.Muon"):
        raise ValueError(_NO_MUON)
    if not module:
        near = get_close_matches(path.lower(), SHORT_NAMES, n=1, cutoff=0.4)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"optimizer={path!r} is unknown. {meant}Give {', '.join(SHORT_NAMES)}, or a class path such as "
            "torch.optim.NAdam."
        )
    if module.partition(".")[0] == "bitsandbytes" and not is_installed():
        raise ValueError(
            f'{name} needs bitsandbytes, which is not installed. Run: pip install "lightning-protrain[bnb]".'
        )
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"optimizer={path!r} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(f"optimizer={path!r} is not a class of torch.optim.Optimizer.")
    return kind


def _arguments_of(kind: type[Optimizer]) -> list[str]:
    """Return the names of the arguments of a class beside the parameters; `**kwargs` are those of its base."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[2:]
        names |= {it.name: None for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)}
        if all(it.kind is not it.VAR_KEYWORD for it in parameters):
            break
    return list(names)


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
