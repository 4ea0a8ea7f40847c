"""Configs of published models that come with the package, in published.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SIZES = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Published:
    """A published model whose config comes with the package.

    Attributes:
        name: Name on the Hugging Face Hub.
        config: Keys of a config of transformers.
        parameters: Number of parameters.
        source: URL of the page that the config was taken from.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int
    source: str

    @property
    def positions(self) -> int:
        """Maximum number of tokens of a sequence."""
        return int(self.config.get("max_position_embeddings") or self.config["n_positions"])


@cache
def published() -> Mapping[str, Published]:
    """Return the models whose configs come with the package, by name."""
    content = yaml.safe_load(SIZES.read_text(encoding="utf-8"))
    found = {}
    for group in content["groups"]:
        columns, source = group.get("columns", content["columns"]), group.get("source", content["source"])
        for name, (parameters, *row) in group["models"].items():
            further = row.pop() if isinstance(row[-1], dict) else {}
            config = {**group["shared"], **dict(zip(columns, row, strict=True)), **further}
            for ending in ("", *group.get("endings", ())):
                found[name + ending] = Published(name + ending, config, parameters, source)
    return found
