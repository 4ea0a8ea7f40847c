"""Ranks have files of their own, fall back, fail and end together, and resume with any number of ranks."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_protrain import rank_store
from lightning_protrain.callbacks.checkpoint import resume
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.resume import (
    ACCUMULATING,
    MOST_COMPARED,
    newest_listed,
    newest_of_all,
    restore_own_states,
    small_states,
)
from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.manifest import MANIFEST
from lightning_protrain.checkpoint.rank_state import capture
from lightning_protrain.checkpoint.serialize import RANK_STATES, WEIGHTS
from lightning_protrain.checkpoint.verification import Fault, verify
from lightning_protrain.rank_store import RankStore
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.checkpoint.contents import content, flip, save_content
from tests.support.counter_runs import Steps
from tests.support.ranks import Outcome, kill_this_rank, run_ranks, trainer_on_rank, values
from tests.support.recorded_runs import Recorded, Samples

COUNT = 48


class Mine(L.Callback):
    """Remembers what only this rank has seen, and what all have."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen = {"rank": trainer.global_rank, "steps": trainer.global_step}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def _fit(
    rank: int, ranks: int, root: Path, path: Any = None, module: Any = None, kind: Any = DDPStrategy, **options: Any
) -> Any:
    of_saver = {name: options.pop(name) for name in ("save_on_exception", "asynchronous") if name in options}
    every = options.pop("every", 1)
    saver = ProTrainCheckpoint(root, every_n_train_steps=every, save_top_k=-1, **of_saver)
    callbacks = [*options.pop("callbacks", []), saver]
    trainer = trainer_on_rank(
        rank, ranks, kind, **{"max_epochs": 1, **options, "enable_checkpointing": True, "callbacks": callbacks}
    )
    samples = Samples(COUNT, noisy=False)
    loader = DataLoader(samples, 2, sampler=DistributedSampler(samples, ranks, rank))
    module = module or Recorded()
    torch.manual_seed(100 + rank if path is None else 7)
    trainer.fit(module, loader, ckpt_path=path)
    return trainer


def _run(folder: Path, function: Any, ranks: int, *args: Any) -> list[Outcome]:
    meeting = folder / f"meeting{len(list(folder.glob('meeting*')))}"
    meeting.mkdir(parents=True)
    return run_ranks(function, ranks, meeting, *args)


def _saves(rank: int, root: Path, ranks: int, steps: int) -> None:
    _fit(rank, ranks, root, callbacks=[Mine()], max_steps=steps)


# --- files ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_only_a_rank_has_is_in_its_own_file(tmp_path: Path, asynchronous: bool) -> None:
    def act(rank: int) -> None:
        _fit(rank, 2, tmp_path / "root", callbacks=[Mine()], max_steps=2, asynchronous=asynchronous)

    values(_run(tmp_path, act, 2))
    [newest, _] = find_checkpoints(tmp_path / "root").found
    assert sorted(newest.manifest.files) == [
        "rank00000.pt",
        "rank00001.pt",
        "state.pt",
        "tensors.safetensors",
        "weights.safetensors",
    ]
    states = ProTrainCheckpointIO().load_checkpoint(newest.path)["rank_states"]
    assert not torch.equal(states[0]["random"]["torch"], states[1]["random"]["torch"])
    # What rank 1 has like rank 0 is there once.
    assert [list(state["others"]) for state in states] == [[], ["callbacks/Mine"]]


def test_each_rank_gets_its_own_back_and_reads_no_other(tmp_path: Path) -> None:
    root = tmp_path / "root"
    values(_run(tmp_path, _saves, 2, root, 2, 3))

    def act(rank: int) -> tuple:
        opened: list[str] = []
        sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
        mine, seen = Mine(), []
        mine.on_train_start = lambda *_: seen.append(dict(mine.seen))  # type: ignore[method-assign]
        _fit(rank, 2, tmp_path / "new", find_checkpoints(root).found[0].path, callbacks=[mine], max_steps=4)
        return seen, sorted({Path(each).name for each in opened if ".ckpt/rank" in each and "/root/" in each})

    assert values(_run(tmp_path, act, 2)) == [
        ([{"rank": rank, "steps": 3}], [f"rank0000{rank}.pt"]) for rank in range(2)
    ]


