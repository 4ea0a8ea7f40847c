"""`SavePretrained`: writes the trained model into a folder in the format of transformers or PEFT."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.config import DTYPES, plural
from lightning_protrain.data.hub import PUSH_ERRORS, is_path, prepare_push, push, why_not_pushed
from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.models.lora import castable_weights, save_model
from lightning_protrain.models.model_card import facts_of_run, warning_of_cards, write_card
from lightning_protrain.progress import waiting
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW, master_of
from lightning_protrain.trainer_events import CopyableCallback

_States = Mapping[Tensor, Mapping[str, Any]]


class SavePretrained(CopyableCallback):
    """Writes the module's `model`, the tokenizer and the processor with `save_pretrained` when training ends.

    Of a model with adapters, only the adapters are saved, in PEFT's format. The folder is renamed to `dirpath` when it
    is complete. The folder has no optimizer states: use checkpoints to resume a run. The chat template and the
    generation settings are those of the data module, so `generate` stops at the trained end of turn. If another
    callback fails after the last step, the folder is written nevertheless.

    Args:
        dirpath: Folder to create; it must not exist.
        fallback_dirpath: Folder on another disk, which is used if `dirpath` cannot be written; None means no fallback.
        dtype: Dtype to cast weights to, with host memory for them: `"float32"` (of SplitAdamW, the masters),
            `"bfloat16"` or `"float16"`; None keeps them.
        push_to_hub: True uploads the folder to the Hugging Face Hub, where a repository is created before training. If
            the upload fails, a warning has the command that repeats it.
        hub_model_id: Name of the repository; None means the name of the folder, or of the run whose folder has it as
            `model`, in the user's namespace. Files that the repository has under other names stay.
        hub_private_repo: True makes a new repository private, and refuses a public one; None leaves that to the
            owner's settings.

    Raises:
        ValueError: The dtype is unknown; or, before training, a folder exists already or cannot be created, the
            module has no `model` that can be saved, or the Hub does not let this process write to the repository.
        OSError: After training, if neither folder can be written; the message names the newest checkpoint.
    """

    needs_whole_weights = True  # On one rank, at the end of a run.

    def __init__(
        self,
        dirpath: str,
        fallback_dirpath: str | None = None,
        dtype: str | None = None,
        push_to_hub: bool = False,
        hub_model_id: str | None = None,
        hub_private_repo: bool | None = None,
    ) -> None:
        if dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}.")
        self.dirpath = os.path.expanduser(dirpath)
        self.fallback_dirpath = None if fallback_dirpath is None else os.path.expanduser(fallback_dirpath)
        self.dtype = dtype
        self.push_to_hub = push_to_hub
        self.hub_model_id = hub_model_id
        self.hub_private_repo = hub_private_repo
        self._repository: str | None = None  # Name on the Hub with its owner, on rank 0; None if nothing is pushed.
        self._is_due = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before training that the model can be saved, and that the folder does not exist and can be made."""
        self._is_due = True
        for dirpath in self._dirpaths:
            if Path(dirpath).exists():
                raise ValueError(f"SavePretrained would write to {dirpath!r}, which already exists. Move it away.")
        if not callable(getattr(getattr(pl_module, "model", None), "save_pretrained", None)):
            raise ValueError(
                f"SavePretrained needs a model of transformers or PEFT as `model` of {type(pl_module).__name__}, and "
                f"finds {type(getattr(pl_module, 'model', None)).__name__}."
            )
        if trainer.is_global_zero:
            for dirpath in self._dirpaths:
                parent = Path(dirpath).absolute().parent
                try:
                    parent.mkdir(parents=True, exist_ok=True)
                    TemporaryDirectory(dir=parent).cleanup()
                except OSError as error:
                    raise ValueError(
                        f"SavePretrained cannot write to {dirpath!r}: {error.strerror}. Give a folder that this "
                        "process may write to."
                    ) from error
        if self.push_to_hub:
            with failing_together("Checking that the model can be pushed"):
                self._prepare_push(trainer, pl_module.model)

    def _prepare_push(self, trainer: Trainer, model: Any) -> None:
        if not trainer.is_global_zero:
            return
        folder = Path(self.dirpath).absolute()
        name = (folder.parent if folder.name == "model" else folder).name  # `fit MODEL DATA` writes runs/NAME/model.
        self._repository = prepare_push(self.hub_model_id or name, self.hub_private_repo)
        base = getattr(model, "name_or_path", "") if hasattr(model, "peft_config") else ""
        if base and is_path(base):
            rank_zero_warn(
                f"The adapters on the Hub will name their base model as {base!r}, which is only on this host. Give "
                "`model` as a name on the Hub, or push what `lightning-protrain merge` writes."
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folder on rank 0."""
        self._is_due = False
        states = _states(trainer, trainer.strategy.optimizer_state) if self.dtype == "float32" else {}
        self._save(trainer, pl_module, states)

    def _save(self, trainer: Trainer, pl_module: LightningModule, states: _States) -> None:
        if not trainer.is_global_zero:
            return
        for dirpath in self._dirpaths:
            try:
                with _in_dtype(pl_module.model, self.dtype, states):
                    _write(trainer, pl_module, dirpath, self._repository or Path(dirpath).absolute().name)
            except (OSError, SafetensorError) as error:
                message = f"SavePretrained could not write the trained model to {dirpath!r}: {error}."
                if dirpath != self._dirpaths[-1]:
                    rank_zero_warn(f"{message} It is written to {self.fallback_dirpath!r} instead.")
                    continue
                raise OSError(f"{message} {_rescue(trainer, dirpath)}") from error
            rank_zero_info(f"The trained model is in {dirpath}.")
            if self._repository is not None:
                _push(dirpath, self._repository)
            return

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the folder if all steps were trained before the error."""
        if not self._is_due or not isinstance(exception, Exception) or not _has_trained_all(trainer):
            return
        self._is_due = False
        try:
            # The other ranks may not come here, so only this rank's states are read.
            states = _states(trainer, Optimizer.state_dict) if self.dtype == "float32" else {}
            self._save(trainer, pl_module, states)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:  # Show the exception that ended the run.
            rank_zero_warn(f"The trained model is not saved: {error}")

    @property
    def _dirpaths(self) -> list[str]:
        return [self.dirpath] if self.fallback_dirpath is None else [self.dirpath, self.fallback_dirpath]


def _has_trained_all(trainer: Trainer) -> bool:
    """Return True if the optimizer has taken the last step of the fit."""
    loop = trainer.fit_loop
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current.ready
    if batches.current.processed < max(batches.current.ready, 1):  # type: ignore[attr-defined]
        return False
    has_stopped = 0 <= loop.max_steps <= trainer.global_step or (trainer.should_stop and loop._can_stop_early)
    is_last_epoch = loop.max_epochs not in (None, -1) and epochs >= loop.max_epochs
    return has_stopped or (is_last_epoch and batches.is_last_batch)


def _states(trainer: Trainer, read: Callable[[Optimizer], Mapping[str, Any]]) -> _States:
    """Return the states of parameters that SplitAdamW steps."""
    state_of: dict[Tensor, Mapping[str, Any]] = {}
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, SplitAdamW):
            states = read(optimizer)["state"]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state_of |= {parameter: states[index] for index, parameter in enumerate(parameters) if index in states}
    return state_of


