"""What users do besides a plain training loop has the same result as under DDP for every placement, or is refused."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.rank_models import VOCABULARY, WIDTH, Module, strategy_of
from tests.support.ranks import run_ranks, trainer_on_rank, values

STEPS = 4


class Plain(Module):
    """The module of the parity tests; knows its rank."""

    def __init__(self, rank: int = 0, kind: str = "full") -> None:
        super().__init__(kind)
        self.rank = rank


class TwoBackwards(Plain):
    """Two backwards in one step of manual optimization."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for row in batch[0].split(1):
            self.manual_backward(super().training_step([row]))
        optimizer.step()


class Toggled(Plain):
    """A module with two optimizers that take turns; weights of the other one have no gradients meanwhile."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = self.model.layers[1].parameters(), [*self.model.layers[0].parameters(), *self.model.head.parameters()]
        return [torch.optim.AdamW(part, lr=1e-2) for part in parts]


class Unused(Plain):
    """One block is used on rank 0 only, and another one nowhere; without gradients nothing decays."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        hidden = self.model.embedding(tokens[:, :-1])
        for index in [0, 1] if self.rank == 0 else [0]:
            hidden = self.model.layers[index](hidden)
        return nn.functional.cross_entropy(self.model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class Penalised(Plain):
    """Every weight is used a second time, outside of its block."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        return loss + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


class Validated(Plain):
    """Ranks have different numbers of batches to validate; afterwards they train on."""

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("loss", Module.training_step(self, batch), sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(4))
        return DataLoader(TensorDataset(tokens[: 2 + 4 * self.rank]), batch_size=2)


EVERYWHERE = ("resident", "replicate", "shard", "shard half")


@dataclass(frozen=True)
class Case:
    """A module, and what is said to the Trainer, to both strategies, and to ours."""

    module: Callable[[int], Module]
    placements: tuple[str, ...] = EVERYWHERE
    trainer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    exact: tuple[str, ...] = (*EVERYWHERE, "replicate half")


UNUSED: dict[str, Any] = {"find_unused_parameters": True}
BEHIND = ("replicate", "replicate half", "shard", "shard half")
CASES = {
    "two backwards": Case(TwoBackwards, exact=("resident", "replicate")),
    "toggled": Case(Toggled, ddp=UNUSED),
    "unused": Case(Unused, (*EVERYWHERE, "replicate half"), ddp=UNUSED),
    "unused, accumulated": Case(Unused, ddp=UNUSED, trainer={"accumulate_grad_batches": 3}),
    "penalised": Case(Penalised),
    "penalised, accumulated": Case(Penalised, trainer={"accumulate_grad_batches": 2}),
    "unused, behind backward": Case(
        Unused,
        BEHIND,
        ddp=UNUSED,
        trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        ours={"overlap_optimizer": "backward"},
        exact=BEHIND,
    ),
    "clipped values": Case(Plain, trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "mixed precision": Case(Plain, trainer={"precision": "bf16-mixed"}),
    "mixed precision, clipped": Case(Plain, trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "static graph": Case(Plain, ddp={"static_graph": True}),
}


def kind_of(placement: str, module: nn.Module, case: Case) -> Callable[..., Any]:
    if placement == "ddp":
        return partial(DDPStrategy, **case.ddp)
    return lambda **process: strategy_of(placement, module, **case.ddp, **case.ours, **process)


def train(rank: int, placement: str, case: Case) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    module = case.module(rank)
    options = {"max_steps": STEPS, **case.trainer}
    trainer = trainer_on_rank(rank, 2, kind=kind_of(placement, module, case), **options)
    trainer.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, trainer


def _compare(rank: int, names: list[str]) -> list[str]:
    """Return the differences from DDP, by case and placement."""
    torch.set_num_threads(1)
    wrong = []
    for name in names:
        case = CASES[name]
        expected, _ = train(rank, "ddp", case)
        for placement in case.placements:
            found, _ = train(rank, placement, case)
            for key, value in expected.items():
                same = torch.equal if placement in case.exact else partial(torch.allclose, rtol=1e-4, atol=1e-6)
                if not same(value, found[key]):
                    difference = float((value - found[key]).abs().max())
                    wrong.append(f"{name}, {placement}: {key} differs by {difference:.1e}")
                    break
    return wrong


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "names",
    [
        ["two backwards", "toggled"],
        ["unused", "unused, accumulated"],
        ["penalised", "penalised, accumulated"],
        ["static graph", "unused, behind backward"],
        ["clipped values", "mixed precision", "mixed precision, clipped"],
    ],
    ids=lambda names: names[0],
)
def test_ranks_do_as_ddp_does(names: list[str], tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 2, tmp_path, names)) == [[], []]


def _shrink(rank: int) -> list[Any]:
    """Return collectives, bytes sent and the largest error of weights, by placement and `reduce_dtype`."""
    found = []
    case = Case(Plain)
    exact, _ = train(rank, "replicate", case)
    for placement in ("replicate", "shard"):
        sent = []
        for dtype in (None, "float32", "bfloat16"):
            weights, trainer = train(rank, placement, Case(Plain, ours={"reduce_dtype": dtype}))
            largest = max(float((exact[name] - value).abs().max()) for name, value in weights.items())
            counters = trainer.strategy.counters
            meeting = 4  # Bytes: the ranks meet when the plan is applied, and never in a step.
            sent.append((counters.collectives, counters.communicated_bytes - meeting, largest))
        found.append(sent)
    return found


def test_gradients_in_half_the_bits_are_half_the_bytes(tmp_path: Path) -> None:
    first, second = values(run_ranks(_shrink, 2, tmp_path))
    assert first == second
    for whole, same, half_of_it in first:
        assert whole == same
        assert whole[2] == 0.0
        assert half_of_it[:2] == (whole[0], whole[1] // 2)
        # AdamW moves a weight by the learning rate in a step at most, wherever rounding turns a gradient's sign.
        assert 0 < half_of_it[2] < 2 * STEPS * 1e-2


class Sparse(Plain):
    """Gradients of the embedding are sparse."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.model.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train_sparse(rank: int) -> list[str]:
    found = []
    for placement in ("replicate", "shard", "resident"):
        try:
            train(rank, placement, Case(Sparse))
            found.append("")
        except RuntimeError as error:
            found.append(str(error).partition(", which")[0])
    return found


def test_sparse_gradients_of_streamed_weights_are_refused(tmp_path: Path) -> None:
    refusal = "The gradient of 'model.embedding.weight' is sparse, and its chunk is streamed on several ranks"
    assert values(run_ranks(_train_sparse, 2, tmp_path)) == [[refusal, refusal, ""]] * 2


def _validate(rank: int) -> list[Any]:
    found = []
    for placement in ("ddp", "resident", "replicate", "shard", "shard half"):
        case = Case(Validated, trainer={"val_check_interval": 2, "num_sanity_val_steps": 0})
        weights, trainer = train(rank, placement, case) if placement != "ddp" else train(rank, "resident", Case(Plain))
        loss = trainer.callback_metrics.get("loss")
        found.append((None if loss is None else loss.item(), [value.tolist() for value in weights.values()]))
    return found


def test_ranks_may_validate_different_numbers_of_batches(tmp_path: Path) -> None:
    first, second = values(run_ranks(_validate, 2, tmp_path))
    assert first == second
    (_, plain), *others = first
    assert {loss for loss, _ in others} == {others[0][0]}
    assert isinstance(others[0][0], float)
    assert all(weights == plain for _, weights in others)


class Wide(Plain):
    """About 130 MB of weights, and hardly any activations."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.model.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(8))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        hidden = batch[0].float().mean() * torch.ones(1, 2048)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def _held_bytes() -> Tensor:
    """Return the memory of this process with its part of shared memory, and this part alone, bytes.

    Libraries do not count. Linux only.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # What is freed and kept by the allocator is nobody's.
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":") for line in lines[1:])
    alone, shared = (1024 * int(found[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return torch.tensor([alone + shared, shared])


def _grow(rank: int, world_size: int, placement: str, kind: type[Plain]) -> Tensor:
    """Return the growth of this rank's memory from before the module was made until after two steps, bytes."""
    dist.barrier()
    before = _held_bytes()
    dist.barrier()
    found: list[Tensor] = []

    class Measured(kind):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, *_: Any) -> None:
            dist.barrier()
            found.append(_held_bytes() - before)
            dist.barrier()

    module = Measured(rank)
    trainer = trainer_on_rank(rank, world_size, kind=kind_of(placement, module, Case(Plain)), max_steps=2)
    trainer.fit(module)
    return found[-1]


def _measure(rank: int, world_size: int, placement: str) -> list[int]:
    """Return the growth for the wide module, less the growth for the plain module."""
    torch.set_num_threads(1)
    _, beside, whole = (_grow(rank, world_size, placement, kind) for kind in (Plain, Plain, Wide))
    return (whole - beside).tolist()


@pytest.mark.slow
def test_a_node_of_four_ranks_holds_one_copy(tmp_path: Path) -> None:
    weights = sum(parameter.nbytes for parameter in Wide(0).parameters())
    found = values(run_ranks(_measure, 4, tmp_path, 4, "shard"))
    total, shared = (sum(parts) for parts in zip(*found, strict=True))
    assert 0.99 * weights <= shared <= 1.01 * weights
    # Gradients and momentum are with their owners; a process keeps some memory beside them, of whatever size they are.
    assert total - shared <= 1.05 * 2 * weights + 4 * 4 * 2**20
