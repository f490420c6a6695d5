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


def _each(world: World, name: str) -> None:
    """Checks each collective with tensors of a dtype."""
    dtype = getattr(torch, name)
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


def test_sums_neither_overflow_nor_lose_digits_and_views_and_byte_orders_arrive() -> None:
    for found in in_group(2, _exact):
        assert found == [40000.0, 1j, 1 - 2j, [2.0, 1.0]]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "complex64", "bool", "uint8"])
def test_each_collective_returns_what_its_name_says(dtype: str) -> None:
    in_group(RANKS, _each, dtype)


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
def test_arrays_and_numbers_stay_arrays_and_numbers(size: int) -> None:
    base, mean = np.arange(6, dtype=np.float64).reshape(2, 3), sum(range(size)) / size
    for found in in_group(size, _kinds):
        assert isinstance(found[0], np.ndarray)
        np.testing.assert_array_equal(found[0], size * (base + mean))
        assert found[1] == pytest.approx(mean + 0.1, abs=1e-15)
        assert found[2] == sum(range(size))
        assert isinstance(found[2], int)
        np.testing.assert_array_equal(found[3], base)
        assert found[4] == [rank / 3 for rank in range(size)]
        assert found[5] is False


def _wrong(world: World, what: str) -> str:
    ranks, main = Collectives(world), world.is_main
    calls: dict[str, Any] = {
        "shapes": lambda: ranks.all_reduce(torch.ones(2 if main else 3)),
        "dtypes": lambda: ranks.all_reduce(1 if main else 1.0),
        "names": lambda: ranks.all_reduce(1) if main else ranks.barrier(),
        "operations": lambda: ranks.all_reduce(1, "sum" if main else "max"),
        "no operation": lambda: ranks.all_reduce(1, "avg"),  # type: ignore[arg-type]
        "sources": lambda: ranks.broadcast(1, source=world.rank),
        "nothing": lambda: ranks.broadcast(None),
        "few": lambda: ranks.scatter([1] if main else None),
        "text": lambda: ranks.all_gather("text" if main else 1),
        "parts": lambda: ranks.reduce_scatter(torch.ones(3)),
    }
    try:
        calls[what]()
    except Exception as error:
        assert ranks.all_reduce(1) == world.world_size  # the ranks are in step still
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "shapes",
            "ValueError: all_reduce needs equal dtypes and shapes: float32 of shape (2,) in rank 0; float32",
        ),
        ("dtypes", "ValueError: all_reduce needs equal dtypes and shapes: int64 of shape () in rank 0; float64 of"),
        ("names", "ValueError: the ranks are not at the same point: all_reduce(sum) in rank 0; barrier in rank 1"),
        ("operations", "ValueError: the ranks are not at the same point: all_reduce(sum) in rank 0; all_reduce(max)"),
        ("no operation", "ConfigError: op 'avg' is unknown"),
        ("sources", "ValueError: the ranks are not at the same point: broadcast(rank 0) in rank 0; broadcast(rank 1)"),
        ("nothing", "ValueError: broadcast got no value in its source, rank 0"),
        ("parts", "ValueError: reduce_scatter got shape (3,), whose first axis 2 ranks cannot share"),
    ],
)
def test_calls_that_do_not_go_together_are_named_in_every_rank(what: str, says: str) -> None:
    assert all(said.startswith(says) for said in in_group(2, _wrong, what))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("few", "ValueError: scatter got 1 values in its source, rank 0, for 2 ranks"),
        ("text", "TypeError: collectives take tensors, NumPy arrays and numbers, got str"),
    ],
)
def test_a_rank_that_cannot_go_on_says_why_and_the_others_do_not_wait(what: str, says: str) -> None:
    first, second = in_group(2, _wrong, what)
    assert first == says
    assert second == f"DistError: {'scatter' if what == 'few' else 'all_gather'}: rank 0 cannot go on"


def _recorded(world: World) -> bool:
    torch.distributed.all_reduce(torch.ones(2))
    return b"all_reduce" in torch._C._distributed_c10d._dump_fr_trace_json(True, False)


def test_ranks_on_cpus_keep_nothing_of_their_collectives() -> None:
    assert in_group(2, _recorded) == [False, False]
