"""Petastorm's readers and loaders feed `train_partition`, which ends with the weights of a fit on the DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from petastorm import make_batch_reader
from petastorm.spark.spark_dataset_converter import SparkDatasetConverter, make_spark_converter
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchRegressor
from sparktorch.adapters.petastorm.decoder import reader_batches
from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import Columns
from sparktorch.data.sampling.plan import rank_of_key
from sparktorch.spark.frame.prepare import Frame, prepare
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.spark.modules import MLP
from tests.support.ranks import train_on

pytestmark = pytest.mark.filterwarnings("ignore")  # petastorm warns of the pyarrow that it was written for

BATCH, EPOCHS, SEED, RATE, RANKS = 64, 2, 11, 0.01, 2


@pytest.fixture(scope="module")
def prepared(frame: DataFrame) -> Frame:
    return prepare(frame, "regression", inputs=["features"], label="target", weight="weight")


@pytest.fixture(scope="module")
def fitted(frame: DataFrame) -> dict[str, torch.Tensor]:
    model = TorchRegressor(
        module=MLP,
        labelCol="target",
        weightCol="weight",
        batchSize=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        learningRate=RATE,
        numWorkers=RANKS,
        progress=False,
    ).fit(frame)
    assert model.summary.rows == 1001
    assert model.summary.history[-1]["loss"] < 0.9 * model.summary.history[0]["loss"]  # there is something to agree on
    return dict(model.module.state_dict())


@pytest.fixture(scope="module")
def converter(
    spark: SparkSession, prepared: Frame, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkDatasetConverter]:
    cache = tmp_path_factory.mktemp("converter").as_uri()
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, cache)
    made = make_spark_converter(prepared.data.repartition(3), dtype=None)
    assert len(made) == 1001
    yield made
    made.delete()


def on_the_wire(columns: Columns) -> Columns:
    form = {spec.column: spec.name for spec in columns.tensors}
    rename = lambda spec: type(spec).from_dict({**spec.to_dict(), "column": form[spec.column]})  # noqa: E731
    assert columns.label is not None
    assert columns.weight is not None
    return Columns(
        inputs=tuple(map(rename, columns.inputs)), label=rename(columns.label), weight=rename(columns.weight)
    )


def trained(reader: Iterable[Any], prepared: Frame) -> dict[str, torch.Tensor]:
    columns = on_the_wire(prepared.columns)
    whole = pa.Table.from_batches(list(reader_batches(reader, columns, key="k"))).combine_chunks()
    rank = rank_of_key(whole["k"].to_numpy(), RANKS)
    parts = [whole.filter(pa.array(rank == index)).to_batches(max_chunksize=100) for index in range(RANKS)]
    job = TrainJob(
        columns=columns,
        recipe=Recipe(module=MLP, loss="MSELoss", optimizer="AdamW", learning_rate=RATE),
        config=TrainConfig(task="regression", batch_size=BATCH, epochs=EPOCHS, seed=SEED),
    )
    state, metas = train_on(parts, job)
    assert sum(meta["rows"] for meta in metas) == 1001
    return state


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


def test_a_batch_reader_trains_the_model_of_the_dataframe(
    prepared: Frame, fitted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    prepared.data.repartition(3).write.parquet(str(tmp_path / "rows"))
    url = (tmp_path / "rows").as_uri()
    with make_batch_reader(url, reader_pool_type="dummy", num_epochs=1, shuffle_row_groups=True) as reader:
        assert_same(trained(reader, prepared), fitted)


def test_the_converter_s_loader_trains_the_model_of_the_dataframe(
    converter: SparkDatasetConverter, prepared: Frame, fitted: dict[str, torch.Tensor]
) -> None:
    with converter.make_torch_dataloader(batch_size=100, num_epochs=1, workers_count=1) as loader:
        assert_same(trained(loader, prepared), fitted)
