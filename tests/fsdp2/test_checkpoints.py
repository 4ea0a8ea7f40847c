"""A plain Trainer resumes a checkpoint of FSDP2, and the other way round; also evaluation, and a second fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.fsdp2.state_dicts import whole_states
from tests.support.fsdp2 import BOUND, CLIPPED, KINDS, MODELS, RANKS, Trained, largest_difference, train
from tests.support.models import variants
from tests.support.ranks import run_ranks, trainer_on_rank, values

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging")


def resume(rank: int, folder: Path, model: str, pairs: list[tuple[str, str]], plugins: list[Any]) -> dict[Any, float]:
    """Each pair is who saves after one epoch, and who trains the second one."""
    options = {"limit_train_batches": 3, "plugins": plugins, **CLIPPED}
    whole, _ = train(rank, MODELS[model](), KINDS["ddp"], max_epochs=2, **options)
    differences = {}
    for saver, loader in pairs:
        path = folder / f"{saver}-{loader}.ckpt"
        _, trainer = train(rank, MODELS[model](), KINDS[saver], max_epochs=1, **options)
        trainer.save_checkpoint(path)
        module = MODELS[model]()
        trainer = trainer_on_rank(rank, RANKS, KINDS[loader], max_epochs=2, **options)
        torch.manual_seed(rank)
        trainer.fit(module, ckpt_path=path)
        assert trainer.global_step == 6
        weights = whole.weights if loader != "parts" else {}
        names = [name for name, _ in itertools.chain(module.named_parameters(), module.named_modules())]
        resumed = Trained(module.losses, trainer.strategy.lightning_module_state_dict() if weights else {}, names)
        expected = Trained(whole.losses[3:], weights, whole.names)
        differences[saver, loader] = largest_difference(resumed, expected, rank)
    return differences


@pytest.mark.slow
@pytest.mark.parametrize("model", ["frozen", "tied"])
def test_checkpoints_are_those_of_a_plain_trainer(model: str, tmp_path: Path) -> None:
    pairs = [("fsdp2", "ddp"), ("ddp", "fsdp2"), ("fsdp2", "offloaded"), ("parts", "parts")]
    for differences in values(run_ranks(resume, RANKS, tmp_path, tmp_path, model, pairs, [])):
        assert len(differences) == len(pairs)
        assert max(differences.values()) <= BOUND


def test_checkpoints_may_be_folders(tmp_path: Path) -> None:
    plugins = [ProTrainCheckpointIO()]
    for differences in values(run_ranks(resume, RANKS, tmp_path, tmp_path, "full", [("fsdp2", "fsdp2")], plugins)):
        assert max(differences.values()) <= BOUND


def evaluate_and_fit_again(rank: int, folder: Path, kind: Callable[..., Any]) -> list[Tensor]:
    """All losses, in their order; weights are seen in parts whenever nothing runs."""
    module, path = variants()["val"](), folder / f"{kind.func.__name__}.ckpt"
    best = ProTrainCheckpoint(dirpath=path.with_suffix(""), monitor="val_loss", save_top_k=1)
    options = {"limit_train_batches": 2, "limit_val_batches": 2, "enable_checkpointing": True, "callbacks": [best]}
    trainer = trainer_on_rank(rank, RANKS, kind, max_epochs=1, **options)
    trainer.validate(module, verbose=False)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module)
        if epochs == 1:
            trainer.save_checkpoint(path)
        trainer.validate(module, verbose=False)
        if isinstance(module, FSDPModule):
            assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    for saved in (path, "best"):
        trainer.validate(module, ckpt_path=saved, weights_only=True, verbose=False)
    return [*module.losses, *module.val_losses]


def fail_and_fit_again(rank: int, kind: Callable[..., Any]) -> list[Tensor]:
    """Both ranks fail in the middle of the second forward, or backward, and train again."""
    module = variants()["val"]()
    original = module.loss

    def fails(tokens: Tensor, batch_idx: int) -> Tensor:
        loss = original(tokens, batch_idx)
        if batch_idx == 1:
            loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError("the test")))
        return loss

    for replacement in (fails, original):
        module.loss = replacement
        trainer = trainer_on_rank(rank, RANKS, kind, max_epochs=1, limit_train_batches=3, limit_val_batches=0)
        with pytest.raises(KeyError) if replacement is fails else nullcontext():
            trainer.fit(module)
        if isinstance(module, FSDPModule):
            assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
        module.zero_grad(set_to_none=True)
    return module.losses


def fail_with_both(rank: int) -> None:
    ours, theirs = (fail_and_fit_again(rank, kind) for kind in (KINDS["fsdp2"], partial(DDPStrategy)))
    assert len(ours) == len(theirs) == 5
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_it_trains_again_after_a_failure(tmp_path: Path) -> None:
    values(run_ranks(fail_with_both, RANKS, tmp_path))


def evaluate_with_both(rank: int, folder: Path) -> None:
    ours, theirs = (evaluate_and_fit_again(rank, folder, kind) for kind in (KINDS["fsdp2"], partial(DDPStrategy)))
    assert len(ours) == len(theirs) > 10
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_evaluation_and_a_second_fit(tmp_path: Path) -> None:
    values(run_ranks(evaluate_with_both, RANKS, tmp_path, tmp_path))


# --- on another number of ranks ---------------------------------------------------------------------------------------

EPOCH: dict[str, Any] = {"limit_train_batches": 3}


def save_both(rank: int, folder: Path, model: str) -> None:
    """One whole checkpoint, and one in shards, of the same three steps."""
    for kind in ("fsdp2", "parts"):
        _, trainer = train(rank, MODELS[model](), KINDS[kind], max_epochs=1, **EPOCH)
        trainer.save_checkpoint(folder / f"{kind}.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)


def go_on(rank: int, world: int, nodes: int, path: Path, kind: str, model: str) -> tuple[Trained, Any]:
    """Three more steps."""
    module = MODELS[model]()
    trainer = trainer_on_rank(rank, world, KINDS[kind], nodes, max_epochs=2, **EPOCH)
    torch.manual_seed(rank)
    trainer.fit(module, ckpt_path=path)
    assert trainer.global_step == 6
    states = trainer.strategy.optimizer_state(trainer.optimizers[0])
    if kind == "parts":
        weights, states = whole_states(module.state_dict(keep_vars=True), keep=True), None
    else:
        weights = trainer.strategy.lightning_module_state_dict()
    names = [name for name, _ in itertools.chain(module.named_parameters(), module.named_modules())]
    return Trained(module.losses, weights, names), states


def resume_elsewhere(rank: int, folder: Path, model: str, world: int, nodes: int) -> dict[str, float]:
    whole, sharded = folder / "fsdp2.ckpt", folder / "parts.ckpt"
    ours, states = go_on(rank, world, nodes, whole, "fsdp2", model)
    ddp, expected = go_on(rank, world, nodes, whole, "ddp", model)
    if rank == 0:
        assert states["param_groups"] == expected["param_groups"]
        assert states["state"].keys() == expected["state"].keys() != set()
    found = {"ddp": largest_difference(ours, ddp, rank)}
    for kind, path in (("parts", sharded), ("parts", whole), ("fsdp2", sharded), ("offloaded", sharded)):
        theirs, _ = go_on(rank, world, nodes, path, kind, model)
        found[f"{kind} from {path.stem}"] = largest_difference(ours, theirs, rank)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        go_on(rank, world, nodes, folder / "weights.ckpt", "fsdp2", model)
    return found


# By number of ranks and of the nodes that they are on.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world", "nodes"),
    [
        ("full", 1, 1),
        *(pytest.param(model, 4, nodes, marks=pytest.mark.slow) for model, nodes in (("frozen", 1), ("full", 2))),
    ],
)
def test_it_resumes_on_another_number_of_ranks(model: str, world: int, nodes: int, tmp_path: Path) -> None:
    for name in ("saved", "resumed"):
        (tmp_path / name).mkdir()
    values(run_ranks(save_both, RANKS, tmp_path / "saved", tmp_path, model))
    for found in values(run_ranks(resume_elsewhere, world, tmp_path / "resumed", tmp_path, model, world, nodes)):
        # Sums over more than two ranks come in another order.
        assert found.pop("ddp") <= (0.0 if world <= 2 else BOUND)
        assert len(found) == 4
        assert not any(found.values()), found
