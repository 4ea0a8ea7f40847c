"""The host runs ahead of the GPU: a step waits for it no more often than a plain one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.cuda.marks import CUDA, needs_gpu
from tests.support.gpus import DEVICE, STAND_IN
from tests.support.models import LanguageModel, Mlp, ParityModule, fit
from tests.support.tiny_networks import tiny_config

pytestmark = [CUDA, needs_gpu]


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield the operators for which the host waits in this context: reading a value, or copies of pageable memory."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [str(each.message) for each in shown if "synchronizing" in str(each.message)]


class Counter(L.Callback):
    """Counts the waits of each batch but the first ones."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *given: Any) -> None:
        self.counting = waits()
        self.found = self.counting.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *given: Any) -> None:
        self.counting.__exit__(None, None, None)
        self.counts.append(len(self.found))


def counted(module: L.LightningModule, strategy: Any, **options: Any) -> list[int]:
    counter = Counter()
    fit(module, accelerator=DEVICE, strategy=strategy, callbacks=[counter], **options)
    return counter.counts[3:]


def in_steps(strategy: Any, **options: Any) -> list[int]:
    torch.manual_seed(0)
    module = ParityModule(LanguageModel([Mlp() for _ in range(4)]), optimizer="adamw")
    module.train_dataloader = lambda: DataLoader(torch.arange(6 * 4 * 8).view(6, 1, 4, 8) % 31, batch_size=None)
    return counted(module, strategy, **options)


@pytest.mark.parametrize(
    ("overlap", "options"),
    [
        ("off", {}),
        ("backward", {}),
        ("forward", {}),
        ("off", {"gradient_clip_val": 1.0}),
        ("auto", {"gradient_clip_val": 1.0}),
    ],
)
@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_a_step_waits_as_often_as_a_plain_one(plan: Any, overlap: Any, options: dict[str, Any]) -> None:
    plain = in_steps("auto", **options)
    assert in_steps(ProTrainStrategy(plan=plan, overlap_optimizer=overlap, monitor=False), **options) == plain
    assert not STAND_IN or plain == [0, 0, 0]


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_the_host_waits_for_the_spans_of_packed_rows_and_the_number_of_labels(plan: Any) -> None:
    row = {"input_ids": torch.arange(24)[None] % 31, "position_ids": torch.arange(8).repeat(3)[None]}
    batch = {**row, "labels": row["input_ids"]}
    module = CausalLMModule(config=tiny_config("llama"), warmup_steps=0)
    module.train_dataloader = lambda: DataLoader([batch] * 6, batch_size=None)
    assert counted(module, ProTrainStrategy(plan=plan, monitor=False), limit_val_batches=0) == [
        3,
        3,
        3,
    ]  # 1 of transformers.


def test_a_wait_is_counted() -> None:
    with waits() as found:
        torch.ones(3, device=DEVICE).sum().item()
    assert len(found) == 1
