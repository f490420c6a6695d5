"""Whether a module computes the same once its layers are divided."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.devices import free_bytes, is_host, let_go
from sparktorch.base.host_memory import available_bytes
from sparktorch.errors import ClusterError, ModuleError, refusing
from sparktorch.train.numerics.comparison import Results, norms_of_gradients, results_of
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.sharding.dtensor import TENSOR, undivided

__all__ = ["compare_division"]

_log = logging.getLogger(__name__)

_DEVICE_SHARE = 0.7  # The rest is for activations of a row.
_HINT = (
    "in strategyParams.plan, a 'rowwise' layer takes what a 'colwise' one returns, and functions between them take "
    "each number, or each head of a fixed size, by itself; what takes all numbers needs 'colwise_gather_output', and "
    "parameters between divided layers 'sum_gradients'"
)


def compare_division(
    module: nn.Module,
    divide: Callable[[nn.Module], Callable[[], None]],
    arguments: Arguments,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Compares a copy of a module with one whose layers are divided among the ranks of a group, of one row.

    It is a collective of these ranks. The first one calls the undivided copy on `device`; nothing is compared if that
    fails, does not fit there, draws random numbers, or has no gradients. `divide` divides the layers of a module, and
    returns what completes the gradients of this rank.

    Raises:
        ModuleError: The divided copy fails, returns something else, or has other gradients.
    """
    arguments = arguments.to(device)
    results = [_undivided(module, arguments, group.size(), device) if group.rank() == 0 else None]
    dist.broadcast_object_list(results, group=group, group_src=0)
    (expected,) = results
    if expected is None:
        return
    divided = copy.deepcopy(module)
    complete = divide(divided)
    divided.to(device)

    def norms(divided: nn.Module) -> dict[str, float]:
        complete()
        return _norms_of_parts(divided, group)

    what, about = f"{type(module).__name__}, with its layers divided,", {"param": "strategyParams"}
    with refusing(f"{what} fails", _HINT, **about, code="ST-TENSOR-PARALLEL"):
        results_divided = results_of(divided, partial(arguments.call, divided), norms)
    del divided
    let_go(str(device))
    difference = expected.difference(results_divided)
    if difference:
        what = f"{what} {difference} than the undivided one"
        raise ModuleError(what, hint=_HINT, **about, code="ST-TENSOR-PARALLEL")


def _undivided(module: nn.Module, arguments: Arguments, ranks: int, device: torch.device) -> Results | None:
    """Returns what a copy of the undivided module computes; `None` if that cannot be compared."""
    try:
        size = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
        if is_host(device):
            copies, free = ranks + 1, available_bytes()  # Each rank makes a copy, and the first one has gradients.
        else:
            copies, free = 2, free_bytes(str(device))  # Gradients are as large as parameters.
        if copies * size > free * _DEVICE_SHARE:
            raise ClusterError(f"{copies} times its {size:,} bytes are more than {_DEVICE_SHARE:.0%} of what is free")
        copied = copy.deepcopy(module).to(device)
        results = results_of(copied, partial(arguments.call, copied), norms_of_gradients)
        del copied
        let_go(str(device))
    except Exception as error:
        _log.warning("the plan is not compared with the undivided module, which fails on %s: %s", device, error)
        return None
    if results.is_random:
        _log.warning("the plan is not compared with the undivided module, which draws random numbers in evaluation")
        return None
    return results if results.norms else None


def _norms_of_parts(module: nn.Module, group: dist.ProcessGroup) -> dict[str, float]:
    """Returns the norms of the gradients of which the ranks of a group have parts by name; a collective of these."""
    norms = norms_of_gradients(module)
    squares = torch.tensor(list(norms.values())).square()
    dist.all_reduce(squares, group=group)
    for name, square in zip(norms, squares.tolist(), strict=True):
        if not undivided(module.get_parameter(name), TENSOR):
            norms[name] = square**0.5
    return norms
