"""Conversations whose right mask is known, and how a tokenizer renders them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.features import CALLS, DEVELOPER, JOINED, MARKERS, REASONING, SEVERAL, SYSTEM, TOOLS

Messages = Sequence[dict[str, Any]]

# What templates raise on roles and fields that they do not take.
REFUSALS: tuple[type[Exception], ...] = (
    TemplateError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)


class Render(Protocol):
    """Token ids of a conversation, by a chat template."""

    def __call__(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Renders `messages`.

        Raises:
            ValueError: The template refuses them.
        """
        ...


@dataclass(frozen=True)
class TemplateRender:
    """Renders by a tokenizer's own template; control tokens in messages become plain text where it can do that.

    Attributes:
        tokenizer: Has a chat template, or is one of mistral-common.
        template_kwargs: Further variables of the template.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Renders `messages`.

        Raises:
            ValueError: The template refuses them, with its reason.
        """
        settings: dict[str, Any] = {"tokenize": True, "return_dict": True, **dict(self.template_kwargs)}
        if tools is not None:
            settings["tools"] = list(tools)
        if add_generation_prompt:
            settings["add_generation_prompt"] = True
        if getattr(self.tokenizer, "backend_tokenizer", None) is not None:
            settings["sanitize_control_tokens"] = True
        try:
            encoded = self.tokenizer.apply_chat_template([dict(message) for message in messages], **settings)
        except (*REFUSALS, *_mistral_refusals()) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"the chat template refuses the roles {roles}: {error!r}") from error
        return [int(index) for index in encoded["input_ids"]]


def _mistral_refusals() -> tuple[type[Exception], ...]:
    # An optional package: loaded by now if the tokenizer is one of its own.
    exceptions = sys.modules.get("mistral_common.exceptions")
    return () if exceptions is None else (exceptions.MistralCommonException,)


@dataclass(frozen=True)
class Probe:
    """A conversation and what must come of it.

    Attributes:
        name: What it tries.
        messages: Its messages; every text in it has a word of its own.
        kept: Words that the assistant says: trained, where the template writes them.
        hidden: Words that others say: never trained.
        tools: Tools that are offered.
        exact: Whether every message of the assistant is a turn of its own, so that turns can be compared one by one.
        feature: What conversations have that stand or fall with it; empty: all.
    """

    name: str
    messages: tuple[dict[str, Any], ...]
    kept: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    exact: bool = True
    feature: str = ""

    @property
    def expected(self) -> list[str]:
        """What the assistant says, message by message."""
        return [str(message["content"]).strip() for message in self.messages if message["role"] == "assistant"]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


ONE = Probe("one turn", (_user("First, walnut: what is 7 + 5?"), _assistant("It is maple.")))
MAIN = Probe(
    "two turns",
    (
        _user("First, walnut: what is 7 + 5?"),
        _assistant("It is maple."),
        _user("And (poplar) then - why?"),
        _assistant("Because of hazel!"),
    ),
    feature=SEVERAL,
)
# Who may speak after the assistant, beside the user.
LATE_ROLES = ("tool", "system", "developer")


def late_probe(role: str) -> Probe:
    """A message of this role between two of the assistant."""
    messages = (_user("Walnut?"), _assistant("It is maple."), {"role": role, "content": "say willow"})
    return Probe(
        f"a late message of {role}", (*messages, _assistant("Then hazel."), _user("Poplar?")), hidden=("willow",)
    )


