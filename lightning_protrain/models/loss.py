"""Next-token cross entropy that computes logits for a limited number of tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_protrain.data.batches.loader import IGNORE_INDEX
from lightning_protrain.runtime.recompute import checkpoint_call

# Architectures of transformers whose logits are `head(base_model(...)[0])` if the settings in RESCALED_LOGITS are
# neutral. For all other architectures, the model's forward computes the logits of all tokens.
PLAIN_HEAD_MODEL_TYPES = frozenset({
    "arcee", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "falcon",
    "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "lfm2", "llama", "mamba", "mamba2", "ministral",
    "ministral3", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "stablelm", "starcoder2",
})  # fmt: skip
# Such architectures that read images, audio or video.
PLAIN_HEAD_MEDIA_TYPES = frozenset({
    "gemma3", "gemma4", "glm4v", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next", "mistral3", "mllama",
    "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_vl", "smolvlm", "voxtral",
})  # fmt: skip

# Neutral values of config settings that cap or scale logits.
RESCALED_LOGITS: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
}


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    chunk_tokens: int = 1024,
    weights: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Sum the next-token losses of the labelled tokens, a slice of tokens at a time.

    The labels are shifted here: position `t` of `hidden` is scored against `labels[:, t + 1]`. The head only runs on
    positions with a label. Each slice uses activation checkpointing, so that logits never have more than
    `chunk_tokens * vocab` elements; in exchange, backward repeats the head's forward. Slices are summed in order in
    float32, so the result is deterministic.

    Args:
        hidden: Last hidden states, [batch, seq, hidden].
        head: Maps [tokens, hidden] to logits, [tokens, vocab]. It is called with its hooks, once per slice in forward
            and once per slice in backward.
        labels: Token ids, [batch, seq], not shifted; `IGNORE_INDEX` marks tokens that are not scored.
        chunk_tokens: Maximum number of tokens whose logits exist at the same time.
        weights: Factors of the token losses, float32 of shape [batch, seq], not shifted; None means 1 for all.

    Returns:
        The sum of the losses in nats, a float32 scalar, and the number of labelled tokens. Without labelled tokens, the
        sum is a zero in the autograd graph of `hidden` and `head`.

    Raises:
        ValueError: If `chunk_tokens` is below 1, or if the shapes of `hidden` and `labels` disagree.
    """
    selected, targets, positions = labelled(hidden, labels, chunk_tokens)
    factors: Sequence[Tensor | None] = [None] * max(-(-len(targets) // chunk_tokens), 1)
    if weights is not None:
        shifted = F.pad(weights[:, 1:], (0, 1)).flatten()
        factors = shifted.index_select(0, positions).split(chunk_tokens)

    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    # Splitting zero tokens gives one empty slice. The head runs on it, so that its gradients are zeros, not None.
    slices = zip(selected.split(chunk_tokens), targets.split(chunk_tokens), factors, strict=True)
    for slice_hidden, slice_targets, slice_factors in slices:
        if torch.is_grad_enabled():
            part = checkpoint_call(_slice_loss, slice_hidden, head, slice_targets, slice_factors)
        else:
            part = _slice_loss(slice_hidden, head, slice_targets, slice_factors)
        total = total + part
    return total, positions.numel()


def token_logps(hidden: Tensor, head: nn.Module, labels: Tensor, chunk_tokens: int = 1024) -> Tensor:
    """Return the log-probability of each labelled token, a slice of tokens at a time.

    Memory and errors are those of `chunked_cross_entropy`, as are the arguments.

    Returns:
        Log-probabilities in nats, float32 [batch, seq]: entry `t` is that of label `t + 1`, and 0 if it has no label.
        They are in the autograd graph of `hidden` and `head`, also without labels.
    """
    selected, targets, positions = labelled(hidden, labels, chunk_tokens)
    score = partial(checkpoint_call, _slice_logps) if torch.is_grad_enabled() else _slice_logps
    slices = zip(selected.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    parts = [score(slice_hidden, head, slice_targets) for slice_hidden, slice_targets in slices]
    zeros = torch.zeros(labels.numel(), dtype=torch.float32, device=hidden.device)
    # Each position occurs once, so the result is deterministic, unlike that of `index_add` on a GPU.
    return zeros.index_copy(0, positions, torch.cat(parts)).view(labels.shape)


def labelled(hidden: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the labelled hidden states [tokens, hidden], their targets and flat positions, both int64 [tokens].

    The arguments and errors are those of `chunked_cross_entropy`.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1.")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"`hidden` of shape {tuple(hidden.shape)} needs labels of shape {tuple(hidden.shape[:-1])}; "
            f"their shape is {tuple(labels.shape)}."
        )
    # Shift the labels, not the hidden states: flattening shifted hidden states would copy them.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    return hidden.flatten(0, 1).index_select(0, positions), targets.index_select(0, positions), positions


def _slice_loss(hidden: Tensor, head: nn.Module, targets: Tensor, factors: Tensor | None) -> Tensor:
    logits = head(hidden).float()  # [tokens, vocab]
    if factors is None:
        return F.cross_entropy(logits, targets, reduction="sum")
    # A dot product would run in the autocast dtype, and round losses and factors.
    return (F.cross_entropy(logits, targets, reduction="none") * factors).sum()


def _slice_logps(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    return -F.cross_entropy(head(hidden).float(), targets, reduction="none")


def has_plain_head(model: nn.Module) -> bool:
    """Return True if a model of transformers is known to compute its logits as `head(base_model(...)[0])`.

    The result is False for other modules and unknown architectures, and if the model scales or caps its logits, adds a
    router loss, or has no head outside its base model.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    if model.config.model_type not in PLAIN_HEAD_MODEL_TYPES | PLAIN_HEAD_MEDIA_TYPES:
        return False
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            return False
        if any(getattr(config, name, None) not in (None, neutral) for name, neutral in RESCALED_LOGITS.items()):
            return False
    return model.base_model is not model and isinstance(model.get_output_embeddings(), nn.Module)
