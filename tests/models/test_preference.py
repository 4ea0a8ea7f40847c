"""PreferenceModule: the mean over pairs, the reference and its rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.testing import assert_close

from lightning_protrain import InitialValidation, PreferenceModule, ProTrainCheckpointIO, SampleCompletion
from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.models.preference_loss import Objective
from lightning_protrain.trainer import PlanningTrainer
from tests.callbacks.stand_ins import chat_data
from tests.support.module_runs import LLAMA, trainer
from tests.support.preference_runs import LORA, Pairs, built, collate, filler, module, pairs
from tests.support.tiny_networks import tiny_config


class Gradients(Callback):
    """Records the gradients of every optimizer step, the loss of every batch, and the logged loss."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.logged: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        trained = [(name, weight) for name, weight in pl_module.named_parameters() if weight.grad is not None]
        self.gradients.append({name: weight.grad.clone() for name, weight in trained if weight.grad is not None})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        self.logged.append(float(trainer.callback_metrics.get("train_loss", torch.nan)))


def train(folder: Path, data: Any, *callbacks: Callback, ckpt_path: Any = None, steps: int = 4, **options: Any) -> Any:
    """A module that was trained, and the trainer; `plugins` are the Trainer's."""
    plugins = options.pop("plugins", [])
    made = module(**options)
    windows = {"accumulate_grad_batches": data.accumulate}
    run = trainer(folder, max_steps=steps, callbacks=list(callbacks), plugins=plugins, **windows)
    run.fit(made, data, ckpt_path=ckpt_path)
    return made, run


def data_of(folder: Path, batches: list[Any], accumulate: int, loss: str = "dpo") -> Pairs:
    data = Pairs(folder, loss=loss, accumulate=accumulate)
    data.splits["train"] = batches
    return data


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": LORA}, {"loss": "ipo"}, {"loss": "orpo"}, {"loss": "simpo"}],
    ids=["dpo", "lora", "ipo", "orpo", "simpo"],
)
def test_a_window_with_fillers_is_one_large_batch(options: dict[str, Any], tmp_path: Path) -> None:
    five = pairs(5)
    parts = [collate(five[:2]), collate([filler(five[0])]), collate([*five[2:4], filler(five[1])]), collate(five[4:])]
    of_window, of_batch = Gradients(), Gradients()
    train(tmp_path, data_of(tmp_path, parts, 4), of_window, steps=1, **options)
    train(tmp_path, data_of(tmp_path, [collate(five)], 1), of_batch, steps=1, **options)
    assert of_window.logged[-1] == pytest.approx(of_batch.logged[-1], rel=1e-6)
    assert len(of_window.losses) == 4
    assert of_window.losses[1] == 0
    assert_close(of_window.gradients, of_batch.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_filler_changes_nothing_in_kto(lora: Any, tmp_path: Path) -> None:
    three, found = pairs(3), []
    for rows in (three, [three[0], filler(three[2]), *three[1:]]):
        found.append(Gradients())
        train(tmp_path, data_of(tmp_path, [collate(rows, "kto")], 1, "kto"), found[-1], steps=1, loss="kto", lora=lora)
    assert found[0].losses[0] != 0
    assert_close(found[0].losses, found[1].losses, rtol=1e-6, atol=0)
    assert_close(found[0].gradients, found[1].gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_a_batch_of_one_label_trains(label: int, tmp_path: Path) -> None:
    rows = [{**pair, "desirable": torch.tensor([label])} for pair in pairs(2)]
    data, seen = data_of(tmp_path, [collate(rows, "kto")], 1, "kto"), Gradients()
    data.splits["validation"] = data.splits["train"]
    weight = {"desirable_weight": 2.0} if label else {"undesirable_weight": 2.0}
    _, run = train(tmp_path, data, seen, steps=1, loss="kto", **weight)
    assert seen.losses[0] == 1.0  # 2 * (1 - sigmoid(0))
    run.validate(run.lightning_module, data, verbose=False)
    kind, other = ("chosen", "rejected")[:: 1 if label else -1]
    assert f"val_rewards_{kind}" in run.callback_metrics
    assert f"val_rewards_{other}" not in run.callback_metrics


# The reference


def test_the_first_loss_is_that_of_equal_models(tmp_path: Path) -> None:
    for lora in (None, LORA, {**LORA, "init_lora_weights": "pissa"}, {**LORA, "bias": "lora_only"}):
        seen = Gradients()
        train(tmp_path, Pairs(tmp_path), seen, steps=1, lora=lora)
        assert_close(seen.losses[0], torch.tensor(2.0).log(), rtol=1e-5, atol=0)


NEW_ROWS = {**LORA, "trainable_token_indices": [3, 5]}


@pytest.mark.parametrize(
    "lora", [LORA, {**LORA, "modules_to_save": ["lm_head"]}, NEW_ROWS, {**LORA, "lora_dropout": 0.5, "use_dora": True}]
)
def test_without_adapters_the_model_is_its_base_and_no_random_number_is_drawn(lora: Any) -> None:
    made, batch = built(lora=lora, disable_dropout=False), collate(pairs(3))
    before = made._reference_logps(batch)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight))
    frozen = {name: weight.requires_grad for name, weight in made.named_parameters()}
    state, training = torch.get_rng_state(), [each.training for each in made.modules()]
    after = made._reference_logps(batch)
    assert before is not None
    assert torch.equal(before, after)
    assert torch.equal(state, torch.get_rng_state())
    assert training == [each.training for each in made.modules()]
    assert frozen == {name: weight.requires_grad for name, weight in made.named_parameters()}
    assert not torch.equal(made._token_logps(batch)[0].sum(1), after)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_computed_before_training_or_in_each_step_the_reference_is_the_same(loss: str, tmp_path: Path) -> None:
    found = []
    for precompute in (False, True):
        data = Pairs(tmp_path, loss=loss)
        made, _ = train(tmp_path, data, loss=loss, lora=LORA, precompute_ref_log_probs=precompute)
        found.append(made.state_dict())
        assert bool(data.computed) is precompute
    assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_reference_on_disk_is_read_by_runs_with_equal_weights_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = PreferenceModule._compute_reference
    monkeypatch.setattr(
        PreferenceModule, "_compute_reference", lambda self, *rest: computed.append(1) or compute(self, *rest)
    )
    first, _ = train(tmp_path, Pairs(tmp_path))
    again, _ = train(tmp_path, Pairs(tmp_path), loss="ipo")
    assert len(computed) == 1
    assert_close(first._reference.state(), again._reference.state(), rtol=0, atol=0)
    train(tmp_path, Pairs(tmp_path, seed=1))
    train(tmp_path, Pairs(tmp_path), config={**LLAMA, "tie_word_embeddings": True})
    assert len(computed) == 3
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(b"no tensors")
    with pytest.warns(UserWarning, match="is damaged"):
        train(tmp_path, Pairs(tmp_path))
    assert len(computed) == 4
    for start in (True, "gaussian"):  # Adapters are no part of the reference.
        train(tmp_path, Pairs(tmp_path), lora={**LORA, "init_lora_weights": start}, precompute_ref_log_probs=True)
    assert len(computed) == 5


