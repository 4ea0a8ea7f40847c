"""The same tokens give the same metrics on any number of ranks, in any batches, in any order."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MetricCollection

from lightning_protrain.models.metrics import (
    AcceptanceLength,
    AcceptanceRate,
    BitsPerByte,
    Perplexity,
    TokenAccuracy,
    TokenLoss,
    WeightedAccuracy,
)
from tests.support.ranks import kill_this_rank, run_ranks, trainer_on_rank, values

NUM_ROWS = 23
WORLDS = (1, 2, 3, 4)
ORDERS = ("as it is", "reversed", "shuffled")
SHARES = ("dealt out", "first rank gets nothing", "last rank gets all")


class Row:
    """Losses and hits of the tokens of one row; some rows have none."""

    def __init__(self, generator: random.Random, index: int) -> None:
        size = 0 if index % 5 == 2 else generator.randint(1, 40)
        self.losses = [generator.uniform(0, 12) for _ in range(size)]
        self.correct = [generator.random() < 0.3 for _ in range(size)]
        positions = generator.randint(0, 5)
        self.total = [generator.randint(0, 9) for _ in range(positions)]
        self.accepted = [generator.randint(0, count) for count in self.total]


ROWS = [Row(random.Random(index), index) for index in range(NUM_ROWS)]


def collection() -> MetricCollection:
    rates: dict[str, Any] = {f"rate_{position}": AcceptanceRate(position) for position in range(6)}
    return MetricCollection(
        {
            "loss": TokenLoss(),
            "perplexity": Perplexity(),
            "bits": BitsPerByte(),
            "accuracy": TokenAccuracy(),
            "weighted": WeightedAccuracy(),
            "length": AcceptanceLength(),
            **rates,
        },
        compute_groups=False,
    )


def update(metrics: MetricCollection, rows: list[Row]) -> None:
    """One batch."""
    losses = [loss for row in rows for loss in row.losses]
    num_correct, num_tokens = sum(sum(row.correct) for row in rows), len(losses)
    size = max((len(row.total) for row in rows), default=0)
    padded = [[each + [0] * (size - len(each)) for each in (row.accepted, row.total)] for row in rows]
    accepted, total = torch.tensor(padded, dtype=torch.int64).reshape(len(rows), 2, size).sum(0)
    metrics.update(
        loss_sum=torch.tensor(math.fsum(losses), dtype=torch.float64),
        num_tokens=num_tokens,
        num_bytes=3 * num_tokens,
        num_correct=num_correct,
        accuracy=num_correct / num_tokens if num_tokens else math.nan,
        accuracy_denom=num_tokens,
        accepted=accepted,
        total=total,
    )


def expected() -> dict[str, float]:
    losses = [loss for row in ROWS for loss in row.losses]
    mean, accuracy = math.fsum(losses) / len(losses), sum(sum(row.correct) for row in ROWS) / len(losses)
    rates = []
    for position in range(5):
        here = [row for row in ROWS if len(row.total) > position]
        rates.append(sum(row.accepted[position] for row in here) / sum(row.total[position] for row in here))
    length = sum(math.prod(rates[: position + 1]) for position in range(5))
    return {
        "loss": mean,
        "perplexity": math.exp(mean),
        "bits": mean / 3 / math.log(2),
        "accuracy": accuracy,
        "weighted": accuracy,
        "length": length,
        **{f"rate_{position}": rate for position, rate in enumerate(rates)},
    }


def ordered(order: str) -> list[Row]:
    rows = ROWS[::-1] if order == "reversed" else list(ROWS)
    if order == "shuffled":
        random.Random(0).shuffle(rows)
    return rows


def share_of(rank: int, world_size: int, rows: list[Row], share: str) -> list[Row]:
    if share == "last rank gets all":
        return rows if rank == world_size - 1 else []
    first = 1 if share == "first rank gets nothing" and world_size > 1 else 0
    return rows[rank - first :: world_size - first] if rank >= first else []


def evaluate(rank: int, world_size: int, batch_size: int, order: str, share: str) -> dict[str, float]:
    metrics = collection()
    rows = share_of(rank, world_size, ordered(order), share)
    for begin in range(0, len(rows), batch_size):
        update(metrics, rows[begin : begin + batch_size])
    return {name: value.item() for name, value in metrics.compute().items() if value is not None}


CASES = list(itertools.product((1, 3, 8, NUM_ROWS), ORDERS, SHARES))


def evaluate_all(rank: int, world_size: int) -> list[dict[str, float]]:
    return [evaluate(rank, world_size, *case) for case in CASES]


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[dict[str, float]]]]:
    """All cases on all ranks, one start for each number of ranks."""
    return {size: values(run_ranks(evaluate_all, size, tmp_path_factory.mktemp("ranks"), size)) for size in WORLDS}


@pytest.mark.sample(7)
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)).replace(" ", "_") for case in CASES])
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_same_value(by_world: dict[int, list[list[dict[str, float]]]], world_size: int, case: int) -> None:
    for results in by_world[world_size]:
        assert results[case] == pytest.approx(expected(), rel=1e-12, abs=0)  # rate_5 is absent: nobody saw it
        assert results[case] == by_world[world_size][0][case]  # the same bits on every rank


class Logging(LightningModule):
    """Its batches are indices of rows; some ranks have none."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = collection()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        update(self.metrics, [ROWS[index] for index in batch.tolist()])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics, prog_bar=True)  # type: ignore[arg-type]


