"""The package keeps its own rules, and every rule catches a planted violation."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import architecture
from tests.architecture import PACKAGE, RULES, Finding, Source

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_SOURCES = tuple(
    Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
)
# Distribution to import name, where they differ.
IMPORT_NAMES = {"pyyaml": "yaml", "pillow": "PIL"}


def _find(rule: Callable[[Source], Iterator[Finding]], source: Source) -> list[str]:
    return [f"{source.path}:{line} {message}" for line, message in rule(source)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Source], Iterator[Finding]]) -> None:
    findings = [finding for source in PACKAGE_SOURCES for finding in _find(rule, source)]
    assert not findings, "\n".join(findings)


def test_the_package_and_its_console_script_have_no_import_cycle() -> None:
    script = ROOT / "lightning_protrain_command.py"
    sources = (*PACKAGE_SOURCES, Source(script.name, script.read_text(encoding="utf-8")))
    assert architecture.import_cycle(sources) == []


def test_the_package_has_no_crumbs_and_no_name_twice() -> None:
    assert architecture.crumbs(PACKAGE_SOURCES) == []
    assert architecture.repeated_names(PACKAGE_SOURCES) == []


def test_files_name_few_modules_and_functions_take_few_arguments() -> None:
    assert architecture.differences(architecture.fan_out(PACKAGE_SOURCES), architecture.MORE_MODULES) == []
    found = architecture.long_argument_lists(PACKAGE_SOURCES)
    assert architecture.differences(found, architecture.MORE_ARGUMENTS) == []


def test_flat_keywords_are_there_and_many() -> None:
    names = {f"{source.module}.{name}" for source in PACKAGE_SOURCES for name in _qualified_names(source.tree)}
    assert names.issuperset(architecture.FLAT_KEYWORDS)


def _qualified_names(tree: ast.AST, owner: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield f"{owner}{node.name}"
            yield from _qualified_names(node, f"{owner}{node.name}.")


def _declared_packages() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["bnb"], *extras["plots"], *extras["tensorboard"]]
    names = [re.split(r"[\s<>=!\[]", requirement)[0].lower() for requirement in requirements]
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_every_third_party_import_is_a_declared_dependency() -> None:
    declared = _declared_packages() | sys.stdlib_module_names
    findings = [
        f"{source.path}:{line} {message}"
        for source in PACKAGE_SOURCES
        for line, message in architecture.undeclared_imports(source, declared)
    ]
    assert not findings, "\n".join(findings)
    assert set(architecture.OPTIONAL_IMPORTS) <= declared


def test_test_files_are_ascii_and_in_packages() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    sources = [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    findings = [finding for source in sources for finding in _find(architecture.text_is_ascii, source)]
    # Without an `__init__.py`, two tests could not share a name.
    findings += [str(path) for path in paths if not (path.parent / "__init__.py").is_file()]
    assert not findings, "\n".join(findings)


DOC = '"""Doc."""\n'
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * architecture.MAX_FUNCTION_LINES
VIOLATIONS: list[tuple[Callable[[Source], Iterator[Finding]], str, str]] = [
    (architecture.imports_run_one_way, "planner/plan.py", "from lightning_protrain.runtime.apply import apply_plan"),
    (architecture.imports_run_one_way, "planner/plan.py", "from lightning_protrain.runtime import apply"),
    (architecture.imports_run_one_way, "runtime/hooks.py", "from ..strategy import ProTrainStrategy"),
    (architecture.planner_imports_no_torch, "planner/plan.py", "import lightning_protrain.device.device"),
    (architecture.imports_run_one_way, "planner/plan.py", "from lightning_protrain import Plan"),
    (architecture.planner_imports_no_torch, "profiler/records.py", "from lightning_protrain.profiler import blocks"),
    (
        architecture.imports_run_one_way,
        "models/loss.py",
        "from lightning_protrain.callbacks.evaluator import Evaluator",
    ),
    (
        architecture.imports_run_one_way,
        "device/device.py",
        "def f():\n    from lightning_protrain.runtime import chunk",
    ),
    (architecture.imports_run_one_way, "unheard_of.py", ""),
    (architecture.houses_stand_alone, "strategy/protrain.py", "from lightning_protrain.checkpoint import io"),
    (architecture.houses_stand_alone, "checkpoint/save.py", "from lightning_protrain.device.host import Job"),
    (architecture.houses_stand_alone, "callbacks/checkpoint/resume.py", "import lightning_protrain.callbacks.samples"),
    (architecture.lightning_is_at_the_edge, "runtime/apply.py", "import lightning as L"),
    (architecture.arguments_are_written_out, "cli.py", "def f(a):\n    how = a, 1\n    g(2, *how)"),
    (architecture.lightning_is_at_the_edge, "strategy/protrain.py", "from pytorch_lightning import Trainer"),
    (architecture.planner_imports_no_torch, "planner/search.py", "from torch import nn"),
    (architecture.planner_imports_no_torch, "profiler/records.py", "import torch.nn"),
    (architecture.planner_imports_no_torch, "profiler/records.py", "import torch"),
    (architecture.planner_imports_no_torch, "profiler/gpu_specs.py", "from torch import nn"),
    (architecture.cuda_is_in_one_file, "strategy/protrain.py", "import torch\ntorch.cuda.synchronize()"),
    (architecture.cuda_is_in_one_file, "strategy/protrain.py", "import torch as t\nt.cuda.synchronize()"),
    (architecture.cuda_is_in_one_file, "strategy/protrain.py", "from torch import cuda"),
    (architecture.cuda_is_in_one_file, "strategy/protrain.py", "from torch.cuda.amp import GradScaler"),
    (architecture.cuda_is_in_one_file, "strategy/protrain.py", "import torch.cuda"),
    (architecture.cuda_is_in_one_file, "strategy/protrain.py", 'import torch\ngetattr(torch, "cuda")'),
    (architecture.nothing_broad_is_suppressed, "cli.py", "with contextlib.suppress(Exception):\n    f()"),
    (architecture.imports_are_at_the_top, "cli.py", "def f():\n    import json"),
    (architecture.imports_are_at_the_top, "cli.py", "class A:\n    def f(self):\n        from torch import nn"),
    (architecture.functions_are_short, "cli.py", LONG_FUNCTION),
    (architecture.functions_are_short, "cli.py", f"async {LONG_FUNCTION}"),
    (architecture.names_say_what_things_are, "cli.py", "class ChunkManager: ..."),
    (architecture.names_say_what_things_are, "cli.py", "def model_wrapper(): ..."),
    (architecture.names_say_what_things_are, "cli.py", "import shutil as file_utils"),
    (architecture.names_say_what_things_are, "cli.py", "def f(helper): ..."),
    (architecture.names_say_what_things_are, "data/utils.py", ""),
    (architecture.text_is_ascii, "cli.py", "x = '\u2192'"),
    (architecture.public_methods_have_docstrings, "cli.py", f"class A:\n    {DOC}    def f(self): ..."),
    (architecture.docstrings_begin_with_a_verb_or_a_noun, "cli.py", '"""What the command does."""'),
    (architecture.docstrings_begin_with_a_verb_or_a_noun, "cli.py", 'class A:\n    """Of a run: the path."""'),
    (architecture.docstrings_begin_with_a_verb_or_a_noun, "cli.py", 'def _f():\n    """The same for a batch."""'),
    (architecture.environment_is_not_read, "cli.py", "import os\nos.environ['A']"),
    (architecture.environment_is_not_read, "cli.py", "import os\nos.getenv('A')"),
    (architecture.environment_is_not_read, "cli.py", "from os import environ"),
]
ALLOWED: list[tuple[Callable[[Source], Iterator[Finding]], str, str]] = [
    (architecture.imports_run_one_way, "planner/step_time.py", "import lightning_protrain.profiler.records"),
    (architecture.imports_run_one_way, "runtime/hooks.py", "from lightning_protrain.planner.plan import Plan"),
    (
        architecture.imports_run_one_way,
        "strategy/protrain.py",
        "from lightning_protrain.runtime.apply import apply_plan",
    ),
    (architecture.lightning_is_at_the_edge, "report/timeline.py", "from lightning.pytorch import Callback"),
    (architecture.arguments_are_written_out, "cli.py", "def f(*a):\n    b = [1, 2]\n    g(*a, *b)"),
    (architecture.planner_imports_no_torch, "profiler/blocks.py", "import torch"),
    (architecture.cuda_is_in_one_file, "device/device.py", "import torch\ntorch.cuda.synchronize()"),
    (architecture.nothing_broad_is_suppressed, "cli.py", "with contextlib.suppress(OSError):\n    f()"),
    (architecture.imports_are_at_the_top, "strategy/precision.py", "def f():\n    import bitsandbytes.optim"),
    (architecture.functions_are_short, "cli.py", 'def f():\n    """Doc.\n' + "\n" * 90 + '    """\n    return 1'),
    (architecture.names_say_what_things_are, "cli.py", "from contextlib import contextmanager\nf(wrapper=1)"),
    (architecture.public_methods_have_docstrings, "cli.py", f"class A(B):\n    {DOC}    def setup(self): ..."),
    (architecture.docstrings_begin_with_a_verb_or_a_noun, "cli.py", '"""Forward hooks; itself no module."""'),
]


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in VIOLATIONS} == set(RULES)


@pytest.mark.parametrize(("rule", "path", "text"), VIOLATIONS)
def test_a_planted_violation_is_found(rule: Callable[[Source], Iterator[Finding]], path: str, text: str) -> None:
    assert len(_find(rule, Source(f"{PACKAGE}/{path}", text))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED)
def test_what_is_allowed_is_no_finding(rule: Callable[[Source], Iterator[Finding]], path: str, text: str) -> None:
    assert _find(rule, Source(f"{PACKAGE}/{path}", text)) == []


@pytest.mark.parametrize(
    "texts",
    [
        {"device": "from lightning_protrain.metrics import f", "metrics": "import lightning_protrain.device.device"},
        {
            "__init__": "from lightning_protrain.strategy.protrain import S",
            "strategy/protrain": "from lightning_protrain import Plan",
        },
        {"data/a": "from lightning_protrain.data import b", "data/b": "def f():\n    from .a import g"},
    ],
)
def test_a_planted_cycle_is_found(texts: dict[str, str]) -> None:
    sources = [Source(f"{PACKAGE}/{name}.py", text) for name, text in texts.items()]
    assert set(architecture.import_cycle(sources)) == {source.module for source in sources}


def test_a_planted_crumb_is_found() -> None:
    texts = {
        "a": "from lightning_protrain import b",
        "b": "x = 1\n" * 119,
        "c": "from lightning_protrain import d",
        "d": "",
    }
    sources = [Source(f"{PACKAGE}/{name}.py", text) for name, text in texts.items()]
    found = ["b (119 lines) belongs into a", "d (0 lines) belongs into c"]
    assert architecture.crumbs(sources) == found
    long = Source(f"{PACKAGE}/b.py", "x = 1\n" * 120)
    twice = Source(f"{PACKAGE}/e.py", "from lightning_protrain import d")
    assert architecture.crumbs([sources[0], long, *sources[2:], twice]) == []


def test_a_planted_name_that_is_there_twice_is_found() -> None:
    texts = {
        "a": "class A: ...\nclass B: ...",
        "data/a": "",
        "data/b": "class B: ...",
        "data/__init__": "",
        "__init__": "",
    }
    sources = [Source(f"{PACKAGE}/{name}.py", text) for name, text in texts.items()]
    found = [
        "a.py: lightning_protrain/a.py, lightning_protrain/data/a.py",
        "class B: lightning_protrain/a.py, lightning_protrain/data/b.py",
    ]
    assert architecture.repeated_names(sources) == found


def test_a_planted_undeclared_import_is_found() -> None:
    source = Source(f"{PACKAGE}/cli.py", "import json\nimport torch.nn\nimport pandas as pd")
    assert [line for line, _ in architecture.undeclared_imports(source, {"json", "torch"})] == [3]


def test_a_planted_file_that_names_many_modules_is_found() -> None:
    names = [f"m{number}" for number in range(architecture.MAX_MODULES + 1)]
    sources = [Source(f"{PACKAGE}/{name}.py", "") for name in names]
    few = Source(f"{PACKAGE}/few.py", "".join(f"from {PACKAGE} import {name}\n" for name in names[1:]))
    many = Source(f"{PACKAGE}/many.py", "".join(f"from {PACKAGE}.{name} import f\n" for name in names) + "import json")
    inside = Source(f"{PACKAGE}/inside.py", "def f():\n" + "".join(f"    import {PACKAGE}.{name}\n" for name in names))
    assert architecture.fan_out([*sources, few, many, inside]) == {"many": 13, "inside": 13}


def test_a_planted_list_of_arguments_is_found() -> None:
    text = """
