"""One rank of a node loads, the node holds the weights once, and a failure of one rank ends all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_protrain import CausalLMModule, ProTrainStrategy
from tests.support.loading_ranks import KINDS, Everywhere, Once, loader, module_of, save, tensors_of
from tests.support.plans import half
from tests.support.ranks import run_ranks, trainer_on_rank, values

PLACEMENTS = ("shard", "shard half", "auto", "replicate", "resident")


class Found(L.Callback):
    """A callback that records tensors, random state and classes of the model after set-up."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.tensors = {f"first {name}": tensor for name, tensor in tensors_of(pl_module).items()}
        self.tensors["random"] = torch.get_rng_state()
        self.classes = [(name, type(module).__name__) for name, module in pl_module.named_modules()]
        self.outlined = trainer.strategy.loaded_outline


def strategy_of(kind: type[Once], placement: str, planned: Callable[[], nn.Module], **process: Any) -> Any:
    sharding, _, part = placement.partition(" ")
    plan: Any = half(planned()) if part else "auto" if sharding == "resident" else "offload"
    return kind(sharding=sharding, plan=plan, monitor=False, **process)


def train(rank: int, world_size: int, case: str, folder: Path, placement: str, kind: type[Once]) -> Any:
    def planned() -> nn.Module:
        module = module_of(case, folder)
        module.configure_model()
        return module

    def make(**process: Any) -> Any:
        return strategy_of(kind, placement, planned, **process)

    trainer = trainer_on_rank(rank, world_size, make, max_steps=3, callbacks=[found := Found()])
    torch.manual_seed(5)
    module = module_of(case, folder)
    trainer.fit(module, loader())
    return found, {**found.tensors, **tensors_of(module)}


def differences(rank: int, world_size: int, case: str, folder: Path, placements: tuple[str, ...]) -> list[str]:
    """Return the differences from ranks that each load all weights.

    With two ranks, one reference serves all placements: they sum gradients in the same order.
    """
    torch.set_num_threads(1)
    wrong = []
    for placement in placements:
        if placement == placements[0] or world_size > 2:
            before, wanted = train(rank, world_size, case, folder, placement, Everywhere)
        after, found = train(rank, world_size, case, folder, placement, Once)
        wrong += [f"{placement}: {name}" for name in wanted.keys() ^ found.keys()]
        wrong += [f"{placement}: {name}" for name in wanted if not torch.equal(wanted[name], found[name])]
        wrong += [] if before.classes == after.classes else [f"{placement}: classes"]
        lean = world_size > 1 and rank > 0 and placement in ("shard", "shard half", "auto")
        wrong += [] if (before.outlined, after.outlined) == (False, lean) else [f"{placement}: who loads"]
    return wrong


QUICK = [("full", 1), ("full", 2), ("lora", 2), ("head", 2)]
# One rank loads as ever, whatever the model is, and four do what two do.
CASES = [
    pytest.param(kind, world_size, marks=[] if (kind, world_size) in QUICK else pytest.mark.slow)
    for kind in (*KINDS, "head")
    for world_size in (1, 2, 4)
    if world_size == 2 or kind in ("full", "nf4")
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "world_size"), CASES)
def test_ranks_train_what_each_would_have_loaded(kind: str, world_size: int, tmp_path: Path) -> None:
    save(kind, tmp_path / "model")
    placements = PLACEMENTS if world_size == 2 else ("shard", "shard half") if world_size == 4 else ("auto",)
    found = values(run_ranks(differences, world_size, tmp_path, world_size, kind, tmp_path / "model", placements))
    assert found == [[]] * world_size


# --- what goes wrong --------------------------------------------------------------------------------------------------
def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


KEY = "model.layers.1.mlp.up_proj.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(KEY), f"missing: {KEY}"),
    "extra": (lambda tensors: tensors.update(more=torch.ones(2)), "not in the model: more"),
    "shape": (lambda tensors: tensors.update({KEY: torch.ones(2, 3)}), f"{KEY} (2, 3), not (32, 16)"),
}


