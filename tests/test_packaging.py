"""A fresh clone: metadata, pinned versions, commands of the README, and an import without side effects."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_protrain
import lightning_protrain_command
from lightning_protrain.commands import environment
from lightning_protrain.distributed import rank_sync

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
PUBLIC = {
    "BlockPolicy",
    "CausalLMModule",
    "ChatDataModule",
    "Evaluator",
    "InitialValidation",
    "Plan",
    "PlanMonitor",
    "PositionScores",
    "PreferenceModule",
    "ProTrainCheckpoint",
    "ProTrainCheckpointIO",
    "ProTrainFSDP2Strategy",
    "ProTrainPrecision",
    "ProTrainStrategy",
    "SampleCompletion",
    "SavePretrained",
    "SplitAdamW",
    "plan",
}
TEXT_SUFFIXES = {".cfg", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}


def _command(mark: str) -> str:
    """The one line of the first bash block after `<!-- mark -->` in the README."""
    found = re.search(rf"^<!-- {mark} -->\n```bash\n(.+)\n```$", README, re.MULTILINE)
    assert found, f"README.md has no one-line bash block after <!-- {mark} -->"
    return found.group(1)


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def _requirements() -> list[Requirement]:
    extras = [text for extra in EXTRAS.values() for text in extra]
    listed = [Requirement(text) for text in [*PROJECT["dependencies"], *extras]]
    return [requirement for requirement in listed if requirement.name != PROJECT["name"]]


@pytest.mark.parametrize("requirement", _requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    pin = _pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin), f"{requirement} does not allow the pinned {pin}"
    assert "+" not in pin, "a local version is on no index"


def test_pins_are_what_the_tests_run_with() -> None:
    installed = {canonicalize_name(found.name): found.version.partition("+")[0] for found in metadata.distributions()}
    other = {name: (pin, installed[name]) for name, pin in _pins().items() if installed.get(name, pin) != pin}
    assert other == {}


def test_the_pins_leave_out_the_compromised_releases() -> None:
    (lightning,) = (requirement for requirement in _requirements() if requirement.name == "lightning")
    assert not any(lightning.specifier.contains(version) for version in ("2.6.2", "2.6.3"))
    assert lightning.specifier.contains(_pins()["lightning"])


def test_readme_commands_install_with_the_pins() -> None:
    install = "python -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e "
    assert _command("quickstart").startswith(install + ". && lightning-protrain fit --config ")
    assert _command("tests") == install + '".[dev]" && pytest -n logical --dist worksteal'


def test_the_readme_command_names_a_config_that_exists() -> None:
    (path,) = re.findall(r"--config (\S+)", _command("quickstart"))
    assert isinstance(yaml.safe_load((ROOT / path).read_text(encoding="utf-8")), dict)


def test_ci_runs_the_readme_commands_in_their_order_and_what_is_documented_between_them() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^block\(\) \{.+?^\}$", script, re.DOTALL | re.MULTILINE)
    for mark in ("quickstart", "tests"):
        command = ["bash", "-euo", "pipefail", "-c", f"{function}\nblock {mark}"]
        extracted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert extracted.stdout.strip() == _command(mark)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    steps = (
        '-c "$quickstart"',
        ".venv/bin/python -m tests.documented",
        '-c "$tests"',
        "pytest -n logical --dist worksteal -m slow",
        "mkdocs build --strict",
        "ruff check",
        "ruff format --check",
        "mypy",
        "bash .ci/lower",
    )
    places = [script.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


def test_public_names() -> None:
    assert set(lightning_protrain.__all__) == PUBLIC | {"__version__"}
    assert all(hasattr(lightning_protrain, name) for name in PUBLIC)
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_protrain.__version__)
    assert lightning_protrain.__version__ == metadata.version("lightning-protrain")


@pytest.mark.usefixtures("not_installed")
def test_the_version_needs_no_metadata(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [PROJECT["name"], "--version"])
    lightning_protrain_command.main()
    assert capsys.readouterr().out == f"{PROJECT['name']} {lightning_protrain.__version__}\n"
    said = environment.describe()
    assert said.startswith(f"{PROJECT['name']}: {lightning_protrain.__version__}, Python 3.")
    assert f"packages: torch {metadata.version('torch')}, " in said
    assert rank_sync._versions.__wrapped__().endswith(f", lightning_protrain {lightning_protrain.__version__}")


def test_importing_registers_the_strategies_and_again_changes_nothing() -> None:
    before = dict(StrategyRegistry)
    assert {"protrain", "protrain_spawn"} <= before.keys()
    importlib.reload(lightning_protrain)
    assert dict(StrategyRegistry) == before


def test_every_module_imports() -> None:
    modules = [info.name for info in pkgutil.walk_packages(lightning_protrain.__path__, "lightning_protrain.")]
    assert len(modules) > 10
    for name in modules:
        assert importlib.import_module(name).__name__ == name


@pytest.mark.slow
def test_every_module_imports_without_what_only_posix_has() -> None:
    modules = [info.name for info in pkgutil.walk_packages(lightning_protrain.__path__, "lightning_protrain.")]
    program = (
        "import os, signal, sys\n"
        "import accelerate, datasets, lightning.pytorch.cli, peft, torch, torchmetrics, transformers\n"
        "for name in ('fcntl', 'grp', 'pwd', 'resource', 'termios'):\n"
        "    sys.modules[name] = None\n"
        "for name in ('SIGHUP', 'SIGKILL', 'SIGUSR1', 'SIGUSR2', 'pthread_sigmask', 'sigwaitinfo'):\n"
        "    delattr(signal, name)\n"
        "for name in ('O_CLOEXEC', 'O_DIRECTORY', 'O_NOFOLLOW', 'O_NONBLOCK', 'fork', 'getuid', 'sched_getaffinity',\n"
        "             'posix_fadvise', 'posix_fallocate', 'sysconf', 'uname'):\n"
        "    delattr(os, name)\n"
        "import importlib\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "from lightning_protrain.commands.environment import describe\n"
        "assert 'page-locked memory: the limit is not known' in describe()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """Return variables with which `import torchvision` finds one of another build."""
    package, metadata_folder = tmp_path / "torchvision", tmp_path / "torchvision-0.28.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (package / "version.py").write_text("__version__ = '0.28.0+cu130'\n")
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


@pytest.mark.slow
def test_a_torchvision_of_another_build_is_treated_as_absent(broken: dict[str, str]) -> None:
    program = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import lightning_protrain\n"
        "told = [str(each.message) for each in caught if 'torchvision' in str(each.message)]\n"
        "from lightning_protrain.data.extras import missing_package, optional\n"
        "from transformers.utils import is_torchvision_available\n"
        "assert not is_torchvision_available()\n"
        "module = lightning_protrain.CausalLMModule(config={'model_type': 'llama', 'num_hidden_layers': 1})\n"
        "print('\\n'.join(told), missing_package(ImportError('it needs the Torchvision library')), sep='\\n')\n"
        "try:\n"
        "    optional('torchvision')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=broken)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert len(said) == 3
    for line in said:
        assert f"torchvision 0.28.0+cu130 does not load beside torch {torch.__version__}" in line
        assert "operator torchvision::nms does not exist" in line
        assert (
            f'pip install --force-reinstall --no-deps "torchvision==0.{int(torch.__version__.split(".")[1]) + 15}.*"'
            in line
        )


@pytest.mark.slow
@pytest.mark.parametrize("broken_package", ["torchvision", "torch"])
def test_env_survives_what_does_not_load(broken_package: str, broken: dict[str, str], tmp_path: Path) -> None:
    if broken_package != "torchvision":
        (tmp_path / broken_package).mkdir()
        (tmp_path / broken_package / "__init__.py").write_text("raise OSError('libcudart.so.13: no such file')\n")
    command = [sys.executable, str(ROOT / "lightning_protrain_command.py"), "env"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=broken)
    assert ended.returncode == 0, ended.stderr
    shown = " ".join(ended.stdout.split())
    assert "lightning-protrain" in shown
    reasons = {
        "torch": "OSError: libcudart.so.13: no such file",
        "torchvision": "torchvision 0.28.0+cu130 does not load beside torch",
    }
    assert reasons[broken_package] in shown


@pytest.mark.slow
@pytest.mark.parametrize("module", ["lightning_protrain", "lightning_protrain.cli"])
def test_the_module_is_the_command(module: str) -> None:
    command = [sys.executable, "-m", module, "plan", "gpt2", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "--host-cores" in ended.stdout


def test_the_command_is_installed() -> None:
    (entry,) = (point for point in metadata.entry_points(group="console_scripts") if point.name == "lightning-protrain")
    assert entry.value == PROJECT["scripts"]["lightning-protrain"]
    assert callable(entry.load())


def test_the_help_imports_no_library() -> None:
    program = (
        "import sys, lightning_protrain_command\n"
        "sys.argv = ['lightning-protrain', '--help']\n"
        "lightning_protrain_command.main()\n"
        "assert not {'torch', 'lightning', 'numpy', 'lightning_protrain'} & set(sys.modules), 'imported'\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "fit" in result.stdout


def test_ctrl_c_while_libraries_are_imported_shows_no_traceback(tmp_path: Path) -> None:
    package = tmp_path / "torch" / "__init__.py"
    package.parent.mkdir()
    package.write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-c", "import lightning_protrain_command as it; it.main()", "inspect", "nowhere"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "importing\n"
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=30)
    assert run.returncode == 130
    assert said == ""


# What only data, models of transformers, adapters and the command line need.
HEAVY = ("bitsandbytes", "datasets", "jsonargparse", "peft", "platformdirs", "transformers")
BLOCK = f"""
import importlib.metadata, sys
from importlib.abc import MetaPathFinder

