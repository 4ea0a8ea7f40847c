"""Families of vision-language models through their own processors: masks, mixed batches, steps, adapters, exports."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from lightning_protrain import ProTrainStrategy
from lightning_protrain.data.batches.encode import Encoded
from lightning_protrain.data.batches.loader import BatchRow, Collator
from lightning_protrain.data.batches.vision import ImageEncoder, ImageMeasure
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.conversation import MalformedRow
from tests.support import vision_runs
from tests.support.vision_families import REAL_TOKENIZERS, VISION_FAMILIES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging"),
    pytest.mark.filterwarnings("ignore:.*causal_conv1d", "ignore:You are trying to `self.log"),
]
FAMILIES = pytest.mark.parametrize("name", VISION_FAMILIES)
SLOW = ("Gemma 3n",)
RUNS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in VISION_FAMILIES]
)
# Their processors look up characters in the tokens, which control tokens kept as text do not allow.
REFUSES_CONTROL_TOKENS = ("Idefics3",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: vision_runs.saved(name, tmp_path_factory.mktemp("family"), weights=True))


def _encoder(folder: str, **options: Any) -> ImageEncoder:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return ChatEncoders(tokenizer, folder).image_encoder(ChatSettings(max_length=1000, **options))


def _check_mask(name: str, encoder: ImageEncoder) -> None:
    family, tokenizer = VISION_FAMILIES[name], encoder.processor.tokenizer
    measure = ImageMeasure(encoder)
    for question in ("Is it walnut?", f"Is it {family.end} walnut?"):
        for num_images in range(3):
            row = vision_runs.row(num_images, question)
            if num_images and family.end in question and name in REFUSES_CONTROL_TOKENS:
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
            assert encoded.images == num_images
            assert ("pixel_values" in encoded.extras) == (num_images > 0)


def _trained(encoded: Encoded) -> Iterator[Any]:
    """Yield the tokens of each run of trained ones."""
    places = np.flatnonzero(encoded.trained)
    for part in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        yield encoded.input_ids[part]


@FAMILIES
def test_the_processor_of_the_family_masks_all_but_the_answers(name: str, folders: Any) -> None:
    encoder = _encoder(folders(name))
    assert type(encoder.processor) is type(VISION_FAMILIES[name].make()[0])
    _check_mask(name, encoder)
    everything = _encoder(folders(name), train_on_inputs=True).encode(vision_runs.row(2), "row")
    assert isinstance(everything, Encoded)
    added = encoder.processor.tokenizer.added_tokens_decoder
    text = {*_encoder(folders(name)).encode(vision_runs.row(0), "row").input_ids.tolist()}
    trained = {*everything.input_ids[everything.trained].tolist()}
    assert {str(added[token]) for token in trained - text if token in added} == set(), "tokens of images are trained"


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_the_same_with_the_real_vocabulary(name: str, tmp_path: Path) -> None:
    processor, _ = VISION_FAMILIES[name].make(REAL_TOKENIZERS[name]())
    processor.save_pretrained(tmp_path)
    _check_mask(name, _encoder(str(tmp_path)))


@FAMILIES
def test_a_mixed_batch_is_scored_as_its_rows_alone(name: str, folders: Any) -> None:
    """By the model of transformers, with what the processor itself makes of each row."""
    folder = folders(name)
    encoder = _encoder(folder)
    rows = [vision_runs.row(num_images, answer="maple " * (1 + num_images)) for num_images in (1, 0, 2, 0)]
    encoded = [encoder.encode(row, "row") for row in rows]
    pad = encoder.processor.tokenizer.pad_token_id
    batch = Collator(pad, 1000)([BatchRow((one,)) for one in encoded if isinstance(one, Encoded)])
    module = vision_runs.module(model=folder).eval()
    expected, num_tokens = torch.zeros(()), 0
    for row, one in zip(rows, encoded, strict=True):
        assert isinstance(one, Encoded)
        text = encoder.chat.renderer.render(row).text
        given = encoder.processor(text=[text], images=row.get("images"), add_special_tokens=False, return_tensors="pt")
        pixels = {key: value.float() if value.is_floating_point() else value for key, value in given.items()}
        with torch.no_grad():
            logits = module.model(**pixels, use_cache=False).logits[0]
        trained = torch.from_numpy(one.trained)[1:]
        expected += F.cross_entropy(logits[:-1][trained], given["input_ids"][0, 1:][trained], reduction="sum")
        num_tokens += int(trained.sum())
    with torch.no_grad():
        loss = module.training_step(batch)
    assert loss * num_tokens == pytest.approx(float(expected), rel=1e-5)


@RUNS
def test_a_step_is_bitwise_that_of_lightning(name: str, folders: Any) -> None:
    runs = []
    for options in ({}, {"strategy": ProTrainStrategy(plan="offload", monitor=False)}):
        data = vision_runs.data(folders(name))
        runs.append(vision_runs.fit(vision_runs.module(model=folders(name)), data, max_steps=1, **options))
        assert data.reports[0].num_dropped == 0
    (losses, weights), (own_losses, own_weights) = runs
    assert torch.equal(torch.stack(losses), torch.stack(own_losses))
    assert len(losses) == 1
    assert weights.keys() == own_weights.keys()
    assert [key for key, value in weights.items() if not torch.equal(value, own_weights[key])] == []
