"""The optimizer step of offloaded parameters, on the CPU, with the user's own optimizer.

[Note: Host step]
The optimizer holds the host parameters, which are CPU tensors, and its state lives where its parameters live. So the
step is the user's `optimizer.step()`, once and whole, and everything that reads `param_groups` and `state` (schedulers,
checkpoints) sees the user's optimizer. Where the user left the implementation open and the accelerator is a GPU,
PyTorch would take its slowest loop for the host part: for the time of the step the groups are split by device and the
host part takes PyTorch's fused CPU kernel.

What is stepped in that call runs on the main thread, which a launcher may have given one thread for all ranks' sake
(torchrun exports `OMP_NUM_THREADS=1`). The plan counts on as many as the host's worker has: for the time of the step,
and of unscaling before it, the main thread has them, too. It stays on its own cores.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as optim

from lightning_protrain.runtime.blockwise import is_unchanged
from lightning_protrain.runtime.hoststep import hyperparameters

# Adam's two moments in fp32: assumed of optimizers that are not PyTorch's own.
ASSUMED_STATE_BYTES = 8.0
_PROBE_SIZE = 32


def state_bytes_per_element(optimizers: Iterable[Optimizer]) -> float:
    """Bytes of optimizer state for each trained element, averaged over all elements of all optimizers.

    Measured by one step of a copy of each optimizer on a probe of 32 x 32 elements.
    """
    total, elements = 0.0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            numel = sum(parameter.numel() for parameter in group["params"])
            if numel:
                total += numel * _measure(optimizer, group)
                elements += numel
    return total / elements if elements else 0.0


def move_state_beside_parameters(optimizers: Iterable[Optimizer]) -> None:
    """Puts the state of every parameter on that parameter's device; step counters stay where the optimizer put them."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, Tensor):
                continue
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != parameter.device and value.dim() > 0:
                    state[name] = value.to(parameter.device)


def check_one_device(optimizers: Iterable[Optimizer]) -> None:
    """Refuses an optimizer that flattens all its parameters into one vector when they are on two devices.

    Raises:
        ValueError: LBFGS over resident and offloaded parameters.
    """
    for optimizer in optimizers:
        devices = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
        if isinstance(optimizer, LBFGS) and len(devices) > 1:
            raise ValueError(
                "LBFGS works on all parameters as one vector, but the plan keeps some on the device and some in host "
                'memory. Give plan="offload" or plan="resident".'
            )


@contextmanager
def fused_host_step(
    optimizer: Optimizer,
    closure: Callable[[], Any],
    device_type: str,
    stepped: Callable[[], Set[int]] = frozenset,
    threads: int | None = None,
    then: Callable[[], object] = lambda: None,
) -> Iterator[Callable[[], Any]]:
    """Gives the closure for `optimizer.step` that makes it use PyTorch's fused kernel for host parameters.

    The groups are split when the closure has run: only then the gradients are known, and what it changes in the groups
    (a learning rate) is the user's. They are put back when the step has ended, before any hook on it sees them: order
    and indices of parameters, and so `state_dict()`, are always those of the user's groups. Nothing is split where the
    accelerator is the CPU itself, where the user chose an implementation, or where the optimizer has no fused one. See
    [Note: Host step].

    Args:
        optimizer: Whose step follows.
        closure: The user's.
        device_type: Of the accelerator.
        stepped: Called after the closure; gives the identities of parameters that are stepped elsewhere.
        threads: See `on_host_threads`; the closure itself runs on as many as before.
        then: Called when it has stepped, before any hook on it.
    """
    groups, stepping = optimizer.param_groups, ExitStack()

    def put_back() -> None:
        optimizer.param_groups = groups
        stepping.close()

    def end(*_: Any) -> None:
        put_back()
        then()

    def then_split() -> Any:
        stepping.close()  # LBFGS calls the closure again in the middle of its step.
        result = closure()
        elsewhere = stepped()
        if elsewhere:
            rest = ({**group, "params": [p for p in group["params"] if id(p) not in elsewhere]} for group in groups)
            optimizer.param_groups = [group for group in rest if group["params"]]
        if device_type != "cpu":
            optimizer.param_groups = [part for group in optimizer.param_groups for part in _split(group)]
        stepping.enter_context(on_host_threads(optimizer, threads))
        return result

    handle = optimizer.register_step_post_hook(end)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    try:
        yield then_split
    finally:
        handle.remove()
        put_back()


