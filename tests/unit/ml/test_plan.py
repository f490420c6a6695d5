"""What a user says of a worker is a number, of whatever type."""

from __future__ import annotations

import numpy as np

from sparktorch.ml.fit.plan import check_figures


def test_figures_of_numpy_are_numbers() -> None:
    check_figures(np.int64(8000), np.float32(1.5), np.float64(2))  # type: ignore[arg-type]
