"""Rows that are read when asked for, and the check that comes before."""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_protrain.data.conversation import MalformedRow
from lightning_protrain.data.sources.dataset import (
    MAX_EXAMPLES,
    ConversationRows,
    MalformedRows,
    check_fields,
    read_rows,
)
from lightning_protrain.data.sources.row_kinds import RowFormat
from lightning_protrain.data.sources.tables import ArrowTable, JsonLines, RowList
from tests.data.conftest import conversation

GOOD = [conversation(str(i), "x") for i in range(6)]
BAD: dict[str, Any] = {"messages": None}


def _table(rows: list[Any], name: str = "a") -> RowList:
    return RowList(rows, name, Path())


def _read(*tables: Any, fields: dict[str, str] | None = None, **options: Any) -> ConversationRows:
    return read_rows(tables, RowFormat(fields=fields or {}), "'a', split train", **options)


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 0, 4], [0, 6], [6, 0], [1] * 6])
def test_tables_lie_end_to_end(sizes: list[int]) -> None:
    stops = np.cumsum(sizes)
    tables = [
        _table(GOOD[stop - size : stop], f"t{n}") for n, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    ]
    rows = _read(*tables)
    assert list(rows) == GOOD == [rows[index] for index in range(6)]
    assert len(rows) == 6
    expected = [f"t{number}, row {row}" for number, size in enumerate(sizes) for row in range(size)]
    assert [rows.where(index) for index in range(6)] == expected


@given(cut=st.slices(6))
def test_a_slice_is_a_list(cut: slice) -> None:
    assert _read(_table(GOOD))[cut] == GOOD[cut]


def test_places_from_the_end_and_beyond() -> None:
    rows = _read(_table(GOOD))
    assert rows[-1] == GOOD[-1]
    with pytest.raises(IndexError):
        rows[6]


@pytest.mark.parametrize("indices", [[], [0], [5, 0, 5], np.array([1, 2]), range(3)])
def test_selected_rows(indices: Any) -> None:
    rows = _read(_table(GOOD))
    chosen = rows.select(indices)
    assert list(chosen) == [GOOD[index] for index in indices]
    assert chosen.tables is rows.tables


def test_rows_are_read_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table(list(GOOD))
    rows = _read(table)
    table.rows[2] = conversation("new", "x")
    assert rows[2] == conversation("new", "x")
    read: list[int] = []
    monkeypatch.setattr(RowList, "raw", lambda self, index: read.append(index) or self.rows[index])
    assert rows.select([4])[0] == GOOD[4]
    assert read == [4]


def test_they_can_be_sent_to_workers() -> None:
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    rows = _read(
        JsonLines(Path("a.jsonl").absolute()), _table(GOOD[:1]), ArrowTable(Dataset.from_list(GOOD), "b", Path())
    )
    assert list(pickle.loads(pickle.dumps(rows.select([7, 6, 0])))) == [GOOD[0], GOOD[0], GOOD[0]]


def test_the_first_malformed_row_is_an_error() -> None:
    with pytest.raises(MalformedRow, match=r"^b, row 1: `messages` is null.*`on_malformed: skip` leaves such rows out"):
        _read(_table(GOOD, "a"), _table([GOOD[0], BAD, {}], "b"))


@pytest.mark.parametrize("num_bad", [1, 4, 5, 6, 20])
def test_malformed_rows_are_counted_and_left_out(num_bad: int) -> None:
    table = _table([*GOOD[:2], *[BAD] * num_bad, *GOOD[2:]])
    with pytest.warns(UserWarning, match=f"Left out {num_bad} of {6 + num_bad} rows of 'a', split t") as seen:
        rows = _read(table, on_malformed="skip")
    assert len(seen) == 1
    assert list(rows) == GOOD
    assert rows.malformed.count == num_bad
    names = [f"a, row {number}: " for number in range(2, 2 + min(num_bad, MAX_EXAMPLES))]
    assert len(rows.malformed.examples) == len(names)
    assert all(example.startswith(name) for example, name in zip(rows.malformed.examples, names, strict=True))
    assert all(f"\n  {example}" in str(seen[0].message) for example in rows.malformed.examples)
    assert rows.where(2) == f"a, row {2 + num_bad}"


def test_good_rows_need_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert _read(_table(GOOD), on_malformed="skip").malformed == MalformedRows(0, ())
    assert not recwarn.list


def test_nothing_but_malformed_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"(?s)No row of 'a', split train .* 7 rows are malformed.*a, row 4: [^\n]*$"):
        _read(_table([BAD] * 7), on_malformed="skip")


@pytest.mark.parametrize("tables", [[], [[]], [[], []]])
def test_no_rows_are_an_error(tables: list[Any]) -> None:
    with pytest.raises(ValueError, match="'a', split train has no rows"):
        _read(*map(_table, tables))


