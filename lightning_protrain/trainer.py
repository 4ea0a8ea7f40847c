"""A Trainer that can say how it would train, and on what: on this machine or on one that is not here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_protrain.config import parse_bytes
from lightning_protrain.data.batches.preview import page, render
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.device.host import worker_cores
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.fsdp_memory import FSDPMemory
from lightning_protrain.planner.memory import HostTooSmall, format_bytes
from lightning_protrain.planner.plan import BlockPolicy, Plan, RankLayout, Sharding
from lightning_protrain.planner.scaling import Cluster, Scaled, scale
from lightning_protrain.planner.sharding_choice import choose
from lightning_protrain.profiler.cgroup_limits import free_host_bytes
from lightning_protrain.profiler.gpu_specs import gpu as gpu_called
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.strategy.joint_plan import DryRun, Targets
from lightning_protrain.strategy.profile_step import SyntheticData
from lightning_protrain.strategy.protrain import ProTrainStrategy

# A plan, or why there is none, by name of the hardware; `""` is this machine.
Answers = Mapping[str, Plan | ValueError]
NETWORK = "25GB"  # per second, between machines


class PlanningTrainer(Trainer):
    """Lightning's Trainer with two more entry points, `plan` and `preview`."""

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        gpu: Sequence[str] | None = None,
        num_gpus: int = 1,
        host_memory: str | int = "auto",
        host_cores: int | None = None,
        num_nodes: int = 1,
        gpu_link: str | None = None,
        network: str = NETWORK,
        json: str | None = None,
        batch_size: int | None = None,
        length: int | None = None,
    ) -> None:
        """Print the plan that `fit` would make, without weights, without training and without the GPU.

        Under `ProTrainFSDP2Strategy` it is what each rank takes on device and host, over which mesh, if it fits.

        Args:
            model: As for `fit`; what it makes in `configure_model` is made without memory.
            datamodule: As for `fit`; its largest batch is profiled if it can tell, else its first one.
            gpu: Names of GPUs to plan for, e.g. "RTX 3090"; None: the device of this machine.
            num_gpus: How many of them there are, on all machines together. Those of a machine share its host: one copy
                of what is offloaded, or an equal part of memory and cores each; `sharding="auto"` takes what is faster.
            host_memory: Of the host to plan for, e.g. "64GiB"; "auto": what this one has free.
            host_cores: Of the same; None: as many as this one has.
            num_nodes: Machines that `num_gpus` are on, as many on each.
            gpu_link: Bytes per second that a GPU sends to another one of its machine, e.g. "250GB"; None: what it sends
                to its host.
            network: Bytes per second that a machine sends to another one.
            json: File for the plans, as a JSON object by name of the GPU; what cannot be planned has null.
            batch_size: Samples of the batch that is made where neither `datamodule` nor the model has data; None: one.
            length: Tokens of each of them; None: 1024, or as many as the model has positions for.

        Raises:
            ValueError: The strategy plans nothing; an unknown GPU; no folder for `json`; nothing can be profiled; or
                no plan fits any GPU.
        """
        if not isinstance(self.strategy, (ProTrainStrategy, ProTrainFSDP2Strategy)):
            raise ValueError(
                "Plans are those of ProTrainStrategy and ProTrainFSDP2Strategy, the Trainer has "
                f"{type(self.strategy).__name__}. Set trainer.strategy to protrain or protrain_fsdp2, or leave it out."
            )
        for name, value in (("num_gpus", num_gpus), ("host_cores", host_cores), ("num_nodes", num_nodes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: give a positive number.")
        if num_gpus % num_nodes:
            raise ValueError(f"num_gpus={num_gpus} are all GPUs, and {num_nodes} machines cannot have as many each.")
        beside = host_memory, host_cores, gpu_link, network, num_gpus
        if isinstance(self.strategy, ProTrainFSDP2Strategy):  # Any number of devices like this one.
            beside = *beside[:-1], 1
        if not gpu and beside != ("auto", None, None, NETWORK, 1):
            named = "host_memory, host_cores, num_gpus, num_nodes, gpu_link and network"
            raise ValueError(f"{named} say what else there is beside a `gpu`: give one.")
        here = num_gpus // num_nodes
        if gpu_link is not None and here == 1:
            raise ValueError("gpu_link is what one GPU of a machine sends to another one: give more num_gpus, or none.")
        if network != NETWORK and num_nodes == 1:
            raise ValueError("network is what one machine sends to another one: give more num_nodes, or none.")
        wholes: dict[str, HardwareProfile] = {}
        if gpu:
            nbytes = free_host_bytes() if host_memory == "auto" else parse_bytes(host_memory)
            profiles = [gpu_called(name, nbytes, host_cores or len(worker_cores())) for name in gpu]
            wholes = {profile.name: profile for profile in profiles}
        _check_folder("json", json)
        link, wire = parse_bytes(gpu_link) if gpu_link is not None else None, parse_bytes(network)
        has_data = datamodule is not None or is_overridden("train_dataloader", model)
        if has_data and (batch_size is not None or length is not None):
            raise ValueError("batch_size and length are those of a batch that is made where there is no data.")
        made = None if has_data else DataLoader(SyntheticData(batch_size, length), batch_size=None)
        data = (datamodule if datamodule is not None else model) if has_data else None
        if isinstance(self.strategy, ProTrainFSDP2Strategy):
            with self.strategy.planning_only(wholes or {"": None}, num_nodes, here) as found:
                self.fit(model, made, datamodule=datamodule)
            report_fsdp(found, json)
            batch = _batch_sentence({}, data, batch_size, length, self.accumulate_grad_batches)
            say_basis(f"{batch} {_host_sentence(None, host_memory, host_cores)}")
            _refuse_all(found)
            return
        ground = _Ground(wholes, here, num_nodes, link, wire)
        answers, clusters = ground.plan(self.strategy, lambda: self.fit(model, made, datamodule=datamodule))
        answers = {name: _on_host(answer, wholes.get(name)) for name, answer in answers.items()}
        report(answers, json, clusters)
        batch = _batch_sentence(answers, data, batch_size, length, self.accumulate_grad_batches)
        say_basis(f"{batch} {_host_sentence(self.strategy.host_memory, host_memory, host_cores)}")
        _refuse_all(answers)

    def preview(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        num: int = 3,
        html: str | None = None,
    ) -> None:
        """Show which tokens of the training data are trained, and count what is left out; nothing is trained.

        Args:
            model: Not used; a config for `fit` has one.
            datamodule: As for `fit`.
            num: Conversations of each data set.
            html: File for a page that shows the same.

        Raises:
            ValueError: Another data module than `ChatDataModule`, a number below one, or wrong data.
        """
        if not isinstance(datamodule, ChatDataModule):
            raise ValueError(f"preview shows what ChatDataModule trains, the data is a {type(datamodule).__name__}.")
        if num < 1:
            raise ValueError(f"num={num}: give a positive number.")
        _check_folder("html", html)
        datamodule.prepare_data()
        datamodule.setup("fit")
        shown = datamodule.show(num)
        Console().print(render(shown, datamodule.reports))
        if html is not None:
            Path(html).write_text(page(shown, datamodule.reports), encoding="utf-8")


def _refuse_all(answers: Mapping[str, object]) -> None:
    """Raise the first refusal if there are no answers but refusals."""
    refusals = [answer for answer in answers.values() if isinstance(answer, ValueError)]
    if len(refusals) == len(answers):
        raise refusals[0]


def _on_host(answer: Plan | ValueError, whole: HardwareProfile | None) -> Plan | ValueError:
    """Return a plan that streams nothing, or why its weights cannot be loaded: any other is held against the host."""
    if isinstance(answer, ValueError) or whole is None or answer.prediction is None or answer.num_offloaded_chunks:
        return answer
    needed = answer.prediction.host_bytes
    if needed <= whole.host_bytes:
        return answer
    return HostTooSmall(
        f"No plan fits: the host needs {format_bytes(needed)} to load the weights, and has "
        f"{format_bytes(whole.host_bytes)}. Raise host_memory to {format_bytes(needed)}."
    )


def _batch_sentence(
    answers: Answers, data: object | None, batch_size: int | None, length: int | None, accumulate: int
) -> str:
    """Return which batch the plans are made for, and where its size comes from.

    Args:
        answers: By name of the hardware; a plan that was searched for knows samples and tokens.
        data: The data module, or the module with data of its own; None: the batch was made.
        batch_size: As it was given.
        length: As it was given.
        accumulate: Micro-batches of a step.
    """
    predictions = [answer.prediction for answer in answers.values() if isinstance(answer, Plan)]
    known = next((each for each in predictions if each is not None and each.tokens), None)
    size = f" of {known.samples} x {known.tokens // max(known.samples, 1)} tokens" if known is not None else ""
    if data is not None:
        source = f"the {'largest' if hasattr(data, 'largest_batch') else 'first'} one of the data"
    else:
        given = {"batch_size": batch_size, "length": length}
        source = ", ".join(name if value is not None else f"{name} by default" for name, value in given.items())
    return f"Planned for a micro-batch{size} ({source}), {accumulate} to a step (accumulate_grad_batches)."


def _host_sentence(of_strategy: int | None, host_memory: str | int, host_cores: int | None) -> str:
    """Return which host the plans are made for, and where its figures come from.

    Args:
        of_strategy: Bytes of the host that the strategy may use; None: it was not told.
        host_memory: As it was given.
        host_cores: As it was given.
    """
    cores = f"{host_cores} cores (host_cores)" if host_cores else f"{len(worker_cores())} cores (those of this machine)"
    if of_strategy is not None:
        return f"Host: {cores}, {short_bytes(of_strategy)} of memory (host_memory of the strategy)."
    if host_memory != "auto":
        return f"Host: {cores}, {short_bytes(parse_bytes(host_memory))} of memory (host_memory)."
    return f"Host: {cores}, {short_bytes(free_host_bytes())} of memory (free on this machine now)."


@rank_zero_only
def say_basis(text: str) -> None:
    """Print what plans rest on."""
    Console().print(text, highlight=False, soft_wrap=True)


def _check_folder(name: str, path: str | None) -> None:
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{name}={path!r}: there is no such folder. Make it, or correct the path.")


@dataclass(frozen=True)
class _Ground:
    """What plans are made for.

    Attributes:
        wholes: Machines by the name of their GPU; empty: this one.
        here: GPUs of each.
        num_nodes: Machines.
        link: Bytes per second that a GPU sends to another one of its machine; None: what it sends to its host.
        network: Bytes per second that a machine sends to another one.
    """

    wholes: Mapping[str, HardwareProfile]
    here: int
    num_nodes: int
    link: float | None
    network: float

    def plan(
        self, strategy: ProTrainStrategy, fit: Callable[[], None]
    ) -> tuple[dict[str, Plan | ValueError], dict[str, Cluster]]:
        """Plans, and the clusters that they are for if there is more than one GPU, by name of the GPU.

        Args:
            strategy: Whose plans they are.
            fit: Ends when they are made.
        """
        clusters = self._clusters()
        dry_run = DryRun(self._targets(strategy), RankLayout(self.num_nodes, self.here), clusters)
        with strategy.planning_only(dry_run) as found:
            fit()
        return {name: _best(under, clusters.get(name)) for name, under in found.items()}, clusters

    def _targets(self, strategy: ProTrainStrategy) -> Targets:
        shardings = strategy.shardings(self.here)
        if not self.wholes:
            return {"": {shardings[0]: None}}
        return {
            name: {each: _for_rank(whole, each, self.here) for each in shardings} for name, whole in self.wholes.items()
        }

    def _clusters(self) -> dict[str, Cluster]:
        if self.here * self.num_nodes == 1:
            return {}
        return {
            name: Cluster(self.here, self.num_nodes, self.link or whole.download, self.network, whole.host_memory)
            for name, whole in self.wholes.items()
        }


def _for_rank(whole: HardwareProfile, sharding: Sharding, here: int) -> HardwareProfile:
    """A machine as one of its ranks has it: ranks that share one copy step it together, others each their own.

    Args:
        whole: The machine.
        sharding: Who holds offloaded chunks.
        here: Ranks of each machine.
    """
    if sharding is Sharding.SHARD:
        return whole
    return replace(whole, host_step=whole.host_step / here, host_memory=whole.host_memory / here)


def _best(found: Mapping[Sharding, Plan | ValueError], cluster: Cluster | None) -> Plan | ValueError:
    """The plan with the shortest step on all GPUs, or why there is none."""

    def seconds(plan: Plan) -> float | None:
        return scale(plan, cluster).step_seconds if cluster is not None and plan.prediction is not None else None

    try:
        return choose(found, seconds, " on all GPUs").plan
    except ValueError as error:
        return error


@rank_zero_only
def report_fsdp(answers: Mapping[str, FSDPMemory | ValueError], path: str | None = None) -> None:
    """Print what each rank takes under FSDP2, and write it.

    Args:
        answers: By name of the GPU.
        path: File for JSON, if one is wanted.
    """
    console = Console()
    table = _table("FSDP2: the most that each takes")
    for column in ("hardware", "mesh", "device", "host of a node", "blocks recomputed", "fits"):
        table.add_column(column, justify="left" if column == "hardware" else "right", no_wrap=True)
    for name, answer in answers.items():
        if isinstance(answer, ValueError):
            table.add_row(name or "this machine", *[""] * 4, "no")
            continue
        copies, shards = answer.to_dict()["mesh"]
        blocks = f"{len(answer.checkpointed)} of {answer.num_blocks}"
        device, host = short_bytes(answer.device_bytes), short_bytes(answer.node_host_bytes)
        table.add_row(name or "this machine", f"{copies} x {shards}", device, host, blocks, "yes")
    console.print(table)
    for name, answer in answers.items():
        said = str(answer) if isinstance(answer, ValueError) else answer.describe()
        console.print(f"{name or 'this machine'}: {said}", highlight=False, soft_wrap=True)
    if len(answers) == 1:
        for answer in answers.values():
            if not isinstance(answer, ValueError):
                console.print(_fsdp_phases(answer))
    if path is not None:
        content = {
            name or "this machine": None if isinstance(answer, ValueError) else answer.to_dict()
            for name, answer in answers.items()
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _fsdp_phases(memory: FSDPMemory) -> Table:
    table = _table("Each rank, by phase")
    for column in ("phase", "device", "host", "of the device"):
        table.add_column(column, justify="right" if column in ("device", "host") else "left")
    for phase in memory.phases:
        terms = sorted(((nbytes, term) for term, nbytes in phase.device.items() if nbytes), reverse=True)
        largest = ", ".join(f"{term} {short_bytes(nbytes)}" for nbytes, term in terms[:3])
        table.add_row(phase.name, short_bytes(phase.device_bytes), short_bytes(phase.host_bytes), largest)
    return table


@rank_zero_only
def report(answers: Answers, path: str | None = None, clusters: Mapping[str, Cluster] | None = None) -> None:
    """Prints plans, and writes them.

    Args:
        answers: By name of the hardware.
        path: Of a JSON file, if one is wanted.
        clusters: What each plan is for, if it is more than one GPU.
    """
    console = Console()
    plans = {name: answer for name, answer in answers.items() if isinstance(answer, Plan)}
    if len(answers) == 1:
        for plan in plans.values():
            console.print(plan.explain())
    else:
        console.print(comparison(answers))
        for name, answer in answers.items():
            said = str(answer) if isinstance(answer, ValueError) else _policies(answer)
            console.print(f"{name}: {said}", highlight=False)
    if clusters and plans:
        console.print(scaling({name: (plan.sharding, scale(plan, clusters[name])) for name, plan in plans.items()}))
    if path is not None:
        content = {
            name or "this machine": json.loads(answer.to_json()) if isinstance(answer, Plan) else None
            for name, answer in answers.items()
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def comparison(answers: Answers) -> Table:
    """One row for each machine; with the longest name of the catalogue it fits 80 columns."""
    table = _table("Plans")
    for column in ("hardware", "resident", "device", "host", "step", "tokens/s", "bound"):
        table.add_column(column, justify="left" if column in ("hardware", "bound") else "right", no_wrap=True)
    for name, answer in answers.items():
        if isinstance(answer, ValueError):
            table.add_row(name, "no plan")
            continue
        prediction = answer.prediction
        row = [name, _resident(answer)]
        if prediction is not None:
            rate = prediction.tokens_per_second
            row += [
                short_bytes(prediction.device_bytes),
                short_bytes(prediction.host_bytes),
                short_seconds(prediction.step_seconds),
                "" if rate is None else f"{rate:,.0f}",
                prediction.bound,
            ]
        table.add_row(*row)
    return table


def scaling(scaled: Mapping[str, tuple[str, Scaled]]) -> Table:
    """One row for each cluster: who holds what is offloaded, host of a machine, seconds of sums."""
    table = _table("On all GPUs (estimate)")
    for column in ("hardware", "GPUs", "host", "sums", "step", "tokens/s", "efficiency"):
        table.add_column(column, justify="left" if column == "hardware" else "right", no_wrap=column != "GPUs")
    for name, (way, one) in scaled.items():
        table.add_row(
            name,
            f"{one.cluster.num_nodes} x {one.cluster.gpus_per_node}, {way}",
            short_bytes(one.node_bytes),
            short_seconds(one.sent_seconds),
            short_seconds(one.step_seconds),
            "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
            f"{100 * one.efficiency:.0f} %",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _resident(plan: Plan) -> str:
    total = sum(chunk.nbytes for chunk in plan.chunks)
    resident = sum(chunk.nbytes for chunk in plan.chunks if chunk.resident)
    return f"{100 * resident / max(total, 1):.0f} %"


def _policies(plan: Plan) -> str:
    """What blocks do, and what is to be warned of."""
    counts = {policy: sum(block.policy is policy for block in plan.blocks) for policy in BlockPolicy}
    named = ", ".join(f"{count} {policy}" for policy, count in counts.items() if count)
    advice = plan.prediction.advice if plan.prediction is not None else ()
    warnings = [sentence for sentence in advice if sentence.startswith("Warning")]
    blocks = f"activations of {len(plan.blocks)} {'block' if len(plan.blocks) == 1 else 'blocks'}: {named}"
    return ". ".join([blocks, *warnings])
