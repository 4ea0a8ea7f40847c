"""What has been moved between host and device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TransferCounters:
    """What has been moved since the run began; all in bytes unless said otherwise.

    Attributes:
        uploaded_bytes: Host to device, parameters.
        downloaded_bytes: Device to host, gradients and weights changed in a forward.
        uploads: Number of chunk uploads.
        prefetch_hits: Number of uploads that had been issued before the chunk was asked for.
        prefetch_misses: Number of uploads issued only when the chunk was needed at once.
        live_bytes: Offloaded chunks now on the device.
        peak_live_bytes: The most there ever were.
        swapped_out_bytes: Device to host, activations.
        swapped_in_bytes: Host to device, the same.
        waited_seconds: The host has waited for gradients and swapped activations on their way to it.
        collectives: Number of collectives among ranks, those of DDP not counted.
        communicated_bytes: What this rank has given to them.
    """

    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    uploads: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    live_bytes: int = 0
    peak_live_bytes: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    waited_seconds: float = 0.0
    collectives: int = 0
    communicated_bytes: int = 0

    def add_live(self, nbytes: int) -> None:
        """Counts `nbytes` more (or fewer, if negative) on the device."""
        self.live_bytes += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
