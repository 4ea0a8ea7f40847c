"""LoRA settings, models with adapters, and adapters in the module under every plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor

from lightning_protrain.models.lora import base_of, lora_config, with_lora
from lightning_protrain.models.loss import chunked_cross_entropy
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.adapter_runs import IDS, changed, pretrained_logits, read, written_logits
from tests.support.exported_models import pretrained
from tests.support.module_runs import LLAMA, VOCAB, Sequences
from tests.support.tiny_networks import tiny_config, tiny_model
from tests.support.trainers import QUIET, SILENT


def test_all_linear_layers_but_the_head_by_default() -> None:
    model = with_lora(tiny_model("llama"), {"r": 4})
    adapted = {name.rpartition(".")[2] for name, each in model.named_modules() if hasattr(each, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all("lora_" in name for name, each in model.named_parameters() if each.requires_grad)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral", "gemma3_text"])
def test_only_adapters_are_trained(name: str) -> None:
    model = with_lora(tiny_model(name), {"r": 2})
    trained = [each for each, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in each for each in trained)


def test_modules_to_save_are_trained_whole() -> None:
    model = with_lora(tiny_model("llama"), {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    trained = {name for name, each in model.named_parameters() if each.requires_grad and "lora_" not in name}
    assert trained == {"base_model.model.lm_head.modules_to_save.default.weight"}


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"use_rslora": True}, {"lora_alpha": 32, "bias": "all"}])
def test_settings_reach_peft(settings: dict[str, Any]) -> None:
    config = lora_config({"r": 3, **settings})
    assert config.r == 3
    assert all(getattr(config, name) == value for name, value in settings.items())


def test_the_base_without_the_container() -> None:
    base = tiny_model("llama")
    model = with_lora(base, {"r": 2})
    assert isinstance(model, PeftModel)
    assert base_of(model) is base
    assert base_of(base) is base
    ids = torch.arange(6).reshape(1, 6)
    assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)


def test_prompts_that_are_learned_need_their_container() -> None:
    model = get_peft_model(tiny_model("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert base_of(model) is model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, r"key 'rank'.* Try: r, lora_alpha"),
        ({"lora_alfa": 4}, r"key 'lora_alfa'.* Try: lora_alpha"),
        ({"r": 0}, "lora.r is 0"),
        ({"r": "many"}, "lora.r is 'many'"),
        ({"target_modules": ["query"]}, r"does not fit the model: .*query.* Its linear layers are: down_proj, gate"),
        # Settings that PEFT would ignore.
        ({"peft_type": "OFT"}, "lora.peft_type is 'OFT'. Only LoRA adapters"),
        ({"task_type": "SEQ_CLS"}, "lora.task_type is 'SEQ_CLS'. Only causal"),
        ({"inference_mode": True}, "lora.inference_mode is True. It would freeze"),
        ({"base_model_name_or_path": "elsewhere"}, "lora.base_model_name_or_path .* written by PEFT"),
        ({"revision": "main"}, "lora.revision .* written by PEFT"),
        ({"auto_mapping": {"a": "b"}}, "lora.auto_mapping .* written by PEFT"),
        ({"use_qalora": True}, "lora.use_qalora .* GPTQ"),
        ({"init_lora_weights": "eva"}, "lora.init_lora_weights is 'eva'. Supported are true, false, gaussian"),
        ({"init_lora_weights": "loftq"}, "lora.init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "pissa_niter_x"}, "lora.init_lora_weights is 'pissa_niter_x'"),
        ({"eva_config": {"rho": 1.0}}, "lora.eva_config .* data"),
        ({"modules_to_save": ["lm_head", "score"]}, "lora.modules_to_save names 'score', but no module"),
        ({"rank_pattern": {"query": 2}}, "lora.rank_pattern has 'query', which matches no module"),
        ({"exclude_modules": ["query"]}, "lora.exclude_modules names 'query', but no module"),
        ({"trainable_token_indices": []}, r"lora.trainable_token_indices is \[\]. Give the numbers"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, "lora.trainable_token_indices is .*-1"),
        ({"trainable_token_indices": [VOCAB]}, "does not fit the model: index 64 is out of bounds"),
        (
            {"init_lora_weights": "pissa", "target_parameters": ["q_proj.weight"]},
            "combined with `target_parameters`",
        ),
        ({"init_lora_weights": "pissa", "r": 40}, "'pissa' is not possible for .*q_proj' .Linear. with r=40"),
        ({"init_lora_weights": "pissa", "target_modules": ["embed_tokens"]}, "not possible for 'model.embed_tokens'"),
        # Adapters that cannot be merged, or not loaded again.
        ({"layer_replication": [[0, 2], [1, 2]]}, "lora.layer_replication .* cannot be merged"),
        ({"alora_invocation_tokens": [1]}, "lora.alora_invocation_tokens .* cannot be merged"),
        ({"monteclora_config": {}}, "lora.monteclora_config is {}. This variant"),
        ({"lora_bias": True}, "lora.lora_bias cannot be merged into 'model.layers.0.self_attn.q_proj'"),
        ({"bias": "some"}, "does not fit the model: .*some"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_lora(tiny_model("llama"), settings)


@pytest.mark.parametrize(
    ("kind", "init", "quantised"),
    [("mixtral", "olora", False), ("mixtral", "pissa_niter_2", False), ("llama", "orthogonal", True)],
)
def test_an_initialisation_that_peft_cannot_compute(kind: str, init: str, quantised: bool) -> None:
    model = tiny_model(kind)
    for layer in model.modules() if quantised else ():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=f"lora.init_lora_weights='{init}' is not possible for quantised layers or"):
        with_lora(model, {"r": 4, "init_lora_weights": init})


def test_defaults_of_refused_settings_are_accepted() -> None:
    config = lora_config({"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": False, "eva_config": None})
    assert config.peft_type == "LORA"


def test_settings_are_not_changed() -> None:
    settings: dict[str, Any] = {"modules_to_save": ["lm_head", "wte"], "ensure_weight_tying": True}
    with_lora(tiny_model("gpt2"), settings)
    assert settings["modules_to_save"] == ["lm_head", "wte"]


# What is trained of an embedding E and a head H that are tied, and whether they stay tied.
TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "embedding": ({"modules_to_save": ["E"]}, False),
    "head": ({"modules_to_save": ["H"]}, False),
    "both": ({"modules_to_save": ["E", "H"]}, False),
    "both as one": ({"modules_to_save": ["E", "H"], "ensure_weight_tying": True}, True),
    "rows": ({"trainable_token_indices": [1, 5, 6]}, True),
    "rows of both": ({"trainable_token_indices": {"E": [1, 6], "H": [1, 6]}}, True),
    "rows of the head": ({"modules_to_save": ["E"], "trainable_token_indices": {"H": [1, 6]}}, False),
}
NAMES = {
    "llama": ("embed_tokens", "lm_head"),
    "gpt2": ("wte", "lm_head"),
    "gpt_neox": ("embed_in", "lm_head"),
    "biogpt": ("embed_tokens", "output_projection"),
    "bert-generation": ("word_embeddings", "decoder"),
}


def named(value: Any, kind: str) -> Any:
    """Put the names of a family's layers in settings."""
    embedding, head = NAMES[kind]
    text = json.dumps(value).replace('"E"', f'"{embedding}"').replace('"H"', f'"{head}"')
    return json.loads(text)


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:.*may compute its logits outside its head")
@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind in NAMES for case in TIED if not ("rows" in case and kind == "bert-generation")],
)  # Its head has a bias, see below.
def test_tied_layers_are_written_as_they_were_trained(case: str, kind: str, tmp_path: Path) -> None:
    settings, tied = named(TIED[case][0], kind), TIED[case][1]
    if case == "both as one":  # PEFT knows the names `embed_tokens` and `lm_head` only.
        tied = "embed_tokens" in NAMES[kind] or "lm_head" in NAMES[kind]
    base = pretrained(tmp_path / "base", tiny_config(kind, vocab_size=VOCAB, tie_word_embeddings=True))
    module = changed(base, lora={"r": 2, **settings})
    wanted = module.model(input_ids=IDS).logits
    assert (wanted - pretrained_logits(base)).abs().max() > 0.01
    for logits in written_logits(module, tmp_path):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    merged = read(tmp_path / "merged")
    assert merged.config.tie_word_embeddings is tied
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) is tied


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"target_modules": ["q_proj", "E"]}, r"share a tied weight \(model.embed_tokens, lm_head\)"),
        ("gpt2", {"target_modules": ["c_attn", "H"]}, r"share a tied weight \(transformer.wte, lm_head\)"),
        ("llama", {"target_modules": ["H"], "ensure_weight_tying": True}, "share a tied weight"),
        ("llama", {"trainable_token_indices": {"H": [1]}}, "share a tied weight"),
        ("llama", {"trainable_token_indices": {"E": [1], "H": [2]}}, "share a tied weight"),
        ("llama", {"trainable_token_indices": {"E": [1]}, "modules_to_save": ["H"]}, "cannot train rows of 'lm_head'"),
        ("gptj", {"trainable_token_indices": [1]}, "trainable_token_indices would drop the bias of 'lm_head'"),
        ("gptj", {"modules_to_save": ["H"], "ensure_weight_tying": True}, "tying would drop the bias of 'lm_head'"),
        ("gpt2", {"init_lora_weights": "olora"}, r"'olora' is not possible for 'transformer.h.0.attn.c_attn' \(Conv1D"),
    ],
)
def test_adapters_of_tied_layers_that_cannot_be_merged(kind: str, settings: Any, message: str) -> None:
    names = {**NAMES, "gptj": ("wte", "lm_head")}[kind]
    text = json.dumps(settings).replace('"E"', f'"{names[0]}"').replace('"H"', f'"{names[1]}"')
    with pytest.raises(ValueError, match=message):
        with_lora(tiny_model(kind, tie_word_embeddings=True), json.loads(text))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "pissa_niter_2"},
        {"init_lora_weights": "pissa_niter_2", "use_dora": True},
        {
            "init_lora_weights": "pissa_niter_2",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 3},
            "alpha_pattern": {"v_proj": 5},
        },
    ],
)
def test_initial_values_that_change_frozen_weights(settings: dict[str, Any], dtype: Any, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base")
    module = changed(base, lora={"r": 4, "lora_alpha": 6, **settings}, dtype=dtype)
    wanted = module.model(input_ids=IDS).logits
    tolerance = 1e-5 if dtype == "float32" else 0.02 * wanted.abs().max().item()
    for logits in written_logits(module, tmp_path):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=tolerance)


SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 16},
    "dora": {"r": 4, "use_dora": True},
    "rslora": {"r": 4, "use_rslora": True, "lora_dropout": 0.1},
    "whole modules": {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    "rows": {"r": 4, "trainable_token_indices": {"embed_tokens": [3, 4], "lm_head": [4, 5]}},
    "random pissa": {"r": 4, "init_lora_weights": "pissa_niter_2"},
}


def module(lora: dict[str, Any] | None, config: dict[str, Any] | None = None) -> CausalLMModule:
    torch.manual_seed(0)
    return CausalLMModule(config=config or LLAMA, warmup_steps=0, learning_rate=1e-2, lora=lora)


def fit(one: LightningModule, strategy: Any = "auto", *callbacks: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=4, strategy=strategy, callbacks=list(callbacks), **QUIET)
    trainer.fit(one, datamodule=Sequences())
    return {name: value.clone() for name, value in one.state_dict().items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("settings", SETTINGS)
def test_streaming_gives_the_weights_of_plain_training(settings: str) -> None:
    plain = fit(module(SETTINGS[settings]))
    streamed = fit(module(SETTINGS[settings]), ProTrainStrategy(plan="offload", monitor=False))
    assert streamed.keys() == plain.keys()
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "olmo2", "mixtral"])
def test_the_loss_is_that_of_the_model_with_its_container(name: str) -> None:
    one = module({"r": 4}, tiny_config(name))
    one.configure_model()
    assert one.model is not None
    for each, parameter in one.model.named_parameters():
        if "lora_B" in each:
            torch.nn.init.normal_(parameter)
    ids = torch.randint(40, (2, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    one.eval()
    scores, head, _ = one._scores(batch)
    ours, number = chunked_cross_entropy(scores, head, ids)
    logits = one.model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits
    theirs = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    assert (ours / number).item() == pytest.approx(theirs.item(), rel=1e-5)


def test_a_checkpoint_is_loaded_with_its_adapters(tmp_path: Any) -> None:
    one = module(SETTINGS["lora"])
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, **SILENT)
    trainer.fit(one, datamodule=Sequences())
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in one.state_dict().items())