class Indices(IterableDataset[int]):
    def __init__(self, indices: range) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def validate(rank: int, world_size: int, batch_size: int, folder: Path) -> list[dict[str, float]]:
    """Return the metrics that `validate` returns, that callbacks can monitor, and that a logger was given."""
    first = world_size > 2  # rank 0 has nothing then
    share = range(rank - first, NUM_ROWS, world_size - first) if rank >= first else range(0)
    logger = CSVLogger(folder, name=f"{world_size}-{batch_size}")
    trainer = trainer_on_rank(rank, world_size, logger=logger, enable_progress_bar=True)
    result = trainer.validate(Logging(), DataLoader(Indices(share), batch_size), verbose=False)[0]
    seen = [dict(result), {name: value.item() for name, value in trainer.callback_metrics.items()}]
    if rank == 0:
        logger.save()
        names, numbers = csv.reader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
        logged = dict(zip(names, map(float, numbers), strict=True))
        seen.append({name: value for name, value in logged.items() if name not in ("epoch", "step")})
    return seen


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_metric_through_lightning(world_size: int, batch_size: int, tmp_path: Path) -> None:
    for seen in values(run_ranks(validate, world_size, tmp_path, world_size, batch_size, tmp_path)):
        assert seen == [seen[0]] * len(seen)
        assert seen[0] == pytest.approx(expected(), rel=1e-12, abs=0)


def nothing_then_something(rank: int) -> list[Any]:
    metric = TokenLoss()
    seen = [metric.compute(), metric.compute() if rank == 0 else None]  # once more on one rank alone, as a progress bar
    metric.reset()
    if rank == 1:
        metric.update(6.0, 3)
    return [*seen, float(metric.compute())]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_what_is_absent_can_be_read_by_one_rank_alone(tmp_path: Path) -> None:
    assert values(run_ranks(nothing_then_something, 2, tmp_path)) == [[None, None, 2.0]] * 2


def in_mixtures(rank: int) -> list[float]:
    """Sums of 6, 12 and so on over 3 tokens; what rank 1 does besides must not change the schedule."""
    metric, shared = TokenLoss(), MetricCollection({"loss": TokenLoss(), "accuracy": TokenAccuracy()})
    metric(6.0 * (rank + 1), 3)
    if rank == 1:
        metric(0.0, 0)  # of this batch alone there is no value
        shared.update(loss_sum=0.0, num_tokens=0, num_correct=0)  # all sums alike, on this rank
        metric.set_dtype(torch.float32)
    shared.update(loss_sum=6.0, num_tokens=3, num_correct=1)
    found = [float(metric.compute()), float(metric.compute()), *map(float, shared.compute().values())]
    other = TokenLoss()
    other.update(6.0, 3)
    metric.merge_state(other)
    return [*found, float(metric.compute())]


def test_forward_merge_and_cast_in_mixtures(tmp_path: Path) -> None:
    assert values(run_ranks(in_mixtures, 2, tmp_path)) == [[3.0, 3.0, 1 / 3, 2.0, 2.5]] * 2


def not_finite(rank: int, policy: Any) -> float:
    metric = TokenLoss(nonfinite=policy)
    metric.update(6.0, 3)
    if rank == 1:
        metric.update(math.inf, 5)
    return float(metric.compute())


@pytest.mark.filterwarnings("ignore:TokenLoss")
@pytest.mark.parametrize(("policy", "value"), [("exclude", 2.0), ("keep", math.inf)])
def test_a_batch_that_is_not_finite_is_left_out_or_kept_on_all_ranks(policy: str, value: float, tmp_path: Path) -> None:
    assert values(run_ranks(not_finite, 2, tmp_path, policy)) == [value, value]


def test_a_batch_that_is_not_finite_is_fatal_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(not_finite, 3, tmp_path, "error")
    assert all("NaN or infinite values in 1 batch" in str(each.error) for each in outcomes)


def dies(rank: int) -> float:
    if rank == 1:
        kill_this_rank()
    return not_finite(rank, "exclude")


def test_a_rank_that_is_killed_leaves_nobody_waiting(tmp_path: Path) -> None:
    outcomes = run_ranks(dies, 3, tmp_path)
    assert outcomes[1].error == "killed"
    assert all(each.error and each.error != "hangs" for each in (outcomes[0], outcomes[2]))
