"""Files as tables: what is read from them, and what is wrong with them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import tqdm
from datasets import Dataset, Features, List, Value
from pyarrow import parquet

from lightning_protrain.data.conversation import MalformedRow
from lightning_protrain.data.sources.tables import ArrowTable, JsonLines, RowList, Table, open_table
from tests.data.conftest import conversation

ROWS = [conversation(str(i), "x") for i in range(3)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of `datasets` in the test's folder; its bars would leave the monitor thread of tqdm behind."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _write(content: bytes, name: str = "a.jsonl") -> Path:
    path = Path(name).absolute()
    path.write_bytes(content)
    return path


def _rows(table: Table) -> list[Any]:
    """All rows, after looking at them in both ways."""
    alone = [table.decode(table.raw(index), table.where(index)) for index in range(len(table))]
    assert [table.decode(raw, table.where(index)) for index, raw in enumerate(table.raws())] == alone
    return alone


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.rstrip(b"\n"),
        LINES.replace(b"\n", b"\r\n"),
        LINES.replace(b"\n", b"\n\n \n"),
        b"\n\n" + LINES + b"\n \n",
        b"\xef\xbb\xbf" + LINES,
        b"\xef\xbb\xbf\n" + LINES,
        b"  " + LINES,
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_one_object_per_line(name: str, content: bytes) -> None:
    table = open_table(_write(content, name))
    assert isinstance(table, JsonLines)
    assert _rows(table) == ROWS
    assert table.folder == Path.cwd()


def test_lines_are_counted_from_one_and_empty_ones_count() -> None:
    table = open_table(_write(b"\n" + LINES.replace(b"\n", b"\n\n")))
    assert [table.where(index) for index in range(3)] == [f"{Path.cwd() / 'a.jsonl'}, line {n}" for n in (2, 4, 6)]


@pytest.mark.parametrize("text", ["\u2028\u2029\x0b\x0c\x85\x1c", "\u00e4\u6f22\U0001f600", "\r"])
def test_only_line_feeds_end_a_line(text: str) -> None:
    row = conversation(text, "x")
    assert _rows(open_table(_write(json.dumps(row, ensure_ascii=False).encode()))) == [row]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON .*Write one JSON object per line"),
        (b"nothing", "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "not valid JSON .Extra data"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": "\x00"}', "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "caf\xe9"}', r"not UTF-8 \(byte 0xe9 at 10\). Save the file as UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', r"not UTF-8 \(byte 0xed at 7\)"),
        (b'{"a": "\\ud800"}', r"the lone surrogate \\ud800"),
        (b'{"\\uDFFF": 1}', r"the lone surrogate \\udfff"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(line: bytes, message: str) -> None:
    table = open_table(_write(LINES + line + b"\n" + LINES))
    raws = list(table.raws())
    assert raws[3] == table.raw(3)
    with pytest.raises(MalformedRow, match=rf"a\.jsonl, line 4: .*{message}"):
        table.decode(raws[3], table.where(3))
    assert [table.decode(raw, "") for raw in (*raws[:3], *raws[4:])] == ROWS * 2


def test_both_halves_of_a_surrogate_pair_are_one_character() -> None:
    assert _rows(open_table(_write(b'{"a": "\\ud83d\\ude00"}'))) == [{"a": "\U0001f600"}]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_last_line_that_is_cut_off(cut: int) -> None:
    table = open_table(_write(LINES[: -1 - cut]))
    with pytest.raises(MalformedRow, match=r"line 3: not valid JSON .*The last line is truncated"):
        table.decode(table.raw(2), table.where(2))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl is empty \(0 bytes\)"),
        ("a.json", b"", r"a\.json is empty \(0 bytes\)"),
        ("a.parquet", b"", r"a\.parquet is empty \(0 bytes\)"),
        ("a.jsonl", json.dumps(ROWS).encode(), "holds a JSON array, not one JSON object per line. Rename it to .json"),
        ("a.jsonl", json.dumps(ROWS, indent=1).encode(), "holds a JSON array"),
        ("a.jsonl", b"\xef\xbb\xbf [\n{}]", "holds a JSON array"),
        ("a.jsonl", json.dumps(ROWS[0]["messages"]).encode() + b"\n", r'write \{"messages": \[\.\.\.\]\} in each line'),
        ("a.jsonl", LINES.decode().encode("utf-16"), "is not UTF-8 but UTF-16 or binary"),
        ("a.jsonl", LINES.decode().encode("utf-16-be"), "is not UTF-8 but UTF-16 or binary"),
        ("a.json", json.dumps(ROWS).encode("utf-16"), "a.json is not UTF-8"),
        ("a.json", b'[{"a": "caf\xe9"}]', r"is not UTF-8 \(byte 11\)"),
        ("a.json", json.dumps(ROWS[0], indent=1).encode(), "neither a JSON array of rows nor one JSON object per line"),
        ("a.json", b"[{}", "neither a JSON array of rows nor"),
        ("a.json", b"x", "neither a JSON array of rows nor"),
        ("a.json", b"[" * 100_000, "neither a JSON array of rows nor"),
        ("a.json", b" \n", "neither a JSON array of rows nor"),
        ("a.parquet", b"x" * 100, "The Parquet file .*cannot be read"),
        ("a.parquet", b"PAR1" + b"x" * 100 + b"PAR1", "The Parquet file .*cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(name: str, content: bytes, message: str) -> None:
    path = _write(content, name)
    with pytest.raises(ValueError, match=message):
        open_table(path)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_json_array(indent: int | None, bom: bytes) -> None:
    table = open_table(_write(bom + json.dumps(ROWS, indent=indent).encode(), "a.json"))
    assert isinstance(table, RowList)
    assert _rows(table) == ROWS
    assert table.where(2) == f"{Path.cwd() / 'a.json'}, row 2"


def test_half_of_a_surrogate_pair_in_an_array_is_named() -> None:
    table = open_table(_write(b'[{"a": 1}, {"a": "\\uD800"}]', "a.json"))
    assert table.decode(table.raw(0), "") == {"a": 1}
    with pytest.raises(MalformedRow, match=r"row 1: the text has the lone surrogate \\ud800"):
        table.decode(table.raw(1), "row 1")


def test_a_parquet_file_is_memory_mapped() -> None:
    Dataset.from_list(ROWS).to_parquet("a.parquet")
    table = open_table(Path("a.parquet").absolute())
    assert isinstance(table, ArrowTable)
    assert table.dataset.cache_files, "the rows must lie in a file"
    assert _rows(table) == ROWS
    assert table.where(1) == f"{Path.cwd() / 'a.parquet'}, row 1"


def test_a_parquet_file_that_is_replaced_is_read_again() -> None:
    for rows in (ROWS, ROWS[::-1]):
        Dataset.from_list(rows).to_parquet("a.parquet")
        os.utime("a.parquet", (1e9, 1e9))
        assert _rows(open_table(Path("a.parquet"))) == rows


def test_images_stay_encoded() -> None:
    features = Features({"images": List(datasets.Image()), "image": datasets.Image()})
    rows = [{"images": [{"bytes": b"not an image", "path": None}], "image": {"bytes": None, "path": "a.png"}}]
    table = ArrowTable(Dataset.from_list(rows, features=features), "x", Path())
    assert _rows(table) == [{"images": [{"bytes": b"not an image"}], "image": {"path": "a.png"}}]


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets has no Json feature")
def test_json_columns_are_decoded_and_keep_their_nulls() -> None:
    json_feature = datasets.Json()
    features = Features(
        {
            "a": json_feature,
            "b": List(json_feature),
            "c": {"d": json_feature, "e": Value("string")},
            "f": Value("int64"),
        }
    )
    row = {"a": {"x": None}, "b": [{"y": None}, 3], "c": {"d": [None], "e": "z"}, "f": 1}
    empty = {"a": None, "b": None, "c": None, "f": None}
    table = ArrowTable(Dataset.from_list([row, empty], features=features), "x", Path())
    assert _rows(table)[0] == row
    assert not any(_rows(table)[1].values())


def test_opening_lines_keeps_no_text() -> None:
    table = open_table(_write(LINES * 1000))
    assert len(table) == 3000
    assert len(pickle.dumps(table)) < len(LINES) * 1000 / 3


def test_a_key_that_stands_twice_loses_nothing_in_silence(tmp_path: Path) -> None:
    text = '{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}'
    table = JsonLines(_written(tmp_path / "a.jsonl", text + "\n"))
    with pytest.raises(MalformedRow, match=r"a.jsonl, line 1: .*an object has the key 'role' 2 times, keep one"):
        table.decode(table.raw(0), table.where(0))
    with pytest.raises(ValueError, match=r"a.json .*an object has the key 'role' 2 times"):
        open_table(_written(tmp_path / "a.json", f"[{text}]"))


def test_lines_that_end_in_a_carriage_return(tmp_path: Path) -> None:
    crlf = open_table(_written(tmp_path / "crlf.jsonl", '{"a": 1}\r\n{"a": 2}\r\n'))
    assert [crlf.decode(raw, "x") for raw in crlf.raws()] == [{"a": 1}, {"a": 2}]
    alone = open_table(_written(tmp_path / "cr.jsonl", '{"a": 1}\r{"a": 2}\r'))
    with pytest.raises(MalformedRow, match=r"cr.jsonl, line 1.*end in a carriage return alone: save the file with"):
        alone.decode(alone.raw(0), alone.where(0))


def _written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), r"Name\(prompt\) in prompt: string"),
        (pa.table({"prompt": pa.array([], pa.string())}), "must be greater than 0, got 0"),
    ],
)
def test_parquet_that_cannot_be_read_says_why(tmp_path: Path, table: Any, why: str) -> None:
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        ValueError,
        match=rf"The Parquet file .*a.parquet cannot be read: .*{why}. Write it again, with rows, and with distinct",
    ):
        open_table(tmp_path / "a.parquet")
