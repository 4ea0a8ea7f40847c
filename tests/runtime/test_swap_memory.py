"""Swapped blocks take what is planned and give it back; those that save more are said, or refused."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel

from lightning_protrain.device.device import CPUDevice, Device
from lightning_protrain.device.host import PAGE
from lightning_protrain.planner.plan import Plan
from lightning_protrain.runtime.hooks import find_tensors
from lightning_protrain.runtime.swap import CallSlabs, SlabPool
from tests.runtime.applied import WIDTH, Applied, Block, Net, applied, batches, differences, mean_square, train
from tests.runtime.cases import CASES
from tests.runtime.swapped import MORE_THAN_PLANNED, PLANS, SLAB, Counting, engine_of, free_bytes, plans, small
from tests.support.plans import place
from tests.support.simulated.device import SimulatedDevice


# --- device -----------------------------------------------------------------------------------------------------------
def mlp(depth: int) -> nn.Module:
    return Net([Block() for _ in range(depth)])


class Llama(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = LlamaConfig(vocab_size=16, num_hidden_layers=depth, use_cache=False, **sizes)
        self.model = LlamaModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).last_hidden_state


class Encoder(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(depth)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(512, WIDTH)),
    "encoder": (Encoder, lambda: torch.randn(2, 128, 32)),
    "llama": (Llama, lambda: torch.arange(16).repeat(2, 8)),
}


def saved_bytes(model: nn.Module, block: nn.Module, batch: Tensor) -> int:
    """Return the bytes that autograd saves in `block` without weights; each storage counts once, in whole pages."""
    weights = {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights and tensor.untyped_storage().nbytes() >= PAGE:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    handles = [
        block.register_forward_pre_hook(lambda *_: hooks.__enter__()),
        block.register_forward_hook(lambda *_: hooks.__exit__()),
    ]
    model(batch)
    for handle in handles:
        handle.remove()
    return sum(-(-tensor.untyped_storage().nbytes() // PAGE) * PAGE for tensor in saved.values())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def run(name: str, depth: int, swapped: Callable[[int], bool]) -> tuple[int, int, int]:
    """Peak of swapped bytes on the device, what is planned for them, and what is left of them after a forward."""
    torch.manual_seed(0)
    build, make_batch = MODELS[name]
    model, batch, device = build(depth), make_batch(), Counting()
    nbytes = saved_bytes(model, blocks_of(model)[0], batch)

    def make(module: nn.Module) -> Plan:
        return place(
            module,
            resident=lambda index: True,
            checkpointed=lambda index: not swapped(index),
            swap_bytes=lambda index: nbytes * swapped(index),
        )

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        """The model's own forward and the checkpointed blocks also hold the input of the first block."""
        storages = [tensor.untyped_storage() for tensor in find_tensors((args, kwargs))]
        device.others = {storage._cdata: StorageWeakRef(storage) for storage in storages}

    with applied(model, make, device) as state:
        blocks_of(model)[0].register_forward_pre_hook(keep, with_kwargs=True)
        for _ in range(2):
            loss = state.step(mean_square, model, batch, 0)
            left = device.count()
            loss.backward()
            del loss
        return device.peak, state.plan.memory.swapped_activations, left


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [1, 2])
def test_device_bytes_are_as_planned_at_any_depth(name: str, step: int) -> None:
    (peak, planned, left), deeper = (run(name, depth, lambda index: index % step == 0) for depth in (4, 8))
    assert 0.98 * planned <= peak <= planned
    assert deeper == (peak, planned, left)
    # Without checkpointed blocks between, the last one has had no neighbour to leave beside.
    assert left <= planned / 2


