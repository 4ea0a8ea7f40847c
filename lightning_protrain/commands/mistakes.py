"""Refusals: errors that are messages to the user. Distinguishes them from other errors, and finds their config key."""

from __future__ import annotations

import dis
import errno
import operator
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from types import FrameType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_protrain.device.device import why_no_gpu

# Types of errors that may be refusals.
REFUSALS = (ValueError, TypeError, OSError, ModuleNotFoundError, MisconfigurationException)
_PACKAGE = __name__.partition(".")[0]
# Types of errors that a package raises as messages to the user.
_SAID: dict[str, tuple[type[Exception], ...]] = {
    _PACKAGE: (ValueError, OSError),
    "lightning": (FileNotFoundError, MisconfigurationException),
    "torchmetrics": (ValueError,),
}
# Modules that pass the user's values to Lightning. Errors of Lightning that they cause are about these values.
_PASSING = {f"{_PACKAGE}.cli", f"{_PACKAGE}.trainer"}
# Packages that may be in the traceback of a refusal. An error that passes through other packages, such as the user's
# own, is not a refusal.
_LIBRARIES = (
    *("lightning", "lightning_utilities", "jsonargparse", "torch", "torchmetrics", "transformers", "peft", "datasets"),
    *("tokenizers", "safetensors", "huggingface_hub", "fsspec", "yaml", "rich"),
)
_BETWEEN = {_PACKAGE, f"{_PACKAGE}_command", *_LIBRARIES, *sys.stdlib_module_names}
_RAISE = dis.opmap["RAISE_VARARGS"]
# Errors of the operating system about the user's path or disk, with advice.
_OF_THE_SYSTEM = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Give a folder that this process may write to."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space, or give a folder on another disk."),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP), "Correct the path."),
    errno.EIO: "Check the disk.",
    errno.ENOENT: "Correct the path.",  # Not always a refusal, because it may be a bug of this package.
}


def is_refusal(error: BaseException) -> bool:
    """Return True if an error is a refusal: a message to the user, not a bug.

    An error is a refusal if a `raise` statement of this package or of Lightning (for a misconfiguration) raised it, or
    if it is an error of the operating system about a path or the disk. Errors of other operations, such as `int("x")`,
    are not refusals.
    """
    calls = list(walk_tb(error.__traceback__))
    owners = [_owner(frame) for frame, _ in calls]
    if not calls or not _BETWEEN.issuperset(owners):
        return False
    if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM.keys() - {errno.ENOENT}:
        return True
    kinds = _SAID.get(owners[-1], ())
    names = {str(frame.f_globals.get("__name__")) for frame, _ in calls}
    if owners[-1] == "lightning" and {name for name in names if name.startswith(f"{_PACKAGE}.")} <= _PASSING:
        kinds = REFUSALS
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return isinstance(error, kinds) and last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def sentence(error: BaseException) -> str:
    """Return the text of a refusal, with advice for errors of the operating system and for a missing extra."""
    if isinstance(error, ModuleNotFoundError) and "`tensorboard`" in str(error):  # Lightning's message has four lines.
        return (
            'TensorBoardLogger needs tensorboard, which is not installed. Run: pip install "lightning-protrain'
            '[tensorboard]".'
        )
    if not isinstance(error, OSError) or error.errno not in _OF_THE_SYSTEM:
        return str(error)
    name = error.filename2 or error.filename
    return f"{error.strerror}{'' if name is None else f': {name!r}'}. {_OF_THE_SYSTEM[error.errno]}"


def refusal_in(error: BaseException) -> BaseException | None:
    """Return the error itself if it is a refusal, else the refusal among its causes, or None."""
    cause: BaseException | None = error
    while cause is not None and not is_refusal(cause):
        cause = cause.__cause__
    return cause


