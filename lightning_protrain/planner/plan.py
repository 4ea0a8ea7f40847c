"""The plan: where every chunk is stored, what every block does with its activations, and the predicted cost.

Also reads the file that `lightning-protrain plan --json` writes: a plan for each hardware name, null if none fits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_protrain.config import format_bytes, plural
from lightning_protrain.planner.explain import Explanation, explain, short_bytes, unit_rows
from lightning_protrain.planner.placement import BlockPlan, BlockPolicy, ChunkPlan, MemoryTerms, Sharding
from lightning_protrain.planner.plots import plot_units
from lightning_protrain.planner.prediction import Prediction, read
from lightning_protrain.profiler.records import ModelLayout, ParameterInfo

FORMAT = 5
# Bytes. CUDA's caching allocator allocates in multiples of 512 bytes, and vector loads need no larger alignment.
ALIGNMENT = 256
# Bytes. Copying a gradient up to this size takes less time than issuing the copy.
SMALL_GRADIENT = 1 << 20


@dataclass(frozen=True)
class RankLayout:
    """The ranks that train together.

    Attributes:
        num_nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        sharding: Division of the offloaded chunks among ranks.
    """

    num_nodes: int = 1
    ranks_per_node: int = 1
    sharding: Sharding = Sharding.REPLICATE

    @property
    def num_ranks(self) -> int:
        """Total number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def copies(self) -> int:
        """Number of copies of the offloaded chunks on a node."""
        return 1 if self.sharding is Sharding.SHARD else self.ranks_per_node

    @property
    def sharers(self) -> int:
        """Number of ranks of a node that share one copy of the offloaded chunks."""
        return self.ranks_per_node // self.copies


ONE_RANK = RankLayout()


