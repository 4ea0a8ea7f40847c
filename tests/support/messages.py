"""Find every message of the package in its source: what is raised, warned and logged, as templates.

A template is an f-string as it is written: `{name}: give at least {least}, as in {{"least": 2}}.` Names,
conditional expressions and calls of our own functions that return text are followed, so that a message which is put
together elsewhere is listed where its text stands. `faults` says what is wrong
with one. `python -m tests.support.messages` writes the list again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_protrain"
LIST = ROOT / "tests" / "messages.txt"
# Calls whose first argument is shown to the user, beside `raise`.
SPOKEN = {"rank_zero_warn", "rank_zero_info", "warn", "log_once", "say"}
# How many names and calls are followed to the text.
MAX_DEPTH = 3

# Where parts of sentences stand, which other messages quote: they have no full stop.
CLAUSES = (
    "checkpoint/manifest.py",
    "checkpoint/references.py",
    "checkpoint/verification.py",
    "data/batches/encode.py",
    "data/batches/tokenizer.py",
    "data/chat/check_turns.py",
    "data/chat/detect_format.py",
    "data/chat/render.py",
    "data/chat/verify_format.py",
    "data/sources/tables.py",
    "planner/fsdp_memory.py",
    "profiler/fake_mode.py",
    "runtime/grad_offload.py",
)
# What begins a sentence: a capital, a placeholder, code in backticks, or a name that is no English word.
BEGINS = re.compile(r"[A-Z{`\[]|[a-z]\w*[=_.]|lightning-protrain ")
# Messages for which one of the rules does not make sense, and why.
OTHERS = {
    "module {__name__} has no attribute": "Python's own words",
    "one of the variables needed for gradient computation": "PyTorch's own words, which users search for",
    "The memory that ranks have shared cannot": "`strerror` of an OSError: the command line adds the full stop",
    "{name or type(module).__name__} holds {found} weights": "a kind of weights, not a number",
    "{problem.ranks.name} needs": "`all 32 blocks` or `12 of 32 blocks`",
}
ENDS = re.compile(r"[.?}\])]$")
# A number before one of these goes through `plural`, which knows "1 chunk".
COUNTED = "batch|block|buffer|byte|chunk|conversation|embedding|image|layer|message|module|node|parameter|rank|row|"
COUNTED += "second|shard|step|tensor|token|turn|unit|weight"
PLURAL = re.compile(rf"(?<!\}} of )\{{[^{{}}]*\}} (?:(?!of|has|have|are|is|such)[a-z]+ )?(?:{COUNTED})e?s\b")
BYTES = re.compile(r"\} ?(?:[KMGT]i?)?B\b|\} bytes\b")
# A placeholder in a string that is no f-string.
UNFILLED = re.compile(r"\{\{[A-Za-z_][\w.]*(?:[!:(\[][^{}]*)?\}\}")
# Words of earlier versions, and what is said now.
PRIVATE = {
    r"torn": "partially stepped, or cut short",
    r"come apart": "diverged",
    r"on paper": "dry run",
    r"outlook": "prediction",
    r"shortage": "does not fit",
    r"crew": "threads",
    r"twins?": "device parameter",
    r"land(s|ed|ing)?": "copied to the host",
    r"gaug(e|es|ed|ing)": "bandwidth probe",
    r"gone on from": "resumed",
    r"machines? of the cluster": "nodes",
    r"of ours|ours": "this package",
}


@dataclass(frozen=True, order=True)
class Message:
    """One message: its file inside the package, and its template."""

    path: str
    text: str


class Finder:
    """Finds the messages of parsed files, given by their path inside the package."""

    def __init__(self, files: dict[str, ast.Module]) -> None:
        self.files = files
        self.functions: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
        self.constants: dict[str, dict[str, str]] = {path: {} for path in files}
        for path, tree in files.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self.functions.setdefault(node.name, []).append((path, node))
            for node in tree.body:
                match node:
                    case ast.Assign([ast.Name(name)], ast.Constant(str(text))):
                        self.constants[path][name] = text

    def messages(self) -> set[Message]:
        """Return the messages of all files."""
        found: set[Message] = set()
        for path, tree in self.files.items():
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            for scope in [tree, *functions]:
                for call in _own(scope):
                    for argument in _spoken(call):
                        found |= self._texts(argument, path, scope, 0)
        return found

    def _texts(self, node: ast.expr, path: str, scope: ast.AST, depth: int) -> set[Message]:
        """Return the alternatives of an expression; none where no text of ours is in it."""
        if depth > MAX_DEPTH:
            return set()
        if isinstance(node, ast.IfExp):
            return self._texts(node.body, path, scope, depth) | self._texts(node.orelse, path, scope, depth)
        if isinstance(node, ast.Name) and node.id not in self.constants[path]:
            values = [each.value for each in ast.walk(scope) if isinstance(each, ast.Assign) and _names(each, node.id)]
            return set().union(*(self._texts(value, path, scope, depth + 1) for value in values))
        name = _called(node)
        if name in self.functions:
            found: set[Message] = set()
            for other, function in self.functions[name]:
                for each in _own(function):
                    if isinstance(each, ast.Return) and each.value is not None:
                        found |= self._texts(each.value, other, function, depth + 1)
            return found
        if isinstance(node, ast.Call) and name[:1].isupper():  # an error that a function returns
            return set().union(*(self._texts(argument, path, scope, depth) for argument in node.args))
        text = self._template(node, path)
        return {Message(path, text)} if " " in text.replace("{" + ast.unparse(node) + "}", "") else set()

    def _template(self, node: ast.expr, path: str) -> str:
        """Return the text of an expression, its placeholders in braces, constants and alternatives filled in."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value.replace("{", "{{").replace("}", "}}")
        if isinstance(node, ast.JoinedStr):
            return "".join(self._template(value, path) for value in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and '"' in ast.unparse(node).replace("'", '"'):
            return self._template(node.left, path) + self._template(node.right, path)
        if isinstance(node, ast.FormattedValue):
            return self._template(node.value, path)
        if isinstance(node, ast.IfExp):
            return f"[{self._template(node.body, path)}|{self._template(node.orelse, path)}]"
        if isinstance(node, ast.Name):
            elsewhere = self.constants.values() if node.id.isupper() and not node.id.startswith("_") else ()
            known = [texts[node.id] for texts in (self.constants[path], *elsewhere) if node.id in texts]
            return known[0] if known else "{" + node.id + "}"
        return "{" + ast.unparse(node) + "}"


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Walk a function or module without the functions inside it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef):
            yield node
            waiting += ast.iter_child_nodes(node)


