"""Every shipped config creates its objects, and every recipe is planned for its machine."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lightning_protrain import CausalLMModule, ChatDataModule
from lightning_protrain.callbacks.samples import InitialValidation
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.config import parse_bytes
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.models.export import merge
from lightning_protrain.models.published import published
from lightning_protrain.planner.plan import Plan
from tests.data.conftest import conversation
from tests.documented import blocks
from tests.support.vision_runs import saved
from tests.whole_runs.support import documented

pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
QUICKSTART = next(path for path in SHIPPED if path.name == "quickstart.yaml")
# Weights, gradients and two moments, in fp32.
STATE_BYTES = 16


@pytest.fixture
def quickstart() -> dict[str, Any]:
    return yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))


@pytest.mark.sample(9)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_config_makes_its_objects(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    cli = ProTrainCLI(["--config", str(path)], run=False)
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert type(cli.model).__name__ == given["model"]["class_path"].rpartition(".")[2]
    assert type(cli.datamodule).__name__ == given["data"]["class_path"].rpartition(".")[2]
    assert type(cli.trainer.strategy).__name__ == given["trainer"]["strategy"]["class_path"].rpartition(".")[2]
    assert cli.trainer.max_steps == given["trainer"]["max_steps"]


@pytest.mark.filterwarnings("ignore")
def test_the_loggers_that_the_answers_name_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="not installed")
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    (text,) = (each.code for each in blocks(QUICKSTART.parents[1] / "docs" / "faq.md") if each.language == "yaml")
    named = tmp_path / "loggers.yaml"
    named.write_text(text)
    cli = ProTrainCLI(["--config", str(QUICKSTART), "--config", str(named)], run=False)
    assert [type(each).__name__ for each in cli.trainer.loggers] == ["TensorBoardLogger", "WandbLogger"]


def test_the_quickstart_needs_more_than_its_budget(quickstart: dict[str, Any]) -> None:
    data = quickstart["data"]["init_args"]
    with torch.device("meta"):
        config = AutoConfig.for_model(**quickstart["model"]["init_args"]["config"], vocab_size=data["vocab_size"])
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert parameters >= 20_000_000
    budget = parse_bytes(quickstart["trainer"]["strategy"]["init_args"]["device_memory"])
    assert 2.8 * budget < parameters * STATE_BYTES


def test_the_quickstart_cuts_nothing_and_asks_what_is_not_in_its_data(quickstart: dict[str, Any]) -> None:
    given, trainer = quickstart["data"]["init_args"], quickstart["trainer"]
    file = QUICKSTART.parents[1] / given["dataset"]
    data = ChatDataModule(**{**given, "dataset": str(file), "cache_dir": "cache"})
    data.prepare_data()
    data.setup("fit")
    train, validation = data.reports
    assert (train.num_dropped, train.num_unended, validation.num_dropped, validation.num_unended) == (0, 0, 0, 0)
    assert (
        max(train.lengths)
        <= given["max_length"]
        <= quickstart["model"]["init_args"]["config"]["max_position_embeddings"]
    )
    # Two ranks with half of the batch size take the same batches, and none of them is short.
    assert train.num_kept % given["batch_size"] == 0
    (prompts,) = (each["init_args"]["prompts"] for each in trainer["callbacks"] if "Sample" in each["class_path"])
    asked = {json.loads(line)["messages"][0]["content"] for line in file.read_text(encoding="utf-8").splitlines()}
    assert not asked & set(prompts)


def test_the_quickstart_tells_the_loss_before_and_after(
    quickstart: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    cli = ProTrainCLI(["--config", str(QUICKSTART)], run=False)
    assert any(isinstance(callback, InitialValidation) for callback in cli.trainer.callbacks)
    assert type(cli.trainer.logger).__name__ == "CSVLogger"


@pytest.fixture
def small_folder() -> None:
    """A small model in place of the one of `chat.yaml` and `lora.yaml`, and their conversations."""
    rows = [conversation(f"Question {i}?", f"First {i}.", f"Last {i}.") for i in range(60)]
    train_tokenizer(rows, 280).save_pretrained("models/my-model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=280, **sizes)).save_pretrained(
        "models/my-model"
    )
    Path("data").mkdir()
    kinds = {"user": "human", "assistant": "bot"}
    agent = [
        {"conversations": [{"from": kinds[m["role"]], "value": m["content"]} for m in row["messages"]]} for row in rows
    ]
    for name, written in (("chats", rows), ("manners", rows[:4]), ("agent", agent)):
        Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))


@pytest.mark.slow
@pytest.mark.usefixtures("small_folder")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "result"), [("chat", "my-trained"), ("lora", "my-adapters")])
def test_a_stock_config_leaves_its_last_step_and_a_folder_that_others_read(
    name: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    text = SHIPPED[0].with_name(f"{name}.yaml").read_text(encoding="utf-8")
    config = Path("config.yaml")
    config.write_text(text.replace("Qwen/Qwen3-4B", "models/my-model"), encoding="utf-8")
    options = ["--data.max_length=128", "--trainer.accumulate_grad_batches=2", "--data.packing=false"]
    if name == "chat":
        options.append("--data.num_workers=0")
    cli = ProTrainCLI(["fit", f"--config={config}", "--trainer.accelerator=cpu", *options])
    assert find_checkpoints(Path("checkpoints") / name).found[0].manifest.step == cli.trainer.global_step
    kind = AutoModelForCausalLM if name == "chat" else AutoPeftModelForCausalLM
    tokens = torch.arange(6)[None]
    assert isinstance(cli.model.model, torch.nn.Module)
    with torch.no_grad():
        trained = cli.model.model.eval()(tokens).logits
        loaded = kind.from_pretrained(f"models/{result}", dtype=trained.dtype).eval()
        assert torch.equal(loaded(tokens).logits, trained)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_config_for_images_trains_adapters_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config runs on a tiny model with 4-bit weights, and on rows with no, one and two images."""
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    folder = Path("models/my-vl-7b")
    folder.mkdir(parents=True)
    # Kernels for four bits need widths that are multiples of 64.
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    text = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "rope_parameters": rope}
    vision = {"hidden_size": 128, "intermediate_size": 128, "out_hidden_size": 128}
    saved("Qwen2.5-VL", folder, weights=True, text_config=text, vision_config=vision)
    options = ["--model.config=null", f"--model.model={folder}", f"--data.dataset={folder}/rows.jsonl"]
    options += ["--data.num_workers=0", "--data.val_fraction=0.2", "--trainer.accumulate_grad_batches=2"]
    config = SHIPPED[0].with_name("vision.yaml")
    cli = ProTrainCLI(["fit", f"--config={config}", "--trainer.accelerator=cpu", *options])
    (last,) = find_checkpoints(Path("checkpoints/vision")).found[:1]
    assert last.manifest.step == cli.trainer.global_step > 0
    assert cli.datamodule.reports[0].num_dropped == 0
    assert {p.dtype for p in cli.model.parameters()} >= {torch.uint8, torch.float32}
    trained = [name for name, p in cli.model.named_parameters() if name.endswith("lora_B.default.weight") and p.any()]
    for part in ("visual.blocks", "visual.merger", "language_model"):
        assert any(part in name for name in trained), part
    merge(last.path, Path("merged"))
    merged = AutoModelForImageTextToText.from_pretrained("merged", dtype="auto")
    assert merged.dtype == torch.bfloat16


CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1 << 30
# Billions of parameters, and bytes of each parameter on the device and the host together.
RECIPES: dict[str, tuple[float, float]] = {
    "lora-8b": (8.07, 2.0),
    "qlora-27b": (27.1, 0.6),
    "vision": (8.34, 0.6),
    "full-7b": (7.24, 14.0),
    "full-8b-24gb": (8.03, 8.0),
    "four-cards": (8.03, 14.0),
}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_size_that_it_is_called_after(name: str) -> None:
    """Counted with adapters; where weights are quantised two of their elements are a byte."""
    module = CausalLMModule(**read(name)["model"]["init_args"])
    with torch.device("meta"):
        module.configure_model()
    billions, _ = RECIPES[name]
    number = sum(p.numel() * (2 if p.dtype is torch.uint8 else 1) for p in module.parameters())
    assert number / 1e9 == pytest.approx(billions, rel=0.01)
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("name", [*RECIPES, "slurm"])
def test_a_recipe_says_how_it_is_run(name: str) -> None:
    text, given = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"), read(name)
    assert f"fit --config configs/{name}.yaml --model.config null --model.model models/" in text
    assert given["trainer"]["logger"]["init_args"]["name"] == name
    # Frozen weights are in bfloat16; trained ones only with masters, as updates would be lost in their rounding.
    model = given["model"]["init_args"]
    has_masters = model.get("optimizer", "").startswith("split_adamw")
    assert model.get("dtype") == ("bfloat16" if "lora" in model or has_masters else None)
    assert given["trainer"]["precision"] == ("bf16-true" if has_masters else "bf16-mixed")


