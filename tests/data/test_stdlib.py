"""Docstrings of a made-up library and of the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_protrain.data.sources import load
from lightning_protrain.data.sources.load import stdlib_conversations

SOURCE = '''"""Module text."""
raise SystemExit("imported")

def function():
    """Function text.

    Second paragraph.
    """

async def coroutine():
    "Coroutine \\d text."

class Outer:
    """Outer text."""
    def method(self):
        """Method text."""
        def inner():
            """Inner text."""
    class Nested:
        def method(self):
            """Nested method text."""

def silent(): ...
def copied():
    """Method text."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load, "MIN_DOCSTRINGS", 1)
    root = tmp_path / "lib"
    for path, text in {
        "b/__init__.py": SOURCE,
        "a.py": '"""A text."""',
        "broken.py": '"""Broken."""\ndef f(:',
        "binary.py": "\0",
        "latin.py": "# -*- coding: latin-1 -*-\n" + '"""Latin text."""',
        "notes.txt": '"""No text."""',
        **{f"{skipped}/module.py": f'"""{skipped}."""' for skipped in load.SKIPPED_FOLDERS},
        "b/test/deep.py": '"""Deep test."""',
        "config-3.11-x86/build.py": '"""Config."""',
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_modules_functions_classes_and_methods_are_found_by_name(library: Path) -> None:
    found = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in stdlib_conversations(library)}
    assert found == {
        "What does `a` do?": "A text.",
        "What does `b` do?": "Module text.",
        "What does `b.function` do?": "Function text.\n\nSecond paragraph.",
        "What does `b.coroutine` do?": "Coroutine \\d text.",
        "What does `b.Outer` do?": "Outer text.",
        "What does `b.Outer.method` do?": "Method text.",
        "What does `b.Outer.Nested.method` do?": "Nested method text.",
        "What does `latin` do?": "Latin text.",
    }


def test_rows_are_in_the_format_of_conversations(library: Path) -> None:
    rows = stdlib_conversations(library)
    assert [[message["role"] for message in row["messages"]] for row in rows] == [["user", "assistant"]] * len(rows)
    assert rows == stdlib_conversations(str(library))


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("One.\n\nTwo.", 100, "One.\n\nTwo."),
        ("One.\n\nTwo.", 10, "One.\n\nTwo."),
        ("One.\n\nTwo.", 9, "One."),
        ("One.\n\nTwo.\n\nThree is long.", 15, "One.\n\nTwo."),
        ("One two three", 9, "One two"),
        ("One two three", 7, "One two"),
        ("Unbreakable", 4, "Unbr"),
        ("  \n  Indented\n    more\n  less\n", 100, "Indented\n  more\nless"),
        ("   \n ", 100, ""),
    ],
)
def test_long_docstrings_keep_whole_paragraphs_or_words(text: str, limit: int, expected: str) -> None:
    assert load._shorten(text, limit) == expected


def test_a_library_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text('"""One text."""')
    with pytest.raises(ValueError, match=f"Only 1 docstrings under {tmp_path}, at least 100"):
        stdlib_conversations(tmp_path)


@pytest.mark.parametrize("max_rows", [1, 100, 130])
def test_files_are_read_until_there_are_enough_rows(tmp_path: Path, max_rows: int) -> None:
    for number in range(20):
        functions = "".join(f'def f{i}():\n    """Does {number}.{i}."""\n' for i in range(10))
        (tmp_path / f"m{number:02}.py").write_text(functions)
    rows = stdlib_conversations(tmp_path, max_rows=max_rows)
    assert len(rows) == max(100, max_rows)
    assert rows == stdlib_conversations(tmp_path)[: len(rows)]


def test_the_real_library_is_parsed_and_not_imported() -> None:
    before = set(sys.modules)
    rows = stdlib_conversations(max_rows=1000)
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(rows) >= 1000
    assert len(set(answers)) == len(answers)
    assert max(map(len, answers)) <= 600
    assert any(row["messages"][0]["content"] == "What does `ast.literal_eval` do?" for row in rows)
    assert not {"antigravity", "this", "turtledemo"} & (set(sys.modules) - before)