def _spoken(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement shows to the user."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        # `raise refuse(param, "why")`: the text is in the function, and in what it is given.
        return [node.exc, *node.exc.args] if _called(node.exc) not in {"type", "next"} else []
    if isinstance(node, ast.Call) and _called(node) in SPOKEN:
        return node.args[:1]
    return []


def _called(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


@cache
def package_messages() -> tuple[Message, ...]:
    """Return all messages of the package in the order of their files."""
    files = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    return tuple(sorted(Finder(files).messages()))


def faults(message: Message) -> list[str]:
    """Return what is wrong with a message."""
    text, found = message.text, []
    if text.startswith(tuple(OTHERS)):
        return []
    clause = message.path in CLAUSES and not text.endswith(".")
    if not clause and not BEGINS.match(text):
        found.append("begins with neither a capital nor a name")
    if not clause and not ENDS.search(text):
        found.append("has no full stop")
    if "  " in text or text != text.strip():
        found.append("has spaces too many")
    if not text.isascii():
        found.append("is not ASCII")
    if PLURAL.search(text):
        found.append("may say 1 of several: use `plural`")
    if BYTES.search(text):
        found.append("has bytes without `format_bytes`")
    if UNFILLED.search(text):
        found.append("has a placeholder, and is no f-string")
    words = re.sub(r"\{[^{}]*\}|`[^`]*`", "", text)
    found += [f"says {word!r} for {instead!r}" for word, instead in PRIVATE.items() if re.search(rf"\b{word}\b", words)]
    return found


def rendered() -> str:
    """Return the list as text: each file, and its messages below it, newlines escaped."""
    lines, path = [], ""
    for message in package_messages():
        if message.path != path:
            path = message.path
            lines += ["", path]
        lines.append("  " + message.text.replace("\n", "\\n"))
    return "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":
    LIST.write_text(rendered())
