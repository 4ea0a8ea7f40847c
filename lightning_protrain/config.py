"""Frozen records of user options; both strategies build them from their keywords, and the records check the values.

Checks that need a model, a device or the ranks are made elsewhere.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal, NoReturn, get_args

Preset = Literal["auto", "resident", "offload"]
# None: find repeated layers. "size": modules of at least `min_num_params`. Otherwise exactly these names and classes.
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


class RaisingParser(ArgumentParser):
    """An ArgumentParser that raises an error for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of ending the process."""
        raise ValueError(message)


def parse_bytes(value: int | str) -> int:
    """Return bytes from an integer, plain digits, or a number with a decimal (`GB`) or binary (`GiB`) unit.

    Raises:
        ValueError: The value is something else, or less than one byte.
    """
    found = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)?\s*", str(value)) if type(value) in (int, str) else None
    )
    unit = (found[2] or "") if found else None
    nbytes = int(Decimal(found[1]) * _UNITS[unit]) if found and unit in _UNITS else 0
    if nbytes < 1:
        raise ValueError(
            f'{value!r} is no amount of memory. Give e.g. "22GiB", "512MiB", "1.5GB", or a number of bytes.'
        )
    return nbytes


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun: `"1 rank"`, `"2 ranks"`; `nouns` is an irregular plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


def format_bytes(nbytes: int) -> str:
    """Format bytes for people and programs, such as `"1.50 GiB (1610612736 bytes)"`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit} ({nbytes} bytes)"
    return plural(nbytes, "byte")


def _refuse_other(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}.")


def _check_min_num_params(number: object) -> None:
    if type(number) is not int or number < 1:
        raise ValueError(f"min_num_params={number!r}: give a positive number of parameters.")


