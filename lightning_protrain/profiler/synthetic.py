"""Batches of random inputs for a model of transformers, for planning without data.

[Note: Synthetic batches]
The class of a model determines its inputs: transformers lists the classes of each task, and the signature of a class's
forward names its arguments. The config is not reliable: `BartForCausalLM` has `is_encoder_decoder=True` in its config,
but only a decoder. Sequences are not padded, and every token is scored. Images and audio have the size that the model
was made for. If the number of tokens of an image is unknown, as for Gemma 4 and Llama 4, the batch is text.

[Note: Large batches]
Figures of a step are linear in the number of samples. So the profile of a large batch is extrapolated from those of two
small ones, and takes neither its memory nor its time. A loss that runs the head for one slice of tokens after another
has more slices in the larger batch. Those of the smaller batch stand for all, and count their operations as often. The
last slice is left out, because it is not full.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_protrain.profiler.fake_mode import MetaMode
from lightning_protrain.profiler.records import (
    Backward,
    Forward,
    ModelProfile,
    OperationCost,
    Segment,
    Storage,
    UnitCall,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_T = TypeVar("_T")
_Way = TypeVar("_Way", Forward, Backward)
BATCH_SIZE, LENGTH = 1, 1024
# Patches along each side of an image, for models that take images of any size.
GRID_SIDE = 32
# Minimum number of text tokens beside an image.
LEAST_TEXT = 16
IGNORED = -100
# Model types, besides those named after RoBERTa, whose first position is one behind the index of the padding token.
_BEHIND_PADDING = ("camembert", "data2vec-text", "xmod", "longformer", "ibert")


def size_of(batch: Any) -> tuple[int, int]:
    """Return the numbers of samples and tokens of a batch; 0 if unknown."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return (sizes[0] if sizes else 0), (ids.numel() if isinstance(ids, torch.Tensor) else 0)


def synthetic_batch(model: nn.Module, batch_size: int = BATCH_SIZE, length: int | None = None) -> dict[str, Any]:
    """Return deterministic inputs for a model of transformers, see [Note: Synthetic batches].

    Args:
        model: The model, or a module that contains it (an adapter, a LightningModule); it may be on the meta device.
        batch_size: Number of samples.
        length: Tokens of each sample; None means `LENGTH`, or the model's number of positions if that is less.

    Returns:
        Keyword arguments of the model's forward, tensors on the CPU; with `labels` if the class computes a loss.

    Raises:
        ValueError: If the module contains no model of transformers, its inputs are unknown, or a size is not allowed.
    """
    inner = next((module for module in model.modules() if _is_pretrained(module)), None)
    if inner is None:
        raise ValueError(
            f"{type(model).__name__} contains no model of transformers, so its inputs are unknown. Give data."
        )
    for name, value in (("batch_size", batch_size), ("length", length)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r}: give a positive integer.")
    name = type(inner).__name__
    make = next((make for classes, make in _MAKERS.items() if _lists(_names(classes), name)), _Maker.anything)
    maker = _Maker(inner, batch_size, _checked_length(inner, length))
    with torch.device("cpu"):
        return make(maker)


def _is_pretrained(module: nn.Module) -> TypeGuard[PreTrainedModel]:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _names(task: str) -> dict[str, Any]:
    """Return the class names that transformers lists for a task, by model type."""
    from transformers.models.auto import modeling_auto

    names: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return names


def _lists(classes: Any, name: str) -> bool:
    return any(name == entry or (isinstance(entry, (tuple, list)) and name in entry) for entry in classes.values())


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the greatest length of a sequence that a model of transformers is made for; None: no limit is known.

    Rotary positions that are scaled by a factor reach that many times as far as those before the scaling. Positions
    that depend on distances only (ALiBi, the buckets of T5) and recurrent models have no limit.
    """
    text: Any = config.get_text_config()
    if getattr(text, "alibi", False) or hasattr(text, "relative_attention_num_buckets") or text.model_type == "rwkv":
        return None
    numbers = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions"))
    most = next((value for value in numbers if isinstance(value, int) and value > 0), None)
    if most is None:
        return None
    if "roberta" in text.model_type or text.model_type in _BEHIND_PADDING:  # Positions follow that of the padding.
        return most - 1 - (text.pad_token_id or 0)
    rope = getattr(text, "rope_parameters", None) or {}
    for scaling in (rope, *rope.values()):  # Some models have parameters for each kind of attention.
        if isinstance(scaling, Mapping) and scaling.get("factor"):
            unscaled = scaling.get("original_max_position_embeddings") or most
            most = max(most, int(scaling["factor"] * unscaled))
    return most


def _checked_length(model: PreTrainedModel, length: int | None) -> int:
    """Return the length of sequences; raise ValueError if `length` exceeds the model's number of positions."""
    most = num_positions(model.config)
    if length is None:
        return LENGTH if most is None else min(LENGTH, most)
    if most is not None and length > most:
        other = ""
        if getattr(model.config.get_text_config(), "rope_parameters", None):
            other = ", or a config whose rope_parameters (rope_scaling in older files) extend them by a factor"
        raise ValueError(f"length={length}: {type(model).__name__} has {most} positions. Give at most {most}{other}.")
    return length


