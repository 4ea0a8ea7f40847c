"""Profiles of models and hardware, the input of the planner."""
