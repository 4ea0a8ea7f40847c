"""Answers at the end of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_protrain.callbacks.completion import SampleCompletion
from lightning_protrain.module import CausalLMModule
from tests.callbacks.stand_ins import Speaker, chat_data, fit


class ModeKeeper(Callback):
    """Notes the mode of every module before and after the callback that stands between the two."""

    def __init__(self) -> None:
        self.modes: list[list[bool]] = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.modes.append([module.training for module in pl_module.modules()])


def test_every_prompt_is_answered_with_decoded_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Speaker()
    fit(module, chat_data(tmp_path), SampleCompletion(["One [bold]?", "Two?"], max_new_tokens=7))
    lines = capsys.readouterr().out.splitlines()
    # The stand-in repeats the prompt's tokens: roles and text, without the special ones.
    assert lines[-4:] == ["> One [bold]?", "userOne [bold]?assistant", "> Two?", "userTwo?assistant"]
    assert module.max_new_tokens == [7, 7]


def test_the_module_is_in_eval_mode_meanwhile_and_put_back(tmp_path: Path) -> None:
    module, keeper = Speaker(), ModeKeeper()
    fit(module, chat_data(tmp_path), keeper, SampleCompletion(["One?"]), keeper)
    assert module.generated_in_training_mode == [False]
    before, after = keeper.modes
    assert before == after
    assert True in before
    assert False in before


def test_the_modes_are_put_back_after_an_error(tmp_path: Path) -> None:
    class Broken(Speaker):
        def generate(self, *_: object, **__: object) -> torch.Tensor:
            raise RuntimeError("broken")

    module = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, chat_data(tmp_path), SampleCompletion(["One?"]))
    assert module.training
    assert not module.frozen.training


def test_a_real_model_answers_within_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths: list[int] = []

    class Measured(CausalLMModule):
        def generate(self, input_ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            output = super().generate(input_ids, *args, **options)
            lengths.append(output.shape[1] - input_ids.shape[1])
            return output

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
    module = Measured(config={"model_type": "llama", **sizes}, warmup_steps=0)
    fit(module, chat_data(tmp_path), SampleCompletion(["Question 1?"], max_new_tokens=5))
    assert "> Question 1?\n" in capsys.readouterr().out
    assert len(lengths) == 1
    assert 1 <= lengths[0] <= 5


def test_what_cannot_answer_is_refused_before_training(tmp_path: Path) -> None:
    class Mute(Speaker):
        generate = None

        def training_step(self, *_: object) -> torch.Tensor:
            raise AssertionError("trained")

    with pytest.raises(ValueError, match=r"`generate.input_ids, max_new_tokens, eos_token_id.`, and Mute has no"):
        fit(Mute(), chat_data(tmp_path), SampleCompletion(["One?"]))


def test_a_datamodule_without_tokenizer_is_refused_before_training(tmp_path: Path) -> None:
    data = chat_data(tmp_path)
    data.setup("fit")
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[SampleCompletion(["One?"])]
    )
    with pytest.raises(ValueError, match="needs a datamodule with a `tokenizer`"):
        trainer.fit(Speaker(), train_dataloaders=data.train_dataloader(), val_dataloaders=data.val_dataloader())


@pytest.mark.parametrize(
    ("prompts", "length", "message"), [([], 8, "has no prompts"), (["x"], 0, "max_new_tokens=0: give at least 1")]
)
def test_wrong_arguments_are_refused(prompts: list[str], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleCompletion(prompts, length)
