"""A fit is held to its contract: what it is known by, and a refusal that names all that has changed."""

from __future__ import annotations

import copy
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.resume import ResumedFit
from lightning_protrain.callbacks.checkpoint.run_signature import (
    data_signature,
    model_signature,
    optimizer_signature,
)
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.data.batches.pack import single_blocks
from lightning_protrain.data.batches.sampler import EpochSampler
from lightning_protrain.rank_store import RankStore
from tests.support.trainers import SILENT


def _dataset(count: int = 6) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)), torch.ones(count, 2))


def test_companions_of_quantised_weights_are_no_weights() -> None:
    names = ["a.weight", "a.weight.absmax", "a.weight.quant_map", "a.weight.nested_absmax", "a.weight.nested_quant_map"]
    state = dict.fromkeys([*names, "a.weight.quant_state.bitsandbytes__nf4"], torch.zeros(1))
    assert list(model_signature(state)) == ["a.weight"]
    # Names like theirs are weights like others where they belong to none.
    assert list(model_signature({"absmax": torch.zeros(1), "b.absmax": torch.zeros(2)})) == ["absmax", "b.absmax"]


def _optimizer_terms(schedule: Any, *, last: bool = False) -> Any:
    module: Any = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    config = SimpleNamespace(scheduler=schedule(optimizer), interval="step", frequency=1)
    return optimizer_signature(SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[config]), module)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda o: CosineAnnealingLR(o, 10), lambda o: CosineAnnealingLR(o, 11)),
        (lambda o: CosineAnnealingLR(o, 10), lambda o: LambdaLR(o, lambda step: 1.0)),
        (lambda o: LambdaLR(o, lambda step: min(step, 10)), lambda o: LambdaLR(o, lambda step: min(step, 20))),
        (lambda o: ReduceLROnPlateau(o, patience=3), lambda o: ReduceLROnPlateau(o, patience=4)),
    ],
)
def test_schedules_are_known_by_what_they_do(one: Any, other: Any) -> None:
    assert _optimizer_terms(one) == _optimizer_terms(one)
    assert _optimizer_terms(one) != _optimizer_terms(other)
    json.dumps(_optimizer_terms(one))


@pytest.mark.parametrize(
    ("loader", "size", "shuffled"),
    [
        (DataLoader(_dataset(), batch_size=3), 3, False),
        (DataLoader(_dataset(), batch_size=2, shuffle=True), 2, True),
        (DataLoader(_dataset(), batch_sampler=BatchSampler(DistributedSampler(_dataset(), 2, 0), 2, False)), 2, True),
        (DataLoader(_dataset(), sampler=WeightedRandomSampler([1.0], 1)), 1, None),
        (DataLoader(_dataset(), batch_sampler=[[0, 1], [2]]), None, None),
    ],
)
def test_data_is_known_by_rows_order_and_content(loader: Any, size: int | None, shuffled: bool | None) -> None:
    terms = data_signature([loader])
    assert terms["batch_size"] == (None if size is None else [size])
    [known] = terms["data"]
    assert known["rows"] == 6
    assert known.get("shuffled") is shuffled
    assert known["fingerprint"] != data_signature([DataLoader(_dataset(7))])["data"][0]["fingerprint"]
    json.dumps(terms)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4)[::2][:1],
        torch.ones(()).expand(3),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(0, 2),
        torch.eye(3).to_sparse(),
    ],
    ids=["one of a stride", "expanded", "conjugate", "empty", "sparse"],
)
def test_tensors_of_any_layout_have_a_fingerprint(tensor: Tensor) -> None:
    [known] = data_signature([DataLoader(TensorDataset(tensor))])["data"]
    assert known["fingerprint"].startswith("crc32:")


def test_a_dataset_says_what_it_is_by_a_fingerprint() -> None:
    for name in ("fingerprint", "_fingerprint"):
        dataset = _dataset()
        setattr(dataset, name, "abc")
        assert data_signature([DataLoader(dataset)])["data"][0]["fingerprint"] == "abc"


def test_a_sampler_says_more() -> None:
    def terms(**options: Any) -> dict[str, Any]:
        given = {"batch_size": 2, "seed": 1, **options}
        return data_signature(
            [SimpleNamespace(sampler=EpochSampler(single_blocks(torch.arange(1, 9).numpy()), **given))]
        )

    assert terms() == terms(world_size=2)
    assert terms()["batch_size"] == [2]
    assert terms(batch_size=3)["data"] == terms()["data"]
    assert terms(seed=2)["data"] != terms()["data"]


