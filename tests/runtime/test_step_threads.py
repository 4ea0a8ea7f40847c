"""Steps are shared out among the threads that the plan counts on; errors reach who waits, and threads go back."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.optim.host_step import ThreadPool, WorkQueue
from lightning_protrain.runtime.optim.step import fused_host_step


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool("test-pool")
    yield made
    made.close()
    assert names() == []


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("test-pool"))


def is_other() -> bool:
    return threading.current_thread().name.startswith("test-pool")


def run(pool: ThreadPool, works: list[Callable[[], None]], others: int) -> None:
    calls = WorkQueue()
    group = calls.add(works)
    pool.join(calls, others)
    calls.finish(group)


@pytest.mark.parametrize("others", [0, 1, 3])
@pytest.mark.parametrize("numbers", [[0], [1], [100], [3, 0, 5, 40]])
def test_everything_is_done_once_before_it_has_been_waited_for(
    pool: ThreadPool, others: int, numbers: list[int]
) -> None:
    for _ in range(20):
        calls, done = WorkQueue(), [list[int]() for _ in numbers]
        groups = [
            calls.add([partial(record.append, index) for index in range(number)])
            for record, number in zip(done, numbers, strict=True)
        ]
        pool.join(calls, others)
        for group, record, number in zip(groups, done, numbers, strict=True):
            calls.finish(group)
            assert sorted(record) == list(range(number))


def test_calls_may_be_added_while_others_are_made(pool: ThreadPool) -> None:
    calls, done = WorkQueue(), list[int]()
    groups = []
    for index in range(200):
        groups.append(calls.add([partial(done.append, index)]))
        pool.join(calls, 2)
        if index % 3 == 0:
            calls.finish(groups.pop())
    for group in groups:
        calls.finish(group)
    assert sorted(done) == list(range(200))


def test_alone_nothing_is_done_before_its_turn() -> None:
    """Calls are made in the order in which their results are waited for."""
    calls, done = WorkQueue(), list[int]()
    groups = [calls.add([partial(done.append, index)]) for index in range(3)]
    for index, group in enumerate(groups):
        calls.finish(group)
        assert done == list(range(index + 1))


def test_rather_than_wait_for_another_thread_a_later_call_is_made(pool: ThreadPool) -> None:
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        taken.set()
        assert release.wait(60)

    calls = WorkQueue()
    first = calls.add([hold])
    pool.join(calls, 1)
    assert taken.wait(60)
    calls.add([release.set])  # Who waits for the first group would wait forever if this were not called meanwhile.
    calls.finish(first)
    assert release.is_set()


def test_all_threads_work_at_once_without_gradients_on_one_core_each(pool: ThreadPool) -> None:
    torch.set_num_threads(2)
    calls, apart = WorkQueue(), SimpleQueue[int]()
    calls.add([lambda: apart.put(torch.get_num_threads())])
    pool.join(calls, 2)
    assert apart.get(timeout=60) == 1
    with ThreadPoolExecutor(1) as another:
        assert another.submit(torch.get_num_threads).result() == 2, "as its maker's, not as the pool's"
    together = threading.Barrier(3)
    seen: list[tuple[bool, int]] = []

    def work() -> None:
        together.wait(60)
        seen.append((torch.is_grad_enabled(), torch.get_num_threads()))

    with torch.no_grad():
        run(pool, [work] * 3, 2)
    assert seen == [(False, 1)] * 3
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_only_as_many_threads_are_started_as_are_needed(pool: ThreadPool) -> None:
    numbers = []
    for others in (0, 1, 1, 2, 1):
        run(pool, [lambda: None], others)
        numbers.append(len(names()))
    assert numbers == [0, 1, 1, 2, 2]


def test_a_thread_that_is_too_late_is_not_waited_for(pool: ThreadPool) -> None:
    """The only other thread is busy with calls of another step."""
    release, busy = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert release.wait(60)

    theirs = WorkQueue()
    held = theirs.add([hold])
    pool.join(theirs, 1)
    assert busy.wait(60)
    here: list[bool] = []
    run(pool, [lambda: here.append(is_other())] * 2, 1)
    assert here == [False, False]
    release.set()
    theirs.finish(held)


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_error_is_raised_when_all_have_ended(pool: ThreadPool, where: str) -> None:
    together, ended = threading.Barrier(2), []

    def work() -> None:
        together.wait(60)
        if is_other() == (where == "there"):
            raise RuntimeError("out of luck")
        ended.append(where)

    for _ in range(2):  # The thread lives on.
        with pytest.raises(RuntimeError, match="out of luck"):
            run(pool, [work] * 2, 1)
    assert ended == [where] * 2


def test_an_error_is_raised_to_who_waits_for_that_group() -> None:
    def fail() -> None:
        raise RuntimeError("out of luck")

    calls, done = WorkQueue(), list[int]()
    groups = [calls.add([partial(done.append, 0)]), calls.add([fail]), calls.add([partial(done.append, 2)])]
    calls.make()
    calls.finish(groups[0])
    with pytest.raises(RuntimeError, match="out of luck"):
        calls.finish(groups[1])
    calls.finish(groups[2])
    assert done == [0, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unexpected_error_is_raised_too_and_nothing_hangs(pool: ThreadPool) -> None:
    together = threading.Barrier(2)

    def work() -> None:
        together.wait(60)
        if is_other():
            raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        run(pool, [work] * 2, 1)
    done: list[int] = []
    run(pool, [lambda: done.append(1)], 1)
    assert done == [1]


def test_several_callers_at_once(pool: ThreadPool) -> None:
    def one(seed: int) -> int:
        done: list[int] = []
        run(pool, [partial(done.append, index) for index in range(seed, seed + 50)], 2)
        return sum(done)

    with ThreadPoolExecutor(6) as executor:
        assert list(executor.map(one, range(60))) == [sum(range(seed, seed + 50)) for seed in range(60)]


def test_nothing_is_held_when_it_is_done(pool: ThreadPool) -> None:
    class Held:
        def work(self) -> None:
            pass

    held = Held()
    died = threading.Event()
    weakref.finalize(held, died.set)
    run(pool, [held.work] * 4, 2)
    del held
    gc.collect()
    assert died.wait(60)


def test_it_starts_again_after_it_was_closed(pool: ThreadPool) -> None:
    for _ in range(2):
        run(pool, [lambda: None], 2)
        assert len(names()) == 2
        pool.close()
        assert names() == []


MANY = 3


class Counting(torch.optim.Optimizer):
    """Notes on how many threads it steps; derived from no optimizer, whose step would call all hooks once more."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.seen: list[int] = []
        self.work: Callable[[], Any] = lambda: None

    def step(self, closure: Any = None) -> Any:
        result = closure()
        self.seen.append(torch.get_num_threads())
        self.work()
        return result