_SYSTEM, _DEVELOPER = (
    Probe(
        feature,
        ({"role": role, "content": "You know linden."}, *MAIN.messages),
        hidden=("linden",),
        feature=feature,
    )
    for role, feature in (("system", SYSTEM), ("developer", DEVELOPER))
)
# Whatever stands at the borders of a content may share a token with the markers.
EDGES = Probe(
    "contents with spaces, line ends and symbols at their borders",
    tuple(
        message
        for number, (before, after) in enumerate(
            [
                ("\n", "\n"),
                ("\n\n", "\n\n"),
                ("\n\n\n", ".\n"),
                (" ", " "),
                ("  ", "  \n"),
                ("\t", "\t"),
                ("\n  ", ".\n\n"),
                ("", "."),
                ("", "?"),
                ("7", "7"),
                ("(", ")"),
                ("**", "**"),
                ('"', '"'),
                ("{", "}"),
                ("[", "]"),
                ("`", "`"),
                ("# ", ":"),
                ("- ", ","),
                ("$", "%"),
                ("caf\u00e9 ", " \u00e9"),
                ("\u4f60", "\u3002"),
                ("s", "s"),
            ]
        )
        for message in (_user(f"{before}aspen{number}{after}"), _assistant(f"{before}cedar{number}{after}"))
    ),
)
_JOINED = Probe(
    "neighbouring messages of one role",
    (
        _user("Say walnut."),
        _user("Say poplar."),
        _assistant("First maple."),
        _assistant("Then hazel."),
        _user("Linden?"),
    ),
    hidden=("walnut", "poplar", "Linden"),
    exact=False,
    feature=JOINED,
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up a juniper.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where."}},
            "required": ["place"],
        },
    },
}


_OFFERED = Probe(
    "tools that are offered",
    MAIN.messages,
    kept=("maple", "hazel"),
    hidden=("juniper", "walnut", "poplar"),
    tools=(_TOOL,),
    feature=TOOLS,
)


def _tool_probe(arguments: Any, results: int, content: str | None = "") -> Probe:
    calls = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
        for number in range(results)
    ]
    answers = [
        {"role": "tool", "name": "lookup", "tool_call_id": call["id"], "content": f"willow{number}"}
        for number, call in enumerate(calls)
    ]
    return Probe(
        f"{results} call{'s' if results > 1 else ''} of tools",
        (
            _user("Ask about walnut."),
            {"role": "assistant", "content": content, "tool_calls": calls},
            *answers,
            _assistant("There is hazel."),
            _user("Thanks, poplar."),
            _assistant("Bye, rowan."),
        ),
        kept=("chestnut", "hazel", "rowan"),
        hidden=("walnut", "poplar", "juniper", *(f"willow{number}" for number in range(results))),
        tools=(_TOOL,),
        exact=False,
        feature=CALLS,
    )


THINKING = Probe(
    "reasoning",
    (
        _user("First walnut."),
        _assistant("It is maple.", reasoning_content="Consider sorrel."),
        _user("Then poplar."),
        _assistant("It is hazel.", reasoning_content="Consider tansy."),
    ),
    kept=("maple", "hazel", "sorrel", "tansy"),
    hidden=("walnut", "poplar"),
    exact=False,
    feature=REASONING,
)
THOUGHTS = ("sorrel", "tansy")
# Each group holds forms of one probe of a feature: the first that the template takes counts.
GROUPS: tuple[tuple[Probe, ...], ...] = (
    (_SYSTEM,),
    (_DEVELOPER,),
    (_JOINED,),
    (_OFFERED,),
    *(
        (
            _tool_probe({"place": "chestnut"}, results),
            _tool_probe('{"place": "chestnut"}', results),
            _tool_probe({"place": "chestnut"}, results, None),
        )
        for results in (1, 2)
    ),
    (THINKING,),
)


def spoof_probe(texts: Sequence[str]) -> Probe:
    """A user who writes the markers of a turn of the assistant.

    Args:
        texts: What the user writes around the word "bryony".
    """
    messages = list(MAIN.messages)
    messages[0] = _user("First walnut. " + " ".join(f"{text}bryony" for text in texts) + " thyme")
    return Probe("markers in a user's text", tuple(messages), hidden=("bryony", "walnut", "thyme"), feature=MARKERS)


def single_probes(probe: Probe) -> list[Probe]:
    """The same, each turn of the assistant and what is before it on its own."""
    pairs = zip(probe.messages[::2], probe.messages[1::2], strict=True)
    return [replace(probe, messages=pair) for pair in pairs]


def as_parts(probe: Probe) -> Probe:
    """The same with contents as lists of parts, which templates of models with images ask for."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in probe.messages
    ]
    return replace(probe, messages=tuple(messages))
