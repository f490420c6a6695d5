"""A rank's work, without Spark: it reads its rows, trains on them, and returns the result."""

from sparktorch.worker.function import called, run_function, run_on_elements, run_on_partition, run_script_in_rank
from sparktorch.worker.held_out import score_fold
from sparktorch.worker.held_rows import HeldRows
from sparktorch.worker.job import RankJob, RankResult, TrainJob
from sparktorch.worker.rank import Task, run_held, serve, train_held, train_partition, try_in_rank

__all__ = [
    "HeldRows",
    "RankJob",
    "RankResult",
    "Task",
    "TrainJob",
    "called",
    "run_function",
    "run_held",
    "run_on_elements",
    "run_on_partition",
    "run_script_in_rank",
    "score_fold",
    "serve",
    "train_held",
    "train_partition",
    "try_in_rank",
]
