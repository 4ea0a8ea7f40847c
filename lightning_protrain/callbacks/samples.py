"""Callbacks that show progress: answers to prompts, and a validation metric before and after training."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from rich import get_console
from rich.table import Table
from rich.text import Text

from lightning_protrain.data.chat.render import REFUSALS
from lightning_protrain.distributed.failures import failing_together, warning_together
from lightning_protrain.trainer_events import CopyableCallback, validates


class InitialValidation(CopyableCallback):
    """Measures a validation metric before training, and prints "val_loss 8.41 -> 4.92" after training.

    The callback extends Lightning's sanity check to all validation batches, and logs its value at step 0. A resumed run
    has no sanity check, so only the last value is printed. If the module logs `val_accuracy`, that is printed, too.

    Args:
        monitor: Name of the metric that the module logs in validation.

    Raises:
        ValueError: Before training, if the sanity check does not log the metric. A later validation only warns.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        self.monitor = monitor
        self.first: float | None = None
        self.last: float | None = None
        self._accuracies: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Extend the sanity check to all validation batches, up to `limit_val_batches`."""
        if stage == "fit":
            trainer.num_sanity_val_steps = math.inf

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the first value, if there are validation rows, and log it: Lightning logs none of a sanity check."""
        if not validates(trainer):
            return
        self.first = self._metric(trainer)
        for logger in trainer.loggers:
            logger.log_metrics({self.monitor: self.first}, step=0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the last value; warn if there is none."""
        if not trainer.sanity_checking:
            try:
                self.last = self._metric(trainer)
            except ValueError as error:
                rank_zero_warn(str(error))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print both values on rank 0."""
        if trainer.is_global_zero:
            get_console().print(self.summary(), highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """Return the first and the last value as text."""
        if self.last is None:
            return f"{self.monitor}: no validation ran during training."
        if self.first is None:
            return f"{self.monitor} {self.last:.4f}"
        return f"{self.monitor} {self.first:.4f} -> {self.last:.4f}{self._predicted()}"

    def _predicted(self) -> str:
        """Return the accuracy before and after training as text; empty if the module does not log `val_accuracy`."""
        if len(self._accuracies) < 2:
            return ""
        before, after = (f"{100 * share:.0f}" for share in (self._accuracies[0], self._accuracies[-1]))
        return f"\nThe model predicts {after} of 100 tokens; before training it was {before}."

    def _metric(self, trainer: Trainer) -> float:
        if self.monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ValueError(f"InitialValidation monitors {self.monitor!r}, but validation logged {logged}.")
        if "val_accuracy" in trainer.callback_metrics:
            self._accuracies.append(float(trainer.callback_metrics["val_accuracy"]))
        return float(trainer.callback_metrics[self.monitor])


class SampleCompletion(CopyableCallback):
    """Shows the model's answer to each prompt as a table, and as text in TensorBoard loggers.

    Prompts are rendered with the chat template that is trained: by `prompt_ids` of the data module, or else by its
    tokenizer. The module's method `generate(input_ids, max_new_tokens, eos_token_id)` makes the answers, also with
    streamed weights. `eos_token_id` is the end token of the tokenizer, or a list if `end_ids` of the data module has
    further ones. All ranks generate, because a forward may contain collectives; rank 0 prints. An error before training
    ends all ranks; a later error is a warning. The callback does not change module modes or random states.

    Args:
        prompts: User messages; each is a conversation of its own.
        max_new_tokens: Maximum length of an answer, tokens.
        in_validation: True answers after each validation and at the end of training, False only at the end.
        before: True answers before the first step, too, and shows these answers beside later ones.

    Raises:
        ValueError: If there are no prompts. `on_fit_start` raises it if the data module has no tokenizer, a prompt
            cannot be rendered, or the module has no `generate`.
    """

    def __init__(
        self, prompts: list[str], max_new_tokens: int = 48, in_validation: bool = False, before: bool = False
    ) -> None:
        if not prompts:
            raise ValueError("SampleCompletion has no prompts. Give at least one, or leave the callback out.")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give at least 1.")
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.in_validation = in_validation
        self.before = before
        self._first: tuple[str, ...] = ()
        self._answered_at: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the data module has a tokenizer that renders every prompt, and the module a `generate`."""
        _tokenizer(trainer)
        for prompt in self.prompts:
            try:
                _prompt_ids(trainer, prompt)
            except REFUSALS as error:
                reason = str(error).rstrip(".")
                raise ValueError(
                    f"SampleCompletion cannot ask {prompt!r}: {reason}. Change the prompt or the chat template, or "
                    "leave the callback out."
                ) from error
        if not callable(getattr(pl_module, "generate", None)):
            raise ValueError(
                "SampleCompletion needs a method `generate(input_ids, max_new_tokens, eos_token_id)`, and "
                f"{type(pl_module).__name__} has no such method. Add it, or leave the callback out."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the first answers if `before` is set."""
        if self.before:
            with failing_together("Answering prompts before training"):
                self._first = tuple(self._answers(trainer, pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answer the prompts if `in_validation` is set."""
        if self.in_validation and not trainer.sanity_checking:
            self._show(trainer, pl_module)

    # Lightning may have torn down the strategy before `on_fit_end`.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answer the prompts, unless they were already answered at this step."""
        if trainer.global_step != self._answered_at:
            self._show(trainer, pl_module)

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._answered_at = trainer.global_step
        # If a rank failed here alone, the other ranks would wait for it in the next step.
        with warning_together(f"Answering prompts after {trainer.global_step} steps"):
            answers = self._answers(trainer, pl_module)
            if trainer.is_global_zero:
                self._print(answers, trainer)

    def _print(self, answers: list[str], trainer: Trainer) -> None:
        title = f"Answers after {trainer.global_step} steps"
        columns = ("prompt", "before", "after") if self._first else ("prompt", "answer")
        table = Table(*columns, title=title, title_justify="left", show_lines=bool(self._first))
        for index, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            # In a `str`, rich would interpret markup.
            table.add_row(Text(prompt), *map(Text, self._first[index : index + 1]), Text(answer))
            for logger in trainer.loggers:
                add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
                if callable(add_text):
                    # TensorBoard renders Markdown; indentation by four spaces shows the answer as plain text.
                    code = "\n".join(f"    {line}" for line in answer.splitlines())
                    add_text(f"answers/{prompt}", code, global_step=trainer.global_step)
        get_console().print(table)

    def _answers(self, trainer: Trainer, pl_module: LightningModule) -> list[str]:
        modes = {module: module.training for module in pl_module.modules()}
        pl_module.eval()
        try:
            with torch.no_grad(), isolate_rng():
                return [self._answer(trainer, pl_module, prompt) for prompt in self.prompts]
        finally:
            for module, training in modes.items():
                module.training = training

    def _answer(self, trainer: Trainer, pl_module: LightningModule, prompt: str) -> str:
        tokenizer = _tokenizer(trainer)
        input_ids = torch.tensor([_prompt_ids(trainer, prompt)], device=pl_module.device)
        ends = dict.fromkeys((*getattr(trainer.datamodule, "end_ids", ()), tokenizer.eos_token_id))  # type: ignore[attr-defined]
        known = [end for end in ends if end is not None]
        generate: Any = pl_module.generate
        output = generate(
            input_ids,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=known if len(known) > 1 else next(iter(known), None),
        )
        answer: str = tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)
        return answer.strip()


def _prompt_ids(trainer: Trainer, prompt: str) -> list[int]:
    tokenizer, render = _tokenizer(trainer), getattr(trainer.datamodule, "prompt_ids", None)  # type: ignore[attr-defined]
    if callable(render):
        ids: list[int] = render(prompt)
        return ids
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _tokenizer(trainer: Trainer) -> Any:
    # Trainer has no attribute `datamodule` if none was given.
    tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
    if tokenizer is None:
        raise ValueError("SampleCompletion needs a datamodule with a `tokenizer`, such as ChatDataModule. Give one.")
    return tokenizer
