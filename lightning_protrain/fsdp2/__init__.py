"""Sharding with FSDP2: a strategy that chooses units, mesh and recomputed blocks."""
