"""The module against transformers' own loss, as plain Lightning trains, evaluates, saves and loads it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_protrain.distributed.failures import SharedFailure
from lightning_protrain.models.module import CausalLMModule, learning_rate_factor
from tests.support.module_runs import LLAMA, VOCAB, Sequences, trainer
from tests.support.tiny_networks import tiny_config

GPT2 = tiny_config("gpt2", vocab_size=VOCAB)
# A name, the settings, and whether the head may be called on slices; if not, the logits of all tokens are made.
ARCHITECTURES = [
    ("llama", {}, True),
    ("llama", {"tie_word_embeddings": True}, True),
    ("qwen2", {}, True),
    ("gemma2", {}, False),
    ("gemma3_text", {}, True),
    ("mixtral", {}, True),
    ("mixtral", {"output_router_logits": True}, False),
    ("gpt2", {}, True),
    ("falcon", {}, True),
    ("opt", {}, True),
    ("cohere", {"logit_scale": 0.5}, False),
    ("granite", {"logits_scaling": 4.0}, False),
    ("mamba", {}, True),
    ("modernbert-decoder", {"cls_token_id": 0, "sep_token_id": 0}, False),
]
ALL_LOGITS = "logits of all tokens of a batch exist at once"


class Recorder(Callback):
    """Records the modes of dropout layers and the learning rates; ends the run after `num_steps`."""

    def __init__(self, num_steps: int = 99) -> None:
        self.num_steps = num_steps
        self.modes: list[bool] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.modes += [layer.training for layer in pl_module.modules() if isinstance(layer, nn.Dropout)]
        self.rates.append(optimizer.param_groups[0]["lr"])
        trainer.should_stop = len(self.rates) == self.num_steps


class Endless(IterableDataset):
    def __iter__(self):
        row = torch.arange(12)
        while True:
            yield {"input_ids": row, "labels": row}


def build(**arguments: Any) -> CausalLMModule:
    seed_everything(0, verbose=False)
    module = CausalLMModule(**{"config": LLAMA, **arguments})
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # outside a Trainer
    return module


def example(masked: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    input_ids = torch.randint(3, VOCAB, (3, 12))
    labels = input_ids.clone()
    labels[0, :masked] = -100
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


@pytest.fixture(autouse=True)
def no_monitor_of_progress_bars(monkeypatch):
    """The bars of transformers start a thread that outlives the test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


@pytest.fixture
def pretrained(tmp_path):
    """The folder of a saved GPT-2 with dropout."""
    AutoModelForCausalLM.from_config(build(config=GPT2).model.config).save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


@pytest.mark.parametrize("strategy", ["auto", "protrain"])
def test_a_model_in_bfloat16_says_what_transformers_reads_back(strategy: str, tmp_path: Path) -> None:
    """Rotary frequencies stay in float32, as transformers computes them, whatever the dtype of the weights."""
    module = build()
    trainer(tmp_path, precision="bf16-true", devices=1, strategy=strategy).validate(module, Sequences(), verbose=False)
    read = AutoModelForCausalLM.from_config(module.model.config, dtype=torch.bfloat16).eval()
    read.load_state_dict(module.model.state_dict())
    ids = torch.arange(VOCAB)[None]
    with torch.no_grad():
        assert torch.equal(module.eval()(input_ids=ids).logits, read(input_ids=ids).logits)


@pytest.mark.filterwarnings(f"ignore:.*{ALL_LOGITS}")
@pytest.mark.parametrize(("model_type", "overrides", "chunked"), ARCHITECTURES)
def test_the_loss_and_gradients_are_those_of_transformers(model_type, overrides, chunked):
    config = tiny_config(model_type, vocab_size=VOCAB, **overrides)
    module, batch = build(config=config, loss_chunk_tokens=7).eval(), example()
    heads: list[int] = []
    head = module.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: heads.append(args[0].shape[:-1].numel()))

    loss = module.training_step(batch)
    assert (max(heads) == 7) == chunked
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    expected = module.model(**batch, use_cache=False).loss
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for parameter_name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_all_logits_at_once_when_asked_for():
    batch = example()
    loss, chunked = (build(loss_chunk_tokens=size).training_step(batch) for size in (None, 5))
    torch.testing.assert_close(loss, chunked)


