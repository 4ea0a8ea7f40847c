"""A request for a plan, and its answer: a given plan, a preset, or the result of a search within budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_protrain.config import PlanOptions, Preset
from lightning_protrain.planner.advice import (
    UNCLIPPED,
    clipping_memory,
    expected,
    larger_steps,
    predict,
    slow_optimizer,
    without_gains,
)
from lightning_protrain.planner.alternatives import (
    FSDP2,
    in_16_bits,
    on_more_devices,
    on_one_device,
    with_8_bit_states,
    with_passing_gradients,
    with_split_masters,
)
from lightning_protrain.planner.free_memory import FreeMemory
from lightning_protrain.planner.memory import (
    CHECKPOINT_COPY_ADVICE,
    FSDP2_ADVICE,
    HostTooSmall,
    HostUse,
    StatesProblem,
    check_fits,
    format_bytes,
    host_terms,
    memory_terms,
)
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import ONE_RANK, ChunkPlan, Plan, RankLayout, Sharding, check_plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.planner.problem import Problem, Workload
from lightning_protrain.planner.search import NoFeasiblePlan, any_fits, resident_plan, search_with_evaluation
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, ParameterInfo, UnitInfo

# Share of the free device memory for model states if activations are unknown, and for a whole plan if they are known.
# Some memory is left for handles that libraries allocate later.
SHARE_OF_STATES, SHARE_OF_ALL = 0.7, 0.96
PlanOrPreset = Plan | Preset
# Returns a workload with the profile of its training step on some hardware; None: on this node.
ProfileOn = Callable[[HardwareProfile | None], Workload]
# Returns the same with slices of the tokens, see [Note: Slices]; None: the step cannot be sliced.
SlicedOn = Callable[[HardwareProfile | None], Workload | None]


@dataclass(frozen=True)
class LocalNode:
    """Free memory of this node and of this rank's device before anything is placed.

    Attributes:
        free: Free memory; with several ranks, the least of any rank.
        on_gpu: True if the device is a GPU.
        measure: Measures the hardware rates for the operations of a profile.
        most_device_bytes: Maximum device memory of a plan, because more did not fit in an earlier run; None: no run
            failed.
        is_rehearsed: True if `measure` returns what a rehearsal has measured.
    """

    free: FreeMemory
    on_gpu: bool
    measure: Callable[[ModelProfile], HardwareProfile]
    most_device_bytes: int | None = None
    is_rehearsed: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Methods with an argument `hardware` plan for that hardware, as one rank sees it. None means this node. Ranks that
    each hold a copy of the weights divide the host memory.

    Attributes:
        choice: A given plan, or the name of a preset.
        options: Limits and knobs that the user gave.
        workload: The model and its training.
        node: Free memory and measurements of this node.
        say: Called with sentences for the user.
        ranks: The ranks that train together.
        network: Network over which ranks sum gradients; None if there is one rank, or it is unknown.
        profile_on: Returns the workload with the profile of its step on some hardware; None: `workload` has its
            profile.
        sliced_on: Returns the workload of a step that runs on slices of the tokens, for when nothing fits otherwise;
            None: there is none.
        element_bytes: Bytes of an element of summed gradients of offloaded chunks; None: as in its parameter.
    """

    choice: PlanOrPreset
    options: PlanOptions
    workload: Workload
    node: LocalNode
    say: Callable[[str], None]
    ranks: RankLayout = ONE_RANK
    network: Network | None = None
    profile_on: ProfileOn | None = None
    sliced_on: SlicedOn | None = None
    element_bytes: int | None = None

    def on(self, hardware: HardwareProfile | None) -> PlanRequest:
        """Return the request with the step's profile on `hardware`, where other kernels may run.

        Raises:
            ValueError: The step must be profiled and cannot be.
        """
        return self if self.profile_on is None else replace(self, workload=self.profile_on(hardware))

    def under(self, sharding: Sharding, network: Network | None = None) -> PlanRequest:
        """Return the request with this sharding of offloaded chunks and this network."""
        return replace(self, ranks=replace(self.ranks, sharding=sharding), network=network)

    def plan(self, hardware: HardwareProfile | None = None) -> Plan:
        """Return a plan that fits.

        Raises:
            ValueError: No plan fits, a given plan is for another model, or knobs contradict each other.
        """
        try:
            plan = self._plan(hardware)
        except (HostTooSmall, NoFeasiblePlan) as error:
            sliced = self.in_slices(hardware) if getattr(error, "slices_may_help", True) else None
            if sliced is not None:
                return sliced.plan(hardware)
            others = list(self._changes(hardware))
            if isinstance(error, HostTooSmall) and self.ranks.num_ranks > 1 and not others:
                others = [FSDP2_ADVICE]
            if not others:
                raise
            raise type(error)(" ".join([str(error), *others])) from error
        if plan.num_offloaded_chunks and self.workload.host_step_refusal:
            raise ValueError(self.workload.host_step_refusal)
        if plan.num_offloaded_chunks and plan.prediction is not None:
            plan = replace(plan, prediction=plan.prediction.with_advice(*self._fsdp2(hardware)))
        return plan

    def in_slices(self, hardware: HardwareProfile | None = None) -> PlanRequest | None:
        """Return the request for a plan with slices of the tokens, see [Note: Slices]; None if there is none."""
        if self.sliced_on is None or self.workload.profile is None or not self.searches(hardware):
            return None
        sliced = self.sliced_on(hardware)
        if sliced is None:
            return None
        workload = self.workload.profiled(sliced.profile, sliced.streamed)
        return replace(self, workload=workload, profile_on=None, sliced_on=None)

    def of(self, plan: Plan, hardware: HardwareProfile | None = None) -> PlanRequest:
        """Return the request that a plan answers: with slices of the tokens if the plan has them."""
        sliced = self.in_slices(hardware) if plan.sliced else None
        return self if sliced is None else sliced

    def can_fit(self, hardware: HardwareProfile | None = None) -> bool:
        """Return False if a search would find no plan; faster than the search."""
        problem, options = self.here(hardware), self.options
        if resident_plan(problem, options.knobs, options.min_num_params) is not None:
            return True
        room = self._room_for_buckets(self.workload.layout.units)
        return any_fits(replace(problem, device_bytes=(problem.device_bytes or 0) - room))

    def searches(self, hardware: HardwareProfile | None = None) -> bool:
        """Return True if a search must decide: there is a device limit, and the knobs leave a choice."""
        limited = hardware is not None or self.options.device_bytes is not None or self.node.free.device is not None
        return self.workload.training is not None and limited and _is_open(self.choice, self.options)

    def budget(self, hardware: HardwareProfile | None = None) -> int | None:
        """Return the maximum device memory of a plan, bytes; None: no limit."""
        budget, most = self._budget(hardware), self.node.most_device_bytes
        return budget if budget is None or most is None or hardware is not None else min(budget, most)

    def _budget(self, hardware: HardwareProfile | None) -> int | None:
        if self.options.device_bytes is not None:
            return self.options.device_bytes
        free = hardware.device_bytes if hardware is not None else self.node.free.device
        if free is None:
            return None
        if isinstance(self.choice, Plan):
            knows_all = self.choice.prediction is not None
        else:
            knows_all = self.searches(hardware) and self.workload.profile is not None
        return int(free * (SHARE_OF_ALL if knows_all else SHARE_OF_STATES))

    def host_bytes(self, hardware: HardwareProfile | None = None) -> int:
        """Return the host memory for each copy of the offloaded weights, bytes."""
        copies = self.ranks.copies
        if self.options.host_bytes is not None:
            return self.options.host_bytes // copies
        if hardware is not None:
            return hardware.host_bytes // copies
        return self.node.free.share(copies, self.workload.weight_bytes)

    def expects(self, plan: Plan) -> Prediction:
        """Return the prediction of a plan on this node."""
        prediction = self._among_ranks(replace(plan, prediction=expected(self.here(), plan))).prediction
        assert prediction is not None
        return prediction

    def expecting(self, plan: Plan, now: Prediction) -> Plan:
        """Return a plan of a search with another prediction; its advice stays, and gains are those over `now`."""
        advice = without_gains(plan.prediction.advice if plan.prediction is not None else ())
        plan = replace(plan, prediction=now)
        gains = larger_steps(self.here(), plan, self.options.knobs)
        return replace(plan, prediction=now.with_advice(*advice, *gains))

    def here(self, hardware: HardwareProfile | None = None) -> Problem:
        """Return the problem of a search; the step must have been profiled."""
        profile, budget = self.workload.profile, self.budget(hardware)
        assert profile is not None
        assert budget is not None
        return self._problem(hardware or self.measured(profile), profile, budget, self.host_bytes(hardware))

    def spare_host_bytes(self, plan: Plan) -> int:
        """Return the host bytes that this rank may use in addition to `plan`; never negative."""
        use = self._host_use
        taken = sum(host_terms(self.workload.layout, plan, self.workload.state_bytes, use).values())
        return max(self.host_bytes() - self._checkpoint_copy - taken, 0) // use.sharers

    def measured(self, profile: ModelProfile) -> HardwareProfile:
        """Return the measured hardware of this node.

        Each rank measures its own cores. Ranks that share a copy step it together, so the rate is multiplied by their
        number.
        """
        hardware = self.node.measure(profile)
        return replace(hardware, host_step=hardware.host_step * self.ranks.sharers)

    def _plan(self, hardware: HardwareProfile | None) -> Plan:
        host_bytes, copied = self.host_bytes(hardware), self._checkpoint_copy
        try:
            plan = self._find_plan(hardware, max(host_bytes - copied, 0))
        except NoFeasiblePlan:
            raise
        except ValueError as error:
            if not copied:
                raise
            self._find_plan(hardware, host_bytes)  # It raises the same error if the copy is not the reason.
            raise type(error)(f"{error} {format_bytes(copied)} of host memory are {CHECKPOINT_COPY_ADVICE}") from error
        if hardware is not None and not self.searches(hardware):
            is_known = self.workload.profile is not None and self.workload.training is not None
            plan = replace(plan, prediction=expected(self.here(hardware), plan) if is_known else None)
        return replace(self._among_ranks(plan), sharding=self.ranks.sharding)

    def _find_plan(self, hardware: HardwareProfile | None, host_bytes: int) -> Plan:
        workload = self.workload
        problem = StatesProblem(
            self._layout,
            workload.state_bytes,
            self.budget(hardware),
            host_bytes,
            workload.swap_bytes,
            self._host_use,
            self._room_for_buckets(workload.layout.units),
        )
        if isinstance(self.choice, Plan):
            check_plan(self.choice, workload.layout, workload.low_dtype)
            plan = self._among_ranks(self.choice)
            check_fits(plan, problem)
            return plan
        if self.searches(hardware) and workload.profile is not None:
            return self._search(hardware, workload.profile)
        knobs = self.options.knobs
        if workload.training is None and knobs.num_swap_blocks:  # Evaluation saves no activations to swap.
            knobs = replace(knobs, num_swap_blocks=0, num_keep_offloaded_blocks=None)
        return make_plan(problem, self.choice, knobs, self.options.min_num_params)

    def _search(self, other: HardwareProfile | None, profile: ModelProfile) -> Plan:
        """Search within the free memory; on this node also within measured memory, as not all may be lockable."""
        hardware = other or self.measured(profile)
        budget, host_bytes = self.budget(other), self.host_bytes(other)
        assert budget is not None
        if other is None:
            most = self.budget(hardware)
            assert most is not None
            budget = min(budget, most)
            host_bytes = min(host_bytes, self.host_bytes(hardware) + self.workload.weight_bytes)
        problem, plan = self.fastest(self._problem(hardware, profile, budget, host_bytes))
        plan = replace(predict(problem, plan), slice_tokens=profile.slice_tokens, sliced=profile.sliced)
        assert plan.prediction is not None
        knobs = self.options.knobs
        prediction = plan.prediction.with_advice(
            *slow_optimizer(plan, self.workload.host_slowdown),
            *clipping_memory(problem, plan, self.workload.clipping_keeps),
            *larger_steps(problem, plan, knobs),
        )
        return replace(plan, prediction=replace(prediction, budget=budget))

    def _changes(self, hardware: HardwareProfile | None) -> Iterator[str]:
        """Yield a sentence for each single change with which a model that has no plan would fit."""
        workload, profile = self.workload, self.workload.profile
        if profile is None or not self.searches(hardware) or self.options.knobs.given or workload.host_step_refusal:
            return

        def fits(other: Workload | None) -> bool:
            return other is not None and replace(self, workload=other, sliced_on=None).can_fit(hardware)

        if fits(with_8_bit_states(workload)):
            yield "It fits with an optimizer of 8-bit states, such as bitsandbytes.optim.AdamW8bit."
        if "bfloat16" in (hardware or self.measured(profile)).flops:
            split = next((moments for moments, other in with_split_masters(workload) if fits(other)), None)
            if split is not None:
                how = f'precision bf16-true and SplitAdamW(moments="{split}")'
                yield f"It fits with {how}, which keeps float32 masters."
            elif fits(in_16_bits(workload)):
                yield "It fits with precision bf16-true, which loses updates that are small beside the weights."
        if fits(with_passing_gradients(workload)):
            yield f"It fits {UNCLIPPED}, as a norm needs all gradients in host memory at the same time."
        if self.ranks.num_ranks > 1:
            yield from self._fsdp2(hardware)
            if replace(self, ranks=ONE_RANK, network=None).can_fit(hardware):
                yield on_one_device(self.ranks, self._room_for_buckets(workload.layout.units))
        else:
            yield from on_more_devices(workload, self._device(hardware, profile), self.options.device_bytes)

    def _fsdp2(self, hardware: HardwareProfile | None) -> Iterator[str]:
        """Yield a sentence if the ranks can train under FSDP2 without offload; nothing if that is unknown."""
        profile = self.workload.profile
        if self.ranks.num_ranks > 1 and profile is not None and self.searches(hardware):
            fsdp = FSDP2(self.workload, self.ranks, self._device(hardware, profile), self.options.device_bytes)
            if fsdp.memory is not None:
                yield fsdp.describe(self.network)

    def _device(self, hardware: HardwareProfile | None, profile: ModelProfile) -> HardwareProfile:
        """Return the hardware to plan for; this node as it is before weights are placed."""
        if hardware is not None:
            return hardware
        measured, free = self.measured(profile), self.node.free.device
        return replace(
            measured,
            device_bytes=measured.device_bytes if free is None else free,
            host_bytes=measured.host_bytes + self.workload.weight_bytes,
        )

    def fastest(self, problem: Problem) -> tuple[Problem, Plan]:
        """Return the fastest plan for a problem of these ranks, and the problem with room for all-reduce buffers.

        Raises:
            NoFeasiblePlan: No plan fits.
        """
        plan = resident_plan(problem, self.options.knobs, self.options.min_num_params)
        if plan is not None:
            return problem, plan
        room = self._room_for_buckets(self.workload.layout.units)
        problem = replace(problem, device_bytes=(problem.device_bytes or 0) - room, reserved=room)
        return problem, search_with_evaluation(problem, self.options.knobs, self.say)

    def _problem(self, hardware: HardwareProfile, profile: ModelProfile, budget: int, host_bytes: int) -> Problem:
        workload = self.workload
        assert workload.training is not None
        return Problem(
            profile=profile,
            layout=self._layout,
            hardware=replace(hardware, host_step=hardware.host_step / workload.host_slowdown),
            training=workload.training,
            device_bytes=budget,
            host_bytes=host_bytes,
            state_bytes=workload.state_bytes,
            alpha=workload.alpha if hardware.asynchronous else 1.0,
            foreach=workload.foreach,
            checkpoint_copy=self._checkpoint_copy,
            sharers=self.ranks.sharers,
            network=self.network,
        )

    @property
    def _layout(self) -> ModelLayout:
        layout = self.workload.layout
        keeps = self.ranks.num_ranks == 1 or not layout.passes_gradients
        return layout if keeps else replace(layout, passes_gradients=False)

    @property
    def _host_use(self) -> HostUse:
        return HostUse(self.ranks.sharers, self.workload.accumulate)

    @property
    def _checkpoint_copy(self) -> int:
        """Host memory of each rank for checkpoint copies; a node has one copy, which its ranks divide."""
        return -(-self.workload.copied_bytes // self.ranks.copies)

    def _room_for_buckets(self, groups: Iterable[UnitInfo | ChunkPlan]) -> int:
        """Return device bytes for gradients that ranks sum, at most three chunks, see [Note: Reduction]."""
        if self.ranks.num_ranks == 1:
            return 0
        infos, size = self.workload.layout.by_name, self.element_bytes

        def room(info: ParameterInfo) -> int:
            sent = info.nbytes if size is None else size * info.numel
            return 3 * sent if sent == info.nbytes else 2 * (info.nbytes + sent)

        trained = [[infos[fqn] for fqn in group.parameters if infos[fqn].trainable] for group in groups]
        return max((sum(map(room, group)) for group in trained), default=0)

    def _among_ranks(self, plan: Plan) -> Plan:
        """Return a plan whose memory and prediction include the all-reduce buffers of these ranks."""
        nbytes = self._room_for_buckets(chunk for chunk in plan.chunks if not chunk.resident)
        in_flight = memory_terms(self.workload.layout, plan.chunks, plan.num_chunk_buffers, 0.0).gradients_in_flight
        memory = replace(plan.memory, gradients_in_flight=in_flight + nbytes)
        prediction = plan.prediction.among_ranks(nbytes) if plan.prediction is not None else None
        return replace(plan, memory=memory, prediction=prediction)


def needs_profile(choice: PlanOrPreset, options: PlanOptions, workload: Workload, limited: bool) -> bool:
    """Return True if a plan depends on the profile of a training step.

    Args:
        choice: A given plan, or the name of a preset.
        options: Limits and knobs that the user gave.
        workload: The model and its training.
        limited: True if the device memory has a limit.
    """
    swaps = choice == "auto" and bool(options.knobs.num_swap_blocks)
    streams = choice == "offload" or (choice == "auto" and bool(options.knobs.given))
    searches = workload.training is not None and limited and _is_open(choice, options)
    return searches or swaps or (workload.low_dtype is not None and streams)


def what_needs_profile(choice: PlanOrPreset, options: PlanOptions, elsewhere: bool) -> str:
    """Return the setting that cannot work without a profile; empty if there is none.

    Args:
        choice: A given plan, or the name of a preset.
        options: Limits and knobs that the user gave.
        elsewhere: True if the plan is for other hardware.
    """
    if options.knobs.num_swap_blocks:
        return f"num_swap_blocks={options.knobs.num_swap_blocks}"
    if elsewhere:
        return "A plan"
    # A budget that the user gives must hold with activations; of free memory, a share is left for activations.
    budget = options.device_bytes
    return f"device_memory={format_bytes(budget)}" if budget is not None and _is_open(choice, options) else ""


def _is_open(choice: PlanOrPreset, options: PlanOptions) -> bool:
    return choice == "auto" and not options.knobs.are_whole
