"""Work that the first run of a process does once; done before the fork, no rank repeats it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from lightning.fabric.utilities.registry import _load_external_callbacks
from lightning.pytorch.trainer.connectors import callback_connector

from lightning_protrain.distributed import rank_sync
from tests.support.parity import CLIPPING
from tests.support.rank_models import Module, strategy_of
from tests.support.ranks import quiet_trainer


@pytest.fixture(scope="package", autouse=True)
def _first_runs() -> Iterator[None]:
    """Import, compile and read what would otherwise take each rank a tenth of a second."""
    environment = dict(os.environ)
    rank_sync._versions()
    # Lightning reads the entry points of all packages for each Trainer.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback_connector, "_load_external_callbacks", cache(_load_external_callbacks))
        # Where there is a GPU, backward starts threads, and who has them cannot be forked.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in () if torch.cuda.is_available() else ("full", "lora"):
                module = Module(kind)
                options = {"strategy": strategy_of("shard", module), "max_steps": 2, **CLIPPING["norm"]}
                quiet_trainer(devices=1, **options).fit(module)
        os.environ.clear()
        os.environ.update(environment)
        yield
