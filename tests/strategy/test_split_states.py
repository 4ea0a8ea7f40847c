"""A checkpoint of float32 weights and AdamW resumes with SplitAdamW, and the other way round, with equal masters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_protrain import ProTrainCheckpoint, ProTrainStrategy, SplitAdamW
from lightning_protrain.models.float32_masters import masters_in
from lightning_protrain.runtime.optim.split_adamw import float32_moment
from tests.support.models import ParityModule, zoo
from tests.support.plans import plans
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.trainers import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*in terms that allow_drift permits"),
    pytest.mark.filterwarnings("ignore:.* of the updates are lost"),  # By SGD.
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
STEPS = 4
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"moments": "bfloat16"},
    "8bit": {"moments": "8bit"},
    "no masters": {"masters": False},
}
MOMENTS = ("float32 exp_avg", "float32 exp_avg_sq", "step")
Values = dict[str, Tensor]


class Recorder(L.Callback):
    """Records what a run holds when training starts and when it ends."""

    def __init__(self) -> None:
        self.start: Values = {}
        self.end: Values = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = _held(pl_module, trainer.optimizers[0])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.end = _held(pl_module, trainer.optimizers[0])


def _held(module: L.LightningModule, optimizer: torch.optim.Optimizer) -> Values:
    """Return weights by name, and masters, moments in float32 and every entry of the state after a colon."""
    found: Values = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter.detach().clone()
        if parameter.requires_grad:
            master = optimizer.master(parameter) if isinstance(optimizer, SplitAdamW) else parameter.detach()
            found[f"{name}:master"] = master.float().clone()
        if state := optimizer.state.get(parameter):
            found |= {f"{name}:{key}": value.clone() for key, value in state.items()}
            found |= {f"{name}:float32 {key}": float32_moment(state, key).clone() for key in ("exp_avg", "exp_avg_sq")}
    return found


def _module(kind: str | None, model: str = "frozen") -> ParityModule:
    """Return a module that trains with AdamW without a kind, else with that kind of SplitAdamW."""
    module = zoo()[model](seed=5)
    lr = 0.01
    if model == "moe":  # A trained weight that never gets a gradient.
        module.register_parameter("unused", torch.nn.Parameter(torch.full((3,), 0.1)))
    if model == "moe" and kind is None:  # Ties: rounding takes them to even, but the weight lies away from zero.
        lr, weight = 0.0, module.network.head.weight.detach()
        weight.view(torch.int32).bitwise_and_(-1 << 16).bitwise_or_(1 << 15)

    def configure_optimizers() -> torch.optim.Optimizer:
        # In another order than that of the module.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        groups = [{"params": trained[:2], "weight_decay": 0.0}, {"params": trained[2:]}]
        return torch.optim.AdamW(groups, lr, fused=True) if kind is None else SplitAdamW(groups, lr, **FORMATS[kind])

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    return module


def _plan(plan: str, kind: str | None, model: str) -> Any:
    module = _module(kind, model)
    return plans()[plan](module if kind is None else module.to(torch.bfloat16))  # A plan knows the dtypes.


def _trainer(
    kind: str | None, steps: int, *callbacks: L.Callback, make: Callable[..., Any] = L.Trainer, **more: Any
) -> Any:
    precision = "bf16-mixed" if kind is None else "bf16-true"
    settings: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "precision": precision, **QUIET, **more}
    return make(**{**settings, "callbacks": list(callbacks), "enable_checkpointing": len(callbacks) > 1})


def _fit(
    kind: str | None, plan: str, steps: int, saver: L.Callback | None = None, path: Any = None, model: str = "frozen"
) -> Recorder:
    recorder = Recorder()
    callbacks = [recorder] if saver is None else [recorder, saver]
    strategy = "auto" if plan == "plain" else ProTrainStrategy(plan=_plan(plan, kind, model), monitor=False)
    trainer = _trainer(kind, steps, *callbacks, strategy=strategy, accelerator="cpu", devices=1)
    module = _module(kind, model)
    if path is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)
    torch.manual_seed(0)
    trainer.fit(module, ckpt_path=path, weights_only=False)
    return recorder


def _saver(form: str, folder: Path, every: int = STEPS, **options: Any) -> ModelCheckpoint:
    made = ProTrainCheckpoint if form == "folder" else ModelCheckpoint
    options = options if form == "folder" else {}
    return made(folder, filename="saved-{step}", every_n_train_steps=every, save_top_k=-1, **options)


def _equal(one: Values, other: Values, *parts: str) -> bool:
    names = [name for name in one if name.partition(":")[2] in parts]
    return bool(names) and all(torch.equal(one[name], other[name]) for name in names)


FORMS = [("plain", "folder"), *itertools.product(("resident", "offload"), ("folder", "file")), ("half", "folder")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("plan", "form"), FORMS)
@pytest.mark.parametrize("kind", ["float32", "8bit"])
@pytest.mark.parametrize("model", ["frozen", "moe"])
def test_masters_and_moments_pass_from_one_form_to_the_other(
    model: str, kind: str, plan: str, form: str, tmp_path: Path
) -> None:
    drift = {"allow_drift": ["precision", "dtype"]}
    for number, (first, second) in enumerate(((None, kind), (kind, None))):
        folder = tmp_path / str(number)
        begun = _fit(first, plan, STEPS, _saver(form, folder), model=model).end
        path = folder / f"saved-step={STEPS}.ckpt"
        resumed = _fit(second, plan, STEPS + 1, _saver(form, tmp_path / "more", **drift), path, model)
        assert _equal(begun, resumed.start, "master", "step")
        assert _equal(begun, resumed.start, *MOMENTS) or (second, kind) == (kind, "8bit")
        weights = {name: value for name, value in resumed.start.items() if ":" not in name}
        assert {value.dtype for value in weights.values()} == {torch.float32 if second is None else torch.bfloat16}
        keys = {name.partition(":")[2] for name in resumed.start}
        assert ("remainder" in keys, "exp_avg_scale" in keys) == (second is not None, second == "8bit")


@pytest.mark.sample(4)
@pytest.mark.parametrize(("plan", "form"), FORMS[1:])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_resumed_run_ends_as_one_without_a_break(kind: str, plan: str, form: str, tmp_path: Path) -> None:
    steps = STEPS if form == "folder" else 14  # Lightning's files restore no position within an epoch.
    expected = _fit(kind, "plain", steps + 3).end
    _fit(kind, plan, steps + 1, _saver(form, tmp_path, steps))
    found = _fit(kind, plan, steps + 3, _saver(form, tmp_path, steps), tmp_path / f"saved-step={steps}.ckpt").end
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


@pytest.mark.parametrize(("one", "other"), [("float32", "8bit"), ("8bit", "bfloat16"), ("bfloat16", "float32")])
def test_moments_are_converted_and_masters_stay(one: str, other: str, tmp_path: Path) -> None:
    begun = _fit(one, "offload", STEPS, _saver("folder", tmp_path)).end
    resumed = _fit(other, "offload", STEPS + 1, path=tmp_path / f"saved-step={STEPS}.ckpt").start
    assert _equal(begun, resumed, "master", "remainder", "step")
    for name in (name for name in begun if ":float32" in name):
        torch.testing.assert_close(begun[name], resumed[name], rtol=0.02, atol=float(begun[name].abs().max()) / 100)


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_states_of_other_optimizers_are_refused(plan: str, tmp_path: Path) -> None:
    def fit(optimizer: str, path: Path | None = None) -> L.Trainer:
        module = _module("float32")
        if optimizer == "SGD":
            groups = module.configure_optimizers().param_groups
            plain = [{"params": group["params"]} for group in groups]
            module.configure_optimizers = lambda: torch.optim.SGD(plain, momentum=0.9)  # type: ignore[method-assign]
        strategy = ProTrainStrategy(plan=plan, monitor=False)
        trainer: L.Trainer = _trainer("float32", STEPS, strategy=strategy, accelerator="cpu", devices=1)
        trainer.fit(module, ckpt_path=path, weights_only=False)
        return trainer

    for first, second, message in (
        ("SGD", "SplitAdamW", "was not made by AdamW or SplitAdamW"),
        ("SplitAdamW", "SGD", "optimizer states of SplitAdamW, which SGD cannot load"),
    ):
        fit(first).save_checkpoint(tmp_path / first)
        with pytest.raises(ValueError, match=message):
            fit(second, tmp_path / first)


def _pass_on_rank(rank: int, folder: Path, first: str | None, second: str | None) -> list[tuple[list[str], list[str]]]:
    """Return the names of the masters that this rank has after resuming, and of those that are not the saved ones."""
    torch.set_num_threads(1)
    found = []
    for sharding in ("shard", "replicate"):
        make = partial(ProTrainStrategy, plan="offload", sharding=sharding, monitor=False)
        on_rank = partial(trainer_on_rank, rank, dist.get_world_size(), kind=make)
        path, resumed = folder / f"{sharding}.ckpt", Recorder()
        trainer = _trainer(first, STEPS, make=on_rank)
        trainer.fit(_module(first))
        trainer.save_checkpoint(path)
        dist.barrier()
        _trainer(second, STEPS + 1, resumed, make=on_rank).fit(_module(second), ckpt_path=path, weights_only=False)
        content = torch.load(path, weights_only=False)
        saved = content["state_dict"] if first is None else masters_in(content)
        # Other ranks have the remainders of parameters that they own.
        owned = [name.removesuffix(":step") for name in resumed.start if name.endswith(":step")]
        masters = {name: resumed.start[f"{name}:master"] for name in owned}
        found.append((list(masters), [name for name in masters if not torch.equal(saved[name], masters[name])]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(None, "8bit"), ("8bit", None)])
def test_masters_pass_on_several_ranks(first: str | None, second: str | None, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    trained = {name for name, parameter in _module(None).named_parameters() if parameter.requires_grad}
    for ranks in zip(*values(run_ranks(_pass_on_rank, 2, tmp_path / "meeting", tmp_path, first, second)), strict=True):
        assert {name for names, _ in ranks for name in names} == trained
        assert [wrong for _, wrong in ranks] == [[], []]
