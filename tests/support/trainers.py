"""Trainer arguments that switch off logs, progress bars, tables and, by default, checkpoints."""

from __future__ import annotations

SILENT = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
QUIET = {**SILENT, "enable_checkpointing": False}
