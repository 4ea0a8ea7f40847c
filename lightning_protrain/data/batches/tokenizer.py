"""Loads a tokenizer, or trains a small byte-level BPE on the data."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import torch
from lightning.pytorch import Trainer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_protrain.checkpoint.manifest import STATE
from lightning_protrain.data.batches.token_cache import make_folder
from lightning_protrain.data.conversation import fingerprint, text_of
from lightning_protrain.data.gguf import local_name
from lightning_protrain.data.hub import hub_file, hub_refusals, look_up

START, SEPARATOR, END, PAD = "<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, START, SEPARATOR, END)
# The vocabulary has at least a token for each byte, and the special tokens.
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# A folder with a tokenizer has one of these files.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")

# The role is followed by a special token rather than a newline, so that no token spans the role and the content.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '<|im_sep|>' }}
{{- message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant<|im_sep|>' }}
{%- endif %}"""


def load_tokenizer(name: str | Path, new_tokens: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        name: A local folder or GGUF file, a file of an installed package as `package://NAME/FILE`, or a name on the
            Hugging Face Hub.
        new_tokens: As in `add_tokens`.

    Raises:
        ValueError: If there is no such tokenizer, or the folder has a `tekken.json` but no `config.json`; or as in
            `add_tokens`.
    """
    name = local_name(str(name))
    folder = Path(name)
    others = ("config.json", "tokenizer.json", "tokenizer_config.json")
    if (folder / "tekken.json").is_file() and not any((folder / other).is_file() for other in others):
        raise ValueError(
            f"The folder {name!r} has a tekken.json but no config.json, which identifies a Mistral tokenizer. "
            "Copy the model's config.json into it."
        )
    look_up(name)
    with hub_refusals(name):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            if type(tokenizer).__name__ == "MistralCommonBackend":
                # In its default mode, this class refuses conversations whose last message is the assistant's.
                tokenizer = type(tokenizer).from_pretrained(name, mode="finetuning")
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".: ")
            if not any(hub_file(name, file) for file in _FILES):
                hub_file(name, _FILES[0], required=True)  # Offline, it may exist outside of the cache.
                reason = f"none of the files {', '.join(_FILES)} is in it"
            raise ValueError(
                f"No tokenizer could be loaded from {name!r}: {reason}. Give a folder or a name on the Hugging Face "
                "Hub, or leave `tokenizer` out and one is trained on the data."
            ) from error
    add_tokens(tokenizer, new_tokens)
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
    """Add special tokens that the tokenizer does not have.

    Raises:
        ValueError: If the tokenizer takes no further tokens.
    """
    if not texts:
        return
    try:
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts], special_tokens=True)
    except NotImplementedError as error:
        raise ValueError(f"new_tokens cannot be added to a {type(tokenizer).__name__}. Leave them out.") from error


def pack_files(*savers: Any) -> torch.Tensor:
    """Return the files that tokenizers and processors write, as a zip archive in a uint8 tensor.

    Checkpoints of all kinds store tensors without a copy or a change of encoding.

    Args:
        savers: Objects with `save_pretrained`; a later one replaces files of an earlier one.
    """
    archive = io.BytesIO()
    with TemporaryDirectory() as folder, ZipFile(archive, "w") as files:
        for saver in savers:
            saver.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():  # Without times, equal files are equal archives.
                name = ZipInfo(path.relative_to(folder).as_posix())
                files.writestr(name, path.read_bytes(), ZIP_DEFLATED)
    return torch.frombuffer(bytearray(archive.getbuffer()), dtype=torch.uint8)


def unpack_files(packed: torch.Tensor, folder: Path) -> None:
    """Write the files of `pack_files` into a folder, which is created."""
    with ZipFile(io.BytesIO(packed.numpy().tobytes())) as files:
        files.extractall(folder)


def day_of_checkpoint() -> str | None:
    """Return the date in the checkpoint that the running Trainer will load, in ISO format; None if there is none.

    Lightning loads the checkpoint after `setup`, and tells its path to nobody before. With the date of today, `setup`
    would encode all data in vain. So the path is read from the frame of the Trainer.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer._run.__code__:
        frame = frame.f_back
    path = None if frame is None else frame.f_locals.get("ckpt_path")
    if path is None or not Path(path).exists():
        return None
    file = Path(path, STATE) if Path(path).is_dir() else Path(path)
    try:
        content = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError):  # Loading the checkpoint will say why.
        return None
    states = content.values() if isinstance(content, dict) else ()
    return next(
        (state["chat_format"].get("day") for state in states if isinstance(state, dict) and "chat_format" in state),
        None,
    )


def train_tokenizer(rows: Sequence[Any], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on rows; equal arguments give equal tokenizers.

    Args:
        rows: Rows, whose whole text is used.
        vocab_size: Number of tokens; a small text may give fewer.
    """
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(_texts(rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, SEPARATOR],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def cached_tokenizer_folder(rows: Sequence[Any], vocab_size: int, cache_dir: Path) -> Path:
    """Train a tokenizer on conversations, unless it is cached; return its folder in the cache.

    Raises:
        ValueError: If `vocab_size` is below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size} leaves no room for the bytes. Give at least {MIN_VOCAB_SIZE}.")
    key = fingerprint(rows, vocab_size=vocab_size, chat_template=CHAT_TEMPLATE, special_tokens=SPECIAL_TOKENS)
    folder = cache_dir / "tokenizers" / key
    if not folder.is_dir():
        make_folder(folder, lambda staging: train_tokenizer(rows, vocab_size).save_pretrained(staging))
    return folder


def _texts(rows: Sequence[Any]) -> Iterator[str]:
    for row in rows:
        for side in row.get("sides", [row]):
            for message in side.get("messages", ()):
                yield message["role"]
                yield text_of(message)
            if "text" in side:
                yield side.get("prompt", "") + side["text"]
