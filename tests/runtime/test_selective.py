"""A block that keeps its products computes nothing twice that is dear, and the same to the bit."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.runtime import recompute
from lightning_protrain.runtime.recompute import checkpoint
from tests.runtime.applied import PLANS, WIDTH, Block, Net, applied, assert_parity, batches, mean_square


class Counted(TorchDispatchMode):
    """A dispatch mode that counts how often each operation is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(function: Callable[[Tensor], Any], value: Tensor, selects: bool = True) -> Any:
    return checkpoint(function, ((value,), {}), nn.Module(), "block", selects)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize(("selects", "products"), [(True, 2), (False, 3)])
def test_products_are_computed_once_and_the_rest_twice(selects: bool, products: int) -> None:
    """The last product is not asked for again in either way: nothing is saved behind it."""
    block = Block()
    with Counted() as counted:
        run(block, leaf(4, WIDTH), selects).sum().backward()
    assert counted.calls["addmm"] == products
    assert counted.calls["native_layer_norm"] == 2
    assert counted.calls["tanh"] == 2


class Attending(nn.Module):
    """Attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(self.norm(hidden)).unflatten(-1, (3, 1, WIDTH)).permute(1, 2, 0, 3)
        mixed = nn.functional.scaled_dot_product_attention(*parts).squeeze(0)
        return hidden + torch.tanh(self.out(nn.functional.dropout(mixed, 0.3)))


@pytest.mark.parametrize("step", [mean_square, None])
@pytest.mark.parametrize("block", [Block, Attending])
def test_parity(block: type[nn.Module], step: Any) -> None:
    def autocast(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(model, batch, index)

    assert_parity(lambda: Net([block() for _ in range(3)]), PLANS["selective"], step or autocast)


def test_two_backwards_through_one_graph() -> None:
    value, other = leaf(4, WIDTH), leaf(4, WIDTH)
    block = Block()
    for each, function in ((value, lambda x: run(block, x)), (other, block)):
        loss = function(each).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(value.grad, other.grad)


def gradients(function: Callable[[Callable[[Tensor], Any], Tensor, Tensor], None], selects: bool) -> list[Tensor]:
    """Return the gradients of input and weight; `function` gets a function that calls a forward."""
    value, weight = leaf(4, WIDTH), leaf(WIDTH, WIDTH)
    function(lambda forward: run(forward, value) if selects else forward(value), value, weight)
    assert value.grad is not None
    assert weight.grad is not None
    return [value.grad, weight.grad]


def output_by_output(call: Callable[[Any], Any], value: Tensor, weight: Tensor) -> None:
    one, other = call(lambda x: ((x @ weight).exp().tanh(), (x.tanh() @ weight).exp().tanh()))
    one.sum().backward()
    other.sum().backward()


def gradient_inside(call: Callable[[Any], Any], value: Tensor, weight: Tensor) -> None:
    def forward(given: Tensor) -> Tensor:
        own = given.detach().requires_grad_()
        slope = torch.autograd.grad(((own @ weight).tanh() @ weight).tanh().sum(), own)[0]
        return ((given + slope) @ weight).tanh().exp()

    call(forward).sum().backward()


def logged_once(call: Callable[[Any], Any], value: Tensor, weight: Tensor) -> None:
    norms: list[Tensor] = []

    def forward(given: Tensor) -> Tensor:
        if not norms:
            with torch.no_grad():
                norms.append((given @ given.new_ones(WIDTH, WIDTH)).norm())
        return (given @ weight).exp().tanh()

    call(forward).sum().backward()


@pytest.mark.parametrize("function", [output_by_output, gradient_inside, logged_once])
def test_gradients_where_the_second_run_is_not_the_first_one_again(function: Any) -> None:
    expected, found = gradients(function, False), gradients(function, True)
    assert all(map(torch.equal, expected, found))


def test_products_are_let_go_when_they_have_been_found() -> None:
    kept: list[weakref.ref[Any]] = []
    weight = leaf(WIDTH, WIDTH)

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            alive.append(sum(reference() is not None for reference in kept))
            return gradient

    alive: list[int] = []
    keep = recompute.KeptOutputs.keep

    def keeping(self: recompute.KeptOutputs, func: Any, made: Any) -> None:
        keep(self, func, made)
        kept.append(weakref.ref(self._made[-1][1].tensor))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute.KeptOutputs, "keep", keeping)
        output = run(lambda x: (Seen.apply((x @ weight).exp()) @ weight).exp(), leaf(4, WIDTH))
        assert [reference() is not None for reference in kept] == [True, True]
        output.sum().backward()
    assert alive == [0]


def changed_inside(block: Block, hidden: Tensor) -> tuple[Tensor, Tensor]:
    made = block.up(hidden)
    made += 1
    return made, torch.tanh(made)


def changed_behind(block: Block, hidden: Tensor) -> tuple[Tensor, Tensor]:
    made = block.up(hidden)
    return made, torch.exp(torch.tanh(made))


def never_found(block: Block, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return block.up(torch.tanh(hidden)), hidden.sum()


@pytest.mark.parametrize("forward", [changed_inside, changed_behind, never_found])
def test_a_product_that_is_changed_is_refused_where_it_is_needed(
    forward: Callable[[Block, Tensor], tuple[Tensor, Tensor]],
) -> None:
    block = Block()
    made, result = run(lambda hidden: forward(block, hidden), leaf(4, WIDTH))
    if forward is not changed_inside:
        made.add_(1)
    loss = made.sum() + result.sum()
    if forward is never_found:
        loss.backward()
        return
    with pytest.raises(ValueError, match=r"'block' is checkpointed selectively .* changed in place.*num_checkpoint"):
        loss.backward()


def test_another_order_of_operations_is_refused() -> None:
    block, calls = Block(), []

    def function(hidden: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == 1:
            return torch.tanh(block.up(hidden))
        return torch.tanh(nn.functional.conv1d(hidden[None], block.up.weight[..., None])[0])

    with pytest.raises(ValueError, match=r"'block' is recomputed, and does not call the operations that it called"):
        run(function, leaf(WIDTH, WIDTH)).sum().backward()


def test_more_is_kept_than_by_a_checkpoint_and_less_than_by_none() -> None:
    """Bytes that are there when the forward has ended."""

    def held(plan: str) -> int:
        made: dict[int, weakref.ref[Any]] = {}

        class Made(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                for tensor in result if isinstance(result, tuple) else (result,):
                    if isinstance(tensor, Tensor) and not func.is_view:
                        made[tensor.untyped_storage().data_ptr()] = weakref.ref(tensor.untyped_storage())
                return result

        model = Net([Block(64) for _ in range(3)])
        model.inp, model.head = nn.Linear(WIDTH, 64), nn.Linear(64, 1)
        with applied(model, PLANS[plan]) as state, Made():
            loss = state.step(mean_square, model, batches()[0], 0)
            found = [storage for reference in made.values() if (storage := reference()) is not None]
            nbytes = sum(storage.nbytes() for storage in found)
            loss.backward()
        return nbytes

    assert held("checkpointed") < held("selective") < held("kept")
