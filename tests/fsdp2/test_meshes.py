"""FSDP2 over nodes: the mesh and the blocks that recompute follow the memory, and plans predict it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_protrain.fsdp2.planning
from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from lightning_protrain.models.loading import load_once
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.planner.fsdp_memory import FSDPMemory
from lightning_protrain.trainer import PlanningTrainer
from tests.support.fsdp2 import BOUND, CLIPPED, Trained, largest_difference
from tests.support.models import HIDDEN, VOCABULARY, LanguageModel, Mlp, ParityModule, zoo
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.trainers import QUIET

BLOCKS = 3
STEPS = 4

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*smaller than the logging", "ignore:.*no .val_dataloader"
)


class Wide(ParityModule):
    """Batches whose activations take more than the weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(LanguageModel([Mlp() for _ in range(BLOCKS)]))
        self.recomputing: list[str] = []

    def on_train_start(self) -> None:
        self.recomputing = [name for name, module in self.named_modules() if "forward" in vars(module)]

    def train_dataloader(self) -> DataLoader:
        tokens = torch.randint(VOCABULARY, (128, 64), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens), batch_size=8)


class Direct(Wide):
    """The wide model, sharded by its own `configure_model` with PyTorch alone."""

    def __init__(self, sizes: tuple[int, ...], offload: bool = False, low: bool = False) -> None:
        super().__init__()
        self.sizes, self.offload, self.low = sizes, offload, low

    def configure_model(self) -> None:
        if isinstance(self.network, FSDPModule):
            return
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", self.sizes, mesh_dim_names=("copies", "shards")[-len(self.sizes) :]),
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if self.offload else OffloadPolicy(),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            if self.low
            else MixedPrecisionPolicy(),
        }
        for part in (*self.network.blocks, self.network):
            fully_shard(part, **options)


def train(rank: int, world: int, nodes: int, module: Wide, kind: Callable[..., Any], **options: Any) -> Any:
    torch.set_num_threads(1)
    trainer = trainer_on_rank(rank, world, kind, nodes, **{"max_steps": STEPS, **options})
    trainer.fit(module)
    names = [name for name, _ in module.named_parameters()]
    return Trained(module.losses, trainer.strategy.lightning_module_state_dict(), names), trainer.strategy


def direct(world: int) -> Callable[..., Any]:
    """Lightning's own strategy, which leaves sharding to the module; every rank has batches of its own."""
    return partial(ModelParallelStrategy, world, 1, save_distributed_checkpoint=False)


# By name: number of nodes and of ranks, arguments, the mesh that they give.
MESHES: dict[str, tuple[int, int, dict[str, Any], tuple[int, ...]]] = {
    "by nodes, chosen": (2, 4, {}, (2, 2)),
    "by nodes, asked for": (2, 4, {"sharding_strategy": "HYBRID_SHARD", "activation_checkpointing": 2}, (2, 2)),
    "over all ranks": (2, 4, {"sharding_strategy": "FULL_SHARD"}, (4,)),
    "over one node": (1, 4, {"sharding_strategy": "HYBRID_SHARD"}, (4,)),
    "given": (1, 4, {"device_mesh": (2, 2)}, (2, 2)),
    "given, over all nodes": (4, 4, {"device_mesh": (1, 4)}, (4,)),
    "nodes of one rank": (2, 2, {"sharding_strategy": "HYBRID_SHARD"}, (2, 1)),
}


def meshes(rank: int, name: str) -> list[Any]:
    nodes, world, arguments, expected = MESHES[name]
    module = Wide()
    ours, strategy = train(rank, world, nodes, module, partial(ProTrainFSDP2Strategy, **arguments), **CLIPPED)
    weight = module.network.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh.shape == expected
    assert weight.to_local().numel() == weight.numel() // expected[-1]
    assert strategy.distributed_sampler_kwargs == {"num_replicas": world, "rank": rank}
    theirs, _ = train(rank, world, nodes, Direct(expected), direct(world), **CLIPPED)
    ddp, _ = train(rank, world, nodes, Wide(), DDPStrategy, **CLIPPED)
    return [largest_difference(ours, other, rank) for other in (theirs, ddp)]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MESHES)
def test_each_mesh_trains_as_fully_shard_and_ddp_do(name: str, tmp_path: Path) -> None:
    for of_direct, of_ddp in values(run_ranks(meshes, MESHES[name][1], tmp_path, name)):
        assert of_direct == 0.0
        assert of_ddp <= BOUND


def wrong_mesh(rank: int, sizes: tuple[int, int]) -> None:
    train(rank, 2, 1, Wide(), partial(ProTrainFSDP2Strategy, device_mesh=sizes))


