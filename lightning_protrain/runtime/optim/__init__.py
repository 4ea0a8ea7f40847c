"""The optimizer step of offloaded chunks, on the host."""
