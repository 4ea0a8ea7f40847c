"""The strategy as a whole: how it is chosen, what it plans, what it attaches, and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_protrain.device.device import CPUDevice, TransferCounters
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.profiler import hardware
from lightning_protrain.profiler.hardware import cpu_name
from lightning_protrain.runtime.apply import apply_plan
from lightning_protrain.strategy import plan_session, protrain
from lightning_protrain.strategy.precision import ProTrainPrecision
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU
from tests.support.models import HIDDEN, ParityModule, fit, token_batches, variants, zoo
from tests.support.parity import Result, differences, run, snapshot
from tests.support.plans import half, kept, preset
from tests.support.trainers import QUIET


class Spy(L.Callback):
    """A callback that records attributes of the strategy during a run."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ProTrainStrategy)
        self.plan, self.num_hooks, self.budget = strategy.plan, strategy.num_hooks, strategy.budget
        self.devices = {parameter.device.type for parameter in pl_module.parameters()}
        self.replaced = [name for name, module in pl_module.named_modules() if "forward" in vars(module)]
        self.hooked = [
            name
            for name, parameter in pl_module.named_parameters()
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ]


def _spy(module: L.LightningModule, strategy: Any, **options: Any) -> Spy:
    spy = Spy()
    fit(module, strategy=strategy, callbacks=[spy], max_steps=2, **options)
    return spy


# --- how it is chosen -------------------------------------------------------------------------------------------------


def test_registration_is_idempotent() -> None:
    before = dict(StrategyRegistry)
    assert {"protrain", "protrain_spawn"} <= before.keys()
    ProTrainStrategy.register_strategies(StrategyRegistry)
    assert dict(StrategyRegistry) == before
    assert type(StrategyRegistry.get("protrain")) is ProTrainStrategy
    assert StrategyRegistry.get("protrain_spawn")._launch.start_method == "spawn"


def test_by_name_object_and_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    trainers = [
        L.Trainer(strategy=given, accelerator="cpu", devices=1, **QUIET) for given in ("protrain", ProTrainStrategy())
    ]
    monkeypatch.setattr(sys, "argv", ["program"])
    arguments = {
        "strategy": {
            "class_path": "lightning_protrain.ProTrainStrategy",
            "init_args": {"plan": "offload", "device_memory": "1GiB", "chunk_bytes": 4096},
        },
        "accelerator": "cpu",
        "devices": 1,
    }
    cli = LightningCLI(
        ParityCommand, run=False, save_config_callback=None, args={"trainer": arguments}, seed_everything_default=False
    )
    trainers.append(cli.trainer)
    for trainer in trainers:
        assert type(trainer.strategy) is ProTrainStrategy
        assert type(trainer.strategy.precision_plugin) is ProTrainPrecision
        assert trainer.world_size == 1
        assert trainer.strategy.root_device == torch.device("cpu")
    assert trainers[-1].strategy.session.options.knobs.chunk_bytes == 4096
    assert trainers[-1].strategy.session.options.device_bytes == 2**30


def test_the_processes_of_all_nodes_count() -> None:
    trainer = L.Trainer(strategy="protrain", accelerator="cpu", devices=3, num_nodes=2, **QUIET)
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}


class ParityCommand(L.LightningModule):
    """A module for the command line."""


