"""Says which parameters are trained, and with which options, by glob patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sparktorch.base.state_dict import WRAPPER
from sparktorch.errors import ConfigError, nearest

__all__ = ["freeze", "group"]


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters whose names match a pattern, and unfreezes those that match a `!pattern`.

    Patterns are globs, in which `*` matches dots, too. Later patterns override earlier ones. `!pattern` also unfreezes
    parameters that the module itself has frozen.
    """
    if not patterns:
        return
    named = dict(module.named_parameters(remove_duplicate=False))
    is_trained: dict[str, bool] = {}
    for pattern in patterns:
        names = _matching_names(pattern.removeprefix("!"), named, "freeze")
        unfreezes = pattern.startswith("!")
        if unfreezes:
            # An adapter trains a copy of such a part. It keeps the original, and does not call it.
            names = {name for name in names if ".original_module." not in name}
        is_trained |= dict.fromkeys(names, unfreezes)
    # A parameter with several names is frozen if one of them is: names that freeze come last.
    for name in sorted(is_trained, key=is_trained.__getitem__, reverse=True):
        parameter = named[name]
        can_have_gradient = parameter.is_floating_point() or parameter.is_complex()
        parameter.requires_grad_(is_trained[name] and can_have_gradient)


def _by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by all their names, without the part that activation checkpointing adds to a name."""
    return {name.replace(WRAPPER, ""): p for name, p in module.named_parameters(remove_duplicate=False)}


def group(
    module: nn.Module, groups: Sequence[Mapping[str, Any]], whole: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Returns the module's trainable parameters as an optimizer's groups; parameters without a group come first.

    A parameter belongs to the first group with a glob under "params" that matches its name. If this module has only
    some of the parameters, `whole` is the module with all of them; then groups may be empty.
    """
    if whole is not None:
        return _share_of_groups(module, whole, group(whole, groups))
    named = dict(module.named_parameters(remove_duplicate=False))
    # They have the order of their names, and a parameter with several names is there once.
    ungrouped = {parameter: None for parameter in named.values() if parameter.requires_grad}
    grouped = []
    for number, options in enumerate(groups):
        globs = options.get("params", ())
        patterns = globs if isinstance(globs, Iterable) and not isinstance(globs, str) else [globs]
        names: set[str] = set()
        for pattern in patterns:
            names |= _matching_names(str(pattern), named, "parameterGroups")
        members = list(dict.fromkeys(named[name] for name in named if name in names and named[name] in ungrouped))
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


def _share_of_groups(module: nn.Module, whole: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups of a whole module's parameters with the parameters that this part of the module has."""
    in_part = _by_name(module)
    twins: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if name in in_part:
            twins.setdefault(parameter, in_part[name])
    assert {p for p in in_part.values() if p.requires_grad} <= set(twins.values()), "names of other parameters"
    return [{**options, "params": [twins[p] for p in options["params"] if p in twins]} for options in groups]


def _matching_names(pattern: str, names: Iterable[str], param: str) -> set[str]:
    """Returns the names that match a pattern; raises `ConfigError` if there are none."""
    matching = {name for name in names if fnmatchcase(name, pattern)}
    if not matching:
        parts = {f"{name.rsplit('.', above)[0]}.*" for name in names for above in range(1, name.count(".") + 1)}
        hint = nearest(pattern, {*names, *parts}, f"names are {', '.join(list(names)[:3])}, ...")
        raise ConfigError(f"{param}: {pattern!r} matches no parameter", hint=hint, param=param, code="ST-PATTERN")
    return matching