@dataclass
class _Maker:
    """A maker of inputs for a model: `batch_size` samples of `length` tokens."""

    model: PreTrainedModel
    batch_size: int
    length: int

    def __post_init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.config = self.model.config
        self.takes = frozenset(inspect.signature(self.model.forward).parameters)

    def refusal(self, reason: str) -> ValueError:
        """Return the error that no batch can be made."""
        return ValueError(f"No batch can be made for {type(self.model).__name__}: {reason}. Give data.")

    def draw(self, *shape: int) -> Tensor:
        """Return normal random numbers, like normalised images and audio."""
        return torch.randn(shape, generator=self._generator)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Return random integers from zero to `below`, exclusive."""
        return torch.randint(below, shape, generator=self._generator)

    def ids(self, length: int | None = None) -> Tensor:
        """Return random token ids, without the special tokens in the config."""
        texts = (self.config, self.config.get_text_config())
        values = [value for text in texts for key, value in text.to_dict().items() if key.endswith(("_id", "_index"))]
        special = {value for value in tree_leaves(values) if isinstance(value, int)}
        embeddings = self.model.get_input_embeddings()
        size = getattr(embeddings, "num_embeddings", None) or int(self.config.get_text_config().vocab_size)
        plain = torch.tensor([token for token in range(size) if token not in special] or [0])
        return plain[self.integers(len(plain), self.batch_size, length or self.length)]

    # --- tasks --------------------------------------------------------------------------------------------------------

    def next_tokens(self) -> dict[str, Any]:
        """Return inputs for next-token prediction."""
        ids = self.ids()
        return self.masks() | {"input_ids": ids, "labels": ids.clone()}

    def masks(self) -> dict[str, Any]:
        """Return masks of ones for encoder-decoders, which would otherwise make float masks and read their values."""
        has_halves = self.config.model_type in _names("SEQ_TO_SEQ_CAUSAL_LM")
        names = {"attention_mask", "decoder_attention_mask"} & self.takes if has_halves else ()
        return {name: torch.ones(self.batch_size, self.length, dtype=torch.int64) for name in sorted(names)}

    def masked_tokens(self) -> dict[str, Any]:
        """Return inputs for masked language modelling, with a label at every seventh token."""
        ids = self.ids()
        labels = torch.full_like(ids, IGNORED)
        labels[:, ::7] = ids[:, ::7]
        if "decoder_input_ids" in self.takes:  # Encoder-decoders in this list predict all tokens.
            labels = ids.clone()
        return self.masks() | {"input_ids": ids, "labels": labels}

    def translation(self) -> dict[str, Any]:
        """Return inputs for sequence-to-sequence models."""
        return self.masks() | {"input_ids": self.ids(), "labels": self.ids()}

    def speech(self) -> dict[str, Any]:
        """Return inputs for speech recognition, with audio of the maximum length."""
        frames = 2 * int(self.config.max_source_positions)
        bins = getattr(self.config, "num_mel_bins", None) or int(self.config.input_feat_per_channel)
        features = self.draw(self.batch_size, bins, frames)
        if "attention_mask" in self.takes and not hasattr(self.config, "num_mel_bins"):
            features = features.transpose(1, 2).contiguous()  # [batch, time, bins]
        return {"input_features": features, "labels": self.ids()}

    def sequences(self) -> dict[str, Any]:
        """Return inputs for sequence classification; each sequence ends with the end-of-sequence token."""
        ids, end = self.ids(), getattr(self.config.get_text_config(), "eos_token_id", None)
        if isinstance(end, int):
            ids[:, -1] = end
        if self.batch_size > 1 and self.config.get_text_config().pad_token_id is None and not _is_encoder(self.config):
            raise ValueError(
                f"batch_size={self.batch_size}: {type(self.model).__name__} finds the end of sequences by their "
                "padding, but its config has no pad_token_id. Set it, or give batch_size=1."
            )
        return self.masks() | {"input_ids": ids, "labels": self.classes()}

    def classes(self) -> Tensor:
        """Return labels for the config's `problem_type`: classes, numbers, or one 0 or 1 for each class."""
        count, kind = int(self.config.num_labels), getattr(self.config, "problem_type", None)
        if kind == "multi_label_classification":
            return self.integers(2, self.batch_size, count).float()
        if kind == "regression" or (kind is None and count == 1):
            return self.draw(self.batch_size) if count == 1 else self.draw(self.batch_size, count)
        return self.integers(count, self.batch_size)

    def tokens(self) -> dict[str, Any]:
        """Return inputs for token classification."""
        return {
            "input_ids": self.ids(),
            "labels": self.integers(int(self.config.num_labels), self.batch_size, self.length),
        }

    def answers(self) -> dict[str, Any]:
        """Return inputs for question answering, with the first and last position of each answer."""
        places = {"start_positions": torch.zeros(self.batch_size, dtype=torch.int64)}
        return {"input_ids": self.ids(), **places, "end_positions": self.integers(self.length, self.batch_size)}

    def images(self) -> dict[str, Any]:
        """Return inputs for image classification."""
        return {"pixel_values": self.pictures(self.config), "labels": self.classes()}

    def pictures(self, config: Any) -> Tensor:
        """Return one image for each sample."""
        size = getattr(config, "image_size", None)
        if size is None:
            raise self.refusal("its config has no image_size")
        height, width = (size, size) if isinstance(size, int) else size
        return self.draw(self.batch_size, int(getattr(config, "num_channels", 3)), int(height), int(width))

    def image_and_text(self) -> dict[str, Any]:
        """Return one image for each sample, if its tokens are known, followed by text; image tokens are not scored."""
        token = getattr(self.config, "image_token_id", None)
        token = getattr(self.config, "image_token_index", None) if token is None else token
        features: Callable[..., Any] | None = getattr(self.model, "get_image_features", None)
        if token is None or features is None:
            raise self.refusal("its image inputs are unknown")
        seen = self._seen(inspect.signature(features).parameters)
        count = self._count_tokens(features, seen) if seen else 0
        if seen and not count:
            raise self.refusal("its images take no tokens")
        ids = self.ids(max(self.length, count + LEAST_TEXT) if count else self.length)
        ids[:, 1 : 1 + count] = token
        batch = {"input_ids": ids, **seen, "labels": ids.masked_fill(ids == token, IGNORED)}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in self.takes:
                batch[name] = (ids == token).long()
        return batch

    def _count_tokens(self, features: Callable[..., Any], seen: Mapping[str, Any]) -> int:
        """Return the number of tokens that the images of one sample take."""
        with MetaMode([*self.model.parameters(), *self.model.buffers()]), torch.no_grad():
            made = features(**seen)
            width = self.config.get_text_config().hidden_size
            pooled = getattr(made, "pooler_output", made)
            count = sum(leaf.numel() for leaf in tree_leaves(pooled) if isinstance(leaf, Tensor)) // width
        return int(count // self.batch_size)

    def _seen(self, takes: Any) -> dict[str, Any]:
        """Return images as keyword arguments of `get_image_features`, whose parameters are `takes`.

        Nothing is returned if the number of their tokens is unknown: for Gemma 4, whose images may have any size, and
        for Llama 4, whose `get_image_features` returns what comes before the projector.
        """
        config = getattr(self.config, "vision_config", self.config)
        if config.model_type == "llama4_vision_model" or not (
            "image_grid_thw" in takes or hasattr(config, "image_size")
        ):
            return {}
        if "image_grid_thw" not in takes:
            pictures = self.pictures(config)
            sizes = torch.tensor([pictures.shape[-2:]] * self.batch_size)
            return {"pixel_values": pictures} | ({"image_sizes": sizes} if "image_sizes" in takes else {})
        channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
        patch = channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, GRID_SIDE, GRID_SIDE]] * self.batch_size)
        return {"pixel_values": self.draw(self.batch_size * GRID_SIDE**2, patch), "image_grid_thw": grid}

    def anything(self) -> dict[str, Any]:
        """Return inputs for a class without a known task, which computes no loss."""
        if "input_ids" in self.takes:
            both = {"decoder_input_ids": self.ids()} if "decoder_input_ids" in self.takes else {}
            return self.masks() | {"input_ids": self.ids(), **both}
        if "pixel_values" in self.takes:
            return {"pixel_values": self.pictures(self.config)}
        raise self.refusal("its inputs are unknown")


