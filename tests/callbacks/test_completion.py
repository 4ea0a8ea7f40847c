"""Answers at the end of training."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from transformers import AutoTokenizer

from lightning_protrain.callbacks.samples import SampleCompletion
from lightning_protrain.data.batches.tokenizer import CHAT_TEMPLATE
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.callbacks.stand_ins import Speaker, chat_data, fit, tokenizer_folder
from tests.support.ranks import run_ranks, trainer_on_rank, values


class ModeKeeper(Callback):
    """Records the training mode of every module; two of them stand before and after the tested callback."""

    def __init__(self) -> None:
        self.modes: list[list[bool]] = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.modes.append([module.training for module in pl_module.modules()])


class Board(DummyLogger):
    """Keeps the text that it is given, as TensorBoard does."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str, int]] = []

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(add_text=lambda tag, text, global_step: self.texts.append((tag, text, global_step)))


def test_every_prompt_is_answered_with_decoded_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Speaker()
    fit(module, chat_data(tmp_path), SampleCompletion(["One [bold]?", "Two?"], max_new_tokens=7))
    lines = [line.replace("\u2502", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["Answers", "after", "2", "steps"] in lines
    # The stand-in repeats the prompt's tokens: roles and text, without the special ones.
    assert lines[-3:-1] == [["One", "[bold]?", "userOne", "[bold]?assistant"], ["Two?", "userTwo?assistant"]]
    assert module.max_new_tokens == [7, 7]


def test_answers_before_training_stand_beside_those_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Learning(Speaker):
        def generate(self, input_ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            said = super().generate(input_ids, *args, **options)
            return said if self.trainer.global_step else said[:, :-2]

    fit(Learning(), chat_data(tmp_path), SampleCompletion(["One?"], before=True))
    lines = [
        line.replace("\u2502", " ").replace("\u2503", " ").split() for line in capsys.readouterr().out.splitlines()
    ]
    assert ["prompt", "before", "after"] in lines
    (answers,) = (line for line in lines if line[:1] == ["One?"])
    assert answers[1] != answers[2] == "userOne?assistant"


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
    with pytest.warns(UserWarning, match="after 2 steps failed; the run goes on without. RuntimeError: broken"):
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
    assert "Question 1?" in capsys.readouterr().out
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


PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
DATED = "{{ '<|im_start|>system<|im_sep|>' + strftime_now('%d %B') + '<|im_end|>' }}"


@pytest.mark.parametrize("own", [None, PLAIN])
def test_prompts_are_rendered_as_in_training(tmp_path: Path, own: str | None) -> None:
    asked: list[tuple[str, Any]] = []

    class Asked(Speaker):
        def generate(self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_id: Any = None) -> torch.Tensor:
            asked.append((data.tokenizer.decode(input_ids[0]), eos_token_id))
            return super().generate(input_ids, max_new_tokens)

    folder = tokenizer_folder(tmp_path, own)
    template = "{% if tone is defined %}{{ tone }}{% endif %}" + DATED + CHAT_TEMPLATE
    options = {"chat_template": template, "chat_template_kwargs": {"tone": "Politely."}}
    data = chat_data(tmp_path, tokenizer=folder, **options)
    data.load_state_dict({"chat_format": {"day": "2024-07-05"}})
    fit(Asked(), data, SampleCompletion(["One?"]))
    date = "<|im_start|>system<|im_sep|>05 July<|im_end|>"
    ends = [data.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|pad|>")]
    assert asked == [(f"Politely.{date}<|im_start|>user<|im_sep|>One?<|im_end|><|im_start|>assistant<|im_sep|>", ends)]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "SampleCompletion cannot ask 'One.': .*chat_template is not set"),
        ("{{ raise_exception('no prompts') }}", "cannot ask 'One.': no prompts. Change the prompt"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_refused_before_training(
    tmp_path: Path, template: str | None, message: str
) -> None:
    class Untrained(Speaker):
        def training_step(self, *_: object) -> torch.Tensor:
            raise AssertionError("trained")

    class Plain(LightningDataModule):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(tmp_path, template))

        def train_dataloader(self) -> list[int]:
            return [0, 1]

    with pytest.raises(ValueError, match=message):
        fit(Untrained(), Plain(), SampleCompletion(["One?"]), val_check_interval=None)


@pytest.mark.parametrize(
    ("prompts", "length", "message"), [([], 8, "has no prompts"), (["x"], 0, "max_new_tokens=0: give at least 1")]
)
def test_wrong_arguments_are_refused(prompts: list[str], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleCompletion(prompts, length)


def test_streamed_weights_answer_the_same_after_every_step(tmp_path: Path) -> None:
    """Only this package's callbacks read weights here, so an optimizer step may still run."""

    def answers(strategy: Any) -> list[str]:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2}
        module = CausalLMModule(config={"model_type": "llama", **sizes}, warmup_steps=0, learning_rate=0.03)
        callback, board = SampleCompletion(["Question 1?"], 6, in_validation=True), Board()
        fit(module, chat_data(tmp_path), callback, logger=board, strategy=strategy, max_steps=4)
        return [text for _, text, _ in board.texts]

    plain = answers("auto")
    assert len(plain) == 4
    assert len(set(plain)) > 1
    for overlap in ("forward", "backward", "off"):
        assert answers(ProTrainStrategy(plan="offload", overlap_optimizer=overlap)) == plain


def test_tensorboard_holds_the_text(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    fit(Speaker(), chat_data(tmp_path), SampleCompletion(["One?"], in_validation=True), logger=logger)
    found = events.EventAccumulator(logger.log_dir)
    found.Reload()
    texts = [(each.step, each.tensor_proto.string_val[0]) for each in found.Tensors("answers/One?/text_summary")]
    assert texts == [(1, b"    userOne?assistant"), (2, b"    userOne?assistant")]


def answer_on_rank(rank: int, folder: Path, failing: int | None) -> list[str]:
    class Failing(Speaker):
        def generate(self, *args: Any, **options: Any) -> torch.Tensor:
            if rank == failing:
                raise OSError("broken")
            return super().generate(*args, **options)

    trainer = trainer_on_rank(
        rank, 2, max_steps=2, val_check_interval=1, callbacks=[SampleCompletion(["One?"], 4, True)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Failing(), chat_data(folder))
    said = [str(each.message) for each in caught if "run goes on" in str(each.message)]
    return [str(trainer.global_step), *said]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_on_two_ranks(tmp_path: Path, failing: int | None) -> None:
    chat_data(tmp_path).setup("fit")  # the tokenizer is made once
    outcomes = run_ranks(answer_on_rank, 2, tmp_path, tmp_path, failing)
    assert "hangs" not in [each.error for each in outcomes]
    (step, *said), other = values(outcomes)
    assert [step, *other] == ["2", "2"]  # rank 0 warns
    assert len(said) == (0 if failing is None else 2)
    assert all("OSError: broken" in each for each in said)


def test_answers_in_validation_leave_the_training_as_it_is(tmp_path: Path) -> None:
    class Drawing(CausalLMModule):
        def generate(self, *args: Any, **options: Any) -> torch.Tensor:
            torch.rand(3)
            return super().generate(*args, **options)

    def weights(*callbacks: Callback) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
        module = Drawing(config={"model_type": "llama", "attention_dropout": 0.2, **sizes}, warmup_steps=0)
        fit(module, chat_data(tmp_path), *callbacks, strategy="protrain", max_steps=3)
        return module.state_dict()

    plain, sampled = weights(), weights(SampleCompletion(["One?"], 4, in_validation=True))
    assert all(torch.equal(plain[name], sampled[name]) for name in plain)