# --- together ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", ["rank00001.pt", "weights.safetensors", "manifest.json"])
def test_all_ranks_fall_back_past_a_torn_checkpoint(tmp_path: Path, file: str) -> None:
    root = tmp_path / "root"
    values(_run(tmp_path, _saves, 2, root, 2, 3))
    torn, good = (each.path for each in find_checkpoints(root).found[:2])
    flip(torn / file, 300)

    def act(rank: int) -> tuple:
        if rank == 1:
            return _fit(rank, 2, root, "last", max_steps=4).global_step, None
        with pytest.warns(UserWarning, match="is the newest undamaged checkpoint") as caught:
            step = _fit(rank, 2, root, "last", max_steps=4).global_step
        return step, next(str(each.message) for each in caught if "is the newest undamaged" in str(each.message))

    (step, message), (other, _) = values(_run(tmp_path, act, 2))
    assert step == other == 4
    assert message.startswith(str(good))
    assert torn.name in message
    assert file in message
    assert find_checkpoints(root).found[0].manifest.step == 4


def test_ranks_that_go_back_set_aside_what_came_after(tmp_path: Path) -> None:
    root = tmp_path / "root"
    values(_run(tmp_path, _saves, 2, root, 2, 3))

    def act(rank: int) -> int:
        return _fit(rank, 2, root, root / "epoch=0-step=1.ckpt", max_steps=2, callbacks=[Mine()]).global_step

    assert values(_run(tmp_path, act, 2)) == [2, 2]
    assert sorted(each.manifest.step for each in find_checkpoints(root).found) == [1, 2]
    assert sorted(path.name for path in root.glob("*.aside")) == ["epoch=0-step=2.aside", "epoch=0-step=3.aside"]


PHASES = ["states", "write", "rename"]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_in_any_phase_of_a_save_ends_the_others_in_time(tmp_path: Path, phase: str, dies: int) -> None:
    root = tmp_path / "root"

    def act(rank: int) -> None:
        class Dies(Recorded):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                if self.trainer.global_step == 2 and rank == dies:
                    if phase == "states":
                        kill_this_rank()
                    _kill_in(phase)

        _fit(rank, 2, root, module=Dies(), max_steps=3)

    outcomes = _run(tmp_path, act, 2)
    if dies == 1 and phase != "states":
        # Rank 1 writes nothing: it lives.
        assert [each.error for each in outcomes] == [None, None]
        return
    assert outcomes[dies].error == "killed"
    assert f"rank {dies} has not responded" in (outcomes[1 - dies].error or "")
    assert "Saving " in (outcomes[1 - dies].error or "")
    assert outcomes[1 - dies].error != "hangs"
    good = [each for each in find_checkpoints(root).found if verify(each.path) == []]
    assert good[-1].manifest.step == 1


def _kill_in(phase: str) -> None:
    name = {"write": "write", "rename": "rename"}[phase]
    setattr(Files, name, lambda *_: kill_this_rank())


def test_a_rank_that_writes_for_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "BOUND", 1.0)

    def act(rank: int) -> int:
        checkpoints = ProTrainCheckpointIO()
        sync = checkpoints.files.sync
        checkpoints.files.sync = lambda descriptor: (time.sleep(0.3), sync(descriptor))[1]  # type: ignore[method-assign]
        return _fit(rank, 2, tmp_path / "root", plugins=[checkpoints], max_steps=1).global_step

    assert values(_run(tmp_path, act, 2)) == [1, 1]


