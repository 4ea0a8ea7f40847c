"""The models of the parity tests are what they claim to be."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.models import ModuleFactory, ParityModule, fit, token_batches, variants, zoo


def _train(factory: ModuleFactory, optimizer: str = "adamw", steps: int = -1) -> tuple[ParityModule, dict[str, Tensor]]:
    module = factory(optimizer=optimizer)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    fit(module, max_steps=steps)
    return module, start


def test_tied_shares_one_parameter() -> None:
    network = zoo()["tied"]().network
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_frozen_changes_only_what_is_not_frozen() -> None:
    module, start = _train(zoo()["frozen"])
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    unchanged = {name for name, value in module.state_dict().items() if torch.equal(value, start[name])}
    assert unchanged == frozen
    assert {name.split(".")[3] for name in frozen if ".layers." in name} == {"0", "2"}
    assert "network.model.embed_tokens.weight" in frozen


def test_unused_has_a_branch_without_gradients_and_a_block_that_rests() -> None:
    module, start = _train(zoo()["unused"])
    unchanged = {name for name, value in module.state_dict().items() if torch.equal(value, start[name])}
    assert unchanged == {"network.blocks.1.spare.weight", "network.blocks.1.spare.bias"}
    for batch_idx in (0, 1):
        module.zero_grad()
        module.loss(next(iter(token_batches()))[0], batch_idx).backward()
        assert (module.network.blocks[2].up.weight.grad is None) == (batch_idx == 1)


def test_moe_leaves_experts_without_tokens() -> None:
    module = zoo()["moe"]()
    idle = []
    for batch_idx, (tokens,) in enumerate(token_batches()):
        module.zero_grad()
        module.loss(tokens, batch_idx).backward()
        experts = [expert for block in module.network.blocks for expert in block.experts]
        idle.append(sum(expert.up.weight.grad is None for expert in experts))
        assert module.network.blocks[0].router.weight.grad is not None
    assert any(idle)
    assert len(set(idle)) > 1


def test_reused_runs_one_block_twice() -> None:
    module = zoo()["reused"]()
    calls = []
    for index, block in enumerate(module.network.blocks):
        block.register_forward_hook(lambda *_, index=index: calls.append(index))
    module.loss(next(iter(token_batches()))[0], 0)
    assert calls == [0, 1, 1, 2]


def test_dropout_draws_random_numbers() -> None:
    module = zoo()["dropout"]()
    tokens = next(iter(token_batches()))[0]
    assert module.training
    assert not torch.equal(module.loss(tokens, 0), module.loss(tokens, 0))


def test_buffers_change_in_training() -> None:
    module, start = _train(variants()["buffers"], steps=1)
    name = "network.blocks.0.batch_norm.running_mean"
    assert not torch.equal(start[name], module.state_dict()[name])
