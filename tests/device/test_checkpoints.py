"""A training on devices that was killed goes on from its checkpoint, on as many devices, on others, and on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.jobs import DEVICE, close, within
from tests.support.nets import Noisy, Tower
from tests.support.ranks import train_on
from tests.support.resume import STEPS, Counts, job_for, killed, parts

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {"strategy": "zero3", "strategy_params": {"min_parameters": 60}},
}


def folder(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), *((strategy, 2) for strategy in STRATEGIES)])
def test_it_goes_on_to_the_same_bits(strategy: str, ranks: int, tmp_path: Path) -> None:
    config: dict[str, Any] = {"epochs": 2, "interval": 4, **STRATEGIES[strategy]}
    calm, rough = folder(tmp_path, "calm"), folder(tmp_path, "rough")
    expected, _ = train_on(parts(ranks), job_for(calm, Counts(calm), module=Noisy, **config), device=DEVICE)
    killed(job_for(rough, Counts(rough, rank=ranks - 1, step=STEPS + 5), module=Noisy, **config), ranks, device=DEVICE)
    found, _ = train_on(parts(ranks), job_for(rough, Counts(rough), module=Noisy, **config), device=DEVICE)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("ranks", "device"), [(1, DEVICE), (2, "cpu")])
def test_it_goes_on_elsewhere(ranks: int, device: str, tmp_path: Path) -> None:
    calm, rough = folder(tmp_path, "calm"), folder(tmp_path, "rough")
    expected, _ = train_on(parts(1), job_for(calm, module=Tower, epochs=2, interval=4), device="cpu")
    killed(job_for(rough, Counts(rough, rank=1, step=STEPS + 5), module=Tower, epochs=2, interval=4), 2, device=DEVICE)
    found, _ = train_on(parts(ranks), job_for(rough, module=Tower, epochs=2, interval=4), device=device)
    close(found, expected, 1e-5)


def test_a_checkpoint_waits_for_the_device_twice_whatever_it_holds(tmp_path: Path) -> None:
    _, metas = train_on(parts(1), job_for(folder(tmp_path, "calm"), module=Tower, interval=4), device=DEVICE)
    saves = 3 * STEPS // 4
    copies = [wait.partition(":")[0] for wait in metas[0]["waits"] if within(wait, "share")]
    assert copies == ["synchronize"] * 2 * saves  # for the epoch's losses, and for the module and its optimizer
