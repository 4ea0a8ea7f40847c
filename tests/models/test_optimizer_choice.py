"""The optimizer of CausalLMModule is chosen by name or class path, and a bad choice is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW, NAdam, Rprop

from lightning_protrain import ProTrainStrategy, SplitAdamW
from lightning_protrain.models import optimizer as choices
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.models.optimizer import SHORT_NAMES, choose_optimizer
from tests.support.module_runs import LLAMA, Sequences, trainer

bitsandbytes = pytest.importorskip("bitsandbytes")
HERE = "tests.models.test_optimizer_choice"
KINDS = {
    "adamw": AdamW,
    "split_adamw": SplitAdamW,
    "split_adamw_bf16": SplitAdamW,
    "split_adamw_8bit": SplitAdamW,
    "adamw8bit": bitsandbytes.optim.AdamW8bit,
    "paged_adamw8bit": bitsandbytes.optim.PagedAdamW8bit,
    "lion": bitsandbytes.optim.Lion,
    "lion8bit": bitsandbytes.optim.Lion8bit,
    "adafactor": Adafactor,
    "sgd": SGD,
}


pytestmark = pytest.mark.filterwarnings("ignore:.*are float32, and stay so")  # Most models here are small and float32.


class Theirs(AdamW):
    """Passes all arguments on."""

    def __init__(self, params: Any, scale: float = 1.0, **arguments: Any) -> None:
        super().__init__(params, **arguments)
        self.scale = scale


class NoRate(AdamW):
    """Has no learning rate of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)


def made(optimizer: Any, **options: Any) -> Any:
    """The optimizer of a module with GPT-2, which has biases."""
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16, "n_positions": 8}
    module = CausalLMModule(config=config, warmup_steps=0, optimizer=optimizer, **options)
    module.configure_model()
    module._schedule_steps = lambda: (None, 0)  # Without a trainer.
    return module.configure_optimizers()["optimizer"]


def test_every_short_name_is_tested() -> None:
    assert set(KINDS) == set(SHORT_NAMES)


