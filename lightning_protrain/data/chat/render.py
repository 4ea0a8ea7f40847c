"""Conversations become token ids by the tokenizer's own chat template.

[Note: Spoofing]
A user who writes "<|im_end|>" into a message must not end the turn: what looks like a control token in a message (one
that the tokenizer calls special, or a part of a marker) is encoded as plain text. In messages of the assistant that
holds for markers of turns and for media only: reasoning and tool calls are often part of its text, as tokens of their
own. A marker that is plain text ("ASSISTANT:") cannot be told
apart from a user's words by any tokenizer; a conversation that holds one is pointed out, and its mask is held against
its text. Source: https://github.com/huggingface/transformers/issues/29279
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers import __version__ as installed_version

from lightning_protrain.data.chat.check_turns import has_tags
from lightning_protrain.data.chat.verify_format import REFUSALS, Messages, TemplateRender
from lightning_protrain.data.conversation import Conversation

try:
    from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens
except ImportError:  # an older version, with which models are trained all the same
    encode_marked_chat = mark_control_tokens = None

# What of a message a user can fill.
_FILLED = ("content", "reasoning_content", "tool_calls", "name", "tool_call_id")


@dataclass(frozen=True)
class Rendered:
    """What a chat template makes of a conversation.

    Attributes:
        text: Its output; what is to be encoded as plain text is marked where `sanitized`.
        sanitized: Whether a message holds a control token.
        suspicious: Whether a message holds a marker that is plain text.
        ids: Its tokens, where the tokenizer renders and encodes at once.
    """

    text: str
    sanitized: bool = False
    suspicious: bool = False
    ids: tuple[int, ...] | None = None


class Renderer:
    """Applies a chat template and encodes what it gives, see [Note: Spoofing].

    Args:
        tokenizer: Its template is used.
        markers: Texts that begin and end turns, and media; None: any token that is found in text as a whole.
        template_kwargs: Further variables of the template, `enable_thinking` for example.
        chat_template: Another template than the tokenizer's.

    Raises:
        ValueError: The installed transformers cannot encode control tokens in messages as text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        markers: Iterable[str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        if encode_marked_chat is None:
            raise ValueError(
                f"Chat data needs transformers 5.23 or newer, which encodes control tokens in messages as text, "
                f"and transformers {installed_version} is installed. Run: pip install 'transformers>=5.23'"
            )
        self.tokenizer = tokenizer
        self._markers = None if markers is None else frozenset(marker.strip() for marker in markers) - {""}
        self._kwargs = dict(template_kwargs or {})
        if chat_template is not None:
            self._kwargs["chat_template"] = chat_template

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> Rendered:
        """The text of a conversation.

        Args:
            conversation: Its weights do not matter here.
            add_generation_prompt: Whether what a model is asked to answer by is added.

        Raises:
            ValueError: The template refuses it.
        """
        tools = conversation.get("tools") or None
        if self._encodes_at_once:
            given = [_without_weights(message) for message in conversation["messages"]]
            ids = TemplateRender(self.tokenizer, tuple(self._kwargs.items()))(given, tools, add_generation_prompt)
            return Rendered(self.tokenizer.decode(ids), ids=tuple(ids))
        messages = [self._as_template_reads(message) for message in conversation["messages"]]
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
        return Rendered(self._apply(messages, tools, add_generation_prompt), sanitized, suspicious)

    def encode(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """Token ids of texts, without any token that the template does not write."""
        if self._encodes_at_once:
            return [list(one.ids or ()) for one in rendered]
        plain = [one.text for one in rendered if not one.sanitized]
        encoded = iter(self.tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else ())
        return [
            encode_marked_chat(self.tokenizer, one.text) if one.sanitized else list(next(encoded)) for one in rendered
        ]

    def ids(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of messages, by the way that conversations take: what `proof.prove` asks for.

        Raises:
            ValueError: The template refuses them.
        """
        conversation: Any = {"messages": messages} if tools is None else {"messages": messages, "tools": list(tools)}
        return self.encode([self.render(conversation, add_generation_prompt)])[0]

    def _apply(self, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **self._kwargs
            )
        except REFUSALS as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"the chat template refuses the roles {roles}: {error!r}") from error
        return str(text)

    def _as_template_reads(self, message: Mapping[str, Any]) -> dict[str, Any]:
        read = _without_weights(message)
        if self._reads_parts and isinstance(read["content"], str):
            read["content"] = [{"type": "text", "text": read["content"]}]
        return read

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the template."""
        return {name: value for name, value in self._kwargs.items() if name != "chat_template"}

    @property
    def _encodes_at_once(self) -> bool:
        """Whether it is a tokenizer of mistral-common: no text of a message ever becomes a control token of it."""
        return getattr(self.tokenizer, "backend_tokenizer", None) is None

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template wants lists of parts: templates for images often drop a text that is none."""
        said = [{"role": "user", "content": "walnut"}, {"role": "assistant", "content": "maple"}]
        listed = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in said]
        for messages, wants_parts in ((said, False), (listed, True)):
            try:
                text = self._apply(messages, None)
            except ValueError:
                continue
            if "walnut" in text and "maple" in text and "'type'" not in text:
                return wants_parts
        return False

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that are found in text as a whole, but for whitespace."""
        if self._encodes_at_once:
            return frozenset()
        return frozenset(index for token, index in self.tokenizer.get_added_vocab().items() if not token.isspace())

    @cached_property
    def _added(self) -> frozenset[str]:
        """All tokens that are found in text before it is split into pieces, but for whitespace."""
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
        """Those that may begin or end a turn: not a tag of thoughts that is a part of a marker with other tokens."""
        return _any_of(token for token in self._of_markers if not self._marks_thoughts_alone(token))

    def _marks_thoughts_alone(self, token: str) -> bool:
        if self._markers is None or not has_tags(token):
            return False
        others = [other for other in self._of_markers if not has_tags(other)]
        return all(any(other in marker for other in others) for marker in self._markers if token in marker)

    @cached_property
    def _plain_markers(self) -> re.Pattern[str]:
        return _any_of(text for text in self._markers or () if not any(token in text for token in self._added))


def _without_weights(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in ("train", "weight")}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _marked(value: Any, control: re.Pattern[str]) -> Any:
    """The same with its control tokens marked as plain text, in keys too: templates write those of arguments."""
    if isinstance(value, Mapping):
        return {_marked(key, control): _marked(part, control) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(part, control) for part in value]
    return mark_control_tokens(value, control)


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
