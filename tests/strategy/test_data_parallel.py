"""Data parallelism of a strategy: options, choices, one reduction for each gradient, and traffic."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_protrain import ProTrainStrategy
from lightning_protrain.config import Parallelism
from lightning_protrain.planner.plan import Plan, RankLayout, Sharding
from lightning_protrain.runtime.comm.shared_memory import assign_owners
from lightning_protrain.runtime.executor import Executor
from lightning_protrain.strategy import data_parallel
from lightning_protrain.strategy.data_parallel import DataParallel
from tests.support.machines import CPU as MACHINE
from tests.support.models import fit, zoo
from tests.support.plans import alternating, half, preset
from tests.support.rank_models import Module, strategy_of
from tests.support.ranks import run_ranks, trainer_on_rank, values

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sharding", "zero", "sharding='zero': give one of 'auto', 'resident', 'replicate', 'shard'"),
        ("reduce_dtype", "float16", "reduce_dtype='float16': give one of None, 'float32', 'bfloat16'"),
        ("adapter_grad_sync", None, "adapter_grad_sync=None: give one of 'auto', 'ddp', 'flat'"),
    ],
)
def test_what_is_no_choice_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallelism(**{name: value})
    with pytest.raises(ValueError, match=message):
        ProTrainStrategy(**{name: value})


@pytest.mark.parametrize("plan", ["offload", half(Module("full"))], ids=["offload", "half"])
def test_resident_sharding_refuses_a_plan_that_offloads(plan: Any) -> None:
    with pytest.raises(ValueError, match='sharding="resident" keeps everything on the device, and the plan offloads'):
        ProTrainStrategy(sharding="resident", plan=plan)


@pytest.mark.parametrize(
    ("sharding", "copies", "sharers"), [(Sharding.SHARD, 1, 4), (Sharding.REPLICATE, 4, 1)], ids=["shard", "replicate"]
)
def test_ranks_share_a_copy_or_the_memory_of_a_machine(sharding: Sharding, copies: int, sharers: int) -> None:
    ranks = RankLayout(2, 4, sharding)
    assert (ranks.num_ranks, ranks.copies, ranks.sharers) == (8, copies, sharers)


def strategy_with(sharding: Any, local_size: int, world_size: int, **options: Any) -> ProTrainStrategy:
    strategy = ProTrainStrategy(sharding=sharding, parallel_devices=[CPU] * local_size, **options)
    ranks: Any = SimpleNamespace(meet=lambda what, flag: flag)
    strategy._sync.mesh = ranks if world_size > 1 else None
    return strategy


@pytest.mark.parametrize(
    ("sharding", "local_size", "world_size", "chosen"),
    [
        ("auto", 2, 2, ("shard", "replicate")),
        ("auto", 1, 2, ("replicate",)),
        ("auto", 1, 1, ("replicate",)),
        ("shard", 2, 4, ("shard",)),
        ("shard", 1, 2, ("replicate",)),
        ("shard", 1, 1, ("replicate",)),
        ("replicate", 2, 2, ("replicate",)),
        ("resident", 2, 2, ("replicate",)),
    ],
)
def test_weights_may_be_shared_where_a_machine_has_several_ranks(
    sharding: str, local_size: int, world_size: int, chosen: tuple[str, ...]
) -> None:
    strategy = strategy_with(sharding, local_size, world_size)
    assert (
        strategy._dp.own_shardings(None, local_size) == strategy.shardings(local_size) == tuple(map(Sharding, chosen))
    )


def test_statistics_of_batches_over_ranks_are_refused() -> None:
    alone, strategy = strategy_with("shard", 1, 1), strategy_with("shard", 2, 2)
    assert alone._dp.own_shardings(None, 1, TorchSyncBatchNorm())  # It has all of a batch.
    with pytest.raises(ValueError, match="sync_batchnorm=True is not supported"):
        strategy._dp.own_shardings(None, 2, TorchSyncBatchNorm())


@pytest.mark.parametrize("hook", [None, print])
def test_few_weights_go_to_ddp_where_it_has_a_hook(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[Any] = []
    monkeypatch.setattr(data_parallel, "wrap", lambda *args: wrapped.append(args[-1].comm_hook))
    strategy = strategy_with("auto", 2, 2, ddp_comm_hook=hook)
    module = Module("full").requires_grad_(False)
    module.model.layers[0].norm.requires_grad_(True)
    runtime: Any = SimpleNamespace(plan=preset(module, "resident"), averages_chunks=False)
    strategy._dp.replicate(module, runtime, CPU)
    assert wrapped == ([] if hook is None else [hook])
    assert (strategy._dp._flat is None) is (hook is not None)


class Skipping(Module):
    """A module that may skip a layer on rank 1, and notes of each backward the groups in the order of their sums."""

    def __init__(self, skips: bool) -> None:
        super().__init__("full")
        self.skips = skips
        self.order: list[list[str]] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        layers = self.model.layers
        if self.skips and self.global_rank == 1:
            self.model.layers = nn.ModuleList(layer for at, layer in enumerate(layers) if at != self.global_step % 3)
        try:
            return super().training_step(batch)
        finally:
            self.model.layers = layers

    def on_before_backward(self, loss: Tensor) -> None:
        self.order.append([])


def _order_of_groups(rank: int, static: bool, hook: Any, mistake: bool) -> list[list[str]]:
    torch.set_num_threads(1)
    if mistake:
        Executor.after_chunks = lambda self, issue: issue()  # type: ignore[method-assign]
    module = Skipping(not static)
    strategy = partial(
        ProTrainStrategy,
        plan=alternating(module),
        sharding="replicate",
        adapter_grad_sync="ddp",
        monitor=False,
        static_graph=static,
        find_unused_parameters=not static,
        ddp_comm_hook=hook,
    )
    trainer = trainer_on_rank(rank, 2, kind=strategy, max_steps=3)
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        mesh = trainer.strategy._sync.mesh
        if module.order and group in (None, dist.group.WORLD, mesh.everyone):
            module.order[-1].append("chunk" if group is mesh.everyone else "resident")
        return all_reduce(tensor, *args, group=group, **options)

    dist.all_reduce = noted
    trainer.fit(module)
    return module.order


@pytest.mark.parametrize(
    ("static", "hook", "mistake"),
    [
        pytest.param(False, None, False, id="unused parameters"),
        pytest.param(True, None, False, id="static graph"),
        pytest.param(False, allreduce_hook, False, id="the user's hook"),
        pytest.param(False, None, True, id="a mistake"),
    ],
)
def test_resident_gradients_are_sent_behind_those_of_chunks(
    static: bool, hook: Any, mistake: bool, tmp_path: Path
) -> None:
    one, other = values(run_ranks(_order_of_groups, 2, tmp_path, static, hook, mistake))
    assert one[0].count("resident") >= 1
    assert one[0].count("chunk") >= 2
    ordered = [sorted(sums) == sums for sums in (*one, *other)]  # "chunk" comes before "resident".
    assert all(ordered) is not mistake, one
    assert one == other or mistake


def test_one_rank_that_should_shard_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(data_parallel, "rank_zero_info", said.append)
    strategy_with("shard", 1, 1)._dp.own_shardings(None, 1)
    assert said == ['sharding="shard": there is one rank, which holds everything, as under "replicate".']


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_backward_takes_no_other_thread(plan: str) -> None:
    """On a GPU, autograd would run backward on another thread, see [Note: One thread].

    This also holds for a backward that the training step begins itself.
    """
    module, seen = zoo()["reused"](), []
    step = module.training_step

    def watched(*args: Any) -> torch.Tensor:
        seen.append(torch._C._is_multithreading_enabled())
        loss = step(*args)
        loss.register_hook(lambda _: seen.append(torch._C._is_multithreading_enabled()))
        return loss

    module.training_step = watched  # type: ignore[method-assign]
    fit(module, strategy=ProTrainStrategy(plan=plan), limit_train_batches=2)
    assert seen == [False] * 4
    assert torch._C._is_multithreading_enabled()


# --- one reduction per step -----------------------------------------------------------------------------------------
BATCHES, STEPS_AT = 7, {1: list(range(7)), 3: [2, 5, 6]}


def expected_traffic(plan: Plan, module: nn.Module, steps: int, clips: bool, world_size: int) -> tuple[int, int]:
    """Collectives of a run and bytes of one rank, as [Note: Reduction] and [Note: Owners] have them."""
    parameters = dict(module.named_parameters())
    chunks = [[parameters[fqn] for fqn in chunk.parameters] for chunk in plan.chunks if not chunk.resident]
    shards = plan.sharding is Sharding.SHARD
    owners = assign_owners([[p.nbytes for p in chunk] for chunk in chunks], world_size)
    regions = nbytes = 0
    for chunk, mine in zip(chunks, owners, strict=True):
        trained = [(p, owner if shards else 0) for p, owner in zip(chunk, mine, strict=True) if p.requires_grad]
        regions += len({owner for _, owner in trained})
        nbytes += sum(p.nbytes + p.itemsize for p, _ in trained)  # A flag behind each gradient.
    norms = clips and shards and bool(chunks)
    told = 16 * sum(p.requires_grad for chunk in chunks for p in chunk) if norms else 0
    # One meeting when the plan is applied; turns are taken without a word, see [Note: Step sync].
    return 1 + steps * (regions + norms), 4 + steps * (nbytes + told)


def _count(rank: int, world_size: int, cases: list[tuple[str, str, int, bool]]) -> list[str]:
    torch.set_num_threads(1)
    wrong = []
    for kind, placement, accumulate, clips in cases:
        sent: list[int] = []
        module = Module(kind)

        def count(function: Any, sent: list[int] = sent, module: Module = module) -> Any:
            def counted(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
                if group in (None, module.trainer.strategy._sync.mesh.everyone):  # Not that in which ranks meet.
                    sent.append(module.trainer.fit_loop.batch_idx)
                return function(tensor, *args, group=group, **kwargs)

            return counted

        def hook(sent, bucket, module=module):  # type: ignore[no-untyped-def] # DDP does not read strings.
            sent.append(module.trainer.fit_loop.batch_idx)
            return (
                dist.distributed_c10d._get_default_group()
                .allreduce(bucket.buffer())
                .get_future()
                .then(lambda future: future.value()[0])
            )

        def strategy(placement: str = placement, module: Module = module, hook: Any = hook, **process: Any) -> Any:
            hooked = {} if placement == "ddp flat" else {"ddp_comm_hook": hook, "ddp_comm_state": sent}  # noqa: B023
            return strategy_of(placement, module, **hooked, **process)

        options: dict[str, Any] = {"gradient_clip_val": 0.1} if clips else {}
        trainer = trainer_on_rank(
            rank,
            world_size,
            kind=strategy,
            accumulate_grad_batches=accumulate,
            limit_train_batches=BATCHES,
            max_epochs=1,
            **options,
        )
        functions = dist.all_reduce, dist.reduce
        dist.all_reduce, dist.reduce = map(count, functions)
        trainer.fit(module)
        dist.all_reduce, dist.reduce = functions
        name = f"{kind} {placement} {accumulate} {clips}"
        if sorted(set(sent)) != STEPS_AT[accumulate] or len(sent) % len(STEPS_AT[accumulate]):
            wrong.append(f"{name}: sent at {sent}")
        plan, counters = trainer.strategy.plan, trainer.strategy.counters
        expected = expected_traffic(plan, module, len(STEPS_AT[accumulate]), clips, world_size)
        if (counters.collectives, counters.communicated_bytes) != expected:
            wrong.append(f"{name}: {counters.collectives, counters.communicated_bytes}, expected {expected}")
    return wrong


COUNTED = [
    ("full", "replicate", 1, False),
    ("full", "shard", 3, True),
    ("tied", "shard half", 3, False),
    ("half frozen", "shard", 1, True),
    ("full", "resident", 3, False),
    ("lora", "ddp flat", 3, False),
    ("lora", "replicate", 3, True),
]


def test_ranks_send_what_the_plan_says_and_once_in_a_step(tmp_path: Path) -> None:
    assert values(run_ranks(_count, 2, tmp_path, 2, COUNTED)) == [[], []]


def _count_without_rest(rank: int, world_size: int) -> list[str]:
    """A mistake: every micro-batch ends with averages."""
    DataParallel.averages = property(lambda self: self._ranks is not None)  # type: ignore[assignment, method-assign]
    return _count(rank, world_size, [("full", "replicate", 3, False)])


def test_averages_in_every_micro_batch_are_found(tmp_path: Path) -> None:
    for wrong in values(run_ranks(_count_without_rest, 2, tmp_path, 2)):
        assert "sent at [0, 0, 0" in wrong[0]
        assert "expected" in wrong[1]


# --- equal beginnings, and the end ----------------------------------------------------------------------------------
def _begin(rank: int, placements: list[str]) -> list[Any]:
    """Weights after two steps from different beginnings, and what is left of DDP and of the meetings afterwards."""
    found: list[Any] = []
    for placement in placements:
        torch.manual_seed(rank)
        module = Module("full")
        options: dict[str, Any] = {}
        if placement != "ddp":
            options["kind"] = lambda placement=placement, module=module, **process: strategy_of(
                placement, module, **process
            )
        trainer = trainer_on_rank(rank, 2, max_steps=2, **options)
        trainer.fit(module)
        assert not isinstance(trainer.strategy.model, DistributedDataParallel) or placement == "ddp"
        left = vars(trainer.fit_loop.epoch_loop).get("_broadcast_sigterm_tensor") if placement != "ddp" else None
        found.append((left, [value.tolist() for value in module.state_dict().values()]))
    return found


def test_all_ranks_begin_with_the_weights_of_rank_0(tmp_path: Path) -> None:
    first, second = values(run_ranks(_begin, 2, tmp_path, ["ddp", "resident", "replicate", "shard", "shard half"]))
    assert first == second
    assert all(found == first[0] for found in first)


def _search(rank: int, sharding: str) -> Any:
    """Return the network in the explanation of a searched plan, and the rates that this rank uses."""
    module = Module("full")
    strategy = ProTrainStrategy(
        sharding=sharding, device_memory="64KiB", hardware=MACHINE, process_group_backend="gloo"
    )
    trainer = trainer_on_rank(rank, 2, kind=lambda **_: strategy, max_steps=2)
    trainer.fit(module)
    plan = strategy.plan
    assert plan is not None
    assert plan.prediction is not None
    return plan.to_json(), plan.num_offloaded_chunks, plan.prediction.busy["network"], plan.sharding


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_a_search_among_ranks_knows_their_network(sharding: str, tmp_path: Path) -> None:
    first, second = values(run_ranks(_search, 2, tmp_path, sharding))
    assert first == second
    assert first[1] > 0
    assert first[2] > 0
    assert first[3] is Sharding(sharding)


def test_a_hook_of_ddp_is_not_forgotten() -> None:
    with pytest.raises(ValueError, match=r'adapter_grad_sync="flat" .* ddp_comm_hook'):
        ProTrainStrategy(adapter_grad_sync="flat", ddp_comm_hook=print)
    ProTrainStrategy(ddp_comm_hook=print)
