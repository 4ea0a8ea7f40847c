"""`SampleCompletion`: what the model says to a few prompts, once it is trained and after each validation."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_protrain.callbacks.failures import failing_together


class SampleCompletion(Callback):
    """Shows the model's answer to each prompt: as a table, and as text in TensorBoard where that is the logger.

    The prompts go through the chat template of the datamodule's tokenizer; the module answers with its
    `generate(input_ids, max_new_tokens, eos_token_id)`, with streamed weights if need be. All ranks take part, as a
    strategy may need them for a forward; rank zero shows, and what fails on one ends all. Modes of modules and random
    generators are as before.

    Args:
        prompts: What the user says, one conversation each.
        max_new_tokens: The longest answer, in tokens.
        in_validation: Whether to answer after each validation too, and not only when training ends.

    Raises:
        ValueError: No prompts, here; a datamodule without tokenizer or a module without `generate`, before training.
    """

    def __init__(self, prompts: list[str], max_new_tokens: int = 48, in_validation: bool = False) -> None:
        if not prompts:
            raise ValueError("SampleCompletion has no prompts. Give at least one, or leave the callback out.")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give at least 1.")
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.in_validation = in_validation
        self._answered_at: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses what could not answer, before the training and not after it."""
        _tokenizer(trainer)
        if not callable(getattr(pl_module, "generate", None)):
            raise ValueError(
                "SampleCompletion needs a method `generate(input_ids, max_new_tokens, eos_token_id)`, and "
                f"{type(pl_module).__name__} has no such method. Add it, or leave the callback out."
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answers the prompts, if that is asked for."""
        if self.in_validation and not trainer.sanity_checking:
            self._show(trainer, pl_module)

    # Not on_fit_end: by then Lightning may have torn down what the forward needs.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answers the prompts, unless this model has just done so."""
        if trainer.global_step != self._answered_at:
            self._show(trainer, pl_module)

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._answered_at = trainer.global_step
        # The other ranks would wait in the next training step for one that fails here.
        with failing_together(f"Answering prompts after {trainer.global_step} steps"):
            answers = self._answers(trainer, pl_module)
            if trainer.is_global_zero:
                self._print(answers, trainer)

    def _print(self, answers: list[str], trainer: Trainer) -> None:
        table = Table("prompt", "answer", title=f"Answers after {trainer.global_step} steps", title_justify="left")
        for prompt, answer in zip(self.prompts, answers, strict=True):
            table.add_row(Text(prompt), Text(answer))  # not strings, in which rich looks for markup
            for logger in trainer.loggers:
                add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
                if callable(add_text):
                    # Four blanks: TensorBoard renders Markdown, and what the model says is none.
                    code = "\n".join(f"    {line}" for line in answer.splitlines())
                    add_text(f"answers/{prompt}", code, global_step=trainer.global_step)
        Console().print(table)

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
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        input_ids = encoded["input_ids"].to(pl_module.device)
        generate: Any = pl_module.generate
        output = generate(input_ids, max_new_tokens=self.max_new_tokens, eos_token_id=tokenizer.eos_token_id)
        answer: str = tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)
        return answer.strip()


def _tokenizer(trainer: Trainer) -> Any:
    # Trainer has the attribute `datamodule` only once one was given.
    tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
    if tokenizer is None:
        raise ValueError("SampleCompletion needs a datamodule with a `tokenizer`, such as ChatDataModule. Give one.")
    return tokenizer
