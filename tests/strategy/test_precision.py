"""The precision of the strategy stands for Lightning's own, scales as it does, or says why it cannot."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.problem import layout_alpha
from lightning_protrain.profiler.records import ModelLayout, ParameterInfo
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.strategy.precision import ProTrainPrecision, as_protrain_precision
from tests.support.models import LanguageModel, Mlp, ParityModule, fit, token_batches, zoo
from tests.support.parity import Result, differences, snapshot
from tests.support.trainers import QUIET

MIXED = (("packed", "uint8", 900), ("norm", "bfloat16", 100))


def test_a_model_of_several_dtypes_has_the_mean_of_their_factors_by_bytes() -> None:
    packed, norm = (ParameterInfo(name, (name,), (8,), dtype, nbytes, False) for name, dtype, nbytes in MIXED)
    assert layout_alpha(ModelLayout((packed, norm), (), 0)) == pytest.approx(0.9 * 1.05 + 0.1 * 1.1)
    assert layout_alpha(ModelLayout((), (), 0)) == 1.0


def test_a_precision_of_ours_stays_the_object_it_is() -> None:
    class Own(ProTrainPrecision):
        pass

    own = Own()
    assert as_protrain_precision(own) is own


@pytest.mark.parametrize(
    "plugin",
    [
        None,
        Precision(),
        MixedPrecision("bf16-mixed", "cpu"),
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")),
        HalfPrecision("bf16-true"),
        HalfPrecision("16-true"),
        DoublePrecision(),
    ],
    ids=lambda plugin: plugin.precision if plugin else "none",
)
def test_what_lightning_makes_of_a_precision_is_replaced(plugin: Precision | None) -> None:
    precision = as_protrain_precision(plugin)
    assert type(precision) is ProTrainPrecision
    assert precision.precision == (plugin.precision if plugin else "32-true")
    assert precision.scaler is getattr(plugin, "scaler", None)
    precision.open("cpu")
    with precision.forward_context():
        layer = torch.nn.Linear(2, 2)
        computes_in = layer(torch.ones(1, 2, dtype=layer.weight.dtype)).dtype
    assert (computes_in is torch.float32) is (precision.precision == "32-true")
    assert torch.get_default_dtype() is torch.float32


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'8-true'"):
        ProTrainPrecision("8-true")


def test_a_class_of_the_user_is_refused_too() -> None:
    class Custom(Precision):
        pass

    module = zoo()["reused"]()
    for attempt in (
        lambda: as_protrain_precision(Custom()),
        lambda: fit(module, strategy="protrain", plugins=[Custom()], fast_dev_run=True),
    ):
        with pytest.raises(ValueError, match=r"'32-true' \(Custom\).*'64-true', '32-true', 'bf16-true'"):
            attempt()
    assert module.losses == []


# --- the same bits as Lightning ---------------------------------------------------------------------------------------
MODELS = zoo()
DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


def run(
    module: ParityModule,
    precision: str,
    plan: Any = None,
    overlap: str = "off",
    device_memory: str | int | None = None,
    **options: Any,
) -> Result:
    """Trains in `precision`, plainly or under a plan; scaled where 16 bits need it."""
    if precision == "16-mixed":
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    else:
        options["precision"] = precision
    if device_memory is not None:
        options["strategy"] = ProTrainStrategy(device_memory=device_memory)
    elif plan is not None:
        options["strategy"] = ProTrainStrategy(plan=plan, overlap_optimizer=overlap)
    fit(module, **options)
    return Result(tuple(module.losses), snapshot(module))


@functools.cache
def plain(model: str, precision: str) -> Result:
    return run(MODELS[model](), precision)


def test_a_scaler_steps_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that overflow skip the step, whole, and halve the scale."""
    results = []
    for plan in (None, "offload"):
        module = MODELS["tied"](lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        options = {} if plan is None else {"strategy": ProTrainStrategy(plan=plan)}
        fit(module, plugins=plugin, **options)
        results.append((Result(tuple(module.losses), snapshot(module)), scaler.get_scale()))
    assert differences(results[0][0], results[1][0]) == []
    assert results[0][1] == results[1][1] < 2.0**40


def test_a_scaler_and_an_overlap_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"decides after backward whether a step is taken.*bf16-mixed"):
        run(MODELS["tied"](), "16-mixed", "offload", "backward")


def test_a_scaler_and_a_fused_optimizer_do_not_go_together() -> None:
    module = MODELS["tied"]()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=True)
    with pytest.raises(ValueError, match="is fused"):
        run(module, "16-mixed", "offload")


