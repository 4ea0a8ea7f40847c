"""Finds the chat format of a tokenizer: by name, by rendering its template, or by inference from the rendered text.

Inference takes as the start of an assistant's turn what the generation prompt adds to a user's turn. Its end is the
text between the answer and the start of the user's next turn. The inferred family must be proven like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.chat.chat_format import EOS, Exclusion, Family, RoleBoundary
from lightning_protrain.data.chat.check_turns import THOUGHT_TAGS, THOUGHT_WORD
from lightning_protrain.data.chat.known_formats import FAMILIES, family_called
from lightning_protrain.data.chat.markers import ExclusionMarkers, Markers, resolve, resolve_exclusions
from lightning_protrain.data.chat.mask import ASSISTANT
from lightning_protrain.data.chat.verify_format import (
    MAIN,
    ONE,
    THINKING,
    Messages,
    Render,
    TemplateRender,
    VerificationError,
    as_parts,
    verify_family,
)
from lightning_protrain.data.chat.vocabulary import Vocabulary

EMPTY_THOUGHTS = (
    *("<think>\n\n</think>\n\n", "<think>\n\n</think>\n", "<think>\n</think>\n", "<think></think>"),
    *("<|channel>thought\n<channel|>", "[THINK][/THINK]"),
)


_TAG = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_TAG_BEFORE, _TAG_BEHIND = re.compile(_TAG + r"\s*$"), re.compile(r"\s*" + _TAG)


def with_scaffolds(markers: Markers, vocabulary: Vocabulary, render: Render) -> Markers:
    """Return the user's markers, with the empty thoughts that the template puts before answers as scaffolds.

    Args:
        markers: Markers without exclusions.
        vocabulary: Vocabulary of the tokenizer.
        render: Renders messages.
    """
    texts = dict.fromkeys((*EMPTY_THOUGHTS, *empty_thoughts(render, vocabulary)))
    return _with(markers, vocabulary, (Exclusion("scaffold", text) for text in texts))


def with_tags(markers: Markers, vocabulary: Vocabulary, render: Render) -> Markers:
    """Return markers that also exclude thoughts in plain-text tags and, if needed, in tags that the template writes.

    Args:
        markers: Markers of a chat format.
        vocabulary: Vocabulary of the tokenizer.
        render: Renders messages.
    """
    tagged = _with(markers, vocabulary, (Exclusion("thinking", f"<{tag}>", f"</{tag}>") for tag in THOUGHT_TAGS))
    if verify_family(render, vocabulary, tagged, quiet=True):
        for tag in _written(vocabulary, render):
            more = _with(tagged, vocabulary, (Exclusion("thinking", *tag),))
            if not verify_family(render, vocabulary, more, quiet=True):
                return more
    return tagged


def _written(vocabulary: Vocabulary, render: Render) -> Iterator[tuple[str, str]]:
    """Yield the text right before and right after a thought, if both look like tags."""
    thought = str(THINKING.messages[-1]["reasoning_content"])
    for probe in (THINKING, as_parts(THINKING)):
        try:
            text = vocabulary.text(render(probe.messages))
        except ValueError:
            continue
        before, found, behind = text.rpartition(thought)
        opening, closing = _TAG_BEFORE.search(before), _TAG_BEHIND.match(behind)
        if found and opening and closing:
            yield opening[1], closing[1]
            return


def _with(markers: Markers, vocabulary: Vocabulary, exclusions: Iterable[Exclusion]) -> Markers:
    known = set(markers.exclusions)
    family = Family(markers.family, (), tuple(exclusions))
    added: list[ExclusionMarkers] = [one for one in resolve_exclusions(family, vocabulary) if one not in known]
    return replace(markers, exclusions=(*markers.exclusions, *added))


_SHOWN = 1500


def find_family(
    tokenizer: PreTrainedTokenizerBase, name: str | None = None, render: Render | None = None
) -> tuple[Family, Markers]:
    """Return the chat family of a tokenizer, proven on its template, and its markers on this tokenizer.

    Args:
        tokenizer: A fast tokenizer with a chat template, or one of mistral-common.
        name: A family, or a model that has its format. None tries all families whose markers the template writes, the
            most specific first, and then a "generic" one that is inferred from the template. The first family that is
            proven for most features wins.
        render: Renders messages as rows will be rendered; by default the tokenizer's own template.

    Raises:
        ValueError: If there is no such family; if the tokenizer is slow or lacks its vocabulary or a chat template; if
            the named family does not fit (with expected and found text); or if none fits and none can be inferred.
    """
    family = None if name is None else family_named(name)
    vocabulary = Vocabulary(tokenizer)
    if render is None:
        check_template(tokenizer, None)
        render = TemplateRender(tokenizer)
    if family is not None:
        family = with_prompt(family, render, vocabulary)
        markers = resolve(family, vocabulary)
        verify_family(render, vocabulary, markers)
        return family, markers
    return _recognise(vocabulary, render)


def check_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
    """Check that there is a chat template.

    Args:
        tokenizer: Tokenizer, maybe with a template; one of mistral-common needs none.
        given: A template that replaces the tokenizer's; None if there is none.

    Raises:
        ValueError: If there is none.
    """
    if not given and getattr(tokenizer, "backend_tokenizer", None) is not None and not tokenizer.chat_template:
        name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        raise ValueError(
            f"The tokenizer {name!r} has no chat template, so nothing says how a chat is written. Give "
            "`chat_template`, or use the tokenizer of a model that was trained on chats."
        )


def family_named(name: str) -> Family:
    """Return the family of this name, or of a model of this name.

    Raises:
        ValueError: If there is none; the message names similar ones.
    """
    family = family_called(name)
    if family is not None:
        return family
    near = get_close_matches(name.strip().lower(), FAMILIES, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    names = ", ".join(sorted({family.name for family in FAMILIES.values()}))
    raise ValueError(
        f"There is no chat family {name!r}.{hint} There are {names}. Leave it out and it is recognised from the chat "
        "template, or give `role_boundaries`."
    )


def _recognise(vocabulary: Vocabulary, render: Render) -> tuple[Family, Markers]:
    text = _rendered(vocabulary, render)
    reasons: list[str] = []
    best: tuple[int, Family, Markers] | None = None
    derived: list[tuple[str, Callable[[], Family]]] = [
        ("derived from the template", partial(infer_family, render, vocabulary)),
        ("derived without its generation prompt", partial(infer_family, render, vocabulary, by_prompt=False)),
    ]
    for name, make in (*_named(text, vocabulary), *derived):
        if best is not None and (name, make) == derived[1]:
            break
        try:
            family = with_prompt(make(), render, vocabulary)
            markers = resolve(family, vocabulary)
            unproven = len(verify_family(render, vocabulary, markers))
        except VerificationError as error:
            reasons.append(str(error).split("\n")[0])
        except ValueError as error:
            reasons.append(f"{name}: {error}")
        else:
            if best is None or unproven < best[0]:
                best = unproven, family, markers
            if not unproven:
                break
    if best is not None:
        return best[1:]
    listed = "\n".join(f"- {reason}" for reason in reasons)
    raise ValueError(
        f"The chat format of the tokenizer {vocabulary.name!r} is not recognised, and it is not guessed.\nIts template "
        f"renders two turns as {text[:_SHOWN]!r}\nTried:\n{listed}\nGive `role_boundaries`: for each role the text "
        "that begins and that ends its turns. Or name the `family`."
    )


def _named(text: str, vocabulary: Vocabulary) -> Iterator[tuple[str, Callable[[], Family]]]:
    for family in _candidates(text, vocabulary):
        yield family.name, partial(replace, family)


def _rendered(vocabulary: Vocabulary, render: Render) -> str:
    refusal: ValueError | None = None
    for probe in (MAIN, as_parts(MAIN), ONE, as_parts(ONE)):
        try:
            text = vocabulary.text(render(probe.messages))
        except ValueError as error:
            refusal = refusal or error
            continue
        if "maple" in text:
            return text
    reason = refusal or "it leaves out what the assistant says"
    raise ValueError(
        f"The chat template of the tokenizer {vocabulary.name!r} renders no chat of user and assistant: {reason}. "
        "Give another `chat_template`."
    ) from refusal


def _candidates(text: str, vocabulary: Vocabulary) -> Sequence[Family]:
    """Return the families whose markers the text contains, the one with most tokens in this vocabulary first."""
    scored: dict[str, tuple[tuple[int, int, int], Family]] = {}
    for family in FAMILIES.values():
        assistant = [boundary for boundary in family.boundaries if boundary.role == ASSISTANT]
        starts = [start.strip(" ") for boundary in assistant for start in boundary.start]
        ends = [vocabulary.eos if end == EOS else end for boundary in assistant for end in boundary.end]
        written = [start for start in starts if start in text]
        if written and any(end is None or end in text for end in ends):
            in_pieces = sum(not vocabulary.has(start) for start in starts)
            score = (-_known(family, vocabulary), -max(map(len, written)), in_pieces)
            scored.setdefault(family.name, (score, family))
    return [family for _, family in sorted(scored.values(), key=lambda entry: entry[0])]


def _known(family: Family, vocabulary: Vocabulary) -> int:
    """Return the number of the family's control tokens that are in the vocabulary."""
    texts = [start for boundary in family.boundaries for start in boundary.start] + list(family.media)
    texts += [text for exclusion in family.exclusions for text in (exclusion.start, exclusion.end)]
    return sum(any(token in text for text in texts) for token in vocabulary.added if not token.isspace())


