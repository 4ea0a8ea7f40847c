"""An outline has every name and shape and no value; what gives it memory keeps the objects that others know."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from lightning_protrain.distributed.meta_init import (
    NamesByUse,
    find_waiting,
    load_on_first,
    make_room,
    send_values,
)
from lightning_protrain.models.loading import StoredModel
from lightning_protrain.quant_state import has_companions
from lightning_protrain.rank_store import RankStore
from lightning_protrain.runtime.comm.collectives import RankMesh
from tests.support.networks import networks
from tests.support.quantised import QuantisedLanguageModel

NAMES = [
    "llama",
    "llama-tied",
    "gemma3-text",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "mamba",
    "gpt2",
    "llava",
    "qwen2.5-vl",
]


class Kept(nn.Module):
    """Tensors of every kind, some of them at several places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("rates", torch.arange(3.0), persistent=False)
        self.original = self.rates


def seen_from(rank: int, world_size: int, local_size: int) -> RankMesh:
    """Return the rank mesh of one rank, without process groups."""
    nobody: Any = None
    return RankMesh(rank, world_size, rank % local_size, local_size, nobody, nobody, nobody)


ALONE = seen_from(0, 1, 1)


def on_meta(kind: Any = Kept) -> Any:
    with torch.device("meta"):
        return kind()


@pytest.mark.sample(7)
@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_an_outline_is_the_model_without_values(name: str, dtype: str, tmp_path: Path) -> None:
    networks()[name].build().save_pretrained(tmp_path)
    given = str(tmp_path), AutoConfig.from_pretrained(tmp_path), dtype
    whole = StoredModel(*given).load()
    with torch.device("meta"):
        outline = StoredModel(*given).outline()
    pairs = zip(whole.named_modules(remove_duplicate=False), outline.named_modules(remove_duplicate=False), strict=True)
    assert all(one == other and type(a) is type(b) for (one, a), (other, b) in pairs)
    for found, wanted in (
        (outline.named_parameters(remove_duplicate=False), whole.named_parameters(remove_duplicate=False)),
        (outline.named_buffers(remove_duplicate=False), whole.named_buffers(remove_duplicate=False)),
    ):
        for (one, a), (other, b) in zip(found, wanted, strict=True):
            assert one == other
            assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad), one
    assert all(parameter.is_meta for parameter in outline.parameters())
    assert len(list(outline.parameters())) == len(list(whole.parameters()))  # what is tied is tied
    assert outline.config.to_dict() == whole.config.to_dict()
    assert outline.generation_config == whole.generation_config


def test_an_outline_has_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    networks()["llama-tied"].build().save_pretrained(tmp_path)
    with torch.device("meta"):
        outline = StoredModel(str(tmp_path), AutoConfig.from_pretrained(tmp_path), "float32", vocab_size=64).outline()
    assert outline.get_input_embeddings().weight.shape[0] == 64
    assert outline.get_input_embeddings().weight is outline.get_output_embeddings().weight


def test_pickled_weights_are_loaded_by_everybody(tmp_path: Path) -> None:
    network = networks()["llama"].build()
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        found = StoredModel(str(tmp_path), AutoConfig.from_pretrained(tmp_path), "float32", allow_pickle=True).outline()
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in found.state_dict().items())


def test_parameters_stay_the_objects_that_others_know() -> None:
    model = on_meta()
    before = dict(model.named_parameters(remove_duplicate=False))
    calls: list[str] = []
    removed = model.first.weight.register_hook(lambda grad: calls.append("removed"))
    model.first.weight.register_hook(lambda grad: calls.append("grad"))
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
    model.first.weight.note = "kept"
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    names = {name for name, parameter in model.named_parameters()}
    assert make_room(model, {*names, ".rates", ".original", "norm.running_mean"}) == names
    assert all(before[name] is each for name, each in model.named_parameters(remove_duplicate=False))
    assert all(each.device.type == "cpu" for each in model.parameters())
    assert model.norm.running_var.is_meta  # nobody has asked for it
    assert model.original is model.rates
    assert model.rates.device.type == "cpu"
    assert model.first.weight.note == "kept"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    removed.remove()
    (model.first(torch.ones(2, 3)) + model.second(torch.ones(2, 3))).sum().backward()
    assert calls == ["grad", "after"]
    optimizer.step()
    assert (model.second.weight < 1.0).all()


