"""Finds the chat family of a tokenizer: by name, or by rendering its chat template and proving. Never by guess."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.boundaries import EOS, Family
from lightning_protrain.data.derivation import derive, with_prompt
from lightning_protrain.data.families import FAMILIES, family_called
from lightning_protrain.data.markers import Markers, resolve
from lightning_protrain.data.masking import ASSISTANT
from lightning_protrain.data.probes import MAIN, ONE, Render, TemplateRender, as_parts
from lightning_protrain.data.proof import NotProven, prove
from lightning_protrain.data.vocabulary import Vocabulary

_SHOWN = 1500


def find_family(
    tokenizer: PreTrainedTokenizerBase, name: str | None = None, render: Render | None = None
) -> tuple[Family, Markers]:
    """The chat family of a tokenizer, proven on its template, and its markers on this tokenizer.

    Args:
        tokenizer: A fast one with a chat template, or one of mistral-common.
        name: A family, or a model whose format it has. None: all families whose markers the template writes are tried,
            the most specific first, and a "generic" one that is derived from what the template writes. It is the first
            that is proven for most features.
        render: Renders messages as rows will be rendered; by default the tokenizer's template as it is.

    Raises:
        ValueError: No such family; the tokenizer is slow, lacks its vocabulary or a chat template; the named family
            does not fit, with expected and found text; or none fits and none can be derived.
    """
    family = None if name is None else family_named(name)
    vocabulary = Vocabulary(tokenizer)
    if render is None:
        check_template(tokenizer, None)
        render = TemplateRender(tokenizer)
    if family is not None:
        family = with_prompt(family, render, vocabulary)
        markers = resolve(family, vocabulary)
        prove(render, vocabulary, markers)
        return family, markers
    return _recognise(vocabulary, render)


def check_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
    """Check that there is a chat template.

    Args:
        tokenizer: Has one, maybe; one of mistral-common needs none.
        given: A template in place of the tokenizer's.

    Raises:
        ValueError: There is none.
    """
    if not given and getattr(tokenizer, "backend_tokenizer", None) is not None and not tokenizer.chat_template:
        name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        raise ValueError(
            f"The tokenizer {name!r} has no chat template, so nothing says how a chat is written. Give "
            "`chat_template`, or use the tokenizer of a model that was trained on chats."
        )


def family_named(name: str) -> Family:
    """The family of this name, or of a model of this name.

    Raises:
        ValueError: There is none; near names are told.
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
        ("derived from the template", partial(derive, render, vocabulary)),
        ("derived without its generation prompt", partial(derive, render, vocabulary, by_prompt=False)),
    ]
    for name, make in (*_named(text, vocabulary), *derived):
        if best is not None and (name, make) == derived[1]:
            break
        try:
            family = with_prompt(make(), render, vocabulary)
            markers = resolve(family, vocabulary)
            unproven = len(prove(render, vocabulary, markers))
        except NotProven as error:
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
    """The families whose markers the text has, the one with most of what this vocabulary knows first."""
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
    """How many control tokens of the family the vocabulary has."""
    texts = [start for boundary in family.boundaries for start in boundary.start] + list(family.media)
    texts += [text for exclusion in family.exclusions for text in (exclusion.start, exclusion.end)]
    return sum(any(token in text for text in texts) for token in vocabulary.added if not token.isspace())
