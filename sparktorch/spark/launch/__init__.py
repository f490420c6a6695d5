"""The barrier job and its tasks, the ranks."""

import os

# Else torch writes native traces into the log of a rank that the driver has given up. It reads this on its import.
if "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
