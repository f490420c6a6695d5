"""What a fit looked like."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TrainingSummary"]


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """The course of a fit.

    Attributes:
        history: One record per epoch: `epoch` from 1, `loss` (mean over the training rows, weighted),
            `val_loss` and `val_accuracy` where there are validation rows, `learning_rate` of the last
            step, `seconds`, `rows_per_second` over all ranks, `data_wait_share` in `[0, 1]`;
            `gradient_norm` and `gradient_norm_max`, mean and maximum of the norm of the whole gradient before clipping,
            over all steps with `gradientClipNorm` and over every 32nd and the last one without;
            `padding_share` where inputs are padded; further metrics as `val_NAME`, those of a training step as
            `train_NAME` too, `skipped_steps` where `nonFiniteLoss` is "skip", and what callbacks have added. Where
            validation goes by step, `steps` that the epoch took, and `validations`: a dict of `step` and
            metrics for each.
        rows: Number of training rows.
        validationRows: Number of validation rows.
        stepsPerEpoch: Optimizer steps in an epoch.
        numWorkers: Number of ranks.
        fingerprint: Identifies the training rows, whatever their order and partitioning; those of one split
            cannot be compared with those of the other.
        seconds: Wall seconds of the driver's phases and of those of the rank that the model comes from.
        ranks: Per rank: host, device, threads, rows, bytes, `storage` ("memory", "disk", or "device" for an
            accelerator's own memory), seconds (with checkpoints
            also those of copying and of waiting for the one before, in which training stood still, and of writing),
            `data_wait_share` (what part of its training it waited for rows, in `[0, 1]`), `peak_memory` (the most
            bytes that its process held) and, on devices that count, `peak_device_memory` (the most bytes of tensors
            there); and `epochs`, the history of its own model, under strategy "independent".
        confusionMatrix: Of a classifier with validation rows, how many of them with class `i` (row)
            were predicted as class `j` (column) with the weights of the model, sample weights aside;
            `None` otherwise, and with more than 100 classes.
        droppedRows: Number of rows left out because they hold a null, NaN or infinity, under
            `nullPolicy` "drop".
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

    @classmethod
    def of(cls, results: list[tuple[dict[str, Any], bytes]], seconds: dict[str, float]) -> TrainingSummary:
        """Returns the course of a fit, of what each rank handed back and the seconds of the driver's phases."""
        ranks = [meta for meta, _ in results]
        best = next(rank for rank, (_, payload) in enumerate(results) if payload)
        main = ranks[best]
        joined = [main] if "epochs" in main else ranks  # independent ranks have a model each
        return cls(
            history=main.pop("history"),
            rows=sum(meta["rows"] for meta in joined),
            validationRows=sum(meta["validation_rows"] for meta in joined),
            stepsPerEpoch=main.pop("steps_per_epoch"),
            numWorkers=len(ranks),
            fingerprint=main.pop("fingerprint"),
            seconds=seconds | {f"rank{best}.{name}": value for name, value in main["seconds"].items()},
            ranks=ranks,
            confusionMatrix=main.pop("confusion"),
            droppedRows=sum(meta["dropped"] for meta in joined),
        )

    @property
    def objectiveHistory(self) -> list[float]:
        """The training loss of every epoch."""
        return [record["loss"] for record in self.history]

    @property
    def totalIterations(self) -> int:
        """Optimizer steps in all."""
        return sum(record.get("steps", self.stepsPerEpoch) for record in self.history)

    @property
    def paddingShare(self) -> float | None:
        """The share of padding in the padded inputs, over the epochs; `None` where nothing is padded."""
        shares = [record["padding_share"] for record in self.history if "padding_share" in record]
        return sum(shares) / len(shares) if shares else None

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; `TrainingSummary(**form)` is its inverse."""
        return asdict(self)
