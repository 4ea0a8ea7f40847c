"""Makes the plan of a run: describe and profile the model, look at the hardware, search, and agree over all ranks.

Rank 0 plans from the profile and from names and shapes of weights, without their values. So until then a rank may have
an outline of the model, see [Note: Meta init]. Before the plan is applied, each rank gets the weights that it will
hold.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.config import PlanOptions, Preset
from lightning_protrain.device.device import Device
from lightning_protrain.planner.free_memory import FreeMemory
from lightning_protrain.planner.plan import ONE_RANK, Plan, RankLayout, Sharding
from lightning_protrain.planner.request import LocalNode, PlanOrPreset, PlanRequest
from lightning_protrain.profiler.hardware import cache_key, cached_profile, user_folder
from lightning_protrain.profiler.records import HardwareProfile, ModelProfile
from lightning_protrain.runtime.comm.collectives import RankMesh, measure_collectives
from lightning_protrain.strategy.describe import Described, Run, describe
from lightning_protrain.strategy.joint_plan import DryRun, DryRunAnswers, plan_jointly, with_least_memory
from lightning_protrain.strategy.open_sizes import HasOpenSizes, SizeSearch, provisional
from lightning_protrain.strategy.rehearsal import Place, Rehearsal, Shape, explain_out_of_memory

if TYPE_CHECKING:
    PlanChoice = Plan | str | os.PathLike[str]
else:
    # Parsers of command lines read this annotation: with `Plan` in it, they would read the file instead of its path.
    PlanChoice = str | os.PathLike[str]


# A plan that is predicted to take more of the budget is rehearsed even if all weights are resident.
TIGHT = 0.9


def _is_worth_trying(plan: Plan) -> bool:
    """Return True if another plan may be faster, or the device may run out of memory; equal on all ranks."""
    prediction = plan.prediction
    return prediction is not None and (plan.does_anything or prediction.device_bytes > TIGHT * prediction.budget)


def _waiting(trainer: Trainer) -> set[str]:
    """Return the names of weights that this rank has no values of yet."""
    return {name for name, parameter in trainer.lightning_module.named_parameters() if parameter.is_meta}


def read_plan_choice(plan: PlanChoice) -> PlanOrPreset:
    """Return the plan at a path, or a given plan or the name of a preset unchanged.

    Args:
        plan: `"auto"`, `"resident"`, `"offload"`, a plan, or the path of a saved plan.

    Raises:
        ValueError: `plan` is none of these.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise ValueError(f'plan={plan!r}: give "auto", "resident", "offload", a Plan, or the path of one.')
    return cast(Preset, plan) if plan in get_args(Preset) else Plan.load(os.fspath(plan))