@dataclass(frozen=True, repr=False)
class Plan:
    """A complete decision: puts every parameter in one chunk, and gives every block one policy.

    Attributes:
        chunks: All chunks in execution order.
        blocks: All blocks in execution order.
        num_chunk_buffers: Number of offloaded chunks that may be on the device at the same time (n_buffer).
        memory: Device memory by term.
        shapes: Shape of every parameter, by first name, to recognise the model that the plan was made for.
        prediction: Predicted memory and time; None if nothing was predicted.
        sharding: Division of the offloaded chunks among ranks.
        gradient_buffers: Number of chunks whose gradients have host memory at the same time, if the run steps them
            behind backward, see [Note: Gradients in passing]; 0: gradients of all chunks have.
        slice_tokens: Maximum number of tokens that the modules in `sliced` compute at a time.
        sliced: Names of the modules that run on slices of the tokens, see [Note: Slices] in profiler/row_wise.py.
    """

    chunks: tuple[ChunkPlan, ...]
    blocks: tuple[BlockPlan, ...]
    num_chunk_buffers: int
    memory: MemoryTerms
    shapes: Mapping[str, tuple[int, ...]]
    prediction: Prediction | None = None
    sharding: Sharding = Sharding.REPLICATE
    gradient_buffers: int = 0
    slice_tokens: int = 0
    sliced: tuple[str, ...] = ()

    @property
    def num_offloaded_chunks(self) -> int:
        """Number of streamed chunks."""
        return sum(not chunk.resident for chunk in self.chunks)

    @property
    def does_anything(self) -> bool:
        """True if chunks are streamed, or a block does not keep its activations: then another plan may be faster."""
        return bool(self.num_offloaded_chunks or self.sliced) or any(
            block.policy is not BlockPolicy.KEEP for block in self.blocks
        )

    def block(self, name: str) -> BlockPlan:
        """Return the block called `name`.

        Raises:
            KeyError: The plan has no such block.
        """
        for entry in self.blocks:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def __repr__(self) -> str:
        policies = Counter(str(block.policy) for block in self.blocks)
        blocks = ", ".join(f"{count} {policy}" for policy, count in policies.items()) or "none"
        return (
            f"Plan({len(self.chunks)} chunks, {self.num_offloaded_chunks} of them streamed through "
            f"{self.num_chunk_buffers} buffers; blocks: {blocks}; {short_bytes(self.memory.total)} on the device)"
        )

    def __str__(self) -> str:
        return str(self.explain())

    def explain(self, budget: int | None = None, sentences: Sequence[str] = ()) -> Explanation:
        """Return the plan as tables, for `print` or rich; see `lightning_protrain.planner.explain`."""
        return explain(self, budget, sentences)

    def plot(self, ax: Any | None = None) -> tuple[Any, Any]:
        """Draw the placement with matplotlib, and return the figure and its axes; see `Prediction.plot`."""
        return plot_units(unit_rows(self), ax)

    def to_json(self) -> str:
        """Return the plan as JSON text that `from_json` reads back to an equal plan."""
        chunks = [chunk._asdict() for chunk in self.chunks]
        return json.dumps({"format": FORMAT, **asdict(replace(self, chunks=())), "chunks": chunks}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse a plan, or the only plan in a file of `lightning-protrain plan --json`.

        Raises:
            ValueError: The text is no plan, has several plans, or has another format.
        """
        try:
            content = only_plan(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"The plan is not valid JSON: {error}. Write one with `Plan.save(path)`.") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            its_format = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(
                f"The plan has format {its_format!r}, this version reads format {FORMAT}. Make the plan again."
            )
        del content["format"]
        prediction = content.get("prediction")
        plan: Plan = read(cls, "plan", content if prediction is None else {**content, "prediction": None})
        for index, chunk in enumerate(plan.chunks):
            if not chunk.parameters:
                raise ValueError(f"The plan's chunks[{index}].parameters is empty. Make the plan again.")
        return plan if prediction is None else replace(plan, prediction=Prediction.from_dict(prediction))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON to `path`."""
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read the plan at `path`.

        Raises:
            ValueError: The file does not exist, or is no plan.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise ValueError(f'No plan at {path}. Give plan="auto", "resident", "offload", a Plan, or the path of one.')
        return cls.from_json(path.read_text(encoding="utf-8"))


def chunk_offsets(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the offsets of tensors of `sizes` bytes in a chunk, aligned to `ALIGNMENT`, and the size of the chunk."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), end


def gathers_gradients(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> list[bool]:
    """Return for each chunk whether its gradients are copied to the host together: several small adapter gradients.

    Args:
        layout: The model.
        chunks: All its chunks.
    """
    key = "gathered", *[(chunk.unit, chunk.trainable, chunk.parameters) for chunk in chunks]
    if key not in layout.known:
        frozen = {chunk.unit for chunk in chunks if not chunk.trainable}
        layout.known[key] = [
            chunk.trainable
            and chunk.unit in frozen
            and len(chunk.parameters) > 1
            and all(layout.by_name[fqn].streamed_nbytes <= SMALL_GRADIENT for fqn in chunk.parameters)
            for chunk in chunks
        ]
    gathers: list[bool] = layout.known[key]
    return gathers


def unit_bytes(chunks: Iterable[ChunkPlan]) -> list[int]:
    """Return the total bytes of each unit's chunks, for units that have chunks."""
    totals: dict[str, int] = {}
    for chunk in chunks:
        totals[chunk.unit] = totals.get(chunk.unit, 0) + chunk.nbytes
    return list(totals.values())


def check_plan(plan: Plan, layout: ModelLayout, low_dtype: str | None = None) -> None:
    """Refuse a plan that was made for another model, or that cannot run.

    Args:
        plan: The plan, made here or read from a file.
        layout: The model.
        low_dtype: Dtype in which autocast computes, without the `torch.` prefix; None without autocast.

    Raises:
        ValueError: The plan and the model have different parameters or blocks. Or a parameter differs in shape, dtype
            or `requires_grad`. Or a chunk has a wrong size, unit or streamed dtype. Or `num_chunk_buffers` is out of
            range. Or `swap_bytes` of a block contradicts its policy.
    """
    infos = {info.fqn: info for info in layout.parameters}
    placed = [fqn for chunk in plan.chunks for fqn in chunk.parameters]
    _check_names("parameters", placed, list(infos))
    _check_names("shapes of parameters", list(plan.shapes), list(infos))
    _check_names("blocks", [block.name for block in plan.blocks], [unit.name for unit in layout.blocks])
    owners = {unit.name: frozenset(unit.parameters) for unit in layout.units}
    for chunk in plan.chunks:
        if chunk.unit not in owners:
            raise ValueError(f"The plan has a chunk for {chunk.unit!r}, which is no unit of this model. {_REMEDY}")
        for fqn in chunk.parameters:
            planned, present = _state(plan.shapes[fqn], chunk), _state(infos[fqn].shape, infos[fqn])
            if planned != present:
                other_dtype = chunk.dtype != infos[fqn].dtype and plan.shapes[fqn] == infos[fqn].shape
                raise ValueError(
                    f"The plan has {fqn!r} as {planned}, the model as {present}. "
                    f"{_DTYPE_REMEDY if other_dtype else _REMEDY}"
                )
            if fqn not in owners[chunk.unit]:
                raise ValueError(
                    f"The plan puts {fqn!r} into a chunk of {chunk.unit!r}, which does not use it. {_REMEDY}"
                )
        if chunk.streamed_dtype is not None:
            _check_streamed(chunk, low_dtype)
        whole = chunk.streamed_dtype is None
        _, nbytes = chunk_offsets([infos[fqn].nbytes if whole else 2 * infos[fqn].numel for fqn in chunk.parameters])
        if chunk.nbytes != nbytes:
            raise ValueError(
                f"The plan gives the chunk of {chunk.parameters[0]!r} {format_bytes(chunk.nbytes)}, "
                f"but it has {format_bytes(nbytes)}. {_REMEDY}"
            )
    if plan.num_chunk_buffers < 0 or (plan.num_offloaded_chunks and not plan.num_chunk_buffers):
        raise ValueError(
            f"The plan has {plural(plan.num_offloaded_chunks, 'offloaded chunk')}, but "
            f"num_chunk_buffers={plan.num_chunk_buffers}. Give at least one."
        )
    for block in plan.blocks:
        _check_swap(block)


def _check_streamed(chunk: ChunkPlan, low_dtype: str | None) -> None:
    if chunk.resident or chunk.dtype != "float32" or chunk.streamed_dtype != low_dtype:
        raise ValueError(
            f"The plan streams the chunk of {chunk.parameters[0]!r} ({chunk.dtype}) in {chunk.streamed_dtype}, but the "
            f"Trainer's precision computes in {low_dtype or 'the dtype of the weights'}. Make the plan again with this "
            "precision."
        )


def _check_swap(block: BlockPlan) -> None:
    swaps = block.policy is BlockPolicy.SWAP
    if block.swap_bytes < 0 or (swaps and not block.swap_bytes):
        raise ValueError(
            f"The plan gives block {block.name!r} ({block.policy}) swap_bytes={block.swap_bytes}: give the host bytes "
            "that its activations take, or another policy."
        )
    if block.swap_bytes and block.policy in (BlockPolicy.KEEP, BlockPolicy.SELECTIVE):
        raise ValueError(
            f"The plan gives block {block.name!r} ({block.policy}) swap_bytes={block.swap_bytes}, but nothing of it is "
            "swapped. Give 0."
        )
    if block.swap_bytes and not block.name:
        raise ValueError(
            "The plan swaps the whole model, which is one block: its activations would come back all at once. Name "
            "blocks with `blocks`."
        )


_REMEDY = "It was made for another model: make the plan again, or load that model."
_DTYPE_REMEDY = (
    "Weights of another dtype need another plan: make it again, or give the Trainer the precision that the plan was "
    'made with ("32-true" or a mixed one for float32, "bf16-true" for bfloat16, "16-true" for float16).'
)


def _state(shape: tuple[int, ...], source: ChunkPlan | ParameterInfo) -> str:
    return f"{'trainable' if source.trainable else 'frozen'} {source.dtype}{list(shape)}"


def _check_names(kind: str, planned: Sequence[str], present: Sequence[str]) -> None:
    """Check that both lists contain the same names, each once."""
    doubled = sorted(name for name, count in Counter(planned).items() if count > 1)
    unknown = sorted(set(planned) - set(present))
    missing = sorted(set(present) - set(planned))
    for problem, names in (("names twice", doubled), ("names unknown", unknown), ("lacks", missing)):
        if names:
            shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ValueError(f"The plan {problem} {kind}: {shown}. {_REMEDY}")


def only_plan(content: object) -> object:
    """Return the only plan in a file of several names; return other content unchanged.

    Args:
        content: Content of a JSON file.

    Raises:
        ValueError: The file has several plans, or none.
    """
    if not isinstance(content, dict) or not content:
        return content
    if not all(plan is None or (isinstance(plan, dict) and "format" in plan) for plan in content.values()):
        return content
    plans = {name: plan for name, plan in content.items() if plan is not None}
    if not plans:
        raise ValueError(f"There is no plan that fits {_shown(content)}: the file has null in its place.")
    if len(plans) > 1:
        raise ValueError(
            f"The file has plans for several machines: {_shown(plans)}. Write one with the machine's `--gpu` alone, or "
            "without `--gpu` for this one, or save one of them as a file of its own."
        )
    return next(iter(plans.values()))


def _shown(plans: dict[str, object]) -> str:
    return ", ".join(map(repr, plans))
