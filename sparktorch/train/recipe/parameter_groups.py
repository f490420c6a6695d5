"""Which parameters are trained, and with which options: glob patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sparktorch.base.state_dict import WRAPPER
from sparktorch.errors import ConfigError, nearest

__all__ = ["freeze", "group"]


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters whose names match, and unfreezes others; later patterns override earlier ones.

    Patterns are globs, in which `*` matches dots too; `!pattern` unfreezes, also what the module itself has frozen.
    """
    if not patterns:
        return
    named = dict(module.named_parameters(remove_duplicate=False))
    trained: dict[str, bool] = {}
    for pattern in patterns:
        matching = _matching(pattern.removeprefix("!"), named, "freeze")
        unfreezes = pattern.startswith("!")
        # An adapter keeps the part that it has copied to train, and does not call it.
        trained |= {name: unfreezes for name in matching if not (unfreezes and ".original_module." in name)}
    for name in sorted(trained, key=trained.__getitem__, reverse=True):  # Either name of a tensor freezes it.
        parameter = named[name]
        parameter.requires_grad_(trained[name] and (parameter.is_floating_point() or parameter.is_complex()))


def _by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by all of their names, without what torch's activation checkpointing adds to these."""
    return {name.replace(WRAPPER, ""): p for name, p in module.named_parameters(remove_duplicate=False)}


def group(
    module: nn.Module, groups: Sequence[Mapping[str, Any]], whole: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Returns the module's trainable parameters as an optimizer's groups; those without a group come first.

    A parameter belongs to the first group with a glob under "params" that matches its name. If `whole` is the module
    with all of the parameters, of which this one has some, groups may be empty.
    """
    if whole is not None:
        present = _by_name(module)
        twins: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in whole.named_parameters(remove_duplicate=False):
            if name in present:
                twins.setdefault(parameter, present[name])
        assert {p for p in present.values() if p.requires_grad} <= set(twins.values()), "names of other parameters"
        of_whole = group(whole, groups)
        return [{**options, "params": [twins[p] for p in options["params"] if p in twins]} for options in of_whole]
    named = dict(module.named_parameters(remove_duplicate=False))
    ungrouped = {
        parameter: None for parameter in named.values() if parameter.requires_grad
    }  # The order is that of names, and tied parameters are there once.
    grouped = []
    for number, options in enumerate(groups):
        globs = options.get("params", ())
        patterns = globs if isinstance(globs, Iterable) and not isinstance(globs, str) else [globs]
        matching = {name for pattern in patterns for name in _matching(str(pattern), named, "parameterGroups")}
        members = list(dict.fromkeys(named[name] for name in named if name in matching and named[name] in ungrouped))
        if not members:
            raise ConfigError(
                f"parameterGroups[{number}] is left without a parameter",
                hint="its 'params' are globs of parameter names; those that they match are frozen, or belong to an "
                "earlier group",
                param="parameterGroups",
            )
        for parameter in members:
            del ungrouped[parameter]
        grouped.append({**options, "params": members})
    return [{"params": list(ungrouped)}, *grouped] if ungrouped else grouped


def _matching(pattern: str, names: Iterable[str], param: str) -> set[str]:
    """Returns the names that match a pattern; raises `ConfigError` if there are none."""
    matching = {name for name in names if fnmatchcase(name, pattern)}
    if not matching:
        parts = {f"{name.rsplit('.', above)[0]}.*" for name in names for above in range(1, name.count(".") + 1)}
        hint = nearest(pattern, {*names, *parts}, f"names are {', '.join(list(names)[:3])}, ...")
        raise ConfigError(f"{param}: {pattern!r} matches no parameter", hint=hint, param=param, code="ST-PATTERN")
    return matching
