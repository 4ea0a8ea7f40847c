"""DDP averages exactly the resident trained parameters, without those that the user tells it to ignore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain import ProTrainStrategy
from lightning_protrain.config import DDPOptions
from lightning_protrain.distributed import ddp
from lightning_protrain.distributed.ddp import FlatAverage, broadcast_weights, chooses_flat, without_sync, wrap
from tests.support.ranks import run_ranks, trainer_on_rank, values

CPU = torch.device("cpu")


class Network(nn.Module):
    """Parameters of the root, tied ones, a frozen one, and one under two names of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.twice = nn.Linear(4, 4, bias=False)
        self.twice.same = self.twice.weight
        self.layers[0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        for layer in (*self.layers, self.twice):
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def tokens(rank: int) -> Tensor:
    return torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(rank))


# What is offloaded, by the first name; everything else that is trained is DDP's.
OFFLOADED: list[set[str]] = [
    set(),
    {"scale"},
    {"embedding.weight"},
    {"layers.1.weight", "twice.weight"},
    {"scale", "embedding.weight", "layers.0.weight", "layers.1.weight", "layers.1.bias", "twice.weight"},
]


def _gradients(model: nn.Module, rank: int) -> dict[str, Tensor]:
    model(tokens(rank)).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _take(rank: int) -> list[str]:
    """Return the differences from DDP for several sets of offloaded parameters."""
    wrong = []
    for offloaded in OFFLOADED:
        torch.manual_seed(0)
        model = Network()
        local = _gradients(model, rank)
        model.zero_grad()
        torch.manual_seed(0)
        expected = _gradients(DistributedDataParallel(Network()), rank)
        names = dict(model.named_parameters())
        mine = [p for name, p in names.items() if p.requires_grad and name not in offloaded]
        wrapped = wrap(model, mine, CPU, DDPOptions())
        found = _gradients(wrapped, rank)
        wrong += [f"{name} is marked" for name, p in names.items() if vars(p)]
        wrong += [f"{name} of DDP" for name in vars(model) if "ddp" in name]
        if list(names) != [name.removeprefix("module.") for name, _ in wrapped.named_parameters()]:
            wrong.append("names")
        for name in names:
            if name == "layers.0.bias":
                assert f"module.{name}" not in found
                continue
            right = local[name] if name in offloaded else expected[f"module.{name}"]
            if not torch.equal(found[f"module.{name}"], right):
                wrong.append(f"{offloaded}: {name}")
        if all(torch.equal(local[name], expected[f"module.{name}"]) for name in local):
            wrong.append("the ranks have the same gradients")
    return wrong


def test_ddp_averages_what_is_resident_and_nothing_else(tmp_path: Path) -> None:
    assert values(run_ranks(_take, 2, tmp_path)) == [[], []]


def _plant(rank: int) -> list[str]:
    """Return the errors for a parameter that neither or both of DDP and the runtime average."""
    found = []
    for spoil in (lambda names: names[1:], lambda names: [*names, "layers.1.weight", "layers.2.weight"]):
        model = Network()
        mine = [model.scale, model.layers[1].weight, model.layers[2].weight]
        names = ddp._names_of_others
        ddp._names_of_others = lambda model, mine, spoil=spoil, names=names: spoil(
            [name for name in names(model, mine) if not name.startswith(".")]
        )
        try:
            wrap(model, mine, CPU, DDPOptions())
        except AssertionError as error:
            found.append(str(error))
        finally:
            ddp._names_of_others = names
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    return found


def test_a_parameter_of_nobody_or_of_two_is_found(tmp_path: Path) -> None:
    assert values(run_ranks(_plant, 1, tmp_path)) == [["DDP averages wrong parameters"] * 2]


def _options(rank: int) -> list[Any]:
    """Comm hooks are called, unused parameters are found, a graph may be static, and `without_sync` is silent."""
    buckets: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP does not read annotations that are strings.
        state.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 0 + 7)
        return future

    torch.manual_seed(0)
    model = Network()
    mine = [model.layers[1].weight, model.layers[2].weight]
    wrapped = wrap(model, mine, CPU, DDPOptions(True, False, hook, buckets))
    with without_sync(wrapped):
        _gradients(wrapped, rank)
    silent = len(buckets)
    _gradients(wrapped, rank)
    other = Network()
    graph = wrap(other, [other.layers[1].weight], CPU, DDPOptions(static_graph=True))
    for _ in range(2):
        _gradients(graph, rank)
    with without_sync(None), without_sync(other):
        pass
    told = (wrapped.find_unused_parameters, wrapped.static_graph, graph.find_unused_parameters, graph.static_graph)
    return [silent, sum(buckets), set(mine[0].grad.flatten().tolist()), told]  # type: ignore[union-attr]


def test_the_options_of_ddp_are_ddps_own(tmp_path: Path) -> None:
    assert values(run_ranks(_options, 2, tmp_path)) == [[0, 32, {7.0}, (True, False, False, True)]] * 2