BLOCKED = {(*HEAVY, "accelerate", "huggingface_hub", "matplotlib", "PIL", "tokenizers", "torchvision")}

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def from_name(name, real=importlib.metadata.Distribution.from_name):
    if name in BLOCKED:  # torchmetrics asks for the version before it imports a package
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

sys.meta_path.insert(0, Blocked())
importlib.metadata.Distribution.from_name = from_name
"""
TRAIN = """
import lightning as L
import lightning_protrain
import torch
from lightning_protrain import ProTrainStrategy
from lightning_protrain.distributed import rank_sync
from torch import nn

class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def training_step(self, batch, index):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

def train(strategy):
    torch.manual_seed(0)
    model = Plain()
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(strategy=strategy, max_epochs=1, **options)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 8)))
    assert trainer.global_step == 4
    return torch.cat([each.detach().flatten() for each in model.parameters()])

weights = [train(each) for each in ("auto", "protrain", ProTrainStrategy(plan="offload"))]
assert all(torch.equal(weights[0], each) for each in weights)
assert "transformers (not installed)" in rank_sync._versions()  # ranks compare them
print("trained")
"""


@pytest.mark.slow
def test_a_plain_module_trains_without_the_packages_of_language_models() -> None:
    command = [sys.executable, "-c", BLOCK + TRAIN]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.stdout.endswith("trained\n"), result.stderr


@pytest.mark.slow
def test_importing_is_light_starts_no_device_and_needs_no_extra() -> None:
    program = (
        "import sys, torch\n"
        "threads = torch.get_num_threads()\n"
        "import lightning.pytorch\n"
        "before = set(sys.modules)\n"
        "import lightning_protrain\n"
        f"print(sorted({{name.partition('.')[0] for name in set(sys.modules) - before}} & set({HEAVY})))\n"
        f"print(sorted(set(sys.modules) & set({HEAVY}) - {{'transformers'}}))\n"  # torchmetrics imports it
        "sys.modules['datasets'] = sys.modules['bitsandbytes'] = sys.modules['tensorboard'] = None\n"
        # Names that are imported when they are asked for are listed.
        "assert set(lightning_protrain.__all__) <= set(dir(lightning_protrain))\n"
        "assert 'lightning_protrain.models.module' not in sys.modules\n"
        "from lightning_protrain import *\n"
        "from lightning_protrain.models import module\n"
        "assert CausalLMModule is lightning_protrain.CausalLMModule is module.CausalLMModule\n"
        "import lightning_protrain.cli\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert torch.get_num_threads() == threads\n"
        "lightning_protrain.Nothing\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "[]\n[]\n", result.stderr
    assert "AttributeError: module 'lightning_protrain' has no attribute 'Nothing'" in result.stderr


def _text_files() -> list[Path]:
    """Every text file of the repository that is no cache and no result of a run."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in TEXT_SUFFIXES and path.is_file()]