@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_an_exception_is_saved_if_all_ranks_end_with_it(tmp_path: Path, where: str) -> None:
    root = tmp_path / "root"

    def act(rank: int) -> None:
        def fail() -> None:
            if where == "everywhere" or rank == 1:
                raise RuntimeError(f"of the user on rank {rank}")

        _fit(rank, 2, root, callbacks=[Steps(3, fail)], every=100, save_on_exception=True)

    outcomes = _run(tmp_path, act, 2)
    assert "of the user on rank 1" in (outcomes[1].error or "")
    if where == "everywhere":
        assert "of the user on rank 0" in (outcomes[0].error or "")
        assert [each.manifest.step for each in find_checkpoints(root).found] == [3]
        assert sorted(find_checkpoints(root).found[0].manifest.files)[:2] == ["rank00000.pt", "rank00001.pt"]
    else:
        assert outcomes[0].error is not None
        assert find_checkpoints(root).found == ()
    assert "hangs" not in [outcome.error for outcome in outcomes]


# --- other numbers of ranks -------------------------------------------------------------------------------------------
class Looks(Recorded):
    """Remembers its weights, moments and random numbers when training starts."""

    def on_train_start(self) -> None:
        self.found = self._all()

    def _all(self) -> list[Any]:
        moments = self.trainer.optimizers[0].state_dict()["state"]
        tensors = [*self.state_dict().values(), *(each for state in moments.values() for each in state.values())]
        return [tensor.tolist() for tensor in tensors]


def _saved(path: Path) -> list[Any]:
    content = ProTrainCheckpointIO().load_checkpoint(path)
    moments = content["optimizer_states"][0]["state"]
    tensors = [*content["state_dict"].values(), *(each for state in moments.values() for each in state.values())]
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.filterwarnings("ignore:.*was saved with")
def test_weights_and_moments_go_from_two_ranks_to_one_to_four(tmp_path: Path) -> None:
    values(_run(tmp_path, _saves, 2, tmp_path / "two", 2, 4))
    two = find_checkpoints(tmp_path / "two").found[0].path

    def one(rank: int) -> tuple:
        module = Looks()
        _fit(rank, 1, tmp_path / "one", two, module, max_steps=6)
        return module.found, module.given

    [(found, given)] = values(_run(tmp_path, one, 1))
    assert found == _saved(two)
    middle = find_checkpoints(tmp_path / "one").found[0].path

    def four(rank: int) -> tuple:
        module = Looks()
        _fit(rank, 4, tmp_path / "four", middle, module, max_steps=7)
        return module.found, module.given

    four_found = values(_run(tmp_path, four, 4))
    assert all(each == _saved(middle) for each, _ in four_found)
    # Every sample before that place was trained, and none after it: 4 batches on each of 2 ranks are 8 on one.
    assert [batch[0] for batch in given] == [8, 9]
    # 10 of one rank lie between the second and the third of four.
    assert {batch[0] for _, batches in four_found for batch in batches} == {2}


@pytest.mark.filterwarnings("ignore:.*was saved with")
def test_the_samples_of_an_epoch_are_trained_once_by_whatever_ranks(tmp_path: Path) -> None:
    def trained(outcomes: list[Outcome]) -> list[int]:
        return sorted(int(number) for given in values(outcomes) for batch in given for number in batch[1:])

    def run(rank: int, ranks: int, root: Path, path: Any, steps: int) -> list:
        module = Recorded()
        _fit(rank, ranks, root, path, module, max_steps=steps)
        return module.given

    first = trained(_run(tmp_path, run, 2, 2, tmp_path / "two", None, 6))
    rest = trained(_run(tmp_path, run, 4, 4, tmp_path / "four", find_checkpoints(tmp_path / "two").found[0].path, 100))
    assert len(first) == 24
    assert sorted(first + rest) == list(range(COUNT))


