"""Families of models for images, audio and video through their own processors: masks, mixed batches, steps, exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoProcessor

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainCheckpoint, ProTrainStrategy
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.data.batches.encode import TOKEN_EXTRAS, Encoded
from lightning_protrain.data.batches.loader import Batch, count_trained
from lightning_protrain.data.batches.media_rows import MediaEncoder, MediaMeasure
from lightning_protrain.data.batches.tokenizer import load_tokenizer
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.conversation import MalformedRow
from lightning_protrain.models.export import export, merge
from lightning_protrain.models.loss import PLAIN_HEAD_MEDIA_TYPES, has_plain_head
from tests.support import vision_runs
from tests.support.machines import CPU
from tests.support.ranks import quiet_trainer, run_ranks, trainer_on_rank, values
from tests.support.vision_families import REAL_TOKENIZERS, VISION_FAMILIES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging"),
    pytest.mark.filterwarnings("ignore:.*causal_conv1d", "ignore:You are trying to `self.log"),
]
FAMILIES = pytest.mark.parametrize("name", VISION_FAMILIES)
SLOW = ("Gemma 3n", "Voxtral")
# Their runs with checkpoints are tried wherever tests run, those of others with `-m slow`.
BRIEF_FAMILIES = ("Qwen2.5-VL", "Gemma 3", "Llama 3.2 Vision", "LLaVA", "Qwen2-Audio")
BRIEF = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in BRIEF_FAMILIES else [pytest.mark.slow]) for n in VISION_FAMILIES]
)
# Their processors look up characters in the tokens, which control tokens kept as text do not allow.
REFUSES_CONTROL_TOKENS = ("Idefics3",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: vision_runs.saved(name, tmp_path_factory.mktemp("family"), weights=True))


@pytest.fixture(scope="module")
def encoders(folders: Any) -> Any:
    """Encoders of a family, which share a chat format that was verified once."""
    return cache(lambda name: _encoders(folders(name)))


@pytest.fixture(scope="module")
def models(folders: Any) -> Any:
    """Models of families for evaluation, which no test changes."""
    return cache(lambda name: vision_runs.module(model=folders(name)).model.eval())


def _encoders(folder: str) -> ChatEncoders:
    return ChatEncoders(load_tokenizer(folder), folder)


def _encoder(encoders: ChatEncoders, **options: Any) -> MediaEncoder:
    return encoders.media_encoder(ChatSettings(max_length=1000, **options))


def _module(model: Any, **options: Any) -> CausalLMModule:
    """Return a module around a model that exists."""
    module = CausalLMModule(model=model.name_or_path, **options)
    module.model = model
    return module.eval()


def _check_mask(name: str, encoder: MediaEncoder) -> None:
    family, tokenizer = VISION_FAMILIES[name], encoder.processor.tokenizer
    measure = MediaMeasure(encoder)
    for question in ("Is it walnut?", f"Is it {family.end} walnut?"):
        for kinds in family.rows:
            row = vision_runs.row(kinds, question)
            if kinds and family.end in question and name in REFUSES_CONTROL_TOKENS:
                with pytest.raises(
                    MalformedRow, match=f"{type(encoder.processor).__name__} cannot keep control tokens"
                ):
                    encoder.encode(row, "row")
                continue
            encoded, measured = encoder.encode(row, "row"), measure.encode(row, "row")
            assert isinstance(encoded, Encoded)
            assert isinstance(measured, Encoded)
            assert measured.input_ids.tolist() == encoded.input_ids.tolist()
            trained = [tokenizer.decode(part.tolist()).strip() for part in _trained(encoded)]
            last = family.end if family.last_end is None else family.last_end
            assert trained == [f"maple{family.end}", f"still maple{last}"]
            assert encoded.media == kinds
            extras = encoded.extras.keys() - TOKEN_EXTRAS
            assert ({"image", "video"} & {*kinds} != set()) == any(extra.startswith("pixel_values") for extra in extras)
            assert ("audio" in kinds) == ("input_features" in extras)


def _trained(encoded: Encoded) -> Iterator[Any]:
    """Yield the tokens of each run of trained ones."""
    places = np.flatnonzero(encoded.trained)
    for part in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        yield encoded.input_ids[part]


@pytest.mark.sample(5)
@FAMILIES
def test_the_processor_of_the_family_masks_all_but_the_answers(name: str, encoders: Any) -> None:
    encoder = _encoder(encoders(name))
    assert type(encoder.processor) is type(VISION_FAMILIES[name].make()[0])
    _check_mask(name, encoder)
    has_own = encoder.chat.renderer.added_ids  # Tokenizers of mistral-common do not tell.
    added = encoder.processor.tokenizer.added_tokens_decoder if has_own else {24: "[AUDIO]", 25: "[BEGIN_AUDIO]"}
    text = {*encoder.encode(vision_runs.row(()), "row").input_ids.tolist()}
    greedy = _encoder(encoders(name), train_on_inputs=True)
    for kinds in VISION_FAMILIES[name].rows:
        everything = greedy.encode(vision_runs.row(kinds), "row")
        assert isinstance(everything, Encoded)
        trained = {*everything.input_ids[everything.trained].tolist()}
        assert {str(added[token]) for token in trained - text if token in added} == set(), "tokens of media are trained"


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_the_same_with_the_real_vocabulary(name: str, tmp_path: Path) -> None:
    processor, config = VISION_FAMILIES[name].make(REAL_TOKENIZERS[name]())
    processor.save_pretrained(tmp_path)
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    _check_mask(name, _encoder(_encoders(str(tmp_path))))


@pytest.mark.sample(6)
@FAMILIES
def test_a_mixed_batch_is_scored_as_its_rows_alone(name: str, encoders: Any, models: Any) -> None:
    """The reference is the transformers model, with the processor's own output for each row."""
    encoder = _encoder(encoders(name))
    kinds = [*VISION_FAMILIES[name].rows[1:], (), VISION_FAMILIES[name].rows[1], ()]
    rows = [vision_runs.row(own, answer="maple " * (1 + len(own))) for own in kinds]
    encoded = [encoder.encode(row, "row") for row in rows]
    batch = vision_runs.batch(encoder, rows)
    module = _module(models(name), loss_chunk_tokens=None)
    expected, num_tokens = torch.zeros(()), 0
    for row, one in zip(rows, encoded, strict=True):
        assert isinstance(one, Encoded)
        given = vision_runs.processed(encoder, row)
        pixels = {key: value.float() if value.is_floating_point() else value for key, value in given.items()}
        with torch.no_grad():
            logits = module.model(**pixels, use_cache=False).logits[0]
        trained = torch.from_numpy(one.trained)[1:]
        expected += F.cross_entropy(logits[:-1][trained], given["input_ids"][0, 1:][trained], reduction="sum")
        num_tokens += int(trained.sum())
    with torch.no_grad():
        loss = module.training_step(batch)
    assert loss * num_tokens == pytest.approx(float(expected), rel=1e-5)


