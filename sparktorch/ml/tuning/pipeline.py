"""A pipeline whose first stages are fitted once for several settings of Params."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator, Pipeline, PipelineModel
from pyspark.ml.util import MetaAlgorithmReadWrite
from pyspark.sql import DataFrame

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

__all__ = ["PrefixFittedOnce"]


class PrefixFittedOnce(Estimator[PipelineModel]):
    """Fits the stages before our estimator once, and our estimator with `fitMultiple`.

    Settings that touch the stages before ours are fitted one by one.
    """

    def __init__(self, pipeline: Pipeline, place: int) -> None:
        """Sets the pipeline, and the place of our estimator among its stages."""
        super().__init__()
        self._pipeline, self._place = pipeline, place

    def copy(self, extra: ParamMap | None = None) -> PrefixFittedOnce:
        """Copies it; the Params in `extra` are those of the pipeline."""
        return PrefixFittedOnce(self._pipeline.copy(extra), self._place)

    def _fit(self, dataset: DataFrame) -> PipelineModel:
        return self._pipeline.fit(dataset)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[ParamMap]) -> Iterator[tuple[int, PipelineModel]]:
        """Yields a model for each setting, with its index; thread-safe."""
        return _Models(self._pipeline, self._place, dataset, paramMaps)


class _Models(Iterator[tuple[int, PipelineModel]]):
    def __init__(self, pipeline: Pipeline, place: int, dataset: DataFrame, maps: Sequence[ParamMap]) -> None:
        self._pipeline, self._dataset, self._maps = pipeline, dataset, maps
        self._stages, self._place = pipeline.getStages(), place
        before = [one.uid for stage in self._stages[:place] for one in MetaAlgorithmReadWrite.getAllNestedStages(stage)]
        alone = [any(param.parent in (pipeline.uid, *before) for param in params) for params in maps]
        self._alone = iter([index for index in range(len(maps)) if alone[index]])
        self._ours = self._fit_ours([index for index in range(len(maps)) if not alone[index]])
        self._lock = Lock()

    def __next__(self) -> tuple[int, PipelineModel]:
        with self._lock:
            found = next(self._ours, None)
            index = next(self._alone) if found is None else found[0]
        if found is None:
            return index, self._pipeline.fit(self._dataset, self._maps[index])
        return index, self._completed(*found)

    def _fit_ours(self, indices: list[int]) -> Iterator[tuple[int, list[Any], DataFrame]]:
        """Fits the stages before ours, and yields them with ours for each index, and the rows that ours gets."""
        if not indices:
            return
        fitted, data = [], self._dataset
        for stage in self._stages[: self._place]:
            fitted.append(stage.fit(data) if isinstance(stage, Estimator) else stage)
            data = fitted[-1].transform(data)
        ours: Any = self._stages[self._place]
        for place, model in ours.fitMultiple(data, [self._maps[index] for index in indices]):
            yield indices[place], [*(stage.copy() for stage in fitted), model], data

    def _completed(self, index: int, fitted: list[Any], data: DataFrame) -> PipelineModel:
        """Returns the pipeline's model, with the stages after ours fitted on what ours makes of the rows."""
        last = max(at for at, stage in enumerate(self._stages) if isinstance(stage, Estimator))
        for at, given in enumerate(self._stages[self._place + 1 :], self._place + 1):
            if at <= last:
                data = fitted[-1].transform(data)
            stage = given.copy(self._maps[index])
            fitted.append(stage.fit(data) if isinstance(stage, Estimator) else stage)
        return PipelineModel(fitted)