def test_of_what_says_nothing_its_length_is_known() -> None:
    assert data_signature([[1, 2, 3]]) == {"batch_size": None, "data": [{"batches": 3}]}
    assert data_signature([iter([1, 2, 3])]) == {"batch_size": None, "data": None}


ROWS = 16


class Configured(L.LightningModule):
    """Everything that a contract knows of can be given."""

    def __init__(
        self, width: int = 3, optimizer: type = torch.optim.AdamW, order: int = 1, schedule: Callable | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
        self.make, self.order, self.schedule = optimizer, order, schedule
        self.trained = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trained += 1
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        parameters = [each for each in list(self.parameters())[:: self.order] if each.requires_grad]
        optimizer = self.make(parameters, lr=0.1)
        if self.schedule is None:
            return optimizer
        scheduler = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _cosine(optimizer: Any, total: int) -> Any:
    return CosineAnnealingLR(optimizer, total)


def _function(optimizer: Any, total: int) -> Any:
    return LambdaLR(optimizer, lambda step: 1 - min(step, total) / total)


def _nested(optimizer: Any, total: int) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1, 2), CosineAnnealingLR(optimizer, total - 2)], [2])


def _fit(root: Path, path: Any = None, module: Configured | None = None, **options: Any) -> Configured:
    module = module or Configured(**{name: options.pop(name) for name in ("schedule",) if name in options})
    of_saver = {name: options.pop(name) for name in ("allow_drift", "weights_and_counters_only") if name in options}
    rows = torch.arange(2.0 * options.pop("rows", ROWS)).reshape(-1, 2) / 10 + options.pop("shift", 0)
    loader = DataLoader(
        TensorDataset(rows), batch_size=options.pop("batch_size", 2), shuffle=options.pop("shuffle", True)
    )
    saver = ProTrainCheckpoint(root, every_n_train_steps=1, save_top_k=-1, **of_saver)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[saver],
        **{"max_steps": 6, "accumulate_grad_batches": 2, **SILENT, **options},
    )
    trainer.fit(module, loader, ckpt_path=path)
    return module


def _saved(root: Path, **options: Any) -> Path:
    _fit(root, **{"max_steps": 3, **options})
    return find_checkpoints(root).found[0].path


DRIFTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "optimizer",
        {"module": Configured(optimizer=torch.optim.SGD)},
        r"\.class: saved 'torch\.optim\.adamw\.AdamW', now ",
    ),
    (
        "optimizer",
        {"module": Configured(order=-1)},
        r"groups\[0\]\[0\]: saved 'layers\.0\.weight', now 'layers\.1\.bias'",
    ),
    ("precision", {"precision": "bf16-mixed"}, r"precision: saved '32-true', now 'bf16-mixed'"),
    ("accumulation", {"accumulate_grad_batches": 1}, r"accumulation: saved 2, now 1"),
    ("batch_size", {"batch_size": 4}, r"batch_size \[0\]: saved 2, now 4"),
    ("data", {"rows": 20}, r"data \[0\]\.rows: saved 16, now 20"),
    ("data", {"shift": 1}, r"data \[0\]\.fingerprint: saved 'crc32:"),
    ("data", {"shuffle": False}, r"data \[0\]\.shuffled: saved True, now False"),
]


@pytest.mark.parametrize("only", [False, True])
def test_a_checkpoint_of_another_model_is_called_so_and_no_option_is_named(tmp_path: Path, only: bool) -> None:
    path = _saved(tmp_path)
    module = Configured(width=4)
    message = r"(?s)step=3\.ckpt is a checkpoint of another model.*model layers\.0\.weight\[0\]: saved 3, now 4"
    with pytest.raises(ValueError, match=message) as caught:
        _fit(tmp_path, path, module, weights_and_counters_only=only, precision="bf16-mixed")
    assert "allow_drift" not in str(caught.value)
    assert "weights_and_counters_only" not in str(caught.value)
    assert module.trained == 0


@pytest.mark.parametrize(("term", "options", "message"), DRIFTS, ids=[message for *_, message in DRIFTS])
def test_a_changed_setting_is_refused_before_training(
    tmp_path: Path, term: str, options: dict[str, Any], message: str
) -> None:
    path = _saved(tmp_path)
    module = copy.deepcopy(options.get("module") or Configured())
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=rf"(?s)step=3\.ckpt was saved with settings that differ.*{message}.*{term}"
    ) as caught:
        _fit(tmp_path, path, **{**options, "module": module})
    assert f"allow_drift=['{term}']" in str(caught.value)
    assert module.trained == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", [option for _, option, _ in DRIFTS[3:]], ids=str)