def test_the_first_good_rows_are_enough() -> None:
    assert list(_read(_table(GOOD), max_rows=4)) == GOOD[:4]
    assert list(_read(_table(GOOD), max_rows=9)) == GOOD
    assert list(_read(_table([*GOOD, BAD]), max_rows=6)) == GOOD
    with pytest.warns(UserWarning, match="Left out 1 of 3 rows"):
        assert list(_read(_table([BAD, *GOOD, BAD]), max_rows=2, on_malformed="skip")) == GOOD[:2]


def test_every_row_may_have_its_own_format(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"messages": GOOD[0]["messages"]},
        {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "x"}]},
        {"prompt": "2", "response": "x"},
        {"instruction": "3", "output": "x"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert list(_read(JsonLines(path))) == GOOD[:4]
    path.write_text(path.read_text() + json.dumps({**lines[0], **lines[1]}) + "\n")
    with pytest.raises(
        MalformedRow, match=r"a\.jsonl, line 5: several columns may hold the conversation: messages, conversations"
    ):
        _read(JsonLines(path))


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"images": "picture"}, "'picture'"),
        ({"train": "trian", "tools": "tool"}, "'tool', 'trian'"),
        ({"messages": "messages", "name": "speaker"}, "'speaker'"),
    ],
)
def test_a_name_that_occurs_nowhere_is_an_error(fields: dict[str, str], missing: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`fields` names {missing}, which no row of 'a' has")):
        check_fields(fields, [_table(GOOD), _table([BAD])], "'a'")


def test_the_nearest_column_is_named() -> None:
    with pytest.raises(ValueError, match=r"Correct the name \(the nearest is 'messages'\), or remove it\."):
        check_fields({"tools": "massages"}, [_table(GOOD)], "'a'")


def test_a_name_that_occurs_once_is_right() -> None:
    marked = {"messages": [GOOD[0]["messages"][0], {**GOOD[0]["messages"][1], "learn": False}], "tooling": None}
    fields = {"train": "learn", "tools": "tooling"}
    check_fields(fields, [_table([*GOOD, 3]), _table([marked])], "'a'")
    rows = _read(_table([*GOOD, marked]), fields=fields)
    assert rows[6]["messages"][1]["train"] is False


def _png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("image", [b"no image", "absent.png", {"bytes": None, "path": "absent.png"}])
def test_an_image_that_does_not_open_makes_a_row_malformed(image: Any) -> None:
    def row(image: Any) -> dict[str, Any]:
        return {"question": "Why?", "answer": "So.", "image": image}

    table = _table([row(_png()), row(image)])
    with pytest.raises(MalformedRow, match=r"a, row 1, image 0 \(.*\) does not open"):
        _read(table)
    with pytest.warns(UserWarning, match="Left out 1 of 2 rows"):
        assert len(_read(table, on_malformed="skip")) == 1


def test_many_rows_show_a_bar_and_leave_no_thread() -> None:
    rows = _read(_table(GOOD[:1] * 20_001))
    assert len(rows) == 20_001


CALL = {"type": "function", "id": "1", "function": {"name": "get", "arguments": {"city": "Rome"}}}
OTHER = {"type": "function", "function": {"name": "put", "arguments": {"rows": [1, 2], "dry": True}}}
SCHEMA = {"type": "function", "function": {"name": "get", "parameters": {"properties": {"city": {"type": "string"}}}}}
KINDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "hm"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "20", "tool_call_id": "1", "name": "get"},
            {"role": "assistant", "content": "b", "train": False, "weight": 0.5},
        ],
        "tools": [SCHEMA, {"type": "function", "function": {"name": "put", "parameters": {"required": ["rows"]}}}],
    },
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [OTHER]}]},
]


@pytest.mark.parametrize(
    ("column", "variables"),
    [({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1}), *((empty, None) for empty in (None, {}, "", "{}"))],
)
def test_variables_of_the_template(column: Any, variables: Any) -> None:
    row = RowFormat().parse({**GOOD[0], "chat_template_kwargs": column}, "a", Path())
    assert row.get("template_kwargs") == variables


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1], "is a list. Give an object"),
        ("{", "is not valid JSON"),
        ({"tokenize": True}, "names 'tokenize', which is not a variable"),
    ],
)
def test_variables_that_are_none_are_refused(column: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=f"a: `chat_template_kwargs` {message}"):
        RowFormat().parse({**GOOD[0], "chat_template_kwargs": column}, "a", Path())


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
def test_what_arrow_fills_in_is_taken_out_again(rows: list[dict[str, Any]]) -> None:
    table = ArrowTable(Dataset.from_list([{"tools": None, **row} for row in rows]), "a", Path())
    assert list(_read(table)) == rows == list(_read(_table(rows)))
