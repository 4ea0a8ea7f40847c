"""Every note, page and heading that sources or pages refer to exists, once."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import lightning_protrain

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "LOG.md",
        *(ROOT / "docs").rglob("*.md"),
    )
}
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("lightning_protrain", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__).resolve()
}
# A note begins its line, with nothing or a sentence behind it; what is cited stands within a sentence.
BEGUN = re.compile(r"^[ \t]*(?:# )?\[Note: ([^\]\n]+)\](?:$| [A-Z])", re.MULTILINE)
CITED = re.compile(r"\[Note:\s+([^\]]+)\]")
CITED_ON_A_PAGE = re.compile(r"`([\w/]+\.py)`, \*([^*]+)\*|\[Note: ([^\]]+)\] in `([\w/]+\.py)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def wrong_notes(sources: Mapping[str, str], pages: Mapping[str, str]) -> list[str]:
    """Notes that there are twice, and those that are cited and not there."""
    begun = Counter((path, name) for path, text in sources.items() for name in BEGUN.findall(text))
    times = Counter(name for path, name in begun.elements())
    wrong = [f"[Note: {name}] begins {count} times" for name, count in times.items() if count > 1]
    for path, text in (*sources.items(), *pages.items()):
        names = {" ".join(name.replace("#", " ").split()) for name in CITED.findall(text)}
        wrong += [f"{path}: there is no [Note: {name}]" for name in sorted(names) if name not in times]
    for path, text in pages.items():
        for source, name, other_name, other_source in CITED_ON_A_PAGE.findall(" ".join(text.split())):
            if not any(
                where.endswith(f"/{source or other_source}") for where, its in begun if its == (name or other_name)
            ):
                wrong.append(f"{path}: {source or other_source} has no [Note: {name or other_name}]")
    return wrong


def headings(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    for title in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        found[re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")] += 1
    return {f"{name}-{number}" if number else name for name, count in found.items() for number in range(count)}


def dead_links(pages: Mapping[str, str]) -> list[str]:
    """Links to files that are not in the repository, and to headings that are not on the page."""
    dead = []
    for path, text in pages.items():
        for link in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            file, _, heading = link.partition("#")
            target = (ROOT / path).parent / file if file else ROOT / path
            if re.match(r"https?://", link):
                continue
            page = target.resolve().relative_to(ROOT).as_posix()
            if not target.exists() or (heading and heading not in headings(pages[page])):
                dead.append(f"{path}: {link}")
    return dead


def missing_files(pages: Mapping[str, str]) -> list[str]:
    """Python files that a page names in backticks and that are neither in the repository nor in the package."""
    package = ROOT / "lightning_protrain"
    return [
        f"{path}: {name}"
        for path, text in pages.items()
        for name in re.findall(r"`((?:[\w.-]+/)*\w+\.py)`", text)
        if not (ROOT / name).exists() and not any(package.rglob(name))
    ]


def test_a_note_is_there_once() -> None:
    assert wrong_notes(SOURCES, PAGES) == []


def test_links_lead_somewhere() -> None:
    assert dead_links(PAGES) == []


def test_the_navigation_lists_every_page_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    listed = re.findall(r"[\w/-]+\.md$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(path.removeprefix("docs/") for path in PAGES if path.startswith("docs/"))


def test_the_reference_lists_every_public_name_once() -> None:
    public = PAGES["docs/reference/api.md"].partition("\n## Names of submodules")[0]
    listed = re.findall(r"^::: lightning_protrain\.(?:\w+\.)*(\w+)$", public, re.MULTILINE)
    assert sorted(listed) == sorted(set(lightning_protrain.__all__) - {"__version__"})


def test_the_reference_shows_every_config() -> None:
    shown = re.findall(r'^--8<-- "configs/(.+)"$', PAGES["docs/reference/yaml.md"], re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "configs").iterdir())


# Pages beside tasks: the entrance, answers, words and results.
NO_TASKS = {"index", "faq", "glossary", "benchmarks", "gpu", "largest", "published-runs", "learned", "changelog"}


def test_a_task_page_begins_with_what_to_do() -> None:
    pages = {path: text for path, text in PAGES.items() if re.fullmatch(r"docs/[\w-]+\.md", path)}
    tasks = {path: text.partition("\n## ")[0] for path, text in pages.items() if Path(path).stem not in NO_TASKS}
    assert len(tasks) > 15
    assert [path for path, begin in tasks.items() if "```" not in begin] == []


def test_every_page_on_how_it_works_has_a_picture() -> None:
    pages = {path: text for path, text in PAGES.items() if path.startswith("docs/how/")}
    assert [path for path, text in pages.items() if not re.search(r"^```mermaid$|^!\[", text, re.MULTILINE)] == []


def test_the_picture_is_what_its_program_draws() -> None:
    program = runpy.run_path(str(ROOT / "docs" / "pictures" / "step.py"))
    drawn = program["picture"](program["schedule"]())
    assert (ROOT / "docs" / "pictures" / "step.svg").read_text(encoding="utf-8") == drawn


def test_files_that_pages_name_are_there() -> None:
    assert missing_files(PAGES) == []
    assert missing_files({"page.md": "`runtime/chunk.py`, `tests/conftest.py`, `runtime/chunks.py`"}) == [
        "page.md: runtime/chunks.py"
    ]


@pytest.mark.parametrize(
    ("source", "page", "wrong"),
    [
        ('"""[Note: One]."""\n[Note: One]\n', "[Note: One] in `a.py`", []),
        ("[Note: One]\n# [Note: One] Here.\n", "", ["[Note: One] begins 2 times"]),
        ("# See [Note: One\n# more].\n", "", ["lightning/a.py: there is no [Note: One more]"]),
        ("[Note: One]\n", "`b.py`, *One*", ["page.md: b.py has no [Note: One]"]),
        ("[Note: One]\n", "[Note: One] in\n`b.py`", ["page.md: b.py has no [Note: One]"]),
    ],
)
def test_a_planted_note_is_found(source: str, page: str, wrong: list[str]) -> None:
    assert wrong_notes({"lightning/a.py": source}, {"page.md": page}) == wrong


@pytest.mark.parametrize(
    ("link", "dead"),
    [("#b-c", 0), ("#b-c-1", 0), ("README.md", 0), ("https://a.b/c", 0), ("#a", 1), ("#b-c-2", 1), ("nowhere.md", 1)],
)
def test_a_planted_link_is_found(link: str, dead: int) -> None:
    page = f"# `B` [c](README.md)!\n\n```\n# a\n```\n\n## b c\n\n[d]({link})\n"
    assert len(dead_links({"README.md": page})) == dead
