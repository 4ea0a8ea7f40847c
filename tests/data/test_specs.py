"""Specifications of a data set in Python and in YAML."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources.spec import DatasetSpec

BOUNDARY = {"role": "assistant", "start": "<|im_start|>assistant\n", "end": None}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=DatasetSpec | list[DatasetSpec])
    return parser


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("train_on_inputs", True),
        ("train_on_inputs", False),
        ("roles_to_train", ["assistant", "tool"]),
        ("roles_to_train", []),
        *[("train_on_eos", value) for value in ("turn", "all", "last", "none")],
        *[("train_on", value) for value in ("all", "last_turn")],
        ("train_thinking", False),
        ("role_boundaries", []),
        ("role_boundaries", [BOUNDARY]),
        *[("on_untrainable", value) for value in ("error", "drop", "warn")],
    ],
)
def test_a_knob_of_masking_that_is_set_is_told_apart(knob: str, value: Any) -> None:
    assert DatasetSpec(**{knob: value}).masking == {knob: value}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "names no data set"),
        ({"path": []}, "names no data set"),
        ({"path": ["a.jsonl", ""]}, "names no data set"),
        ({"format": "share_gpt"}, "format: 'share_gpt' is unknown. Did you mean 'sharegpt'"),
        ({"format": None}, "format: None is unknown"),
        ({"on_malformed": "warn"}, "on_malformed: 'warn' is unknown. There are error, skip"),
        *[({"max_rows": value}, f"max_rows={value!r}: give a whole number") for value in (0, -1, 1.5, True, "3")],
        *[({"repeat": value}, f"repeat={value!r}: give a whole number") for value in (0, -1, 0.5)],
        ({"fields": {"message": "chat"}}, "fields: 'message' is unknown. Did you mean 'messages'"),
        ({"fields": {"messages": ""}}, "'messages' is mapped to ''"),
        ({"fields": {"messages": 3}}, "'messages' is mapped to 3"),
        ({"roles": {"bot": ""}}, "'bot' is mapped to ''"),
        ({"fields": {"messages": ""}, "roles": {"messages": "x"}}, "'messages' is mapped to ''"),
        ({"split": ""}, "`split` is empty"),
        ({"split": {"training": "a"}}, "split: 'training' is unknown. Did you mean 'train'"),
        ({"split": {"validation": "a"}}, "does not say which split is trained on"),
    ],
)
def test_a_wrong_value_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("[", r"\[")):
        DatasetSpec(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on_eos": "turns"}, "train_on_eos must be one of turn, all, last, none, got 'turns'"),
        ({"train_on_eos": True}, "train_on_eos must be one of turn, all, last, none, got True"),
        ({"train_on": "last"}, "train_on must be one of all, last_turn, got 'last'"),
        ({"on_untrainable": "skip"}, "on_untrainable must be one of error, drop, warn, got 'skip'"),
        ({"roles_to_train": "assistant"}, "roles_to_train must be a list of names of roles, got 'assistant'"),
        ({"role_boundaries": [{**BOUNDARY, "stop": "x"}]}, r"role_boundaries\[0\]: unknown key 'stop'"),
        ({"role_boundaries": [BOUNDARY, {"role": "user"}]}, r"role_boundaries\[1\]: the key 'start' is missing"),
    ],
)
def test_a_wrong_mask_of_a_data_set_is_refused_with_the_module(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatDataModule([DatasetSpec(**options)])


@pytest.mark.parametrize(
    ("options", "label", "paths"),
    [
        ({"path": "a.jsonl"}, "a.jsonl", ("a.jsonl",)),
        ({"path": ["a.jsonl", "b.jsonl", "c.jsonl"]}, "a.jsonl and 2 more", ("a.jsonl", "b.jsonl", "c.jsonl")),
        ({"path": "some/data", "name": "small"}, "some/data, small", ("some/data",)),
    ],
)
def test_how_it_is_called(options: dict[str, Any], label: str, paths: tuple[str, ...]) -> None:
    spec = DatasetSpec(**options)
    assert (spec.label, spec.paths) == (label, paths)


SPECS = [
    DatasetSpec(),
    DatasetSpec(path=["a.jsonl", "b.parquet"], format="sharegpt", on_malformed="skip", max_rows=10, repeat=2),
    DatasetSpec(path="some/data", name="small", split={"train": "sft", "test": "sft_test"}, revision="main"),
    DatasetSpec(path="x.jsonl", fields={"messages": "chat", "from": "who"}, roles={"bot": "assistant"}),
    DatasetSpec(path="x.jsonl", split="train[:10%]", images_dir="pictures", train_on_inputs=True, train_thinking=False),
    DatasetSpec(family="chatml", chat_template="{{ messages }}", chat_template_kwargs={"enable_thinking": False}),
    DatasetSpec(role_boundaries=[BOUNDARY], roles_to_train=[], train_on_eos="none", train_on="last_turn"),
]


@pytest.mark.parametrize("spec", SPECS)
def test_yaml_gives_the_same_spec(spec: DatasetSpec) -> None:
    parser = _parser()
    for value in (spec, [spec, spec]):
        plain = [dataclasses.asdict(one) for one in value] if isinstance(value, list) else dataclasses.asdict(value)
        config = parser.parse_string(yaml.safe_dump({"data": plain}))
        assert parser.instantiate_classes(config).data == value


def test_a_list_may_hold_names_and_mappings() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ChatDataModule, "data")
    config = parser.parse_string("{data: {dataset: [a.jsonl, {path: b.jsonl, repeat: 2}]}}")
    assert parser.instantiate(config).data.specs == [DatasetSpec("a.jsonl"), DatasetSpec("b.jsonl", repeat=2)]


@pytest.mark.parametrize("text", ["{format: csv}", "{max_rows: 0}", "{paths: x}", "{split: {eval: x}}", "{repeat: a}"])
def test_yaml_is_checked(text: str) -> None:
    parser = _parser()
    with pytest.raises((ArgumentError, ValueError)):
        parser.instantiate_classes(parser.parse_string(f"data: {text}"))
