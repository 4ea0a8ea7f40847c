"""Everything that a data set may be named by."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import tqdm
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetNotFoundError
from PIL import Image

from lightning_protrain.data.conversation import Conversation, MalformedRow, Media
from lightning_protrain.data.sources import load
from lightning_protrain.data.sources.dataset import ConversationRows
from lightning_protrain.data.sources.load import Source
from lightning_protrain.data.sources.spec import DatasetSpec
from tests.data.conftest import conversation

ROWS = [conversation(str(i), "x") for i in range(3)]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of `datasets` in the test's folder; its bars would leave the monitor thread of tqdm behind."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _splits(dataset: Any, trained_roles: Sequence[str] | None = ("assistant",)) -> dict[str, ConversationRows]:
    return Source(dataset, trained_roles).splits


def _listed(splits: Mapping[str, ConversationRows]) -> dict[str, list[Conversation]]:
    return {name: list(rows) for name, rows in splits.items()}


def _load(path: Any, **options: Any) -> dict[str, list[Conversation]]:
    return _listed(_splits(DatasetSpec(path=path, **options)))


def _write(name: str, rows: list[Any]) -> str:
    """A file of the kind that its suffix says, in the test's folder."""
    path = Path(name).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _saved(**splits: list[Any]) -> str:
    DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk("saved")
    return str(Path("saved").absolute())


def test_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "stdlib_conversations", lambda **_: ROWS)
    assert _listed(_splits("stdlib")) == {"train": ROWS}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_file(suffix: str) -> None:
    path = _write(f"chats.{suffix}", ROWS)
    assert _listed(_splits(path)) == _load(path) == {"train": ROWS}
    assert _load([path]) == {"train": ROWS}
    assert _listed(_splits(f"chats.{suffix}")) == {"train": ROWS}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_folder_of_files(suffix: str) -> None:
    for number, row in enumerate(ROWS):
        _write(f"test-data/part-{number}.{suffix}", [row])
    _write("test-data/.cache/old.jsonl", [{}])
    if suffix != "json":
        Path("test-data/dataset_info.json").write_text("{}")
    assert _load("test-data") == {"train": ROWS}
    assert _load(f"test-data/*.{suffix}" if suffix != "json" else "test-data/part*.json") == {"train": ROWS}


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "validation.jsonl", "test.jsonl"),
        ("train-00000-of-00001.jsonl", "val-00000.jsonl", "test_00000.jsonl"),
        ("chats.jsonl", "chats_dev.jsonl", "chats.test.jsonl"),
        ("train/a.jsonl", "valid/a.jsonl", "test/a.jsonl"),
        ("train/sub/a.jsonl", "validation/sub/b.jsonl", "test/sub/c.jsonl"),
        ("latest.jsonl", "VALIDATION.jsonl", "Test.jsonl"),
    ],
)
@pytest.mark.parametrize("path", ["test_train", "test_train/**"])
def test_files_of_a_folder_name_their_splits(path: str, names: tuple[str, ...]) -> None:
    for name, row in zip(names, ROWS, strict=True):
        _write(f"test_train/{name}", [row])
    expected = {"train": ROWS[:1], "validation": ROWS[1:2], "test": ROWS[2:]}
    assert _load(path) == expected
    assert _load(path, split="test") == {"train": ROWS[2:]}
    assert _load(path, split={"train": "validation", "test": "train"}) == {"train": ROWS[1:2], "test": ROWS[:1]}


def test_a_file_without_a_split_beside_others_is_refused() -> None:
    for name, row in zip(("train", "test", "more"), ROWS, strict=True):
        _write(f"chats/{name}.jsonl", [row])
    with pytest.raises(ValueError, match=r"chats: chats/more\.jsonl names no split, but others do"):
        _load("chats")
    assert _load([f"chats/{name}.jsonl" for name in ("train", "test", "more")]) == {"train": ROWS}
    assert _load(["chats/t*.jsonl", "chats/more.jsonl"]) == {"train": [ROWS[1], ROWS[0], ROWS[2]]}


def test_files_of_different_kinds_in_a_list() -> None:
    paths = [_write(f"a.{suffix}", [row]) for suffix, row in zip(("jsonl", "json", "parquet"), ROWS, strict=True)]
    assert _load(paths) == {"train": ROWS}


