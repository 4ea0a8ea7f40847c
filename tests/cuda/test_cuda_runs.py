"""Whole runs on a GPU: overlapped steps, swapping, the search, measured profiles, and running out of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.transfers import TransferProbe
from lightning_protrain.device.device import Device
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.runtime.shadow import InPlaceGrad
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.cuda.marks import CUDA, needs_gpu, needs_real_gpu
from tests.runtime.swapped import SLAB
from tests.support.gpus import DEVICE, STAND_IN
from tests.support.machines import CPU
from tests.support.models import LanguageModel, Mlp, ParityModule, ValidationModule, fit, token_batches, zoo
from tests.support.parity import CLIPPING, snapshot
from tests.support.plans import PlanMaker, kept, place, plans, selective

pytestmark = CUDA
# What two kernels of one sum in another order differ by: in float32, and where bfloat16 is computed in.
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
ROUGH = {"rtol": 2e-2, "atol": 2e-2}
# The search asks the machine nothing: its rates change which plan is found, not whether it fits.
GPU = replace(CPU, name="Test GPU", flops=dict.fromkeys(CPU.flops, 10e12), memory=500e9, asynchronous=True)
MIB = 1 << 20


def train(module: L.LightningModule, strategy: ProTrainStrategy | None = None, **options: Any) -> L.Trainer:
    return fit(module, accelerator=DEVICE, strategy=strategy or "auto", **options)


def make(optimizer: str = "sgd") -> ValidationModule:
    torch.manual_seed(0)
    return ValidationModule(LanguageModel([Mlp() for _ in range(4)]), optimizer=optimizer)


def device_of(strategy: ProTrainStrategy) -> Device:
    assert strategy._device is not None
    return strategy._device


def assert_weights_equal(expected: nn.Module, found: nn.Module) -> None:
    for (name, one), (_, other) in zip(expected.state_dict().items(), found.state_dict().items(), strict=True):
        assert torch.equal(one.cpu(), other.cpu()), name


# --- overlapped steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", CLIPPING)
def test_gradients_in_shadow_copies(clipping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[InPlaceGrad] = []
    made = InPlaceGrad.__init__
    monkeypatch.setattr(InPlaceGrad, "__init__", lambda grad, *given: (lent.append(grad), made(grad, *given))[1])
    expected, found = make(), make()
    options = {"precision": "bf16-mixed", "limit_val_batches": 0, **CLIPPING[clipping]}
    train(expected, **options)
    overlap: Any = "forward" if clipping == "norm" else "backward"
    train(found, ProTrainStrategy(plan="offload", overlap_optimizer=overlap, monitor=False), **options)
    assert lent
    torch.testing.assert_close(found.losses, expected.losses, **ROUGH)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_overlap_changes_no_bit_and_evaluation_sees_whole_steps(overlap: Any, precision: Any) -> None:
    modules = []
    for way in ("off", overlap):
        module = make("adamw")
        strategy = ProTrainStrategy(plan="offload", overlap_optimizer=way)
        train(module, strategy, precision=precision, val_check_interval=2, limit_val_batches=2, max_epochs=2)
        modules.append(module)
    one, other = modules
    assert len(one.val_losses) > 20
    assert torch.equal(torch.stack(one.losses), torch.stack(other.losses))
    assert torch.equal(torch.stack(one.val_losses), torch.stack(other.val_losses))
    assert_weights_equal(one, other)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_what_is_saved_while_steps_are_pending_resumes_to_the_same_weights(overlap: Any, tmp_path: Path) -> None:
    def strategy() -> ProTrainStrategy:
        return ProTrainStrategy(plan="offload", overlap_optimizer=overlap)

    whole, resumed = make("adamw"), make("adamw")
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"limit_val_batches": 0}
    train(whole, strategy(), callbacks=[saving], enable_checkpointing=True, limit_train_batches=8, **options)
    state = torch.load(tmp_path / "step=3.ckpt", weights_only=False)
    resumed.load_state_dict(state["state_dict"])
    # Lightning does not restore the position in the data: the batches that are left are given.
    resumed.train_dataloader = lambda: DataLoader(list(token_batches())[3:8], batch_size=None)
    resumed.on_fit_start = lambda: resumed.trainer.strategy.load_optimizer_state_dict(state)
    train(resumed, strategy(), **options)
    assert_weights_equal(whole, resumed)


def test_a_step_that_overflows_is_skipped_whole() -> None:
    scales, modules = [], []
    for plan in (None, "offload"):
        module, scaler = make(), torch.amp.GradScaler(DEVICE, init_scale=2.0**40, growth_interval=100)
        before = snapshot(module)
        plugins = MixedPrecision("16-mixed", DEVICE, scaler)
        strategies = [None if plan is None else ProTrainStrategy(plan=plan) for _ in range(2)]
        train(module, strategies[0], plugins=plugins, max_steps=2, limit_val_batches=0)
        assert all(torch.equal(value.cpu(), before[name]) for name, value in module.state_dict().items())
        train(module, strategies[1], plugins=plugins, max_epochs=3, limit_val_batches=0)
        scales.append(scaler.get_scale())
        modules.append(module)
    assert scales[0] == scales[1] < 2.0**40
    torch.testing.assert_close(modules[1].losses, modules[0].losses, **ROUGH)


# --- activations ------------------------------------------------------------------------------------------------------

POLICIES: dict[str, PlanMaker] = {
    "swap": lambda module: place(module, swap_bytes=lambda index: SLAB * (index % 2 == 0)),
    "swapped inputs": lambda module: place(
        module, checkpointed=lambda index: index % 3 > 0, swap_bytes=lambda index: SLAB
    ),
    "selective": selective,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trait", ["reused", "moe", "frozen"])
def test_policies_of_activations(trait: str, policy: str) -> None:
    expected, found = zoo()[trait](optimizer="sgd"), zoo()[trait](optimizer="sgd")
    for module in (expected, found):  # Activations of whole pages, as smaller ones are not worth a copy.
        module.train_dataloader = lambda: DataLoader(torch.arange(7 * 32 * 8).view(7, 1, 32, 8) % 31, batch_size=None)
    strategy = ProTrainStrategy(plan=POLICIES[policy](zoo()[trait]()))
    train(expected)
    train(found, strategy)
    torch.testing.assert_close(found.losses, expected.losses, **CLOSE)
    swapped = strategy.counters.swapped_out_bytes, strategy.counters.swapped_in_bytes
    assert all(swapped) == (policy != "selective")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_is_recomputed_draws_the_same_dropout(precision: Any) -> None:
    losses = []
    for plan in (kept, plans()["offload"], selective):
        module = zoo()["dropout"](optimizer="sgd")
        train(module, ProTrainStrategy(plan=plan(zoo()["dropout"]())), precision=precision)
        losses.append(torch.stack(module.losses))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


# --- memory -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention and an MLP: (B, S, H) to (B, S, H)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.projections = nn.Linear(hidden, 3 * hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.projections(hidden).unflatten(-1, (3 * self.heads, 64)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        return hidden + self.down(F.silu(self.up(hidden + attended)))


class AttentionModule(L.LightningModule):
    """Learns to give its input back.

    Args:
        hidden: Width.
        tokens: Batch and length.
        looks: Whether a step looks at an address, as kernels of Triton do, so that it cannot be traced.
    """

    def __init__(self, hidden: int = 256, tokens: tuple[int, int] = (4, 256), looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(hidden) for _ in range(8))
        self.shape, self.repeats, self.looks = (*tokens, 8), hidden // 8, looks  # Little is uploaded beside weights.
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        hidden = repeated = batch.repeat(1, 1, self.repeats)
        for block in self.blocks:
            hidden = block(hidden)
        loss = (hidden - repeated).square().mean()
        self.losses.append(loss.detach().clone())
        assert not self.looks or loss.data_ptr()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        return DataLoader([torch.randn(self.shape, generator=generator) for _ in range(4)], batch_size=None)


def allocated() -> int:
    """Bytes on the device before a run, with the workspaces that cuBLAS takes for this thread."""
    if DEVICE != "cuda":
        return 0
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(256, 256, device=DEVICE, dtype=dtype)
        layer(torch.ones(4, 256, device=DEVICE, dtype=dtype, requires_grad=True)).sum().backward()
    del layer
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("looks", [False, True], ids=["traced", "measured"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("budget", [40 * MIB, 60 * MIB])
def test_what_a_search_predicts_holds(
    budget: int, precision: Any, looks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if STAND_IN and budget == 40 * MIB and precision == "32-true":
        pytest.skip("its attention has no kernel, and holds the whole matrix")
    expected, found = AttentionModule(looks=looks), AttentionModule(looks=looks)
    train(expected, precision=precision)
    allocated()  # The workspaces are no part of what is measured.
    retries = torch.cuda.memory_stats().get("num_alloc_retries")
    strategy = ProTrainStrategy(device_memory=budget, hardware=GPU, rehearse=False)
    caplog.set_level("INFO")
    train(found, strategy, precision=precision)
    plan, device = strategy.plan, device_of(strategy)
    assert isinstance(plan, Plan)
    assert plan.num_offloaded_chunks
    assert plan.prediction is not None
    assert plan.prediction.device_bytes <= budget
    assert any("is run once on" in record.message for record in caplog.records) is looks
    torch.testing.assert_close(found.losses, expected.losses, **(CLOSE if precision == "32-true" else ROUGH))
    peak, stats = device.peak_bytes(), strategy.allocator_stats
    if peak is None:
        pytest.skip("nobody counts the memory of this device")
    assert peak <= plan.prediction.device_bytes
    reserved = stats["reserved_peak_bytes"]
    assert reserved <= 1.1 * plan.prediction.device_bytes + 20 * MIB  # Segments are of 2 or of 20 MiB.
    assert stats["alloc_retries"] == retries


@pytest.mark.skipif(STAND_IN, reason="its attention has no kernel")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_trace_records_what_the_kernels_of_the_device_save(precision: torch.dtype | None) -> None:
    """Attention has a kernel that a trace has to know, and each kernel saves other activations."""

    def context() -> torch.autocast:
        return torch.autocast(DEVICE, precision or torch.bfloat16, enabled=precision is not None, cache_enabled=False)

    profiles = []
    for looks in (False, True):
        module = AttentionModule(looks=looks)
        weights, batch = snapshot(module), next(iter(module.train_dataloader()))
        step: Callable[[], Tensor] = lambda module=module, batch=batch: module.training_step(batch)  # noqa: E731
        how: dict[str, Any] = {"device": DEVICE, "log_once": lambda message: None}
        profiles.append(profile_model(module, describe_model(module), step, context, **how))
        assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
        assert all(weight.grad is None for weight in module.parameters())
    traced, measured = profiles
    assert measured.measured
    assert sum(count for _, count in traced.attention) == 8
    assert replace(measured, measured="") == traced


# --- out of memory ----------------------------------------------------------------------------------------------------


class Exhausting(torch.autograd.Function):
    """An identity whose backward allocates more memory than the device has."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if DEVICE == "cuda":
            return torch.empty(1 << 44, device=DEVICE, dtype=gradient.dtype)
        raise torch.OutOfMemoryError("planned")


