"""The commands `plan MODEL` and `fits`, which need no config."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import product

from rich.console import Console

from lightning_protrain.config import RaisingParser
from lightning_protrain.device.topology import describe_gpus
from lightning_protrain.models.published import find_config
from lightning_protrain.models.repeated_blocks import METHODS
from lightning_protrain.planner.explain import details
from lightning_protrain.planner.plan import Plan
from lightning_protrain.plans import BEST, CHOSEN, LONGEST, TrainingOptions, alternatives, answers_for, fitting
from lightning_protrain.profiler.gpu_specs import find
from lightning_protrain.profiler.hardware import cpu_name
from lightning_protrain.progress import waiting
from lightning_protrain.report.plan_report import Answers, comparison, make_parent, report, say_basis, write_plans
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware

COMMANDS = {
    "plan": "print the plan for training a model that is given by its name",
    "fits": "list the published models that can be trained on a GPU, by method, largest first",
}


def plan_command(arguments: Sequence[str]) -> int:
    """Run `plan MODEL` or `fits`.

    Args:
        arguments: Command line, beginning with the name of the command.

    Returns:
        The exit status: 1 if no requested plan fits.

    Raises:
        ValueError: If the model, the GPU or an option is unknown, or a value is not allowed.
    """
    parser = RaisingParser(prog="lightning-protrain", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in COMMANDS.items():
        command = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False)
        _add_options(command, name)
    options = parser.parse_args(list(arguments))
    return _fits(options) if options.command == "fits" else _plan(options)


def _add_options(parser: ArgumentParser, command: str) -> None:
    """Add the options of a command; each can be written with dashes or underscores."""

    def add(name: str, **options: object) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, **options)  # type: ignore[arg-type]

    if command == "plan":
        parser.add_argument("model", nargs="+", help="name on the Hub, folder with a config.json, or such a file")
    add("gpu", action="append", required=command == "fits", help="name of a GPU, e.g. 'RTX 4090'; may be given again")
    add("method", action="append", choices=METHODS, help="full, lora (default) or qlora; may be given again")
    add("precision", help="as in the Trainer; default: bf16-mixed, or 16-mixed for GPUs without bfloat16")
    add(
        "optimizer",
        help="short name such as split_adamw, or class path; default: adamw; `plan --method full` without "
        "precision and optimizer takes the first of adamw and split_adamw in bfloat16 that fits",
    )
    default = "the one with most tokens per second (max), or 1 with --length max" if command == "plan" else "1"
    add("batch-size", type=_size, help=f"sequences in a micro-batch; default: {default}")
    maximum = "; max: the most that fit" if command == "plan" else ""
    add("length", type=_size, help=f"tokens of a sequence{maximum}; default: 1024")
    add("host-memory", help="memory of the host, e.g. 64GiB; default: free memory of this host")
    add("host-cores", type=int, help="number of cores of the host; default: as on this host")
    add("num-gpus", type=int, default=1, help="GPUs of the host, which train together; default: 1")
    if command == "plan":
        add("json", help="file for the plans")
        add("verbose", action="store_true", help="show every unit, every term of memory, and all rates of one plan")
    else:
        add("most", type=int, default=3, help="number of models to list for each method; default: 3")


def _size(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _plan(options: Namespace) -> int:
    make_parent(options.json)
    models = [find_config(name) for name in options.model]
    hardware, methods = _hardware(options), options.method or ["lora"]
    labels = {"model": len(models) > 1, "method": len(methods) > 1, "GPU": len(hardware.gpu) > 1}
    is_single = not any(labels.values())
    answers: dict[str, Plan | ValueError] = {}
    for model, method in product(models, methods):
        try:
            with waiting(f"Planning {model.name}"):
                answers_of = answers_for(model, _options(options, method), hardware)
        except ValueError as error:
            if len(models) * len(methods) == 1:
                raise
            answers_of = dict.fromkeys(hardware.gpu or [""], error)
        for gpu, answer in answers_of.items():
            parts = zip((model.name.rpartition("/")[2], method, gpu), labels.values(), strict=True)
            answers[gpu if is_single else ", ".join(part for part, shown in parts if shown)] = answer
    failed = [name for name, answer in answers.items() if isinstance(answer, ValueError)]
    if is_single and failed:
        (answer,) = answers.values()
        with waiting("Looking for settings that fit"):
            others = list(alternatives(models[0], _options(options, methods[0]), hardware)) if hardware.gpu else []
        raise ValueError(" ".join([str(answer), *others]))
    if is_single:
        report(answers, options.json)
        if options.verbose:
            _say_details(answers, hardware)
    else:
        _table(answers, ", ".join(label for label, shown in labels.items() if shown))
        write_plans(answers, options.json)
    for source in dict.fromkeys(model.source for model in models):
        names = ", ".join(model.name for model in models if model.source == source)
        say_basis(f"{names}: config from {source}.")
    say_basis(_defaults(options, hardware))
    return 1 if len(failed) == len(answers) else 0


def _say_details(answers: Answers, hardware: DryRunHardware) -> None:
    """Print the details of each plan, and the data sheet that its rates are from."""
    for gpu, plan in answers.items():
        if isinstance(plan, Plan) and plan.prediction is not None and gpu in hardware.nodes:
            Console().print(details(plan, hardware.nodes[gpu].rates(), find(gpu).source))


def _fits(options: Namespace) -> int:
    if options.most < 1:
        raise ValueError(f"most={options.most}: give a number above zero.")
    if _options(options, METHODS[0]).searches:
        raise ValueError('`fits` lists models for one size: "max" is for `plan`. Give a number.')
    hardware = _hardware(options)
    fits = False
    for gpu, method in product(hardware.gpu, options.method or METHODS):
        fit = fitting(_options(options, method), hardware.alone(gpu), options.most)
        fits |= bool(fit.plans)
        title = f"{gpu}, {method}" if fit.plans else f"{gpu}, {method}: no model fits"
        shown = {name.rpartition("/")[2]: plan for name, plan in fit.plans.items()}
        Console().print(comparison(shown, "model", title, list(fit.longest.values())))
        if fit.smaller:
            say_basis(f"{fit.smaller} smaller models that come with this package also fit.\n")
    if _options(options, METHODS[0]).batch_size == 1:
        say_basis("tokens/s: with one sequence in a batch; `plan NAME` finds the batch with most.\n")
    say_basis("longest: tokens of a text that fits, by one profile; `plan NAME --length max` may find a longer one.\n")
    say_basis("Models of text and images, and with linear attention, are not listed: `plan` takes a minute for each.\n")
    say_basis(_defaults(options, hardware))
    return 0 if fits else 1


def _hardware(options: Namespace) -> DryRunHardware:
    gpus = dict.fromkeys(find(name).name for name in options.gpu or ())
    hardware = DryRunHardware(tuple(gpus), options.num_gpus, 1, options.host_memory or "auto", options.host_cores)
    hardware.refuse_unused(counts_gpus=True)
    return hardware


def _options(options: Namespace, method: str) -> TrainingOptions:
    batch_size = 1 if options.batch_size is None and options.command == "fits" else options.batch_size
    return TrainingOptions(method, options.precision, batch_size, options.length, options.optimizer)  # type: ignore[arg-type]


def _table(answers: Answers, label: str) -> None:
    console = Console()
    console.print(comparison(answers, label))
    for name, answer in answers.items():
        if isinstance(answer, ValueError):
            remark = str(answer).partition(" Most is needed")[0]
        else:
            advice = answer.prediction.advice if answer.prediction is not None else ()
            remark = " ".join(sentence for sentence in advice if sentence.startswith((CHOSEN, LONGEST, BEST)))
        if remark:
            console.print(f"{name}: {remark}", highlight=False, soft_wrap=True)


def _defaults(arguments: Namespace, hardware: DryRunHardware) -> str:
    """Return a sentence on the options whose default is used, and on the host."""
    methods = arguments.method or (METHODS if arguments.command == "fits" else ["lora"])
    gpus: Sequence[str | None] = hardware.gpu or [None]
    options = [_options(arguments, method) for method in methods]
    # A plan with a choice of precisions says which one it has.
    fixed = [option for option in options if arguments.command == "fits" or not option.others]
    names = dict.fromkeys(option.precision_on(gpu) for option in fixed for gpu in gpus)
    taken = {
        "method lora": arguments.method or arguments.command == "fits",
        f"precision {' or '.join(names)}": arguments.precision or not names,
        f"batch-size {options[0].for_hardware(hardware).batch_size}": arguments.batch_size,
        "length 1024": arguments.length,
    }
    shown = [f"--{option}" for option, value in taken.items() if not value]
    defaults = f"Defaults: {', '.join(shown)}. " if shown else ""
    if not hardware.gpu:
        defaults += f"Device: {next(iter(describe_gpus()), cpu_name())} (of this machine). "
    return f"{defaults}{hardware.describe_host(None)}"