def test_the_state_of_the_scaler_is_saved() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = ProTrainPrecision("16-mixed", scaler)
    precision.open("cpu")
    state = precision.state_dict()
    assert state["scale"] == 8.0
    precision.load_state_dict({**state, "scale": 4.0})
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("precision", ["bf16-mixed", *DTYPES])
def test_evaluation_computes_in_that_precision(precision: str) -> None:
    outputs = []
    for strategy in ("auto", ProTrainStrategy(plan="offload")):
        module = MODELS["tied"]()
        module.predict_step = lambda batch, batch_idx, module=module: module.logits(batch[0], batch_idx)
        trainer = L.Trainer(accelerator="cpu", devices=1, precision=precision, strategy=strategy, **QUIET)
        outputs.append(torch.stack(trainer.predict(module, token_batches())))
    assert torch.equal(*outputs)
    assert outputs[0].dtype is DTYPES.get(precision, torch.bfloat16)


@pytest.mark.slow
def test_a_plan_is_searched_for_in_double_precision() -> None:
    """Weights, gradients and states of eight bytes are what the budget is held against."""
    bounds = []
    for precision in ("32-true", "64-true"):
        with pytest.raises(ValueError, match="would need at least") as caught:
            run(MODELS["tied"](), precision, device_memory="1KiB")
        bounds.append(int(re.findall(r"Raise device_memory to .*?\((\d+) bytes\)", str(caught.value))[0]))
    assert bounds[1] > 1.5 * bounds[0]
    found = run(MODELS["tied"](), "64-true", device_memory=bounds[1])
    assert differences(plain("tied", "64-true"), found) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_that_autocast_casts_are_streamed_in_two_bytes(model: str, overlap: str) -> None:
    strategy = ProTrainStrategy(plan="offload", overlap_optimizer=overlap)
    module = MODELS[model]()
    fit(module, strategy=strategy, precision="bf16-mixed")
    assert differences(plain(model, "bf16-mixed"), Result(tuple(module.losses), snapshot(module))) == []
    low = {chunk.streamed_dtype for chunk in strategy.plan.chunks}
    # Whether an expert runs depends on values, which a trace does not know.
    assert low == ({None} if model == "moe" else {None, "bfloat16"})


def test_a_plan_made_in_mixed_precision_is_used_again() -> None:
    made = ProTrainStrategy(plan="offload")
    fit(MODELS["tied"](), strategy=made, precision="bf16-mixed")
    expected = plain("tied", "bf16-mixed")
    assert differences(expected, run(MODELS["tied"](), "bf16-mixed", made.plan)) == []
    with pytest.raises(ValueError, match="computes in the dtype of the weights"):
        run(MODELS["tied"](), "32-true", made.plan)


def test_a_hook_before_fit_keeps_a_weight_in_its_dtype() -> None:
    def hooked() -> ParityModule:
        module = MODELS["reused"]()
        module.network.head.weight.register_hook(lambda gradient: gradient * 0.5)
        return module

    strategy = ProTrainStrategy(plan="offload")
    module = hooked()
    fit(module, strategy=strategy, precision="bf16-mixed")
    assert differences(run(hooked(), "bf16-mixed"), Result(tuple(module.losses), snapshot(module))) == []
    (chunk,) = [chunk for chunk in strategy.plan.chunks if "network.head.weight" in chunk.parameters]
    assert chunk.streamed_dtype is None


# --- weights that are used otherwise than in the step that was traced -------------------------------------------------
class Otherwise(Mlp):
    """A module that uses a weight differently in evaluation, or from some step on, than in the first step."""

    def __init__(self, use: str, when: str) -> None:
        super().__init__()
        self.use, self.when, self.step = use, when, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(hidden)
        if self.training if self.when == "evaluation" else self.step < 3:
            return outputs
        weight = next(layer.weight for layer in self.modules() if isinstance(layer, torch.nn.Linear))
        if self.use == "elementwise":
            return outputs * (1 + weight.mean())
        if self.use == "twice":
            return outputs + super().forward(hidden)
        if self.use == "dtype":
            return outputs.to(weight.dtype) * 1.5
        with torch.autocast("cpu", enabled=False):
            return outputs + (hidden.float() @ weight.t()).mean()


class Validated(ParityModule):
    def loss(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.network.blocks:
            block.step = max(batch_idx, getattr(block, "step", 0))
        return super().loss(tokens, batch_idx)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch[0], batch_idx).detach().clone())

    def val_dataloader(self) -> Any:
        return token_batches()


def otherwise(use: str, when: str) -> Validated:
    torch.manual_seed(0)
    return Validated(LanguageModel([Otherwise(use, when) for _ in range(3)]))


@pytest.mark.parametrize("use", ["elementwise", "twice", "dtype", "no autocast"])
def test_evaluation_may_use_weights_otherwise(use: str) -> None:
    expected, found = (run(otherwise(use, "evaluation"), "bf16-mixed", plan) for plan in (None, "offload"))
    assert differences(expected, found) == []


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("elementwise", "Tensor.mean` uses it in another way"),
        ("twice", "uses it a second time"),
        ("no autocast", "uses it in another way"),
    ],
)
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_training_that_uses_weights_otherwise_is_refused(use: str, message: str, overlap: str) -> None:
    module = otherwise(use, "later")
    with pytest.raises(RuntimeError, match=message):
        run(module, "bf16-mixed", "offload", overlap, num_sanity_val_steps=0)
    assert len(module.losses) == 3
    assert {type(parameter) for parameter in module.parameters()} == {torch.nn.Parameter}


