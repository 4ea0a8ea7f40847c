"""Synchronisation of ranks: they compare settings, wait for each other before each batch, and end together.

To *meet* is to wait at a named barrier until all ranks are at the same point. Without it, a rank that has ended its
epoch could wait in a collective of a metric for a rank that still has batches, until the process group times out. A
barrier detects this, and its error names the ranks and where they are.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.config import LaunchOptions, OnNonFinite, Parallelism, __version__, version_of
from lightning_protrain.device.topology import PeerAccess
from lightning_protrain.distributed.evaluation import each_once, evaluate_each_once, patch
from lightning_protrain.distributed.failures import FirstRankRefused
from lightning_protrain.distributed.finite import FiniteLosses
from lightning_protrain.distributed.launch import ProcessPlace, connect
from lightning_protrain.planner.free_memory import FreeMemory, least, shortages
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.rank_store import RankStore, is_of_collective
from lightning_protrain.runtime.comm.collectives import RankMesh

_T = TypeVar("_T")


class SigtermNote:
    """A handler of SIGTERM that only records the signal; all ranks end when they next meet.

    Lightning's own handler may communicate while other ranks are in a different collective, and ends only the rank that
    got the signal.

    Attributes:
        received: True if this rank has received the signal, and ends together with the others.
    """

    def __init__(self) -> None:
        self.received = False
        self._waits = False
        self._trainer: Trainer | None = None
        self._patches = ExitStack()
        self._watch = SigtermWatch()

    def listen(self, trainer: Trainer) -> None:
        """Replace Lightning's handler of SIGTERM; call this before Lightning installs its handlers."""
        self.received = self._waits = False
        self._trainer = trainer
        self._patches.callback(patch(trainer._signal_connector, "_sigterm_notifier_fn", self._note))
        self._watch.begin(trainer.global_rank)

    def note_batch(self) -> None:
        """Note that a batch begins, so that a rank in a slow batch counts as blocked only later."""
        self._watch.note_batch()

    def wait_for_others(self) -> None:
        """Let this rank end together with the others from now on; until this call, Lightning ends it alone."""
        self._waits = True

    def close(self) -> None:
        """Restore Lightning's handler after a run."""
        self._trainer = None
        self._watch.close()
        self._patches.close()

    def _note(self, signum: int, _: FrameType) -> None:
        assert self._trainer is not None
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not (self.received or self._trainer.received_sigterm):
            launcher.kill(signum)  # Sends the signal to child processes.
        if self._waits:
            self.received = True
        else:
            self._trainer._signal_connector.received_sigterm = True


# Exit code of a process that SIGTERM ends, 128 + 15.
_TERMINATED = 128 + 15
# Seconds after which a signal that was not answered is sent again.
_RESENT = 1.0
# Number of innermost calls to show.
_NUM_FRAMES = 8
# Modules that write files: one call may take minutes, and what it writes must not be lost.
_WRITERS = (
    "lightning_protrain.checkpoint",
    "lightning.fabric.utilities.cloud_io",
    "torch.serialization",
    "safetensors",
)


