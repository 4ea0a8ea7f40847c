"""Every combination that is documented runs whole from the command line, and leaves a model that transformers reads."""

from __future__ import annotations

import csv
import math
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_protrain.cli import file_command
from tests.support.gpus import DEVICE
from tests.whole_runs import support
from tests.whole_runs.support import COMMAND, REFUSED, Run

RUNS = support.cover()


# The cover


def test_every_pair_of_values_is_run_or_refused() -> None:
    covered = set().union(*(each.pairs for each in RUNS))
    assert support.every_pair() - covered == REFUSED.keys()
    assert len(RUNS) <= 40


def test_every_config_is_run_as_it_is() -> None:
    for config in support.CONFIGS:
        said = support.row_of(config).items()
        assert any(each.config == config and said <= each._asdict().items() for each in RUNS), config


def test_every_documented_fit_starts_from_a_config_that_is_run() -> None:
    started = {re.findall(r"configs/(.+?)\.yaml", line)[0] for line in support.documented() if " fit --config" in line}
    assert started == set(support.SHIPPED)


def test_a_run_that_hangs_leaves_no_process() -> None:
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with pytest.raises(TimeoutError, match=r"takes longer than 2 s:\n\d+\n(?s:.*)most recent call first") as caught:
        support.run(sys.executable, "-c", program, limit=2)
    (left,) = re.findall(r"^(\d+)$", str(caught.value), re.MULTILINE)
    assert not psutil.pid_exists(int(left)) or psutil.Process(int(left)).status() == psutil.STATUS_ZOMBIE


# Runs


def run(*words: str) -> support.Ended:
    """Run a command: the installed one with what it imports at hand, torchrun and commands for a GPU as they are."""
    return support.run_forked(*words) if words[0] == COMMAND and DEVICE == "cpu" else support.run(*words)


def succeeds(*words: str) -> str:
    """Run a command and return what it says."""
    ended = run(*words)
    assert ended.status == 0, ended.output
    assert "Traceback" not in ended.output
    return ended.output


def metrics(name: str) -> dict[str, float]:
    """Return the values of a metric by step, as the newest version of the log has them."""
    newest = max(Path("logs").rglob("metrics.csv"), key=lambda path: int(path.parent.name.partition("_")[2]))
    with newest.open(encoding="utf-8") as file:
        return {row["step"]: float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def checkpoint() -> Path:
    """Return the newest checkpoint of the run."""
    found = Path("checkpoints").glob("*/*.ckpt")
    return max(found, key=lambda path: int(path.stem.partition("step=")[2].partition("-")[0]))


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
@pytest.mark.parametrize("one", RUNS, ids="-".join)
def test_a_run_ends_well(one: Run) -> None:
    program, given = support.command(one), [*support.arguments(one), f"--trainer.callbacks+={support.__name__}.Witness"]
    before: dict[str, float] = {}
    if one.then == "resume":
        given.append("--ckpt_path=last")
        lost = run(*program, "fit", *given, "--trainer.callbacks.kill_at_step=4")
        assert lost.status == -9, lost.output
        before = metrics("train_loss")
    output = succeeds(*program, "fit", *given)
    losses = metrics("train_loss")
    again = before.keys() & losses.keys()
    assert bool(again) == bool(before), "no step was trained in both lives"
    for step in again:
        assert losses[step] == pytest.approx(before[step], rel=one.rounding, abs=0)
    losses = before | losses
    assert list(losses) == [str(step) for step in range(support.STEPS)]
    assert all(map(math.isfinite, losses.values()))
    assert metrics("val_loss")["3"] < losses["0"]
    if one.plan == "budget":
        assert re.search(r"[1-9][\d.]* [KM]iB streamed", output), output
    check_model(one)
    if one.then in ("validate", "test", "predict"):
        check_evaluation(one, [*program, one.then, *given, f"--ckpt_path={checkpoint()}"])


def check_evaluation(one: Run, words: list[str]) -> None:
    """Compare the loss that a command of its own finds with the one at the end of training."""
    expected = metrics("val_loss")["3"]
    succeeds(*words)
    if one.then == "predict":
        total, tokens = sum(torch.load(path) for path in Path().glob("scores*.pt"))
        found = float(total / tokens)
    else:
        (found,) = metrics("val_loss" if one.then == "validate" else "test_loss").values()
    assert found == pytest.approx(expected, rel=max(one.rounding, 1e-6))


def check_model(one: Run) -> None:
    """Compare what plain transformers and PEFT say after export or merge with what the model said in its run."""
    said = torch.load("logits.pt")
    if "lora" not in one.tuning:
        assert file_command(["export", str(checkpoint()), "exported"]) == 0
        assert_close(
            says(one, AutoModelForCausalLM.from_pretrained("exported", dtype="auto")), said, one.rounding_elsewhere
        )
        return
    assert file_command(["merge", str(checkpoint()), "merged", "--adapter=adapter"]) == 0
    settings = support.read(one.config)["model"]["init_args"]
    options: dict[str, Any] = {"dtype": settings.get("dtype", "float32")}
    whole = adapted = says(one, with_adapter(one, **options))
    if one.tuning == "lora-4bit":
        quantised = BitsAndBytesConfig(**settings["quantization"])
        adapted = says(one, with_adapter(one, **options, quantization_config=quantised))
    assert_close(adapted, said, one.rounding_elsewhere)
    # The sum of weights and adapters is rounded to bfloat16.
    assert_close(says(one, AutoModelForCausalLM.from_pretrained("merged", dtype="auto")), whole, 0.03)


def with_adapter(one: Run, **options: Any) -> PeftModel:
    """Return the model that was adapted, as PEFT reads it; under `bf16-true` adapters have the dtype of the weights."""
    base = AutoModelForCausalLM.from_pretrained("models/my-model", **options)
    return PeftModel.from_pretrained(base, "adapter", autocast_adapter_dtype=one.precision != "bf16-true")


def says(one: Run, model: Any) -> Tensor:
    """Return the logits of a model, which bitsandbytes may have loaded on a GPU."""
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled="mixed" in one.precision):
        return model.eval()(input_ids=support.TOKENS.to(model.device)).logits.cpu()


def assert_close(found: Tensor, expected: Tensor, rounding: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding * expected.abs().max().item())


@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
@pytest.mark.parametrize(("pair", "sentence"), REFUSED.items(), ids=REFUSED.values())
def test_what_is_refused_by_design_says_so(pair: support.Pair, sentence: str) -> None:
    ended = run(COMMAND, "fit", *support.arguments(support.refused(pair)))
    assert ended.status == 1
    assert sentence in ended.output
    assert "Traceback" not in ended.output