def _is_encoder(config: Any) -> bool:
    """Return True if the model classifies by a token other than the last one, so that padding does not matter."""
    return bool(config.is_encoder_decoder) or config.model_type in _names("MASKED_LM")


# By the name of transformers' list of models. Some classes are in several lists, so specific tasks come first.
_MAKERS: dict[str, Callable[[_Maker], dict[str, Any]]] = {
    "SPEECH_SEQ_2_SEQ": _Maker.speech,
    "IMAGE_TEXT_TO_TEXT": _Maker.image_and_text,
    "IMAGE_CLASSIFICATION": _Maker.images,
    "SEQUENCE_CLASSIFICATION": _Maker.sequences,
    "TOKEN_CLASSIFICATION": _Maker.tokens,
    "QUESTION_ANSWERING": _Maker.answers,
    "SEQ_TO_SEQ_CAUSAL_LM": _Maker.translation,
    "CAUSAL_LM": _Maker.next_tokens,
    "MASKED_LM": _Maker.masked_tokens,
}


def on_line(one: _T, two: _T, times: float, renamed: Callable[[str], str] | None = None) -> _T:
    """Return `one + times * (two - one)` for each integer in two records of equal structure.

    Args:
        one: A record: an integer, a text, or a dataclass or (named) tuple of records.
        two: Record to extrapolate to.
        times: Distance from `one`, in distances between the records.
        renamed: Returns the text for a text of `one`; None requires equal texts.

    Raises:
        ValueError: The records differ in their structure or in another value.
    """
    start, end = cast(Any, one), cast(Any, two)
    if type(start) is int and type(end) is int:
        return cast(_T, start + round(times * (end - start)))
    if isinstance(start, str) and renamed is not None:
        return cast(_T, renamed(start))
    if is_dataclass(start):
        pairs = ((getattr(start, field.name), getattr(end, field.name)) for field in fields(start))
        return cast(Any, type(start))(*(on_line(*pair, times, renamed) for pair in pairs))
    if isinstance(start, Storage):
        return cast(_T, start if start == end else Storage._make(map(partial(on_line, times=times), start, end)))
    if isinstance(start, tuple):
        try:
            return cast(_T, tuple(on_line(*pair, times, renamed) for pair in zip(start, end, strict=True)))
        except ValueError:
            costs = [record for record in start if isinstance(record, OperationCost)]
            if renamed is not None or not costs:
                raise
            # Operations of equal cost are grouped, and others are equal in the other batch. Nearly all of their cost is
            # proportional to the batch.
            grown = (
                replace(cost, flops=_grown(cost.flops, times), nbytes=_grown(cost.nbytes, times)) for cost in costs
            )
            return cast(_T, tuple(grown))
    if one != two:
        raise ValueError(f"{one} and {two} lie on no line.")
    return one


