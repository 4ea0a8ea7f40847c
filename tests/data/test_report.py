"""Counts of data sets."""

from __future__ import annotations

import pytest

from lightning_protrain.data.sources.dataset import count


def test_counts_are_added_up() -> None:
    report = count("chats, train", "chatml", [10, 30, 20, 40, 50], 30, 1, ["cut", "cut", "empty"])
    assert (report.num_kept, report.num_dropped, report.num_tokens, report.num_trained) == (5, 3, 150, 30)
    assert report.dropped == (("cut", 2), ("empty", 1))
    assert report.lengths == (10, 30, 50, 50)


def test_a_sentence_names_all_of_it() -> None:
    text = count("chats, train", "chatml", [10, 30], 10, 2, {"without a trained token": 3}).describe()
    assert text == (
        "chats, train: 2 conversations, 40 tokens, 25.0% of them trained; 3 dropped (3 without a trained token). "
        "2 trained turns have no end token, because the chat template writes none there."
    )


@pytest.mark.parametrize(
    ("num_unended", "num_cut", "sentence"),
    [
        (1776, 1776, "1,776 assistant turns were cut at max_length, so their end token is not trained."),
        (1, 1, "1 assistant turn was cut at max_length, so its end token is not trained."),
        (1, 0, "1 trained turn has no end token, because the chat template writes none there."),
    ],
)
def test_turns_that_were_cut_are_told_from_turns_that_never_end(num_unended: int, num_cut: int, sentence: str) -> None:
    assert count("c", "f", [10], 5, num_unended, [], num_cut=num_cut).describe().endswith(f"0 dropped. {sentence}")


def test_nothing_is_kept() -> None:
    report = count("empty", "chatml", [], 0, 0, [])
    assert report.lengths == (0, 0, 0, 0)
    assert "0 conversations, 0 tokens, 0.0% of them trained; 0 dropped." in report.describe()
