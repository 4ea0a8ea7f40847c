"""The single decisions of a plan that a user may pin."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Knobs:
    """Single decisions that a user pins; `None` leaves one open.

    Attributes:
        num_persistent_chunks: The first so many chunks are resident (n_persist).
        num_chunk_buffers: So many offloaded chunks may be on the device at one time (n_buffer).
        num_swap_blocks: So many blocks swap their activations (n_swap), spread over the first ones.
        num_checkpoint_blocks: So many blocks recompute their activations (n_checkpoint), between them; the others
            keep or swap all of them.
        num_keep_offloaded_blocks: So many blocks with offloaded chunks keep their activations.
        chunk_bytes: The most bytes of a chunk (S_chunk).

    Raises:
        ValueError: A value that is no integer, or out of range.
    """

    num_persistent_chunks: int | None = None
    num_chunk_buffers: int | None = None
    num_swap_blocks: int | None = None
    num_checkpoint_blocks: int | None = None
    num_keep_offloaded_blocks: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        """Checks types and ranges; what depends on the model is checked by `make_plan`."""
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
        """Whether nothing is left open; the number of blocks that keep with offloaded chunks follows from the rest."""
        return set(self.given) >= {field.name for field in fields(self)} - {"num_keep_offloaded_blocks"}

    @property
    def leave_policies(self) -> bool:
        """Whether nothing is said of how many blocks checkpoint or keep: then some may keep their products alone."""
        return self.num_checkpoint_blocks is None and self.num_keep_offloaded_blocks is None

    @property
    def forbids_alone(self) -> tuple[str, ...]:
        """Names of knobs that rule plans out and ask for none: no block that keeps with offloaded chunks."""
        return ("num_keep_offloaded_blocks",) if self.num_keep_offloaded_blocks == 0 else ()

    def without_keep_offloaded(self) -> Knobs:
        """The same, and no block keeps its activations while its chunks are offloaded.

        What kernels keep of weights on `ctx` is then made anew by the forward that runs again.

        Raises:
            ValueError: Such blocks are asked for.
        """
        if self.num_keep_offloaded_blocks:
            raise ValueError(
                f"num_keep_offloaded_blocks={self.num_keep_offloaded_blocks} asks for blocks that "
                "forbid_keep_offload_with_fused_lora=True forbids. Leave one of them out."
            )
        return replace(self, num_keep_offloaded_blocks=0)

    def refuse(self, plan: str, allowed: Collection[str] = ()) -> None:
        """Refuses knobs beside a plan that leaves them nothing to decide.

        Args:
            plan: What was given as `plan`, for the message.
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
