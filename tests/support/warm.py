"""Imported once by what forks ranks, or Spark's Python workers: all that these import while they train and score."""

from __future__ import annotations

import gc

import fsspec.core  # noqa: F401 - what is forked has it then
import pandas  # noqa: F401 - Arrow loads it when the first array is converted
import pyarrow.compute  # noqa: F401 - what is forked has it then
import safetensors.torch  # noqa: F401 - what is forked has it then
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.debug
from torch import nn

# The first optimizer of a process imports a thousand modules, and the first operator a hundred.
torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)

# A fork would copy their memory when the collector looks at them, as it does after each of Spark's tasks.
gc.freeze()