class SigtermWatch:
    """A thread that ends this process after SIGTERM if a collective blocks it.

    Python calls a handler only when the main thread comes back from native code. A rank that waits in gloo or for a
    GPU, for a rank that never joins, does not come back before the process group times out, and SIGTERM does nothing.
    The interpreter writes the number of a signal to a pipe at once, though. So a thread reads the pipe. After SIGTERM
    it sends SIGURG to the main thread again and again, and expects its handler to be called. A process that writes a
    file is not ended.

    Attributes:
        patience: Seconds that the main thread has to answer, beside the duration of the longest batch so far.
    """

    patience = 10.0

    def __init__(self) -> None:
        self._answered, self._closed = threading.Event(), threading.Event()
        self._batch_begun: float | None = None
        self._longest_batch = 0.0
        self._restores = ExitStack()

    def __reduce__(self) -> tuple[type[SigtermWatch], tuple[()]]:
        return SigtermWatch, ()  # A copy, as of the Trainer whose signal handlers reach this, watches nothing.

    def begin(self, rank: int) -> None:
        """Watch for SIGTERM until `close`; do nothing outside of the main thread, or if another library watches.

        Args:
            rank: Rank of this process, for the message.
        """
        self.close()
        if not hasattr(signal, "SIGURG") or threading.current_thread() is not threading.main_thread():
            return
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        other = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            os.close(reads)
            os.close(writes)
            return
        self._closed.clear()
        self._batch_begun, self._longest_batch = None, 0.0
        handler = signal.signal(signal.SIGURG, lambda *_: self._answered.set())
        watch = threading.Thread(target=self._watch, args=(reads, rank), name="protrain SIGTERM", daemon=True)
        watch.start()
        register_after_fork(self, lambda _: signal.set_wakeup_fd(-1))  # A worker of a DataLoader has the pipe, too.
        # In reverse order: the thread may wait for an answer until it has ended.
        self._restores.callback(signal.signal, signal.SIGURG, signal.SIG_DFL if handler is None else handler)
        self._restores.callback(watch.join)
        self._restores.callback(os.close, writes)  # Wakes the thread.
        self._restores.callback(self._closed.set)
        self._restores.callback(signal.set_wakeup_fd, -1)

    def note_batch(self) -> None:
        """Note that a batch begins."""
        now = time.monotonic()
        self._longest_batch = max(self._longest_batch, now - (self._batch_begun or now))
        self._batch_begun = now

    def close(self) -> None:
        """Restore the handler of SIGURG, and end the thread."""
        self._restores.close()

    def _watch(self, pipe: int, rank: int) -> None:
        while (numbers := os.read(pipe, 64)) and signal.SIGTERM not in numbers:
            pass
        while not self._closed.is_set():
            self._end_if_blocked(rank)
            self._closed.wait(1.0)
        os.close(pipe)

    def _end_if_blocked(self, rank: int) -> None:
        main, limit = threading.main_thread().ident, self.patience + self._longest_batch
        assert main is not None
        self._answered.clear()
        until = time.monotonic() + limit
        while not self._answers(main, until):
            frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
            if not any(frame.f_globals.get("__name__", "").startswith(_WRITERS) for frame in frames):
                told = (
                    f"SIGTERM: rank {rank} ends and saves nothing, because a collective or another native call has "
                    f"blocked it for {limit:.0f} s. Check that all ranks use the same modules. It waits here:\n"
                )
                os.write(2, (told + "".join(traceback.format_stack(frames[0], _NUM_FRAMES))).encode())
                os._exit(_TERMINATED)

    def _answers(self, main: int, until: float) -> bool:
        """Return whether the main thread calls its handler before a time.

        A signal that arrives right before a wait for a lock does not end it; only the next one does.
        """
        while True:
            signal.pthread_kill(main, signal.SIGURG)
            left = until - time.monotonic()
            if self._answered.wait(min(max(left, 0.1), _RESENT)):
                return True
            if left <= _RESENT:
                return False


