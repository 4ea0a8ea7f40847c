"""Callbacks: what the plan is, what it moves, and what the model has learned."""