@pytest.mark.parametrize(
    ("path", "unread"),
    [("chats", "b.JSONL, chats/c.jsonl.gz, chats/d.json, chats/e.csv"), ("chats/[abc].*", "b.JSONL, chats/c.jsonl.gz")],
)
def test_files_of_data_that_are_not_read_are_named(path: str, unread: str) -> None:
    _write("chats/a.jsonl", ROWS)
    for name in ("b.JSONL", "c.jsonl.gz", "e.csv", "notes.txt", "README.md", "dataset_info.json"):
        Path("chats", name).write_text("x")
    _write("chats/d.json", ROWS)
    with pytest.warns(UserWarning, match=rf"Left out of '{re.escape(path)}': chats/{unread}\. \.jsonl, "):
        assert _load(path) == {"train": ROWS}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_path_with_the_signs_of_a_glob_is_that_file(suffix: str, streaming: bool) -> None:
    path = _write(f"chats [v1]/x[1].{suffix}", ROWS)
    _write(f"chats [v1]/x1.{suffix}", ROWS[:1])
    spec = DatasetSpec(path, streaming=streaming)
    assert load.missing_files(spec) == []
    source = Source(spec, ("assistant",))
    tables = source.shards if streaming else source.tables["train"]
    assert sum(len([*table.raws()]) for table in tables) == len(ROWS)


def test_files_of_two_kinds_in_a_folder_are_refused() -> None:
    _write("chats/a.jsonl", ROWS)
    _write("chats/b.parquet", ROWS)
    with pytest.raises(ValueError, match=r"chats has both \.jsonl and \.parquet files"):
        _load("chats")


def test_a_saved_dataset() -> None:
    Dataset.from_list(ROWS).add_column("id", [1, 2, 3]).save_to_disk("saved")
    splits = _splits("saved")
    assert _listed(splits) == {"train": ROWS}
    assert splits["train"].tables[0].dataset.cache_files, "the rows must lie in a file"


def test_a_saved_dataset_with_splits_keeps_those_it_knows() -> None:
    parts = {"train": ROWS[:1], "validation": ROWS[1:2], "test": ROWS[2:]}
    assert _load(_saved(**parts, extra=ROWS)) == parts


@pytest.mark.parametrize("name", ["val", "valid", "dev"])
def test_other_names_of_validation(name: str) -> None:
    assert _load(_saved(train=ROWS, **{name: ROWS[:1]})) == {"train": ROWS, "validation": ROWS[:1]}
    assert _load(_saved(train=ROWS, validation=ROWS[1:], **{name: ROWS[:1]}))["validation"] == ROWS[1:]


def test_splits_of_other_names_are_named_by_the_user() -> None:
    path = _saved(train_sft=ROWS[:2], test_sft=ROWS[2:])
    with pytest.raises(ValueError, match=r"splits \['test_sft', 'train_sft'\], none of them is called \"train\""):
        _load(path)
    assert _load(path, split="train_sft") == {"train": ROWS[:2]}
    both = {"train": "train_sft", "validation": "test_sft"}
    assert _load(path, split=both) == {"train": ROWS[:2], "validation": ROWS[2:]}
    with pytest.raises(ValueError, match=r"has no split 'sft', but \['test_sft', 'train_sft'\]. Correct `split`"):
        _load(path, split="sft")


@pytest.mark.parametrize("split", ["train", {"train": "train"}])
@pytest.mark.parametrize("path", ["chats.jsonl", ["chats.jsonl"], "stdlib"])
def test_a_file_has_no_splits(path: Any, split: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "stdlib_conversations", lambda **_: ROWS)
    _write("chats.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"has no splits: all of it is trained on"):
        _load(path, split=split)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("a.jsonl", r"a\.jsonl, line 3, message 0: the role is 'bot'"),
        ("a.json", r"a\.json, row 2, message 0: the role is 'bot'"),
        ("a.parquet", r"a\.parquet, row 2, message 0: the role is 'bot'"),
        ("saved", "saved, split train, row 2, message 0: the role is 'bot'"),
    ],
)
def test_a_bad_row_is_named(name: str, where: str) -> None:
    rows = [*ROWS[:2], {"messages": [{"role": "bot", "content": "x"}, ROWS[0]["messages"][1]]}]
    path = _saved(train=rows) if name == "saved" else _write(name, rows)
    with pytest.raises(MalformedRow, match=where):
        _splits(path)
    with pytest.warns(UserWarning, match=r"Left out 1 of 3 rows of .*, split train"):
        assert _load(path, on_malformed="skip") == {"train": ROWS[:2]}
    assert _load(path, roles={"bot": "user"})["train"][2]["messages"][0] == {"role": "user", "content": "x"}


@pytest.mark.parametrize("name", ["no/such/file.jsonl", "a/b/c", "no*.jsonl", "~/nothing.parquet", "a b", "x.json"])
def test_an_unknown_name_is_refused(name: str) -> None:
    for path in (name, [name]):
        with pytest.raises(ValueError) as raised:
            _load(path)
        assert str(raised.value).startswith(f'No data set {name!r}. Give "stdlib"')


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was not written by `datasets.Dataset.save_to_disk` and has no .jsonl"):
        _splits(str(tmp_path))


