"""Whatever a step does, the streamed model computes bit for bit what the plain one does, and users see true weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.chunk import Chunk, ChunkState
from lightning_protrain.runtime.residency import Residency
from tests.runtime.applied import (
    PLANS,
    WIDTH,
    Applied,
    Block,
    Net,
    applied,
    assert_parity,
    assert_same,
    batches,
    differences,
    each_plan,
    mean_square,
    poison_released_memory,
    train,
)
from tests.runtime.cases import CASES, Case, InPlace, InPlaceNet, Nested, Normed, through
from tests.support.plans import half, place
from tests.support.simulated.device import SimulatedDevice


@pytest.mark.sample(34)
@each_plan
@pytest.mark.parametrize("case", CASES)
def test_parity(monkeypatch: pytest.MonkeyPatch, case: str, make: Any) -> None:
    poison_released_memory(monkeypatch)
    build, step, options = CASES[case]
    assert_parity(build, make, step, **options)


@pytest.mark.parametrize("make", [PLANS["kept"], PLANS["small chunks"]])
def test_blocks_that_return_their_changed_input(make: Any) -> None:
    assert_parity(lambda: InPlaceNet([InPlace() for _ in range(3)]), make)


def test_embedding_rows_are_normalised_on_the_host() -> None:
    with applied(Normed()) as state:
        state.step(mean_square, state.model, batches()[0], 0, training=False)
        norms = state.model.table.weight.norm(dim=1)
        assert bool((norms[[0, 1, 4]] <= 0.5 + 1e-6).all())
        assert bool((norms[[2, 3, 5]] > 0.5).any())


class Broken(Exception):
    """Something that a user's code raises."""


