"""The barrier job and its tasks, the ranks."""

import os

# Without this level, torch writes native traces into the log of a rank that the driver has given up. torch reads the
# level when it is imported.
if "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
