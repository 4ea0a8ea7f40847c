"""The model card: the README.md beside a saved model, which says how the model was trained and how to use it.

The Hub reads its YAML block (https://huggingface.co/docs/hub/model-cards). The card names files and folders of this
host by their last part only, and leaves out what is unknown.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from lightning.pytorch import Trainer

from lightning_protrain.config import __version__, plural, version_of
from lightning_protrain.data.hub import cached_names, is_path
from lightning_protrain.device.topology import describe_gpus
from lightning_protrain.models.loading import auto_class
from lightning_protrain.models.lora import base_of
from lightning_protrain.profiler.hardware import cpu_name

_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
# Lengths above are no limit.
_UNCUT = 1 << 40


@dataclass(frozen=True)
class TrainingFacts:
    """Facts on a training, for a model card.

    Attributes:
        base: Name of the pretrained model as the user gave it; None if it is unknown, or weights began at random.
        datasets: Names of data sets as the user gave them.
        adapters: Method of PEFT, such as "LoRA"; empty if weights themselves were trained.
        rows: Rows of the table: name and text.
    """

    base: str | None = None
    datasets: tuple[str, ...] = ()
    adapters: str = ""
    rows: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def warning_of_cards() -> Iterator[None]:
    """Warn if the body of this context fails: a model without a card is better than none."""
    try:
        yield
    except _ERRORS as error:
        warnings.warn(f"The model card README.md is incomplete: {type(error).__name__}: {error}", stacklevel=3)


def facts_of_run(trainer: Trainer, module: Any) -> TrainingFacts:
    """Return the facts on a run that has ended.

    Args:
        trainer: Trainer of the run.
        module: The LightningModule, with a `model` of transformers or PEFT. Its hyperparameters have the names of
            `CausalLMModule`, or are left out.
    """
    settings, data = dict(module.hparams), getattr(trainer, "datamodule", None)
    base = settings.get("model") or (None if settings.get("config") else module.model.config.name_or_path or None)
    loop = trainer.fit_loop
    progress: Any = loop.epoch_loop.batch_progress.current
    num_batches = loop.max_batches
    # Without a length, there are infinitely many batches in an epoch.
    epochs = loop.epoch_progress.current.ready - 1 + progress.processed / num_batches if num_batches else 0.0
    sizes = {name: getattr(data, name, None) for name in ("batch_size", "max_length", "packing")}
    run = {
        "accumulation": trainer.accumulate_grad_batches,
        "world_size": trainer.world_size,
        "precision": trainer.precision,
        "steps": trainer.global_step,
        "epochs": epochs,
    }
    specs = getattr(data, "specs", [])
    names = [name for spec in specs for name in spec.paths]
    reports = [report for report in getattr(data, "reports", ()) if report.name.endswith(", train")]
    kept = sum(report.num_kept for report in reports)
    tokens = epochs * sum(report.num_trained * spec.repeat for report, spec in zip(reports, specs, strict=False))
    trained = [weight for weight in module.model.parameters() if weight.requires_grad]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    common = _rows(settings, module.model, {**sizes, **run})
    rows = {
        "base model": common.pop("base model"),
        "data": ", ".join(dict.fromkeys(_shown(name, "dataset") for name in names))
        + (f" ({plural(kept, 'row')})" if kept else ""),
        **common,
        "trained parameters": f"{sum(weight.numel() for weight in trained):,}",
        "optimizer": ", ".join(map(_optimizer, trainer.optimizers)),
        "trained tokens": f"about {tokens:,.0f}" if tokens else "",
        "hardware": _hardware(trainer),
        "validation": ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()),
        "versions": _versions(hasattr(module.model, "peft_config"), bool(settings.get("quantization"))),
    }
    return TrainingFacts(base, tuple(names), _method(module.model), rows)


def facts_of_checkpoint(content: Mapping[str, Any], model: Any) -> TrainingFacts:
    """Return the facts in a checkpoint of CausalLMModule and its model; those of ProTrainCheckpoint have the most."""
    settings = content["hyper_parameters"]
    data: Mapping[str, Any] = next(
        (state for state in content.values() if isinstance(state, Mapping) and "sizes" in state), {}
    )
    contract = content.get("contract", {})
    steps, accumulation = content.get("global_step"), contract.get("accumulation")
    epochs = steps * accumulation / data["num_batches"] if data.get("num_batches") and accumulation and steps else None
    run = {
        **data.get("sizes", {}),
        "accumulation": accumulation,
        "world_size": data.get("world_size"),
        "precision": contract.get("precision"),
        "steps": steps,
        "epochs": epochs,
    }
    rows = {
        **_rows(settings, model, run),
        "optimizer": ", ".join(entry["class"].rpartition(".")[2] for entry in contract.get("optimizer", ())),
        "versions": _versions(hasattr(model, "peft_config"), bool(settings.get("quantization"))),
    }
    return TrainingFacts(settings.get("model"), (), _method(model), rows)


def write_card(folder: Path, name: str, model: Any, facts: TrainingFacts) -> None:
    """Write README.md into the folder of a saved model; a card that is there is replaced.

    Args:
        folder: The folder.
        name: Name of the folder when it is complete, or of the repository on the Hub.
        model: The saved model; its weights are not read.
        facts: Facts on its training.
    """
    is_adapter, kind = hasattr(model, "peft_config"), auto_class(base_of(model).config).__name__
    tasks = {"AutoModelForCausalLM": "text-generation", "AutoModelForImageTextToText": "image-text-to-text"}
    data = ModelCardData(
        base_model=facts.base if facts.base is not None and _is_on_hub(facts.base) else None,
        datasets=[dataset for dataset in facts.datasets if _is_on_hub(dataset, "dataset")] or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=tasks.get(kind),
        tags=["lightning-protrain", *([facts.adapters.lower()] if facts.adapters else [])],
    )
    rows = dict(facts.rows)
    if facts.adapters and not is_adapter:
        rows["method"] += ", merged into the weights"
    table = [f"| {key} | {' '.join(text.split()).replace('|', '&#124;')} |" for key, text in rows.items() if text]
    what = f"{facts.adapters} adapters of" if is_adapter else "Fine-tuned from"
    origin = "Trained" if facts.base is None else f"{what} {_shown(facts.base)}, trained"
    is_chat = any((folder / file).exists() for file in ("chat_template.jinja", "chat_template.json"))
    lines = [f"---\n{data.to_yaml()}\n---\n", f"# {name.rpartition('/')[2]}\n", f"{origin} with lightning_protrain.\n"]
    lines += ["## Use\n", "```python", *_usage(name, kind, is_adapter, is_chat), "```\n"]
    if is_adapter and data.base_model is None:
        lines += ["`adapter_config.json` has the place of the base model.\n"]
    ModelCard("\n".join([*lines, "## Training\n", "| | |", "|---|---|", *table, ""])).save(folder / "README.md")


def _usage(name: str, kind: str, is_adapter: bool, is_chat: bool) -> list[str]:
    """Return lines of Python that load the model, and of a text model print an answer."""
    if kind != "AutoModelForCausalLM":
        loaded = (("model", kind), ("processor", "AutoProcessor"))
        lines = [f'{to} = {of}.from_pretrained("{name}")' for to, of in loaded]
        return [f"from transformers import AutoProcessor, {kind}\n", *lines]
    begin = ["from transformers import pipeline", "", f'answer = pipeline("text-generation", "{name}")']
    if is_adapter:
        begin = [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer, GenerationConfig, pipeline",
            "",
            f'name = "{name}"',
            "model = AutoPeftModelForCausalLM.from_pretrained(name)",
            "model.generation_config = GenerationConfig.from_pretrained(name)  # has the ends of turns",
            'answer = pipeline("text-generation", model, tokenizer=AutoTokenizer.from_pretrained(name))',
        ]
    prompt, rest = '[{"role": "user", "content": "Who are you?"}]', '[-1]["content"]'
    if not is_chat:
        prompt, rest = '"Once upon a time"', ""
    return [*begin, f'print(answer({prompt}, max_new_tokens=64)[0]["generated_text"]{rest})']


def _rows(settings: Mapping[str, Any], model: Any, run: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows that runs and checkpoints have in common, of hyperparameters and of numbers of the run."""
    loss = settings.get("loss") or ("next-token cross-entropy" if "loss_chunk_tokens" in settings else "")
    beta = f", beta {settings['beta']:g}" if "beta" in settings else ""
    rate = f"{settings['learning_rate']:g}" if "learning_rate" in settings else ""
    if rate and "min_learning_rate_ratio" in settings:
        warmup, floor = settings["warmup_steps"], settings["min_learning_rate_ratio"]
        over = f"{warmup:.0%} of the steps" if 0 < warmup < 1 else plural(int(warmup), "step")
        rate += (f", warm-up over {over}" if warmup else "") + f", cosine decay to {floor:.0%}"
    size, accumulation, devices = (run.get(key) for key in ("batch_size", "accumulation", "world_size"))
    batch, length = "", run.get("max_length")
    if isinstance(size, int) and accumulation and devices:
        rows = "packed rows" if run.get("packing") else "rows"
        parts = f"{size} x {plural(accumulation, 'micro-batch', 'micro-batches')} x {plural(devices, 'device')}"
        batch = f"{size * accumulation * devices:,} {rows} ({parts})"
        batch += f" of at most {plural(length, 'token')}" if isinstance(length, int) and length < _UNCUT else ""
    weights = f"weights in {settings['dtype']}" if settings.get("dtype", "auto") != "auto" else ""
    steps, epochs = run.get("steps"), run.get("epochs")
    return {
        "base model": "" if not settings.get("model") else _linked(settings["model"]),
        "method": _described(model, settings),
        "loss": f"{loss}{beta}",
        "precision": ", ".join(filter(None, [str(run.get("precision") or ""), weights])),
        "learning rate": rate,
        "steps": f"{steps:,}" + (f", {epochs:.3g} epochs" if epochs else "") if steps else "",
        "batch": batch,
    }


