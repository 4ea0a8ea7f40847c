"""Machines divide more where their hosts are too small, and nothing where they are not, without being told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_protrain import CausalLMModule
from tests.distributed import test_row_runs
from tests.distributed.test_checkpoints import Same
from tests.distributed.test_exchange import Case, fit, module_of, trainer_of
from tests.distributed.test_overlap import differing
from tests.distributed.test_parity import Module
from tests.distributed.test_row_reading import CONFIG, Read, stored, tokens
from tests.machines import CPU
from tests.ranks import run_ranks, values

OFFLOAD: dict[str, Any] = {"plan": "offload", "sharding": "auto"}
SEARCH: dict[str, Any] = {
    "plan": "auto", "sharding": "shard", "device_memory": "60KiB", "chunk_bytes": 4096, "num_persistent_chunks": 0,
    "hardware": CPU,
}  # fmt: skip
STEPS: dict[str, Any] = {"shard_optimizer": "world", "shard_weights": "machine"}
WEIGHTS: dict[str, Any] = {"shard_weights": "world"}


def _way(module: Any, trainer: Any) -> str:
    if any(isinstance(each, DTensor) for each in module.parameters()):
        return "weights"
    return "steps" if trainer.strategy.ranks.divides_steps else "machine"


def _sizes(cls: type[Module] = Module) -> int:
    """Bytes of the weights."""
    return sum(each.nbytes for each in module_of(cls=cls).parameters())


def _try(rank: int, local_size: int, plan: dict[str, Any], share: float) -> tuple[str, list[str]]:
    """What is divided where each host has so many times the bytes of the weights; and what differs from all of it."""
    case = Case(True, local_size, divides={**plan, "sharding": "shard", **STEPS})
    expected, _ = fit(rank, module_of(), case)
    module = module_of()
    given = {**plan, "host_memory": int(share * _sizes())}
    found, trainer = fit(rank, module, case._replace(divides=given))
    return _way(module, trainer), differing(expected, found)


# Weights, gradients and two moments are four times the bytes of weights, and 2.5 times where machines divide all but
# weights, beside chunks on their way.
@pytest.mark.parametrize(("share", "way"), [(6.0, "machine"), (3.8, "steps")])
@pytest.mark.parametrize(("plan", "local_size"), [(SEARCH, 1), (OFFLOAD, 2)], ids=["search", "offload"])
def test_steps_are_divided_where_hosts_are_too_small(
    local_size: int, share: float, way: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    number = 2 * local_size
    assert values(run_ranks(_try, number, tmp_path, local_size, plan, share)) == [(way, [])] * number


def _read(rank: int, folder: str, local_size: int, share: float, how: dict[str, Any]) -> tuple[str, list[str], bool]:
    """The same for weights that a module leaves where they are; and whether some rank has read all of them."""
    case = Case(True, local_size, divides={"plan": "offload", **(how or STEPS)})
    expected, _ = fit(rank, module_of(cls=Same), case)
    module: Any = module_of(cls=Read)
    module.folder = folder
    given = {"plan": "offload", "sharding": "auto", "host_memory": int(share * _sizes(Same)), **how}
    found, trainer = fit(rank, module, case._replace(divides=given))
    whole = {name: (0, each.shape[0]) for name, each in module_of(cls=Same).named_parameters()}
    return _way(module, trainer), differing(expected, found), module.asked.items() >= whole.items()


@pytest.mark.parametrize("local_size", [1, 2])
@pytest.mark.parametrize(("share", "way"), [(6.0, "machine"), (3.8, "steps"), (3.43, "weights")])
def test_weights_are_read_when_it_is_known_who_holds_them(
    share: float, way: str, local_size: int, tmp_path: Path
) -> None:
    number, folder = 2 * local_size, stored(tmp_path / "stored")
    found = values(run_ranks(_read, number, tmp_path, folder, local_size, share, {}))
    reads = [way != "weights" and rank % local_size == 0 for rank in range(number)]
    assert found == [(way, [], each) for each in reads]


@pytest.mark.parametrize("how", [{"sharding": "replicate"}, {"plan": "resident", "sharding": "auto"}], ids=str)
def test_what_is_not_shared_is_read_on_every_rank(how: dict[str, Any], tmp_path: Path) -> None:
    folder = stored(tmp_path / "stored")
    found = values(run_ranks(_read, 4, tmp_path, folder, 2, 9.0, how))
    assert found == [("machine", [], True)] * 4


def _pretrained(rank: int, folder: str, share: float, weights: int) -> tuple[str, list[str], bool]:
    found = []
    for how in ({"plan": "offload", **STEPS}, {"plan": "offload", "host_memory": int(share * weights)}):
        module: Any = CausalLMModule(folder)
        module.train_dataloader = tokens
        trained, trainer = fit(rank, module, Case(True, divides=how), max_steps=2)
        found.append(trained)
    return _way(module, trainer), differing(*found), hasattr(module, "load_rows")


@pytest.mark.parametrize(
    ("share", "way", "reads"),
    [(3.8, "steps", False), (3.0, "steps", True), (2.45, "weights", True)],
)
def test_a_pretrained_model_is_left_where_it_is_if_it_may_not_fit(
    share: float, way: str, reads: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "num_hidden_layers": 16}))
    model.save_pretrained(folder)
    weights = sum(each.nbytes for each in model.parameters())
    assert values(run_ranks(_pretrained, 2, tmp_path, str(folder), share, weights)) == [(way, [], reads)] * 2


class Watched(test_row_runs.Watched, Read):
    """Is tested, on weights that it reads."""


def _again(rank: int, folder: str) -> list[Any]:
    """What is divided in a fit and in a test and a fit of the same model after it; and the loss."""
    found: list[Any] = []
    for how in (WEIGHTS, {"sharding": "auto", "host_memory": int(3.43 * _sizes(Same))}):
        module: Any = module_of(cls=Watched)
        module.folder = folder
        _, trainer = fit(rank, module, Case(True, divides=how))
        ways = [_way(module, trainer)]
        (tested,) = trainer.test(module, verbose=False)
        ways.append(_way(module, trainer))
        trainer.fit_loop.epoch_loop.max_steps = 6
        trainer.fit(module)
        found.append((ways, tested["loss"], _way(module, trainer)))
    return found


def test_what_has_been_divided_stays_so(tmp_path: Path) -> None:
    for one, other in values(run_ranks(_again, 2, tmp_path, stored(tmp_path / "stored"))):
        assert one == other
        assert [*one[0], one[2]] == ["weights"] * 3


def _evaluated(rank: int, folder: str) -> tuple[str, float]:
    module: Any = module_of(cls=Watched)
    module.folder = folder
    case = Case(True, divides={"sharding": "auto", "host_memory": int(0.9 * _sizes(Same))})
    trainer = trainer_of(rank, module, case)
    (found,) = trainer.test(module, verbose=False)
    return _way(module, trainer), found["loss"]


def test_an_evaluation_divides_weights_as_well(tmp_path: Path) -> None:
    folder = stored(tmp_path / "stored")
    whole: Any = module_of(cls=Same)
    expected = [whole.training_step([rows]).item() for rows in Watched.test_dataloader(whole).dataset.tensors]
    found = values(run_ranks(_evaluated, 2, tmp_path, folder))
    assert [way for way, _ in found] == ["weights"] * 2
    assert [loss for _, loss in found] == pytest.approx(expected * 2)


def _refused(rank: int, how: dict[str, Any]) -> None:
    module = module_of()
    module.automatic_optimization = "manual" not in how
    given = {"sharding": "auto", "host_memory": _sizes(), **how}
    given.pop("manual", None)
    fit(rank, module, Case(True, divides=given))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "The plan needs .* of host memory"),
    ({"shard_optimizer": "machine", "shard_weights": "machine"}, "The plan needs .* of host memory"),
    ({"sharding": "replicate"}, "The plan needs .* of host memory"),
    ({"overlap_optimizer": "forward"}, "Machines cannot divide weights: .*overlap_optimizer='forward'"),
    ({"manual": True}, "Machines cannot divide weights: .*manual optimization"),
    (SEARCH, "All weights are on each machine until they are placed"),
    ({**SEARCH, "shard_weights": "machine"}, 'shard_weights="world" divides the weights among the machines, too'),
]


@pytest.mark.parametrize(("how", "message"), REFUSED)
def test_where_nothing_more_can_be_divided_that_is_said(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    for each in run_ranks(_refused, 2, tmp_path, how):
        assert re.search(message, str(each.error))