class RankSync:
    """Synchronises the ranks of a run: at the begin, before each batch, at the end of epochs, and after errors.

    Args:
        on_nonfinite: `"stop"` or `"warn"`, for losses that are not finite.
        every_batch: True if every micro-batch has collectives, not only the last one of a step.

    Attributes:
        mesh: The ranks; None for a single rank, or before the process group exists.
        peers: Links between the devices, see [Note: Peer-to-peer] in device/topology.py; None if unknown.
        losses: Checks that losses and weights are finite.
        sigterm: Handler of SIGTERM.
    """

    def __init__(self, on_nonfinite: OnNonFinite = "stop", every_batch: bool = False) -> None:
        self.mesh: RankMesh | None = None
        self.peers: PeerAccess | None = None
        self.losses = FiniteLosses(on_nonfinite)
        self.sigterm = SigtermNote()
        self._every_batch = every_batch
        # Restores what is patched for a run.
        self._patches = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling without the ranks, because a spawned process connects itself."""
        return {**vars(self), "mesh": None, "sigterm": SigtermNote(), "_patches": ExitStack()}

    def connect(self, environment: ClusterEnvironment, place: ProcessPlace, options: LaunchOptions) -> None:
        """Create the process groups; the arguments and errors are those of `launch.connect`."""
        self.mesh, found = connect(environment, place, options)
        self.peers = found or self.peers  # In a second run, the process group exists and `found` is None.

    def begin_run(self, options: Parallelism, trainer: Trainer) -> None:
        """Compare settings and install the handler of SIGTERM; every rank calls it after `connect`.

        Raises:
            ValueError: If ranks have different settings; raised on all ranks.
        """
        names = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
        settings = options.settings() | {name: repr(getattr(trainer, name)) for name in names}
        refuse_differences({f"values of {name}": value for name, value in settings.items()})
        self.sigterm.listen(trainer)

    def meet(self, what: str, flag: bool = False) -> bool:
        """Wait until all ranks are at the point `what`; return True if any rank has set the flag."""
        return flag if self.mesh is None else self.mesh.meet(what, flag)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum of a tensor over all ranks; return other values unchanged."""
        if not isinstance(tensor, Tensor):
            return tensor
        if group is None:
            self.meet("a reduction")
        return _sync_ddp_if_available(for_mean(tensor, reduce_op), group, reduce_op=reduce_op)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Return the object of rank `src`; every rank calls it."""
        self.meet("a broadcast")
        if not dist.is_available() or not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    # --- training -----------------------------------------------------------------------------------------------------

    def begin_training(self, trainer: Trainer) -> None:
        """Compare the lengths of epochs before the first batch, and let ranks meet before each batch."""
        self.losses.begin(trainer)
        self._patches.close()
        if self.mesh is not None:
            refuse_uneven(trainer.num_training_batches)
            meet_in_epochs(trainer, functools.partial(self._meet_before_batch, trainer), self.meet, self._patches)
            self.sigterm.wait_for_others()

    def _meet_before_batch(self, trainer: Trainer) -> None:
        """Wait until all ranks are at the same batch; if one rank must end, all ranks end.

        Raises:
            SIGTERMException: If a rank has received SIGTERM.
            ValueError: If losses of a rank are not finite.
        """
        assert self.mesh is not None
        self.sigterm.note_batch()
        batch = f"batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready} of epoch {trainer.current_epoch}"
        step = f"Training at step {trainer.global_step}"
        self.mesh.store.doing = f"{step} in {batch}" if self._every_batch else step
        has_sigterm, why = trainer.received_sigterm or self.sigterm.received, self.losses.why_to_stop()
        if self.meet(batch, has_sigterm or bool(why)):
            self._stop_if(why, f"the reason to end at {batch}")
            raise SIGTERMException

    def check_losses(self) -> None:
        """Raise ValueError if losses are not finite, for a single rank; several ranks check this when they meet."""
        if self.mesh is None and (why := self.losses.why_to_stop()):
            raise ValueError(why)

    def end_training(self) -> None:
        """Wait until all ranks have ended their last epoch.

        Raises:
            ValueError: If the last losses of a rank are not finite.
        """
        self._stop_if(self.losses.why_to_stop(wait=True), "the end of training")
        self.losses.end()

    def refuse_spoiled(self, checkpoint: Mapping[str, Any], module: LightningModule | None) -> None:
        """Raise ValueError during a fit if trained weights in a checkpoint are not finite; every rank calls it."""
        if module is not None and self.losses.watches:
            trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            self._stop_if(self.losses.why_not_to_save(checkpoint, trained), "a checkpoint")

    def _stop_if(self, why: str, place: str) -> None:
        """Raise ValueError on all ranks if one of them has a reason to stop; it is empty on the others."""
        if self.meet(place, bool(why)):
            raise ValueError(why or "The loss or a trained weight of another rank is not finite. Training stops.")

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def each_once(self, dataloader: object, trainer: Trainer) -> object:
        """Remove samples that an evaluation on several ranks would count twice, see [Note: Each sample once]."""
        return dataloader if self.mesh is None else each_once(dataloader, trainer)

    def begin_evaluation(self, trainer: Trainer, together: bool = False) -> None:
        """Begin a validation, test or prediction; see [Note: Each sample once] in evaluation.py.

        During a fit, ranks meet here, because a collective of a metric would not name a missing rank.

        Args:
            trainer: Trainer that evaluates.
            together: True if every forward is a collective, so that all ranks must run the same number of batches.
        """
        if place := validation_place(trainer):
            self.meet(place)
        if self.mesh is not None:
            evaluate_each_once(trainer, self.mesh if together else None, self._patches)

    # --- errors -------------------------------------------------------------------------------------------------------

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return an error that names the missing ranks if `error` comes from a collective; else return `error`."""
        if self.mesh is None or not is_of_collective(error):
            return error
        return self.mesh.store.explain()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Raise an error that names the missing ranks if a collective fails within this context."""
        try:
            yield
        except RuntimeError as error:
            if (explained := self.explain(error)) is error:
                raise
            raise explained from error

    def report_failure(self, exception: BaseException) -> None:
        """Report an error of this rank to the others; name the missing ranks if it is an error of a collective."""
        if self.mesh is None:
            return
        store = self.mesh.store
        if is_of_collective(exception):
            exception.add_note(str(store.explain()))  # A collective of a metric or of the user.
        at = store.doing[0].lower() + store.doing[1:]
        store.sign_off(f"failed ({at}) with {type(exception).__name__}: {exception}")

    def close(self) -> None:
        """Restore the loops and signal handlers of the Trainer after a run."""
        RankStore.rest()
        self.sigterm.close()
        self.losses.end()
        self._patches.close()


def for_mean(tensor: Any, reduce_op: Any) -> Any:
    """Convert an integer tensor to float64 if it will be averaged, because Lightning would round the mean down.

    Lightning uses such means of batch sizes as weights of logged values.
    """
    if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
        return tensor.double()
    return tensor


def meet_in_epochs(
    trainer: Trainer, before_batch: Callable[[], None], meet: Callable[[str], object], patches: ExitStack
) -> None:
    """Patch the loops of a Trainer so that ranks meet in the fit that begins.

    Args:
        trainer: Trainer that fits.
        before_batch: Called before each batch.
        meet: Called at the end of each epoch, with the name of that point.
        patches: Undoes the patches when it is closed.
    """
    loop = trainer.fit_loop
    # Lightning's own function only checks rank 0, waits for the device, and continues after a failure.
    patches.callback(patch(loop.epoch_loop, "_broadcast_sigterm_tensor", before_batch))
    ends = functools.partial(_end_epoch, loop, meet, loop.on_advance_end)
    patches.callback(patch(loop, "on_advance_end", ends))


def validation_place(trainer: Trainer) -> str:
    """Return the name of the point at which a rank validates during a fit; empty outside of a fit."""
    if not trainer.validating or trainer.state.fn != TrainerFn.FITTING:
        return ""
    trained = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return f"validation after batch {trained} of epoch {trainer.current_epoch}"


def length_is_known(trainer: Trainer) -> bool:
    """Return True if all dataloaders of a running fit have a length; limits of the Trainer do not matter."""
    loaders = trainer.fit_loop._combined_loader
    assert loaders is not None
    return all(sized_len(loader) is not None for loader in loaders.flattened)


def _end_epoch(loop: _FitLoop, meet: Callable[[str], object], own: Callable[[], None]) -> None:
    meet(f"the end of epoch {loop.trainer.current_epoch}")
    own()


def refuse_others(
    layout: ModelLayout,
    device_type: str,
    precision: str,
    choice: Plan | str = "auto",
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Compare models, optimizers and settings of ranks; every rank calls it.

    Raises:
        ValueError: If a rank differs from rank 0; raised on all ranks.
    """
    plan = choice if isinstance(choice, str) else hashlib.sha256(choice.to_json().encode()).hexdigest()[:12]
    facts = {"versions": _versions(), "device types": device_type, "precisions": precision, "choices of a plan": plan}
    refuse_differences(facts)
    kinds = {True: "trained", False: "frozen"}
    refuse_other_models(
        {info.fqn: f"{info.dtype}{list(info.shape)}, {kinds[info.trainable]}" for info in layout.parameters}
    )
    refuse_differences({"optimizers": "; ".join(map(_describe_optimizer, optimizers)) or "none"})


