"""One plan for several ranks: made for the memory of the one that has least, under the sharding with the shorter step.

[Note: Plans before weights]
A plan needs names and shapes of weights, and what a step does, and rank 0 makes it. So outlines may stand until it is
there, whoever will hold offloaded chunks then: before it is applied, each rank gets what it will hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_protrain.consensus import decide, least_memory
from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.planner.scaling import Cluster
from lightning_protrain.planner.sharding_choice import choose, plan_each
from lightning_protrain.planning import Case
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.comm import Ranks
from lightning_protrain.runtime.gauging import gauge
from lightning_protrain.runtime.node_memory import FOLDER
from lightning_protrain.runtime.owners import shared_bytes

# Machines to plan for, by name and by who would hold what is offloaded, as one rank has them; None stands for this one.
Machines = Mapping[str, Mapping[Sharding, HardwareProfile | None]]
Answers = dict[str, dict[Sharding, Plan | ValueError]]


def plan_jointly(
    case: Case,
    model: nn.Module,
    ranks: Ranks | None,
    shardings: Sequence[Sharding],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> tuple[Case, Plan]:
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
        network = gauge(ranks, device, shardings[0], case.layout, dtype)
        rank_zero_info(f"Sums of gradients over {ranks.world_size} ranks: {network.describe()}.")
    plan = decide(lambda: _plan_best(case, network, shardings, ranks.local_size))
    case = case.among(plan.sharding)
    # Only rank 0 has a profile. The plan says whether it was used, so the budget is the same on all ranks.
    return replace(case, wishes=replace(case.wishes, choice=plan)), plan


def _plan_best(case: Case, network: Network | None, shardings: Sequence[Sharding], num_sharers: int) -> Plan:
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


def _refuse_small_room(case: Case, plan: Plan, num_sharers: int) -> None:
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
    case: Case, machines: Machines, clusters: Mapping[str, Cluster] | None = None, dtype: torch.dtype | None = None
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
    case: Case, under: Mapping[Sharding, HardwareProfile | None], cluster: Cluster | None, element: int | None
) -> dict[Sharding, Plan | ValueError]:
    def make(sharding: Sharding) -> Plan:
        machine = under[sharding]
        network = cluster.network_under(sharding, element) if cluster is not None else None
        return case.on(machine).plan_among(network, sharding, machine)

    shardings = tuple(under)
    return plan_each(shardings if case.searches(under[shardings[0]]) else shardings[:1], make)


def say_if_one_block(plan: Plan, layout: ModelLayout) -> None:
    """Tells the user that little can be streamed."""
    if plan.num_offloaded_chunks and [block.name for block in layout.blocks] == [""]:
        rank_zero_info(
            "No repeated list of blocks was found: the whole model is one block, all its weights are on the device "
            "during a step. Name blocks with `blocks` to stream them one by one."
        )
