"""Plans without weights, GPU or training, for any number of ranks; and previews of the data."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.models import module as module_file
from lightning_protrain.planner import request
from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.memory import HostTooSmall
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.strategy import dry_run_hardware
from lightning_protrain.strategy.protrain import ProTrainStrategy
from lightning_protrain.trainer import PlanningTrainer
from tests.data.conftest import conversation
from tests.support.machines import CPU
from tests.support.models import zoo
from tests.support.rank_models import Module
from tests.support.trainers import QUIET

CONFIG = "{model_type: llama, hidden_size: 64, num_hidden_layers: 4, intermediate_size: 128, num_attention_heads: 4}"
BESIDE_A_GPU = {"num_gpus": 2, "host_memory": "1GiB", "gpu_link": "50GB", "network": "1GB"}
pytestmark = [
    pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*no .val_dataloader"),
]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return command-line options of a small model and twelve conversations."""
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(conversation(f"Question {i}?", f"Answer {i}.")) + "\n" for i in range(12)))
    return [
        f"--model.config={CONFIG}",
        f"--data.dataset={path}",
        "--data.vocab_size=280",
        "--data.batch_size=2",
        f"--data.cache_dir={tmp_path / 'cache'}",
        "--trainer.max_epochs=1",
    ]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a module of the model is made with memory."""
    made = module_file.CausalLMModule.configure_model

    def configure(self: Any) -> None:
        made(self)
        assert {parameter.device.type for parameter in self.parameters()} == {"meta"}

    monkeypatch.setattr(module_file.CausalLMModule, "configure_model", configure)


def _written(path: Path) -> dict[str, Plan | None]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return {name: None if plan is None else Plan.from_json(json.dumps(plan)) for name, plan in content.items()}


@pytest.mark.parametrize("plan", ["auto", "offload"])
def test_one_gpu_is_explained(plan: str, options: list[str], no_weights: None, capsys: Any) -> None:
    options += ["--trainer.strategy=lightning_protrain.ProTrainStrategy", f"--trainer.strategy.plan={plan}"]
    ProTrainCLI(["plan", "--gpu", "RTX 3090", "--host_memory", "64GiB", "--host_cores", "16", *options])
    shown = capsys.readouterr().out
    said = "model.layers.0-3", "on RTX 3090", "tokens per second", "what bounds it"
    assert [sentence for sentence in said if sentence not in shown] == []
    assert "no limit" not in shown
    assert not list(Path().glob("lightning_logs"))


@pytest.mark.parametrize(
    ("given", "batch", "host"),
    [
        (
            ["--data=null", "--length=64", "--host_memory=64GiB", "--host_cores=16"],
            "of 1 x 64 tokens (batch_size by default, length), 2 to a step (accumulate_grad_batches).",
            "16 cores (host_cores), 64.0 GiB of memory (host_memory)",
        ),
        (
            ["--data=null", "--batch_size=3"],
            "of 3 x 1024 tokens (batch_size, length by default), 2 to a step (accumulate_grad_batches).",
            "7 cores (those of this machine), 5.0 GiB of memory (free on this machine now)",
        ),
        (
            ["--trainer.strategy=lightning_protrain.ProTrainStrategy", "--trainer.strategy.host_memory=9GiB"],
            "(the largest of the data), 2 to a step (accumulate_grad_batches).",
            "7 cores (those of this machine), 9.0 GiB of memory (host_memory of the strategy)",
        ),
    ],
)
def test_a_plan_says_what_it_rests_on(
    given: list[str], batch: str, host: str, options: list[str], no_weights: None, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(dry_run_hardware, "usable_cores", lambda: 7)
    monkeypatch.setattr(dry_run_hardware, "free_host_bytes", lambda: 5 << 30)
    if "--data=null" in given:
        options = [f"--model.config={CONFIG.replace('}', ', vocab_size: 128}')}", "--trainer.max_epochs=1"]
    ProTrainCLI(["plan", "--gpu", "RTX 3090", "--trainer.accumulate_grad_batches=2", *options, *given])
    said = " ".join(capsys.readouterr().out.split())
    assert said.partition("Planned for a micro-batch")[2].endswith(f"{batch} Host: {host}.")


def test_a_gpu_without_bfloat16_is_planned_for_in_float16(options: list[str], capsys: Any) -> None:
    """The plan is made on a CPU, for which Lightning would take bfloat16."""
    host = ["--host_memory=64GiB", "--host_cores=8", "--trainer.strategy=protrain"]
    ProTrainCLI(["plan", "--gpu", "T4", "--trainer.precision=16-mixed", *host, *options])
    assert "tokens per second" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(
        ValueError, match=r"'T4' has no rate for bfloat16, only for float32, float16\. Use another precision"
    ):
        ProTrainCLI(["plan", "--gpu", "T4", "--trainer.precision=bf16-mixed", *host, *options])


def test_a_host_that_cannot_load_the_weights_is_refused(options: list[str], no_weights: None) -> None:
    with pytest.raises(
        ValueError, match=r"the host needs .* to load the weights, and has 1\.00 KiB .*Raise host_memory"
    ):
        ProTrainCLI(["plan", "--gpu", "A100 80GB SXM", "--host_memory=1KiB", *options])


def test_several_gpus_are_a_table_and_a_file(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ("RTX 3060", "RTX 4090", "A100 80GB SXM")
    names = [part for name in gpus for part in ("--gpu", name)]
    ProTrainCLI(["plan", *names, "--host_memory", "64GiB", "--json", "plans.json", *options])
    shown = capsys.readouterr().out
    assert all(name in shown for name in gpus)
    plans = _written(Path("plans.json"))
    assert set(plans) == set(gpus)
    for name, plan in plans.items():
        assert plan is not None
        assert plan.prediction is not None
        assert (plan.prediction.hardware, plan.prediction.tokens > 0) == (name, True)
    rates = [plans[name].prediction.tokens_per_second for name in gpus]
    assert rates == sorted(rates)


def test_tables_of_several_gpus_fit_eighty_columns(options: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ["--gpu", "RTX 4070 Ti SUPER", "--gpu", "A100 80GB SXM"]
    ProTrainCLI(["plan", *names, "--host_memory=64GiB", "--num_gpus=8", "--num_nodes=2", *options])
    shown = capsys.readouterr().out
    assert "\u2026" not in shown  # What rich writes where it cuts a cell off.
    for header in ("resident", "tokens/s", "bound", "efficiency"):
        assert f" {header} " in shown
    # Rows of the scaling below have an efficiency of 100 %, too.
    heading, *rows = [line for line in shown.splitlines() if re.search(r" bound | 100 % ", line)][:3]
    names = [(heading, "hardware"), (rows[0], "RTX 4070"), (rows[1], "A100 80G")]
    assert {line.index(name) for line, name in names} == {1}
    assert {row.index(" 100 %") + len(" 100 %") for row in rows} == {heading.index(" resident") + len(" resident")}
    assert "RTX 4070 Ti SUPER: activations of 4 blocks: 4 keep" in shown


@pytest.mark.parametrize(("sharding", "shares"), [("auto", [(1, 4), (4, 1)]), ("replicate", [(4, 1)])])
def test_the_ranks_of_a_machine_are_planned_for(
    sharding: str, shares: list[tuple[int, int]], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = request.PlanRequest.plan

    def plan(self: request.PlanRequest, machine: HardwareProfile | None = None) -> Plan:
        asked.append(self.ranks)
        return real(self, machine)

    monkeypatch.setattr(request.PlanRequest, "plan", plan)
    strategy = ["--trainer.strategy=lightning_protrain.ProTrainStrategy", f"--trainer.strategy.sharding={sharding}"]
    many = ["--num_gpus=8", "--num_nodes=2", *strategy, "--trainer.strategy.device_memory=3MiB"]
    ProTrainCLI(["plan", "--gpu", "RTX 3090", "--host_memory=64GiB", *options, *many])
    assert [(each.num_ranks, each.copies, each.sharers) for each in asked] == [(8, *each) for each in shares]


@pytest.mark.parametrize("plan", ["auto", "resident"])
def test_plans_for_many_gpus_know_what_they_send(plan: str, options: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    strategy = ["--trainer.strategy=lightning_protrain.ProTrainStrategy", f"--trainer.strategy.plan={plan}"]
    many = ["--host_memory=64GiB", "--num_gpus=4", "--num_nodes=2", "--json=plans.json", *strategy]
    steps = []
    for network in ("25GB", "10MB"):
        ProTrainCLI(["plan", "--gpu", "RTX 3090", f"--network={network}", *many, *options])
        shown = " ".join(capsys.readouterr().out.split()).partition("On all GPUs")[2]
        found = _written(Path("plans.json"))["RTX 3090"]
        assert found is not None
        assert found.prediction is not None
        assert short_seconds(found.prediction.busy["network"]) in shown
        assert short_seconds(found.prediction.step_seconds) in shown
        steps.append(found.prediction.step_seconds)
    assert steps[1] > 10 * steps[0]


def test_warnings_stand_beside_the_table(options: list[str], capsys: Any, monkeypatch: Any) -> None:
    real = request.expected
    monkeypatch.setattr(request, "expected", lambda *of: real(*of).with_advice("Warning: look out.", "Well done."))
    options += ["--trainer.strategy=lightning_protrain.ProTrainStrategy", "--trainer.strategy.plan=offload"]
    ProTrainCLI(["plan", "--gpu", "RTX 3090", "--gpu", "RTX 4090", *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(": 4 checkpoint. Warning: look out.") == 2
    assert "Well done" not in shown


def test_what_fits_no_gpu_is_an_error(options: list[str], monkeypatch: Any, capsys: Any) -> None:
    tiny = {"device_bytes": 100_000}
    real = request.PlanRequest.plan

    def plan(self: request.PlanRequest, machine: HardwareProfile | None = None) -> Plan:
        assert machine is not None
        small = machine.name == "RTX 3060"
        return real(self, HardwareProfile(**{**vars(machine), **tiny}) if small else machine)

    monkeypatch.setattr(request.PlanRequest, "plan", plan)
    with pytest.raises(ValueError, match=r"No plan fits: the device would need at least"):
        ProTrainCLI(["plan", "--gpu", "RTX 3060", *options])
    ProTrainCLI(["plan", "--gpu", "RTX 3060", "--gpu", "RTX 3090", "--json", "plans.json", *options])
    shown = capsys.readouterr().out
    assert "no plan" in shown
    assert "RTX 3060: No plan fits" in shown
    plans = _written(Path("plans.json"))
    assert plans["RTX 3060"] is None
    assert plans["RTX 3090"] is not None


def test_the_plan_of_this_machine_is_the_one_that_fit_takes() -> None:
    def strategy() -> ProTrainStrategy:
        return ProTrainStrategy(device_memory="40KiB", hardware=CPU)

    def trainer(**arguments: Any) -> PlanningTrainer:
        return PlanningTrainer(accelerator="cpu", devices=1, max_steps=2, **arguments, **QUIET)

    planned, fitted = trainer(strategy=strategy()), trainer(strategy=strategy())
    planned.plan(zoo()["reused"](), json="plan.json")
    module = zoo()["reused"]()
    fitted.fit(module)
    assert _written(Path("plan.json"))["this machine"] == fitted.strategy.plan
    assert len(module.losses) == 2
    assert planned.global_step == 0


@pytest.mark.parametrize(
    ("choice", "by_gpu"), [({}, True), ({"foreach": False}, False), ({"fused": True}, False)], ids=str
)
def test_a_plan_for_a_gpu_counts_what_pytorch_steps_at_once_there(choice: dict[str, Any], by_gpu: bool) -> None:
    module = zoo()["reused"]()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.1, **choice)  # type: ignore[method-assign]
    strategy = ProTrainStrategy(device_memory="1GiB", hardware=CPU)
    trainer = PlanningTrainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=2, **QUIET)
    trainer.plan(module, gpu=("RTX 3090",), json="plan.json")
    plan = _written(Path("plan.json"))["RTX 3090"]
    assert plan is not None
    step = next(phase for phase in plan.prediction.phases if phase.name == "step")
    assert (step.device["temporaries"] >= step.device["gradients"]) == by_gpu


def test_a_planned_trainer_can_train() -> None:
    module = zoo()["reused"]()
    strategy = ProTrainStrategy(device_memory="1GiB", hardware=CPU)
    trainer = PlanningTrainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=2, **QUIET)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.plan(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    trainer.fit(module)
    assert len(module.losses) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": ["RTX 30900"]}, "No GPU 'RTX 30900' is in the catalogue.*RTX 3090"),
        ({"gpu": ["RTX 3090"], "num_gpus": 0}, "num_gpus=0: give a positive number"),
        ({"gpu": ["RTX 3090"], "host_cores": 0}, "host_cores=0: give a positive number"),
        ({"gpu": ["RTX 3090"], "host_memory": "much"}, "'much' is not an amount of memory"),
        (
            {"gpu": ["RTX 3090"], "num_gpus": 2, "num_nodes": 2, "gpu_link": "9GB"},
            "gpu_link connects .* more num_gpus",
        ),
        ({"gpu": ["RTX 3090"], "num_gpus": 2, "network": "9GB"}, "`network` connects .*Give more num_nodes"),
        *(({name: value}, "describe the hardware around a `gpu`") for name, value in BESIDE_A_GPU.items()),
        ({"length": 64}, "batch_size and length describe a synthetic batch, but data is given"),
    ],
    ids=str,
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    strategy = ProTrainStrategy(hardware=CPU)
    trainer = PlanningTrainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=2, **QUIET)
    with pytest.raises(ValueError, match=message):
        trainer.plan(zoo()["reused"](), **arguments)


def test_another_strategy_has_no_plan() -> None:
    trainer = PlanningTrainer(strategy="auto", accelerator="cpu", devices=1, max_steps=2, **QUIET)
    with pytest.raises(ValueError, match=r"the Trainer has SingleDeviceStrategy\. Set trainer\.strategy to protrain"):
        trainer.plan(zoo()["reused"]())


def test_the_error_of_the_model_comes_first() -> None:
    class Broken(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyError("no such column")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(4, 2))

    trainer = PlanningTrainer(
        strategy=ProTrainStrategy(hardware=CPU), accelerator="cpu", devices=1, max_steps=2, **QUIET
    )
    with pytest.raises(KeyError, match="no such column"):
        trainer.plan(Broken(), gpu=["RTX 3090"])


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> ChatDataModule:
    """Two files of conversations; the terminal is wide enough for the whole table."""
    monkeypatch.setenv("COLUMNS", "200")
    for name, count in (("first", 12), ("second", 5)):
        lines = [json.dumps(conversation(f"Why {i}, {name}?", f"Because of <b>{i}</b>.")) + "\n" for i in range(count)]
        Path(f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return ChatDataModule(["first.jsonl", "second.jsonl"], vocab_size=300, max_length=64, cache_dir="cache")


@pytest.fixture
def trainer() -> PlanningTrainer:
    return PlanningTrainer(strategy="auto", accelerator="cpu", devices=1, **{**QUIET, "logger": True})


def test_a_preview_is_printed_and_written(chats: ChatDataModule, trainer: PlanningTrainer, capsys: Any) -> None:
    trainer.preview(datamodule=chats, num=2, html="page.html")
    shown = capsys.readouterr().out
    page = Path("page.html").read_text(encoding="utf-8")
    for name, rows in (("first", 11), ("second", 4)):
        for number in (1, 2):
            assert f"{name}.jsonl, conversation {number}" in shown
            assert f"<h2>{name}.jsonl, conversation {number} <small>" in page
        assert f"{name}.jsonl, conversation 3" not in shown + page
        assert re.search(rf"^{name}\.jsonl, .* {rows} +0 ", shown, re.MULTILINE)
        assert f"<td>{name}.jsonl, train</td><td>phi4</td><td>{rows}</td>" in page
    assert "<b>" in shown
    trained = re.findall(r'<span class="trained">(.*?)</span>', page)
    assert trained.pop(0) == "trained text", "the legend"
    assert len(trained) == 4
    assert all(re.fullmatch(r"Because of &lt;b&gt;\d+&lt;/b&gt;\.", text) for text in trained)
    assert page.count('<span class="marker trained">&lt;|im_end|&gt;</span>') == 4


def test_a_preview_trains_nothing_and_keeps_no_logs(chats: ChatDataModule, trainer: PlanningTrainer) -> None:
    module = zoo()["reused"]()
    trainer.preview(module, chats, num=1)
    assert trainer.global_step == 0
    assert not module.losses
    assert {path.name for path in Path().iterdir()} == {"first.jsonl", "second.jsonl", "cache"}


def test_more_conversations_than_there_are_are_all(
    chats: ChatDataModule, trainer: PlanningTrainer, capsys: Any
) -> None:
    trainer.preview(datamodule=chats, num=100)
    assert len(re.findall(r"\d+ of \d+ tokens trained \(\d+%\): ", capsys.readouterr().out)) == 11 + 4


@pytest.mark.parametrize("num", [0, -1])
def test_a_preview_of_no_conversation_is_refused(chats: ChatDataModule, trainer: PlanningTrainer, num: int) -> None:
    with pytest.raises(ValueError, match=f"num={num}: give a positive number"):
        trainer.preview(datamodule=chats, num=num, html="page.html")
    assert not Path("page.html").exists()
    assert not Path("cache").exists(), "it is refused before anything is made"


@pytest.mark.parametrize(("data", "kind"), [(None, "NoneType"), (L.LightningDataModule(), "LightningDataModule")])
def test_a_preview_of_other_data_is_refused(trainer: PlanningTrainer, data: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"`preview` needs a ChatDataModule, but the data module is a {kind}"):
        trainer.preview(datamodule=data)


def test_a_preview_names_the_row_that_is_wrong(chats: ChatDataModule, trainer: PlanningTrainer) -> None:
    with Path("second.jsonl").open("a", encoding="utf-8") as lines:
        lines.write('{"messages": null}\n')
    with pytest.raises(ValueError, match=r"second\.jsonl, line 6: `messages` is null"):
        trainer.preview(datamodule=chats, html="page.html")
    assert not Path("page.html").exists()


WEIGHTS = sum(each.nbytes for each in Module("full").parameters())


def planned(folder: Path, share: float, num_nodes: int = 2, here: int = 1, **how: Any) -> Plan | None:
    """Plan for nodes whose hosts have so many times the bytes of the weights."""
    given: dict[str, Any] = {"device_memory": "60KiB", "chunk_bytes": 4096, "num_persistent_chunks": 0, **how}
    trainer: Any = PlanningTrainer(accelerator="cpu", devices=1, strategy=ProTrainStrategy(**given), **QUIET)
    path, many = folder / "plans.json", {"num_gpus": num_nodes * here, "num_nodes": num_nodes}
    trainer.plan(Module("full"), gpu=("RTX 3090",), **many, host_memory=int(share * WEIGHTS), json=str(path))
    found = json.loads(path.read_text())["RTX 3090"]
    return None if found is None else Plan.from_json(json.dumps(found))


# Of the bytes of the weights, each node needs about four times as many under a plan.
@pytest.mark.parametrize("how", [{}, {"plan": "offload"}], ids=["searched", "given"])
def test_what_no_node_holds_is_refused_in_favour_of_fsdp2(how: dict[str, Any], tmp_path: Path) -> None:
    if how:
        how |= {"device_memory": "auto", "num_persistent_chunks": None}
    with pytest.raises(HostTooSmall, match='strategy="protrain_fsdp2" with cpu_offload=True shards'):
        planned(tmp_path, 3.5, **how)


def test_a_single_rank_is_not_told_to_shard(tmp_path: Path) -> None:
    with pytest.raises(HostTooSmall) as caught:
        planned(tmp_path, 0.5, num_nodes=1)
    assert "protrain_fsdp2" not in str(caught.value)