class Living(TorchDispatchMode):
    """Knows every storage that an operation has made, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in find_tensors(result):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self, weights: set[int]) -> int:
        """Bytes of all storages but slabs and `weights`."""
        live = [key for key, (reference, _) in self.storages.items() if not reference.expired()]
        return sum(self.storages[key][1] for key in live if key not in weights and self.storages[key][1] != SLAB)


def bytes_after_forward(depth: int, make: Callable[[nn.Module], Plan]) -> int:
    model, batch = mlp(depth), torch.randn(512, WIDTH)
    with applied(model, make) as state, Living() as living:
        loss = state.step(mean_square, model, batch, 0)
        assert loss.requires_grad
        return living.live_bytes({parameter.untyped_storage()._cdata for parameter in model.parameters()})


def test_nothing_is_left_behind_by_a_swapped_block() -> None:
    """Not even its input and output stay: all tensors are counted, after forwards of models with two depths."""
    resident = lambda module: place(module, resident=lambda index: True)  # noqa: E731
    inputs = 512 * WIDTH * 4
    kept, swapped = (
        bytes_after_forward(12, make) - bytes_after_forward(4, make) for make in (resident, PLANS["resident"])
    )
    assert kept >= 8 * 4 * inputs
    # The mean and the deviation of each row, half a page each.
    assert swapped <= 8 * PAGE < 8 * inputs / 2


@pytest.mark.parametrize("name", MODELS)
def test_host_bytes_are_as_planned(name: str) -> None:
    build, make_batch = MODELS[name]
    model, batch = build(3), make_batch()
    nbytes = saved_bytes(model, blocks_of(model)[0], batch)
    for planned in (nbytes, nbytes - PAGE):
        device = Counting()
        make = lambda module, planned=planned: place(module, lambda index: True, swap_bytes=lambda index: planned)  # noqa: E731
        with applied(model, make, device) as state:
            if planned == nbytes:
                state.step(mean_square, model, batch, 0).backward()
                assert device.host.allocated_bytes == 3 * nbytes
                continue
            message = rf"0' is swapped and saves more than planned: .*{planned} bytes.* at least .*{nbytes} bytes.*"
            message += "batch is larger .*largest first.* unfrozen parameters.*begin another fit"
            with pytest.raises(RuntimeError, match=message):
                state.step(mean_square, model, batch, 0)
            gc.collect()
            state.runtime.reset()
            assert free_bytes(device) == device.host.allocated_bytes


# --- host -------------------------------------------------------------------------------------------------------------
@small
@pytest.mark.parametrize("ending", ["backward", "no backward", "forward raises", "backward raises", "retained"])
def test_host_memory_comes_back(ending: str) -> None:
    device = CPUDevice(torch.device("cpu"))
    model = Net()
    with applied(model, PLANS["resident"], device) as state:
        for _ in range(2):
            if ending == "forward raises":
                with pytest.raises(RuntimeError, match="size mismatch"):
                    state.step(lambda model, batch, index: model(batch) @ torch.ones(3), model, batches()[0], 0)
                state.runtime.reset()
            else:
                loss = state.step(mean_square, model, batches()[0], 0)
                assert device.host.allocated_bytes - free_bytes(device) == 4 * SLAB
                if ending == "backward raises":
                    loss.register_hook(_raise)
                    with pytest.raises(RuntimeError, match="planted"):
                        loss.backward()
                    state.runtime.reset()
                elif ending != "no backward":
                    loss.backward(retain_graph=ending == "retained")
                del loss
            gc.collect()
            engine_of(state).settle()
            assert free_bytes(device) == device.host.allocated_bytes == 4 * SLAB


def _raise(gradient: Tensor) -> None:
    raise RuntimeError("planted")


@small
def test_an_exception_in_the_middle_of_backward_leaves_no_trace() -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    with applied(model, PLANS["swapped"]) as state:
        loss = state.step(lambda *args: mean_square(*args), model, batches()[0], 0)
        handle = model.blocks[1].up.weight.register_hook(_raise)
        with pytest.raises(RuntimeError, match="planted"):
            state.step(mean_square, model, batches()[0], 0).backward()
        handle.remove()
        state.runtime.reset()
        del loss
        model.zero_grad()
        assert differences(train(plain, mean_square), train(model, mean_square, state)) == []


@small
def test_evaluation_copies_nothing() -> None:
    model = Net()
    with applied(model, PLANS["resident"]) as state:
        with torch.no_grad():
            state.step(mean_square, model, batches()[0], 0, training=False)
            state.step(mean_square, model, batches()[0], 0)
        with torch.inference_mode():
            state.step(mean_square, model, batches()[0], 0, training=False)
        assert state.device.counters.swapped_out_bytes == 0
        assert state.device.host.allocated_bytes == 0


@small
def test_a_plan_that_is_taken_off_is_forgotten_although_a_graph_remains() -> None:
    model = Net()
    with applied(model, PLANS["resident"]) as state:
        known = weakref.ref(engine_of(state))
        loss = state.step(mean_square, model, batches()[0], 0)
    expected = torch.autograd.grad(mean_square(model, batches()[0], 0), list(model.parameters()))
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    del loss, state
    gc.collect()
    assert known() is None


# What every call is planned to save, so that nearly all of it is growth, and what the host may give.
SWAP_PLANS = plans(PAGE)
SPARE = 1 << 30
# Of batches that grow, shrink and grow again: a row of the widest tensor in a block has 64 bytes.
ROWS = (4, 300, 8, 700, 700, 40, 1000, 4)


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
    with applied(model, SWAP_PLANS[plan], device, SPARE) as state:
        assert differences(expected, train(model, step, state, **options, **more)) == []
        assert engine_of(state)._slabs.grown_bytes > 0
    assert engine_of(state)._slabs.grown_bytes == 0, "taken off"
    return state


@pytest.mark.sample(35)
@small
@pytest.mark.parametrize(("name", "plan"), MORE_THAN_PLANNED)
def test_parity(name: str, plan: str) -> None:
    state = assert_growing_parity(name, plan, cpu())
    assert state.device.counters.swapped_out_bytes > 0


@small
@pytest.mark.parametrize("name", ["plain", "reused", "two losses", "attention"])
def test_parity_without_races(name: str) -> None:
    device = SimulatedDevice()
    with device:
        assert_growing_parity(name, "swapped", device)


@pytest.mark.parametrize("plan", SWAP_PLANS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_parity_where_batches_grow_and_shrink(plan: str, accumulate: int) -> None:
    results = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = Net()
        if plain:
            results.append(train(model, mean_square, accumulate=accumulate, inputs=rising()))
            continue
        with applied(model, SWAP_PLANS[plan], spare_host_bytes=SPARE) as state:
            results.append(train(model, mean_square, state, accumulate=accumulate, inputs=rising()))
    assert differences(*results) == []


def test_a_graph_that_has_grown_may_be_retained() -> None:
    model, batch = Net(), rising()[1]
    expected = torch.autograd.grad(mean_square(model, batch, 0), list(model.parameters()))
    with applied(model, SWAP_PLANS["resident"], spare_host_bytes=SPARE) as state:
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
    with applied(Net(), SWAP_PLANS["resident"], spare_host_bytes=SPARE) as state:
        first, second, third, fourth, fifth, sixth, seventh, eighth = run_batches(state, rising())
    assert 0 == first < second == third < fourth == fifth == sixth < seventh == eighth


def test_what_has_grown_is_said_once() -> None:
    with applied(Net(), SWAP_PLANS["resident"], spare_host_bytes=SPARE) as state:
        run_batches(state, rising()[:1])
        assert state.sentences == []
        run_batches(state, rising())
        (sentence,) = state.sentences
    pattern = r"'blocks\.0' is swapped and saves more than planned: .*\(4096 bytes\) of .* took .*\((\d+) bytes\)\. .*"
    found = re.match(
        pattern + r"The step also takes more device memory.*larger.*one size.*largest_batch.*ChatDataModule", sentence
    )
    assert found is not None
    assert PAGE < int(found[1]) <= 300 * 4 * (4 * WIDTH + 2 * 2 * WIDTH + 2) + 8 * PAGE


def needed_bytes(batch: Tensor) -> int:
    """Return the bytes that a step on this batch takes beyond the plan."""
    with applied(Net(), SWAP_PLANS["resident"], spare_host_bytes=SPARE) as state:
        (grown,) = run_batches(state, [batch])
        return grown


def test_exactly_what_is_needed_is_enough_and_a_page_less_is_not() -> None:
    batch = rising()[3]
    needed = needed_bytes(batch)
    with applied(Net(), SWAP_PLANS["resident"], spare_host_bytes=needed) as state:
        # Of another size, whose pieces have to go for those of the first one.
        first, other, again = run_batches(state, [batch, rising()[1], batch])
        assert other <= first == again == needed
    with (
        applied(Net(), SWAP_PLANS["resident"], spare_host_bytes=needed - PAGE) as state,
        pytest.raises(RuntimeError, match=r"'blocks\.3' .*\(4096 bytes\) .* at least .*\(\d+ bytes\) are needed"),
    ):
        run_batches(state, [batch])


def test_after_a_refusal_the_run_goes_on() -> None:
    batches = rising((4, 300, 4, 4))
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    spare = needed_bytes(batches[1])
    message = (
        r"more than planned: .*\(4096 bytes\) .* at least .* are needed, and beyond the plan .* more\. "
        ".*batch is larger.*largest first.*unfrozen.*num_checkpoint_blocks.*host_memory"
    )
    with applied(model, SWAP_PLANS["swapped"], spare_host_bytes=spare) as state:
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
    with applied(Net(), SWAP_PLANS["resident"], spare_host_bytes=needed_bytes(batch)) as state:
        held = state.step(mean_square, state.model, batch, 0)
        with pytest.raises(RuntimeError, match="beyond the plan the host may give 0 bytes more"):
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
            memory = live[which][0].reserve(pages * PAGE - 7)
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
