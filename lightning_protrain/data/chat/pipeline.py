"""Makes encoders from the user's chat settings: chooses and verifies the chat format of a tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lightning_protrain.config import check_kinds
from lightning_protrain.data.batches.encode import ChatEncoder, OnUntrainable
from lightning_protrain.data.batches.encode_text import TextEncoder
from lightning_protrain.data.batches.media_rows import MediaEncoder, with_media
from lightning_protrain.data.batches.processor import check_names, load_media_processor
from lightning_protrain.data.chat.chat_format import EOS, Family, parse_boundaries
from lightning_protrain.data.chat.detect_format import (
    check_template,
    family_named,
    find_family,
    has_template,
    unwritten_scaffolds,
    with_prompt,
    with_scaffolds,
    with_tags,
)
from lightning_protrain.data.chat.markers import Marker, Markers, resolve
from lightning_protrain.data.chat.mask import ASSISTANT, MaskOptions, token_kinds, trained_roles
from lightning_protrain.data.chat.render import Renderer, TemplateDate, check_variables
from lightning_protrain.data.chat.verify_format import (
    end_tokens,
    leaking_roles,
    leaves_open,
    user_header,
    verify_family,
)
from lightning_protrain.data.chat.vocabulary import Vocabulary

# Matches names of template variables such as "training", with which a template may write the last end token.
_FOR_TRAINING = re.compile(r"\b\w*train\w*\b")
_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")


@dataclass(frozen=True)
class ChatSettings:
    """Settings for rendering and masking the conversations of one data set; see `ChatDataModule`.

    Raises:
        ValueError: If a value is invalid; or if nothing would be trained, unless `on_untrainable` is "warn".
    """

    family: str | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    train_on_inputs: bool = False
    roles_to_train: list[str] | None = None
    train_on_eos: Any = "turn"
    train_on: Any = "all"
    train_thinking: bool = True
    role_boundaries: list[dict[str, Any]] | None = None
    on_untrainable: OnUntrainable = "drop"
    max_length: int = 512
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_eos: bool = True

    def __post_init__(self) -> None:
        if self.on_untrainable not in get_args(OnUntrainable):
            choices = ", ".join(get_args(OnUntrainable))
            raise ValueError(f"on_untrainable must be one of {choices}, got {self.on_untrainable!r}.")
        check_kinds(str, "text", family=self.family)
        check_kinds(str | os.PathLike, "text or a path", chat_template=self.chat_template)
        check_kinds(Mapping, "a mapping", chat_template_kwargs=self.template_kwargs)
        check_kinds(Mapping, "a mapping", processor_kwargs=self.processor_kwargs)
        if self.family is not None:
            family_named(self.family)
        check_variables(self.template_kwargs)
        check_names(self.processor_kwargs)
        assert self.template is None or self.template  # reads the template's file, to report early if it is missing
        nothing = "roles_to_train" if self.roles_to_train == [] else "role_boundaries"
        empty = not self.options.roles or (self.boundaries is not None and not self.boundaries.boundaries)
        if empty and self.on_untrainable != "warn" and not self.train_on_inputs:
            raise ValueError(
                f"{nothing} is an empty list, so nothing would be trained. Leave it out, or let `on_untrainable` be "
                '"warn" if that is what you want.'
            )

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles in `role_boundaries` or `family`."""
        family = self.boundaries or (None if self.family is None else family_named(self.family))
        return () if family is None else family.roles

    @property
    def format(self) -> str:
        """Key that is equal for settings with the same chat format, template and template variables."""
        return repr((self.family, self.template, sorted(self.template_kwargs.items()), self.boundaries))

    @cached_property
    def options(self) -> MaskOptions:
        """Options of the loss mask."""
        roles: Any = self.roles_to_train
        if isinstance(roles, list | tuple):
            roles = tuple(roles)
        if self.boundaries is not None and not self.boundaries.boundaries:
            roles = ()
        return MaskOptions(self.train_on_inputs, roles, self.train_on_eos, self.train_on, self.train_thinking)

    @cached_property
    def boundaries(self) -> Family | None:
        """Chat format of `role_boundaries`; None if the user gave none."""
        return None if self.role_boundaries is None else parse_boundaries(self.role_boundaries)

    @cached_property
    def template(self) -> str | None:
        """Text of the chat template that replaces the tokenizer's; None if the user gave none.

        Raises:
            ValueError: If `chat_template` is the path of a file that does not exist.
        """
        if self.chat_template is None or not str(self.chat_template).endswith(_TEMPLATE_SUFFIXES):
            return self.chat_template
        path = Path(self.chat_template).expanduser()
        if not path.is_file():
            raise ValueError(f"chat_template={self.chat_template!r} is not a file. Correct the path, or give its text.")
        return path.read_text(encoding="utf-8")


