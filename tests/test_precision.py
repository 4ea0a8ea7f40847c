"""The precision of the strategy stands for Lightning's own, or says why it cannot."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from lightning_protrain.precision import ProTrainPrecision, as_protrain_precision
from tests.models import fit, zoo


@pytest.mark.parametrize("plugin", [None, Precision()])
def test_what_lightning_makes_of_32_bits_is_replaced(plugin: Precision | None) -> None:
    precision = as_protrain_precision(plugin)
    assert type(precision) is ProTrainPrecision
    assert precision.precision == "32-true"


def test_a_precision_of_ours_stays_the_object_it_is() -> None:
    class Own(ProTrainPrecision):
        pass

    own = Own()
    assert as_protrain_precision(own) is own


@pytest.mark.parametrize("plugin", [MixedPrecision("bf16-mixed", "cpu"), HalfPrecision("bf16-true"), DoublePrecision()])
def test_any_other_is_refused_by_its_name(plugin: Precision) -> None:
    with pytest.raises(ValueError, match=rf"'{plugin.precision}' \({type(plugin).__name__}\).*\"32-true\""):
        as_protrain_precision(plugin)


def test_a_class_of_the_user_is_refused_too() -> None:
    class Custom(Precision):
        pass

    with pytest.raises(ValueError, match="Custom"):
        as_protrain_precision(Custom())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_the_trainer_refuses_before_it_trains(precision: str) -> None:
    module = zoo()["reused"]()
    with pytest.raises(ValueError, match="32-true"):
        fit(module, strategy="protrain", precision=precision, fast_dev_run=True)
    assert module.losses == []


def test_parameters_keep_their_dtype() -> None:
    precision = as_protrain_precision(None)
    layer = torch.nn.Linear(2, 2).double()
    assert precision.convert_module(layer) is layer
    assert layer.weight.dtype == torch.float64
    with precision.tensor_init_context(), precision.forward_context():
        assert torch.zeros(1).dtype == torch.float32
