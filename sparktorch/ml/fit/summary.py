"""The summary of a training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ConfigError
from sparktorch.ml.scoring import figures, html
from sparktorch.train.loop.validation import Best, validations_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TrainingSummary"]

_TABLE_EPOCHS = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingSummary:
    """The summary of a fit.

    Attributes:
        history: One record per epoch: `epoch` from 1, `loss` (mean over the training rows, weighted),
            `val_loss` and `val_accuracy` where there are validation rows, `learning_rate` of the last
            step, `seconds`, `rows_per_second` over all ranks, `data_wait_share` in `[0, 1]`;
            `gradient_norm` and `gradient_norm_max`, mean and maximum of the norm of the whole gradient before clipping,
            over all steps with `gradientClipNorm`, and over every 32nd and the last one without;
            `padding_share` if inputs are padded; further metrics as `val_NAME`, those of a training step also as
            `train_NAME`; `skipped_steps` if `nonFiniteLoss` is "skip"; `micro_batch_size` if `microBatchSize` is
            "auto"; and numbers that callbacks added. If
            a validation was before the first step: `untrained`, its metrics, in the first epoch. If
            validation is by step: `steps`, the number of steps in the epoch, and `validations`, a dict of `step`
            and metrics for each.
        rows: Number of training rows.
        validationRows: Number of validation rows.
        stepsPerEpoch: Optimizer steps in an epoch.
        numWorkers: Number of ranks.
        fingerprint: Identifies the training rows, independent of their order and partitioning. Fingerprints of
            different `split` values cannot be compared.
        seconds: Wall-clock seconds. `prepare` and `job` are the whole fit on the driver: what comes before the job, and
            all attempts with the pauses between them. `rank0.load`, `rank0.train` and others are phases of the rank
            that returned the model, in the last attempt alone.
        ranks: Per rank: host, device, threads, rows, bytes, `storage` ("memory", "disk", or "device" for
            accelerator memory), seconds (with checkpoints also of copying, of waiting for the previous checkpoint,
            which both pause the training, and of writing), `data_wait_share` (share of the training time spent
            waiting for rows, in `[0, 1]`), `peak_memory` (peak bytes of its process) and, on devices that report
            it, `peak_device_memory` (peak bytes of tensors); under strategy "independent" also `epochs`, the
            history of its own model.
        confusionMatrix: For a classifier with validation rows: how many rows of class `i` (row) the fitted model
            predicts as class `j` (column), without sample weights. `None` otherwise, and with more than 100 classes.
        droppedRows: Number of rows left out because they hold a null, NaN or infinity, under
            `nullPolicy` "drop".
        attempts: The attempts of the fit, one dict for each: `workers`; `began` and `ended`, in seconds since the first
            one; `why` it ended, empty for the last one; `steps` that count, and how many had to be done again
            (`redone`); `training`, the seconds from the first step to the last, times the share of steps that count;
            and `first_step_after` how many seconds.
        ended: Why the training ended: "patience", with the number of validations without a better one; "all epochs";
            "time", with the minutes that are over; or "stopped", by a callback or a search.
        best: The best validation, whose weights a model trained with patience has: its metrics, `epoch` (0 before the
            first step) and, of validations by step, `step`. Empty without validation.
        settings: The Params that `"auto"` stood for, with all others that it may stand for; empty in a fit without.
        heldOut: The samples that the fit has held out itself: `samples`, their number, in `unit`, and what they were
            chosen by. Empty if it has held out none.
        baseline: What predicting without inputs gives on the validation rows: of a classifier `val_accuracy`, that of
            the most frequent class; of a `TabularRegressor`, or a `Recommender` of ratings, `val_loss`, that of the
            mean; of a `Forecaster` with its own network that of its start. Empty of a series' model that is
            trained on, or if it is not known.
        labels: Names of a classifier's classes, if they have any; `to_dict` leaves them out.
    """

    history: list[dict[str, Any]]
    rows: int
    validationRows: int
    stepsPerEpoch: int
    numWorkers: int
    fingerprint: str
    seconds: dict[str, float]
    ranks: list[dict[str, Any]]
    confusionMatrix: list[list[int]] | None = None
    droppedRows: int = 0
    attempts: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    best: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    heldOut: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    labels: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        results: list[tuple[dict[str, Any], bytes]],
        seconds: dict[str, float],
        attempts: Callable[[int], list[dict[str, Any]]] | None = None,
        *,
        config: TrainConfig,
        chosen: Mapping[str, Any] | None = None,
    ) -> TrainingSummary:
        """Makes the summary from the results of all ranks and the seconds of the driver's phases.

        `attempts` returns those of a training of so many steps; `chosen` are fields that the estimator knows.
        """
        ranks = [meta for meta, _ in results]
        # Only the rank that returns the model has a payload.
        best = next(rank for rank, (_, payload) in enumerate(results) if payload)
        main = ranks[best]
        joined = [main] if "epochs" in main else ranks  # Independent ranks have a model each.
        history, steps = main.pop("history"), main["steps_per_epoch"]
        confusion, chosen = main.pop("confusion"), dict(chosen or {})
        validation_rows = sum(meta["validation_rows"] for meta in joined)
        if "heldOut" in chosen:  # An estimator that has counted the samples itself keeps its number.
            chosen["heldOut"] = {"samples": validation_rows, **chosen["heldOut"]}
        return cls(
            history=history,
            ended=ending(history, config, out_of_time=main.pop("out_of_time", False)),
            best=best_validation(history, config),
            **{"baseline": {**history[0].get("untrained", {})} or majority(confusion), **chosen},
            attempts=attempts(sum(record.get("steps", steps) for record in history)) if attempts else [],
            rows=sum(meta["rows"] for meta in joined),
            validationRows=validation_rows,
            stepsPerEpoch=main.pop("steps_per_epoch"),
            numWorkers=len(ranks),
            fingerprint=main.pop("fingerprint"),
            seconds=seconds | {f"rank{best}.{name}": value for name, value in main["seconds"].items()},
            ranks=ranks,
            confusionMatrix=confusion,
            droppedRows=sum(meta["dropped"] for meta in joined),
        )

    @property
    def objectiveHistory(self) -> list[float]:
        """The training loss of every epoch."""
        return [record["loss"] for record in self.history]

    @property
    def totalIterations(self) -> int:
        """Total number of optimizer steps."""
        return sum(record.get("steps", self.stepsPerEpoch) for record in self.history)

    @property
    def goodput(self) -> float | None:
        """The share of the time in which steps were trained that count; `None` if the driver saw none.

        The time is that from the beginning of the first attempt to the end of the last. The rest is what it took to
        start, to find lost workers, to wait for slots, and to repeat steps.
        """
        if not any(attempt["steps"] for attempt in self.attempts):
            return None
        return float(sum(attempt["training"] for attempt in self.attempts) / self.attempts[-1]["ended"])

    @property
    def paddingShare(self) -> float | None:
        """The mean over epochs of the share of padding in the padded inputs; `None` if nothing is padded."""
        shares = [record["padding_share"] for record in self.history if "padding_share" in record]
        return sum(shares) / len(shares) if shares else None

    @property
    def microBatchSize(self) -> int | None:
        """The most rows of a micro-batch that `microBatchSize="auto"` has found; `None` if it was not asked to."""
        return self.history[-1].get("micro_batch_size") if self.history else None

    def plot(self) -> Figure:
        """Draws the losses by epoch, the metrics of validation, and the learning rate if it changes.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        return figures.curves(self.history)

    def plotConfusion(self) -> Figure:
        """Draws `confusionMatrix`, with the names of the classes if they have any.

        Raises:
            ConfigError: There is no matrix, or matplotlib is not installed.
        """
        if self.confusionMatrix is None:
            raise ConfigError(
                "the training has counted no confusion matrix",
                hint="that of a classifier does, with validationIndicatorCol and up to 100 classes; "
                "model.evaluate(rows).plotConfusion() draws that of any rows",
            )
        return figures.confusion_matrix(self.confusionMatrix, self.labels)

    def __repr__(self) -> str:
        """Returns the numbers of rows, workers and epochs, the last epoch's losses and metrics, and the best ones."""
        last = self.history[-1] if self.history else {}
        facts: dict[str, Any] = {"rows": self.rows, "validationRows": self.validationRows}
        facts["numWorkers"] = self.numWorkers
        if len(self.attempts) > 1:
            facts |= {"attempts": len(self.attempts), "goodput": self.goodput}
        facts |= {"ended": self.ended} if self.ended else {}
        facts["epochs"] = len(self.history)
        facts |= {name: last[name] for name in _measured(last) if name in last}
        if self.best:
            facts["bestEpoch"] = self.best["epoch"]
            facts |= {f"best_{name}": value for name, value in self.best.items() if name.startswith("val_")}
        return f"TrainingSummary({', '.join(f'{name}={html.number(value)}' for name, value in facts.items())})"

    def _repr_html_(self) -> str:
        seconds = sum(record["seconds"] for record in self.history)
        whole = sum(self.seconds.get(phase, 0.0) for phase in ("prepare", "job"))
        facts = {
            "rows": f"{self.rows:,}" + (f", and {self.validationRows:,} of validation" if self.validationRows else ""),
            "workers": str(self.numWorkers),
            "epochs": f"{len(self.history)} in {seconds:.1f} s" + (f", of {whole:.1f} s of the fit" if whole else ""),
        }
        if self.ended:
            facts["ended"] = self.ended
        if self.heldOut:
            facts["held out"] = f"{self.heldOut['samples']:,} {self.heldOut['unit']}, by {self.heldOut['by']}"
        if self.settings:
            facts["chosen"] = ", ".join(f"{name} {html.number(value)}" for name, value in self.settings.items())
        for name, value in self.baseline.items():
            facts[f"{name} without inputs"] = html.number(value)
        if len(self.attempts) > 1:
            facts["attempts"] = f"{len(self.attempts)}, which trained {self.goodput or 0:.0%} of the time"
        names = dict.fromkeys(name for record in self.history for name in record)
        columns = ["epoch", *_measured(names)]
        columns += [name for name in ("learning_rate", "seconds") if name in names]
        table = html.grid(_table_rows(self.history), [*columns, ""]) if self.history else ""
        return html.block("Training", "", html.pairs(facts), table, html.drawn(self.plot) if self.history else "")

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dict; `TrainingSummary(**form)` is the inverse."""
        return {name: value for name, value in asdict(self).items() if name != "labels"}


def ending(history: Sequence[Mapping[str, Any]], config: TrainConfig, *, out_of_time: bool = False) -> str:
    """Returns why a training with that history ended."""
    best = Best(config)
    for record in history:
        for validation in validations_in(record):
            if config.judged(validation) is not None:
                best.offer(validation, dict)
    if best.out_of_patience:
        return f"patience: {config.patience} validations without a better {config.best_metric}"
    if out_of_time:
        return f"time: {config.max_minutes:g} minutes are over"
    return "all epochs" if len(history) >= config.epochs else "stopped by a callback or a search"


def best_validation(history: Sequence[Mapping[str, Any]], config: TrainConfig) -> dict[str, Any]:
    """Returns metrics and epoch of the best validation; the epoch is 0 before the first step. Some have a `step`."""
    best, loss = {}, math.inf
    for record in history:
        for validation in validations_in(record):
            judged = config.judged(validation)
            if judged is not None and judged < loss:
                metrics = {name: value for name, value in validation.items() if name.startswith("val_")}
                trained = validation is not record.get("untrained")
                loss, best = judged, {"epoch": record["epoch"] if trained else 0, **metrics}
                best |= {"step": validation["step"]} if "step" in validation else {}
    return best


def majority(confusion: Sequence[Sequence[int]] | None) -> dict[str, float]:
    """Returns the accuracy of predicting the most frequent class of a confusion matrix's rows."""
    counts = [sum(row) for row in confusion or ()]
    return {"val_accuracy": max(counts) / sum(counts)} if sum(counts) else {}


def _measured(names: Iterable[str]) -> list[str]:
    """Returns the names of losses and metrics among those of a record."""
    return ["loss", *(name for name in names if name.startswith(("val_", "train_")))]


def _table_rows(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the epochs that a table has room for: the first, that of the lowest loss, with a mark, and the last."""
    judged = [record for record in history if "val_loss" in record] or history
    loss = "val_loss" if "val_loss" in judged[0] else "loss"
    best = min(judged, key=lambda record: (math.isnan(record[loss]), record[loss]))
    best_position, before_last = history.index(best), len(history) - _TABLE_EPOCHS
    rows: list[dict[str, Any]] = []
    for position, record in enumerate(history):
        if position in (0, best_position) or position > before_last:
            rows.append({**record, "": f"lowest {loss}" if record is best else ""})
        elif rows[-1]["epoch"] != "…":
            rows.append({"epoch": "…"})
    return rows