def test_no_file_names_a_path_of_one_machine() -> None:
    homes = re.compile(r"(?<![\w.])/(?:" + "|".join(["work", "root", "home", "tmp"]) + r")/[\w.]")
    files = _text_files()
    findings = [path.relative_to(ROOT).as_posix() for path in files if homes.search(path.read_text(encoding="utf-8"))]
    assert len(files) > 20
    assert findings == []
    assert homes.search("in " + "/root" + "/x")


@pytest.mark.slow
def test_what_would_be_published_is_whole(tmp_path: Path) -> None:
    # The wheel is built from the source distribution, so that one holds all of it.
    for command in (["build", "--outdir", str(tmp_path), str(ROOT)], ["twine", "check", "--strict"]):
        given = command + [str(path) for path in tmp_path.iterdir()]
        ended = subprocess.run([sys.executable, "-m", *given], capture_output=True, text=True, timeout=280, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert "lightning_protrain/py.typed" in names
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"lightning_protrain", "lightning_protrain_command.py"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_protrain").rglob("*.py")}
    assert sources <= set(names)
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "configs/quickstart.yaml"} <= inside


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["title"], citation["version"]) == (PROJECT["name"], lightning_protrain.__version__)
    assert citation["license"] == PROJECT["license"]
    assert citation["references"][0]["url"].endswith("2406.08334")


def test_the_extra_for_everything_holds_what_runs_can_use() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == EXTRAS.keys() - {"all", "dev", "docs", "tokenizers"}