class Watched:
    """Numbers of tokens that a head was given, one for each call."""

    def __init__(self, head: Any) -> None:
        self.sizes: list[int] = []
        head.register_forward_hook(lambda *given: self.sizes.append(given[2].shape[-2]))


@pytest.mark.sample(8)
@FAMILIES
def test_the_loss_of_slices_is_that_of_all_logits(name: str, encoders: Any, models: Any) -> None:
    batch = vision_runs.batch(_encoder(encoders(name)), [vision_runs.row(own) for own in VISION_FAMILIES[name].rows])
    plain = has_plain_head(models(name))
    assert plain == (VISION_FAMILIES[name].model_type in PLAIN_HEAD_MEDIA_TYPES)
    losses, gradients = [], []
    for chunk_tokens in (None, 5):
        module = _module(models(name), loss_chunk_tokens=chunk_tokens)
        module.zero_grad()
        head = Watched(module.model.get_output_embeddings())
        losses.append(module.training_step(batch))
        losses[-1].backward()
        gradients.append({key: value.grad for key, value in module.named_parameters() if value.grad is not None})
    assert (max(head.sizes) <= 5) == plain, "the head sees a slice at a time"
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert gradients[0].keys() == gradients[1].keys()
    for key, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][key], rtol=1e-4, atol=1e-5, msg=key)


def test_every_listed_architecture_for_media_is_among_the_families() -> None:
    assert {family.model_type for family in VISION_FAMILIES.values()} >= PLAIN_HEAD_MEDIA_TYPES


