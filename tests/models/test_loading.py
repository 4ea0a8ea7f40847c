"""Pretrained weights arrive bit for bit in no more memory than they take; paths are never sent to the Hub."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from huggingface_hub import constants, is_offline_mode
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_protrain import CausalLMModule, ProTrainStrategy
from lightning_protrain.data import hub
from lightning_protrain.data.batches.tokenizer import load_tokenizer
from lightning_protrain.data.sources.load import Source
from lightning_protrain.models.loading import StoredModel, auto_class, read_config, weight_files
from tests.support.models import fit
from tests.support.networks import NetworkModule, networks
from tests.support.trainers import QUIET

NAMES = ["llama", "llama-tied", "gemma3-text", "mixtral", "qwen3-moe", "gpt-oss", "jamba", "zamba2", "mamba", "gpt2"]


NAMES += ["llava", "gemma3", "qwen2.5-vl"]


KEY = "model.layers.1.mlp.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def saved(name: str, folder: Path, **options: Any) -> PreTrainedModel:
    network = networks()[name].build()
    network.save_pretrained(folder, **options)
    return network


def load(folder: Path, dtype: str = "float32", **options: Any) -> PreTrainedModel:
    return StoredModel(str(folder), AutoConfig.from_pretrained(folder), dtype, **options).load()


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_that_transformers_loads(name: str, dtype: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    found = load(tmp_path, dtype)
    kind = auto_class(AutoConfig.from_pretrained(tmp_path))
    wanted = kind.from_pretrained(tmp_path, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    theirs = wanted.state_dict()
    assert list(found.state_dict()) == list(theirs)
    for key, value in found.state_dict().items():
        assert value.dtype == theirs[key].dtype
        assert torch.equal(value, theirs[key]), key
    assert all(torch.equal(one, other) for one, other in zip(found.buffers(), wanted.buffers(), strict=True))
    assert found.generation_config == wanted.generation_config
    assert found.config.name_or_path == str(tmp_path)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_weights_in_several_files(name: str, tmp_path: Path) -> None:
    network = saved(name, tmp_path, max_shard_size="20KB")
    assert len(weight_files(str(tmp_path))) > 1
    found = load(tmp_path)
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in found.state_dict().items())
    missing = weight_files(str(tmp_path))[0]
    missing.unlink()
    with pytest.raises(ValueError, match=missing.name):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is damaged: it has no valid `weight_map`"):
        load(tmp_path)


def test_weights_do_not_change_with_their_file(tmp_path: Path) -> None:
    found = saved("llama", tmp_path) and load(tmp_path)
    before = {key: value.clone() for key, value in found.state_dict().items()}
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as raw:
        raw.seek(file.stat().st_size // 2)
        raw.write(b"\xff" * 1000)
    assert all(torch.equal(value, before[key]) for key, value in found.state_dict().items())


WRONG: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": ("llama", lambda tensors: tensors.pop(KEY), rf"missing: {KEY}"),
    "extra": ("llama", lambda tensors: tensors.update(more=torch.ones(2)), r"not in the model: more\."),
    "shape": ("llama", lambda tensors: tensors.update({KEY: torch.ones(2, 3)}), rf"{KEY} \(2, 3\), not \(32, 16\)"),
    "vocabulary": (
        "llama",
        lambda tensors: tensors.update({"lm_head.weight": torch.ones(48, 16)}),
        r"lm_head.weight \(48, 16\), not \(40, 16\)",
    ),
    "missing expert": (
        "qwen3-moe",
        lambda tensors: tensors.pop(EXPERT),
        r"1\.mlp\.experts\..* \(3, 16, 16\), not \(4, 16, 16\)|do not match a",
    ),
    "shape of an expert": (
        "qwen3-moe",
        lambda tensors: tensors.update({EXPERT: torch.ones(2, 3)}),
        "do not match a",
    ),
    "many": (
        "llama",
        lambda tensors: [tensors.pop(key) for key in list(tensors) if "mlp" in key],
        r"missing: .*, .* and 4 more",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights_are_named_before_any_is_read(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change, message = WRONG[case]
    saved(name, tmp_path)
    edit(tmp_path, change)

    def read(*_: Any) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr("lightning_protrain.models.loading.StoredTensor.__getitem__", read)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_pickled_weights_need_a_word(tmp_path: Path) -> None:
    network = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="There are no weights"):
        load(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled \(pytorch_model.bin\).*allow_pickle"):
        load(tmp_path)
    found = load(tmp_path, allow_pickle=True)
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in found.state_dict().items())
    state = network.state_dict()
    del state[KEY]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"missing: {KEY}"):
        load(tmp_path, allow_pickle=True)


def test_the_module_hands_the_flag_on(tmp_path: Path) -> None:
    network = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    module = CausalLMModule(model=str(tmp_path))
    with pytest.raises(ValueError, match="allow_pickle"):
        module.configure_model()
    module = CausalLMModule(model=str(tmp_path), allow_pickle=True)
    module.configure_model()
    assert module.model is not None
    assert torch.equal(module.model.state_dict()[KEY], network.state_dict()[KEY])


FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}},
}


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_checkpoints_are_named(name: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": FORMATS[name]}))
    with pytest.raises(ValueError, match=rf"quantised \({name}\) and cannot be trained"):
        load(tmp_path)


def test_a_larger_vocabulary_is_made_and_a_smaller_one_refused(tmp_path: Path) -> None:
    network = saved("llama-tied", tmp_path)
    found = load(tmp_path, vocab_size=64)
    assert found.get_input_embeddings().weight.shape[0] == 64
    assert found.get_input_embeddings().weight is found.get_output_embeddings().weight
    assert torch.equal(found.get_input_embeddings().weight[:40], network.get_input_embeddings().weight)


# --- how Lightning makes modules --------------------------------------------------------------------------------------
class OwnModule(NetworkModule):
    """Makes its network at once, or where the strategy says."""

    def __init__(self, late: bool) -> None:
        super().__init__(nn.Identity(), networks()["llama"].batches())
        self.late = late
        if not late:
            self.network = networks()["llama"].build()

    def configure_model(self) -> None:
        if self.late and isinstance(self.network, nn.Identity):
            self.network = networks()["llama"].build()


def test_weights_without_values_are_filled_by_a_checkpoint(tmp_path: Path) -> None:
    first = OwnModule(late=False)
    fit(first).save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    trainer = L.Trainer(
        accelerator="cpu", strategy=ProTrainStrategy(plan="offload", monitor=False), max_epochs=1, **QUIET
    )
    with trainer.init_module(empty_init=True):
        second = OwnModule(late=False)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    second.load_state_dict(state)
    trainer.fit(second)
    plain = OwnModule(late=False)
    plain.load_state_dict(state)
    fit(plain)
    assert all(torch.equal(one, other) for one, other in zip(plain.losses, second.losses, strict=True))


@pytest.mark.parametrize("late", [True, False])
def test_a_network_made_late_trains_the_same(late: bool) -> None:
    plain, streamed = OwnModule(late=False), OwnModule(late)
    fit(plain)
    fit(streamed, strategy=ProTrainStrategy(plan="offload", monitor=False))
    assert all(torch.equal(one, other) for one, other in zip(plain.losses, streamed.losses, strict=True))


def test_a_model_that_somebody_else_has_placed_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "disk", "lm_head": "disk"}
    places["model.rotary_emb"] = "cpu"
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    module = NetworkModule(placed, networks()["llama"].batches())
    with pytest.raises(ValueError, match=r"(?s)accelerate.*device_map"):
        fit(module, strategy=ProTrainStrategy(plan="offload", monitor=False))


# --- memory -----------------------------------------------------------------------------------------------------------
_MEASURE = """
import sys
from pathlib import Path
from lightning_protrain.models.module import CausalLMModule

