"""Plans for a model that is known by its config, from profiles of a few of its blocks.

[Note: Repeated blocks]
All blocks of a language model are alike, or the kinds of blocks repeat after a *period*: Gemma 3 has five blocks with a
sliding window and one without. So two shallow models are profiled; the second has one period more. Figures of a deeper
model are extrapolated linearly: a record of the first model plus a multiple of its difference from the matching record
of the second. The blocks of one period are inserted as often as needed. Tests check that the result equals the profile
of the deep model in every figure, for every model type in UNIFORM; other types are profiled whole. The first block is
not repeated, because it is special: in training with adapters its input, the embeddings, needs no gradient.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, Literal, TypeVar, cast

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from transformers import AutoConfig

from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.planner.problem import Workload
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.planner.sizes import SizedStep
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.profiler.synthetic import num_positions, on_line
from lightning_protrain.report.plan_report import Answers
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware
from lightning_protrain.strategy.joint_plan import DryRun
from lightning_protrain.strategy.precision import ProTrainPrecision
from lightning_protrain.strategy.profile_step import SyntheticData
from lightning_protrain.strategy.protrain import ProTrainStrategy

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
# Model types whose blocks differ only in settings that the config lists for each block.
UNIFORM = (
    *("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox"),
    *("gpt2", "smollm3", "olmo3", "granite", "glm4", "seed_oss", "mixtral", "olmoe", "qwen3_moe", "qwen3_next"),
    *("gpt_oss", "gemma3", "mistral3", "qwen3_5", "qwen3_5_moe"),
)
# Model types of UNIFORM whose profile takes a minute nevertheless: they have towers for images, or linear attention in
# many small steps.
SLOW = ("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
LORA = {"r": 16, "lora_alpha": 32}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
_Record = TypeVar("_Record")
# The number of a block of the language model in the name of a module or parameter: towers for media do not deepen.
_BLOCK = re.compile(r"^((?:(?!vision|audio).)*?\.(?:layers|h)\.)(\d+)(?=\.|$)")


def method_options(method: Method, precision: str) -> dict[str, Any]:
    """Return the arguments of CausalLMModule for a method: adapters, and dtype and quantisation of frozen weights."""
    if method == "full":
        return {}
    # Frozen weights in float16 cannot be traced on the CPU, because its autocast does not support the dtype.
    options: dict[str, Any] = {"lora": dict(LORA), "dtype": "bfloat16" if precision.startswith("bf16") else "float32"}
    if method == "qlora":
        compute = "float16" if precision.startswith("16") else "bfloat16"
        options["quantization"] = {**FOUR_BITS, "bnb_4bit_compute_dtype": compute}
    return options


@dataclass(frozen=True)
class ModelTraining:
    """A training that is planned from the config of its model, without weights.

    Attributes:
        config: Config of a transformers model, as keys and values.
        method: Full fine-tuning, adapters on frozen weights, or adapters on 4-bit weights.
        precision: As in the Trainer.
        batch_size: Sequences in a micro-batch.
        length: Tokens of a sequence; None: 1024, or the model's number of positions if that is less.
        optimizer: As in CausalLMModule.
    """

    config: Mapping[str, Any]
    method: Method
    precision: str
    batch_size: int = 1
    length: int | None = None
    optimizer: str | Mapping[str, Any] | None = None

    def module(self) -> CausalLMModule:
        """Return the module to train; it has no weights yet."""
        # Without a key-value cache, one profile is enough.
        options: dict[str, Any] = {"config": self._with({"use_cache": False}), "optimizer": self.optimizer}
        options |= method_options(self.method, self.precision)
        return CausalLMModule(**options)

    def shallow(self, depth: int) -> ModelTraining:
        """Return the training of a model with only the first `depth` blocks."""
        text = self.text()
        name = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        lists = {key: values[:depth] for key, values in _lists(text).items()}
        return replace(self, config=self._with({**lists, name: depth}))

    def _with(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with other settings of its language model."""
        if "text_config" in self.config:
            settings = {"text_config": {**self.config["text_config"], **settings}}
        return {**self.config, **settings}

    def text(self) -> Any:
        """Return the config of the language model, which may be a part of the model."""
        return AutoConfig.for_model(**self.config).get_text_config()

    def positions(self) -> int | None:
        """Return the greatest length of a sequence that the model is made for; None: no limit is known."""
        return num_positions(AutoConfig.for_model(**self.config))

    def period(self) -> int | None:
        """Return the number of blocks after which their kinds repeat; None: unknown."""
        if self.config["model_type"] not in UNIFORM:
            return None
        config = self.text()
        lists = list(_lists(config).values())
        periods = range(1, config.num_hidden_layers)
        return next((n for n in periods if all(values[n:] == values[:-n] for values in lists)), None)


