"""Callbacks: what the plan is and moves, what the model has learned, and checkpoints of it."""
