"""Rules by which `fit MODEL DATA` chooses: functions from records of model, data and machine to numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.config import format_bytes, parse_bytes
from lightning_protrain.device.topology import describe_gpus, first_gpu
from lightning_protrain.models.bnb import is_installed, require_installed
from lightning_protrain.models.loading import PACKING_MODEL_TYPES, build_model, check_source, num_positions, read_config
from lightning_protrain.models.repeated_blocks import Method, silent
from lightning_protrain.progress import waiting

# Conversations in an optimizer step, and the least number of steps in an epoch for which there are as many.
TOTAL_BATCH, EPOCH_STEPS = 16, 24
# Rows below which nothing is validated; fraction and greatest number of validation rows.
LEAST_VALIDATED, VAL_FRACTION, MOST_VALIDATED = 20, 0.05, 500
# Rows up to which there are three epochs, and two.
THREE_EPOCHS, TWO_EPOCHS = 100, 10_000
# Learning rates of models of RATED parameters and more, by objective and method. Smaller ones get up to tenfold.
RATES = {"tokens": {"full": 1e-5, "lora": 2e-4}, "preferences": {"full": 5e-7, "lora": 5e-6}}
RATED, MOST_RAISED = 8e9, 10.0
# Tokens of a row of plain text, and of a micro-batch on a CPU without a limit, where larger ones are no faster.
TEXT_LENGTH, CPU_TOKENS = 2048, 1024
# Steps of an epoch from which it is validated four times.
LONG_EPOCH = 200


@dataclass(frozen=True)
class Machine:
    """The device and the host to train on.

    Attributes:
        ranks: Number of GPUs or processes of this node that train.
        on_gpu: True if GPUs train, False if the CPU does.
        bfloat16: True if the GPU, or else the CPU, has matrix units for bfloat16.
        device_bytes: Device memory that may be used; None means no limit.
        host_bytes: Free memory of the host.
    """

    ranks: int
    on_gpu: bool
    bfloat16: bool
    device_bytes: int | None
    host_bytes: int


@dataclass(frozen=True)
class ModelSize:
    """Properties of a model that choices depend on.

    Attributes:
        parameters: Number of parameters.
        positions: Greatest length of a sequence; None means no limit is known.
        packs: True if packed conversations do not see each other.
    """

    parameters: int
    positions: int | None = None
    packs: bool = False


@dataclass(frozen=True)
class Corpus:
    """Properties of the training rows.

    Attributes:
        rows: Number of conversations, documents or preferences.
        tokens: Tokens of all rows.
        longest: Tokens of the longest row, with its padding.
        objective: `"tokens"`, `"pairs"` of a chosen and a rejected answer, or `"unpaired"` answers with a label.
        is_text: True if the rows are plain text, which is packed.
        has_media: True if rows have images, audio or video.
    """

    rows: int
    tokens: int
    longest: int
    objective: str = "tokens"
    is_text: bool = False
    has_media: bool = False


def choose_method(asked: Method | None, model: ModelSize, machine: Machine) -> tuple[Method, str]:
    """Return the method and the reason: `"lora"`, or `"qlora"` if frozen weights fit neither device nor host.

    Args:
        asked: Method that the user has given; None chooses.
        model: The model.
        machine: The machine.

    Raises:
        ValueError: If `qlora` is asked for without bitsandbytes or without a GPU.
    """
    if asked == "qlora":
        require_installed()
        if not machine.on_gpu:
            raise ValueError("--method qlora needs a CUDA GPU, and none is used. Give --method lora.")
    if asked is not None:
        return asked, ""
    nbytes = (2 if machine.bfloat16 else 4) * model.parameters
    fits = machine.device_bytes is None or nbytes <= max(machine.device_bytes, machine.host_bytes)
    if machine.on_gpu and not fits and is_installed():
        return "qlora", f"{format_bytes(nbytes)} of frozen weights fit neither device nor host"
    return "lora", "adapters; --method full trains all weights"


def learning_rate(method: Method, parameters: int, objective: str) -> float:
    """Return the peak learning rate: RATES, times the square root of RATED per parameter; one significant digit."""
    rates = RATES["tokens" if objective == "tokens" else "preferences"]
    raised = min(max(sqrt(RATED / max(parameters, 1)), 1.0), MOST_RAISED)
    return float(f"{rates['full' if method == 'full' else 'lora'] * raised:.0e}")


def total_batch(rows: int) -> int:
    """Return the rows of an optimizer step: a power of two up to TOTAL_BATCH, with EPOCH_STEPS steps in an epoch."""
    size = TOTAL_BATCH
    while size > 1 and size * EPOCH_STEPS > rows:
        size //= 2
    return size


def packed_rows(corpus: Corpus, length: int) -> tuple[int, int]:
    """Return the packed rows of an epoch, and of an optimizer step.

    Args:
        corpus: The rows to pack.
        length: Tokens of a packed row.
    """
    rows = max(corpus.tokens // length, 1)
    if corpus.is_text:  # A document may be as long as many rows.
        return rows, total_batch(rows)
    return rows, max(round(total_batch(corpus.rows) * rows / corpus.rows), 1)


def num_epochs(rows: int) -> int:
    """Return the number of epochs for a number of rows."""
    return 3 if rows <= THREE_EPOCHS else 2 if rows <= TWO_EPOCHS else 1


def val_fraction(rows: int) -> float:
    """Return the fraction of rows for validation; 0 for few rows."""
    return 0.0 if rows < LEAST_VALIDATED else min(VAL_FRACTION, float(f"{MOST_VALIDATED / rows:.1g}"))


def packs(corpus: Corpus, model: ModelSize) -> bool:
    """Return True if conversations are packed: padding would be half of the tokens, and the model keeps them apart."""
    short = 2 * corpus.tokens <= corpus.rows * corpus.longest
    many = corpus.tokens >= corpus.longest * TOTAL_BATCH * EPOCH_STEPS
    return model.packs and corpus.objective == "tokens" and short and many and not corpus.has_media


def longest_length(corpus: Corpus, model: ModelSize) -> int:
    """Return the length at which no row is cut, or the number of positions if that is less.

    Plain text is packed into rows of TEXT_LENGTH, or of less if an epoch would have fewer than EPOCH_STEPS rows.
    """
    longest = corpus.longest
    if corpus.is_text:
        longest = min(max(longest, corpus.tokens // EPOCH_STEPS // 8 * 8), TEXT_LENGTH)
    return longest if model.positions is None or corpus.has_media else min(longest, model.positions)


def unlimited_batch(length: int, total: int) -> int:
    """Return the rows of a micro-batch on a CPU without a memory limit."""
    return max(min(CPU_TOKENS // length, total), 1)


def model_size(name: str, allow_pickle: bool) -> ModelSize:
    """Return the properties of a model; download no weights.

    Args:
        name: As `model` of CausalLMModule.
        allow_pickle: As in CausalLMModule.

    Raises:
        ValueError: If there is no such model, or its weights cannot be trained.
    """
    check_source(name, allow_pickle)
    config = read_config(name)
    with waiting("Counting parameters"), torch.device("meta"), silent():
        parameters = sum(parameter.numel() for parameter in build_model(config, "bfloat16").parameters())
    return ModelSize(parameters, num_positions(config), config.model_type in PACKING_MODEL_TYPES)


def find_machine(accelerator: str, devices: int | str | list[Any], limit: int | str) -> Machine:
    """Return the properties of this machine.

    Args:
        accelerator: As in the Trainer.
        devices: As in the Trainer.
        limit: Device memory that may be used, as in ProTrainStrategy.

    Raises:
        ValueError: If there is no device.
    """
    gpu = first_gpu() if accelerator in ("auto", "gpu", "cuda") else None
    if devices in ("auto", -1, "-1"):
        devices = max(len(describe_gpus()), 1) if gpu else 1
    if isinstance(devices, str):  # "0," is a list of one device.
        devices = [number for number in devices.split(",") if number.strip()]
    count = devices if isinstance(devices, int) else len(devices)
    if count < 1:
        raise ValueError(f"trainer.devices is {devices}: give at least 1 device.")
    nbytes = (None if gpu is None else gpu[0]) if limit == "auto" else parse_bytes(limit, "device_memory")
    bfloat16 = gpu[1] if gpu else bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return Machine(count, gpu is not None, bfloat16, nbytes, free_host_bytes())
