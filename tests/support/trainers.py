"""What keeps a Trainer of a test from writing: logs, bars, tables, and unless a test is about them, checkpoints."""

from __future__ import annotations

SILENT = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
QUIET = {**SILENT, "enable_checkpointing": False}
