"""The model of ring all-reduces: its limits, and what it must never do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import common
from benchmarks.ring import Gradient, Link, Work, all_reduce, buckets, evenly, step

LINK = Link(bandwidth=1e9, latency=1e-5)
WORK = Work(0.05, 0.10, 0.01, evenly(100e6, 10e6, 0.10))

links = st.builds(
    Link,
    bandwidth=st.floats(1e6, 1e11),
    latency=st.floats(0, 1e-3),
    busy=st.floats(0, 1),
)
works = st.builds(
    lambda forward, backward, size, count: Work(forward, backward, 0.01, evenly(size, size / count, backward)),
    st.floats(1e-4, 1),
    st.floats(1e-4, 1),
    st.floats(1e3, 1e9),
    st.integers(1, 20),
)


def test_a_ring_sends_nearly_twice_the_bytes() -> None:
    assert all_reduce(1e9, 2, Link(1e9)) == pytest.approx(1.0)
    assert all_reduce(1e9, 4, Link(1e9)) == pytest.approx(1.5)
    assert all_reduce(1e9, 10**6, Link(1e9)) == pytest.approx(2.0, abs=1e-5)
    assert all_reduce(0, 5, Link(1e9, latency=1e-3)) == pytest.approx(8e-3)


def test_where_sending_takes_longer_than_the_backward_pass_the_link_is_never_idle() -> None:
    sending = 10 * all_reduce(10e6, 8, LINK)
    assert all_reduce(10e6, 8, LINK) > 0.01
    first = WORK.buckets[0].ready
    assert step(WORK, 8, LINK) == pytest.approx(WORK.forward + first + sending + WORK.optimizer)


@given(works, links, st.integers(1, 5000))
def test_overlap_never_costs_and_never_saves_more_than_there_is(work: Work, link: Link, ranks: int) -> None:
    overlapped, flat = step(work, ranks, link), step(work, ranks, link, overlap=False)
    assert work.seconds <= overlapped * (1 + 1e-9)
    assert overlapped <= flat * (1 + 1e-9)


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
