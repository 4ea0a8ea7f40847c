"""Applying a plan changes no name, no parameter object and no value that anybody can see, at any hook."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import ModuleFactory, ParityModule, fit, token_batches, variants, zoo
from tests.support.plans import plans

PLANS = {name: make for name, make in plans().items() if name != "resident"}
MODELS = {**zoo(), **variants()}
_NAMES = """
on_fit_start on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad on_before_backward
on_after_backward on_before_optimizer_step on_train_batch_end on_validation_start on_validation_batch_start
on_validation_batch_end on_validation_end on_train_epoch_end on_train_end on_fit_end
"""
HOOKS = tuple(_NAMES.split())


def _structure(module: nn.Module) -> dict[str, list[Any]]:
    """Every name of the module with the shape, dtype and flags behind it."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {
        "parameters": [(n, type(p), p.shape, p.stride(), p.dtype, p.requires_grad, p.is_leaf) for n, p in parameters],
        "buffers": [(name, tuple(b.shape), b.dtype) for name, b in module.named_buffers(remove_duplicate=False)],
        "modules": [(name, type(m).__name__) for name, m in module.named_modules(remove_duplicate=False)],
        "state_dict": [(name, tuple(value.shape), value.dtype) for name, value in module.state_dict().items()],
    }


class Observer(L.Callback):
    """Looks at the module in every hook: its structure, its parameter objects, their values and gradients."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.structures: list[dict[str, list[Any]]] = []
        self.objects: list[list[nn.Parameter]] = []
        self.values: list[dict[str, Tensor]] = []

    def look(self, hook: str, trainer: L.Trainer | None, module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        self.seen.append(hook)
        self.structures.append(_structure(module))
        self.objects.append(list(module.parameters()))
        gradients = {f"{n}.grad": p.grad for n, p in module.named_parameters() if p.grad is not None}
        self.values.append(
            {name: value.detach().clone() for name, value in {**module.state_dict(), **gradients}.items()}
        )


for _hook in HOOKS:
    setattr(Observer, _hook, functools.partialmethod(Observer.look, _hook))


class Validation:
    """Adds a validation of two batches to a module of the zoo."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0], batch_idx))

    def val_dataloader(self) -> DataLoader:
        return token_batches(seed=4321)


def _observe(factory: ModuleFactory, plan: str | None = None) -> tuple[Observer, ParityModule]:
    module = factory()
    module.__class__ = type("Validating", (Validation, type(module)), {})
    strategy = "auto" if plan is None else ProTrainStrategy(plan=PLANS[plan](module))
    observer = Observer()
    observer.look("before", None, module)
    fit(
        module,
        callbacks=[observer],
        strategy=strategy,
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=2,
        val_check_interval=2,
        num_sanity_val_steps=1,
        accumulate_grad_batches=1 if factory is MODELS["multi_optimizer"] else 2,
    )
    observer.look("after", None, module)
    return observer, module


@functools.cache
def _plain(model: str) -> Observer:
    return _observe(MODELS[model])[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model", "plan"),
    [pair for number, pair in enumerate(itertools.product(MODELS, PLANS)) if (number + number // 4) % 2 == 0],
)
def test_names_objects_and_values_at_every_hook(model: str, plan: str) -> None:
    plain, (found, module) = _plain(model), _observe(MODELS[model], plan)
    assert found.seen == plain.seen
    assert set(HOOKS) - set(found.seen) <= ({"on_before_zero_grad"} if model == "multi_optimizer" else set())
    for hook, structure, objects in zip(found.seen, found.structures, found.objects, strict=True):
        assert structure == found.structures[0], hook
        assert all(now is parameter for now, parameter in zip(objects, module.parameters(), strict=True)), hook
    assert found.structures[0] == plain.structures[0]
    for hook, expected, values in zip(found.seen, plain.values, found.values, strict=True):
        assert values.keys() == expected.keys(), hook
        for name, value in values.items():
            assert torch.equal(value, expected[name]), f"{name} in {hook}"


def test_the_observer_sees_gradients_and_a_change_of_values() -> None:
    plain = _plain("val")
    after = plain.seen.index("on_after_backward")
    assert any(name.endswith(".grad") for name in plain.values[after])
    name = "network.head.weight"
    assert not torch.equal(plain.values[0][name], plain.values[-1][name])


@pytest.mark.parametrize("plan", PLANS)
def test_inside_a_block_the_device_parameter_has_the_name(plan: str) -> None:
    """Names of a block's parameters lead to device parameters only while it computes; values and class are equal."""
    module = MODELS["val"]()
    seen: list[bool] = []
    parameters = dict(module.named_parameters())

    def look(block: nn.Module, name: str) -> None:
        for inner, parameter in block.named_parameters():
            registered = parameters[f"{name}.{inner}"]
            assert isinstance(parameter, type(registered))
            assert torch.equal(parameter, registered)
            seen.append(parameter is registered)

    for index, block in enumerate(module.network.blocks):
        # The hook of a child runs while the block computes; that of the block itself runs around it.
        block.up.register_forward_hook(lambda *_, block=block, index=index: look(block, f"network.blocks.{index}"))
    fit(module, strategy=ProTrainStrategy(plan=PLANS[plan](module)), max_steps=2)
    assert not all(seen)
    assert any(seen) == (plan in ("half", "alternating"))
