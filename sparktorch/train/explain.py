"""What torch says where a Param asks for more than a worker or a module can do, in the user's terms."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from sparktorch.config import TrainConfig
from sparktorch.errors import ClusterError, ModuleError

__all__ = ["explained"]

_NO_COMPILER = ("InvalidCxxCompiler", "No working C++ compiler", "Failed to find C compiler")


@contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """A block in which errors that a Param has brought about name it.

    Raises:
        ModuleError: The module has an operation that cannot be deterministic.
        ClusterError: There is no compiler for `compile`, or cuBLAS was started without a workspace.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        trace = "".join(traceback.format_exception(error))
        if config.compile and any(sign in text for sign in _NO_COMPILER):
            raise ClusterError(
                "compile=True needs a C++ compiler on every worker, and this one has none",
                hint="install g++ where the executors run, name it in the environment variable CXX, or leave "
                "compile out",
                param="compile",
                trace=trace,
            ) from error
        if config.deterministic and "use_deterministic_algorithms(True)" in text:
            if "CUBLAS_WORKSPACE_CONFIG" in text:
                raise ClusterError(
                    "deterministic=True, but this Python worker has used cuBLAS before without a workspace of its own",
                    hint="set spark.executorEnv.CUBLAS_WORKSPACE_CONFIG to :4096:8",
                    param="deterministic",
                    trace=trace,
                ) from error
            raise ModuleError(
                f"deterministic=True, but {text.split('. ')[0]}",
                hint="use another operation in the module, or leave deterministic out",
                param="deterministic",
                trace=trace,
            ) from error
        raise
