"""The loss mask equals the mask of generated conversations, and a simple reference for any tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_protrain.data.chat import mask
from lightning_protrain.data.chat.marker_search import lay_out
from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.mask import MaskOptions, token_weights, trained_roles, trained_tokens
from lightning_protrain.data.chat.turns import scan
from tests.data.cases import Case, random_case
from tests.data.reference_mask import reference_mask
from tests.data.styles import ASSISTANT, STYLES, USER
from tests.data.turns import NEWLINE, conversations, family, mark, role

EOS = ("turn", "all", "last", "none")
CHATML = STYLES["chatml"].markers
DEFAULT = MaskOptions()


def masked_rows(rows: Any, markers: Markers, options: MaskOptions = DEFAULT, weights: Any = None) -> Any:
    tokens = lay_out(rows)
    return trained_tokens(tokens, scan(tokens, markers), markers, options, weights)


def masked(ids: Any, markers: Markers, options: MaskOptions = DEFAULT, weights: Any = None) -> Any:
    return masked_rows([ids], markers, options, weights)


def kept(ids: Sequence[int], markers: Markers, options: MaskOptions = DEFAULT, **arguments: Any) -> list[int]:
    return np.asarray(ids)[masked(ids, markers, options, **arguments)].tolist()


def agree(case: Case, weights: Sequence[float] | None = None) -> None:
    found = masked_rows(case.rows, case.markers, case.options, weights)
    assert found.tolist() == reference_mask(case.rows, case.markers, case.options, weights), case


@pytest.mark.parametrize("seed", range(4))
def test_anything_is_masked_as_by_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        case = random_case(rng)
        spans = scan(lay_out(case.rows), case.markers)
        count = int(trained_roles(case.markers, case.options)[spans.role].sum())
        agree(case, [rng.choice([0.0, 1.0, 0.5]) for _ in range(count)] if rng.random() < 0.3 else None)


PLANTED = {
    "no exclusions": ("_excluded", lambda *_: (np.empty(0, dtype=np.int64),) * 2),
    "exclusions overlap": ("without_overlap", lambda position, stop: slice(None)),
    "the last turn of the row": (
        "last_of_row",
        lambda _row, _spans, turns: turns & (np.cumsum(turns) == turns.sum()),
    ),
    "shared terminators": ("_shared_terminators", lambda _row, spans, *_: np.zeros(spans.role.size, dtype=bool)),
    "no terminator is shared": ("terminators", lambda _row, _markers, spans: np.zeros_like(spans.role)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, *PLANTED[bug])
    rng = random.Random(0)

    def compare() -> None:
        for _ in range(5000):
            agree(random_case(rng))

    with pytest.raises(AssertionError):
        compare()


ORACLE_OPTIONS = [
    MaskOptions(train_on_eos=eos, train_on=turns, train_thinking=thinking)  # type: ignore[arg-type]
    for eos, turns, thinking in itertools.product(["turn", "last", "none"], ["all", "last_turn"], [True, False])
]


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_was_built_to_be_trained_is(name: str, data: st.DataObject) -> None:
    conversation = data.draw(conversations(STYLES[name]))
    for options in ORACLE_OPTIONS:
        assert masked(conversation.ids, conversation.style.markers, options).tolist() == conversation.expected(options)
    every = MaskOptions(roles_to_train=tuple(conversation.style.forms))
    assert masked(conversation.ids, conversation.style.markers, every).tolist() == conversation.expected(every)


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_many_rows_are_masked_as_each_is_alone(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    talks = data.draw(st.lists(conversations(style, 3), min_size=1, max_size=3))
    options = data.draw(
        st.builds(
            MaskOptions,
            train_on_inputs=st.booleans(),
            roles_to_train=st.lists(st.sampled_from(list(style.forms)), max_size=3, unique=True).map(tuple),
            train_on_eos=st.sampled_from(EOS),
            train_on=st.sampled_from(["all", "last_turn"]),
            train_thinking=st.booleans(),
        )
    )
    alone = [masked(talk.ids, style.markers, options).tolist() for talk in talks]
    together = masked_rows([talk.ids for talk in talks], style.markers, options)
    assert together.tolist() == list(itertools.chain(*alone))


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_mask_of_a_prefix_is_the_prefix_of_the_mask(name: str, data: st.DataObject) -> None:
    """Under `turn`, with all turns: at every cut that splits no marker."""
    conversation = data.draw(conversations(STYLES[name], 3))
    options = MaskOptions(train_thinking=data.draw(st.booleans()))
    whole = masked(conversation.ids, conversation.style.markers, options).tolist()
    for cut in range(len(whole) + 1):
        if not conversation.splits_a_marker(cut):
            assert masked(conversation.ids[:cut], conversation.style.markers, options).tolist() == whole[:cut], cut


def test_terminators_of_others() -> None:
    every = MaskOptions(train_on_eos="all")
    ids = [1, USER, NEWLINE, 200, 2, NEWLINE, 1, ASSISTANT, NEWLINE, 201, 2]
    assert kept(ids, CHATML, every) == [2, 201, 2]
    assert kept(ids, CHATML, MaskOptions(train_on_eos="all", roles_to_train=("user",))) == [200, 2, 2]
    assert kept(ids, CHATML, MaskOptions(train_on_eos="all", roles_to_train=())) == []
    # [/INST] begins the assistant's turn; the same would be true if it were not said of it.
    assert kept([99, 17, 9, 18, 3, 200, 4, 201, 2], STYLES["mistral"].markers, every) == [18, 201, 2]
    roles = [role("user", [mark(3)], [mark(4), mark(5)]), role("assistant", [mark(4), mark(6, 7)], [mark(2), mark(6)])]
    shared = family("shared", [*roles, role("tool", [mark(8)], [mark(5)], include_end=False)])
    assert kept([99, 3, 200, 4, 201, 2], shared, every) == [201, 2]
    assert kept([99, 3, 200, 5, 4, 201, 2], shared, every) == [201, 2]
    # A terminator of the assistant is one for others too, although a longer start marker begins with it.
    assert kept([99, 41, 40, 41, 200, 9, NEWLINE, 42, 41, 201, 9], STYLES["idefics"].markers, every)[-2:] == [201, 9]
    opened = [99, 40, 41, 200, 9, NEWLINE, 42, 41, 201, 9]
    assert kept(opened, STYLES["idefics"].markers, every) == [9, 201, 9]


def test_include_flags() -> None:
    roles = [entry for entry in CHATML.roles if entry.role != "assistant"]
    assistant = next(entry for entry in CHATML.roles if entry.role == "assistant")
    ids = [99, 1, ASSISTANT, NEWLINE, 200, 2]
    for with_start, with_end in itertools.product([False, True], repeat=2):
        flagged = type(assistant)("assistant", assistant.starts, assistant.ends, False, with_start, with_end)
        expected = [1, ASSISTANT, NEWLINE] * with_start + [200] + [2] * with_end
        assert kept(ids, family("flags", [*roles, flagged])) == expected
        assert kept(ids[1:], family("flags", [*roles, flagged])) == expected[with_start:]


def test_weights_of_turns() -> None:
    turn = [1, ASSISTANT, NEWLINE, 200, 2, NEWLINE]
    ids, spans = turn * 3, scan(lay_out([turn * 3]), CHATML)
    assert kept(ids, CHATML, weights=[1, 0, 0.5]) == [200, 2, 200, 2]
    trained = masked(ids, CHATML, weights=[1, 0, 0.5])
    weights = token_weights(trained, spans, CHATML, DEFAULT, [1, 0, 0.5])
    assert weights.dtype == np.float32
    assert weights[trained].tolist() == [1, 1, 0.5, 0.5]
    assert not weights[~trained].any()
    last = MaskOptions(train_on="last_turn", train_on_eos="all")
    assert masked(ids, CHATML, last, [1, 1, 0]).nonzero()[0].tolist() == [4, 9, 10]
    inputs = MaskOptions(train_on_inputs=True)
    assert kept(ids, CHATML, inputs, weights=[0, 1, 1]) == [ASSISTANT, NEWLINE, NEWLINE, *turn * 2]


def test_media_and_inputs() -> None:
    markers = family("media", CHATML.roles, media=(77, 78))
    ids = [1, USER, NEWLINE, 77, 200, 2, NEWLINE, 1, ASSISTANT, NEWLINE, 78, 201, 10**6, -5, 2]
    assert kept(ids, markers) == [201, 10**6, -5, 2]
    everything = [token for token in ids[1:] if token not in (77, 78)]
    assert kept(ids, markers, MaskOptions(train_on_inputs=True)) == everything


def test_the_first_token_of_a_row_is_no_target() -> None:
    inputs = MaskOptions(train_on_inputs=True)
    assert masked_rows([[7, 7], [], [7, 7, 7]], CHATML, inputs).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"train_on_eos": "always"}, "train_on_eos must be one of turn, all, last, none, got 'always'"),
        ({"train_on": "last"}, "train_on must be one of all, last_turn, got 'last'"),
        ({"train_on_inputs": "false"}, "train_on_inputs must be true or false, got 'false'"),
        ({"train_thinking": None}, "train_thinking must be true or false"),
        ({"roles_to_train": "assistant"}, "roles_to_train must be a list of names of roles, got 'assistant'"),
        ({"roles_to_train": (1,)}, "roles_to_train must be a list"),
        ({"roles_to_train": 1}, "roles_to_train must be a list"),
        ({"train_on_eos": ["turn"]}, "train_on_eos must be one of"),
    ],
)
def test_invalid_options(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MaskOptions(**arguments)


def test_roles_that_a_family_does_not_have() -> None:
    options = MaskOptions(roles_to_train=["model", "assistant"])  # type: ignore[arg-type]
    assert options.roles_to_train == ("model", "assistant")
    with pytest.raises(ValueError, match=r"'model', for which the chat family 'chatml' has no boundary.*system, user"):
        masked([1], CHATML, options)
    with pytest.raises(ValueError, match="'assistant'"):
        masked([1], family("one", [role("user", [mark(1)])]))


@pytest.mark.parametrize("rows", [[[]], [[], []]])
@pytest.mark.parametrize("options", [*ORACLE_OPTIONS[:4], MaskOptions(train_on_inputs=True)])
def test_nothing_at_all(rows: list[list[int]], options: MaskOptions) -> None:
    assert masked_rows(np.array(rows, dtype=np.int32), CHATML, options).size == 0
