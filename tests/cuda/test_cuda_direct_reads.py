"""On a GPU, a step reads streamed weights without calling their modules; on the CPU the host parameters answer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_protrain import CausalLMModule
from lightning_protrain.device.device import StreamDevice
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.cuda.marks import CUDA
from tests.support.gpus import DEVICE, STAND_IN
from tests.support.models import HIDDEN, QUIET, VOCABULARY, Mlp, ParityModule, ValidationModule, fit

pytestmark = CUDA


class Reading(nn.Module):
    """Embeds tokens and, beside that, reads the weights of two modules that it does not call for it."""

    def __init__(self, read: Callable[[Reading, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.read = read

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.read(self, hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def resized(model: Reading, hidden: Tensor) -> Tensor:
    table = F.interpolate(model.positions.weight.t()[None], size=hidden.shape[1], mode="linear")[0]
    return table.t()


def without_gradients(model: Reading, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return hidden + model.positions.weight[3] + F.linear(hidden, model.positions.weight[:HIDDEN])


READS: dict[str, Callable[[Reading, Tensor], Tensor]] = {
    "one row": lambda model, hidden: model.positions.weight[3],
    "rows by a tensor": lambda model, hidden: model.positions.weight[torch.arange(hidden.shape[1]).to(hidden.device)],
    "as a table": resized,
    "with other tensors": lambda model, hidden: F.linear(hidden, model.positions.weight[:HIDDEN]),
    "in a list": lambda model, hidden: torch.stack([hidden[0, 0], model.positions.weight[1]]).mean(0),
    "in another type": lambda model, hidden: model.positions.weight.to(torch.float64).mean().to(hidden.dtype),
    "its place": lambda model, hidden: (
        torch.ones(HIDDEN).to(model.positions.weight.device)
        * model.positions(torch.zeros(1, dtype=torch.int64).to(next(model.parameters()).device))
    ),
    "of its block": lambda model, hidden: hidden * model.blocks[0](hidden).mean(),
    "without gradients": lambda model, hidden: without_gradients(model, hidden),
    "into another tensor": lambda model, hidden: torch.zeros_like(hidden).add_(model.positions.weight[0]),
    "in a checkpoint": lambda model, hidden: checkpoint(
        lambda given: (given * model.positions.weight[3]).relu(), hidden, use_reentrant=False
    ),
    "a penalty": lambda model, hidden: sum(weight.square().mean() for weight in model.positions.parameters()),
}


def trained(read: Callable[[Reading, Tensor], Tensor], **options: Any) -> ParityModule:
    torch.manual_seed(0)
    module = ValidationModule(Reading(read), optimizer="sgd")
    fit(module, **{"accelerator": DEVICE, "devices": 1, "limit_train_batches": 4, "limit_val_batches": 1, **options})
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", READS)
def test_training_is_plain_training(name: str, precision: Any) -> None:
    expected = trained(READS[name], precision=precision)
    found = trained(READS[name], precision=precision, strategy=ProTrainStrategy(plan="offload"))
    close = {"rtol": 1e-4, "atol": 1e-5} if precision == "32-true" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found.losses, expected.losses, **close)
    for (key, value), other in zip(expected.state_dict().items(), found.state_dict().values(), strict=True):
        torch.testing.assert_close(other, value, **close, msg=lambda text, key=key: f"{key}: {text}")


def test_a_weight_is_itself_again_after_the_step() -> None:
    found = trained(READS["one row"], strategy=ProTrainStrategy(plan="offload"))
    weight = found.network.positions.weight
    assert type(weight) is nn.Parameter
    assert weight.device.type == "cpu"


def written(model: Reading, hidden: Tensor) -> Tensor:
    table = model.positions.weight
    with torch.no_grad():
        table[0] = 5.0
        table.data[1] = 6.0
        table[torch.tensor([2], device=hidden.device)] = torch.full((1, HIDDEN), 7.0, device=hidden.device)
        torch.detach(table)[3].fill_(8.0)
    return hidden * 0


def test_writes_go_to_the_host() -> None:
    plain = trained(written)
    found = trained(written, strategy=ProTrainStrategy(plan="offload"))
    assert found.network.positions.weight[:4, 0].tolist() == [5.0, 6.0, 7.0, 8.0]
    torch.testing.assert_close(found.network.positions.weight, plain.network.positions.weight.cpu())


@pytest.mark.usefixtures("plants_races")
@pytest.mark.skipif(not STAND_IN, reason="a GPU checks no order")
def test_writes_wait_for_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamDevice, "settle", lambda device: None)
    with pytest.raises(RuntimeError, match="Race: the host writes"):
        trained(written, strategy=ProTrainStrategy(plan="offload"))


@pytest.mark.skipif(DEVICE == "cpu", reason="on the CPU a part is a part of the weight")
def test_a_write_that_would_be_lost_is_refused() -> None:
    def lost(model: Reading, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            model.positions.weight[0].fill_(5.0)
        return hidden * 0

    with pytest.raises(RuntimeError, match="is streamed, and a part of it was changed"):
        trained(lost, strategy=ProTrainStrategy(plan="offload"))


def test_what_belongs_to_the_weight_reaches_it() -> None:
    def use(model: Reading, hidden: Tensor) -> Tensor:
        weight = model.positions.weight
        weight.requires_grad = True
        weight.requires_grad_(True)
        assert copy.deepcopy(weight).shape == copy.deepcopy(model.positions).weight.shape == weight.shape
        assert len(weight) == VOCABULARY
        return hidden * 0

    found = trained(use, strategy=ProTrainStrategy(plan="offload"))
    assert found.network.positions.weight.requires_grad


class Penalised(ParityModule):
    """Adds penalties over all weights to the loss, and computes a part of it without gradients."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        flat = torch.cat([weight.view(-1) for weight in self.parameters()])
        return loss + 1e-3 * flat.norm(1) + 1e-3 * torch.stack([each.norm() for each in self.parameters()]).sum()


