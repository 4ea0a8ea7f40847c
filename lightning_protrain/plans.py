"""Plans for training a model that is given by its name, without config, data, weights or network.

lightning_protrain.plan("Qwen/Qwen3-8B", method="lora", gpu="RTX 4090", host_memory="64GiB")
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, Final, Literal, get_args

from lightning_protrain.models.optimizer import choose_optimizer
from lightning_protrain.models.published import NamedConfig, Published, find_config, published
from lightning_protrain.models.repeated_blocks import (
    METHODS,
    SLOW,
    UNIFORM,
    Method,
    ModelTraining,
    Planner,
    planner_for,
)
from lightning_protrain.planner.memory import HostUse, host_bytes
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.sizes import LEAST, SizedStep, fastest, lengths_to, longest, longest_by_one
from lightning_protrain.profiler.gpu_specs import CATALOGUE, find
from lightning_protrain.report.plan_report import Answers
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware
from lightning_protrain.strategy.precision import PrecisionName
from lightning_protrain.strategy.profile_step import MOST_TOKENS

# Minimum bytes of a parameter on device and host: weights, and optimizer states if it is trained.
LEAST_BYTES: Mapping[Method, float] = {"full": 6, "lora": 2, "qlora": 0.5}
# Short names of precisions that the Trainer accepts.
SHORT = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true"}
# Optimizers to try with bfloat16 weights if float32 weights do not fit; all have float32 masters. And the bytes of a
# weight with its states, which card and host together must hold.
WITH_MASTERS = {"split_adamw": 12, "split_adamw_bf16": 8, "split_adamw_8bit": 6}
# Beginning of the sentence in a plan that says which precision and optimizer were chosen for the user.
CHOSEN = "Planned with precision"
# Beginnings of the sentence in a plan that says which length, or batch size, was searched for and found.
LONGEST, BEST = "The longest text that is planned to fit:", "The batch size with most tokens per second:"
# The value of a length or a batch size to search for.
MAX: Final = "max"
# Length that is profiled first in a search for the longest text.
LONG = 1 << 17
# Length that is profiled for a list of models.
LISTED = 1 << 15
# Number of larger GPUs to try if a model does not fit.
LARGER_GPUS = 3


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training to plan.

    Attributes:
        method: Full fine-tuning, adapters on frozen weights, or adapters on 4-bit weights.
        precision: As in the Trainer; None means mixed precision, with bfloat16 if the GPU supports it, and
            `"bf16-true"` for full fine-tuning with SplitAdamW.
        batch_size: Number of sequences in a micro-batch; "max" means the one with most tokens per second. None means
            that for a GPU of the catalogue, or 1 if the length is searched for or no GPU is given.
        length: Tokens of a sequence; None means 1024, or the model's number of positions if that is less; "max" means
            the most that fit.
        optimizer: As in CausalLMModule. If neither it nor the precision is given for full fine-tuning, AdamW in mixed
            precision is taken if it fits, or else the first of WITH_MASTERS that fits.

    Raises:
        ValueError: If the method, the precision or the optimizer is unknown, or a number is below one.
    """

    method: Method = "lora"
    precision: str | None = None
    batch_size: int | Literal["max"] | None = None
    length: int | Literal["max"] | None = None
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
            if value not in (None, MAX) and (type(value) is not int or value < 1):
                raise ValueError(f'{name}={value!r}: give a positive integer, or "max".')
        if self.batch_size == self.length == MAX:
            raise ValueError('batch_size="max" needs a length, and length="max" a batch size: give one of them.')

    @property
    def searches(self) -> bool:
        """True if the batch size or the length is searched for."""
        return MAX in (self.batch_size, self.length)

    def for_hardware(self, hardware: DryRunHardware) -> TrainingOptions:
        """Return the options with a batch size that is given or searched for."""
        if self.batch_size is not None:
            return self
        return replace(self, batch_size=MAX if hardware.gpu and self.length != MAX else 1)

    @property
    def smallest(self) -> TrainingOptions:
        """The options with the smallest size in place of one that is searched for."""
        length = LEAST if self.length == MAX else self.length
        size = 1 if self.batch_size in (None, MAX) else self.batch_size
        return replace(self, batch_size=size, length=length)

    def of(self, model: NamedConfig, gpu: str | None) -> ModelTraining:
        """Return the training of a model on a GPU; None means the device of this machine."""
        assert not self.searches, "`smallest` has sizes."
        length = None if self.length is None else int(self.length)
        precision = self.precision_on(gpu)
        return ModelTraining(model.config, self.method, precision, int(self.batch_size or 1), length, self.optimizer)

    def precision_on(self, gpu: str | None) -> str:
        """Return the precision of the training on a GPU; None means the device of this machine."""
        return self.precision_with(gpu is None or find(gpu).bfloat16)

    def precision_with(self, bfloat16: bool) -> str:
        """Return the precision of the training on a GPU with or without bfloat16."""
        if self.precision is not None:
            return SHORT.get(self.precision, self.precision)
        if self.method == "full" and choose_optimizer(self.optimizer).kind is SplitAdamW:
            return "bf16-true"
        return "bf16-mixed" if bfloat16 else "16-mixed"

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
    batch_size: int | Literal["max"] | None = None,
    length: int | Literal["max"] | None = None,
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
        batch_size: Number of sequences in a micro-batch; None and "max" as in TrainingOptions.
        length: Tokens of a sequence; None and "max" as in TrainingOptions.
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
    options = options.for_hardware(hardware)
    if options.searches:
        if not hardware.gpu:
            raise ValueError(
                'The size "max" is searched for on a GPU of the catalogue, and none is given. Give a `gpu`.'
            )
        return {gpu: _Largest(model, options, hardware.alone(gpu)).answer() for gpu in hardware.gpu}
    answers: dict[str, Plan | ValueError] = {}
    room = dict[str, float]()  # Bytes for each weight.
    for training, planner in _planners(model, options, hardware):
        answers |= planner.answers()
        for gpu, workload in planner.known.items() if options.others else ():
            answers[gpu] = _with_choice(answers[gpu], training, planner, gpu)
            node = hardware.nodes.get(gpu)
            nbytes = inf if node is None else (node.device_bytes + node.host_bytes) * find(gpu).bfloat16
            room[gpu] = nbytes / sum(info.numel for info in workload.layout.parameters)
    for other in options.others:
        least = WITH_MASTERS[str(other.optimizer)]
        left = [gpu for gpu in answers if isinstance(answers[gpu], ValueError) and room[gpu] > least]
        smaller = replace(hardware, gpu=tuple(filter(None, left)))
        for training, planner in _planners(model, other, smaller) if left else ():
            for gpu, answer in planner.answers().items():
                if isinstance(answer, Plan):
                    answers[gpu] = _with_choice(answer, training, planner, gpu)
    return answers


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


