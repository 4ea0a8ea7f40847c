"""Makes the plan of a run: describe, profile, search, and agree on one plan over all ranks.

[Note: Plans before weights]
A plan needs names and shapes of weights, and what a step does, and rank 0 makes it. So outlines may stand until it is
there, whoever will hold offloaded chunks then: before it is applied, each rank gets what it will hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_protrain.callbacks.checkpoint.setup import copied_bytes
from lightning_protrain.config import Knobs
from lightning_protrain.device.device import Device
from lightning_protrain.device.quant_state import prepare_weights
from lightning_protrain.distributed.rank_sync import decide, least_memory
from lightning_protrain.planner.advice import expected, predict
from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.free_memory import FreeMemory
from lightning_protrain.planner.fsdp_memory import FSDPProblem, FSDPRanks, fsdp_sentence
from lightning_protrain.planner.infeasible import COPY
from lightning_protrain.planner.memory import HostTooSmall, HostUse, check_fits, format_bytes, host_terms, memory_terms
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import ChunkPlan, Plan, Sharding, check_plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.scaling import Cluster
from lightning_protrain.planner.search import NoFeasiblePlan, search
from lightning_protrain.planner.sharding_choice import choose, plan_each
from lightning_protrain.profiler.attention import Capability
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.cgroup_limits import free_host_bytes
from lightning_protrain.profiler.gpu_specs import capability
from lightning_protrain.profiler.hardware import cached_profile, user_folder
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, UnitInfo
from lightning_protrain.runtime.comm.collectives import RankMesh, measure_collectives
from lightning_protrain.runtime.comm.shared_memory import FOLDER, free_shared_bytes, shared_bytes
from lightning_protrain.runtime.optim.bnb_optimizers import host_slowdown, mean_state_bytes, refuse_without_host_step
from lightning_protrain.strategy.checks import refuse_unsupported
from lightning_protrain.strategy.overlap import OverlapPlan
from lightning_protrain.strategy.plan_options import PlanRequest
from lightning_protrain.strategy.precision import ProTrainPrecision, alpha_for_dtype
from lightning_protrain.strategy.profile_step import batch_to_plan_with, profile_training_step, streamable


def search_and_predict(problem: Problem, knobs: Knobs, min_num_params: int, room: int) -> Plan:
    """The plan for a run, with its prediction.

    Args:
        problem: With a limit for the device.
        knobs: What is pinned.
        min_num_params: From this size on a module outside blocks is large.
        room: Bytes of the device beside a plan that offloads anything.

    Raises:
        NoFeasiblePlan: Training fits nowhere.
    """
    assert problem.device_bytes is not None
    budget = problem.device_bytes
    plan = _plan_if_all_fits(problem, knobs, min_num_params)
    if plan is None:
        problem = replace(problem, device_bytes=budget - room, reserved=room)
        plan = search_with_evaluation(problem, knobs)
    plan = predict(problem, plan, knobs)
    assert plan.prediction is not None
    return replace(plan, prediction=replace(plan.prediction, budget=budget))


def _plan_if_all_fits(problem: Problem, knobs: Knobs, min_num_params: int) -> Plan | None:
    """The plan that streams nothing and keeps everything, if it fits and no knob is against it.

    Where the host steps beside the device, to offload a little may look shorter by less than anybody can predict; but
    what fits must cost nothing.
    """
    if set(knobs.given) - set(knobs.forbids_alone):
        return None
    plan = make_plan(problem.layout, "resident", Knobs(), None, None, problem.state_bytes, min_num_params)
    return plan if memory_timeline(problem, plan).device_peak <= (problem.device_bytes or 0) else None


def search_with_evaluation(problem: Problem, knobs: Knobs) -> Plan:
    """The plan of `search`, whose evaluation fits the device too.

    Evaluation may take more than training, for weights that it may need whole. If there is no plan whose evaluation
    fits, evaluation may run out of memory, and that is said.

    Args:
        problem: With a limit for the device.
        knobs: What is pinned.

    Raises:
        NoFeasiblePlan: Training fits nowhere.
    """
    assert problem.device_bytes is not None
    try:
        return search(replace(problem, evaluates=True), knobs)
    except NoFeasiblePlan:
        plan = search(problem, knobs)
    rank_zero_info(
        f"Evaluation may take {format_bytes(memory_timeline(problem, plan).device_peak)} on the device, of which "
        f"{format_bytes(problem.device_bytes)} are allowed; training fits."
    )
    return plan


# Of the memory that a device reports as free: what model states may take where nothing is known of activations, and
# what a plan may take that knows them. Handles of libraries take some later.
SHARE_OF_STATES, SHARE_OF_ALL = 0.7, 0.96


@dataclass(frozen=True)
class PlanSession:
    """One model on its way to a plan.

    Attributes:
        plan_request: What the user says.
        device: Where it will run.
        layout: What it is made of, with what is streamed in two bytes.
        profile: What a training step does; None: not known, or the plan does not depend on it.
        streamed: Parameters that are streamed in two bytes.
        low_dtype: The name of the two bytes' dtype; None without autocast.
        state_bytes: Bytes of optimizer states for each trained element.
        training: How the training loop uses the plan; None: nothing is trained.
        foreach: Whether the device's optimizer steps all parameters at once, with temporaries.
        optimizers: Those of the model; empty: nothing is trained.
        copied_bytes: Bytes of the host for copies of states that callbacks keep, on one rank of the machine.
        network: How ranks sum gradients; None: there is one, or it is not known.
        free: What every rank has free at least; None: what this one has.
        profile_on: Profiles the step, and says what is streamed in two bytes, for a GPU of some compute capability that
            is not here, or for `device`; None: it need not be profiled.
    """

    plan_request: PlanRequest
    device: Device
    layout: ModelLayout
    profile: ModelProfile | None = None
    streamed: frozenset[str] = frozenset()
    low_dtype: str | None = None
    state_bytes: float = 0.0
    training: Training | None = None
    foreach: bool = False
    optimizers: tuple[Optimizer, ...] = ()
    copied_bytes: int = 0
    network: Network | None = None
    free: FreeMemory | None = None
    profile_on: Callable[[HardwareProfile | None], tuple[ModelProfile | None, frozenset[str]]] | None = None

    def on(self, machine: HardwareProfile | None) -> PlanSession:
        """The same case with the profile of the step as it runs there; kernels differ.

        Raises:
            ValueError: The step has to be profiled and cannot be.
        """
        if self.profile_on is None:
            return self
        profile, streamed = self.profile_on(machine)
        layout = self.layout if self.low_dtype is None else self.layout.streaming(streamed, self.low_dtype)
        return replace(self, layout=layout, profile=profile, streamed=streamed)

    def among(self, sharding: Sharding, network: Network | None = None) -> PlanSession:
        """The same where ranks hold offloaded chunks so, and sum gradients so, if that is known."""
        return replace(self, plan_request=self.plan_request.among(sharding), network=network)

    def plan_among(self, network: Network | None, sharding: Sharding, machine: HardwareProfile | None = None) -> Plan:
        """The plan for ranks on machines like this one, or on others.

        Args:
            network: How they sum gradients, where that is known.
            sharding: Who holds offloaded chunks.
            machine: One of the others, as one rank has it; copies of several ranks share its host's memory.

        Raises:
            ValueError: As `plan`.
        """
        return replace(self.among(sharding, network).plan(machine), sharding=sharding)

    def plan(self, machine: HardwareProfile | None = None) -> Plan:
        """The plan for this machine, or for another one.

        Args:
            machine: The other one.

        Raises:
            ValueError: No plan fits, or the one that is given is not for this model; a knob contradicts another one.
        """
        try:
            plan = self._plan(machine)
        except HostTooSmall as error:
            if self.plan_request.ranks == 1:
                raise
            raise type(error)(f"{error} {self.under_fsdp2(machine)}") from error
        if plan.num_offloaded_chunks:
            refuse_without_host_step(self.optimizers)
        return plan

    def under_fsdp2(self, machine: HardwareProfile | None) -> str:
        """Return what the same ranks would take under FSDP2, which shards over nodes what no node holds."""
        plan_request = self.plan_request
        ranks = FSDPRanks(plan_request.num_nodes, plan_request.ranks // plan_request.num_nodes, cpu_offload=True)
        problem = FSDPProblem(
            self.layout,
            ranks,
            self.state_bytes,
            self.profile,
            self.low_dtype,
            accumulates=self.training is not None and self.training.accumulate > 1,
            on_gpu=machine.asynchronous if machine is not None else self.device.torch_device.type != "cpu",
        )
        host_bytes = self._host_bytes(machine) * plan_request.copies
        return f"With cpu_offload=True, {fsdp_sentence(problem, self.budget(machine), host_bytes)}"

    def _plan(self, machine: HardwareProfile | None) -> Plan:
        host_bytes, copied = self._host_bytes(machine), self._checkpoint_copy
        try:
            found = self._find_plan(machine, max(host_bytes - copied, 0))
        except NoFeasiblePlan:
            raise
        except ValueError as error:
            if not copied:
                raise
            self._find_plan(machine, host_bytes)  # It raises as well, if the copy is not the reason.
            raise type(error)(f"{error} {format_bytes(copied)} of the host are {COPY}") from error
        if machine is not None and not self.searches(machine):
            found = replace(found, prediction=self._expected(found, machine))
        return self._among_ranks(found)

    def _find_plan(self, machine: HardwareProfile | None, host_bytes: int) -> Plan:
        choice, device_bytes = self.plan_request.choice, self.budget(machine)
        if isinstance(choice, Plan):
            check_plan(choice, self.layout, self.low_dtype)
            choice = self._among_ranks(choice)
            check_fits(choice, self.layout, device_bytes, host_bytes, self.state_bytes, self._host_use)
            return choice
        if self.searches(machine) and self.profile is not None and self.training is not None:
            return self._search(machine, self.profile, self.training)
        return make_plan(
            self.layout,
            choice,
            self.plan_request.options.knobs,
            device_bytes,
            host_bytes,
            self.state_bytes,
            self.plan_request.options.min_num_params,
            self.profile.swap_bytes(self.streamed) if self.profile is not None else None,
            self._host_use,
            self._room_for_buckets(self.layout.units),
        )

    def searches(self, machine: HardwareProfile | None = None) -> bool:
        """Whether anything is left to decide: without a limit everything stays on the device, or where knobs say."""
        device_bytes = self.plan_request.options.device_bytes
        limited = machine is not None or device_bytes is not None or self.device.free_bytes() is not None
        is_open = self.plan_request.choice == "auto" and not self.plan_request.options.knobs.are_whole
        return self.training is not None and limited and is_open

    def budget(self, machine: HardwareProfile | None = None) -> int | None:
        """Bytes that the device may hold; None: no limit."""
        if self.plan_request.options.device_bytes is not None:
            return self.plan_request.options.device_bytes
        free = machine.device_bytes if machine is not None else self.free_memory().device
        if free is None:
            return None
        choice = self.plan_request.choice
        searched = choice.prediction is not None if isinstance(choice, Plan) else self.searches(machine)
        knows_all = searched and (self.profile is not None or isinstance(choice, Plan))
        return int(free * (SHARE_OF_ALL if knows_all else SHARE_OF_STATES))

    def free_memory(self, waiting: Collection[str] = ()) -> FreeMemory:
        """What is free for a plan where the user does not say it: here now, or on the rank that has the least.

        Args:
            waiting: Names of weights that this rank does not have yet; the others are in host memory.
        """
        if self.free is not None:
            return self.free
        device = None if self.plan_request.options.device_bytes is not None else self.device.free_bytes()
        host = None if self.plan_request.options.host_bytes is not None else free_host_bytes()
        here = (info.nbytes for info in self.layout.parameters if info.fqn not in waiting)
        shared = free_shared_bytes() if self.plan_request.sharers > 1 else None
        return FreeMemory(device, host, sum(here), shared)

    def spare_host_bytes(self, plan: Plan) -> int:
        """What this rank may have of the host beyond what `plan` takes of it on this machine; never negative."""
        use = self._host_use
        taken = sum(host_terms(self.layout, plan, self.state_bytes, use.accumulate, True, use.sharers).values())
        return max(self._host_bytes(None) - self._checkpoint_copy - taken, 0) // use.sharers

    @property
    def _host_use(self) -> HostUse:
        accumulate = self.training.accumulate if self.training is not None else 1
        return HostUse(self.plan_request.sharers, accumulate)

    @property
    def _checkpoint_copy(self) -> int:
        """The share that each rank has of the copies, of which there is one on a machine."""
        return -(-self.copied_bytes // self.plan_request.copies)

    def _host_bytes(self, machine: HardwareProfile | None) -> int:
        copies = self.plan_request.copies
        if self.plan_request.options.host_bytes is not None:
            return self.plan_request.options.host_bytes // copies
        if machine is not None:
            return machine.host_bytes // copies
        return self.free_memory().share(copies, self._weight_bytes)

    def _measure(self, profile: ModelProfile) -> HardwareProfile:
        machine = self.plan_request.hardware
        if machine is None:
            names = {cost.dtype for segment in profile.segments for cost in segment.forward.operations if cost.flops}
            machine = cached_profile(self.device, [getattr(torch, name) for name in sorted(names)], user_folder())
        # That is the rate of this rank's cores; ranks that share one copy step a part of it each, all at one time.
        return replace(machine, host_step=machine.host_step * self.plan_request.sharers)

    def _search(self, other: HardwareProfile | None, profile: ModelProfile, training: Training) -> Plan:
        machine = other or self._measure(profile)
        problem = self._problem(machine, profile, training, *self._limits(other, machine))
        room = self._room_for_buckets(self.layout.units)
        options = self.plan_request.options
        return search_and_predict(problem, options.knobs, options.min_num_params, room)

    def _expected(self, plan: Plan, machine: HardwareProfile) -> Prediction | None:
        """Of a plan that nobody has searched for, on another machine; None: it is not known what a step does."""
        if self.profile is None or self.training is None:
            return None
        return expected(self._problem(machine, self.profile, self.training, *self._limits(machine, machine)), plan)

    def _problem(
        self, machine: HardwareProfile, profile: ModelProfile, training: Training, device_bytes: int, host_bytes: int
    ) -> Problem:
        dtypes = {info.dtype for info in self.layout.parameters}
        return Problem(
            profile=profile,
            layout=self.layout,
            hardware=replace(machine, host_step=machine.host_step / host_slowdown(self.optimizers)),
            training=training,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            state_bytes=self.state_bytes,
            alpha=max(map(alpha_for_dtype, dtypes), default=1.0) if machine.asynchronous else 1.0,
            foreach=self.foreach,
            checkpoint_copy=self._checkpoint_copy,
            sharers=self.plan_request.sharers,
            network=self.network,
        )

    def _limits(self, other: HardwareProfile | None, machine: HardwareProfile) -> tuple[int, int]:
        """Bytes of the device and of the host for a search.

        On this machine both are what is free, and no more than `machine` says: less of the host may be lockable.
        """
        budget, own = self.budget(machine), self.budget(other)
        assert budget is not None
        assert own is not None
        if other is not None:
            return own, self._host_bytes(other)
        return min(budget, own), min(self._host_bytes(machine) + self._weight_bytes, self._host_bytes(None))

    @property
    def _weight_bytes(self) -> int:
        return sum(info.nbytes for info in self.layout.parameters)

    def _room_for_buckets(self, groups: Iterable[UnitInfo | ChunkPlan]) -> int:
        """Bytes of the device for gradients that are summed over ranks, see [Note: Reduction]: three chunks at most."""
        if self.plan_request.ranks == 1:
            return 0
        infos = {info.fqn: info for info in self.layout.parameters}
        trained = [sum(infos[fqn].nbytes for fqn in each.parameters if infos[fqn].trainable) for each in groups]
        return 3 * max(trained, default=0)

    def _among_ranks(self, plan: Plan) -> Plan:
        """With the room that sums of these ranks take, as terms and predicted, whoever made it."""
        nbytes = self._room_for_buckets(chunk for chunk in plan.chunks if not chunk.resident)
        own = memory_terms(self.layout, plan.chunks, plan.num_chunk_buffers, state_bytes=0.0).gradients_in_flight
        memory = replace(plan.memory, gradients_in_flight=own + nbytes)
        prediction = plan.prediction.among_ranks(nbytes) if plan.prediction is not None else None
        return replace(plan, memory=memory, prediction=prediction)


def describe_session(
    plan_request: PlanRequest,
    trainer: Trainer,
    model: LightningModule,
    device: Device,
    precision: ProTrainPrecision,
    optimizers: Sequence[Optimizer] | None,
    overlap: OverlapPlan,
    elsewhere: bool = False,
) -> PlanSession:
    """Finds out what the plan depends on.

    Args:
        plan_request: What the user says.
        trainer: In `Strategy.setup`.
        model: What it runs.
        device: Where.
        precision: Opened.
        optimizers: Those of the model; None: nothing is trained.
        overlap: How the host's optimizer steps are overlapped.
        elsewhere: Whether it is planned for other machines; then `PlanSession.on` profiles the step, for each kind of
            GPU.

    Raises:
        ValueError: A model that cannot be described or streamed, or a step that has to be profiled and cannot be.
    """
    refuse_unsupported(model)
    prepare_weights(model, device.torch_device)
    layout = describe_model(model, plan_request.options.blocks, plan_request.options.min_num_params)
    if optimizers is None and isinstance(plan_request.choice, Plan):
        return PlanSession(plan_request, device, layout, low_dtype=precision.low_dtype_name)
    if optimizers is None:
        knobs = plan_request.options.knobs
        if knobs.num_swap_blocks:  # nothing is saved
            knobs = replace(knobs, num_swap_blocks=0, num_keep_offloaded_blocks=None)
        frozen = tuple(replace(info, trainable=False) for info in layout.parameters)
        options = replace(plan_request.options, knobs=knobs)
        return PlanSession(replace(plan_request, options=options), device, replace(layout, parameters=frozen))
    takes_norm = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
    training = Training(overlap.overlap.value, trainer.accumulate_grad_batches, takes_norm)
    layout = replace(layout, lends_copies=overlap.lends)
    state_bytes = mean_state_bytes(optimizers)
    case = PlanSession(
        plan_request=plan_request,
        device=device,
        layout=layout,
        low_dtype=precision.low_dtype_name,
        state_bytes=state_bytes,
        training=training,
        foreach=device.torch_device.type != "cpu" and any(map(_may_take_foreach, optimizers)),
        optimizers=tuple(optimizers),
        copied_bytes=copied_bytes(trainer, optimizers, state_bytes),
    )
    if not (elsewhere or _needs_profile(case)):
        return case
    if trainer.global_rank:  # Rank 0 makes the plan. Loaders are made on all ranks together.
        batch_to_plan_with(trainer)
        return case
    reason = _reason(case, elsewhere)

    profiles: dict[Capability | None, tuple[ModelProfile | None, frozenset[str]]] = {}

    def profile_on(machine: HardwareProfile | None) -> tuple[ModelProfile | None, frozenset[str]]:
        kind = capability(machine.name) if machine is not None else None
        if kind not in profiles:
            profiles[kind] = profiled(machine)
        return profiles[kind]

    def profiled(machine: HardwareProfile | None) -> tuple[ModelProfile | None, frozenset[str]]:
        profile = profile_training_step(trainer, layout, reason, machine)
        return profile, streamable(profile, model, case.low_dtype)

    case = replace(case, profile_on=profile_on)
    return case if elsewhere else case.on(None)


def _needs_profile(case: PlanSession) -> bool:
    """Whether the plan depends on what a training step does."""
    choice, knobs = case.plan_request.choice, case.plan_request.options.knobs
    swaps = choice == "auto" and bool(knobs.num_swap_blocks)
    streams = choice == "offload" or (choice == "auto" and bool(knobs.given))
    return case.searches() or swaps or (case.low_dtype is not None and streams)


def _reason(case: PlanSession, elsewhere: bool) -> str:
    """Return what cannot be had without a profile; empty if there is a way without."""
    plan_request = case.plan_request
    if plan_request.options.knobs.num_swap_blocks:
        return f"num_swap_blocks={plan_request.options.knobs.num_swap_blocks}"
    if elsewhere:
        return "A plan"
    # A budget that is given is a promise; of what is free on a device, a share is left for activations.
    budget = plan_request.options.device_bytes
    return f"device_memory={format_bytes(budget)}" if budget is not None and case.searches() else ""


def _may_take_foreach(optimizer: Optimizer) -> bool:
    """Whether PyTorch steps all its parameters at once on a GPU, unless it is told otherwise."""
    return any(group.get("foreach") is not False and not group.get("fused") for group in optimizer.param_groups)


# Machines to plan for, by name and by who would hold what is offloaded, as one rank has them; None stands for this one.
Machines = Mapping[str, Mapping[Sharding, HardwareProfile | None]]
Answers = dict[str, dict[Sharding, Plan | ValueError]]


@dataclass(frozen=True)
class DryRun:
    """Machines that are planned for and need not be here.

    Attributes:
        machines: Under the names that answers have, by who holds what; None: this one.
        clusters: What each of them is one of, by its name, with which sums are timed; None: they are not.
        answers: A plan for each machine under each sharding, or why there is none.
    """

    machines: Machines
    clusters: Mapping[str, Cluster] | None
    answers: Answers


def plan_jointly(
    case: PlanSession,
    model: nn.Module,
    ranks: RankMesh | None,
    shardings: Sequence[Sharding],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> tuple[PlanSession, Plan]:
    """The plan that all ranks take; every rank calls it.

    Args:
        case: What the plan depends on.
        model: With the weights of this rank, some of which may be waited for, see [Note: Plans before weights].
        ranks: Who trains together; None: there is one.
        shardings: Who may hold offloaded chunks. If a plan is searched for, that whose step is expected to be shorter;
            else the first that there is a plan under.
        device: Where gradients are averaged.
        dtype: In which gradients of offloaded chunks are summed; None: in that of their weights.

    Returns:
        The case as the plan has it, and the plan.

    Raises:
        ValueError: There is no plan; raised on all.
        RuntimeError: A rank is gone, or has failed.
    """
    if ranks is None:
        return case, case.plan_among(None, shardings[0])
    waiting = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    case = replace(case, free=least_memory(case.free_memory(waiting), ranks))
    network = None
    if ranks.meet("the search for a plan", case.searches()):
        # Under the first sharding all sums are made that another one has.
        network = measure_collectives(ranks, device, shardings[0], case.layout, dtype)
        rank_zero_info(f"Sums of gradients over {ranks.world_size} ranks: {network.describe()}.")
    plan = decide(lambda: _plan_best(case, network, shardings, ranks.local_size))
    case = case.among(plan.sharding)
    # Only rank 0 has a profile. The plan says whether it was used, so the budget is the same on all ranks.
    return replace(case, plan_request=replace(case.plan_request, choice=plan)), plan


def _plan_best(case: PlanSession, network: Network | None, shardings: Sequence[Sharding], num_sharers: int) -> Plan:
    def make(sharding: Sharding) -> Plan:
        shares = sharding is Sharding.SHARD
        plan = case.plan_among(network if shares or network is None else network.without_owners(), sharding)
        if shares and len(shardings) > 1:  # Of one that is asked for, the runtime says what it lacks.
            _refuse_small_room(case, plan, num_sharers)
        return plan

    choice = choose(plan_each(shardings, make, compares=network is not None))
    if choice.sentence:
        rank_zero_info(choice.sentence)
    return choice.plan


def _refuse_small_room(case: PlanSession, plan: Plan, num_sharers: int) -> None:
    """Refuses a plan whose offloaded weights do not fit the memory that ranks of a machine can share."""
    free = case.free_memory()
    assert free.shared is not None
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    needed = shared_bytes(offloaded, {info.fqn: info.nbytes for info in case.layout.parameters}, num_sharers)
    if needed > free.shared:
        raise ValueError(
            f"{FOLDER} has {short_bytes(free.shared)} free on the machine of rank {free.shared_at}, needs "
            f"{short_bytes(needed)} for the weights that ranks share. Give it more (`docker run --shm-size`, `mount -o "
            "remount,size=...`)."
        )


def answers(
    case: PlanSession,
    machines: Machines,
    clusters: Mapping[str, Cluster] | None = None,
    dtype: torch.dtype | None = None,
) -> Answers:
    """The plan for each machine under each sharding, or why there is none.

    Where nothing is searched for, there is one under the first sharding only, as in a run.

    Args:
        case: What the plans depend on.
        machines: What to plan for.
        clusters: What each is one of, by its name; others train alone.
        dtype: In which gradients of offloaded chunks are summed; None: in that of their weights.
    """
    element = None if dtype is None else dtype.itemsize
    return {name: _answers(case, under, (clusters or {}).get(name), element) for name, under in machines.items()}


def _answers(
    case: PlanSession, under: Mapping[Sharding, HardwareProfile | None], cluster: Cluster | None, element: int | None
) -> dict[Sharding, Plan | ValueError]:
    def make(sharding: Sharding) -> Plan:
        machine = under[sharding]
        network = cluster.network_under(sharding, element) if cluster is not None else None
        session = case.on(machine)
        plan = session.plan_among(network, sharding, machine)
        if plan.prediction is None or case.plan_request.num_nodes == 1:
            return plan
        return replace(plan, prediction=plan.prediction.with_advice(session.under_fsdp2(machine)))

    shardings = tuple(under)
    return plan_each(shardings if case.searches(under[shardings[0]]) else shardings[:1], make)


def say_if_one_block(plan: Plan, layout: ModelLayout) -> None:
    """Tells the user that little can be streamed."""
    if plan.num_offloaded_chunks and [block.name for block in layout.blocks] == [""]:
        rank_zero_info(
            "No repeated list of blocks was found: the whole model is one block, all its weights are on the device "
            "during a step. Name blocks with `blocks` to stream them one by one."
        )
