"""What a user says of a worker is a number, of whatever type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparktorch.errors import ConfigError
from sparktorch.ml.fit.plan import check_figures


def test_figures_of_numpy_are_numbers() -> None:
    check_figures(np.int64(8000), np.float32(1.5), np.float64(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [10**400, 1e308, True, np.bool_(True), "8GB", 1j])
def test_what_no_plan_can_compute_with_is_refused(memory: Any) -> None:
    with pytest.raises(ConfigError, match="must be a number"):
        check_figures(memory, None, None)
