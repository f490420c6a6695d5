"""Where the rows are kept while they are trained on, and how they get there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["STORAGE_DEFAULTS", "StorageParams"]

STORAGE_DEFAULTS: dict[str, Any] = {"split": "key", "storage": "memory", "memoryBudget": 1024}


class StorageParams(Params):
    """How the rows are split over the workers, and where each keeps its own."""

    split: Param[str] = Param(
        Params._dummy(),
        "split",
        "'key' sends each row to a worker by its contents, and the training depends on nothing else; 'keep' makes a "
        "worker of each partition as it is, without a shuffle",
        typeConverter=TypeConverters.toString,
    )
    storage: Param[str] = Param(
        Params._dummy(),
        "storage",
        "where a worker keeps its rows: in 'memory', on 'disk' in Spark's local directories, or 'auto': in memory as "
        "far as memoryBudget goes, and else on disk",
        typeConverter=TypeConverters.toString,
    )
    memoryBudget: Param[int] = Param(
        Params._dummy(),
        "memoryBudget",
        "MB of memory that the rows of one worker may take, with storage 'disk' or 'auto' (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    shuffleBlock: Param[int] = Param(
        Params._dummy(),
        "shuffleBlock",
        "number of neighbouring rows, by key, that an epoch trains within as many steps, so that they are read from "
        "disk at once; 1, as with storage 'memory', shuffles single rows; 32 if it is not set otherwise (> 0)",
        typeConverter=TypeConverters.toInt,
    )

    def getSplit(self) -> str:
        """Gets the value of `split` or its default."""
        return self.getOrDefault(self.split)

    def setSplit(self, value: str) -> Self:
        """Sets the value of `split`."""
        return self._set(split=value)

    def getStorage(self) -> str:
        """Gets the value of `storage` or its default."""
        return self.getOrDefault(self.storage)

    def setStorage(self, value: str) -> Self:
        """Sets the value of `storage`."""
        return self._set(storage=value)

    def getMemoryBudget(self) -> int:
        """Gets the value of `memoryBudget` or its default."""
        return self.getOrDefault(self.memoryBudget)

    def setMemoryBudget(self, value: int) -> Self:
        """Sets the value of `memoryBudget`."""
        return self._set(memoryBudget=value)

    def getShuffleBlock(self) -> int:
        """Gets the value of `shuffleBlock`."""
        return self.getOrDefault(self.shuffleBlock)

    def setShuffleBlock(self, value: int) -> Self:
        """Sets the value of `shuffleBlock`."""
        return self._set(shuffleBlock=value)
