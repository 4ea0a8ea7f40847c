"""A Trainer with `plan` and `preview`, which show what a run would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_protrain.data.batches.preview import page, render
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from lightning_protrain.planner.fsdp_memory import FSDPRanks
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.report.plan_page import page as page_of_plans
from lightning_protrain.report.plan_report import Answers, make_parent, report, report_fsdp, say_basis
from lightning_protrain.strategy.dry_run_hardware import NETWORK, DryRunHardware
from lightning_protrain.strategy.profile_step import SyntheticData
from lightning_protrain.strategy.protrain import ProTrainStrategy


class PlanningTrainer(Trainer):
    """Lightning's Trainer with two more methods, `plan` and `preview`."""

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
        html: str | None = None,
        batch_size: int | None = None,
        length: int | None = None,
    ) -> None:
        """Print the plan that `fit` would make, without weights, without training and without the GPU.

        With `ProTrainFSDP2Strategy`, print the memory of each rank on device and host, and the mesh that fits.

        Args:
            model: As for `fit`; weights made in `configure_model` are on the meta device.
            datamodule: As for `fit`; its largest batch is profiled if it has `largest_batch`, else its first batch.
            gpu: Names of GPUs to plan for, such as "RTX 3090"; None means the device of this machine.
            num_gpus: Number of GPUs on all nodes. The GPUs of a node may share one copy of the offloaded weights, or
                keep one copy each; `sharding="auto"` takes whichever is faster.
            host_memory: Memory of a node's host, such as "64GiB"; "auto" means the free memory of this host.
            host_cores: Number of cores of a node's host; None means the number of cores of this host.
            num_nodes: Number of nodes; all have the same number of GPUs.
            gpu_link: Bytes per second between two GPUs of a node, such as "250GB"; None means the rate between GPU and
                host.
            network: Bytes per second between two nodes.
            json: File for the plans: a JSON object by GPU name, with null if no plan fits.
            html: File for a page that shows the plans: placement, the timeline of a step, memory, throughput.
            batch_size: Number of samples in a synthetic batch, if neither `datamodule` nor the model has data. None
                means the batch size of a ChatDataModule whose files are missing, or else 1.
            length: Tokens of each synthetic sample. None means `max_length` of a ChatDataModule whose files are
                missing, or else 1024, or the model's number of positions if that is less.

        Raises:
            ValueError: If the strategy makes no plans, a GPU is unknown, the folder of `json` or `html` does not exist,
                the model cannot be profiled, or no plan fits any GPU.
        """
        if not isinstance(self.strategy, (ProTrainStrategy, ProTrainFSDP2Strategy)):
            raise ValueError(
                f"Only ProTrainStrategy and ProTrainFSDP2Strategy make plans, but the Trainer has "
                f"{type(self.strategy).__name__}. Set trainer.strategy to protrain or protrain_fsdp2, or leave it out."
            )
        hardware = DryRunHardware(tuple(gpu or ()), num_gpus, num_nodes, host_memory, host_cores, gpu_link, network)
        hardware.refuse_unused(counts_gpus=isinstance(self.strategy, ProTrainStrategy))
        make_parent(json)
        make_parent(html)
        missing = datamodule.missing_files() if isinstance(datamodule, ChatDataModule) else []
        if isinstance(datamodule, ChatDataModule) and missing:
            sizes = datamodule.known_size("batch_size"), datamodule.known_size("max_length")
            rows = ", for rows of max_length" if length is None and sizes[1] is not None else ""
            say_basis(f"Planned without data{rows}, because of missing files: {', '.join(missing)}.")
            if None in sizes:
                say_basis('What is "auto" is chosen for the data: without it, give batch_size and length.')
            batch_size, length = batch_size or sizes[0], length or sizes[1]
            datamodule = None
        has_data = datamodule is not None or is_overridden("train_dataloader", model)
        if has_data and (batch_size is not None or length is not None):
            raise ValueError(
                "batch_size and length describe a synthetic batch, but data is given. Leave them out, or give no data."
            )
        made = None if has_data else DataLoader(SyntheticData(batch_size, length), batch_size=None)
        data = (datamodule if datamodule is not None else model) if has_data else None
        if isinstance(self.strategy, ProTrainFSDP2Strategy):
            if html is not None:
                raise ValueError(f"html={html!r} is not supported with ProTrainFSDP2Strategy. Give json instead.")
            nodes: Mapping[str, HardwareProfile | None] = hardware.nodes or {"": None}
            ranks = FSDPRanks(num_nodes, hardware.ranks.ranks_per_node)
            with self.strategy.session.planning_only(nodes, ranks) as dry:
                self.fit(model, made, datamodule=datamodule)
            report_fsdp(dry, json)
            batch = _batch_sentence({}, data, batch_size, length, self.accumulate_grad_batches)
            say_basis(f"{batch} {hardware.describe_host(None)}")
            _refuse_all(dry)
            return
        dry_run = hardware.dry_run(self.strategy.shardings(hardware.ranks.ranks_per_node), draws=html is not None)
        with self.strategy.session.planning_only(dry_run):
            self.fit(model, made, datamodule=datamodule)
        answers = hardware.answers(dry_run)
        report(answers, json, dry_run.clusters)
        batch = _batch_sentence(answers, data, batch_size, length, self.accumulate_grad_batches)
        basis = f"{batch} {hardware.describe_host(self.strategy.session.options.host_bytes)}"
        say_basis(basis)
        if html is not None and self.is_global_zero:
            drawn = {
                name: dry_run.charts.get((name, answer.sharding))
                for name, answer in answers.items()
                if isinstance(answer, Plan)
            }
            Path(html).write_text(page_of_plans(answers, basis, drawn), encoding="utf-8")
        _refuse_all(answers)

    def preview(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        num: int = 3,
        html: str | None = None,
    ) -> None:
        """Show which tokens of the training data are trained, and count skipped and truncated rows, without training.

        Args:
            model: Ignored; accepts the model of a config for `fit`.
            datamodule: As for `fit`.
            num: Number of conversations of each data set to show.
            html: File for a page with the same content; None writes no page.

        Raises:
            ValueError: If the data module is not a `ChatDataModule`, `num` is below one, or the data is invalid.
        """
        if not isinstance(datamodule, ChatDataModule):
            raise ValueError(f"`preview` needs a ChatDataModule, but the data module is a {type(datamodule).__name__}.")
        if num < 1:
            raise ValueError(f"num={num}: give a positive number.")
        make_parent(html)
        datamodule.prepare_data()
        shown = datamodule.show(num)
        Console().print(render(shown, datamodule.reports))
        if html is not None:
            Path(html).write_text(page(shown, datamodule.reports), encoding="utf-8")


def _refuse_all(answers: Mapping[str, object]) -> None:
    """Raise the first error if all answers are errors."""
    refusals = [answer for answer in answers.values() if isinstance(answer, ValueError)]
    if len(refusals) == len(answers):
        raise refusals[0]


def _batch_sentence(
    answers: Answers, data: object | None, batch_size: int | None, length: int | None, accumulate: int
) -> str:
    """Return a sentence on the batch of the plans and the source of its size; without `data` it is synthetic."""
    predictions = [answer.prediction for answer in answers.values() if isinstance(answer, Plan)]
    known = next((prediction for prediction in predictions if prediction is not None and prediction.tokens), None)
    size = f" of {known.samples} x {known.tokens // max(known.samples, 1)} tokens" if known is not None else ""
    if data is not None:
        source = f"the {'largest' if hasattr(data, 'largest_batch') else 'first'} of the data"
    else:
        sizes = {"batch_size": batch_size, "length": length}
        source = ", ".join(name if value is not None else f"{name} by default" for name, value in sizes.items())
    return f"Planned for a micro-batch{size} ({source}), {accumulate} to a step (accumulate_grad_batches)."
