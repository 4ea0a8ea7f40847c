"""What steps under FSDP2 run in: recomputed blocks, evaluation, errors that say what to do, what optimizers hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_protrain.fsdp_state import load_optimizer_parts
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


def release_parameters(optimizers: Sequence[Optimizer], model: nn.Module) -> Callable[[], None]:
    """Take the parameters out of optimizers, which would keep them whole, and return what puts their shards there.

    Args:
        optimizers: They hold parameters of the model; what they keep of them is sharded like them.
        model: It may be sharded before the shards are put there.

    Raises:
        ValueError: An optimizer holds something that is no parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is no parameter "
                    "of the model any more. Make the optimizer in configure_optimizers, from self.parameters()."
                )
    states = [optimizer.state_dict() if optimizer.state else None for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:  # In place: LBFGS has the same list under another name.
            group["params"][:] = [names[id(parameter)] for parameter in group["params"]]

    def put_back() -> None:
        for optimizer, content in zip(optimizers, states, strict=True):
            for group in optimizer.param_groups:
                group["params"][:] = [model.get_parameter(name) for name in group["params"]]
            if content is not None:
                load_optimizer_parts(optimizer, content)

    return put_back


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
