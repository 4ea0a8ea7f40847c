"""Finds the chat format of a tokenizer: by name, by the markers in a rendered text, or by inference.

To infer a chat format, four known messages are rendered. The start marker of the assistant is the text before both
answers; the generation prompt must contain it, too. The end marker is the text after both answers. An inferred format
is verified like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.chat.chat_format import EOS, Exclusion, Family, RoleBoundary
from lightning_protrain.data.chat.check_turns import THOUGHT_TAGS, THOUGHT_WORD
from lightning_protrain.data.chat.known_formats import EMPTY_THOUGHTS, FAMILIES, family_called
from lightning_protrain.data.chat.markers import Markers, resolve
from lightning_protrain.data.chat.mask import ASSISTANT
from lightning_protrain.data.chat.render import Messages, Render
from lightning_protrain.data.chat.verify_format import MAIN, ONE, THINKING, VerificationError, verify_family
from lightning_protrain.data.chat.vocabulary import Vocabulary

_EMPTY_THOUGHTS = (*EMPTY_THOUGHTS, "<|channel>thought\n<channel|>", "[THINK][/THINK]")
_TAG = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_TAG_BEFORE, _TAG_BEHIND = re.compile(_TAG + r"\s*$"), re.compile(r"\s*" + _TAG)


def with_scaffolds(markers: Markers, vocabulary: Vocabulary, render: Render) -> Markers:
    """Return markers that exclude empty thoughts that templates write before answers, such as "<think></think>".

    Args:
        markers: Markers of a chat format.
        vocabulary: Vocabulary of the tokenizer.
        render: Renders messages.
    """
    texts = dict.fromkeys((*_EMPTY_THOUGHTS, *empty_thoughts(render, vocabulary)))
    return _with(markers, vocabulary, (Exclusion("scaffold", text) for text in texts))


def unwritten_scaffolds(markers: Markers, vocabulary: Vocabulary, render: Render) -> tuple[str, ...]:
    """Return the scaffolds that the template writes neither before known answers nor in the generation prompt.

    It may write them in other conversations: SmolLM3's does after a system message with "/no_think". Whitespace at the
    borders is left out. The arguments are those of `with_scaffolds`.
    """
    texts = dict.fromkeys(part.start[0].text.strip() for part in markers.exclusions if part.kind == "scaffold")
    if not texts or not any(role.role == ASSISTANT for role in markers.roles):
        return ()
    written = "".join((_rendered(vocabulary, render) + _prompt(render, vocabulary)).split())
    return tuple(text for text in texts if "".join(text.split()) not in written)


def with_tags(markers: Markers, vocabulary: Vocabulary, render: Render) -> Markers:
    """Return markers that exclude reasoning in tags such as "<think>" and, if needed, in tags of the template.

    The arguments are those of `with_scaffolds`.
    """
    tagged = _with(markers, vocabulary, (Exclusion("thinking", f"<{tag}>", f"</{tag}>") for tag in THOUGHT_TAGS))
    if verify_family(render, vocabulary, tagged, quiet=True):
        for tag in _written(vocabulary, render):
            more = _with(tagged, vocabulary, (Exclusion("thinking", *tag),))
            if not verify_family(render, vocabulary, more, quiet=True):
                return more
    return tagged


def _written(vocabulary: Vocabulary, render: Render) -> Iterator[tuple[str, str]]:
    """Yield the tags that the template writes before and after reasoning, if it writes tags."""
    thought = THINKING.messages[-1]["reasoning_content"]
    try:
        text = vocabulary.text(render(THINKING.messages))
    except ValueError:
        return
    head, written, behind = text.rpartition(thought)
    opening, closing = _TAG_BEFORE.search(head), _TAG_BEHIND.match(behind)
    if written and opening and closing:
        yield opening[1], closing[1]


def _with(markers: Markers, vocabulary: Vocabulary, exclusions: Iterable[Exclusion]) -> Markers:
    known = set(markers.exclusions)
    family = Family(markers.family, (), tuple(exclusions))
    added = [part for part in resolve(family, vocabulary).exclusions if part not in known]
    return replace(markers, exclusions=(*markers.exclusions, *added))


_SHOWN = 1500


def has_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> bool:
    """Return True if chats can be written; the arguments are those of `check_template`."""
    return bool(template or tokenizer.chat_template) or getattr(tokenizer, "backend_tokenizer", None) is None


def check_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Raise ValueError if there is no chat template.

    Args:
        tokenizer: The tokenizer; a tokenizer of mistral-common needs no template.
        template: Template that replaces the tokenizer's; None if the user gave none.
    """
    if not has_template(tokenizer, template):
        name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        raise ValueError(
            f"The tokenizer {name!r} has no chat template, so nothing says how a chat is written. Give "
            "`chat_template`, or use the tokenizer of a model that was trained on chats."
        )


