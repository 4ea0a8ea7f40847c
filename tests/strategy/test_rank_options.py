"""What the user says of several ranks: what is refused at once, and what has been taken out."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_protrain import ProTrainStrategy


def test_a_hook_of_ddp_is_not_forgotten() -> None:
    with pytest.raises(ValueError, match=r'adapter_grad_sync="flat" .* ddp_comm_hook'):
        ProTrainStrategy(adapter_grad_sync="flat", ddp_comm_hook=print)
    ProTrainStrategy(ddp_comm_hook=print)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("gather", "device", "each rank uploads whole chunks"),
        ("gather", "host", "Leave it out"),
        ("shard_optimizer", "world", 'strategy="protrain_fsdp2" with cpu_offload=True'),
        ("shard_weights", "world", 'strategy="protrain_fsdp2" with cpu_offload=True'),
        ("shard_weights", "machine", "each node holds all offloaded weights"),
    ],
)
def test_a_keyword_that_has_been_taken_out_names_what_to_use_in_its_place(name: str, value: Any, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}='{value}' has been taken out: .*{instead}"):
        ProTrainStrategy(**{name: value})


def test_a_keyword_that_there_has_never_been_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match="ProTrainStrategy has no keyword 'shards'"):
        ProTrainStrategy(shards=2)
