"""A module from a checkpoint folder without a Trainer: `load_from_checkpoint`, for folders too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor

from lightning_protrain.checkpoint.consolidation import load_folder
from lightning_protrain.checkpoint.discover import resolve
from lightning_protrain.checkpoint.references import fill

_Module = TypeVar("_Module", bound=LightningModule)


def load_module(
    kind: type[_Module],
    folder: str | os.PathLike[str],
    map_location: Any = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> _Module:
    """Makes a module with the weights and hyperparameters in a checkpoint folder, such as `best_model_path`.

    Every byte of the folder is checked, and nothing in it is executed. Frozen weights that it only refers to are read
    from where they came from.

    Args:
        kind: The class of the module.
        folder: The checkpoint.
        map_location: As in `torch.load`; None: the host.
        strict: Whether the names of the weights have to be those of the module; None: its `strict_loading`.
        kwargs: Arguments of the module that take the place of hyperparameters in the checkpoint.

    Raises:
        ValueError: It is not good, and what is wrong with it; its weights are quantised; or the source of frozen ones
            is gone or another one.
        FileNotFoundError: There is no such checkpoint.
        RuntimeError: The weights are those of another module.
    """
    place = resolve(Path(os.path.abspath(folder)))
    content = load_folder(place, map_location)
    settings = content.setdefault(kind.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if isinstance(settings, Mapping) and settings.get("quantization") is not None:
        raise ValueError(
            f"{place} has adapters of quantised weights, which only a Trainer loads: give it as `ckpt_path`, or write "
            "the whole model with `lightning-protrain merge`."
        )
    fill(content, str(place))
    settings.update(kwargs)
    module = cast(_Module, _load_state(kind, content, strict=strict, **kwargs))
    devices = {value.device for value in content["state_dict"].values() if isinstance(value, Tensor)}
    return module.to(devices.pop()) if len(devices) == 1 else module


class RestorableModule(LightningModule):
    """A LightningModule whose `load_from_checkpoint` reads folders of ProTrainCheckpoint as well as stock files."""

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """As that of LightningModule; a folder as in `load_module`, and with its own hyperparameters alone.

        Raises:
            ValueError: As in `load_module`; or a folder is given a file of hyperparameters.
        """
        is_path = isinstance(checkpoint_path, (str, os.PathLike))
        if not is_path or not os.path.isdir(checkpoint_path):
            load = super().load_from_checkpoint
            return load(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)
        if hparams_file is not None:
            raise ValueError(
                f"{checkpoint_path} is a folder with hyperparameters of its own: give others as arguments, in place "
                f"of hparams_file={str(hparams_file)!r}."
            )
        return load_module(cls, checkpoint_path, map_location, strict, **kwargs)