def fit(rank: int, world_size: int, module: L.LightningModule, sharding: str = "shard") -> L.Trainer:
    torch.set_num_threads(1)

    def make(**process: Any) -> Any:
        return ProTrainStrategy(sharding=sharding, plan="offload", monitor=False, **process)

    trainer = trainer_on_rank(rank, world_size, make, max_steps=1)
    trainer.fit(module, loader())
    return trainer


def load_from(rank: int, world_size: int, folders: list[str]) -> None:
    fit(rank, world_size, CausalLMModule(model=folders[rank]))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights_are_named_on_all_ranks(case: str, tmp_path: Path) -> None:
    save("full", tmp_path / "model")
    edit, message = WRONG[case]
    change(tmp_path / "model", edit)
    outcomes = run_ranks(load_from, 2, tmp_path, 2, [str(tmp_path / "model")] * 2)
    assert all(message in str(each.error) for each in outcomes), outcomes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_rank_cannot_read_ends_all(rank: int, tmp_path: Path) -> None:
    folders = [tmp_path / "good", tmp_path / "good"]
    save("full", folders[0])
    folders[rank] = tmp_path / "bad"
    save("full", folders[rank])
    file = folders[rank] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    outcomes = run_ranks(load_from, 2, tmp_path, 2, [str(folder) for folder in folders])
    assert "model.safetensors (100 bytes) is damaged" in str(outcomes[rank].error)
    assert f"failed on rank {rank} (ValueError" in str(outcomes[1 - rank].error)
    assert "hangs" not in [each.error for each in outcomes]


def load_unreadable(rank: int, world_size: int, folder: Path) -> None:
    def read(*_: Any) -> Tensor:
        raise OSError("Input/output error")

    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_protrain.models.loading.StoredTensor.__getitem__", read)
            load_from(rank, world_size, [str(folder)] * world_size)
    else:
        load_from(rank, world_size, [str(folder)] * world_size)


def test_a_disk_that_fails_while_weights_are_read_ends_all(tmp_path: Path) -> None:
    save("full", tmp_path / "model")
    outcomes = run_ranks(load_unreadable, 2, tmp_path, 2, tmp_path / "model")
    assert all("Input/output error" in str(each.error) for each in outcomes), outcomes
    assert "rank 0" in str(outcomes[1].error)


class ByHand(CausalLMModule):
    """Decides itself which rank has values."""

    def __init__(self, meta_ranks: tuple[int, ...], **options: Any) -> None:
        super().__init__(**options)
        self.meta_ranks = meta_ranks

    def configure_model(self) -> None:
        where = "meta" if self.trainer.global_rank in self.meta_ranks else "cpu"
        with torch.device(where):
            self.model = self._build()


def train_by_hand(rank: int, world_size: int, folder: Path, meta_ranks: tuple[int, ...]) -> dict[str, Any]:
    module = ByHand(meta_ranks, model=str(folder), learning_rate=1e-2)
    fit(rank, world_size, module, "auto")
    return {name: tensor.tolist() for name, tensor in tensors_of(module).items()}


def evaluate(rank: int, world_size: int, folder: Path, kind: type[Once]) -> Any:
    torch.set_num_threads(1)
    module = module_of("full", folder)
    trainer = trainer_on_rank(rank, world_size, lambda **process: kind(plan="offload", monitor=False, **process))
    return trainer.validate(module, loader(), verbose=False), trainer.strategy.loaded_outline


def evaluations(rank: int, world_size: int, folder: Path) -> list[Any]:
    return [evaluate(rank, world_size, folder, kind) for kind in (Everywhere, Once)]


def test_evaluation_loads_once_too(tmp_path: Path) -> None:
    save("full", tmp_path / "model")
    for rank, ((wanted, _), (found, outlined)) in enumerate(
        values(run_ranks(evaluations, 2, tmp_path, 2, tmp_path / "model"))
    ):
        assert found == wanted
        assert outlined is (rank > 0)


