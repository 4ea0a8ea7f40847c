"""Plans by the name of a model: `plan` and `fits` without a config, and `lightning_protrain.plan`."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import lightning_protrain
import lightning_protrain_command
from lightning_protrain import Plan, plans
from lightning_protrain.commands import plan_command
from lightning_protrain.models import bnb, lora
from lightning_protrain.models import published as models
from lightning_protrain.models.published import find_config, published
from lightning_protrain.strategy import profile_step
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware

SMALL = "HuggingFaceTB/SmolLM2-135M"
HOST = ["--host-memory", "64GiB", "--host-cores", "16"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "try_to_load_from_cache", lambda *_: None)


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give SMALL few layers, which are profiled in a fraction of the time; return their number."""
    small = published()[SMALL]
    few = replace(small, config={**small.config, "num_hidden_layers": 3})
    monkeypatch.setattr(models, "published", lambda: {**published(), SMALL: few})
    return 3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, int | str]]:
    """Run the console script; return its output and its status, or what it says at the end."""

    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # the command sets it for its process, unless it is set

    def command(*arguments: str) -> tuple[str, int | str]:
        monkeypatch.setattr(sys, "argv", ["lightning-protrain", *arguments])
        with pytest.raises(SystemExit) as ended:
            lightning_protrain_command.main()
        return capsys.readouterr().out, ended.value.code

    return command


@pytest.mark.usefixtures("shallow")
def test_one_line_gives_the_plan_of_a_model_and_says_what_was_taken_by_default(run, tmp_path: Path) -> None:
    shown, status = run("plan", SMALL, "--gpu", "rtx4090", *HOST, "--json", str(tmp_path / "plans" / "plan.json"))
    assert status == 0
    assert "on RTX 4090" in shown
    assert "tokens per second" in shown
    shown = " ".join(shown.split())
    assert "Defaults: --method lora, --precision bf16-mixed, --batch-size max, --length 1024." in shown
    assert plans.BEST in shown
    assert "come with this package" in shown
    (content,) = json.loads((tmp_path / "plans" / "plan.json").read_text()).values()
    plan = lightning_protrain.plan(SMALL, gpu="RTX 4090", host_memory="64GiB", host_cores=16)
    assert json.loads(plan.to_json()) == content


def test_verbose_adds_every_unit_every_term_and_the_rates_with_their_source(run, shallow: int) -> None:
    arguments = ("plan", SMALL, "--gpu", "RTX 4090", *HOST, "--batch-size", "1", "--length", "64")
    (short, _), (shown, status) = run(*arguments), run(*arguments, "--verbose")
    assert status == 0
    plan = short.partition(f"{SMALL}:")[0]
    assert shown.startswith(plan)
    assert plan.count("\n") <= 25
    assert max(map(len, shown.splitlines())) <= 80
    assert all(f"layers.{number} " in shown for number in range(shallow))
    assert "rate of RTX 4090" in shown
    assert "data sheet, https://" in " ".join(shown.split())


