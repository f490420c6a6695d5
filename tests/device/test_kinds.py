"""Every kind of column trains on a device what it trains on the CPU, and no step waits for the device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.jobs import close, job_of, trained, waits_in_steps
from tests.device.kinds import KINDS

PARTS: dict[str, dict[str, Any]] = {"whole": {}, "micro-batches": {"micro_batch_size": 4}}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_what_the_cpu_trains(kind: str, parts: str) -> None:
    job = job_of(kind, validated=True, weighted=True, **PARTS[parts])
    expected, (reference,) = trained(job, kind, device="cpu")
    for ranks in (1, 2):
        for storage in ("memory", "disk"):
            on_device = job_of(kind, validated=True, weighted=True, storage=storage, **PARTS[parts])
            state, metas = trained(on_device, kind, ranks=ranks)
            close(state, expected)
            losses = [(record["loss"], record["val_loss"]) for record in metas[0]["history"]]
            known = [(record["loss"], record["val_loss"]) for record in reference["history"]]
            assert losses == [pytest.approx(pair, abs=1e-6) for pair in known]
            assert not waits_in_steps(metas)
            decoded = kind in ("image", "text", "padded, preprocessed")
            assert {meta["storage"] for meta in metas} == {
                "disk" if storage == "disk" else "memory" if decoded else "device"
            }
