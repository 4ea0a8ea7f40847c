"""Markers and boundaries of turns are found where they are, and refused where they make no sense."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.chat.chat_format import EOS, Exclusion, Family, RoleBoundary, parse_boundaries
from lightning_protrain.data.chat.known_formats import FAMILIES
from lightning_protrain.data.chat.marker_search import MarkerSearch, lay_out, without_overlap
from lightning_protrain.data.chat.markers import Marker, Markers, _Resolver, resolve
from lightning_protrain.data.chat.vocabulary import Vocabulary
from tests.data import tokenizers
from tests.data.cases import random_case
from tests.data.reference_scan import borders, match
from tests.data.templates import FORMATS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": " ", "start": ("a",)}, "empty role"),
        ({"role": "user", "start": ()}, "'user' has no start marker"),
        ({"role": "user", "start": ("",)}, "'user' has an empty start marker"),
        ({"role": "user", "start": ("a",), "end": ()}, "'user' has no end marker"),
        ({"role": "user", "start": ("a",), "end": (" ",)}, "'user' has an empty end marker"),
        ({"role": "user", "start": ("a", "a")}, "a start marker twice"),
        ({"role": "user", "start": ("a",), "end": (None, None)}, "a end marker twice"),
    ],
)
def test_a_boundary_that_makes_no_sense_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoleBoundary(**arguments)


def test_a_start_marker_belongs_to_one_role() -> None:
    with pytest.raises(ValueError, match="'<a>' belongs to both 'user' and 'tool'"):
        Family("f", (RoleBoundary("user", ("<a>",)), RoleBoundary("tool", ("<b>", "<a>"))))


def test_roles_are_named_once_in_order() -> None:
    family = Family("f", (RoleBoundary("b", ("1",)), RoleBoundary("a", ("2",)), RoleBoundary("b", ("3",))))
    assert family.roles == ("b", "a")


def test_boundaries_of_a_user_are_read() -> None:
    family = parse_boundaries(
        [
            {"role": "user", "start": "[INST]"},
            {"role": "assistant", "start": ["[/INST]", "[/R]"], "end": [EOS, None], "include_start": True},
            {"role": "tool", "start": "[R]", "end": None, "include_end": False},
        ]
    )
    assert family.boundaries == (
        RoleBoundary("user", ("[INST]",), (None,)),
        RoleBoundary("assistant", ("[/INST]", "[/R]"), (EOS, None), include_start=True),
        RoleBoundary("tool", ("[R]",), (None,), include_end=False),
    )


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"role": "user"}, "role_boundaries is a dict"),
        ("user", "role_boundaries is a str"),
        (["user"], r"role_boundaries\[0\] is 'user'"),
        ([{"role": "user", "start": "a", "ends": "b"}], r"\[0\]: unknown key 'ends'. Did you mean 'end'"),
        ([{"role": "user", "start": "a", "x": "b"}], r"unknown key 'x'. The keys are `role`, `start`"),
        ([{"role": "user"}], "the key 'start' is missing"),
        ([{"start": "a"}], "the key 'role' is missing"),
        ([{"role": 1, "start": "a"}], "role=1 is not text"),
        ([{"role": "user", "start": None}], "start=null"),
        ([{"role": "user", "start": [1]}], r"start=\[1\] holds a int"),
        ([{"role": "user", "start": "eos_token"}], "is allowed only in `end`"),
        ([{"role": "user", "start": []}], r"\[0\]: The role 'user' has no start marker"),
        ([{"role": "user", "start": "a", "end": 3}], "end=3 holds a int"),
        ([{"role": "user", "start": "a", "include_end": "yes"}], "include_end='yes' is neither true nor false"),
        ([{"role": "user", "start": "a"}, {"role": "tool", "start": "a"}], "belongs to both"),
    ],
)
def test_what_a_user_gets_wrong_is_named(specs: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_boundaries(specs)  # type: ignore[arg-type]


CONTENTS = ["Hi", "\nHi", "\n\nHi", "\n\n\nHi", " Hi", "7", "(a", "\tx", "\u4f60", "", "s"]


def _single(start: str, end: str | None = EOS) -> Family:
    return Family("single", (RoleBoundary("assistant", (start,), (end,)),))


@cache
def _vocabulary(name: str) -> Vocabulary:
    real = {"chatml": tokenizers.qwen, "llama3": tokenizers.llama3, "sentencepiece": tokenizers.sentencepiece}
    return Vocabulary(real[name]())


@cache
def _on_real(name: str, start: str) -> tuple[Vocabulary, tuple[Marker, ...]]:
    return _vocabulary(name), resolve(_single(start), _vocabulary(name)).roles[0].starts


def _matches(markers: tuple[Marker, ...], ids: list[int], at: int) -> int:
    """Tokens of the longest marker that matches there, its tail included."""
    lengths = [0]
    for marker in markers:
        stop = at + len(marker.ids)
        if tuple(ids[at:stop]) == marker.ids:
            if not marker.tails:
                lengths.append(len(marker.ids))
            elif stop < len(ids) and ids[stop] in marker.tails:
                lengths.append(len(marker.ids) + 1)
    return max(lengths)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_line_end_shared_with_the_content_is_still_the_marker(name: str, content: str) -> None:
    start = FAMILIES[name].boundaries[0].start[0]
    vocabulary, starts = _on_real(name, start)
    ids = vocabulary.encode([f"x{start}{content}"])[0]
    length = _matches(starts, ids, 1)
    assert length
    spelled = b"".join(vocabulary.spell(ids[1 : 1 + length])).decode()
    # Nothing but line ends of the content goes with the marker.
    assert spelled.startswith(start)
    assert not spelled.removeprefix(start).strip()


@pytest.mark.parametrize("before", ["", "</s>", "x</s>", "Hello. ", "\n", "\n\n"])
@pytest.mark.parametrize("start", ["USER:", "ASSISTANT:", "### Response:\n", "[INST]"])
@pytest.mark.parametrize("content", [" Hi", "\nHi", "Hi"])
def test_every_tokenization_of_a_text_marker_is_known(before: str, start: str, content: str) -> None:
    vocabulary, markers = _on_real("sentencepiece", start)
    ids = vocabulary.encode([before + start + content])[0]
    matched = [_matches(markers, ids, at) for at in range(len(ids))]
    assert sum(length > 0 for length in matched) == 1
    found = next(at for at, length in enumerate(matched) if length)
    rest = b"".join(vocabulary.spell(ids[found + matched[found] :])).decode()
    assert rest.strip() in content


@pytest.mark.parametrize("start", ["<role>user\n", "\n<role>user ", " <role>a<role>:", "#<role>", ".<role>\n\n"])
@pytest.mark.parametrize(
    "controls",
    [
        [AddedToken("<role>")],
        [AddedToken("<role>", normalized=True)],
        [AddedToken("<role>", lstrip=True, rstrip=True)],
        [AddedToken("<role>", single_word=True)],
        ["<role>", "a\n<role>"],
        ["<role>", "<role>user\n\n"],
        ["<role>", ".<", "\n", "\n\n"],
    ],
)
def test_control_tokens_separate_what_is_around_a_marker(
    start: str, controls: list[AddedToken | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = Vocabulary(tokenizers.metaspace(None, controls))
    found = resolve(_single(start), vocabulary)
    # The texts before and after the marker, all combined.
    monkeypatch.setattr(_Resolver, "_around_control", lambda *_: None)
    assert found == resolve(_single(start), vocabulary)


def test_control_tokens_of_mistral_common_are_ids() -> None:
    markers = resolve(FAMILIES["mistral"], Vocabulary(tokenizers.mistral_common()))
    assistant, user = markers.roles[:2]
    assert {marker.ids for marker in assistant.starts} == {(4,), (8,)}
    assert {marker.ids for marker in user.starts} == {(3,), (4, 3), (8, 3)}
    assert [marker.ids for marker in assistant.ends] == [(2,)]


def test_released_ids_are_found() -> None:
    qwen = resolve(FAMILIES["qwen2.5-vl"], Vocabulary(tokenizers.qwen()))
    assert [(marker.ids, 198 in marker.tails, 271 in marker.tails) for marker in qwen.roles[0].starts] == [
        ((151644, 77091), True, True)
    ]
    assert {151652, 151653, 151655, 151656} <= qwen.media
    llama = resolve(FAMILIES["llama-3.1"], Vocabulary(tokenizers.llama3()))
    assert (128006, 78191, 128007) in {marker.ids for marker in llama.roles[0].starts}
    assert [marker.ids for marker in llama.roles[0].ends] == [(128009,), (128008,)]


def _resolved(name: str) -> Markers:
    form = FORMATS[name]
    return resolve(FAMILIES[form.family], Vocabulary(tokenizers.byte_level(form.template, form.controls, form.eos)))


def test_what_the_vocabulary_lacks_is_left_out() -> None:
    assert not _resolved("chatml").media
    ends = next(role.ends for role in _resolved("deepseek-v3").roles if role.role == "assistant")
    assert len(ends) == 1
    family = Family("f", (RoleBoundary("assistant", ("<|im_start|>assistant\n",), ("<|im_end|>", "<|other|>")),))
    assert len(resolve(family, Vocabulary(tokenizers.qwen())).roles[0].ends) == 1
    assert len(resolve(family, Vocabulary(tokenizers.qwen()), strict=True).roles[0].ends) > 1


def test_flags_and_open_ends_are_kept() -> None:
    family = parse_boundaries(
        [
            {
                "role": "user",
                "start": "<|im_start|>",
                "end": [None, "eos_token"],
                "include_start": True,
                "include_end": False,
            }
        ]
    )
    role = resolve(family, Vocabulary(tokenizers.qwen()), strict=True).roles[0]
    assert (role.open_ended, role.include_start, role.include_end) == (True, True, False)
    assert [end.ids for end in role.ends] == [(151645,)]


def test_an_exclusion_has_its_tokenizations() -> None:
    family = Family("f", (), (Exclusion("thinking", "<think>", "</think>"), Exclusion("scaffold", "</think>")))
    thinking, scaffold = resolve(family, Vocabulary(tokenizers.qwen())).exclusions
    assert ([m.ids for m in thinking.start], [m.ids for m in thinking.end]) == ([(151667,)], [(151668,)])
    assert scaffold.end == ()


def test_a_missing_end_of_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"end with the end-of-sequence token, but the tokenizer .* has none"):
        resolve(_single("ASSISTANT:"), Vocabulary(tokenizers.byte_level(None)))
    either = Family("either", (RoleBoundary("assistant", ("ASSISTANT:",), (EOS, "###")),))
    assert {end.text for end in resolve(either, Vocabulary(tokenizers.byte_level(None))).roles[0].ends} == {"###"}


def _words(words: list[str]) -> PreTrainedTokenizerFast:
    plain = ["The", "quick", "13", "."]
    vocabulary = {word: index for index, word in enumerate(["<unk>", *plain, *words])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")


class _Words(Vocabulary):
    """Without the check of the whole vocabulary."""

    def _check(self) -> None:
        pass


def test_a_marker_of_unknown_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the marker 'ASSISTANT:' encodes to the unknown token \(\[0"):
        resolve(_single("ASSISTANT:", None), _Words(_words([])))


def test_a_marker_that_encodes_to_nothing_is_an_error() -> None:
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="the marker 'ASSISTANT:' encodes to nothing"):
        resolve(_single("ASSISTANT:", None), _Words(empty))


def test_a_marker_that_does_not_come_back_is_an_error() -> None:
    tokenizer = tokenizers.byte_level(None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="which comes back as 'assistant:'"):
        resolve(_single("ASSISTANT:", None), _Words(tokenizer))


@pytest.mark.parametrize("seed", range(3))
def test_sets_of_markers_are_found_as_by_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        case = random_case(rng)
        sets = [entry for role in case.markers.roles for entry in (role.starts, role.ends)]
        rows = lay_out(case.rows)
        for markers, matches in zip(sets, MarkerSearch(sets).find(rows), strict=True):
            expected = [
                (at, *found)
                for first, border in borders(case.rows)
                for at in range(first, border)
                if (found := match(markers, rows.ids.tolist(), at, border))
            ]
            columns = (matches.position, matches.stop, matches.marker)
            assert list(zip(*[column.tolist() for column in columns], strict=True)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_intervals_without_overlap(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        position = sorted(rng.sample(range(40), rng.randint(0, 20)))
        stop = [at + rng.randint(1, 6) for at in position]
        expected: list[int] = []
        for index, at in enumerate(position):
            if not expected or at >= stop[expected[-1]]:
                expected.append(index)
        kept = without_overlap(np.array(position, dtype=np.int64), np.array(stop, dtype=np.int64))
        assert np.arange(len(position))[kept].tolist() == expected


def test_a_long_chain_of_overlaps() -> None:
    position = np.arange(100_001)
    assert (without_overlap(position, position + 2) == position[::2]).all()


def test_no_markers() -> None:
    assert MarkerSearch([]).find(lay_out([[1, 2]])) == []
    assert MarkerSearch([[]]).find(lay_out([[1, 2]]))[0].position.size == 0