def test_a_changed_setting_is_allowed_by_name(tmp_path: Path, option: dict[str, Any]) -> None:
    path = _saved(tmp_path)
    term = next(term for term, each, _ in DRIFTS if each is option)
    with pytest.warns(UserWarning, match=rf"(?s)terms that allow_drift permits:\n  {term}"):
        module = _fit(tmp_path, path, allow_drift=[term], **option)
    assert module.trained > 0


def test_everything_that_has_changed_is_in_one_message(tmp_path: Path) -> None:
    path = _saved(tmp_path, schedule=_cosine)
    module = Configured(optimizer=torch.optim.SGD, schedule=_cosine)
    options = {"batch_size": 4, "accumulate_grad_batches": 1, "rows": 20, "precision": "bf16-mixed", "max_steps": 9}
    with pytest.raises(ValueError) as caught:
        _fit(tmp_path, path, module, **options)
    terms = ["optimizer", "precision", "accumulation", "batch_size", "data", "lr_schedule"]
    assert f"allow_drift={terms}" in str(caught.value)
    assert str(caught.value).count(": saved ") >= len(terms)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (_cosine, r"lr_schedule \[0\]\.T_max: saved 3, now 6"),
        (_function, r"lr_schedule \[0\]\.factors\[0\]\.at step 2: saved 0\.33.*, now 0\.66"),
        (_nested, r"lr_schedule \[0\]\.schedulers\[1\]\.T_max: saved 1, now 4"),
    ],
)
def test_the_horizon_is_what_the_schedule_was_made_for(
    tmp_path: Path, schedule: Callable, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = _saved(tmp_path, schedule=schedule)
    with pytest.raises(ValueError, match=message):
        _fit(tmp_path, path, schedule=schedule)
    caplog.clear()
    assert _fit(tmp_path, path, schedule=schedule, max_steps=3).trained == 0  # The same horizon.
    advice = (
        r"raise max_steps above 3, and set (ProTrainCheckpoint\(allow_drift=\['lr_schedule'\]\)), in YAML `(.*?)` in"
    )
    python, in_yaml = re.search(advice, caplog.text).groups()  # type: ignore[union-attr]
    assert python == f"ProTrainCheckpoint(allow_drift={yaml.safe_load(in_yaml)['allow_drift']})"
    # Who follows the advice trains on.
    with pytest.warns(UserWarning, match="that allow_drift permits"):
        assert _fit(tmp_path, path, schedule=schedule, max_steps=4, **yaml.safe_load(in_yaml)).trained == 2


def test_without_a_schedule_or_with_a_fixed_one_the_run_may_be_longer(tmp_path: Path) -> None:
    for name, schedule in (("none", None), ("fixed", lambda optimizer, total: CosineAnnealingLR(optimizer, 50))):
        path = _saved(tmp_path / name, schedule=schedule)
        assert _fit(tmp_path / name, path, schedule=schedule).trained == 6


def test_another_optimizer_begins_anew_if_it_is_allowed(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    module = Configured(optimizer=torch.optim.SGD)
    with pytest.warns(UserWarning, match="that allow_drift permits:\n  optimizer"):
        _fit(tmp_path, path, module, allow_drift=["optimizer"], max_steps=4)
    last = ProTrainCheckpointIO().load_checkpoint(find_checkpoints(tmp_path).found[0].path)
    assert (last["global_step"], last["optimizer_states"][0]["state"]) == (4, {})


def test_weights_and_counters_are_all_that_is_taken_if_asked(tmp_path: Path) -> None:
    path = _saved(tmp_path, schedule=_cosine)
    saved = ProTrainCheckpointIO().load_checkpoint(path)
    other = _Watched(optimizer=torch.optim.SGD, schedule=_function)
    _fit(tmp_path / "new", path, other, batch_size=4, rows=32, max_steps=4, weights_and_counters_only=True)
    last = ProTrainCheckpointIO().load_checkpoint(find_checkpoints(tmp_path / "new").found[0].path)
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in other.found.items())
    assert (last["global_step"], last["lr_schedulers"][0]["last_epoch"]) == (4, 1)
    with pytest.raises(ValueError, match=r"model layers\.0\.weight\[0\]: saved 3, now 5"):
        _fit(tmp_path / "new", path, Configured(width=5), weights_and_counters_only=True)


class _Watched(Configured):
    def on_train_start(self) -> None:
        self.found = {name: value.clone() for name, value in self.state_dict().items()}


def test_the_same_terms_are_no_drift(tmp_path: Path) -> None:
    path = _saved(tmp_path, schedule=lambda optimizer, total: LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    contract = ProTrainCheckpointIO().load_checkpoint(path)["contract"]
    assert contract["batch_size"] == [2]
    assert contract["optimizer"][0]["groups"] == [
        ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    ]
    module = _fit(tmp_path, path, schedule=lambda optimizer, total: LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    assert module.trained == 6


def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    with pytest.raises(ValueError, match=r"dtype layers\.0\.weight: saved 'torch\.float32', now 'torch\.float64'"):
        _fit(tmp_path, path, Configured().double())


class _State:
    """A stand-in for the `quant_state` that bitsandbytes attaches to a 4-bit weight."""

    quant_type, blocksize, state2 = "nf4", 64, None

    def __init__(self) -> None:
        self.absmax, self.code = torch.ones(2), torch.linspace(-1, 1, 16)


class Quantised(nn.Module):
    """Saves what a layer of bitsandbytes in 4 bits saves, and like it loads none of it."""

    def __init__(self, absmax: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = _State()
        self.weight.quant_state.absmax.fill_(absmax)

    def _save_to_state_dict(self, destination: OrderedDict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.quant_state
        destination[f"{prefix}weight.absmax"] = state.absmax
        destination[f"{prefix}weight.quant_map"] = state.code
        packed = torch.frombuffer(bytearray(b'{"quant_type": "nf4", "blocksize": 64}'), dtype=torch.uint8)
        destination[f"{prefix}weight.quant_state.bitsandbytes__nf4"] = packed


def test_what_quantised_weights_need_passes_strict_loading(tmp_path: Path) -> None:
    def module(absmax: float) -> Configured:
        made = Configured()
        made.base = Quantised(absmax)
        return made

    path = _saved(tmp_path, module=module(3.0))
    with pytest.raises(RuntimeError, match="Unexpected key"):  # Without it they do not.
        module(3.0).load_state_dict(ProTrainCheckpointIO().load_checkpoint(path)["state_dict"])
    resumed = module(1.0)
    _fit(tmp_path, path, resumed)
    assert resumed.base.weight.quant_state.absmax.tolist() == [3.0, 3.0]
    assert resumed.trained == 6
    assert not resumed.base._load_state_dict_pre_hooks


def _trainer(rank: int = 0, world_size: int = 1, path: str | None = "x", module: Any = None) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        world_size=world_size,
        global_rank=rank,
        ckpt_path=path,
        lightning_module=module,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        precision="32-true",
        accumulate_grad_batches=1,
        fit_loop=SimpleNamespace(_data_source=SimpleNamespace(instance=None, name="train_dataloader")),
    )


def _module() -> Any:
    module = L.LightningModule()
    module.layer = nn.Linear(1, 1)
    return module


def _resumed(saved: dict[str, Any], trainer: Any) -> ResumedFit:
    resumption = ResumedFit()
    resumption.begin(trainer, RankStore.open("x"))
    resumption.accept(trainer, {"state_dict": trainer.lightning_module.state_dict(), **saved}, "x")
    return resumption


def test_random_numbers_go_on_when_training_starts_and_not_before() -> None:
    saved: dict[str, Any] = {}
    trainer = _trainer(module=_module())
    ResumedFit().save(trainer, saved)
    expected = torch.rand(3)
    resumption = _resumed(saved, trainer)
    assert not torch.equal(torch.rand(3), expected)
    resumption.restore(trainer)
    assert torch.equal(torch.rand(3), expected)
    resumption.restore(_trainer(path=None))  # Once only.
    assert not torch.equal(torch.rand(3), expected)


def test_another_model_is_refused_before_anything_is_loaded() -> None:
    trainer = _trainer(module=_module())
    with pytest.raises(ValueError, match=r"model layer\.weight\[0\]: saved 2, now 1"):
        _resumed({"state_dict": nn.ModuleDict({"layer": nn.Linear(1, 2)}).state_dict()}, trainer)
    # Where names may be missing, those that both have are compared.
    trainer.lightning_module.strict_loading = False
    _resumed({"state_dict": {"layer.bias": torch.zeros(1)}}, trainer)