def key_in(config: Mapping[str, Any], error: BaseException) -> str | None:
    """Return the config key that a refusal is about, such as `data.batch_size`, or None if it is unknown.

    The key is that of an argument that the message names, preferably of the class that raised the refusal. If the
    message names no argument, it is the key of the class whose constructor raised the refusal.

    Args:
        config: The config as plain dicts and lists.
        error: The refusal.
    """
    message, settings = str(error), list(_settings(config))
    calls = [frame for frame, _ in walk_tb(error.__traceback__)]
    methods = [(type(frame.f_locals.get("self")).__name__, frame.f_code.co_name) for frame in reversed(calls)]
    kinds = {setting.kind for setting in settings}
    kind, method = next(((kind, method) for kind, method in methods if kind in kinds), ("", ""))
    settings_of_class = [setting for setting in settings if kind and setting.kind == kind]
    for keys in (
        _given(message, settings_of_class),
        _quoted(message, settings_of_class, names=True),
        _named(message, settings_of_class),
        _given(message, settings),
        _quoted(message, settings),
    ):
        if len(keys) == 1:
            return keys.pop()
    holders = {setting.holder for setting in settings_of_class}
    return holders.pop() if method == "__init__" and len(holders) == 1 else None


@dataclass(frozen=True)
class _Setting:
    """One value of a config.

    Attributes:
        key: Full key, such as `data.batch_size`.
        name: Last name in the key.
        kind: Name of the class that takes the value as an argument.
        holder: Key of that class.
    """

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
        items = [(f"{key}.{inner}" if key else str(inner), str(inner), element) for inner, element in value.items()]
    elif isinstance(value, list):
        items = [(f"{key}[{index}]", name, element) for index, element in enumerate(value)]
    for inner_key, inner, element in items:
        yield from _settings(element, inner_key, inner, kind, holder)


def _given(message: str, settings: Iterable[_Setting]) -> set[str]:
    """Return the keys whose name and value begin a message, as in `batch_size=0: give` or `learning_rate is -1.0;`."""
    begins = {
        setting.key: (f"{setting.name}={setting.value!r}", f"{setting.name} is {setting.value!r}")
        for setting in settings
    }
    return {key for key, beginnings in begins.items() if message.startswith(beginnings)}


def _quoted(message: str, settings: Iterable[_Setting], names: bool = False) -> set[str]:
    """Return the keys whose value comes first in a message, as in `No data set 'x'` or `x.jsonl, line 1`.

    With `names`, also search for quoted names, as in `'head' is not a key`.
    """
    places: dict[int, set[str]] = {}
    for setting in settings:
        patterns = [f"'{re.escape(setting.name)}'"] if names else []
        if isinstance(setting.value, str) and setting.value:
            patterns.append(re.escape(repr(setting.value)))
            if re.search(r"[./]", setting.value):  # Paths may have no quotes.
                patterns.append(rf"(?<![\w/.-]){re.escape(setting.value)}(?!\.?[\w/-])")
        starts = [match.start() for pattern in patterns for match in re.finditer(pattern, message)]
        if starts:
            places.setdefault(min(starts), set()).add(setting.key)
    return places[min(places)] if places else set()


def _named(message: str, settings: Sequence[_Setting]) -> set[str]:
    """Return the keys of the first setting that a message names as `plan=`, as `` `family` `` or as its first word.

    Of several settings with that name, return those with the shortest keys.
    """
    for word in re.findall(r"^\w+|\w+(?==)|(?<=`)\w+(?=`)", message):
        keys = {setting.key for setting in settings if setting.name == word}
        if keys:
            least = min(key.count(".") for key in keys)
            return {key for key in keys if key.count(".") == least}
    return set()


def _owner(frame: FrameType) -> str:
    return str(frame.f_globals.get("__package__") or frame.f_globals.get("__name__")).partition(".")[0]


# Configs that cannot be parsed

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
_PLAIN = {"builtins", "types", "pathlib", "datetime", "typing", "collections.abc"}  # Types without `init_args`.
_NEVER_NULL = {int, float, bool, str, list, tuple, dict, Literal}
COMMAND_LINE = "command line"  # Source of values that are not in a config file.
_SPEC = {"class_path", "init_args", "dict_kwargs"}
_SHOWN = 60


