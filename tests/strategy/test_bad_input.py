"""Every refusal names what is wrong, with its numbers, and what to do; the model is as it was before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_protrain.device.device import TransferCounters
from lightning_protrain.device.host import HostMemory
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU
from tests.support.models import HIDDEN, LanguageModel, Mlp, ParityModule, fit, zoo
from tests.support.plans import half, kept

KNOBS = (
    *("num_persistent_chunks", "num_chunk_buffers", "num_swap_blocks", "num_checkpoint_blocks"),
    *("num_keep_offloaded_blocks", "chunk_bytes"),
)


def _state(module: nn.Module) -> list[Any]:
    """Return the state that a refusal must not change: objects, memory, gradients, and all attachments."""
    parameters = [
        (name, id(p), p.data_ptr(), p._version, p.requires_grad, p.grad, _hooks(p))
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    modules = [(name, id(m), "forward" in vars(m), len(m._forward_hooks)) for name, m in module.named_modules()]
    return [parameters, modules, [(name, id(b), b.data_ptr()) for name, b in module.named_buffers()]]


def _hooks(parameter: nn.Parameter) -> tuple[Any, Any]:
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


@pytest.fixture
def made_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all host memory that is allocated for chunks."""
    sizes: list[int] = []
    make = HostMemory._new_block
    monkeypatch.setattr(HostMemory, "_new_block", lambda self, size: (sizes.append(size), make(self, size))[1])
    return sizes


def _refused(module: L.LightningModule, message: str, made_blocks: list[int], **arguments: Any) -> None:
    """Fits with these arguments of the strategy: it raises `message`, allocates nothing and changes nothing."""
    before = _state(module)
    strategy = ProTrainStrategy(**arguments)
    with pytest.raises(ValueError, match=message):
        fit(module, strategy=strategy)
    assert _state(module) == before
    assert made_blocks == []
    assert strategy.counters == TransferCounters()
    assert strategy.plan is None
    assert strategy.num_hooks == 0


