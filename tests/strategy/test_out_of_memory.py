"""Memory that runs out in training: no step is trained on by half, and the checkpoint from before is good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain import ProTrainStrategy
from lightning_protrain.runtime.optim.host_step import HostStep
from lightning_protrain.strategy.rehearsal import _lowered
from lightning_protrain.strategy.sharded_states import why_partially_stepped
from tests.support.failing_runs import Failing, failing, resumed
from tests.support.models import fit
from tests.support.overlapped_runs import run

# Steps before the one that fails, and all steps.
AT, STEPS = 4, 14
SHORT = "CUDA out of memory. Tried to allocate 2.00 KiB."


class Starving(TorchDispatchMode):
    """Has no memory for the third weight that an optimizer updates on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.updates += func.overloadpacket is torch.ops.aten.addcdiv_
        if self.updates == 3:
            raise torch.OutOfMemoryError(SHORT)
        return func(*args, **(kwargs or {}))


class Starved(Failing):
    """Steps without memory once."""

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        if batch_idx != AT:
            super().optimizer_step(epoch, batch_idx, *args, **kwargs)
            return
        with Starving():
            super().optimizer_step(epoch, batch_idx, *args, **kwargs)


def plant_on_the_worker(monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    """The worker has no memory for the second chunk of a step."""
    step, calls = HostStep.step, list[int]()

    def failing_step(host: HostStep, *args: Any) -> None:
        calls.append(1)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError(SHORT)
        step(host, *args)

    fails_at = -1
    monkeypatch.setattr(HostStep, "step", failing_step)
    run(failing(), overlap)
    fails_at = AT * len(calls) // STEPS + 2
    calls.clear()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[bool]:
    assert one.keys() == other.keys()
    return [torch.equal(value, other[name]) for name, value in one.items()]


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize("where", ["forward", "backward", "host step"])
def test_weights_are_those_before_the_step_or_refused(
    where: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = failing()
    if where != "host step":
        module.at, module.where, module.error = AT, where, torch.OutOfMemoryError(SHORT)
    elif overlap == "off":
        module = Starved(module.network)
    else:
        plant_on_the_worker(monkeypatch, overlap)
    strategy = ProTrainStrategy(plan="offload", overlap_optimizer=overlap)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(module, strategy=strategy, callbacks=[saving], enable_checkpointing=True)
    assert any(note.startswith("The device ran out of memory") for note in raised.value.__notes__)
    monkeypatch.undo()
    path = tmp_path / f"step={AT}.ckpt"
    assert path == max(tmp_path.iterdir(), key=lambda path: int(path.stem[5:]))
    before = torch.load(path, weights_only=False)
    states, kept = strategy.optimizers[0].state_dict()["state"], before["optimizer_states"][0]["state"]
    are_same = same(module.state_dict(), before["state_dict"])
    are_same += [each for index in kept for each in same(states[index], kept[index])]
    is_whole = where == "forward" or (where == "backward" and overlap != "backward")
    if is_whole:
        assert all(are_same)
        assert why_partially_stepped(module) is None
    else:
        assert any(are_same)  # The comparison sees a step by half.
        assert not all(are_same)
        with pytest.raises(RuntimeError, match="partially stepped"):
            fit(module, strategy=ProTrainStrategy(plan="offload"))
    expected = run(failing()).weights
    assert all(same(resumed(path, AT, overlap), expected))


def test_the_comparison_sees_states_that_were_not_loaded(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(failing(), "forward", callbacks=[saving], enable_checkpointing=True)
    found = resumed(tmp_path / f"step={AT}.ckpt", AT, "forward", loads_states=False)
    assert not all(same(found, run(failing()).weights))


def test_an_error_that_gives_no_size_lowers_the_budget_by_a_twentieth() -> None:
    assert _lowered(1000, None, torch.OutOfMemoryError("No memory is left.")) == 950
