"""Plans for training a model that is given by its name, without config, data, weights or network.

lightning_protrain.plan("Qwen/Qwen3-8B", method="lora", gpu="RTX 4090", host_memory="64GiB")
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, get_args

from lightning_protrain.models.optimizer import choose_optimizer
from lightning_protrain.models.published import NamedConfig, Published, find_config, published
from lightning_protrain.planner.memory import HostUse, host_bytes
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.gpu_specs import CATALOGUE, find
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware
from lightning_protrain.strategy.plan_report import Answers
from lightning_protrain.strategy.precision import PrecisionName
from lightning_protrain.strategy.repeated_blocks import (
    METHODS,
    SLOW,
    UNIFORM,
    Method,
    ModelTraining,
    Planner,
    planner_for,
)

# Minimum bytes of a parameter on device and host: weights, and optimizer states if it is trained.
LEAST_BYTES: Mapping[Method, float] = {"full": 6, "lora": 2, "qlora": 0.5}
# Short names of precisions that the Trainer accepts.
SHORT = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true"}
# Optimizers to try with bfloat16 weights if float32 weights do not fit; all have float32 masters. And the bytes of a
# weight with its states, which card and host together must hold.
WITH_MASTERS = {"split_adamw": 12, "split_adamw_bf16": 8, "split_adamw_8bit": 6}
# Beginning of the sentence in a plan that says which precision and optimizer were chosen for the user.
CHOSEN = "Planned with precision"
# Number of larger GPUs to try if a model does not fit.
LARGER_GPUS = 3


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training to plan.

    Attributes:
        method: Full fine-tuning, adapters on frozen weights, or adapters on 4-bit weights.
        precision: As in the Trainer; None means mixed precision, with bfloat16 if the GPU supports it, and
            `"bf16-true"` for full fine-tuning with SplitAdamW.
        batch_size: Number of sequences in a micro-batch.
        length: Tokens of a sequence; None means 1024, or the model's number of positions if that is less.
        optimizer: As in CausalLMModule. If neither it nor the precision is given for full fine-tuning, AdamW in mixed
            precision is taken if it fits, or else the first of WITH_MASTERS that fits.

    Raises:
        ValueError: If the method, the precision or the optimizer is unknown, or a number is below one.
    """

    method: Method = "lora"
    precision: str | None = None
    batch_size: int = 1
    length: int | None = None
    optimizer: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        choose_optimizer(self.optimizer)
        known = {"method": METHODS, "precision": (None, *get_args(PrecisionName), *SHORT)}
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name}={value!r}: give one of {', '.join(filter(None, values))}.")
        for name in ("batch_size", "length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: give a positive integer.")

    def of(self, model: NamedConfig, gpu: str | None) -> ModelTraining:
        """Return the training of a model on a GPU; None means the device of this machine."""
        precision = self.precision_on(gpu)
        return ModelTraining(model.config, self.method, precision, self.batch_size, self.length, self.optimizer)

    def precision_on(self, gpu: str | None) -> str:
        """Return the precision of the training on a GPU; None means the device of this machine."""
        if self.precision is not None:
            return SHORT.get(self.precision, self.precision)
        if self.method == "full" and choose_optimizer(self.optimizer).kind is SplitAdamW:
            return "bf16-true"
        return "bf16-mixed" if gpu is None or find(gpu).bfloat16 else "16-mixed"

    @property
    def others(self) -> tuple[TrainingOptions, ...]:
        """Options to try, in turn, on GPUs with bfloat16 if no plan fits."""
        is_open = self.method == "full" and self.precision is None and self.optimizer is None
        return tuple(replace(self, optimizer=name) for name in WITH_MASTERS) if is_open else ()


