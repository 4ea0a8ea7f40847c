"""Verifies with probes that a chat format gives the right loss mask on a tokenizer and its chat template.

A probe is a conversation whose correct loss mask is known. Probes are rendered and masked like the rows of a data set.
Each trained turn must be a message of the assistant and an end marker; text of other roles must not be trained. A turn
may begin with text that the generation prompt lacks, because the model generates it: for example, the channel in
gpt-oss.

A chat format that fails for plain turns is refused. Further features, such as tools, reasoning or a system message, are
verified separately; `features` in check_turns.py lists them. If a feature fails, a conversation with it is trained only
if each turn is exactly its message. If the template refuses a probe, nothing is recorded: `check_turns` checks each
row, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_protrain.config import plural
from lightning_protrain.data.chat.check_turns import (
    CALLS,
    DEVELOPER,
    JOINED,
    MARKERS,
    QUIET,
    REASONING,
    RESULTS,
    SEVERAL,
    SYSTEM,
    THOUGHT_WORD,
    TOOLS,
)
from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.mask import ASSISTANT, MaskOptions, trained_tokens
from lightning_protrain.data.chat.turns import scan
from lightning_protrain.data.chat.vocabulary import Vocabulary

Messages = Sequence[dict[str, Any]]

# Exceptions that a chat template raises for messages that it does not accept.
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
    """A function that renders messages with a chat template and returns the token ids."""

    def __call__(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render messages; raise ValueError if the template refuses them."""
        ...


@dataclass(frozen=True)
class TemplateRender:
    """Renders with the chat template of a tokenizer; control tokens in messages become plain text.

    Attributes:
        tokenizer: Tokenizer with a chat template, or one of mistral-common.
        template_kwargs: Further variables of the template.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render messages; raise ValueError with the reason if the template refuses them."""
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
    # mistral_common is optional. If the tokenizer comes from it, it is imported by now.
    exceptions = sys.modules.get("mistral_common.exceptions")
    return () if exceptions is None else (exceptions.MistralCommonException,)


