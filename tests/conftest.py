"""Fixtures around every test: an empty working folder, a fixed seed, and checks that nothing is left behind."""

from __future__ import annotations

import os

# Read at import by the libraries below. One thread: reductions in another order are not bitwise equal, and Lightning's
# launchers set the number of threads where the variable is unset.
os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})

import gc

gc.disable()  # until all tests are collected: nothing that an import makes is garbage

import signal
import threading
import zlib
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from lightning_utilities.core.inheritance import get_all_subclasses
from torch.utils.data import BatchSampler, DataLoader

from tests.support.torchvision_schemas import declare_missing

declare_missing()  # before Lightning imports torchvision

import lightning_protrain  # noqa: F401  registers the strategies before any test looks at the registry
from tests.support import police
from tests.support.sampling import sample

# How long an example takes says something of the machine, and of nothing that is tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell starts a background job with SIGINT ignored, `nohup` ignores SIGHUP, and children inherit that: tests of
# Ctrl-C and of closed terminals need the defaults.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Test files that need one of these are skipped where it is not installed; the package trains without them.
OPTIONAL = ("av", "bitsandbytes", "datasets", "jsonargparse", "matplotlib", "platformdirs", "pyte", "tensorboard")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Parity is bitwise only with one order of summation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, as under torchrun, and check that a test has given back threads that it lent to a step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment after each test file, because a shared fixture may have set a seed."""
    before = dict(os.environ)
    yield
    police.restore_environment(before)
    _spare_collections()


@pytest.fixture(autouse=True)
def _police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind, and restore the state for the next test."""
    declared = {name for mark in request.node.iter_markers("leaves") for name in mark.args}
    state = police.read_all()
    environment = dict(os.environ)
    threads = threading.enumerate()
    processes = police.child_processes()
    files = police.files_below(ROOT)
    yield
    findings = [
        *police.restore_changed(state, declared),
        *police.restore_environment(environment, declared),
        *police.leaked_threads(threads),
        *police.leaked_processes(processes),
        *police.new_files(ROOT, files),
    ]
    if findings:
        pytest.fail("The test left behind:\n  " + "\n  ".join(findings), pytrace=False)


_DUNDERS = ("__init__", "__setattr__", "__delattr__")
_PLAIN = {(kind, name): getattr(kind, name) for kind in (DataLoader, BatchSampler) for name in _DUNDERS}


@pytest.fixture(autouse=True)
def _plain_loaders() -> Iterator[None]:
    """Gives loaders their methods back: Lightning leaves them patched where a hook that makes a loader raises."""
    yield
    for base in (DataLoader, BatchSampler):
        for kind in (base, *get_all_subclasses(base)):
            for name in _DUNDERS:
                if (old := vars(kind).get(f"__old{name}")) is not None:
                    setattr(kind, name, _PLAIN.get((kind, name), old))
                    delattr(kind, f"__old{name}")


@pytest.fixture(autouse=True)
def _empty_folder(_police: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own empty folder, with the same seed."""
    monkeypatch.chdir(tmp_path)
    # `torch.manual_seed` also seeds devices that are not there, once they are: it keeps a stack for each.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the metadata of the package: a copy that runs from a folder has none."""
    real = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name.replace("_", "-") == "lightning-protrain":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that run what `sample` leaves out, or a third of the tests."""
    parser.addoption(
        "--every-case", action="store_true", help="run all cases, also those that marks `sample` leave out"
    )
    parser.addoption("--third", type=int, help="run this third of the tests: 0, 1 or 2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases beyond samples and thirds, and skips tests that need a CUDA device where there is none."""
    third, tests = config.getoption("third"), dict[tuple[str, bool], list[pytest.Item]]()
    for item in items:
        tests.setdefault((item.nodeid.partition("[")[0], item.get_closest_marker("slow") is None), []).append(item)
    chosen = [cases for (name, _), cases in tests.items() if third is None or zlib.crc32(name.encode()) % 3 == third]
    kept = {item for cases in chosen for item in (cases if config.getoption("every_case") else sample(cases))}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Looks for garbage from now on."""
    _spare_collections()
    gc.enable()


def _spare_collections() -> None:
    """Exclude imported objects from garbage collection, which takes a second with them and a millisecond without."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skips a test file that imports an optional package which is missing."""
    report = yield
    if report.failed and isinstance(collector, pytest.Module):
        for name in OPTIONAL:
            if f"ModuleNotFoundError: No module named '{name}'" in str(report.longrepr):
                report.outcome = "skipped"
                report.longrepr = (str(collector.path), 1, f"Skipped: needs {name}, which is not installed")
    return report
