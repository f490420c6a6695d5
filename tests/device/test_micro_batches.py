"""microBatchSize="auto" on devices with little memory: what is found fits, and twice as much does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparktorch.data.columns import KEY
from sparktorch.errors import ClusterError
from sparktorch.worker import TrainJob
from tests.device.jobs import DEVICE, close, job_of, trained
from tests.device.kinds import KINDS, ROWS, Kind, Net
from tests.support.ranks import control_server, run_ranks, train_on

pytestmark = pytest.mark.skipif(DEVICE != "sim", reason="the memory of a real device cannot be limited")

LIMIT = {"SIM_MEMORY": str(20 << 20)}


class Hungry(Net):
    """Needs megabytes for each element of its input, on all ranks or on one; draws random numbers, has statistics."""

    def __init__(self, kind: str = "dense", rank: int = -1) -> None:
        super().__init__(kind)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self._rank = rank

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = self.layers(self.dropout(self.norm(self._features(*inputs)))).squeeze(-1)
        hungry = self._rank < 0 or (dist.is_initialized() and dist.get_rank() == self._rank)
        places = inputs[0][..., 0].numel() if self._kind == "padded" else len(out)
        width = (places << 18) // len(out) if hungry else 1
        found: torch.Tensor = out + out[:, None].expand(-1, width).sin().mean(1)
        return found


def hungry(size: Any, kind: str = "dense", rank: int = -1, **config: Any) -> TrainJob:
    params = {"kind": kind, "rank": rank}
    return job_of(kind, recipe={"module": Hungry, "module_params": params}, micro_batch_size=size, **config)


def sizes(metas: list[dict[str, Any]]) -> list[int]:
    return [record["micro_batch_size"] for record in metas[0]["history"]]


@pytest.mark.parametrize(("ranks", "rank", "strategy"), [(1, -1, "ddp"), (2, 1, "ddp"), (2, -1, "zero1")])
def test_what_is_found_fits_and_trains_as_if_it_were_set(ranks: int, rank: int, strategy: str) -> None:
    def job(size: Any) -> TrainJob:
        return hungry(size, rank=rank, strategy=strategy, batch_size=24, validated=True)

    state, metas = trained(job("auto"), ranks=ranks, environment=LIMIT)
    assert len({*sizes(metas)}) == 1
    size = sizes(metas)[-1]
    expected, known = trained(job(size), ranks=ranks, environment=LIMIT)
    close(state, expected)
    assert [record["loss"] for record in metas[0]["history"]] == [record["loss"] for record in known[0]["history"]]
    with pytest.raises(ClusterError, match="the memory of the device is full"):
        trained(job(2 * size + 1), ranks=ranks, environment=LIMIT)


def test_a_row_that_is_longer_than_all_before_is_split_off() -> None:
    place = int(np.argsort(KINDS["padded"].parts(1)[0][0].column(KEY).to_numpy())[50])
    rows = [[[0.5] * 6] * (4 if row == place else 1) for row in range(ROWS)]
    kind = Kind(KINDS["padded"].specs, (pa.array(rows, pa.list_(pa.list_(pa.float32(), 6))),))
    job = hungry("auto", "padded", shuffle=False, batch_size=4, epochs=1)
    state, metas = train_on(kind.parts(1), job, device=DEVICE, environment={"SIM_MEMORY": str(36 << 20)})
    assert sizes(metas) == [2]
    assert all(value.isfinite().all() for value in state.values())


def test_one_row_that_does_not_fit_is_an_error_with_advice_and_leaves_nothing() -> None:
    job = hungry("auto", rank=1)
    with control_server() as server:
        ended = run_ranks(server, KINDS["dense"].parts(2), job, device=DEVICE, environment={"SIM_MEMORY": str(1 << 20)})
        failure, _ = server.first_failure()
    assert [rank.left for rank in ended] == [0, 0]
    assert isinstance(failure, ClusterError)
    assert failure.where["rank"] == 1
    assert "microBatchSize='auto'" in failure.hint
