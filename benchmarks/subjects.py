"""A training run in its own process, which waits for a message before every step.

[Note: Baton]
The ratio of the times of two runs is only meaningful if other programs disturb both equally. So the two runs of a
comparison exist at the same time and alternate step by step: a run computes only between the message that starts its
step and its answer. Each run is a process, with its own allocator and interpreter lock, as if it were alone.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import lightning as L
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.systems import SYSTEMS, System
from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.plan import BlockPolicy

VOCABULARY = 8192
NUM_LAYERS = 12
PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed"]
HEAD = 64


@dataclass(frozen=True)
class Subject:
    """One run of a comparison.

    Attributes:
        name: Name of the run.
        plan: Arguments of `ProTrainStrategy`; None means plain Lightning.
        checkpointed: True checkpoints every block with `torch.utils.checkpoint`, in a run without a plan.
        compiled: True compiles the forward of every block.
        num_params: Approximate number of parameters of the Llama.
        batch: Sequences in a step.
        sequence: Tokens in a sequence.
        steps: Number of steps, including warm-up.
        threads: Threads of PyTorch.
        accelerator: As in the Trainer.
        precision: As in the Trainer.
    """

    name: str
    plan: dict[str, Any] | None
    checkpointed: bool = False
    compiled: bool = False
    num_params: int = 100_000_000
    batch: int = 4
    sequence: int = 128
    steps: int = 10
    threads: int = 1
    accelerator: str = "cpu"
    precision: PrecisionName = "32-true"


@dataclass(frozen=True)
class Step:
    """The times of forward, backward and optimizer in one step, seconds, and the loss."""

    wall_seconds: float
    cpu_seconds: float
    loss: float


@dataclass(frozen=True)
class Facts:
    """Facts about a run at its end; None if a fact does not apply.

    Attributes:
        num_params: Number of parameters of the model.
        num_hooks: Number of hooks that the strategy has attached to the model.
        plan: Short description of the applied plan.
        planned_bytes: `Plan.memory.total`.
        counters: `TransferCounters` after the last step.
        peak_bytes: Peak of CUDA's allocator after warm-up.
    """

    num_params: int
    num_hooks: int | None = None
    plan: str | None = None
    planned_bytes: int | None = None
    counters: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None


class Llama(L.LightningModule):
    """A Llama with random weights and AdamW, trained on random tokens.

    Args:
        config: Config of the model.
        checkpointed: True checkpoints every block.
        system: System that provides the optimizer and shards the model.
    """

    def __init__(
        self, config: transformers.LlamaConfig, checkpointed: bool, system: System = SYSTEMS["plain Lightning"]
    ) -> None:
        super().__init__()
        self._system = system
        self._is_sharded = False
        self.model = transformers.LlamaForCausalLM(config)
        if checkpointed:
            for block in self.model.model.layers:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of tokens (B, S)."""
        return self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss

    def configure_model(self) -> None:
        """Shard the model once."""
        if self._system.shard is not None and not self._is_sharded:
            self._system.shard(self.model)
            self._is_sharded = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for all parameters."""
        return self._system.optimizer(self.parameters())


class Baton(L.Callback):
    """A callback that waits for a message before every step, and answers with its time, see [Note: Baton].

    Args:
        connection: Connection to the process that sends messages.
        subject: The run.
    """

    def __init__(self, connection: Connection, subject: Subject) -> None:
        self._connection = connection
        self._subject = subject
        self._answer: Step | None = None
        self._begin = (0.0, 0.0)
        self._step = 0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Send the time of the previous step, which includes work of Lightning's loop after it."""
        self._hand_over()
        _synchronize(trainer)
        self._begin = _now()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        """Stop the clock."""
        _synchronize(trainer)
        wall, cpu = (after - before for before, after in zip(self._begin, _now(), strict=True))
        self._answer = Step(wall, cpu, float(outputs["loss"]))
        self._step += 1
        if self._step == 2 and trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Send the facts, after the last answer."""
        self._hand_over()
        self._connection.send(_facts(trainer, module))

    def _hand_over(self) -> None:
        self._connection.send(self._answer)
        self._connection.recv()


def llama_config(num_params: int, sequence: int) -> transformers.LlamaConfig:
    """Return the config of a Llama of 12 blocks with about `num_params` parameters, at least 1.7 million."""
    hidden = min(range(HEAD, 8192 + 1, HEAD), key=lambda hidden: abs(_count(hidden) - num_params))
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=_intermediate(hidden),
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=hidden // HEAD,
        max_position_embeddings=sequence,
    )


def run_subject(connection: Connection, subject: Subject) -> None:
    """Train, one step for each message; the target of a process."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    torch.set_num_threads(subject.threads)
    torch.manual_seed(0)
    module = Llama(llama_config(subject.num_params, subject.sequence), subject.checkpointed)
    if subject.compiled:
        for block in module.model.model.layers:
            block.forward = torch.compile(block.forward)
    tokens = torch.randint(VOCABULARY, (subject.steps * subject.batch, subject.sequence))
    trainer = L.Trainer(
        strategy="auto" if subject.plan is None else ProTrainStrategy(**subject.plan),
        accelerator=subject.accelerator,
        precision=subject.precision,
        devices=1,
        max_steps=subject.steps,
        max_epochs=-1,
        callbacks=[Baton(connection, subject)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=subject.batch))


def _facts(trainer: L.Trainer, module: L.LightningModule) -> Facts:
    num_params = sum(parameter.numel() for parameter in module.parameters())
    peak = torch.cuda.max_memory_allocated() if trainer.strategy.root_device.type == "cuda" else None
    strategy = trainer.strategy
    if not isinstance(strategy, ProTrainStrategy):
        return Facts(num_params, peak_bytes=peak)
    plan = strategy.plan
    assert plan is not None
    checkpointed = sum(block.policy is BlockPolicy.CHECKPOINT for block in plan.blocks)
    return Facts(
        num_params=num_params,
        num_hooks=strategy.num_hooks,
        plan=f"{plan.num_offloaded_chunks} of {len(plan.chunks)} chunks offloaded, {plan.num_chunk_buffers} buffers, "
        f"{checkpointed} of {len(plan.blocks)} blocks checkpointed",
        planned_bytes=plan.memory.total,
        counters=asdict(strategy.counters),
        peak_bytes=peak,
    )


def _intermediate(hidden: int) -> int:
    return -(-hidden * 8 // (3 * HEAD)) * HEAD


def _count(hidden: int) -> int:
    block = 4 * hidden**2 + 3 * hidden * _intermediate(hidden) + 2 * hidden
    return NUM_LAYERS * block + 2 * VOCABULARY * hidden + hidden


def _synchronize(trainer: L.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
