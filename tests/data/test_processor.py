"""Processors: built from their real classes, with the packages that these ask for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from transformers import AutoProcessor

from lightning_protrain.data.batches.processor import load_media_processor, load_processor
from lightning_protrain.data.chat.pipeline import ChatSettings
from lightning_protrain.data.extras import EXTRAS
from tests.data import llava, processors
from tests.support.torchvision_schemas import declare_missing

pytestmark = pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision, which is not installed")

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import importlib.metadata, importlib.util, sys
from importlib.abc import MetaPathFinder

hidden, *folders = sys.argv[1:]
hidden = hidden.split()

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def find_spec(name, *rest, real=importlib.util.find_spec):
    return None if name in hidden else real(name, *rest)

def from_name(name, real=importlib.metadata.Distribution.from_name):
    if name in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

sys.meta_path.insert(0, Hidden())
importlib.metadata.Distribution.from_name = from_name
importlib.util.find_spec = find_spec

from lightning_protrain.data.batches.processor import load_processor
from lightning_protrain.models.loading import build_model, read_config
for folder in folders:
    try:
        is_model = folder.endswith("model")
        print("built", build_model(read_config(folder), "float32") if is_model else load_processor(folder))
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("name", processors.MADE)
def test_a_processor_is_built_from_its_class(tmp_path: Path, name: str) -> None:
    made = load_processor(processors.save(name, tmp_path))
    assert type(made) is type(processors.MADE[name]())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "others"), [("qwen2_vl", "torchvision", ""), ("smolvlm", "num2words", "timm")]
)
def test_a_missing_package_of_a_processor_or_a_model_is_one_line_that_names_its_extra(
    tmp_path: Path, name: str, package: str, others: str
) -> None:
    folder, model = processors.save(name, tmp_path / "processor"), tmp_path / "model"
    expected = (
        f"The processor of {folder!r} cannot be built: {package} is not installed. "
        'Run: pip install "lightning-protrain[vision]"\n'
    )
    command = [sys.executable, "-c", LOAD, f"{package} {others}", folder]
    if others:
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "gemma3n"}))
        command.append(str(model))
        expected += (
            f"The model 'gemma3n' cannot be built: {others} is not installed. "
            'Run: pip install "lightning-protrain[vision]"\n'
        )
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == expected, result.stderr


def test_the_extras_install_what_the_messages_name() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert {Requirement(text).name for text in given[extra]} == set(packages)
        assert all(find_spec(package) for package in packages), "the tests need every extra"


@pytest.mark.slow
def test_torchvision_for_another_torch_is_made_importable(tmp_path: Path) -> None:
    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    copy = tmp_path / "torchvision"
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "models"))
    file = copy / "extension.py"
    file.write_text(file.read_text().partition("\n\n# Written by the tests")[0])
    (copy / "models.py").touch()
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch, torchvision\n"
        f"assert torchvision.__file__.startswith({str(tmp_path)!r})\n"
        "from torchvision.transforms.v2 import functional\n"
        "print(tuple(functional.resize(torch.rand(3, 8, 8), [4, 4], antialias=True).shape))\n"
    )
    said = []
    for changed in (True, False):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        said.append(run.stdout or run.stderr.splitlines()[-1])
        assert declare_missing(copy) is changed
    assert said == ["RuntimeError: operator torchvision::nms does not exist", "(3, 4, 4)\n"]


# Processor, settings, and where they are seen in the processor that is built.
_AREA = {"shortest_edge": 3136, "longest_edge": 12544}
_SEEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen2_vl", {"min_pixels": 3136, "max_pixels": 12544}, {"image_processor.size": _AREA}),
    ("qwen2_vl", {"min_pixels": 3136, "max_pixels": 12544}, {"video_processor.size": _AREA}),
    ("qwen2_vl", {"do_rescale": False}, {"image_processor.do_rescale": False, "video_processor.do_rescale": False}),
    ("qwen2_vl", {"patch_size": 16}, {"image_processor.patch_size": 16}),
    ("qwen2_vl", {"merge_size": 1}, {"image_processor.merge_size": 1}),
    ("qwen2_vl", {"temporal_patch_size": 1}, {"image_processor.temporal_patch_size": 1}),
    ("qwen2_vl", {"size": _AREA}, {"image_processor.size": _AREA}),
    ("qwen2_vl", {"fps": 1.5}, {"video_processor.fps": 1.5}),
    (
        "qwen2_vl",
        {"images_kwargs": {"patch_size": 16}},
        {"image_processor.patch_size": 16, "video_processor.patch_size": 14},
    ),
    (
        "qwen2_vl",
        {"patch_size": 12, "videos_kwargs": {"patch_size": 16}},
        {"image_processor.patch_size": 12, "video_processor.patch_size": 16},
    ),
    ("gemma3", {"image_seq_length": 9}, {"image_seq_length": 9}),
    ("idefics3", {"image_seq_len": 7}, {"image_seq_len": 7}),
    ("idefics3", {"do_image_splitting": False}, {"image_processor.do_image_splitting": False}),
    ("idefics3", {"max_image_size": {"longest_edge": 128}}, {"image_processor.max_image_size": {"longest_edge": 128}}),
    ("smolvlm", {"image_seq_len": 7}, {"image_seq_len": 7}),
    ("smolvlm", {"size": {"longest_edge": 256}}, {"image_processor.size": {"longest_edge": 256}}),
    ("internvl", {"max_patches": 3, "min_patches": 2}, {"image_processor.max_patches": 3}),
    ("internvl", {"image_seq_length": 9}, {"image_seq_length": 9}),
    ("internvl", {"videos_kwargs": {"num_frames": 2}}, {"video_processor.num_frames": 2}),
    ("lfm2_vl", {"max_tiles": 3}, {"image_processor.max_tiles": 3}),
    ("lfm2_vl", {"use_thumbnail": False}, {"image_processor.use_thumbnail": False}),
    ("lfm2_vl", {"max_image_tokens": 64}, {"image_processor.max_image_tokens": 64}),
    ("llava", {"patch_size": 4}, {"patch_size": 4}),
    ("llava", {"crop_size": {"height": 8, "width": 8}}, {"image_processor.crop_size": {"height": 8, "width": 8}}),
    ("llava", {"do_center_crop": False}, {"image_processor.do_center_crop": False}),
    ("llava", {"num_additional_image_tokens": 1}, {"num_additional_image_tokens": 1}),
    ("llava_next", {"image_grid_pinpoints": [[16, 32]]}, {"image_processor.image_grid_pinpoints": [[16, 32]]}),
    ("llava_next", {"vision_feature_select_strategy": "full"}, {"vision_feature_select_strategy": "full"}),
    ("mllama", {"max_image_tiles": 2}, {"image_processor.max_image_tiles": 2}),
    ("mllama", {"size": {"height": 32, "width": 32}}, {"image_processor.size": {"height": 32, "width": 32}}),
    ("pixtral", {"spatial_merge_size": 2}, {"spatial_merge_size": 2}),
    ("pixtral", {"do_convert_rgb": False}, {"image_processor.do_convert_rgb": False}),
    ("pixtral", {"image_mean": [0.0, 0.0, 0.0]}, {"image_processor.image_mean": [0.0, 0.0, 0.0]}),
    ("qwen2_audio", {"chunk_length": 2}, {"feature_extractor.chunk_length": 2, "feature_extractor.n_samples": 32_000}),
    ("qwen2_audio", {"audio_kwargs": {"n_fft": 200}}, {"feature_extractor.n_fft": 200}),
]


def _at(processor: Any, path: str) -> Any:
    for name in path.split("."):
        processor = getattr(processor, name)
    if isinstance(processor, tuple):
        return list(processor)
    return {key: processor[key] for key in processor.keys()} if hasattr(processor, "keys") else processor  # noqa: SIM118


@pytest.mark.parametrize(
    ("name", "options", "seen"), _SEEN, ids=[f"{name}-{'-'.join(options)}" for name, options, _ in _SEEN]
)
def test_a_setting_is_seen_in_the_processor_and_saved_with_it(
    tmp_path: Path, name: str, options: dict[str, Any], seen: dict[str, Any]
) -> None:
    folder = processors.save(name, tmp_path / "given")
    plain, made = load_processor(folder), load_processor(folder, options)
    made.save_pretrained(tmp_path / "saved")
    for path, value in seen.items():
        assert _at(made, path) == value
        assert _at(AutoProcessor.from_pretrained(tmp_path / "saved"), path) == value
    assert any(_at(plain, path) != value for path, value in seen.items()), "the setting is another than in the files"
    plain.save_pretrained(tmp_path / "plain")
    files = [(tmp_path / each / "tokenizer_config.json").read_text() for each in ("plain", "saved")]
    assert files[0] == files[1], "the settings of the processor are none of the tokenizer"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 3}),
        ("internvl", {"crop_to_patches": False}),
    ],
)
def test_a_setting_replaces_one_that_the_class_of_the_processor_gives_in_every_call(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    folder = processors.save(name, tmp_path / "given")
    assert not options.items() <= _of_call(load_processor(folder)).items()
    made = load_processor(folder, options)
    made.save_pretrained(tmp_path / "saved")
    for each in (made, AutoProcessor.from_pretrained(tmp_path / "saved")):
        assert options.items() <= _of_call(each).items()
        assert all(getattr(each.image_processor, key) == value for key, value in options.items())


def _of_call(processor: Any) -> dict[str, Any]:
    merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
    return {**merged["images_kwargs"]}


_CALLS = ("return_tensors", "text", "images", "videos", "audio", "add_special_tokens", "padding", "truncation")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("revision", "give `tokenizer` a folder of that revision"),
        ("trust_remote_code", "Code that comes with a model is never run"),
        ("chat_template", "Use the option `chat_template`"),
        ("max_length", "Use the option `max_length`"),
        *((name, "leave it out") for name in (*_CALLS, "text_kwargs", "device", "input_data_format")),
    ],
)
def test_an_argument_that_is_no_setting_is_refused_before_anything_is_loaded(name: str, why: str) -> None:
    for options in ({name: True}, {"images_kwargs": {name: True}}):
        with pytest.raises(ValueError, match=f"processor_kwargs names '{name}', which is no setting of a processor"):
            ChatSettings(processor_kwargs=options)
    with pytest.raises(ValueError, match=why):
        ChatSettings(processor_kwargs={name: True})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen2_vl", {"max_pixel": 1}, "'max_pixel', which Qwen2VLProcessor does not take. Did you mean 'max_pixels'"),
        ("qwen2_vl", {"num_crops": 4}, "'num_crops', which Qwen2VLProcessor does not take. Did you mean 'num_frames'"),
        ("qwen2_vl", {"crop_size": 4}, "'crop_size', which Qwen2VLProcessor does not take"),
        ("qwen2_vl", {"use_fast": True}, "'use_fast', which Qwen2VLProcessor does not take"),
        ("qwen2_vl", {"token": "x"}, "'token', which Qwen2VLProcessor does not take"),
        ("qwen2_vl", {"zzz": 1}, "It takes .*max_pixels, .*patch_size"),
        ("qwen2_vl", {"images_kwargs": {"fps": 2}}, "'fps', which image_processor of Qwen2VLProcessor does not take"),
        ("qwen2_vl", {"audio_kwargs": {}}, "'audio_kwargs', and Qwen2VLProcessor has no feature_extractor"),
        ("qwen2_vl", {"images_kwargs": 3}, "images_kwargs is 3. Give a mapping"),
        ("qwen2_vl", {"do_rescale": "yes"}, "do_rescale='yes' is refused by Qwen2VLImageProcessor"),
        ("qwen2_vl", {"max_pixels": "many"}, "max_pixels='many' is refused by Qwen2VLImageProcessor"),
        ("qwen2_vl", {"size": {"side": 3}}, "size must have one of the following set of keys"),
        ("lfm2_vl", {"size": {"height": 8, "width": 8}}, "'size', which Lfm2VlProcessor does not take"),
        ("mllama", {"do_resize": False}, "'do_resize', which MllamaProcessor does not take. Did you mean"),
        ("gemma3", {"image_seq_length": "4"}, "image_seq_length='4' is refused by Gemma3Processor: expected int"),
        ("gemma3", {"image_processor": {}}, "'image_processor', which Gemma3Processor does not take"),
        ("gemma3", {"patch_size": 4}, "'patch_size', which Gemma3Processor does not take"),
        ("llava", {"image_seq_len": 4}, "'image_seq_len', which LlavaProcessor does not take"),
        ("llava", {"videos_kwargs": {"fps": 1}}, "'videos_kwargs', and LlavaProcessor has no video_processor"),
        ("qwen2_audio", {"chunk_len": 2}, "Qwen2AudioProcessor does not take. Did you mean 'chunk_length'"),
        ("gemma3", {"images_kwargs": {"do_pan_and_scan": True}}, "Give it beside images_kwargs"),
        ("qwen2_audio", {"max_pixels": 2}, "'max_pixels', which Qwen2AudioProcessor does not take"),
    ],
)
def test_a_setting_that_the_processor_does_not_take_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        load_processor(processors.save(name, tmp_path), options)
    assert "\n" not in str(refused.value)


def test_settings_without_a_processor_are_refused(tmp_path: Path) -> None:
    llava.processor().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"processor_kwargs names max_pixels, and .* has no processor but a tokenizer"):
        load_media_processor(str(tmp_path), {"max_pixels": 1})


def test_the_page_begins_with_code_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "media.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "media.md", "exec"), {"VISION_MODEL": processors.save("llava", tmp_path)})
    assert capsys.readouterr().out.startswith("torch.Size([2, 3, 16, 16]) ")