def test_validation_leaves_the_router_loss_out():
    config = tiny_config("mixtral", vocab_size=VOCAB, output_router_logits=True, router_aux_loss_coef=0.5)
    with pytest.warns(UserWarning, match=ALL_LOGITS):
        module = build(config=config)
    batch = example()
    module.validation_step(batch)
    logits = module.model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert module.val_metrics["loss"].compute().item() == pytest.approx(expected.item(), rel=1e-5)
    assert module.training_step(batch).item() > expected.item() + 0.1


def test_further_keys_of_the_batch_reach_the_model():
    """Two sequences packed in a row, told apart by their positions, have the loss of the two alone."""
    module = build()
    rows = torch.randint(3, VOCAB, (2, 6))
    alone = module.predict_step({"input_ids": rows, "labels": rows})
    labels = rows.clone()
    labels[:, 0] = -100  # the first token of a packed sequence has nothing before it
    packed = {"input_ids": rows, "labels": labels, "position_ids": torch.arange(6).repeat(2, 1)}
    packed = {name: value.view(1, 12) for name, value in packed.items()}
    torch.testing.assert_close(module.predict_step(packed)["loss_sum"], alone["loss_sum"].sum()[None])


def test_predict_scores_each_sequence():
    module, batch = build(), example()
    scores = module.predict_step(batch)
    assert scores["num_tokens"].tolist() == [8, 11, 11]
    for row in range(3):
        single = {name: value[row : row + 1] for name, value in batch.items()}
        mean = scores["loss_sum"][row] / scores["num_tokens"][row]
        torch.testing.assert_close(mean, module.training_step(single))


def test_fit_learns_and_logs(tmp_path):
    seed_everything(0, verbose=False)
    module = CausalLMModule(config=LLAMA, learning_rate=1e-2)
    fit = trainer(tmp_path, max_steps=48)
    fit.fit(module, datamodule=Sequences())
    assert fit.callback_metrics["train_loss"] < 1.0 < math.log(VOCAB)
    loss, perplexity = fit.callback_metrics["val_loss"], fit.callback_metrics["val_perplexity"]
    assert loss < 1.0
    assert perplexity.item() == pytest.approx(math.exp(loss))


def test_a_second_run_of_a_trainer_replaces_no_callback(tmp_path, caplog):
    caplog.set_level("INFO")
    twice, module = trainer(tmp_path), CausalLMModule(config=LLAMA)
    for _ in range(2):
        twice.validate(module, Sequences(), verbose=False)
    assert "override existing callbacks" not in caplog.text
    assert sum(isinstance(each, SharedFailure) for each in twice.callbacks) == 1


def test_configure_model_keeps_the_model_it_finds(tmp_path):
    module = CausalLMModule(config=LLAMA)
    trainer(tmp_path).fit(module, datamodule=Sequences())
    before = module.model
    trainer(tmp_path).fit(module, datamodule=Sequences())
    assert module.model is before


def test_runs_from_a_command_line(tmp_path):
    pytest.importorskip("jsonargparse")
    options = {"max_steps": 2, "accelerator": "cpu", "default_root_dir": tmp_path, "logger": "false"}
    options |= {"enable_progress_bar": "false", "enable_checkpointing": "false"}
    args = ["fit", "--model.warmup_steps=1", *(f"--trainer.{key}={value}" for key, value in options.items())]
    args += [f"--model.config.{key}={value}" for key, value in LLAMA.items()]
    cli = LightningCLI(CausalLMModule, Sequences, auto_configure_optimizers=False, save_config_callback=None, args=args)
    assert cli.trainer.global_step == 2
    assert cli.model.hparams["warmup_steps"] == 1


