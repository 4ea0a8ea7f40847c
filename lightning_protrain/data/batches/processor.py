"""Loads the processor of a model with the user's settings, and refuses settings that nothing reads."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoProcessor
from transformers.processing_utils import ImagesKwargs, ProcessorMixin, VideosKwargs

from lightning_protrain.data.batches.tokenizer import add_tokens
from lightning_protrain.data.conversation import MediaKind
from lightning_protrain.data.extras import missing_package
from lightning_protrain.data.hub import hub_refusals

# Map from a key of `processor_kwargs` with settings for one part of a processor to the attribute with that part.
PARTS = {"images_kwargs": "image_processor", "videos_kwargs": "video_processor", "audio_kwargs": "feature_extractor"}
# For each kind of media: the key in `PARTS`, and the argument of the processor's `__call__` that passes the media.
_READERS: dict[MediaKind, tuple[str, str]] = {
    "image": ("images_kwargs", "images"),
    "audio": ("audio_kwargs", "audio"),
    "video": ("videos_kwargs", "videos"),
}

_CALL = "It is an argument of each call, and set for training; leave it out."
_RESERVED = {
    "revision": "Processor and model are of one folder: give `tokenizer` a folder of that revision.",
    "trust_remote_code": "Code that comes with a model is never run: give a model whose processor is in transformers.",
    "chat_template": "Use the option `chat_template`.",
    "max_length": "Use the option `max_length`.",
    **dict.fromkeys(("return_tensors", "add_special_tokens", "padding", "truncation", "text_kwargs"), _CALL),
    **dict.fromkeys(("common_kwargs", "device", "data_format", "input_data_format", "disable_grouping"), _CALL),
    **dict.fromkeys(("return_metadata", "video_metadata", "return_attention_mask", "sampling_rate"), _CALL),
    **dict.fromkeys(("text", "images", "videos", "audio"), "It comes from the rows of the data; leave it out."),
}
# Settings that transformers declares for every image and video processor, even if the processor ignores them.
_COMMON = {*ImagesKwargs.__annotations__, *VideosKwargs.__annotations__}
# Settings in `_COMMON` that the base classes of all processors read.
_ALWAYS_READ = {"do_convert_rgb", "default_to_square", "do_sample_frames", "fps", "num_frames"}


def check_names(options: Mapping[str, Any]) -> None:
    """Raise ValueError if `processor_kwargs` has a name that is not a setting of any processor."""
    for name, value in options.items():
        if name in _RESERVED:
            raise ValueError(f"processor_kwargs names {name!r}, which is no setting of a processor. {_RESERVED[name]}")
        if name in PARTS:
            if not isinstance(value, Mapping):
                raise ValueError(f"processor_kwargs: {name} is {value!r}. Give a mapping of settings.")
            check_names(value)


def load_processor(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Load the processor of a model.

    Args:
        name: A local folder, or a name on the Hugging Face Hub.
        options: Settings that replace settings in the processor's files. The keys in `PARTS` contain settings for one
            part of the processor. None replaces nothing.

    Raises:
        OSError: If the model has no processor.
        ValueError: If a package that the processor needs is not installed, or it does not take a setting.
    """
    processor = _build(name, {})
    if not options:
        return processor
    if not isinstance(processor, ProcessorMixin):
        raise ValueError(f"processor_kwargs names {', '.join(options)}, and {name!r} has no processor but a tokenizer.")
    check_names(options)
    flat = {key: value for key, value in options.items() if key not in PARTS}
    _check_options(processor, flat, options)
    made = _build(name, flat)
    # transformers also passed the settings to the tokenizer. Remove them there, except settings that the processor's
    # class has defaults for: in a call, a setting of the tokenizer takes precedence over such a default.
    defaults = {key for group in PARTS for key in getattr(type(made), group, {})}
    tokenizers = [getattr(getattr(holder, "tokenizer", None), "init_kwargs", {}) for holder in (processor, made)]
    for key in flat.keys() - tokenizers[0].keys() - defaults:
        tokenizers[1].pop(key, None)
    for group, part in _parts(made):
        settings = dict(options.get(group, {}))
        if not hasattr(type(part), "valid_kwargs"):  # `from_pretrained` sets only settings that the files contain.
            settings = {**{key: flat[key] for key in flat.keys() & _taken(part)}, **settings}
        if settings:
            setattr(made, PARTS[group], type(part).from_dict(part.to_dict(), **settings))
    return made


def load_media_processor(name: str, options: Mapping[str, Any] | None = None, new_tokens: Sequence[str] = ()) -> Any:
    """Load a processor that reads media; see `load_processor`, and `add_tokens` for `new_tokens`.

    Raises:
        ValueError: If the model has no processor for media, a package that the processor needs is not installed, or it
            does not take a setting.
    """
    needs = f"processor_kwargs names {', '.join(options)}" if options else "The data has media"
    try:
        processor = load_processor(name, options)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{needs}, and {name!r} has no processor for media: {reason}") from error
    if not dict(_parts(processor)):
        raise ValueError(f"{needs}, and {name!r} reads text only. Give the `tokenizer` of a model for both.")
    add_tokens(processor.tokenizer, new_tokens)
    return processor