STEPS = [(name, None) for name in VISION_FAMILIES] + [(name, 16) for name in BRIEF_FAMILIES]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "chunk_tokens"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[0] in SLOW else []) for each in STEPS],
)
def test_a_step_is_bitwise_that_of_lightning(name: str, chunk_tokens: int | None, folders: Any) -> None:
    data, runs = vision_runs.data(folders(name)), []
    for options in ({}, {"strategy": ProTrainStrategy(plan="offload", monitor=False)}):
        module = vision_runs.module(model=folders(name), loss_chunk_tokens=chunk_tokens)
        runs.append(vision_runs.fit(module, data, max_steps=1, **options))
        assert data.reports[0].num_dropped == 0
    (losses, weights), (own_losses, own_weights) = runs
    assert torch.equal(torch.stack(losses), torch.stack(own_losses))
    assert len(losses) == 1
    assert weights.keys() == own_weights.keys()
    assert [key for key, value in weights.items() if not torch.equal(value, own_weights[key])] == []


def _logits(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(**vision_runs.inputs(batch), use_cache=False).logits


@pytest.mark.sample(2)
@BRIEF
def test_adapters_everywhere_are_saved_merged_and_read_by_peft(name: str, folders: Any, tmp_path: Path) -> None:
    folder, runs = folders(name), []
    data = vision_runs.data(folder)
    saving = [SavePretrained(str(tmp_path / "adapter")), ProTrainCheckpoint(str(tmp_path / "saved"), save_last=True)]
    streamed = {"strategy": ProTrainStrategy(plan="offload", monitor=False), "callbacks": saving}
    for options in ({}, {**streamed, "enable_checkpointing": True}):
        module = vision_runs.module(model=folder, lora={"r": 2})
        runs.append(vision_runs.fit(module, data, **options)[1])
    assert [key for key, value in runs[0].items() if not torch.equal(value, runs[1][key])] == []
    batch = data.largest_batch()
    trained = _logits(module.model, batch)
    base = AutoModelForMultimodalLM.from_pretrained(folder)
    assert not torch.allclose(_logits(base, batch), trained, atol=1e-3)
    read = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(_logits(read, batch), trained)
    (checkpoint,) = (each.path for each in find_checkpoints(tmp_path / "saved").found)
    merge(checkpoint, tmp_path / "merged")
    merged = AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged")
    # Merged weights round once more than adapters beside them; PEFT's own merge has the same bits.
    assert torch.equal(_logits(merged, batch), _logits(read.merge_and_unload(), batch))
    torch.testing.assert_close(_logits(merged, batch), trained)


@pytest.mark.sample(5)
@BRIEF
def test_a_trained_model_is_exported_with_its_processor(name: str, folders: Any, tmp_path: Path) -> None:
    folder = folders(name)
    module, data = vision_runs.module(model=folder), vision_runs.data(folder)
    saving = [ProTrainCheckpoint(str(tmp_path / "saved"), save_last=True)]
    strategy = ProTrainStrategy(plan="offload", monitor=False)
    vision_runs.fit(module, data, saving, max_steps=1, strategy=strategy, enable_checkpointing=True)
    (checkpoint,) = (each.path for each in find_checkpoints(tmp_path / "saved").found)
    export(checkpoint, tmp_path / "trained")
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path / "trained")
    batch = data.largest_batch()
    torch.testing.assert_close(_logits(model, batch), _logits(module.model, batch), rtol=0, atol=0)
    processor = AutoProcessor.from_pretrained(tmp_path / "trained")
    assert type(processor) is type(VISION_FAMILIES[name].make()[0])


# Layers of the language model, the tower and the projector, by patterns of their names.
PARTS = {
    "language": r".*language_model.*\.(q|v)_proj",
    "tower": r".*(visual\.blocks|vision_tower|vision_model)\..*(qkv|q_proj|v_proj)",
    "projector": r".*(visual\.merger\.mlp\.[02]|multi_modal_projector\.linear_[12])",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "LLaVA", "Llama 4"])
def test_adapters_in_one_part_alone(name: str, part: str, folders: Any) -> None:
    folder, pattern = folders(name), PARTS[part]
    module = vision_runs.module(model=folder, lora={"r": 2, "target_modules": pattern})
    before = {key: value.clone() for key, value in module.state_dict().items()}
    strategy = ProTrainStrategy(plan="offload", monitor=False)
    _, after = vision_runs.fit(module, vision_runs.data(folder), max_steps=2, strategy=strategy)
    changed = {key.partition(".lora_")[0] for key, value in after.items() if not torch.equal(value, before[key])}
    layers = {key.partition(".lora_")[0] for key in after if ".lora_" in key}
    assert changed
    assert changed <= layers
    assert {layer for layer in layers if re.fullmatch(pattern, layer)} == layers


