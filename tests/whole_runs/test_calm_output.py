"""The quickstart speaks in 80 columns, on one screen, and says each fact once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.whole_runs import support

# Lines of a terminal on half of a screen.
SCREEN = 50
SMALL = (
    *("--model.config.hidden_size=64", "--model.config.intermediate_size=128", "--trainer.accelerator=cpu"),
    *("--trainer.max_steps=8", "--trainer.limit_train_batches=8", "--trainer.val_check_interval=8"),
    *("--trainer.limit_val_batches=2", "--trainer.strategy.device_memory=6MiB", "--data.cache_dir=cache"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
def test_the_quickstart_fits_a_screen_and_ends_with_what_a_person_can_judge() -> None:
    ended = support.run(support.COMMAND, "fit", "--config=configs/quickstart.yaml", *SMALL, columns=80)
    assert ended.status == 0, ended.output
    # A bar is one line of a terminal, written again and again.
    lines = [line.rpartition("\r")[2].rstrip() for line in ended.output.splitlines()]
    said = [line for line in lines if line]
    assert len(lines) <= SCREEN, ended.output
    assert max(map(len, lines)) <= 80, ended.output
    assert [line for line, count in Counter(said).items() if count > 1 and re.search("[a-z]{4}", line)] == []
    for noise in ("site-packages", "Warning", "Seed set", "TPU", "Tip:", "Trainer.fit"):
        assert noise not in ended.output, noise
    assert re.search(r"streamed through [2-9] chunk buffers", ended.output)  # one computes, the next one is fetched
    assert re.search("prompt.*before.*after", ended.output)
    judged = r"^val_loss \d\.\d+ -> \d\.\d+\nThe model predicts \d+ of 100 tokens; before training it was \d+\.$"
    assert re.search(judged, ended.output, re.MULTILINE)
    assert sum(line.startswith("Epoch") for line in said) == 1
    assert Path("logs/quickstart/version_0/metrics.csv").is_file()
