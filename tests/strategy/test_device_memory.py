"""Device memory stays within the plan, also in evaluation; the smallest budget of a refusal is the true one."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

from lightning_protrain.planner import candidates, search
from lightning_protrain.planner.plan import MemoryTerms
from lightning_protrain.runtime.chunk import Chunk, ChunkState
from lightning_protrain.runtime.grad_offload import GradOffload
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU, GIB
from tests.support.models import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    BatchNormMlp,
    Experts,
    LanguageModel,
    Lstm,
    Mlp,
    ParityModule,
    fit,
    zoo,
)
from tests.support.plan_cases import case
from tests.support.plans import alternating, half, kept

BLOCKS: dict[str, type[nn.Module]] = {"mlp": Mlp, "lstm": Lstm, "moe": Experts, "buffers": BatchNormMlp}
DEPTHS = (2, 4, 8)
# One hidden state (B, S, H) in float32.
HIDDEN_BYTES = BATCH * SEQUENCE * HIDDEN * 4


def _module(block: str, depth: int) -> ParityModule:
    torch.manual_seed(0)
    options = {"num_experts": 3} if block == "moe" else {}
    return ParityModule(LanguageModel([BLOCKS[block](**options) for _ in range(depth)]))


class StateBytes(TorchDispatchMode):
    """The most bytes of model states on the device at any operation of a fit."""

    def __init__(self, strategy: ProTrainStrategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.peak = 0
        self.samples = 0
        self.leaving = 0
        self.terms: MemoryTerms | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sample()
        return result

    def sample(self) -> None:
        runtime = self.strategy._runtime
        if runtime is None:
            return
        if self.terms is None:
            self.terms = runtime.plan.memory
            self.chunks = list(runtime._chunks)
            self.device_params = [param.device_param for chunk in self.chunks for param in chunk.params]
            offloaded = {param.fqn for chunk in self.chunks for param in chunk.params}
            named = self.strategy.lightning_module.named_parameters()
            self.resident = [parameter for name, parameter in named if name not in offloaded]
        held = [
            *self.resident,
            *(p.grad for p in self.resident),
            *(device_param.grad for device_param in self.device_params),
        ]
        held += self.strategy.lightning_module.buffers()
        held += [value for p in self.resident for state in self._states(p) for value in state.values() if value.dim()]
        storages = sum(chunk._storage.nbytes() for chunk in self.chunks)
        self.peak = max(self.peak, storages + self.leaving + sum(t.nbytes for t in held if t is not None))
        self.samples += 1

    def _states(self, parameter: nn.Parameter) -> Iterator[dict[str, Tensor]]:
        return (o.state[parameter] for o in self.strategy.optimizers if parameter in o.state)

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Counts while inside, and what lands until it has landed."""
        land = GradOffload.take

        def landed(offload: GradOffload, param: Any) -> None:
            # The gradient leaves the device parameter before it is copied, but not the device.
            self.leaving = param.device_param.grad.nbytes
            land(offload, param)
            self.leaving = 0

        monkeypatch.setattr(GradOffload, "take", landed)
        with self:
            yield


def _peak(module: ParityModule, plan: Any, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> StateBytes:
    strategy = ProTrainStrategy(plan=plan, **arguments)
    tracker = StateBytes(strategy)
    with tracker.watching(monkeypatch):
        fit(module, strategy=strategy, max_steps=2)
    assert tracker.samples > 100
    return tracker


@pytest.mark.parametrize("block", BLOCKS)
def test_offloaded_states_stay_within_the_plan_and_do_not_grow_with_depth(
    block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = [_peak(_module(block, depth), "offload", monkeypatch) for depth in DEPTHS]
    sizes, peaks = set(), set()
    for tracker in trackers:
        terms = tracker.terms
        assert terms is not None
        assert tracker.peak <= terms.total * 1.02
        assert tracker.peak >= terms.chunk_buffers, "the tracker sees what is live"
        assert tracker.strategy.counters.peak_live_bytes <= terms.chunk_buffers
        assert tracker.strategy.counters.live_bytes == 0
        sizes.add((terms.resident_states, terms.chunk_buffers, terms.gradients_in_flight))
        peaks.add(tracker.peak - terms.module_buffers)
    assert len(sizes) == len(peaks) == 1


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("model", "make"),
    [pair for number, pair in enumerate(itertools.product(zoo(), [half, kept, alternating])) if number % 2 == 0],
)
def test_any_plan_keeps_its_promise(model: str, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = zoo()[model]()
    tracker = _peak(module, make(module), monkeypatch)
    assert tracker.terms is not None
    assert tracker.peak <= tracker.terms.total * 1.02


@pytest.mark.parametrize("block", BLOCKS)
def test_a_smaller_budget_is_kept_too(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = _peak(_module(block, 4), "offload", monkeypatch)
    least = _smallest_budget(functools.partial(_module, block, 4), "offload", None)
    tracker = _peak(_module(block, 4), "offload", monkeypatch, device_memory=least)
    assert tracker.peak <= least
    assert tracker.peak < most.peak


def test_the_tracker_sees_a_chunk_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunk, "release", lambda self: setattr(self, "state", ChunkState.HOST))
    tracker = _peak(_module("mlp", 8), "offload", monkeypatch)
    assert tracker.terms is not None
    assert tracker.peak > tracker.terms.total * 1.5


# --- activations ------------------------------------------------------------------------------------------------------
class MadeBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: Any = WeakIdKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage()._cdata for arg in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.storages[storage] = None
        self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)


def _tensors(value: Any) -> Iterator[Tensor]:
    yield from (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor))


