"""Renders conversations with a chat template, and encodes the text.

A user who writes "<|im_end|>" into a message must not end the turn. So control tokens in messages (special tokens, and
added tokens within markers) are encoded as plain text. In the assistant's messages, only markers of turns and media
tokens are, because its text often contains control tokens for reasoning and tool calls. A plain-text marker such as
"ASSISTANT:" cannot be told from a user's words, so a conversation that contains one is flagged as suspicious. Compare
https://github.com/huggingface/transformers/issues/29279
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, __version__
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from lightning_protrain.data.chat.check_turns import has_tags
from lightning_protrain.data.conversation import NO_VARIABLES, Conversation

Messages = Sequence[Mapping[str, Any]]
# Renders messages like `Renderer.ids`, and raises ValueError if the template refuses them.
Render = Callable[..., list[int]]
# Exceptions that a chat template raises for messages that it does not accept.
REFUSALS: tuple[type[Exception], ...] = (
    *(TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, NotImplementedError),
)
# Functions that tell control tokens in messages from those of the template; older versions of transformers lack them.
encode_marked_chat: Any = getattr(chat_template_utils, "encode_marked_chat", None)
mark_control_tokens: Any = getattr(chat_template_utils, "mark_control_tokens", None)
# Fields of a message that may contain control tokens.
_FILLED = ("content", "reasoning_content", "tool_calls", "name", "tool_call_id")


def check_variables(names: Iterable[str]) -> None:
    """Raise ValueError if `chat_template_kwargs` names what is not a variable of a template."""
    for name in names:
        if name in NO_VARIABLES:
            raise ValueError(
                f"chat_template_kwargs names {name!r}, which is not a variable of a chat template. {NO_VARIABLES[name]}"
            )


class TemplateDate:
    """The date that chat templates write with `strftime_now`.

    A run keeps the date of its first start: otherwise a run that resumes on another day would have other tokens.

    Args:
        day: Date in ISO format; None means today.

    Attributes:
        day: Date in ISO format.
        was_read: True if a template has asked for the date.
    """

    def __init__(self, day: str | None = None) -> None:
        if day is None:
            ((day,), _) = render_jinja_template([[]], chat_template="{{ strftime_now('%Y-%m-%d') }}")
        self.day: str = day
        self.was_read = False

    def __call__(self, format: str) -> str:
        """Format the date like `strftime`; its time is midnight."""
        self.was_read = True
        return datetime.fromisoformat(self.day).strftime(format)

    @contextmanager
    def given_to(self, template: str) -> Iterator[None]:
        """Make a template write this date; transformers passes no function to a template as a variable."""
        names = _compile_jinja_template(template).environment.globals
        usual = names["strftime_now"]
        names["strftime_now"] = self
        try:
            yield
        finally:
            names["strftime_now"] = usual


@dataclass(frozen=True)
class Rendered:
    """The text that a chat template makes of a conversation.

    Attributes:
        text: Output of the template. If `sanitized` is True, it marks the control tokens to encode as plain text.
        sanitized: True if a message contains a control token.
        suspicious: True if a message contains a plain-text marker.
        ids: Token ids, if the tokenizer renders and encodes in one step; otherwise None.
    """

    text: str
    sanitized: bool = False
    suspicious: bool = False
    ids: tuple[int, ...] | None = None


class Renderer:
    """Applies a chat template and encodes its output; control tokens in messages become plain text.

    Args:
        tokenizer: The tokenizer.
        markers: Text of markers and media tokens, to encode as plain text in messages; None means all added tokens.
        template_kwargs: Further variables of the template, for example `enable_thinking`.
        chat_template: Template that replaces the tokenizer's; None replaces nothing.
        date: Date for templates that write one; None means today.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        markers: Iterable[str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        date: TemplateDate | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._date = TemplateDate() if date is None else date
        self._markers = None if markers is None else frozenset(marker.strip() for marker in markers) - {""}
        self._kwargs = dict(template_kwargs or {})
        if chat_template is not None:
            self._kwargs["chat_template"] = chat_template

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> Rendered:
        """Render a conversation.

        Raises:
            ValueError: If the template refuses the conversation.
        """
        tools = conversation.get("tools") or None
        if self._encodes_at_once:
            ids = self._ids_at_once(conversation, tools, add_generation_prompt)
            return Rendered(self.tokenizer.decode(ids), ids=tuple(ids))
        messages = [self._as_template_reads(message) for message in conversation["messages"]]
        if any("tool_calls" in message for message in messages):
            messages = _with_named_ids(messages) if self._writes_ids else messages
            messages = [_with_json(message) for message in messages] if self._reads_json else messages
        sanitized = suspicious = False
        for message in messages:
            control = self._turn_tokens if message["role"] == "assistant" else self._control_tokens
            for key in _FILLED:
                if key not in message:
                    continue
                texts = list(_strings(message[key]))
                suspicious |= any(map(self._plain_markers.search, texts))
                if any(map(control.search, texts)):
                    sanitized = True
                    message[key] = _marked(message[key], control)
        if tools is not None and any(map(self._control_tokens.search, _strings(tools))):
            sanitized, tools = True, _marked(tools, self._control_tokens)
        variables = conversation.get("template_kwargs", {})
        return Rendered(self._apply(messages, tools, variables, add_generation_prompt), sanitized, suspicious)

    def encode(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """Return the token ids of each text; no special token is added."""
        if self._encodes_at_once:
            return [list(rendering.ids or ()) for rendering in rendered]
        plain = [rendering.text for rendering in rendered if not rendering.sanitized]
        encoded = iter(self.tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else ())
        return [
            encode_marked_chat(self.tokenizer, rendering.text) if rendering.sanitized else list(next(encoded))
            for rendering in rendered
        ]

    def ids(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render and encode messages; return the token ids.

        Raises:
            ValueError: If the template refuses the messages.
        """
        conversation: Any = {"messages": messages} if tools is None else {"messages": messages, "tools": list(tools)}
        return self.encode([self.render(conversation, add_generation_prompt)])[0]

    def as_decoded(self, conversation: Conversation) -> Conversation:
        """Return a conversation with the text that its tokens decode to.

        A tokenizer may normalize text: Qwen's composes characters, so that "e" with a combining accent becomes one
        character. ASCII text is not compared.
        """
        texts = [text for text in dict.fromkeys(_strings(conversation["messages"])) if not text.isascii()]
        if not texts or self._encodes_at_once:
            return conversation
        # A control token is no text to normalize.
        ids = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        decoded = dict(zip(texts, self.tokenizer.batch_decode(ids), strict=True))
        messages = _mapped(conversation["messages"], lambda text: decoded.get(text, text))
        return {**conversation, "messages": messages}

    def _ids_at_once(self, conversation: Conversation, tools: Any, add_generation_prompt: bool) -> list[int]:
        # mistral-common refuses arguments that are None or False.
        options = {"tools": tools} if tools else {}
        options |= {"add_generation_prompt": True} if add_generation_prompt else {}
        messages, variables = conversation["messages"], {**self._kwargs, **conversation.get("template_kwargs", {})}
        with _refused(messages):
            plain = [_without_weights(message) for message in messages]
            encoded = self.tokenizer.apply_chat_template(plain, return_dict=True, **options, **variables)
        return [int(index) for index in encoded["input_ids"]]

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        variables: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = False,
    ) -> str:
        variables = {**self._kwargs, **variables}
        with (
            _refused(messages),
            self._date.given_to(self.tokenizer.get_chat_template(self._kwargs.get("chat_template"), tools)),
        ):
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
                )
            )

    def _as_template_reads(self, message: Mapping[str, Any]) -> dict[str, Any]:
        read = _without_weights(message)
        if self._reads_parts and isinstance(read["content"], str):
            read["content"] = [{"type": "text", "text": read["content"]}]
        return read

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the template, without the template itself."""
        return {name: value for name, value in self._kwargs.items() if name != "chat_template"}

    @property
    def _encodes_at_once(self) -> bool:
        """True for a tokenizer of mistral-common, which never encodes text in a message as a control token."""
        return getattr(self.tokenizer, "backend_tokenizer", None) is None

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template drops contents that are strings, and needs a list of parts."""
        plain = [{"role": "user", "content": "walnut"}, {"role": "assistant", "content": "maple"}]
        listed = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in plain]
        for messages, wants_parts in ((plain, False), (listed, True)):
            try:
                text = self._apply(messages, None)
            except ValueError:
                continue
            if "walnut" in text and "maple" in text and "'type'" not in text:
                return wants_parts
        return False

    @cached_property
    def _writes_ids(self) -> bool:
        """True if the template writes the id of a tool call in place of the function's name."""
        text = self._calling({})
        return "maple" in text and "hazel" not in text

    @cached_property
    def _reads_json(self) -> bool:
        """True if the template refuses arguments of a tool call that are an object, and needs JSON text."""
        return not self._calling({"fir": 1}) and "fir" in self._calling('{"fir": 1}')

    def _calling(self, arguments: Any) -> str:
        """Return what the template makes of a tool call with such arguments; empty if it refuses them."""
        call = {"id": "maple", "type": "function", "function": {"name": "hazel", "arguments": arguments}}
        messages: Messages = [
            {"role": "user", "content": "walnut"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return self._apply([self._as_template_reads(message) for message in messages], None)
        except ValueError:
            return ""

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the added tokens that are not whitespace."""
        if self._encodes_at_once:
            return frozenset()
        return frozenset(index for token, index in self.tokenizer.get_added_vocab().items() if not token.isspace())

    @cached_property
    def _added(self) -> frozenset[str]:
        """Added tokens that are not whitespace."""
        return frozenset(token for token in self.tokenizer.get_added_vocab() if not token.isspace())

    @cached_property
    def _of_markers(self) -> frozenset[str]:
        if self._markers is None:
            return self._added
        return frozenset(token for token in self._added if any(token in marker for marker in self._markers))

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        decoder = self.tokenizer.added_tokens_decoder
        return _any_of(self._of_markers | {str(token) for token in decoder.values() if token.special})

    @cached_property
    def _turn_tokens(self) -> re.Pattern[str]:
        """Pattern of the tokens to mark in the assistant's messages: those in markers, without reasoning tags.

        A reasoning tag is marked if a marker contains it and no other token.
        """
        return _any_of(token for token in self._of_markers if not self._marks_thoughts_alone(token))

    def _marks_thoughts_alone(self, token: str) -> bool:
        if self._markers is None or not has_tags(token):
            return False
        others = [other for other in self._of_markers if not has_tags(other)]
        return all(any(other in marker for other in others) for marker in self._markers if token in marker)

    @cached_property
    def _plain_markers(self) -> re.Pattern[str]:
        return _any_of(text for text in self._markers or () if not any(token in text for token in self._added))


@contextmanager
def _refused(messages: Messages) -> Iterator[None]:
    """Raise ValueError with the reason if a template refuses messages."""
    # mistral_common is optional. If the tokenizer comes from it, it is imported by now.
    mistral: Any = sys.modules.get("mistral_common.exceptions")
    errors = REFUSALS if mistral is None else (*REFUSALS, mistral.MistralCommonException)
    try:
        yield
    except errors as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template refuses the roles {roles}: {error!r}") from error


def _without_weights(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in ("train", "weight")}


def _with_json(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have arguments in JSON text."""
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _with_named_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each tool call an id with the function's name, and each result the id of its call.

    Templates that write ids in place of names, such as that of Kimi K2, need ids such as "functions.lookup:0". The
    number counts the calls of the conversation. An id that contains the name stays as it is.
    """
    named, numbers = [], itertools.count()
    old_ids: list[str] = []
    ids: list[str] = []
    for message in messages:
        if "tool_calls" in message:
            names = [call["function"]["name"] for call in message["tool_calls"]]
            old_ids = [str(call.get("id") or "") for call in message["tool_calls"]]
            ids = [
                old if name in old else f"functions.{name}:{number}"
                for name, old, number in zip(names, old_ids, numbers, strict=False)
            ]
            calls = [{**call, "id": new} for call, new in zip(message["tool_calls"], ids, strict=True)]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and ids:
            # Results without a known id have the order of their calls.
            old = message.get("tool_call_id")
            at = old_ids.index(old) if old in old_ids else 0
            old_ids.pop(at)
            message = {**message, "tool_call_id": ids.pop(at)}
        named.append(message)
    return named


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, preferring the longest; without texts, it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _marked(value: Any, control: re.Pattern[str]) -> Any:
    """Mark control tokens as plain text, in all strings of a value."""

    def mark(text: str) -> Any:
        if mark_control_tokens is None and (token := control.search(text)):
            raise ValueError(
                f"a message contains {token[0]!r}, a control token of the tokenizer, and transformers {__version__} "
                'cannot encode it as text: run `pip install -U "transformers>=5.23"`, or remove it from the message'
            )
        return text if mark_control_tokens is None else mark_control_tokens(text, control)

    return _mapped(value, mark)


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply a function to strings, also in lists, and in keys and values of mappings."""
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(part, change) for part in value]
    return change(value) if isinstance(value, str) else value


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _strings(key)
            yield from _strings(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _strings(part)
