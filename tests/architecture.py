"""The rules that `test_architecture.py` holds the package to: functions from a parsed source file to findings."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "lightning_protrain"
MAX_FUNCTION_LINES = 80
# A shorter module with one importer is a part of that one, unless it is what one command or one keyword opens.
CRUMB_LINES = 120
ENTRY_POINTS = ("checkpoint.inspection", "commands.environment", "commands.file_commands")

# The layers of the package, from the ground up: a module imports from its own layer and from those below it, and a name
# that is not here belongs to the layer of the longest prefix that is. "" is the package's own `__init__.py`.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("config", "progress", "torchvision_build", "cgroup_limits", "quant_state", "connections", "rank_store"),
    ("trainer_events",),
    ("checkpoint",),
    ("callbacks.checkpoint",),
    ("device",),
    ("profiler",),
    ("planner",),
    ("runtime",),
    ("distributed",),
    ("report",),
    ("strategy", "fsdp2"),
    ("data", "models.shipped"),
    ("models",),
    ("callbacks",),
    ("trainer",),
    ("plans",),
    ("commands",),
    ("cli",),
    ("commands.fit_command",),
    ("registration",),
    ("", "__main__"),
)
# Three houses, and the ground that all stand on: a module belongs to the house of its longest prefix that is here.
HOUSES: dict[str, tuple[str, ...]] = {
    "ground": (
        "config",
        "progress",
        "torchvision_build",
        "cgroup_limits",
        "quant_state",
        "connections",
        "rank_store",
        "trainer_events",
    ),
    "engine": ("device", "profiler", "planner", "runtime", "distributed", "report", "strategy", "fsdp2"),
    "checkpoints": ("checkpoint", "callbacks.checkpoint"),
    "recipes": ("data", "models", "callbacks", "trainer", "plans", "commands", "cli"),
}
# Houses from which a house may import, besides its own.
MAY_USE = {
    "ground": (),
    "engine": ("ground",),
    "checkpoints": ("ground",),
    "recipes": ("ground", "engine", "checkpoints"),
}
# Modules of ours that a file names at most, and what names more. Every number is today's, so the list can only shrink.
MAX_MODULES = 12
MORE_MODULES = {
    "": 16,
    "data.datamodule": 13,
    "fsdp2.strategy": 13,
    "strategy.plan_session": 13,
    "strategy.protrain": 14,
}
# Arguments beside `self` of a constructor and of any other function, and what takes more, as above.
MAX_CONSTRUCTOR_ARGUMENTS, MAX_ARGUMENTS = 6, 5
MORE_ARGUMENTS = {
    "data.chat.mask._trained_turns": 6,
    "device.topology.peers_found": 6,
    "profiler.profile.profile_model": 8,
    "runtime.optim.step.bound_norm": 6,
    "runtime.optim.step.fused_host_step": 6,
}
# What users write as flat keywords, in Python, in YAML and on the command line. A record would nest them.
FLAT_KEYWORDS = (
    "callbacks.checkpoint.callback.ProTrainCheckpoint.__init__",
    "data.datamodule.ChatDataModule.__init__",
    "fsdp2.strategy.ProTrainFSDP2Strategy.__init__",
    "models.module.CausalLMModule.__init__",
    "models.preference.PreferenceModule.__init__",
    "plans.plan",
    "runtime.optim.split_adamw.SplitAdamW.__init__",
    "strategy.protrain.ProTrainStrategy.__init__",
    "trainer.PlanningTrainer.plan",
)
# Who may import Lightning, and who must not import torch.
MAY_IMPORT_LIGHTNING = (
    *("strategy", "fsdp2", "distributed", "report", "models", "callbacks", "data", "checkpoint.io", "trainer", "cli"),
    *("commands.mistakes", "commands.fit_command", "trainer_events", "registration"),
)
MUST_NOT_IMPORT_TORCH = (
    *("config", "progress", "planner", "profiler.records", "profiler.gpu_specs", "cgroup_limits", "connections"),
)
# The only imports inside functions: dependencies that may be absent or that few need, with the reason.
OPTIONAL_IMPORTS = {
    "bitsandbytes": "extra `bnb`: 4-bit weights and 8-bit optimizers",
    "matplotlib": "extra `plots`",
    "tensorboard": "extra `tensorboard`",
    "datasets": "with pandas half a second and 80 MiB in each rank; only for Parquet and what that library wrote",
    "platformdirs": "the usual place of caches is known without it",
    "transformers": "for its models alone: the strategy trains any, where it is not installed",
    "peft": "takes seconds, and bitsandbytes along; only for adapters",
}
# Beginnings of a docstring that send the reader elsewhere for its noun or its verb.
HEADLESS = re.compile(
    r"(Of|The same|Those|These|They|It|This|That|There|As|What|Whether|Where|When|Which|Who|Whose|How|If|With|By|For|"
    r"From|Like)\b"
)
AVOIDED_WORDS = {"helper", "helpers", "manager", "managers", "util", "utils", "wrapper", "wrappers"}

Finding = tuple[int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One source file: its path inside the repository and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """Dotted name inside the package; empty for the package itself."""
        parts = list(Path(self.path.removeprefix(f"{PACKAGE}/")).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> tuple[tuple[int, str], ...]:
        """Line and dotted name of everything imported; `from a import b` is `a.b`, which may be a module or not."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = f"{node.module}." if node.module else ""
                if node.level:
                    package = (PACKAGE, *Path(self.path).parts[1:-1])
                    start = ".".join(package[: len(package) - node.level + 1]) + "." + start
                found += [(node.lineno, start + alias.name) for alias in node.names]
        return tuple(found)