def _method(model: Any) -> str:
    """Return the method of PEFT, such as "LoRA"; empty if there is none."""
    config = getattr(model, "peft_config", {}).get("default")
    name = getattr(getattr(config, "peft_type", None), "value", "") if config is not None else ""
    return {"LORA": "LoRA"}.get(name, name)


def _described(model: Any, settings: Mapping[str, Any]) -> str:
    method = _method(model)
    if not method:
        return "full"
    config = model.peft_config["default"]
    parts = [f"{key} {value}" for key in ("r", "lora_alpha", "lora_dropout") if (value := getattr(config, key, None))]
    parts += [key for key in ("use_rslora", "use_dora") if getattr(config, key, False)]
    targets = getattr(config, "target_modules", None)
    if targets:
        names = [targets] if isinstance(targets, str) else sorted({name.rpartition(".")[2] for name in targets})
        parts.append(f"on {', '.join(names)}")
    if saved := getattr(config, "modules_to_save", None):
        parts.append(f"and whole {', '.join(saved)}")
    quantization = settings.get("quantization") or {}
    bits = 4 if quantization.get("load_in_4bit") else 8 if quantization else 0
    return f"{method}: {', '.join(parts)}" + (f"; base weights quantised to {bits} bits in training" if bits else "")


def _optimizer(optimizer: Any) -> str:
    groups = optimizer.param_groups
    decay = max((group.get("weight_decay", 0) for group in groups), default=0)
    betas = groups[0].get("betas")
    return type(optimizer).__name__ + (f", betas {tuple(betas)}" if betas else "") + f", weight decay {decay:g}"


def _hardware(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    name = describe_gpus()[device.index or 0].partition(",")[0] if device.type == "cuda" else cpu_name()
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    return f"{trainer.world_size} x {name}{nodes}"


def _versions(has_adapters: bool, is_quantised: bool) -> str:
    names = ["torch", "lightning", "transformers", *["peft"] * has_adapters, *["bitsandbytes"] * is_quantised]
    return ", ".join([f"lightning_protrain {__version__}", *(f"{name} {version_of(name)}" for name in names)])


def _is_on_hub(name: str, kind: str = "model") -> bool:
    """Return True if a model or data set came from the Hub; elsewhere, a relative path looks like a name."""
    return not is_path(name) and name in cached_names(kind)


def _shown(name: str, kind: str = "model") -> str:
    """Return a name on the Hub, or the last part of a path."""
    return name if _is_on_hub(name, kind) else re.split(r"[/\\]", name.rstrip("/\\"))[-1]


def _linked(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})" if _is_on_hub(name) else _shown(name)
