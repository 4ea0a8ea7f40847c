"""Checkpoints as directories: how they are written, found, checked and removed. Files and dicts only."""
