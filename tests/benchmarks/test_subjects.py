"""The model of the benchmarks has the size that was asked for, and its checkpointed form computes the same."""

from __future__ import annotations

import pytest
import torch
import transformers

from benchmarks.subjects import NUM_LAYERS, Llama, llama_config


@pytest.mark.parametrize("num_params", [1_700_000, 100_000_000, 3_000_000_000])
def test_the_model_is_about_as_large_as_asked_for(num_params: int) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config(num_params, sequence=16))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(num_params, rel=0.1)
    assert len(model.model.layers) == NUM_LAYERS


def test_the_checkpointed_peer_computes_the_same_and_calls_every_block_twice() -> None:
    tokens = torch.arange(16).view(2, 8)
    gradients, calls = [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = Llama(llama_config(1_700_000, sequence=8), checkpointed)
        counted: list[int] = []
        for block in module.model.model.layers:
            block.mlp.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        module.training_step([tokens], 0).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
        calls.append(len(counted))
    assert calls == [NUM_LAYERS, 2 * NUM_LAYERS]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
