"""Every image of a row has exactly one place in its messages, and every place one image."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.data.conversation import MalformedRow
from lightning_protrain.data.sources.media import place_media

IMAGE = {"type": "image"}


def place_images(messages: list[Any], images: Any, where: str) -> list[Any]:
    placed = place_media(messages, {"image": images}, where)
    assert {kind for kind, _ in placed} <= {"image"}
    return [image for _, image in placed]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<image>", [IMAGE]),
        ("<image>Why?", [IMAGE, _text("Why?")]),
        ("<image>\nWhy?", [IMAGE, _text("Why?")]),
        ("<image>\n\nWhy?", [IMAGE, _text("\nWhy?")]),
        ("Why?<image>", [_text("Why?"), IMAGE]),
        ("Why?\n<image>", [_text("Why?"), IMAGE]),
        ("a<image>b", [_text("a"), IMAGE, _text("b")]),
        ("a\n<image>\nb", [_text("a\n"), IMAGE, _text("\nb")]),
        (" <image> b", [_text(" "), IMAGE, _text(" b")]),
        ("<image>\n<image>\nWhy?", [IMAGE, IMAGE, _text("Why?")]),
        ("<image><image>", [IMAGE, IMAGE]),
        ("<image>\n<image>", [IMAGE, IMAGE]),
    ],
)
def test_placeholders_become_parts(text: str, parts: list[Any]) -> None:
    messages = _user(text)
    images = [f"{number}.png" for number in range(parts.count(IMAGE))]
    assert place_images(messages, images, "row 3") == images
    assert messages == _user(parts)


@pytest.mark.parametrize("images", [None, []])
def test_a_row_without_images_stays(images: Any) -> None:
    messages = _user("Why?")
    assert place_images(messages, images, "row 3") == []
    assert messages == _user("Why?")


def test_a_placeholder_is_text_where_there_is_no_column_of_images() -> None:
    messages = _user("What is <image> in HTML?")
    assert place_images(messages, None, "row 3") == []
    assert messages == _user("What is <image> in HTML?")


def test_a_placeholder_of_the_assistant_is_text() -> None:
    messages = [*_user("<image>"), {"role": "assistant", "content": "Write <image>."}]
    assert place_images(messages, ["a"], "row 3") == ["a"]
    assert messages[2]["content"] == "Write <image>."


@pytest.mark.parametrize(
    ("parts", "images", "placed"),
    [
        ([IMAGE], ["a"], ["a"]),
        ([IMAGE, IMAGE], ["a", "b"], ["a", "b"]),
        ([{**IMAGE, "image": "c"}], None, ["c"]),
        ([{**IMAGE, "image": "c"}, IMAGE], ["a"], ["c", "a"]),
        ([IMAGE, {**IMAGE, "image": "c"}, IMAGE], ["a", "b"], ["a", "c", "b"]),
        ([{**IMAGE, "index": 1}, {**IMAGE, "index": 0}], ["a", "b"], ["b", "a"]),
        ([{**IMAGE, "index": 0}, {**IMAGE, "index": 0}], ["a"], ["a", "a"]),
    ],
)
def test_parts_take_their_images(parts: list[Any], images: Any, placed: list[str]) -> None:
    messages = _user([*map(dict, parts), _text("Why?")])
    assert place_images(messages, images, "row 3") == placed
    assert messages == _user([*[IMAGE] * len(parts), _text("Why?")])


def test_images_go_through_the_turns_in_order() -> None:
    messages = [*_user("<image>\na"), *_user("b <image> c <image>"), *_user("d")]
    assert place_images(messages, ["1", "2", "3"], "row 3") == ["1", "2", "3"]
    assert [isinstance(message["content"], str) for message in messages] == [False, True, False, True, True, True]


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ([IMAGE], None, "1 image part or placeholders but 0 images"),
        ([IMAGE, IMAGE], ["a"], "2 image parts or placeholders but 1 image"),
        ([{**IMAGE, "index": 1}], ["a"], "1 image part or placeholders but 1 image"),
        ([{**IMAGE, "index": -1}], ["a"], "1 image part or placeholders but 1 image"),
        ("<image>", [], "1 image part or placeholders but 0 images"),
        ("<image><image>", ["a"], "2 image parts or placeholders but 1 image"),
        ("Why?", ["a"], "1 image but 0 image parts or placeholders: 1 of the images without a place"),
        ([IMAGE], ["a", "b"], "2 images but 1 image part or placeholders: 1 of the images without a place"),
        ("<image>", ["a", "b", "c"], "3 images but 1 image part or placeholders: 2 of the images without a place"),
        ([{**IMAGE, "image": "c"}], ["a"], "1 image but 1 image part or placeholders: 1 of the images without a place"),
        ([IMAGE, _text("<image>")], ["a"], "1 image parts and 1 times <image> in the text"),
    ],
)
def test_images_and_places_must_be_equally_many(content: Any, images: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=re.escape(f"row 3: {message}")):
        place_images(_user(content), images, "row 3")


@given(pieces=st.lists(st.text(alphabet="ab <>\n", max_size=4), min_size=2, max_size=6))
def test_no_text_is_lost(pieces: list[str]) -> None:
    messages = _user("<image>".join(pieces))
    images = [str(number) for number in range(len(pieces) - 1)]
    assert place_images(messages, images, "row 3") == images
    parts = messages[0]["content"]
    text = "".join(part.get("text", "<image>") for part in parts)
    assert parts.count(IMAGE) == len(images)
    assert all(part.get("text") != "" for part in parts)
    # Of the text only the line breaks that separate a placeholder at the edge may go.
    original = "<image>".join(pieces)
    assert text.replace("\n", "") == original.replace("\n", "")
    assert original.count("\n") - text.count("\n") <= len(images)