def _within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or (prefix and name.startswith(prefix + ".")) for prefix in prefixes)


def _external(source: Source, *packages: str) -> Iterator[Finding]:
    for line, name in source.imports:
        if _within(name, packages):
            yield line, f"imports {name}"


def _layer(module: str) -> int | None:
    """Return the index of the layer that a module, or something defined in one, belongs to."""
    found = [(len(name), index) for index, names in enumerate(LAYERS) for name in names if _within(module, [name])]
    return max(found)[1] if found else None


def imports_run_one_way(source: Source) -> Iterator[Finding]:
    own = _layer(source.module)
    if own is None:
        yield 1, "is in no layer of LAYERS"
        return
    for line, name in source.imports:
        if _within(name, [PACKAGE]):
            layer = _layer(name.removeprefix(PACKAGE).removeprefix("."))
            if layer is None:  # `from lightning_protrain import Plan`
                layer = len(LAYERS) - 1
            if layer > own:
                yield line, f"imports {name}, which is in a layer above it"


def _house(module: str) -> str | None:
    """Return the house that a module, or something defined in one, belongs to; None for what connects them."""
    found = [(len(name), house) for house, names in HOUSES.items() for name in names if _within(module, [name])]
    return max(found)[1] if found else None


def houses_stand_alone(source: Source) -> Iterator[Finding]:
    house = _house(source.module)
    if house is None:
        return
    for line, name in source.imports:
        other = _house(name.removeprefix(f"{PACKAGE}."))
        if other not in (None, house, *MAY_USE[house]):
            yield line, f"imports {name}: {house} must not use {other}"


def lightning_is_at_the_edge(source: Source) -> Iterator[Finding]:
    yield from _external(source, "pytorch_lightning", "lightning_fabric")
    if not _within(source.module, MAY_IMPORT_LIGHTNING):
        yield from _external(source, "lightning")


def planner_imports_no_torch(source: Source) -> Iterator[Finding]:
    if _within(source.module, MUST_NOT_IMPORT_TORCH):
        yield from _external(source, "torch", "torchmetrics", "transformers", "peft")
        for line, name in source.imports:
            inner = name.removeprefix(f"{PACKAGE}.")
            if _within(name, [PACKAGE]) and not _within(inner, MUST_NOT_IMPORT_TORCH):
                yield line, f"imports {name}, which imports torch"