_THOUGHT_TAG = re.compile(r"</?[^<>]*(?:think|thought|reason)[^<>]*>|\[/?THINK\]", re.IGNORECASE)
_FIRST, _ANSWER, _SECOND, _FINAL = "walnut", "maple", "poplar", "hazel"
_CHAT = (("user", _FIRST), ("assistant", _ANSWER), ("user", _SECOND), ("assistant", _FINAL))


def infer_family(render: Render, vocabulary: Vocabulary, by_prompt: bool = True) -> Family:
    """Infer a family "generic" from the text that the template writes; the module docstring explains how.

    Args:
        render: Renders messages.
        vocabulary: Vocabulary of the tokenizer.
        by_prompt: True requires that the start of an answer also begins the generation prompt; some templates write
            another prompt than header.

    Raises:
        ValueError: If nothing in the template shows where an answer begins.
    """
    for parts in (False, True):
        sample = _sample(render, vocabulary, parts)
        if sample is not None:
            return _family(sample, vocabulary, by_prompt)
    raise ValueError("the template does not write two turns of user and assistant in order")


def empty_thoughts(render: Render, vocabulary: Vocabulary) -> tuple[str, ...]:
    """Return the texts that look like empty thoughts and that the template itself puts before answers.

    Args:
        render: Renders messages.
        vocabulary: Vocabulary of the tokenizer.
    """
    for parts in (False, True):
        sample = _sample(render, vocabulary, parts)
        if sample is not None:
            try:
                _, leads = _assistant_start(sample, vocabulary)
            except ValueError:
                continue
            return tuple(dict.fromkeys(lead for lead in leads if THOUGHT_WORD.search(lead)))
    return ()