def takes_conversations(processor: Any) -> bool:
    """Return True if a processor reads audio only in whole conversations, through mistral-common."""
    return type(processor).__name__ == "VoxtralProcessor"


def part_for(processor: Any, kind: MediaKind) -> Any:
    """Return the part of a processor that reads media of a kind; raise ValueError if there is none."""
    group, argument = _READERS[kind]
    part, call = dict(_parts(processor)).get(group), inspect.signature(type(processor).__call__)
    if getattr(processor.tokenizer, "backend_tokenizer", None) is None and not takes_conversations(processor):
        raise ValueError(
            f"The data has {argument}, which {type(processor).__name__} cannot read through mistral-common. Give a "
            "`tokenizer` whose folder has a tokenizer.json and no tekken.json."
        )
    if part is None or not (argument in call.parameters or takes_conversations(processor)):
        raise ValueError(
            f"The data has {argument}, which {type(processor).__name__} cannot read beside rendered text. Give the "
            "`tokenizer` of a model that can, or leave such rows out."
        )
    return part


def _build(name: str, options: Mapping[str, Any]) -> Any:
    with hub_refusals(name):
        try:
            return AutoProcessor.from_pretrained(name, **options)
        except ImportError as error:
            raise ValueError(f"The processor of {name!r} cannot be built: {missing_package(error)}") from error
        except (ValueError, TypeError, KeyError) as error:
            also = f" with processor_kwargs={dict(options)}" if options else ""
            raise ValueError(f"{name!r} has no processor for media{also}: {' '.join(str(error).split())}") from error


def _parts(processor: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key in `PARTS` and the object of each part that a processor has."""
    for group, attribute in PARTS.items():
        part = getattr(processor, attribute, None)
        if part is not None:
            yield group, part


def _taken(part: Any) -> set[str]:
    """Return the names of the settings that a part of a processor reads."""
    kind = type(part)
    declared = getattr(getattr(kind, "valid_kwargs", None), "__annotations__", None)
    if declared is None:  # Feature extractors declare their settings as arguments.
        named = set(inspect.signature(kind.__init__).parameters) & part.to_dict().keys()
        return named - _RESERVED.keys()
    read = _ALWAYS_READ | set(inspect.signature(kind._preprocess).parameters)
    taken = {key for key in declared if key not in _COMMON or key in read}
    return {key for key in taken if not key.startswith("return_")} - _RESERVED.keys()


def _own(processor: Any) -> dict[str, Any]:
    """Return the settings of a processor that do not belong to a part, with their defaults."""
    named = inspect.signature(type(processor).__init__).parameters.values()
    plain = {
        parameter.name: parameter.default
        for parameter in named
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    others = {"self", "audio_tokenizer", *processor.get_attributes(), *_RESERVED}
    return {key: default for key, default in plain.items() if key not in others}


def _check_options(processor: Any, flat: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError if a processor does not read a setting, or a value has a wrong type.

    `flat` has those of `options` that are outside of the keys in `PARTS`.
    """
    kind, own_settings = type(processor).__name__, _own(processor)
    parts = dict(_parts(processor))
    taken = {group: _taken(part) for group, part in parts.items()}
    everything = {*own_settings, *chain.from_iterable(taken.values())}
    for key, value in flat.items():
        takers = [group for group in parts if key in taken[group]]
        if not takers and key not in own_settings:
            raise ValueError(_unknown(key, kind, everything))
        default = own_settings.get(key)
        if default not in (None, inspect.Parameter.empty) and not isinstance(value, type(default)):
            expected = type(default).__name__
            raise ValueError(f"processor_kwargs: {key}={value!r} is refused by {kind}: expected {expected}.")
        for group in takers:
            _check_value(parts[group], key, value)
    for group in options.keys() & PARTS.keys():
        if group not in parts:
            raise ValueError(f"processor_kwargs names {group!r}, and {kind} has no {PARTS[group]}. Leave it out.")
        for key, value in options[group].items():
            if key not in taken[group]:
                raise ValueError(_unknown(key, f"{PARTS[group]} of {kind}", taken[group]))
            if key in getattr(type(processor), group, {}):  # Such a default overrides the setting in every call.
                raise ValueError(f"processor_kwargs: {kind} replaces {key!r} of {group}. Give it beside {group}.")
            _check_value(parts[group], key, value)


def _unknown(key: str, kind: str, names: set[str]) -> str:
    near = difflib.get_close_matches(key, sorted(names), n=3)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"It takes {', '.join(sorted(names))}."
    return f"processor_kwargs names {key!r}, which {kind} does not take. {hint}"


def _check_value(part: Any, key: str, value: Any) -> None:
    declared = getattr(type(part), "valid_kwargs", None)
    if declared is None:
        return
    try:
        validate_typed_dict(declared, {key: value})
    except StrictDataclassError as error:
        why = " ".join(str(error).split()).partition(" Errors: ")[0]
        raise ValueError(f"processor_kwargs: {key}={value!r} is refused by {type(part).__name__}: {why}") from error
