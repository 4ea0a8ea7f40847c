"""`SampleCompletion`: what the model says to a few prompts once it is trained."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.text import Text


class SampleCompletion(Callback):
    """Prints the model's answer to each prompt when training ends.

    The prompts go through the chat template of the datamodule's tokenizer; the module answers with its
    `generate(input_ids, max_new_tokens, eos_token_id)`. All ranks take part, as a strategy may need them for a forward;
    rank zero prints.

    Args:
        prompts: What the user says, one conversation each.
        max_new_tokens: The longest answer, in tokens.

    Raises:
        ValueError: No prompts, here; a datamodule without tokenizer or a module without `generate`, before training.
    """

    def __init__(self, prompts: list[str], max_new_tokens: int = 48) -> None:
        if not prompts:
            raise ValueError("SampleCompletion has no prompts. Give at least one, or leave the callback out.")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give at least 1.")
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses what could not answer, before the training and not after it."""
        _tokenizer(trainer)
        if not callable(getattr(pl_module, "generate", None)):
            raise ValueError(
                "SampleCompletion needs a method `generate(input_ids, max_new_tokens, eos_token_id)`, and "
                f"{type(pl_module).__name__} has no such method. Add it, or leave the callback out."
            )

    # Not on_fit_end: by then Lightning may have torn down what the forward needs.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answers the prompts in eval mode and puts every module back into the mode it had."""
        console = Console()
        modes = {module: module.training for module in pl_module.modules()}
        pl_module.eval()
        try:
            with torch.no_grad():
                for prompt in self.prompts:
                    answer = self._answer(trainer, pl_module, prompt)
                    if trainer.is_global_zero:
                        console.print(Text.assemble((f"> {prompt}\n", "bold"), answer), soft_wrap=True)
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