def cuda_is_in_one_file(source: Source) -> Iterator[Finding]:
    if _within(source.module, ["device"]):
        return
    yield from _external(source, "torch.cuda")
    names = {"torch"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="cuda") if name in names:
                yield node.lineno, f"names {name}.cuda"
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=name), ast.Constant(value="cuda"), *_]) if (
                name in names
            ):
                yield node.lineno, f"names {name}.cuda"


def nothing_broad_is_suppressed(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            broad = {ast.unparse(argument) for argument in node.args} & {"Exception", "BaseException"}
            if broad:
                yield node.lineno, f"suppress({', '.join(sorted(broad))})"


def _functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def imports_are_at_the_top(source: Source) -> Iterator[Finding]:
    for function in _functions(source.tree):
        for node in ast.walk(function):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            for name in names:
                if not _within(name, OPTIONAL_IMPORTS):
                    yield node.lineno, f"imports {name} inside {function.name}"


def functions_are_short(source: Source) -> Iterator[Finding]:
    for function in _functions(source.tree):
        lines = (function.end_lineno or 0) - function.lineno + 1
        first = function.body[0]
        if ast.get_docstring(function) is not None:
            lines -= (first.end_lineno or 0) - first.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def arguments_are_written_out(source: Source) -> Iterator[Finding]:
    """Find calls such as `f(*these)` of a tuple that the function itself makes: they hide the number of arguments."""
    for function in _functions(source.tree):
        assigned = (
            node for node in ast.walk(function) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        )
        made = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
        for call in ast.walk(function):
            if isinstance(call, ast.Call):
                names = (
                    it.value.id for it in call.args if isinstance(it, ast.Starred) and isinstance(it.value, ast.Name)
                )
                yield from ((call.lineno, f"*{name} hides arguments: write them out") for name in names if name in made)


def _defined_names(tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def names_say_what_things_are(source: Source) -> Iterator[Finding]:
    for line, name in [(1, source.module), *_defined_names(source.tree)]:
        avoided = _words(name) & AVOIDED_WORDS
        if avoided:
            yield line, f"{name} uses the word {', '.join(sorted(avoided))}"


def text_is_ascii(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if not line.isascii():
            yield number, f"has {next(character for character in line if not character.isascii())!a}"


def public_methods_have_docstrings(source: Source) -> Iterator[Finding]:
    for node in source.tree.body:
        # The methods of a class with a base mostly fill in hooks that the base documents.
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not node.bases:
            for method in node.body:
                public = isinstance(method, Function) and not method.name.startswith("_")
                if public and ast.get_docstring(method) is None:
                    yield method.lineno, f"{node.name}.{method.name} has no docstring"


def docstrings_begin_with_a_verb_or_a_noun(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            beginning = HEADLESS.match(ast.get_docstring(node) or "")
            if beginning:
                line = node.body[0].lineno
                yield line, f"the docstring begins with {beginning[0]!r}: say which thing it is, or what to do"


def environment_is_not_read(source: Source) -> Iterator[Finding]:
    # [Note: Peer-to-peer]: NCCL cannot be told in any other way. `lightning-protrain env` prints what is set.
    if source.module in ("device.topology", "commands.environment"):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=("environ" | "getenv" | "putenv") as name):
                yield node.lineno, f"names os.{name}"
            case ast.ImportFrom(module="os", names=names):
                for alias in names:
                    if alias.name in {"environ", "getenv", "putenv"}:
                        yield node.lineno, f"imports os.{alias.name}"


RULES: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    imports_run_one_way,
    houses_stand_alone,
    lightning_is_at_the_edge,
    planner_imports_no_torch,
    cuda_is_in_one_file,
    nothing_broad_is_suppressed,
    imports_are_at_the_top,
    functions_are_short,
    arguments_are_written_out,
    names_say_what_things_are,
    text_is_ascii,
    public_methods_have_docstrings,
    docstrings_begin_with_a_verb_or_a_noun,
    environment_is_not_read,
)


def _imported(sources: Sequence[Source]) -> dict[str, set[str]]:
    """The modules of the package that each one imports. Imports for type checking count too."""
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        edges = graph.setdefault(source.module, set())
        for _, name in source.imports:
            if not _within(name, [PACKAGE, f"{PACKAGE}_command"]):
                continue
            inner = "" if name == PACKAGE else name.removeprefix(f"{PACKAGE}.")
            # `from a import b` means the module a.b where there is one, else something defined in a.
            target = inner if inner in modules else inner.rpartition(".")[0]
            if target != source.module and target in modules:
                edges.add(target)
    return graph


def crumbs(sources: Sequence[Source]) -> list[str]:
    """Return the short modules that only one other module imports; they belong into that module."""
    importers: dict[str, list[str]] = {source.module: [] for source in sources}
    for module, imported in _imported(sources).items():
        for name in imported:
            importers[name].append(module)
    short = (source for source in sources if not source.path.endswith("__init__.py"))
    return [
        f"{source.module} ({len(source.text.splitlines())} lines) belongs into {importers[source.module][0]}"
        for source in short
        if len(source.text.splitlines()) < CRUMB_LINES
        and len(importers[source.module]) == 1
        and source.module not in ENTRY_POINTS
    ]


def fan_out(sources: Sequence[Source]) -> dict[str, int]:
    """Return the number of modules that a module imports from the package, for modules above the limit."""
    graph = _imported(sources)
    return {module: len(named) for module, named in graph.items() if len(named) > MAX_MODULES}


def long_argument_lists(sources: Sequence[Source]) -> dict[str, int]:
    """Return the number of arguments of a function besides `self`, for functions above the limit."""
    found = {}
    for source in sources:
        for owner, function in _owned_functions(source.tree, source.module):
            arguments = function.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            static = any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)
            count -= owner.is_class and not static
            limit = MAX_CONSTRUCTOR_ARGUMENTS if function.name == "__init__" else MAX_ARGUMENTS
            name = f"{owner.name}.{function.name}"
            if count > limit and name not in FLAT_KEYWORDS:
                found[name] = count
    return found


@dataclass(frozen=True)
class _Owner:
    """The scope in which a function is defined: a module, a class, or another function."""

    name: str
    is_class: bool = False


def _owned_functions(tree: ast.AST, name: str, is_class: bool = False) -> Iterator[tuple[_Owner, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield _Owner(name, is_class), node
            yield from _owned_functions(node, f"{name}.{node.name}")
        elif isinstance(node, ast.ClassDef):
            yield from _owned_functions(node, f"{name}.{node.name}", is_class=True)
        else:
            yield from _owned_functions(node, name, is_class)


def differences(found: dict[str, int], listed: dict[str, int]) -> list[str]:
    """Return each name that is above its limit and not listed, and each one that is listed with a wrong number."""
    return [
        f"{name} has {found.get(name, 'no more than the limit')}, the list has {listed.get(name, 'no exception')}"
        for name in sorted(found.keys() | listed.keys())
        if found.get(name) != listed.get(name)
    ]


def repeated_names(sources: Sequence[Source]) -> list[str]:
    """Names of files and of classes that the package has twice."""
    found: dict[str, list[str]] = {}
    for source in sources:
        if not source.path.endswith("__init__.py"):
            found.setdefault(f"{Path(source.path).stem}.py", []).append(source.path)
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(f"class {node.name}", []).append(source.path)
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1]


def import_cycle(sources: Sequence[Source]) -> list[str]:
    """Modules of one import cycle, or an empty list."""
    try:
        graphlib.TopologicalSorter(_imported(sources)).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def undeclared_imports(source: Source, declared: Iterable[str]) -> Iterator[Finding]:
    """Imports of packages that are neither ours, nor the standard library's, nor in `declared`."""
    for line, name in source.imports:
        package = name.partition(".")[0]
        if package not in {PACKAGE, f"{PACKAGE}_command", *declared}:
            yield line, f"imports {package}, which pyproject.toml does not declare"
