"""Plans whose layers do not fit each other are found on the driver, and others are let through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import check_module
from tests.support.nets import Gated

PAIR = {"fc1": "colwise", "fc2": "rowwise"}
LINEAR = {"encoder.layers.*.linear1": "colwise", "encoder.layers.*.linear2": "rowwise"}


class Masked(nn.Module):
    """An encoder with padding, whose fused kernels would make nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(self.enter(x)[:, None], src_key_padding_mask=x[:, :1] < 0)[:, 0, 0]
        return found


class Remembering(Gated):
    """Keeps something as wide as a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.fc1(x))
        self.memory = hidden if self.memory is None else hidden + self.memory
        out: torch.Tensor = self.fc2(self.memory).squeeze(-1)
        return out


class Choosing(Gated):
    """Looks at values, which a trial has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if not found.isfinite().all():
            raise ArithmeticError("a number is not finite")
        return found


class Branching(Gated):
    """Takes another path with a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(x)
        if hidden.isfinite().all() and hidden.shape[-1] < 8:
            hidden = hidden @ torch.ones(8, 8)
        out: torch.Tensor = self.fc2(hidden).squeeze(-1)
        return out


class ByKeyword(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(input=x))).squeeze(-1)
        return out


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.fc1, self.fc2, self.fc3 = nn.Linear(5, 8), nn.Linear(width, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc3(self.fc2(self.function(self.fc1(x)))).squeeze(-1)
        return out


@pytest.mark.parametrize(
    ("function", "width", "refused"),
    [
        (torch.tanh, 8, False),
        (lambda h: nn.functional.dropout(h * torch.sigmoid(h)), 8, False),
        (lambda h: h.view(len(h), -1, 2).softmax(-1).flatten(1), 8, False),  # in heads, as attention
        (nn.functional.glu, 4, True),
        (lambda h: h.softmax(-1), 8, True),
        (nn.functional.normalize, 8, True),
        (lambda h: h.view(len(h), 2, -1).softmax(-1).flatten(1), 8, True),  # in heads of another size in a rank
        (lambda h: h / h.shape[-1] ** 0.5, 8, True),
        (lambda h: h + torch.rand_like(h), 8, False),  # nothing is known of it
        (lambda h: h + torch.from_numpy(np.random.rand(*h.shape)).float(), 8, False),
    ],
)
def test_plans_that_divide_what_is_computed_of_several_columns_are_refused(
    function: Callable[[torch.Tensor], torch.Tensor], width: int, refused: bool
) -> None:
    module = Between(function, width)
    config = TrainConfig(task="regression", strategy="mesh", strategy_params={"tensor": 2, "plan": PAIR})
    says = r"what 'fc2' takes in a rank differs from that of the whole module.* by 'colwise': 'fc1'"
    with pytest.raises(ModuleError, match=says) if refused else contextlib.nullcontext():
        check_module(config, Recipe(module=module), 2, module, Batch((torch.ones(2, 5),), None, None, 2))


class Force(Gated):
    """Takes a gradient in its forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            return energy + torch.autograd.grad(energy.sum(), x, retain_graph=True)[0].sum(1)


class Sparse(Gated):
    """Returns more than what can be compared."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x.to_sparse(), torch.complex(x, x)


class Forgetful(Between):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)


class Noisy(Between):
    """Draws numbers, which are the same in all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


class Padded(Masked):
    """Has a pair of layers behind an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.fc1(super().forward(x)[:, None]).softmax(-1)).squeeze(-1)
        return out


def rounded(hidden: torch.Tensor) -> torch.Tensor:
    """As kernels round that compute other shapes in another order: by two steps of float16."""
    return hidden * (1.002 if hidden.shape[-1] < 8 else 1.0)


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        (Force(), False),
        (Sparse(), False),
        (Between(rounded).half(), False),
        (Forgetful(nn.functional.normalize), True),
        (Noisy(nn.functional.normalize), True),
        (Padded(), True),
    ],
)
def test_right_plans_of_modules_with_their_own_ways_are_taken_and_wrong_ones_refused(
    module: nn.Module, refused: bool
) -> None:
    plan = {**PAIR, **LINEAR} if isinstance(module, Padded) else PAIR
    config = TrainConfig(task="generic", strategy="mesh", strategy_params={"tensor": 2, "plan": plan})
    batch = Batch((torch.ones(2, 5, dtype=next(module.parameters()).dtype),), None, None, 2)
    with pytest.raises(ModuleError, match="differs from") if refused else contextlib.nullcontext():
        check_module(config, Recipe(module=module), 2, module, batch)


def test_a_plan_by_which_the_module_would_return_a_part_is_refused() -> None:
    module = Between(torch.tanh)
    config = TrainConfig(task="regression", strategy="mesh", strategy_params={"tensor": 2, "plan": {"fc2": "colwise"}})
    module.fc3 = cast(Any, nn.AdaptiveAvgPool1d(1))
    with pytest.raises(ModuleError, match="what Between returns differs from that of the whole module"):
        check_module(config, Recipe(module=module), 2, module, Batch((torch.ones(2, 5),), None, None, 2))


@pytest.mark.parametrize(
    ("kind", "plan", "says"),
    [
        (Gated, {"fc1": "colwise"}, r"(?s)in each of 2 ranks, 'fc2' fails with a part.* of 'fc1': .*by 'rowwise'"),
        (Gated, {"fc2": "rowwise"}, "'fc2' is divided by 'rowwise' and gets 8 features in each of 2 ranks, not 4"),
        (ByKeyword, PAIR, "'fc1' is divided, and its input is passed by keyword"),
        (Masked, {"encoder.layers.*.linear1": "colwise"}, r"'encoder\.layers\.0\.linear2' fails"),
        (Branching, PAIR, "in each of 2 ranks, Branching, in evaluation, fails with a part .* of 'fc1': mat1 and mat2"),
        (Gated, PAIR, ""),
        (Gated, {"fc1": "colwise_gather_output"}, ""),
        (Masked, LINEAR, ""),
        (Remembering, PAIR, ""),
        (Choosing, PAIR, ""),
    ],
)
def test_plans_whose_shapes_do_not_fit_are_refused_before_the_job(
    kind: type[nn.Module], plan: dict[str, str], says: str
) -> None:
    module, recipe = kind(), Recipe(module=kind)
    config = TrainConfig(task="regression", strategy="mesh", strategy_params={"tensor": 2, "plan": plan})
    with pytest.raises(ModuleError, match=says) if says else contextlib.nullcontext():
        check_module(config, recipe, 2, module, Batch((torch.ones(2, 5),), None, None, 2))
    assert module.training
    assert getattr(module, "memory", None) is None
    assert module(torch.ones(2, 5)).shape == (2,)  # nothing is left of the trial
