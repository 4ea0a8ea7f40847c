"""Callbacks: evaluation and samples during training, export, and checkpoints."""
