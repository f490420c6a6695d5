"""What an installed package does without extras: fit a file that Spark wrote, score it, save, load, score again."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession

import sparktorch
from sparktorch import TorchClassificationModel, TorchClassifier

extras = [name for name in ("mlflow", "torchmetrics", "PIL", "grpc", "petastorm", "s3fs") if find_spec(name)]
assert not extras, f"installed beside the package: {extras}"
assert Path(sparktorch.__file__).parent.parent.name == "site-packages", sparktorch.__file__

spark = SparkSession.builder.master("local[2]").getOrCreate()
x = np.random.default_rng(0).normal(size=(200, 4))
rows = [(i, Vectors.dense(row), float(row.sum() > 0)) for i, row in enumerate(x)]
spark.createDataFrame(rows, ["id", "features", "label"]).write.parquet("rows")
data = spark.read.parquet("rows")

sizes = {"in_features": 4, "out_features": 2}
model = TorchClassifier(module="torch.nn:Linear", moduleParams=sizes, numWorkers=2, epochs=20, learningRate=0.1).fit(
    data
)
model.save("model")
with torch.inference_mode():
    expected = model.module(torch.as_tensor(x, dtype=torch.float32)).argmax(1).tolist()
for scorer in (model, TorchClassificationModel.load("model")):
    scored = scorer.transform(data).orderBy("id").collect()
    assert [row["prediction"] for row in scored] == expected
accuracy = np.mean([row["prediction"] == row["label"] for row in scored])
assert accuracy > 0.9, accuracy
spark.stop()
print(f"sparktorch {sparktorch.__version__} from its wheel: accuracy {accuracy:.2f}, the same after saving and loading")