def _with_choice(
    answer: Plan | ValueError,
    training: ModelTraining,
    planner: Planner,
    gpu: str,
    reason: str = "float32 weights do not fit",
) -> Plan | ValueError:
    """Return a plan with a sentence on the precision and optimizer chosen for the user, and an error as it is."""
    if isinstance(answer, ValueError) or answer.prediction is None:
        return answer
    workload, ranks = planner.known[gpu], replace(planner.dry_run.ranks, sharding=answer.sharding)
    streamed = [chunk for chunk in answer.chunks if chunk.trainable and not chunk.resident]
    numel = sum(workload.layout.by_name[name].numel for chunk in streamed for name in chunk.parameters)
    sentence = f"{CHOSEN} {training.precision} and optimizer {training.optimizer or 'adamw'}"
    if training.optimizer is not None:
        sentence += f", which keeps float32 masters, as {reason}"
    if numel:
        nbytes_each = host_bytes(workload.layout, streamed, workload.state_bytes, use=HostUse(ranks.sharers)) / numel
        sentence += f": {nbytes_each:.3g} bytes of the host for each streamed parameter"
    return replace(answer, prediction=replace(answer.prediction, advice=(f"{sentence}.", *answer.prediction.advice)))


class _Largest:
    """Searches for the longest text that fits, or for the batch size with most tokens per second.

    Args:
        options: Options of the training, with the length or the batch size to search for.
        hardware: Hardware with one GPU.
    """

    def __init__(self, model: NamedConfig, options: TrainingOptions, hardware: DryRunHardware) -> None:
        (self._gpu,) = hardware.gpu
        self._model, self._options, self._hardware = model, options, hardware
        self._ways = (options, *(options.others if find(self._gpu).bfloat16 else ()))

    def length_without_slices(self) -> int:
        """Return about the longest text that fits without slices, from the profile of one length; 0: none fits."""
        options = self._ways[-1]
        lengths = self._lengths(options)
        length = min(lengths[-1], LISTED)
        return longest_by_one(self._planner(replace(options, length=length)).step(self._gpu), length, lengths)

    def answer(self) -> Plan | ValueError:
        """Return the plan for the size that was found, or the error that says why nothing fits."""
        best: Plan | ValueError | None
        if self._options.length == MAX:
            # The fewest bytes of states leave the most memory for the text.
            best = self._longest(self._ways[-1])
        else:
            best = next((plan for way in self._ways if (plan := self._fastest(way)) is not None), None)
        return best or answers_for(self._model, self._options.smallest, self._hardware)[self._gpu]

    def _planner(self, options: TrainingOptions) -> Planner:
        return planner_for(options.of(self._model, self._gpu), self._hardware)

    def _answer(self, options: TrainingOptions, planner: Planner, sentence: str) -> Plan | ValueError:
        """Return the plan for a size that fits, with a sentence that says what was found."""
        answer = planner.answers()[self._gpu]
        if self._options.others:
            longest = self._options.length == MAX
            reason = "small states leave most memory for the text" if longest else "float32 weights do not fit"
            answer = _with_choice(answer, options.of(self._model, self._gpu), planner, self._gpu, reason)
        if isinstance(answer, ValueError) or answer.prediction is None:
            return answer
        return replace(answer, prediction=replace(answer.prediction, advice=(sentence, *answer.prediction.advice)))

    def _longest(self, options: TrainingOptions) -> Plan | ValueError | None:
        """Return the plan for the longest text; None: the shortest does not fit."""
        lengths = self._lengths(options)

        @cache
        def planner(length: int) -> Planner:
            return self._planner(replace(options, length=length))

        def at(length: int) -> SizedStep:
            return replace(planner(length).step(self._gpu), saves_by_slices=options.method != "full")

        length = longest(at, lengths, min(lengths[-1], LONG))
        if not length:
            return None
        chosen = replace(options, length=length)
        end = ", all positions of the model" if length == chosen.of(self._model, self._gpu).positions() else ""
        return self._answer(chosen, planner(length), f"{LONGEST} {length:,} tokens{end}.")

    def _lengths(self, options: TrainingOptions) -> list[int]:
        """Return the lengths to choose from, in order."""
        limit = options.smallest.of(self._model, self._gpu).positions()
        return lengths_to(min(limit or MOST_TOKENS, max(MOST_TOKENS // int(options.batch_size or 1), LEAST)))

    def _fastest(self, options: TrainingOptions) -> Plan | ValueError | None:
        """Return the plan with most tokens per second; None: one sequence does not fit."""

        @cache
        def planner(size: int) -> Planner:
            return self._planner(replace(options, batch_size=size))

        most = max(MOST_TOKENS // planner(1).step(self._gpu).tokens, 1)
        size = fastest(lambda size: planner(size).step(self._gpu), most)
        if not size:
            return None
        return self._answer(replace(options, batch_size=size), planner(size), f"{BEST} {size:,}.")


def alternatives(model: NamedConfig, options: TrainingOptions, hardware: DryRunHardware) -> Iterator[str]:
    """Yield a sentence for each single change with which a model fits, the mildest first.

    Tried are smaller micro-batches, the other methods, shorter sequences, and larger GPUs. The refusal itself names
    other optimizers, precisions and numbers of GPUs.

    Args:
        model: A model for which no plan fits.
        options: Options of the training.
        hardware: Hardware with one GPU, for which no plan fits.
    """
    (gpu,), options = hardware.gpu, options.smallest
    larger = [it for it in CATALOGUE if it.gib > find(gpu).gib and it.bfloat16 and it.vendor == "nvidia"]
    fastest = {it.gib: it.name for it in sorted(larger, key=lambda it: it.half)}
    sizes = {size: fastest[size] for size in sorted(fastest)[:LARGER_GPUS]}
    planner = planner_for(options.of(model, gpu), hardware)
    samples, length = int(options.batch_size or 1), int(options.length or 1024)
    fitting_tokens = 0

    def fits(other: TrainingOptions) -> bool:
        nonlocal fitting_tokens
        tokens = int(other.batch_size or 1) * int(other.length or 1024)
        if not planner.can_fit(gpu, tokens / (samples * length)):
            return False
        # The proportion is only about right, as the loss has slices of its own.
        if tokens > fitting_tokens and not _fits(model, other, hardware):
            return False
        fitting_tokens = max(tokens, fitting_tokens)
        return True

    for size in _halves(samples, 1):
        if fits(replace(options, batch_size=size)):
            yield f"It fits with --batch-size {size}."
            break
    for method in METHODS[METHODS.index(options.method) + 1 :]:
        if _fits(model, replace(options, method=method), hardware):
            yield f"It fits with --method {method}."
    for shorter in _halves(length, 128):
        if fits(replace(options, length=shorter)):
            yield f"It fits with --length {shorter}."
            break
    on_others = planner_for(options.of(model, gpu), replace(hardware, gpu=tuple(sizes.values()))) if sizes else None
    for gib, name in sizes.items():
        # Without slices: they would have to be profiled for each kind of GPU.
        if on_others is not None and on_others.step(name).fits():
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
        longest: About the longest text that each of them trains on without slices of the tokens.
        smaller: Number of smaller models that fit.
    """

    plans: Mapping[str, Plan]
    longest: Mapping[str, int]
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
    unique = {_sizes(known): known for known in reversed(models) if known.positions >= int(options.length or 1)}
    some = sorted((known for known in unique.values() if known.parameters <= limit), key=lambda known: known.parameters)
    named = [NamedConfig(known.name, known.config, known.source) for known in some]

    @cache
    def planner(at: int) -> Planner:
        return planner_for(options.of(named[at], gpu), hardware)

    first = len(named)
    if named and not planner(first - 1).can_fit(gpu):
        first = bisect_left(range(first), True, key=lambda at: not planner(at).can_fit(gpu))
    plans: dict[str, Plan] = {}
    longest: dict[str, int] = {}
    while first > 0 and len(plans) < most:
        first -= 1
        answer = planner(first).answers()[gpu]
        if isinstance(answer, Plan):
            plans[named[first].name] = answer
            search = _Largest(named[first], replace(options, length=MAX), hardware)
            # The plan fits at its own length, though in proportion to a longer one it may seem not to.
            tokens = 0 if answer.prediction is None else answer.prediction.tokens
            planned = tokens // int(options.batch_size or 1)
            longest[named[first].name] = max(search.length_without_slices(), planned)
    return Fitting(plans, longest, first)


def _sizes(model: Published) -> frozenset[tuple[str, str]]:
    """Return the settings of a model's config that determine its plan."""
    return frozenset((key, str(value)) for key, value in model.config.items() if key != "max_position_embeddings")
