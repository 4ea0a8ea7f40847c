"""Rows of plain text, and of answers that were judged, in the forms in which the Hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from lightning_protrain.data.conversation import MalformedRow, unit_of
from lightning_protrain.data.sources.dataset import read_rows
from lightning_protrain.data.sources.row_kinds import RowFormat
from lightning_protrain.data.sources.tables import ArrowTable, JsonLines, RowList

Q = {"role": "user", "content": "Why?"}
GOOD = {"role": "assistant", "content": "So."}
BAD = {"role": "assistant", "content": "No."}
S = {"role": "system", "content": "Be kind."}
HUMAN = {"from": "human", "value": "Why?"}
HH = "\n\nHuman: Why?\n\nAssistant:"
# Three turns before the answer.
LONG = [Q, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "And?"}]


def _parse(row: Any, **options: Any) -> Any:
    return RowFormat(**options).parse(row, "row 3", Path())


def _untrained(*messages: Any) -> list[Any]:
    return [{**message, "train": False} for message in messages]


PAIR = ([*_untrained(Q), GOOD], [*_untrained(Q), BAD])
WITH_SYSTEM = ([*_untrained(S, Q), GOOD], [*_untrained(S, Q), BAD])
LONG_START = tuple([*_untrained(*LONG[:2]), answer] for answer in (GOOD, BAD))
LONG_PAIR = ([*_untrained(*LONG), GOOD], [*_untrained(*LONG), BAD])


@pytest.mark.parametrize(
    ("row", "sides"),
    [
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, PAIR),
        ({"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]}, PAIR),
        ({"prompt": [Q], "chosen": "So.", "rejected": "No."}, PAIR),
        ({"prompt": "Why?", "chosen": [GOOD], "rejected": [BAD]}, PAIR),
        ({"prompt": "Why?", "chosen": GOOD, "rejected": BAD}, PAIR),
        ({"prompt": [S, Q], "chosen": [GOOD], "rejected": [BAD]}, WITH_SYSTEM),
        ({"chosen": [Q, GOOD], "rejected": [Q, BAD]}, PAIR),
        ({"chosen": [S, Q, GOOD], "rejected": [S, Q, BAD]}, WITH_SYSTEM),
        ({"chosen": [*LONG, GOOD], "rejected": [*LONG, BAD]}, LONG_PAIR),
        ({"chosen": [*LONG[1:], GOOD], "rejected": [*LONG[1:], BAD]}, tuple(side[1:] for side in LONG_PAIR)),
        # A column and the messages at the beginning of both answers may each have only a part of the prompt.
        ({"prompt": LONG, "chosen": [LONG[2], GOOD], "rejected": [LONG[2], BAD]}, LONG_PAIR),
        *[
            ({"prompt": words, "chosen": [*LONG, GOOD], "rejected": [*LONG, BAD]}, LONG_PAIR)
            for words in ("Why?", "And? ")
        ],
        ({"prompt": "Why?", "chosen": [*LONG[:2], GOOD], "rejected": [*LONG[:2], BAD]}, LONG_START),
        ({"messages": [Q, GOOD], "chosen": [Q, GOOD], "rejected": [Q, BAD]}, PAIR),
        ({"prompt": LONG, "chosen": [GOOD], "rejected": [BAD]}, LONG_PAIR),
        # HuggingFaceH4/ultrafeedback_binarized: the prompt, and the whole conversations, beside other columns.
        (
            {
                "prompt": "Why?",
                "prompt_id": "a",
                "chosen": [Q, GOOD],
                "rejected": [Q, BAD],
                "messages": [Q, GOOD],
                "score_chosen": 8.0,
                "score_rejected": 2.0,
            },
            PAIR,
        ),
        ({"question": "Why?", "chosen": "So.", "rejected": "No."}, PAIR),
        ({"instruction": "Why?", "chosen": "So.", "rejected": "No."}, PAIR),
        ({"instruction": "Why?", "input": "", "chosen": "So.", "rejected": "No."}, PAIR),
        (
            {"system": "Be kind.", "question": "Why?", "chosen": "So.", "rejected": "No."},
            ([S, *_untrained(Q), GOOD], [S, *_untrained(Q), BAD]),
        ),
        ({"system": "", "question": "Why?", "chosen": "So.", "rejected": "No."}, PAIR),
        ({"system": None, "prompt": "Why?", "chosen": "So.", "rejected": "No."}, PAIR),
        ({"input": "Why?", "chosen": "So.", "rejected": "No."}, PAIR),
        ({"prompt": "Why?", "chosen_response": "So.", "rejected_response": "No."}, PAIR),
        # LLaMA-Factory
        (
            {
                "conversations": [HUMAN],
                "chosen": {"from": "gpt", "value": "So."},
                "rejected": {"from": "gpt", "value": "No."},
            },
            PAIR,
        ),
        (
            {
                "conversations": [HUMAN],
                "chosen": [{"from": "gpt", "value": "So."}],
                "rejected": [{"from": "gpt", "value": "No."}],
            },
            PAIR,
        ),
        ({"messages": [Q], "chosen": [GOOD], "rejected": [BAD]}, PAIR),
        ({"messages": [Q], "chosen": "So.", "rejected": "No."}, PAIR),
        # https://platform.openai.com/docs/guides/direct-preference-optimization
        (
            {"input": {"messages": [Q], "tools": []}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
            PAIR,
        ),
        ({"input": [Q], "chosen": "So.", "rejected": "No."}, PAIR),
        # Old versions of `datasets` store a list of objects as an object of lists.
        (
            {
                "chosen": {"role": ["user", "assistant"], "content": ["Why?", "So."]},
                "rejected": {"role": ["user", "assistant"], "content": ["Why?", "No."]},
            },
            PAIR,
        ),
        ({"prompt": "Why?", "chosen": [Q, GOOD], "rejected": [Q, BAD], "images": []}, PAIR),
        ({"history": [["Why?", "Hm."]], "prompt": "And?", "chosen": "So.", "rejected": "No."}, LONG_PAIR),
        ({"chosen": f"{HH} So.", "rejected": f"{HH} No."}, PAIR),
        (
            {
                "chosen": f"{HH} Hm.\n\nHuman: And?\n\nAssistant: So.",
                "rejected": f"{HH} Hm.\n\nHuman: And?\n\nAssistant: No.",
            },
            LONG_PAIR,
        ),
        ({"chosen": [Q, {**GOOD, "name": None}], "rejected": [{**Q, "tool_calls": None}, BAD]}, PAIR),
    ],
)
def test_a_pair_has_one_prompt_and_two_answers(row: Any, sides: Any) -> None:
    parsed = _parse(row)
    assert unit_of(parsed) == "pair"
    assert [side["messages"] for side in parsed["sides"]] == [*sides]
    assert parsed["num_prompt"] == len(sides[0]) - 1


@pytest.mark.parametrize("beside", [{}, {"prompt": "Why?"}])
def test_answers_that_go_on_over_several_turns_keep_what_differs(beside: Any) -> None:
    other = {"role": "user", "content": "Oh."}
    parsed = _parse({"chosen": [Q, GOOD, other, GOOD], "rejected": [Q, BAD], **beside})
    assert [len(side["messages"]) for side in parsed["sides"]] == [4, 2]
    assert parsed["num_prompt"] == 1


@pytest.mark.parametrize(
    ("row", "documents"),
    [
        (
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
            [{"prompt": "2 + 2 =", "text": " 4"}, {"prompt": "2 + 2 =", "text": " 5"}],
        ),
        (
            {"chosen": "The sky is blue", "rejected": "The sky is black"},
            [{"prompt": "The sky is", "text": " blue"}, {"prompt": "The sky is", "text": " black"}],
        ),
        (
            {"chosen": f"{HH} So.", "rejected": f"{HH} No."},
            [{"prompt": HH, "text": " So."}, {"prompt": HH, "text": " No."}],
        ),
    ],
)
def test_texts_have_a_plain_form(row: Any, documents: Any) -> None:
    assert [side.get("plain", side) for side in _parse(row)["sides"]] == documents


LABELLED = [*_untrained(Q), GOOD]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Why?", "completion": "So.", "label": True}, LABELLED),
        ({"prompt": [Q], "completion": [GOOD], "label": True}, LABELLED),
        ({"question": "Why?", "answer": "So.", "label": True, "id": 4}, LABELLED),
        ({"messages": [Q, GOOD], "label": True}, LABELLED),
        ({"messages": [Q, GOOD], "kto_tag": True}, LABELLED),
        ({"conversations": [HUMAN, {"from": "gpt", "value": "So."}], "label": True}, LABELLED),
        ({"messages": [*LONG, GOOD], "label": True}, [*_untrained(*LONG), GOOD]),
        ({"prompt": "Why?", "completion": "So.", "system": "Be kind.", "label": True}, [S, *LABELLED]),
    ],
)
def test_an_answer_may_have_a_label(row: Any, messages: Any) -> None:
    parsed = _parse(row)
    assert unit_of(parsed) == "labelled completion"
    assert [side["messages"] for side in parsed["sides"]] == [messages]
    assert (parsed["num_prompt"], parsed["label"]) == (len(messages) - 1, True)


@pytest.mark.parametrize(
    ("row", "format", "parsed"),
    [
        ({"text": "Once.", "url": "x"}, "auto", {"text": "Once."}),
        ({"text": "", "id": 1}, "auto", {"text": ""}),
        ({"prompt": "a", "completion": "b"}, "completion", {"prompt": "a", "text": "b"}),
        ({"prompt": "a", "completion": "b", "messages": [Q, GOOD]}, "completion", {"prompt": "a", "text": "b"}),
        ({"instruction": "a", "input": "c", "output": "b"}, "completion", {"prompt": "a\n\nc", "text": "b"}),
        # tatsu-lab/alpaca has the same row as text of some template, too.
        (
            {"instruction": "Why?", "input": "", "output": "So.", "text": "### Why?"},
            "auto",
            {"messages": [Q, GOOD]},
        ),
        ({"messages": [Q, GOOD], "text": "x"}, "text", {"text": "x"}),
        ({"question": "Why?", "answer": "So.", "label": 3}, "auto", {"messages": [Q, GOOD]}),
        ({"prompt": "Why?", "response": "So.", "label": None}, "auto", {"messages": [Q, GOOD]}),
    ],
)
def test_rows_of_text(row: Any, format: Any, parsed: Any) -> None:
    assert _parse(row, format=format) == parsed


def test_a_column_may_have_another_name() -> None:
    assert _parse({"content": "x", "path": "a.py"}, fields={"text": "content"}) == {"text": "x"}
    fields = {"prompt": "mine", "response": "so"}
    row = {"mine": "a", "question": "x", "so": "b", "answer": "y"}
    assert _parse(row, fields=fields, format="completion") == {"prompt": "a", "text": "b"}
    row = {"input": "Why?", "best": "So.", "worst": "No.", "question": "x", "preferred": "y"}
    parsed = _parse(row, fields={"prompt": "input", "chosen": "best", "rejected": "worst"})
    assert [side["messages"] for side in parsed["sides"]] == [*PAIR]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Why?", "chosen": "", "rejected": "No."}, "`chosen` is empty. Give an answer, or remove the row"),
        ({"prompt": "Why?", "chosen": "So.", "rejected": []}, "`rejected` is empty"),
        ({"prompt": "Why?", "chosen": None, "rejected": "No."}, "`chosen` is null"),
        ({"prompt": "Why?", "chosen": "So.", "rejected": 3}, "`rejected` is a number. Give text, or a list"),
        ({"chosen": [Q, GOOD], "rejected": [{**Q, "content": "How?"}, BAD]}, "`chosen` and `rejected` have no prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "have no prompt: no column has one"),
        # Texts without a prompt: they share no word, other columns may have it, or it is null.
        ({"chosen": "ab", "rejected": "xy"}, "have no prompt"),
        ({"user_query": "What?", "chosen": "It is 4.", "rejected": "It is 5."}, "have no prompt"),
        ({"prompt": None, "chosen": "It is 4.", "rejected": "It is 5."}, "have no prompt"),
        (
            {"prompt": "Why?", "chosen": [Q], "rejected": [BAD]},
            "`chosen` begins with a message of the user that is not",
        ),
        ({"prompt": "Why?", "chosen": [Q, GOOD], "rejected": [{**Q, "content": "Why? "}, BAD]}, "`chosen` begins with"),
        ({"prompt": "How?", "chosen": [Q, GOOD], "rejected": [Q, BAD]}, "`chosen` begins with"),
        (
            {"chosen": f"{HH} Hm.\n\nHuman: a\n\nAssistant: b", "rejected": f"{HH} Hm.\n\nHuman: c\n\nAssistant: b"},
            "user",
        ),
        ({"prompt": LONG, "chosen": {"role": [], "content": []}, "rejected": [BAD]}, "`chosen` is empty"),
        ({"prompt": "Why?", "chosen": ["So."], "rejected": [BAD]}, "a message is no object"),
        ({"prompt": "a", "chosen": "b", "preferred": "c", "rejected": "d"}, "several columns may be the chosen"),
        ({"prompt": "Why?", "chosen": "a", "rejected": "b", "images": ["x.png"]}, "`images` has some"),
        ({"messages": [GOOD], "label": True}, "there is no prompt"),
        ({"messages": [Q], "label": True}, "there is no answer after the prompt"),
    ],
)
def test_what_cannot_be_compared_is_refused(row: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=f"^row 3.*{message}"):
        _parse(row)


def test_roles_of_the_data_tell_what_is_an_answer() -> None:
    row = {"messages": [Q, {"role": "pirate", "content": "So."}], "label": False}
    parsed = _parse(row, roles={"pirate": "assistant"})
    assert parsed["sides"][0]["messages"] == LABELLED
    with pytest.raises(MalformedRow, match="there is no answer after the prompt"):
        _parse(row)


def test_a_label_may_have_another_name() -> None:
    row = {"prompt": "Why?", "completion": "So.", "good": True, "kto_tag": False}
    assert _parse(row, fields={"label": "good"})["label"] is True


@pytest.mark.parametrize("column", ["system", "history", "tools", "images", "chat_template_kwargs"])
def test_a_completion_has_no_place_for_what_templates_write(column: str) -> None:
    with pytest.raises(MalformedRow, match=f"plain text, which has no place for `{column}`"):
        _parse({"prompt": "a", "completion": "b", column: ["x"]}, format="completion")


@pytest.mark.parametrize("label", [0, 1, 1.0])
def test_a_number_that_may_judge_the_answer_is_asked_about(label: float) -> None:
    row = {"prompt": "Why?", "completion": "So.", "label": label}
    with pytest.raises(MalformedRow, match=rf"`label` is {label}, which may judge .*unpaired_preference`; else"):
        _parse(row)
    assert _parse(row, format="unpaired_preference")["label"] is bool(label)
    assert _parse(row, format="prompt_response")["messages"] == [Q, GOOD]
    assert _parse({**row, "label": None, "good": label}, fields={"label": "good"})["label"] is bool(label)


def test_a_label_is_true_or_false() -> None:
    with pytest.raises(MalformedRow, match=r"`label` is 7\. Give true for a desirable answer"):
        _parse({"prompt": "Why?", "completion": "So.", "label": 7}, format="unpaired_preference")


@pytest.mark.parametrize("arrow", [False, True])
def test_files_of_pairs_keep_their_lines(tmp_path: Path, arrow: bool) -> None:
    rows = [{"prompt": "Why?", "chosen": "So.", "rejected": "No.", "system": None}] * 2
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table: Any = ArrowTable(Dataset.from_list(rows), "a", Path()) if arrow else JsonLines(path)
    assert [unit_of(row) for row in read_rows([table], RowFormat(), "a")] == ["pair"] * 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"text": "x"}, "the columns text make a document, and the rows before are conversations"),
        ({"chosen": [Q, GOOD], "rejected": [Q, BAD]}, "make a pair"),
        ({"messages": [Q, GOOD], "label": False}, "make a labelled completion"),
    ],
)
def test_rows_of_two_kinds_are_refused_by_line(other: Any, words: str) -> None:
    rows = [{"messages": [Q, GOOD]}, {"prompt": "a", "completion": "b"}, other]
    with pytest.raises(MalformedRow, match=f"^a, row 2: .*{words}.*choose one `format` for all"):
        read_rows([RowList(rows, "a", Path())], RowFormat(), "'a'")
    with pytest.warns(UserWarning, match="Left out 1 of 3 rows"):
        assert len(read_rows([RowList(rows, "a", Path())], RowFormat(), "'a'", on_malformed="skip")) == 2