@pytest.mark.parametrize("name", KINDS)
def test_a_short_name_has_the_groups_and_the_settings_of_the_module(name: str) -> None:
    found = made(name, learning_rate=2e-3, weight_decay=0.2, betas=(0.8, 0.9))
    assert type(found) is KINDS[name]
    decay, others = found.param_groups
    assert (decay["name"], others["name"]) == ("decay", "no_decay")
    assert all(each.ndim >= 2 for each in decay["params"])
    assert all(each.ndim < 2 for each in others["params"])
    assert (decay["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    assert decay["lr"] == others["lr"] == 2e-3
    assert decay.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    if type(found) in (AdamW, SGD):
        assert decay["fused"]
        assert others["fused"]


@pytest.mark.parametrize(
    ("name", "moments"),
    [("split_adamw", "float32"), ("split_adamw_bf16", "bfloat16"), ("split_adamw_8bit", "8bit")],
)
def test_a_short_name_says_the_format_of_the_moments(name: str, moments: str) -> None:
    assert made(name).moments == moments
    mapping = {"class_path": name, "init_args": {"seed": 3, "moments": "bfloat16"}}
    assert (made(mapping).moments, made(mapping).seed) == ("bfloat16", 3)


def test_without_a_choice_it_is_adamw_with_the_fused_kernel() -> None:
    found = made(None)
    assert type(found) is AdamW
    assert all(group["fused"] and group["betas"] == (0.9, 0.95) for group in found.param_groups)
    assert not getattr(found, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("name", ["foreach", "differentiable", "fused"])
def test_the_user_may_choose_the_implementation(name: str) -> None:
    found = made({"class_path": "adamw", "init_args": {name: True}})
    assert [group[name] for group in found.param_groups] == [True, True]
    assert [bool(group["fused"]) for group in found.param_groups] == [name == "fused"] * 2


@pytest.mark.parametrize("path", ["torch.optim.NAdam", f"{HERE}.Theirs", "torch.optim.Rprop"])
def test_any_class_path_is_taken(path: str) -> None:
    found = made(path, weight_decay=0.2, betas=(0.7, 0.8))
    assert type(found) is {"NAdam": NAdam, "Theirs": Theirs, "Rprop": Rprop}[path.rpartition(".")[2]]
    if not isinstance(found, Rprop):
        assert found.param_groups[0]["betas"] == (0.7, 0.8)
        assert found.param_groups[0]["weight_decay"] == 0.2


def test_init_args_override_the_module() -> None:
    arguments = {"weight_decay": 0.3, "betas": [0.5, 0.6], "eps": 1e-6, "scale": 2.0}
    found = made({"class_path": f"{HERE}.Theirs", "init_args": arguments}, weight_decay=0.2)
    decay, others = found.param_groups
    assert found.scale == 2.0
    assert (decay["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert tuple(decay["betas"]) == (0.5, 0.6)
    assert decay["eps"] == others["eps"] == 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("adamww", "optimizer='adamww' is unknown. Did you mean adamw? Give adamw, split_adamw,"),
        ("SplitAdamW", "Did you mean split_adamw?"),
        ("", "is unknown. Give adamw"),
        ("torch.optim.Nope", "'torch.optim.Nope' cannot be imported: module 'torch.optim' has no attribute 'Nope'"),
        ("nowhere.Optimizer", "cannot be imported: No module named 'nowhere'"),
        ("..here.Optimizer", "cannot be imported"),
        ("torch.nn.Linear", "'torch.nn.Linear' is not a class of torch.optim.Optimizer"),
        ("torch.optim.swa_utils", "is not a class of"),
        (3, "optimizer=3: give a name or a mapping"),
        ({"init_args": {}}, "give the keys class_path"),
        ({"class_path": 3}, "give the keys class_path"),
        ({"class_path": "adamw", "init_args": 3}, "give the keys class_path"),
        ({"class_path": "adamw", "lr": 3}, "give the keys class_path"),
        ({"class_path": "adamw", "init_args": {"lr": 1e-3}}, "has lr in init_args. Give it as learning_rate"),
        ({"class_path": "adamw", "init_args": {"epsilon": 1}}, "AdamW has no argument 'epsilon', only lr, betas, eps,"),
        ({"class_path": f"{HERE}.Theirs", "init_args": {"a": 1}}, "no argument 'a', only scale, lr, betas,"),
        ({"class_path": "adamw", "init_args": {"params": []}}, "AdamW has no argument 'params'"),
        (
            {"class_path": "adamw", "init_args": {"eps": -1.0}},
            "AdamW(eps=-1.0) says Invalid epsilon value: -1.0",
        ),
        (
            {"class_path": "adamw", "init_args": {"weight_decay": -1.0}},
            "AdamW(weight_decay=-1.0) says Invalid weight_decay value",
        ),
        (
            {"class_path": "split_adamw", "init_args": {"moments": "4bit"}},
            "Choose one of 'float32', 'bfloat16', '8bit'",
        ),
        ({"class_path": "split_adamw", "init_args": {"eps": "small"}}, "SplitAdamW(eps='small') says"),
        (f"{HERE}.NoRate", "NoRate has no argument lr, which the schedule scales"),
        ("torch.optim.LBFGS", "LBFGS() says LBFGS doesn't support per-parameter options"),
        ("muon", "Muon steps matrices alone"),
        ("torch.optim.Muon", "Muon steps matrices alone"),
    ],
)
def test_a_bad_choice_is_refused_before_anything_is_allocated(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        CausalLMModule(config=LLAMA, optimizer=given)
    assert message in str(refused.value)


def test_bitsandbytes_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"AdamW8bit needs bitsandbytes, which is not installed. Run: pip install"):
        CausalLMModule(config=LLAMA, optimizer="adamw8bit")
    choose_optimizer("adamw")


def weights(optimizer: Any, tmp_path: Path, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = CausalLMModule(config=LLAMA, optimizer=optimizer, warmup_steps=0, learning_rate=1e-2)
    trainer(tmp_path, **{"gradient_clip_val": 1.0, **options}).fit(module, datamodule=Sequences())
    return {name: each.detach().clone() for name, each in module.named_parameters()}


@pytest.mark.sample(6)
@pytest.mark.parametrize("plan", ["offload", "resident"])
@pytest.mark.parametrize("name", ["split_adamw", "split_adamw_8bit", "adamw8bit", "adafactor", "sgd"])
def test_a_run_with_protrain_has_the_bits_of_a_plain_one(name: str, plan: str, tmp_path: Path) -> None:
    precision: Any = {"precision": "bf16-true"} if "split" in name else {}
    plain = weights(name, tmp_path, **precision)
    ours = weights(name, tmp_path, strategy=ProTrainStrategy(plan=plan), **precision)
    assert all(torch.equal(value, ours[key]) for key, value in plain.items())


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize(
    "options", [{"moments": "float32"}, {"moments": "8bit"}, {"moments": "bfloat16", "masters": False}], ids=str
)
def test_split_masters_step_behind_the_computation_with_the_same_bits(
    options: dict[str, Any], overlap: Any, tmp_path: Path
) -> None:
    given = {"class_path": "split_adamw", "init_args": options}
    run: dict[str, Any] = {"precision": "bf16-true", "gradient_clip_val": None if overlap == "backward" else 1.0}
    plain = weights(given, tmp_path, **run)
    ours = weights(given, tmp_path, strategy=ProTrainStrategy(plan="offload", overlap_optimizer=overlap), **run)
    assert all(torch.equal(value, ours[key]) for key, value in plain.items())


@pytest.mark.parametrize("given", ["split_adamw", {"class_path": "torch.optim.NAdam", "init_args": {"eps": 1e-6}}])
def test_the_choice_is_saved_and_old_checkpoints_are_loaded(given: Any, tmp_path: Path) -> None:
    module, saved = CausalLMModule(config=LLAMA, optimizer=given), tmp_path / "one.ckpt"
    run = trainer(tmp_path, max_steps=1)
    run.fit(module, datamodule=Sequences())
    run.save_checkpoint(saved)
    assert CausalLMModule.load_from_checkpoint(saved).hparams["optimizer"] == given
    content = torch.load(saved, weights_only=False)
    del content["hyper_parameters"]["optimizer"]
    torch.save(content, saved)
    assert CausalLMModule.load_from_checkpoint(saved).hparams["optimizer"] is None


@pytest.mark.parametrize(
    ("written", "kind", "eps"),
    [
        ("split_adamw", SplitAdamW, 1e-8),
        ("{class_path: torch.optim.NAdam, init_args: {eps: 1e-6}}", NAdam, 1e-6),
        ("{class_path: adamw, init_args: {eps: 1.0e-6}}", AdamW, 1e-6),
    ],
)
@pytest.mark.leaves("PL_GLOBAL_SEED")
def test_it_is_written_in_yaml(written: str, kind: type, eps: float, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    options = {"max_steps": 1, "accelerator": "cpu", "default_root_dir": tmp_path, "logger": "false"}
    options |= {"enable_progress_bar": "false", "enable_checkpointing": "false"}
    (tmp_path / "one.yaml").write_text(f"model:\n  config: {LLAMA}\n  optimizer: {written}\n")
    args = ["fit", f"--config={tmp_path}/one.yaml", *(f"--trainer.{key}={value}" for key, value in options.items())]
    cli = LightningCLI(CausalLMModule, Sequences, auto_configure_optimizers=False, save_config_callback=None, args=args)
    (found,) = cli.trainer.optimizers
    assert type(found) is kind
    assert found.param_groups[0]["eps"] == eps