class ChatEncoders:
    """Makes the encoders of all data sets, which share one tokenizer.

    Args:
        tokenizer: The tokenizer.
        name: Folder or name from which to load the model's processor; None means that there is no processor.
        day: Date for templates that write one, in ISO format; None means today.
        new_tokens: Special tokens to add to the processor's tokenizer.

    Attributes:
        date: Date for templates that write one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None,
        day: str | None = None,
        new_tokens: Sequence[str] = (),
    ) -> None:
        self._new_tokens = new_tokens
        self.date = TemplateDate(day)
        self._tokenizer = tokenizer
        self._name = name
        self._verified: dict[str, tuple[ChatEncoder, str]] = {}
        self._recognised: dict[str, tuple[Family, Markers]] = {}
        self._logged: set[str] = set()
        self._processors: dict[str, Any] = {}

    def row_encoder(self, settings: ChatSettings, row: Mapping[str, Any]) -> ChatEncoder | TextEncoder:
        """Return the encoder for a data set whose rows are like `row`.

        Raises:
            ValueError: As in `encoder`; or if the row is a preference and the settings would train its prompt.
        """
        if "sides" in row and (settings.train_on_inputs or settings.train_on_eos == "all"):
            name = "train_on_inputs: true" if settings.train_on_inputs else "train_on_eos: all"
            raise ValueError(f"`{name}` trains prompts, but of preferences only answers are trained. Leave it out.")
        side = row["sides"][0] if "sides" in row else row
        if "text" not in side and ("plain" not in side or has_template(self._tokenizer, settings.template)):
            return self.encoder(settings)
        return self.text_encoder(settings)

    def text_encoder(self, settings: ChatSettings) -> TextEncoder:
        """Return the encoder for plain text."""
        return TextEncoder(
            self._tokenizer, settings.max_length, settings.on_untrainable, settings.train_on_inputs, settings.add_eos
        )

    def encoder(self, settings: ChatSettings, processor: Any = None) -> ChatEncoder:
        """Return the encoder for conversations of a data set.

        Args:
            settings: Settings of the data set.
            processor: The model's processor; its media tokens are never trained, and its chat template replaces the
                tokenizer's. None means that the data set has no media.

        Raises:
            ValueError: If the chat format that the user gave does not fit the template, or no known one fits.
        """
        quiet = not settings.options.train_thinking
        key = f"{settings.format} {quiet} {processor is not None}"
        if key not in self._verified:
            self._verified[key] = self._verify(settings, processor, quiet)
        verified, header = self._verified[key]
        trained_roles(verified.markers, settings.options)
        if "user" in settings.options.roles and header and not settings.train_on_inputs:
            raise ValueError(
                f"roles_to_train names 'user', but then {header!r}, which the chat template writes around a user's "
                "words, would be trained too. Give `role_boundaries` whose markers include it."
            )
        return replace(
            verified, options=settings.options, max_length=settings.max_length, on_untrainable=settings.on_untrainable
        )

    def _verify(self, settings: ChatSettings, processor: Any, quiet: bool) -> tuple[ChatEncoder, str]:
        """Return an encoder with a verified chat format, and the text around a user's words, see `user_header`."""
        template = settings.template or getattr(processor, "chat_template", None)
        check_template(self._tokenizer, template)
        everything = self.renderer(settings.template_kwargs, template)
        vocabulary = Vocabulary(self._tokenizer)
        if settings.boundaries is not None:
            family, source = with_prompt(settings.boundaries, everything.ids, vocabulary), "role_boundaries"
            markers = resolve(family, vocabulary, strict=True)
            if markers.roles:
                markers = with_scaffolds(markers, vocabulary, everything.ids)
        elif settings.family is not None:
            family, source = with_prompt(family_named(settings.family), everything.ids, vocabulary), "given by name"
            markers = resolve(family, vocabulary)
        else:
            # The processor often has the chat template of the tokenizer.
            key = f"{settings.format} {template or getattr(self._tokenizer, 'chat_template', None)}"
            if key not in self._recognised:
                self._recognised[key] = find_family(vocabulary, everything.ids)
            (family, markers), source = self._recognised[key], "recognised"
        if quiet:
            markers = with_tags(markers, vocabulary, everything.ids)
        renderer = self.renderer(settings.template_kwargs, template, self._texts(family))
        unproven = verify_family(renderer.ids, vocabulary, markers)
        if processor is not None:
            markers = with_media(markers, processor)
        described = _describe(settings, markers, source, unproven)
        if described not in self._logged:  # data sets with different options may have the same description
            self._logged.add(described)
            rank_zero_info(described)
        should_end = any(
            role.role == ASSISTANT and role.ends and role.include_end and not role.open_ended for role in markers.roles
        )
        is_open = should_end and leaves_open(renderer.ids, vocabulary)
        if is_open and settings.train_on_eos != "none" and not settings.train_on_inputs:
            self._warn_open(settings.template_kwargs, template)
        encoder = ChatEncoder(
            renderer,
            markers,
            leaking=leaking_roles(renderer.ids, vocabulary, markers),
            unproven=unproven,
            unwritten=unwritten_scaffolds(markers, vocabulary, renderer.ids),
            leaves_open=is_open,
            end_ids=end_tokens(renderer.ids, vocabulary, markers),
        )
        return encoder, user_header(renderer.ids, vocabulary, markers)

    def renderer(
        self, template_kwargs: Mapping[str, Any], template: str | None, markers: list[str] | None = None
    ) -> Renderer:
        """Return a renderer with the tokenizer and the date of the run; the arguments are those of `Renderer`."""
        return Renderer(self._tokenizer, markers, template_kwargs, template, self.date)

    def _warn_open(self, template_kwargs: Mapping[str, Any], template: str | None) -> None:
        """Warn that the template writes no end token after the last turn; name a template variable that adds it."""
        text = str(template or self._tokenizer.chat_template)
        closing = None
        for name in dict.fromkeys(_FOR_TRAINING.findall(text)):
            renderer = self.renderer({**template_kwargs, name: True}, template)
            if not leaves_open(renderer.ids, Vocabulary(self._tokenizer)):
                closing = name
                break
        help_ = (
            f"Set `chat_template_kwargs` to {{{closing}: true}}, which adds it."
            if closing
            else "Give a `chat_template` that writes one, or the model learns where to stop only from earlier turns."
        )
        rank_zero_warn(
            "The chat template writes no end token after the last turn of a conversation, so none is trained there. "
            + help_
        )

    def _texts(self, family: Family) -> list[str]:
        """Return the text of all markers of turns and tool results, and of media tokens."""
        ends = [end for boundary in family.boundaries for end in boundary.end if end is not None]
        eos = str(self._tokenizer.eos_token or "")
        starts = [start for boundary in family.boundaries for start in boundary.start]
        outputs = [text for part in family.exclusions if part.kind == "tool_output" for text in (part.start, part.end)]
        return [*starts, *(eos if end == EOS else end for end in ends), *outputs, *family.media]

    def media_encoder(self, settings: ChatSettings) -> MediaEncoder:
        """Return the encoder for a data set with media.

        Raises:
            ValueError: If the model has no processor for media.
        """
        processor = self.processor(settings.processor_kwargs)
        return MediaEncoder(self.encoder(settings, processor), processor)

    def processor(self, options: Mapping[str, Any]) -> Any:
        """Load the model's processor with the settings in `options`, and cache it.

        Raises:
            ValueError: If the model has no processor, or the processor does not take a setting.
        """
        if self._name is None:
            raise ValueError("The data has images, audio or videos: give the `tokenizer` of a model for them and text.")
        key = repr(sorted(options.items()))
        if key not in self._processors:
            self._processors[key] = load_media_processor(self._name, options, self._new_tokens)
        return self._processors[key]

    def kinds(
        self, settings: ChatSettings, media: bool = False, plain: bool = False
    ) -> Callable[[NDArray[Any]], NDArray[np.int8]]:
        """Return a function that classifies the tokens of a row, see `token_kinds`.

        Args:
            settings: Settings of the data set.
            media: True if the data set has media.
            plain: True if it is plain text, which has no markers.
        """
        if plain:
            return partial(np.zeros_like, dtype=np.int8)
        markers = (self.media_encoder(settings).chat if media else self.encoder(settings)).markers
        return partial(token_kinds, markers=markers)


def _describe(settings: ChatSettings, markers: Markers, source: str, unproven: Mapping[str, str]) -> str:
    """Describe a chat format for the log: name, source, trained roles with markers, and features that failed."""
    options = settings.options
    trained = [role for role in markers.roles if role.role in options.roles]
    roles = "; ".join(
        f"{role.role} from {_texts(role.starts)} to {_texts(role.ends) or 'the next turn'}" for role in trained
    )
    ends = " Its trained turns have no end marker, so the model does not learn where to stop." * any(
        not role.ends for role in trained
    )
    doubts = "; ".join(f"{feature} ({why})" for feature, why in unproven.items())
    return (
        f"Chat format {markers.family!r} ({source}), trained: "
        f"{'everything' if options.train_on_inputs else roles or 'nothing'}.{ends}"
        + (f" Features whose check failed, so that each turn must be exactly its message: {doubts}." if doubts else "")
    )


def _texts(markers: tuple[Marker, ...]) -> str:
    return " | ".join(dict.fromkeys(repr(marker.text) for marker in markers[:3]))
