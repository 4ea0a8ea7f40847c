"""Moves bytes, decides nothing: runs a model as its Plan says."""