def _lists(config: Any) -> dict[str, list[Any]]:
    """Return the settings of a config that list a value for each block."""
    lists = {key: value for key, value in config.to_dict().items() if isinstance(value, list)}
    return {key: value for key, value in lists.items() if len(value) == config.num_hidden_layers}


@dataclass(frozen=True)
class Planner:
    """A request for plans of a training, with a profile of its step.

    Attributes:
        hardware: The hardware to plan for.
        dry_run: The dry run for this hardware.
        request: Request for the plans.
        known: Workload with the profile of its step, by GPU name.
        sliced: Returns the workloads with slices of the tokens; None: the step cannot be sliced.
    """

    hardware: DryRunHardware
    dry_run: DryRun
    request: PlanRequest
    known: Mapping[str, Workload]
    sliced: Callable[[], Mapping[str, Workload | None]]

    def answers(self) -> Answers:
        """Return a plan for each GPU, or the error that says why no plan fits."""
        first = next(iter(self.known.values()))
        request = replace(self.request, workload=first, profile_on=self._on, sliced_on=self.sliced_on)
        self.dry_run.answer(request)
        return self.hardware.answers(self.dry_run)

    def step(self, gpu: str) -> SizedStep:
        """Return the profiled step, to ask whether other sizes fit a GPU and how fast they are."""
        request = replace(self.request, workload=self.known[gpu], profile_on=None, sliced_on=self.sliced_on)
        return SizedStep(self.dry_run.requests_on(gpu, request))

    def can_fit(self, gpu: str, factor: float = 1.0) -> bool:
        """Return False if no plan fits a GPU, with `factor` times the samples; faster than a search."""
        step = self.step(gpu)
        return step.times(factor).fits() or (step.sliced is not None and step.sliced.times(factor).fits())

    def _on(self, gpu: HardwareProfile | None) -> Workload:
        return self.known["" if gpu is None else gpu.name]

    def sliced_on(self, gpu: HardwareProfile | None) -> Workload | None:
        """Return the workload with slices of the tokens, as in PlanRequest."""
        return self.sliced()["" if gpu is None else gpu.name]


def planner_for(training: ModelTraining, hardware: DryRunHardware) -> Planner:
    """Return a planner that needs neither weights nor the GPU.

    Raises:
        ValueError: The model, its training step or the hardware is not supported.
    """
    dry_run = hardware.dry_run(ProTrainStrategy().shardings(hardware.ranks.ranks_per_node))
    period, depth = training.period(), training.text().num_hidden_layers
    least = 2 * (period or depth) + 1
    shallow = least + (depth - least) % (period or depth)
    depths = [shallow, shallow + (period or 0)]
    if period is None or sum(depths) >= depth:
        depths = [depth]

    def described(slices: bool) -> tuple[PlanRequest, dict[str, Workload | None]]:
        shallower = [training if layers == depth else training.shallow(layers) for layers in depths]
        descriptions = [_described(shallow, dry_run, slices) for shallow in shallower]
        request, smaller = descriptions[0]
        if len(descriptions) == 1:
            return request, smaller
        assert period is not None
        times = (depth - shallow) // period
        _, larger = descriptions[1]
        return request, {name: deepened(small, larger[name], period, times) for name, small in smaller.items()}

    request, known = described(slices=False)
    whole = {name: each for name, each in known.items() if each is not None}
    request = replace(request, sliced_on=None)  # That of the request is for the shallow model.
    return Planner(hardware, dry_run, request, whole, cache(lambda: described(slices=True)[1]))


@dataclass(frozen=True)
class _Collecting(DryRun):
    """A dry run that stores the request instead of answering it.

    Attributes:
        slices: True to profile the step with slices of the tokens.
        known: Workload with the profile of its step, by GPU name; None: it cannot be sliced.
    """

    slices: bool = False
    requests: list[PlanRequest] = field(default_factory=list)
    known: dict[str, Workload | None] = field(default_factory=dict)

    def answer(self, request: PlanRequest, element_bytes: int | None = None) -> None:
        self.requests.append(request)
        for name, under in self.targets.items():
            hardware: HardwareProfile | None = next(iter(under.values()))
            sliced = request.sliced_on(hardware) if self.slices and request.sliced_on is not None else None
            self.known[name] = sliced if self.slices else request.on(hardware).workload