def test_both_spellings_of_options_mean_the_same(run, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(plan_command, "_plan", lambda given: taken.append(vars(given)))
    options = {"gpu": "T4", "batch-size": "2", "host-memory": "64GiB", "host-cores": "16", "num-gpus": "1"}
    for dash in "-_":
        run("plan", SMALL, *(f"--{name.replace('-', dash)}={value}" for name, value in options.items()))
    assert taken[0] == taken[1]
    assert taken[0]["batch_size"] == 2


@pytest.mark.slow
def test_several_models_methods_and_gpus_make_one_table(run) -> None:
    shown, status = run(
        *("plan", SMALL, "pythia-70m", "--gpu", "RTX 4090", "--gpu", "T4", *HOST),
        *("--method", "full", "--method", "lora", "--batch-size", "1", "--length", "128"),
    )
    assert status == 0
    assert shown.count("Plans") == 1
    assert shown.count("SmolLM2") >= 4
    assert "SmolLM2-135M, full, RTX 4090: Planned with precision bf16-mixed and optimizer adamw." in shown
    assert "--method" not in shown.partition("Defaults:")[2]


@pytest.mark.sample(0)  # README.md runs it in CI.
@pytest.mark.slow
def test_the_models_that_fit_are_listed_by_method_largest_first(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # long names stay in one line
    shown, status = run("fits", "--gpu", "RTX 3060", *HOST, "--most", "2", "--method", "full", "--method", "lora")
    assert status == 0
    counts = {each.name.rpartition("/")[2]: each.parameters for each in published().values()}
    sizes = {}
    for method in ("full", "lora"):
        lines = shown.partition(f"RTX 3060, {method}")[2].partition("smaller models")[0].splitlines()
        rows = [words for line in lines if (words := line.split()) and words[0] in counts]
        sizes[method] = [counts[words[0]] for words in rows]
        assert sizes[method] == sorted(sizes[method], reverse=True)
        assert all(1024 <= int(words[-1].replace(",", "")) <= 1 << 18 for words in rows)  # the longest text
    assert len(sizes["full"]) == len(sizes["lora"]) == 2
    assert sizes["full"][0] < sizes["lora"][1]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "Qwen/Qwen3-9B"], "did you mean Qwen/Qwen3.5-9B or Qwen/Qwen3-8B"),
        (["plan", SMALL, "--gpu", "RTX 4095"], "No GPU 'RTX 4095' is in the catalogue. Did you mean"),
        (["plan", "gpt2", "--gpu", "T4", "--length", "3000"], "has 1024 positions. Give at most 1024."),
        (["plan", SMALL, "--gpu", "T4", "--length", "9000"], "Give at most 8192, or a config whose rope_parameters"),
        (["plan", SMALL, "--gpu", "T4", "--length", "max", "--batch-size", "max"], "give one of them"),
        (["plan", SMALL, "--length", "max"], "Give a `gpu`"),
        (["plan", SMALL, "--gpu", "T4", "--length", "most"], 'give a positive integer, or "max"'),
        (["fits", "--gpu", "T4", "--length", "max"], '"max" is for `plan`'),
        (["plan", SMALL, "--gpu", "T4", "--precision", "bf16-mixed"], "has no rate for bfloat16"),
        (["plan", SMALL, "--method", "dora"], "invalid choice: 'dora'"),
        (["plan", SMALL, "--hostmemory", "3"], "unrecognized arguments: --hostmemory 3"),
        (["plan", SMALL, "--host-cores", "3"], "none is given"),
        (["plan", SMALL, "--gpu", "T4", "--precision", "fp7"], "precision='fp7': give one of 64-true"),
        (["plan", SMALL, "--gpu", "T4", "--batch-size", "0"], "batch_size=0: give a positive integer"),
        (["plan", SMALL, "--gpu", "T4", "--length", "-5"], "length=-5: give a positive integer"),
        (["plan", SMALL, "--gpu", "T4", "--host-memory", "0"], "'0' is not an amount of memory"),
        (["plan", SMALL, "--gpu", "T4", "--json", f"{__file__}/plan.json"], "File exists"),
        (["plan", SMALL, "--gpu", "T4", "--optimizer", "adamx"], "'adamx' is unknown. Did you mean adamw?"),
        (["plan", SMALL, "--gpu", "T4", "--optimizer", "nowhere.Adam"], "'nowhere.Adam' cannot be imported"),
        (["fits"], "the following arguments are required: --gpu"),
        (["fits", "--gpu", "T4", "--most", "0"], "most=0: give a number above zero"),
    ],
)
def test_a_mistake_ends_with_one_sentence(run, arguments: list[str], message: str) -> None:
    _, said = run(*arguments)
    assert str(said).startswith("lightning-protrain: ")
    assert message in str(said)
    assert "\n" not in str(said)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{x", "is not a valid JSON file"),
        ('{"model_type": "t5"}', "is an encoder-decoder"),
        ('{"model_type": "clip_vision_model"}', "is not a causal model"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "are quantised (gptq)"),
        ('{"model_type": "llama", "hidden_size": 65}', "(65) is not a multiple of the number of attention heads"),
        ('{"model_type": "llama", "hidden_size": "64"}', "expected int, got str"),
        ('{"model_type": "llama", "hidden_size": -64}', "has hidden_size=-64: correct it"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "has num_hidden_layers=0: correct it"),
        (None, "There is no config.json"),
    ],
)
def test_a_folder_that_cannot_be_planned_ends_with_one_sentence(
    run, config: str | None, message: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    _, said = run("plan", str(tmp_path), "--gpu", "T4", *HOST)
    assert str(said).startswith("lightning-protrain: ")
    assert message in str(said)
    assert "\n" not in str(said)


@pytest.mark.usefixtures("shallow")
def test_weights_of_4_bits_are_planned_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted() -> Any:
        options = {"batch_size": 1, "length": 64, "host_memory": "32GiB", "host_cores": 8}
        return lightning_protrain.plan(SMALL, method="qlora", gpu="T4", **options).prediction

    wanted = predicted()
    for module in (bnb, lora):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert predicted() == wanted


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_gpu_without_bfloat16_is_planned_for_in_float16(method: str) -> None:
    options: dict[str, Any] = {"method": method, "batch_size": 1, "length": 64}
    plan = lightning_protrain.plan(SMALL, gpu="T4", host_memory="32GiB", host_cores=8, **options)
    assert plan.prediction is not None
    assert plan.prediction.hardware == "T4"


def choice(plan: Plan) -> str:
    """What a plan says of the precision and the optimizer that it took."""
    assert plan.prediction is not None
    (said,) = [each for each in plan.prediction.advice if each.startswith("Planned with precision ")]
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host_memory", "taken"),
    [
        ("24GiB", "precision bf16-mixed and optimizer adamw: 14 bytes of the host for each streamed parameter."),
        ("9GiB", "precision bf16-true and optimizer split_adamw"),
    ],
)
def test_full_training_takes_what_fits_with_float32_masters(host_memory: str, taken: str, run) -> None:
    host: dict[str, Any] = {"host_memory": host_memory, "host_cores": 8}
    plan = lightning_protrain.plan("Qwen3-1.7B", method="full", gpu="RTX 3060", batch_size=1, length=512, **host)
    assert taken in choice(plan)
    shown, status = run(
        *("plan", "Qwen3-1.7B", "--method", "full", "--gpu", "RTX 3060", "--batch-size", "1", "--length", "512"),
        *("--host-memory", host_memory, "--host-cores", "8"),
    )
    assert status == 0
    assert choice(plan)[:60] in " ".join(shown.split())
    assert "--precision" not in shown