# Layers of the tower, of the projector and of the language model.
ADAPTED = r".*\.(q_proj|qkv|v_proj|linear_1|merger\.mlp\.0)"
SYNCS: dict[str, dict[str, Any]] = {
    "ddp": {"plan": "resident", "adapter_grad_sync": "ddp"},
    "flat": {"plan": "resident", "adapter_grad_sync": "flat"},
    "offload": {"plan": "offload"},
}


def _train_adapters(rank: int, folder: str, batches: list[Batch], options: dict[str, Any] | None) -> dict[str, Any]:
    """Return the adapters after three steps: on this rank's batch of a pair, or on both without `options`."""
    torch.set_num_threads(1)
    module = vision_runs.module(model=folder, lora={"r": 2, "target_modules": ADAPTED})
    for key, parameter in module.named_parameters():
        if key.endswith("_gate"):  # With gates at zero, nothing of an image would reach the text.
            parameter.data.fill_(0.5)
    given: dict[str, Any] = {"max_steps": 3, "use_distributed_sampler": False}
    if options is None:
        count = torch.tensor(count_trained(batches))
        rows = [{**batch, "trained_tokens": count} for batch in batches] * 3
        trainer = quiet_trainer(**given, accumulate_grad_batches=2)
    else:
        own = batches[rank]
        rows = [{**own, "trained_tokens": torch.tensor(count_trained([own]))}] * 3
        trainer = trainer_on_rank(rank, 2, kind=partial(ProTrainStrategy, monitor=False, **options), **given)
    trainer.fit(module, DataLoader(rows, batch_size=None))
    return {name: value.numpy() for name, value in module.state_dict().items() if ".lora_" in name}


@pytest.mark.sample(3)
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", ["LLaVA", "Qwen2.5-VL", "Llama 3.2 Vision", "Qwen2-Audio"])
def test_a_rank_with_text_alone_trains_the_adapted_tower(
    name: str, sync: str, folders: Any, encoders: Any, tmp_path: Path
) -> None:
    folder = folders(name)
    kinds = (VISION_FAMILIES[name].rows[1], ())
    batches = [vision_runs.batch(_encoder(encoders(name)), [vision_runs.row(own)]) for own in kinds]
    has_media = [any("pixel" in key or "features" in key for key in batch) for batch in batches]
    assert has_media == [True, False]
    expected = _train_adapters(0, folder, batches, None)
    tower = [key for key in expected if "lora_B" in key and re.search("vision|visual|audio_tower", key)]
    assert any(expected[key].any() for key in tower), "the tower is trained"
    for found in values(run_ranks(_train_adapters, 2, tmp_path, folder, batches, SYNCS[sync])):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-6, err_msg=key)


@pytest.fixture(scope="module")
def packed(folders: Any) -> ChatDataModule:
    """Packed rows of one family: a model is refused before anything is said of its media."""
    return vision_runs.data(folders("Qwen2.5-VL"), packing=True)


@FAMILIES
def test_packed_rows_are_refused_by_name_at_setup(name: str, folders: Any, packed: ChatDataModule) -> None:
    module = CausalLMModule(model=folders(name), vocab_size=10_000)
    with pytest.raises(ValueError, match=f"'{VISION_FAMILIES[name].model_type}' is not known to: it makes positions"):
        vision_runs.fit(module, packed)
    assert module.model is None, "nothing has been allocated"


LLAMA = {"model_type": "llama", "vocab_size": 1200, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def test_videos_that_a_model_takes_for_images_are_refused_at_setup(folders: Any, tmp_path: Path) -> None:
    folder = folders("GLM-4V")
    (tmp_path / "film.mp4").write_bytes(vision_runs.film((20, 24)))
    messages = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "So."}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"messages": messages, "video": "film.mp4"}) + "\n") * 4)
    data = ChatDataModule(str(rows), tokenizer=folder, max_length=1000, cache_dir=str(tmp_path))
    message = "has videos, .* does not write token .* which Glm4vForConditionalGeneration replaces by them"
    with pytest.raises(ValueError, match=message):
        vision_runs.fit(CausalLMModule(model=folder), data)