def test_every_plan_for_another_gpu_names_its_host() -> None:
    """Otherwise the figures beside such a command would depend on the reader's machine."""
    pages = [CONFIGS.parent / "README.md", *(CONFIGS.parent / "docs").rglob("*.md"), *CONFIGS.glob("*.yaml")]
    texts = [page.read_text(encoding="utf-8").replace("\\\n#", " ").replace("\\\n", " ") for page in pages]
    commands = [line for text in texts for line in text.splitlines() if "-protrain plan " in line and "--gpu" in line]
    assert len(commands) > 8
    assert [line for line in commands if "--host_cores " not in line or "--host_memory " not in line] == []


def test_the_job_of_the_cluster_is_that_of_its_config() -> None:
    text, trainer = (CONFIGS / "slurm.yaml").read_text(encoding="utf-8"), read("slurm")["trainer"]
    assert f"#SBATCH --nodes={trainer['num_nodes']}\n" in text
    assert f"#SBATCH --ntasks-per-node={trainer['devices']}\n" in text
    assert f"#SBATCH --gpus-per-node={trainer['devices']}\n" in text


def test_a_config_without_its_data_is_planned_for_full_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 320"
    model = f"--model.config={{model_type: llama, {sizes}}}"
    data = ["--data.dataset=data/none.jsonl", "--data.tokenizer=models/none", "--data.max_length=48"]
    ProTrainCLI(["plan", model, *data, "--data.batch_size=3", "--gpu=T4", "--trainer.precision=32-true"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Planned without data, for rows of max_length, because of missing files: data/none.jsonl." in shown
    assert "Planned for a micro-batch of 3 x 48 tokens" in shown


@pytest.mark.parametrize("name", ["chat", "lora"])
def test_a_recipe_of_a_published_model_is_planned_without_its_weights_and_data(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = read(name)["model"]["init_args"]["model"]
    shallow = replace(published()[given], config={**published()[given].config, "num_hidden_layers": 2})
    monkeypatch.setattr("lightning_protrain.models.loading.published", lambda: {given: shallow})
    options = ["--gpu=RTX 3090", "--host_memory=56GiB", "--host_cores=16", "--data.max_length=64"]
    ProTrainCLI(["plan", f"--config={CONFIGS / name}.yaml", *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Planned without data" in shown
    assert "Planned for a micro-batch of 1 x 64 tokens" in shown


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_machine(name: str) -> None:
    """Planned by the command that its first lines give."""
    billions, state_bytes = RECIPES[name]
    Path("configs").symlink_to(CONFIGS)
    (line,) = (line for line in documented() if f"plan --config configs/{name}.yaml" in line)
    ProTrainCLI([*shlex.split(line)[1:], "--json=plans.json"])
    assert {each.name for each in Path().iterdir()} == {"configs", "plans.json"}
    (content,) = json.loads(Path("plans.json").read_text()).values()
    plan = Plan.from_json(json.dumps(content))
    prediction = plan.prediction
    assert prediction is not None
    assert plan.memory.resident_states < prediction.device_bytes < 24 * GIB
    page = (CONFIGS.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}.yaml`"))
    documented_rate = float(row.split("|")[-2].replace(",", ""))
    if "optimizer" in read(name)["model"]["init_args"]:  # Its step on the host has been timed on this machine.
        assert documented_rate / 4 < prediction.tokens_per_second < documented_rate * 4
    else:
        assert prediction.tokens_per_second == pytest.approx(documented_rate, rel=0.05)
    assert prediction.host_bytes < {"four-cards": 240, "full-7b": 120}.get(name, 56) * GIB
    assert prediction.device_bytes + prediction.host_bytes > state_bytes * billions * 1e9
    assert sum(chunk.nbytes for chunk in plan.chunks) < 24 * GIB
    assert prediction.step_seconds > 0