@pytest.mark.filterwarnings("ignore:.*was saved with")
def test_new_ranks_draw_numbers_of_their_own_and_old_ones_go_on(tmp_path: Path) -> None:
    values(_run(tmp_path, _saves, 2, tmp_path / "two", 2, 4))
    path = find_checkpoints(tmp_path / "two").found[0].path

    def drawn(rank: int, ranks: int) -> list[float]:
        numbers: list[float] = []

        class Draws(Recorded):
            def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
                numbers.extend(torch.rand(2).tolist())

        _fit(rank, ranks, tmp_path / f"new{ranks}{len(os.listdir(tmp_path))}", path, Draws(), max_steps=5)
        return numbers[:2]

    same, more, again = (values(_run(tmp_path, drawn, ranks, ranks)) for ranks in (2, 4, 4))
    assert more == again
    assert more[:2] == same
    assert len({tuple(each) for each in more}) == 4


@pytest.mark.filterwarnings("ignore:.*was saved with")
def test_at_the_end_of_an_epoch_the_next_one_begins(tmp_path: Path) -> None:
    def saves(rank: int) -> None:
        _fit(rank, 2, tmp_path / "two", max_epochs=1)

    values(_run(tmp_path, saves, 2))
    path = find_checkpoints(tmp_path / "two").found[0].path

    def one(rank: int) -> list:
        module = Recorded()
        _fit(rank, 1, tmp_path / "one", path, module, max_epochs=2)
        return module.given

    [given] = values(_run(tmp_path, one, 1))
    assert len(given) == COUNT // 2


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_ranks_under_a_plan_end_with_the_same_bits(tmp_path: Path, plan: str) -> None:
    def act(rank: int, root: Path, path: Any) -> tuple:
        class Streamed(Recorded):
            def __init__(self) -> None:
                super().__init__()
                self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        module = Streamed()
        _fit(rank, 2, root, path, module, partial(ProTrainStrategy, plan=plan, blocks=[nn.Linear]))
        return module.given, module.losses, [value.tolist() for value in module.state_dict().values()]

    whole = values(_run(tmp_path, act, 2, tmp_path / "whole", None))
    path = next(each.path for each in find_checkpoints(tmp_path / "whole").found if each.manifest.step == 5)
    for one, other in zip(values(_run(tmp_path, act, 2, tmp_path / "resumed", path)), whole, strict=True):
        assert one == (other[0][5:], other[1][5:], other[2])


def _save(root: Path, *steps: int, **record: Any) -> None:
    root.mkdir(exist_ok=True)
    for step in steps:
        saved = {**content(step), RANK_STATES: [{"random": rank} for rank in range(2)]}
        save_content(saved, root / f"step={step}", step, record=record)


def _chosen(rank: int, root: Path) -> tuple[str | None, list[str]]:
    exchange = RankStore.open("x")
    newest = newest_of_all(exchange, rank, root, "run")
    exchange.sign_off("has ended")
    return newest.chosen and newest.chosen.path.name, [f"{path.name} {what}" for path, what in newest.skipped]


def test_all_ranks_choose_the_newest_good_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1, 2, 3)
    assert values(run_ranks(_chosen, 2, tmp_path, tmp_path / "a")) == [("step=3", [])] * 2
    assert newest_listed(tmp_path / "a", "run") == tmp_path / "a" / "step=3"


@pytest.mark.parametrize(("file", "rank"), [(WEIGHTS, 0), ("rank00000.pt", 0), ("rank00001.pt", 1), (MANIFEST, None)])
def test_a_checkpoint_that_one_rank_finds_damaged_is_skipped_by_all(
    tmp_path: Path, file: str, rank: int | None
) -> None:
    _save(tmp_path / "a", 1, 2, 3)
    flip(tmp_path / "a" / "step=3" / file, 200)
    for name, skipped in values(run_ranks(_chosen, 2, tmp_path, tmp_path / "a")):
        assert name == "step=2"
        assert len(skipped) == 1
        assert file in skipped[0]
        assert rank is None or f"(on rank {rank})" in skipped[0]


