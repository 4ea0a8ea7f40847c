"""Attention of padded and packed rows and of sliding windows: no tensor of tokens x tokens, and equal results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from lightning_protrain import CausalLMModule, ProTrainStrategy
from lightning_protrain.models import maskless
from lightning_protrain.models.loading import PACKING_MODEL_TYPES, without_masks
from lightning_protrain.planner.replay import peak
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import ModelProfile
from tests.support.plans import PlanMaker, place, plans, selective
from tests.support.tiny_networks import VOCAB, tiny_config, tiny_model
from tests.support.trainers import QUIET

LONG = 16_384
LAYERS = {"gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]}}


def _positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _rows(kind: str, length: int) -> dict[str, Tensor]:
    """Two rows that differ in their padding or in their documents, and labels for their real tokens."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    real, quarter = torch.ones_like(ids), length // 4
    if kind in ("padded", "padded on the left", "padded inside"):
        padding = {"padded": slice(-quarter, None), "padded on the left": slice(quarter)}
        real[1, padding.get(kind, slice(quarter, 2 * quarter))] = 0
    predicted = real * real.roll(1, 1)  # Padding predicts nothing.
    given = {"input_ids": ids, "labels": ids.masked_fill(predicted == 0, -100)}
    if kind.startswith("packed"):
        rows = [(quarter, length - quarter), (1, 2 * quarter, length - 2 * quarter - 1)]
        return given | {"position_ids": torch.stack([_positions(*rows[0]), _positions(*rows[-1])])}
    return given if kind == "plain" else given | {"attention_mask": real}


