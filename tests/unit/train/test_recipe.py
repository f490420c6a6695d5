"""Modules and optimizers are built from what users give, or refused with a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparktorch.base.imports import import_path, load_object
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.lookup import has_fused_kernel
from sparktorch.train.recipe.recipe import Recipe, recipe_of
from tests.support import nets
from tests.support.nets import Mlp

PATH = "tests.support.nets:Mlp"


def state_of(module: nn.Module) -> list[torch.Tensor]:
    return list(module.state_dict().values())


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(state_of(left), state_of(right), strict=True))


def test_an_import_path_gives_the_object() -> None:
    assert load_object(PATH) is Mlp
    assert load_object("torch:nn.Linear") is nn.Linear


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.nn.Linear", "'torch.nn.Linear' is not an import path"),
        ("no_such_module:Net", "cannot import 'no_such_module:Net'"),
        ("tests.support.nets:Mpl", "(?s)cannot import 'tests.support.nets:Mpl'.*did you mean 'Mlp'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(ModuleError, match=message):
        load_object(path)


def local_class() -> type:
    class Local(Mlp):
        pass

    return Local


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Mlp, PATH),
        (nets.not_a_module, "tests.support.nets:not_a_module"),
        (Mlp(), None),
        (lambda: Mlp(), None),
        (local_class(), None),
        (type("Mlp", (Mlp,), {"__module__": Mlp.__module__}), None),
    ],
    ids=["class", "factory", "module", "lambda", "local", "namesake"],
)
def test_only_what_can_be_imported_again_has_a_path(value: Any, path: str | None) -> None:
    assert import_path(value) == path


@pytest.mark.parametrize("module", [PATH, Mlp, lambda **kwargs: Mlp(**kwargs)], ids=["path", "class", "factory"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(module: Any) -> None:
    recipe = Recipe(module=module, module_params={"outputs": 4})
    assert same(recipe.build_module(7), recipe.build_module(7))
    assert not same(recipe.build_module(7), recipe.build_module(8))
    assert state_of(recipe.build_module(7))[-1].shape == (4,)


def test_an_instance_is_copied_and_keeps_its_weights() -> None:
    given = Mlp()
    built = Recipe(module=given).build_module(0)
    assert built is not given
    assert same(built, given)
    with torch.no_grad():
        next(built.parameters()).zero_()
    assert not same(built, given)


@pytest.mark.parametrize(
    ("module", "params", "message", "hint"),
    [
        (Mlp, {"widht": 3}, "module Mlp cannot be built: TypeError", "hidden: 'int' = 8"),
        (Mlp, {2: 3}, "module Mlp cannot be built: TypeError", "its parameters are (inputs"),
        (
            Mlp,
            {"hiden": 3},
            "module Mlp cannot be built: TypeError",
            "'hiden' is none of its parameters: did you",
        ),
        (nets.not_a_module, {}, "module not_a_module returned int, not an nn.Module", "pass an nn.Module class"),
        (Mlp(), {"hidden": 3}, "moduleParams are given, but module is an instance", "pass the class instead"),
    ],
)
def test_a_module_that_cannot_be_built_is_refused(module: Any, params: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ModuleError) as caught:
        Recipe(module=module, module_params=params).build_module(0)
    assert caught.value.what.startswith(message)
    assert hint in caught.value.hint


def build_optimizer(name: Any, module: nn.Module | None = None, **params: Any) -> torch.optim.Optimizer:
    recipe = Recipe(module=Mlp, optimizer=name, optimizer_params=params, learning_rate=0.25)
    return recipe.build_optimizer(module or Mlp())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SGD", torch.optim.SGD),
        ("torch.optim:RMSprop", torch.optim.RMSprop),
        (torch.optim.Adam, torch.optim.Adam),
        (lambda parameters, lr: torch.optim.SGD(parameters, lr=lr), torch.optim.SGD),
    ],
)
def test_an_optimizer_is_a_name_a_path_or_a_factory(name: Any, kind: type) -> None:
    optimizer = build_optimizer(name)
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("name", "params", "fused"),
    [
        ("AdamW", {}, True),
        ("AdamW", {"fused": False}, False),
        ("AdamW", {"foreach": True}, None),
        ("SGD", {}, None),
        (lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr), {}, None),
    ],
)
def test_a_fused_kernel_is_used_unless_the_user_chose(name: Any, params: dict[str, Any], fused: bool | None) -> None:
    assert build_optimizer(name, **params).param_groups[0].get("fused") is fused


class Decayed(torch.optim.AdamW):
    """An optimizer of a user's that torch's is the base of."""


def test_a_fused_kernel_is_used_only_where_torch_has_it_for_the_device() -> None:
    with torch.library._scoped_library("aten", "IMPL") as device:
        device.impl("_fused_adamw_", lambda *_, **__: None, "PrivateUse1")  # of this device, Adagrad has none
        fused = {
            (kind.__name__, on): has_fused_kernel(kind, on)
            for kind in (torch.optim.AdamW, Decayed, torch.optim.Adagrad, torch.optim.RMSprop)
            for on in ("cpu", "privateuseone")
        }
    assert fused == {
        ("AdamW", "cpu"): True,
        ("AdamW", "privateuseone"): True,
        ("Decayed", "cpu"): True,
        ("Decayed", "privateuseone"): True,
        ("Adagrad", "cpu"): True,
        ("Adagrad", "privateuseone"): False,
        ("RMSprop", "cpu"): False,
        ("RMSprop", "privateuseone"): False,
    }
    with FakeTensorMode():  # torch for CPUs has no kernels of CUDA's
        optimizer = build_optimizer("Adagrad", nn.ParameterList([torch.ones(2, device="cuda")]))
    there = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adagrad_", "CUDA")
    assert bool(optimizer.defaults["fused"]) == there


def test_sgd_with_momentum_takes_a_gradient_that_comes_in_a_later_step() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = build_optimizer("SGD", module, momentum=0.9)
    for part in (module[0], module):
        part(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_train_as_they_do_in_plain_torch(name: str) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = build_optimizer(name, nn.Sequential(embedding))
    embedding(torch.tensor([1])).sum().backward()
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns where nobody chose
        optimizer.step()
    assert (before != embedding.weight).any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("name", "params", "message", "hint"),
    [
        ("AdmW", {}, "optimizer 'AdmW' is unknown", "did you mean 'AdamW'?"),
        ("AdamW", {"weight_deacy": 1}, "optimizer AdamW cannot be built", "weight_decay: "),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_refused(
    name: Any, params: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ModuleError) as caught:
        build_optimizer(name, **params)
    assert caught.value.what.startswith(message)
    assert hint in caught.value.hint


# Optimizers that users have built, built again


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": net[0].parameters(), "lr": 0.5}, {"params": [*net[1].parameters(), *net[2].parameters()]}]


@pytest.mark.parametrize(
    "build",
    [
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.2),
        lambda net: torch.optim.SGD(_groups(net), lr=0.1, momentum=0.9, nesterov=True),
        lambda net: torch.optim.Adagrad(net.parameters(), lr=torch.tensor(0.1)),
    ],
)
def test_an_optimizer_that_is_built_again_takes_the_same_steps(build: Callable[[nn.Module], Any]) -> None:
    first, second = _net(), _net()
    optimizer = build(first)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds values to its groups
    again = recipe_of(second, build(second)).build_optimizer(second)
    assert type(again) is type(optimizer)
    for net, own in ((first, optimizer), (second, again)):
        for _ in range(3):
            own.zero_grad()
            net(torch.ones(5, 3)).sum().backward()
            own.step()
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (_stepped, "Adam has taken steps already"),
        (lambda net: torch.optim.Adam(nn.Linear(2, 2).parameters()), "has parameters that are not the module's"),
        (lambda net: torch.optim.Adam(net[0].parameters()), "lacks the trainable parameters 1.weight, 1.bias"),
    ],
)
def test_an_optimizer_of_something_else_is_refused(build: Callable[[nn.Module], Any], says: str) -> None:
    net = _net()
    with pytest.raises(ModuleError, match=says):
        recipe_of(net, build(net))


def test_an_optimizer_without_parameters_is_built_with_its_own_options() -> None:
    _, parameters, options = Recipe(module=nn.Identity, optimizer="Rprop").optimizer_call(nn.Identity())
    assert (parameters, "fused" in options) == ([], False)