def _average(rank: int) -> list[str]:
    """Return the differences from DDP on the same gradients, and the cost of a few collectives."""
    wrong: list[str] = []
    sent: list[int] = []
    all_reduce = dist.all_reduce
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model, same = nn.Linear(4, 3).to(dtype), nn.Linear(4, 3).to(dtype)
        same.load_state_dict(model.state_dict())
        ddp, inputs = DistributedDataParallel(same), torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        for scale in (1.0, 2.0):  # Two micro-batches: the first communicates nothing.
            with without_sync(ddp if scale == 1 else None):
                (ddp(inputs.to(dtype)) * scale).sum().backward()
            (model(inputs.to(dtype)) * scale).sum().backward()
        dist.all_reduce = lambda tensor: (sent.append(tensor.numel()), all_reduce(tensor))
        FlatAverage(list(model.parameters())).average()
        dist.all_reduce = all_reduce
        wrong += [
            f"{dtype} {name}"
            for (name, one), other in zip(model.named_parameters(), same.parameters(), strict=True)
            if not torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        ]
    return [*wrong, str(sent)]


def test_one_flat_tensor_gives_the_averages_of_ddp(tmp_path: Path) -> None:
    # Twelve weights and three biases, and a flag for each.
    assert values(run_ranks(_average, 2, tmp_path)) == [["[17, 17]"]] * 2


def _missing(rank: int) -> list[Any]:
    """Gradients that are missing on one rank, on both, or frozen; two dtypes; and a sparse one."""
    one, both, frozen, low = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    low.data = low.detach().half()
    average = FlatAverage([one, both, frozen, low])
    frozen.grad = torch.full((2,), 5.0 + rank)
    frozen.requires_grad_(False)
    low.grad = torch.full((2,), 1.0 + rank).half()
    if rank == 1:
        one.grad = torch.full((2,), 8.0)
    average.average()
    found = [None if each.grad is None else each.grad.tolist() for each in (one, both, frozen, low)]
    table = nn.Parameter(torch.zeros(2, 2))
    table.grad = torch.eye(2).to_sparse()
    try:
        FlatAverage([table]).average()
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_a_gradient_that_only_some_ranks_have_counts_as_zero_on_the_others(tmp_path: Path) -> None:
    sparse = (
        'A gradient of a resident parameter is sparse, but adapter_grad_sync="flat" averages only dense gradients. Use '
        "`sparse=False`, "
        'or set adapter_grad_sync="ddp".'
    )
    found = values(run_ranks(_missing, 2, tmp_path))
    assert found == [[[4.0, 4.0], None, [5.0 + rank] * 2, [1.5, 1.5], sparse] for rank in range(2)]


def _equalise(rank: int) -> list[Any]:
    torch.manual_seed(rank)
    tensors = [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(6)[::2],
        torch.randn(0, 2),
        torch.tensor(float(rank)),
        torch.randn(5).bfloat16(),
        torch.arange(4) + rank,
        nn.Parameter(torch.randn(2, 2)),
        torch.tensor([True, False]) ^ bool(rank),
        torch.randn(6)[::2][:1],
        torch.randn(1, 1).as_strided((1, 1), (5, 3)),
    ]
    broadcast_weights(tensors)
    return [tensor.tolist() for tensor in tensors]


def test_all_ranks_have_the_weights_of_rank_0(tmp_path: Path) -> None:
    first, second = values(run_ranks(_equalise, 2, tmp_path))
    assert first == second
    assert first[4:7:2] == [0.0, [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("choice", "trained", "has_fast_link", "flat"),
    [
        ("flat", 100, True, True),
        ("ddp", 1, False, False),
        ("auto", 10, False, True),
        ("auto", 11, False, False),
        ("auto", 1, True, False),
    ],
)
def test_adapters_are_averaged_in_one_tensor_where_the_link_is_slow(
    choice: Any, trained: int, has_fast_link: bool, flat: bool
) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(trained)), nn.Parameter(torch.zeros(100 - trained))])
    assert chooses_flat(choice, [model[0]], model, has_fast_link) is flat


NAMES = ["own.weight", "place"]


class Expert(L.LightningModule):
    """Has an expert and a buffer of its own on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.own.weight, 0.1 * (rank + 1))
        self.register_buffer("place", torch.tensor([float(rank)]))
        self.register_buffer("common", torch.tensor([float(rank)]))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, list(NAMES))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.own(self.shared(batch[0])) + self.place).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=2)


def train(rank: int, options: dict[str, Any] | None) -> dict[str, Any]:
    module = Expert(rank)

    def strategy(**process: Any) -> Any:
        if options is None:
            return DDPStrategy(**process)
        return ProTrainStrategy(monitor=False, **options, **process)

    trainer_on_rank(rank, 2, kind=strategy, max_epochs=1).fit(module)
    assert module._ddp_params_and_buffers_to_ignore == NAMES
    marked = [name for name, each in module.named_parameters() if getattr(each, "_ddp_ignored", False)]
    assert marked == NAMES[:1]
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(train, 2, tmp_path_factory.mktemp("ddp"), None))


@pytest.mark.parametrize("sync", ["ddp", "flat"])
def test_what_ddp_ignores_is_neither_sent_nor_averaged(
    sync: str, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = values(run_ranks(train, 2, tmp_path, {"plan": "resident", "adapter_grad_sync": sync}))
    assert not np.array_equal(expected[0]["own.weight"], expected[1]["own.weight"])
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-6, err_msg=name)


def test_a_plan_that_offloads_what_ddp_ignores_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for outcome in run_ranks(train, 2, tmp_path, {"plan": "offload"}):
        assert outcome.error is not None
        assert outcome.error.startswith(
            "ValueError: 'own.weight' is in _ddp_params_and_buffers_to_ignore, and the plan"
        )