@pytest.mark.parametrize("put_into_eval_mode", [False, True])
def test_dropout_is_active_in_training(tmp_path, pretrained, put_into_eval_mode):
    module, recorder = CausalLMModule(model=pretrained), Recorder()
    module.configure_model()
    assert module.model.training
    module.train(not put_into_eval_mode)
    trainer(tmp_path, callbacks=[recorder]).fit(module, datamodule=Sequences())
    assert recorder.modes
    assert all(recorder.modes)


@pytest.mark.parametrize("source", ["model", "config", "resumed", "loaded", "again"])
def test_weights_that_begin_at_random_are_told(tmp_path, pretrained, source, caplog):
    module, path = CausalLMModule(model=pretrained) if source == "model" else CausalLMModule(config=LLAMA), None
    if source in ("resumed", "loaded", "again"):
        first = trainer(tmp_path)
        first.fit(module, datamodule=Sequences())
        first.save_checkpoint(saved := tmp_path / "first.ckpt")
        path = saved if source == "resumed" else None
        module = {"resumed": CausalLMModule(config=LLAMA), "again": module}.get(source)
        module = module or CausalLMModule.load_from_checkpoint(saved)
    caplog.clear()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer(tmp_path).fit(module, datamodule=Sequences(), ckpt_path=path)
    assert ("Training from random weights" in caplog.text) == (source == "config")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("source", ["model", "config"])
def test_dtype_and_attention(pretrained, source, dtype):
    arguments = {"model": pretrained, "config": None} if source == "model" else {"config": GPT2}
    module = build(dtype=dtype, attn_implementation="eager", **arguments)
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)  # the checkpoint is in float32
    assert {parameter.dtype for parameter in module.parameters()} == {expected}
    assert module.model.config._attn_implementation == "eager"


def test_vocab_size_overrides(pretrained):
    assert build(vocab_size=96).model.get_input_embeddings().num_embeddings == 96
    assert build(model=pretrained, config=None, vocab_size=96).model.get_input_embeddings().num_embeddings == 96
    assert build(model=pretrained, config=None).model.get_input_embeddings().num_embeddings == VOCAB


@pytest.mark.parametrize("source", ["model", "config", "built"])
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, pretrained, source):
    arguments = {"model": pretrained} if source == "model" else {"config": LLAMA}
    module = CausalLMModule(**arguments)
    if source == "built":
        module.configure_model()
    with pytest.raises(ValueError, match="has 65 tokens, but the model has 64 embeddings"):
        trainer(tmp_path).fit(module, datamodule=Sequences(num_tokens=65))
    assert (module.model is None) == (source != "built")


class Long(Sequences):
    """Data that knows the length of its longest row."""

    longest = 12

    def longest_row(self) -> int:
        return self.longest


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({**GPT2, "max_position_embeddings": 16}, "raise n_positions in `config`"),
        ({**LLAMA, "max_position_embeddings": 16}, "raise max_position_embeddings in `config`"),
        (None, "give a model with more"),
    ],
    ids=["gpt2", "llama", "pretrained"],
)
def test_rows_beyond_the_positions_of_the_model_are_refused(tmp_path, pretrained, config, remedy):
    data, arguments = Long(), {"config": config}
    if config is None:
        arguments = {"model": pretrained}
        config = AutoConfig.from_pretrained(pretrained).to_dict()
    most = config.get("max_position_embeddings") or config["n_positions"]
    data.longest = most + 1
    module = CausalLMModule(**arguments)
    expected = f"longest row of the data has {most + 1} tokens, but '{config['model_type']}' has {most} positions. "
    with pytest.raises(ValueError, match=f"{expected}Set max_length of the data to at most {most}, or {remedy}"):
        trainer(tmp_path).fit(module, datamodule=data)
    assert module.model is None
    data.longest = most
    trainer(tmp_path, max_steps=1).fit(module, datamodule=data)