class ExhaustingModule(ParityModule):
    """Runs out of memory in the backward of its third batch until `enough` is set."""

    enough = False

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        hidden = self.network.embedding(tokens)
        for index, block in enumerate(self.network.blocks):
            hidden = block(hidden)
            if (batch_idx, index) == (2, 1) and not self.enough:
                hidden = Exhausting.apply(hidden)
        return self.network.head(self.network.norm(hidden))


@pytest.mark.parametrize("plan", ["offload", "kept", "half"])
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_fit_works_after_one_that_ran_out_of_memory(overlap: Any, plan: str) -> None:
    before = allocated()
    torch.manual_seed(0)
    module = ExhaustingModule(LanguageModel([Mlp() for _ in range(3)]))
    first, second = (
        ProTrainStrategy(plan=plans()[plan](copy.deepcopy(module)), overlap_optimizer=overlap) for _ in range(2)
    )
    with pytest.raises(torch.OutOfMemoryError):
        train(module, first)
    assert device_of(first).host.locked_bytes == 0
    assert device_of(first).worker._pool is None
    assert not any("forward" in vars(inner) for inner in module.modules())
    assert {weight.device.type for weight in module.parameters()} == {"cpu"}
    module.losses.clear()
    module.zero_grad()
    assert allocated() - before <= MIB
    module.enough = True
    train(module, second, max_epochs=3)
    assert device_of(second).host.locked_bytes == 0
    assert len(module.losses) == 3 * len(token_batches())
    assert torch.stack(module.losses[-14:]).mean() < torch.stack(module.losses[:14]).mean()