def test_training_may_ask_for_a_dtype_later() -> None:
    expected, found = (run(otherwise("dtype", "later"), "bf16-mixed", plan) for plan in (None, "offload"))
    assert differences(expected, found) == []


def test_a_plan_made_for_another_use_is_refused() -> None:
    made = ProTrainStrategy(plan="offload")
    fit(otherwise("elementwise", "evaluation"), strategy=made, precision="bf16-mixed", limit_val_batches=0)
    module = otherwise("elementwise", "later")
    for block in module.network.blocks:
        block.step = 3
    with pytest.raises(RuntimeError, match=r"uses it in another way.*or give a Plan"):
        run(module, "bf16-mixed", made.plan)


def test_the_message_for_a_hook_knows_of_plans() -> None:
    made = ProTrainStrategy(plan="offload")
    fit(MODELS["reused"](), strategy=made, precision="bf16-mixed")
    module = MODELS["reused"]()
    module.network.head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(RuntimeError, match=r"give no Plan that was made without it"):
        run(module, "bf16-mixed", made.plan)


# --- copies of weights that code writes to without a version ----------------------------------------------------------


def test_nothing_is_profiled_where_nothing_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled: list[Any] = []
    monkeypatch.setattr(
        "lightning_protrain.strategy.describe.profile_training_step", lambda *given: profiled.append(given)
    )
    run(MODELS["tied"](), "32-true", "offload")
    run(MODELS["tied"](), "bf16-true", "offload")
    run(MODELS["tied"](), "bf16-mixed", "resident")
    run(MODELS["tied"](), "bf16-mixed", "auto")
    assert profiled == []
    run(MODELS["tied"](), "bf16-mixed", "offload")
    assert len(profiled) == 1


def test_a_step_that_needs_what_training_sets_up_is_streamed_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Prepared(ParityModule):
        def on_train_start(self) -> None:
            self.scale = 0.5

        def loss(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.scale * super().loss(tokens, batch_idx)

    def prepared() -> ParityModule:
        torch.manual_seed(0)
        return Prepared(LanguageModel([Mlp() for _ in range(3)]))

    with caplog.at_level("INFO"):
        found = run(prepared(), "bf16-mixed", "offload")
    assert differences(run(prepared(), "bf16-mixed"), found) == []
    assert any("raised AttributeError" in line and "scale" in line for line in caplog.messages)


class Far(Tensor):
    """A scale that stands for one on a GPU."""

    def cpu(self, *_: Any) -> Tensor:  # type: ignore[override]
        return self.detach().as_subclass(Tensor).clone()


class Watched(torch.amp.GradScaler):
    """Notes where its scale is while it unscales."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.was_far = isinstance(self._scale, Far)
        super().unscale_(optimizer)


def scaled(gradient: float) -> tuple[Watched, torch.optim.Optimizer, nn.Parameter]:
    """A scaler on a GPU, so to say, and one weight whose gradient is scaled."""
    scaler, weight = Watched("cpu", init_scale=8.0), nn.Parameter(torch.ones(2))
    scaler.scale(torch.zeros(()))
    scaler._scale = scaler._scale.as_subclass(Far)
    weight.grad = torch.full((2,), 8.0 * gradient)
    return scaler, torch.optim.SGD([weight], lr=1.0), weight


def test_gradients_are_unscaled_with_a_scale_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch copies it from a GPU to gradients on the host without waiting for the copy."""
    scaler, optimizer, weight = scaled(0.25)
    there = scaler._scale
    precision = ProTrainPrecision("16-mixed", scaler)
    monkeypatch.setattr(precision, "_after_closure", lambda *_: None)  # It calls hooks of a trainer.
    precision.optimizer_step(optimizer, SimpleNamespace(automatic_optimization=False), lambda: None)
    assert not scaler.was_far
    assert scaler._scale is there
    assert weight.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
@pytest.mark.parametrize("here", [0.5, float("inf")])
def test_an_infinite_gradient_is_one_on_every_rank(here: float, elsewhere: float) -> None:
    scaler, optimizer, weight = scaled(here)
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    updates: Any = object.__new__(AsyncStep)
    updates._sharing = SimpleNamespace(sum_of_node=lambda mine: mine + elsewhere)
    updates.agree_on_overflow(found)
    scaler.step(optimizer)
    skipped = weight.tolist() == [1.0, 1.0]
    assert skipped is bool(elsewhere or here == float("inf"))
