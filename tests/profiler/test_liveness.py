from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.fake_mode import MetaMode, ShapeTensor
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.recorder import LiveBytes


@pytest.mark.parametrize("traced", [False, True])
def test_a_shadow_counts_as_one_with_its_original(traced: bool) -> None:
    live = LiveBytes()
    with MetaMode() as mode:
        tensor = torch.ones(4, 6) if traced else torch.arange(24).reshape(4, 6)
        storage = mode.storage(tensor)
        nbytes = storage.nbytes()
        live.add(storage)
        live.add(storage)
        activation = live.find(storage)
        assert activation is not None
        assert live.now == nbytes
        shadow = live.shadow(tensor[1:].t(), activation)
        second = live.shadow(tensor, activation)
        assert (shadow.shape, shadow.stride(), shadow.storage_offset()) == ((6, 3), (1, 6), 6)
        assert isinstance(shadow, ShapeTensor) == traced
        assert traced or shadow.tolist() == tensor[1:].t().tolist()
        assert live.now == nbytes
        del tensor, storage
        assert not activation.original_alive
        assert activation.alive
        del shadow
        assert live.now == nbytes
        activation.is_gradient = True
        del second
        assert (live.now, live.held_gradients, activation.alive) == (0, nbytes, False)
        live.check_conserved()


def test_bytes_that_nobody_holds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4))

    def step() -> Tensor:
        kept.append(model(torch.ones(2, 4)))
        return kept[-1].sum()

    somewhere = torch.eye(2).to_sparse()  # has no storage, and nothing to do with it
    assert profile_model(model, describe_model(model), step).segments  # somebody holds what is left
    assert somewhere.is_sparse
    kept.clear()
    monkeypatch.setattr(LiveBytes, "_leave", lambda *_: None)
    with pytest.raises(AssertionError, match="nobody holds"):
        profile_model(model, describe_model(model), lambda: model(torch.ones(2, 4)).sum())