@dataclass(frozen=True)
class ProbeConversation:
    """A probe: a conversation whose correct loss mask is known.

    Attributes:
        name: Name of the probe, for messages.
        messages: Messages, each with a word that occurs in no other message.
        kept: Words that must be trained if the template writes them.
        hidden: Words that must not be trained.
        tools: Tools that the assistant may call; None means no tools.
        exact: True if each message of the assistant must be a separate turn.
        feature: Feature that the probe tests; empty for plain turns.
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
        """Text of each message of the assistant, in order."""
        return [str(message["content"]).strip() for message in self.messages if message["role"] == "assistant"]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


ONE = ProbeConversation("one turn", (_user("First, walnut: what is 7 + 5?"), _assistant("It is maple.")))
MAIN = ProbeConversation(
    "two turns",
    (
        _user("First, walnut: what is 7 + 5?"),
        _assistant("It is maple."),
        _user("And (poplar) then - why?"),
        _assistant("Because of hazel!"),
    ),
    feature=SEVERAL,
)
# Roles other than the user whose messages may follow an assistant message.
LATE_ROLES = ("tool", "system", "developer")


def late_message(role: str) -> ProbeConversation:
    """Return a probe with a message of `role` between two messages of the assistant."""
    messages = (_user("Walnut?"), _assistant("It is maple."), {"role": role, "content": "say willow"})
    return ProbeConversation(
        f"a late message of {role}", (*messages, _assistant("Then hazel."), _user("Poplar?")), hidden=("willow",)
    )


_SYSTEM, _DEVELOPER = (
    ProbeConversation(
        feature,
        ({"role": role, "content": "You know linden."}, *MAIN.messages),
        hidden=("linden",),
        feature=feature,
    )
    for role, feature in (("system", SYSTEM), ("developer", DEVELOPER))
)
# The tokenizer may merge the first and last characters of these contents with the markers.
EDGES = ProbeConversation(
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
_JOINED = ProbeConversation(
    JOINED,
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


_OFFERED = ProbeConversation(
    "tools that are offered",
    MAIN.messages,
    kept=("maple", "hazel"),
    hidden=("juniper", "walnut", "poplar"),
    tools=(_TOOL,),
    feature=TOOLS,
)


def _tool_probes(num_calls: int, results: bool, ends: bool = False) -> tuple[ProbeConversation, ...]:
    """Return a probe with tool calls in three forms: with arguments as a mapping, as text, and without content.

    Args:
        num_calls: Number of calls in a message.
        results: True adds the results of the calls, and an answer to them.
        ends: True ends the conversation after the calls.
    """
    return tuple(
        _tool_probe(num_calls, results, ends, arguments, content)
        for arguments, content in (
            ({"place": "chestnut"}, ""),
            ('{"place": "chestnut"}', ""),
            ({"place": "chestnut"}, None),
        )
    )


def _tool_probe(num_calls: int, results: bool, ends: bool, arguments: Any, content: str | None) -> ProbeConversation:
    calls = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
        for number in range(num_calls)
    ]
    answers = [
        {"role": "tool", "name": "lookup", "tool_call_id": call["id"], "content": f"willow{number}"}
        for number, call in enumerate(calls)
    ]
    name = f"{plural(num_calls, 'tool call')}{' and results' if results else ''}{' at the end' if ends else ''}"
    return ProbeConversation(
        name,
        (
            _user("Ask about walnut."),
            {"role": "assistant", "content": content, "tool_calls": calls},
            *((*answers, _assistant("There is hazel.")) if results else ()),
            *(() if ends else (_user("Thanks, poplar."), _assistant("Bye, rowan."))),
        ),
        kept=("chestnut", *(("hazel",) if results else ()), *(() if ends else ("rowan",))),
        hidden=("walnut", "poplar", "juniper", *(f"willow{number}" for number in range(num_calls))),
        tools=(_TOOL,),
        exact=False,
        feature=RESULTS if results else CALLS,
    )


THINKING = ProbeConversation(
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
# A group has alternative forms of a probe; the first form that the template accepts is checked.
GROUPS: tuple[tuple[ProbeConversation, ...], ...] = (
    (_SYSTEM,),
    (_DEVELOPER,),
    (_JOINED,),
    (_OFFERED,),
    _tool_probes(1, results=False),
    _tool_probes(1, results=False, ends=True),
    _tool_probes(1, results=True),
    _tool_probes(2, results=True),
    (THINKING,),
)


def spoofed_markers(texts: Sequence[str]) -> ProbeConversation:
    """Return a probe in which the user writes markers of the assistant.

    Args:
        texts: Markers, each of which the user writes before the word "bryony".
    """
    messages = list(MAIN.messages)
    messages[0] = _user("First walnut. " + " ".join(f"{text}bryony" for text in texts) + " thyme")
    return ProbeConversation(
        "markers in a user's text", tuple(messages), hidden=("bryony", "walnut", "thyme"), feature=MARKERS
    )


def single_turns(probe: ProbeConversation) -> list[ProbeConversation]:
    """Divide a probe into probes of one user message and one assistant message."""
    pairs = zip(probe.messages[::2], probe.messages[1::2], strict=True)
    return [replace(probe, messages=pair) for pair in pairs]


def as_parts(probe: ProbeConversation) -> ProbeConversation:
    """Return a copy of a probe whose contents are lists of parts, which some templates require."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in probe.messages
    ]
    return replace(probe, messages=tuple(messages))


_SHOWN = 1500
# Maximum number of answers in a probe for which the generation prompt of each answer is checked.
_ALL_PROMPTS = 2


class VerificationError(ValueError):
    """An error for a chat format that gives a wrong loss mask for a probe."""


def verify_family(
    render: Render, tokenizer: PreTrainedTokenizerBase | Vocabulary, markers: Markers, quiet: bool = False
) -> dict[str, str]:
    """Verify the markers of a chat format on a tokenizer and its template.

    Markers without the role "assistant" are not verified.

    Args:
        render: Renders messages in the same way as the rows of a data set.
        tokenizer: The tokenizer, or its vocabulary.
        markers: Markers of the chat format on this tokenizer.
        quiet: True verifies only that reasoning can be excluded from training.

    Returns:
        Failures by feature of the chat format, such as tools or reasoning; empty if every feature was verified.

    Raises:
        VerificationError: If the mask of plain turns is wrong.
        ValueError: If the template refuses a user message followed by an assistant message.
    """
    if not any(role.role == ASSISTANT for role in markers.roles):
        return {}
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    proof = _Verification(render, vocabulary, markers)
    if not quiet:
        proof.plain_turns()
        for group in (*GROUPS, *proof.spoofs()):
            proof.optional(group)
    proof.thinking()
    return proof.unproven


