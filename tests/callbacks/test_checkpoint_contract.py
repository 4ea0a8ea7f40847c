"""A run that is resumed on other terms than those it was saved under is refused, with all that has changed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO

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
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[saver],
        **{"max_steps": 6, "accumulate_grad_batches": 2, **quiet, **options},
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
def test_what_has_changed_is_refused_before_it_trains(
    tmp_path: Path, term: str, options: dict[str, Any], message: str
) -> None:
    path = _saved(tmp_path)
    module = copy.deepcopy(options.get("module") or Configured())
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=rf"(?s)step=3\.ckpt was saved with other settings.*{message}.*{term}"
    ) as caught:
        _fit(tmp_path, path, **{**options, "module": module})
    assert f"allow_drift=['{term}']" in str(caught.value)
    assert module.trained == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", [option for _, option, _ in DRIFTS[3:]], ids=str)
def test_it_is_allowed_by_name(tmp_path: Path, option: dict[str, Any]) -> None:
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
def test_the_horizon_is_what_the_schedule_was_made_for(tmp_path: Path, schedule: Callable, message: str) -> None:
    path = _saved(tmp_path, schedule=schedule)
    with pytest.raises(ValueError, match=message):
        _fit(tmp_path, path, schedule=schedule)
    assert _fit(tmp_path, path, schedule=schedule, max_steps=3).trained == 0  # The same horizon.


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


def test_only_terms_can_be_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"allow_drift=\['batchsize'\]: give a list of model, dtype"):
        ProTrainCheckpoint(tmp_path, allow_drift=["batchsize"])


class _State:
    """Of a weight in 4 bits, as bitsandbytes has it."""

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