def test_memory_is_laid_out_as_that_of_the_rank_that_has_values() -> None:
    model, whole = on_meta(), Kept()
    make_room(model, {"turned"})
    assert model.turned.stride() == whole.turned.stride() == (1, 3)


def test_weights_that_somebody_looks_into_are_refused_by_name() -> None:
    model = on_meta()
    view = model.first.weight.view(-1)
    with pytest.raises(ValueError, match=r"'first.weight' is on the meta device and cannot be allocated"):
        make_room(model, {"first.weight"})
    assert view.is_meta


def test_what_waits_is_what_the_first_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, outline = Kept(), on_meta()
    assert find_waiting(whole, ALONE) == frozenset()
    with pytest.raises(ValueError, match="'turned' is on the meta device on rank 0"):
        find_waiting(outline, ALONE)
    everywhere = [[(".rates", False)], [("first.weight", True), (".rates", False), (".original", False)]]
    monkeypatch.setattr(RankStore, "gather", lambda self, mine, doing: everywhere)
    assert find_waiting(whole, seen_from(0, 2, 2)) == {"first.weight", ".original"}
    with pytest.raises(ValueError, match="on rank 1, the first of its node"):
        find_waiting(whole, seen_from(0, 2, 1))


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_what_hangs_on_quantised_weights_gets_memory_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = QuantisedLanguageModel(kind).to("cpu")
    outline = QuantisedLanguageModel(kind).to("cpu")
    names = {name for name, _ in outline.named_parameters()}
    sent: list[Tensor] = []
    monkeypatch.setattr(
        "lightning_protrain.distributed.meta_init.broadcast_weights", lambda tensors, *_: sent.extend(tensors)
    )
    send_values(whole, ALONE, names, torch.device("cpu"))
    values = [tensor.detach().clone() for tensor in sent]
    sent.clear()
    send_values(outline, ALONE, names, torch.device("cpu"), NamesByUse(shared=names))
    assert len(values) > len(names)
    quantised = [parameter for parameter in whole.parameters() if has_companions(parameter)]
    assert len(quantised) == 3
    assert len(sent) == len(values) - len(names)  # what hangs on them is sent, although they are shared


def test_random_numbers_go_on_as_where_values_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    begun = torch.get_rng_state()
    torch.rand(5)
    ended = torch.get_rng_state()
    for before, wanted in ((begun, ended), (torch.get_rng_state(), None)):
        torch.set_rng_state(before)
        monkeypatch.setattr(RankStore, "gather", lambda self, mine, doing: [(begun, ended), mine])
        made = load_on_first(seen_from(1, 2, 2), lambda: "values", lambda: torch.empty(1).device.type)
        assert made == "meta"
        assert torch.equal(torch.get_rng_state(), before if wanted is None else wanted)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another allocator than glibc's")
def test_memory_that_dies_between_others_is_returned() -> None:
    script = """
import re
from pathlib import Path
import torch
from lightning_protrain.distributed.meta_init import returning_memory

def mapped():
    return int(re.findall(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[0]) << 10

nbytes, count = 4 << 20, 120
torch.empty(16 << 20)  # a large block that dies makes glibc take smaller ones from its heap
with returning_memory():
    tensors = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(count)]
before = mapped()
del tensors[: count - 1]
print((before - mapped()) / (nbytes * (count - 1)), tensors[0].numel() == nbytes)
"""
    # In a process of its own: what earlier tests freed of a heap serves new blocks before they are mapped.
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert float(printed[0]) > 0.9
    assert printed[1] == "True"
