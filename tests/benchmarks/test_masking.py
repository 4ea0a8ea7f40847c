"""The benchmark compares scans that agree, on the shapes that it names."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import masking
from benchmarks.masking import (
    Preparation,
    Shape,
    main,
    measure,
    prepare,
)
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.sources.load import stdlib_conversations

SMALL = (Shape("small", "chatml", 5, 2, 64), Shape("small", "llama3", 20, 3, 80))
PREPARED = Preparation("short", tokens=57.2, encode=100.0, alone=1.0, checked=4.0)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.family)
def test_a_measurement(shape: Shape) -> None:
    timing = measure(shape, rounds=2, slow_rounds=1)
    assert timing.turns > shape.rows
    assert all(0 < best <= median for best, median in (timing.ours, timing.plain, timing.loop))


def test_scans_that_do_not_agree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "loop_over_turns", lambda ids, markers: np.ones(ids.shape, dtype=bool))
    with pytest.raises(ValueError, match="small: the scans do not agree"):
        measure(SMALL[0], 1, 1)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(masking, "SHAPES", SMALL)
    monkeypatch.setattr(masking, "preparations", lambda rounds: [PREPARED])
    monkeypatch.setattr(masking, "write_result", lambda *arguments: kept.append(arguments))
    main(["--rounds", "1", "--slow-rounds", "1", "--results", "masking"])
    assert capsys.readouterr().out.count("| small |") == 2
    assert kept[0][0] == "masking"
    assert [row["shape"] for row in kept[0][3]["rows"]] == ["small", "small"]
    assert kept[0][3]["preparation"][0]["met"]


@pytest.mark.slow
def test_the_preparation_of_rows_is_measured() -> None:
    rows = stdlib_conversations()[:60]
    encoder = ChatEncoders(train_tokenizer(rows, 400), None).encoder(ChatSettings(max_length=10_000))
    entry = prepare("some", rows, encoder, 2)
    assert entry.tokens > 10
    assert 0 < entry.checked < entry.encode
    assert 0 < entry.alone < entry.encode
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    with pytest.raises(ValueError, match=r"some: a row is not trained.*leaves out a tool call"):
        prepare("some", [{"messages": [*rows[0]["messages"][:1], call]}], encoder, 1)
