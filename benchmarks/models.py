"""Small models of real architectures, with one batch each, for benchmarks of the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH, SEQUENCE, VOCABULARY, HIDDEN, LAYERS, IMAGE_TOKEN = 2, 96, 320, 96, 4, 5
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LANGUAGE = SIZES | {"num_key_value_heads": 2}
HEADS = LANGUAGE | {"head_dim": HIDDEN // 4}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}


def _t5() -> nn.Module:
    sizes = {"d_model": HIDDEN, "d_ff": 3 * HIDDEN, "d_kv": HIDDEN // 4, "num_layers": 3, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, vocab_size=VOCABULARY, decoder_start_token_id=0))


def _llava() -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION).to_dict(),
        text_config=hf.LlamaConfig(**LANGUAGE).to_dict(),
        image_token_index=IMAGE_TOKEN,
    )
    return hf.LlavaForConditionalGeneration(config)


def _lora() -> nn.Module:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LANGUAGE))
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=SEQUENCE, vocab_size=VOCABULARY, bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LANGUAGE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**HEADS)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**HEADS)),
    "t5": _t5,
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=3)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**LANGUAGE, num_local_experts=4)),
    "lora": _lora,
    "llava": _llava,
}  # fmt: skip


def batch_of(name: str) -> dict[str, Tensor]:
    """Return the inputs of the model called `name`: token ids (B, S), int64, and further inputs."""
    tokens = torch.randint(6, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    if name == "bert":
        return {"input_ids": tokens, "labels": torch.zeros(BATCH, dtype=torch.int64)}
    if name == "llava":
        num_patches = (VISION["image_size"] // VISION["patch_size"]) ** 2
        tokens[:, :num_patches] = IMAGE_TOKEN
        pixels = torch.linspace(-1, 1, BATCH * 3 * VISION["image_size"] ** 2)
        images = pixels.reshape(BATCH, 3, VISION["image_size"], VISION["image_size"])
        return {"input_ids": tokens, "pixel_values": images, "labels": tokens.clone()}
    return {"input_ids": tokens, "labels": tokens.clone()}


class Repeated(Dataset[dict[str, Tensor]]):
    """A data set that repeats one batch without copying it."""

    def __init__(self, batch: dict[str, Tensor], count: int) -> None:
        self.batch = batch
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.batch for _ in range(self.count))


class Subject(L.LightningModule):
    """One of `MODELS`, trained on its batch with AdamW."""

    def __init__(self, name: str, num_steps: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = MODELS[name]().train()
        for module in self.network.modules():
            config: Any = getattr(module, "config", None)
            if config is not None:
                config.use_cache = False  # Training does not use a cache of keys and values.
        self.batch = batch_of(name)
        self.num_steps = num_steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=1e-3)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Repeated(self.batch, self.num_steps), batch_size=None)