def test_what_only_one_rank_cannot_read_is_skipped_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "a", 1, 2)
    verify_rank = resume.verify_rank

    def act(rank: int) -> Any:
        def fails(folder: Path, number: int) -> list[Fault]:
            bad = rank == 1 and folder.name == "step=2"
            return [Fault(WEIGHTS, "Input/output error")] if bad else verify_rank(folder, number)

        monkeypatch.setattr(resume, "verify_rank", fails)
        return _chosen(rank, tmp_path / "a")

    expected = ("step=1", [f"step=2 {WEIGHTS}: Input/output error (on rank 1)"])
    assert values(run_ranks(act, 2, tmp_path)) == [expected] * 2


def test_without_a_good_checkpoint_all_ranks_raise(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    flip(tmp_path / "a" / "step=1" / "rank00001.pt", 20)
    zero, one = run_ranks(_chosen, 2, tmp_path, tmp_path / "a")
    assert "All checkpoints of run 'run' in" in (zero.error or "")
    assert "failed on rank 0 (ValueError: " in (one.error or "")
    assert "All checkpoints of run 'run' in" in (one.error or "")


def test_one_between_two_steps_is_not_gone_on_from(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    _save(tmp_path / "b", 2, **{ACCUMULATING: True})
    (tmp_path / "b" / "step=2").rename(tmp_path / "a" / "step=2")
    assert newest_listed(tmp_path / "b", "run") is None
    assert newest_listed(tmp_path / "nothing", "run") is None


def test_a_broken_manifest_is_listed_so_that_it_is_told(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    flip(tmp_path / "a" / "step=1" / MANIFEST, 20)
    assert newest_listed(tmp_path / "a", "run") == tmp_path / "a" / "step=1"


class Data(L.LightningDataModule):
    pass


def _trainer(rank: int = 0, world_size: int = 2, data: Any = None) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy, datamodule=data)


CHECKPOINT = {"callbacks": {"A": {"x": 1}, "large": {"w": [torch.zeros(MOST_COMPARED)]}}, "Data": {"at": 3}, "other": 1}


def test_what_is_small_is_compared() -> None:
    assert list(small_states(_trainer(data=Data()), CHECKPOINT)) == ["callbacks/A", "Data"]
    assert list(small_states(_trainer(), CHECKPOINT)) == ["callbacks/A"]
    assert small_states(_trainer(world_size=1), CHECKPOINT) == {}
    assert small_states(_trainer(), {"callbacks": {"A": {"x": 1}}}) == small_states(_trainer(), CHECKPOINT)


def _content(**others: Any) -> dict[str, Any]:
    counts = {"ready": 4, "completed": 4}
    progress = {"current": dict(counts), "total": dict(counts), "is_last_batch": False}
    states = [
        {"random": capture(torch.device("cpu")), "data": None, "others": others if rank else {}} for rank in (0, 1)
    ]
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    return {"callbacks": {"A": {"x": 0}, "B": 5}, "Data": {"at": 0}, RANK_STATES: states, "loops": loops}


def test_a_rank_gets_what_was_its_own() -> None:
    own = small_states(_trainer(data=Data()), {"callbacks": {"A": {"x": 7}}, "Data": {"at": 9}})
    for rank, expected in ((0, (0, 0)), (1, (7, 9))):
        content = _content(**own)
        assert restore_own_states(_trainer(rank), content, "x") is content[RANK_STATES][rank]
        assert (content["callbacks"]["A"]["x"], content["Data"]["at"]) == expected
        assert content["callbacks"]["B"] == 5


def test_another_number_of_ranks_warns() -> None:
    content = _content()
    with pytest.warns(UserWarning, match=r"x was saved with world_size=2 and is resumed with 4\..*4/2 of the samples"):
        restore_own_states(_trainer(3, 4), content, "x")
    assert content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 2
    with pytest.warns(UserWarning, match="is between two batches"):
        restore_own_states(_trainer(0, 3), _content(), "x")


def test_a_checkpoint_without_states_of_ranks_restores_none() -> None:
    assert restore_own_states(_trainer(), {}, "x") is None
