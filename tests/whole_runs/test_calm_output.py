"""The command line speaks in 80 columns, and says each fact once: a screen for the quickstart, on one rank or two."""

from __future__ import annotations

import os
import pty
import re
from collections import Counter
from pathlib import Path

import pyte
import pytest

from tests.whole_runs import support

# Lines of a terminal on half of a screen.
SCREEN = 50
QUICKSTART = "--config=configs/quickstart.yaml"
SMALL = (
    *("--model.config.hidden_size=64", "--model.config.intermediate_size=128", "--trainer.accelerator=cpu"),
    *("--trainer.max_steps=8", "--trainer.limit_train_batches=8", "--trainer.val_check_interval=8"),
    *(
        "--model.warmup_steps=2",
        "--trainer.limit_val_batches=2",
        "--trainer.strategy.device_memory=6MiB",
        "--data.cache_dir=cache",
    ),
)
TWO_RANKS = ("--trainer.devices=2", "--data.batch_size=2", "--trainer.strategy.device_memory=4MiB")
# Two data sets of one chat format.
CHAT = (
    *("--config=configs/chat.yaml", "--trainer.accelerator=cpu", "--trainer.accumulate_grad_batches=1"),
    *("--data.max_length=64", "--data.cache_dir=cache"),
)
FIT = (*CHAT, "--trainer.limit_train_batches=10")
NOISE = ("site-packages", "Warning: ", "Seed set", "TPU", "Tip:", "Trainer.fit", "GLOBAL_RANK", "distributed")


def lines_of(ended: support.Ended) -> list[str]:
    """Return the lines of a command as a person sees them; check their width, and that each fact is said once."""
    assert ended.status == 0, ended.output
    # A bar is one line of a terminal, written again and again.
    lines = [line.rpartition("\r")[2].rstrip() for line in ended.output.splitlines()]
    assert max(len(line) for line in lines if " " in line) <= 80, ended.output  # a path is not divided
    said = Counter(line for line in lines if len(line.split()) > 2 and re.search("[a-z]{4}", line))  # no end of a line
    assert [line for line, count in said.items() if count > 1] == []
    return lines


@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
@pytest.mark.parametrize("more", [(), TWO_RANKS], ids=["one rank", "two ranks"])
def test_the_quickstart_fits_a_screen_and_ends_with_what_a_person_can_judge(more: tuple[str, ...]) -> None:
    ended = support.run(support.COMMAND, "fit", QUICKSTART, *SMALL, *more, columns=80)
    lines = lines_of(ended)
    assert len(lines) <= SCREEN + 8 * bool(more), ended.output
    # Two samples of each rank are few for weights that are streamed: so much is true of this small run.
    few = "Warning: a step of 2 samples streams weights"
    assert [noise for noise in NOISE if noise in ended.output.replace(few, "")] == []
    assert re.search(r"streamed through [2-9] chunk buffers", ended.output)  # one computes, the next one is fetched
    assert re.search("prompt.*answer", ended.output)
    judged = r"^val_loss \d\.\d+ -> \d\.\d+\nThe model predicts \d+ of 100 tokens; before training it was \d+\.$"
    assert re.search(judged, ended.output, re.MULTILINE)
    assert sum(line.startswith("Epoch") for line in lines) == 1
    assert ended.output.count('sharding="auto" takes') == bool(more)
    assert Path("logs/quickstart/version_0/metrics.csv").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
def test_a_run_that_is_resumed_says_where_it_begins_and_nothing_else_new() -> None:
    constant = ("--model.min_learning_rate_ratio=1", "--model.warmup_steps=0")  # else more epochs change the schedule
    first = lines_of(support.run(support.COMMAND, "fit", *FIT, *constant, "--trainer.max_epochs=1", columns=80))
    Path("models/my-trained").rename("models/my-first")
    resumed = support.run(support.COMMAND, "fit", *FIT, *constant, "--ckpt_path=last", columns=80)
    lines = lines_of(resumed)
    assert [noise for noise in NOISE if noise in resumed.output] == []
    assert sum(line.startswith("Chat format") for line in first) == 1
    new = [line for line in lines if line not in first and not line.startswith(("Epoch", "ProTrain"))]
    assert new[0] == "Restored all states from the checkpoint at", new
    assert "epoch=0-step=10.ckpt" in "".join(new[1:]), new


@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
def test_a_preview_says_each_fact_once() -> None:
    ended = support.run(support.COMMAND, "preview", *CHAT, "--num=1", columns=80)
    assert max(map(len, ended.output.splitlines())) <= 80, ended.output
    assert [noise for noise in (*NOISE, "GPU") if noise in ended.output] == []
    assert ended.output.count("Chat format") == 1
    assert ended.output.count("33.2%") == 2  # once for each data set
    assert ended.output.count("max_length=64") == 2  # the settings of both splits together


@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
def test_no_message_is_erased_by_the_progress_bar_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    screen, shown = pyte.Screen(80, 200), bytearray()

    def read(descriptor: int) -> bytes:
        read = os.read(descriptor, 65536)
        shown.extend(read)
        return read

    status = pty.spawn([support.COMMAND, "fit", QUICKSTART, *SMALL], read)
    pyte.ByteStream(screen).feed(bytes(shown))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert status == 0, lines
    assert lines[-1].startswith("Epoch 0/3"), lines
    assert re.search(r"8/8 .* loss: \d\.\d+ step: ", lines[-1])
    assert sum(line.startswith("Epoch") for line in lines) == 1, lines
    for beginning in ("ProTrain streamed", "Answers after 8 steps", "val_loss", "The model predicts"):
        assert sum(line.startswith(beginning) for line in lines) == 1, (beginning, lines)