def test_a_penalty_over_all_weights() -> None:
    modules = []
    for strategy in ("auto", ProTrainStrategy(plan="offload")):
        torch.manual_seed(0)
        modules.append(Penalised(Reading(READS["one row"]), optimizer="sgd"))
        fit(modules[-1], accelerator=DEVICE, devices=1, strategy=strategy, limit_train_batches=4)
    found = [loss.cpu() for loss in modules[1].losses]
    torch.testing.assert_close(found, [loss.cpu() for loss in modules[0].losses], rtol=1e-4, atol=1e-5)


class Peeking(Mlp):
    """A block that reads a weight of the model around it."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.tables = [table]  # Not a child.

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + self.tables[0].weight[2])


@pytest.mark.parametrize("plan", ["offload", "resident"])
def test_a_recomputation_reads_as_the_forward_did(plan: str) -> None:
    modules = []
    for strategy in ("auto", ProTrainStrategy(plan=plan)):
        torch.manual_seed(0)
        model = Reading(lambda model, hidden: hidden * 0)
        model.blocks = nn.ModuleList(Peeking(model.positions) for _ in range(3))
        modules.append(ParityModule(model, optimizer="sgd"))
        fit(modules[-1], accelerator=DEVICE, devices=1, strategy=strategy, limit_train_batches=4)
    torch.testing.assert_close(modules[1].losses, modules[0].losses, rtol=1e-4, atol=1e-5)


class CheckpointsItself(nn.Module):
    """A block that recomputes a part of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(checkpoint(lambda given: self.first(given).relu(), hidden, use_reentrant=False))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("plan", ["offload", "auto"])
def test_a_block_that_recomputes_a_part_of_itself(plan: Any, precision: Any) -> None:
    modules = []
    for strategy in ("auto", ProTrainStrategy(plan=plan, device_memory="1MiB")):
        torch.manual_seed(0)
        blocks = [CheckpointsItself() for _ in range(4)]
        network = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Sequential(*blocks), nn.Linear(HIDDEN, VOCABULARY))
        modules.append(ParityModule(network, optimizer="sgd"))
        how = {"devices": 1, "precision": precision, "limit_train_batches": 4}
        fit(modules[-1], accelerator=DEVICE, strategy=strategy, **how)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision == "32-true" else {"rtol": 5e-3, "atol": 5e-3}
    torch.testing.assert_close(modules[1].losses, modules[0].losses, **tolerance)


class Speaking(L.Callback):
    """Uses the model outside of steps: generates, calls it, and copies it."""

    def __init__(self) -> None:
        self.said: list[list[int]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        prompt = torch.arange(5, device=pl_module.device)[None]
        for model in (pl_module, pl_module.model, copy.deepcopy(pl_module).to(pl_module.device)):
            self.said.append(model.generate(prompt, max_new_tokens=4)[0].tolist())
        with torch.no_grad():
            assert pl_module(input_ids=prompt).logits.device == pl_module.device


def test_callbacks_generate_as_in_a_plain_run() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    said = []
    for strategy in ("auto", ProTrainStrategy(plan="offload")):
        torch.manual_seed(0)
        module = CausalLMModule(config={"model_type": "llama", "num_attention_heads": 2, **sizes})
        module.configure_model()  # On the host: a GPU draws other weights.
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(VOCABULARY, (4, 8))]
        speaking = Speaking()
        trainer = L.Trainer(
            accelerator=DEVICE, devices=1, max_epochs=1, strategy=strategy, callbacks=[speaking], **QUIET
        )
        trainer.fit(module, DataLoader(rows, 2))
        said.append(speaking.said)
        assert "generate" not in vars(module.model)
    assert said[0] == said[1]
    assert said[0][0] == said[0][1] == said[0][2]
