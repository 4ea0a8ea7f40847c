"""Frozen records of the keywords of both strategies, which check their values, and the noise that both hide.

Checks that need a model, a device or the ranks are elsewhere.
"""

from __future__ import annotations

import logging
import re
import reprlib
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NoReturn, get_args

# The package may run from a folder, where it is not installed and has no metadata.
__version__ = "0.1.0"

Preset = Literal["auto", "resident", "offload"]
# None: repeated layers. "size": modules with at least `min_num_params` parameters. A list: modules by name or class.
BlockChoice = str | Sequence[str | type] | None
OverlapChoice = Literal["auto", "backward", "forward", "off"]
ShardingChoice = Literal["auto", "resident", "replicate", "shard"]
GradSync = Literal["auto", "ddp", "flat"]
OnNonFinite = Literal["stop", "warn"]
Rehearse = bool | Literal["auto"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
ShardingStrategy = Literal["auto", "FULL_SHARD", "HYBRID_SHARD"]
Policy = Literal["transformer", "size", "none"]
Checkpointing = bool | int | Literal["auto", "all", "none"]

MIN_NUM_PARAMS = 100_000_000
_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


# Beginnings of messages that Lightning logs in every run, and that nobody can act on.
_NOISE = (
    "Tip: ",
    "Seed set to ",
    "Initializing distributed: ",
    "All distributed processes registered",
    "TPU available: False",
    "Loading `train_dataloader` to ",
    "`Trainer.fit` stopped: ",
    "Using bfloat16 Automatic",
    "Restoring states from",  # Followed by "Restored all states from".
)
# Beginnings of warnings about the code of libraries, not of the user.
_NOISY_WARNINGS = (
    r".*isinstance\(treespec, LeafSpec\)",
    r"Total length of `list` across ranks is zero",  # There are no validation rows.
    r".*Your `IterableDataset` has `__len__` defined",
    r"`is_gradient_checkpointing` is deprecated",  # PEFT uses it.
)


def hide_noise() -> None:
    """Hide messages that libraries show in every run of a strategy and that the user cannot act on.

    Filters that the user sets for warnings take precedence.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # Kernels that are not installed.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # A cast in every product of 8 bits.
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed", "fabric.utilities.distributed"):
        logging.getLogger(f"lightning.{name}").addFilter(_can_be_acted_on)
    for message in _NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message, append=True)


def _can_be_acted_on(record: logging.LogRecord) -> bool:
    # Remove a rank, a light bulb, or a line with the name of the backend from the begin.
    message = re.sub(r"^(\[rank: \d+\] |\U0001f4a1 |-+\ndistributed_backend=\w+\n)", "", record.getMessage())
    return not message.startswith(_NOISE)


class RaisingParser(ArgumentParser):
    """An ArgumentParser that raises ValueError for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of exiting."""
        raise ValueError(message)


def is_valid(check: Callable[[Any], object], value: Any) -> bool:
    """Return True if a value passes a check; False if its type is such that the check fails."""
    try:
        return bool(check(value))
    except TypeError:
        return False


def check_kinds(kind: Any, accepted: str, **given: object) -> None:
    """Raise ValueError if one of the given arguments is neither None nor an instance of `kind`."""
    for name, value in given.items():
        if not isinstance(value, kind | None):
            raise ValueError(f"{name}={reprlib.repr(value)}: give {accepted}, or None.")


def parse_bytes(value: int | str, name: str = "") -> int:
    """Parse a number of bytes: an integer, digits, or a number with a decimal (`GB`) or binary (`GiB`) unit.

    Args:
        value: The number.
        name: Name of the argument, for the message.

    Raises:
        ValueError: If the value has another form, or is less than one byte.
    """
    match = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)?\s*", str(value)) if type(value) in (int, str) else None
    )
    unit = (match[2] or "") if match else None
    nbytes = int(Decimal(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if nbytes < 1:
        raise ValueError(
            f'{name and name + "="}{value!r} is not an amount of memory. Give e.g. "22GiB", "512MiB", "1.5GB", or a '
            "number of bytes."
        )
    return nbytes


# Dtypes of exported weights.
DTYPES = ("float32", "bfloat16", "float16")


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun, such as `"1 rank"` or `"2 ranks"`; `nouns` is an irregular plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes, such as `"1.50 GiB (1610612736 bytes)"`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit} ({nbytes} bytes)"
    return plural(nbytes, "byte")


def version_of(package: str) -> str:
    """Return the version of another package, for messages; "(not installed)" if it has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _refuse_other(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}.")


def _check_min_num_params(number: object) -> None:
    if type(number) is not int or number < 1:
        raise ValueError(f"min_num_params={number!r}: give a positive number of parameters.")


@dataclass(frozen=True)
class Knobs:
    """Decisions of a plan that a user can pin; None leaves the decision to the planner.

    Attributes:
        num_persistent_chunks: Number of resident chunks, from the first chunk on (n_persist).
        num_chunk_buffers: Number of offloaded chunks that may be on the device at the same time (n_buffer).
        num_swap_blocks: Number of blocks that swap their activations (n_swap).
        num_checkpoint_blocks: Number of blocks that recompute all their activations (n_checkpoint).
        num_keep_offloaded_blocks: Number of blocks with offloaded chunks that keep their activations.
        chunk_bytes: Maximum size of a chunk, bytes (S_chunk).

    Raises:
        ValueError: If a value is not an integer, or is out of range.
    """

    num_persistent_chunks: int | None = None
    num_chunk_buffers: int | None = None
    num_swap_blocks: int | None = None
    num_checkpoint_blocks: int | None = None
    num_keep_offloaded_blocks: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check types and ranges."""
        for name in self.given:
            value = getattr(self, name)
            least = 1 if name == "chunk_bytes" else 0
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}: give an integer of at least {least}, or None.")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the knobs that are set."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def are_whole(self) -> bool:
        """True if all knobs are set; `num_keep_offloaded_blocks` follows from the others."""
        return set(self.given) >= {field.name for field in fields(self)} - {"num_keep_offloaded_blocks"}

    @property
    def forbids_alone(self) -> tuple[str, ...]:
        """Names of knobs that only forbid a policy: `num_keep_offloaded_blocks` if it is 0."""
        return ("num_keep_offloaded_blocks",) if self.num_keep_offloaded_blocks == 0 else ()

    def without_keep_offloaded(self) -> Knobs:
        """Return the knobs with `num_keep_offloaded_blocks=0`: blocks with offloaded chunks recompute or swap.

        Fused kernels that keep weights on `ctx` then get the fetched weights again in the recomputed forward.

        Raises:
            ValueError: If the user has set `num_keep_offloaded_blocks` to another number.
        """
        if self.num_keep_offloaded_blocks:
            raise ValueError(
                "forbid_keep_offload_with_fused_lora=True contradicts "
                f"num_keep_offloaded_blocks={self.num_keep_offloaded_blocks}. Remove one of the two."
            )
        return replace(self, num_keep_offloaded_blocks=0)

    def refuse(self, plan: str, allowed: Collection[str] = ()) -> None:
        """Raise ValueError if a knob is set that the user's plan or preset would ignore.

        Args:
            plan: Value of the user's `plan`, for the message.
            allowed: Names of the knobs that have an effect.
        """
        ignored = [f"{name}={getattr(self, name)}" for name in self.given if name not in allowed]
        if self.forbids_alone and not set(self.forbids_alone) & set(allowed):
            ignored[ignored.index("num_keep_offloaded_blocks=0")] += " (or forbid_keep_offload_with_fused_lora=True)"
        if ignored:
            raise ValueError(
                f'plan={plan} makes all decisions and would ignore {", ".join(ignored)}. Give plan="auto" with these '
                "settings, or remove them."
            )


NO_KNOBS = Knobs()


@dataclass(frozen=True)
class PlanOptions:
    """The user's options for planning, except for the plan or preset itself.

    Attributes:
        knobs: Decisions that the user has pinned.
        blocks: Modules that are blocks, see `BlockChoice`.
        min_num_params: Minimum number of parameters of a block with `blocks="size"`, and of a unit outside blocks that
            stays on the device if it fits.
        device_memory: Maximum device memory, such as `"22GiB"`, or bytes; "auto" means the free memory.
        host_memory: Maximum host memory, such as `"64GiB"`, or bytes; "auto" means the free memory.
        overlap_optimizer: Phase of the step during which the host steps the optimizer.
        rehearse: True rehearses a plan of the search before training; "auto" does so on a GPU.

    Raises:
        ValueError: If a value is out of range.
    """

    knobs: Knobs = NO_KNOBS
    blocks: BlockChoice = None
    min_num_params: int = MIN_NUM_PARAMS
    device_memory: str | int = "auto"
    host_memory: str | int = "auto"
    overlap_optimizer: OverlapChoice = "auto"
    rehearse: Rehearse = "auto"

    def __post_init__(self) -> None:
        """Check the values."""
        _check_min_num_params(self.min_num_params)
        for name in ("device_memory", "host_memory"):
            if getattr(self, name) != "auto":
                parse_bytes(getattr(self, name), name)
        _refuse_other("overlap_optimizer", self.overlap_optimizer, get_args(OverlapChoice))
        if self.rehearse != "auto" and not isinstance(self.rehearse, bool):
            raise ValueError(f"rehearse={self.rehearse!r}: give 'auto', True or False.")

    @property
    def device_bytes(self) -> int | None:
        """Maximum device memory, bytes; None if the user sets none."""
        return None if self.device_memory == "auto" else parse_bytes(self.device_memory)

    @property
    def host_bytes(self) -> int | None:
        """Maximum host memory, bytes; None if the user sets none."""
        return None if self.host_memory == "auto" else parse_bytes(self.host_memory)


@dataclass(frozen=True)
class DDPOptions:
    """Options of DistributedDataParallel.

    Attributes:
        find_unused_parameters, static_graph: As in `DistributedDataParallel`.
        comm_hook, comm_state: As in `DistributedDataParallel.register_comm_hook`.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    comm_hook: Callable[..., Any] | None = None
    comm_state: object = None


@dataclass(frozen=True)
class Parallelism:
    """Options for training one model on several ranks.

    Attributes:
        sharding: Placement of the offloaded chunks: a copy on every rank, or one copy on each node.
        reduce_dtype: Dtype in which gradients of offloaded chunks are summed; None means the dtype of the weights.
        adapter_grad_sync: Method of averaging gradients of resident parameters over ranks: DDP, or one flat all-reduce.
        ddp: Options of DistributedDataParallel.

    Raises:
        ValueError: If a value is not allowed, or two values contradict each other.
    """

    sharding: ShardingChoice = "auto"
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    adapter_grad_sync: GradSync = "auto"
    ddp: DDPOptions = field(default_factory=DDPOptions)

    def __post_init__(self) -> None:
        """Check the values."""
        _refuse_other("sharding", self.sharding, get_args(ShardingChoice))
        _refuse_other("reduce_dtype", self.reduce_dtype, (None, "float32", "bfloat16"))
        _refuse_other("adapter_grad_sync", self.adapter_grad_sync, get_args(GradSync))
        if self.adapter_grad_sync == "flat" and self.ddp.comm_hook is not None:
            raise ValueError(
                'adapter_grad_sync="flat" averages gradients of resident weights without DDP, but ddp_comm_hook is '
                'called by DDP. Remove one of the two, or set adapter_grad_sync="ddp".'
            )

    def settings(self) -> dict[str, str]:
        """Return the options that determine the collectives, by name; they must be equal on all ranks."""
        settings = {field.name: repr(getattr(self, field.name)) for field in fields(self) if field.name != "ddp"}
        settings |= {name: repr(getattr(self.ddp, name)) for name in ("find_unused_parameters", "static_graph")}
        return settings | {"ddp_comm_hook": "none" if self.ddp.comm_hook is None else "one"}


@dataclass(frozen=True)
class LaunchOptions:
    """Options for starting the processes of a run and connecting them.

    Attributes:
        backend: Backend of the process group; None means the default of the device.
        timeout: Maximum duration of a collective; None means PyTorch's default.
        start_method: Method to start processes with.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    start_method: StartMethod = "popen"


@dataclass(frozen=True)
class FSDPOptions:
    """Options of `ProTrainFSDP2Strategy`.

    Attributes:
        policy, min_num_params, activation_checkpointing, cpu_offload, sync_each_batch, sharding_strategy, device_mesh,
            device_memory: As in `ProTrainFSDP2Strategy`.

    Raises:
        ValueError: If a value is out of range, or two values contradict each other.
    """

    policy: Policy = "transformer"
    min_num_params: int = MIN_NUM_PARAMS
    activation_checkpointing: Checkpointing = "auto"
    cpu_offload: bool = False
    sync_each_batch: bool = False
    sharding_strategy: ShardingStrategy = "auto"
    device_mesh: tuple[int, int] | None = None
    device_memory: str | int = "auto"

    def __post_init__(self) -> None:
        """Check the values."""
        _refuse_other("policy", self.policy, get_args(Policy))
        _check_min_num_params(self.min_num_params)
        for name in ("cpu_offload", "sync_each_batch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: give True or False.")
        wanted = self.activation_checkpointing
        if not (isinstance(wanted, int) and wanted >= 0) and wanted not in ("auto", "all", "none"):
            raise ValueError(
                f'activation_checkpointing={wanted!r}: give "auto", "all" or True, "none" or False, or a number of '
                "blocks."
            )
        _refuse_other("sharding_strategy", self.sharding_strategy, get_args(ShardingStrategy))
        self._check_mesh()
        if self.device_memory != "auto":
            parse_bytes(self.device_memory, "device_memory")

    def _check_mesh(self) -> None:
        if self.device_mesh is None:
            return
        sizes: Sequence[int] = self.device_mesh
        if not is_valid(lambda sizes: len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes), sizes):
            raise ValueError(
                f"device_mesh={sizes!r}: give two positive numbers, the number of copies and the ranks of each copy."
            )
        if self.sharding_strategy == "FULL_SHARD":
            raise ValueError(
                f'sharding_strategy="FULL_SHARD" shards over all ranks, but device_mesh={tuple(sizes)} sets their '
                "number. Give one of the two."
            )

    @property
    def device_bytes(self) -> int | None:
        """Maximum device memory, bytes; None if the user sets none."""
        return None if self.device_memory == "auto" else parse_bytes(self.device_memory)
