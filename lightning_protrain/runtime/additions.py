"""Nothing is added to a model while its plan is applied: nobody would bring its weights."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle


def refuse_additions(model: nn.Module) -> RemovableHandle:
    """From now on no module with weights that the model does not have is put into it, until the handle is removed.

    What is raised where somebody tries is a ValueError.
    """
    # Weakly: an identity may become that of another module when this one is gone.
    paths = WeakKeyDictionary({module: path for path, module in model.named_modules()})
    parameters = {id(parameter) for parameter in model.parameters()}

    def check(parent: nn.Module, name: str, added: Any) -> None:
        if parent not in paths or not isinstance(added, nn.Module) or added in paths:
            return
        new = next((each for each, value in added.named_parameters() if id(value) not in parameters), None)
        if new is not None:
            path = ".".join(part for part in (paths[parent], name) if part)
            raise ValueError(
                f"{path!r} ({type(added).__name__}, with {new!r}) is added while a plan is applied: it would be in no "
                "chunk and in no optimizer. Add adapters and layers before fit, in `configure_model` or before the "
                "Trainer is called."
            )

    return register_module_module_registration_hook(check)
