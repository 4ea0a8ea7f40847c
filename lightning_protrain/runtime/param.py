"""A user's host parameter, its device parameter, and the places where it is registered.

The 8-bit layer of bitsandbytes keeps codes and scales in an object, `layer.state`, which its autograd function holds
until backward. Like the weight, that object exists twice: `QuantisedLocation` registers the host state at rest, and the
device state, whose tensors lie in the chunk, while the block computes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.quant_state import accept_companions, has_companions, prepare_weights
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.shadow import InPlaceGrad, ShadowWeight


def in_storage(storage: torch.UntypedStorage, offset: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor at byte `offset` of `storage`, a multiple of the itemsize, shaped and strided like `like`."""
    dtype = dtype or like.dtype
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, like.shape, like.stride())


def dense_like(tensor: Tensor) -> Tensor:
    """Return a meta tensor shaped like `tensor`, with its strides if it is dense, else contiguous."""
    if _is_dense(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without holes or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def changed_before_backward(param: OffloadedParam) -> RuntimeError:
    """Return the error for a weight that changed between its forward and its backward, see [Note: Versions]."""
    now, before = param.host._version, param.seen_version
    # Re-pointing `data` moves no version; `seen_version` is -1 if the chunk has already adopted the new memory.
    how = f"version {now}, the forward used {before}" if now > before >= 0 else "`data` is other memory now"
    return RuntimeError(
        f"{param.fqn!r} was changed between a forward and its backward ({how}): the gradient would be wrong. Step "
        "optimizers and change weights after backward."
    )


def refuse_changed_by_others(changed: Sequence[OffloadedParam]) -> None:
    """Refuse changes of shared weights by ranks that do not own them: each rank would apply the change again.

    Args:
        changed: Parameters that have changed since their latest use.

    Raises:
        RuntimeError: This rank has changed a weight that another rank owns.
    """
    for param in changed:
        if not param.owned and param.changed_here:
            raise RuntimeError(
                f"{param.fqn!r} was changed between steps on a rank that does not own it. The ranks of this node share "
                "it: each would change it again, while others read it. Set "
                'sharding="replicate" if callbacks or hooks write to weights.'
            )


@dataclass(eq=False)
class ParamLocation:
    """A place where a parameter is registered: `module._parameters[name]`."""

    module: nn.Module
    name: str

    def exchange(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Register `new` if `old` is registered; what the user has registered instead (pruning) is left alone."""
        if self.module._parameters.get(self.name) is not old:
            return
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = new
        else:
            # Classes such as nn.LSTM keep a second list of their weights up to date in __setattr__.
            setattr(self.module, self.name, new)
            if isinstance(self.module, nn.RNNBase):
                # RNNs keep a third list of weak references. If those were out of date, `flatten_parameters` would move
                # the weights out of the chunk, into one memory of its own on the GPU.
                place = self.module._flat_weights_names.index(self.name)
                self.module._flat_weight_refs[place] = weakref.ref(new)


@dataclass(eq=False, slots=True)
class Ownership:
    """The rank that steps a parameter which the ranks of a node share, see [Note: Owners].

    Attributes:
        here: True if this rank steps the parameter.
        steps_elsewhere: Number of steps since `seen_version`, if another rank owns it. Each step increments the version
            of the host parameter by one.
    """

    here: bool
    steps_elsewhere: int = 0


@dataclass(eq=False, slots=True)
class OffloadedParam:
    """An offloaded parameter, see [Note: Two parameters].

    Attributes:
        fqn: First fully qualified name.
        host: The user's parameter.
        device_param: The device parameter.
        offset: First byte of the parameter in its chunk.
        pointer: Address of the host data that the chunk knows; another address means that `host.data` was re-pointed.
        read_version: Version of `host` at the latest fetch.
        seen_version: Version of `host` at the latest use.
        device_version: Version of `device_param` when its values last equalled the host's.
        shadow: Shadow copy that is streamed in place of the host parameter; None: there is none.
        ownership: The rank that steps it, see [Note: Owners]; None: every rank steps its own.
        hooks: Handles of hooks to remove with the plan.
        own_hook: Key of the runtime's own gradient hook on `host`; all other hooks are the user's.
        mirrored: Handles of the user's hooks, registered on `device_param`, by their keys on `host`.
    """

    fqn: str
    host: nn.Parameter
    device_param: nn.Parameter
    offset: int
    pointer: int = 0
    read_version: int = 0
    seen_version: int = 0
    device_version: int = 0
    shadow: ShadowWeight | None = None
    ownership: Ownership | None = None
    hooks: list[Any] = field(default_factory=list)
    own_hook: int = -1
    mirrored: dict[int, Any] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Version of the host parameter; it changes when the values do."""
        return self.host._version

    def show(self, whole: bool = False) -> nn.Parameter:
        """Return the parameter its block should compute with: the device parameter, or the full-precision weight.

        The full-precision weight stands in for a shadow copy outside of autocast.

        Args:
            whole: Whether evaluation needs full precision even under autocast.

        Raises:
            RuntimeError: The parameter is streamed in low precision and would be trained outside of autocast.
        """
        if self.shadow is None:
            return self.device_param
        uses = self.shadow.uses
        if uses.is_cast and not (whole and not torch.is_grad_enabled()):
            return self.device_param
        if torch.is_grad_enabled() and self.device_param.requires_grad:
            raise RuntimeError(
                f"{self.fqn!r} is streamed in {uses.dtype}, because the step that was traced used it under autocast "
                "only, and is now trained outside of autocast. Make its chunk resident (`num_persistent_chunks`), or "
                "call its block under autocast."
            )
        with below_guard():
            host = self.host.detach()
        return nn.Parameter(host.to(uses.device), requires_grad=False)

    @property
    def owned(self) -> bool:
        """True if this rank steps the parameter."""
        return self.ownership is None or self.ownership.here

    def begin_step(self) -> None:
        """Begin a step when the gradient is known; from now on the step may write the weight and its shadow copy."""
        if self.shadow is not None:
            self.shadow.begin_step()
        if self.passing is not None:
            self.passing.begin_step()

    def end_step(self) -> None:
        """End a step, which has written the shadow copy if there was a gradient; give up a gradient in passing."""
        if self.shadow is not None:
            self.shadow.end_step()
        elif self.passing is not None:
            self.passing.give_up()

    @property
    def passing(self) -> InPlaceGrad | None:
        """Gradient that the step gives up, see [Note: Gradients in passing]; None: there is none."""
        with below_guard():
            gradient = self.host.grad if self.shadow is None else None
        return gradient if isinstance(gradient, InPlaceGrad) else None

    def receive_in_passing(self, values: Tensor, wait: Callable[[], None]) -> None:
        """Set `grad` to a gradient that is being downloaded to `values`, and that the step gives up."""
        self.host.grad = gradient = InPlaceGrad(self.host, values)
        gradient.downloads(wait)

    def forget_passing(self) -> None:
        """Leave no stand-in in `grad`: replace it by the gradient, or by None if the step has been made."""
        passing = self.passing
        if passing is not None and passing.is_given_up:
            self.host.grad = None
        elif passing is not None:
            passing.whole()

    def note_seen(self) -> None:
        """Note that a device is about to use the current values."""
        self.seen_version = self.version
        if self.ownership is not None:
            self.ownership.steps_elsewhere = 0

    def step_elsewhere(self) -> None:
        """Note that another rank, the owner, steps the weight: increment its version here as a step would."""
        assert self.ownership is not None
        torch.autograd.graph.increment_version(self.host)
        self.ownership.steps_elsewhere += 1

    @property
    def changed_here(self) -> bool:
        """True if this rank has written to or re-pointed the weight since its latest use."""
        known = self.seen_version + (self.ownership.steps_elsewhere if self.ownership is not None else 0)
        return self.version != known or self.host.data_ptr() != self.pointer

    def drop_gradient(self) -> None:
        """Forget a gradient of the device parameter that has not been downloaded."""
        with below_guard():
            self.device_param.grad = None

    @property
    def has_user_hooks(self) -> bool:
        """True if the user has registered hooks on the gradient of the parameter."""
        host = self.host
        hooks = host._backward_hooks or {}
        return bool(host._post_accumulate_grad_hooks) or any(key != self.own_hook for key in hooks)

    def follow(self) -> None:
        """Copy flags and gradient hooks that the user has set on the host parameter to the device parameter."""
        host = self.host
        if host.requires_grad is not self.device_param.requires_grad:
            self.device_param.requires_grad_(host.requires_grad)
        hooks = host._backward_hooks or {}
        wanted = [key for key in hooks if key != self.own_hook]
        if wanted == list(self.mirrored) or not self.device_param.requires_grad:
            return
        if self.shadow is not None:
            raise RuntimeError(
                f"{self.fqn!r} has a gradient hook and is streamed in {self.shadow.values.dtype}, so the hook "
                f"would get a gradient of another dtype than {self.host.dtype}. Register the hook before fit, so that "
                "the plan streams the weight as it is, and give no Plan that was made "
                "without it; or make its chunk resident (`num_persistent_chunks`)."
            )
        for handle in self.mirrored.values():
            handle.remove()
        # Register the hooks in the user's order.
        self.mirrored = {key: self.device_param.register_hook(hooks[key]) for key in wanted}


# Flag of a layer that repacks its weight into memory of its own, for a CPU kernel that only evaluates.
_REPACKS = "support_avx512bf16_for_cpu"


@dataclass(eq=False)
class QuantisedLocation(ParamLocation):
    """A place where a weight with quantisation state is registered.

    Exchanging the parameter exchanges the layer's state as well, see the module docstring.

    Attributes:
        host: The user's parameter.
    """

    host: nn.Parameter = field(kw_only=True)
    _of_host: dict[str, Any] = field(init=False, default_factory=dict)
    _of_device: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Keep the layer's present state as the host state, and copy it for the device."""
        prepare_weights(self.module)
        attributes = vars(self.module)
        if "CB" in vars(self.host) and "state" in attributes:
            self._of_device["state"] = copy.copy(attributes["state"])
        if _REPACKS in attributes:
            self._of_device[_REPACKS] = False
        self._of_host = {name: attributes[name] for name in self._of_device}

    def exchange(self, old: nn.Parameter, new: nn.Parameter) -> None:
        held = self.module._parameters.get(self.name)
        if held is not None and held is not old:
            # PEFT reads such a weight and registers another parameter over the same memory.
            with below_guard():  # Otherwise every read would pass the class of the weight, which is slow.
                old = held if held.untyped_storage()._cdata == old.untyped_storage()._cdata else old
        super().exchange(old, new)
        if self.module._parameters.get(self.name) is new:
            vars(self.module).update(self._of_host if new is self.host else self._of_device)


def locations_of(
    model: nn.Module, layout: ModelLayout, params: dict[int, OffloadedParam]
) -> dict[str, list[tuple[ParamLocation, OffloadedParam]]]:
    """Return every place where an offloaded parameter is registered, by the innermost unit around it that needs it."""
    parameters = {unit.name: unit.parameters for unit in layout.units}
    by_owner: dict[str, list[tuple[ParamLocation, OffloadedParam]]] = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        around = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
        for name, parameter in module._parameters.items():
            param = params.get(id(parameter))
            if param is None:
                continue
            owner = next((unit for unit in around if param.fqn in parameters.get(unit, ())), None)
            assert owner is not None, f"{param.fqn} is registered in {path!r} outside every unit that needs it"
            location = ParamLocation(module, name)
            if has_companions(param.host):
                param.hooks.append(accept_companions(module))
                location = QuantisedLocation(module, name, host=param.host)
            by_owner.setdefault(owner, []).append((location, param))
    return by_owner
