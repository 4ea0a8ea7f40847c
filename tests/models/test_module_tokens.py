"""The token-true loss: one optimizer step is the same however its rows fall into batches and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from lightning_protrain.data.batches.loader import WEIGHT_UNITS, Batch, BatchRow, Collator, TrainLoader
from lightning_protrain.data.batches.pack import pack, single_blocks
from lightning_protrain.data.batches.sampler import EpochSampler
from lightning_protrain.models.module import CausalLMModule
from tests.support.encoded_rows import encoded
from tests.support.tiny_networks import tiny_config
from tests.support.trainers import QUIET, SILENT

CONFIG = tiny_config("llama")
# From none to all tokens trained.
ROWS = [encoded(6 + index, index, trained=np.arange(6 + index) < (6 + index) * index / 11) for index in range(12)]
LENGTHS = np.array([len(row) for row in ROWS])


class Plain(CausalLMModule):
    """A module with plain gradient descent, so that differences of gradients are differences of weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Twelve(LightningDataModule):
    def __init__(self, batch_size: int, weights: bool = False, packing: bool = False) -> None:
        super().__init__()
        self.batch_size, self.weights, self.packing = batch_size, weights, packing

    def train_dataloader(self) -> TrainLoader:
        trainer = self.trainer
        sampler = EpochSampler(
            pack(LENGTHS, 64) if self.packing else single_blocks(LENGTHS),
            self.batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        rows = [weighted(row, index) for index, row in enumerate(ROWS)] if self.weights else ROWS
        return TrainLoader(rows, sampler, Collator(0, 64, weighted=self.weights), trainer=trainer)


def weighted(row: Any, index: int) -> Any:
    weights = np.where(np.arange(len(row)) % 2, 0.25, float(index)).astype(np.float32)
    return encoded(len(row), index, trained=row.trained, weights=weights)


def built(**options: Any) -> Plain:
    torch.manual_seed(0)
    module = Plain(config=CONFIG, **options)
    module.configure_model()
    return module


def fitted(batch_size: int, module: Plain | None = None, **options: Any) -> tuple[dict[str, Tensor], float]:
    """Parameters after the epoch, and the last logged loss."""
    data = {name: options.pop(name) for name in ("weights", "packing") if name in options}
    module = built() if module is None else module
    options = {"devices": 1, "max_epochs": 1, "enable_checkpointing": False, **options}
    trainer = Trainer(accelerator="cpu", **SILENT, **options)
    trainer.fit(module, Twelve(batch_size, **data))
    return {name: value.clone() for name, value in module.state_dict().items()}, float(
        trainer.callback_metrics["train_loss"]
    )


def mean_loss(module: CausalLMModule, weights: bool = False) -> float:
    """The mean over all trained tokens, from the logits of transformers."""
    total, count = 0.0, 0.0
    for index, row in enumerate(ROWS):
        batch = Collator(0, 64, weighted=weights)([BatchRow((weighted(row, index) if weights else row,))])
        logits = module.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="none").double()
        factors = batch["loss_weights"][0, 1:] / WEIGHT_UNITS if weights else (labels != -100).double()
        total, count = total + float(losses.detach() @ factors.double()), count + float(factors.sum())
    return total / count


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_micro_batches_make_the_step_of_one_batch(batch_size: int, weights: bool) -> None:
    expected, loss = fitted(12, weights=weights)
    assert loss == pytest.approx(mean_loss(built(), weights), rel=1e-5)
    # Five rows a batch leave a window of three with two in the last; a window of 20 is never full.
    for accumulate in (-(-12 // batch_size), 20):
        parameters, logged = fitted(batch_size, accumulate_grad_batches=accumulate, weights=weights)
        close(expected, parameters)
        assert logged == pytest.approx(loss, rel=1e-5)


def test_a_mean_of_means_would_fail() -> None:
    """The rows are so unlike that the comparison above can tell."""
    expected, _ = fitted(12)
    module = built()
    module._share_of_window = lambda loss_sum, batch, batch_idx: loss_sum / max(scored(batch), 1)
    module.log = lambda *args, **options: None
    Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, accumulate_grad_batches=3, **SILENT
    ).fit(module, Twelve(4))
    with pytest.raises(AssertionError, match="not close"):
        close(expected, module.state_dict())


def scored(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def test_packed_rows_make_the_step_of_single_ones() -> None:
    expected, loss = fitted(12)
    parameters, logged = fitted(1, packing=True, accumulate_grad_batches=4)
    close(expected, parameters)
    assert logged == pytest.approx(loss, rel=1e-5)


def window(batch_size: int, *batches: int) -> Batch:
    """The rows of some batches of the first epoch, as one batch."""
    order = EpochSampler(single_blocks(LENGTHS), batch_size).batches(0)
    return Collator(0, 64)([BatchRow((ROWS[index],)) for number in batches for index in order[number]])


def test_a_window_of_one_batch_is_what_it_was_bitwise() -> None:
    batch = window(12, 0)
    before = built()
    before.log = lambda *args, **options: None
    before.training_step(batch).backward()
    torch.optim.SGD(before.parameters(), lr=1.0).step()
    after, _ = fitted(12)
    assert all(torch.equal(after[name], value) for name, value in before.state_dict().items())


def test_two_windows_are_two_steps() -> None:
    """The count of the first window is not that of the second, nor of a second fit."""
    module = built()
    fitted(3, module, accumulate_grad_batches=2)
    fitted(3, module, accumulate_grad_batches=2)
    again = built()
    for _ in range(2):
        for batches in ((0, 1), (2, 3)):
            again.log = lambda *args, **options: None
            again.zero_grad()
            again.training_step(window(3, *batches)).backward()
            torch.optim.SGD(again.parameters(), lr=1.0).step()
    close(again.state_dict(), module.state_dict())


def test_a_second_fit_counts_anew() -> None:
    """The first window of the second fit has the same number as the last window of the first fit."""
    module = built()
    fitted(6, module, limit_train_batches=1)
    again = built()
    again.load_state_dict(module.state_dict())
    expected, loss = fitted(12, again)
    parameters, logged = fitted(12, module)
    close(expected, parameters)
    assert logged == pytest.approx(loss)


@pytest.mark.parametrize("weights", [False, True])
def test_a_batch_without_trained_tokens_is_a_zero_with_a_graph(weights: bool) -> None:
    module = built()
    module.log = lambda *args, **options: None
    rows = [BatchRow((weighted(row, 1) if weights else row,)) for row in (ROWS[2].untrained(), ROWS[3].untrained())]
    loss = module.training_step(Collator(0, 64, weighted=weights)(rows))
    assert loss.item() == 0
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_weights_matter_and_are_normalised() -> None:
    plain, _ = fitted(12)
    changed, _ = fitted(12, weights=True)
    assert any(not torch.allclose(plain[name], changed[name], atol=1e-4) for name in plain)
    batch = Collator(0, 64, weighted=True)([BatchRow((weighted(row, index),)) for index, row in enumerate(ROWS)])
    module = built()
    module.log = lambda *args, **options: None
    loss = module.training_step(batch)
    torch.testing.assert_close(module.training_step({**batch, "loss_weights": batch["loss_weights"] // 1000}), loss)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_weights_reach_the_loss_unrounded_in_every_precision(precision: str) -> None:
    row = encoded(12, weights=np.full(12, 0.3, np.float32), trained=np.arange(12) > 4)
    batch = Collator(0, 64, weighted=True)([BatchRow((row,))])
    trainer = Trainer(accelerator="cpu", devices=1, precision=precision, logger=False, enable_checkpointing=False)
    given = trainer.precision_plugin.convert_input(batch)
    weights = given["loss_weights"][given["labels"] != -100].float() / WEIGHT_UNITS
    assert (weights == np.float32(0.3)).all()


def test_no_copy_of_all_logits_is_made() -> None:
    """A batch is flattened into one row for flash attention alone, and what the head gives is viewed, not copied."""
    module = built(loss_chunk_tokens=None)
    batch = Collator(0, 64)([BatchRow((row,), packed=True) for row in ROWS])
    inside: list[Tensor] = []
    module.model.register_forward_hook(lambda _, args, output: inside.append(output.logits))
    scores, _, _ = module._scores(batch)
    assert scores.data_ptr() == inside[0].data_ptr()
    module.model.config._attn_implementation_internal = "flash_attention_2"
    shapes: list[torch.Size] = []

    def one_row(input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        shapes.append(input_ids.shape)
        module.model.config._attn_implementation_internal = "sdpa"
        return type(module.model).forward(module.model, input_ids, position_ids=position_ids, use_cache=use_cache)

    module.model.forward = one_row
    flattened, _, _ = module._scores(batch)
    assert shapes == [torch.Size((1, batch["input_ids"].numel()))]
    torch.testing.assert_close(flattened, scores)


def test_packing_for_a_model_that_mixes_segments_is_refused_before_it_is_built() -> None:
    module = CausalLMModule(config=tiny_config("opt"))
    with pytest.raises(ValueError, match="'opt' is not known to"):
        Trainer(accelerator="cpu", **QUIET).fit(module, Twelve(4, packing=True))
    assert module.model is None


class Counting(Plain):
    """Writes down the integers that are reduced, and what it logs; rank 0 keeps its parameters."""

    def on_train_start(self) -> None:
        self.reduced: list[int] = []
        self.local: list[int] = []
        reduce = torch.distributed.all_reduce

        def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
            result = reduce(tensor, *args, **options)
            if tensor.dtype == torch.int64:
                self.reduced.append(int(tensor))
            return result

        torch.distributed.all_reduce = counted

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.local.append(int(batch["trained_tokens"]))

    def on_train_end(self) -> None:
        found = {
            "reduced": self.reduced,
            "local": self.local,
            "loss": float(self.trainer.callback_metrics["train_loss"]),
        }
        Path(f"rank{self.trainer.global_rank}.json").write_text(json.dumps(found))
        if self.trainer.global_rank == 0:
            torch.save(self.state_dict(), "parameters.pt")


@pytest.mark.parametrize(("batch_size", "accumulate"), [(6, 1), (2, 3), (1, 20), (5, 2)])
def test_two_ranks_make_the_step_of_one_with_one_reduction(batch_size: int, accumulate: int) -> None:
    expected, loss = fitted(12)
    torch.manual_seed(0)
    module = Counting(config=CONFIG)
    module.configure_model()
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        max_epochs=1,
        enable_checkpointing=False,
        accumulate_grad_batches=accumulate,
        **SILENT,
    ).fit(module, Twelve(batch_size))
    close(expected, torch.load("parameters.pt", weights_only=True))
    ranks = [json.loads(Path(f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(len(set(found["local"])) == 1 for found in ranks), "the reduction must leave the batch alone"
    assert sum(found["local"][0] for found in ranks) == sum(row.num_trained for row in ROWS)
    for found in ranks:
        assert found["reduced"] == [sum(row.num_trained for row in ROWS)]
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
