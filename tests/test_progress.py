"""Progress is shown of what takes long, to whoever may be looking, and of nothing else."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tqdm
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_protrain import CausalLMModule, ProTrainStrategy, progress
from lightning_protrain.checkpoint.consolidation import consolidate, load_folder
from lightning_protrain.checkpoint.verification import verify
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.models.lora import save_model
from lightning_protrain.profiler.hardware import cached_profile
from lightning_protrain.progress import bar, is_shown, waiting
from lightning_protrain.runtime.grad_offload import GradOffload
from tests.callbacks.stand_ins import chat_data
from tests.checkpoint.contents import save_content
from tests.support.machines import CPU
from tests.support.models import fit, zoo


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


class Slow(threading.Event):
    """The end of work that has taken a moment."""

    def set(self) -> None:
        time.sleep(0.05)
        super().set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setattr(progress, "TICK", 0.01)


@contextmanager
def terminal(is_one: bool = True) -> Iterator[Terminal]:
    """Standard error in this context."""
    file = Terminal()
    if not is_one:
        file.isatty = lambda: False  # type: ignore[method-assign]
    with redirect_stderr(file):
        yield file


@pytest.fixture
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes longer than the time after which it is shown."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress.threading, "Event", Slow)


def train(folder: Path, rehearse: bool = False) -> None:
    module = zoo()["dropout"]()
    budget = int(2.5 * sum(weight.nbytes for weight in module.parameters()))
    fit(module, strategy=ProTrainStrategy(device_memory=budget, hardware=CPU, rehearse=rehearse), max_steps=1)


def rehearse(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:  # What an earlier run has measured is not rehearsed.
        patch.setattr("lightning_protrain.strategy.plan_session.user_folder", lambda: folder)
        train(folder, rehearse=True)


def lock(folder: Path) -> None:
    device = CPUDevice(torch.device("cpu"))
    chunk = SimpleNamespace(plan=SimpleNamespace(trainable=True, streamed_dtype=None))
    gradients: Any = SimpleNamespace(_chunks=[chunk], _stays=[SimpleNamespace(nbytes=64)], _all_stay=device.host)
    GradOffload.reserve(gradients, lends=False)
    device.close()


def measure(folder: Path) -> None:
    device = CPUDevice(torch.device("cpu"))
    cached_profile(device, [torch.float32], folder, measure=lambda *_: CPU)
    device.close()


def encode(folder: Path) -> None:
    data = chat_data(folder)
    data.prepare_data()
    data.setup("fit")


def save(folder: Path) -> None:
    save_content({"weight": torch.ones(1000)}, folder / "saved", 1)
    assert not verify(folder / "saved")
    load_folder(folder / "saved")
    consolidate(folder / "saved", folder / "saved.ckpt")


def export(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_model(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32)), folder / "model")


WORK: list[tuple[Callable[[Path], None], set[str]]] = [
    (train, {"Profiling a training step", "Placing weights in host memory"}),
    (lock, {"Page-locking memory for gradients"}),
    (rehearse, {"Rehearsing the plan"}),
    (measure, {"Measuring the hardware"}),
    (encode, {"Reading", "chats.jsonl, train"}),
    (save, {"Saving a checkpoint", "Verifying a checkpoint", "Reading a checkpoint", "Writing one file"}),
    (export, {"Writing the model"}),
]
NAMES = set().union(*(names for _, names in WORK))


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize(("work", "names"), WORK, ids=lambda it: getattr(it, "__name__", ""))
def test_what_takes_long_is_shown(tmp_path: Path, work: Callable[[Path], None], names: set[str]) -> None:
    with terminal() as shown:
        work(tmp_path)
    assert {name for name in names if f"{name}:" in shown.getvalue()} == names


@pytest.mark.parametrize("work", [work for work, _ in WORK], ids=lambda work: work.__name__)
def test_what_is_short_says_nothing(
    tmp_path: Path, work: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 60.0)  # Beside other work it may take two seconds.
    with terminal() as shown:
        work(tmp_path)
    assert {name for name in NAMES if name in shown.getvalue()} == set()


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("why", ["another rank", "no terminal", "another thread", ""])
def test_nobody_else_is_shown_progress(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "another rank":
        monkeypatch.setattr(rank_zero_only, "rank", 1)

    def work() -> None:
        with waiting("Working"), bar(None, "Counting", 3) as counted:
            counted.update(3)

    with terminal(why != "no terminal") as shown:
        if why == "another thread":
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
    assert all((name in shown.getvalue()) == (not why) for name in ("Working", "Counting"))


def test_notebooks_are_no_terminals_and_are_shown_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(False):
        assert not is_shown()
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
        assert is_shown()


@pytest.mark.usefixtures("_long")
def test_what_fails_leaves_no_line_and_no_thread() -> None:
    before = threading.active_count()
    with terminal() as shown, pytest.raises(RuntimeError, match="planted"), waiting("Working"):
        raise RuntimeError("planted")
    assert "Working: 00:00" in shown.getvalue()
    assert shown.getvalue().endswith("\r")
    assert threading.active_count() == before


def test_time_is_counted_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 1.2)
    with terminal() as shown, waiting("Working"):
        time.sleep(1.4)
    assert re.search(r"Working: 00:0[1-9]", shown.getvalue())


@pytest.mark.parametrize("looks", [True, False])
def test_loading_weights_shows_one_line_on_a_terminal(
    tmp_path: Path, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    read = LlamaForCausalLM.from_pretrained

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return read(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", slowly)
    with terminal(looks) as shown:
        CausalLMModule(str(tmp_path / "model")).configure_model()
    assert ("Loading weights: 00:0" in shown.getvalue()) == looks
    assert "%" not in shown.getvalue()  # no bar of transformers beside it
