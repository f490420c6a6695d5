"""Draws docs/images/demo.svg of the last run of `make demo`: the loss of each epoch, and what it logged.

python scripts/demo_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from mlflow import MlflowClient

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "demo.svg"
CURVES = {"loss": "training", "val_loss": "validation"}


def draw() -> None:
    """Reads the newest run of the demo in MLflow, and writes the picture."""
    client = MlflowClient(f"sqlite:///{ROOT}/out/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None, "run `make demo` first"
    run, *_ = client.search_runs([experiment.experiment_id], max_results=1)
    params, metrics = run.data.params, run.data.metrics
    rows = [
        ("workers", params["numWorkers"]),
        ("rows of a step", params["batchSize"]),
        ("epochs", params["epochs"]),
        ("validation accuracy", f"{metrics['val_accuracy']:.3f}"),
    ]
    mpl.rcParams.update({"svg.hashsalt": "demo", "svg.fonttype": "none", "font.size": 10})
    figure, (curves, table) = plt.subplots(1, 2, figsize=(8, 2.6), width_ratios=(2, 1), layout="constrained")
    for name, label in CURVES.items():
        history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda point: point.step)
        curves.plot([point.step for point in history], [point.value for point in history], label=label)
    curves.set(xlabel="epoch", ylabel="loss", yscale="log")
    curves.spines[["top", "right"]].set_visible(False)
    curves.legend(frameon=False)
    table.axis("off")
    cells = table.table(rows, loc="center", edges="horizontal", colWidths=(0.7, 0.3))
    cells.scale(1, 1.6)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw()
