"""What steps under FSDP2 run in: recomputed blocks, evaluation, errors that say what to do, what optimizers hold."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_protrain.runtime.recompute import checkpoint


def let_recompute(module: nn.Module, name: str) -> Callable[[], None]:
    """Lets `module` recompute its activations, inside of all its hooks; returns what undoes it."""
    own, forward = module.__dict__.get("forward"), module.forward

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, args, kwargs, module, name)

    def undo() -> None:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own

    module.__dict__["forward"] = recomputing
    return undo


def point_to_parts(
    optimizers: Sequence[Optimizer], model: nn.Module, known: list[tuple[weakref.ref[nn.Parameter], str]]
) -> None:
    """Optimizers that were made before the model was sharded get the parts of what they hold.

    Raises:
        ValueError: One holds something that is no parameter of the model.
    """
    present = {id(parameter) for parameter in model.parameters()}
    names = {id(parameter): name for reference, name in known if (parameter := reference()) is not None}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in present:
                    continue
                if id(parameter) not in names:
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is no "
                        "parameter of the model any more. Make the optimizer in configure_optimizers, from "
                        "self.parameters()."
                    )
                group["params"][index] = model.get_parameter(names[id(parameter)])


@contextmanager
def evaluating() -> Generator[None, None, None]:
    """Buffers that are gathered here serve training later: they must not be inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def explained() -> Generator[None, None, None]:
    """Says of an error that no user of FSDP2 can be expected to read what it means."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            "A weight was used while it was not gathered: some module reads the weight of another one instead of "
            "calling it, or calls its `forward` directly. Call the module itself, or give policy='none' or a larger "
            "min_num_params."
        ) from error


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Weights are sent in the dtype that autocast computes in; gradients are reduced in that of the weights."""
    if precision != "bf16-mixed":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # Autocast casts what it is given; targets and the like keep their dtype.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
