"""Keeps ranks in step: they compare settings, meet before each batch, and end together.

After its last batch, a rank goes on to validation metrics and hooks at the end of the epoch. These may use collectives,
which a rank with further batches would never join: both would wait until the process group times out. So ranks meet
before that, and a rank that still has batches is named.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
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

from lightning_protrain.config import LaunchOptions, OnNonFinite, Parallelism
from lightning_protrain.device.topology import PeerAccess
from lightning_protrain.distributed.evaluation import each_once, evaluate_as_ever, evaluate_each_once
from lightning_protrain.distributed.finite import FiniteLosses
from lightning_protrain.distributed.launch import ProcessPlace, connect
from lightning_protrain.distributed.ranks import gather
from lightning_protrain.planner.free_memory import FreeMemory, least, shortages
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.comm.rank_health import is_of_collective, naming_wait

_T = TypeVar("_T")


class SigtermNote:
    """Records a SIGTERM, for the points of a run at which it may end.

    Lightning's own handler sends messages to the other ranks at any time and waits for answers that do not come. It
    also ends the rank that got the signal after its batch, while other ranks go on.

    Attributes:
        received: True once this rank has received the signal, if it ends together with the others.
    """

    def __init__(self) -> None:
        self.received = False
        self._waits = False
        self._trainer: Trainer | None = None

    def listen(self, trainer: Trainer) -> None:
        """Replace Lightning's handler of SIGTERM, before a run installs its handlers."""
        self.received = self._waits = False
        self._trainer = trainer
        trainer._signal_connector._sigterm_notifier_fn = self._note  # type: ignore[method-assign]

    def wait_for_others(self) -> None:
        """Let this rank end together with all others from now on; before, Lightning ends it alone."""
        self._waits = True

    def close(self) -> None:
        """Restore the Trainer after a run."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)

    def _note(self, signum: int, _: FrameType) -> None:
        assert self._trainer is not None
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not (self.received or self._trainer.received_sigterm):
            launcher.kill(signum)  # Processes that this process has started.
        if self._waits:
            self.received = True
        else:
            self._trainer._signal_connector.received_sigterm = True


class RankSync:
    """Knows the ranks that train together, and whether all of them are still present.

    Ranks meet before each batch and after the last batch of an epoch. A rank that leaves tells the others why. A single
    rank never waits.

    Args:
        on_nonfinite: `"stop"` or `"warn"`, for losses that are not finite.
        every_batch: True if every batch has collectives, even one that ends no step.

    Attributes:
        mesh: The ranks; None: there is only one, or the processes have not met yet.
        peers: Links between the devices, see [Note: Peer-to-peer]; None if unknown.
        losses: Watches whether losses and weights are finite.
        sigterm: Records whether this rank must end.
    """

    def __init__(self, on_nonfinite: OnNonFinite = "stop", every_batch: bool = False) -> None:
        self.mesh: RankMesh | None = None
        self.peers: PeerAccess | None = None
        self.losses = FiniteLosses(on_nonfinite)
        self.sigterm = SigtermNote()
        self._every_batch = every_batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the ranks: a new process connects to its own."""
        return {**vars(self), "mesh": None}

    def connect(self, environment: ClusterEnvironment, place: ProcessPlace, options: LaunchOptions) -> None:
        """Make the process groups; every rank calls it.

        Args:
            environment: Knows the address where ranks meet.
            place: Place of this process in the run.
            options: The user's options.

        Raises:
            ValueError: The backend cannot send tensors of the device.
        """
        self.mesh, found = connect(environment, place, options)
        self.peers = found or self.peers  # In a second run the process group exists, and the answer stays.

    def begin_run(self, options: Parallelism, trainer: Trainer) -> None:
        """Refuse ranks with different settings, and listen to signals; every rank calls it after `connect`.

        Raises:
            ValueError: Ranks differ; raised on all ranks.
        """
        names = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
        settings = options.settings() | {name: repr(getattr(trainer, name)) for name in names}
        refuse_differences({f"values of {name}": value for name, value in settings.items()})
        self.sigterm.listen(trainer)

    def meet(self, what: str, flag: bool = False) -> bool:
        """Wait until all ranks are at the same point; return True if any rank has set the flag."""
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
        """Refuse epochs of different lengths before the first batch, and let ranks meet before each batch."""
        self.losses.begin(trainer)
        if self.mesh is not None:
            refuse_uneven(trainer.num_training_batches)
            meet_in_epochs(trainer, functools.partial(self._meet_before_batch, trainer), self.meet)
            self.sigterm.wait_for_others()

    def _meet_before_batch(self, trainer: Trainer) -> None:
        """Wait until all ranks are about to train the same batch; if one rank must end, all ranks end.

        Raises:
            SIGTERMException: A rank has received SIGTERM.
            ValueError: Losses of a rank are not finite any more.
        """
        assert self.mesh is not None
        batch = f"batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready} of epoch {trainer.current_epoch}"
        step = f"Training at step {trainer.global_step}"
        self.mesh.rank_health.doing = f"{step} in {batch}" if self._every_batch else step
        told_to_end, why = trainer.received_sigterm or self.sigterm.received, self.losses.why_to_stop()
        if self.meet(batch, told_to_end or bool(why)):
            self._stop_if(why, f"the reason to end at {batch}")
            raise SIGTERMException

    def check_losses(self) -> None:
        """End the fit of a single rank if its losses are not finite any more; several ranks check when they meet.

        Raises:
            ValueError: The losses are not finite.
        """
        if self.mesh is None and (why := self.losses.why_to_stop()):
            raise ValueError(why)

    def end_training(self) -> None:
        """Wait until all ranks have ended their last epoch.

        Raises:
            ValueError: The last losses of a rank were not finite.
        """
        self._stop_if(self.losses.why_to_stop(wait=True), "the end of training")
        self.losses.end()

    def refuse_spoiled(self, checkpoint: Mapping[str, Any], module: LightningModule | None) -> None:
        """Refuse a checkpoint with spoiled weights during a fit; every rank calls it.

        Raises:
            ValueError: Trained weights are not finite.
        """
        if module is not None and self.losses.watches:
            trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            self._stop_if(self.losses.why_not_to_save(checkpoint, trained), "a checkpoint")

    def _stop_if(self, why: str, place: str) -> None:
        """End the fit on all ranks if one of them has a reason to stop.

        Args:
            why: This rank's reason; empty: no reason.
            place: Name of the point at which the ranks meet.

        Raises:
            ValueError: A rank has a reason.
        """
        if self.meet(place, bool(why)):
            raise ValueError(why or "The loss or a trained weight of another rank is not finite. Training stops.")

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def each_once(self, dataloader: object, trainer: Trainer) -> object:
        """Remove samples that an evaluation on several ranks would count twice, see [Note: Each sample once]."""
        return dataloader if self.mesh is None else each_once(dataloader, trainer)

    def begin_evaluation(self, trainer: Trainer, together: bool = False) -> None:
        """Begin a validation, test or prediction; see [Note: Each sample once].

        During a fit ranks wait for each other here, because metrics would wait without naming a missing rank.

        Args:
            trainer: Trainer that evaluates.
            together: True if each batch has collectives, so that all ranks need equally many batches.
        """
        if place := validation_place(trainer):
            self.meet(place)
        if self.mesh is not None:
            evaluate_each_once(trainer, self.mesh if together else None)

    # --- errors -------------------------------------------------------------------------------------------------------

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return an error that names the missing ranks if `error` comes from a collective; else return `error`."""
        if self.mesh is None or not is_of_collective(error):
            return error
        return self.mesh.rank_health.explain()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Name the missing ranks, once, if a collective fails within this context.

        Raises:
            RuntimeError: A collective failed.
        """
        try:
            yield
        except RuntimeError as error:
            if self.mesh is None or self.mesh.rank_health.has_explained(error):
                raise
            if (explained := self.explain(error)) is error:
                raise
            raise explained from error

    def leave(self, exception: BaseException) -> None:
        """Tell the other ranks why this one is missing; tell the user which ranks were missing here."""
        if self.mesh is None:
            return
        rank_health = self.mesh.rank_health
        if is_of_collective(exception) and not rank_health.has_explained(exception):
            exception.add_note(str(rank_health.explain()))  # The collective of a metric or of the user.
        at = rank_health.doing[0].lower() + rank_health.doing[1:]
        rank_health.leave(f"failed ({at}) with {type(exception).__name__}: {exception}")

    def close(self, trainer: Trainer | None) -> None:
        """Restore the loops and signal handlers of the Trainer after a run."""
        self.sigterm.close()
        self.losses.end()
        if trainer is not None:
            meet_no_more(trainer)
            evaluate_as_ever(trainer)


