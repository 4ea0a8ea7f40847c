"""Split masters are float32 masters; random bits depend on positions alone; what is not stepped is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_protrain import SplitAdamW
from lightning_protrain.runtime.optim import split_adamw
from lightning_protrain.runtime.optim.fused import NO_CLIP, Clip
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, hyperparameters
from lightning_protrain.runtime.optim.split_numbers import (
    BLOCK,
    PAGE,
    CodeScratch,
    codes_of,
    dequantise,
    fresh_remainder,
    hash_of,
    join,
    quantise,
    random_bits,
    round_stochastically,
    sequence,
    split,
    sums_of,
)

CPU = torch.device("cpu")
FORMATS = [(moments, masters) for moments in ("float32", "bfloat16", "8bit") for masters in (True, False)]
every_format = pytest.mark.parametrize(("moments", "masters"), FORMATS)
# Less than a block, a part of a block, less than a page, pages and a part of one.
SHAPES = [(1,), (77,), (30, 40), (2, 3, 100), (3, PAGE // 2 + 11)]
STEPS = 3
KNOWN = [45585, 52187, 45345, 58853]


def weights(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((0.02 * torch.randn(shape, generator=generator)).bfloat16()) for shape in shapes]


def gradients(shapes: Sequence[tuple[int, ...]], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [(1e-3 * torch.randn(shape, generator=generator)).bfloat16() for shape in shapes]


def trained(optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[Any]:
    parameters = optimizer.param_groups[0]["params"]
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients([each.shape for each in parameters], step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return list(parameters)


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [*optimizer.param_groups[0]["params"], *kept]


def same(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> bool:
    return all(torch.equal(*pair) for pair in zip(everything(left), everything(right), strict=True))


# --- masters ----------------------------------------------------------------------------------------------------------
def test_every_float32_is_a_weight_and_a_remainder() -> None:
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(1 << 16, dtype=torch.int32) << 16) | 0x8000
    bits = torch.cat([random, ties, ties - 1, ties + 1])
    weight, remainder = split(bits.view(torch.float32))
    assert torch.equal(join(weight, remainder).view(torch.int32), bits)
    numbers = bits.view(torch.float32).double()
    usual = numbers.abs() < 3e38
    assert bool(((weight.double() - numbers).abs() <= (numbers.abs() * 2**-8).clamp_min(1e-40))[usual].all())


@pytest.mark.parametrize("threads", [1, 2])
def test_masters_are_those_of_adamw(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        options = {"lr": 1e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
        ours, idle = (SplitAdamW(weights(), **options | rate) for rate in ({}, {"lr": 0.0}))  # type: ignore[arg-type]
        peers = [nn.Parameter(idle.master(weight)) for weight in trained(idle, 1)]  # The first masters.
        trained(AdamW(peers, fused=True, **options))  # type: ignore[arg-type]
        for weight, peer in zip(trained(ours), peers, strict=True):
            assert torch.equal(ours.master(weight), peer)
            assert torch.equal(split(peer.detach())[0], weight)
    finally:
        torch.set_num_threads(before)


def test_first_masters_lie_anywhere_between_those_that_round_to_another_weight() -> None:
    weight = torch.cat([torch.zeros(10), -torch.zeros(10), torch.full((10_000,), 1.0)]).bfloat16()
    remainder = fresh_remainder(weight, 5)
    assert not remainder[:20].any()
    assert torch.equal(split(join(weight, remainder))[0].view(torch.int16), weight.view(torch.int16))
    assert abs(float(remainder[20:].float().mean())) < 600
    assert float(remainder[20:].float().std()) == pytest.approx(65536 / 12**0.5, rel=0.02)


@pytest.mark.parametrize("zeros", [False, True])
def test_weights_move_from_the_first_step_on(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: remainders of zero let no weight move before its master has moved by half a unit."""
    if zeros:
        monkeypatch.setattr(
            split_adamw, "fresh_remainder", lambda weight, _: torch.zeros_like(weight, dtype=torch.int16)
        )
    weight = nn.Parameter(torch.ones(10_000).bfloat16())
    optimizer = SplitAdamW([weight], lr=1e-4, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moved = float((1.0 - weight.detach().float()).mean())
    assert (moved == pytest.approx(1e-4, rel=0.2)) != zeros


@pytest.mark.filterwarnings("ignore:.*are float32, and stay so")
def test_float32_weights_are_their_own_masters() -> None:
    parameters = [nn.Parameter(weight.detach().float()) for weight in weights()]
    peers = [nn.Parameter(weight.detach().clone()) for weight in parameters]
    trained(SplitAdamW(parameters))
    trained(AdamW(peers, fused=True))
    assert all(torch.equal(*pair) for pair in zip(parameters, peers, strict=True))


def test_float32_weights_are_said() -> None:
    with pytest.warns(UserWarning, match="1 of 6 parameters of SplitAdamW are float32, and stay so"):
        SplitAdamW([*weights(), nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(("moments", "nbytes"), [("float32", 8), ("bfloat16", 4), ("8bit", 2 + 8 / BLOCK)])
@pytest.mark.parametrize("masters", [True, False])
def test_bytes_of_a_parameter(moments: Any, nbytes: float, masters: bool) -> None:
    optimizer = SplitAdamW(weights([(4 * PAGE,)]), moments=moments, masters=masters)
    trained(optimizer, 1)
    (state,) = optimizer.state.values()
    whole = sum(value.nbytes for name, value in state.items() if name != "step")
    assert whole / (4 * PAGE) == pytest.approx(nbytes + (2 + 8 / PAGE) * masters)


# --- weights that somebody else changes -------------------------------------------------------------------------------
def by_copy(weight: Tensor) -> None:
    weight[:5].copy_(torch.full((5,), 3.0))


def by_data(weight: Tensor) -> None:
    weight.data[:5] = 3.0


@pytest.mark.parametrize("change", [by_copy, by_data])
def test_a_remainder_of_a_changed_weight_means_nothing(change: Any) -> None:
    optimizer = SplitAdamW(weights([(2 * PAGE + 10,)]), lr=1e-4)
    (weight,) = trained(optimizer)
    before = optimizer.master(weight)
    with torch.no_grad():
        change(weight)
    weight.grad.zero_()
    state = optimizer.state[weight]
    state["exp_avg"].zero_()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()  # It moves nothing.
    after = optimizer.master(weight)
    assert torch.equal(after[:PAGE], weight[:PAGE].float())
    assert torch.equal(after[:5], torch.full((5,), 3.0))
    assert torch.equal(after[PAGE:], before[PAGE:])


@every_format
def test_weights_that_are_put_back_train_on(moments: Any, masters: bool) -> None:
    """As a callback does that validates with averaged weights."""
    left, right = (SplitAdamW(weights(), lr=1e-4, moments=moments, masters=masters) for _ in range(2))
    trained(left)
    for weight in trained(right):
        held = weight.detach().clone()
        weight.data.copy_(torch.zeros_like(held))
        with torch.no_grad():
            weight.copy_(held)
    trained(left)
    trained(right)
    assert same(left, right)


# --- bits that depend on positions alone ------------------------------------------------------------------------------
@every_format
@settings(max_examples=5, deadline=None)
@given(tile=st.sampled_from([PAGE, 2 * PAGE, 5 * PAGE]), seed=st.integers(0, 3))
def test_tiles_do_not_matter(moments: Any, masters: bool, tile: int, seed: int) -> None:
    made = []
    for size in (PAGE, tile):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(split_adamw, "tile_of", lambda *_, size=size: size)
            made.append(SplitAdamW(weights(), lr=1e-3, moments=moments, masters=masters, seed=seed))
            trained(made[-1])
    assert same(*made)


@every_format
@pytest.mark.parametrize("clip", [NO_CLIP, Clip(bound=5e-4), Clip(coefficient=torch.tensor(0.3))])
def test_the_host_steps_chunk_by_chunk_to_the_same_bits(moments: Any, masters: bool, clip: Clip) -> None:
    whole, parts = (SplitAdamW(weights(), lr=1e-3, moments=moments, masters=masters) for _ in range(2))
    host = HostStep(1)
    for step in range(STEPS):
        for parameter, gradient in zip(whole.param_groups[0]["params"], gradients(SHAPES, step), strict=True):
            parameter.grad = gradient
            clip.apply([parameter.grad])
        whole.step()
        group, given = hyperparameters(parts.param_groups[0]), gradients(SHAPES, step)
        pairs = [ParamUpdate(*pair) for pair in zip(parts.param_groups[0]["params"], given, strict=True)]
        for chunk in (pairs[3:], pairs[:2], pairs[2:3]):
            host.step(parts, [(group, chunk)], clip)
    for left, right in zip(*(opt.param_groups[0]["params"] for opt in (whole, parts)), strict=True):
        assert torch.equal(left, right)
        assert all(torch.equal(value, parts.state[right][name]) for name, value in whole.state[left].items())


@pytest.mark.filterwarnings("ignore:.*are float32, and stay so")
def test_the_host_writes_shadow_copies_of_float32_weights() -> None:
    weight, low = nn.Parameter(torch.randn(1000)), torch.empty(1000, dtype=torch.bfloat16)
    optimizer = SplitAdamW([weight])
    update = ParamUpdate(weight, torch.ones(1000).bfloat16(), low)
    HostStep(1).step(optimizer, [(optimizer.param_groups[0], [update])])
    assert torch.equal(low, weight.detach().bfloat16())


def numbers_of(step: int, begin: int = 0, count: int = 1 << 16, index: int = 5) -> Tensor:
    half = count // 2
    memory = torch.empty(2, half, dtype=torch.int32)
    key = hash_of(3, step, index, 0)
    return random_bits(begin, memory[0], memory[1], sequence(half, CPU), key).to(torch.int32) & 0xFFFF


def test_random_bits_are_a_function_of_position() -> None:
    whole = numbers_of(7)
    assert torch.equal(numbers_of(7, 4096, 512), whole[4096:4608])
    assert whole[:4].tolist() == KNOWN, "every device and version must give these bits"
    assert not torch.equal(numbers_of(8), whole)
    assert not torch.equal(numbers_of(7, index=6), whole)


def test_random_bits_are_uniform() -> None:
    every = torch.stack([numbers_of(step) for step in range(40)]).double() / 65536
    assert every.mean() == pytest.approx(0.5, abs=2e-3)
    assert every.var() == pytest.approx(1 / 12, abs=1e-3)
    counts = torch.histc(every, 256, 0, 1)
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 400  # 255 degrees of freedom
    for shift in (1, 2, 256):
        pairs = torch.stack([every[:, :-shift].flatten(), every[:, shift:].flatten()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5e-3
    assert abs(float(torch.corrcoef(torch.stack([every[:-1].flatten(), every[1:].flatten()]))[0, 1])) < 5e-3


def test_rounding_keeps_the_expectation() -> None:
    values = torch.full((1 << 16,), 1.0 + 2**-9)  # A quarter of the way to the next number.
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    random = numbers_of(1).to(torch.int16)
    round_stochastically(values.clone(), random, torch.empty(1 << 16, dtype=torch.int32), out)
    assert set(out.tolist()) == {1.0, 1.0078125}
    assert float(out.double().mean()) == pytest.approx(1.0 + 2**-9, abs=1e-4)


@pytest.mark.parametrize("rounds_to_nearest", [False, True])
def test_second_moments_in_bfloat16_do_not_stop_growing(
    rounds_to_nearest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: to the nearest, they stop at a fraction of their limit."""
    if rounds_to_nearest:
        monkeypatch.setattr(split_adamw.SplitStep, "_round", lambda self, values, out, *_: out.copy_(values))
    optimizer = SplitAdamW([weight := nn.Parameter(torch.ones(1000).bfloat16())], lr=0.0, moments="bfloat16")
    for _ in range(3000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    mean = float(optimizer.state[weight]["exp_avg_sq"].float().mean())
    assert (mean == pytest.approx(1 - 0.999**3000, rel=0.01)) != rounds_to_nearest


def test_small_updates_add_up_without_masters() -> None:
    optimizer = SplitAdamW([weight := nn.Parameter(torch.ones(10_000).bfloat16())], lr=1e-5, masters=False)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 200 * 1e-5 * (1 + 0.01), abs=2e-4)


# --- codes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("signed", [True, False])
def test_codes_have_the_values_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(codes_of(signed, CPU).values, functional.create_dynamic_map(signed=signed))


def test_the_default_dtype_changes_no_code() -> None:
    expected = codes_of(True, CPU)
    codes_of.cache_clear()
    torch.set_default_dtype(torch.bfloat16)  # As while a model computes in `bf16-true`.
    try:
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(codes_of(True, CPU), expected, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 77, BLOCK, 5 * BLOCK, 5 * BLOCK + 3])
def test_codes_are_the_nearest(signed: bool, numel: int) -> None:
    table = codes_of(signed, CPU)
    values = torch.randn(numel) * torch.logspace(-6, 2, numel)
    values = values if signed else values.square()
    codes, scales = torch.empty(numel, dtype=torch.uint8), torch.empty(-(-numel // BLOCK))
    quantise(values.clone(), table, CodeScratch.empty(numel, CPU), codes, scales)
    back = dequantise(codes, scales, table, CodeScratch.empty(numel, CPU), torch.empty(numel))
    scale = scales.repeat_interleave(BLOCK)[:numel]
    nearest = (values[:, None] / scale[:, None] - table.values).abs().min(1).values * scale
    off = (back - values).abs()
    assert bool((off <= nearest + 2**-7 * values.abs() + 1e-6 * scale).all())
    assert signed or bool((back > 0)[values > 0].all()), "a moment above zero is not zero"


def test_what_is_no_number_stays_so() -> None:
    for moments, masters in FORMATS:
        optimizer = SplitAdamW([weight := nn.Parameter(torch.ones(4).bfloat16())], moments=moments, masters=masters)  # type: ignore[arg-type]
        for _ in range(2):
            weight.grad = torch.tensor([1.0, torch.nan, torch.inf, 0.0]).bfloat16()
            optimizer.step()
        assert weight.isnan()[1:3].all(), moments
        assert moments == "8bit" or not weight.isnan()[[0, 3]].any()


# --- states -----------------------------------------------------------------------------------------------------------
def again(optimizer: SplitAdamW, how: str) -> SplitAdamW:
    if how == "pickle":
        return pickle.loads(pickle.dumps(optimizer))
    if how == "deepcopy":
        return copy.deepcopy(optimizer)
    held = [nn.Parameter(weight.detach().clone()) for weight in optimizer.param_groups[0]["params"]]
    made = SplitAdamW(held, moments=optimizer.moments, masters=optimizer.masters)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made


@every_format
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_copy_trains_on_to_the_same_bits(how: str, moments: Any, masters: bool) -> None:
    optimizer = SplitAdamW(weights(), lr=1e-3, moments=moments, masters=masters)
    trained(optimizer)
    other = again(optimizer, how)
    trained(optimizer)
    trained(other)
    assert same(optimizer, other)


@every_format
@pytest.mark.parametrize("before", ["float32", "bfloat16", "8bit", "adamw"])
def test_moments_of_another_format_are_converted(before: Any, moments: Any, masters: bool) -> None:
    first = AdamW(weights(), lr=1e-3) if before == "adamw" else SplitAdamW(weights(), lr=1e-3, moments=before)
    held = [nn.Parameter(weight.detach().clone()) for weight in trained(first)]
    second = SplitAdamW(held, lr=1e-3, moments=moments, masters=masters)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for old, new in zip(first.state.values(), second.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            there, here = (split_adamw.float32_moment(state, name) for state in (old, new))
            torch.testing.assert_close(here, there, rtol=0.1, atol=0.02 * float(there.abs().max()))
        assert float(new["step"]) == STEPS
        assert ("remainder" in new) == masters
        assert not masters or before == "adamw" or torch.equal(new["remainder"], old["remainder"])
    trained(second)


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": "int4"}, "no moments='int4'. Choose one of 'float32', 'bfloat16', '8bit'"),
        ({"lr": -1.0}, "lr=-1.0 is out of range"),
        ({"betas": (0.9, 1.0)}, "betas=.* is out of range"),
        ({"eps": -1e-8}, "eps=-1e-08 is out of range"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is out of range"),
    ],
)
def test_options_that_are_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitAdamW(weights(), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"steps bfloat16 and float32 weights, not float(16|64) \(shape \[3\]\)"):
        SplitAdamW([nn.Parameter(torch.ones(3, dtype=dtype))])


def test_sparse_gradients_and_weights_in_another_layout() -> None:
    weight = nn.Parameter(torch.ones(4, 3).bfloat16())
    weight.grad = torch.zeros_like(weight).to_sparse()
    with pytest.raises(ValueError, match="does not step sparse gradients"):
        SplitAdamW([weight]).step()
    with pytest.raises(ValueError, match=r"contiguous weights, not one of shape \[3, 4\] and strides \(1, 3\)"):
        SplitAdamW([nn.Parameter(torch.ones(4, 3).bfloat16().t())])


def test_states_of_others() -> None:
    optimizer = SGD(weights(), lr=0.1, momentum=0.9)
    trained(optimizer)
    with pytest.raises(ValueError, match="has no 'step', only 'momentum_buffer', so it was not made by AdamW"):
        SplitAdamW(weights()).load_state_dict(optimizer.state_dict())
    wrong = SplitAdamW(weights([(5,)]))
    trained(wrong)
    with pytest.raises(ValueError, match=r"'exp_avg' has the shape \[5\], its weight \[6\]"):
        SplitAdamW(weights([(6,)])).load_state_dict(wrong.state_dict())


def test_sums_of_pages() -> None:
    weight = weights([(PAGE + 3,)])[0].detach()
    first = sums_of(weight)
    assert first.shape == (2,)
    weight[PAGE] += 1
    assert (sums_of(weight) != first).tolist() == [False, True]