def family_named(name: str) -> Family:
    """Return the chat format with this name, or of the model with this name.

    Raises:
        ValueError: If the name is unknown.
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


def find_family(vocabulary: Vocabulary, render: Render) -> tuple[Family, Markers]:
    """Return the chat format of a tokenizer and its markers, verified with the chat template.

    Known formats whose markers the template writes are tried, and then a format inferred from the template. The format
    with the fewest failed features wins. The arguments are those of `with_scaffolds`.

    Raises:
        ValueError: If no chat format fits the template.
    """
    text = _rendered(vocabulary, render)
    reasons: list[str] = []
    best: tuple[int, Family, Markers] | None = None
    last = "derived without its generation prompt"
    tried: list[tuple[str, Callable[[], Family]]] = [
        *((family.name, partial(replace, family)) for family in _candidates(text, vocabulary)),
        ("derived from the template", partial(infer_family, render, vocabulary)),
        (last, partial(infer_family, render, vocabulary, by_prompt=False)),
    ]
    for name, make in tried:
        if best is not None and name == last:
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


def _rendered(vocabulary: Vocabulary, render: Render) -> str:
    refusal: ValueError | None = None
    for probe in (MAIN, ONE):
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
    """Return the known chat formats whose markers a text contains; formats with more tokens in `vocabulary` first."""
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
    """Return the number of added tokens of a vocabulary that occur in the markers of a chat format."""
    texts = [start for boundary in family.boundaries for start in boundary.start] + list(family.media)
    texts += [text for exclusion in family.exclusions for text in (exclusion.start, exclusion.end)]
    return sum(any(token in text for text in texts) for token in vocabulary.added if not token.isspace())


_THOUGHT_TAG = re.compile(r"</?[^<>]*(?:think|thought|reason)[^<>]*>|\[/?THINK\]", re.IGNORECASE)
_FIRST, _ANSWER, _SECOND, _FINAL = "walnut", "maple", "poplar", "hazel"
_WORDS = (_FIRST, _ANSWER, _SECOND, _FINAL)
_MESSAGES = [{"role": "assistant" if at % 2 else "user", "content": word} for at, word in enumerate(_WORDS)]


def infer_family(render: Render, vocabulary: Vocabulary, by_prompt: bool = True) -> Family:
    """Infer the chat format, named "generic", from rendered text; the module docstring explains how.

    Args:
        render: Renders messages.
        vocabulary: Vocabulary of the tokenizer.
        by_prompt: True requires the start marker in the generation prompt, too. False is for templates whose
            generation prompt differs from the text before answers.

    Raises:
        ValueError: If the template does not write a text that identifies the begin of an answer.
    """
    sample = _sample(render, vocabulary)
    if sample is None:
        raise ValueError("the template does not write two turns of user and assistant in order")
    start, leads = _assistant_start(sample, vocabulary, by_prompt)
    ends, user_start = _assistant_end(sample, vocabulary, start)
    exclusions = [Exclusion("scaffold", lead) for lead in dict.fromkeys(leads) if THOUGHT_WORD.search(lead)]
    if exclusions or "<think>" in vocabulary.added:
        exclusions.append(Exclusion("thinking", "<think>", "</think>"))
    boundaries = [RoleBoundary("assistant", (start,), ends)]
    if user_start and user_start != start:
        end = _whole_end(sample.answer[: sample.answer.rfind(start)], vocabulary)
        boundaries.append(RoleBoundary("user", (user_start,), (end or None,)))
    return Family("generic", tuple(boundaries), tuple(exclusions))


def empty_thoughts(render: Render, vocabulary: Vocabulary) -> tuple[str, ...]:
    """Return the empty thoughts that a template writes before answers without reasoning."""
    sample = _sample(render, vocabulary)
    try:
        leads = [] if sample is None else _assistant_start(sample, vocabulary)[1]
    except ValueError:
        leads = []
    return tuple(dict.fromkeys(lead for lead in leads if THOUGHT_WORD.search(lead)))


def with_prompt(family: Family, render: Render, vocabulary: Vocabulary) -> Family:
    """Return a chat format that excludes the end of the generation prompt, after the assistant's start marker.

    It has a further start marker that includes whitespace, and an exclusion for other text.
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
    return replace(family, boundaries=tuple(boundaries), exclusions=(*family.exclusions, *scaffold))


def _prompt(render: Render, vocabulary: Vocabulary) -> str:
    """Return the text that a template writes after a user's message, including the generation prompt."""
    try:
        return vocabulary.text(render(_MESSAGES[:1], add_generation_prompt=True)).rpartition(_FIRST)[2]
    except ValueError:
        return ""


class _Sample(NamedTuple):
    """The text that a template writes around the four messages of `_MESSAGES`.

    Attributes:
        head: Text before the user's first message.
        answer: Text between the user's first message and the first answer.
        between: Text between the first answer and the user's second message.
        final: Text between the user's second message and the second answer.
        tail: Text after the second answer.
        user_only: Text after the user's first message, rendered alone.
        prompt: Text after the user's first message, rendered alone with a generation prompt.
    """

    head: str
    answer: str
    between: str
    final: str
    tail: str
    user_only: str
    prompt: str


