"""Measurements of models and hardware; decisions are the planner's."""