def with_prompt(family: Family, render: Render, vocabulary: Vocabulary) -> Family:
    """Return the family, changed so that nothing in the generation prompt is content of the assistant.

    Whitespace after a start marker becomes part of a further start marker; other text of the prompt becomes a scaffold.

    Args:
        family: A chat format.
        render: Renders messages.
        vocabulary: Vocabulary of the tokenizer.
    """
    prompt = _prompt(render, vocabulary)
    starts = [start for boundary in family.boundaries if boundary.role == ASSISTANT for start in boundary.start]
    written = [start for start in starts if start in prompt]
    if not written:
        return family
    last = max(written, key=lambda start: (prompt.rfind(start) + len(start), len(start)))
    behind = prompt[prompt.rfind(last) + len(last) :]
    text = behind.lstrip()
    longer = last + behind[: len(behind) - len(text)]
    boundaries = [
        replace(boundary, start=(*boundary.start, longer))
        if last in boundary.start and longer not in starts and boundary.role == ASSISTANT
        else boundary
        for boundary in family.boundaries
    ]
    scaffold = [Exclusion("scaffold", text)] if text else []
    return replace(
        family,
        boundaries=tuple(boundaries),
        exclusions=(*family.exclusions, *(one for one in scaffold if one not in family.exclusions)),
    )