class Failing(torch.autograd.Function):
    """Passes values on and raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken


class Fragile(Block):
    """Raises in the middle of its forward or backward when told to."""

    mode = ""

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.up(self.norm(hidden))
        if self.mode == "forward" or (self.mode == "recomputation" and torch._C._current_graph_task_id() != -1):
            raise Broken
        if self.mode == "backward":
            inner = Failing.apply(inner)
        return hidden + self.down(torch.tanh(inner))


@each_plan
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("mode", ["forward", "backward", "recomputation"])
def test_training_goes_on_after_an_exception(mode: str, reset: bool, make: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net([Block(), Fragile(), Block(), Block()])

    expected = train(build(), mean_square)
    with applied(build(), make) as state:
        model = state.model
        before = dict(model.named_parameters())
        model.blocks[1].mode = mode
        if mode != "recomputation" or "blocks.1" in {b.name for b in state.plan.blocks if b.policy == "checkpoint"}:
            with pytest.raises(Broken):
                state.step(mean_square, model, batches()[0], 0).backward()
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        model.blocks[1].mode = ""
        if reset:
            state.runtime.reset()
            assert state.num_live == 0
            assert state.device.counters.live_bytes == 0
            assert all(param.device_param.grad is None for chunk in state.chunks for param in chunk.params)
        model.zero_grad()
        assert differences(expected, train(model, mean_square, state)) == []


@each_plan
def test_a_backward_that_has_failed_may_be_repeated_in_its_step(make: Any) -> None:
    def step(model: nn.Module, batch: Tensor, index: int) -> None:
        if isinstance(model.blocks[1], Fragile):
            model.blocks[1].mode = "backward"
            with pytest.raises(Broken):
                mean_square(model, batch, index).backward()
            model.blocks[1].mode = ""
            model.zero_grad()
        mean_square(model, batch, index).backward()

    found = []
    for block in (Block, Fragile):
        torch.manual_seed(0)
        with applied(Net([Block(), block(), Block(), Block()]), make, SimulatedDevice()) as state:
            found.append(train(state.model, step, state))
    assert differences(*found) == []


def test_weights_that_the_step_itself_reads_come_back_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        read, squares = model.bias, model.bias.square()

        def look(grad: Tensor) -> None:  # Before autograd reads the weight, which would end the process if it is gone.
            assert read.untyped_storage().nbytes()

        squares.register_hook(look)
        return model.head(model.inp(batch + squares)).square().mean()

    poison_released_memory(monkeypatch)
    model = Net()
    model.bias = nn.Parameter(torch.ones(WIDTH))
    with applied(model) as state:
        loss = state.step(step, model, batches()[0])
        state.runtime.settle()
        loss.backward()
        assert model.bias.grad.isfinite().all()


def test_an_exception_keeps_the_gradients_of_earlier_micro_batches() -> None:
    """A weight used outside its block has its older gradient set aside during backward; nobody may lose it."""

    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        return mean_square(model, batch, index) + 0.1 * sum(p.square().sum() for p in model.parameters())

    with applied(Net([Block(), Fragile(), Block()])) as state:
        model = state.model
        state.step(step, model, batches()[0], 0).backward()
        before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.blocks[1].mode = "backward"
        with pytest.raises(Broken):
            state.step(step, model, batches()[1], 1).backward()
        state.runtime.reset()
        lost = [
            name
            for name in before
            if name.startswith("inp.") and not torch.equal(model.get_parameter(name).grad, before[name])
        ]
        assert lost == []


@each_plan
def test_gradients_of_inputs(make: Any) -> None:
    def saliency(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch)
        return gradient

    torch.manual_seed(0)
    model = Net()
    expected = saliency(model, batches()[0], 0)
    with applied(model, make) as state:
        assert torch.equal(state.step(saliency, model, batches()[0], 0), expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert state.num_live <= state.plan.num_chunk_buffers
        state.step(mean_square, model, batches()[0], 0).backward()


def test_second_derivatives_are_refused() -> None:
    def penalty(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return gradient.square().mean()

    with applied(Net()) as state:
        with pytest.raises(RuntimeError, match="create_graph=True runs through 'head'"):
            state.step(penalty, state.model, batches()[0], 0)
        state.runtime.reset()
        state.step(mean_square, state.model, batches()[0], 0).backward()


@each_plan
def test_a_model_called_outside_of_a_scope(make: Any) -> None:
    torch.manual_seed(0)
    expected = train(Net(), mean_square)
    torch.manual_seed(0)
    with applied(Net(), make) as state:
        model = state.model
        before = model(batches()[0])
        assert state.num_live == 0
        found = {}
        stepper = torch.optim.AdamW(model.parameters(), lr=0.01)
        for index, batch in enumerate(batches()):
            loss = mean_square(model, batch, index)
            found[f"loss {index}"] = loss.detach().clone()
            assert state.num_live == 0
            loss.backward()
            assert state.num_live == 0
            found |= {f"grad {index} {name}": p.grad.clone() for name, p in model.named_parameters()}
            stepper.step()
            stepper.zero_grad()
        assert differences(expected, found | dict(model.state_dict())) == []
        assert not torch.equal(before, model(batches()[0]))


def test_backward_of_two_scopes_at_once() -> None:
    torch.manual_seed(0)
    plain = Net()
    (mean_square(plain, batches()[0], 0) + mean_square(plain, batches()[1], 1)).backward()
    torch.manual_seed(0)
    with applied(Net()) as state:
        losses = [state.step(mean_square, state.model, batch, index) for index, batch in enumerate(batches()[:2])]
        sum(losses).backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(state.model.get_parameter(name).grad, parameter.grad), name


@pytest.mark.parametrize("plan", ["kept", "checkpointed", "small chunks", "offload"])
def test_weights_changed_before_backward_are_refused(plan: str) -> None:
    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        loss = mean_square(model, batch, index)
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
        return loss

    with applied(Net(), PLANS[plan]) as state:
        loss = state.step(step, state.model, batches()[0], 0)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight.*changed (in place )?between a forward"):
            loss.backward()
        state.runtime.reset()


def test_the_graph_of_an_older_step_is_refused_after_an_optimizer_step() -> None:
    with applied(Net()) as state:
        model = state.model
        older = state.step(mean_square, model, batches()[0], 0)
        state.step(mean_square, model, batches()[1], 1).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        state.runtime.refresh()
        state.step(mean_square, model, batches()[2], 2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed"):
            older.backward()
        state.runtime.reset()


def test_another_order_is_said_once() -> None:
    with applied(Net()) as state:
        for index, order in enumerate([(3, 2, 1, 0), (3, 2, 1, 0)]):
            state.step(through(*order), state.model, batches()[0], index).backward()
        assert state.sentences == []  # The first step only corrects what the plan had assumed.
        for index, order in enumerate([(0, 1), (1, 0), (3, 2)]):
            state.step(through(*order), state.model, batches()[0], index).backward()
        assert [sentence[:36] for sentence in state.sentences] == ["The blocks ran in another order than"]


def test_calls_of_one_block_in_a_row_are_no_other_order() -> None:
    """A head is called for each slice of a sequence, and sequences differ in length."""
    with applied(Net()) as state:
        for index, times in enumerate([1, 3, 1, 2]):
            state.step(through(0, 1, 2, *[3] * times), state.model, batches()[0], index).backward()
            with torch.no_grad():
                state.step(through(0, 1, *[2] * times, 3), state.model, batches()[0], index, training=False)
        assert state.sentences == []


def test_a_step_may_leave_out_the_first_unit_if_it_is_resident() -> None:
    with applied(Net(), half) as state:
        for index, leaves_out in enumerate([False, True]):
            if leaves_out:
                state.model.inp = nn.Identity()
            state.step(mean_square, state.model, batches()[0], index).backward()
        assert state.sentences == []


def test_evaluation_has_an_order_of_its_own() -> None:
    with applied(Net()) as state:
        for index in range(2):
            state.step(through(0, 1, 2, 3), state.model, batches()[0], index).backward()
            with torch.no_grad():
                state.step(through(3, 2), state.model, batches()[0], index, training=False)
            assert state.num_live == 0
        assert state.sentences == []


@each_plan
@pytest.mark.parametrize("case", ["plain", "nested", "reused", "tied", "frozen"])
def test_the_bounds_hold_at_every_upload(monkeypatch: pytest.MonkeyPatch, case: str, make: Any) -> None:
    build, step, options = CASES[case]
    seen: list[tuple[int, int]] = []
    with applied(build(), make) as state:
        fetch = Chunk.fetch

        def watched(chunk: Chunk, *how: Any) -> None:
            fetch(chunk, *how)
            seen.append((state.num_live, sum(c.nbytes for c in state.chunks if c.state is not ChunkState.HOST)))

        monkeypatch.setattr(Chunk, "fetch", watched)
        train(state.model, step, state, **options)
        assert len(seen) == state.device.counters.uploads
        assert max(count for count, _ in seen) <= state.plan.num_chunk_buffers
        assert max(nbytes for _, nbytes in seen) == state.device.counters.peak_live_bytes
        assert state.device.counters.peak_live_bytes <= state.plan.memory.chunk_buffers
        assert state.sentences == [] or case == "reused"


def test_a_known_order_is_fetched_ahead() -> None:
    with applied(Net(), PLANS["offload"]) as state:
        counters = state.device.counters
        state.step(mean_square, state.model, batches()[0], 0).backward()
        for index in range(3):
            state.step(mean_square, state.model, batches()[0], index).backward()
        assert counters.prefetch_misses == 4  # The first unit of each step.
        assert counters.prefetch_hits + counters.prefetch_misses >= counters.uploads


def test_what_forward_leaves_is_not_fetched_again() -> None:
    model = Net()
    with applied(model, lambda module: place(module, chunk_bytes=None)) as state:
        num_chunks, buffers = len(state.chunks), state.plan.num_chunk_buffers
        for index in range(2):
            before = state.device.counters.uploads
            state.step(mean_square, model, batches()[0], index).backward()
        uploads = state.device.counters.uploads - before
        assert uploads == num_chunks + (num_chunks - buffers)


def test_a_unit_outside_its_enclosing_names_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is handed another block and runs it: more has to be live than names can tell."""

    class Caller(Block):
        other: Any = None

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = super().forward(hidden)
            return hidden if self.other is None else self.other[0](hidden)

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Net([Caller(), Caller(), Caller()])
        model.blocks[0].other = (model.blocks[2],)
        return model

    expected = train(build(), mean_square)
    with applied(build()) as state:
        assert differences(expected, train(state.model, mean_square, state)) == []
        assert [sentence for sentence in state.sentences if "do not enclose it by name" in sentence] == state.sentences
        assert len(state.sentences) == 1