@pytest.mark.parametrize(
    ("arguments", "resident", "checkpointed", "buffers"),
    [
        ({}, 6, 0, 0),
        ({"plan": "resident"}, 6, 0, 0),
        ({"plan": "offload"}, 0, 3, 2),
        ({"plan": "offload", "chunk_bytes": 2500}, 0, 3, None),
        ({"num_persistent_chunks": 2}, 2, 0, 2),
        ({"num_chunk_buffers": 3}, 0, 0, 3),
        ({"num_swap_blocks": 0}, 0, 0, 2),
        ({"num_checkpoint_blocks": 2}, 0, 2, 2),
        ({"num_keep_offloaded_blocks": 1}, 0, 2, 2),
        ({"num_persistent_chunks": 6}, 6, 0, None),
        ({"plan": "offload", "host_memory": "1GiB", "device_memory": "1GiB"}, 0, 3, 2),
        ({"plan": "offload", "blocks": ["network.blocks.0", "network.blocks.2"]}, 0, 2, None),
        ({"plan": "offload", "blocks": [nn.Linear]}, 0, 7, None),
        ({"plan": "offload", "blocks": "size", "min_num_params": 1000}, 0, 3, 2),
        ({"plan": "offload", "start_method": "popen", "process_group_backend": "gloo", "timeout": None}, 0, 3, 2),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Settings of the plan that were not given")
def test_every_argument_reaches_the_plan(
    arguments: dict[str, Any], resident: int, checkpointed: int, buffers: int | None
) -> None:
    plan = _spy(zoo()["reused"](), ProTrainStrategy(**arguments)).plan
    assert plan is not None
    assert sum(chunk.resident for chunk in plan.chunks) == resident
    assert sum(block.policy is BlockPolicy.CHECKPOINT for block in plan.blocks) == checkpointed
    assert buffers is None or plan.num_chunk_buffers == buffers
    if "chunk_bytes" in arguments:
        assert all(chunk.nbytes <= 2500 or len(chunk.parameters) == 1 for chunk in plan.chunks)
        assert len(plan.chunks) > 5


def test_knobs_left_open_are_named() -> None:
    strategy = ProTrainStrategy(num_persistent_chunks=2, num_swap_blocks=0)
    message = r"take these values: num_chunk_buffers=2, num_checkpoint_blocks=0, num_keep_offloaded_blocks=2\."
    with pytest.warns(UserWarning, match=message):
        fit(zoo()["reused"](), strategy=strategy, max_steps=1)


@pytest.mark.parametrize("given", ["object", "path", "text"])
def test_a_plan_as_object_or_file(given: str) -> None:
    module = zoo()["lstm"]()
    plan = half(module)
    path = Path("plan.json")
    plan.save(path)
    choice: Any = {"object": plan, "path": path, "text": str(path)}[given]
    spy = _spy(module, ProTrainStrategy(plan=choice))
    assert spy.plan == plan
    assert spy.replaced == [f"network.{name}" for name in ("embedding", "blocks.1", "norm", "head")]


# --- "auto" -----------------------------------------------------------------------------------------------------------


def _auto(module: L.LightningModule, budget: int | str, **arguments: Any) -> Plan:
    """Return the plan of a search."""
    plan = _spy(module, ProTrainStrategy(device_memory=budget, hardware=CPU, **arguments)).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("model", ["tied", "frozen", "lstm", "moe"])
def test_auto_is_resident_if_that_fits_and_else_the_fastest_that_does(model: str) -> None:
    roomy = _auto(zoo()[model](), "1GiB")
    assert roomy.num_offloaded_chunks == 0
    assert {block.policy for block in roomy.blocks} == {BlockPolicy.KEEP}
    assert roomy.memory.activations > 0
    needed = roomy.prediction.device_bytes
    fitting = _auto(zoo()[model](), needed)
    assert (fitting.chunks, fitting.blocks) == (roomy.chunks, roomy.blocks)
    tight = _auto(zoo()[model](), needed - 1)
    assert (tight.chunks, tight.blocks) != (roomy.chunks, roomy.blocks)
    assert tight.prediction.device_bytes <= needed - 1
    assert tight.prediction.step_seconds >= roomy.prediction.step_seconds


def test_auto_measures_the_machine_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_session, "user_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(hardware, "is_busy", lambda: False)
    names = [_spy(zoo()["reused"](), ProTrainStrategy(device_memory="1GiB")).plan.prediction.hardware for _ in "12"]
    assert names == [cpu_name()] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_step_that_looks_at_values_is_measured_and_searched_for(caplog: pytest.LogCaptureFixture) -> None:
    module = zoo()["reused"]()
    module.training_step = lambda batch, batch_idx=0: _looking(module, batch)
    budget = preset(zoo()["reused"](), "resident").memory.total
    plan = _auto(module, budget)
    assert any("step is run once on 'cpu'" in message for message in caplog.messages)
    traced = _auto(zoo()["reused"](), budget)
    assert (plan.chunks, plan.blocks) == (traced.chunks, traced.blocks)
    assert plan.prediction is not None


def test_without_a_batch_a_preset_takes_its_place_on_a_device_that_says_what_it_has_free(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from token_batches()

    budget = preset(zoo()["reused"](), "resident").memory.total
    monkeypatch.setattr(CPUDevice, "free_bytes", lambda self: 2 * budget)
    strategy, spy = ProTrainStrategy(hardware=CPU), Spy()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, callbacks=[spy], limit_val_batches=0, **QUIET
    )
    trainer.fit(zoo()["reused"](), DataLoader(Stream(), batch_size=None))
    assert spy.plan is not None
    assert (spy.plan.num_offloaded_chunks, spy.plan.prediction) == (0, None)
    assert any("No plan is searched for" in message for message in caplog.messages)


def _looking(module: L.LightningModule, batch: Any) -> torch.Tensor:
    """A step that depends on a value."""
    loss = type(module).training_step(module, batch, 0)
    return loss if loss.item() < 1e9 else 2 * loss


def test_auto_counts_the_states_of_the_optimizer_in_use() -> None:
    """SGD without momentum keeps nothing, so it fits where AdamW does not."""
    module = zoo()["reused"]()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    needed = _auto(module, "1GiB").prediction.device_bytes
    assert _auto(zoo()["reused"](), "1GiB").prediction.device_bytes > needed
    assert _auto(zoo()["reused"](), needed).num_offloaded_chunks > 0


def test_more_budget_means_more_buffers_and_fewer_uploads() -> None:
    most = preset(zoo()["reused"](), "offload")
    chunks = sorted(chunk.nbytes for chunk in most.chunks)
    strategies = [
        ProTrainStrategy(plan="offload", device_memory=size) for size in (most.memory.total - chunks[0], "1GiB")
    ]
    buffers = [_spy(zoo()["reused"](), strategy).plan.num_chunk_buffers for strategy in strategies]
    assert buffers[0] < buffers[1] == most.num_chunk_buffers
    assert strategies[0].counters.uploads > strategies[1].counters.uploads > 0
    assert strategies[0].counters.peak_live_bytes < strategies[1].counters.peak_live_bytes


# --- batches that grow ------------------------------------------------------------------------------------------------

# Sequences of so many tokens, in batches of 64: what is planned for is the first.
RISING = (4, 5, 12, 4, 14, 3, 16)
SWAPPING = {"num_swap_blocks": 2, "num_checkpoint_blocks": 1}
open_knobs = pytest.mark.filterwarnings("ignore:Settings of the plan that were not given")


def _rising(module: ParityModule, strategy: Any = "auto", **options: Any) -> Result:
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(32, (64, length), generator=generator) for length in RISING]
    module.train_dataloader = lambda: DataLoader([[batch] for batch in batches], batch_size=None)
    fit(module, strategy=strategy, max_epochs=2, **options)
    return Result(tuple(module.losses), snapshot(module))


@pytest.mark.sample(4)
@open_knobs
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["tied", "dropout", "reused", "frozen"])
def test_parity_where_batches_grow_under_a_plan_that_swaps(name: str, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    blocks = {"blocks": [f"network.model.layers.{i}" for i in (1, 2, 3)]} if name == "frozen" else {}
    strategy = ProTrainStrategy(**SWAPPING, **blocks)
    plain, found = _rising(zoo()[name](), **options), _rising(zoo()[name](), strategy, **options)
    assert differences(plain, found) == []
    assert strategy.plan is not None
    planned = sum(block.swap_bytes for block in strategy.plan.blocks)
    assert strategy.counters.swapped_out_bytes > 1.5 * planned * 2 * len(RISING)


@open_knobs
def test_the_host_gives_no_more_than_it_may(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with pytest.raises(
        RuntimeError, match=r"saves more than planned: .* \(\d+ bytes\) .* the host may give .* \(\d+ bytes\) more"
    ):
        _rising(zoo()["reused"](), ProTrainStrategy(host_memory="700KiB", **SWAPPING))
    caplog.clear()
    strategy = ProTrainStrategy(host_memory="3MiB", **SWAPPING)
    assert differences(_rising(zoo()["reused"]()), _rising(zoo()["reused"](), strategy)) == []
    assert sum("this one took" in record.message for record in caplog.records) == 1


# --- what it attaches and what it leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", {**zoo(), **variants()})
def test_resident_installs_nothing(model: str) -> None:
    spy = _spy({**zoo(), **variants()}[model](), ProTrainStrategy(plan="resident"))
    assert spy.num_hooks == 0
    assert spy.replaced == []
    assert spy.hooked == []


def test_offload_attaches_to_every_unit_and_every_parameter() -> None:
    module = zoo()["reused"]()
    spy = _spy(module, ProTrainStrategy(plan="offload"))
    assert spy.replaced == [
        f"network.{name}" for name in ("embedding", *(f"blocks.{i}" for i in range(3)), "norm", "head")
    ]
    assert spy.hooked == [name for name, _ in module.named_parameters()]
    assert spy.num_hooks == len(spy.replaced) + len(spy.hooked)


@pytest.mark.parametrize("make", [kept, half, lambda module: "offload"])
def test_nothing_is_left_after_fit(make: Callable[[nn.Module], Plan | str]) -> None:
    module = zoo()["tied"]()
    keys = {name: set(vars(inner)) for name, inner in module.network.named_modules()}
    strategy = ProTrainStrategy(plan=make(module))
    fit(module, strategy=strategy)
    assert {name: set(vars(inner)) for name, inner in module.network.named_modules()} == keys
    for parameter in module.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    assert module.network.config.use_cache
    assert strategy.plan is not None  # what has run can still be read
    assert strategy.num_hooks == 0
    assert strategy.counters.live_bytes == 0


def test_counters() -> None:
    module = zoo()["reused"]()
    strategy = ProTrainStrategy(plan="offload")
    assert strategy.counters == TransferCounters()
    fit(module, strategy=strategy)
    counters = strategy.counters
    trained = sum(parameter.nbytes for parameter in module.parameters())
    steps = len(token_batches())
    assert counters.downloaded_bytes == trained * steps
    assert counters.uploaded_bytes >= trained * steps
    assert counters.uploads == counters.prefetch_hits + counters.prefetch_misses
    assert counters.prefetch_misses == steps, "only the first unit of a step is fetched when it is entered"
    assert 0 < counters.peak_live_bytes < trained


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_the_measured_peak_is_not_that_of_what_came_before(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def place(*args: Any, **kwargs: Any) -> Any:
        seen.append("place")
        return apply_plan(*args, **kwargs)

    monkeypatch.setattr(CPUDevice, "forget_peak", lambda self: seen.append("forget"))
    monkeypatch.setattr(protrain, "apply_plan", place)
    fit(zoo()["reused"](), strategy=ProTrainStrategy(plan=plan), max_steps=1)
    assert seen == ["forget", "place"]


def test_teardown_twice_and_without_a_run() -> None:
    strategy = ProTrainStrategy(plan="offload")
    trainer = fit(zoo()["reused"](), strategy=strategy, max_steps=1)
    trainer.strategy.teardown()
    trainer.strategy.teardown()
    assert strategy.num_hooks == 0
    fresh = L.Trainer(strategy=ProTrainStrategy(), accelerator="cpu", devices=1, **QUIET)
    fresh.strategy.teardown()
    assert fresh.strategy.plan is None


def test_a_model_without_blocks_is_one_block() -> None:
    def make() -> ParityModule:
        torch.manual_seed(0)
        return ParityModule(nn.Sequential(nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, 32)))

    plain, found = run(make()), run(make(), "offload")
    assert differences(plain, found) == []


SCRIPT = """
import sys
import torch
from lightning_protrain import ProTrainStrategy
from tests.support.models import fit, zoo

if __name__ == "__main__":
    torch.set_num_threads(1)
    module = zoo()["tied"]()
    offload = ProTrainStrategy(plan="offload", start_method="spawn")
    strategies = {"spawn": "protrain_spawn", "offload": offload}
    fit(module, strategy=strategies[sys.argv[1]])
    torch.save(module.state_dict(), sys.argv[2])
"""


@pytest.mark.slow
def test_spawned_runs_bring_their_weights_back() -> None:
    Path("script.py").write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    module = zoo()["tied"]()
    fit(module)
    plain = module.state_dict()
    for kind in ("spawn", "offload"):
        command = [sys.executable, "script.py", kind, f"{kind}.pt"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(root)}, timeout=240)
        found = torch.load(f"{kind}.pt")
        assert found.keys() == plain.keys()
        assert all(torch.equal(value, plain[name]) for name, value in found.items()), kind


@pytest.mark.parametrize("number", [0, -5, "x", 2.5, True, None])
def test_a_number_of_parameters_that_is_none(number: Any) -> None:
    with pytest.raises(ValueError, match=r"min_num_params=.*: give a positive number of parameters"):
        ProTrainStrategy(min_num_params=number)
