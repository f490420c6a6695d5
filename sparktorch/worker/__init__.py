"""A rank's work, without Spark: it reads its rows, trains on them, and returns the result."""

from sparktorch.worker.held_out import score_fold
from sparktorch.worker.held_rows import HeldRows
from sparktorch.worker.job import RankResult, TrainJob
from sparktorch.worker.rank import Task, serve, train_partition, try_in_rank

__all__ = ["HeldRows", "RankResult", "Task", "TrainJob", "score_fold", "serve", "train_partition", "try_in_rank"]
