"""Single messages, and what must hold between those of a row."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lightning_protrain.data.conversation import ROLES, MalformedRow
from lightning_protrain.data.sources.messages import ROLE_NAMES, check_order, parse_calls, parse_message

CALL = {"name": "get", "arguments": {"city": "Rome"}}
PARSED = {"type": "function", "function": CALL}


def _parse(roles: dict[str, str] | None = None, **entry: Any) -> Any:
    return parse_message({"role": "assistant", "content": "x", **entry}, "row 3, message 1", roles or {})


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("content", ["x", " x\n", "\u00e4\u2028", "<|im_end|>", "{}"])
def test_plain_text_stays_as_it_is(role: str, content: str) -> None:
    assert _parse(role=role, content=content) == {"role": role, "content": content}


@pytest.mark.parametrize(("name", "role"), ROLE_NAMES.items())
def test_customary_names_of_roles(name: str, role: str) -> None:
    if name not in ("function_call", "tool_call"):
        assert [_parse(role=shown)["role"] for shown in (name, name.title(), f" {name.upper()} ")] == [role] * 3


def test_roles_of_the_user_come_first() -> None:
    assert _parse({"bot": "assistant"}, role="bot")["role"] == "assistant"
    assert _parse({"critic": "critic"}, role="critic")["role"] == "critic"
    assert _parse({"tool": "user"}, role="tool")["role"] == "user"
    with pytest.raises(MalformedRow, match="Use one of system, developer, user, assistant, tool, critic, or map"):
        _parse({"critic": "critic"}, role="bot")


@pytest.mark.parametrize("role", [None, "", "bot", 1, ["user"], True])
def test_an_unknown_role_is_refused(role: Any) -> None:
    with pytest.raises(MalformedRow, match=re.escape(f"row 3, message 1: the role is {role!r}. Use one of system")):
        _parse(role=role)


@pytest.mark.parametrize("entry", [None, "text", 3, ["role"], []])
def test_what_is_no_message_is_refused(entry: Any) -> None:
    with pytest.raises(MalformedRow, match=r"row 3, message 1 is .*Give an object with `role` and `content`"):
        parse_message(entry, "row 3, message 1", {})


@pytest.mark.parametrize(
    ("content", "parsed"),
    [
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a", "image": None, "index": None}], "a"),
        (
            [{"type": "image"}, {"type": "text", "text": ""}, {"type": "text", "text": "a"}],
            [{"type": "image"}, {"type": "text", "text": "a"}],
        ),
        ([{"type": "image", "image": "a.png"}], [{"type": "image", "image": "a.png"}]),
        ([{"type": "image", "path": "a.png"}], [{"type": "image", "image": {"path": "a.png"}}]),
        ([{"type": "image", "bytes": b"1", "path": "a"}], [{"type": "image", "image": {"path": "a", "bytes": b"1"}}]),
        ([{"type": "image", "url": "a.png"}], [{"type": "image", "image": "a.png"}]),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}], [{"type": "image", "image": {"url": "a.png"}}]),
        ([{"type": "image", "index": 1, "text": None}], [{"type": "image", "index": 1}]),
    ],
)
def test_parts_become_text_where_there_is_only_text(content: Any, parsed: Any) -> None:
    assert _parse(role="user", content=content)["content"] == parsed


def test_a_part_of_reasoning_becomes_reasoning() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "thinking", "thinking": None, "text": "!"}]
    parts += [{"type": "text", "text": "a"}]
    assert _parse(content=parts) == {"role": "assistant", "content": "a", "reasoning_content": "hm!"}
    with pytest.raises(MalformedRow, match="part 1: reasoning after other content"):
        _parse(content=[parts[2], parts[0]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the content is null. Give text, or a list of parts"),
        (3, "the content is a number"),
        (True, "the content is true or false"),
        ({"text": "x"}, "the content is an object"),
        (b"x", "the content is a bytes"),
        ([3], "part 0 is a number"),
        ([None], "part 0 is null"),
        (["x", ["y"]], "part 1 is a list"),
        ([{"text": "x"}], "part 0: the type is None"),
        ([{"type": "sound", "sound": "x"}], "part 0: the type is 'sound'"),
        ([{"type": {"x": 1}, "text": "a"}], "part 0: the type is {'x': 1}"),
        ([{"type": "file"}], "part 0: the type is 'file'"),
        ([{"type": "text"}], "part 0: the text is null"),
        ([{"type": "text", "text": 3}], "part 0: the text is a number"),
        ([{"type": "thinking"}], "part 0: the thinking is null"),
        ([{"type": "image", "image": "a", "url": "b"}], "part 0: an image under each of image, url"),
        ([{"type": "image", "index": "1"}], "part 0: the index of the image is '1'"),
        ([{"type": "image", "index": True}], "part 0: the index of the image is True"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_a_wrong_content_is_refused(role: str, content: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=f"row 3, message 1.*{re.escape(message)}"):
        _parse(role=role, content=content)


@pytest.mark.parametrize("content", ["", " ", "\n\t", [], [""], [{"type": "text", "text": ""}]])
def test_an_assistant_that_says_nothing_is_refused(content: Any) -> None:
    with pytest.raises(MalformedRow, match="row 3, message 1: the assistant's content is empty and it calls no tool"):
        _parse(content=content)
    with pytest.raises(MalformedRow, match="content is empty"):
        _parse(content=content, reasoning_content="hm")
    assert _parse(content=content, tool_calls=[CALL])["tool_calls"] == [PARSED]
    for role in ("system", "user", "tool"):
        assert _parse(role=role, content=content)["content"] in ("", " ", "\n\t")


@pytest.mark.parametrize("absent", [{"content": None}, {"content": ""}])
def test_a_call_needs_no_content(absent: dict[str, Any]) -> None:
    assert _parse(tool_calls=[CALL], **absent) == {"role": "assistant", "content": "", "tool_calls": [PARSED]}


@pytest.mark.parametrize(
    ("calls", "parsed"),
    [
        ([CALL], [PARSED]),
        (CALL, [PARSED]),
        ([PARSED], [PARSED]),
        (json.dumps([CALL]), [PARSED]),
        (json.dumps(CALL), [PARSED]),
        ([json.dumps(PARSED)], [PARSED]),
        ([{"name": "get", "arguments": json.dumps(CALL["arguments"])}], [PARSED]),
        ([{"name": "get", "arguments": None, "parameters": CALL["arguments"]}], [PARSED]),
        ([{**PARSED, "id": "call_1"}], [{**PARSED, "id": "call_1"}]),
        ([{"id": 1, "function": CALL}], [{**PARSED, "id": "1"}]),
        ([CALL, CALL], [PARSED, PARSED]),
        *[
            ([{"name": "get", **arguments}], [{"type": "function", "function": {"name": "get", "arguments": {}}}])
            for arguments in ({}, {"arguments": None}, {"arguments": {}}, {"arguments": ""}, {"arguments": "{}"})
        ],
    ],
)
def test_calls_have_one_form(calls: Any, parsed: Any) -> None:
    assert parse_calls(calls, "x") == parsed
    assert _parse(tool_calls=calls)["tool_calls"] == parsed


def test_the_older_form_of_a_call() -> None:
    assert _parse(content=None, function_call=CALL)["tool_calls"] == [PARSED]


@pytest.mark.parametrize("role", ["function_call", "tool_call", "Function_Call"])
@pytest.mark.parametrize("value", [CALL, [CALL]])
def test_a_call_as_a_turn(role: str, value: Any) -> None:
    parsed = _parse(role=role, content=json.dumps(value))
    assert parsed == {"role": "assistant", "content": "", "tool_calls": [PARSED]}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("get(Rome)", "the tool calls are not valid JSON"),
        ("[" * 100_000, "the tool calls are not valid JSON"),
        ("3", "the tool calls are a number"),
        (3, "the tool calls are a number"),
        ([{}], "tool call 0 has no name"),
        ([CALL, None], "tool call 1 has no name"),
        ([{"name": ""}], "tool call 0 has no name"),
        ([{"name": 3}], "tool call 0 has no name"),
        ([{"function": "get"}], "tool call 0 has no name"),
        ([{"name": "get", "arguments": "Rome"}], "tool call 0: the arguments are not valid JSON"),
        ([{"name": "get", "arguments": "3"}], "tool call 0: the arguments are a number"),
        ([{"name": "get", "arguments": ["Rome"]}], "tool call 0: the arguments are a list"),
        (["x"], "tool call 0 is not valid JSON"),
    ],
)
def test_a_wrong_call_is_refused(calls: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=f"row 3, message 1.*{re.escape(message)}"):
        _parse(tool_calls=calls)


@pytest.mark.parametrize("value", ["call get", None, "[]"])
def test_a_call_as_a_turn_must_be_one(value: Any) -> None:
    with pytest.raises(MalformedRow, match=r"row 3, message 1.*tool calls are"):
        _parse(role="function_call", content=value)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_every_name(key: str) -> None:
    assert _parse(**{key: "hm"})["reasoning_content"] == "hm"
    assert "reasoning_content" not in _parse(**{key: ""})
    with pytest.raises(MalformedRow, match=f"`{key}` is a list"):
        _parse(**{key: ["hm"]})
    with pytest.raises(MalformedRow, match="reasoning in a turn of the user"):
        _parse(role="user", **{key: "hm"})


def test_two_kinds_of_reasoning_must_agree() -> None:
    assert _parse(reasoning="hm", thinking="hm")["reasoning_content"] == "hm"
    with pytest.raises(MalformedRow, match="reasoning and thinking differ"):
        _parse(reasoning="hm", thinking="so")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_the_assistant_calls(role: str) -> None:
    assert "tool_calls" not in _parse(role=role, tool_calls=[])
    with pytest.raises(MalformedRow, match=f"tool calls in a turn of the {role}"):
        _parse(role=role, tool_calls=[CALL])


def test_keys_that_are_null_count_as_absent_and_others_are_left_out() -> None:
    keys = ("name", "tool_call_id", "tool_calls", "reasoning", "train", "weight", "function_call")
    assert _parse(**dict.fromkeys(keys), id=7, audio=None) == {"role": "assistant", "content": "x"}
    assert _parse(role="tool", name="get", tool_call_id=7) == {
        "role": "tool",
        "content": "x",
        "name": "get",
        "tool_call_id": "7",
    }


@pytest.mark.parametrize(
    ("flags", "parsed"),
    [
        ({"train": True}, {"train": True}),
        ({"train": 0}, {"train": False}),
        ({"training": False}, {"train": False}),
        ({"loss": False}, {"train": False}),
        ({"loss": True, "train": False}, {"train": False}),
        ({"loss": 0.37}, {}),
        ({"train_detail": []}, {}),
        ({"weight": 0}, {"weight": 0.0}),
        ({"weight": 1.5}, {"weight": 1.5}),
        ({"train": False, "weight": 2}, {"train": False, "weight": 2.0}),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_what_a_message_says_about_its_loss(role: str, flags: Any, parsed: Any) -> None:
    assert _parse(role=role, **flags) == {"role": role, "content": "x", **parsed}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("train", value) for value in ("yes", 2, [], -1, "true")],
        *[("weight", value) for value in ("1", -0.5, True, [], float("nan"), float("inf"))],
        ("train_detail", [{"begin_offset": 0, "end_offset": 1, "train": False}]),
    ],
)
def test_a_wrong_flag_is_refused(key: str, value: Any) -> None:
    with pytest.raises(MalformedRow, match=f"row 3, message 1: `{key}` (is|trains parts of a message)"):
        _parse(**{key: value})


def _turns(text: str) -> list[Any]:
    """A row from letters: s(ystem), d(eveloper), u(ser), a(ssistant), c(all), t(ool)."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    return [
        {"role": roles[letter], "content": "x", **({"tool_calls": [{**PARSED, "id": "1"}]} if letter == "c" else {})}
        for letter in text
    ]


