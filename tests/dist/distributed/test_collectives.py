"""Collectives on tensors, arrays and numbers, and calls that do not go together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.world import World
from sparktorch.distributed.collectives import Collectives
from tests.support.ranks import in_group

RANKS = 3
Found = tuple[list[Any], list[Any], dict[str, str], bool]


def _each(world: World) -> None:
    for dtype in (torch.bfloat16, torch.int16, torch.complex64, torch.bool):
        _check(world, dtype)


def _check(world: World, dtype: torch.dtype) -> None:
    """Checks each collective with tensors of a dtype."""
    ranks, rank = Collectives(world), world.rank
    values = [torch.arange(6).add(of).to(dtype).reshape(6, 1) for of in range(RANKS)]
    own = values[rank].clone()
    total = values[0] + values[1] + values[2]
    if dtype is not torch.bool:
        assert _same(ranks.all_reduce(own), total)
        assert _same(ranks.reduce_scatter(own), total[2 * rank : 2 * rank + 2])
    if not dtype.is_complex:
        assert _same(ranks.all_reduce(own, "max"), values[0].maximum(values[1]).maximum(values[2]))
    assert all(map(_same, ranks.all_gather(own), values))
    assert all(map(_same, ranks.all_gather(own[:rank]), [value[:of] for of, value in enumerate(values)]))
    assert _same(ranks.broadcast(own if rank == 1 else None, source=1), values[1])
    scattered = [values[1], values[1][:2], values[1][:0]]
    assert _same(ranks.scatter(scattered if rank == 1 else None, source=1), scattered[rank])
    gathered = ranks.gather(own, target=2)
    assert gathered is None if rank != 2 else all(map(_same, gathered or [], values))
    assert _same(own, values[rank])


def _exact(world: World) -> list[Any]:
    ranks, rank = Collectives(world), world.rank
    return [
        ranks.all_reduce(torch.tensor([40000.0]).half(), "mean").item(),
        ranks.all_reduce((1 + rank) / 3 * 1j),
        ranks.all_gather(torch.tensor([1 + 2j]).conj())[1].item(),
        ranks.all_reduce(np.array([1.0, rank], dtype=">f8")).tolist(),
    ]


def test_sums_neither_overflow_nor_lose_digits_and_views_and_byte_orders_arrive(two: list[Found]) -> None:
    for found, *_ in two:
        assert found == [40000.0, 1j, 1 - 2j, [2.0, 1.0]]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def test_each_collective_returns_what_its_name_says() -> None:
    in_group(RANKS, _each)


def _kinds(world: World) -> list[Any]:
    ranks = Collectives(world)
    fortran = np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)) + world.rank
    return [
        ranks.all_reduce(fortran),
        ranks.all_reduce(world.rank + 0.1, "mean"),
        ranks.all_reduce(world.rank),
        ranks.broadcast(fortran if world.rank == 0 else None),
        ranks.all_gather(world.rank / 3),
        ranks.all_reduce(torch.ones(3, requires_grad=True)).requires_grad,
        ranks.barrier(),
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_arrays_and_numbers_stay_arrays_and_numbers(size: int, two: list[Found]) -> None:
    base, mean = np.arange(6, dtype=np.float64).reshape(2, 3), sum(range(size)) / size
    for found in [kinds for _, kinds, *_ in two] if size == 2 else in_group(1, _kinds):
        assert isinstance(found[0], np.ndarray)
        np.testing.assert_array_equal(found[0], size * (base + mean))
        assert found[1] == pytest.approx(mean + 0.1, abs=1e-15)
        assert found[2] == sum(range(size))
        assert isinstance(found[2], int)
        np.testing.assert_array_equal(found[3], base)
        assert found[4] == [rank / 3 for rank in range(size)]
        assert found[5] is False


def _wrong(world: World) -> dict[str, str]:
    """Makes calls that do not go together; returns what each has raised."""
    ranks, main, said = Collectives(world), world.is_main, dict[str, str]()
    calls: dict[str, Any] = {
        "shapes": lambda: ranks.all_reduce(torch.ones(2 if main else 3)),
        "names": lambda: ranks.all_reduce(1) if main else ranks.barrier(),
        "sources": lambda: ranks.broadcast(1, source=world.rank),
        "nothing": lambda: ranks.broadcast(None),
        "parts": lambda: ranks.reduce_scatter(torch.ones(3)),
        "few": lambda: ranks.scatter([1] if main else None),
        "text": lambda: ranks.all_gather("text" if main else 1),
    }
    for what, call in calls.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is part of what is returned
            call()
        said[what] = f"{caught.type.__name__}: {caught.value}"
        assert ranks.all_reduce(1) == world.world_size  # the ranks are in step still
    return said


def test_calls_that_do_not_go_together_are_named_in_every_rank_and_none_waits(two: list[Found]) -> None:
    first, second = (wrong for _, _, wrong, _ in two)
    cannot = {what: (first.pop(what), second.pop(what)) for what in ("few", "text")}
    assert first == second
    assert first["shapes"].startswith("ValueError: all_reduce needs equal dtypes and shapes: float32 of shape (2,) in")
    assert first["names"].endswith("not at the same point: all_reduce(sum) in rank 0; barrier in rank 1")
    assert first["sources"].endswith("broadcast(rank 0) in rank 0; broadcast(rank 1) in rank 1")
    assert first["nothing"] == "ValueError: broadcast got no value in its source, rank 0"
    assert first["parts"].startswith("ValueError: reduce_scatter got shape (3,)")
    assert cannot["few"][0] == "ValueError: scatter got 1 values in its source, rank 0, for 2 ranks"
    assert cannot["text"][0].startswith("TypeError: collectives take dense tensors, NumPy arrays and numbers")
    assert [of_other for _, of_other in cannot.values()] == [
        "DistError: scatter: rank 0 cannot go on",
        "DistError: all_gather: rank 0 cannot go on",
    ]


def _recorded(world: World) -> bool:
    torch.distributed.all_reduce(torch.ones(2))
    return b"all_reduce" in torch._C._distributed_c10d._dump_fr_trace_json(True, False)


def test_ranks_on_cpus_keep_nothing_of_their_collectives(two: list[Found]) -> None:
    assert [recorded for *_, recorded in two] == [False, False]


def _all(world: World) -> Found:
    return _exact(world), _kinds(world), _wrong(world), _recorded(world)


@pytest.fixture(scope="module")
def two() -> list[Found]:
    """What two ranks have found."""
    return in_group(2, _all)
