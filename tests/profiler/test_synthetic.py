"""Synthetic batches for models without data, which train on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.synthetic import (
    IGNORED,
    LEAST_TEXT,
    LENGTH,
    num_positions,
    synthetic_batch,
)
from tests.profiler.models import TEXT, VISION

BART = {
    "d_model": 16,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
}
T5 = {
    "d_model": 16,
    "d_ff": 32,
    "d_kv": 8,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}
BERT = {key: TEXT[key] for key in TEXT if key != "num_key_value_heads"} | {"max_position_embeddings": 40}
GRID = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
SPECIAL = {"vision_start_token_id": 5, "vision_end_token_id": 6, "image_token_id": 7, "video_token_id": 8}
WHISPER = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 12,
}
GEMMA = TEXT | {"head_dim": 8}


def _qwen() -> nn.Module:
    text = TEXT | {"rope_scaling": ROPE}
    return hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=text, vision_config=GRID, **SPECIAL))


def _llava() -> nn.Module:
    vision, text = hf.CLIPVisionConfig(**VISION), hf.LlamaConfig(**TEXT)
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5))


def _gemma3() -> nn.Module:
    vision = hf.SiglipVisionConfig(**VISION)
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**GEMMA), vision_config=vision, mm_tokens_per_image=4, image_token_index=9
    )
    return hf.Gemma3ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "causal": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)), {"input_ids": (2, 24), "labels": (2, 24)}),
    "mamba": (
        lambda: hf.MambaForCausalLM(hf.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=64)),
        {"input_ids": (2, 24), "labels": (2, 24)},
    ),
    "masked": (lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), {"input_ids": (2, 24), "labels": (2, 24)}),
    "encoder-decoder": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        {"attention_mask": (2, 24), "decoder_attention_mask": (2, 24), "input_ids": (2, 24), "labels": (2, 24)},
    ),
    "bart": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
        {"attention_mask": (2, 24), "decoder_attention_mask": (2, 24), "input_ids": (2, 24), "labels": (2, 24)},
    ),
    "decoder of bart": (
        lambda: hf.BartForCausalLM(hf.BartConfig(**BART)),
        {"attention_mask": (2, 24), "input_ids": (2, 24), "labels": (2, 24)},
    ),
    "encoder of t5": (lambda: hf.T5EncoderModel(hf.T5Config(**T5)), {"attention_mask": (2, 24), "input_ids": (2, 24)}),
    "base of t5": (
        lambda: hf.T5Model(hf.T5Config(**T5)),
        {
            "attention_mask": (2, 24),
            "decoder_attention_mask": (2, 24),
            "input_ids": (2, 24),
            "decoder_input_ids": (2, 24),
        },
    ),
    "sequences": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3)),
        {"input_ids": (2, 24), "labels": (2,)},
    ),
    "sequences of bart": (
        lambda: hf.BartForSequenceClassification(hf.BartConfig(**BART, num_labels=3)),
        {"attention_mask": (2, 24), "decoder_attention_mask": (2, 24), "input_ids": (2, 24), "labels": (2,)},
    ),
    "sequences of llama": (
        lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**TEXT, num_labels=3)),
        {"input_ids": (2, 24), "labels": (2,)},
    ),
    "tokens": (
        lambda: hf.BertForTokenClassification(hf.BertConfig(**BERT, num_labels=5)),
        {"input_ids": (2, 24), "labels": (2, 24)},
    ),
    "answers": (
        lambda: hf.BertForQuestionAnswering(hf.BertConfig(**BERT)),
        {"input_ids": (2, 24), "start_positions": (2,), "end_positions": (2,)},
    ),
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3)),
        {"pixel_values": (2, 3, 8, 8), "labels": (2,)},
    ),
    "base of vit": (lambda: hf.ViTModel(hf.ViTConfig(**VISION)), {"pixel_values": (2, 3, 8, 8)}),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(**{key: BART[key] for key in BART if key != "max_position_embeddings"} | WHISPER)
        ),
        {"input_features": (2, 8, 20), "labels": (2, 12)},
    ),
    "llava": (
        _llava,
        {"input_ids": (2, 24), "pixel_values": (2, 3, 8, 8), "labels": (2, 24)},
    ),
    "gemma3": (
        _gemma3,
        {"input_ids": (2, 24), "pixel_values": (2, 3, 8, 8), "labels": (2, 24), "token_type_ids": (2, 24)},
    ),
    "qwen2-vl": (
        _qwen,
        {
            # 32 patches along each side, 2 x 2 of which are one token.
            "input_ids": (2, 256 + LEAST_TEXT),
            "pixel_values": (2 * 32 * 32, 3 * 2 * 4 * 4),
            "image_grid_thw": (2, 3),
            "labels": (2, 256 + LEAST_TEXT),
            "mm_token_type_ids": (2, 256 + LEAST_TEXT),
        },
    ),
}
WITHOUT_LOSS = ("encoder of t5", "base of t5", "base of vit")


@pytest.mark.parametrize("name", MODELS)
def test_the_model_trains_on_its_batch(name: str) -> None:
    build, shapes = MODELS[name]
    model = build().train()
    batch = synthetic_batch(model, 2, 12 if name == "whisper" else 24)
    assert {key: tuple(value.shape) for key, value in batch.items()} == shapes
    outputs: Any = model(**batch)
    if name in WITHOUT_LOSS:
        assert getattr(outputs, "loss", None) is None
    else:
        outputs.loss.backward()
        assert torch.isfinite(outputs.loss)
        assert any(parameter.grad is not None for parameter in model.parameters())
    again = synthetic_batch(model, 2, 12 if name == "whisper" else 24)
    assert all(torch.equal(value, again[key]) for key, value in batch.items())


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_weights_and_data_is_profiled(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name][0]().train()
    batch = synthetic_batch(model, 2, 12 if name == "whisper" else 24)

    def step() -> Tensor:
        outputs: Any = model(**batch)
        return outputs[0].float().sum() if name in WITHOUT_LOSS else outputs.loss

    profile = profile_model(model, describe_model(model), step)
    assert not profile.measured
    assert profile.flops > 0
    layers = [segment for segment in profile.segments if "language_model.layers" in segment.unit]
    assert all(segment.backward.operations for segment in layers)


@pytest.mark.parametrize(("name", "token", "each"), [("llava", 5, 4), ("gemma3", 9, 4), ("qwen2-vl", 7, 256)])
def test_a_picture_takes_the_tokens_that_the_model_makes_of_it(name: str, token: int, each: int) -> None:
    model = MODELS[name][0]()
    batch = synthetic_batch(model, 3)
    places = batch["input_ids"] == token
    assert places.sum(1).tolist() == [each] * 3
    assert (batch["labels"][places] == IGNORED).all()
    assert (batch["labels"][~places] == batch["input_ids"][~places]).all()


def test_lengths_have_documented_defaults() -> None:
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))
    assert synthetic_batch(llama)["input_ids"].shape == (1, LENGTH)
    bert = hf.BertForMaskedLM(hf.BertConfig(**BERT))
    assert synthetic_batch(bert)["input_ids"].shape == (1, 40)
    with pytest.raises(ValueError, match="length=41: BertForMaskedLM has 40 positions"):
        synthetic_batch(bert, length=41)
    for wrong in ({"batch_size": 0}, {"length": -1}, {"length": 2.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*positive integer"):
            synthetic_batch(bert, **wrong)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}
POSITIONS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "a table": ("gpt2", {"n_positions": 64}, 64),
    "a table with an offset": ("opt", {"max_position_embeddings": 64}, 64),
    "a table behind the padding": ("roberta", {"max_position_embeddings": 66, "pad_token_id": 1}, 64),
    "rotary": ("llama", {"max_position_embeddings": 64}, 64),
    "yarn": ("llama", {"max_position_embeddings": 64, "rope_scaling": YARN}, 256),
    "yarn, counted": (
        "llama",
        {"max_position_embeddings": 64, "rope_scaling": {**YARN, "original_max_position_embeddings": 16}},
        64,
    ),
    "linear": ("llama", {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
    "each kind of attention": ("gemma3_text", {"max_position_embeddings": 64}, 64),
    "images and text": ("llava", {"text_config": {"model_type": "llama", "max_position_embeddings": 64}}, 64),
    "ALiBi": ("falcon", {"max_position_embeddings": 64, "alibi": True}, None),
    "ALiBi only": ("mpt", {"max_seq_len": 64}, None),
    "buckets": ("t5", {"n_positions": 64}, None),
    "recurrent": ("mamba", {}, None),
    "no number": ("xlnet", {}, None),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_the_number_of_positions_is_that_of_the_family(name: str) -> None:
    kind, settings, most = POSITIONS[name]
    assert num_positions(hf.AutoConfig.for_model(kind, **settings)) == most


@pytest.mark.parametrize("name", ["a table", "a table with an offset", "a table behind the padding"])
def test_a_table_has_exactly_as_many_positions(name: str) -> None:
    kind, settings, most = POSITIONS[name]
    small = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "is_decoder": True}
    sizes = {"ffn_dim": 16} if kind == "opt" else {"intermediate_size": 16}
    config = hf.AutoConfig.for_model(kind, **settings, **small, **({} if kind == "gpt2" else sizes))
    model = hf.AutoModelForCausalLM.from_config(config)
    assert most is not None
    assert torch.isfinite(model(input_ids=torch.full((1, most), 5)).logits).all()
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))


@pytest.mark.parametrize(
    ("choices", "dtype", "shape"),
    [
        ({"num_labels": 4}, torch.int64, (2,)),
        ({"num_labels": 1}, torch.float32, (2,)),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, torch.float32, (2, 4)),
        ({"num_labels": 3, "problem_type": "regression"}, torch.float32, (2, 3)),
    ],
)
def test_labels_are_those_of_the_problem(choices: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, **choices))
    labels = synthetic_batch(model, 2)["labels"]
    assert (labels.dtype, tuple(labels.shape)) == (dtype, shape)
    assert torch.isfinite(model(**synthetic_batch(model, 2)).loss)


def test_tokens_have_no_meaning_of_their_own() -> None:
    ids = synthetic_batch(_llava(), 4, 500)["input_ids"][:, 5:]
    assert not set(ids.flatten().tolist()) & {0, 1, 2, 5}  # padding, begin, end, picture
    assert ids.max() < 64


def test_what_holds_a_model_has_its_batch() -> None:
    inner = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))
    expected = synthetic_batch(inner)
    adapted = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    assert torch.equal(synthetic_batch(adapted)["input_ids"], expected["input_ids"])
    assert torch.equal(synthetic_batch(nn.ModuleDict({"model": inner}))["input_ids"], expected["input_ids"])
    with pytest.raises(ValueError, match="Linear contains no model of transformers"):
        synthetic_batch(nn.Linear(2, 2))


def test_what_is_not_known_is_refused() -> None:
    wav = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(ValueError, match="for Wav2Vec2Model: its inputs are unknown"):
        synthetic_batch(hf.Wav2Vec2Model(hf.Wav2Vec2Config(**wav)))
    unpadded = hf.LlamaForSequenceClassification(hf.LlamaConfig(**TEXT | {"pad_token_id": None}))
    with pytest.raises(ValueError, match=r"batch_size=2: LlamaForSequenceClassification .* no pad_token_id"):
        synthetic_batch(unpadded, 2)
    assert synthetic_batch(unpadded, 1)["labels"].shape == (1,)
