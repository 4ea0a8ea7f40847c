"""Conversations from the docstrings of Python's standard library: real text that every machine already has."""

from __future__ import annotations

import ast
import inspect
import math
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from lightning_protrain.data.conversations import Conversation

MIN_DOCSTRINGS = 100
# Tests and vendored or generated trees say little about what the library does.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages", "lib-dynload", "_bundled"}
)

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_conversations(
    folder: str | Path | None = None, max_characters: int = 600, max_rows: int | None = None
) -> list[Conversation]:
    """One question and answer per docstring: "What does `json.dumps` do?" and the docstring's first paragraphs.

    The sources are parsed, never imported. The order is that of the sorted paths and of the definitions within a file,
    so equal folders give equal lists. Of equal docstrings only the first stays.

    Args:
        folder: Where the modules lie; None takes the running interpreter's standard library.
        max_characters: Whole paragraphs are taken until this length; a longer first paragraph is cut there, at a word.
        max_rows: Files are read until there are so many, and at least 100; None reads all.

    Raises:
        ValueError: The folder holds fewer than 100 docstrings, as where Python was installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if folder is None else folder)
    answers: dict[str, str] = {}
    enough = math.inf if max_rows is None else max(max_rows, MIN_DOCSTRINGS)
    for path in sorted(_sources(root), key=lambda path: path.parts):
        for name, docstring in _docstrings(path, root):
            answer = _shorten(docstring, max_characters)
            if answer:
                answers.setdefault(answer, name)
        if len(answers) >= enough:
            break
    if len(answers) < MIN_DOCSTRINGS:
        raise ValueError(
            f"Only {len(answers)} docstrings under {root}, at least {MIN_DOCSTRINGS} are needed. Install Python with "
            "the sources of its standard library, or give `dataset` the path of a .jsonl file."
        )
    return [
        {
            "messages": [
                {"role": "user", "content": f"What does `{name}` do?"},
                {"role": "assistant", "content": answer},
            ]
        }
        for answer, name in answers.items()
    ]


def _sources(root: Path) -> Iterator[Path]:
    """The modules below `root`; skipped folders, the largest of all, are not even listed."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _docstrings(path: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring of the module at `path` and of its functions, classes and methods."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    parts = path.relative_to(root).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    yield from _walk(tree, module)


def _walk(node: _Documented, name: str) -> Iterator[tuple[str, str]]:
    docstring = ast.get_docstring(node, clean=False)
    if docstring:
        yield name, docstring
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _walk(child, f"{name}.{child.name}")


def _shorten(docstring: str, max_characters: int) -> str:
    """Whole paragraphs of the cleaned docstring up to `max_characters`, or the start of the first one."""
    text = inspect.cleandoc(docstring).strip()
    if len(text) <= max_characters:
        return text
    head = text[: max_characters + 1]
    end = head.rfind("\n\n")
    if end <= 0:
        end = max(head.rfind(" "), head.rfind("\n"))
    return text[:end].rstrip() if end > 0 else text[:max_characters]