@dataclass(frozen=True)
class Knobs:
    """Decisions of a plan that a user can pin; None leaves a decision open.

    Attributes:
        num_persistent_chunks: Number of resident chunks, counted from the first (n_persist).
        num_chunk_buffers: Number of offloaded chunks that may be on the device at one time (n_buffer).
        num_swap_blocks: Number of blocks that swap their activations (n_swap), spread over the first ones.
        num_checkpoint_blocks: Number of blocks that recompute their activations (n_checkpoint), between the swapped
            ones; all other blocks keep or swap their activations.
        num_keep_offloaded_blocks: Number of blocks with offloaded chunks that keep their activations.
        chunk_bytes: Maximum size of a chunk, bytes (S_chunk).

    Raises:
        ValueError: A value is no integer, or is out of range.
    """

    num_persistent_chunks: int | None = None
    num_chunk_buffers: int | None = None
    num_swap_blocks: int | None = None
    num_checkpoint_blocks: int | None = None
    num_keep_offloaded_blocks: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check types and ranges; `make_plan` makes the checks that need the model."""
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
        """True if no knob is open; `num_keep_offloaded_blocks` follows from the other knobs."""
        return set(self.given) >= {field.name for field in fields(self)} - {"num_keep_offloaded_blocks"}

    @property
    def leave_policies(self) -> bool:
        """True if no knob fixes how many blocks checkpoint or keep, so that blocks may recompute selectively."""
        return self.num_checkpoint_blocks is None and self.num_keep_offloaded_blocks is None

    @property
    def forbids_alone(self) -> tuple[str, ...]:
        """Names of knobs that only exclude plans: `num_keep_offloaded_blocks=0` requires no block of any policy."""
        return ("num_keep_offloaded_blocks",) if self.num_keep_offloaded_blocks == 0 else ()

    def without_keep_offloaded(self) -> Knobs:
        """Return knobs under which no block with offloaded chunks keeps its activations.

        Then the recomputed forward of such blocks also stores again the weights that fused kernels keep on `ctx`.

        Raises:
            ValueError: The user asks for such blocks.
        """
        if self.num_keep_offloaded_blocks:
            raise ValueError(
                f"num_keep_offloaded_blocks={self.num_keep_offloaded_blocks} asks for blocks that "
                "forbid_keep_offload_with_fused_lora=True forbids. Leave one of them out."
            )
        return replace(self, num_keep_offloaded_blocks=0)

    def refuse(self, plan: str, allowed: Collection[str] = ()) -> None:
        """Refuse knobs that would have no effect beside the user's plan.

        Args:
            plan: Value of the user's `plan`, for the message.
            allowed: Names of the knobs that still have an effect.

        Raises:
            ValueError: A knob that is not in `allowed` is set.
        """
        ignored = [f"{name}={getattr(self, name)}" for name in self.given if name not in allowed]
        if self.forbids_alone and not set(self.forbids_alone) & set(allowed):
            ignored[ignored.index("num_keep_offloaded_blocks=0")] += " (or forbid_keep_offload_with_fused_lora=True)"
        if ignored:
            raise ValueError(
                f"plan={plan} decides everything itself and would ignore {', '.join(ignored)}. "
                'Give plan="auto" with these knobs, or leave them out.'
            )


NO_KNOBS = Knobs()


@dataclass(frozen=True)
class PlanOptions:
    """The user's options for planning, except for the plan or preset itself.

    Attributes:
        knobs: Decisions that the user pinned.
        blocks: The modules that are blocks, see `BlockChoice`.
        min_num_params: A module outside blocks is large from this number of parameters on.
        device_memory: Maximum device memory, as `"22GiB"` or bytes; "auto" means the free memory.
        host_memory: Maximum host memory, as `"64GiB"` or bytes; "auto" means the free memory.
        overlap_optimizer: The phase during which the host steps the optimizer.
        rehearse: True to rehearse a plan from the search before training; "auto": on a GPU.

    Raises:
        ValueError: A value is out of range.
    """

    knobs: Knobs = NO_KNOBS
    blocks: BlockChoice = None
    min_num_params: int = MIN_NUM_PARAMS
    device_memory: str | int = "auto"
    host_memory: str | int = "auto"
    overlap_optimizer: OverlapChoice = "auto"
    rehearse: Rehearse = "auto"

    def __post_init__(self) -> None:
        """Make the checks that need no model."""
        _check_min_num_params(self.min_num_params)
        for memory in (self.device_memory, self.host_memory):
            if memory != "auto":
                parse_bytes(memory)
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
    """Options of DistributedDataParallel, under its own names.

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
        sharding: Division of the offloaded chunks among ranks.
        reduce_dtype: Dtype in which gradients of offloaded chunks are summed; None means the dtype of the weights.
        adapter_grad_sync: How ranks average gradients of resident parameters if few are trained.
        ddp: Options of DistributedDataParallel.

    Raises:
        ValueError: A value is not allowed, or two values contradict each other.
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
                'adapter_grad_sync="flat" averages gradients of resident weights without DDP, and ddp_comm_hook is '
                'called by DDP. Leave one of them out, or set adapter_grad_sync="ddp".'
            )

    def settings(self) -> dict[str, str]:
        """Return the options, by name, that determine the collectives; all ranks must have the same."""
        found = {each.name: repr(getattr(self, each.name)) for each in fields(self) if each.name != "ddp"}
        found |= {name: repr(getattr(self.ddp, name)) for name in ("find_unused_parameters", "static_graph")}
        return found | {"ddp_comm_hook": "none" if self.ddp.comm_hook is None else "one"}


@dataclass(frozen=True)
class LaunchOptions:
    """Options for starting the processes of a run and connecting them.

    Attributes:
        backend: Backend of the process group; None means the backend of the device.
        timeout: Maximum duration of a collective; None means PyTorch's default.
        start_method: Method that starts processes.
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
        ValueError: A value is out of range, or two values contradict each other.
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
        """Make the checks that need neither a model nor the ranks."""
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
            parse_bytes(self.device_memory)

    def _check_mesh(self) -> None:
        if self.device_mesh is None:
            return
        sizes: Sequence[int] = self.device_mesh
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"device_mesh={sizes!r}: give two positive numbers, of copies and of the ranks that shard each."
            )
        if self.sharding_strategy == "FULL_SHARD":
            raise ValueError(
                f'sharding_strategy="FULL_SHARD" shards over all ranks, and device_mesh={tuple(sizes)} says over how '
                "many. Give one of the two."
            )

    @property
    def device_bytes(self) -> int | None:
        """Maximum device memory, bytes; None if the user sets none."""
        return None if self.device_memory == "auto" else parse_bytes(self.device_memory)