class FirstStep(L.Callback):
    """Counts bytes from the start of the first step to the end of its backward; `saved` is what forward left behind."""

    def __init__(self) -> None:
        self.made = MadeBytes()
        self.saved = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.made.__enter__()

    def on_before_backward(self, *args: Any) -> None:
        self.saved = self.made.live

    def on_after_backward(self, *args: Any) -> None:
        self.made.__exit__(None, None, None)


def _activations(block: str, depth: int, strategy: Any) -> FirstStep:
    step = FirstStep()
    fit(_module(block, depth), strategy=strategy, max_steps=1, callbacks=[step])
    assert step.saved > 0
    return step


@pytest.mark.parametrize("block", BLOCKS)
def test_forward_saves_one_block_input_for_each_block(block: str) -> None:
    saved = [_activations(block, depth, ProTrainStrategy(plan="offload")).saved for depth in range(2, 6)]
    # Buffers that a forward may change are kept as they were before it, for the recomputation.
    buffers = sum(buffer.nbytes for buffer in _module(block, 1).buffers())
    grown = [more - less for less, more in itertools.pairwise(saved)]
    assert len(set(grown)) == 1
    assert HIDDEN_BYTES <= grown[0] <= HIDDEN_BYTES + buffers
    plain = [_activations(block, depth, "auto").saved for depth in (2, 3)]
    assert plain[1] - plain[0] > 2 * HIDDEN_BYTES, "the count sees activations"


@pytest.mark.parametrize("block", ["mlp", "lstm"])
def test_the_peak_of_a_step_grows_by_one_block_input_for_each_block(block: str) -> None:
    """Over forward and backward: neither weights nor gradients nor recomputed activations pile up."""
    peaks = [_activations(block, depth, ProTrainStrategy(plan="offload")).made.peak for depth in range(2, 6)]
    assert [more - less for less, more in itertools.pairwise(peaks)] == [HIDDEN_BYTES] * 3


# --- the smallest budget ----------------------------------------------------------------------------------------------
def _smallest_budget(make: Callable[[], L.LightningModule], preset: Any, chunk_bytes: int | None) -> int:
    """The number in the message that refuses a budget of one byte."""
    with pytest.raises(ValueError, match="Raise device_memory") as refusal:
        fit(make(), strategy=ProTrainStrategy(plan=preset, device_memory=1, chunk_bytes=chunk_bytes))
    found = re.search(r"needs? at least .*?([0-9]+) bytes", str(refusal.value))
    assert found is not None, str(refusal.value)
    return int(found[1])


@pytest.mark.slow
@settings(max_examples=7, deadline=None)
@given(model=st.sampled_from(sorted(zoo())), chunk_bytes=st.none() | st.integers(1, 20_000), plan=st.booleans())
def test_the_named_budget_works_and_one_byte_less_does_not(model: str, chunk_bytes: int | None, plan: bool) -> None:
    preset = "offload" if plan else "auto"
    make = zoo()[model]
    least = _smallest_budget(make, preset, chunk_bytes)

    def run(budget: int) -> ProTrainStrategy:
        strategy = ProTrainStrategy(plan=preset, device_memory=budget, chunk_bytes=chunk_bytes)
        fit(make(), strategy=strategy, max_steps=2)
        return strategy

    assert run(least).counters.peak_live_bytes <= least
    with pytest.raises(ValueError, match=rf"\(?{least} bytes\)?.*{least - 1} bytes"):
        run(least - 1)


