"""A training step that talks to other ranks is profiled on rank 0 alone, and the ranks train as they would without."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as differentiable
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_protrain import ProTrainStrategy, rank_store
from lightning_protrain.models.loading import load_once
from lightning_protrain.strategy import profile_step
from tests.support.machines import CPU
from tests.support.ranks import run_ranks, trainer_on_rank, values

WIDTH, VOCABULARY, LAYERS = 32, 19, 4
Step = Callable[["Talking", Tensor, Tensor], Tensor | None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)
    )


class Talking(L.LightningModule):
    """Talks to the other ranks in its training step."""

    def __init__(self, talk: Step, outline: bool = False) -> None:
        super().__init__()
        self.talk, self.outline, self.losses = talk, outline, list[float]()
        self.model = None if outline else network()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = load_once(self.trainer, network, network)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        embedding, layers, head = self.model
        (tokens,) = batch
        hidden = embedding(tokens[:, :-1])
        for layer in layers:
            hidden = layer(hidden)
        loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        other = self.talk(self, hidden, loss)
        loss = loss if other is None else other
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        self.trainer.strategy.barrier()  # As where rank 0 downloads the data.
        tokens = torch.randint(VOCABULARY, (16, 65), generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(tokens), batch_size=4)

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        dist.all_reduce(torch.ones(1))
        return batch


def every_rank(module: Talking, hidden: Tensor, loss: Tensor) -> Tensor | None:
    """Counts who takes part, in every way there is, and decides upon it."""
    count = torch.ones((), dtype=torch.long)
    dist.all_reduce(count)
    found = module.trainer.strategy.reduce(torch.ones(()), reduce_op="sum")
    assert module.all_gather(count).shape == (2,)
    assert [each.shape for each in gather_all_tensors(hidden.detach())] == [hidden.shape] * 2
    told: list[Any] = [None, None]
    dist.all_gather_object(told, {"rank": module.global_rank})
    assert all(isinstance(each["rank"], int) for each in told)
    objects = [{"seed": 3} if module.global_rank == 0 else None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [{"seed": 3}]
    assert module.trainer.strategy.broadcast(module.global_rank) == 0
    module.trainer.strategy.barrier()
    dist.barrier()
    if int(count) > 0:
        return loss * found / 2
    return None


def gathered_negatives(module: Talking, hidden: Tensor, loss: Tensor) -> Tensor:
    """Gradients go through what is gathered."""
    mean = hidden.mean(1)
    whole = module.all_gather(mean, sync_grads=True).flatten(0, 1)
    assert whole.shape == (2 * mean.shape[0], WIDTH)
    whole = whole + torch.cat(differentiable.all_gather(mean)) + differentiable.all_reduce(mean).repeat(2, 1)
    return loss + (mean @ whole.T).logsumexp(1).mean()


def tensors_into_tensors(module: Talking, hidden: Tensor, loss: Tensor) -> None:
    """The others, on tensors with and without values, in a group of its own."""
    group = module.trainer.strategy._sync.mesh.meeting
    for part in (hidden.detach().mean((0, 1)), torch.arange(WIDTH)):
        whole = part.new_zeros(2 * WIDTH)
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(torch.empty_like(part), whole, group=group)
        dist.all_to_all_single(torch.empty_like(part), part, group=group)
        dist.all_to_all([part.new_empty(WIDTH // 2) for _ in range(2)], list(part.chunk(2)), group=group)
        dist.reduce(part.clone(), 0, group=group)
        dist.broadcast(part.clone(), 0, group=group)
        dist.all_gather([torch.empty_like(part) for _ in range(2)], part, group=group, async_op=True).wait()
        first = module.global_rank == 0
        dist.gather(part, [torch.empty_like(part) for _ in range(2)] if first else None, group=group)
        dist.scatter(torch.empty_like(part), [part, part] if first else None, group=group)
        dist.send(part, 1, group=group) if first else dist.recv(torch.empty_like(part), 0, group=group)


def values_needed(module: Talking, hidden: Tensor, loss: Tensor) -> Tensor:
    """The step is measured with real tensors."""
    chosen = loss.detach().clone()
    dist.all_reduce(chosen)
    return loss if float(chosen) > 0 else 2 * loss


def from_rank_1(module: Talking, hidden: Tensor, loss: Tensor) -> None:
    dist.broadcast_object_list([None], 1)


def functional_collective(module: Talking, hidden: Tensor, loss: Tensor) -> None:
    assert functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).tolist() == [2, 2, 2]


def own_group(module: Talking, hidden: Tensor, loss: Tensor) -> None:
    dist.all_reduce(torch.ones(1), group=dist.new_group())


ANSWERED = {each.__name__: each for each in (every_rank, gathered_negatives, tensors_into_tensors, values_needed)}
REFUSED = {each.__name__: each for each in (from_rank_1, functional_collective, own_group)}
SENTENCES = {
    "from_rank_1": "where the result of c10d.broadcast_.default is unknown",
    "functional_collective": "where the result of _c10d_functional.all_reduce.default is unknown",
    "own_group": "makes a process group, but is profiled on rank 0 alone. Make the group in `setup`.",
}


def train(rank: int, name: str, outline: bool) -> tuple[tuple[float, int], bool, str]:
    """Returns the loss and the budget, whether the plan was searched for, and what was said of the profile."""
    said: list[str] = []
    profile_step.rank_zero_info = said.append
    torch.manual_seed(0)
    module = Talking((ANSWERED | REFUSED)[name], outline)

    def strategy(**process: Any) -> ProTrainStrategy:
        return ProTrainStrategy(device_memory="1MiB", hardware=CPU, monitor=False, **process)

    trainer = trainer_on_rank(rank, 2, kind=strategy, max_steps=2, use_distributed_sampler=False)
    trainer.fit(module)
    plan, budget = trainer.strategy.plan, trainer.strategy.budget
    return (float(trainer.callback_metrics["loss"]), budget), plan.prediction is not None, "".join(said)


@pytest.mark.parametrize(("name", "outline"), [(name, number % 2 == 1) for number, name in enumerate(ANSWERED)])
def test_a_step_that_talks_to_other_ranks_is_profiled(name: str, outline: bool, tmp_path: Path) -> None:
    first, second = values(run_ranks(train, 2, tmp_path, name, outline))
    assert first[:2] == second[:2]
    assert first[1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_rank_0_cannot_know_is_named_on_every_rank_where_a_budget_is_given(name: str, tmp_path: Path) -> None:
    outcomes = run_ranks(train, 2, tmp_path, name, True)
    assert all(SENTENCES[name] in str(each.error) for each in outcomes), outcomes


def wait_for_profile(rank: int, ends: bool) -> list[str]:
    """Returns what this rank warns of while rank 0 sleeps in its profile, after which it ends or goes on."""
    rank_store._SLOW = 0.5

    def sleep(module: Talking, hidden: Tensor, loss: Tensor) -> None:
        if type(hidden) is not Tensor:
            time.sleep(3)
            if ends:
                raise KeyError("a bug")

    def strategy(**process: Any) -> ProTrainStrategy:
        return ProTrainStrategy(num_swap_blocks=1, hardware=CPU, monitor=False, **process)

    trainer = trainer_on_rank(rank, 2, kind=strategy, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Talking(sleep))
    return [str(each.message) for each in caught if "has waited" in str(each.message)]


def test_a_long_wait_in_set_up_names_itself_and_the_rank(tmp_path: Path) -> None:
    first, second = values(run_ranks(wait_for_profile, 2, tmp_path, False))
    assert first == []
    assert len(second) >= 2
    assert {re.sub(r"\d+ s", "1 s", each) for each in second} == {
        "Rank 1 has waited 1 s for rank 0 (profiling a training step)."
    }


def test_what_ends_the_profile_of_rank_0_ends_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(wait_for_profile, 2, tmp_path, True)
    assert first.error is not None
    assert first.error.startswith("KeyError: 'a bug'")
    assert second.error == (
        "FailedElsewhere: Profiling a training step failed on rank 0 (KeyError: 'a bug'); rank 1 stops with it."
    )
