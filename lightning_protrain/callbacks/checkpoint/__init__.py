"""Checkpoints of a Trainer as folders: when they are saved, and how a run resumes from them."""
