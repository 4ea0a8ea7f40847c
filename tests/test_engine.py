"""The engine trains any loop of PyTorch, without Lightning and transformers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from tests.documented import ROOT, blocks

(PAGE,) = (block.code for block in blocks(ROOT / "docs" / "how" / "engine.md"))
HIDE = "import sys\nsys.modules.update(dict.fromkeys(('lightning', 'transformers', 'torchmetrics', 'peft')))\n"


def test_the_loop_of_the_page_trains_the_weights_of_a_plain_loop() -> None:
    program = HIDE + PAGE
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "streamed through" in ended.stdout
    plain: dict[str, Any] = {}
    exec(PAGE.partition("\ndevice = ")[0], plain)
    model = plain["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        plain["step"]().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = torch.load("model.pt")
    assert trained.keys() == model.state_dict().keys()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


def test_without_lightning_the_strategy_is_said_to_need_it() -> None:
    program = HIDE + "import lightning_protrain as engine\nengine.Plan, engine.SplitAdamW\nengine.ProTrainStrategy"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in ended.stderr
    assert "lightning" in ended.stderr.splitlines()[-1]
