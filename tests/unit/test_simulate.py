"""The model of ring all-reduces that the simulation of many ranks is of, and samples that are taken again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.ring import Gradient, Link, all_reduce, buckets


def test_a_ring_sends_nearly_twice_the_bytes() -> None:
    assert all_reduce(1e9, 2, Link(1e9)) == pytest.approx(1.0)
    assert all_reduce(1e9, 4, Link(1e9)) == pytest.approx(1.5)
    assert all_reduce(1e9, 10**6, Link(1e9)) == pytest.approx(2.0, abs=1e-5)
    assert all_reduce(0, 5, Link(1e9, latency=1e-3)) == pytest.approx(8e-3)


@pytest.mark.parametrize("cap", [0, 1, 4_000, 4_001, 100_000, 10**9])
def test_buckets_are_those_of_torch(cap: int) -> None:
    sizes = [1000, 3000, 40, 200_000, 4000, 4000, 17, 90_000, 8]
    tensors = [torch.empty(size // 4 + 1) for size in sizes]
    # torch sorts what it returns by the first tensor of a bucket, which here is the order of readiness.
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, [cap])
    gradients = [Gradient(float(i), tensor.nbytes) for i, tensor in enumerate(tensors)]
    assert buckets(gradients, cap) == tuple(
        Gradient(float(indices[-1]), sum(tensors[i].nbytes for i in indices)) for indices in expected
    )


def test_a_sample_whose_process_aborts_at_its_end_is_measured_again_and_counted(tmp_path: Path) -> None:
    aborts = "echo 'terminate called without an active exception' >&2; exit 1"
    script = f"if [ -e {tmp_path}/done ]; then echo measured; else touch {tmp_path}/done; {aborts}; fi"
    before = len(common._repeated)
    assert common.run_process(["sh", "-c", script])[1] == "measured\n"
    assert len(common._repeated) == before + 1
    with pytest.raises(RuntimeError, match="failed with 3"):
        common.run_process(["sh", "-c", "exit 3"])
    assert len(common._repeated) == before + 1
