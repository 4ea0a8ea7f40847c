"""The command `chat`, which answers prompts with a saved model, or with the model in a checkpoint."""

from __future__ import annotations

import json
import math
import sys
import warnings
from argparse import ArgumentParser, Namespace
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.checkpoint.discover import checkpoint_at, find_checkpoints, pointed
from lightning_protrain.checkpoint.manifest import is_remains
from lightning_protrain.config import format_bytes, plural
from lightning_protrain.data.batches.tokenizer import load_tokenizer
from lightning_protrain.data.chat.render import Renderer
from lightning_protrain.data.gguf import local_name
from lightning_protrain.data.hub import hub_file, is_path, look_up
from lightning_protrain.device.device import why_no_gpu
from lightning_protrain.models.export import export
from lightning_protrain.models.loading import (
    StoredModel,
    num_positions,
    read_config,
    resize_rows,
    stored_tensors,
    vocab_size_of,
    weight_files,
)
from lightning_protrain.models.lora import base_of

_ADAPTERS, _TOKENIZER = "adapter_config.json", "tokenizer_config.json"
_WEIGHTS = "adapter_model.safetensors"
# Quantisation of weights that do not fit a GPU in bfloat16, and their bytes per parameter with scales and head.
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
_BYTES_OF_FOUR_BITS = 0.6
# Share of the free memory that weights may take; the rest is for activations and the key-value cache.
_SHARE = 0.9


