"""Where it is trained, what survives the loss of workers, and where it is logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LAUNCH_DEFAULTS", "CheckpointParams", "LaunchParams", "TrackingParams"]

LAUNCH_DEFAULTS: dict[str, Any] = {
    "numWorkers": 1,
    "rendezvous": "auto",
    "preflight": "basic",
    "dryRun": "driver",
    "checkpointInterval": 1,
    "checkpointUnit": "epoch",
    "keepCheckpoints": 2,
    "maxRestarts": 0,
    "startTimeout": 3600.0,
    "stallTimeout": 600.0,
    "logLevel": "WARNING",
    "progress": True,
}


class LaunchParams(Params):
    """Where it is trained."""

    numWorkers: Param[int] = Param(
        Params._dummy(),
        "numWorkers",
        "number of barrier tasks, the world size (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    rendezvous: Param[str] = Param(
        Params._dummy(),
        "rendezvous",
        "who hosts the store at which workers meet: 'auto', 'driver' or 'rank0'",
        typeConverter=TypeConverters.toString,
    )
    minWorkers: Param[int] = Param(
        Params._dummy(),
        "minWorkers",
        "the fewest workers that a restart goes on with, where the cluster has no slots for all of them any more (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    startTimeout: Param[float] = Param(
        Params._dummy(),
        "startTimeout",
        "seconds that a fit waits for executors that are to come, and for slots which other jobs hold (> 0)",
        typeConverter=TypeConverters.toFloat,
    )
    stallTimeout: Param[float] = Param(
        Params._dummy(),
        "stallTimeout",
        "seconds that a worker may stand still, or start after the first one, before the fit ends with its name, its "
        "place and its Python stack (> 0)",
        typeConverter=TypeConverters.toFloat,
    )
    logLevel: Param[str] = Param(
        Params._dummy(),
        "logLevel",
        "from which level on the driver shows what workers log; what they print counts as 'INFO'",
        typeConverter=TypeConverters.toString,
    )
    preflight: Param[str] = Param(
        Params._dummy(),
        "preflight",
        "what is checked before the job starts: 'basic' for settings, slots and GPUs, 'full' for the executors as well",
        typeConverter=TypeConverters.toString,
    )
    dryRun: Param[str] = Param(
        Params._dummy(),
        "dryRun",
        "where module and loss are tried on the first row before the job starts: on the 'driver', or in a 'worker' "
        "for modules that need an accelerator, or more memory than the driver has",
        typeConverter=TypeConverters.toString,
    )
    progress: Param[bool] = Param(
        Params._dummy(),
        "progress",
        "whether fit shows a progress bar on the driver",
        typeConverter=TypeConverters.toBoolean,
    )

    def getNumWorkers(self) -> int:
        """Gets the value of `numWorkers` or its default."""
        return self.getOrDefault(self.numWorkers)

    def setNumWorkers(self, value: int) -> Self:
        """Sets the value of `numWorkers`."""
        return self._set(numWorkers=value)

    def getRendezvous(self) -> str:
        """Gets the value of `rendezvous` or its default."""
        return self.getOrDefault(self.rendezvous)

    def setRendezvous(self, value: str) -> Self:
        """Sets the value of `rendezvous`."""
        return self._set(rendezvous=value)

    def getMinWorkers(self) -> int:
        """Gets the value of `minWorkers`."""
        return self.getOrDefault(self.minWorkers)

    def setMinWorkers(self, value: int) -> Self:
        """Sets the value of `minWorkers`."""
        return self._set(minWorkers=value)

    def getStartTimeout(self) -> float:
        """Gets the value of `startTimeout` or its default."""
        return self.getOrDefault(self.startTimeout)

    def setStartTimeout(self, value: float) -> Self:
        """Sets the value of `startTimeout`."""
        return self._set(startTimeout=value)

    def getStallTimeout(self) -> float:
        """Gets the value of `stallTimeout` or its default."""
        return self.getOrDefault(self.stallTimeout)

    def setStallTimeout(self, value: float) -> Self:
        """Sets the value of `stallTimeout`."""
        return self._set(stallTimeout=value)

    def getLogLevel(self) -> str:
        """Gets the value of `logLevel` or its default."""
        return self.getOrDefault(self.logLevel)

    def setLogLevel(self, value: str) -> Self:
        """Sets the value of `logLevel`."""
        return self._set(logLevel=value)

    def getPreflight(self) -> str:
        """Gets the value of `preflight` or its default."""
        return self.getOrDefault(self.preflight)

    def setPreflight(self, value: str) -> Self:
        """Sets the value of `preflight`."""
        return self._set(preflight=value)

    def getDryRun(self) -> str:
        """Gets the value of `dryRun` or its default."""
        return self.getOrDefault(self.dryRun)

    def setDryRun(self, value: str) -> Self:
        """Sets the value of `dryRun`."""
        return self._set(dryRun=value)

    def getProgress(self) -> bool:
        """Gets the value of `progress` or its default."""
        return self.getOrDefault(self.progress)

    def setProgress(self, value: bool) -> Self:
        """Sets the value of `progress`."""
        return self._set(progress=value)


class CheckpointParams(Params):
    """What survives the loss of workers."""

    checkpointDir: Param[str] = Param(
        Params._dummy(),
        "checkpointDir",
        "path or URL of a directory that all workers can write, for checkpoints; a fit whose directory holds an "
        "unfinished training of the same configuration goes on with it",
        typeConverter=TypeConverters.toString,
    )
    checkpointInterval: Param[int] = Param(
        Params._dummy(),
        "checkpointInterval",
        "epochs or steps from one checkpoint to the next (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    checkpointUnit: Param[str] = Param(
        Params._dummy(),
        "checkpointUnit",
        "what checkpointInterval counts: 'epoch' or 'step'",
        typeConverter=TypeConverters.toString,
    )
    keepCheckpoints: Param[int] = Param(
        Params._dummy(),
        "keepCheckpoints",
        "number of checkpoints that are kept, besides that of the best validation (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    maxRestarts: Param[int] = Param(
        Params._dummy(),
        "maxRestarts",
        "how often a training that loses a worker is started again, from its last checkpoint if it has one (>= 0)",
        typeConverter=TypeConverters.toInt,
    )

    def getCheckpointDir(self) -> str:
        """Gets the value of `checkpointDir`."""
        return self.getOrDefault(self.checkpointDir)

    def setCheckpointDir(self, value: str) -> Self:
        """Sets the value of `checkpointDir`."""
        return self._set(checkpointDir=value)

    def getCheckpointInterval(self) -> int:
        """Gets the value of `checkpointInterval` or its default."""
        return self.getOrDefault(self.checkpointInterval)

    def setCheckpointInterval(self, value: int) -> Self:
        """Sets the value of `checkpointInterval`."""
        return self._set(checkpointInterval=value)

    def getCheckpointUnit(self) -> str:
        """Gets the value of `checkpointUnit` or its default."""
        return self.getOrDefault(self.checkpointUnit)

    def setCheckpointUnit(self, value: str) -> Self:
        """Sets the value of `checkpointUnit`."""
        return self._set(checkpointUnit=value)

    def getKeepCheckpoints(self) -> int:
        """Gets the value of `keepCheckpoints` or its default."""
        return self.getOrDefault(self.keepCheckpoints)

    def setKeepCheckpoints(self, value: int) -> Self:
        """Sets the value of `keepCheckpoints`."""
        return self._set(keepCheckpoints=value)

    def getMaxRestarts(self) -> int:
        """Gets the value of `maxRestarts` or its default."""
        return self.getOrDefault(self.maxRestarts)

    def setMaxRestarts(self, value: int) -> Self:
        """Sets the value of `maxRestarts`."""
        return self._set(maxRestarts=value)


class TrackingParams(Params):
    """Where it is logged. Inside an active MLflow run every fit is logged, without these."""

    mlflowExperiment: Param[str] = Param(
        Params._dummy(),
        "mlflowExperiment",
        "name of the MLflow experiment, made if it is missing, in which each fit starts a run of its own, "
        "nested where a run is active",
        typeConverter=TypeConverters.toString,
    )
    mlflowRunName: Param[str] = Param(
        Params._dummy(),
        "mlflowRunName",
        "name of the MLflow run that each fit starts for itself, nested where a run is active",
        typeConverter=TypeConverters.toString,
    )

    def getMlflowExperiment(self) -> str:
        """Gets the value of `mlflowExperiment`."""
        return self.getOrDefault(self.mlflowExperiment)

    def setMlflowExperiment(self, value: str) -> Self:
        """Sets the value of `mlflowExperiment`."""
        return self._set(mlflowExperiment=value)

    def getMlflowRunName(self) -> str:
        """Gets the value of `mlflowRunName`."""
        return self.getOrDefault(self.mlflowRunName)

    def setMlflowRunName(self, value: str) -> Self:
        """Sets the value of `mlflowRunName`."""
        return self._set(mlflowRunName=value)
