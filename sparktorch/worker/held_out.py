"""A task of a pool: scores the rows of a fold with a trained module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sparktorch.data.convert.tensors import to_arrow
from sparktorch.distributed.client import Client
from sparktorch.model.scorer import Scorer, first_batch_size
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
    scoring: dict[str, Any],
) -> RankResult:
    """Scores the rows of a fold, those marked for validation included.

    Args:
        rows: This rank's rows.
        client: Connects the rank to the driver.
        fold: The fold.
        trained: The module, trained without the fold.
        results: Names of the results of `Scorer.score` to return.
        scoring: Keyword arguments of `Scorer`: `batch_size`, `precision`, `compiled`, `thresholds`.

    Returns:
        Its payload is an Arrow stream with the carried columns and the results, one row per row of the fold; it is
        empty if this rank has no row of the fold.
    """
    client.enter("scoring")
    trained, weights = trained.unpacked()
    scorer = Scorer(trained, device=rows.world.device, weights=weights, **scoring)
    carried = rows.carried(fold)
    inputs = rows.inputs(fold, first_batch_size(scoring["batch_size"]))
    parts = [scorer.score_tensors(part) for part in client.moving(inputs)]
    if not parts:
        return RankResult({"rows": 0})
    columns = {name: pa.array(values) for name, values in carried.items()}
    columns |= {name: to_arrow(np.concatenate([part[name] for part in parts])) for name in results}
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return RankResult({"rows": table.num_rows}, sink.getvalue().to_pybytes())