def test_weights_of_half_a_step_are_not_trained_on() -> None:
    """Steps behind backward have begun when the memory runs out."""
    module = ExhaustingModule(LanguageModel([Mlp() for _ in range(3)]))
    strategy = ProTrainStrategy(plan="offload", overlap_optimizer="backward")
    with pytest.raises(torch.OutOfMemoryError):
        train(module, strategy)
    assert device_of(strategy).host.locked_bytes == 0
    with pytest.raises(RuntimeError, match="partially stepped"):
        train(module, ProTrainStrategy(plan="offload"))


# --- transfers --------------------------------------------------------------------------------------------------------


class Probe(L.Callback):
    """Traces the transfers of the last steps."""

    share: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            self._probe = TransferProbe()
            self._probe.start()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.share = self._probe.stop()


@needs_real_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_transfers_are_hidden_behind_long_computation(precision: Any) -> None:
    module, probe = AttentionModule(hidden=1024, tokens=(32, 1024)), Probe()
    # Behind backward, the host steps for longer than an H200 computes in bfloat16, and uploads wait for the host.
    strategy = ProTrainStrategy(num_persistent_chunks=0, num_chunk_buffers=4, hardware=GPU, overlap_optimizer="off")
    train(module, strategy, precision=precision, callbacks=[probe])
    assert strategy.counters.prefetch_hits > strategy.counters.prefetch_misses
    assert probe.share is not None
    assert probe.share > 0.8


@needs_gpu
def test_pruning_needs_resident_weights() -> None:
    def pruned(strategy: ProTrainStrategy | None) -> L.LightningModule:
        module = make()
        options = {"amount": 0.3, "use_lottery_ticket_hypothesis": False}
        train(module, strategy, callbacks=[ModelPruning("l1_unstructured", **options)])
        return module

    with pytest.raises(ValueError, match="ModelPruning cannot prune weights that are streamed to a GPU"):
        pruned(ProTrainStrategy(plan="offload"))
    expected, found = pruned(None), pruned(ProTrainStrategy(plan="resident"))
    assert_weights_equal(expected, found)
