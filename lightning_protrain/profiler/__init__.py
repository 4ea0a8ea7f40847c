"""Measurements of models and hardware; the planner decides what follows from them."""
