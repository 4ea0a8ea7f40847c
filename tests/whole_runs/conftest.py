"""The files that configs and pages name, for runs beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_protrain.data import datamodule
from tests.whole_runs import support


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    support.make_model(folder)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A home folder, which keeps the measured hardware from run to run."""
    return str(tmp_path_factory.mktemp("home"))


@pytest.fixture
def _furnished(model: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    support.furnish(model)
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(datamodule, "CACHE_DIR", Path(home, "tokenizers"))
