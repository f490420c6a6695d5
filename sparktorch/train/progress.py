"""What has come of a training so far: this rank's sums over the epoch it is in, and what all ranks know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from sparktorch.train.validation import Best

__all__ = ["Progress", "Tally"]


@dataclass
class Tally:
    """What adds up over the steps of an epoch in this rank.

    Attributes:
        losses: This rank's weighted losses of each step, float64 of shape `(steps,)`.
        taken: Number of steps.
        rows: Number of rows.
        waited: Seconds waited for rows.
        seconds: Seconds of the steps that were taken before the training was interrupted.
        validating: Seconds in validation.
        skipped: Steps that were left out.
        validations: What each validation found.
        places: Of the padded inputs.
        elements: In these places.
    """

    losses: torch.Tensor
    taken: int = 0
    rows: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    validating: float = 0.0
    skipped: list[int] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    places: int = 0
    elements: int = 0

    def sums(self) -> torch.Tensor:
        """Returns what adds up over ranks, for `Progress.record`."""
        sums = [float(self.losses.sum()), self.rows, self.waited, self.places, self.elements]
        return torch.tensor(sums, dtype=torch.float64)

    def add(self, other: Tally) -> None:
        """Adds the tally of another rank over the same steps."""
        self.losses += other.losses.to(self.losses.device)
        self.rows += other.rows
        self.waited += other.waited
        self.places += other.places
        self.elements += other.elements


class Progress:
    """What a training has come to, in one rank.

    Attributes:
        tally: Of the epoch that the training is in.
        history: The records of the epochs before it.
        best: The best validation, and how many came after it.
        confusion: Of the weights that the model would have now, where there is one.
        validated_step: The last after which the training was validated, 0 before any.
        ended: Whether it is over before its last epoch.
    """

    def __init__(self, steps: int, patience: int | None, device: torch.device) -> None:
        """Begins at nothing; `steps` are those of an epoch, `patience` that of `Best`."""
        self._steps, self._device = steps, device
        self.best = Best(patience)
        self.history: list[dict[str, Any]] = []
        self.confusion: torch.Tensor | None = None
        self.validated_step = 0
        self.ended = False
        self.tally = self._nothing()

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Adds the record of an epoch to the history, and begins to count anew."""
        self.history.append(record)
        self.tally = self._nothing()

    def last_validation(self) -> dict[str, Any]:
        """Returns a record with the metrics of the last validation, if this epoch or the one before was validated."""
        return (self.tally.validations or self.history or [{}])[-1]

    def record(
        self,
        sums: torch.Tensor,
        weights: torch.Tensor,
        seconds: float,
        ranks: int,
        *,
        number: int,
        learning_rate: float,
    ) -> dict[str, Any]:
        """Returns the record of the epoch, the same on every rank but for the seconds.

        Args:
            sums: `Tally.sums`, added over all ranks.
            weights: Of each step, over all ranks.
            seconds: That the steps have taken.
            ranks: Number of ranks.
            number: Of the epoch, from 1.
            learning_rate: Of the last step.
        """
        loss_sum, rows, waited, places, elements = sums.tolist()
        weights = weights.clone()
        weights[self.tally.skipped] = 0
        weight = float(weights[: self.tally.taken].sum())
        record = {
            "epoch": number,
            "loss": loss_sum / max(weight, torch.finfo(torch.float64).tiny),
            "learning_rate": learning_rate,
            "seconds": seconds,
            "rows_per_second": rows / seconds,
            "data_wait_share": waited / (seconds * ranks),
        }
        if places:
            record["padding_share"] = 1 - elements / places
        return record

    def state(self) -> dict[str, Any]:
        """Returns all of it but the best weights, for `merge`."""
        return {
            "best": self.best.state_dict(),
            "confusion": self.confusion,
            "validated_step": self.validated_step,
            "history": self.history,
            "ended": self.ended,
            "tally": asdict(self.tally),
        }

    def merge(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int, weights: dict[str, torch.Tensor]
    ) -> None:
        """Goes on from the states of ranks, of which there may have been another number.

        Each old rank's sums go to one of those that there are now.

        Args:
            states: By rank, what `state` returned, among other things.
            rank: This rank.
            size: Number of ranks now.
            weights: The best ones.
        """
        main = states[0]
        self.best.load_state_dict(main["best"], weights)
        self.confusion, self.validated_step = main["confusion"], main["validated_step"]
        self.history, self.ended = main["history"], main["ended"]
        sums: dict[str, Any] = dict.fromkeys(("rows", "waited", "places", "elements"), 0)
        self.tally = replace(Tally(**main["tally"]), losses=self._nothing().losses, **sums)
        for state in states[rank::size]:
            self.tally.add(Tally(**state["tally"]))

    def _nothing(self) -> Tally:
        return Tally(torch.zeros(self._steps, dtype=torch.float64, device=self._device))
