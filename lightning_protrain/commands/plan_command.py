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
    given = parser.parse_args(list(arguments))
    return _fits(given) if given.command == "fits" else _plan(given)


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


def _plan(given: Namespace) -> int:
    make_parent(given.json)
    models = [find_config(name) for name in given.model]
    hardware, methods = _hardware(given), given.method or ["lora"]
    labels = {"model": len(models) > 1, "method": len(methods) > 1, "GPU": len(hardware.gpu) > 1}
    one = not any(labels.values())
    answers: dict[str, Plan | ValueError] = {}
    for model, method in product(models, methods):
        try:
            with waiting(f"Planning {model.name}"):
                found = answers_for(model, _options(given, method), hardware)
        except ValueError as error:
            if len(models) * len(methods) == 1:
                raise
            found = dict.fromkeys(hardware.gpu or [""], error)
        for gpu, answer in found.items():
            parts = zip((model.name.rpartition("/")[2], method, gpu), labels.values(), strict=True)
            answers[gpu if one else ", ".join(part for part, shown in parts if shown)] = answer
    failed = [name for name, answer in answers.items() if isinstance(answer, ValueError)]
    if one and failed:
        (answer,) = answers.values()
        with waiting("Looking for settings that fit"):
            others = list(alternatives(models[0], _options(given, methods[0]), hardware)) if hardware.gpu else []
        raise ValueError(" ".join([str(answer), *others]))
    if one:
        report(answers, given.json)
        if given.verbose:
            _say_details(answers, hardware)
    else:
        _table(answers, ", ".join(label for label, shown in labels.items() if shown))
        write_plans(answers, given.json)
    for source in dict.fromkeys(model.source for model in models):
        names = ", ".join(model.name for model in models if model.source == source)
        say_basis(f"{names}: config from {source}.")
    say_basis(_defaults(given, hardware))
    return 1 if len(failed) == len(answers) else 0


def _say_details(answers: Answers, hardware: DryRunHardware) -> None:
    """Print the details of each plan, and the data sheet that its rates are from."""
    for gpu, plan in answers.items():
        if isinstance(plan, Plan) and plan.prediction is not None and gpu in hardware.nodes:
            Console().print(details(plan, hardware.nodes[gpu].rates(), find(gpu).source))


def _fits(given: Namespace) -> int:
    if given.most < 1:
        raise ValueError(f"most={given.most}: give a number above zero.")
    if _options(given, METHODS[0]).searches:
        raise ValueError('`fits` lists models for one size: "max" is for `plan`. Give a number.')
    hardware = _hardware(given)
    fits = False
    for gpu, method in product(hardware.gpu, given.method or METHODS):
        found = fitting(_options(given, method), hardware.alone(gpu), given.most)
        fits |= bool(found.plans)
        title = f"{gpu}, {method}" if found.plans else f"{gpu}, {method}: no model fits"
        shown = {name.rpartition("/")[2]: one for name, one in found.plans.items()}
        Console().print(comparison(shown, "model", title, list(found.longest.values())))
        if found.smaller:
            say_basis(f"{found.smaller} smaller models that come with this package also fit.\n")
    if _options(given, METHODS[0]).batch_size == 1:
        say_basis("tokens/s: with one sequence in a batch; `plan NAME` finds the batch with most.\n")
    say_basis("longest: tokens of a text that fits, by one profile; `plan NAME --length max` may find a longer one.\n")
    say_basis("Models of text and images, and with linear attention, are not listed: `plan` takes a minute for each.\n")
    say_basis(_defaults(given, hardware))
    return 0 if fits else 1


def _hardware(given: Namespace) -> DryRunHardware:
    gpus = dict.fromkeys(find(name).name for name in given.gpu or ())
    hardware = DryRunHardware(tuple(gpus), given.num_gpus, 1, given.host_memory or "auto", given.host_cores)
    hardware.refuse_unused(counts_gpus=True)
    return hardware


def _options(given: Namespace, method: str) -> TrainingOptions:
    batch_size = 1 if given.batch_size is None and given.command == "fits" else given.batch_size
    return TrainingOptions(method, given.precision, batch_size, given.length, given.optimizer)  # type: ignore[arg-type]


def _table(answers: Answers, label: str) -> None:
    console = Console()
    console.print(comparison(answers, label))
    for name, answer in answers.items():
        if isinstance(answer, ValueError):
            said = str(answer).partition(" Most is needed")[0]
        else:
            advice = answer.prediction.advice if answer.prediction is not None else ()
            said = " ".join(each for each in advice if each.startswith((CHOSEN, LONGEST, BEST)))
        if said:
            console.print(f"{name}: {said}", highlight=False, soft_wrap=True)


def _defaults(given: Namespace, hardware: DryRunHardware) -> str:
    """Return a sentence on the options whose default is used, and on the host."""
    methods = given.method or (METHODS if given.command == "fits" else ["lora"])
    gpus: Sequence[str | None] = hardware.gpu or [None]
    options = [_options(given, method) for method in methods]
    # A plan with a choice of precisions says which one it has.
    fixed = [each for each in options if given.command == "fits" or not each.others]
    names = dict.fromkeys(each.precision_on(gpu) for each in fixed for gpu in gpus)
    taken = {
        "method lora": given.method or given.command == "fits",
        f"precision {' or '.join(names)}": given.precision or not names,
        f"batch-size {options[0].for_hardware(hardware).batch_size}": given.batch_size,
        "length 1024": given.length,
    }
    shown = [f"--{option}" for option, value in taken.items() if not value]
    said = f"Defaults: {', '.join(shown)}. " if shown else ""
    if not hardware.gpu:
        said += f"Device: {next(iter(describe_gpus()), cpu_name())} (of this machine). "
    return f"{said}{hardware.describe_host(None)}"
