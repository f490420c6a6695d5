"""Imported once by the server that ranks are forked from: all that a rank would import while it trains."""

from __future__ import annotations

import pandas  # noqa: F401 - Arrow loads it when the first array is converted
import pyarrow.compute  # noqa: F401
import torch
import torchmetrics  # noqa: F401
from torch import nn

import sparktorch.worker  # noqa: F401
import tests.support.nets  # noqa: F401

# The first optimizer of a process imports a thousand modules.
torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
