"""Batches of plain text, and of answers that were judged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_protrain import CausalLMModule, ChatDataModule, Evaluator, PreferenceModule
from lightning_protrain.data.batches import encode
from lightning_protrain.data.batches.encode_text import TextEncoder
from lightning_protrain.data.batches.loader import BatchRows, count_trained
from tests.support.trainers import SILENT

TEXTS = [f"Text {i} is about {'this and ' * (i % 5)}that. " * (1 + i % 3) for i in range(30)]


def _write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _save(tokenizer: PreTrainedTokenizerFast, folder: Path, template: bool) -> str:
    tokenizer.save_pretrained(folder)
    if not template:
        (folder / "chat_template.jinja").unlink()
    return str(folder)


@pytest.fixture
def plain(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    """A tokenizer without a chat template."""
    return _save(tokenizer, tmp_path / "plain", template=False)


@pytest.fixture
def chatty(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    """The same tokenizer with a chat template."""
    return _save(tokenizer, tmp_path / "chatty", template=True)


def _data(path: Any, tokenizer: str, tmp_path: Path, **options: Any) -> ChatDataModule:
    options = {"max_length": 32, "batch_size": 2, "val_fraction": 0, "cache_dir": str(tmp_path / "cache"), **options}
    data = ChatDataModule(path, tokenizer, **options)
    data.setup("fit")
    return data


def _tokenizer(data: ChatDataModule) -> Any:
    return data.tokenizer


def _spoken(data: ChatDataModule, row: torch.Tensor) -> str:
    return _tokenizer(data).decode(row[row != -100].tolist())


# Plain text


@pytest.mark.parametrize("max_length", [7, 32, 10_000])
@pytest.mark.parametrize("packing", [None, False])
def test_every_token_of_a_document_is_trained_once(
    plain: str, tmp_path: Path, max_length: int, packing: bool | None
) -> None:
    data = _data(_write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), plain, tmp_path)
    data = _data(data.specs[0].path, plain, tmp_path, max_length=max_length, packing=packing)
    batches = [*data.train_dataloader()]
    assert all(("position_ids" in batch) == (packing is None) for batch in batches)
    assert max(batch["input_ids"].shape[1] for batch in batches) <= max_length
    trained = Counter(label for batch in batches for label in batch["labels"][batch["labels"] != -100].tolist())
    ids = [[*_tokenizer(data)(text)["input_ids"], _tokenizer(data).eos_token_id] for text in TEXTS]
    # Nothing is before the first token of a document, so nothing predicts it.
    assert trained == Counter(token for document in ids for token in document[1:])
    (report,) = data.reports
    assert (report.unit, report.num_kept, report.num_trained) == ("document", 30, sum(trained.values()))
    assert "30 documents" in report.describe()


def test_attention_does_not_cross_the_borders_of_documents(plain: str, tmp_path: Path) -> None:
    data = _data(_write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), plain, tmp_path, max_length=120)
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    module = CausalLMModule(config={**config, "num_attention_heads": 2, "vocab_size": len(_tokenizer(data))})
    module.configure_model()
    batch = next(iter(data.train_dataloader()))
    begins = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(begins) > 2
    border = begins[1]

    def logits(ids: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(input_ids=ids, position_ids=batch["position_ids"]).logits[0]

    changed = batch["input_ids"].clone()
    changed[0, :border] = (changed[0, :border] + 1) % 256
    before, after = logits(batch["input_ids"]), logits(changed)
    assert torch.equal(before[border:], after[border:])
    assert not torch.equal(before[:border], after[:border])  # the change is felt where it is


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"prompt": "2 + 2 =", "completion": " 4"}, " 4<|im_end|>"),
        # A space and the word after it are one token, and the prompt ends between them.
        ({"prompt": "What is 3 ", "completion": "plus 3?"}, "plus 3?<|im_end|>"),
        ({"prompt": "", "completion": "The sum is 4."}, " sum is 4.<|im_end|>"),  # nothing predicts the first token
    ],
)
def test_a_completion_is_trained_after_its_prompt(plain: str, tmp_path: Path, row: Any, trained: str) -> None:
    data = _data(_write(tmp_path / "a.jsonl", [row]), plain, tmp_path)
    (batch,) = data.train_dataloader()
    assert _spoken(data, batch["labels"][0]) == trained
    prompt = _tokenizer(data)(row["prompt"])["input_ids"]
    assert batch["input_ids"][0, : len(prompt)].tolist() == prompt == data.prompt_ids(row["prompt"])
    assert data.end_ids == [_tokenizer(data).eos_token_id]
    assert data.reports[0].unit == "completion"


def test_a_completion_is_a_chat_if_the_tokenizer_has_a_template(chatty: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [{"prompt": "Why?", "completion": "So."}])
    (batch,) = _data(path, chatty, tmp_path).train_dataloader()
    data = _data(path, chatty, tmp_path)
    assert "<|im_start|>user" in _tokenizer(data).decode(batch["input_ids"][0])
    assert _spoken(data, batch["labels"][0]) == "So.<|im_end|>"
    spec = {"path": path, "format": "completion"}
    data = _data(spec, chatty, tmp_path)
    (batch,) = data.train_dataloader()
    assert "<|im_start|>" not in _tokenizer(data).decode(batch["input_ids"][0])


def test_messages_need_a_chat_template(plain: str, chats: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template, so nothing says how a chat is written"):
        _data(chats, plain, tmp_path)


def test_add_eos_may_be_left_out(plain: str, tmp_path: Path) -> None:
    spec = {"path": _write(tmp_path / "a.jsonl", [{"text": "What is 1"}]), "add_eos": False}
    (batch,) = (data := _data(spec, plain, tmp_path)).train_dataloader()
    assert _tokenizer(data).eos_token_id not in batch["input_ids"]
    assert data.end_ids == []


@pytest.mark.parametrize("appends", [False, True])
def test_begin_and_end_tokens_are_neither_doubled_nor_lost(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, appends: bool
) -> None:
    folder = _save(tokenizer, tmp_path / "plain", template=False)
    saved = json.loads(Path(folder, "tokenizer.json").read_text())
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    pieces: list[Any] = [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pieces += [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}] * appends
    ids = {"<|im_start|>": begin, "<|im_end|>": end}
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": special,
    }
    Path(folder, "tokenizer.json").write_text(json.dumps(saved))
    saved_tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<|im_start|>")
    encoder = TextEncoder(saved_tokenizer)
    for text in ("What is", "<|im_start|>What is", "What is<|im_end|>"):
        ((example,),) = encoder.encode([{"text": text}])
        assert [example.input_ids.tolist().count(token) for token in (begin, end)] == [1, 1]
        assert (example.input_ids[0], example.input_ids[-1]) == (begin, end)
        assert example.num_trained == len(example) - 1
    ((example,), _) = TextEncoder(saved_tokenizer, add_eos=False).encode([{"text": "Why?<|im_end|>"}, {"text": "x"}])
    assert example.input_ids[-1] == end
    # The prompt has an end token, and a token spans the border before an end token.
    rows = [{"prompt": "Why?<|im_end|>", "text": "So."}, {"prompt": "What is 3 ", "text": "plus<|im_end|>"}]
    trained = [saved_tokenizer.decode(row.input_ids[row.trained].tolist()) for row in encoder.encode(rows)]
    assert trained == ["So.<|im_end|>", "plus<|im_end|>"]


def test_a_completion_within_a_word_gets_no_space() -> None:
    vocabulary = {name: number for number, name in enumerate(("<s>", "</s>", "<unk>", *"\u2581abc", "ab"))}
    model = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    (example,) = TextEncoder(tokenizer).encode([{"prompt": "a", "text": "bc"}])
    assert tokenizer.convert_ids_to_tokens(example.input_ids.tolist()) == ["\u2581", "a", "b", "c", "</s>"]
    assert example.num_trained == 3


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = Path(_save(tokenizer, tmp_path / "plain", template=False))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    path = _write(tmp_path / "a.jsonl", [{"text": "x y"}])
    with pytest.raises(ValueError, match=r"no end token to put after plain text\. Set `add_eos` to false"):
        _data(path, str(folder), tmp_path)


def test_empty_documents_are_dropped_and_counted(plain: str, tmp_path: Path) -> None:
    data = _data(_write(tmp_path / "a.jsonl", [{"text": ""}, {"text": "What is 1"}, {"text": ""}]), plain, tmp_path)
    assert data.reports[0].dropped == (("no token is trained", 2),)
    assert "a.jsonl, line 1: no token is trained" in data.reports[0].dropped_rows[0]


def test_a_text_file_is_a_document(plain: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("What is it?\n\nThe sum.\n" * 20)
    data = _data(str(tmp_path / "book.txt"), plain, tmp_path)
    assert data.reports[0].num_kept == 1
    assert len(data.examples["train"][0]) > 1


# Weights


def _origins(data: ChatDataModule) -> Counter[str]:
    text = [_tokenizer(data).decode(row) for batch in data.train_dataloader() for row in batch["input_ids"]]
    return Counter("a" if "in a" in row else "b" for row in text)


def test_weights_are_shares_of_an_epoch(chatty: str, tmp_path: Path) -> None:
    paths = [
        _write(tmp_path / f"{name}.jsonl", [{"prompt": f"{i} in {name}", "completion": "x"} for i in range(count)])
        for name, count in (("a", 12), ("b", 90))
    ]
    specs: Any = [{"path": path, "weight": weight} for path, weight in zip(paths, (0.25, 0.75), strict=True)]
    data = _data(specs, chatty, tmp_path)
    assert _origins(data) == {"a": 30, "b": 90}
    rows = data._epoch_rows([12, 90])
    assert set(Counter(rows[0].tolist()).values()) == {2, 3}  # each row, and none twice more often than another
    again = _data(specs, chatty, tmp_path)
    for first, second in zip(data.train_dataloader(), again.train_dataloader(), strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
    left_out = _data([specs[0] | {"weight": 2}, specs[1] | {"weight": 0}], chatty, tmp_path)
    assert _origins(left_out) == {"a": 12}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((-1, 2), "weight=-1: give a number that is not negative"),
        ((0, 0), "All data sets have weight 0"),
        ((1, None), "has no `weight`, but other data sets have one"),
        ((float("nan"), 1), "weight=nan"),
        (("1", 1), "weight='1'"),
    ],
)
def test_weights_that_say_nothing_are_refused(chats: str, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatDataModule([{"path": chats, "weight": weight} for weight in weights])


# Judged answers

PAIRS = [
    {"prompt": f"What is {i} plus {i}?", "chosen": f"The sum is {2 * i}.", "rejected": f"It is {i} plus."}
    for i in range(7)
]


@pytest.mark.parametrize("template", [True, False])
def test_the_sides_of_a_pair_are_two_rows_of_a_batch(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, template: bool
) -> None:
    folder = _save(tokenizer, tmp_path / "tokenizer", template)
    data = _data(_write(tmp_path / "a.jsonl", PAIRS), folder, tmp_path)
    assert (data.objective, data.packs, data.pair_count("train")) == ("pairs", False, 7)
    loader = data.train_dataloader()
    seen = []
    for batch in loader:
        assert len(batch["input_ids"]) == 2 * len(batch["pair_ids"])
        assert int(batch["trained_tokens"]) == len(batch["pair_ids"])
        for number, pair in enumerate(batch["pair_ids"].tolist()):
            chosen, rejected = batch["labels"][2 * number], batch["labels"][2 * number + 1]
            assert _spoken(data, chosen) == f"{PAIRS[pair]['chosen']}<|im_end|>"
            assert _spoken(data, rejected) == f"{PAIRS[pair]['rejected']}<|im_end|>"
            begin = int((chosen != -100).nonzero()[0])
            sides = batch["input_ids"][2 * number : 2 * number + 2, :begin]
            assert torch.equal(sides[0], sides[1])
            seen.append(pair)
    assert sorted(seen) == [*range(7)]
    assert [pair for batch in data.pair_batches("train") for pair in batch["pair_ids"].tolist()] == [*range(7)]
    assert "7 pairs" in data.reports[0].describe()
    titles = [preview.title.rpartition(".jsonl, ")[2] for preview in data.show(2)]
    assert titles == ["pair 1, chosen", "pair 1, rejected", "pair 2, chosen", "pair 2, rejected"]


def test_a_rank_without_a_pair_gets_one_that_counts_as_nothing(chatty: str, tmp_path: Path) -> None:
    data = _data(_write(tmp_path / "a.jsonl", PAIRS), chatty, tmp_path)
    rows = BatchRows(data._joined("train"), data._blocks("train"))
    batch = data._collator("train")([rows[~0], rows[1]])
    assert batch["pair_ids"].tolist() == [-1, 1]
    assert (batch["labels"][:2] == -100).all()
    assert count_trained([batch]) == 1


def test_the_largest_batch_of_pairs_is_at_least_as_long_as_any(chatty: str, tmp_path: Path) -> None:
    data = _data(_write(tmp_path / "a.jsonl", [*PAIRS, {**PAIRS[0], "rejected": "The sum " * 9}]), chatty, tmp_path)
    largest = data.largest_batch()
    assert largest["input_ids"].shape[0] == 4
    assert largest["input_ids"].shape[1] == max(batch["input_ids"].shape[1] for batch in data.train_dataloader())


def test_pairs_that_say_nothing_are_dropped_and_counted(chatty: str, tmp_path: Path) -> None:
    long = "What is it? " * 60
    rows = [
        *PAIRS,
        {**PAIRS[0], "rejected": PAIRS[0]["chosen"]},
        {"prompt": long, "chosen": "So.", "rejected": "No."},
    ]
    data = _data(_write(tmp_path / "a.jsonl", rows), chatty, tmp_path, max_length=48)
    dropped = dict(data.reports[0].dropped)
    assert data.reports[0].num_kept == 7
    assert dropped == {
        "chosen and rejected are equal within max_length": 1,
        "no trained token lies within max_length": 1,
    }


LABELLED = [
    {"prompt": f"What is {i} plus {i}?", "completion": f"The sum is {i}.", "label": i % 2 == 0} for i in range(5)
]
UNTRAINED = {
    "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "train": False}],
    "label": True,
}


@pytest.mark.parametrize(("at_once", "of_first"), [(3, 1), (512, 4)])
def test_a_labelled_answer_has_another_one_to_the_same_prompt(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, of_first: int
) -> None:
    """It is that of a row that can be trained, and untrainable rows leave their neighbours."""
    monkeypatch.setattr(encode, "_ENCODE_AT_ONCE", at_once)
    rows = [UNTRAINED, *LABELLED[:3], UNTRAINED, LABELLED[3], UNTRAINED, UNTRAINED, UNTRAINED, LABELLED[4]]
    data = _data(_write(tmp_path / "a.jsonl", rows), chatty, tmp_path)
    assert data.objective == "unpaired"
    (report,), (examples,) = data.reports, data.examples["train"]
    assert (report.num_kept, report.num_dropped, len(examples)) == (5, 5, 10)
    assert report.num_tokens == sum(map(len, examples[::2]))
    assert report.num_trained == sum(example.num_trained for example in examples[::2])
    for cached in (data, _data(str(tmp_path / "a.jsonl"), chatty, tmp_path)):
        for batch in cached.train_dataloader():
            for number, (pair, label) in enumerate(zip(batch["pair_ids"], batch["desirable"], strict=True)):
                assert int(label) == (int(pair) % 2 == 0)
                mine, other = batch["labels"][2 * number], batch["labels"][2 * number + 1]
                assert _spoken(data, mine) == f"The sum is {int(pair)}.<|im_end|>"
                assert _spoken(data, other) == f"The sum is {int(pair) - 1 if pair else of_first}.<|im_end|>"
                assert f"What is {int(pair)} plus" in _tokenizer(data).decode(batch["input_ids"][2 * number + 1])


def test_an_untrainable_labelled_answer_is_refused_by_its_line(chatty: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a.jsonl, line 6: no token is trained"):
        _data(_write(tmp_path / "a.jsonl", [*LABELLED, UNTRAINED]), chatty, tmp_path, on_untrainable="error")


def test_validation_rows_may_have_labels_of_one_kind(chatty: str, tmp_path: Path) -> None:
    data = _data(_write(tmp_path / "a.jsonl", LABELLED), chatty, tmp_path, val_fraction=0.05)
    assert [data.pair_count(split) for split in ("train", "validation")] == [4, 1]


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_kind_are_refused(chatty: str, tmp_path: Path, label: bool) -> None:
    rows = [{"prompt": "Why?", "completion": "So.", "label": label}] * 3
    with pytest.raises(
        ValueError, match=f"All 3 labels of .*a.jsonl, train are {str(label).lower()}, so nothing tells"
    ):
        _data(_write(tmp_path / "a.jsonl", rows), chatty, tmp_path)


@pytest.mark.parametrize(("knob", "value"), [("train_on_inputs", True), ("train_on_eos", "all")])
@pytest.mark.parametrize("labelled", [False, True])
def test_options_that_train_prompts_are_refused_for_preferences(
    plain: str, chatty: str, tmp_path: Path, knob: str, value: Any, labelled: bool
) -> None:
    rows = [{"prompt": "Why?", "completion": "So.", "label": at > 0} for at in range(3)] if labelled else PAIRS
    for tokenizer in (plain, chatty):
        with pytest.raises(ValueError, match=f"`{knob}: .*` trains prompts, but of preferences only answers are"):
            _data(_write(tmp_path / "a.jsonl", rows), tokenizer, tmp_path, **{knob: value})


def test_data_sets_with_different_losses_are_refused(chatty: str, chats: str, tmp_path: Path) -> None:
    pairs = _write(tmp_path / "a.jsonl", PAIRS)
    with pytest.raises(ValueError, match=r"has pairs and .*chats.jsonl, train conversations, which have differe"):
        _data([chats, pairs], chatty, tmp_path)
    with pytest.raises(ValueError, match=r"packing: true, but the pairs of .* are not packed"):
        _data(pairs, chatty, tmp_path, packing=True)


def test_text_and_chats_are_trained_together(chatty: str, chats: str, tmp_path: Path) -> None:
    texts = _write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    data = _data([chats, texts], chatty, tmp_path)
    assert (data.objective, data.packs) == ("tokens", False)
    assert [report.unit for report in data.reports] == ["conversation", "document"]
    assert np.isin([_tokenizer(data).eos_token_id], data.end_ids)


# Streams


def test_a_stream_of_text_is_packed_and_every_token_is_trained(plain: str, tmp_path: Path) -> None:
    spec = {"path": _write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), "streaming": True}
    data = _data(spec, plain, tmp_path)
    assert data.packs
    ids = [[*_tokenizer(data)(text)["input_ids"], _tokenizer(data).eos_token_id] for text in TEXTS]
    expected = Counter(token for document in ids for token in document[1:])
    trained: Counter[int] = Counter()
    for batch in data.train_dataloader():
        assert "position_ids" in batch
        trained += Counter(batch["labels"][batch["labels"] != -100].tolist())
        if trained.total() >= expected.total():
            break
    assert trained == expected


def test_streams_of_pairs_are_refused(chatty: str, tmp_path: Path) -> None:
    spec = {"path": _write(tmp_path / "a.jsonl", PAIRS), "streaming": True}
    with pytest.raises(ValueError, match=r"a.jsonl' has pairs, which are not streamed"):
        _data(spec, chatty, tmp_path)


def test_a_row_of_another_kind_in_a_stream_is_refused_by_its_name(plain: str, tmp_path: Path) -> None:
    rows = [*({"text": text} for text in TEXTS * 3), {"prompt": "a", "completion": "b"}]
    data = _data({"path": _write(tmp_path / "a.jsonl", rows), "streaming": True, "format": "auto"}, plain, tmp_path)
    with pytest.raises(ValueError, match=r"a.jsonl, row 90: a conversation, and the first row of the stream is a doc"):
        next(iter(data.train_dataloader()))


# Modules


def _module(kind: type[CausalLMModule], tokenizer: PreTrainedTokenizerFast) -> CausalLMModule:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
    return kind(config={"model_type": "llama", "vocab_size": len(tokenizer), **sizes})


@pytest.mark.parametrize(
    ("kind", "others", "message"),
    [
        (CausalLMModule, PAIRS, "The rows of the data are preferences, which PreferenceModule trains"),
        (
            PreferenceModule,
            [{"prompt": "Why?", "completion": "So."}] * 2,
            "trains on rows with `chosen` and `rejected`",
        ),
    ],
)
@pytest.mark.parametrize("evaluated", [False, True])
def test_rows_for_another_loss_are_refused_before_training(
    tokenizer: PreTrainedTokenizerFast,
    chatty: str,
    tmp_path: Path,
    kind: Any,
    others: Any,
    message: str,
    evaluated: bool,
) -> None:
    wrong = ChatDataModule(_write(tmp_path / "wrong.jsonl", others), chatty, val_fraction=0.5, cache_dir=str(tmp_path))
    right_rows = PAIRS if kind is PreferenceModule else [{"prompt": "Why?", "completion": "So."}] * 4
    right = ChatDataModule(_write(tmp_path / "right.jsonl", right_rows), chatty, cache_dir=str(tmp_path))
    callbacks: Any = [Evaluator({"others": wrong}, every_n_steps=1)] if evaluated else []
    trainer = Trainer(accelerator="cpu", max_steps=1, callbacks=callbacks, **SILENT)
    with pytest.raises(ValueError, match=message):
        trainer.fit(_module(kind, tokenizer), datamodule=right if evaluated else wrong)


def test_an_evaluator_without_a_reference_is_refused_before_training(
    tokenizer: PreTrainedTokenizerFast, chatty: str, tmp_path: Path
) -> None:
    path = _write(tmp_path / "a.jsonl", PAIRS)
    data, others = (ChatDataModule(path, chatty, val_fraction=0.3, cache_dir=str(tmp_path)) for _ in range(2))
    trainer = Trainer(accelerator="cpu", max_steps=1, callbacks=[Evaluator({"others": others})], **SILENT)
    with pytest.raises(ValueError, match="an Evaluator cannot score others"):
        trainer.fit(_module(PreferenceModule, tokenizer), datamodule=data)


def test_a_model_that_cannot_keep_documents_apart_gets_one_a_row(
    tokenizer: PreTrainedTokenizerFast, plain: str, tmp_path: Path
) -> None:
    path = _write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": len(tokenizer)}
    for packing in (None, True):
        data = ChatDataModule(path, plain, max_length=32, packing=packing, cache_dir=str(tmp_path))
        trainer = Trainer(accelerator="cpu", max_steps=1, **SILENT)
        module = CausalLMModule(config={"model_type": "opt", **sizes})
        if packing:
            with pytest.raises(ValueError, match="Packed rows need a model that keeps their segments apart"):
                trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, datamodule=data)
            assert not data.packs