class Evaluated(ParityModule):
    """Has validation batches, in which mixed precision takes whole weights."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(LanguageModel([Mlp() for _ in range(4)]), optimizer)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch[0], batch_idx)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:.* of the updates are lost")  # The gradients of a made model are small.
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_the_named_budget_is_enough_for_evaluation_where_there_is_any(
    precision: str, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def run(budget: int, share: float) -> int:
        """Train within a budget; return the predicted peak, of which evaluation is a part only if there is any."""
        strategy = ProTrainStrategy(device_memory=budget, hardware=CPU, monitor=False)
        fit(Evaluated(optimizer), strategy=strategy, precision=precision, max_steps=2, limit_val_batches=share)
        assert strategy.plan is not None
        assert strategy.plan.prediction is not None
        phases = {phase.name: sum(phase.device.values()) for phase in strategy.plan.prediction.phases}
        return max(nbytes for name, nbytes in phases.items() if share or name != "evaluation")

    least = {}
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="Raise device_memory to") as refused:
            run(1, share)
        (found,) = re.findall(r"Raise device_memory to [^(]*?\(?([0-9]+) bytes", str(refused.value))
        least[share] = int(found)
        assert ("is needed in evaluation" in str(refused.value)) <= bool(share)
        assert run(least[share], share) <= least[share]
        assert "Evaluation is predicted" not in caplog.text
    with pytest.raises(ValueError, match="No plan fits"):
        run(least[0.0] - 1, 0.0)
    assert (least[1.0] > least[0.0]) == (precision == "bf16-mixed")


def _with_evaluation(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Evaluation takes `more` bytes than what the plan is expected to take at most."""
    expected = search.memory_timeline

    def larger(*given: Any, **options: Any) -> Any:
        timeline = expected(*given, **options)
        last = replace(timeline.phases[-1], device={"activations": timeline.device_peak + more})
        return replace(timeline, phases=(*timeline.phases[:-1], last))

    monkeypatch.setattr(search, "memory_timeline", larger)
    monkeypatch.setattr(candidates, "memory_timeline", larger)


@pytest.mark.parametrize("more", [6_500, 10_000, 20_000])
def test_evaluation_fits_too(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    whole = case(GIB).plan().prediction.device_bytes
    free = case(device_memory=whole - 1).plan()
    _with_evaluation(monkeypatch, more)
    found = case(device_memory=whole - 1).plan()
    assert free.prediction.device_bytes + more > whole - 1
    assert found.prediction.device_bytes + more <= whole - 1


def test_evaluation_that_fits_nowhere_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = case(GIB).plan().prediction.device_bytes
    free = case(device_memory=whole - 1).plan()
    _with_evaluation(monkeypatch, GIB)
    with caplog.at_level("INFO"):
        assert case(device_memory=whole - 1).plan().chunks == free.chunks
    assert "Evaluation is predicted to take 1.00 GiB" in caplog.text


class CheckpointedConvolutions(nn.Module):
    """A residual block that recomputes its activations by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)

    def body(self, images: Tensor) -> Tensor:
        return images + self.second(torch.relu(self.norm(self.first(images))))

    def forward(self, images: Tensor) -> Tensor:
        return checkpoint(self.body, images, use_reentrant=False)


class Classifier(ParityModule):
    """Six such blocks between a stem and a head."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(), nn.Flatten(), nn.LazyLinear(10)))
        self.network[1] = nn.ModuleList(CheckpointedConvolutions() for _ in range(6))
        self.logits(self.train_dataloader().dataset.tensors[0], 0)

    def logits(self, images: Tensor, batch_idx: int) -> Tensor:
        stem, blocks, *head = self.network
        images = stem(images)
        for block in blocks:
            images = block(images)
        return nn.Sequential(*head)(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(batch[0], batch_idx), batch[1])

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        images = torch.rand(8, 3, 10, 10, generator=generator)
        return DataLoader(TensorDataset(images, torch.arange(8)), 4)


@pytest.mark.sample(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_blocks_that_recompute_by_themselves_are_planned_under_any_budget(share: float) -> None:
    """Checkpointing them again costs no time, so the search cannot order plans by it."""
    with pytest.raises(ValueError, match="at least") as refused:
        fit(Classifier(), strategy=ProTrainStrategy(device_memory=1, hardware=CPU, monitor=False))
    least = int(str(refused.value).partition("(")[2].partition(" bytes")[0])
    whole = ProTrainStrategy(device_memory=GIB, hardware=CPU, monitor=False)
    fit(Classifier(), max_steps=1, strategy=whole)
    budget = int(least + share * (whole.plan.prediction.device_bytes - least))
    strategy = ProTrainStrategy(device_memory=budget, hardware=CPU, monitor=False)
    fit(Classifier(), max_steps=1, strategy=strategy)
    assert strategy.plan.num_offloaded_chunks
    assert strategy.plan.prediction.device_bytes <= budget