def _described(
    training: ModelTraining, dry_run: DryRun, slices: bool
) -> tuple[PlanRequest, dict[str, Workload | None]]:
    """Return the request for a plan of a training, and the profiled workload for each GPU."""
    dry = _Collecting(dry_run.targets, dry_run.ranks, dry_run.clusters, slices=slices)
    data = DataLoader(SyntheticData(training.batch_size, training.length), batch_size=None)
    with silent():
        strategy = ProTrainStrategy()
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu" if dry.on_gpus else "auto",
            devices=1,
            # Given by its name, Lightning would take bfloat16 in place of float16, as accelerators of CPUs have none.
            plugins=[ProTrainPrecision(cast(Any, training.precision))],
            logger=False,
            enable_checkpointing=False,
        )
        with strategy.session.planning_only(dry):
            trainer.fit(training.module(), data)
    return dry.requests[0], dry.known


@contextmanager
def silent() -> Iterator[None]:
    """Suppress messages of Lightning and other libraries about a Trainer that trains nothing."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "bitsandbytes.backends.cpu.ops")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def deepened(one: Workload | None, two: Workload | None, period: int, times: int) -> Workload | None:
    """Return the workload of a deeper model, see [Note: Repeated blocks].

    Args:
        one: Workload of a shallow model.
        two: Workload of the same model with `period` more blocks.
        period: Number of blocks after which their kinds repeat.
        times: Number of periods to insert into the shallow model.
    """
    if one is None or two is None:
        return None
    assert one.profile is not None
    assert two.profile is not None
    repeat = _Repeat(period, times)
    layout = repeat.record(one.layout, two.layout, ("parameters", "units"))
    profile = repeat.record(one.profile, two.profile, ("calls", "parameters", "segments"))
    return replace(one, layout=layout, profile=profile, streamed=repeat.names(one.streamed))


@dataclass(frozen=True)
class _Repeat:
    """Extrapolates the records of a deep model from those of two shallow models.

    Attributes:
        period: Number of blocks to repeat, those of the second period.
        times: Number of periods to insert.
    """

    period: int
    times: int

    def record(self, one: _Record, two: _Record, lists: tuple[str, ...]) -> _Record:
        """Return a record of the whole model; the fields named in `lists` hold one record for each block."""
        made = {
            each.name: (self._inserted if each.name in lists else self._figure)(
                getattr(one, each.name), getattr(two, each.name)
            )
            for each in fields(cast(Any, one))
        }
        return type(one)(**made)

    def names(self, names: frozenset[str]) -> frozenset[str]:
        """Return these names of parameters, and their copies in inserted blocks."""
        return frozenset(self._renamed(name, at) for name in names for at in range(self.times + 1))

    def _figure(self, one: Any, two: Any) -> Any:
        return self._on_line(one, two, self.times)

    def _inserted(self, one: tuple[Any, ...], two: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the records of all blocks, and those before and after the blocks."""
        inside = [at for at, each in enumerate(one) if self.period <= (_block(each) or 0) < 2 * self.period]
        begin, number = inside[0], inside[-1] + 1 - inside[0]
        assert len(two) == len(one) + number, "The blocks differ."
        assert one[:begin] == two[:begin], "What comes before the blocks depends on their number."
        after = list(zip(one[begin:], two[begin + number :], strict=True))
        made = list(one[:begin])
        for at in range(self.times):
            made += [self._on_line(first, second, at) for first, second in after[:number]]
        made += [self._on_line(first, second, self.times) for first, second in after]
        return tuple(made)

    def _on_line(self, one: _Record, two: _Record, times: int) -> _Record:
        """Extrapolate linearly: `one + times * (two - one)` for each number of the records, with blocks renamed."""
        return on_line(one, two, times, partial(self._renamed, times=times))

    def _renamed(self, name: str, times: int) -> str:
        """Return a name with the block number raised by `times` periods, if the block is behind the first period."""

        def later(match: re.Match[str]) -> str:
            number = int(match[2])
            return f"{match[1]}{number + times * self.period if number >= self.period else number}"

        return _BLOCK.sub(later, name)


def _block(record: Any) -> int | None:
    """Return the number of the block that a record belongs to; None: it belongs to no block."""
    name = next(getattr(record, key) for key in ("fqn", "name", "unit") if hasattr(record, key))
    match = _BLOCK.search(name)
    return None if match is None else int(match[2])