@pytest.mark.slow
def test_a_given_precision_or_optimizer_is_the_only_one_tried() -> None:
    options: dict[str, Any] = {"method": "full", "gpu": "RTX 4090", "batch_size": 1, "length": 64}
    for given in ({"precision": "bf16-mixed"}, {"optimizer": "split_adamw_8bit"}, {"optimizer": "torch.optim.NAdam"}):
        plan = lightning_protrain.plan(SMALL, host_memory="32GiB", host_cores=8, **options, **given)
        assert plan.prediction is not None
        assert not any(each.startswith("Planned with precision ") for each in plan.prediction.advice)
        wide = {chunk.dtype for chunk in plan.chunks} == {"float32"}
        assert wide is (given.get("optimizer") != "split_adamw_8bit")


@pytest.mark.usefixtures("shallow")
def test_the_precision_of_split_masters_is_named_among_the_defaults(run) -> None:
    arguments = ["plan", SMALL, "--method", "full", "--gpu", "RTX 4090", *HOST, "--length", "64"]
    shown, _ = run(*arguments, "--optimizer", "split_adamw")
    assert "Defaults: --precision bf16-true, --batch-size max." in " ".join(shown.split())


@pytest.mark.slow
def test_what_fits_is_listed_without_models_that_have_too_few_positions(run, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {each.name: each for each in published().values() if each.parameters < 800e6}
    assert min(each.positions for each in few.values()) < 20_000 <= max(each.positions for each in few.values())
    monkeypatch.setattr(plans, "published", lambda: few)
    _, status = run("fits", "--gpu", "RTX 4090", *HOST, "--most", "1", "--method", "lora", "--length", "20000")
    assert status == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--method", "full", "--host-memory", "8GiB", "--precision", "bf16-mixed"],
            ["precision bf16-true", "--method lora", "--method qlora", "GPU of 32 GB"],
        ),
    ],
    ids=["states"],
)
def test_a_model_that_does_not_fit_hears_of_each_change_with_which_it_fits(
    options: list[str], said: list[str], run
) -> None:
    given = ["plan", "Qwen3-1.7B", "--gpu", "RTX 3060", "--host-cores", "8", *options]
    _, text = run(*given)
    assert "No plan fits" in str(text)
    found = re.findall(r"It fits (?:with|on a) ((?:--[\w-]+|precision) [\w-]+|GPU of \d+ GB)", str(text))
    assert found == said
    for change in found:
        if not change.startswith("GPU"):
            name, value = change.split()
            name = f"--{name.removeprefix('--')}"
            at = given.index(name) if name in given else len(given)
            assert run(*given[:at], name, value, *given[at + 2 :])[1] == 0, change