def test_a_mesh_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    for outcome in run_ranks(wrong_mesh, 2, tmp_path, (2, 2)):
        assert outcome.error is not None
        assert "device_mesh=(2, 2) needs 4 ranks, but there are 2 (1 x 2)" in outcome.error


# --- by the memory model ----------------------------------------------------------------------------------------------
def predict(rank: int, **arguments: Any) -> tuple[FSDPMemory, Wide]:
    module = Wide()
    kind = partial(ProTrainFSDP2Strategy, **{"device_memory": "1GiB", **arguments})
    _, strategy = train(rank, 2, 2, module, kind, max_steps=1)
    assert strategy.memory is not None
    return strategy.memory, module


def choose(rank: int) -> None:
    by_nodes = {"sharding_strategy": "HYBRID_SHARD"}
    found = [predict(rank, activation_checkpointing=count, **by_nodes) for count in range(BLOCKS + 1)]
    needed = [memory.device_bytes for memory, _ in found]
    assert needed[0] > needed[1] > needed[2] >= needed[3]
    for count, (memory, module) in enumerate(found):
        names = [f"network.blocks.{index}" for index in range(count)]
        assert [*memory.checkpointed] == module.recomputing == names
        assert memory.counts_activations
    # As few as fit, under HSDP as long as that fits; then over both nodes.
    for count in (0, 1, 2):
        memory, module = predict(rank, device_memory=needed[count])
        assert (memory.ranks.divisor, len(module.recomputing)) == (1, count)
    memory, _ = predict(rank, device_memory=needed[3] - 1)
    assert memory.ranks.divisor == 2
    assert memory.device_bytes < needed[3]
    sharded, _ = predict(rank, activation_checkpointing="all", sharding_strategy="FULL_SHARD")
    module = Wide()
    kind = partial(ProTrainFSDP2Strategy, device_memory=sharded.device_bytes - 1)
    with pytest.raises(ValueError, match=r"FSDP2 over 2 ranks needs .* on each device with all 3 blocks recomputed"):
        train(rank, 2, 2, module, kind)
    assert not isinstance(module, FSDPModule)


@pytest.mark.slow
def test_the_memory_chooses_mesh_and_blocks(tmp_path: Path) -> None:
    values(run_ranks(choose, 2, tmp_path))


def many_blocks(rank: int) -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing=4: Wide has 3 blocks.*Give at most 3"):
        train(rank, 2, 1, Wide(), partial(ProTrainFSDP2Strategy, activation_checkpointing=4))
    # Another rank was told something else.
    kind = partial(ProTrainFSDP2Strategy, min_num_params=100 + rank)
    with pytest.raises(ValueError, match=r"different arguments of ProTrainFSDP2Strategy.*min_num_params=101"):
        train(rank, 2, 1, Wide(), kind)


def test_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    values(run_ranks(many_blocks, 2, tmp_path))


class Stream(IterableDataset[Any]):
    """Nobody may take a batch of it ahead."""

    def __iter__(self) -> Iterator[Any]:
        yield from Wide.train_dataloader(None).dataset  # type: ignore[arg-type]


class Streamed(Wide):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=8)


def without_a_batch(rank: int) -> None:
    module = Streamed()
    train(rank, 2, 2, module, partial(ProTrainFSDP2Strategy, device_memory="1GiB"))
    assert module.recomputing == [f"network.blocks.{index}" for index in range(BLOCKS)]
    module = Wide()
    trainer = trainer_on_rank(rank, 2, partial(ProTrainFSDP2Strategy, device_memory="1GiB"), max_steps=1)
    module.validation_step = module.training_step
    module.val_dataloader = module.train_dataloader
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    assert len(module.recomputing) == BLOCKS


def test_all_blocks_recompute_where_activations_are_not_known(tmp_path: Path) -> None:
    values(run_ranks(without_a_batch, 2, tmp_path))


def too_small(rank: int) -> None:
    with (
        mock.patch.object(lightning_protrain.fsdp2.planning, "free_device_bytes", return_value=100_000 - rank),
        pytest.raises(ValueError, match=r"91.* are allowed.*Or set activation_checkpointing and sharding_strategy"),
    ):
        train(rank, 2, 1, Wide(), ProTrainFSDP2Strategy)
    # Where nothing is open, nothing is predicted.
    kind = partial(ProTrainFSDP2Strategy, activation_checkpointing=1)
    with mock.patch.object(lightning_protrain.fsdp2.planning, "free_device_bytes", return_value=1):
        _, strategy = train(rank, 2, 1, Wide(), kind)
    assert not strategy.memory.counts_activations


