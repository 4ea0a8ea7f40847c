"""Splits the optimizer step between device and host; gradient norms and clipping.

Under `shard` a gradient is only on the rank that owns its parameter. So ranks exchange the norm of every parameter that
they own. Each rank then takes the norm of all norms in the order of the parameters. The result is equal on all ranks,
and bitwise the norm that a single rank with all gradients would get.

[Note: Host step]
The optimizer holds the host parameters, which are CPU tensors, and its state lies where its parameters lie. So the step
is the user's `optimizer.step()`, once and whole, and everything that reads `param_groups` and `state` (schedulers,
checkpoints) sees the user's optimizer. If the user chose no implementation and the accelerator is a GPU, PyTorch would
use its slowest loop for host parameters. So the groups are split by device during the step, and the host part uses
PyTorch's fused CPU kernel.

The step runs on the main thread, which a launcher may have restricted to one computing thread (torchrun exports
`OMP_NUM_THREADS=1`). The plan assumes as many threads as the host's worker has. So the main thread uses that number
during the step, and during unscaling before it. It stays on its own cores.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as optim
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.runtime.optim.adam8bit import is_unchanged
from lightning_protrain.runtime.optim.host_step import hyperparameters
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW
from lightning_protrain.runtime.shadow import InPlaceGrad, cast


def total_norm(parameters: Sequence[Tensor], norms: Mapping[int, Tensor]) -> Tensor:
    """Return the norm of all norms, in the order in which `torch.nn.utils.get_total_norm` stacks them.

    Args:
        parameters: Parameters with a gradient or with a norm in `norms`.
        norms: Known norms, by the identity of the parameter.
    """
    # With several dtypes PyTorch's order is that of a hash table.
    groups = _group_tensors_by_device_and_dtype([list(parameters)], with_indices=True)
    ordered = []
    for parameter in (parameters[at] for _, indices in groups.values() for at in indices):
        norm = norms.get(id(parameter))
        if norm is None:
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(cast(parameter.grad))
        ordered.append(norm)
    first = parameters[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in ordered]))


class NormScratch:
    """Host memory in which low-precision gradients are cast for their norms.

    It is kept from gradient to gradient: the first access to fresh memory takes several times as long as the norm. The
    whole gradient is cast at once, not in tiles, so that the norm has the bits of PyTorch's norm of the cast gradient.
    """

    def __init__(self) -> None:
        self._values = torch.empty(0)

    def norm(self, gradient: Tensor) -> Tensor:
        """Return the norm of a gradient in the dtype of its weight, a scalar."""
        low = gradient.arrived() if isinstance(gradient, InPlaceGrad) else gradient
        if low.dtype == gradient.dtype:
            return torch.linalg.vector_norm(low)
        if self._values.numel() < low.numel() or self._values.dtype != gradient.dtype:
            self._values = torch.empty(low.numel(), dtype=gradient.dtype)
        values = self._values.as_strided(low.shape, low.stride())
        return torch.linalg.vector_norm(values.copy_(low))


def take_norms(
    parameters: Sequence[Tensor], norms: dict[int, Tensor], wait: Callable[[], None], scratch: NormScratch
) -> None:
    """Put the norms of gradients that are being downloaded into `norms`, on the host's worker.

    Args:
        parameters: Parameters whose gradients are measured.
        norms: Receives the norms, by the identity of the parameter.
        wait: Waits for the downloads and adds gradients up.
        scratch: Memory for casts, used by one thread at a time.
    """
    with below_guard(), torch.no_grad():
        wait()
        for parameter in parameters:
            if parameter.grad is not None:
                norms[id(parameter)] = scratch.norm(parameter.grad)


def clip_values(parameters: Sequence[Tensor], clip_value: float) -> None:
    """Clip gradient values as `torch.nn.utils.clip_grad_value_` does, but without error if there are no gradients.

    Gradients in the memory of shadow copies are left to their steps, see [Note: Gradients in shadows].
    """
    present = [p for p in parameters if p.grad is not None and not isinstance(p.grad, InPlaceGrad)]
    if present:
        torch.nn.utils.clip_grad_value_(present, clip_value)


def norms_of_owners(
    parameters: Sequence[Tensor],
    shared: Collection[int],
    communicator: Collectives,
    known: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """Return the norms of all gradients that ranks of a node own, by parameter identity; every rank calls it.

    Args:
        parameters: Parameters, identical and in the same order on every rank.
        shared: Identities of the parameters whose gradients are only on their owners.
        communicator: Reaches the other ranks of the node.
        known: Norms that this rank has already computed.
    """
    exchanged = [parameter for parameter in parameters if id(parameter) in shared]
    # Double precision represents a norm of any dtype exactly, and adding the zeros of other ranks changes nothing.
    told = torch.zeros(2, len(exchanged), dtype=torch.float64)
    for at, parameter in enumerate(exchanged):
        if parameter.grad is not None:
            norm = known.get(id(parameter))
            told[0, at] = torch.linalg.vector_norm(parameter.grad) if norm is None else norm
            told[1, at] = 1
    communicator.sum_of_node(told)
    return {id(p): told[0, at].to(p.dtype) for at, p in enumerate(exchanged) if told[1, at]}


def bound_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    known: Mapping[int, Tensor] | None = None,
    later: Collection[int] = (),
    shared: Collection[int] = (),
    communicator: Collectives | None = None,
) -> Tensor | None:
    """Clip the norm of all gradients together, bit for bit as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: Parameters, identical and in the same order on every rank.
        max_norm: Largest norm.
        known: Norms of this rank's gradients, by the identity of the parameter; None: scale all gradients here.
        later: Identities of parameters whose gradients are scaled later, if all gradients have one dtype.
        shared: Identities of the parameters whose gradients are only on their owners, see `norms_of_owners`; the other
            gradients are complete on every rank.
        communicator: Reaches the other ranks, all of which call this function; None: no parameter is shared.

    Returns:
        The factor of the gradients that are scaled later; None: all gradients have been scaled.
    """
    norms = known or {}
    if communicator is not None:
        norms = norms_of_owners(parameters, shared, communicator, norms)
    present = [p for p in parameters if (id(p) in norms if id(p) in shared else p.grad is not None)]
    if known is None or len({parameter.dtype for parameter in present}) != 1:
        if communicator is None:
            torch.nn.utils.clip_grad_norm_(present, max_norm)
        elif present:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm(present, norms))
        return None
    coefficient = torch.clamp(max_norm / (total_norm(present, norms) + 1e-6), max=1.0)
    for parameter in present:
        if id(parameter) not in later and parameter.grad is not None:
            parameter.grad.mul_(coefficient.to(parameter.grad.device))
    return coefficient.cpu()


# Adam's two moments in fp32: assumed of optimizers that are neither PyTorch's nor this package's.
ASSUMED_STATE_BYTES = 8.0
_PROBE_SIZE = 32


def state_bytes_per_element(optimizers: Iterable[Optimizer]) -> float:
    """Return the bytes of optimizer state for each trained element, averaged over all elements of all optimizers.

    For each group, a trial optimizer steps a probe of 32 x 32 elements, and the states that it makes are counted.
    """
    total, elements = 0.0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            numel = sum(parameter.numel() for parameter in group["params"])
            if numel:
                total += numel * _measure(optimizer, group)
                elements += numel
    return total / elements if elements else 0.0


def reserve_states(
    optimizer: Optimizer, bytes_per_element: float, parameters: Collection[Tensor]
) -> list[torch.UntypedStorage]:
    """Allocate the memory of the states that an optimizer's first step will make, in pieces of its parameters' sizes.

    Delete the pieces right before that step, which then takes their place. Otherwise the states of the first step come
    to lie between freed activations, where later activations no longer fit: an H100 reserved 13 % more than it used.

    Args:
        optimizer: Optimizer whose states are reserved; a parameter that has a state already needs no more memory.
        bytes_per_element: Optimizer state for each trained element, bytes.
        parameters: Parameters that stay on the device.
    """
    resident, pieces = {id(parameter) for parameter in parameters}, []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) in resident and parameter not in optimizer.state:
            whole, rest = divmod(ceil(bytes_per_element * parameter.numel()), max(parameter.nbytes, 1))
            sizes = [*[parameter.nbytes] * whole, rest]
            pieces += [torch.UntypedStorage(size, device=parameter.device) for size in sizes if size]
    return pieces


def move_state_beside_parameters(optimizers: Iterable[Optimizer]) -> None:
    """Move the state of every parameter to that parameter's device; step counters stay where the optimizer put them."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, Tensor):
                continue
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != parameter.device and value.dim() > 0:
                    state[name] = value.to(parameter.device)