def test_a_broken_saved_dataset_is_refused() -> None:
    path = _saved(train=ROWS)
    (Path(path) / "train" / "dataset_info.json").unlink()
    with pytest.raises(ValueError, match=r"saved was written by `datasets.Dataset.save_to_disk` but is broken"):
        _splits(path)


def test_the_first_rows_of_each_split() -> None:
    assert _load(_saved(train=ROWS, test=ROWS[1:]), max_rows=1) == {"train": ROWS[:1], "test": ROWS[1:2]}


def test_columns_are_renamed() -> None:
    path = _write("a.jsonl", [{"q": "0", "a": "x"}])
    assert _load(path, fields={"prompt": "q", "response": "a"}) == {"train": ROWS[:1]}
    with pytest.raises(MalformedRow, match="several columns may hold the conversation"):
        _load(_write("b.jsonl", [{"q": "0", "a": "x", "prompt": "1", "response": "y", **ROWS[0]}]))


def test_a_column_that_is_named_may_be_in_one_split_or_late_in_a_stream() -> None:
    _write("data/train.jsonl", [{**ROWS[0], "sys": "Be kind."}, ROWS[1]])
    _write("data/validation.jsonl", ROWS[2:])
    first = _load("data", fields={"system": "sys"})["train"][0]
    assert first["messages"][0] == {"role": "system", "content": "Be kind."}
    with pytest.raises(ValueError, match=r"`fields` names 'syst', .* \(the nearest is 'sys'\)"):
        _load("data", fields={"system": "syst"})
    spec = {"path": _write("b.jsonl", [3, *ROWS]), "streaming": True, "on_malformed": "skip"}
    with pytest.warns(UserWarning, match="Left out 1 of 4 rows"):
        assert [*Source({**spec, "fields": {"system": "sys"}}, None).first_rows] == ROWS


@pytest.mark.parametrize(
    ("options", "default", "allowed"),
    [
        ({}, ("assistant",), False),
        ({}, ("assistant", "user"), True),
        ({}, None, True),
        ({}, (), True),
        ({"train_on_inputs": True}, ("assistant",), True),
        ({"train_on_inputs": False}, ("assistant",), False),
        ({"roles_to_train": ["user"]}, ("assistant",), True),
        ({"roles_to_train": ["tool"]}, None, False),
        ({"roles_to_train": []}, ("assistant",), True),
    ],
)
def test_a_row_needs_a_turn_to_learn(options: dict[str, Any], default: Any, allowed: bool) -> None:
    row = {"messages": ROWS[0]["messages"][:1]}
    spec = DatasetSpec(path=_write("a.jsonl", [row]), **options)
    if allowed:
        assert _listed(_splits(spec, default)) == {"train": [row]}
    else:
        with pytest.raises(MalformedRow, match="so nothing to learn"):
            _splits(spec, default)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved"])
def test_paths_of_images_begin_in_the_folder_of_the_data(kind: str, tmp_path: Path) -> None:
    row = {"question": "Why?", "answer": "So.", "image": "a.png"}
    path = _saved(train=[row]) if kind == "saved" else _write(f"chats/a.{kind}", [row])
    folder = Path(path) if kind == "saved" else Path(path).parent
    with pytest.raises(MalformedRow, match=r"row 0, image 0 \(|line 1, image 0 \("):
        _splits(path)
    Image.new("RGB", (2, 2)).save(folder / "a.png")
    assert _load(path)["train"][0]["media"] == [Media("image", str(folder / "a.png"))]
    (tmp_path / "elsewhere").mkdir()
    (folder / "a.png").rename(tmp_path / "elsewhere" / "a.png")
    assert _load(path, images_dir="elsewhere")["train"][0]["media"] == [Media("image", "elsewhere/a.png")]
    with pytest.raises(ValueError, match="images_dir='nowhere' is no folder"):
        _load(path, images_dir="nowhere")


def test_images_within_parquet() -> None:
    images = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    answer = ROWS[0]["messages"][1]
    rows = [
        {"images": images[:count], "messages": [{"role": "user", "content": "<image>" * count}, answer]}
        for count in (1, 2)
    ]
    path = _write("a.parquet", rows)
    read = _load(path)["train"]
    assert [len(row["media"]) for row in read] == [1, 2]
    sources = [one.source for row in read for one in row["media"]]
    assert all(isinstance(source, bytes) and source.startswith(b"\x89PNG") for source in sources)