@pytest.mark.sample(0)  # It takes two minutes.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smaller_batches_are_advised_that_fit_in_slices() -> None:
    model, hardware = find_config("Qwen3-1.7B"), DryRunHardware(("RTX 3060",), 1, 1, "56GiB", 8)
    options = plans.TrainingOptions("lora", batch_size=64, length=8192)
    assert next(plans.alternatives(model, options, hardware)) == "It fits with --batch-size 16."  # Else 4.


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("batch_size", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_the_longest_text_fits_and_a_longer_one_does_not(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_step, "LEAST_SLICE", 1 << 40)  # Profiles in slices take minutes.
    options: dict[str, Any] = {"method": "lora", "gpu": "RTX 3060", "host_memory": "8GiB", "host_cores": 8}
    plan = lightning_protrain.plan(SMALL, batch_size=batch_size, length="max", **options)
    assert plan.prediction is not None
    length = plan.prediction.tokens // batch_size
    (said,) = [each for each in plan.prediction.advice if each.startswith(plans.LONGEST)]
    assert f" {length:,} tokens" in said
    assert (length == 8192) is (batch_size == 1) is ("all positions of the model" in said)
    if length < 8192:
        with pytest.raises(ValueError, match="No plan fits"):
            lightning_protrain.plan(SMALL, batch_size=batch_size, length=length + max(512, length // 10), **options)


@pytest.mark.slow
def test_the_fastest_batch_size_is_no_slower_than_others(run) -> None:
    options: dict[str, Any] = {"method": "full", "gpu": "RTX 3060", "length": 256, "precision": "bf16-mixed"}
    host: dict[str, Any] = {"host_memory": "32GiB", "host_cores": 8}
    best = lightning_protrain.plan(SMALL, **options, **host).prediction
    assert best is not None
    for size in (1, 2, 4):
        other = lightning_protrain.plan(SMALL, batch_size=size, **options, **host).prediction
        assert other is not None
        assert (best.tokens_per_second or 0) >= 0.99 * (other.tokens_per_second or 0)
    (said,) = [each for each in best.advice if each.startswith(plans.BEST)]
    assert said.endswith(f" {best.samples}.")


def test_the_config_of_a_run_may_be_given_as_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for line, taken in {
        "plan run.yaml --gpu T4": "plan --config run.yaml --gpu T4",
        "plan --config run.yaml --gpu T4": "plan --config run.yaml --gpu T4",
        "plan --gpu T4 run.yaml": "plan --gpu T4 --config run.yaml",
        "fit --config run.yaml": "fit --config run.yaml",
    }.items():
        arguments = line.split()
        assert not lightning_protrain_command.names_models(arguments)
        assert arguments == taken.split()
    for line in ("plan gpt2 --gpu T4", "plan --gpu T4 gpt2", "plan --gpu=T4 gpt2", "fits --gpu T4"):
        assert lightning_protrain_command.names_models(line.split())


@pytest.mark.slow
def test_a_plan_in_python_is_one_that_a_strategy_takes_or_a_refusal() -> None:
    plan = lightning_protrain.plan(SMALL, method="full", gpu="RTX 4090", length=128, host_memory="64GiB", host_cores=8)
    assert isinstance(plan, Plan)
    assert plan.prediction is not None
    assert plan.prediction.tokens == 128 * plan.prediction.samples
    with pytest.raises(ValueError, match="No plan fits"):
        lightning_protrain.plan("Qwen3-8B", method="full", gpu="RTX 3060", host_memory="16GiB", host_cores=8)
    with pytest.raises(ValueError, match="method='dora': give one of full, lora, qlora"):
        lightning_protrain.plan(SMALL, method="dora", gpu="T4")
