"""The report of `lightning-protrain env`."""

from __future__ import annotations

import re
import resource
from importlib.metadata import version

import pytest
import torch

from lightning_protrain.commands import environment
from lightning_protrain.commands.file_commands import file_command


def test_it_names_versions_machine_limits_and_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(environment, "group_free_bytes", lambda: 3 << 30)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64 << 20, 64 << 20))
    assert file_command(["env"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    text = re.sub(r"\s+", " ", said)
    for part in (
        f"lightning-protrain: {version('lightning-protrain')}, Python 3.",
        f"torch {version('torch')}",
        f"transformers {version('transformers')}",
        "control groups allow 3.0 GiB",
        "page-locked memory: limit of 64.0 MiB",
        "NCCL_DEBUG=INFO",
        "HF_HUB_OFFLINE=1",
        "OMP_NUM_THREADS=1",
        "cores may be used",
    ):
        assert part in text, part
    assert "secret" not in text
    assert "hypothesis" not in text  # only the tests need it


def test_gpus_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("GPU: none is visible" in environment.describe()) == (not torch.cuda.is_available())
    monkeypatch.setattr(environment, "describe_gpus", lambda: ["NVIDIA A", "NVIDIA B"])
    assert re.findall(r"^GPU (\d): NVIDIA (.)$", environment.describe(), re.MULTILINE) == [("0", "A"), ("1", "B")]


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_packages", lambda: ["torch", "no-such-package"])
    assert "no-such-package (not installed)" in environment.describe()