def for_mean(tensor: Any, reduce_op: Any) -> Any:
    """Return the tensor to average over ranks: integers become float64.

    Lightning would round the mean down, and it weights logged values by such means of batch sizes.
    """
    if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
        return tensor.double()
    return tensor


def meet_in_epochs(trainer: Trainer, before_batch: Callable[[], None], meet: Callable[[str], object]) -> None:
    """Let ranks meet in the fit that begins.

    Args:
        trainer: Trainer that fits.
        before_batch: Called before each batch.
        meet: Called after the last batch of an epoch, with the name of that point.
    """
    loop = trainer.fit_loop
    # Lightning's own function asks rank 0 only, waits for the device, and continues after a failure.
    loop.epoch_loop._broadcast_sigterm_tensor = before_batch  # type: ignore[method-assign]
    loop.on_advance_end = functools.partial(_end_epoch, loop, meet)  # type: ignore[method-assign]


def meet_no_more(trainer: Trainer) -> None:
    """Restore the loops after a fit."""
    vars(trainer.fit_loop).pop("on_advance_end", None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def validation_place(trainer: Trainer) -> str:
    """Return the name of the point at which a rank validates; empty outside of a fit and before its first batch."""
    if not trainer.validating or trainer.state.fn != TrainerFn.FITTING:
        return ""
    trained = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return f"validation after batch {trained} of epoch {trainer.current_epoch}"


def length_is_known(trainer: Trainer) -> bool:
    """Return True if all loaders of a running fit know their number of batches, whatever limits the Trainer sets."""
    loaders = trainer.fit_loop._combined_loader
    assert loaders is not None
    return all(sized_len(each) is not None for each in loaders.flattened)


def _end_epoch(loop: _FitLoop, meet: Callable[[str], object]) -> None:
    meet(f"the end of epoch {loop.trainer.current_epoch}")
    type(loop).on_advance_end(loop)


def refuse_others(
    layout: ModelLayout,
    device_type: str,
    precision: str,
    choice: Plan | str = "auto",
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Refuse ranks that train with different settings; every rank calls it.

    Raises:
        ValueError: A rank differs from rank 0; raised on all ranks.
    """
    refuse_differences(describe_rank(device_type, precision, choice))
    kinds = {True: "trained", False: "frozen"}
    refuse_other_models(
        {info.fqn: f"{info.dtype}{list(info.shape)}, {kinds[info.trainable]}" for info in layout.parameters}
    )
    refuse_differences({"optimizers": "; ".join(map(_describe_optimizer, optimizers)) or "none"})


def describe_rank(device_type: str, precision: str, choice: Plan | str = "auto") -> dict[str, str]:
    """Return the settings that must be equal on all ranks that train together."""
    plan = choice if isinstance(choice, str) else hashlib.sha256(choice.to_json().encode()).hexdigest()[:12]
    return {
        "versions": _versions(),
        "device types": device_type,
        "precisions": precision,
        "choices of a plan": plan,
    }


def _describe_optimizer(optimizer: Optimizer) -> str:
    """Return the optimizer's class and its settings for each group, as far as they are plain values."""
    plain = int | float | str | tuple | None
    groups = (
        {name: value for name, value in group.items() if isinstance(value, plain)}
        | {"parameters": len(group["params"])}
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__name__} with {', '.join(map(repr, groups))}"


def refuse_other_models(mine: Mapping[str, str]) -> None:
    """Refuse ranks with different models; every rank calls it.

    Args:
        mine: Description of each tensor of this rank by name, in order.

    Raises:
        ValueError: A rank differs from rank 0; raised on all ranks, with the first difference.
    """
    if (
        len(set(gather(hashlib.sha256(repr([*mine.items()]).encode()).hexdigest(), "the models of the other ranks")))
        == 1
    ):
        return
    first, *others = gather(dict(mine))
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
    packages = ("torch", "lightning", "transformers", "lightning_protrain")
    return ", ".join(f"{package} {version(package)}" for package in packages)


def refuse_differences(facts: Mapping[str, str]) -> None:
    """Refuse ranks whose values differ from those of rank 0; every rank calls it.

    Args:
        facts: Values by the plural of their name; the names are equal on all ranks.

    Raises:
        ValueError: A rank differs from rank 0; raised on all ranks.
    """
    everywhere = gather(dict(facts), f"the {', '.join(facts)} of the other ranks")
    for what in facts:
        for rank, other in enumerate(everywhere):
            if other[what] != everywhere[0][what]:
                raise ValueError(
                    f"The ranks have different {what}: rank 0 has {everywhere[0][what]}, rank {rank} has "
                    f"{other[what]}. All ranks must build the same model, with the same settings and packages, on the "
                    "same kind of device."
                )


def say_if_weights_differ(model: nn.Module, ignored: Collection[str] = ()) -> None:
    """Warn if ranks have been initialised differently, because all ranks will take the weights of rank 0.

    Args:
        model: Model that holds the weights of this rank.
        ignored: Names of parameters that may differ.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta and name not in ignored:
            head = parameter.detach().flatten()[:16].cpu().clone(memory_format=torch.contiguous_format)
            digest.update(head.as_strided((head.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
    digests = gather(digest.hexdigest(), "the weights of the other ranks")
    others = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        rank_zero_info(
            f"The weights of rank {', '.join(others)} differ from those of rank 0, which all ranks take. Call "
            "`seed_everything` with the same seed before the model is made to begin equal."
        )


def least_memory(mine: FreeMemory, ranks: RankMesh) -> FreeMemory:
    """Return the least free memory of any rank; warn of ranks with much less than rank 0.

    Every rank calls it.

    Args:
        mine: Free memory of this rank.
        ranks: The ranks.

    Raises:
        RuntimeError: A rank is gone or has failed.
    """
    values = mine.device, mine.host, mine.weights, mine.shared
    told = torch.tensor([-1 if value is None else value for value in values])
    everywhere = [torch.empty_like(told) for _ in range(ranks.world_size)]
    work = dist.all_gather(everywhere, told, group=ranks.meeting, async_op=True)
    ranks.rank_health.wait(work, "the memory of all ranks")
    found = []
    for each in everywhere:
        device, host, weights, shared = each.tolist()
        limits = [None if value < 0 else value for value in (device, host, shared)]
        found.append(FreeMemory(limits[0], limits[1], weights, limits[2]))
    for sentence in shortages(found):
        rank_zero_info(sentence)
    return least(found, ranks.local_size)


def decide(make: Callable[[], Plan]) -> Plan:
    """Return the plan that rank 0 makes; every rank calls it.

    Args:
        make: Makes the plan; called on rank 0.

    Raises:
        ValueError: No plan fits on rank 0; raised on all ranks.
    """
    told: list[str | ValueError | None] = [None]
    if dist.get_rank() == 0:
        try:
            told[0] = make().to_json()
        except ValueError as error:
            told[0] = error
    with naming_wait("the plan of rank 0"):
        dist.broadcast_object_list(told, 0)
    answer = told[0]
    if isinstance(answer, ValueError):
        raise answer
    assert isinstance(answer, str)
    return Plan.from_json(answer)


def refuse_uneven(num_batches: float) -> None:
    """Refuse ranks with different numbers of batches, which would wait for each other at the end of an epoch.

    Args:
        num_batches: Number of training batches of one epoch on this rank; every rank calls it.

    Raises:
        ValueError: Ranks have different numbers of batches; raised on all ranks.
    """
    counts = gather(num_batches, "the numbers of training batches of the other ranks")
    if any(count != counts[0] for count in counts):
        each = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise ValueError(
            f"The ranks have different numbers of training batches ({each}), and the step after the shortest epoch "
            "would wait for ranks that have none. Give every rank as many (`drop_last=True`, a DistributedSampler), "
            "or set Trainer(limit_train_batches=...)."
        )
