"""Adapters on a frozen base: their weights without the base's, which the module's source makes again."""

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

_RECORD = "sparktorch.base"  # This entry of a state dict tells which base it lacks.


@dataclass(frozen=True)
class FrozenBase:
    """The frozen parameters under a module's adapters.

    A factory makes them again in every process, from the same files and with the same seed; an instance has them. So
    neither weights that are returned nor checkpoints hold them. Buffers and everything trained are held.

    Attributes:
        names: Names of the parameters in the module's state dict.
        digest: SHA-256 of them.
        seed: The seed with which the factory was called.
    """

    names: frozenset[str]
    digest: str
    seed: int

    @classmethod
    def of(
        cls, module: nn.Module, parts: Mapping[str, nn.Module], seed: int, initial: bytes = b""
    ) -> FrozenBase | None:
        """Returns the base in a module on the CPU; `None` if none of its `parts`, by path, has a frozen parameter.

        The parts are those with adapters; see `adapted_parts`. What the factory does not make belongs to no base: the
        initial weights, as those of an earlier training that `freeze` now freezes.
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
        """Returns a state dict without the base, and with a record of it, for `load_weights`; of none, none."""
        if not state:
            return {}
        record = json.dumps({"sha256": self.digest, "seed": self.seed}).encode()
        trained = {name: value for name, value in state.items() if name not in self.names}
        return trained | {_RECORD: torch.tensor(list(record), dtype=torch.uint8)}

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Checks that training has not changed the base, in the rank that has a state dict."""
        if state and _digest(state, self.names) != self.digest:
            raise ModuleError(
                "parameters that were frozen under the adapters when the training began have changed",
                hint="they are not in the result: let the factory set requires_grad on those that a callback trains",
                param="module",
            )


def lacks_base(content: bytes) -> bool:
    """Whether a packed state dict is one without its base."""
    return _RECORD in entries(content)


def seed_of(state: Mapping[str, torch.Tensor], default: int) -> int:
    """Returns the seed of the factory that made the base which a state dict lacks, or the default if it lacks none."""
    return int(_record(state)["seed"]) if _RECORD in state else default


def load_weights(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Loads a state dict, of which a recorded base may be missing; refuses one that is not the module's."""
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