def plan(
    model: str,
    *,
    method: Method = "lora",
    gpu: str | None = None,
    precision: str | None = None,
    batch_size: int = 1,
    length: int | None = None,
    host_memory: str | int = "auto",
    host_cores: int | None = None,
    num_gpus: int = 1,
    optimizer: str | Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan for training a model, without config, data and weights.

    Args:
        model: Name on the Hugging Face Hub, or path of a config.json or its folder.
        method: `"full"` trains all weights, `"lora"` adapters, `"qlora"` adapters on 4-bit weights.
        gpu: Name of a GPU of the catalogue, such as "RTX 4090"; None means the device of this machine.
        precision: As in the Trainer; None as in TrainingOptions.
        batch_size: Number of sequences in a micro-batch.
        length: Tokens of a sequence; None means 1024, or the model's number of positions if that is less.
        host_memory: Memory of the host, such as "64GiB"; "auto" means the free memory of this host.
        host_cores: Number of cores of the host; None means the number of cores of this host.
        num_gpus: Number of GPUs of the host, which train together.
        optimizer: As in CausalLMModule; None as in TrainingOptions.

    Raises:
        ValueError: If no plan fits, the model or the GPU is unknown, or a value is not allowed.
    """
    options = TrainingOptions(method, precision, batch_size, length, optimizer)
    hardware = DryRunHardware((gpu,) if gpu else (), num_gpus, 1, host_memory, host_cores)
    hardware.refuse_unused(counts_gpus=True)
    (answer,) = answers_for(find_config(model), options, hardware).values()
    if isinstance(answer, ValueError):
        raise answer
    return answer


def answers_for(model: NamedConfig, options: TrainingOptions, hardware: DryRunHardware) -> Answers:
    """Return a plan for each GPU, or the error that explains why no plan fits.

    Args:
        model: The model.
        options: Options of the training.
        hardware: Hosts and GPUs; each GPU gets its own plan.
    """
    found: dict[str, Plan | ValueError] = {}
    room = dict[str, float]()  # Bytes for each weight.
    for training, planner in _planners(model, options, hardware):
        found |= planner.answers()
        for gpu, workload in planner.known.items() if options.others else ():
            found[gpu] = _with_choice(found[gpu], training, planner, gpu)
            node = hardware.nodes.get(gpu)
            nbytes = inf if node is None else (node.device_bytes + node.host_bytes) * find(gpu).bfloat16
            room[gpu] = nbytes / sum(info.numel for info in workload.layout.parameters)
    for other in options.others:
        least = WITH_MASTERS[str(other.optimizer)]
        left = [gpu for gpu in found if isinstance(found[gpu], ValueError) and room[gpu] > least]
        smaller = replace(hardware, gpu=tuple(filter(None, left)))
        for training, planner in _planners(model, other, smaller) if left else ():
            for gpu, answer in planner.answers().items():
                if isinstance(answer, Plan):
                    found[gpu] = _with_choice(answer, training, planner, gpu)
    return found


def _planners(
    model: NamedConfig, options: TrainingOptions, hardware: DryRunHardware
) -> Iterator[tuple[ModelTraining, Planner]]:
    """Yield each kind of training, and a planner for all GPUs that train in this way."""
    trainings = {gpu: options.of(model, gpu or None) for gpu in hardware.gpu or ("",)}
    while trainings:
        training = next(iter(trainings.values()))
        gpus = tuple(gpu for gpu, other in trainings.items() if other == training)
        yield training, planner_for(training, replace(hardware, gpu=tuple(filter(None, gpus))))
        trainings = {gpu: other for gpu, other in trainings.items() if gpu not in gpus}


def _with_choice(answer: Plan | ValueError, training: ModelTraining, planner: Planner, gpu: str) -> Plan | ValueError:
    """Return a plan with a sentence on the precision and the optimizer that were chosen for the user."""
    if isinstance(answer, ValueError) or answer.prediction is None:
        return answer
    workload, ranks = planner.known[gpu], replace(planner.dry_run.ranks, sharding=answer.sharding)
    streamed = [chunk for chunk in answer.chunks if chunk.trainable and not chunk.resident]
    numel = sum(workload.layout.by_name[name].numel for chunk in streamed for name in chunk.parameters)
    said = f"{CHOSEN} {training.precision} and optimizer {training.optimizer or 'adamw'}"
    if training.optimizer is not None:
        said += ", which keeps float32 masters, as float32 weights do not fit"
    if numel:
        each = host_bytes(workload.layout, streamed, workload.state_bytes, use=HostUse(ranks.sharers)) / numel
        said += f": {each:.3g} bytes of the host for each streamed parameter"
    return replace(answer, prediction=replace(answer.prediction, advice=(f"{said}.", *answer.prediction.advice)))


def alternatives(model: NamedConfig, options: TrainingOptions, hardware: DryRunHardware) -> Iterator[str]:
    """Yield a sentence for each single change with which a model fits, the mildest first.

    Tried are smaller micro-batches, the other methods, shorter sequences, and larger GPUs. The refusal itself names
    other optimizers, precisions and numbers of GPUs.

    Args:
        model: A model for which no plan fits.
        options: Options of the training.
        hardware: Hardware with one GPU, for which no plan fits.
    """
    (gpu,) = hardware.gpu
    larger = [each for each in CATALOGUE if each.gib > find(gpu).gib and each.bfloat16 and each.vendor == "nvidia"]
    fastest = {each.gib: each.name for each in sorted(larger, key=lambda each: each.half)}
    sizes = {size: fastest[size] for size in sorted(fastest)[:LARGER_GPUS]}
    planner = planner_for(options.of(model, gpu), replace(hardware, gpu=(gpu, *sizes.values())))
    for size in _halves(options.batch_size, 1):
        if planner.can_fit(gpu, size / options.batch_size):
            yield f"It fits with --batch-size {size}."
            break
    for method in METHODS[METHODS.index(options.method) + 1 :]:
        if _fits(model, replace(options, method=method), hardware):
            yield f"It fits with --method {method}."
    for length in _halves(options.length or 1024, 128):
        # In proportion it is only about right, as attention grows faster.
        likely = planner.can_fit(gpu, length / (options.length or 1024))
        if likely and _fits(model, replace(options, length=length), hardware):
            yield f"It fits with --length {length}."
            break
    for gib, name in sizes.items():
        if planner.can_fit(name):
            yield f"It fits on a GPU of {gib} GB, such as the {name}."
            break


def _halves(number: int, least: int) -> Iterator[int]:
    """Yield the number divided by 2, 4, 8 and so on, down to `least`."""
    while (number := number // 2) >= least:
        yield number


def _fits(model: NamedConfig, options: TrainingOptions, hardware: DryRunHardware) -> bool:
    (gpu,) = hardware.nodes
    return planner_for(options.of(model, gpu), hardware).can_fit(gpu)


@dataclass(frozen=True)
class Fitting:
    """Published models that can be trained on a GPU.

    Attributes:
        plans: Plans of the largest models, by name, largest first.
        smaller: Number of smaller models that fit.
    """

    plans: Mapping[str, Plan]
    smaller: int


def fitting(options: TrainingOptions, hardware: DryRunHardware, most: int) -> Fitting:
    """Return the largest published models that fit a GPU; of models with equal configs, only one is returned.

    Models that take long to profile are skipped: those with towers for images, or with linear attention.

    Args:
        options: Options of the training; models with fewer positions than `options.length` are skipped.
        hardware: Hardware with one GPU.
        most: Maximum number of models to plan for.
    """
    ((gpu, node),) = hardware.nodes.items()
    limit = (node.device_bytes + node.host_bytes) / LEAST_BYTES[options.method]
    quick = set(UNIFORM) - set(SLOW)
    models = [model for model in published().values() if model.config["model_type"] in quick]
    unique = {_sizes(each): each for each in reversed(models) if each.positions >= (options.length or 1)}
    some = sorted((each for each in unique.values() if each.parameters <= limit), key=lambda each: each.parameters)
    named = [NamedConfig(each.name, each.config, each.source) for each in some]

    @cache
    def planner(at: int) -> Planner:
        return planner_for(options.of(named[at], gpu), hardware)

    first = len(named)
    if named and not planner(first - 1).can_fit(gpu):
        first = bisect_left(range(first), True, key=lambda at: not planner(at).can_fit(gpu))
    plans: dict[str, Plan] = {}
    while first > 0 and len(plans) < most:
        first -= 1
        answer = planner(first).answers()[gpu]
        if isinstance(answer, Plan):
            plans[named[first].name] = answer
    return Fitting(plans, first)


def _sizes(model: Published) -> frozenset[tuple[str, str]]:
    """Return the settings of a model's config that determine its plan."""
    return frozenset((key, str(value)) for key, value in model.config.items() if key != "max_position_embeddings")
