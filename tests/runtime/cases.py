"""Modules and steps that make streaming hard, each with one trait, for tests that compare with a plain run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.applied import WIDTH, Block, Net, mean_square


class InPlace(Block):
    """Changes its input and returns it."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += torch.sin(self.up(hidden.clone()))[:, :WIDTH]
        return hidden


class InPlaceNet(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inp(hidden)
        for block in self.blocks:
            hidden = block(hidden.clone())
        return self.head(hidden)


class WithAux(Block):
    """Returns a second value and keeps a third one to itself."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.kept = self.up(hidden).square().mean()
        return super().forward(hidden), self.down(self.up(hidden)).mean()


class AuxNet(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden, aux = self.inp(hidden), torch.zeros(())
        for block in self.blocks:
            hidden, value = block(hidden)
            aux = aux + value + block.kept
        return self.head(hidden) + aux


class Container(nn.Module):
    """Has parameters of its own around blocks, which it uses before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.scale


class Nested(nn.Module):
    """The root has parameters of its own, and so has the container inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self.container = Container()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.container(hidden + self.bias) + self.bias)


class Passing(Container):
    """Returns what its last block returns: the call inside and the call around it have one output."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class NestedPassing(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.container = Passing()


class Reentrant(Block):
    """Checkpoints a part of itself in the way that runs a backward inside the backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.up(x)), hidden, use_reentrant=True)
        return hidden + self.down(inner)


class Attention(nn.Module):
    """A library's composite, which reads its children's weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.unsqueeze(0)).squeeze(0)


class Clamped(Block):
    """Changes its own weight in every forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(hidden)


class Normed(Net):
    """An embedding that normalises the rows it is asked for, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH, max_norm=0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + self.table(torch.tensor([0, 1, 1, 4])))


class Parametrised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)


class Tied(Net):
    """Block 2 shares a weight with block 0, the head with the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].down.weight = self.blocks[0].down.weight
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.inp.weight

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inp(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


def half_frozen() -> nn.Module:
    model = Net()
    for module in (model.inp, model.blocks[0], model.blocks[2], model.blocks[3].norm):
        module.requires_grad_(False)
    return model


def through(*order: int) -> Callable[[nn.Module, Tensor, int], Tensor]:
    """A step that runs these blocks, in this order."""

    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        hidden = model.inp(batch)
        for at in order:
            hidden = model.blocks[at](hidden)
        return model.head(hidden).square().mean()

    return step


def changing_order(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    return through(*((0, 1, 2, 3), (3, 1, 0, 2), (2, 3), (0, 1, 2, 3))[index % 4])(model, batch, index)


def skipping(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    return through(*((0, 3) if index % 2 else (0, 1, 2, 3)))(model, batch, index)


def unused(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    """Runs blocks whose outputs take no part in the loss."""
    hidden = model.inp(batch)
    for block in model.blocks[:3]:
        block(hidden)
        hidden = model.blocks[3](hidden)
    return model.head(hidden).square().mean()


def twice_backward(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    loss = mean_square(model, batch, index)
    loss.backward(retain_graph=True)
    return loss


def two_losses(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    """A backward inside the step; the second loss comes from blocks that the first has used, too."""
    hidden = model.blocks[0](model.inp(batch))
    first = model.blocks[1](hidden).square().mean()
    first.backward(retain_graph=True)
    return model.head(model.blocks[2](hidden)).square().mean()


def two_forwards(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    return mean_square(model, batch, index) + mean_square(model, batch.flip(0), index)


def without_gradients_first(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        target = model(batch.flip(0))
    return (model(batch) - target).square().mean()


def unfreezing(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    model.blocks[1].requires_grad_(index >= 2)
    model.head.bias.requires_grad_(index < 2)
    return mean_square(model, batch, index)


def scaling(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    """Changes weights right before they are used, when they may have been fetched ahead already."""
    hidden = model.inp(batch)
    for block in model.blocks:
        with torch.no_grad():
            block.up.weight.mul_(0.9)
        hidden = block(hidden)
    return model.head(hidden).square().mean()


def changing_outputs(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    hidden = model.inp(batch)
    for block in model.blocks:
        hidden = block(hidden.clone())
        hidden += 1
    return model.head(hidden).square().mean()


def sometimes_none(model: nn.Module, batch: Tensor, index: int) -> Tensor | None:
    loss = mean_square(model, batch, index)
    return None if index == 1 else loss


Case = tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": (Net, mean_square, {}),
    "accumulation": (Net, mean_square, {"accumulate": 2}),
    "frozen": (half_frozen, mean_square, {"accumulate": 2}),
    "tied": (Tied, mean_square, {}),
    "nested": (Nested, mean_square, {"accumulate": 2}),
    "nested, one output": (NestedPassing, mean_square, {}),
    "reused": (Net, through(0, 1, 1, 3, 1), {}),
    "skipping": (Net, skipping, {}),
    "changing order": (Net, changing_order, {"accumulate": 2}),
    "unused": (Net, unused, {}),
    "two outputs": (lambda: AuxNet([WithAux() for _ in range(3)]), mean_square, {}),
    "two backwards": (Net, twice_backward, {}),
    "two losses": (Net, two_losses, {}),
    "two forwards": (Net, two_forwards, {}),
    "no gradients first": (Net, without_gradients_first, {}),
    "unfreezing": (Net, unfreezing, {}),
    "weights change in the step": (Net, scaling, {}),
    "outputs change in place": (Net, changing_outputs, {}),
    "no loss": (Net, sometimes_none, {"accumulate": 2}),
    "reentrant": (lambda: Net([Reentrant() for _ in range(3)]), mean_square, {}),
    "attention": (lambda: Net([Attention() for _ in range(3)]), mean_square, {}),
    "weights change in forward": (lambda: Net([Clamped() for _ in range(3)]), mean_square, {}),
    "embedding with max_norm": (Normed, mean_square, {}),
    "parametrised": (lambda: Net([Parametrised() for _ in range(3)]), mean_square, {}),
}