def add_chat_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command; options can be written with dashes or underscores."""
    parser.add_argument(
        "folder", help="a model or adapters, as SavePretrained, `export` and `merge` write them, a checkpoint, or a run"
    )
    parser.add_argument("prompt", nargs="?", help="default: standard input; a terminal begins a conversation")
    tokens = "tokens of an answer at most; default: 256"
    parser.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=256, help=tokens)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0, tokens are drawn; default: 0, greedy")
    parser.add_argument("--device", help="such as cpu or cuda:1; default: the GPU, if there is one")


def chat(options: Namespace) -> None:
    """Answer one prompt, or the lines of a terminal as a conversation.

    Raises:
        ValueError: If an option is not allowed, there is no prompt, or the model cannot be loaded.
    """
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: give at least 1.")
    if not 0 <= options.temperature < math.inf:
        raise ValueError(f"--temperature {options.temperature}: give 0 or more.")
    device = _device(options.device)
    prompt: str | None = options.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().rstrip("\n")
    if prompt is not None and not prompt.strip():
        raise ValueError("The prompt is empty: give a text after the folder, or on standard input.")
    conversation = ChatSession(*_load(options.folder, device, options.take), options)
    if prompt is not None:
        conversation.answer(prompt)
        return
    while (line := _line()) is not None:
        if line.strip():
            conversation.answer(line)


def _line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        sys.stdout.write("\n")
        return None


class ChatSession:
    """A conversation with a model; a model without a chat template continues each text instead.

    Args:
        model: The model, on its device.
        tokenizer: Its tokenizer, with the chat template, if any.
        generation: Generation config that was saved with the model.
        options: `max_new_tokens` and `temperature`.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, options: Namespace
    ) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.messages: list[dict[str, str]] = []
        config = deepcopy(generation)
        ends = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
        pad = next((index for index in (config.pad_token_id, tokenizer.pad_token_id) if index is not None), None)
        if pad is None and ends is not None:
            pad = ends if isinstance(ends, int) else ends[0]
        draws = options.temperature > 0
        settings: dict[str, Any] = {"temperature": options.temperature if draws else None}
        settings |= {} if draws else {"top_k": None, "top_p": None, "min_p": None, "typical_p": None}
        config.update(eos_token_id=ends, pad_token_id=pad, do_sample=draws, max_length=None, **settings)
        # `generate` fills the gaps of a config that it is given from that of the model.
        self.generation = base_of(model).generation_config = config

    def answer(self, text: str) -> str:
        """Print the answer to a text while it is generated, and return it.

        Raises:
            ValueError: If the chat template refuses the conversation, or the model has too few positions for it.
        """
        self.messages.append({"role": "user", "content": text})
        ids = self._ids(text)
        count = ids.shape[1]
        most = num_positions(base_of(self.model).config)
        if most is not None and count >= most:
            raise ValueError(
                f"The conversation has {plural(count, 'token')}, and the model {plural(most, 'position')}. Begin a new "
                "one, or give a shorter prompt."
            )
        length = self.options.max_new_tokens
        self.generation.max_new_tokens = length if most is None else min(length, most - count)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with torch.inference_mode():
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer)
        reply: str = self.tokenizer.decode(output[0, count:], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": reply})
        return reply

    def _ids(self, text: str) -> torch.Tensor:
        """Return the tokens of the conversation with the generation prompt, or of the text without a chat template."""
        if getattr(self.tokenizer, "chat_template", None):
            try:
                # Without markers, answers keep their control tokens, and those in prompts become plain text.
                ids = Renderer(self.tokenizer, ()).ids(self.messages, add_generation_prompt=True)
            except ValueError as error:
                raise ValueError(f"This conversation has no answer: {error}.") from error
        else:
            ids = self.tokenizer(text)["input_ids"]
        return torch.tensor([ids], device=self.model.device)


def _device(name: str | None) -> torch.device:
    gpu = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return gpu or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: give cpu, or a GPU such as cuda or cuda:1.") from error
    number = torch.accelerator.device_count() if gpu is not None and gpu.type == device.type else 0
    if device.type != "cpu" and (device.index or 0) >= number:
        reason = why_no_gpu() or f"There are {plural(number, 'device')} of this type."
        raise ValueError(f"--device {name} is not there: {reason}")
    return device


def _load(
    name: str, device: torch.device, take: Literal["last", "best"]
) -> tuple[Any, PreTrainedTokenizerBase, GenerationConfig]:
    """Return the model, the tokenizer and the generation config of a saved model or of a checkpoint."""
    name = local_name(name)
    path = pointed(Path(name)) or Path(name)
    is_saved = any((path / file).is_file() for file in ("config.json", _ADAPTERS))
    if is_saved or not path.exists():
        return _saved(name, device)
    if path.is_dir() and not is_remains(path) and not find_checkpoints(path).found:
        parts = [path / "checkpoints"] if take == "best" else [path / "model", path / "checkpoints"]
        for part in filter(Path.is_dir, parts):  # of a run of `fit MODEL DATA`
            return _load(str(part), device, take)
        raise ValueError(f"{name!r} has no model (config.json), no adapters ({_ADAPTERS}) and no checkpoint.")
    checkpoint = checkpoint_at(path, take)
    with TemporaryDirectory() as folder:  # Adapters are small, and whole models need this room only while they load.
        target = Path(folder, "model")
        export(checkpoint, target, dtype=None if device.type == "cpu" else "bfloat16")
        return _saved(str(target), device)


def _saved(name: str, device: torch.device) -> tuple[Any, PreTrainedTokenizerBase, GenerationConfig]:
    look_up(name)
    file = hub_file(name, _ADAPTERS)
    base = name if file is None else _base_named_in(file)
    try:
        config = read_config(base)
    except ValueError as error:
        if file is None:
            raise
        raise ValueError(f"{error} `base_model_name_or_path` in {file} names this base model.") from error
    place = name if hub_file(name, _TOKENIZER) else local_name(base)
    if not hub_file(place, _TOKENIZER):
        raise ValueError(
            f"There is no tokenizer in {place!r}: write that of the training there, with its `save_pretrained`."
        )
    tokenizer = load_tokenizer(place)
    dtype, quantization = _fitting(base, device)
    model: Any = StoredModel(base, config, dtype, quantization=quantization).load()
    generation = model.generation_config
    if file is not None:
        model = _adapted(model, name, len(tokenizer))
        if hub_file(name, "generation_config.json"):
            generation = GenerationConfig.from_pretrained(name)
    return model.to(device).eval(), tokenizer, generation


def _base_named_in(file: str) -> str:
    """Return the base model in the config of adapters.

    Raises:
        ValueError: If there is none, or it has moved.
    """
    try:
        base = json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is damaged: it has no `base_model_name_or_path`. Copy it again.") from error
    then = f"write its folder, GGUF file or name on the Hugging Face Hub as `base_model_name_or_path` into {file}."
    if not base:
        raise ValueError(f"The adapters do not name their base model: {then}")
    if "://" not in base and is_path(base) and not Path(base).expanduser().exists():
        raise ValueError(f"The base model of the adapters is no longer in {base!r}: put it back, or {then}")
    return str(base)


def _fitting(model: str, device: torch.device) -> tuple[str, dict[str, Any] | None]:
    """Return the dtype and the quantisation with which the weights of a model fit the device.

    Raises:
        ValueError: If they do not fit a GPU with 4 bits.
    """
    numel = sum(math.prod(tensor.shape) for tensor in stored_tensors(weight_files(local_name(model))).values())
    if device.type != "cuda":  # Apple's GPUs share the memory of the host.
        fits = device.type == "cpu" and 4 * numel <= _SHARE * free_host_bytes()
        return "float32" if fits else "bfloat16", None
    free = int(torch.accelerator.get_memory_info(device)[0])
    if 2 * numel <= _SHARE * free:
        return "bfloat16", None
    lacks = f"{format_bytes(2 * numel)} in bfloat16, and {device} has {format_bytes(free)} free"
    if _BYTES_OF_FOUR_BITS * numel > _SHARE * free:
        raise ValueError(f"The weights of {model!r} take {lacks}, too little even for 4 bits. Give --device cpu.")
    warnings.warn(f"The weights take {lacks}: they are quantised to 4 bits.", stacklevel=2)
    return "bfloat16", _FOUR_BITS


def _adapted(model: Any, name: str, num_tokens: int) -> Any:
    """Return the model with saved adapters, with rows for new tokens as in training."""
    from peft import PeftModel

    layer = next(key for key, module in model.named_modules() if module is model.get_input_embeddings())
    weights = hub_file(name, _WEIGHTS, required=True)
    if weights is None:
        raise ValueError(f"There is no {_WEIGHTS} in {name!r}: copy the folder of the adapters again.")
    embedding = stored_tensors([Path(weights)]).get(f"base_model.model.{layer}.weight")
    rows = max(num_tokens, vocab_size_of(model.config)) if embedding is None else embedding.shape[0]
    if rows != vocab_size_of(model.config):
        resize_rows(model, rows)
    try:
        return PeftModel.from_pretrained(model, name, torch_device="cpu")
    except (RuntimeError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ValueError(
            f"The adapters in {name!r} do not fit their base model {model.name_or_path!r}: {reason}. Give the base "
            f"model that they were trained on as `base_model_name_or_path` in its {_ADAPTERS}."
        ) from error
