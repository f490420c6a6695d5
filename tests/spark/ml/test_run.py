"""A user's function in the tasks of a barrier job: its rows, results, errors, restarts, logs, and scripts."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparktorch
from sparktorch import RunContext, TorchRegressor
from sparktorch.errors import ClusterError, ColumnError, ConfigError, RankError
from sparktorch.ml.fit.run import run_script
from tests.support.mlflow import QUIET
from tests.support.nets import Noisy
from tests.support.waiting import until

ROWS = {"featuresCol": "features", "labelCol": "target", "weightCol": "weight", "batchSize": 64, "progress": False}


def loop(context: RunContext) -> None:
    context.barrier()


def regression(context: RunContext, prepare: Callable[..., Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(context.seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    ours, optimizer, backward = prepare(context, net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for epoch in context.epochs:
        for batch in context.loader(epoch):
            x, y = batch
            optimizer.zero_grad()
            backward(batch.mean((ours(x).squeeze(1) - y) ** 2))
            optimizer.step()
    return net.state_dict()


def of_accelerate(context: RunContext, net: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (context.rank, context.world_size)
    return *accelerator.prepare(net, optimizer), accelerator.backward


def of_fabric(context: RunContext, net: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=context.world_size)
    fabric.launch()
    assert (fabric.global_rank, fabric.world_size) == (context.rank, context.world_size)
    return *fabric.setup(net, optimizer), fabric.backward


@pytest.fixture(scope="module")
def fitted(frame: DataFrame) -> dict[str, torch.Tensor]:

    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    return TorchRegressor(module=module, learningRate=0.01, epochs=2, **ROWS).fit(frame).module.state_dict()


@pytest.mark.parametrize("prepare", [of_accelerate, of_fabric])
def test_a_loop_of_a_library_ends_with_the_weights_of_the_estimator(
    frame: DataFrame, fitted: dict[str, torch.Tensor], prepare: Callable[..., Any]
) -> None:
    states = sparktorch.run(regression, frame, args=[prepare], epochs=2, numWorkers=2, **ROWS)
    for state in states:
        torch.testing.assert_close(state, fitted, atol=1e-5, rtol=0)


def test_results_of_any_size_come_back_in_the_order_of_the_ranks(spark: SparkSession) -> None:
    def function(context: RunContext, size: int, *, letter: str) -> Any:
        return context.all_reduce(context.rank), letter * size + str(context.rank), torch.ones(2, requires_grad=True)

    found = sparktorch.run(function, args=[20 << 20], kwargs={"letter": "x"}, numWorkers=3)
    assert [len(text) for _, text, _ in found] == [(20 << 20) + 1] * 3
    assert [(total, text[-1]) for total, text, _ in found] == [(3, "0"), (3, "1"), (3, "2")]
    assert torch.equal(found[0][2], torch.ones(2))


def test_a_run_whose_rank_is_killed_goes_on_from_its_last_save(frame: DataFrame, tmp_path: Path) -> None:
    def function(context: RunContext, flag: str) -> tuple[Any, bool]:
        saved = Path(flag).parent / "killed"  # to which ranks write in the background
        net: Any = Noisy()
        net, optimizer = context.wrap(net, torch.optim.SGD(net.parameters(), lr=0.01))
        if context.restored is not None:
            net.load_state_dict(context.restored["net"])
        for epoch in context.epochs:
            for batch in context.loader(epoch):
                loss = batch.mean((net(batch.inputs[0]) - batch.label) ** 2)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if batch.step == 9:
                    context.save({"net": net.state_dict()})
                if (context.rank, epoch, batch.step) == (1, 1, 3) and flag and not os.path.exists(flag):
                    until(lambda: [*saved.glob("*/manifest.json")], seconds=60, what="the save is complete")
                    Path(flag).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return context.state_dict(net), context.restored is not None

    params = {**ROWS, "weightCol": None, "epochs": 2, "numWorkers": 2, "maxRestarts": 1}
    states = []
    for name, flag in (("calm", ""), ("killed", str(tmp_path / "flag"))):
        found = sparktorch.run(function, frame, args=[flag], checkpointDir=str(tmp_path / name), **params)
        states.append(found[0][0])
        assert [resumed for _, resumed in found] == [bool(flag)] * 2
    torch.testing.assert_close(states[0], states[1], atol=0, rtol=0)


def test_a_missing_column_too_few_slots_and_a_loader_without_rows_are_named(frame: DataFrame) -> None:
    with pytest.raises(ColumnError, match="feature"):
        sparktorch.run(loop, frame, featuresCol="feature")
    with pytest.raises(ClusterError, match="numWorkers=7, but the cluster has 3 slots"):
        sparktorch.run(loop, numWorkers=7, startTimeout=1)
    with pytest.raises(ConfigError, match="the run has no rows"):
        sparktorch.run(lambda context: next(context.loader(0)))


class TestTracking:
    pytestmark = QUIET

    def test_reports_are_the_metrics_of_the_mlflow_run_that_is_active(
        self, frame: DataFrame, store: MlflowClient
    ) -> None:
        def function(context: RunContext) -> None:
            for epoch in context.epochs:
                for batch in context.loader(epoch):
                    batch.mean(batch.label)
                context.report(error=torch.tensor(10.0 - epoch), rank=context.rank)

        with mlflow.start_run() as active:
            sparktorch.run(function, frame, epochs=3, numWorkers=2, **ROWS)
        run = store.get_run(active.info.run_id)
        history = [(one.step, one.value) for one in store.get_metric_history(active.info.run_id, "error")]
        assert sorted(history) == [(1, 10.0), (2, 9.0), (3, 8.0)]
        assert run.data.metrics["rank"] == 0
        assert run.data.params["batchSize"] == "64"
        assert "step_loss" in run.data.metrics


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from beside import offset
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + offset)])
dist.all_reduce(total)
print("total", total.item(), "of", sys.argv[1:], os.environ["LOCAL_WORLD_SIZE"])
if dist.get_rank() == 1 and "--fail" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("offset = 10\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_torchrun_starts_runs_unchanged(spark: SparkSession, script: Path, caplog: Any) -> None:
    def left(context: RunContext) -> tuple[int, Any]:
        return os.getpid(), (sys.argv, [path for path in sys.path if str(script.parent) in path], sorted(os.environ))

    with caplog.at_level(logging.INFO):
        run_script(script, ["--lr", "0.1"], spark=spark, numWorkers=2, logLevel="INFO")
        before = dict(sparktorch.run(left, numWorkers=3))
        run_script(script, [], spark=spark, numWorkers=3, logLevel="INFO")  # in the same Python workers
    assert caplog.text.count("total 21.0 of ['--lr', '0.1'] 2") == 2
    assert caplog.text.count("total 33.0 of [] 3") == 3
    after = dict(sparktorch.run(left, numWorkers=3))
    assert (same := before.keys() & after.keys())
    assert {pid: after[pid] for pid in same} == {pid: before[pid] for pid in same}


def test_a_script_that_exits_with_a_status_has_failed_in_that_rank(spark: SparkSession, script: Path) -> None:
    with pytest.raises(RankError, match=r"script\.py has ended with exit status 3") as caught:
        run_script(script, ["--fail"], spark=spark, numWorkers=2)
    assert caught.value.where["rank"] == 1
    with pytest.raises(FileNotFoundError):
        run_script("nowhere.py", [], spark=spark)