@contextmanager
def _in_dtype(model: Any, dtype: str | None, states: _States) -> Iterator[None]:
    """Let a model (with PEFT: what is trained) hold its weights in one of `DTYPES` in this context; None: no change."""
    if dtype is None:
        yield
        return
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    cast: dict[Tensor, nn.Parameter] = {}
    lost = 0
    for layer, name, weight in castable_weights(model, dtype):
        if hasattr(model, "peft_config") and not weight.requires_grad:
            continue
        if weight not in cast:
            state, low = states.get(weight, {}), weight.dtype == torch.bfloat16
            lost += dtype == "float32" and low and weight.requires_grad and "remainder" not in state
            values = master_of(weight.detach(), state).to("cpu", getattr(torch, dtype))
            cast[weight] = nn.Parameter(values, requires_grad=weight.requires_grad)
        held.append((layer, name, weight))
        layer._parameters[name] = cast[weight]
    if lost:
        rank_zero_warn(f"SavePretrained casts {plural(lost, 'bfloat16 weight')} without masters to float32.")
    try:
        yield
    finally:
        for layer, name, weight in held:
            layer._parameters[name] = weight


def _write(trainer: Trainer, module: Any, dirpath: str, name: str) -> None:
    partial = Path(f"{dirpath}.partial")
    if partial.exists():  # left by a run that was killed while it wrote
        shutil.rmtree(partial)
    try:
        datamodule = getattr(trainer, "datamodule", None)
        save_model(module.model, partial, getattr(datamodule, "end_ids", ()))
        for part in ("tokenizer", "processor"):
            save = getattr(getattr(datamodule, part, None), "save_pretrained", None)
            if callable(save):
                save(partial)
        with warning_of_cards():
            write_card(partial, name, module.model, facts_of_run(trainer, module))
        os.rename(partial, dirpath)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _push(dirpath: str, name: str) -> None:
    """Upload a folder; warn if that fails, because the model is on disk."""
    try:
        with waiting(f"Pushing {dirpath} to {name}"):
            push(dirpath, name)
    except PUSH_ERRORS as error:
        rank_zero_warn(
            f"The trained model in {dirpath!r} is not pushed: {why_not_pushed(error)}. Push it with `hf upload {name} "
            f"{shlex.quote(dirpath)} .`."
        )
        return
    rank_zero_info(f"The trained model is on the Hub as {name}.")


def _rescue(trainer: Trainer, dirpath: str) -> str:
    """Return a sentence that says how to get the weights from a checkpoint."""
    savers = trainer.checkpoint_callbacks
    paths = [getattr(saver, name, "") for saver in savers for name in ("last_model_path", "best_model_path")]
    saved = next((path for path in paths if path and os.path.exists(path)), None)
    if saved is None:
        return "No checkpoint was saved either, so the trained weights are lost."
    return (
        f"The newest checkpoint {saved} has the trained weights. Free disk space, then run "
        f"`lightning-protrain export {shlex.quote(saved)} {shlex.quote(dirpath)}`."
    )
