"""Swapped calls that save more than planned: parity, host bytes, what is said and what is refused."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.device.device import CPUDevice, Device
from lightning_protrain.device.host import PAGE
from lightning_protrain.runtime import swap
from lightning_protrain.runtime.swap import CallSlabs, SlabPool
from tests.runtime.applied import WIDTH, Applied, Net, applied, differences, mean_square, train
from tests.runtime.cases import CASES
from tests.runtime.swapped import engine_of, free_bytes, plans
from tests.support.simulated.device import SimulatedDevice

# What every call is planned to save, so that nearly all of it is growth, and what the host may give.
PLANS = plans(PAGE)
SPARE = 1 << 30
# Of batches that grow, shrink and grow again: a row of the widest tensor in a block has 64 bytes.
ROWS = (4, 300, 8, 700, 700, 40, 1000, 4)


@pytest.fixture
def everything_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of small models as well."""
    monkeypatch.setattr(swap, "MIN_BYTES", 1)


small = pytest.mark.usefixtures("everything_is_swapped")


def cpu() -> CPUDevice:
    return CPUDevice(torch.device("cpu"))


def rising(rows: tuple[int, ...] = ROWS) -> list[Tensor]:
    """Batches of these numbers of rows."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(number, WIDTH, generator=generator) for number in rows]


# --- parity -----------------------------------------------------------------------------------------------------------


def assert_growing_parity(name: str, plan: str, device: Device, **more: Any) -> Applied:
    build, step, options = CASES[name]
    torch.manual_seed(0)
    expected = train(build(), step, **options, **more)
    torch.manual_seed(0)
    model = build()
    with applied(model, PLANS[plan], device, SPARE) as state:
        assert differences(expected, train(model, step, state, **options, **more)) == []
        assert engine_of(state)._slabs.grown_bytes > 0
    assert engine_of(state)._slabs.grown_bytes == 0, "taken off"
    return state


@small
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, plan: str) -> None:
    state = assert_growing_parity(name, plan, cpu())
    assert state.device.counters.swapped_out_bytes > 0


@small
@pytest.mark.parametrize("name", ["plain", "reused", "two losses", "attention"])
def test_parity_without_races(name: str) -> None:
    device = SimulatedDevice()
    with device:
        assert_growing_parity(name, "swapped", device)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_parity_where_batches_grow_and_shrink(plan: str, accumulate: int) -> None:
    results = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = Net()
        if plain:
            results.append(train(model, mean_square, accumulate=accumulate, inputs=rising()))
            continue
        with applied(model, PLANS[plan], spare_host_bytes=SPARE) as state:
            results.append(train(model, mean_square, state, accumulate=accumulate, inputs=rising()))
    assert differences(*results) == []


def test_a_graph_that_has_grown_may_be_retained() -> None:
    model, batch = Net(), rising()[1]
    expected = torch.autograd.grad(mean_square(model, batch, 0), list(model.parameters()))
    with applied(model, PLANS["resident"], spare_host_bytes=SPARE) as state:
        loss = state.step(mean_square, model, batch, 0)
        for retain in (True, True, False):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain)
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


# --- host memory ------------------------------------------------------------------------------------------------------


def run_batches(state: Applied, batches: list[Tensor]) -> list[int]:
    """Steps without an optimizer; the host bytes grown by after each of them, all of which have come back."""
    grown, pool = [], engine_of(state)._slabs
    spare = pool.spare_bytes
    for batch in batches:
        state.step(mean_square, state.model, batch, 0).backward()
        gc.collect()
        engine_of(state).settle()
        host = state.device.host
        assert free_bytes(state.device) == host.allocated_bytes <= 4 * PAGE
        assert pool.spare_bytes == spare
        assert all(piece.memory.allocated_bytes == piece.nbytes for piece in pool._pieces)
        grown.append(pool.grown_bytes)
    return grown


def test_new_host_memory_is_taken_only_for_a_batch_larger_than_all_before() -> None:
    with applied(Net(), PLANS["resident"], spare_host_bytes=SPARE) as state:
        first, second, third, fourth, fifth, sixth, seventh, eighth = run_batches(state, rising())
    assert 0 == first < second == third < fourth == fifth == sixth < seventh == eighth


def test_what_has_grown_is_said_once() -> None:
    with applied(Net(), PLANS["resident"], spare_host_bytes=SPARE) as state:
        run_batches(state, rising()[:1])
        assert state.sentences == []
        run_batches(state, rising())
        (sentence,) = state.sentences
    pattern = r"'blocks\.0' is swapped and saves more than planned: 4096 bytes of .* this one took (\d+)\. .*"
    found = re.match(pattern + r"on the device, too.*larger.*one size.*largest_batch.*ChatDataModule", sentence)
    assert found is not None
    assert PAGE < int(found[1]) <= 300 * 4 * (4 * WIDTH + 2 * 2 * WIDTH + 2) + 8 * PAGE


def needed_bytes(batch: Tensor) -> int:
    """What a step on this batch takes beyond the plan."""
    with applied(Net(), PLANS["resident"], spare_host_bytes=SPARE) as state:
        (grown,) = run_batches(state, [batch])
        return grown


def test_exactly_what_is_needed_is_enough_and_a_page_less_is_not() -> None:
    batch = rising()[3]
    needed = needed_bytes(batch)
    with applied(Net(), PLANS["resident"], spare_host_bytes=needed) as state:
        # Of another size, whose pieces have to go for those of the first one.
        first, other, again = run_batches(state, [batch, rising()[1], batch])
        assert other <= first == again == needed
    with (
        applied(Net(), PLANS["resident"], spare_host_bytes=needed - PAGE) as state,
        pytest.raises(RuntimeError, match=r"'blocks\.3' .* 4096 bytes .* at least \d+ are needed"),
    ):
        run_batches(state, [batch])


def test_after_a_refusal_the_run_goes_on() -> None:
    batches = rising((4, 300, 4, 4))
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    spare = needed_bytes(batches[1])
    message = (
        r"more than planned: 4096 bytes .* at least \d+ are needed, and beyond the plan the host may give \d+ more\. "
        ".*batch is larger.*largest first.*unfrozen.*num_checkpoint_blocks.*host_memory"
    )
    with applied(model, PLANS["swapped"], spare_host_bytes=spare) as state:
        with pytest.raises(RuntimeError, match=message):
            state.step(mean_square, model, rising()[3], 0)
        gc.collect()
        state.runtime.reset()
        assert (
            differences(train(plain, mean_square, inputs=batches), train(model, mean_square, state, inputs=batches))
            == []
        )


def test_all_live_calls_count() -> None:
    batch = rising()[1]
    with applied(Net(), PLANS["resident"], spare_host_bytes=needed_bytes(batch)) as state:
        held = state.step(mean_square, state.model, batch, 0)
        with pytest.raises(RuntimeError, match="beyond the plan the host may give 0 more"):
            state.step(mean_square, state.model, batch, 0)
        state.runtime.reset()
        held.backward()
        del held
        run_batches(state, [batch])


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.booleans()), max_size=40),
    st.integers(0, 200),
    st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_no_more_than_the_spare_bytes_are_ever_taken(
    saves: list[tuple[int, int, bool]], spare: int, planned: int
) -> None:
    """Whatever calls save and whichever graphs die; memory never overlaps, and what is refused would not fit."""
    pool, live = SlabPool(cpu(), print, spare * PAGE), {}
    for pages, which, dies in saves:
        if which not in live:
            live[which] = (CallSlabs(pool, "block", planned * PAGE), [])
        held = pool.spare_bytes
        try:
            memory = live[which][0].reserve(pages * PAGE - 7)[1]
        except RuntimeError:
            assert pages * PAGE > held
        else:
            assert memory.nbytes == pages * PAGE - 7
            byte = 40 * which + len(live[which][1])
            live[which][1].append((memory.fill_(byte), byte))
            del memory
        assert all(bool((part == byte).all()) for _, parts in live.values() for part, byte in parts)
        assert 0 <= spare * PAGE - pool.spare_bytes <= pool.grown_bytes <= spare * PAGE
        if dies:
            del live[which]
            pool.cool()
    live.clear()
    pool.cool()
    assert pool.spare_bytes == spare * PAGE
    pool.close()
    assert pool.grown_bytes == 0


@pytest.mark.parametrize(
    ("planned", "saves"),
    [
        (80, [(80, 0), (1, 10), (9, 10), (1, 20), (25, 50)]),
        (8, [(9, 9), (8, 9), (1, 10)]),
        (1, [(2, 2), (1, 2), (1, 3)]),
    ],
    ids=["in eighths", "what is too large for the planned slab leaves it to others", "in pages"],
)
def test_a_call_grows(planned: int, saves: list[tuple[int, int]]) -> None:
    pool = SlabPool(cpu(), print, SPARE)
    call = CallSlabs(pool, "block", planned * PAGE)
    for pages, grown in saves:
        call.reserve(pages * PAGE)
        assert pool.grown_bytes == grown * PAGE


def test_idle_memory_of_another_size_goes_where_there_is_no_room() -> None:
    pool, sizes = SlabPool(cpu(), print, 10 * PAGE), []
    for pages in (3, 6, 3, 7, 10):
        call = CallSlabs(pool, "block", PAGE)
        call.reserve(pages * PAGE)
        del call
        pool.cool()
        sizes.append(sorted(piece.nbytes // PAGE for piece in pool._pieces))
    assert sizes == [[3], [3, 6], [3, 6], [3, 7], [10]]