@pytest.mark.parametrize(
    "text",
    ["ua", "a", "au", "sua", "usa", "suasua", "uua", "uaa", "uct", "ucta", "uctta", "uctcta", "uat", "uacta"],
)
def test_orders_that_some_template_takes(text: str) -> None:
    messages = _turns(text)
    check_order(messages, "row 3", ("assistant",))
    assert messages == _turns(text)


@pytest.mark.parametrize(("text", "number"), [("ta", 0), ("uta", 1), ("ucuta", 3), ("stua", 1), ("uctuat" + "ut", 7)])
def test_a_tool_without_a_call_is_refused(text: str, number: int) -> None:
    with pytest.raises(MalformedRow, match=f"row 3, message {number}: a tool message that does not follow"):
        check_order(_turns(text), "row 3", ("assistant",))


@pytest.mark.parametrize("text", ["u", "su", "s", "uu"])
def test_a_row_with_nothing_to_learn_is_refused(text: str) -> None:
    with pytest.raises(MalformedRow, match="row 3: no message of the assistant, so nothing to learn"):
        check_order(_turns(text), "row 3", ("assistant",))
    messages = _turns(text)
    check_order(messages, "row 3", None)
    assert messages == _turns(text)


def test_other_roles_may_be_the_ones_to_learn() -> None:
    messages = _turns("su")
    check_order(messages, "row 3", ("assistant", "user"))
    with pytest.raises(MalformedRow, match="no message of the assistant or the tool"):
        check_order(messages, "row 3", ("assistant", "tool"))


def test_a_result_must_belong_to_a_call() -> None:
    messages = _turns("ucta")
    for given in ("1", None):
        messages[2] = {"role": "tool", "content": "x", **({"tool_call_id": given} if given else {})}
        check_order(messages, "row 3", ("assistant",))
    messages[2] = {"role": "tool", "content": "x", "tool_call_id": "2"}
    with pytest.raises(MalformedRow, match="row 3, message 2: no call has the id '2'; there are '1'"):
        check_order(messages, "row 3", ("assistant",))
    del messages[1]["tool_calls"][0]["id"]
    check_order(messages, "row 3", ("assistant",))
