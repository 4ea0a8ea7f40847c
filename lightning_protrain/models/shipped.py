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
        stated: Number of parameters as the maker states it, such as "30.5B".
        states_text: True if the maker states the number of the language model alone, False if of the whole model.
        source: URL of the page that the config was taken from.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int
    stated: str
    states_text: bool
    source: str

    @property
    def text(self) -> Mapping[str, Any]:
        """Keys of the config of the language model."""
        return self.config.get("text_config", self.config)

    @property
    def positions(self) -> int:
        """Maximum number of tokens of a sequence."""
        return int(self.text.get("max_position_embeddings") or self.text["n_positions"])


@cache
def published() -> Mapping[str, Published]:
    """Return the models whose configs come with the package, by name."""
    content = yaml.safe_load(SIZES.read_text(encoding="utf-8"))
    models: dict[str, Published] = {}
    for group in content["groups"]:
        columns, source = group.get("columns", content["columns"]), group.get("source", content["source"])
        for names, (parameters, stated, *row) in group["models"].items():
            further = row.pop() if isinstance(row[-1], dict) else {}
            config = _config(group["shared"], {**dict(zip(columns, row, strict=True)), **further})
            for name in _spelt_out(names):
                assert name not in models, f"{name} is listed twice."
                of_text = group.get("stated") == "language model"
                models[name] = Published(name, config, parameters, stated, of_text, source.format(name=name))
    return models


def _config(shared: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model from the settings of its group and its own."""
    if "text_config" not in shared:
        return {**shared, **settings}
    text = {key: value for key, value in settings.items() if key not in shared}
    parts = {"text_config": text, **{key: value for key, value in settings.items() if key in shared}}
    return {
        **shared,
        **{key: {**shared[key], **part} if isinstance(part, dict) else part for key, part in parts.items()},
    }


def _spelt_out(names: str) -> list[str]:
    """Return the names that `names` matches: one for each alternative in braces."""
    before, brace, rest = names.partition("{")
    inside, _, after = rest.partition("}")
    return [f"{before}{part}{after}" for part in inside.split(",")] if brace else [names]
