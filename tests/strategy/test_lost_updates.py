"""A run whose updates are lost in the rounding of its weights says so after its first full step, with numbers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LinearLR

from lightning_protrain import ProTrainFSDP2Strategy, ProTrainStrategy, SplitAdamW
from tests.support.models import LanguageModel, Mlp, ParityModule, fit
from tests.support.ranks import run_ranks, trainer_on_rank, values

SAID = re.compile(r"(\d+) % of the updates are lost: a step left ([\d,]+) of ([\d,]+) in a .* of (\w+)\. ")


class Chosen(ParityModule):
    """Steps with a given optimizer, and keeps the weights before and after its first step."""

    def __init__(self, optimizer: Callable[..., Optimizer], warm_up: int = 0, network: nn.Module | None = None) -> None:
        super().__init__(network or LanguageModel([Mlp() for _ in range(3)]))
        self.make, self.warm_up = optimizer, warm_up
        self.seen: list[dict[str, Tensor]] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.make([weight for weight in self.parameters() if weight.requires_grad])
        if not self.warm_up:
            return optimizer
        schedule = LinearLR(optimizer, 1e-3, total_iters=self.warm_up)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, *args: Any) -> None:
        if len(self.seen) < 2:
            self.seen.append({name: weight.detach().clone() for name, weight in self.named_parameters()})


def warnings_of(module: ParityModule, plan: str = "offload", **options: Any) -> list[re.Match[str]]:
    strategy = ProTrainStrategy(plan=plan, monitor=False, overlap_optimizer=options.pop("overlap", "auto"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, strategy=strategy, **options)
    return [found for warning in caught if (found := SAID.match(str(warning.message)))]


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("plan", ["offload", "resident"])
def test_the_share_is_that_of_all_weights(plan: str, overlap: str) -> None:
    module = Chosen(partial(AdamW, lr=1e-5))
    (found,) = warnings_of(module, plan, precision="bf16-true", overlap=overlap)
    percent, lost, counted, dtype = found.groups()
    before, after = module.seen
    same = sum(int((value == after[name]).sum()) for name, value in before.items())
    elements = sum(value.numel() for value in before.values())
    assert dtype == "bfloat16"
    assert 'CausalLMModule(optimizer="split_adamw")' in found.string
    assert int(percent) == round(100 * number(lost) / number(counted))
    assert number(lost) / number(counted) == pytest.approx(same / elements, abs=0.05)
    assert 0.5 < same / elements < 1


@pytest.mark.parametrize(
    "optimizer",
    [partial(SGD, lr=1e-5), partial(SGD, lr=1e-5, momentum=0.9), partial(Adafactor, lr=1e-5), partial(NAdam, lr=1e-5)],
    ids=["SGD", "momentum", "Adafactor", "NAdam"],
)
def test_every_optimizer_is_looked_at(optimizer: Callable[..., Optimizer]) -> None:
    assert len(warnings_of(Chosen(optimizer), precision="bf16-true")) == 1


def test_states_of_8_bits_are_read() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer = partial(bitsandbytes.optim.AdamW8bit, lr=1e-5, min_8bit_size=64)
    assert len(warnings_of(Chosen(optimizer), precision="bf16-true")) == 1


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    network = LanguageModel([Mlp() for _ in range(3)]).requires_grad_(False)
    return peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up", "down"]), network)


class Stochastic(SGD):
    """Says that it rounds stochastically."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.stochastic_rounding = True


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        pytest.param(lambda: Chosen(partial(AdamW, lr=1e-5)), "bf16-mixed", id="float32 under autocast"),
        pytest.param(lambda: Chosen(partial(AdamW, lr=1e-7)), "32-true", id="float32"),
        pytest.param(lambda: Chosen(partial(AdamW, lr=1e-2)), "bf16-true", id="a rate that bfloat16 can express"),
        pytest.param(lambda: Chosen(partial(AdamW, lr=1e-2), 4), "bf16-true", id="a warm-up from a small rate"),
        pytest.param(lambda: Chosen(partial(AdamW, lr=1e-4), 0, adapted()), "bf16-true", id="LoRA, half of it zero"),
        pytest.param(lambda: Chosen(partial(Stochastic, lr=1e-5)), "bf16-true", id="stochastic rounding"),
        pytest.param(lambda: Chosen(partial(SplitAdamW, lr=1e-5)), "bf16-true", id="float32 masters"),
        pytest.param(lambda: Chosen(partial(SplitAdamW, lr=1e-5, masters=False)), "bf16-true", id="no masters"),
    ],
)
def test_a_run_that_trains_says_nothing(make: Callable[[], ParityModule], precision: str) -> None:
    assert warnings_of(make(), precision=precision, max_epochs=3) == []


def test_a_warm_up_is_waited_for() -> None:
    module = Chosen(partial(AdamW, lr=1e-5), warm_up=4)
    (found,) = warnings_of(module, precision="bf16-true", max_epochs=3)
    assert "The learning rate is " in found.string


@pytest.mark.parametrize("options", [{"max_steps": 1}, {"accumulate_grad_batches": 2}, {"max_epochs": 3}], ids=str)
def test_it_is_said_once_however_long_the_run(options: dict[str, Any]) -> None:
    assert len(warnings_of(Chosen(partial(AdamW, lr=1e-5)), precision="bf16-true", **options)) == 1


STRATEGIES: dict[str, Callable[..., Any]] = {
    "replicate": partial(ProTrainStrategy, plan="offload", sharding="replicate", monitor=False),
    "shard": partial(ProTrainStrategy, plan="offload", sharding="shard", monitor=False),
    "FSDP2": ProTrainFSDP2Strategy,
}


def said_on_rank(rank: int, name: str, rate: float) -> list[str]:
    """Train on a rank, and return its warnings of lost updates."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = trainer_on_rank(rank, 2, kind=STRATEGIES[name], max_steps=3, precision="bf16-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Chosen(partial(AdamW, lr=rate)))
    return [str(warning.message) for warning in caught if SAID.match(str(warning.message))]


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_of_several_ranks_says_what_each_loses(name: str, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    first, second = values(run_ranks(said_on_rank, 2, tmp_path / "small", name, 1e-5))
    assert (len(first), len(second)) == (1, 0)
    found = SAID.match(first[0])
    assert found is not None
    assert 0.5 < number(found[2]) / number(found[3]) < 1
    assert values(run_ranks(said_on_rank, 2, tmp_path / "large", name, 1e-2)) == [[], []]
