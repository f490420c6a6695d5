"""What a device has no room for: rows stay on the host, and a module that does not fit is an error with a way out."""

from __future__ import annotations

import pytest
import torch

from sparktorch.base.config import StorageConfig, TrainConfig
from sparktorch.errors import ClusterError
from sparktorch.train.recipe.recipe import Recipe
from tests.device.jobs import DEVICE, close, job_of, trained, waits_in_steps
from tests.device.kinds import KINDS, Net
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.ranks import control_server, run_ranks, train_job, train_on

pytestmark = pytest.mark.skipif(DEVICE != "sim", reason="the memory of a real device cannot be limited")


class Activations(Net):
    """Needs a megabyte a row."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs) + self.layers[2].bias.expand(len(inputs[0]), 1 << 18).sin().mean(1)


def test_rows_that_would_take_most_of_it_stay_in_the_memory_of_the_host() -> None:
    job = job_of("padded", validated=True, weighted=True, micro_batch_size=4)
    expected, _ = trained(job, "padded", device="cpu")
    state, metas = trained(job, "padded", environment={"SIM_MEMORY": "14000"})
    close(state, expected)
    assert {meta["storage"] for meta in metas} == {"memory"}
    assert not waits_in_steps(metas)


def test_a_full_device_is_an_error_that_says_what_to_do() -> None:
    job = job_of(recipe={"module": Activations})
    with pytest.raises(ClusterError) as caught:
        trained(job, environment={"SIM_MEMORY": str(20 << 20)})
    assert caught.value.what.startswith("the memory of the device is full: SIM out of memory")
    assert "microBatchSize" in caught.value.hint
    assert caught.value.where["step"] == 1
    smaller = job_of(recipe={"module": Activations}, micro_batch_size=3)
    state, _ = trained(smaller, environment={"SIM_MEMORY": str(20 << 20)})
    close(state, trained(job, device="cpu")[0])


def test_ranks_on_different_kinds_of_devices_all_train_on_the_cpu() -> None:
    _, metas = trained(job_of(), ranks=2, device=["sim:0", "cpu"])
    assert [meta["device"] for meta in metas] == ["cpu", "cpu"]


def test_rows_from_disk_come_to_the_device_a_few_batches_at_a_time() -> None:
    table = Table.random(4_000)
    job = train_job(
        table,
        Recipe(module=Score, loss="MSELoss", optimizer="SGD"),
        TrainConfig(task="regression", batch_size=40, shuffle_block=100),
        storage=StorageConfig(kind="disk", budget=64),
    )
    _, (meta,) = train_on([table.batches()], job, device=DEVICE)
    a_batch = 40 * (5 + 1) * 4
    assert meta["peak_device_memory"] < 10 * a_batch < meta["bytes"]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_nothing_is_left_on_a_device_after_a_fit(strategy: str) -> None:
    job = job_of(validated=True, strategy=strategy, patience=1, ema_decay=0.5)
    with control_server() as server:
        ended = run_ranks(server, KINDS["dense"].parts(2), job, device=DEVICE)
    assert [rank.left for rank in ended] == [0, 0]
    assert all(rank.result and rank.result.meta["peak_device_memory"] for rank in ended)


def test_nothing_is_left_on_a_device_that_was_full() -> None:
    job = job_of(recipe={"module": Activations})
    with control_server() as server:
        (ended,) = run_ranks(
            server, KINDS["dense"].parts(1), job, device=DEVICE, environment={"SIM_MEMORY": str(10 << 20)}
        )
    assert (ended.error, ended.left) == ("ClusterError", 0)
