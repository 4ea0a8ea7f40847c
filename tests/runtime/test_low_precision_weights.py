"""Operations that autocast casts may read the low-precision weight.

Any other operation gets the bits of the float32 weight or is refused, also under dispatch modes.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.low_precision import (
    CASTS,
    DeviceParam,
    LowPrecisionParam,
    ParamUses,
    low_precision_class,
)
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import HAS_BF16_LSTM
from tests.support.trainers import QUIET

BF16 = torch.bfloat16


def autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", BF16, enabled=enabled, cache_enabled=False)


def a_weight(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(seed)))


def device_param_of(host: nn.Parameter, shown: bool = True) -> Any:
    device_param = torch.Tensor._make_subclass(
        low_precision_class(type(host)), host.detach().to(BF16), host.requires_grad
    )
    device_param.uses = ParamUses("block.weight", host, host.device, BF16, shown=shown)
    return device_param


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(9))


PRODUCTS: dict[str, tuple[tuple[int, ...], Callable[[Any], Tensor]]] = {
    "linear": ((4, 4), lambda w: F.linear(x(), w)),
    "linear with bias": ((4,), lambda w: F.linear(x(), x(), w)),
    "linear by name": ((4, 4), lambda w: F.linear(input=x(), weight=w)),
    "@": ((4, 4), lambda w: x() @ w),
    "@ from the left": ((4, 4), lambda w: w @ x()),
    "matmul of t": ((4, 4), lambda w: torch.matmul(x(), w.t())),
    "matmul of T": ((4, 4), lambda w: x().matmul(w.T)),
    "mm of transpose": ((4, 4), lambda w: torch.mm(x(), w.transpose(0, 1))),
    "addmm": ((4, 4), lambda w: torch.addmm(x(), x(), w)),
    "bmm of unsqueezed": ((4, 4), lambda w: torch.bmm(x(1, 4, 4), w.unsqueeze(0))),
    "baddbmm": ((2, 4, 4), lambda w: torch.baddbmm(x(2, 4, 4), x(2, 4, 4), w)),
    "conv1d": ((4, 4, 3), lambda w: F.conv1d(x(1, 4, 9), w)),
    "conv2d": ((4, 4, 3, 3), lambda w: torch.conv2d(x(1, 4, 9, 9), w)),
    "conv_transpose2d": ((4, 4, 3, 3), lambda w: F.conv_transpose2d(x(1, 4, 9, 9), w)),
    "prelu": ((4,), lambda w: F.prelu(x(), w)),
    "attention": ((1, 1, 4, 4), lambda w: F.scaled_dot_product_attention(x(1, 1, 4, 4), w, x(1, 1, 4, 4))),
    "einsum": ((4, 4), lambda w: torch.einsum("ij,kj->ik", x(), w)),
    "several views": ((2, 8), lambda w: x() @ w.view(4, 4).permute(1, 0).contiguous()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_autocast_casts_passes(name: str) -> None:
    shape, use = PRODUCTS[name]
    host, low = a_weight(*shape), device_param_of(a_weight(*shape))
    with autocast():
        expected, found = use(host), use(low)
        assert torch.equal(expected, found)
        assert type(found) is Tensor
        if name != "attention":
            with pytest.raises(RuntimeError, match=r"block\.weight.*uses it a second time before backward"):
                use(low)
    expected.float().square().sum().backward()
    found.float().square().sum().backward()
    with below_guard():
        assert torch.equal(host.grad, low.grad.float())
    low.uses.number = 0
    with autocast(), torch.no_grad():
        assert torch.equal(use(host), use(low))
        assert torch.equal(use(host), use(low))
    assert low.uses._full_precision is None or name == "einsum"  # On the CPU nobody can tell before what it does.


def _arguments(function: Any) -> tuple[Any, ...]:
    name = function.__name__.strip("_")
    if "conv" in name:
        dims = next((int(digit) for digit in name if digit.isdigit()), 1)
        if name == "conv_tbc":
            return x(9, 1, 4), x(3, 4, 4), x(4)
        return x(1, 4, *[9] * dims), x(4, 4, *[3] * dims)
    batched = {"addbmm": 1, "baddbmm": 2}
    if name in batched or name == "bmm":
        return (*([x(*[2] * (batched[name] - 1), 4, 4)] if name in batched else []), x(2, 4, 4), x(2, 4, 4))
    if name == "scaled_dot_product_attention":
        return x(1, 1, 4, 4), x(1, 1, 4, 4), x(1, 1, 4, 4)
    return {"addmm": (x(), x(), x()), "prelu": (x(), x(4))}.get(name, (x(), x()))


def _name(function: Any) -> str:
    return str(function.__qualname__)


@pytest.mark.parametrize("function", sorted(CASTS["cpu"], key=_name), ids=_name)
def test_the_list_is_that_of_autocast(function: Any) -> None:
    """Weights that have been cast before give the same as weights that autocast casts, and autocast does cast."""
    arguments = _arguments(function)
    with autocast():
        expected = function(*arguments)
        assert expected.dtype is BF16
        for position in range(len(arguments)):
            cast = [one.to(BF16) if at == position else one for at, one in enumerate(arguments)]
            assert torch.equal(expected, function(*cast))


OTHERS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda w: w.norm(),
    "mean": lambda w: w.mean(),
    "product": lambda w: x() * w,
    "product with a view": lambda w: x() * w.t(),
    "sum": lambda w: w + w,
    "part": lambda w: x()[:, :2] @ w[:2],
    "expanded": lambda w: torch.bmm(x(2, 4, 4), w.expand(2, 4, 4)),
    "to": lambda w: w.to(torch.float64),
    "float": lambda w: w.float(),
    "stack": lambda w: torch.stack([x(), w]),
    "softmax": lambda w: F.softmax(w, -1),
    "layer_norm": lambda w: F.layer_norm(x(), (4,), w[0]),
    "embedding": lambda w: F.embedding(torch.tensor([1, 2]), w),
    "clone": lambda w: w.clone(),
    "as a list": lambda w: torch.cat([w.view(-1), x().view(-1)]),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("casts", [True, False])
def test_anything_else_computes_with_the_whole_weight(name: str, casts: bool) -> None:
    host, frozen = a_weight(), a_weight().requires_grad_(False)
    use = OTHERS[name]
    with autocast(casts):
        with torch.no_grad():
            expected, found = use(host), use(device_param_of(host))
        assert expected.dtype is found.dtype
        assert torch.equal(expected, found)
        with torch.inference_mode():
            assert torch.equal(expected, use(device_param_of(host)))
        assert torch.equal(expected, use(device_param_of(frozen)))
        with pytest.raises(RuntimeError, match=r"'block\.weight' is streamed in torch\.bfloat16.*Now `torch.*in anoth"):
            use(device_param_of(host))


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "attention"])
def test_outside_of_autocast_nothing_passes(name: str) -> None:
    shape, use = PRODUCTS[name]
    host = a_weight(*shape)
    low = device_param_of(host)
    with autocast(), autocast(False):
        with torch.no_grad():
            assert torch.equal(use(host), use(low))
        with pytest.raises(RuntimeError, match="uses it in another way"):
            use(low)


DESCRIPTIONS: dict[str, Callable[[Any], Any]] = {
    name: (lambda w, name=name: getattr(w, name))
    for name in ("dtype", "shape", "device", "ndim", "requires_grad", "is_leaf", "itemsize", "nbytes", "grad", "layout")
} | {
    "element_size": lambda w: w.element_size(),
    "size": lambda w: (w.size(), w.size(0), w.numel(), w.dim(), w.stride(), len(w)),
    "of a view": lambda w: (w.t().dtype, w.t().shape, w.T.requires_grad),
    "floats": lambda w: (w.is_floating_point(), torch.is_floating_point(w), w.is_contiguous()),
    "cast to it": lambda w: x().double().to(w.dtype),
    "cast like it": lambda w: (x().double().to(w), x().double().type_as(w)),
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "values": lambda w: w.detach().numpy().sum(),
    "list": lambda w: w.tolist(),
    "promotion": lambda w: torch.result_type(x(), w),
    "zeros": lambda w: (torch.zeros_like(w), w.new_zeros(3)),
    "copy": copy.deepcopy,
    "tree": lambda w: tree_leaves(tree_map(lambda leaf: leaf.shape, {"a": [w]})),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_what_describes_a_weight_is_said_of_the_weight(name: str) -> None:
    host = a_weight()
    host.grad = torch.ones(4, 4)
    low = device_param_of(host)
    with autocast():
        for one, other in zip(*(tree_leaves(DESCRIPTIONS[name](weight)) for weight in (host, low)), strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert low.uses.number == 0
    low.uses.end()


def test_a_copy_of_a_weight_is_a_parameter() -> None:
    copied = copy.deepcopy(device_param_of(a_weight()))
    assert type(copied) is nn.Parameter
    buffer = io.BytesIO()
    torch.save(device_param_of(a_weight()), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), a_weight())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda w: w.mul_(2),
    "through data": lambda w: w.data.mul_(2),
    "detached": lambda w: w.detach().zero_(),
    "of data": lambda w: setattr(w, "data", torch.zeros(4, 4)),
    "copy_": lambda w: w.copy_(x()),
    "out": lambda w: torch.add(x(), x(), out=w),
    "hook": lambda w: w.register_hook(lambda gradient: gradient),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_be_lost_is_refused(change: str) -> None:
    low = device_param_of(a_weight())
    with pytest.raises(RuntimeError, match=r"block\.weight.*(lost|lose precision|gradient of torch\.bfloat16)"):  # noqa: PT012
        with torch.no_grad(), autocast():
            CHANGES[change](low)
        low.uses.end()
    low.uses.forget()
    assert low.uses._full_precision is None


def test_whole_weights_go_with_the_unit() -> None:
    low = device_param_of(a_weight())
    with torch.no_grad():
        low.norm()
        first = low.uses._full_precision
        low.mean()
    assert first is low.uses._full_precision is not None
    low.uses.end()
    assert low.uses._full_precision is None
    low.uses.shown = False
    low.detach().norm()
    assert low.uses._full_precision is None  # Nobody would take it back.


def test_it_is_shown_as_what_it_is() -> None:
    low = device_param_of(a_weight())
    assert "bfloat16" in repr(low)
    assert isinstance(low, nn.Parameter)
    assert isinstance(low, DeviceParam)
    low.untyped_storage()
    with below_guard():
        low.untyped_storage().resize_(0)
    assert "not on the device" in repr(low)


def test_a_class_of_the_user_is_kept() -> None:
    class Labelled(nn.Parameter):
        pass

    low = device_param_of(Labelled(torch.ones(4, 4)))
    assert isinstance(low, Labelled)
    assert low.dtype is torch.float32
    assert low_precision_class(nn.Parameter) is LowPrecisionParam


def recurrent(kind: type, fused: bool) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    module = kind(4, 4)
    lows = []
    for name, host in list(module.named_parameters()):
        if fused or "_ih" in name:
            low = device_param_of(host)
            lows.append(low)
            setattr(module, name, low)
    return module, lows


@pytest.mark.parametrize(("kind", "fused"), [(nn.LSTM, True), (nn.GRU, False), (nn.RNN, False)])
def test_recurrent_layers_read_their_weights_once(kind: type, fused: bool) -> None:
    if fused and not HAS_BF16_LSTM:
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
    torch.manual_seed(0)
    plain = kind(4, 4)
    module, lows = recurrent(kind, fused)
    with autocast():
        expected, found = plain(x(5, 2, 4))[0], module(x(5, 2, 4))[0]
    assert torch.equal(expected, found)
    assert {low.uses.number for low in lows} == {1}


def test_a_weight_that_is_read_in_every_step_of_a_sequence_is_refused() -> None:
    module, _ = recurrent(nn.GRU, fused=True)
    with autocast(), pytest.raises(RuntimeError, match="second time"):
        module(x(5, 2, 4))
    module, _ = recurrent(nn.GRU, fused=True)
    torch.manual_seed(0)
    with autocast(), torch.no_grad():
        assert torch.equal(nn.GRU(4, 4)(x(5, 2, 4))[0], module(x(5, 2, 4))[0])


def attention() -> tuple[nn.Module, nn.Module]:
    made = []
    for low in (False, True):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(4, 2)
        for part in module.modules():
            for name, host in list(part._parameters.items()):
                if low and host is not None:
                    part._parameters[name] = device_param_of(host)
        made.append(module)
    return made[0], made[1]


def test_attention_of_torch_passes() -> None:
    plain, low = attention()
    with autocast():
        same = x(3, 4)
        assert torch.equal(plain(same, same, same)[0], low(same, same, same)[0])
    assert low.in_proj_weight.uses.number == low.out_proj.weight.uses.number == 1


def test_attention_across_reads_parts_of_weights() -> None:
    plain, low = attention()
    with autocast():
        with pytest.raises(RuntimeError, match=r"multi_head_attention_forward.*in another way"):
            low(x(3, 4), x(5, 4), x(5, 4))
        with torch.no_grad():
            assert torch.equal(plain(x(3, 4), x(5, 4), x(5, 4))[0], low(x(3, 4), x(5, 4), x(5, 4))[0])


class Foreign(Tensor):
    """A tensor with a dispatch of its own."""

    seen: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_other_classes_see_the_call_too() -> None:
    Foreign.seen.clear()
    with autocast():
        found = F.linear(x().as_subclass(Foreign), device_param_of(a_weight()))
        assert torch.equal(found.as_subclass(Tensor), F.linear(x(), a_weight()))
    assert type(found) is Foreign
    assert F.linear in Foreign.seen


class Doubled(torch.autograd.Function):
    """Uses its weight where autograd does not look."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * weight, None


