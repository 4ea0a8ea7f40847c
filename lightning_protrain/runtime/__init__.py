"""Runs a model as its Plan says: moves chunks, gradients and activations, and makes no decisions of its own."""
