"""Every form of adapter that PEFT makes trains under every plan as in plain Lightning, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import HuggingFaceModule, _llama, fit
from tests.support.parity import Result, differences, run
from tests.support.plans import plans

LINEAR = ["q_proj", "v_proj", "down_proj"]
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
SHORT: dict[str, Any] = {"limit_train_batches": 3}


def lora(**options: Any) -> Callable[[nn.Module], nn.Module]:
    settings = {"r": 2, "lora_alpha": 8, "target_modules": LINEAR, **CAUSAL, **options}
    return lambda model: peft.get_peft_model(model, peft.LoraConfig(**settings))


def two_adapters(active: str) -> Callable[[nn.Module], nn.Module]:
    def make(model: nn.Module) -> nn.Module:
        adapted = lora()(model)
        adapted.add_adapter("second", peft.LoraConfig(r=3, target_modules=["k_proj", "v_proj"], **CAUSAL))
        adapted.set_adapter(active)
        return adapted

    return make


def other(config: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: peft.get_peft_model(model, config)


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "lora": lora(),
    "lora with dropout": lora(lora_dropout=0.2),
    "lora with biases": lora(bias="lora_only"),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "dora with dropout": lora(use_dora=True, lora_dropout=0.2),
    "first of two": two_adapters("default"),
    "second of two": two_adapters("second"),
    "whole modules": lora(modules_to_save=["lm_head", "norm"]),
    "whole embedding": lora(modules_to_save=["embed_tokens"]),
    "on the embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "on the head": lora(target_modules=["lm_head", "q_proj"]),
    "dora on the embedding": lora(target_modules=["embed_tokens", "q_proj"], use_dora=True),
    "trained tokens": lora(trainable_token_indices=[1, 5]),
    "all linear": lora(target_modules="all-linear"),
    "ia3": other(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL)),
    "prompt": other(peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL)),
    "p-tuning": other(peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL)),
    "prefix": other(peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL)),
    "prefix with projection": other(
        peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, **CAUSAL)
    ),
    "loha": other(peft.LoHaConfig(r=2, target_modules=LINEAR, **CAUSAL)),
    "vera": other(peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], **CAUSAL)),
    "oft": other(peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "v_proj"], **CAUSAL)),
}


class PeftModule(HuggingFaceModule):
    """Scores the tokens; what a prompt puts before them is not scored."""

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return super().logits(tokens, batch_idx)[:, -tokens.shape[1] :]


def module(form: str, tied: bool = False) -> PeftModule:
    torch.manual_seed(0)
    return PeftModule(FORMS[form](_llama(num_layers=3, tied=tied)))


@cache
def plain(form: str) -> Result:
    """The form in plain Lightning."""
    return run(module(form), **SHORT)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("form", "plan"),
    [(form, plan) for number, form in enumerate(FORMS) for plan in ("offload", ("kept", "alternating")[number % 2])],
)
def test_parity(form: str, plan: str) -> None:
    assert differences(plain(form), run(module(form), plans()[plan](module(form)), **SHORT)) == []


QUICK = ("dora", "prefix", "whole modules")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in QUICK else pytest.mark.slow) for form in FORMS]
)
def test_parity_of_a_plan_that_was_searched_for(form: str) -> None:
    found = module(form)
    strategy = ProTrainStrategy(device_memory="1MiB", num_persistent_chunks=1, monitor=False)
    fit(found, strategy=strategy, **SHORT)
    assert strategy.plan is not None
    assert strategy.plan.num_offloaded_chunks > 0
    assert strategy.plan.prediction is not None
    assert torch.equal(torch.stack(list(plain(form).losses)), torch.stack(found.losses))


@pytest.mark.parametrize(("device_memory", "fits"), [("8MiB", True), ("40KiB", False)])
def test_kept_blocks_with_offloaded_chunks_may_be_forbidden(device_memory: str, fits: bool) -> None:
    """The number 0 alone is a filter: what fits stays as it is."""
    found = module("lora")
    strategy = ProTrainStrategy(device_memory=device_memory, num_keep_offloaded_blocks=0, monitor=False)
    fit(found, strategy=strategy, **SHORT)
    plan = strategy.plan
    assert plan is not None
    assert (plan.num_offloaded_chunks == 0) is fits
    streamed = {chunk.unit for chunk in plan.chunks if not chunk.resident}
    kept = {block.name for block in plan.blocks if block.policy is BlockPolicy.KEEP}
    assert not streamed & kept
    assert torch.equal(torch.stack(list(plain("lora").losses)), torch.stack(found.losses))