def test_a_planted_order_of_release_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: pins of later calls stay until the end of backward, so that more is live than planned."""
    pin = Residency.pin
    monkeypatch.setattr(Residency, "pin", lambda residency, unit, number: pin(residency, unit, -1))
    with pytest.raises(AssertionError):
        assert_parity(Net, PLANS["kept"])


@each_plan
def test_true_weights_are_seen_outside_of_blocks(make: Any) -> None:
    seen: list[list[str]] = []

    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        hidden = model.inp(batch)
        for block in model.blocks:
            hidden = block(hidden)
            check()
        return model.head(hidden).square().mean()

    torch.manual_seed(0)
    with applied(Net(), make) as state:
        model = state.model
        truth = {name: value.clone() for name, value in model.state_dict().items()}
        objects = dict(model.named_parameters())

        def check(*_: Any) -> None:
            seen.append(differences(truth, dict(model.state_dict())))
            assert all(objects[name] is parameter for name, parameter in model.named_parameters())

        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: check())
            block.register_forward_hook(lambda *_: check())
        loss = state.step(step, model, batches()[0], 0)
        loss.register_hook(check)
        model.inp.weight.register_hook(check)
        check()
        loss.backward()
        check()
        assert len(seen) >= 15
        assert not any(seen)


@each_plan
def test_true_weights_are_seen_inside_of_blocks(make: Any) -> None:
    """Inside a block its parameters are the device parameters.

    Everything else, and all values, are as without a plan.
    """
    seen: list[list[str]] = []
    with applied(Net(), make) as state:
        model = state.model
        truth = {name: value.clone() for name, value in model.state_dict().items()}

        def look(module: nn.Module, inputs: Any) -> None:
            seen.append(differences(truth, dict(model.state_dict())))

        model.blocks[2].up.register_forward_pre_hook(look)
        state.step(mean_square, model, batches()[0], 0).backward()
        assert seen
        assert not any(seen)


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_hooks_of_the_user_fire_once_with_the_right_values(make: Any, accumulate: int) -> None:
    def run(model: nn.Module, state: Applied | None) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        turn = iter(range(1000))

        def on_gradient(gradient: Tensor, name: str = "") -> Tensor:
            seen[f"{next(turn):03} gradient {name}"] = gradient.clone()
            return gradient * 2

        def on_accumulated(parameter: Tensor, name: str = "") -> None:
            assert isinstance(parameter, nn.Parameter)
            seen[f"{next(turn):03} accumulated {name}"] = parameter.grad.clone()

        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: on_gradient(gradient, name))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: on_accumulated(p, name))
        trained = train(model, mean_square, state, accumulate=accumulate)
        assert len([name for name in seen if "accumulated" in name]) == 4 * len(list(model.parameters()))
        return seen | trained

    assert_same(Net, run, make)


@each_plan
def test_a_hook_set_between_forward_and_backward_fires(make: Any) -> None:
    seen: list[Tensor] = []
    with applied(Net(), make) as state:
        loss = state.step(mean_square, state.model, batches()[0], 0)
        state.model.blocks[0].up.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        loss.backward()
        assert len(seen) == 1
        assert torch.equal(seen[0], state.model.blocks[0].up.weight.grad)


@each_plan
def test_an_optimizer_inside_backward(make: Any) -> None:
    """Steps each parameter as soon as its gradient is there, and drops the gradient."""

    def run(model: nn.Module, state: Applied | None) -> dict[str, Tensor]:
        steppers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            steppers[parameter].step()
            steppers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return train(model, mean_square, state, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0))

    assert_same(Net, run, make)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("through_data", [True, False])
def test_a_step_inside_the_step_is_seen_by_the_root(fused: bool, through_data: bool) -> None:
    """The root's own weights are live all through a step; an optimizer step inside it must reach them."""

    def run(model: nn.Module, state: Applied | None) -> dict[str, Tensor]:
        parameters = list(model.parameters())
        stepper = torch.optim.AdamW(parameters, lr=0.1, fused=fused)

        def step(model: nn.Module, batch: Tensor, index: int) -> None:
            for part in (batch, batch.flip(0)):
                mean_square(model, part, index).backward()
                if through_data:
                    for parameter in parameters:
                        parameter.data.sub_(parameter.grad, alpha=0.01)
                else:
                    stepper.step()
                if state is not None:
                    state.runtime.refresh()
                stepper.zero_grad()

        for index, batch in enumerate(batches()):
            if state is None:
                step(model, batch, index)
            else:
                state.step(step, model, batch, index)
        return {name: value.clone() for name, value in model.state_dict().items()}

    assert_same(Nested, run)


# Its step writes to weights whose upload may be under way. They are uploaded again, as their version has changed.
WRITES_IN_THE_STEP = "weights change in the step"


class OwnCheckpoint(Block):
    """Checkpoints a part of itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.up(x)), hidden, use_reentrant=False)
        return hidden + self.down(inner)


FENCED: dict[str, Case] = {name: case for name, case in CASES.items() if name != WRITES_IN_THE_STEP}
FENCED["own checkpoint"] = (lambda: Net([OwnCheckpoint() for _ in range(3)]), mean_square, {})


@pytest.mark.sample(11)
@pytest.mark.parametrize("plan", ["kept", "checkpointed", "offload"])
@pytest.mark.parametrize("name", FENCED)
def test_parity_without_races(name: str, plan: str) -> None:
    build, step, options = FENCED[name]
    assert_same(build, lambda model, state: train(model, step, state, **options), PLANS[plan], SimulatedDevice())