def held(name):  # getrusage gives a child the peak of its parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

module = CausalLMModule(model=sys.argv[1], dtype=sys.argv[2])
before = held("VmRSS:")
module.configure_model()
print((held("VmHWM:") - before) / sum(parameter.nbytes for parameter in module.parameters()))
"""
_MAKE = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
sizes = dict(hidden_size=2048, intermediate_size=5504, num_hidden_layers=8, num_attention_heads=16, vocab_size=32000)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), dtype=torch.bfloat16)
assert model.num_parameters() > 5e8
model.to_empty(device="cpu")
for parameter in model.parameters():
    parameter.data.fill_(0.01)
model.save_pretrained(sys.argv[1], max_shard_size="400MB")
"""


def _in_a_process(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells the peak of a process")
def test_loading_takes_the_memory_of_the_weights(tmp_path: Path) -> None:
    """Half a billion parameters in bfloat16, as they are and cast."""
    _in_a_process(_MAKE, str(tmp_path / "model"))
    for dtype in ("bfloat16", "float32"):
        ratio = float(_in_a_process(_MEASURE, str(tmp_path / "model"), dtype).split()[-1])
        assert 0.95 < ratio < 1.10, dtype


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A Hub that takes connections and never answers."""
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hub.wait_for_hub.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server
    hub.wait_for_hub.cache_clear()


def was_asked(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./mine", True),
        ("/no/where", True),
        ("~/mine", True),
        ("a/b/c", True),
        ("mine/", True),
        ("data\\mine", True),
        ("data/chats.txt", True),
        ("chats.csv", True),
        ("there/mine", True),
        ("there", True),
        ("Qwen/mine", True),
        ("Qwen/Qwen3-0.6B", False),
        ("gpt2", False),
        ("meta-llama/Llama-3.1-8B", False),
        ("Qwen/Qwen2.5-7B", False),
    ],
)
def test_what_is_a_path(name: str, expected: bool) -> None:
    Path("there").mkdir()
    Path("Qwen").mkdir()
    assert hub.is_path(name) is expected


def load_splits(name: str) -> object:
    pytest.importorskip("datasets")
    return Source(name, None).splits


@pytest.mark.parametrize("load", [read_config, load_tokenizer, load_splits])
@pytest.mark.parametrize("name", ["./mine", "/no/where", "there/mine"])
def test_a_path_is_never_sent_to_the_hub(load: object, name: str, silent: socket.socket) -> None:
    assert callable(load)
    Path("there").mkdir()
    with pytest.raises(ValueError, match=name):
        load(name)
    assert not was_asked(silent)


@pytest.mark.parametrize("load", [read_config, load_tokenizer, load_splits])
def test_a_hub_that_does_not_answer_is_waited_for_once(load: object, silent: socket.socket) -> None:
    assert callable(load)
    begin = time.monotonic()
    with pytest.warns(UserWarning, match="does not answer"), pytest.raises(ValueError, match="somebody/model"):
        load("somebody/model")
    assert was_asked(silent)
    with pytest.raises(ValueError, match="somebody/model"):
        load("somebody/model")
    assert not was_asked(silent), "it is asked again"
    assert is_offline_mode()
    assert time.monotonic() - begin < 60  # with the retries of the library it hangs for minutes


def test_offline_mode_is_honoured(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (read_config, load_tokenizer, load_splits):
        with pytest.raises(ValueError, match="somebody/model"):
            load("somebody/model")
    assert not was_asked(silent)
