"""Plots of `benchmarks/results` for the page on performance, each for light and for dark pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
OURS, OTHERS, PARTS = "#2f7ed8", "#9aa5b1", ("#2f7ed8", "#f0a202", "#d1495b")
STYLES = {"light": "default", "dark": "dark_background"}
NET = "MLP 1024 x 4, batch 1024"


def bars(axes: Axes, result: dict[str, Any], names: dict[str, str], unit: str, digits: int = 1) -> None:
    """Draws medians with their spread; the first is ours."""
    values = [result["medians"][name] for name in names]
    spreads = [result["spreads"][name] for name in names]
    around = [[value - low for value, (low, _) in zip(values, spreads, strict=True)]]
    around += [[high - value for value, (_, high) in zip(values, spreads, strict=True)]]
    colours = [OURS, *[OTHERS] * (len(names) - 1)]
    drawn = axes.barh(list(names.values()), values, xerr=around, color=colours, ecolor="#d1495b", capsize=3)
    axes.bar_label(drawn, [f" {value:,.{digits}f}" for value in values], padding=12)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(unit)


def fit(axes: Axes, result: dict[str, Any]) -> None:
    """A whole fit, beside the same training by torchrun and by TorchDistributor."""
    bars(
        axes, result, {"fit, s": "fit", "torchrun, s": "torchrun", "TorchDistributor, s": "TorchDistributor"}, "seconds"
    )


def start(axes: Axes, result: dict[str, Any]) -> None:
    """What a job costs that trains next to nothing."""
    names = {"one-step fit, s": "fit of one step", "no-op TorchDistributor, s": "TorchDistributor, an empty function"}
    bars(axes, result, names, "seconds")


def scoring(axes: Axes, result: dict[str, Any]) -> None:
    """Rows scored a second, by four ways to score in Spark."""
    names = ("transform", "predict_batch_udf", "mlflow spark_udf", "row udf")
    bars(axes, result, {f"{name}, rows/s": name for name in names}, "rows a second", 0)


def search(axes: Axes, result: dict[str, Any]) -> None:
    """Sixteen trials of a search."""
    names = {
        "TorchTuner, 16 trials, s": "TorchTuner",
        "16 warm fits, s": "16 fits",
        "16 processes, two at a time, s": "16 processes, two at a time",
    }
    bars(axes, result, names, "seconds")


def memory(axes: Axes, result: dict[str, Any]) -> None:
    """What a rank holds of a model, by strategy."""
    names = ["ddp", "zero1", "zero2", "zero3"]
    below = [0.0] * len(names)
    for part, colour in zip(("parameters", "gradients", "state"), PARTS, strict=True):
        values = [result["medians"][f"{name}, 8 ranks: {part}, MiB"] for name in names]
        axes.bar(names, values, bottom=below, color=colour, label="optimizer state" if part == "state" else part)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_ylabel("MiB of a rank, of 8")
    axes.legend()


def scaling(axes: Axes, result: dict[str, Any]) -> None:
    """The efficiency that the model of a cluster predicts."""
    efficiency = result["efficiency"]
    for (name, values), colour in zip(efficiency[NET].items(), PARTS, strict=True):
        label = "loopback, as measured here" if name == "as here" else name
        axes.plot(efficiency["ranks"], values, "o-", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(efficiency["ranks"], [f"{ranks:,}" for ranks in efficiency["ranks"]])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("ranks")
    axes.set_ylabel("efficiency, predicted")
    axes.legend()


PLOTS = {"fit": (fit, "fit_wall"), "start": (start, "fit_wall"), "scoring": (scoring, "score")}
PLOTS |= {"search": (search, "search"), "memory": (memory, "memory"), "scaling": (scaling, "simulate")}


def draw(folder: Path, names: Sequence[str] = tuple(PLOTS)) -> None:
    """Writes `NAME-light.svg` and `NAME-dark.svg` of each plot."""
    folder.mkdir(exist_ok=True)
    for name in names:
        plot, benchmark = PLOTS[name]
        result = json.loads((RESULTS / f"{benchmark}.json").read_text())
        for style, base in STYLES.items():
            with plt.style.context(
                [base, {"svg.hashsalt": name, "axes.spines.top": False, "axes.spines.right": False}]
            ):
                figure, axes = plt.subplots(figsize=(7, 3 if plot in (memory, scaling) else 2.2), layout="constrained")
                plot(axes, result)
                source = f"benchmarks.{benchmark}, commit {result['commit']}, {result['date']}, {result['cores']} cores"
                figure.text(0.99, 0.0, source, ha="right", va="top", size=7, color="#888888")
                figure.savefig(
                    folder / f"{name}-{style}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
                )
                plt.close(figure)
