"""SplitAdamW under any plan is bitwise SplitAdamW in plain Lightning: losses, weights, and every optimizer state."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain import ProTrainStrategy, SplitAdamW
from tests.support.models import ParityModule, fit, zoo
from tests.support.parity import CLIPPING, Result, differences, snapshot

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"moments": "bfloat16"},
    "8bit": {"moments": "8bit"},
    "no masters": {"masters": False},
    "8bit, no masters": {"moments": "8bit", "masters": False},
}
WAYS = [("resident", "off"), ("auto", "off"), *itertools.product(("offload",), ("off", "backward", "forward"))]
# Each with the accumulation of its runs.
LOOPS = {"unclipped": 1, "norm": 2, "value": 2}
# The norm needs all gradients before the first step.
CASES = [(clip, *way) for clip, way in itertools.product(LOOPS, WAYS) if (clip, way[1]) != ("norm", "backward")]


def _module(model: str, kind: str) -> ParityModule:
    module = zoo()[model]()

    def configure_optimizers() -> SplitAdamW:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return SplitAdamW(trained, lr=0.01, weight_decay=0.1, seed=3, **FORMATS[kind])

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    return module


def _run(model: str, kind: str, clipping: str, **options: Any) -> Result:
    module = _module(model, kind)
    more = {"precision": "bf16-true", "accumulate_grad_batches": LOOPS[clipping], **CLIPPING[clipping]}
    trainer = fit(module, **more, **options)
    (optimizer,) = trainer.optimizers
    states = {
        f"{index}.{name}": value
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    assert all(isinstance(value, Tensor) for value in states.values())
    return Result(tuple(module.losses), {**snapshot(module), **states})


@functools.cache
def _plain(model: str, kind: str, clipping: str) -> Result:
    return _run(model, kind, clipping)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("clipping", "plan", "overlap"), CASES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("model", ["frozen", "moe"])
def test_parity(model: str, kind: str, clipping: str, plan: str, overlap: str) -> None:
    strategy = ProTrainStrategy(plan=plan, overlap_optimizer=overlap, monitor=False)
    assert differences(_plain(model, kind, clipping), _run(model, kind, clipping, strategy=strategy)) == []


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(FORMATS, 2)))
def test_the_formats_differ(one: str, other: str) -> None:
    names = {name: (_plain("moe", name, "unclipped").weights) for name in (one, other)}
    assert any(
        not torch.equal(value, names[other][name]) for name, value in names[one].items() if name.startswith("network.")
    )
