"""Search for the blocks of a model, and records of its parameters and units."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_protrain.config import MIN_NUM_PARAMS, BlockChoice
from lightning_protrain.profiler.records import ModelLayout, ParameterInfo, UnitInfo
from lightning_protrain.quant_state import packed_nbytes

# Packages with modules that read their children's weights without calling them, such as MultiheadAttention and DoRA.
_OPAQUE = ("torch.nn.modules.", "peft.tuners.")


def discover_blocks(
    model: nn.Module, blocks: BlockChoice = None, min_num_params: int = MIN_NUM_PARAMS
) -> tuple[str, ...]:
    """Return the names of the modules that are blocks (paper, section 3.2: transformer blocks).

    A module that is registered at two places has only its first name. No block is inside another block.

    Args:
        model: The model, which may be on the meta device.
        blocks: None takes the elements of the outermost repeated lists, such as encoder and decoder layers. A repeated
            list is an `nn.ModuleList`, or an `nn.Sequential` of modules with children, with at least two elements of
            one class. Elements without parameters are skipped; elements without their own `forward` (a `ModuleDict`, a
            nested list) are replaced by their children. `"size"` takes the deepest modules with their own `forward` and
            at least `min_num_params` parameters. A list of names and classes takes exactly these modules.
        min_num_params: Minimum number of parameters of a block, for `"size"`.

    Returns:
        Fully qualified names in `named_modules()` order; may be empty.

    Raises:
        ValueError: If `blocks` or `min_num_params` has a wrong value; if a name or class in `blocks` is not in the
            model; if a listed module is inside another one, or has no parameters or no `forward`; or if a parameter is
            uninitialized.
    """
    chosen: Iterable[nn.Module]
    if blocks is None:
        repeated: list[nn.Module] = []
        _collect_repeated(model, set(), repeated)
        inside = {id(module) for block in repeated for module in _descendants(block)}
        chosen = [block for block in repeated if id(block) not in inside]
    elif blocks == "size":
        if isinstance(min_num_params, bool) or min_num_params < 1:
            raise ValueError(f"min_num_params is {min_num_params}; give a positive number of parameters.")
        _refuse_uninitialized(model)
        chosen = _smallest_large(model, min_num_params, {})
    elif isinstance(blocks, type) and issubclass(blocks, nn.Module):
        raise ValueError(f"blocks={blocks.__name__} is one class, not a list: give blocks=[{blocks.__name__}].")
    elif isinstance(blocks, (str, type, int)) or not blocks:
        raise ValueError(f'blocks={blocks!r}: give None, "size", or a list of module names and classes.')
    else:
        chosen = _explicit(model, blocks)
    wanted = {id(module) for module in chosen}
    return tuple(name for name, module in model.named_modules() if id(module) in wanted)


def describe_model(model: nn.Module, blocks: BlockChoice = None, min_num_params: int = MIN_NUM_PARAMS) -> ModelLayout:
    """Return records of all parameters and units of a model; see [Note: Unit] in records.py.

    Args:
        model: The model, which may be on the meta device.
        blocks: As in `discover_blocks`. If there are no blocks, the root is the only block, with all parameters.
        min_num_params: As in `discover_blocks`.

    Raises:
        ValueError: As in `discover_blocks`.
    """
    _refuse_uninitialized(model)
    names = {id(module): name for name, module in model.named_modules()}
    chosen_names = set(discover_blocks(model, blocks, min_num_params)) or {""}
    chosen = {key for key, name in names.items() if name in chosen_names}

    sites: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        sites.setdefault(id(parameter), []).append(fqn)
        tensors[id(parameter)] = parameter
    parameters = tuple(_describe_parameter(tensors[key], fqns) for key, fqns in sites.items())

    order = {key: index for index, key in enumerate(sites)}
    needs: dict[int, set[int]] = {}
    _assign(model, model, chosen, needs, set())
    assert set().union(*needs.values()) == sites.keys(), "a parameter in no unit"
    modules = {id(module): module for module in model.modules() if needs.get(id(module))}
    units = tuple(
        UnitInfo(
            name=names[key],
            is_block=key in chosen,
            parameters=tuple(sites[parameter][0] for parameter in sorted(needs[key], key=order.__getitem__)),
            encloses=tuple(names[id(inner)] for inner in _descendants(module) if id(inner) in modules),
        )
        for key, module in modules.items()
    )
    return ModelLayout(parameters, units, sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()))


def modules_in(module: nn.Module) -> list[nn.Module]:
    """Return `module` and all modules inside of it, each once; many times faster than `modules()`."""
    found, seen = [module], {id(module)}
    for each in found:
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return True if `torch.compile` was applied to a module or its forward, not only to modules inside it."""
    forward = getattr(module.forward, "_forward", module.forward)  # The runtime may have wrapped it.
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def compiled_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of compiled modules."""
    for module in model.modules():
        if is_compiled(module):
            yield from module.parameters()


def _has_own_forward(module: nn.Module) -> bool:
    """Return True if the module can be called, unlike `ModuleList` and `ParameterList`."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Return all children, including repetitions, which `children()` skips."""
    return (child for child in module._modules.values() if child is not None)


def _descendants(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)