class Saver(Callback):
    """Saves a checkpoint after the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("plugins", [[], [ProTrainCheckpointIO()]], ids=["file", "folder"])
def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(plugins: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "saved"
    whole, _ = train(tmp_path, Pairs(tmp_path / "first"), Saver(path), plugins=plugins)
    # Elsewhere: neither the cache nor the first weights are there.
    data = Pairs(tmp_path / "second")
    rest, resumed = train(tmp_path, data, ckpt_path=path, plugins=plugins)
    assert resumed.global_step == 4
    assert_close(rest.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert not (tmp_path / "second").exists()

    for split in ("train", "validation"):
        data = Pairs(tmp_path)
        data.splits[split] = Pairs(tmp_path, seed=1).splits[split]
        with pytest.raises(ValueError, match=r"of 32 rows of the data have no log-probability of the reference model"):
            train(tmp_path, data, ckpt_path=path, plugins=plugins)


def test_a_checkpoint_without_reference_is_not_resumed(tmp_path: Path) -> None:
    _, run = train(tmp_path, Pairs(tmp_path), steps=1, loss="orpo")
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="32 of 32 rows of the data have no log-probability"):
        train(tmp_path, Pairs(tmp_path), ckpt_path=tmp_path / "a.ckpt")


def test_a_new_fit_has_a_new_reference(tmp_path: Path) -> None:
    seen, data = Gradients(), Pairs(tmp_path)
    made, _ = train(tmp_path, data)
    run = trainer(tmp_path, max_steps=1, callbacks=[seen])
    run.fit(made, data)
    assert_close(seen.losses[0], torch.tensor(2.0).log(), rtol=1e-5, atol=0)
    assert run.validate(made, data, verbose=False)[0]["val_loss"] != pytest.approx(0.6931, abs=1e-4)


def test_without_a_fit_a_model_is_its_own_reference_and_a_prediction_needs_none(tmp_path: Path) -> None:
    made, data, run = module(), Pairs(tmp_path), trainer(tmp_path)
    data.splits["test"] = Pairs(tmp_path, seed=1).splits["validation"]
    for results in (run.validate(made, data, verbose=False), run.test(made, data, verbose=False)):
        assert [round(value, 4) for name, value in results[0].items() if name.endswith("_loss")] == [0.6931]
    run.fit(made, data)
    with pytest.raises(ValueError, match="8 of 8 rows of the data have no log-probability"):
        run.test(made, data)
    scores: Any = run.predict(made, data)
    assert [part["loss_sum"].shape for part in scores] == [(4,), (4,)]


# Steps


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_no_dropout_is_left(kind: str) -> None:
    drops = {"opt": {"dropout": 0.5, "layerdrop": 0.5}, "gpt2": {"resid_pdrop": 0.5}}[kind]
    made, batch = built(config=tiny_config(kind, vocab_size=64, **drops), loss="orpo").train(), collate(pairs(2))
    assert torch.equal(made._token_logps(batch)[0], made._token_logps(batch)[0])
    assert all(getattr(made.model.config, name) == 0.5 for name in drops), "it is saved as it was"


@pytest.mark.parametrize("logps", [[0.0, -3.0], [-2.0, 0.0]])
def test_an_answer_that_is_learnt_perfectly_has_finite_gradients(logps: list[float]) -> None:
    rows = torch.tensor(logps, requires_grad=True)
    Objective(loss="orpo").of_pairs(rows, torch.tensor([2, 2]), None, -rows[0::2] / 2).losses.sum().backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()
    assert rows.grad[1] > 0 > rows.grad[0]


def test_weights_that_autocast_casts_without_gradients_are_cast_again() -> None:
    made, batch = built(loss="kto"), collate(pairs(2), "kto")
    batch["reference_logps"] = torch.zeros(4)
    with torch.autocast("cpu", torch.bfloat16):
        made.training_step(batch).backward()
    assert all(
        weight.grad is not None and weight.grad.abs().sum() > 0 for weight in made.model.model.layers.parameters()
    )


@pytest.mark.filterwarnings("ignore:'mixtral' with these settings")
@pytest.mark.parametrize("loss", ["orpo", "kto"])
def test_a_router_loss_is_added_and_logits_outside_a_plain_head_are_read(loss: str) -> None:
    batch = collate(pairs(2), loss) | ({"reference_logps": torch.zeros(4)} if loss == "kto" else {})
    losses = []
    for coefficient in (0.0, 0.5):
        config = tiny_config("mixtral", output_router_logits=True, router_aux_loss_coef=coefficient, vocab_size=64)
        losses.append(built(config=config, loss=loss).training_step(batch))
    assert losses[1] > losses[0] + 0.5


@pytest.mark.parametrize("loss", ["dpo", "orpo", "simpo", "kto"])
def test_slices_of_logits_give_the_same_loss_and_gradients(loss: str) -> None:
    batch = collate(pairs(3), loss) | ({"reference_logps": torch.full((6,), -9.0)} if loss in ("dpo", "kto") else {})
    found, most = [], []
    for size in (None, 1, 5):
        made = built(loss=loss, loss_chunk_tokens=size)
        rows: list[int] = []
        made.model.lm_head.register_forward_hook(
            lambda head, given, made, rows=rows: rows.append(made.shape[:-1].numel())
        )
        total = made.training_step(batch)
        total.backward()
        found.append({"loss": total, **{name: weight.grad for name, weight in made.named_parameters()}})
        most.append(max(rows))
    assert most[0] > 5
    assert most[1:] == [1, 5]
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-4, atol=1e-6)


def test_metrics_have_names_and_callbacks_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = chat_data(tmp_path)
    words.setup("fit")

    class Talking(Pairs):
        tokenizer = words.tokenizer

        def __init__(self) -> None:
            super().__init__(tmp_path)

    callbacks = [InitialValidation(), SampleCompletion(["One?"], max_new_tokens=2, before=True)]
    config = {**LLAMA, "vocab_size": len(words.tokenizer)}
    made = module(config=config, learning_rate=1e-3)
    run = trainer(tmp_path, max_steps=6, callbacks=callbacks)
    run.fit(made, Talking())
    assert set(run.callback_metrics) == {
        *("train_loss", "train_rewards_accuracy", "train_rewards_margin", "val_loss", "val_rewards_accuracy"),
        *("val_rewards_margin", "val_rewards_chosen", "val_rewards_rejected", "val_logps_chosen", "val_logps_rejected"),
    }
    shown = capsys.readouterr().out
    assert "val_loss 0.6931 -> " in shown
    assert "Answers after 6 steps" in shown


def test_kto_has_the_same_validation_loss_in_any_batches(tmp_path: Path) -> None:
    made, rows, found = module(loss="kto", lora=LORA), pairs(4), []
    for size in (1, 2, 4):
        data = Pairs(tmp_path, loss="kto")
        data.splits["validation"] = [collate(rows[start : start + size], "kto") for start in range(0, 4, size)]
        found.append(trainer(tmp_path).validate(made, data, verbose=False)[0])
        with torch.no_grad():
            for weight in made.parameters():
                weight.add_(0.3 if weight.requires_grad and len(found) == 1 else 0)
    assert found[1] == pytest.approx(found[2], rel=1e-5)
    assert found[0]["val_loss"] == 0.5 != found[1]["val_loss"]


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "sigmoid"}, "loss is 'sigmoid'. Give dpo, ipo, orpo, simpo, kto."),
        ({"beta": 0}, "beta is 0; it must be above 0"),
        ({"label_smoothing": 0.5}, "it must be at least 0 and below 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "loss='ipo' does not read it: only dpo and simpo do"),
        ({"desirable_weight": 2.0}, "desirable_weight is 2.0, but loss='dpo' does not read it: only kto does"),
        ({"metrics": {}}, "PreferenceModule takes no `metrics`"),
        ({"config": None}, "Give exactly one of model and config"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**options)


@pytest.mark.parametrize(("loss", "of_rows"), [("dpo", "kto"), ("kto", "dpo"), ("orpo", None)])
def test_rows_of_another_loss_are_refused(loss: str, of_rows: str | None) -> None:
    batch = collate(pairs(1), of_rows or "dpo")
    if of_rows is None:
        del batch["pair_ids"]
    with pytest.raises(ValueError, match=f"loss='{loss}' trains on "):
        built(loss=loss).training_step(batch)


def test_weights_of_messages_are_refused() -> None:
    batch = collate(pairs(1))
    with pytest.raises(ValueError, match="loss='dpo' does not read weights of messages"):
        built().training_step({**batch, "loss_weights": batch["labels"]})


def test_the_command_line_knows_all_arguments_and_their_defaults() -> None:
    chosen = {"class_path": "lightning_protrain.PreferenceModule", "init_args": {"config": LLAMA, "loss": "ipo"}}
    made = ProTrainCLI(args={"model": chosen, "trainer": {"accelerator": "cpu"}}, run=False).model
    assert isinstance(made, PreferenceModule)
    assert (made.hparams["learning_rate"], made.hparams["beta"], made.objective.loss) == (1e-6, 0.1, "ipo")


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo"])
def test_a_run_is_planned_without_data(loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"gpu": ["RTX 3090"], "host_memory": "64GiB", "host_cores": 16, "batch_size": 2, "length": 16}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
    PlanningTrainer(strategy="protrain", default_root_dir=tmp_path, **quiet).plan(module(loss=loss), **options)
    assert "tokens per second" in capsys.readouterr().out


def test_data_that_cannot_list_its_pairs_is_refused_before_training(tmp_path: Path) -> None:
    class Unlisted(Pairs):
        pair_batches: Any = property()

    with pytest.raises(ValueError, match="but Unlisted cannot list them"):
        train(tmp_path, Unlisted(tmp_path))
    train(tmp_path, Unlisted(tmp_path), lora=LORA)


@pytest.mark.parametrize(("loss", "kind"), [("dpo", "tokens"), ("kto", "pairs"), ("simpo", "unpaired")])
def test_data_of_another_kind_is_refused_before_training(loss: str, kind: str, tmp_path: Path) -> None:
    data = Pairs(tmp_path, loss=loss)
    data.objective = kind  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"loss='{loss}' trains on rows with .*, but the data has others"):
        train(tmp_path, data, loss=loss)


def test_a_row_without_reference_is_refused_in_a_step(tmp_path: Path) -> None:
    data = Pairs(tmp_path)
    data.pair_batches = lambda split: Pairs(tmp_path).splits[split][:1]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="4 of 4 rows of this batch have no log-probability"):
        train(tmp_path, data)