def _prompt(render: Render, vocabulary: Vocabulary) -> str:
    """Return the text that a template writes after a user's message, with a generation prompt."""
    for parts in (False, True):
        try:
            text = vocabulary.text(render(_messages(parts)[:1], add_generation_prompt=True))
        except ValueError:
            continue
        if _FIRST in text:
            return text.rpartition(_FIRST)[2]
    return ""


def _messages(as_parts: bool) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": word}] if as_parts else word} for role, word in _CHAT]


@dataclass(frozen=True)
class _Sample:
    """The text around the four messages of `_CHAT`, each of which is one word.

    Attributes:
        head: Text before the user's first message.
        answer: Text between the user's first message and the first answer.
        between: Text between the first answer and the user's second message.
        final: Text between the user's second message and the final answer.
        tail: Text after the final answer.
        user_only: Text after the user's first message if it is the only one.
        prompt: `user_only` with a generation prompt.
    """

    head: str
    answer: str
    between: str
    final: str
    tail: str
    user_only: str
    prompt: str


def _sample(render: Render, vocabulary: Vocabulary, as_parts: bool) -> _Sample | None:
    messages = _messages(as_parts)

    def text(some: Messages, prompt: bool = False) -> str:
        return vocabulary.text(render(some, add_generation_prompt=prompt))

    try:
        whole = text(messages)
        parts = re.split("|".join(word for _, word in _CHAT), whole)
        if len(parts) != len(_CHAT) + 1:
            return None
        alone = text(messages[:1]).rpartition(_FIRST)[2]
        prompted = text(messages[:1], True).rpartition(_FIRST)[2]
    except ValueError:
        return None
    head, answer, between, final, tail = parts
    return _Sample(head, answer, between, final, tail, alone, prompted)


def _family(sample: _Sample, vocabulary: Vocabulary, by_prompt: bool) -> Family:
    start, leads = _assistant_start(sample, vocabulary, by_prompt)
    ends, user_start = _assistant_end(sample, vocabulary, start)
    exclusions = [Exclusion("scaffold", lead) for lead in dict.fromkeys(leads) if THOUGHT_WORD.search(lead)]
    if any(THOUGHT_WORD.search(lead) for lead in leads) or "<think>" in vocabulary.added:
        exclusions.append(Exclusion("thinking", "<think>", "</think>"))
    boundaries = [RoleBoundary("assistant", (start,), ends)]
    if user_start and user_start != start:
        end = _whole_end(sample.answer[: sample.answer.rfind(start)], vocabulary)
        boundaries.append(RoleBoundary("user", (user_start,), (end or None,)))
    return Family("generic", tuple(boundaries), tuple(exclusions))


def _assistant_start(sample: _Sample, vocabulary: Vocabulary, by_prompt: bool = True) -> tuple[str, list[str]]:
    """Return the start marker, and the text that the template writes between it and each of the two answers."""
    common = _common(sample.answer, sample.final)
    if by_prompt and len(sample.prompt) > len(sample.user_only):
        common = _common(common, sample.prompt)
    # A marker does not end within a token.
    common = _whole_tokens(common, sample.answer, vocabulary)
    common = _whole_tokens(common, sample.final, vocabulary)
    start = common.removeprefix(_whole_tokens(_common(common, sample.user_only), common, vocabulary)).lstrip()
    if not start.strip() or _THOUGHT_TAG.fullmatch(start.strip()):
        # Only the end of the user's turn precedes the answer; the end of a thought may be part of the answer.
        start = common.lstrip()
    # A non-Latin letter usually carries as much information as two Latin ones.
    letters = sum(1 if letter.isascii() else 2 for letter in start if letter.isalnum())
    if not any(token in start for token in vocabulary.added) and letters < 3:
        raise ValueError(
            "the template writes no header that tells an answer from other text: the answer begins after "
            f"{start!r}, which any text may hold"
        )
    return start, [part[len(common) :] for part in (sample.answer, sample.final) if part[len(common) :].strip()]