def test_an_unknown_vocabulary_is_refused(tmp_path):
    module = CausalLMModule(config={"model_type": "llama"})
    with pytest.raises(ValueError, match="set vocab_size"):
        trainer(tmp_path).fit(module, datamodule=Sequences(num_tokens=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of model and config"),
        ({"model": "folder", "config": LLAMA}, "exactly one of model and config"),
        ({"config": {**LLAMA, "model_type": "lama"}}, "model_type 'lama' .* Similar: .*llama"),
        ({"config": {"hidden_size": 8}}, "`config` has no `model_type`"),
        ({"config": LLAMA, "betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); it must be two numbers from 0 to below 1"),
        ({"config": {"model_type": "t5"}}, "model_type 't5' is not a causal model"),
        ({"config": {**LLAMA, "hiden_size": 8}}, "'hiden_size' is not a key .* Similar: hidden_size"),
        ({"config": {"model_type": "llava", "txt_config": {}}}, "'txt_config' is not a key of the config of 'llava'"),
        ({"config": LLAMA, "lora": {"rank": 4}}, "`lora` has the key 'rank'"),
        ({"config": LLAMA, "learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"config": LLAMA, "weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"config": LLAMA, "warmup_steps": -1}, "warmup_steps is -1"),
        ({"config": LLAMA, "warmup_steps": 1.5}, "warmup_steps is 1.5; it must be a number of steps, or a fraction"),
        ({"config": LLAMA, "min_learning_rate_ratio": 1.5}, "min_learning_rate_ratio is 1.5"),
        ({"config": LLAMA, "loss_chunk_tokens": 0}, "loss_chunk_tokens is 0"),
        ({"config": LLAMA, "learning_rate": "abc"}, "learning_rate is 'abc'; it must be above 0"),
        ({"config": LLAMA, "betas": 0.9}, "betas is 0.9; it must be two numbers"),
        ({"config": "llama"}, "config='llama': give a mapping, or None"),
        ({"config": LLAMA, "lora": 16}, "lora=16: give a mapping, or None"),
        ({"model": nn.Linear(2, 2)}, r"model=Linear\(.*: give a folder, a GGUF file or a name on the Hugging Face Hub"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CausalLMModule(**arguments)


def test_a_path_of_a_model_is_text_in_the_hyperparameters_and_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    build(config=LLAMA).model.save_pretrained(tmp_path / "mine")
    module = CausalLMModule(Path("~/mine"))
    assert module.hparams["model"] == "~/mine"
    module.configure_model()
    assert module.model.name_or_path == str(tmp_path / "mine")


def test_no_step_needs_no_schedule(tmp_path):
    fit = trainer(tmp_path, max_epochs=-1, max_steps=0)
    fit.fit(CausalLMModule(config=LLAMA, vocab_size=VOCAB), Sequences())
    assert fit.global_step == 0


def test_use_before_the_model_is_built_is_refused():
    with pytest.raises(ValueError, match="not built yet"):
        CausalLMModule(config=LLAMA).training_step(example())


def test_optimizer_groups(tmp_path):
    module = build(config=GPT2, weight_decay=0.2)
    module.model.transformer.wte.weight.requires_grad_(False)
    fit = trainer(tmp_path)
    fit.fit(module, datamodule=Sequences())
    (optimizer,) = fit.optimizers
    decay, no_decay = optimizer.param_groups
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.2, 0.0)
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert set(decay["param_names"]) == {name for name, parameter in trainable.items() if parameter.ndim >= 2}
    assert set(no_decay["param_names"]) == {name for name, parameter in trainable.items() if parameter.ndim < 2}
    assert "model.transformer.wte.weight" not in decay["param_names"]
    assert decay["params"][0] is trainable[decay["param_names"][0]]
    assert decay["fused"]
    assert no_decay["fused"]


def test_gradients_of_the_fused_step_are_clipped_under_mixed_precision(tmp_path):
    module = build(config=LLAMA)
    fit = trainer(tmp_path, precision="bf16-mixed", gradient_clip_val=1e-3)
    fit.fit(module, datamodule=Sequences())
    norm = torch.stack([each.grad.norm() for each in module.parameters() if each.grad is not None]).norm()
    assert 0 < norm <= 1.001e-3


def test_a_frozen_model_is_refused():
    module = build()
    module.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        module.configure_optimizers()


@pytest.mark.parametrize(
    ("warmup_steps", "sentence"),
    [
        (10, r"warmup_steps is 10, but the run has 4 steps: .* only rises, up to 40% of learning_rate. Lower"),
        (4, r"warmup_steps is 4, but the run has 4 steps: .* only rises, up to 100% of learning_rate. Lower"),
        (1.0, r"warmup_steps is 1.0, which means one step; a fraction of all steps is below 1."),
    ],
)
def test_a_warm_up_that_may_not_be_meant_is_told_at_the_start(tmp_path, warmup_steps, sentence):
    with pytest.warns(UserWarning, match=sentence):
        trainer(tmp_path).fit(CausalLMModule(config=LLAMA, warmup_steps=warmup_steps), datamodule=Sequences())


@pytest.mark.parametrize("warmup_steps", [7, 0.75, 1])
def test_other_warm_ups_need_no_words(tmp_path, warmup_steps):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(tmp_path, max_steps=8).fit(CausalLMModule(config=LLAMA, warmup_steps=warmup_steps), Sequences())
    assert [str(each.message) for each in told if "warmup_steps" in str(each.message)] == []


@pytest.mark.parametrize(("warmup_steps", "warmup"), [(0.25, 2), (2, 2), (0, 0), (0.0, 0)])
def test_learning_rate_follows_optimizer_steps(tmp_path, warmup_steps, warmup):
    recorder = Recorder()
    module = CausalLMModule(config=LLAMA, learning_rate=1.0, warmup_steps=warmup_steps, min_learning_rate_ratio=0.1)
    # 32 rows in batches of 2, accumulated by 2: 8 steps
    fit = trainer(tmp_path, callbacks=[recorder], max_steps=-1, max_epochs=1, accumulate_grad_batches=2)
    fit.fit(module, datamodule=Sequences(batch_size=2))
    assert recorder.rates == pytest.approx([learning_rate_factor(step, warmup, 8, 0.1) for step in range(8)])


@pytest.mark.parametrize("endless", [{"max_epochs": -1}, {"max_epochs": 2}])
def test_without_an_end_the_rate_stays_after_the_warm_up(tmp_path, endless):
    recorder = Recorder(num_steps=5)
    module = CausalLMModule(config=LLAMA, learning_rate=1.0, warmup_steps=2)
    fit = trainer(tmp_path, callbacks=[recorder], max_steps=-1, **endless)
    with pytest.warns(UserWarning, match="stays constant"):
        fit.fit(module, DataLoader(Endless(), 2))
    assert recorder.rates == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_fraction_of_an_unknown_number_of_steps_is_refused(tmp_path):
    module = CausalLMModule(config=LLAMA, warmup_steps=0.1)
    with pytest.raises(ValueError, match=r"fraction 0\.1 of an unknown number"):
        trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(module, DataLoader(Endless(), 2))


def test_a_resumed_run_with_more_steps_follows_the_longer_schedule(tmp_path):
    first = trainer(tmp_path, max_steps=4)
    first.fit(CausalLMModule(config=LLAMA, learning_rate=1.0, warmup_steps=0), datamodule=Sequences())
    first.save_checkpoint(tmp_path / "last.ckpt")
    recorder = Recorder()
    module = CausalLMModule(config=LLAMA, learning_rate=1.0, warmup_steps=0)
    trainer(tmp_path, max_steps=8, callbacks=[recorder]).fit(
        module, datamodule=Sequences(), ckpt_path=tmp_path / "last.ckpt", weights_only=True
    )
    # The first step uses the rate that the checkpoint left in the optimizer.
    assert recorder.rates[1:] == pytest.approx([learning_rate_factor(step, 0, 8, 0.1) for step in range(5, 8)])


def test_generate_is_greedy_and_keeps_modes(tmp_path):
    module = build(config=GPT2)
    module.model.transformer.drop.eval()
    prompt = example()["input_ids"][:2, :5]
    modes = [child.training for child in module.modules()]
    out = module.generate(prompt, max_new_tokens=4, eos_token_id=VOCAB - 1)
    assert [child.training for child in module.modules()] == modes

    module.eval()
    expected = prompt
    for _ in range(4):
        expected = torch.cat([expected, module(input_ids=expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert VOCAB - 1 not in expected[:, 5:]  # else the rest would be filled up
    assert torch.equal(out, expected)
    assert module.generate(prompt[:1], max_new_tokens=4, eos_token_id=out[0, 5].item()).shape == (1, 6)


@pytest.mark.parametrize("num_steps", [None, 10])
@pytest.mark.parametrize("warmup", [0, 1, 4, 10])
def test_learning_rate_rises_to_the_peak_and_falls_to_the_floor(num_steps, warmup):
    factors = [learning_rate_factor(step, warmup, num_steps, 0.2) for step in range(30)]
    peak = max(warmup - 1, 0)
    assert factors[peak] == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == (1.0 if num_steps is None else pytest.approx(0.2))
    assert learning_rate_factor(warmup + 5, warmup, warmup + 10, 0.2) == pytest.approx(0.6)  # half-way down


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    module = CausalLMModule(config=LLAMA)
    results = []
    for size in (1, 3, 7):
        data = Sequences(batch_size=size)
        data.rows[0] = {**data.rows[0], "labels": data.rows[0]["labels"].index_fill(0, torch.arange(9), -100)}
        assert trainer(tmp_path).validate(module, data, verbose=False)
        results += trainer(tmp_path).test(module, data, verbose=False)
    assert set(results[0]) == {"test_loss", "test_perplexity", "test_accuracy"}
    assert all(result == pytest.approx(results[0], rel=1e-6) for result in results)


@pytest.mark.parametrize(("policy", "warns"), [("exclude", True), ("keep", False)])
def test_a_batch_that_is_not_finite_counts_in_all_metrics_or_in_none(tmp_path, policy, warns):
    class Broken(CausalLMModule):
        def validation_step(self, batch, batch_idx=0, dataloader_idx=0):
            with torch.no_grad():
                weight = self.model.lm_head.weight
                before = weight.clone()
                weight.mul_(math.nan if batch_idx == 1 else 1.0)
                super().validation_step(batch, batch_idx)
                weight.copy_(before)

    results = []
    for kind, batches in ((Broken, 2), (CausalLMModule, 1)):
        torch.manual_seed(0)
        fit = trainer(tmp_path, limit_val_batches=batches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results += fit.validate(kind(config=LLAMA, nonfinite=policy), Sequences(batch_size=2), verbose=False)
        found = [str(each.message) for each in caught if "NaN or infinite values in 1 batch" in str(each.message)]
        assert bool(found) == (warns and kind is Broken)
    if policy == "exclude":
        assert results[0] == results[1]
    else:
        assert all(math.isnan(value) for value in results[0].values())


def test_a_batch_that_is_not_finite_can_end_the_run(tmp_path):
    class Broken(CausalLMModule):
        def validation_step(self, batch, batch_idx=0, dataloader_idx=0):
            torch.nn.init.constant_(self.model.lm_head.weight, math.inf)
            super().validation_step(batch, batch_idx)

    with pytest.raises(ValueError, match="NaN or infinite values"):
        trainer(tmp_path).validate(Broken(config=LLAMA, nonfinite="error"), Sequences(), verbose=False)


@pytest.mark.filterwarnings("ignore:.*NaN or infinite values in")
def test_a_metric_without_a_value_is_not_the_one_before(tmp_path):
    class Collapsing(CausalLMModule):
        def on_validation_start(self):
            if self.trainer.global_step == 2:
                torch.nn.init.constant_(self.model.lm_head.weight, math.nan)

    # Lightning takes an interval of one batch for one epoch, and would save at its end.
    best = ModelCheckpoint(
        tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}", save_on_train_epoch_end=False
    )
    fit = trainer(
        tmp_path, max_steps=2, val_check_interval=1, num_sanity_val_steps=0, callbacks=[best], enable_checkpointing=True
    )
    with pytest.raises(MisconfigurationException, match="val_loss"):
        fit.fit(Collapsing(config=LLAMA, warmup_steps=0), Sequences())
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]
    assert "val_loss" not in fit.callback_metrics
