"""A model that FSDP2 cannot train is refused with names and a way out, before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from lightning_protrain import ProTrainCheckpoint, SplitAdamW
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.fsdp2.refusals import fuse_host_steps, refuse_optimizers, refuse_run
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from tests.support.fsdp2 import RANKS, SMALL, Flat, Uneven, train
from tests.support.models import HIDDEN, VOCABULARY, ParityModule, variants, zoo
from tests.support.ranks import run_ranks, values

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "layers"}, "policy='layers'"),
        ({"policy": None}, "policy=None"),
        ({"min_num_params": 0}, "min_num_params=0"),
        ({"min_num_params": 1e8}, "min_num_params=100000000.0"),
        ({"min_num_params": True}, "min_num_params=True"),
        ({"activation_checkpointing": -1}, "activation_checkpointing=-1"),
        ({"activation_checkpointing": 1.5}, "activation_checkpointing=1.5"),
        ({"activation_checkpointing": "some"}, 'activation_checkpointing=\'some\': give "auto", "all" or True'),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "sharding_strategy='SHARD_GRAD_OP': give one of 'auto'"),
        ({"device_mesh": 4}, "device_mesh=4: give two positive numbers"),
        ({"device_mesh": (2,)}, "device_mesh=.2,.: give two positive numbers"),
        ({"device_mesh": (2, 0)}, "device_mesh=.2, 0.: give two positive numbers"),
        ({"device_mesh": (1, 2), "sharding_strategy": "FULL_SHARD"}, "Give one of the two"),
        ({"cpu_offload": True, "process_group_backend": "nccl"}, "'nccl' cannot send host tensors"),
        ({"device_memory": "much"}, "device_memory='much' is not an amount of memory"),
        ({"cpu_offload": "yes"}, "cpu_offload='yes'"),
        ({"sync_each_batch": None}, "sync_each_batch=None"),
        ({"save_distributed_checkpoint": 0}, "save_distributed_checkpoint=0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProTrainFSDP2Strategy(**arguments)


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
def test_precision_is_checked(precision: Any) -> None:
    with pytest.raises((ValueError, ModuleNotFoundError), match=r"64-true.*is not supported|transformer_engine"):
        L.Trainer(strategy="protrain_fsdp2", accelerator="cpu", devices=1, precision=precision, logger=False)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)


class ReadsWeights(nn.Module):
    """A layer whose weight is used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens), self.head.weight)


def with_part(part: nn.Module) -> ParityModule:
    module = variants()["val"]()
    module.network.part = part
    return module


def sharded_by_hand() -> ParityModule:
    module = variants()["val"]()
    for block in module.network.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def own_checkpointing() -> ParityModule:
    module = zoo()["tied"]()
    module.network.gradient_checkpointing_enable()
    return module


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "automatic_optimization=False": (variants()["multi_optimizer"], {}, {}),
    "EMAWeightAveraging keeps": (variants()["val"], {}, {"callbacks": [EMAWeightAveraging()]}),
    "sync_batchnorm=True is not supported": (variants()["val"], {}, {"sync_batchnorm": True}),
    "SavePretrained needs whole weights": (variants()["val"], {}, {"callbacks": [SavePretrained("never")]}),
    "ParityModule has no nn.ModuleList": (lambda: ParityModule(Uneven()), {}, {}),
    "has no repeated list of blocks": (Flat, {"policy": "none", "activation_checkpointing": True}, {}),
    "'network.part.factor' has no dimension": (lambda: with_part(Scalar()), {}, {}),
    "'network.part.weight' has quantised values": (lambda: with_part(Quantised()), {}, {}),
    "are trained in one FSDP unit": (lambda: with_part(nn.Linear(2, 2).bfloat16()), {}, {}),
    "'network.blocks.0' is sharded already": (sharded_by_hand, {}, {}),
    "Gradient checkpointing is switched on": (own_checkpointing, {"activation_checkpointing": True}, {}),
}


def refusals(rank: int) -> dict[str, tuple[str, bool]]:
    found = {}
    for message, (build, arguments, options) in REFUSED.items():
        module = build()
        with pytest.raises(ValueError) as caught:
            train(rank, module, partial(ProTrainFSDP2Strategy, **arguments), **options)
        found[message] = str(caught.value), isinstance(module, FSDPModule)
    return found


def test_what_cannot_be_sharded_is_refused_before_it_is(tmp_path: Path) -> None:
    for found in values(run_ranks(refusals, RANKS, tmp_path)):
        for message, (text, sharded) in found.items():
            assert message in text
            assert not sharded


def test_a_callback_that_writes_whole_checkpoints_is_refused_if_shards_are_saved(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", callbacks=[ProTrainCheckpoint(tmp_path)], logger=False)
    refuse_run(trainer, variants()["val"](), sync_batchnorm=False, saves_shards=False)
    with pytest.raises(ValueError, match="ProTrainCheckpoint writes whole checkpoints"):
        refuse_run(trainer, variants()["val"](), sync_batchnorm=False, saves_shards=True)


class Derived(bnb.optim.AdamW8bit):
    pass


@pytest.mark.parametrize("kind", [bnb.optim.AdamW8bit, bnb.optim.Lion, Derived])
def test_an_optimizer_that_steps_whole_tensors_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.__name__} is an optimizer of bitsandbytes.*torch\.optim\.AdamW"):
        refuse_optimizers([torch.optim.AdamW([nn.Parameter(torch.ones(1))]), kind([nn.Parameter(torch.ones(1))])])


def test_an_optimizer_with_masters_beside_its_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^SplitAdamW keeps float32 masters beside .*torch\.optim\.AdamW"):
        refuse_optimizers([SplitAdamW([nn.Parameter(torch.ones(1))])])


def test_an_optimizer_that_steps_on_a_gpu_alone_is_refused_where_shards_are_on_the_host() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], capturable=True)
    refuse_optimizers([optimizer])
    with pytest.raises(ValueError, match=r"^AdamW has capturable=True.*Remove one of the two"):
        refuse_optimizers([optimizer], cpu_offload=True)


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (partial(torch.optim.AdamW), True),
        (partial(torch.optim.SGD, lr=0.1), True),
        (partial(torch.optim.AdamW, fused=False), False),
        (partial(torch.optim.AdamW, foreach=True), None),
        (partial(torch.optim.NAdam), None),
    ],
)
def test_shards_on_the_host_are_stepped_by_the_fused_kernel_unless_the_user_chose(
    make: Any, fused: bool | None
) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    fuse_host_steps([optimizer])
    assert optimizer.param_groups[0].get("fused") is fused
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight[0] < 1


def different_models(rank: int) -> None:
    module = variants()["val"]()
    if rank == 1:
        module.network.norm.requires_grad_(False)
    train(rank, module, ProTrainFSDP2Strategy)


def weights_that_are_read(rank: int) -> None:
    module = ParityModule(ReadsWeights())
    train(rank, module, partial(ProTrainFSDP2Strategy, policy="size", min_num_params=SMALL - 100))


def test_different_models_are_named_on_all_ranks(tmp_path: Path) -> None:
    for outcome in run_ranks(different_models, RANKS, tmp_path):
        assert outcome.error is not None
        assert outcome.error.startswith("ValueError: The ranks have different models (")
        assert "network.norm" in outcome.error


def test_a_weight_that_is_read_and_not_called_is_explained(tmp_path: Path) -> None:
    for outcome in run_ranks(weights_that_are_read, RANKS, tmp_path):
        assert outcome.error is not None
        assert "A weight was used while it was not gathered" in outcome.error