def _describe_optimizer(optimizer: Optimizer) -> str:
    """Return a text with the class of an optimizer and the plain values in its groups."""
    plain = int | float | str | tuple | None
    groups = (
        {name: value for name, value in group.items() if isinstance(value, plain)}
        | {"parameters": len(group["params"])}
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__name__} with {', '.join(map(repr, groups))}"


def refuse_other_models(mine: Mapping[str, str]) -> None:
    """Compare the models of ranks; every rank calls it.

    Args:
        mine: Description of each tensor of this rank's model, by name.

    Raises:
        ValueError: If a rank differs from rank 0; raised on all ranks, with the first difference.
    """
    store, doing = RankStore.current(), "Comparing models"
    if len(set(store.gather(hashlib.sha256(repr([*mine.items()]).encode()).hexdigest(), doing))) == 1:
        return
    first, *others = store.gather(dict(mine), doing)
    for rank, other in enumerate(others, 1):
        if [*other.items()] != [*first.items()]:
            every = {**first, **other}
            names = [name for name in every if first.get(name) != other.get(name)]
            here, there = (
                f"{names[0]!r} is {of[names[0]]}" if names and names[0] in of else f"{len(of)} tensors, not this one"
                for of in (first, other)
            )
            what = f"Rank 0: {here}; rank {rank}: {there}" if names else "The same tensors are in another order"
            raise ValueError(
                f"The ranks have different models ({len(names)} of {len(every)} tensors differ). {what}. All ranks "
                "must build the same model and train the same part of it."
            )


