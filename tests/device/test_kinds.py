"""Every kind of column trains on a device what it trains on the CPU, and no step waits for the device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.jobs import TOLERANCE, close, job_of, trained, waits_in_steps
from tests.device.kinds import KINDS

# Every pair of storage, number of ranks and parts.
WAYS: dict[str, list[tuple[str, int]]] = {
    "whole": [("memory", 1), ("disk", 2)],
    "micro-batches": [("disk", 1), ("memory", 2)],
}


@pytest.mark.parametrize("parts", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_what_the_cpu_trains(kind: str, parts: str) -> None:
    options: dict[str, Any] = {"validated": True, "weighted": True}
    if parts == "micro-batches":
        options["micro_batch_size"] = 4
    expected, (reference,) = trained(job_of(kind, **options), kind, device="cpu")
    known = [(record["loss"], record["val_loss"]) for record in reference["history"]]
    for storage, ranks in WAYS[parts]:
        state, metas = trained(job_of(kind, storage=storage, **options), kind, ranks=ranks)
        close(state, expected)
        losses = [(record["loss"], record["val_loss"]) for record in metas[0]["history"]]
        assert losses == [pytest.approx(pair, abs=TOLERANCE) for pair in known]
        assert not waits_in_steps(metas)
        decoded = kind in ("image", "text", "padded, preprocessed")
        place = "disk" if storage == "disk" else "memory" if decoded else "device"
        assert {meta["storage"] for meta in metas} == {place}
