"""A strategy that shards with FSDP2, and chooses units, mesh and checkpointed blocks."""
