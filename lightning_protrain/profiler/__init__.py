"""Measures, never decides: what a model is made of."""
