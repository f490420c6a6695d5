"""A task of a pool: scores the rows of a fold with a trained module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparktorch.data.convert.tensors import to_arrow
from sparktorch.distributed.client import Client
from sparktorch.model.scorer import Scorer, Scoring, first_batch_size
from sparktorch.model.trained_module import TrainedModule
from sparktorch.worker.held_rows import HeldRows
from sparktorch.worker.job import RankResult

__all__ = ["score_fold"]


def score_fold(
    rows: HeldRows,
    *,
    client: Client,
    fold: int,
    trained: TrainedModule,
    results: Sequence[str],
    scoring: Scoring,
    weight: str | None = None,
    limit: int,
) -> RankResult:
    """Scores the rows of a fold, also those marked for validation, by a module that was trained without the fold.

    Args:
        rows: This rank's rows.
        client: Connects the rank to the driver.
        fold: The number of the fold.
        trained: The module, trained without the fold.
        results: Names of the results of `Scorer.score` to return.
        scoring: How the module scores, on the device of this rank.
        weight: If it is not `None`, equal rows are sent as one row with the sum of their weights. It is the name of the
            carried column with the weights, or "" if each row has the weight 1.
        limit: The most bytes to send.

    Returns:
        A result whose payload is an Arrow stream with the carried columns and the results, which has a row for each row
            of the fold. With `weight`, it has a row for each group of equal rows, and weights in the last column. The
            payload is empty if this rank has no row of the fold, or if it is beyond the limit, which "beyond" says.
    """
    client.enter("scoring")
    trained, weights = trained.unpack()
    scorer = Scorer(trained, scoring, device=rows.world.device, weights=weights)
    carried = rows.carried(fold)
    inputs = rows.inputs(fold, first_batch_size(scoring.batch_size))
    parts = []
    size = 0
    for part in client.moving(inputs):
        scored = scorer.score_tensors(part)
        parts.append([scored[name] for name in results])
        size += sum(array.nbytes for array in parts[-1]) + 8 * len(carried) * len(parts[-1][0])
        if weight is None and size > limit:
            return RankResult({"beyond": True})
    if not parts:
        return RankResult({"beyond": False})
    columns = {name: pa.array(values) for name, values in carried.items()}
    for number, name in enumerate(results):
        columns[name] = to_arrow(np.concatenate([part[number] for part in parts]))
    table = pa.table(columns)
    if weight is not None:
        table = _merge_equal_rows(table, weight)
        if table.nbytes > limit:
            return RankResult({"beyond": True})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return RankResult({"beyond": False}, sink.getvalue().to_pybytes())


def _merge_equal_rows(table: pa.Table, weight: str) -> pa.Table:
    """Returns the table with equal rows as one row, and the sum of their weights as the last column."""
    keys = [name for name in table.column_names if name != weight]
    weights = table[weight] if weight else pa.array(np.ones(table.num_rows))
    if pc.any(pc.less(weights, 0)).as_py():  # The evaluator refuses negative weights, which sums could hide.
        return table.select(keys).append_column("weight_sum", weights)
    table = table.select(keys).append_column("weight", weights)
    sums = table.group_by(keys, use_threads=False).aggregate([("weight", "sum")])
    return sums.select([*keys, "weight_sum"])