def test_the_state_shows_what_a_plan_does(made_blocks: list[int]) -> None:
    module = zoo()["tied"]()
    before = _state(module)
    fit(module, strategy=ProTrainStrategy(plan="offload"), max_steps=1)
    assert _state(module) != before
    assert made_blocks


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"plan": "offload", "device_memory": 100},
            r"needs at least .*\d+ bytes.* 100 bytes are allowed.*Raise device_mem",
        ),
        (
            {"plan": "auto", "device_memory": "1KiB", "hardware": CPU},
            r"need at least .*\d+ bytes.*\(1024 bytes\) are allowed.*Raise device_memory to ",
        ),
        (
            {"plan": "resident", "device_memory": 5000},
            r'plan="resident" needs .*\(5000 bytes\).*"auto", or .*"offload"',
        ),
        (
            {"plan": "offload", "host_memory": 5000},
            r"of host memory, .*\(5000 bytes\) are available.*Raise host_memory",
        ),
        (
            {"num_persistent_chunks": 3, "device_memory": 2000, "hardware": CPU},
            r"need at least .*\(2000 bytes\) are allowed",
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Settings of the plan that were not given")
def test_budget(arguments: dict[str, Any], message: str, made_blocks: list[int]) -> None:
    _refused(zoo()["tied"](), message, made_blocks, **arguments)


def test_a_plan_above_the_budget(made_blocks: list[int]) -> None:
    module = zoo()["lstm"]()
    plan = half(module)
    budget = plan.memory.total - 1
    message = rf"needs .*{plan.memory.total} bytes.*{budget} bytes.*Raise device_memory"
    _refused(module, message, made_blocks, plan=plan, device_memory=budget)


@pytest.mark.parametrize(
    "value", ["many", "", "12 parsecs", "-1GiB", "1e3", 0, -5, 2.5, True, None, [1], "1 GiB 2 MiB"]
)
@pytest.mark.parametrize("name", ["device_memory", "host_memory"])
def test_amount_of_memory(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"is not an amount of memory\. Give e\.g\. \"22GiB\"") as refusal:
        ProTrainStrategy(**{name: value})
    assert str(refusal.value).startswith(f"{name}={value!r} is")


# --- knobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False, -1, 1.0, "2"])
@pytest.mark.parametrize("knob", KNOBS)
def test_knob_of_a_wrong_kind(knob: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{knob}={value!r}: give an integer of at least [01], or None"):
        ProTrainStrategy(**{knob: value})


def test_a_chunk_of_no_bytes() -> None:
    with pytest.raises(ValueError, match="chunk_bytes=0: give an integer of at least 1"):
        ProTrainStrategy(chunk_bytes=0)


@pytest.mark.parametrize("model", ["reused", "moe"])  # the latter looks at values: it is measured
def test_swap_needs_activations_that_could_be_swapped(model: str, made_blocks: list[int]) -> None:
    _refused(zoo()[model](), "num_swap_blocks=1.*no activations of block", made_blocks, num_swap_blocks=1)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_persistent_chunks": 999}, r"num_persistent_chunks=999: this model has \d+ chunks"),
        ({"num_chunk_buffers": 0}, r"num_chunk_buffers=0: this model needs at least 1 with these settings"),
        ({"num_checkpoint_blocks": 4}, r"num_checkpoint_blocks=4: this model has 3 blocks"),
        ({"num_keep_offloaded_blocks": 4}, r"num_keep_offloaded_blocks=4: 3 of 3 blocks have offloaded chunks"),
        (
            {"num_keep_offloaded_blocks": 1, "num_checkpoint_blocks": 1},
            r"num_keep_offloaded_blocks=1 contradicts num_checkpoint_blocks=1, which leaves 2 .* Leave one of them out",
        ),
        (
            {"plan": "resident", "num_chunk_buffers": 2},
            r'plan="resident" .* would ignore num_chunk_buffers=2.*plan="auto"',
        ),
        ({"plan": "offload", "num_persistent_chunks": 1}, r'plan="offload" .* would ignore num_persistent_chunks=1'),
        ({"plan": "offload", "num_checkpoint_blocks": 0}, r'plan="offload" .* would ignore num_checkpoint_blocks=0'),
        ({"blocks": ["network.blok"]}, r"no module is called 'network\.blok'.* Similar: .*'network\.blocks'"),
        ({"blocks": [nn.GRU]}, r"no module is a GRU"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Settings of the plan that were not given")
def test_knob_out_of_range(knobs: dict[str, Any], message: str, made_blocks: list[int]) -> None:
    _refused(zoo()["reused"](), message, made_blocks, **knobs)


def test_hardware_of_another_type() -> None:
    with pytest.raises(ValueError, match=r"hardware='RTX 4090': give a HardwareProfile, or None\."):
        ProTrainStrategy(hardware="RTX 4090")  # type: ignore[arg-type]


class Checkpointing(ParityModule):
    """Checkpoints its blocks in the step, where no attribute of a module says so."""

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        network: Any = self.network
        hidden = network.embedding(tokens)
        for block in network.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return network.head(network.norm(hidden))


def test_a_step_that_checkpoints_streamed_blocks_itself_is_told_to_stop() -> None:
    module = Checkpointing(LanguageModel([Mlp() for _ in range(3)]))
    with pytest.raises(CheckpointError) as failure:
        fit(module, strategy=ProTrainStrategy(plan="offload", monitor=False))
    assert ["around streamed blocks, remove the call; if" in each for each in failure.value.__notes__].count(True) == 1


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if knob != "num_swap_blocks"])
def test_knobs_beside_a_plan(knob: str) -> None:
    with pytest.raises(ValueError, match=rf"plan=a Plan makes all decisions and would ignore {knob}=1"):
        ProTrainStrategy(plan=kept(zoo()["reused"]()), **{knob: 1})


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tied", "frozen", "lstm", "moe", "dropout"])
def test_a_plan_for_another_model(model: str, made_blocks: list[int]) -> None:
    plan = kept(zoo()[model]())
    _refused(zoo()["reused"](), "made for another model: make the plan again", made_blocks, plan=plan)


def test_a_plan_for_another_width_and_for_frozen_weights(made_blocks: list[int]) -> None:
    module = zoo()["reused"]()
    plan = kept(module)
    module.network.head = nn.Linear(HIDDEN, 48, bias=False)
    message = r"has 'network\.head\.weight' as trainable float32\[32, 16\], the model as trainable float32\[48, 16\]"
    _refused(module, message, made_blocks, plan=plan)
    frozen = zoo()["reused"]()
    frozen.network.head.requires_grad_(False)
    _refused(frozen, r"as trainable float32.* the model as frozen float32", made_blocks, plan=plan)


@pytest.mark.parametrize("plan", ["autoo", "", "Resident", Path("nowhere")], ids=repr)
def test_an_unknown_preset(plan: Any) -> None:
    with pytest.raises(ValueError, match=r'No plan at .*Give plan="auto", "resident", "offload"'):
        ProTrainStrategy(plan=plan)


@pytest.mark.parametrize("plan", [None, 3, True, ["auto"]])
def test_a_plan_of_a_wrong_type(plan: Any) -> None:
    with pytest.raises(ValueError, match=r'plan=.*: give "auto", "resident", "offload", a Plan'):
        ProTrainStrategy(plan=plan)


# --- precision and hardware -------------------------------------------------------------------------------------------


def _mps_trainer() -> L.Trainer:
    return L.Trainer(accelerator="mps", devices=1, strategy="protrain", logger=False)


def _mps_strategy() -> ProTrainStrategy:
    return ProTrainStrategy(accelerator=object.__new__(MPSAccelerator))


@pytest.mark.parametrize("make", [_mps_trainer, _mps_strategy])
def test_mps(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with MPS is made up; nothing of it is reached."""
    monkeypatch.setattr(MPSAccelerator, "__init__", lambda self: None)
    for name, answer in (("is_available", True), ("parse_devices", [0]), ("get_parallel_devices", [])):
        monkeypatch.setattr(MPSAccelerator, name, staticmethod(lambda *_, answer=answer: answer))
    with pytest.raises(ValueError, match=r'does not run on accelerator="mps".*Use accelerator="cpu"'):
        make()


@pytest.mark.parametrize("again", ["auto", "cpu"])
@pytest.mark.parametrize("fitted", [False, True])
def test_one_strategy_for_two_trainers(again: str, fitted: bool) -> None:
    strategy = ProTrainStrategy()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, fast_dev_run=True)
    if fitted:
        trainer.fit(zoo()["lstm"]())
    with pytest.raises(ValueError, match=r"belongs to another Trainer already\. Make a new one for each Trainer"):
        L.Trainer(strategy=strategy, accelerator=again, devices=1, logger=False)
    assert trainer.strategy is strategy


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["auto", "offload"])
@pytest.mark.parametrize("model", ["tied", "dropout"])
def test_gradient_checkpointing_of_the_model_itself(model: str, plan: str, made_blocks: list[int]) -> None:
    module = zoo()[model]()
    module.network.gradient_checkpointing_enable()
    message = r"Gradient checkpointing is switched on in 'network\..*gradient_checkpointing_disable\(\)"
    _refused(module, message, made_blocks, plan=plan)


@pytest.mark.parametrize("plan", ["auto", "resident", "offload"])
def test_weights_without_values(plan: str, made_blocks: list[int]) -> None:
    with torch.device("meta"):
        module = ParityModule(LanguageModel([Mlp(), Mlp()]))
    message = r"'network\.embedding\.weight' is on the meta device.* in `configure_model`"
    _refused(module, message, made_blocks, plan=plan)


def test_a_graph_of_streamed_weights_is_refused_before_training() -> None:
    module, logger = ParityModule(LanguageModel([Mlp(), Mlp()])), DummyLogger()
    logger._log_graph = True  # As in TensorBoardLogger.
    with pytest.raises(ValueError, match=r"`log_graph=True` of a logger traces the model.*plan=\"resident\""):
        fit(module, strategy=ProTrainStrategy(plan="offload"), logger=logger)
    assert module.losses == []
    fit(module, strategy=ProTrainStrategy(plan="resident"), logger=logger)
