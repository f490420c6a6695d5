"""Counts floating-point operations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

__all__ = ["flop_counter"]


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter, which here knows attention and LSTMs as CPUs compute them, too."""
    from torch.utils.flop_counter import FlopCounterMode

    aten = torch.ops.aten
    of_cpus = {aten._scaled_dot_product_flash_attention_for_cpu: _attention, aten.mkldnn_rnn_layer: _recurrent}
    return FlopCounterMode(display=False, custom_mapping=of_cpus)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _recurrent(inputs: Any, of_inputs: Any, of_hidden: Any, *_: Any, **__: Any) -> int:
    """Returns the operations of a recurrent layer: its two weights, for each step of each sequence."""
    return int(2 * math.prod(inputs[:-1]) * (math.prod(of_inputs) + math.prod(of_hidden)))