@functools.cache
def _versions() -> str:
    others = [f"{package} {version_of(package)}" for package in ("torch", "lightning", "transformers")]
    return ", ".join([*others, f"lightning_protrain {__version__}"])


def refuse_differences(facts: Mapping[str, str]) -> None:
    """Compare values of ranks; every rank calls it.

    Args:
        facts: Values by the plural of their name; the names are equal on all ranks.

    Raises:
        ValueError: If a rank differs from rank 0; raised on all ranks.
    """
    everywhere = RankStore.current().gather(dict(facts), f"Comparing {', '.join(facts)}")
    for what in facts:
        for rank, other in enumerate(everywhere):
            if other[what] != everywhere[0][what]:
                raise ValueError(
                    f"The ranks have different {what}: rank 0 has {everywhere[0][what]}, rank {rank} has "
                    f"{other[what]}. All ranks must build the same model, with the same settings and packages, on the "
                    "same kind of device."
                )


def say_if_weights_differ(model: nn.Module, ignored: Collection[str] = ()) -> None:
    """Log a message if initial weights differ between ranks; every rank calls it.

    Args:
        model: Model of this rank.
        ignored: Names of parameters that may differ.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta and name not in ignored:
            head = parameter.detach().flatten()[:16].cpu().clone(memory_format=torch.contiguous_format)
            digest.update(head.as_strided((head.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
    digests = RankStore.current().gather(digest.hexdigest(), "Comparing weights")
    others = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        rank_zero_info(
            f"The weights of rank {', '.join(others)} differ from those of rank 0, and will be replaced by them. To "
            "avoid this, call `seed_everything` with the same seed before the model is made."
        )


def least_memory(mine: FreeMemory, ranks: RankMesh) -> FreeMemory:
    """Return the minimum of free memory over ranks, and report ranks with much less than rank 0; every rank calls it.

    Args:
        mine: Free memory of this rank.
        ranks: The ranks.

    Raises:
        FailedElsewhere: If a rank has exited or failed.
    """
    everywhere = ranks.store.gather(mine, "Comparing free memory")
    for sentence in shortages(everywhere):
        rank_zero_info(sentence)
    return least(everywhere, ranks.local_size)


def decide(make: Callable[[], Plan]) -> Plan:
    """Return the plan that rank 0 makes; every rank calls it.

    Args:
        make: Makes the plan; called on rank 0.

    Raises:
        ValueError: If no plan fits on rank 0; raised on all ranks.
    """
    answer: str | ValueError | None = None
    if dist.get_rank() == 0:
        try:
            answer = make().to_json()
        except ValueError as error:
            answer = error
    answer = RankStore.current().broadcast(answer, "Planning")
    if isinstance(answer, ValueError):
        raise answer from (None if dist.get_rank() == 0 else FirstRankRefused("Rank 0 made no plan."))
    assert isinstance(answer, str)
    return Plan.from_json(answer)


def refuse_uneven(num_batches: float) -> None:
    """Raise ValueError on all ranks if ranks have different numbers of batches; every rank calls it.

    Args:
        num_batches: Number of training batches of one epoch on this rank.
    """
    counts = RankStore.current().gather(num_batches, "Comparing the numbers of training batches")
    if any(count != counts[0] for count in counts):
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise ValueError(
            f"The ranks have different numbers of training batches ({listed}), so some would wait for ranks without a "
            "batch. Give all ranks the same number (`drop_last=True`, a DistributedSampler), or set "
            "Trainer(limit_train_batches=...)."
        )
