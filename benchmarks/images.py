"""Pictures of clothes by an ImageClassifier without settings, beside a plain torch loop of the same network.

The Fashion-MNIST that the npm package `fashion-mnist` has, 70,000 pictures of 28 x 28 pixels in ten classes, which
nothing was chosen on: the network, and the settings that "auto" stands for, were chosen on the digits of npm's `mnist`.
10,000 drawn pictures train, and 10,000 others are scored; the error is the share of them whose class is wrong. Both
sides have two cores, random weights of the same seed, and the same epochs, batches and learning rates:

- `ImageClassifier(imageCol="image", numWorkers=2)` reads PNG files from a DataFrame, and holds out a tenth of them.
- The loop has the pictures as one tensor, trains on all of them by one process of two threads, and holds none out.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from pyspark.sql import DataFrame, SparkSession

from benchmarks.common import Goal, arguments, machine, report, seconds, session, workspace
from benchmarks.packages import data_option, from_npm
from sparktorch import ImageClassifier
from sparktorch.tasks.images.network import ImageNetwork

CORES = 2
CLOTHES, DIGITS = ("fashion-mnist", "1.1.0"), ("mnist", "1.1.0")
TRAINED, SCORED, QUICK = 10_000, 10_000, 500
SECONDS, ERROR = "seconds a picture trained, ours / torch loop", "error, ours / torch loop"
GOALS = {SECONDS: Goal(1.3), ERROR: Goal(1.05)}


def pictures(package: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns pictures, uint8 of shape (rows, 28, 28), and their classes."""
    images, labels = [], []
    for label in range(10):
        (file,) = (package / "src").glob(f"*/{label}.json")
        rows = [row for row in json.loads(file.read_text())["data"] if row]  # Two pictures of the package are empty.
        pixels = np.array(rows, np.float32).reshape(-1, 28, 28)
        images.append((pixels * (255 if pixels.max() <= 1 else 1)).round().astype(np.uint8))
        labels.append(np.full(len(pixels), label))
    return np.concatenate(images), np.concatenate(labels)


def written(spark: SparkSession, path: Path, images: np.ndarray, labels: np.ndarray) -> DataFrame:
    """Writes pictures as PNG files in a table of a file for each core, and reads it."""
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        files.append(file.getvalue())
    rows = pd.DataFrame({"image": files, "label": labels})
    path.mkdir()
    for part in range(CORES):
        rows.iloc[part::CORES].to_parquet(path / f"{part}.parquet", index=False)
    return spark.read.parquet(str(path))


def tensor(images: np.ndarray) -> torch.Tensor:
    """Returns pictures as a model gets them: float32 of shape (rows, 3, 28, 28)."""
    return torch.from_numpy(images).to(torch.float32).div_(255)[:, None].expand(-1, 3, -1, -1).contiguous()


def by_hand(images: torch.Tensor, labels: torch.Tensor, epochs: int, settings: dict[str, Any], seed: int) -> Any:
    """Trains the same network as a script would, and returns it."""
    torch.manual_seed(seed)
    model = ImageNetwork(10, images.shape[1:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learningRate"])
    batch = settings["batchSize"]
    steps = epochs * -(-len(images) // batch)
    warm = max(1, round(0.1 * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(images)), batch):
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model


def options_of(parser: argparse.ArgumentParser) -> None:
    data_option(parser)
    parser.add_argument("--rows", type=int, default=TRAINED, help="pictures that train")
    parser.add_argument("--seeds", type=int, default=1, help="draws of pictures, and fits of each side")
    parser.add_argument("--development", action="store_true", help="digits in place of clothes, and 2,000 scored")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    development = options.development or options.quick
    images, labels = pictures(from_npm(*(DIGITS if development else CLOTHES), options.data))
    trained, scored = (QUICK, QUICK) if options.quick else (options.rows, 2_000 if development else SCORED)
    samples: dict[str, list[float]] = {}
    epochs: list[float] = []
    torch.set_num_threads(CORES)
    with workspace() as work, session(work, cores=CORES) as spark:
        for seed in range(options.seeds):
            order = np.random.default_rng(seed).permutation(len(images))
            train, test = order[:trained], order[trained : trained + scored]
            rows, held_out = (
                written(spark, work / f"{name}-{seed}", images[positions], labels[positions])
                for name, positions in (("train", train), ("test", test))
            )
            models: list[Any] = []
            estimator = ImageClassifier(numWorkers=CORES, seed=seed, progress=False)
            wall = seconds(lambda: models.append(estimator.fit(rows)))  # noqa: B023
            summary = models[0].summary
            epochs.append(len(summary.history))
            error = 1 - models[0].evaluate(held_out).accuracy
            chosen = (len(summary.history), summary.settings, seed)
            inputs, targets = tensor(images[train]), torch.from_numpy(labels[train])
            loop = seconds(lambda: models.append(by_hand(inputs, targets, *chosen)))  # noqa: B023
            with torch.inference_mode():
                wrong = [
                    (models[1](tensor(images[batch])).argmax(1).numpy() != labels[batch]).mean()
                    for batch in np.array_split(test, 10)
                ]
            shares = trained - summary.heldOut.get("samples", 0), trained
            for name, value in (
                ("ImageClassifier, s", wall),
                ("torch loop, s", loop),
                ("ImageClassifier, ms a picture trained", 1e3 * wall / shares[0] / epochs[-1]),
                ("torch loop, ms a picture trained", 1e3 * loop / shares[1] / epochs[-1]),
                ("ImageClassifier, error", error),
                ("torch loop, error", float(np.mean(wrong))),
            ):
                samples.setdefault(name, []).append(value)
                print(f"{seed} {name}: {value:.4g}", file=sys.stderr, flush=True)
    means = {name: statistics.mean(values) for name, values in samples.items()}
    ratios = {
        SECONDS: means["ImageClassifier, ms a picture trained"] / means["torch loop, ms a picture trained"],
        ERROR: means["ImageClassifier, error"] / max(means["torch loop, error"], 1e-9),
    }
    facts = {"epochs": epochs, "pictures": trained, **machine("torch", "pyspark")}
    report("images", samples=samples, ratios=ratios, goals=GOALS, facts=facts, path=options.json)


if __name__ == "__main__":
    main()
