"""Rows of every format, and rows of ambiguous format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.data.conversation import MalformedRow, Media
from lightning_protrain.data.sources.row_kinds import PROMPTS, RESPONSES, RowFormat

Q = {"role": "user", "content": "Why?"}
A = {"role": "assistant", "content": "So."}
S = {"role": "system", "content": "Be kind."}
FROM = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
FOLDER = Path("/data")
TOOL = {"type": "function", "function": {"name": "get", "description": "Gets.", "parameters": {"type": "object"}}}


def _parse(row: Any, **options: Any) -> Any:
    return RowFormat(**options).parse(row, "row 3", FOLDER)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [Q, A]}, [Q, A]),
        ({"messages": [Q, A], "id": 7, "source": "x"}, [Q, A]),
        ({"messages": [Q, A], "conversations": None}, [Q, A]),
        ({"messages": [Q, A], "prompt": "Why?"}, [Q, A]),
        ({"messages": {"role": ["user", "assistant"], "content": ["Why?", "So."]}}, [Q, A]),
        ({"messages": FROM}, [Q, A]),
        ({"conversations": FROM}, [Q, A]),
        ({"conversations": [Q, A]}, [Q, A]),
        ({"conversations": [{**entry, "weight": None, "role": None} for entry in FROM]}, [Q, A]),
        ({"messages": [Q, FROM[1]]}, [Q, A]),
        ({"messages": [{**Q, "from": "a list of mails"}, A]}, [Q, A]),
        ({"conversations": FROM, "system": "Be kind."}, [S, Q, A]),
        ({"conversations": FROM, "system_prompt": "Be kind."}, [S, Q, A]),
        ({"conversations": FROM, "system": None, "system_prompt": "Be kind."}, [S, Q, A]),
        ({"conversations": FROM, "system": ""}, [Q, A]),
        ({"messages": [S, Q, A], "system": "Be kind."}, [S, Q, A]),
        *[({prompt: "Why?", response: "So."}, [Q, A]) for prompt in PROMPTS for response in RESPONSES],
        ({"input": "Why?", "output": "So."}, [Q, A]),
        ({"instruction": "Why?", "input": "", "output": "So."}, [Q, A]),
        ({"instruction": "Why?", "input": None, "output": "So."}, [Q, A]),
        (
            {"instruction": "Sum", "input": "1 2", "output": "3"},
            [{**Q, "content": "Sum\n\n1 2"}, {**A, "content": "3"}],
        ),
        (
            {"instruction": "Sum", "context": "1 2", "response": "3"},
            [{**Q, "content": "Sum\n\n1 2"}, {**A, "content": "3"}],
        ),
        ({"prompt": "Why?", "response": "So.", "system": "Be kind."}, [S, Q, A]),
        (
            {"prompt": "Why?", "response": "So.", "history": [["Hm?", "Yes."]]},
            [{**Q, "content": "Hm?"}, {**A, "content": "Yes."}, Q, A],
        ),
        ({"prompt": [S, Q], "completion": [A]}, [{**S, "train": False}, {**Q, "train": False}, A]),
        ({"prompt": [S, Q], "completion": "So."}, [{**S, "train": False}, {**Q, "train": False}, A]),
        ({"prompt": "Why?", "completion": [A, Q, A]}, [Q, A, Q, A]),
        ({"prompt": [{**Q, "weight": 1}], "completion": [A]}, [{**Q, "weight": 1.0}, A]),
        ({"prompt": [{**Q, "loss": True}], "completion": [A]}, [{**Q, "train": True}, A]),
        ({"prompt": "", "response": "So."}, [{**Q, "content": ""}, A]),
    ],
)
def test_the_format_is_seen_by_the_row(row: Any, messages: list[Any]) -> None:
    parsed = _parse(row)
    plain = parsed.pop("plain", None)
    assert parsed == {"messages": messages}
    # Only this pair of columns also has a meaning without a chat template.
    assert (plain is not None) == (row == {"prompt": "Why?", "completion": "So."})


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("messages", {"messages": [Q, A], "conversations": FROM, "prompt": "x", "response": "y"}),
        ("sharegpt", {"messages": [S, A], "conversations": FROM}),
        ("prompt_response", {"messages": [S, A], "prompt": "Why?", "response": "So."}),
    ],
)
def test_a_format_that_is_named_is_taken(format: Any, row: Any) -> None:
    assert _parse(row, format=format) == {"messages": [Q, A]}
    with pytest.raises(MalformedRow, match="row 3: several columns may hold the conversation: "):
        _parse(row)


@pytest.mark.parametrize(
    ("row", "format", "message"),
    [
        *[(row, "auto", "the row is ") for row in (None, 3, "x", [], [Q, A])],
        ({}, "auto", "no `messages` list, no `conversations`, no prompt with its response, no `text`, and no `chosen`"),
        ({"title": "x"}, "auto", "the columns are title. Name the right ones with `fields`"),
        (
            {"prompt": "Why?"},
            "auto",
            "no prompt with its response, no `text`, and no `chosen` with `rejected`; the col",
        ),
        ({"output": "So."}, "auto", "no prompt with its response"),
        ({"messages": None}, "auto", "`messages` is null. Give a list of messages"),
        ({"conversations": None, "id": 3}, "auto", "`conversations` is null"),
        ({"prompt": "Why?", "completion": None}, "auto", "`completion` is null. Give text, or remove the row"),
        ({"messages": []}, "auto", "no `messages` list with at least one message: it is an empty list"),
        ({"messages": "x"}, "auto", "no `messages` list with at least one message: it is text"),
        ({"messages": 3}, "auto", "with at least one message: it is a number"),
        ({"messages": {}}, "auto", "no `messages` list"),
        ({"messages": {"role": ["user"], "content": []}}, "auto", "it is an object"),
        ({"conversations": []}, "auto", "no `conversations` list"),
        ({"messages": [Q, "x"]}, "auto", "message 1 is text"),
        ({"messages": [{"content": "x"}]}, "auto", "message 0: the role is None"),
        (
            {"messages": [Q, A], "conversations": FROM},
            "auto",
            "several columns may hold the conversation: messages, conversations",
        ),
        (
            {"messages": [Q, A], "prompt": "x", "answer": "y"},
            "auto",
            "several columns may hold the conversation: messages, prompt, ans",
        ),
        (
            {"conversations": FROM, "input": "x", "output": "y"},
            "auto",
            "several columns may hold the conversation: conversations, out",
        ),
        ({"messages": None}, "messages", "no `messages` list with at least one message: it is null"),
        ({"id": 1}, "messages", "no `messages` list with at least one message: it is absent; the columns are id"),
        ({"id": 1}, "sharegpt", "no `conversations` list with at least one message: it is absent"),
        ({"response": "So."}, "prompt_response", "no prompt: none of prompt, instruction, question, query among"),
        ({"prompt": "Why?"}, "prompt_response", "no response: none of response, completion, output, answer among"),
        (
            {"prompt": "a", "question": "b", "answer": "c"},
            "auto",
            "several columns may be the prompt: prompt, question",
        ),
        ({"prompt": "a", "output": "b", "answer": "c"}, "auto", "several columns may be the response: output, answer"),
        ({"prompt": [], "response": [], "system": "s"}, "auto", "there is no message"),
        ({"prompt": 3, "response": "x"}, "auto", "the prompt is a number. Give text, or a list of messages"),
        ({"question": "x", "answer": {"text": "y"}}, "auto", "the answer is an object. Give text, or a list"),
        ({"prompt": "Why?", "response": " "}, "auto", "the assistant's content is empty"),
        ({"prompt": "Why?", "response": [Q]}, "auto", "no message of the assistant"),
        ({"prompt": "a", "input": 3, "response": "x"}, "auto", "the input beside `prompt` is not one text"),
        ({"prompt": "a", "input": "b", "context": "c", "response": "x"}, "auto", "is not one text"),
        *[
            ({"prompt": "a", "response": "b", "history": h}, "auto", "`history` ")
            for h in ("x", 3, [["a"]], ["ab"], [3])
        ],
        (
            {"prompt": "a", "response": "b", "history": [["a", ""]]},
            "auto",
            "message 1: the assistant's content is empty",
        ),
        ({"conversations": FROM, "system": 3}, "auto", "the system prompt is a number"),
        (
            {"messages": [S, Q, A], "system": "x"},
            "auto",
            "a system prompt in a column and another in the first message",
        ),
        ({"messages": [Q]}, "auto", "no message of the assistant"),
        (
            {"messages": [A, Q, {"role": "tool", "content": "x"}]},
            "auto",
            "message 2: a tool message that does not follow",
        ),
        ({"messages": [Q, A], "image": "a", "images": ["b"]}, "auto", "columns `image` and `images`"),
        ({"messages": [Q, A], "images": ["b"]}, "auto", "1 image but 0 image parts"),
        ({"messages": [{**Q, "content": "<image>"}, A], "images": [None]}, "auto", "image 0 is null"),
    ],
)
def test_what_is_not_clear_is_refused(row: Any, format: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=f"^row 3.*{re.escape(message)}"):
        _parse(row, format=format)


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"messages": "chat"}, {"chat": [Q, A]}),
        ({"messages": "chat"}, {"chat": [Q, A], "prompt": "x", "response": "y"}),
        ({"messages": "chat"}, {"chat": [Q, A], "messages": [A]}),
        ({"messages": "chat"}, {"chat": [Q, A], "conversations": [A]}),
        ({"conversations": "turns"}, {"turns": FROM}),
        ({"prompt": "q", "response": "a"}, {"q": "Why?", "a": "So."}),
        ({"prompt": "q", "response": "answer"}, {"q": "Why?", "question": "x", "answer": "So.", "output": "y"}),
        ({"prompt": "q", "response": "a"}, {"q": "Why?", "a": "So.", "messages": [A]}),
        ({"role": "speaker", "content": "text"}, {"messages": [{"speaker": "user", "text": "Why?"}, A]}),
        (
            {"messages": "chat", "from": "who", "value": "what"},
            {"chat": [{"who": "human", "what": "Why?"}, {"who": "gpt", "what": "So."}]},
        ),
        ({"messages": "chat"}, {"messages": [Q, A]}),
    ],
)
def test_columns_and_keys_are_renamed(fields: dict[str, str], row: Any) -> None:
    assert _parse(row, fields=fields) == {"messages": [Q, A]}


def test_flags_of_messages_are_renamed() -> None:
    row = {"messages": [Q, {**A, "loss": 0, "importance": 2}]}
    assert _parse(row, fields={"train": "loss", "weight": "importance"})["messages"][1] == {
        **A,
        "train": False,
        "weight": 2.0,
    }


def test_roles_and_the_roles_to_learn() -> None:
    row = {"messages": [Q, {"role": "bot", "content": "So."}]}
    assert _parse(row, roles={"bot": "assistant"}) == {"messages": [Q, A]}
    assert _parse({"messages": [Q]}, trained_roles=("user",)) == {"messages": [Q]}
    assert _parse({"messages": [Q]}, trained_roles=None) == {"messages": [Q]}


def test_a_conversation_with_tools_in_sharegpt() -> None:
    call = {"name": "get", "arguments": {"city": "Rome"}}
    row = {
        "conversations": [
            {"from": "human", "value": "Rome?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "20"},
            {"from": "gpt", "value": "It is 20."},
        ],
        "tools": json.dumps([TOOL["function"]]),
    }
    assert _parse(row) == {
        "messages": [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "20"},
            {"role": "assistant", "content": "It is 20."},
        ],
        "tools": [TOOL],
    }


@pytest.mark.parametrize(
    ("tools", "parsed"),
    [
        *[(tools, None) for tools in (None, [], "", " ", "[]", "null", {})],
        ([TOOL], [TOOL]),
        (TOOL, [TOOL]),
        ([TOOL["function"]], [TOOL]),
        (json.dumps([TOOL]), [TOOL]),
        (json.dumps(TOOL), [TOOL]),
        ([json.dumps(TOOL), TOOL], [TOOL, TOOL]),
        ([{**TOOL["function"], "parameters": json.dumps({"type": "object"})}], [TOOL]),
        ([{"type": "function", "function": {"name": "get"}}], [{"type": "function", "function": {"name": "get"}}]),
    ],
)
def test_tools_have_one_form(tools: Any, parsed: Any) -> None:
    assert _parse({"messages": [Q, A], "tools": tools}).get("tools") == parsed


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("get", "`tools` is not valid JSON"),
        (3, "`tools` is a number"),
        ("3", "`tools` is a number"),
        ([3], "tool 0 has no name"),
        ([TOOL, {"description": "x"}], "tool 1 has no name"),
        ([{"function": "get"}], "tool 0 has no name"),
        (["get"], "tool 0 is not valid JSON"),
        ([{"name": "get", "parameters": "x"}], "tool 0: the parameters are not valid JSON"),
    ],
)
def test_wrong_tools_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=f"^row 3.*{message}"):
        _parse({"messages": [Q, A], "tools": tools})


PARTS = [{"type": "image"}, {"type": "text", "text": "Why?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{**Q, "content": "<image>\nWhy?"}, A], "images": ["a.png"]},
        {"messages": [{**Q, "content": "<image>\nWhy?"}, A], "image": "a.png"},
        {"messages": [{**Q, "content": PARTS}, A], "images": ["a.png"]},
        {"messages": [{**Q, "content": PARTS}, A], "image": {"bytes": None, "path": "a.png"}},
        {"messages": [{**Q, "content": [{"type": "image", "path": "a.png"}, PARTS[1]]}, A]},
        {"messages": [{**Q, "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, PARTS[1]]}, A]},
        {"conversations": [{"from": "human", "value": "<image>\nWhy?"}, FROM[1]], "image": "a.png", "images": None},
        {"question": "Why?", "answer": "So.", "image": "a.png"},
        {"question": "<image>Why?", "answer": "So.", "image": "a.png"},
        {"prompt": [{**Q, "content": PARTS, "train": None, "weight": None}], "completion": [A], "images": ["a.png"]},
    ],
)
def test_images_of_every_format(row: Any) -> None:
    conversation = _parse(row)
    conversation["messages"][0].pop("train", None)
    assert conversation == {"messages": [{**Q, "content": PARTS}, A], "media": [Media("image", "/data/a.png")]}


def test_several_images_of_a_pair_come_before_its_prompt() -> None:
    row = {"question": "Why?", "answer": "So.", "images": ["a.png", b"b"], "history": [["Hm?", "Yes."]]}
    conversation = _parse(row)
    assert conversation["messages"][2]["content"] == [PARTS[0], PARTS[0], PARTS[1]]
    assert conversation["media"] == [Media("image", "/data/a.png"), Media("image", b"b")]


CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda text: "<image>" not in text)
TURN = st.sampled_from(["user", "assistant", "system"])


@given(turns=st.lists(st.tuples(TURN, CONTENT), min_size=1, max_size=6), end=CONTENT, images=st.integers(0, 3))
def test_messages_to_sharegpt_and_back(turns: list[tuple[str, str]], end: str, images: int) -> None:
    messages = [{"role": role, "content": text + "." * (role == "assistant")} for role, text in turns]
    messages += [{"role": "user", "content": "<image>" * images + "x"}, {"role": "assistant", "content": end + "."}]
    paths = [f"{number}.png" for number in range(images)]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [{"from": names[message["role"]], "value": message["content"]} for message in messages]
    there = _parse({"messages": messages, "images": paths})
    assert _parse({"conversations": sharegpt, "images": paths}) == there
    # What comes out is a row of `messages` that stays as it is.
    assert _parse({**there, "images": [one.source for one in there.get("media", ())]}) == there
    back = [
        {"from": names[message["role"]], "value": message["content"]}
        if isinstance(message["content"], str)
        else {"from": names[message["role"]], "value": "<image>" * images + "x"}
        for message in there["messages"]
    ]
    assert back == sharegpt


@given(
    call=st.fixed_dictionaries(
        {
            "name": st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
            "arguments": st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
                st.recursive(st.none() | st.booleans() | st.integers(-5, 5), lambda inner: st.lists(inner, max_size=2)),
                max_size=3,
            ),
        }
    )
)
def test_calls_survive_every_format(call: dict[str, Any]) -> None:
    result, start = {"role": "tool", "content": "20"}, {"from": "human", "value": "Why?"}
    written = {"type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
    there = _parse({"messages": [Q, {"role": "assistant", "content": None, "tool_calls": [written]}, result, A]})
    turns = [start, {"from": "function_call", "value": json.dumps(call)}, {"from": "observation", "value": "20"}]
    assert _parse({"conversations": [*turns, FROM[1]]}) == there
    assert _parse(there) == there
    assert there["messages"][1]["tool_calls"][0]["function"] == call