def _grown(number: int, times: float) -> int:
    return round(number * (1 + times))


def enlarged(one: ModelProfile, two: ModelProfile, times: float) -> ModelProfile | None:
    """Return the profile of a larger batch, see [Note: Large batches]; None if the profiles do not lie on a line.

    Args:
        one: Profile of a step with few samples.
        two: Profile of a step with twice as many samples.
        times: Number of samples beyond `one`, as a multiple of those that `two` has more.
    """
    few, more = (Counter(call.name for call in each.calls) for each in (one, two))
    sliced = {name for name in more if more[name] > few[name]}
    units = [segment.unit for segment in one.segments]
    factor, first, last = 1.0, len(units), len(units)
    at = [index for index, unit in enumerate(units) if unit in sliced]
    if sliced:
        (head,) = sliced if len(sliced) == 1 else ("",)
        if not head or len(at) < 2 or any(units[at[-1] + 1 :]):
            return None
        factor, first, last = on_line(few[head], more[head], times) / (len(at) - 1), at[0], at[-1]
    try:
        segments = on_line(one.segments[:last], two.segments[:last], times)
        return ModelProfile(
            calls=on_line(_calls(one, sliced, len(at) - 1), _calls(two, sliced, len(at) - 1), times),
            parameters=one.parameters,
            saved_bytes=on_line(one.saved_bytes, two.saved_bytes, times),
            flops=on_line(one.flops, two.flops, times),
            segments=segments[:first] + tuple(_repeated(segment, factor) for segment in segments[first:]),
            samples=on_line(one.samples, two.samples, times),
            tokens=on_line(one.tokens, two.tokens, times),
            attention=one.attention,
            measured=one.measured,
            absent=one.absent,
            squares=on_line(one.squares, two.squares, times),
        )
    except ValueError:
        return None


def _calls(profile: ModelProfile, sliced: set[str], most: int) -> tuple[UnitCall, ...]:
    """Return the calls of a step, but only the first `most` of the units in `sliced`."""
    heads = [call for call in profile.calls if call.name in sliced]
    dropped = set(map(id, heads[most:]))
    return tuple(call for call in profile.calls if id(call) not in dropped)


def _repeated(segment: Segment, factor: float) -> Segment:
    """Return a segment that stands for `factor` segments, with as many times the operations."""

    def more(way: _Way) -> _Way:
        return replace(
            way, operations=tuple(replace(cost, count=round(cost.count * factor)) for cost in way.operations)
        )

    return replace(segment, forward=more(segment.forward), backward=more(segment.backward))
