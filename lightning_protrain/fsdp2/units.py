"""Choice of the modules that FSDP2 gathers and frees as units, and of the modules that are checkpointed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_protrain.config import FSDPOptions, Policy, plural
from lightning_protrain.profiler.blocks import _descendants, _has_own_forward, discover_blocks

# Modules that read their children's weights without calling them, so that a child cannot be its own unit.
_READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_PEFT_LAYER = ("peft.tuners.tuners_utils", "BaseTunerLayer")


@dataclass(frozen=True)
class ShardUnits:
    """The modules that become FSDP units, in addition to the model itself, which is always a unit.

    Attributes:
        names: Fully qualified names, inner units before enclosing ones.
        left_out: Modules that are not units because they share a parameter, with the name of the parameter.
    """

    names: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def choose_units(model: nn.Module, policy: Policy, min_num_params: int) -> ShardUnits:
    """Return the FSDP2 units of a model.

    A unit has the parameters below its module, except those of inner units; the model itself has the rest. If units
    share a tied parameter, the innermost of them are removed, until the parameter is in only one unit.

    Args:
        model: The model, which may be on the meta device.
        policy: `"transformer"` takes the elements of the repeated lists. `"size"` takes modules with at least
            `min_num_params` parameters, not counting inner units, from the bottom up, except modules with all
            parameters and modules that are never called. `"none"` takes no module.
        min_num_params: Minimum number of parameters of a unit, for `"size"`.

    Raises:
        ValueError: If the policy is `"transformer"`, but the model has no repeated list.
    """
    if policy == "none":
        return ShardUnits(())
    if policy == "size":
        chosen = {id(module) for module in _large_modules(model, min_num_params)}
    else:
        names = discover_blocks(model)
        if not names:
            raise ValueError(
                f"policy='transformer' shards the elements of repeated lists, but {type(model).__name__} has no "
                "nn.ModuleList with two elements of one class. Give policy='size' with min_num_params."
            )
        chosen = {id(model.get_submodule(name)) for name in names}
    left_out = _untie(model, chosen)
    ordered = [name for name, module in model.named_modules() if id(module) in chosen]
    return ShardUnits(tuple(reversed(ordered)), left_out)


def choose_checkpointed(model: nn.Module, min_num_params: int) -> tuple[str, ...]:
    """Return the names of the modules that can be checkpointed; none of these modules is inside another.

    They are the elements of the repeated lists or, without such lists, the outermost modules of policy `"size"`.
    """
    if names := discover_blocks(model):
        return names
    large = _large_modules(model, min_num_params)
    outermost = set(map(id, large)) - {id(inner) for module in large for inner in _descendants(module)}
    return tuple(name for name, module in model.named_modules() if id(module) in outermost)


def parameters_by_unit(model: nn.Module, units: ShardUnits) -> tuple[tuple[str, ...], ...]:
    """Return the first names of the parameters of each unit except the model, in the order of the units."""
    chosen = {id(model.get_submodule(name)) for name in units.names}
    held: dict[str, list[str]] = {name: [] for name in units.names}
    for fqn, (owner, *_) in owners_of(model, chosen).items():
        if owner:
            held[owner].append(fqn)
    return tuple(map(tuple, held.values()))


def _large_modules(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return the modules with at least `min_num_params` parameters outside of inner units, from the bottom up."""
    everything = {id(parameter) for parameter in model.parameters()}
    counted: set[int] = set()
    large: list[nn.Module] = []

    def count(module: nn.Module) -> int:
        """Count the parameters of a module that are not in an inner unit; a tied parameter counts once."""
        if id(module) in counted:
            return 0
        counted.add(id(module))
        whole = _reads_its_children(module)
        free = 0
        for parameter in module.parameters(recurse=whole):
            free += 0 if id(parameter) in counted else parameter.numel()
            counted.add(id(parameter))
        if not whole:
            free += sum([count(child) for child in module.children()])
        if free < min_num_params or not _has_own_forward(module) or module is model:
            return free
        # A module with all parameters is often not called itself (`model.base_model(...)`), but the root is.
        if {id(parameter) for parameter in module.parameters()} == everything:
            return free
        large.append(module)
        return 0

    count(model)
    return large


def _reads_its_children(module: nn.Module) -> bool:
    return isinstance(module, _READ_THEIR_CHILDREN) or any(
        (base.__module__, base.__name__) == _PEFT_LAYER for base in type(module).__mro__
    )


def _untie(model: nn.Module, chosen: set[int]) -> dict[str, str]:
    """Remove units that share a parameter from `chosen`, and return their names with the name of the parameter."""
    names = {id(module): name for name, module in model.named_modules()}
    left_out: dict[str, str] = {}
    while True:
        tied = next(((fqn, owners) for fqn, owners in owners_of(model, chosen).items() if len(owners) > 1), None)
        if tied is None:
            return left_out
        fqn, owners = tied
        innermost = max(owners, key=lambda owner: owner.count(".") + bool(owner))
        module = id(model.get_submodule(innermost))
        chosen.remove(module)
        left_out[names[module]] = fqn


def owners_of(model: nn.Module, chosen: Collection[int]) -> dict[str, list[str]]:
    """Return the names of the units with each parameter, by the parameter's first name; `""` is the model."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {id(module): name for name, module in model.named_modules()}
    owners: dict[str, list[str]] = {}
    for site, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((id(modules[path]) for path in _paths(site) if id(modules[path]) in chosen), id(model))
        units_of = owners.setdefault(first_names[id(parameter)], [])
        if names[unit] not in units_of:
            units_of.append(names[unit])
    return owners


def _paths(site: str) -> Iterator[str]:
    """Yield the names of the modules that contain a parameter, from the inside out."""
    path = site
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def num_checkpointed(options: FSDPOptions, names: Sequence[str], model: nn.Module) -> int | None:
    """Return the number of modules to checkpoint, from the first one on; None means as few as memory allows.

    Args:
        options: The user's options.
        names: Modules that can be checkpointed.
        model: The model that contains these modules.

    Raises:
        ValueError: If the user wants to checkpoint more modules than possible.
    """
    wanted = options.activation_checkpointing
    if wanted == "auto":
        return None
    if wanted is False or wanted == "none":
        return 0
    if wanted is True or wanted == "all":
        if not names:
            raise ValueError(
                f"activation_checkpointing={wanted!r}: {type(model).__name__} has no repeated list of blocks, and no "
                f"module as large as min_num_params={options.min_num_params}. Lower min_num_params, or remove "
                "activation_checkpointing."
            )
        return len(names)
    assert isinstance(wanted, int)
    if wanted > len(names):
        raise ValueError(
            f"activation_checkpointing={wanted}: {type(model).__name__} has {plural(len(names), 'block')} that can "
            f'recompute their activations. Give at most {len(names)}, or "all".'
        )
    return wanted