def leaking_roles(render: Render, tokenizer: PreTrainedTokenizerBase | Vocabulary, markers: Markers) -> frozenset[str]:
    """Return the roles whose messages would be trained if they follow an assistant message.

    Such a message is trained if turns have no end marker, and the template writes no start marker for its role.

    Args:
        render: Renders messages in the same way as the rows of a data set.
        tokenizer: The tokenizer, or its vocabulary.
        markers: Markers of the chat format on this tokenizer.
    """
    if not any(role.role == ASSISTANT for role in markers.roles):
        return frozenset()
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    found = set()
    for role in LATE_ROLES:
        for probe in (late_message(role), as_parts(late_message(role))):
            try:
                ids = np.asarray(render(probe.messages), dtype=np.int64)
            except ValueError:
                continue
            trained = trained_tokens(ids, scan(ids, markers), markers, MaskOptions())
            kept = b"".join(vocabulary.spell(ids[trained].tolist())).decode(errors="replace")
            found |= {role} if any(word in kept for word in probe.hidden) else set()
    return frozenset(found)


def leaves_open(render: Render, tokenizer: PreTrainedTokenizerBase | Vocabulary) -> bool:
    """Return True if a template writes nothing after the last answer of a conversation.

    Args:
        render: Renders messages in the same way as the rows of a data set.
        tokenizer: The tokenizer, or its vocabulary.
    """
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    for probe in (MAIN, as_parts(MAIN), ONE, as_parts(ONE)):
        try:
            text = vocabulary.text(render(probe.messages))
        except ValueError:
            continue
        last = _said(probe.messages[-1]["content"])
        if last in text:
            return text.rstrip().endswith(last)
    return False


def end_tokens(render: Render, tokenizer: PreTrainedTokenizerBase | Vocabulary, markers: Markers) -> frozenset[int]:
    """Return the control tokens at which generation may stop: those that end what the assistant says.

    A message may be several turns, such as reasoning and an answer. An end marker between them is left out.

    Args:
        render: Renders messages in the same way as the rows of a data set.
        tokenizer: The tokenizer, or its vocabulary.
        markers: Markers of the chat format on this tokenizer.
    """
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    controls = {index for text, index in vocabulary.added.items() if not text.isspace()}
    ends = [end.ids for role in markers.roles if role.role == ASSISTANT for end in role.ends]
    found = {next((index for index in ids if index in controls), None) for ids in ends}
    for probe in (THINKING, as_parts(THINKING)) if found - {None} else ():
        try:
            row = np.asarray(render(probe.messages), dtype=np.int64)
        except ValueError:
            continue
        spans = scan(row, markers)
        speakers = [markers.roles[index].role == ASSISTANT for index in spans.role.tolist()]
        for turn, (own, following) in enumerate(pairwise(speakers)):
            if own and following:
                found -= set(row[spans.end[turn] : spans.stop[turn]].tolist())
    return frozenset(index for index in found if index is not None)


def user_header(render: Render, tokenizer: PreTrainedTokenizerBase | Vocabulary, markers: Markers) -> str:
    """Return the text around a user's words that would be trained if the role "user" is trained; empty if none.

    Args:
        render: Renders messages in the same way as the rows of a data set.
        tokenizer: The tokenizer, or its vocabulary.
        markers: Markers of the chat format on this tokenizer.
    """
    if not any(role.role == "user" for role in markers.roles):
        return ""
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    for probe in (ONE, as_parts(ONE)):
        try:
            ids = np.asarray(render(probe.messages), dtype=np.int64)
        except ValueError:
            continue
        options = MaskOptions(roles_to_train=("user",), train_on_eos="none")
        trained = ids[trained_tokens(ids, scan(ids, markers), markers, options)]
        text = b"".join(vocabulary.spell(trained.tolist())).decode(errors="replace")
        before, found, behind = text.partition(_said(probe.messages[0]["content"]))
        if found:
            return (before if before.strip(" ") else "") + (behind if behind.strip() else "")
    return ""