class PlanSession:
    """The stages from a model to its plan, one method for each stage.

    Args:
        choice: A given plan, or the name of a preset.
        options: The user's choices for the plan.
        hardware: Rates of device and host; None: measure them once and cache them.

    Attributes:
        dry_run: Hardware to plan for instead of training; None: train.
        request: Request that the applied plan answers; None: no plan is applied yet.

    Raises:
        ValueError: A knob is set in addition to a given plan, or `hardware` is something else.
    """

    def __init__(self, choice: PlanOrPreset, options: PlanOptions, hardware: HardwareProfile | None) -> None:
        if isinstance(choice, Plan):
            options.knobs.refuse("a Plan")
        if not isinstance(hardware, HardwareProfile | None):
            raise ValueError(f"hardware={hardware!r}: give a HardwareProfile, or None.")
        self.choice, self.options = choice, options
        self.dry_run: DryRun | None = None
        self.request: PlanRequest | None = None
        self._hardware = hardware
        self._rehearsal: Rehearsal | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the request, which measures on the device of this process."""
        return {**self.__dict__, "request": None, "_rehearsal": None}

    @contextmanager
    def planning_only(self, dry_run: DryRun) -> Generator[DryRunAnswers]:
        """Make a fit within this context only plan, without weights, and fill the yielded answers."""
        self.dry_run = dry_run
        try:
            with warnings.catch_warnings():
                # Synthetic data has no validation part.
                warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
                yield dry_run.answers
        finally:
            self.dry_run = None

    def describe(self, trainer: Trainer, device: Device, optimizers: Sequence[Optimizer] | None) -> Described:
        """Describe all that the plan depends on; every rank calls it, and rank 0 profiles the step.

        Args:
            trainer: The Trainer in `Strategy.setup`, with its module.
            device: Device of this rank.
            optimizers: Optimizers of the module; None if nothing is trained.

        Raises:
            ValueError: As in `strategy.describe.describe`.
        """
        on_gpus = self.dry_run is not None and self.dry_run.on_gpus
        device_type = "cuda" if on_gpus else device.torch_device.type
        run = Run(trainer, device, optimizers)
        return describe(run, self.choice, self.options, self.dry_run is not None, device_type)

    # Makes optimizers for a run whose sizes are not chosen yet.
    provisional = staticmethod(provisional)

    def choose_sizes(
        self,
        described: Described,
        mesh: RankMesh | None,
        shardings: tuple[Sharding, ...],
        reduce_dtype: torch.dtype | None,
    ) -> bool:
        """Choose the open sizes of the data, see [Note: Open sizes]; every rank calls it. False: there were none.

        The arguments are those of `agree`.

        Raises:
            ValueError: The device memory has no limit, the plan is given, or the step cannot be profiled.
        """
        trainer = described.run.trainer
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, HasOpenSizes) or not data.open_sizes():
            return False
        request = self._shared_request(described, mesh, shardings, reduce_dtype)
        if mesh is not None:
            request = with_least_memory(request, mesh, _waiting(trainer))
        SizeSearch(data, described, request, shardings, self.dry_run).choose_all()
        return True

    def answer(self, described: Described, reduce_dtype: torch.dtype | None) -> None:
        """Fill in the answers of the dry run; the arguments are those of `agree`."""
        assert self.dry_run is not None
        element_bytes = None if reduce_dtype is None else reduce_dtype.itemsize
        self.dry_run.answer(self._request(described, ONE_RANK), element_bytes)

    def agree(
        self,
        described: Described,
        mesh: RankMesh | None,
        shardings: tuple[Sharding, ...],
        reduce_dtype: torch.dtype | None,
    ) -> tuple[PlanRequest, Plan]:
        """Return one plan for all ranks, and the request that it answers; every rank calls it.

        Args:
            described: Properties of the run that the plan depends on.
            mesh: The ranks that train together; None: a single rank.
            shardings: Allowed shardings, the preferred one first.
            reduce_dtype: Dtype in which gradients of offloaded chunks are summed; None: the dtype of the weights.

        Raises:
            ValueError: No plan fits; raised on all ranks.
            RuntimeError: A rank is gone or has failed.
        """
        layout, run = described.workload.layout, described.run
        request = self._shared_request(described, mesh, shardings, reduce_dtype)
        self._rehearsal = Rehearsal(user_folder(), self._hardware is None) if self._rehearses(request) else None
        if self._rehearsal is not None:
            request = self._rehearsal.recall(request, self._machine(run.device))
        device = run.device.torch_device
        request, plan = plan_jointly(
            request,
            mesh,
            shardings,
            _waiting(run.trainer),
            lambda mesh, sharding: measure_collectives(mesh, device, sharding, layout, reduce_dtype),
        )
        if plan.num_offloaded_chunks and [block.name for block in layout.blocks] == [""]:
            rank_zero_info(
                "No repeated list of blocks was found: the whole model is one block, all its weights are on the device "
                "during a step. Name blocks with `blocks` to stream them one by one."
            )
        return request, plan

    def apply(self, trainer: Trainer, request: PlanRequest, plan: Plan, place: Place) -> tuple[PlanRequest, Plan]:
        """Apply a plan and rehearse it; return the request and the plan that result, see rehearsal.py.

        Args:
            trainer: Trainer within `Strategy.setup`.
            request: Request that the plan answers.
            plan: The plan.
            place: Applies a plan instead of the present one, with a number of spare host bytes.
        """
        if self._rehearsal is None or not _is_worth_trying(plan):
            place(plan, request.spare_host_bytes(plan))
        else:
            if request.workload.profile is not None:  # On rank 0, which may search again.
                # A step is not traced while a plan is applied.
                request = replace(request, choice=self.choice, sliced_on=None)
            request, plan = self._rehearsal.improve(trainer, request, plan, place)
        self.request = request
        return request, plan

    def explain(
        self, error: BaseException, plan: Plan | None, device: Device | None, shapes: Collection[Shape]
    ) -> str | None:
        """Return a sentence on how an error that ends a run relates to its plan; None if it is unrelated.

        Args:
            error: The error.
            plan: Plan of the run; None: no plan is applied yet.
            device: Device of this rank; None: it is not open yet.
            shapes: Shapes of the tensors of the present micro-batch.
        """
        if not isinstance(error, torch.OutOfMemoryError) or plan is None or device is None:
            return None
        if self._rehearsal is not None:
            self._rehearsal.remember_short(error, plan, device)
        return explain_out_of_memory(error, plan, device, shapes)

    def forget_rehearsal(self) -> None:
        """Make the next run of this configuration rehearse again."""
        if self._rehearsal is not None:
            self._rehearsal.forget()

    def _rehearses(self, request: PlanRequest) -> bool:
        """Return True if the plan is rehearsed before training; equal on all ranks."""
        choice, training = self.options.rehearse, request.workload.training is not None
        wanted = request.node.on_gpu if choice == "auto" else choice
        return wanted and training and self.choice == "auto"

    def _machine(self, device: Device) -> dict[str, object]:
        """Return the properties of device and host that determine rates, as JSON values."""
        hardware = None if self._hardware is None else dict(sorted(asdict(self._hardware).items()))
        return {**cache_key(device, ()), "given": hardware}

    def _shared_request(
        self,
        described: Described,
        mesh: RankMesh | None,
        shardings: tuple[Sharding, ...],
        reduce_dtype: torch.dtype | None,
    ) -> PlanRequest:
        """Return this rank's request for a plan of all ranks; the arguments are those of `agree`."""
        ranks = RankLayout(sharding=shardings[0])
        if mesh is not None:
            ranks = RankLayout(mesh.world_size // mesh.local_size, mesh.local_size, shardings[0])
        element_bytes = None if reduce_dtype is None else reduce_dtype.itemsize
        return replace(self._request(described, ranks), element_bytes=element_bytes)

    def _request(self, described: Described, ranks: RankLayout) -> PlanRequest:
        """Return this rank's request for a plan, with the memory that is free now."""
        workload, device = described.workload, described.run.device
        free = FreeMemory(
            None if self.options.device_bytes is not None else device.free_bytes(),
            None if self.options.host_bytes is not None else free_host_bytes(),
            workload.weight_bytes,
        )

        @cache
        def measured(names: frozenset[str]) -> HardwareProfile:
            return cached_profile(device, [getattr(torch, name) for name in sorted(names)], user_folder())

        def measure(profile: ModelProfile) -> HardwareProfile:
            if self._hardware is not None:
                return self._hardware
            works = (work for segment in profile.segments for work in (segment.forward, segment.backward))
            costs = (cost for work in works for cost in work.operations)
            return measured(frozenset(cost.dtype for cost in costs if cost.flops) or frozenset({"float32"}))

        node = LocalNode(free, device.torch_device.type != "cpu", measure)
        return PlanRequest(
            self.choice,
            self.options,
            workload,
            node,
            rank_zero_info,
            ranks,
            profile_on=described.profile_on,
            sliced_on=described.sliced_on,
        )