def _assistant_end(sample: _Sample, vocabulary: Vocabulary, start: str) -> tuple[tuple[str | None, ...], str]:
    """Return the end markers of an answer, and the start marker of the user's turn."""
    shared = _common(sample.between, sample.tail)
    shared = _whole_tokens(_whole_tokens(shared, sample.between, vocabulary), sample.tail, vocabulary)
    firsts = [_first_token(text, vocabulary) for text in (shared, sample.between, sample.tail)]
    if firsts[0]:
        together = _adjacent_tokens(shared, vocabulary)
        whole, last = _whole_end(shared, vocabulary), together[-1]
        if whole != "".join(together):
            last = max((token for token in vocabulary.added if whole.endswith(token)), key=len)
        # A tool call may end with only the last of these tokens.
        ends: tuple[str | None, ...] = tuple(dict.fromkeys((whole, last)))
        rest = sample.between.lstrip()[len(whole) :]
    elif shared.strip():
        ends, rest = (shared.strip(),), sample.between[len(shared) :]
    elif firsts[1] and firsts[2]:
        # The last answer has another end than earlier ones.
        ends, rest = (firsts[1], firsts[2]), sample.between.lstrip()[len(firsts[1]) :]
    elif firsts[1] and firsts[1] not in sample.head:
        # Only earlier answers have an end.
        ends, rest = (firsts[1],), sample.between.lstrip()[len(firsts[1]) :]
    else:
        ends, rest = (None,), sample.between
    rest = rest.lstrip()
    if None in ends and not rest.strip():
        raise ValueError("nothing stands between an answer and the user's next message")
    return ends, rest if sample.head.endswith(rest) and rest.strip() else ""


def _first_token(text: str, vocabulary: Vocabulary) -> str:
    """Return the control token at the beginning of a text, or an empty text."""
    found = [token for token in vocabulary.added if token.strip() and text.lstrip().startswith(token)]
    return max(found, key=len, default="")


def _adjacent_tokens(text: str, vocabulary: Vocabulary) -> list[str]:
    """Return the control tokens at the beginning of a text, up to the end-of-sequence token."""
    found: list[str] = []
    text = text.lstrip()
    while token := max((one for one in vocabulary.added if one.strip() and text.startswith(one)), key=len, default=""):
        found.append(token)
        text = text[len(token) :]
        if token == vocabulary.eos:
            break
    return found


def _whole_end(text: str, vocabulary: Vocabulary) -> str:
    """Return the end marker at the beginning of a text: its control tokens, or all of it if it also ends with one."""
    tokens = _adjacent_tokens(text, vocabulary)
    is_ended = any(token.strip() and text.rstrip().endswith(token) for token in vocabulary.added)
    return text.strip() if tokens and is_ended and tokens[-1] != vocabulary.eos else "".join(tokens)


def _whole_tokens(prefix: str, text: str, vocabulary: Vocabulary) -> str:
    """Shorten a prefix of a text so that it cuts no control token and no word of the text."""
    for token in vocabulary.added:
        at = text.find(token, max(0, len(prefix) - len(token) + 1))
        if not token.isspace() and 0 <= at < len(prefix) < at + len(token):
            prefix = prefix[:at]
    opened = re.search(r"<[^<>\s]*$", prefix)
    return prefix[: opened.start()] if opened and len(prefix) < len(text) else prefix


def _common(first: str, second: str) -> str:
    """Return the common prefix of both texts."""
    length = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
    return first[: min(len(first), len(second)) if length is None else length]