def explain(parser: ArgumentParser, arguments: Sequence[str], error: Exception) -> str:
    """Return one sentence on what the parser refused.

    Args:
        parser: Parser of the subcommand.
        arguments: Options of the subcommand, as on the command line.
        error: Error of the parser; its message is returned if no mistake is found.
    """
    if mistake := mistake_in(parser, arguments):
        return mistake
    reason = " ".join(str(error).split())
    if nested := re.findall(r'Parser key "([\w.]+)"', reason):
        return f"`{'.'.join(nested)}` has a value of a wrong type. See the documentation of its class."
    stray = reason.rpartition(" ")[2]
    is_config = reason.startswith("unrecognized arguments") and stray.endswith((".yaml", ".yml"))
    return f"{reason}; did you mean `--config {stray}`?" if is_config else reason


def mistake_in(parser: ArgumentParser, arguments: Sequence[str]) -> str | None:
    """Return one sentence on the first mistake in configs and options: file, key, value, and a similar correct value.

    jsonargparse's own message is long, because it has a part for every type of a union. So this function checks the
    values again, key by key. It also finds a null where a class takes none, which jsonargparse accepts.

    Args:
        parser: Parser of the subcommand.
        arguments: Options of the subcommand, as on the command line.
    """
    tree = {action.dest: dict(action.default) for action in parser._actions if _is_spec(action.default)}
    for name, value in option_values(arguments):
        if name not in ("c", "config"):
            put_option(tree, name, value)
            continue
        content = _config_in(value)
        if isinstance(content, str):
            return content
        tree = _merged(tree, content)
    mistake = _mistake_among(_hints(parser), tree, "", "the config")
    if mistake is None:
        return None
    key, text = mistake
    source = source_of(arguments, key)
    return text if source is None else f"{source}: {text}"


def source_of(arguments: Sequence[str], key: str) -> str | None:
    """Return the last config file that sets a key, or "command line"; None if the key is not set."""
    source, path = None, re.findall(r"[^.\[\]]+", key)
    for name, value in option_values(arguments):
        is_file = name in ("c", "config")
        if holds(_config_in(value) if is_file else put_option({}, name, value), path):
            source = value if is_file else COMMAND_LINE
    return source


def nearest(name: str, names: Iterable[str], form: str = "`{}`") -> str:
    """Return the end of a sentence: a question with the most similar name, or a full stop if no name is similar."""
    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {form.format(near[0])}?" if near else "."


def is_option(text: str) -> bool:
    """Return True if an argument names an option; negative numbers are values."""
    return re.match(r"-(?![\d.])", text) is not None


def option_values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names and values of options; the value is empty if an option has none."""
    left = list(arguments)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if is_option(name):
            if not equals and left and not is_option(left[0]):
                value = left.pop(0)
            yield name.lstrip("-"), value


def _config_in(name: str) -> dict[str, Any] | str:
    """Return the content of a config file, or an error message."""
    try:
        content = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        return f"The config {name!r} cannot be read: {error.strerror}."
    except UnicodeDecodeError:
        return f"The config {name!r} is not a text file."
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        return f"{name}{line}: not YAML: {getattr(error, 'problem', None) or error}."
    return content if isinstance(content, dict) else f"The config {name!r} is not a mapping of keys to values."


def read_text(value: Any) -> Any:
    """Return the mapping or list that the text of an option contains; any other value as it is."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        content = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    return content if isinstance(content, dict | list) else value


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping | Namespace) and "class_path" in value


