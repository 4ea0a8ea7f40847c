"""Other workloads that a user could train if no plan fits, and the same workload under FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from lightning_protrain.config import plural
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.fsdp_memory import (
    SHARE_OF_DEVICE,
    FSDPMemory,
    FSDPProblem,
    FSDPRanks,
    FSDPTooLarge,
    fit_fsdp,
    fsdp_seconds,
)
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import RankLayout
from lightning_protrain.planner.problem import Workload
from lightning_protrain.profiler.records import HardwareProfile, ParameterInfo

# Bytes of two moments of bitsandbytes' 8-bit optimizers for an element, with a scale for each 256 elements. Parameters
# of fewer elements than SMALL have states in float32.
EIGHT_BIT_BYTES, FLOAT_BYTES, SMALL = 2 + 8 / 256, 8, 4096
# Numbers of devices to try if one is too small.
MORE_DEVICES = (2, 4, 8)
# The optimizer with float32 masters beside bfloat16 weights, and its bytes of states by the format of the moments.
SPLIT = "SplitAdamW"
SPLIT_BYTES = {"float32": 2 + 8.0, "bfloat16": 2 + 4.0, "8bit": 2 + EIGHT_BIT_BYTES}
# Bytes of states from which on 8 bits are far less: one moment of 32 bits.
_LARGE_STATES = 4


def with_8_bit_states(workload: Workload) -> Workload | None:
    """Return the workload with an optimizer of two moments in 8 bits; None if its states are small, or split, now."""
    trained = [info for info in workload.layout.parameters if info.trainable]
    numel = sum(info.numel for info in trained)
    if workload.state_bytes < _LARGE_STATES or not numel or _is_split(workload):
        return None
    nbytes = sum((FLOAT_BYTES if info.numel < SMALL else EIGHT_BIT_BYTES) * info.numel for info in trained)
    return replace(workload, state_bytes=nbytes / numel)


def with_passing_gradients(workload: Workload) -> Workload | None:
    """Return the workload without clipping by norm; None if gradients would not pass even then."""
    if not workload.clipping_keeps or workload.training is None:
        return None
    training = replace(workload.training, overlap="backward", clips=False)
    return replace(workload, layout=replace(workload.layout, passes_gradients=True), training=training)


def in_16_bits(workload: Workload) -> Workload | None:
    """Return the workload with weights, gradients and states in bfloat16; None if no trained weight is in float32.

    Activations stay as they are: with weights in bfloat16 they are not larger. States of other optimizers than
    PyTorch's may be in float32 for any weight.
    """
    layout, halves = workload.layout, workload.state_bytes >= _LARGE_STATES and workload.has_plain_optimizers
    if workload.low_dtype == "float16" or not any(it.dtype == "float32" and it.trainable for it in layout.parameters):
        return None

    def halved(info: ParameterInfo) -> ParameterInfo:
        info = replace(info, streamed_dtype=None)
        return replace(info, dtype="bfloat16", nbytes=2 * info.numel) if info.dtype == "float32" else info

    return replace(
        workload,
        layout=replace(layout, parameters=tuple(map(halved, layout.parameters)), lends_copies=False),
        streamed=frozenset(),
        low_dtype=None,
        state_bytes=workload.state_bytes / 2 if halves else workload.state_bytes,
    )


def with_split_masters(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the workload with bfloat16 weights and SplitAdamW, by the format of the moments, the widest first."""
    is_split = _is_split(workload)
    low = workload if is_split else in_16_bits(workload)
    if low is not None:
        for moments, nbytes in SPLIT_BYTES.items():
            if not is_split or nbytes < workload.state_bytes:
                yield moments, replace(low, state_bytes=nbytes)


def _is_split(workload: Workload) -> bool:
    return any(name.rpartition(".")[2] == SPLIT for name in workload.optimizers)


def on_more_devices(workload: Workload, hardware: HardwareProfile, device_bytes: int | None) -> Iterator[str]:
    """Yield a sentence on the least number of devices of a node on which a workload fits, see `FSDP2`."""
    for number in MORE_DEVICES:
        if FSDP2(workload, RankLayout(ranks_per_node=number), hardware, device_bytes).memory is not None:
            yield f'It fits on {number} such devices with strategy="protrain_fsdp2".'
            return


def on_one_device(ranks: RankLayout, room: int) -> str:
    """Return a sentence that says that one device has a plan, though several have none.

    Args:
        ranks: The ranks that have no plan.
        room: Device memory for gradients that ranks sum, bytes.
    """
    copies = f", and {ranks.copies} copies of the host's part" if ranks.copies > 1 else ""
    return f"One device alone has a plan: several need up to {short_bytes(room)} of each for gradients{copies}."


class FSDP2:
    """Training of a workload under FSDP2, without offload.

    Args:
        workload: The model and its training, with the profile of a step.
        ranks: The ranks that train together.
        hardware: Rates and free memory of each device, and free memory of its host.
        device_bytes: Maximum memory of each device; None: most of what is free.

    Attributes:
        memory: Its memory; None if it does not fit, or FSDP2 does not train it.
    """

    def __init__(
        self, workload: Workload, ranks: RankLayout, hardware: HardwareProfile, device_bytes: int | None
    ) -> None:
        self._hardware, self._accumulate, self._num_ranks = hardware, workload.accumulate, ranks.num_ranks
        self._problem = FSDPProblem(
            workload.layout,
            FSDPRanks(ranks.num_nodes, ranks.ranks_per_node),
            workload.state_bytes,
            workload.profile,
            workload.low_dtype,
            accumulates=workload.accumulate > 1,
            foreach=workload.foreach,
            on_gpu=True,
            alpha=workload.alpha,
            loads_once=True,
        )
        self.memory: FSDPMemory | None = None
        # FSDP2 trains neither float16 nor 4-bit weights, and shards no scalar. Ranks on CPUs have one memory.
        refused = any(info.dtype == "uint8" or not info.shape for info in workload.layout.parameters)
        trains = workload.low_dtype != "float16" and workload.has_plain_optimizers and not refused
        if trains and hardware.asynchronous:
            device_bytes = device_bytes or int(SHARE_OF_DEVICE * hardware.device_bytes)
            with suppress(FSDPTooLarge):
                self.memory = fit_fsdp(self._problem, device_bytes, hardware.host_bytes)

    def describe(self, network: Network | None) -> str:
        """Return a sentence on this training, which fits.

        Args:
            network: Network over which ranks sum gradients; None: unknown.
        """
        memory = self.memory
        assert memory is not None
        seconds = None
        if network is not None:
            seconds = fsdp_seconds(self._problem, memory, self._hardware, network.everyone, self._accumulate)
        step = "" if seconds is None else f", a step of {short_seconds(seconds)}"
        return (
            f'strategy="protrain_fsdp2" fits the {self._num_ranks} devices without offload: '
            f"{short_bytes(memory.device_bytes)} of each, {len(memory.checkpointed)} of "
            f"{plural(memory.num_blocks, 'block')} recomputed{step} (predicted)."
        )