def _collect_repeated(module: nn.Module, visited: set[int], repeated: list[nn.Module]) -> None:
    """Append the elements of the outermost repeated lists to `repeated`."""
    if id(module) in visited:
        return
    visited.add(id(module))
    elements = _repeated_elements(module)
    repeated.extend(elements)
    if not elements:
        for child in _children(module):
            _collect_repeated(child, visited, repeated)


def _repeated_elements(module: nn.Module) -> list[nn.Module]:
    """Return the elements of a repeated list that can be blocks; empty for other modules."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
        return []
    elements = [element for element in _callable_elements(module) if _has_parameters(element)]
    if isinstance(module, nn.Sequential):
        elements = [element for element in elements if next(_children(element), None) is not None]
    repetitions = Counter(type(element) for element in elements)
    return elements if max(repetitions.values(), default=0) >= 2 else []


def _callable_elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in _children(module):
        if _has_own_forward(child):
            yield child
        else:
            yield from _callable_elements(child)


def _smallest_large(module: nn.Module, min_num_params: int, memo: dict[int, list[nn.Module]]) -> list[nn.Module]:
    """Return the deepest callable modules with at least `min_num_params` parameters in their subtree."""
    if id(module) not in memo:
        memo[id(module)] = []  # Ends the recursion if a module contains itself.
        inner = [large for child in _children(module) for large in _smallest_large(child, min_num_params, memo)]
        qualifies = _has_own_forward(module) and sum(p.numel() for p in module.parameters()) >= min_num_params
        memo[id(module)] = inner or ([module] if qualifies else [])
    return memo[id(module)]


def _explicit(model: nn.Module, blocks: Sequence[object]) -> list[nn.Module]:
    """Return the modules that a user's list names, after checking them."""
    aliases = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[int, str] = {}
    for entry in blocks:
        if isinstance(entry, str):
            if entry not in aliases:
                of_class = next((name for name, module in aliases.items() if type(module).__name__ == entry), None)
                hint = f" It is the class of {of_class!r}: give the class itself, or names of modules."
                raise ValueError(
                    f"`blocks`: no module is called {entry!r}.{hint if of_class else _near(entry, aliases)}"
                )
            chosen.setdefault(id(aliases[entry]), entry)
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            instances = {id(module): name for name, module in model.named_modules() if isinstance(module, entry)}
            if not instances:
                classes = {type(module).__name__ for module in model.modules()}
                raise ValueError(f"`blocks`: no module is a {entry.__name__}.{_near(entry.__name__, classes)}")
            chosen = instances | chosen
        else:
            raise ValueError(f"`blocks`: {entry!r} is neither a module name nor a module class.")
    modules = [aliases[name] for name in chosen.values()]
    for module in modules:
        name = chosen[id(module)]
        inner = next((chosen[id(below)] for below in _descendants(module) if id(below) in chosen), None)
        if inner is not None:
            raise ValueError(f"`blocks`: {inner!r} is inside {name!r}. Give one of the two.")
        if not _has_parameters(module):
            raise ValueError(f"`blocks`: {name!r} ({type(module).__name__}) has no parameters. Remove it.")
        if not _has_own_forward(module):
            raise ValueError(
                f"`blocks`: {name!r} ({type(module).__name__}) has no forward of its own, so it is never called. "
                "Give the modules inside it."
            )
    return modules


def _near(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=5, cutoff=0.4)
    return f" Similar: {', '.join(map(repr, close))}." if close else ""


def _refuse_uninitialized(model: nn.Module) -> None:
    for named in (model.named_parameters(), model.named_buffers()):
        for fqn, tensor in named:
            if is_lazy(tensor):
                raise ValueError(f"{fqn!r} has no shape yet. Run one batch through the model before training starts.")


def _describe_parameter(parameter: nn.Parameter, fqns: Sequence[str]) -> ParameterInfo:
    return ParameterInfo(
        fqn=fqns[0],
        sites=tuple(fqns),
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        nbytes=packed_nbytes(parameter),
        trainable=parameter.requires_grad,
    )


def _is_composite(module: nn.Module, chosen: set[int]) -> bool:
    """Return True if `module` has a library's `forward` that may read its children's weights without calling them."""
    if isinstance(module, nn.Sequential) or next(_children(module), None) is None:
        return False
    defining = (base for base in type(module).__mro__ if base is not nn.Module and "forward" in vars(base))
    opaque = any(base.__module__.startswith(_OPAQUE) for base in defining)
    return opaque and not any(id(inner) in chosen for inner in _descendants(module))


def _assign(
    module: nn.Module, receiver: nn.Module, chosen: set[int], needs: dict[int, set[int]], visited: set[tuple[int, int]]
) -> None:
    """Assign the parameters in `module` to units.

    Args:
        module: Module whose subtree is assigned.
        receiver: Nearest enclosing module that can be called, or the root.
        chosen: Ids of the blocks.
        needs: Result: ids of the parameters of each unit, by id of the unit's module.
        visited: Ids of pairs (`module`, `receiver`) that are done.
    """
    if (id(module), id(receiver)) in visited:
        return
    visited.add((id(module), id(receiver)))
    if id(module) in chosen or _is_composite(module, chosen):
        needs[id(module)] = {id(parameter) for parameter in module.parameters()}
        return
    if _has_own_forward(module):
        receiver = module
    for parameter in module.parameters(recurse=False):
        needs.setdefault(id(receiver), set()).add(id(parameter))
    for child in _children(module):
        _assign(child, receiver, chosen, needs, visited)
