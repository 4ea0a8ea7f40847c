"""Optimizers with states of 8 bits under the strategy: plain Lightning's bits, and the bytes that are planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain.planner.memory import host_terms, memory_terms
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime.optim import bnb_optimizers
from lightning_protrain.runtime.optim.adam8bit import is_blockwise
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.optim.bnb_optimizers import mean_state_bytes
from lightning_protrain.strategy import describe
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU
from tests.support.models import ParityModule, fit
from tests.support.parity import Result, differences, run, snapshot
from tests.support.plans import half, plans
from tests.support.trainers import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

VOCABULARY, WIDTH, SEQUENCE = 64, 64, 16
# Tokens that nothing tells, so that the loss has a floor that is not zero.
NOISE = 0.3
KINDS: dict[str, Callable[[Any], Any]] = {
    "AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, weight_decay=0.1),
    "PagedAdamW8bit": lambda p: bnb.optim.PagedAdamW8bit(p, lr=1e-2, weight_decay=0.1),
    "Lion8bit": lambda p: bnb.optim.Lion8bit(p, lr=1e-3),
}
SHORT: dict[str, Any] = {"limit_train_batches": 5}


class Mixer(nn.Module):
    """A block of 24 thousand elements, most of them in weights that are large enough for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.over = nn.Linear(SEQUENCE, SEQUENCE)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = torch.ones(SEQUENCE, SEQUENCE).tril()
        hidden = hidden + F.linear(hidden.transpose(1, 2), self.over.weight * mask, self.over.bias).transpose(1, 2)
        return hidden + self.down(F.silu(self.up(self.norm(hidden))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Module(ParityModule):
    """Learns sequences in which a token mostly follows from the one before, with an optimizer of `KINDS`."""

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters()) if self.optimizer in KINDS else super().configure_optimizers()

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(5)
        start = torch.randint(VOCABULARY, (400, 1), generator=generator)
        tokens = (start + torch.arange(SEQUENCE) * 7) % VOCABULARY
        random = torch.randint(VOCABULARY, tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < NOISE, random, tokens)
        return DataLoader(TensorDataset(tokens), batch_size=2)


def module(kind: str) -> Module:
    torch.manual_seed(0)
    return Module(Network(), optimizer=kind)


LOOPS: dict[str, dict[str, Any]] = {
    "alone": {},
    "clipped and accumulated": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    "values clipped": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
}


@cache
def plain(kind: str, loop: str) -> Result:
    """The optimizer in plain Lightning."""
    return run(module(kind), **SHORT, **LOOPS[loop])


def overlapped(one: Module, overlap: Any, plan: Any = "offload", **options: Any) -> Result:
    """Without a callback that looks at gradients, so that steps may be taken behind backward."""
    fit(one, strategy=ProTrainStrategy(plan=plan, overlap_optimizer=overlap), **SHORT, **options)
    return Result(tuple(one.losses), snapshot(one))


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of parameters that each step leaves to the host's worker."""
    found: list[int] = []
    real = AsyncStep.launch

    def launch(updates: AsyncStep) -> set[int]:
        parameters = real(updates)
        found.append(len(parameters))
        return parameters

    monkeypatch.setattr(AsyncStep, "launch", launch)
    return found


# Behind backward nothing is clipped by its norm.
WAYS = [
    (plan, overlap, loop)
    for plan, overlap in (("resident", "off"), ("half", "off"), ("offload", "backward"), ("half", "forward"))
    for loop in LOOPS
    if (overlap, loop) != ("backward", "clipped and accumulated")
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("plan", "overlap", "loop"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_overlap_gives_the_bits_of_plain_lightning(
    kind: str, plan: str, overlap: Any, loop: str, stepped: list[int]
) -> None:
    expected = plain(kind, loop)
    found = overlapped(module(kind), overlap, plans()[plan](module(kind)), **LOOPS[loop])
    assert not any(stepped[:1])
    assert min(stepped[1:], default=0) > 0 if overlap != "off" else not any(stepped)
    assert differences(Result(expected.losses, expected.weights), found) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", ["backward", "forward", "off"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_weights_in_two_bytes(precision: Any, overlap: Any) -> None:
    """Streamed as copies that the step writes, or as they are."""
    one, other = module("AdamW8bit"), module("AdamW8bit")
    fit(one, precision=precision, **SHORT)
    found = overlapped(other, overlap, precision=precision)
    assert differences(Result(tuple(one.losses), snapshot(one)), found) == []


@pytest.mark.parametrize("overlap", ["backward", "forward", "off"])
def test_an_overridden_embedding_is_known_beside_the_device(overlap: Any) -> None:
    """States of 32 bits and a rate of its own, as `GlobalOptimManager` has them."""
    results = []
    manager = bnb.optim.GlobalOptimManager.get_instance()
    for plainly in (True, False):
        one = module("AdamW8bit")
        manager.initialize()
        manager.register_module_override(one.network.blocks[1].up, "weight", {"optim_bits": 32, "lr": 0.1})
        try:
            if plainly:
                fit(one, **SHORT)
                results.append(Result(tuple(one.losses), snapshot(one)))
            else:
                results.append(overlapped(one, overlap, half(one)))
        finally:
            manager.initialize()
    expected = plain("AdamW8bit", "alone")
    assert differences(results[0], Result(expected.losses, expected.weights)) != []
    assert differences(*results) == []


def way(how: str) -> Any:
    return "auto" if how == "plain" else ProTrainStrategy(plan="offload", overlap_optimizer=how)  # type: ignore[arg-type]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("first", "second"), [("plain", "off"), ("off", "plain"), ("backward", "backward"), ("forward", "forward")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_where_another_has_saved_it(kind: str, first: str, second: str, tmp_path: Path) -> None:
    whole, begun, resumed = module(kind), module(kind), module(kind)
    fit(whole, max_epochs=2, **SHORT)
    saving = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="last")
    fit(begun, strategy=way(first), callbacks=[saving], **{**SHORT, "enable_checkpointing": True})
    again = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, strategy=way(second), **SHORT, **QUIET)
    again.fit(resumed, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    both = Result((*begun.losses, *resumed.losses), snapshot(resumed))
    assert differences(Result(tuple(whole.losses), snapshot(whole)), both) == []


def test_a_version_without_a_step_on_the_host_may_keep_everything_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bnb_optimizers, "_KERNEL", "bitsandbytes::dequantize_4bit.out")
    one = module("AdamW8bit")
    strategy = ProTrainStrategy(plan="offload")
    with pytest.raises(ValueError, match=r"AdamW8bit of the installed bitsandbytes has no step .* bitsandbytes>=0\.50"):
        fit(one, strategy=strategy, **SHORT)
    assert strategy.plan is None
    assert not one.losses
    fit(one, strategy=ProTrainStrategy(plan="resident"), **SHORT)
    assert len(one.losses) == SHORT["limit_train_batches"]


def test_the_search_knows_what_the_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search knows the bytes of the states on the host, and the time of the step."""
    monkeypatch.setattr(describe, "host_slowdown", lambda optimizers, _: 8.0 if is_blockwise(optimizers[0]) else 1.0)
    found = {}
    for kind in ("adamw", "AdamW8bit"):
        strategy = ProTrainStrategy(device_memory="1MiB", num_persistent_chunks=0, hardware=CPU, monitor=False)
        fit(module(kind), strategy=strategy, **SHORT)
        assert strategy.plan is not None
        assert strategy.plan.prediction is not None
        found[kind] = strategy.plan.prediction
    elements = sum(parameter.numel() for parameter in module("adamw").parameters())
    seconds = [found[kind].busy["host"] for kind in ("adamw", "AdamW8bit")]
    assert seconds[1] - seconds[0] == pytest.approx((8.0 - 1) * elements / CPU.host_step, rel=0.01)
    saved = found["adamw"].host_bytes - found["AdamW8bit"].host_bytes
    assert saved == pytest.approx(elements * (8 - mean_state_bytes([KINDS["AdamW8bit"](module("adamw").parameters())])))


class Held(L.Callback):
    """Bytes that parameters, gradients and states really take, by whether the plan has the parameter resident."""

    def __init__(self, strategy: ProTrainStrategy) -> None:
        self.strategy = strategy
        self.nbytes: dict[tuple[str, bool], int] = {}

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        plan = self.strategy.plan
        assert plan is not None
        if not optimizer.state:
            return
        resident = {fqn for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters}
        self.nbytes.clear()
        for name, parameter in pl_module.named_parameters():
            states = [value for key, value in optimizer.state[parameter].items() if not key.startswith("qmap")]
            found = {
                "parameters": parameter.nbytes,
                "gradients": parameter.grad.nbytes if parameter.grad is not None else 0,
                "optimizer_states": sum(value.nbytes for value in states if isinstance(value, Tensor)),
            }
            for what, nbytes in found.items():
                key = (what, name in resident)
                self.nbytes[key] = self.nbytes.get(key, 0) + nbytes


@pytest.mark.parametrize("plan", ["offload", "half"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_as_planned_on_the_host_and_on_the_device(kind: str, plan: str) -> None:
    one = module(kind)
    strategy = ProTrainStrategy(plan=_planned(one, plan, kind), monitor=False)
    held = Held(strategy)
    fit(one, strategy=strategy, callbacks=[held], **SHORT)
    assert isinstance(strategy.plan, Plan)
    layout = describe_model(module(kind))
    state_bytes = mean_state_bytes([KINDS[kind](module(kind).parameters())])
    assert state_bytes < (2.3 if "Adam" in kind else 1.2)
    planned = host_terms(layout, strategy.plan, state_bytes, asynchronous=False)
    for what in ("parameters", "gradients", "optimizer_states"):
        pages = 4096 * sum(not chunk.resident for chunk in strategy.plan.chunks) if what != "optimizer_states" else 0
        assert planned[what] - pages <= held.nbytes[what, False] * 1.01
        assert planned[what] >= held.nbytes[what, False] * 0.99
    on_device = sum(nbytes for (_, resident), nbytes in held.nbytes.items() if resident)
    padding = 2 * 256 * sum(len(chunk.parameters) for chunk in strategy.plan.chunks if chunk.resident)
    assert strategy.plan.memory.resident_states - padding <= on_device * 1.01
    assert strategy.plan.memory.resident_states >= on_device * 0.99


def _planned(one: Module, plan: str, kind: str) -> Any:
    """Return the strategy's plan, or the plan with half of the chunks resident."""
    if plan == "offload":
        return "offload"
    made = half(one)
    state_bytes = mean_state_bytes([KINDS[kind](module(kind).parameters())])
    terms = memory_terms(describe_model(one), made.chunks, made.num_chunk_buffers, state_bytes, made.blocks)
    return replace(made, memory=terms)
