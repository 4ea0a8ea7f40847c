"""Finds one plan for all ranks of this run, or of a dry run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.config import plural
from lightning_protrain.distributed.rank_sync import decide, least_memory
from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import ONE_RANK, Plan, RankLayout, Sharding
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.planner.scaling import Cluster
from lightning_protrain.planner.sharding_choice import choose, plan_each
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.report.chart_data import Charts, charts
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.comm.shared_memory import FOLDER, free_shared_bytes, shared_bytes

# Hardware to plan for as one rank sees it, by name and sharding; None: this node.
_OnNodes = Mapping[Sharding, HardwareProfile | None]
Targets = Mapping[str, _OnNodes]
DryRunAnswers = dict[str, dict[Sharding, Plan | ValueError]]


@dataclass(frozen=True)
class DryRun:
    """A plan for hardware that need not be present.

    Attributes:
        targets: Hardware to plan for.
        ranks: The ranks that would train together.
        clusters: Cluster of each target, by the target's name; its links determine the time to sum gradients.
        answers: Plan of each target under each sharding, or the error; filled by the fit.
        draws: True if charts of the plans are wanted; throughput curves take further searches.
        charts: Figures for the charts of each answer; filled by the fit.
    """

    targets: Targets
    ranks: RankLayout = ONE_RANK
    clusters: Mapping[str, Cluster] = field(default_factory=dict)
    answers: DryRunAnswers = field(default_factory=dict)
    draws: bool = False
    charts: dict[tuple[str, Sharding], Charts] = field(default_factory=dict)

    @property
    def on_gpus(self) -> bool:
        """True if a target is a GPU that this node lacks."""
        return any(any(under.values()) for under in self.targets.values())

    def requests_on(
        self, name: str, request: PlanRequest, element_bytes: int | None = None
    ) -> list[tuple[PlanRequest, HardwareProfile | None]]:
        """Return the request on a target under each sharding, and the target's hardware; arguments as in `answer`.

        Raises:
            ValueError: The step must be profiled and cannot be.
        """
        under = self.targets[name]
        return [(self._request_on(name, sharding, request, element_bytes), under[sharding]) for sharding in under]

    def _request_on(
        self, name: str, sharding: Sharding, request: PlanRequest, element_bytes: int | None
    ) -> PlanRequest:
        cluster = self.clusters.get(name)
        network = None if cluster is None else cluster.network_under(sharding, element_bytes)
        request = replace(request, ranks=self.ranks, element_bytes=element_bytes)
        return request.under(sharding, network).on(self.targets[name][sharding])

    def answer(self, request: PlanRequest, element_bytes: int | None = None) -> None:
        """Fill in the answers.

        Without a search, only the first sharding is planned, as in a run.

        Args:
            request: Request for the plans.
            element_bytes: Bytes of a gradient element in collectives; None: the element size of its parameter.
        """
        for name, under in self.targets.items():

            def make(sharding: Sharding, name: str = name, under: _OnNodes = under) -> Plan:
                here, hardware = self._request_on(name, sharding, request, element_bytes), under[sharding]
                plan = here.plan(hardware)
                drawn = charts(here.of(plan, hardware), plan, hardware) if self.draws else None
                if drawn is not None:
                    self.charts[name, sharding] = drawn
                return plan

            shardings = tuple(under)
            searches = replace(request, ranks=self.ranks, element_bytes=element_bytes).searches(under[shardings[0]])
            self.answers[name] = plan_each(shardings if searches else shardings[:1], make)


def plan_jointly(
    request: PlanRequest,
    mesh: RankMesh | None,
    shardings: tuple[Sharding, ...],
    waiting: Collection[str],
    measure: Callable[[RankMesh, Sharding], Network],
) -> tuple[PlanRequest, Plan]:
    """Return one plan for all ranks, and the request that it answers; every rank calls it.

    Args:
        request: Request for the plan on this rank.
        mesh: The ranks that train together; None: a single rank.
        shardings: Shardings to choose from. After a search, the one with the shorter predicted step is taken; without a
            search, the first one under which a plan fits.
        waiting: Names of weights that some rank has no values of yet.
        measure: Measures the collectives that sum gradients under a sharding; every rank calls it.

    Raises:
        ValueError: No plan fits; raised on all ranks.
        RuntimeError: A rank is gone or has failed.
    """
    if mesh is None:
        plan = request.under(shardings[0]).plan()
        return request.of(plan), plan
    request = with_least_memory(request, mesh, waiting)
    network = None
    if mesh.meet("the search for a plan", request.searches()):
        network = measure(mesh, shardings[0])  # The first sharding uses all collectives that others use.
        rank_zero_info(f"Gradients over {plural(mesh.world_size, 'rank')}: {network.describe()}.")
    plan = decide(lambda: _plan_best(request, network, shardings))
    # The budget depends on whether a profile was used. Only rank 0 knows; the plan tells the other ranks.
    return replace(request.of(plan).under(plan.sharding, _under(plan.sharding, network)), choice=plan), plan


def with_least_memory(request: PlanRequest, mesh: RankMesh, waiting: Collection[str]) -> PlanRequest:
    """Return the request with the least free memory of any rank; every rank calls it.

    Args:
        request: Request for the plan on this rank.
        mesh: The ranks that train together.
        waiting: Names of weights that some rank has no values of yet.
    """
    weights = sum(info.nbytes for info in request.workload.layout.parameters if info.fqn not in waiting)
    shared = free_shared_bytes() if request.ranks.sharers > 1 else None
    free = least_memory(replace(request.node.free, weights=weights, shared=shared), mesh)
    return replace(request, node=replace(request.node, free=free))


def _under(sharding: Sharding, network: Network | None) -> Network | None:
    """Return the network under a sharding, given a network that was measured with owners."""
    return network if network is None or sharding is Sharding.SHARD else network.without_owners()


def _plan_best(request: PlanRequest, network: Network | None, shardings: tuple[Sharding, ...]) -> Plan:
    def make(sharding: Sharding) -> Plan:
        plan = request.under(sharding, _under(sharding, network)).plan()
        # If the user asks for "shard", the runtime raises this error.
        if sharding is Sharding.SHARD and len(shardings) > 1:
            _refuse_small_room(request, plan)
        return plan

    choice = choose(plan_each(shardings, make, compares=network is not None))
    if choice.sentence:
        rank_zero_info(choice.sentence)
    for sentence in choice.plan.prediction.advice if choice.plan.prediction is not None else ():
        if sentence.startswith("strategy="):
            rank_zero_info(sentence)
    return choice.plan


def _refuse_small_room(request: PlanRequest, plan: Plan) -> None:
    """Refuse a plan whose offloaded weights exceed the free shared memory of a node."""
    free, layout = request.node.free, request.workload.layout
    assert free.shared is not None
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    nbytes = {info.fqn: info.nbytes for info in layout.parameters}
    needed = shared_bytes(offloaded, nbytes, request.ranks.ranks_per_node)
    if needed > free.shared:
        raise ValueError(
            f"{FOLDER} has {short_bytes(free.shared)} free on the node of rank {free.shared_at}, needs "
            f"{short_bytes(needed)} for the weights that ranks share. Give it more (`docker run --shm-size`, `mount -o "
            "remount,size=...`)."
        )