def put_option(tree: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Set the value of an option such as `model.lora.r`, or append to a list for `trainer.callbacks+`.

    Mappings, and lists of them, are read from text; other text stays as it is, because it may be a template or a path.
    """
    node: Any = tree
    *path, last = name.removesuffix("+").split(".")
    for part in path:
        inner = _inner(node, part)
        if not isinstance(inner.get(part), dict | list):
            text = str(inner.get(part, ""))
            inner[part] = {"class_path": text} if re.fullmatch(r"(\w+\.)*[A-Z]\w*", text) else {}
        node = inner[part]
        if isinstance(node, list):  # Options after `+=` belong to the last element.
            node[-1:] = [
                element if isinstance(element, dict) else {"class_path": element} for element in node[-1:]
            ] or [{}]
            node = node[-1]
    inner = _inner(node, last)
    content: Any = read_text(value)
    if isinstance(content, dict) or (
        isinstance(content, list) and any(isinstance(element, dict) for element in content)
    ):
        value = content
    if name.endswith("+"):
        old = inner.get(last)
        inner[last] = [*(old if isinstance(old, list) else []), value]
    else:
        inner[last] = value
    return tree


def _inner(node: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping that contains a name: the arguments of a class, or the mapping itself."""
    if _is_spec(node) and name not in _SPEC:
        node["init_args"] = dict(node.get("init_args") or {})
        return node["init_args"]
    return node


def _merged(old: Any, new: Any) -> Any:
    """Merge two configs; values of `new` override, and a new class replaces the old class with its arguments."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if _is_spec(new) and new["class_path"] != old.get("class_path"):
        return dict(new)
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def holds(content: Any, path: Sequence[str]) -> bool:
    """Return True if a config contains a key.

    Args:
        content: The config.
        path: Names in the key, without `init_args`.
    """
    if not path:
        return True
    content = read_text(content)  # A list of texts.
    if isinstance(content, list):
        return path[0].isdigit() and int(path[0]) < len(content) and holds(content[int(path[0])], path[1:])
    if not isinstance(content, Mapping):
        return False
    if path[0].isdigit() and path[0] not in content:  # Options have no index: they belong to the last element.
        return holds(content, path[1:])
    deeper = [content.get("init_args"), content.get("dict_kwargs")]
    return (path[0] in content and holds(content[path[0]], path[1:])) or any(holds(inner, path) for inner in deeper)


def _hints(parser: ArgumentParser) -> dict[str, Any]:
    """Return the type of each argument by name; None means any type.

    A type includes null only if it says so, or null is the default of the argument.
    """
    actions = [
        action
        for action in parser._actions
        if not action.dest.endswith("help") and type(action) is not ActionConfigFile
    ]
    groups = {action.dest.rpartition(".")[0] for action in actions}
    hints: dict[str, Any] = {}
    for action in actions:
        if action.dest not in groups:
            hint = getattr(action, "_typehint", action.type)
            is_optional = hint is not None and action.default is None and not action.required
            hints[action.dest] = Union[hint, None] if is_optional else hint  # noqa: UP007  # It may be a function.
    return hints


_Found = tuple[str, str]  # Key with a mistake, and message.


def _mistake_among(hints: Mapping[str, Any], values: Mapping[str, Any], prefix: str, owner: str) -> _Found | None:
    """Return the first mistake in a mapping: a key that is unknown or has a wrong value.

    `hints` has the type of each argument, `prefix` precedes all keys, such as `trainer.`; `owner` is for messages.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name in hints:
            mistake = _mistake(key, hints[name], value)
        elif below := {
            hint.removeprefix(f"{name}."): below_hint
            for hint, below_hint in hints.items()
            if hint.startswith(f"{name}.")
        }:
            mapping = value if isinstance(value, Mapping) else {}
            mistake = _mistake_among(below, mapping, f"{key}.", f"`{key}`")
        else:
            known = {hint.partition(".")[0] for hint in hints} | ({"config"} if not prefix else set())
            mistake = key, f"`{key}: {_short(value)}` is not known to {owner}{nearest(str(name), known)}"
        if mistake is not None:
            return mistake
    return None


def _mistake(key: str, hint: Any, value: Any) -> _Found | None:
    """Return the mistake in the value of a key, or None if the value has the type `hint`."""
    if not set(_members(hint)) <= {str, NoneType, None}:
        value = read_text(value)
    if hint is None or ((accepted := _accepts(hint, value)) and not _holds_null(value)):
        return None
    kinds = _members(hint)
    if isinstance(value, list):
        lists = [kind for kind in kinds if get_origin(kind) in (list, Sequence, Iterable) and get_args(kind)]
        for index, element in enumerate(value if lists else []):
            part = reduce(operator.or_, (get_args(kind)[0] for kind in lists))
            if (mistake := _mistake(f"{key}[{index}]", part, element)) is not None:
                return mistake
    classes = [kind for kind in kinds if isinstance(kind, type) and kind.__module__ not in _PLAIN]
    if isinstance(value, Mapping):
        for part in [get_args(kind)[1] for kind in kinds if get_origin(kind) in (dict, Mapping)]:
            for name, element in value.items():
                if (mistake := _mistake(f"{key}.{name}", part, element)) is not None:
                    return mistake
    if isinstance(value, Mapping) or (isinstance(value, str) and str not in kinds):
        for base in classes:
            if (mistake := _mistake_in_class(key, base, value)) is not None:
                return mistake
    if accepted:
        return None
    wanted = list(dict.fromkeys(word for kind in kinds for word in _described(kind)))
    choices = [str(element) for kind in kinds if get_origin(kind) is Literal for element in get_args(kind)]
    end = nearest(str(value), choices) if choices else "."
    listed = ", ".join(wanted[:-1]) + (" or " if len(wanted) > 1 else "") + wanted[-1]
    return key, f"`{key}: {_short(value)}` must be {listed}{end}"


def _mistake_in_class(key: str, base: type, value: str | Mapping[str, Any]) -> _Found | None:
    """Return the mistake in a class path or its arguments, for a value that must be an instance of `base`."""
    kind, init_args = base, value
    if not is_dataclass(base):
        spec = {"class_path": value} if isinstance(value, str) else value
        if not _is_spec(spec):
            return key, f"`{key}: {_short(value)}` must have `class_path`, and the class' arguments in `init_args`."
        path = str(spec["class_path"])
        target = _class_called(path, base)
        if target is None:
            near = nearest(path.rpartition(".")[2], (subclass.__name__ for subclass in _subclasses(base)))
            return key, f"`{key}: {path}` is not a {base.__name__} that can be imported{near}"
        stray = next((name for name in spec if name not in _SPEC), None)
        if stray is not None:
            near = nearest(stray, _SPEC) if get_close_matches(stray, _SPEC) else ": move it to `init_args`."
            return f"{key}.{stray}", f"`{key}.{stray}: {_short(spec[stray])}` is beside `class_path`{near}"
        kind, init_args = target, spec.get("init_args") or {}
    if not isinstance(init_args, Mapping):
        return None
    arguments = ArgumentParser(exit_on_error=False)
    arguments.add_class_arguments(kind, fail_untyped=False)
    found_below = _mistake_among(_hints(arguments), init_args, f"{key}.", kind.__name__)
    absent = [action.dest for action in arguments._actions if action.required and action.dest not in init_args]
    if found_below is None and absent:
        return key, f"`{key}` lacks `{absent[0]}`, which {kind.__name__} requires."
    return found_below


def _class_called(path: str, base: type) -> type | None:
    """Return the class with this full name, or the subclass of `base` with this short name; None if there is none."""
    module, _, name = path.rpartition(".")
    if not module:
        return next((subclass for subclass in _subclasses(base) if subclass.__name__ == name), None)
    try:
        target = getattr(import_module(module), name, None)
    except ImportError:
        return None
    return target if isinstance(target, type) and issubclass(target, base) else None


def _subclasses(base: type) -> Iterator[type]:
    subclass: type
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _accepts(hint: Any, value: Any) -> bool:
    kinds = _members(hint)
    if value is None or (value == "null" and str not in kinds):  # jsonargparse accepts null for every type.
        return any((get_origin(kind) or kind) not in _NEVER_NULL for kind in kinds)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        parser.parse_object({"value": deepcopy(value)})
    except (ArgumentError, TypeError, ValueError, KeyError):
        return False
    return True


def _holds_null(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(element is None or _holds_null(element) for element in inner)


def _members(hint: Any) -> list[Any]:
    """Return the types of a union, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    return [hint]


def _described(kind: Any) -> list[str]:
    origin = get_origin(kind)
    if origin is Literal:
        return [str(choice) for choice in get_args(kind)]
    if origin is tuple and ... not in get_args(kind):
        return [f"a list of {len(get_args(kind))}"]
    if origin in (list, tuple, Sequence, Iterable):
        return ["a list"]
    if origin in (dict, Mapping) or is_dataclass(kind):
        return ["a mapping"]
    return [_WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"]


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def refuse_absent_gpu(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the Trainer is to use a GPU and there is none; say why."""
    name = settings.get("accelerator")
    if name in ("gpu", "cuda") and (reason := why_no_gpu()):
        raise ValueError(f"`trainer.accelerator: {name}` needs a GPU, but {reason} Or train on the CPU with cpu.")