def test_the_device_with_the_least_memory_counts(tmp_path: Path) -> None:
    values(run_ranks(too_small, 2, tmp_path))


# --- shards on the host -----------------------------------------------------------------------------------------------
def offload(rank: int) -> dict[str, tuple[float, float]]:
    both = {**CLIPPED, "accumulate_grad_batches": 2}
    found = {}
    for name, options, arguments in (
        ("clipped", both, {}),
        ("reduced each time", both, {"sync_each_batch": True}),
        ("recomputed", {}, {"activation_checkpointing": "all"}),
        ("bf16-mixed", {**both, "precision": "bf16-mixed"}, {"sync_each_batch": True}),
        ("by nodes", both, {"sync_each_batch": True, "sharding_strategy": "HYBRID_SHARD"}),
    ):
        kind = partial(ProTrainFSDP2Strategy, cpu_offload=True, **arguments)
        nodes = 2 if name == "by nodes" else 1
        ours, strategy = train(rank, 2, nodes, Wide(), kind, **options)
        assert all(parameter.device.type == "cpu" for parameter in strategy.model.parameters())
        low = name == "bf16-mixed"
        ddp, _ = train(rank, 2, 1, Wide(), DDPStrategy, **options)
        sizes = (2, 1) if nodes == 2 else (2,)
        # Lightning's strategy reduces each micro-batch.
        theirs, _ = train(rank, 2, nodes, Direct(sizes, offload=True, low=low), direct(2), **options)
        if low:
            ddp, ours_without = ddp._replace(weights={}), ours._replace(weights={})
        else:
            ours_without = ours
        found[name] = largest_difference(ours, theirs, rank), largest_difference(ours_without, ddp, rank)
    return found


@pytest.mark.slow
def test_shards_on_the_host_train_as_fully_shard_and_ddp_do(tmp_path: Path) -> None:
    for found in values(run_ranks(offload, 2, tmp_path)):
        for name, (of_direct, of_ddp) in found.items():
            assert of_direct == 0.0 or (name == "clipped" and of_direct <= BOUND), found
            assert of_ddp <= (0.02 if name == "bf16-mixed" else BOUND), found


# --- models that one rank of each node loads --------------------------------------------------------------------------
class Rotated(nn.Module):
    """Keeps a buffer under a second name, which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.rand(HIDDEN), persistent=False)
        self.original = self.angles
        self.mlp = Mlp()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden * self.angles + self.original)


class Loaded(Wide):
    """Built in `configure_model`, once on each node or on every rank."""

    def __init__(self, once: bool) -> None:
        super().__init__()
        self.network, self.once = None, once  # type: ignore[assignment]
        self.was_meta = False

    def configure_model(self) -> None:
        if self.network is None:
            torch.manual_seed(3)
            self.network = load_once(self._trainer, self.build, self.build) if self.once else self.build()
            self.was_meta = self.network.head.weight.is_meta

    @staticmethod
    def build() -> LanguageModel:
        return LanguageModel([Rotated() for _ in range(BLOCKS)])


def load(rank: int, folder: Path) -> None:
    world, nodes = 4, 2
    kind = partial(ProTrainFSDP2Strategy, device_memory="1GiB")
    every, strategy = train(rank, world, nodes, Loaded(False), kind)
    module = Loaded(True)
    once, strategy_of_once = train(rank, world, nodes, module, kind)
    assert module.was_meta == (rank % 2 == 1)
    assert largest_difference(once, every, rank) == 0.0
    loading = [each.memory.phases[0].host["whole_model"] for each in (strategy, strategy_of_once)]
    assert loading[0] == 2 * loading[1]
    # A whole checkpoint is read by the ranks that have weights.
    strategy_of_once.lightning_module.trainer.save_checkpoint(folder / "whole.ckpt")
    resumed = []
    for module in (Loaded(True), Loaded(False)):
        trainer = trainer_on_rank(rank, world, kind, nodes, max_steps=2 * STEPS)
        trainer.fit(module, ckpt_path=folder / "whole.ckpt")
        resumed.append(module.losses)
    assert len(resumed[0]) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(*resumed, strict=True))
    assert not torch.equal(resumed[0][0], once.losses[0])


@pytest.mark.slow
def test_one_rank_of_each_node_loads(tmp_path: Path) -> None:
    values(run_ranks(load, 4, tmp_path, tmp_path))


SIZES = "hidden_size: 64, num_hidden_layers: 4, intermediate_size: 128, num_attention_heads: 4, vocab_size: 280"
FSDP2 = ["--trainer.strategy=lightning_protrain.ProTrainFSDP2Strategy", "--trainer.strategy.policy=transformer"]
MANY = ["--gpu=RTX 3090", "--num_gpus=4", "--num_nodes=2"]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return those of a small model, whose weights are never made, without data."""
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    made = CausalLMModule.configure_model

    def configure(self: Any) -> None:
        made(self)
        assert {parameter.device.type for parameter in self.parameters()} == {"meta"}

    monkeypatch.setattr(CausalLMModule, "configure_model", configure)
    return [f"--model.config={{model_type: llama, {SIZES}}}", "--data=null", "--length=64", "--trainer.max_epochs=1"]


