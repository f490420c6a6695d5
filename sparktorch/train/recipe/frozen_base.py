"""Adapters on a frozen base: weights are kept without the base, which the module's source can make again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sparktorch.base.state_dict import entries
from sparktorch.errors import ModuleError

__all__ = ["FrozenBase", "lacks_base", "load_weights", "seed_of"]

# This entry of a state dict says which base the state dict lacks.
_RECORD = "sparktorch.base"


@dataclass(frozen=True)
class FrozenBase:
    """The frozen parameters under a module's adapters.

    A factory makes them again in every process, from the same files and with the same seed; an instance holds them. So
    neither returned weights nor checkpoints hold them. Buffers and all trained parameters are held.

    Attributes:
        names: Names of the parameters in the module's state dict.
        digest: SHA-256 of the parameters.
        seed: The seed with which the factory was called.
    """

    names: frozenset[str]
    digest: str
    seed: int

    @classmethod
    def of(
        cls, module: nn.Module, parts: Mapping[str, nn.Module], seed: int, initial: bytes = b""
    ) -> FrozenBase | None:
        """Returns the base in a module on the CPU; `None` if there is no frozen parameter in its `parts`.

        `parts` has the parts with adapters by path; see `adapted_parts`. The `initial` weights belong to no base,
        because the factory does not make them: they may come from an earlier training, and be frozen by `freeze` now.
        """
        names = {
            f"{path}.{name}".removeprefix(".")
            for path, part in parts.items()
            for name, parameter in part.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }
        state = module.state_dict()
        names = names & state.keys() - entries(initial)
        return cls(frozenset(names), _digest(state, names), seed) if names else None

    def without(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns a state dict without the base and with a record of the base, for `load_weights`.

        An empty state dict, as in ranks other than 0, stays empty.
        """
        if not state:
            return {}
        record = json.dumps({"sha256": self.digest, "seed": self.seed}).encode()
        trained = {name: value for name, value in state.items() if name not in self.names}
        return trained | {_RECORD: torch.tensor(list(record), dtype=torch.uint8)}

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises a `ModuleError` if training has changed the base; an empty state dict is not checked."""
        if state and _digest(state, self.names) != self.digest:
            raise ModuleError(
                "parameters that were frozen under the adapters when the training began have changed",
                hint="they are not in the result: let the factory set requires_grad on those that a callback trains",
                param="module",
            )


def lacks_base(content: bytes) -> bool:
    """Returns whether a packed state dict lacks a base."""
    return _RECORD in entries(content)


def seed_of(state: Mapping[str, torch.Tensor], default: int) -> int:
    """Returns the seed with which the lacking base was made, or the default if the state dict lacks no base."""
    return int(_record(state)["seed"]) if _RECORD in state else default


def load_weights(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Loads a state dict, which may lack a recorded base; a `ModuleError` says that the module has another base."""
    if _RECORD not in state:
        module.load_state_dict(state)
        return
    current = module.state_dict()
    if _digest(current, current.keys() - state.keys()) != _record(state)["sha256"]:
        raise ModuleError(
            "the module's frozen parameters are not those that its adapters were trained on",
            hint="the factory must make the same base in every process: has the folder that it loads changed, or is it "
            "another one on this host? A base that is computed, as PiSSA's, needs an instance as module",
            param="module",
        )
    saved = {name: value for name, value in state.items() if name != _RECORD}
    module.load_state_dict({name: saved.get(name, value) for name, value in current.items()} | saved)


def _record(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    record: dict[str, str] = json.loads(bytes(state[_RECORD].tolist()))
    return record


def _digest(state: Mapping[str, torch.Tensor], names: Iterable[str]) -> str:
    """Returns the SHA-256 of tensors, with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name in sorted(names):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