def _hub(monkeypatch: pytest.MonkeyPatch, **splits: list[Any]) -> list[Any]:
    """A hub that has one data set, "someone/chats"; returns what it is asked for."""
    asked: list[Any] = []

    def load_dataset(path: str, **options: Any) -> Any:
        asked.append((path, options))
        if path != "someone/chats":
            raise DatasetNotFoundError(f"Dataset '{path}' doesn't exist")
        loaded = {name: Dataset.from_list(rows) for name, rows in splits.items()}
        if options["split"] is None:
            return DatasetDict(loaded)
        name = options["split"].partition("[")[0]
        if name not in loaded:
            raise ValueError(f"Unknown split {name!r}. Should be one of {list(loaded)}.")
        return loaded[name].select(range(1)) if "[" in options["split"] else loaded[name]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _hub(monkeypatch, train=ROWS, test=ROWS[:1])
    assert _load("someone/chats", name="small", revision="v1") == {"train": ROWS, "test": ROWS[:1]}
    assert asked == [("someone/chats", {"name": "small", "revision": "v1", "split": None})]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train_sft", {"train": ROWS}),
        ("train_sft[:10%]", {"train": ROWS[:1]}),
        ({"train": "train_sft", "validation": "test_sft"}, {"train": ROWS, "validation": ROWS[1:]}),
    ],
)
def test_splits_of_the_hub(monkeypatch: pytest.MonkeyPatch, split: Any, expected: Any) -> None:
    _hub(monkeypatch, train_sft=ROWS, test_sft=ROWS[1:])
    assert _load("someone/chats", split=split) == expected


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        (
            "someone/other",
            None,
            r"^The data set 'someone/other' of the Hugging Face Hub cannot be read: Dataset 'someone/other' doesn't",
        ),
        ("someone/chats", "sft", r"cannot be read: Unknown split 'sft'"),
        ("someone/chats", None, r"none of them is called \"train\""),
        ("someone/chats", {"train": "sft"}, r"someone/chats has no split 'sft', but \['train_sft'\]"),
    ],
)
def test_what_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch, path: str, split: Any, message: str) -> None:
    _hub(monkeypatch, train_sft=ROWS)
    with pytest.raises(ValueError, match=message):
        _load(path, split=split)


def test_a_bad_row_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _hub(monkeypatch, train=[ROWS[0], {"messages": []}])
    with pytest.raises(MalformedRow, match=r"^someone/chats, small, split train, row 1: no `messages` list"):
        _load("someone/chats", name="small")


def test_name_and_revision_are_for_the_hub_alone() -> None:
    path = _write("a.jsonl", ROWS)
    for option in ("name", "revision"):
        with pytest.raises(ValueError, match=f"{option}='x' is for data sets of the Hub"):
            _load(path, **{option: "x"})


@pytest.mark.parametrize(
    ("name", "kind", "advice"),
    [
        ("rows", "a file without a suffix", "Convert it, or rename it"),
        ("a.csv", "a .csv file", "Convert it in Python: "),
        ("a.tsv", "a .tsv file", "Convert it in Python: "),
        ("a.xlsx", "a .xlsx file", "Convert it in Python: pandas.read_excel"),
        ("a.jsonl.zst", "a .jsonl.zst file", "Unpack it: zstd -d '"),
    ],
)
def test_a_file_of_another_kind_is_not_called_missing(tmp_path: Path, name: str, kind: str, advice: str) -> None:
    (tmp_path / name).write_text("prompt{0}response\na{0}b\n".format("\t" if ".tsv" in name else ","))
    said = rf"{name}' is {kind}: .jsonl, .json, .parquet, .txt files are read. {advice}"
    with pytest.raises(ValueError, match=said) as raised:
        _splits(str(tmp_path / name))
    if name in ("a.csv", "a.tsv"):
        exec(str(raised.value).partition("in Python: ")[2])
        assert list(map(json.loads, (tmp_path / f"{name}.jsonl").open())) == [{"prompt": "a", "response": "b"}]


def test_a_packed_file_is_read_once_it_is_unpacked_as_advised(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() + b"\n"))
    with pytest.raises(ValueError, match=r"a .jsonl.gz file: .* Unpack it: gunzip -k") as raised:
        _load(str(path))
    subprocess.run(shlex.split(str(raised.value).partition("Unpack it: ")[2]), check=True)
    assert _load(str(tmp_path / "a.jsonl")) == {"train": ROWS[:1]}


def test_the_nearest_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"^No data set '.*/chat.jsonl'; the nearest is '.*/chats.jsonl'. Give"):
        _load(str(tmp_path / "chat.jsonl"))


@pytest.mark.slow
def test_lines_of_text_need_no_datasets_library(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    program = (
        "import sys\n"
        "sys.modules['datasets'] = sys.modules['pandas'] = sys.modules['pyarrow'] = None\n"
        "from lightning_protrain.data.sources.load import Source\n"
        f"print(len(Source({str(path)!r}, None).splits['train']))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == f"{len(ROWS)}\n", result.stderr