@pytest.mark.slow
@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
def test_what_ranks_take_under_fsdp2_is_planned_for(options: list[str], capsys: Any) -> None:
    ProTrainCLI(["plan", *MANY, "--host_memory=64GiB", "--json=plans.json", *FSDP2, *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert "HSDP: 2 copies, each sharded over 2 ranks, 0 of 4 blocks recomputed" in shown
    assert "evaluation" in shown
    assert "64.0 GiB of memory (host_memory)" in shown
    plan = json.loads(Path("plans.json").read_text(encoding="utf-8"))["RTX 3090"]
    assert (plan["mesh"], plan["checkpointed"]) == ([2, 2], [])
    sizes = [sum(phase["device"].values()) for phase in plan["phases"].values()]
    assert plan["device_bytes"] == max(sizes)
    assert plan["node_host_bytes"] == 2 * plan["host_bytes"]
    # Where memory is as tight as it can be, all ranks hold one copy, and as few blocks recompute as there must.
    least = [f"--trainer.strategy.{name}" for name in ("sharding_strategy=FULL_SHARD", "activation_checkpointing=all")]
    ProTrainCLI(["plan", *MANY, "--host_memory=64GiB", "--json=plans.json", *FSDP2, *least, *options])
    needed = json.loads(Path("plans.json").read_text(encoding="utf-8"))["RTX 3090"]["device_bytes"]
    tight = f"--trainer.strategy.device_memory={needed}"
    ProTrainCLI(["plan", *MANY, "--host_memory=64GiB", "--json=plans.json", *FSDP2, tight, *options])
    less = json.loads(Path("plans.json").read_text(encoding="utf-8"))["RTX 3090"]
    assert less["mesh"] == [1, 4]
    assert len(less["checkpointed"]) > 0
    assert less["device_bytes"] <= needed < plan["device_bytes"]


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--trainer.strategy.device_memory=9KiB"], r"FSDP2 over 4 ranks needs .* on each device with all 4 blocks"),
        (["--host_memory=9KiB"], r"FSDP2 over 4 ranks needs .* on the host of each node, 9.00 KiB"),
        (
            ["--trainer.strategy.device_mesh=[2, 3]"],
            r"device_mesh=\(2, 3\) needs 6 ranks, but there are 4 \(2 x 2\)",
        ),
        (["--trainer.strategy.activation_checkpointing=5"], r"has 4 blocks that can recompute"),
    ],
)
def test_what_does_not_fit_under_fsdp2_is_refused(given: list[str], message: str, options: list[str]) -> None:
    with pytest.raises(ValueError, match=message):
        ProTrainCLI(["plan", *MANY, *FSDP2, *options, *given])


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
def test_what_ranks_take_here_is_what_fit_predicts(tmp_path: Path) -> None:
    strategy = ProTrainFSDP2Strategy(policy="none", activation_checkpointing=1, device_memory="1GiB")
    trainer = PlanningTrainer(accelerator="cpu", devices=1, max_steps=1, strategy=strategy, **QUIET)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"plan\.html' is not supported with ProTrainFSDP2Strategy\. Give json instead"
    ):
        trainer.plan(zoo()["reused"](), html="plan.html")
    trainer.plan(zoo()["reused"](), json="plan.json")
    planned = json.loads(Path("plan.json").read_text(encoding="utf-8"))["this machine"]
    assert trainer.global_step == 0
    assert not torch.distributed.is_initialized()
    (found,) = values(run_ranks(_fit_memory, 1, tmp_path))
    assert planned == found


def _fit_memory(rank: int) -> Any:
    kind = partial(ProTrainFSDP2Strategy, policy="none", activation_checkpointing=1, device_memory="1GiB")
    trainer = trainer_on_rank(rank, 1, kind, max_steps=1)
    trainer.fit(zoo()["reused"]())
    return trainer.strategy.memory.to_dict()  # type: ignore[attr-defined]
