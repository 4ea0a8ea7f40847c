"""Processors: built from their real classes, with the packages that these ask for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_protrain.data.batches.processor import EXTRAS, load_processor
from tests.data import processors
from tests.support.torchvision_schemas import declare_missing

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import importlib.metadata, importlib.util, sys
from importlib.abc import MetaPathFinder

hidden, folder = sys.argv[1:]

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def find_spec(name, *rest, real=importlib.util.find_spec):
    return None if name == hidden else real(name, *rest)

def from_name(name, real=importlib.metadata.Distribution.from_name):
    if name == hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

sys.meta_path.insert(0, Hidden())
importlib.metadata.Distribution.from_name = from_name
importlib.util.find_spec = find_spec

from lightning_protrain.data.batches.processor import load_processor
try:
    print("built", type(load_processor(folder)).__name__)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("name", processors.MADE)
def test_a_processor_is_built_from_its_class(tmp_path: Path, name: str) -> None:
    made = load_processor(processors.save(name, tmp_path))
    assert type(made) is type(processors.MADE[name]())


@pytest.mark.parametrize(("name", "package"), [("qwen2_vl", "torchvision"), ("smolvlm", "num2words")])
def test_a_missing_package_is_one_line_that_names_its_extra(tmp_path: Path, name: str, package: str) -> None:
    folder = processors.save(name, tmp_path)
    command = [sys.executable, "-c", LOAD, package, folder]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == (
        f"The processor of {folder!r} cannot be built: {package} is not installed. "
        'Run: pip install "lightning-protrain[vision]"\n'
    ), result.stderr


def test_the_extras_install_what_the_messages_name() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert {Requirement(text).name for text in given[extra]} == set(packages)
        assert all(find_spec(package) for package in packages), "the tests need every extra"


def test_torchvision_for_another_torch_is_made_importable(tmp_path: Path) -> None:
    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    copy = tmp_path / "torchvision"
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "models"))
    file = copy / "extension.py"
    file.write_text(file.read_text().partition("\n\n# Written by the tests")[0])
    (copy / "models.py").touch()
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch, torchvision\n"
        f"assert torchvision.__file__.startswith({str(tmp_path)!r})\n"
        "from torchvision.transforms.v2 import functional\n"
        "print(tuple(functional.resize(torch.rand(3, 8, 8), [4, 4], antialias=True).shape))\n"
    )
    said = []
    for changed in (True, False):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        said.append(run.stdout or run.stderr.splitlines()[-1])
        assert declare_missing(copy) is changed
    assert said == ["RuntimeError: operator torchvision::nms does not exist", "(3, 4, 4)\n"]