def _pair(model_type: str, **settings: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model with the attention of transformers, and the same model without masks."""
    settings = {**LAYERS.get(model_type, {}), **settings}
    usual, ours = tiny_model(model_type, **settings), without_masks(tiny_model(model_type, **settings))
    assert usual.config._attn_implementation == "sdpa"
    assert ours.config._attn_implementation == maskless.NAME
    return usual, ours


def _trained(model: PreTrainedModel, rows: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss of every real token, and the gradients of their mean."""
    labels = rows["labels"]
    given = {name: value for name, value in rows.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    losses.mean().backward()
    return losses.detach(), [each.grad for each in model.parameters()]


class Largest(TorchDispatchMode):
    """Finds the number of elements of the largest storage that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def _profile(model_type: str, kind: str, attention: str | None, **settings: Any) -> ModelProfile:
    """The profile of a training step of two long rows in bfloat16, whose attention is called `attention`."""
    sizes = {**LAYERS.get(model_type, {}), "max_position_embeddings": LONG, **settings}
    module = CausalLMModule(
        config=tiny_config(model_type, **sizes),
        dtype="bfloat16",
        attn_implementation="eager" if attention == "eager" else None,
    )
    with torch.device("meta"):
        module.configure_model()
    if attention == "sdpa":
        module.model.config._attn_implementation_internal = "sdpa"
    module.log = lambda *args, **options: None
    rows = _rows(kind, LONG)
    return profile_model(module, describe_model(module), lambda: module.training_step(rows))


KINDS = ["plain", "padded", "padded on the left", "packed"]
SLIDING = {"sliding_window": LONG // 8}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model_type", "kind", "settings"),
    [
        *(("llama", kind, {}) for kind in KINDS),
        *(("mistral", kind, SLIDING) for kind in ("plain", "padded", "packed")),
        ("gemma3_text", "packed", SLIDING),
    ],
)
def test_a_long_step_makes_no_tensor_of_tokens_x_tokens(model_type: str, kind: str, settings: dict[str, int]) -> None:
    profile = _profile(model_type, kind, None, **settings)
    assert LONG not in dict(profile.squares)
    peaks = (nbytes for each in profile.segments for nbytes in (peak(each.forward), each.backward.peak_bytes))
    assert max(*peaks, profile.saved_bytes) < LONG**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "kind", "attention", "nbytes"),
    [
        ("llama", "padded", "sdpa", 2 * 2 * LONG**2),  # PyTorch makes a float mask for each row.
        ("llama", "padded inside", None, 2 * 2 * LONG**2),
        ("llama", "plain", "eager", 4 * 2 * 4 * LONG**2),  # float32 scores of four heads
    ],
)
def test_the_profile_names_the_bytes_of_masks_and_scores(
    model_type: str, kind: str, attention: str | None, nbytes: int
) -> None:
    assert dict(_profile(model_type, kind, attention).squares)[LONG] == nbytes


@pytest.mark.parametrize(("usual", "is_square"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_a_real_step_makes_no_tensor_of_tokens_x_tokens(kind: str, usual: bool, is_square: bool) -> None:
    length, models = 2048, _pair("llama", num_hidden_layers=1, max_position_embeddings=2048)
    with Largest() as largest:
        _trained(models[not usual], _rows(kind, length))
    assert (largest.elements >= length**2) == is_square


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "olmoe", "deepseek_v3"])
def test_a_step_of_plain_rows_is_bitwise_that_of_transformers(model_type: str) -> None:
    usual, ours = (_trained(model, _rows("plain", 48)) for model in _pair(model_type))
    assert torch.equal(usual[0], ours[0])
    assert all(map(torch.equal, usual[1], ours[1]))


@pytest.mark.sample(26)
@pytest.mark.parametrize("window", [5, 20, 64])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_with_masks(
    kind: str, model_type: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maskless, "BLOCK", 16)
    settings = {} if model_type == "llama" else {"sliding_window": window}
    usual, ours = (_trained(model, _rows(kind, 64)) for model in _pair(model_type, **settings))
    torch.testing.assert_close(ours[0], usual[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(ours[1], usual[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_autocast_gives_the_losses_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maskless, "BLOCK", 16)
    with torch.autocast("cpu", torch.bfloat16):
        usual, ours = (_trained(model, _rows("packed", 64)) for model in _pair("mistral", sliding_window=20))
    torch.testing.assert_close(ours[0], usual[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("window", [5, 64])
def test_a_document_does_not_depend_on_the_others(window: int, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maskless, "BLOCK", 16)
    _, model = _pair("mistral", sliding_window=window)
    ids = _rows("plain", 64)["input_ids"]
    changed = ids.clone()
    changed[:, :24] = ids[:, :24].flip(1)
    positions = _positions(24, 40).expand(2, -1) if separate else None
    with torch.no_grad():
        one, other = (
            model(input_ids=given, position_ids=positions, use_cache=False).logits for given in (ids, changed)
        )
    assert not torch.equal(one[:, :24], other[:, :24])
    assert torch.equal(one[:, 24:], other[:, 24:]) == separate


MAKERS: dict[str, PlanMaker] = {
    **plans(),
    "selective": selective,
    "swapped": lambda module: place(module, swap_bytes=lambda index: (1 << 20) * (index % 2)),
}


def _fitted(kind: str, make: PlanMaker | None, **options: Any) -> dict[str, Tensor]:
    """The weights after three steps under a plan, or without one."""
    torch.manual_seed(0)
    module = CausalLMModule(config=tiny_config("mistral", sliding_window=20, num_hidden_layers=4))
    module.configure_model()
    strategy = "auto" if make is None else ProTrainStrategy(plan=make(module), monitor=False)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **options, **QUIET)
    trainer.fit(module, DataLoader([_rows(kind, 64)] * 3, batch_size=None))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("plan", MAKERS)
def test_training_is_bitwise_equal_under_every_plan(plan: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maskless, "BLOCK", 16)
    plain, found = (_fitted(kind, make) for make in (None, MAKERS[plan]))
    assert all(torch.equal(value, found[name]) for name, value in plain.items())


@pytest.mark.parametrize("kind", ["plain", "padded on the left"])
@pytest.mark.parametrize(("model_type", "settings"), [("llama", {}), ("mistral", {"sliding_window": 12})])
def test_generation_is_that_of_transformers(model_type: str, settings: dict[str, int], kind: str) -> None:
    rows = _rows(kind, 24)
    mask = rows.get("attention_mask", torch.ones_like(rows["input_ids"]))
    usual, ours = (
        model.generate(rows["input_ids"], attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
        for model in _pair(model_type, **settings)
    )
    assert torch.equal(usual, ours)


def _with_own_mask(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """A mask of the user for each token."""
    length = rows["input_ids"].shape[1]
    return rows | {"attention_mask": torch.ones(2, 1, length, length, dtype=torch.bool).tril()}


@pytest.mark.parametrize(
    "rows", [_rows("padded inside", 24), _with_own_mask(_rows("plain", 24))], ids=["padding inside", "mask of a user"]
)
def test_other_masks_are_those_of_transformers(rows: dict[str, Tensor]) -> None:
    usual, ours = (_trained(model, rows) for model in _pair("llama"))
    assert torch.equal(usual[0], ours[0])


def _without(model: PreTrainedModel) -> str:
    return str(without_masks(model).config._attn_implementation)


def _media(attention: str | None = None) -> PreTrainedModel:
    text = {"model_type": "llama", **{key: tiny_config("llama")[key] for key in ("hidden_size", "vocab_size")}}
    config = AutoConfig.for_model("llava", text_config=text, vision_config={"model_type": "clip_vision_model"})
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (lambda: tiny_model("llama", attn_implementation="eager"), "eager"),
        (lambda: tiny_model("falcon"), "sdpa"),
        (lambda: tiny_model("gpt_neo"), "eager"),
        (_media, "sdpa"),
    ],
    ids=["as the user asks", "outside of the list", "without the interface", "media"],
)
def test_other_models_keep_their_attention(make: Callable[[], PreTrainedModel], attention: str) -> None:
    assert _without(make()) == attention


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_saved_model_names_no_attention_of_this_package(tmp_path: Path, lora: dict[str, int] | None) -> None:
    module = CausalLMModule(config=tiny_config("llama"), lora=lora)
    module.configure_model()
    assert module.model.config._attn_implementation == maskless.NAME
    module.model.save_pretrained(tmp_path)
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert written
    assert maskless.NAME not in json.dumps(written)
    if lora is None:
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_compiled_block_is_compiled_once_for_all_cuts() -> None:
    _, model = _pair("llama", num_hidden_layers=1)
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    (layer,) = model.model.layers
    layer.forward = torch.compile(layer.forward, backend=backend)
    numbers = []
    for cut in (8, 12, 15, 20):
        positions = _positions(cut, 24 - cut).expand(2, -1)
        with torch.no_grad():
            model(input_ids=_rows("plain", 24)["input_ids"], position_ids=positions, use_cache=False)
        numbers.append(len(graphs))
    torch._dynamo.reset()
    assert numbers == numbers[:1] * 4


@pytest.mark.sample(14)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(PACKING_MODEL_TYPES))
def test_every_model_of_the_list_has_the_logits_of_its_own_attention(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(maskless, "sdpa_mask", lambda **given: made.append(1))
    for kind in KINDS:
        rows = _rows(kind, 24)
        real, given = rows.pop("labels") != -100, rows
        usual, ours = tiny_model(model_type), without_masks(tiny_model(model_type))
        with torch.no_grad():
            one, other = (model(**given, use_cache=False).logits[real] for model in (usual, ours))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not made
