"""The datamodule alone, inside a Trainer, and with evaluation on several ranks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_protrain import trainer_events
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.callbacks.samples import InitialValidation
from lightning_protrain.data import datamodule as module
from lightning_protrain.data.batches.tokenizer import CHAT_TEMPLATE
from lightning_protrain.data.conversation import Conversation
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources.spec import DatasetSpec
from lightning_protrain.models.module import CausalLMModule
from tests.data.chat_runs import DATED, Recorder, _batches, _data, _trainer, set_today
from tests.data.conftest import conversation


def _equal(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


def test_all_rows_are_in_training_or_validation(chats: str, rows: list[Conversation]) -> None:
    data = _data(chats)
    data.prepare_data()
    data.setup("fit")
    parts = {name: part for name, (part,) in data.examples.items()}
    assert {name: len(part) for name, part in parts.items()} == {"train": 32, "validation": 8}
    decoded = [data.tokenizer.decode(one.input_ids.tolist()) for part in parts.values() for one in part]
    assert sorted(decoded) == sorted(data.tokenizer.apply_chat_template(r["messages"], tokenize=False) for r in rows)


@pytest.mark.parametrize(
    ("stage", "encoded"), [("validate", {"validation"}), ("test", {"test"}), ("predict", {"test"})]
)
def test_a_stage_tokenizes_what_it_reads(chats: str, stage: str, encoded: set[str]) -> None:
    data = _data(chats)
    data.setup(stage)
    assert set(data.examples) == encoded


def test_equal_arguments_give_bitwise_equal_batches_in_every_epoch(chats: str) -> None:
    runs = []
    for _ in range(2):
        recorder = Recorder()
        torch.rand(len(runs) + 1)  # the global generator must not matter
        _trainer(max_epochs=2).fit(recorder, datamodule=_data(chats))
        runs.append(recorder.seen)
    assert len(runs[0]) == 2
    assert all(_equal(left, right) for left, right in zip(*runs, strict=True))
    assert not _equal(runs[0][0], runs[0][1]), "the second epoch must have another order"


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("batch_size", "max_length"), [(1, 64), (2, 64), (4, 64), (7, 40), (100, 64)])
def test_no_batch_of_any_epoch_is_larger_than_the_largest(
    chats: str, batch_size: int, max_length: int, packing: bool
) -> None:
    data = _data(chats, batch_size=batch_size, max_length=max_length, packing=packing)
    data.setup("fit")
    largest = data.largest_batch()
    shapes = []
    for epoch in range(5):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        shapes += [tuple(batch["input_ids"].shape) for batch in loader]
    assert largest["input_ids"].shape[1] == max(length for _, length in shapes) or batch_size == 1
    assert largest["input_ids"].shape[0] == max(rows for rows, _ in shapes)
    if not packing:
        assert batch_size == 1 or not largest["attention_mask"].all(), "the mask must be of use"


def test_the_largest_batch_of_a_rank(chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _data(chats, batch_size=20)
    data.setup("fit")
    data.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    monkeypatch.setattr(Trainer, "world_size", 3)
    assert len(data.largest_batch()["input_ids"]) == 11


def test_the_largest_batch_changes_no_epoch(chats: str) -> None:
    epochs = []
    for ask in (False, True):
        data = _data(chats)
        data.setup("fit")
        before = torch.get_rng_state()
        if ask:
            assert _equal([data.largest_batch()], [data.largest_batch()])
        assert torch.equal(torch.get_rng_state(), before)
        epochs.append(_batches(data.train_dataloader()))
    assert _equal(*epochs)


def test_loading_draws_nothing_from_the_global_generator(chats: str) -> None:
    data = _data(chats)
    data.setup("fit")
    before = torch.get_rng_state()
    assert _batches(data.train_dataloader())
    assert _batches(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_test_and_predict_read_the_validation_rows_where_there_is_no_split(chats: str) -> None:
    recorder = Recorder()
    trainer = _trainer()
    trainer.test(recorder, datamodule=_data(chats), verbose=False)
    assert recorder.tested == 8
    assert sum(len(sums) for sums in trainer.predict(recorder, datamodule=_data(chats))) == 8


def test_ranks_see_disjoint_rows(chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _data(chats)
    data.setup("fit")
    data.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    monkeypatch.setattr(Trainer, "world_size", 2)
    indices = []
    for rank in range(2):
        monkeypatch.setattr(Trainer, "global_rank", rank)
        indices.append([row for batch in data.train_dataloader().sampler for row in batch])
    assert sorted(indices[0] + indices[1]) == list(range(32))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["<|im_end|>"]),
        ({"train_on_inputs": True}, ["<|im_end|>"]),
        ({"train_on_eos": "none"}, []),
        ({"max_length": 21, "packing": True}, []),  # every answer is cut
    ],
)
def test_the_ends_are_those_that_are_trained(chats: str, options: dict[str, Any], expected: list[str]) -> None:
    for _ in range(2):  # the second time, tokens are read from the cache
        data = _data(chats, **options)
        data.setup("fit")
        assert data.tokenizer.convert_ids_to_tokens(data.end_ids) == expected


@pytest.mark.parametrize(
    ("own", "option", "first", "second", "saved"),
    [
        ("A", None, "B", "B", "B"),
        ("A", "C", "B", None, "C"),
        ("A", None, "B", None, "A"),
        ("A", None, "B", "C", "B"),
        (None, None, "B", "C", "B"),
    ],
)
def test_the_tokenizer_has_the_template_for_the_saved_model(
    chats: str, tokenizer: Any, tmp_path: Path, own: Any, option: Any, first: Any, second: Any, saved: str
) -> None:
    texts = {name: "{# " + name + " #}" + CHAT_TEMPLATE for name in "ABC"}
    made = copy.deepcopy(tokenizer)
    made.chat_template = texts.get(own)
    made.save_pretrained(tmp_path / "tokenizer")
    specs = [DatasetSpec(chats, chat_template=texts.get(first)), DatasetSpec(chats, chat_template=texts.get(second))]
    data = _data(specs, tokenizer=str(tmp_path / "tokenizer"), chat_template=texts.get(option))
    data.setup("validate")
    assert data.tokenizer.chat_template == texts[saved]


def test_data_sets_may_have_templates_of_their_own(chats: str) -> None:
    """The same rows are rendered in two formats, and end markers of one format end no turns of the other."""
    template = CHAT_TEMPLATE.replace("message['role'] + '<|im_sep|>'", "message['role'] + '\\n'").replace(
        "assistant<|im_sep|>", "assistant\\n"
    )
    data = _data(
        [DatasetSpec(chats, max_rows=8), DatasetSpec(chats, max_rows=8, chat_template=template)], val_fraction=0.1
    )
    data.setup("fit")
    assert [report.family for report in data.reports[:2]] == ["phi4", "chatml"]
    first, second = (part[0] for part in data.examples["train"])
    texts = [data.tokenizer.decode(one.input_ids.tolist()) for one in (first, second)]
    assert texts[1] == texts[0].replace("<|im_sep|>", "\n")
    assert first.input_ids[first.trained].tolist() == second.input_ids[second.trained].tolist()


def test_a_data_set_may_name_its_family(chats: str) -> None:
    with pytest.raises(ValueError, match="no chat family 'chatlm'"):
        _data([chats, DatasetSpec(chats, family="chatlm")])
    data = _data([DatasetSpec(chats, family="llama3")])
    with pytest.raises(ValueError, match="llama3"):
        data.setup("fit")


def test_a_second_run_reads_the_tokenizer_from_the_cache(chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _data(chats).prepare_data()
    # Neither the seed nor the share of validation rows changes what the tokenizer is trained on.
    monkeypatch.setattr("lightning_protrain.data.batches.tokenizer.train_tokenizer", None)
    data = _data(chats, seed=3, val_fraction=0.5)
    data.prepare_data()
    data.setup("fit")
    assert len(list((Path("cache") / "tokenizers").iterdir())) == 1


def test_a_given_tokenizer_is_used(chats: str, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "mine")
    data = _data(chats, tokenizer=str(tmp_path / "mine"))
    data.prepare_data()
    data.setup("fit")
    assert data.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert not Path("cache", "tokenizers").exists()


def test_a_data_set_that_cannot_be_divided_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(conversation("Q", "A")) + "\n")
    with pytest.raises(ValueError, match=r"one.jsonl': 1 row cannot be divided .* or set val_fraction: 0"):
        _data(str(tmp_path / "one.jsonl")).setup("fit")


@pytest.mark.parametrize("count", [1, 5])
def test_all_rows_are_trained_without_validation(count: int) -> None:
    rows = [conversation(f"Q{index}", "A") for index in range(count)]
    Path("all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, recorder = _data("all.jsonl", val_fraction=0, batch_size=1), Recorder()
    kept = ModelCheckpoint("kept")
    trainer = _trainer(max_epochs=2, callbacks=[InitialValidation(), kept])
    trainer.fit(recorder, datamodule=data)
    assert trainer.global_step == 2 * count
    assert Path(kept.best_model_path).name == f"epoch=1-step={2 * count}.ckpt"
    assert not trainer_events.validates(trainer)
    assert (data.val_dataloader(), data.validates) == ([], False)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_without_rows_is_refused(chats: str, stage: str) -> None:
    split = "validation" if stage == "validate" else "test"
    message = rf'There are no rows to {stage}: val_fraction=0, and no data set has a split "{split}"\.'
    with pytest.raises(ValueError, match=message):
        getattr(_trainer(), stage)(Recorder(), datamodule=_data(chats, val_fraction=0))


def test_a_split_of_one_data_set_is_validated_although_no_other_is_divided(chats: str) -> None:
    for split, count in (("train", 3), ("validation", 2)):
        lines = "".join(json.dumps(conversation(f"Q{index}", "A")) + "\n" for index in range(count))
        Path(f"{split}.jsonl").write_text(lines)
    data = _data([chats, "[tv]*.jsonl"], val_fraction=0)
    data.setup("fit")
    assert [[len(part) for part in data.examples[split]] for split in ("train", "validation")] == [[40, 3], [2]]
    assert sum(len(batch["input_ids"]) for batch in data.val_dataloader()) == 2


@pytest.mark.parametrize(
    "callback",
    [ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_accuracy"), ProTrainCheckpoint(monitor="val_loss")],
)
def test_a_monitor_of_validation_is_refused_before_training_without_rows(
    chats: str, callback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    network = CausalLMModule(config={"model_type": "llama", **sizes})
    message = rf"^{type(callback).__name__} has monitor='val_\w+', but there are no validation rows"
    with pytest.raises(ValueError, match=message):
        _trainer(max_steps=1, callbacks=[callback]).fit(network, datamodule=_data(chats, val_fraction=0))
    assert network.model is None


def test_own_roles_may_be_trained(chats: str) -> None:
    boundaries = [
        {"role": "critic", "start": "<c>"},
        {"role": "assistant", "start": "<a>"},
        {"role": "user", "start": "<u>"},
    ]
    data = {"path": chats, "roles": {"reviewer": "critic"}}
    made = ChatDataModule(data, role_boundaries=boundaries, roles_to_train=["critic"])
    assert made.settings[0].options.roles == ("critic",)


def test_what_became_of_the_data_is_told_once(chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = conversation("".join(map(chr, range(33, 127))), "y")
    Path(chats).write_text(Path(chats).read_text() + json.dumps(long) + "\n")
    told: list[str] = []
    monkeypatch.setattr(module, "rank_zero_info", told.append)
    data = _data(chats, val_fraction=0.03)
    data.setup("fit")
    data.setup("fit")
    assert [text.partition(" conv")[0].rpartition("/")[2] for text in told] == [
        "chats.jsonl, train: 39",
        "chats.jsonl, validation: 1",
    ]
    assert "1 dropped (1 no trained token lies within max_length)" in told[0]
    assert [report.num_dropped for report in data.reports] == [1, 0]


def test_several_data_sets_with_their_own_knobs(chats: str, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(conversation(f"Q{i}", f"A{i}", f"B{i}")) + "\n" for i in range(6)))
    specs = [
        DatasetSpec(chats, max_rows=10),
        DatasetSpec(str(other), train_on_eos="none", train_on="last_turn", repeat=3),
    ]
    data = ChatDataModule(specs, vocab_size=300, max_length=64, batch_size=4, val_fraction=0.2, cache_dir="cache")
    data.prepare_data()
    data.setup("fit")
    first, second = data.examples["train"]
    kept = [data.tokenizer.decode(one.input_ids[one.trained].tolist()) for one in second]
    assert all(text[0] == "B" and "<" not in text for text in kept)
    assert all("<|im_end|>" in data.tokenizer.decode(one.input_ids[one.trained].tolist()) for one in first)
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    assert max(batch["input_ids"].shape[1] for batch in batches) == data.longest_row() <= 64
    seen = sum(len(batch["input_ids"]) for batch in data.train_dataloader())
    assert seen == len(first) + 3 * len(second)
    assert [report.name.rpartition("/")[2] for report in data.reports] == [
        *("chats.jsonl, train", "other.jsonl, train"),
        *("chats.jsonl, validation", "other.jsonl, validation"),
    ]


def test_a_data_set_in_python_may_be_a_path_or_what_yaml_says(chats: str) -> None:
    knobs = {"path": chats, "max_rows": 3, "train_on": "last_turn"}
    expected = DatasetSpec(path=chats, max_rows=3, train_on="last_turn")
    assert ChatDataModule(knobs).specs == [expected]
    given = [Path(chats), knobs, {**knobs, "path": Path(chats)}, DatasetSpec(path=[Path(chats)])]
    assert ChatDataModule(given).specs == [DatasetSpec(path=chats), expected, expected, DatasetSpec(path=[chats])]


def test_a_fit_with_a_tokenizer_of_mistral_common(chats: str, mistral_folder: str) -> None:
    """A tokenizer of mistral-common has no Jinja template, and its control tokens have no text."""
    data = _data(chats, tokenizer=mistral_folder, num_workers=0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = CausalLMModule(config={"model_type": "mistral", "num_key_value_heads": 1, **sizes}, learning_rate=0.1)
    trainer = _trainer(max_steps=2, limit_val_batches=1)
    trainer.fit(model, datamodule=data)
    assert trainer.global_step == 2
    assert model.model.config.vocab_size == len(data.tokenizer) == 131072
    assert {report.family for report in data.reports} == {"mistral"}
    encoded = data.examples["train"][0][0]
    assert data.tokenizer.decode(encoded.input_ids[encoded.trained].tolist()).endswith("Done.</s>")
    (shown,) = data.show(1)
    assert [piece.text.strip() for piece in shown.pieces if piece.kind == "marker"][-1] == "</s>"
    assert "".join(piece.text for piece in shown.pieces).replace(" ", "").startswith("<s>[INST]What")


@pytest.mark.parametrize(("packing", "workers"), [(False, 2), (True, 0)])
def test_a_fit_goes_on_in_mid_epoch(chats: str, tmp_path: Path, packing: bool, workers: int) -> None:
    options: dict[str, Any] = {"packing": packing, "max_length": 128 if packing else 64, "batch_size": 2}
    whole = Recorder()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = _trainer(max_epochs=2, callbacks=[keep])
    trainer.fit(whole, datamodule=_data(chats, **options))
    resumed = Recorder()
    data = _data(chats, **options, num_workers=workers)
    _trainer(max_epochs=2).fit(resumed, datamodule=data, ckpt_path=tmp_path / "step=2.ckpt")
    assert len(whole.seen[0]) > 2
    assert _equal(resumed.seen[0], whole.seen[0][2:])
    assert _equal(resumed.seen[1], whole.seen[1])


def _texts(data: ChatDataModule, batches: list[dict[str, Tensor]]) -> list[str]:
    return [data.tokenizer.decode(row) for batch in batches for row in batch["input_ids"]]


@pytest.mark.filterwarnings("ignore:Evaluator. data set 'beside' has no trained token")
@pytest.mark.parametrize(("strategy", "saver"), [("auto", ModelCheckpoint), ("protrain", ProTrainCheckpoint)])
def test_a_run_keeps_the_date_of_its_first_start(
    chats: str, tmp_path: Path, strategy: str, saver: type[ModelCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Evaluated(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.val_metrics = MetricCollection({})

    options: dict[str, Any] = {"chat_template": DATED}
    set_today(monkeypatch, "2026-09-30")
    whole = Evaluated()
    keep = saver(tmp_path / "all", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    _trainer(max_epochs=1, callbacks=[keep], strategy=strategy).fit(whole, datamodule=_data(chats, **options))
    set_today(monkeypatch, "2026-10-01")
    Path("cache").rename("elsewhere")
    encode, encoded = module.encode_rows, list[str]()
    monkeypatch.setattr(module, "encode_rows", lambda *given: encoded.append(given[2]) or encode(*given))
    resumed, data, beside = Evaluated(), _data(chats, **options), _data(chats, **options)
    callbacks = [Evaluator({"beside": beside}), saver(tmp_path / "all", filename="{step}")]
    trainer = _trainer(max_epochs=1, callbacks=callbacks, strategy=strategy)
    trainer.fit(resumed, datamodule=data, ckpt_path=tmp_path / "all" / "step=2.ckpt")
    assert _equal(resumed.seen[0], whole.seen[0][2:])
    assert len(encoded) == 2, "the tokens of another day would be made in vain"
    evaluated = [beside.tokenizer.decode(one.input_ids) for one in beside.examples["validation"][0]]
    texts = [*_texts(data, resumed.seen[0]), *evaluated, data.tokenizer.decode(data.prompt_ids("Hello"))]
    assert all("Today is 30 September 2026." in text for text in texts)
    anew = _data(chats, **options)
    anew.setup("fit")
    assert all("Today is 1 October 2026." in text for text in _texts(anew, _batches(anew.train_dataloader())))


@pytest.mark.parametrize("before", [False, True])
def test_the_date_of_a_checkpoint_replaces_that_of_the_set_up(
    chats: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_today(monkeypatch, "2026-09-30")
    first = _data(chats, chat_template=DATED)
    first.setup("fit")
    set_today(monkeypatch, "2026-10-01")
    second = _data(chats, chat_template=DATED)
    if before:
        second.load_state_dict(first.state_dict())
    second.setup("fit")
    second.load_state_dict(first.state_dict())
    assert second.reports == first.reports
    assert second.state_dict()["chat_format"]["day"] == "2026-09-30"
    loaders = (first.train_dataloader(), second.train_dataloader()), (first.val_dataloader(), second.val_dataloader())
    assert all(_equal(_batches(one), _batches(other)) for one, other in loaders)


@pytest.mark.parametrize("saver", [ModelCheckpoint, ProTrainCheckpoint])
def test_another_template_is_refused_in_mid_epoch(chats: str, tmp_path: Path, saver: type[ModelCheckpoint]) -> None:
    other = CHAT_TEMPLATE.replace("<|im_end|>'", "<|im_end|>\\n'")
    keep = saver(tmp_path / "mid", every_n_train_steps=2)
    _trainer(max_steps=2, callbacks=[keep], limit_val_batches=0).fit(Recorder(), datamodule=_data(chats))
    (path,) = (tmp_path / "mid").glob("*.ckpt")
    trainer = _trainer(max_epochs=2, callbacks=[saver(tmp_path / "other")])
    with pytest.raises(ValueError, match=r"^The chat template of this run is not the one that the checkpoint was"):
        trainer.fit(Recorder(), datamodule=_data(chats, chat_template=other), ckpt_path=path)


def test_another_template_is_named_at_the_end_of_an_epoch(chats: str) -> None:
    first, second = _data(chats), _data(chats, chat_template=DATED)
    first.setup("fit")
    second.setup("fit")
    assert _batches(first.train_dataloader())
    with pytest.warns(UserWarning, match="The saved model will have the template of this run"):
        second.load_state_dict(first.state_dict())
    same = _data(chats, chat_template=CHAT_TEMPLATE)  # that of the tokenizer
    same.setup("fit")
    same.load_state_dict(first.state_dict())


def test_a_checkpoint_of_other_data_is_refused_in_mid_epoch(chats: str, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    _trainer(max_steps=2, callbacks=[keep]).fit(Recorder(), datamodule=_data(chats))
    with pytest.raises(ValueError, match="seed was 0 and is 5"):
        _trainer(max_epochs=1).fit(Recorder(), datamodule=_data(chats, seed=5), ckpt_path=tmp_path / "step=2.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length=0: give at least 1"),
        ({"batch_size": 0}, "batch_size=0: give at least 1"),
        ({"seed": [1]}, r"seed=\[1\]: give at least 0"),
        ({"chat_template": 3}, "chat_template=3: give text or a path, or None"),
        ({"chat_template": Path("no.jinja")}, "chat_template=.*no.jinja.* is not a file"),
        ({"processor_kwargs": 3}, "processor_kwargs=3: give a mapping, or None"),
        ({"val_fraction": -0.1}, "val_fraction=-0.1: give a share from 0 to below 1; 0 trains on all rows"),
        ({"val_fraction": 1.0}, "val_fraction=1.0: give a share from 0 to below 1"),
        ({"roles_to_train": ["asistant"]}, "roles_to_train: 'asistant' is unknown. Did you mean 'assistant'?"),
        (
            {"dataset": {"path": "x.jsonl", "roles_to_train": ["user", "tols"]}},
            "roles_to_train: 'tols' is unknown. Did you mean 'tool'?",
        ),
        (
            {"dataset": {"path": "x.jsonl", "roles": {"bot": "asistant"}}},
            "roles: 'asistant' is unknown. Did you mean 'assistant'?",
        ),
        ({"dataset": []}, "`dataset` is empty"),
        ({"dataset": {"path": "x.jsonl", "max_row": 3}}, "dataset: 'max_row' is unknown. Did you mean 'max_rows'"),
        ({"dataset": [{"path": {"path": "x.jsonl"}}]}, "path={'path': 'x.jsonl'}: give text or a list of texts"),
        ({"dataset": 5}, "path=5: give text or a list of texts"),
        ({"train_on_eos": "every"}, "train_on_eos must be one of turn, all, last, none, got 'every'"),
        ({"train_on": "first"}, "train_on must be one of all, last_turn, got 'first'"),
        ({"on_untrainable": "skip"}, "on_untrainable must be one of error, drop, warn, got 'skip'"),
        ({"roles_to_train": []}, "roles_to_train is an empty list, so nothing would be trained"),
        ({"role_boundaries": []}, "role_boundaries is an empty list, so nothing would be trained"),
        ({"role_boundaries": [{"role": "user"}]}, "role_boundaries"),
        ({"family": "chatlm"}, "no chat family 'chatlm'.*Did you mean 'chatml'"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatDataModule(**options)


def _scored(batches: list[dict[str, Tensor]]) -> list[list[int]]:
    """The trained tokens of each row that has any."""
    rows = [row[row != -100].tolist() for batch in batches for row in batch["labels"]]
    return [row for row in rows if row]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 11])
def test_ranks_evaluate_every_row_once(
    chats: str, monkeypatch: pytest.MonkeyPatch, world_size: int, batch_size: int
) -> None:
    data = _data(chats, batch_size=batch_size)
    data.setup("validate")
    expected = _scored(_batches(data.val_dataloader()))
    data.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    monkeypatch.setattr(Trainer, "world_size", world_size)
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr(Trainer, "global_rank", rank)
        shares.append(_batches(data.val_dataloader()))
    assert len({len(share) for share in shares}) == 1
    assert len(expected) == 8
    for rank, share in enumerate(shares):
        assert _scored(share) == expected[rank::world_size]


class Writer(Recorder):
    """Writes down what a rank evaluates."""

    def on_test_start(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.batches.append(batch)

    def on_test_end(self) -> None:
        found = [len(self.batches), _scored(self.batches)]
        Path(f"rank{self.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_two_processes_evaluate_every_row_once(chats: str, use_distributed_sampler: bool) -> None:
    """Seven rows: Lightning's own sampler would make them eight."""
    data = _data(chats, batch_size=2, val_fraction=7 / 40)
    data.setup("test")
    expected = _scored(_batches(data.test_dataloader()))
    assert len(expected) == 7
    _trainer(devices=2, strategy="ddp_fork", use_distributed_sampler=use_distributed_sampler).test(
        Writer(), datamodule=_data(chats, batch_size=2, val_fraction=7 / 40), verbose=False
    )
    found = [json.loads(Path(f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [count for count, _ in found] == [2, 2]
    assert [rows for _, rows in found] == [expected[::2], expected[1::2]]