def _sample(render: Render, vocabulary: Vocabulary) -> _Sample | None:
    def text(messages: Messages, prompt: bool = False) -> str:
        return vocabulary.text(render(messages, add_generation_prompt=prompt))

    try:
        parts = re.split("|".join(_WORDS), text(_MESSAGES))
        alone, prompted = (text(_MESSAGES[:1], prompt).rpartition(_FIRST)[2] for prompt in (False, True))
    except ValueError:
        return None
    if len(parts) != len(_WORDS) + 1:
        return None
    head, answer, between, final, tail = parts
    return _Sample(head, answer, between, final, tail, alone, prompted)


def _assistant_start(sample: _Sample, vocabulary: Vocabulary, by_prompt: bool = True) -> tuple[str, list[str]]:
    """Return the assistant's start marker, and the texts between it and the answers that are not blank."""
    common = _common(sample.answer, sample.final)
    if by_prompt and len(sample.prompt) > len(sample.user_only):
        common = _common(common, sample.prompt)
    # A marker must end at a token boundary.
    common = _whole_tokens(common, sample.answer, vocabulary)
    common = _whole_tokens(common, sample.final, vocabulary)
    start = common.removeprefix(_whole_tokens(_common(common, sample.user_only), common, vocabulary)).lstrip()
    if not start.strip() or _THOUGHT_TAG.fullmatch(start.strip()):
        # Nothing but the user's end marker precedes the answer, so it marks the start of the answer.
        start = common.lstrip()
    # A non-Latin letter, such as a Chinese one, counts as two.
    letters = sum(1 if letter.isascii() else 2 for letter in start if letter.isalnum())
    if not any(token in start for token in vocabulary.added) and letters < 3:
        raise ValueError(f"the template writes only {start!r} before an answer, which other text may contain")
    return start, [part[len(common) :] for part in (sample.answer, sample.final) if part[len(common) :].strip()]


def _assistant_end(sample: _Sample, vocabulary: Vocabulary, start: str) -> tuple[tuple[str | None, ...], str]:
    """Return the assistant's end markers, and the user's start marker."""
    shared = _common(sample.between, sample.tail)
    shared = _whole_tokens(_whole_tokens(shared, sample.between, vocabulary), sample.tail, vocabulary)
    firsts = [_first_token(text, vocabulary) for text in (shared, sample.between, sample.tail)]
    if firsts[0]:
        together = _adjacent_tokens(shared, vocabulary)
        whole, last = _whole_end(shared, vocabulary), together[-1]
        if whole != "".join(together):
            last = max((token for token in vocabulary.added if whole.endswith(token)), key=len)
        # A tool call may end with only the last token of the end marker.
        ends: tuple[str | None, ...] = tuple(dict.fromkeys((whole, last)))
        rest = sample.between.lstrip()[len(whole) :]
    elif shared.strip():
        ends, rest = (shared.strip(),), sample.between[len(shared) :]
    elif firsts[1] and firsts[2]:
        # The last answer and earlier answers have different end markers.
        ends, rest = (firsts[1], firsts[2]), sample.between.lstrip()[len(firsts[1]) :]
    elif firsts[1] and firsts[1] not in sample.head:
        # The last answer has no end marker.
        ends, rest = (firsts[1],), sample.between.lstrip()[len(firsts[1]) :]
    else:
        ends, rest = (None,), sample.between
    rest = rest.lstrip()
    if None in ends and not rest.strip():
        raise ValueError("the template writes nothing between an answer and the user's next message")
    return ends, rest if sample.head.endswith(rest) and rest.strip() else ""


def _first_token(text: str, vocabulary: Vocabulary) -> str:
    """Return the longest control token at the beginning of a text, or an empty string."""
    tokens = [token for token in vocabulary.added if token.strip() and text.lstrip().startswith(token)]
    return max(tokens, key=len, default="")


def _adjacent_tokens(text: str, vocabulary: Vocabulary) -> list[str]:
    """Return the consecutive control tokens at the beginning of a text, up to the end-of-sequence token."""
    tokens: list[str] = []
    text = text.lstrip()
    while not text[:1].isspace() and (token := _first_token(text, vocabulary)):
        tokens.append(token)
        text = text[len(token) :]
        if token == vocabulary.eos:
            break
    return tokens


def _whole_end(text: str, vocabulary: Vocabulary) -> str:
    """Return the end marker at the beginning of a text: its first control tokens, or all if it ends with one, too."""
    tokens = _adjacent_tokens(text, vocabulary)
    is_ended = any(token.strip() and text.rstrip().endswith(token) for token in vocabulary.added)
    return text.strip() if tokens and is_ended and tokens[-1] != vocabulary.eos else "".join(tokens)


def _whole_tokens(prefix: str, text: str, vocabulary: Vocabulary) -> str:
    """Shorten a prefix of a text so that it ends within no control token of the text."""
    for token in vocabulary.added:
        at = text.find(token, max(0, len(prefix) - len(token) + 1))
        if not token.isspace() and 0 <= at < len(prefix) < at + len(token):
            prefix = prefix[:at]
    opened = re.search(r"<[^<>\s]*$", prefix)
    return prefix[: opened.start()] if opened and len(prefix) < len(text) else prefix


def _common(first: str, second: str) -> str:
    """Return the longest common prefix of two texts."""
    return "".join(
        character for character, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