def f(a, b, c, d, e): ...
def g(a, b, c, d, e, *, f): ...
class A:
    def __init__(self, a, b, c, d, e, f): ...
    def h(self, a, b, c, d, e, f): ...
    @staticmethod
    def i(a, b, c, d, e): ...
    @classmethod
    async def j(cls, a, /, b, c, d, e, f): ...
class B:
    def __init__(self, a, b, c, d, e, f, g): ...
def k():
    class C:
        def l(self, a, b, c, d, e, f): ...
    def m(a, b, c, d, e, f, g): ...
"""
    found = {"cli.g": 6, "cli.A.h": 6, "cli.A.j": 6, "cli.B.__init__": 7, "cli.k.C.l": 6, "cli.k.m": 7}
    assert architecture.long_argument_lists([Source(f"{PACKAGE}/cli.py", text)]) == found


@pytest.mark.parametrize(
    ("found", "listed", "number"),
    [
        ({}, {}, 0),
        ({"a": 13}, {"a": 13}, 0),
        ({"a": 13}, {"a": 14}, 1),
        ({"a": 14}, {"a": 13}, 1),
        ({"a": 13}, {}, 1),
        ({}, {"a": 13}, 1),
    ],
)
def test_a_list_of_exceptions_has_the_numbers_that_there_are(
    found: dict[str, int], listed: dict[str, int], number: int
) -> None:
    assert len(architecture.differences(found, listed)) == number