def check_one_device(optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer that flattens all its parameters into one vector if they are on two devices.

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
    """Yield a closure for `optimizer.step` that makes it use PyTorch's fused kernel for host parameters.

    The groups are split after the user's closure has run, because only then are the gradients known, and because the
    closure may change the groups (a learning rate). The groups are restored when the step has ended, before any step
    hook runs. So user code always sees the user's groups, in the order and with the indices that it gave, and in
    `state_dict()`. Nothing is split if the accelerator is the CPU, if the user chose an implementation, or if the
    optimizer has no fused implementation. See [Note: Host step].

    Args:
        optimizer: Optimizer whose step follows.
        closure: The user's closure.
        device_type: Type of the accelerator.
        stepped: Called after the closure; returns the identities of parameters that are stepped elsewhere.
        threads: Number of threads of the step, see `on_host_threads`; the closure itself runs on the previous number.
        then: Called after the step, before any step hook.
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
    """Let kernels of this thread use `threads` threads, if the optimizer holds parameters in host memory.

    Args:
        optimizer: Optimizer with its present groups.
        threads: Number of threads of the host's worker; None (the accelerator is the CPU): change nothing.
    """
    groups = optimizer.param_groups
    if threads is None or not any(parameter.device.type == "cpu" for group in groups for parameter in group["params"]):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PartGroups:
    """The groups of an optimizer, restricted to some of its parameters.

    Args:
        optimizer: Optimizer that the groups belong to.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    def has(self, parameter: Tensor) -> bool:
        """Return whether the optimizer steps `parameter`."""
        return id(parameter) in self._groups

    def of(self, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return groups of `parameters` alone, with the present settings, which schedulers may change later."""
        groups_by_id: dict[int, dict[str, Any]] = {}
        for parameter in parameters:
            group = self._groups[id(parameter)]
            if id(group) not in groups_by_id:
                groups_by_id[id(group)] = {**hyperparameters(group), "params": []}
            groups_by_id[id(group)]["params"].append(parameter)
        return list(groups_by_id.values())


def steps_parameters_alone(optimizer: Optimizer) -> bool:
    """Return whether stepping parameters one by one gives the same bits as stepping all at once.

    True for PyTorch's own optimizers except LBFGS, for SplitAdamW, and for those of bitsandbytes; unknown, so False,
    for others.
    """
    if type(optimizer) is SplitAdamW or is_unchanged(optimizer):
        return True
    kind = type(optimizer)
    is_of_torch = kind.__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)
    return (
        is_of_torch and inspect.isfunction(inspect.unwrap(kind.step)) and not optimizer.defaults.get("differentiable")
    )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run around the optimizer's steps; they may read any weight."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks or optim._global_optimizer_pre_hooks or optim._global_optimizer_post_hooks)


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
        # Two vectors for each step of the history, the direction, the previous gradient and the flat gradient.
        return float(4 * (2 * group["history_size"] + 3))
    # Unwrapped, so that no global optimizer hook and no profiler sees the probe as a step.
    step = inspect.unwrap(type(optimizer).step)
    known = isinstance(optimizer, SplitAdamW) or type(optimizer).__module__.startswith("torch.optim")
    if not known or not inspect.isfunction(step):
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
        # It makes its states in the constructor, so the probe needs a copy of any of them.
        state: Mapping[str, Any] = next(iter(optimizer.state.values()), {})
        trial.state[probe] = {name: _like(value, probe) for name, value in state.items()}
    with torch.no_grad():
        step(trial)
    nbytes = sum(value.nbytes for value in trial.state[probe].values() if isinstance(value, Tensor) and value.dim() > 0)
    return nbytes / probe.numel()


def _like(value: Any, probe: Tensor) -> Any:
    return torch.zeros_like(probe) if isinstance(value, Tensor) and value.dim() > 0 else copy.deepcopy(value)