@dataclass(frozen=True)
class RenderedTest:
    """A rendered probe: its tokens, their text, and the trained text of each turn."""

    ids: tuple[int, ...]
    text: str
    turns: tuple[str, ...]


class _Verification:
    """Runs the probes for one chat format; `unproven` maps each feature that fails to the reason."""

    def __init__(self, render: Render, vocabulary: Vocabulary, markers: Markers) -> None:
        self.render = render
        self.vocabulary = vocabulary
        self.markers = markers
        ends = {marker.text.strip() for role in markers.roles if role.role == ASSISTANT for marker in role.ends}
        self.ends = tuple(sorted(ends, key=len, reverse=True))
        starts = {
            marker.text.encode().translate(None, b" ").lstrip() for role in markers.roles for marker in role.starts
        }
        self.starts = tuple(sorted(starts, key=len, reverse=True))
        assistant = [role for role in markers.roles if role.role == ASSISTANT]
        self.unended = any(role.open_ended or not role.include_end for role in assistant)
        self.trains_starts = any(role.include_start for role in assistant)
        self.leads: set[str] = {""}
        self.must_end = False
        self.unproven: dict[str, str] = {}

    def plain_turns(self) -> None:
        """Check plain turns of user and assistant; if several turns fail, check single turns."""
        try:
            self._required((MAIN,))
            self._check_group((EDGES,))
        except ValueError as error:
            # Require an end marker: otherwise a wrong one would pass if the template writes none after a single turn.
            self.must_end = isinstance(error, VerificationError)
            try:
                self._required((ONE,))
                for probe in single_turns(EDGES):
                    self._check_group((probe,))
            except ValueError:
                raise error from None
            self.unproven[SEVERAL] = _first_line(error)

    def optional(self, forms: Sequence[ProbeConversation]) -> None:
        """Check the probe of a feature in the first form that the template accepts; record a failure."""
        try:
            self._check_group(forms)
        except VerificationError as error:
            self.unproven.setdefault(forms[0].feature, _first_line(error))

    def thinking(self) -> None:
        """Check that `train_thinking=False` excludes reasoning and keeps answers; record a failure."""
        if not any(exclusion.kind == "thinking" for exclusion in self.markers.exclusions):
            return
        for words, group in ((THOUGHTS, (THINKING, as_parts(THINKING))), ((), (MAIN, as_parts(MAIN)))):
            for form in group:
                try:
                    ids = self.render(form.messages)
                except ValueError:
                    continue
                rendering = self._read(ids, MaskOptions(train_thinking=False))
                if self._says_all(form, rendering.text):
                    hidden = [word for word in words if any(word in turn for turn in rendering.turns)]
                    lost = [word for word in ("maple", "hazel") if not any(word in turn for turn in rendering.turns)]
                    if hidden or lost:
                        self.unproven[QUIET] = f"train_thinking=False keeps {hidden} and loses {lost}"
                    break

    def spoofs(self) -> tuple[tuple[ProbeConversation, ...], ...]:
        """Return probes in which the user writes markers of the assistant, if these are control tokens."""
        starts = [m.text for role in self.markers.roles if role.role == ASSISTANT for m in role.starts]
        controls = [text for text in dict.fromkeys(starts) if self.vocabulary.controls_in(text)]
        end = next(iter(self.ends), "")
        return ((spoofed_markers([*controls, *(end + text for text in controls)]),),) if controls else ()

    def _required(self, forms: Sequence[ProbeConversation]) -> None:
        refusal = self._check_group(forms)
        if refusal is not None:
            raise ValueError(
                f"The tokenizer {self.vocabulary.name!r} cannot be checked: {refusal}. Give it a chat template for "
                "user and assistant in turn."
            ) from refusal

    def _check_group(self, forms: Sequence[ProbeConversation]) -> ValueError | None:
        """Check the first form that the template accepts; return the refusal if it accepts none."""
        refusal: ValueError | None = None
        for form in (*forms, *map(as_parts, forms)):
            try:
                ids = self.render(form.messages, form.tools)
            except ValueError as error:
                refusal = refusal or error
                continue
            shown = self._shown(form, ids)
            if shown is not None:
                if self._tells_roles(form, ids):
                    self._check(form, shown)
                    self._check_prompts(form, shown)
                return None
            refusal = refusal or ValueError("the chat template leaves out what the assistant says")
            if not form.exact and self._tells_roles(form, ids):
                # Check the words of other roles, even though the template leaves out words of the assistant.
                self._check(replace(form, kept=()), self._read(ids, MaskOptions()))
        return refusal

    def _shown(self, probe: ProbeConversation, ids: Sequence[int]) -> RenderedTest | None:
        """Return the rendered probe; None if the template leaves out text of the assistant."""
        rendering = self._read(ids, MaskOptions())
        if probe.exact and not self._says_all(probe, rendering.text):
            return None
        if not probe.exact and any(word not in rendering.text for word in probe.kept[:2]):
            return None
        return rendering

    def _tells_roles(self, probe: ProbeConversation, ids: Sequence[int]) -> bool:
        """Return False if the template renders a message of another role exactly like one of the assistant.

        Such a template does not know that role. Rows with the role fail `check_turns`: they have too many turns.
        """
        for at, message in enumerate(probe.messages):
            if message["role"] not in (ASSISTANT, "user"):
                said = {"role": ASSISTANT, "content": message["content"]}
                try:
                    same = self.render([*probe.messages[:at], said, *probe.messages[at + 1 :]], probe.tools)
                except ValueError:
                    continue
                if same == list(ids):
                    return False
        return True

    def _says_all(self, probe: ProbeConversation, text: str) -> bool:
        said = [_said(message["content"]) for message in probe.messages if message["role"] == ASSISTANT]
        return all(one in text for one in said)

    def _read(self, ids: Sequence[int], options: MaskOptions) -> RenderedTest:
        row = np.asarray(ids, dtype=np.int64)
        spelled = self.vocabulary.spell(list(ids))
        spans = scan(row, self.markers)
        trained = trained_tokens(row, spans, self.markers, options)
        turns = []
        for start, content, stop in zip(spans.start.tolist(), spans.content.tolist(), spans.stop.tolist(), strict=True):
            kept = b"".join(spelled[at] for at in range(content, stop) if trained[at])
            if kept.strip() and any(trained[at] for at in range(content, max(content + 1, stop - 1))):
                turns.append((self._overhang(spelled[start:content]) + kept).decode(errors="replace"))
        return RenderedTest(tuple(ids), b"".join(spelled).decode(errors="replace"), tuple(turns))

    def _overhang(self, spelled: Sequence[bytes]) -> bytes:
        """Return the begin of the content that is in the start marker's last token, see [Note: Tails] in markers.py.

        Args:
            spelled: Bytes of each token of the start marker.
        """
        text = b"".join(spelled)
        for start in self.starts:
            for length in range(len(spelled[-1])):
                # Ignore spaces: a tokenizer may insert them between the tokens of a marker, and before the content.
                if not spelled[-1][: len(spelled[-1]) - length].strip(b" "):
                    continue
                if text[: len(text) - length].translate(None, b" ").lstrip() == start:
                    return text[len(text) - length :]
        return b""

    def _check(self, probe: ProbeConversation, rendering: RenderedTest) -> None:
        if probe.exact:
            self._check_turns(probe, rendering)
        for word in probe.hidden:
            if any(word in turn for turn in rendering.turns):
                self._fail(probe, rendering, f"{word!r}, which the assistant does not say, is trained")
        for word in probe.kept:
            if word in rendering.text and not any(word in turn for turn in rendering.turns):
                self._fail(probe, rendering, f"{word!r}, which the assistant says, is not trained")

    def _check_turns(self, probe: ProbeConversation, rendering: RenderedTest) -> None:
        said = [_said(message["content"]) for message in probe.messages if message["role"] == ASSISTANT]
        if probe in (MAIN, ONE, as_parts(MAIN), as_parts(ONE)):
            self._learn_leads(probe, rendering, said)
        if len(said) != len(rendering.turns):
            self._fail(probe, rendering, f"{len(rendering.turns)} turns are trained instead of {len(said)}")
        ends = "|".join(map(re.escape, self.ends))
        leads = "|".join(map(re.escape, sorted(self.leads, key=len, reverse=True)))
        for number, (one, turn) in enumerate(zip(said, rendering.turns, strict=True)):
            cut = not self.must_end and number + 1 == len(said) and rendering.text.rstrip().endswith(one)
            unended = self.unended or cut
            end = f"(?:{ends})" if ends else ""
            if not re.fullmatch(rf"\s*(?:{leads})\s*{re.escape(one)}\s*{end}{'?' if unended and end else ''}\s*", turn):
                self._fail(probe, rendering, f"turn {number + 1} should be {one!r} and its end marker, not {turn!r}")

    def _check_prompts(self, probe: ProbeConversation, rendering: RenderedTest) -> None:
        """Check that no text of the generation prompt is trained, for answers whose text begins with the prompt."""
        positions = [at for at, one in enumerate(probe.messages) if one["role"] == ASSISTANT]
        if not probe.exact or self.trains_starts:
            return
        if len(positions) > _ALL_PROMPTS:
            # Check only answers that begin with a digit or a non-Latin letter: before them, a space at the end of the
            # prompt is a separate token, which might be trained.
            said = {at: _said(probe.messages[at]["content"])[0] for at in positions}
            positions = [at for at, first in said.items() if first.isdigit() or not first.isascii()]
        spelled = self.vocabulary.spell(rendering.ids)
        stops = np.cumsum([len(piece) for piece in spelled])
        row = np.asarray(rendering.ids, dtype=np.int64)
        trained = trained_tokens(row, scan(row, self.markers), self.markers, MaskOptions())
        for at in positions:
            try:
                before, prompt = (
                    b"".join(self.vocabulary.spell(self.render(probe.messages[:at], add_generation_prompt=asked)))
                    for asked in (False, True)
                )
            except ValueError:
                continue
            if b"".join(spelled).startswith(prompt):
                begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False)))
                inside = (stops <= len(prompt)) & (np.append(0, stops[:-1]) >= begin) & trained
                if inside.any():
                    what = b"".join(spelled[place] for place in np.flatnonzero(inside)).decode(errors="replace")
                    self._fail(probe, rendering, f"{what!r}, which the generation prompt writes, is trained")

    def _learn_leads(self, probe: ProbeConversation, rendering: RenderedTest, said: Sequence[str]) -> None:
        """Record the text between the generation prompt and each answer: the model generates it."""
        positions = [at for at, message in enumerate(probe.messages) if message["role"] == ASSISTANT]
        for at, one in zip(positions, said, strict=True):
            try:
                prompt = self.render(probe.messages[:at], add_generation_prompt=True)
            except ValueError:
                continue
            text = b"".join(self.vocabulary.spell(prompt)).decode(errors="replace")
            if rendering.text.startswith(text) and one in rendering.text[len(text) :]:
                self.leads.add(rendering.text[len(text) :].split(one, 1)[0].strip())
                continue
            self._learn_lead_without_thought(prompt, rendering, one)

    def _learn_lead_without_thought(self, prompt: Sequence[int], rendering: RenderedTest, said: str) -> None:
        """Record the control tokens before an answer, for a generation prompt that begins reasoning instead."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, rendering.ids, strict=False))
        shared = sum(1 for _ in same)
        (opening,) = self.vocabulary.spell(prompt[shared : shared + 1]) or (b"",)
        behind = b"".join(self.vocabulary.spell(rendering.ids[shared:])).decode(errors="replace")
        lead, found, _ = behind.partition(said)
        words = lead
        for token in sorted(self.vocabulary.added, key=len, reverse=True):
            words = words.replace(token, "")
        if found and not words.strip() and THOUGHT_WORD.search(opening.decode(errors="replace")):
            self.leads.add(lead.strip())

    def _fail(self, probe: ProbeConversation, rendering: RenderedTest, what: str) -> None:
        said = [_said(message["content"]) for message in probe.messages if message["role"] == ASSISTANT]
        raise VerificationError(
            f"The chat family {self.markers.family!r} does not fit the tokenizer {self.vocabulary.name!r} and its chat "
            f"template. On {probe.name}, {what}.\nExpected: {said}, each with one of {list(self.ends)}\n"
            f"Found: {list(rendering.turns)}\nRendered: {rendering.text[:_SHOWN]!r}\n"
            "Name the right `family`, or give `role_boundaries`."
        )


def _said(content: object) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")).strip() for part in content)
    return str(content or "").strip()


def _first_line(error: Exception) -> str:
    """Return the first line of a failure, without the names of chat format and tokenizer."""
    return str(error).split("\n")[0].rpartition("its chat template. On ")[2]
