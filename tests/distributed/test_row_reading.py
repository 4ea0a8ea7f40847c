"""Weights that stay on the meta device until set-up: each machine reads the rows that it holds, and no others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_protrain import CausalLMModule
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint_io import ProTrainCheckpointIO
from lightning_protrain.models.loading import stored_rows
from lightning_protrain.runtime.rows import row_ranges
from tests.distributed import test_parity
from tests.distributed.test_checkpoints import Same
from tests.distributed.test_exchange import Case, fit, module_of
from tests.distributed.test_overlap import differing
from tests.distributed.test_rows import ROWS
from tests.ranks import run_ranks, values

CASE = Case(True, divides=ROWS)


class Read(Same):
    """Reads its weights from a folder of safetensors, and notes which."""

    folder = ""

    def __init__(self, kind: str) -> None:
        with torch.device("meta"):
            super().__init__(kind)
        self.asked: dict[str, tuple[int, int]] = {}

    def load_rows(self, name: str, begin: int, end: int) -> Tensor:
        self.asked[name] = (begin, end)
        return stored_rows(self.folder, "model.")(name, begin, end)


class Wrong(Read):
    def load_rows(self, name: str, begin: int, end: int) -> Tensor:
        return super().load_rows(name, begin, end)[..., :1]


def stored(folder: Path) -> str:
    folder.mkdir()
    weights = {name: value.clone() for name, value in module_of(cls=Same).model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def _read(rank: int, folder: str, case: Case) -> tuple[list[str], dict[str, tuple[int, int]]]:
    expected, _ = fit(rank, module_of(cls=Same), case)
    module: Any = module_of(cls=Read)
    module.folder = folder
    found, _ = fit(rank, module, case)
    return differing(expected, found), module.asked


@pytest.mark.parametrize("case", [CASE, CASE._replace(local_size=2, part=True)])
def test_each_machine_reads_its_rows(case: Case, tmp_path: Path) -> None:
    folder = stored(tmp_path / "stored")
    found = values(run_ranks(_read, 2 * case.local_size, tmp_path, folder, case))
    shapes = {name: value.shape for name, value in module_of(cls=Same).named_parameters()}
    for rank, (wrong, asked) in enumerate(found):
        assert wrong == []
        machine, place = divmod(rank, case.local_size)
        halves = {name: row_ranges(shape[0], 2)[machine] for name, shape in shapes.items()}
        whole = {name: (0, shape[0]) for name, shape in shapes.items()}
        offloaded = [name for name, rows in asked.items() if rows == halves[name] != whole[name]]
        assert all(rows in (halves[name], whole[name]) for name, rows in asked.items())
        assert bool(offloaded) is (place == 0)
        assert case.part or len(asked) > 0.7 * len(shapes)  # Of some weights the second machine has no rows.


class Resumed(Read):
    begins = -1

    def on_train_start(self) -> None:
        self.begins = self.global_step


class WithoutBuffer(Read):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.register_buffer("scale", torch.ones(1, device="meta"))


def _resume(rank: int, folder: Path, stored: str, case: Case) -> list[str]:
    again: dict[str, Any] = {"max_epochs": -1, "use_distributed_sampler": False}
    whole, _ = fit(rank, module_of(cls=Same), case, **again)
    saving = L.pytorch.callbacks.ModelCheckpoint(folder, filename="at", every_n_train_steps=2)
    options = {**again, "max_steps": 2, "callbacks": [saving], "enable_checkpointing": True}
    fit(rank, module_of(cls=Same), case, **options)
    module: Any = module_of(cls=Resumed)
    module.folder = stored
    found, _ = fit(rank, module, case, folder / "at.ckpt", **again)
    assert module.begins == 2
    return differing(whole, found)


@pytest.mark.parametrize("local_size", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_a_checkpoint_counts_and_not_what_was_read(local_size: int, precision: str, tmp_path: Path) -> None:
    folder, number = stored(tmp_path / "stored"), 2 * local_size
    case = CASE._replace(local_size=local_size, trainer={"precision": precision})
    assert values(run_ranks(_resume, number, tmp_path, tmp_path / "saved", folder, case)) == [[]] * number


def _resume_folder(rank: int, folder: Path, stored: str, cls: str) -> list[str]:
    """From a folder that every rank has written to; with weights that are read by rows, or made as ever."""
    again: dict[str, Any] = {"max_epochs": -1, "use_distributed_sampler": False}
    whole, _ = fit(rank, module_of(cls=Same), CASE, **again)
    saving = ProTrainCheckpoint(folder, every_n_train_steps=2)
    options = {**again, "max_steps": 2, "callbacks": [saving], "enable_checkpointing": True}
    fit(rank, module_of(cls=Same), CASE, **options)
    module: Any = module_of(cls=Read if cls == "Read" else Same)
    module.folder = stored
    begun: list[int] = []
    module.on_train_start = lambda: begun.append(module.global_step)
    plugins = [ProTrainCheckpointIO()]
    found, _ = fit(rank, module, CASE, Path(saving.last_model_path or saving.best_model_path), plugins=plugins, **again)
    return [*differing(whole, found), *([] if begun == [2] else [f"begun at {begun}"])]


@pytest.mark.parametrize("cls", ["Same", "Read"])
def test_folders_of_all_ranks_are_resumed(cls: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "stored")
    assert values(run_ranks(_resume_folder, 2, tmp_path, tmp_path / "saved", folder, cls)) == [[], []]


def _refused(rank: int, folder: str, cls: type[Same]) -> None:
    module = module_of(cls=cls)
    module.folder = folder  # type: ignore[attr-defined]
    fit(rank, module, CASE)


def _half_loaded(rank: int, folder: str) -> None:
    _refused(rank, folder, Same if rank == 0 else Read)


def test_ranks_that_read_beside_one_that_has_loaded_are_refused_on_all(tmp_path: Path) -> None:
    for each in run_ranks(_half_loaded, 2, tmp_path, stored(tmp_path / "stored")):
        assert "Rank 1 leaves weights to `load_rows`, rank 0 has values of all" in str(each.error)


def test_rows_of_another_shape_are_refused_on_all(tmp_path: Path) -> None:
    for each in run_ranks(_refused, 2, tmp_path, stored(tmp_path / "stored"), Wrong):
        assert "Of 'model.embedding.weight' the rows from" in str(each.error)


def test_buffers_without_values_are_refused_on_all(tmp_path: Path) -> None:
    for each in run_ranks(_refused, 2, tmp_path, stored(tmp_path / "stored"), WithoutBuffer):
        assert "The buffer 'scale' is on the meta device" in str(each.error)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There are no safetensors"):
        stored_rows(str(tmp_path))
    read = stored_rows(stored(tmp_path / "stored"))
    with pytest.raises(ValueError, match="has no 'other'"):
        read("other", 0, 1)


def _plan(rank: int, folder: str, swaps: int) -> tuple[list[str], bool]:
    test_parity.WIDTH = 128  # Of this process: there is something to swap.
    found = []
    for cls, how in ((Same, {"shard_optimizer": "world"}), (Read, ROWS)):
        module: Any = module_of(cls=cls)
        module.folder = folder
        knobs = {"num_swap_blocks": swaps, "num_checkpoint_blocks": 1, "num_persistent_chunks": 1}
        knobs |= {"num_chunk_buffers": 2, "num_keep_offloaded_blocks": 1}
        case = Case(True, divides={**how, **knobs, "plan": "auto"}, trainer={"accumulate_grad_batches": 2})
        weights, trainer = fit(rank, module, case)
        found.append(weights)
    return differing(*found), any(block.swap_bytes for block in trainer.strategy.plan.blocks)


def test_knobs_are_those_of_any_plan(tmp_path: Path) -> None:
    test_parity.WIDTH, width = 128, test_parity.WIDTH
    try:
        folder = stored(tmp_path / "stored")
    finally:
        test_parity.WIDTH = width
    assert values(run_ranks(_plan, 2, tmp_path, folder, 1)) == [([], True)] * 2


# --- the module of this package ---------------------------------------------------------------------------------------


CONFIG: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
    "num_hidden_layers": 2, "max_position_embeddings": 32,
}  # fmt: skip


def tokens() -> DataLoader[Any]:
    ids = torch.arange(8 * 9).reshape(8, 9) % 64
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return DataLoader(rows, batch_size=1)  # type: ignore[arg-type]


def _pretrained(rank: int, folder: str, case: Case, **options: Any) -> tuple[list[str], bool]:
    found = []
    for one in (case._replace(divides={"shard_optimizer": "world"}), case):
        torch.manual_seed(0)  # Of adapters.
        module: Any = CausalLMModule(folder, **options)
        module.train_dataloader = tokens
        weights, _ = fit(rank, module, one)
        found.append(weights)
    return differing(*found), hasattr(module, "load_rows")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("local_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_pretrained_model_is_read_by_rows(tied: bool, local_size: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=tied)).save_pretrained(folder)
    case = CASE._replace(local_size=local_size)
    found = values(run_ranks(_pretrained, 2 * local_size, tmp_path, str(folder), case))
    assert found == [([], True)] * (2 * local_size)


def test_adapters_are_not_read_by_rows(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    found = values(run_ranks(partial(_pretrained, lora={"r": 2}), 2, tmp_path, str(folder), CASE))
    assert found == [([], False)] * 2