def weight(device: str = "cpu") -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [None, 1, MANY])
def test_only_the_step_has_the_threads(threads: int | None) -> None:
    optimizer, outside = Counting([weight()]), []

    def note(*_: Any) -> None:
        outside.append(torch.get_num_threads())

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    with fused_host_step(optimizer, note, "cuda", threads=threads) as final:
        optimizer.step(final)
        note()
    assert outside == [1, 1, 1, 1]
    assert optimizer.seen == [threads or 1]


@pytest.mark.usefixtures("one_thread")
def test_each_call_of_a_closure_has_those_of_before() -> None:
    parameter, seen = weight(), []
    optimizer = torch.optim.LBFGS([parameter], max_iter=4)

    def closure() -> Tensor:
        seen.append(torch.get_num_threads())
        optimizer.zero_grad()
        loss = (parameter - 3).pow(4).sum()
        loss.backward()
        return loss

    with fused_host_step(optimizer, closure, "cuda", threads=MANY) as final:
        optimizer.step(final)
        assert torch.get_num_threads() == 1
    assert len(seen) > 1
    assert set(seen) == {1}


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("where", ["closure", "stepped", "step"])
def test_they_go_back_after_an_exception(where: str) -> None:
    optimizer = Counting([weight()])
    closure: Callable[[], Any] = fail if where == "closure" else lambda: None
    stepped: Any = fail if where == "stepped" else frozenset
    if where == "step":
        optimizer.work = fail
    with pytest.raises(ZeroDivisionError), fused_host_step(optimizer, closure, "cuda", stepped, MANY) as final:
        optimizer.step(final)
    assert torch.get_num_threads() == 1
    assert optimizer.seen == ([MANY] if where == "step" else [])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("devices", "elsewhere", "expected"),
    [
        (("cpu",), False, MANY),
        (("meta", "cpu"), False, MANY),
        (("meta",), False, 1),
        (("meta", "cpu"), True, 1),
    ],
    ids=["host", "both", "device", "stepped elsewhere"],
)
def test_without_host_parameters_nothing_changes(devices: Sequence[str], elsewhere: bool, expected: int) -> None:
    """The device here is `meta`, which stands for any other than the CPU."""
    parameters = [weight(device) for device in devices]
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    others = {id(parameters[-1])} if elsewhere else frozenset[int]()
    with fused_host_step(optimizer, lambda: None, "cuda", lambda: others, MANY) as final:
        final()
        assert torch.get_num_threads() == expected
