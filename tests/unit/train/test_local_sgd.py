"""Local SGD, as one of its ranks does it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.strategies import local_sgd
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.local_sgd import LocalSGD, LocalSGDOptions

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1]])
@pytest.mark.parametrize("start", [0, 1])
def test_models_and_gradients_are_averaged_dtype_by_dtype_in_the_order_of_the_model(
    start: int, dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not spawned: forked ranks share the hashes of dtypes, so a set would have the same order in all of them.
    seen: list[torch.dtype] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(local_sgd, "broadcast", lambda *_: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_: seen.append(tensor.dtype))
    module = nn.ParameterList(torch.ones(2, dtype=dtype) for dtype in dtypes * 2)
    for parameter in module:
        parameter.grad = torch.ones_like(parameter)
    strategy = LocalSGD(TrainConfig(), World(world_size=2), LocalSGDOptions(period=1, start_step=start))
    strategy.prepare(module, Start(example=None))
    strategy.gradients(module).complete()
    strategy.after_step(module)
    assert seen[-len(dtypes) :] == dtypes
    assert len(seen) == len(dtypes) + start