def test_functions_of_the_user_see_the_whole_weight() -> None:
    results = []
    for weight in (a_weight(), device_param_of(a_weight())):
        value = x().requires_grad_()
        Doubled.apply(value, weight).sum().backward()
        results.append(value.grad)
    assert torch.equal(*results)


def test_a_recomputation_passes() -> None:
    """Non-reentrant checkpoints compare what is saved, and uses of the same call are counted once by the executor."""
    host = a_weight()
    low = device_param_of(host)
    results = []
    for weight in (host, low):
        value = x().requires_grad_()

        def run(value: Tensor, weight: Any = weight) -> Tensor:
            if weight is low:
                low.uses.number = 0
            return torch.tanh(F.linear(value, weight))

        with autocast():
            checkpoint(run, value, use_reentrant=False).sum().backward()
        results.append(value.grad)
    assert torch.equal(*results)
    with below_guard():
        assert torch.equal(host.grad, low.grad.float())


SIZES = {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 32, "vocab_size": 128}
# Blocks that are checkpointed, and that are swapped.
PLANS = {"kept": (0, 0), "checkpointed": (3, 0), "swapped": (0, 2)}


class Nothing(TorchDispatchMode):
    """Runs every operation as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Gpt2(L.LightningModule):
    """A GPT-2 module: its Conv1D layers call `addmm`, for which autograd saves the weight itself."""

    def __init__(self, within: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT2LMHeadModel(GPT2Config(**SIZES, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
        self.within = within
        self.mode = Nothing()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=batch, labels=batch, use_cache=False).loss

    def on_train_start(self) -> None:
        if self.within:
            self.mode.__enter__()

    def on_train_end(self) -> None:
        if self.within:
            self.mode.__exit__(None, None, None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train(module: Gpt2, strategy: Any) -> dict[str, Tensor]:
    batches: Any = torch.randint(128, (3, 2, 32), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, precision="bf16-mixed", strategy=strategy, **QUIET)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.state_dict()


@pytest.mark.filterwarnings("ignore:Settings of the plan that were not given")
@pytest.mark.parametrize("plan", PLANS)
def test_training_under_a_mode_is_plain_training(plan: str) -> None:
    plain = train(Gpt2(), "auto")
    num_checkpoint, num_swap = PLANS[plan]
    strategy = ProTrainStrategy(
        num_persistent_chunks=0,
        num_checkpoint_blocks=num_checkpoint,
        num_swap_blocks=num_swap,
        num_chunk_buffers=4,
        monitor=False,
    )
    streamed = train(Gpt2(within=True), strategy)
    assert strategy.plan is not None
    assert any(chunk.streamed_dtype == "bfloat16" for chunk in strategy.plan.chunks)
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)