@pytest.mark.slow
def test_ranks_may_have_values_or_not_but_for_the_first(tmp_path: Path) -> None:
    save("full", tmp_path / "model")
    found = []
    for number, meta_ranks in enumerate(((), (2,), (1, 2))):
        folder = tmp_path / str(number)
        folder.mkdir()
        found += values(run_ranks(train_by_hand, 3, folder, 3, tmp_path / "model", meta_ranks))
    assert len(found) == 9
    assert all(each == found[0] for each in found)
    folder = tmp_path / "none"
    folder.mkdir()
    outcomes = run_ranks(train_by_hand, 2, folder, 2, tmp_path / "model", (0,))
    assert all("is on the meta device on rank 0" in str(each.error) for each in outcomes), outcomes


# --- resuming ---------------------------------------------------------------------------------------------------------
def resume(rank: int, world_size: int, folder: Path, kind: type[Once]) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    module: L.LightningModule | None = None
    for max_steps, path in ((2, None), (4, folder / "half.ckpt")):
        torch.manual_seed(5)
        module = module_of("lora", folder)
        trainer = trainer_on_rank(
            rank, world_size, lambda **process: kind(plan="offload", monitor=False, **process), max_steps=max_steps
        )
        trainer.fit(module, loader(), ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(folder / "half.ckpt")
    assert module is not None
    return tensors_of(module)


def resumptions(rank: int, world_size: int, folder: Path) -> list[str]:
    wanted = resume(rank, world_size, folder, Everywhere)
    found = resume(rank, world_size, folder, Once)
    return [name for name in wanted if not torch.equal(wanted[name], found[name])]


def test_a_run_resumes_as_it_did(tmp_path: Path) -> None:
    save("full", tmp_path / "model")
    assert values(run_ranks(resumptions, 2, tmp_path, 2, tmp_path / "model")) == [[], []]


# Of each process: what it imports, and what it keeps beside weights (modules, plans, gloo).
ALLOWANCE = 16 << 20


def held(processes: list[int]) -> int:
    """Return the memory of processes without their libraries, bytes; shared memory counts once."""
    total = 0
    for process in processes:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total


def said(folder: Path, word: str) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob(f"{word}-*.said"))]


def peak_of(model: Path, folder: Path, dtype: str, who: str, ranks: int) -> tuple[int, int]:
    """The most that all ranks hold together from before they load until they are set up, beyond what they held then."""
    folder.mkdir()
    script = [sys.executable, "-m", "tests.distributed.loaded"]
    with (folder / "log").open("w") as log:
        begun = subprocess.Popen([*script, str(model), str(folder), dtype, who, str(ranks)], stdout=log, stderr=log)
        try:
            while len(said(folder, "load")) < ranks and begun.poll() is None:
                time.sleep(0.1)
            processes = said(folder, "load")
            assert len(processes) == ranks, (folder / "log").read_text()[-2000:]
            before, peak = held(processes), 0
            (folder / "load").touch()
            while len(said(folder, "end")) < ranks and begun.poll() is None:
                peak = max(peak, held(processes))
                time.sleep(0.02)
            assert len(said(folder, "end")) == ranks, (folder / "log").read_text()[-2000:]
            peak = max(peak, held(processes))
        finally:
            (folder / "load").touch()
            (folder / "end").touch()
            begun.wait()
    return peak - before, said(folder, "end")[0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 210 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 2000}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=16)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux says what processes share")
@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 4), ("float32", 2)])
def test_the_ranks_of_a_machine_hold_the_weights_once_while_they_load(
    dtype: str, ranks: int, large: Path, tmp_path: Path
) -> None:
    peak, weights = peak_of(large, tmp_path / "first", dtype, "first", ranks)
    assert weights > 200e6
    assert 0.95 * weights < peak < 1.10 * weights + ranks * ALLOWANCE


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux says what processes share")
def test_where_every_rank_loads_each_has_all_weights(large: Path, tmp_path: Path) -> None:
    """Check the measurement of the previous test: if every rank loads, it sees all weights twice."""
    peak, weights = peak_of(large, tmp_path / "all", "bfloat16", "all", 2)
    assert peak > 0.9 * 2 * weights