def test_a_model_that_also_speaks_is_refused_with_the_part_that_listens() -> None:
    with pytest.raises(ValueError, match=r"qwen2_5_omni.*Similar: .*qwen2_5_omni_thinker"):
        CausalLMModule(config={"model_type": "qwen2_5_omni"}, vocab_size=100)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "num_attention_heads": 2}, "LlamaForCausalLM does not accept .*pixel_values"),
        (
            VISION_FAMILIES["Llama 3.2 Vision"].make()[1],
            "MllamaForCond.* does not accept .*image_grid_thw",
        ),
        ({**VISION_FAMILIES["Qwen2.5-VL"].make()[1], "image_token_id": 3}, "does not write token 3"),
    ],
    ids=["text", "family", "token"],
)
def test_a_model_that_does_not_read_the_images_is_refused_at_setup(
    config: dict[str, Any], message: str, folders: Any
) -> None:
    module = CausalLMModule(config=config, vocab_size=1300)
    with pytest.raises(ValueError, match=message):
        vision_runs.fit(module, vision_runs.data(folders("Qwen2.5-VL")))
    assert module.model is None, "nothing has been allocated"


def _lines(kinds: Sequence[tuple[Any, ...]], longest: tuple[Any, ...] | None = None) -> str:
    """Rows of these media, and a long one."""
    lines = []
    for index, own in enumerate([*kinds] * 4 + ([] if longest is None else [longest] * 2)):
        answer = "maple " * (80 if index >= 4 * len(kinds) else 1)
        columns = {f"{kind}s": [f"{number}.{vision_runs.SUFFIXES[kind]}"] for number, kind in enumerate(own)}
        lines.append(json.dumps({"messages": vision_runs.row(own, answer=answer)["messages"], **columns}))
    return "\n".join(lines)


PLANNED: dict[str, tuple[str, int, str]] = {
    # An embedding that no forward of this model reads.
    "mixed": (_lines([(), ("image",), ("audio", "image")], ()), 4, r"does not run \S*audio_bos_eos_token: "),
    "text alone": (_lines([()]), 4, r"has no media, so nothing is reserved for model\.model\.(audio_tower|visual)"),
    "text is longest": (_lines([("image",)], ()), 1, r"batch does not run .*model\.visual.*an estimate"),
    "no audio": (_lines([("image",)]), 4, r"batch does not run .*model\.audio_tower.*an estimate"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", PLANNED)
def test_a_plan_is_made_with_media_or_says_what_is_reserved(rows: str, folders: Any) -> None:
    lines, batch_size, said = PLANNED[rows]
    file = Path(folders("Qwen2.5-Omni")) / "planned.jsonl"
    file.write_text(lines)
    data = ChatDataModule(
        str(file), tokenizer=str(file.parent), max_length=2000, batch_size=batch_size, cache_dir=str(file.parent / "c")
    )
    strategy = ProTrainStrategy(hardware=CPU, device_memory="1GiB", monitor=False)
    vision_runs.fit(vision_runs.module(model=str(file.parent)), data, max_steps=2, strategy=strategy)
    assert strategy.plan is not None
    text = " ".join(str(strategy.plan).split())
    assert re.search(said, text)
    assert ("does not run" in text) == ("does not run" in said)
    assert ("nothing is reserved" in text) == ("nothing is reserved" in said)


# Columns of the table in docs/media.md, and the tests behind their cells.
COLUMNS: dict[str, Any] = {
    "mask": test_the_processor_of_the_family_masks_all_but_the_answers,
    "mixed batch": test_a_mixed_batch_is_scored_as_its_rows_alone,
    "step": test_a_step_is_bitwise_that_of_lightning,
    "LoRA": test_adapters_everywhere_are_saved_merged_and_read_by_peft,
    "export": test_a_trained_model_is_exported_with_its_processor,
}


def _tried(test: Any) -> set[str]:
    """Return the families that a test is parametrised with."""
    (marks,) = (mark.args[1] for mark in test.pytestmark if mark.name == "parametrize")
    return {getattr(each, "values", (each,))[0] for each in marks}


def test_the_table_in_the_docs_is_that_of_these_tests() -> None:
    page = (Path(__file__).parents[2] / "docs" / "media.md").read_text(encoding="utf-8")
    expected = [f"| family | reads | processor | {' | '.join(COLUMNS)} |", "|---|---|---" + "|---" * len(COLUMNS) + "|"]
    for name, family in VISION_FAMILIES.items():
        cells = ["yes" if name in _tried(test) else "" for test in COLUMNS.values()]
        expected.append(f"| {name} | {family.media} | `{type(family.make()[0]).__name__}` | {' | '.join(cells)} |")
    assert "\n".join(expected) in page
