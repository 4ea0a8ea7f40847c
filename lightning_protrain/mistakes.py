"""What was refused, in contrast to what has gone wrong, and which key of a config a refusal speaks of."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from types import FrameType
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

# The types of what is refused.
REFUSALS = (ValueError, FileNotFoundError, MisconfigurationException)
_PACKAGE = __name__.partition(".")[0]
# Whose calls may lie between the command line and a refusal; where somebody else's are, it may be their mistake.
_LIBRARIES = ("lightning", "jsonargparse", "torch", "torchmetrics", "transformers", "peft", "datasets", "tokenizers")
_BETWEEN = {_PACKAGE, *_LIBRARIES, *sys.stdlib_module_names}
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_refusal(error: BaseException) -> bool:
    """Whether an error is a sentence to the user, and no code of somebody else can have caused it.

    It is one, if a `raise` of this package made it, or one of Lightning's for what is misconfigured or not there; not
    what an operation raises, such as `int("x")`.
    """
    calls = list(walk_tb(error.__traceback__))
    owners = [_owner(frame) for frame, _ in calls]
    kinds = {_PACKAGE: REFUSALS, "lightning": REFUSALS[1:]}
    if not calls or not isinstance(error, kinds.get(owners[-1], ())) or not _BETWEEN.issuperset(owners):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def refusal_in(error: BaseException) -> BaseException | None:
    """The refusal that an error was made from, or the error itself; None: there is none."""
    found: BaseException | None = error
    while found is not None and not is_refusal(found):
        found = found.__cause__
    return found


def key_in(config: Mapping[str, Any], error: BaseException) -> str | None:
    """The key of the setting that a refusal speaks of, as the command line takes it, such as `data.batch_size`.

    Args:
        config: As plain dicts and lists.
        error: The refusal. What its message says of the arguments of the class that raised it counts first.

    Returns:
        Else the key of that class, if its constructor refused; None: nothing says which one it is.
    """
    message, settings = str(error), list(_settings(config))
    calls = [frame for frame, _ in walk_tb(error.__traceback__)]
    methods = [(type(frame.f_locals.get("self")).__name__, frame.f_code.co_name) for frame in reversed(calls)]
    kinds = {each.kind for each in settings}
    kind, method = next(((kind, method) for kind, method in methods if kind in kinds), ("", ""))
    own = [each for each in settings if kind and each.kind == kind]
    within = (_given(message, own), _quoted(message, own, names=True), _named(message, own))
    for keys in (*within, _given(message, settings), _quoted(message, settings)):
        if len(keys) == 1:
            return keys.pop()
    holders = {each.holder for each in own}
    return holders.pop() if method == "__init__" and len(holders) == 1 else None


@dataclass(frozen=True)
class _Setting:
    """One value of a config: its key, the last name in it, the class that takes it, and the key of that class."""

    key: str
    name: str
    value: Any
    kind: str
    holder: str


def _settings(value: Any, key: str = "", name: str = "", kind: str = "", holder: str = "") -> Iterator[_Setting]:
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        kind = value["class_path"].rpartition(".")[2]
        yield from _settings({**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}, key, "", kind, key)
        return
    if name:
        yield _Setting(key, name, value, kind, holder)
    items: Iterable[tuple[str, str, Any]] = ()
    if isinstance(value, Mapping):
        items = [(f"{key}.{inner}" if key else str(inner), str(inner), each) for inner, each in value.items()]
    elif isinstance(value, list):
        items = [(f"{key}[{index}]", name, each) for index, each in enumerate(value)]
    for inner_key, inner, each in items:
        yield from _settings(each, inner_key, inner, kind, holder)


def _given(message: str, settings: Iterable[_Setting]) -> set[str]:
    """Those whose name and value a message begins with: `batch_size=0: give`, or `learning_rate is -1.0;`."""
    begins = {each.key: (f"{each.name}={each.value!r}", f"{each.name} is {each.value!r}") for each in settings}
    return {key for key, beginnings in begins.items() if message.startswith(beginnings)}


def _quoted(message: str, settings: Iterable[_Setting], names: bool = False) -> set[str]:
    """Those that are quoted first: `No data set 'x'`, `x.jsonl, line 1`; with names: `'head' is no key`."""
    places: dict[int, set[str]] = {}
    for each in settings:
        patterns = [f"'{re.escape(each.name)}'"] if names else []
        if isinstance(each.value, str) and each.value:
            patterns.append(re.escape(repr(each.value)))
            if re.search(r"[./]", each.value):  # a path, which needs no quotes
                patterns.append(rf"(?<![\w/.-]){re.escape(each.value)}(?!\.?[\w/-])")
        found = [match.start() for pattern in patterns for match in re.finditer(pattern, message)]
        if found:
            places.setdefault(min(found), set()).add(each.key)
    return places[min(places)] if places else set()


def _named(message: str, settings: Sequence[_Setting]) -> set[str]:
    """Of `plan=`, `` `family` `` and the word that a message begins with, the first one that is; arguments first."""
    for word in re.findall(r"^\w+|\w+(?==)|(?<=`)\w+(?=`)", message):
        keys = {each.key for each in settings if each.name == word}
        if keys:
            least = min(key.count(".") for key in keys)
            return {key for key in keys if key.count(".") == least}
    return set()


def _owner(frame: FrameType) -> str:
    return str(frame.f_globals.get("__package__") or frame.f_globals.get("__name__")).partition(".")[0]