@contextmanager
def on_host_threads(optimizer: Optimizer, threads: int | None) -> Iterator[None]:
    """Within it kernels of this thread use `threads` threads, if the optimizer holds parameters in host memory.

    Args:
        optimizer: Its groups as they are now.
        threads: Those of the host's worker; None: nothing is changed, as where the accelerator is the CPU itself.
    """
    groups = optimizer.param_groups
    if threads is None or not any(one.device.type == "cpu" for group in groups for one in group["params"]):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PartGroups:
    """Groups of some of an optimizer's parameters.

    Args:
        optimizer: Whose groups they are parts of.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    def has(self, parameter: Tensor) -> bool:
        """Whether the optimizer steps `parameter`."""
        return id(parameter) in self._groups

    def of(self, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Groups of `parameters` alone, with the settings that their groups have now: schedulers change them later."""
        found: dict[int, dict[str, Any]] = {}
        for parameter in parameters:
            group = self._groups[id(parameter)]
            if id(group) not in found:
                found[id(group)] = {**hyperparameters(group), "params": []}
            found[id(group)]["params"].append(parameter)
        return list(found.values())


def steps_parameters_alone(optimizer: Optimizer) -> bool:
    """Whether stepping parameters one after the other gives the same bits as stepping all at once.

    True of PyTorch's own optimizers but LBFGS, and of those of bitsandbytes; of others nobody can know.
    """
    if is_unchanged(optimizer):
        return True
    kind = type(optimizer)
    own = kind.__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)
    return own and inspect.isfunction(inspect.unwrap(kind.step)) and not optimizer.defaults.get("differentiable")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is told of its steps, and may look at any weight then."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or optim._global_optimizer_pre_hooks or optim._global_optimizer_post_hooks)


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    open_choice = "fused" in group and group["fused"] is None and not group.get("foreach")
    host = [parameter for parameter in group["params"] if parameter.device.type == "cpu"]
    fusible = open_choice and all(
        parameter.is_floating_point() and not (parameter.grad is not None and parameter.grad.is_sparse)
        for parameter in host
    )
    if not host or not fusible or group.get("differentiable"):
        return [group]
    rest = [parameter for parameter in group["params"] if parameter.device.type != "cpu"]
    parts = [{**group, "params": host, "fused": True}]
    return [*parts, {**group, "params": rest}] if rest else parts


def _measure(optimizer: Optimizer, group: dict[str, Any]) -> float:
    if isinstance(optimizer, LBFGS):
        # Two vectors for each step of its history, the direction, the gradient before and the flat gradient.
        return float(4 * (2 * group["history_size"] + 3))
    # Unwrapped, so that no hook on all optimizers and no profiler takes the probe for a step.
    step = inspect.unwrap(type(optimizer).step)
    if not type(optimizer).__module__.startswith("torch.optim") or not inspect.isfunction(step):
        return ASSUMED_STATE_BYTES
    dtype = next(iter(group["params"])).dtype
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    if type(optimizer) is torch.optim.SparseAdam:
        probe.grad = probe.grad.to_sparse()
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [probe], "fused": None, "foreach": False, "capturable": False}]
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    if type(optimizer) is torch.optim.Adagrad:
        trial.state[probe] = {name: _like(value, probe) for name, value in _any_state(optimizer).items()}
    with torch.no_grad():
        step(trial)
    kept = sum(value.nbytes for value in trial.state[probe].values() if isinstance(value, Tensor) and value.dim() > 0)
    return kept / probe.numel()


def _any_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of some parameter: Adagrad fills it when it is made, so a probe needs the same."""
    return next(iter(optimizer.state.values()), {})


def _like(value: Any, probe: Tensor) -> Any:
    return torch.zeros_like(probe) if isinstance(value, Tensor) and value.dim() > 0 else copy.deepcopy(value)
