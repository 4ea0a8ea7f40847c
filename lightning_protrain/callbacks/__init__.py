"""Callbacks: the plan and its figures, evaluation and samples during training, and checkpoints."""
