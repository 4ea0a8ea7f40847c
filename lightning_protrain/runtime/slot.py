"""One offloaded parameter, and the places where it is registered."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_protrain.runtime.guard import below_guard
from lightning_protrain.runtime.low_gradients import LowGradient
from lightning_protrain.runtime.twin import Uses


@dataclass(eq=False)
class Site:
    """A place where a parameter is registered: `module._parameters[name]`."""

    module: nn.Module
    name: str

    def exchange(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Puts `new` where `old` is; a place that the user has filled otherwise stays, as in pruning."""
        if self.module._parameters.get(self.name) is not old:
            return
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = new
        else:
            # Classes such as nn.LSTM keep a second list of their weights up to date in __setattr__.
            setattr(self.module, self.name, new)
            if isinstance(self.module, nn.RNNBase):
                # It remembers them a third time, and would move those it finds exchanged to one memory of its own on a
                # GPU (`flatten_parameters`), out of that of the chunk.
                place = self.module._flat_weights_names.index(self.name)
                self.module._flat_weight_refs[place] = weakref.ref(new)


@dataclass(eq=False, slots=True)
class Slot:
    """One offloaded parameter, see [Note: Two parameters].

    Attributes:
        fqn: First fully qualified name.
        host: The user's parameter.
        twin: Its device counterpart.
        offset: Its first byte in the chunk.
        pointer: Address of the host data the chunk knows; another one means that `host.data` was re-pointed.
        read_version: Version of `host` at the latest fetch.
        seen_version: Version of `host` at the latest use.
        twin_version: Version of `twin` that is not yet known to differ from the host.
        copy: What is streamed in place of the host parameter, see [Note: Low precision].
        copied_version: Version of `host` that the copy was made of.
        low_gradient: What may lie in the memory of the copy in its stead, see [Note: Low gradients].
        uses: Looks at the uses of a twin in low precision, see [Note: Low twins].
        hooks: Handles to take off when the plan is removed.
        own_hook: Key of the one hook on `host` that is not the user's.
        mirrored: The user's hooks on `host`, by key, with their handles on `twin`.
        owned: Whether this rank steps it, see [Note: Owners].
        steps_elsewhere: Steps of the rank that owns it since `seen_version`; each moves the version of `host` by one.
    """

    fqn: str
    host: nn.Parameter
    twin: nn.Parameter
    offset: int
    pointer: int = 0
    read_version: int = 0
    seen_version: int = 0
    twin_version: int = 0
    copy: Tensor | None = None
    copied_version: int = -1
    low_gradient: LowGradient | None = None
    uses: Uses | None = None
    hooks: list[Any] = field(default_factory=list)
    own_hook: int = -1
    mirrored: dict[int, Any] = field(default_factory=dict)
    owned: bool = True
    steps_elsewhere: int = 0

    @property
    def version(self) -> int:
        """Changes where the values do."""
        return self.host._version

    def show(self, whole: bool = False) -> nn.Parameter:
        """What its unit should compute with now: the twin, or outside of autocast a weight of full precision.

        Args:
            whole: Whether it must be of full precision in evaluation.

        Raises:
            RuntimeError: It is streamed in low precision, and would be trained outside of autocast.
        """
        if self.copy is None:
            return self.twin
        with below_guard():
            dtype, kind = self.copy.dtype, self.twin.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is dtype
        if casts and not (whole and not torch.is_grad_enabled()):
            return self.twin
        if torch.is_grad_enabled() and self.twin.requires_grad:
            raise RuntimeError(
                f"{self.fqn!r} is streamed in {dtype}, because the step that was traced used it under autocast only, "
                "and is now trained outside of autocast. Make its chunk resident (`num_persistent_chunks`), or call "
                "its block under autocast."
            )
        with below_guard():
            host = self.host.detach()
        return nn.Parameter(host.to(self.twin.device), requires_grad=False)

    @property
    def is_stale(self) -> bool:
        """Whether the copy is another one than that of the host parameter now; who writes the copy says so."""
        return self.copy is not None and self.owned and self.copied_version != self.version

    def renew_copy(self) -> None:
        """Casts the host parameter again; a gradient that lies in the memory of the copy goes elsewhere."""
        assert self.copy is not None
        self.keep_gradient()
        self.copy.copy_(self.host.detach())
        self.copied_version = self.version

    def lend_copy(self, gradient: Tensor) -> LowGradient | None:
        """What stands for a gradient that is to land where the copy lies; None: it cannot."""
        copy = self.copy
        alike = copy is not None and copy.dtype == gradient.dtype and copy.stride() == gradient.stride()
        if copy is None or not alike or gradient.layout != torch.strided:
            return None
        self.keep_gradient()  # Somebody may hold one that was dropped.
        self.copied_version = -1
        self.low_gradient = LowGradient(self.host, copy)
        return self.low_gradient

    def keep_gradient(self) -> None:
        """A gradient that lies in the memory of the copy goes elsewhere."""
        low, self.low_gradient = self.low_gradient, None
        if low is not None and not low.is_given_up:
            low.whole()

    def begin_step(self) -> None:
        """Its gradient is known, and from now on the step may write weight and copy."""
        if self.low_gradient is not None:
            self.low_gradient.begin_step()

    def note_step(self) -> None:
        """After a step, which has written the copy if there was a gradient."""
        if self.host.grad is None:
            if self.is_stale:
                self.renew_copy()
            return
        self.copied_version = self.version
        if self.low_gradient is not None:
            self.low_gradient.give_up()
            self.low_gradient = None

    def forget_gradient(self) -> None:
        """No stand-in for a gradient stays: it is whole, or nothing where the step has been made."""
        self.keep_gradient()
        if isinstance(self.host.grad, LowGradient):
            self.host.grad = None

    def step_elsewhere(self) -> None:
        """Another rank steps it now: here its version tells, as it would of a step of this rank."""
        torch.autograd.graph.increment_version(self.host)
        self.steps_elsewhere += 1

    @property
    def changed_here(self) -> bool:
        """Whether this rank has changed it since it was last used, or pointed it elsewhere."""
        known = self.seen_version + self.steps_elsewhere
        return self.version != known or self.host.data_ptr() != self.pointer

    def drop_gradient(self) -> None:
        """Forgets a gradient of the twin that has not landed."""
        with below_guard():
            self.twin.grad = None

    @property
    def has_user_hooks(self) -> bool:
        """Whether the user has hooks on the gradient of the parameter."""
        host = self.host
        hooks = host._backward_hooks or {}
        return bool(host._post_accumulate_grad_hooks) or any(key != self.own_hook for key in hooks)

    def follow(self) -> None:
        """Brings flags and gradient hooks that the user has set on the host parameter to the twin."""
        host = self.host
        if host.requires_grad is not self.twin.requires_grad:
            self.twin.requires_grad_(host.requires_grad)
        hooks = host._backward_hooks or {}
        wanted = [key for key in hooks if key != self.own_hook]
        if wanted == list(self.mirrored) or not self.twin.requires_grad:
            return
        if self.copy is not None:
            raise RuntimeError(
                f"{self.fqn!r} has a hook on its gradient and is streamed in {self.copy.dtype}, so the hook would see "
                f"another gradient than one of {self.host.dtype}. Hooks that are there when a plan is made have their "
                "weights streamed as they are: register it before fit, and give no Plan that was made without it; or "
                "make its chunk resident (`num_persistent_chunks`)."
            )
        for handle in self.mirrored.values():
            handle.remove()
        self.mirrored = {key: self.twin.register_hook(hooks[key]) for key in wanted}  # They run in this order.
