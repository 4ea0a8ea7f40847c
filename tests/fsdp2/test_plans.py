"""What a plan says of FSDP2: bytes of each rank, the mesh, the blocks that recompute, and whether it fits."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.trainer import PlanningTrainer
from tests.support.models import zoo
from tests.support.ranks import run_ranks, trainer_on_rank, values

SIZES = "hidden_size: 64, num_hidden_layers: 4, intermediate_size: 128, num_attention_heads: 4, vocab_size: 280"
FSDP2 = ["--trainer.strategy=lightning_protrain.ProTrainFSDP2Strategy", "--trainer.strategy.policy=transformer"]
MANY = ["--gpu=RTX 3090", "--num_gpus=4", "--num_nodes=2"]
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
pytestmark = [
    pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*no .val_dataloader"),
]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return those of a small model, whose weights are never made, without data."""
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])
    made = CausalLMModule.configure_model

    def configure(self: Any) -> None:
        made(self)
        assert {parameter.device.type for parameter in self.parameters()} == {"meta"}

    monkeypatch.setattr(CausalLMModule, "configure_model", configure)
    return [f"--model.config={{model_type: llama, {SIZES}}}", "--data=null", "--length=64", "--trainer.max_epochs=1"]


def test_what_ranks_take_under_fsdp2_is_planned_for(options: list[str], capsys: Any) -> None:
    ProTrainCLI(["plan", *MANY, "--host_memory=64GiB", "--json=plans.json", *FSDP2, *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert "HSDP: 2 copies, each sharded over 2 ranks, 0 of 4 blocks recomputed" in shown
    assert "evaluation" in shown
    assert "64.0 GiB of memory (host_memory)" in shown
    plan = json.loads(Path("plans.json").read_text(encoding="utf-8"))["RTX 3090"]
    assert (plan["mesh"], plan["checkpointed"]) == ([2, 2], [])
    sizes = [sum(phase["device"].values()) for phase in plan["phases"].values()]
    assert plan["device_bytes"] == max(sizes)
    assert plan["node_host_bytes"] == 2 * plan["host_bytes"]
    # Where memory is as tight as it can be, all ranks hold one copy, and as few blocks recompute as there must.
    least = [f"--trainer.strategy.{name}" for name in ("sharding_strategy=FULL_SHARD", "activation_checkpointing=all")]
    ProTrainCLI(["plan", *MANY, "--host_memory=64GiB", "--json=plans.json", *FSDP2, *least, *options])
    needed = json.loads(Path("plans.json").read_text(encoding="utf-8"))["RTX 3090"]["device_bytes"]
    tight = f"--trainer.strategy.device_memory={needed}"
    ProTrainCLI(["plan", *MANY, "--host_memory=64GiB", "--json=plans.json", *FSDP2, tight, *options])
    less = json.loads(Path("plans.json").read_text(encoding="utf-8"))["RTX 3090"]
    assert less["mesh"] == [1, 4]
    assert len(less["checkpointed"]) > 0
    assert less["device_bytes"] <= needed < plan["device_bytes"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--trainer.strategy.device_memory=9KiB"], r"FSDP2 over 4 ranks needs .* on each device with all 4 blocks"),
        (["--host_memory=9KiB"], r"FSDP2 over 4 ranks needs .* on the host of each node, 9.00 KiB"),
        (
            ["--trainer.strategy.device_mesh=[2, 3]"],
            r"device_mesh=\(2, 3\) is one of 6 ranks, and there are 4 \(2 x 2\)",
        ),
        (["--trainer.strategy.activation_checkpointing=5"], r"has 4 blocks that can recompute"),
    ],
)
def test_what_does_not_fit_under_fsdp2_is_refused(given: list[str], message: str, options: list[str]) -> None:
    with pytest.raises(ValueError, match=message):
        ProTrainCLI(["plan", *MANY, *FSDP2, *options, *given])


def test_what_ranks_take_here_is_what_fit_predicts(tmp_path: Path) -> None:
    strategy = ProTrainFSDP2Strategy(policy="none", activation_checkpointing=1, device_memory="1GiB")
    trainer = PlanningTrainer(accelerator="cpu", devices=1, max_steps=1, strategy=strategy, **QUIET)  # type: ignore[arg-type]
    trainer.plan(zoo()["reused"](), json="plan.json")
    planned = json.loads(Path("plan.json").read_text(encoding="utf-8"))["this machine"]
    assert trainer.global_step == 0
    assert not torch.distributed.is_initialized()
    (found,) = values(run_ranks(_fit_memory, 1, tmp_path))
    assert planned == found


def _fit_memory(rank: int) -> Any:
    kind = partial(ProTrainFSDP2Strategy, policy="none", activation_checkpointing=1, device_memory="1GiB")
    trainer = trainer_on_rank(rank, 1, kind, max_steps=1)
    trainer.fit(zoo()["reused"]())
    return trainer.strategy.memory.to_dict()  # type: ignore[attr-defined]
