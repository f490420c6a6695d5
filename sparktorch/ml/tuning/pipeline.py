"""A pipeline whose first stages are fitted once for several settings of Params."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator, Pipeline, PipelineModel
from pyspark.ml.util import MetaAlgorithmReadWrite
from pyspark.sql import DataFrame

from sparktorch.ml.estimator import TorchEstimatorBase

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

    @classmethod
    def of(cls, pipeline: Pipeline, maps: Sequence[ParamMap]) -> PrefixFittedOnce | str:
        """Returns it for a pipeline; or why it does not help."""
        places = [place for place, stage in enumerate(pipeline.getStages()) if isinstance(stage, TorchEstimatorBase)]
        if not places:
            return "the pipeline has no estimator of this package"
        return cls(pipeline, places[0])

    def copy(self, extra: ParamMap | None = None) -> PrefixFittedOnce:
        """Copies it; the Params in `extra` are those of the pipeline."""
        return PrefixFittedOnce(self._pipeline.copy(extra), self._place)

    def _fit(self, dataset: DataFrame) -> PipelineModel:
        return self._pipeline.fit(dataset)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[ParamMap]) -> Iterator[tuple[int, PipelineModel]]:
        """Yields a model for each setting, with its index; thread-safe."""
        return _Models(self, dataset, paramMaps)

    def _touches_prefix(self, params: ParamMap) -> bool:
        before = self._pipeline.getStages()[: self._place]
        prefix = {one.uid for stage in before for one in MetaAlgorithmReadWrite.getAllNestedStages(stage)}
        return any(param.parent in prefix or param.parent == self._pipeline.uid for param in params)


class _Models(Iterator[tuple[int, PipelineModel]]):
    def __init__(self, once: PrefixFittedOnce, dataset: DataFrame, maps: Sequence[ParamMap]) -> None:
        self._once, self._dataset, self._maps = once, dataset, maps
        self._alone = [index for index, params in enumerate(maps) if once._touches_prefix(params)]
        self._together = [index for index in range(len(maps)) if index not in self._alone]
        self._order = iter([*self._together, *self._alone])
        self._lock = Lock()
        self._prefix: list[Any] | None = None
        self._models: Iterator[tuple[int, Any]] = iter(())
        self._moved = dataset

    def __next__(self) -> tuple[int, PipelineModel]:
        with self._lock:
            index = next(self._order)
            if index in self._alone:
                model = None
            else:
                self._fit_prefix()
                _, model = next(self._models)
        if model is None:
            return index, self._once._pipeline.fit(self._dataset, self._maps[index])
        return index, self._completed(index, model)

    def _fit_prefix(self) -> None:
        """Fits the stages before ours, and begins to fit ours; once."""
        if self._prefix is not None:
            return
        stages, place = self._once._pipeline.getStages(), self._once._place
        fitted, data = [], self._dataset
        for stage in stages[:place]:
            model = stage.fit(data) if isinstance(stage, Estimator) else stage
            data = model.transform(data)
            fitted.append(model)
        self._moved = data
        ours: Any = stages[place]
        self._models = ours.fitMultiple(data, [self._maps[index] for index in self._together])
        self._prefix = fitted

    def _completed(self, index: int, model: Any) -> PipelineModel:
        """Returns the pipeline's model, with the stages after ours fitted on what ours makes of the rows."""
        assert self._prefix is not None
        params, place = self._maps[index], self._once._place
        stages = self._once._pipeline.getStages()
        last = max((at for at, stage in enumerate(stages) if isinstance(stage, Estimator)), default=-1)
        fitted, data = [*(stage.copy() for stage in self._prefix), model], self._moved
        for at in range(place + 1, len(stages)):
            if at <= last:
                data = fitted[-1].transform(data)
            stage = stages[at].copy(params)
            fitted.append(stage.fit(data) if isinstance(stage, Estimator) else stage)
        return PipelineModel(fitted)
