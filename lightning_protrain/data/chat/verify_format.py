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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, takewhile
from typing import Any

import numpy as np

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
from lightning_protrain.data.chat.marker_search import lay_out
from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.mask import ASSISTANT, MaskOptions, trained_tokens
from lightning_protrain.data.chat.render import Render
from lightning_protrain.data.chat.turns import scan
from lightning_protrain.data.chat.vocabulary import Vocabulary


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
        feature, ({"role": role, "content": "You know linden."}, *MAIN.messages), hidden=("linden",), feature=feature
    )
    for role, feature in (("system", SYSTEM), ("developer", DEVELOPER))
)
# First and last characters of contents, which the tokenizer may merge with the markers.
_BORDERS = (
    *(("\n", "\n"), ("\n\n", "\n\n"), ("\n\n\n", ".\n"), (" ", " "), ("  ", "  \n"), ("\t", "\t"), ("\n  ", ".\n\n")),
    *(("", "."), ("", "?"), ("7", "7"), ("(", ")"), ("**", "**"), ('"', '"'), ("{", "}"), ("[", "]"), ("`", "`")),
    *(("# ", ":"), ("- ", ","), ("$", "%"), ("caf\u00e9 ", " \u00e9"), ("\u4f60", "\u3002"), ("s", "s")),
)
EDGES = ProbeConversation(
    "contents with spaces, line ends and symbols at their borders",
    tuple(
        message
        for number, (before, after) in enumerate(_BORDERS)
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


def _tool_probe(num_calls: int, results: bool, ends: bool = False) -> ProbeConversation:
    """Return a probe with tool calls and, on request, their results and an answer; `ends`: it ends after the calls."""
    calls = [
        {
            "id": f"abcdefgh{number}",
            "type": "function",
            "function": {"name": "lookup", "arguments": {"place": "chestnut"}},
        }
        for number in range(num_calls)
    ]
    answers = [
        {"role": "tool", "name": "lookup", "tool_call_id": call["id"], "content": f"willow{number}"}
        for number, call in enumerate(calls)
    ]
    return ProbeConversation(
        f"{plural(num_calls, 'tool call')}{' and results' if results else ''}{' at the end' if ends else ''}",
        (
            _user("Ask about walnut."),
            _assistant("", tool_calls=calls),
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
PROBES = (
    _SYSTEM,
    _DEVELOPER,
    _JOINED,
    _OFFERED,
    _tool_probe(1, results=False),
    _tool_probe(1, results=False, ends=True),
    _tool_probe(1, results=True),
    _tool_probe(2, results=True),
    THINKING,
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


_SHOWN = 1500
# Maximum number of answers in a probe for which the generation prompt of each answer is checked.
_ALL_PROMPTS = 2


class VerificationError(ValueError):
    """An error for a chat format that gives a wrong loss mask for a probe."""


def verify_family(render: Render, vocabulary: Vocabulary, markers: Markers, quiet: bool = False) -> dict[str, str]:
    """Verify the markers of a chat format on a tokenizer and its template.

    Markers without the role "assistant" are not verified.

    Args:
        render: Renders messages in the same way as the rows of a data set.
        vocabulary: Vocabulary of the tokenizer.
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
    proof = _Verification(render, vocabulary, markers)
    if not quiet:
        proof.plain_turns()
        for probe in (*PROBES, *proof.spoofs()):
            proof.optional(probe)
    proof.thinking()
    return proof.unproven


def leaking_roles(render: Render, vocabulary: Vocabulary, markers: Markers) -> frozenset[str]:
    """Return the roles whose messages would be trained if they follow an assistant message.

    Such a message is trained if turns have no end marker, and the template writes no start marker for its role. The
    arguments are those of `verify_family`.
    """
    if not any(role.role == ASSISTANT for role in markers.roles):
        return frozenset()
    probes = {role: late_message(role) for role in LATE_ROLES}
    trained = {role: _trained(render, vocabulary, markers, probe, MaskOptions()) for role, probe in probes.items()}
    return frozenset(role for role, probe in probes.items() if any(word in trained[role] for word in probe.hidden))


def _trained(
    render: Render, vocabulary: Vocabulary, markers: Markers, probe: ProbeConversation, options: MaskOptions
) -> str:
    """Return the trained text of a probe; empty if the template refuses it."""
    try:
        rows = lay_out([render(probe.messages)])
    except ValueError:
        return ""
    trained = rows.ids[trained_tokens(rows, scan(rows, markers), markers, options)]
    return b"".join(vocabulary.spell(trained.tolist())).decode(errors="replace")


def leaves_open(render: Render, vocabulary: Vocabulary) -> bool:
    """Return True if a template writes nothing after the last answer; the arguments are those of `verify_family`."""
    for probe in (MAIN, ONE):
        try:
            text = vocabulary.text(render(probe.messages))
        except ValueError:
            continue
        last = probe.expected[-1]
        if last in text:
            return text.rstrip().endswith(last)
    return False


def end_tokens(render: Render, vocabulary: Vocabulary, markers: Markers) -> frozenset[int]:
    """Return the control tokens at which generation may stop: those that end what the assistant says.

    A message may be several turns, such as reasoning and an answer. An end marker between them is left out. The
    arguments are those of `verify_family`.
    """
    controls = {index for text, index in vocabulary.added.items() if not text.isspace()}
    ends = [end.ids for role in markers.roles if role.role == ASSISTANT for end in role.ends]
    firsts = ([index for index in ids if index in controls][:1] for ids in ends)
    tokens = set(chain.from_iterable(firsts))
    try:
        rows = lay_out([render(THINKING.messages)])
    except ValueError:
        return frozenset(tokens)
    spans = scan(rows, markers)
    speaks = [markers.roles[index].role == ASSISTANT for index in spans.role.tolist()]
    for turn, (this, following) in enumerate(pairwise(speaks)):
        if this and following:
            tokens -= set(rows.ids[spans.end[turn] : spans.stop[turn]].tolist())
    return frozenset(tokens)


def user_header(render: Render, vocabulary: Vocabulary, markers: Markers) -> str:
    """Return the text around a user's words that would be trained if the role "user" is trained; empty if none.

    The arguments are those of `verify_family`.
    """
    if not any(role.role == "user" for role in markers.roles):
        return ""
    options = MaskOptions(roles_to_train=("user",), train_on_eos="none")
    text = _trained(render, vocabulary, markers, ONE, options)
    before, words, behind = text.partition(ONE.messages[0]["content"])
    return (before if before.strip(" ") else "") + (behind if behind.strip() else "") if words else ""


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
            self._required(MAIN)
            self._check_probe(EDGES)
        except ValueError as error:
            # Require an end marker: otherwise a wrong one would pass if the template writes none after a single turn.
            self.must_end = isinstance(error, VerificationError)
            try:
                self._required(ONE)
                for probe in single_turns(EDGES):
                    self._check_probe(probe)
            except ValueError:
                raise error from None
            self.unproven[SEVERAL] = _first_line(error)

    def optional(self, probe: ProbeConversation) -> None:
        """Check the probe of a feature; record a failure."""
        try:
            self._check_probe(probe)
        except VerificationError as error:
            self.unproven.setdefault(probe.feature, _first_line(error))

    def thinking(self) -> None:
        """Check that `train_thinking=False` excludes reasoning and keeps answers; record a failure."""
        if not any(exclusion.kind == "thinking" for exclusion in self.markers.exclusions):
            return
        for words, probe in ((THOUGHTS, THINKING), ((), MAIN)):
            try:
                rendered = self._read(self.render(probe.messages), MaskOptions(train_thinking=False))
            except ValueError:
                continue
            if all(text in rendered.text for text in probe.expected):
                hidden = [word for word in words if any(word in turn for turn in rendered.turns)]
                lost = [word for word in ("maple", "hazel") if not any(word in turn for turn in rendered.turns)]
                if hidden or lost:
                    self.unproven[QUIET] = f"train_thinking=False keeps {hidden} and loses {lost}"

    def spoofs(self) -> tuple[ProbeConversation, ...]:
        """Return a probe in which the user writes markers of the assistant, if these are control tokens."""
        starts = [m.text for role in self.markers.roles if role.role == ASSISTANT for m in role.starts]
        controls = [text for text in dict.fromkeys(starts) if self.vocabulary.controls_in(text)]
        end = next(iter(self.ends), "")
        return (spoofed_markers([*controls, *(end + text for text in controls)]),) if controls else ()

    def _required(self, probe: ProbeConversation) -> None:
        refusal = self._check_probe(probe)
        if refusal is not None:
            raise ValueError(
                f"The tokenizer {self.vocabulary.name!r} cannot be checked: {refusal}. Give it a chat template for "
                "user and assistant in turn."
            ) from refusal

    def _check_probe(self, probe: ProbeConversation) -> ValueError | None:
        """Check a probe; return the refusal if the template does not accept it."""
        try:
            ids = self.render(probe.messages, probe.tools)
        except ValueError as error:
            return error
        rendered = self._read(ids, MaskOptions())
        # The template may leave out text of the assistant.
        needed = probe.expected if probe.exact else probe.kept[:2]
        if all(text in rendered.text for text in needed):
            if self._tells_roles(probe, ids):
                self._check(probe, rendered)
                self._check_prompts(probe, rendered)
            return None
        if not probe.exact and self._tells_roles(probe, ids):
            # Check the words of other roles all the same.
            self._check(replace(probe, kept=()), rendered)
        return ValueError("the chat template leaves out what the assistant says")

    def _tells_roles(self, probe: ProbeConversation, ids: Sequence[int]) -> bool:
        """Return False if the template renders a message of another role exactly like one of the assistant.

        Such a template does not know that role. Rows with the role fail `check_turns`: they have too many turns.
        """
        for at, message in enumerate(probe.messages):
            if message["role"] not in (ASSISTANT, "user"):
                spoken = _assistant(message["content"])
                try:
                    same = self.render([*probe.messages[:at], spoken, *probe.messages[at + 1 :]], probe.tools)
                except ValueError:
                    continue
                if same == list(ids):
                    return False
        return True

    def _read(self, ids: Sequence[int], options: MaskOptions) -> RenderedTest:
        rows = lay_out([ids])
        spelled = self.vocabulary.spell(list(ids))
        spans = scan(rows, self.markers)
        trained = trained_tokens(rows, spans, self.markers, options)
        turns = []
        for start, content, stop in zip(spans.start.tolist(), spans.content.tolist(), spans.stop.tolist(), strict=True):
            text = b"".join(spelled[at] for at in range(content, stop) if trained[at])
            if text.strip() and any(trained[at] for at in range(content, max(content + 1, stop - 1))):
                turns.append((self._overhang(spelled[start:content]) + text).decode(errors="replace"))
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
        if probe in (MAIN, ONE):
            self._learn_leads(probe, rendering)
        answers = probe.expected
        if len(answers) != len(rendering.turns):
            self._fail(probe, rendering, f"{len(rendering.turns)} turns are trained instead of {len(answers)}")
        ends = "|".join(map(re.escape, self.ends))
        leads = "|".join(map(re.escape, sorted(self.leads, key=len, reverse=True)))
        for number, (answer, turn) in enumerate(zip(answers, rendering.turns, strict=True)):
            cut = not self.must_end and number + 1 == len(answers) and rendering.text.rstrip().endswith(answer)
            end = (f"(?:{ends})?" if self.unended or cut else f"(?:{ends})") if ends else ""
            if not re.fullmatch(rf"\s*(?:{leads})\s*{re.escape(answer)}\s*{end}\s*", turn):
                self._fail(probe, rendering, f"turn {number + 1} should be {answer!r} and its end marker, not {turn!r}")

    def _check_prompts(self, probe: ProbeConversation, rendering: RenderedTest) -> None:
        """Check that no text of the generation prompt is trained, for answers whose text begins with the prompt."""
        positions = [at for at, message in enumerate(probe.messages) if message["role"] == ASSISTANT]
        if not probe.exact or self.trains_starts:
            return
        if len(positions) > _ALL_PROMPTS:
            # Check only answers that begin with a digit or a non-Latin letter: before them, a space at the end of the
            # prompt is a separate token, which might be trained.
            firsts = {at: text[0] for at, text in zip(positions, probe.expected, strict=True)}
            positions = [at for at, first in firsts.items() if first.isdigit() or not first.isascii()]
        spelled = self.vocabulary.spell(rendering.ids)
        stops = np.cumsum([len(piece) for piece in spelled])
        rows = lay_out([rendering.ids])
        trained = trained_tokens(rows, scan(rows, self.markers), self.markers, MaskOptions())
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

    def _learn_leads(self, probe: ProbeConversation, rendering: RenderedTest) -> None:
        """Record the text between the generation prompt and each answer: the model generates it."""
        positions = [at for at, message in enumerate(probe.messages) if message["role"] == ASSISTANT]
        for at, answer in zip(positions, probe.expected, strict=True):
            try:
                prompt = self.render(probe.messages[:at], add_generation_prompt=True)
            except ValueError:
                continue
            text = b"".join(self.vocabulary.spell(prompt)).decode(errors="replace")
            if rendering.text.startswith(text) and answer in rendering.text[len(text) :]:
                self.leads.add(rendering.text[len(text) :].split(answer, 1)[0].strip())
                continue
            self._learn_lead_without_thought(prompt, rendering, answer)

    def _learn_lead_without_thought(self, prompt: Sequence[int], rendering: RenderedTest, answer: str) -> None:
        """Record the control tokens before an answer, for a generation prompt that begins reasoning instead."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, rendering.ids, strict=False))
        shared = sum(1 for _ in same)
        (opening,) = self.vocabulary.spell(prompt[shared : shared + 1]) or (b"",)
        behind = b"".join(self.vocabulary.spell(rendering.ids[shared:])).decode(errors="replace")
        lead, written, _ = behind.partition(answer)
        words = lead
        for token in sorted(self.vocabulary.added, key=len, reverse=True):
            words = words.replace(token, "")
        if written and not words.strip() and THOUGHT_WORD.search(opening.decode(errors="replace")):
            self.leads.add(lead.strip())

    def _fail(self, probe: ProbeConversation, rendering: RenderedTest, what: str) -> None:
        raise VerificationError(
            f"The chat family {self.markers.family!r} does not fit the tokenizer {self.vocabulary.name!r} and its chat "
            f"template. On {probe.name}, {what}.\nExpected: {probe.expected}, each with one of {list(self.ends)}\n"
            f"Found: {list(rendering.turns)}\nRendered: {rendering.text[:_SHOWN]!r}\n"
            "Name the right `family`, or give `role_boundaries`."
        )


def _first_line(error: Exception) -> str:
    """Return the first line of a failure, without the names of chat format and tokenizer."""
    return str(error).split("\n")[0].rpartition("its chat template. On ")[2]
