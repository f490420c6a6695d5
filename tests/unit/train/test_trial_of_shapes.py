"""The trial without values, which `modelDir` asks for on the driver."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparktorch.errors import ModuleError
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.recipe.recipe import Recipe
from tests.support.nets import Score


def test_it_finds_what_the_trial_with_values_finds() -> None:
    x, label = {"x": torch.ones(2, 5)}, torch.ones(2)
    found, wanted = (dry_run(Recipe(module=Score), "regression", 0, x, label, values=v) for v in (False, True))
    assert (found.outputs, found.arguments, found.state_bytes) == (wanted.outputs, wanted.arguments, wanted.state_bytes)
    assert [type(tensor) for tensor in found.aligned] == [torch.Tensor, torch.Tensor]  # for metrics
    assert all((tensor > 0).all() for tensor in found.aligned if tensor is not None)


def test_jagged_rows_are_tried_with_values_only() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ModuleError, match=r"column 'x' is jagged.*\n.*dryRun='worker' tries values"):
        dry_run(Recipe(module=nn.Identity), "generic", 0, {"column 'x'": jagged}, None, values=False)


class Looks(Score):
    """Looks at its values when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]


class Waves(Score):
    """Computes a buffer when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.arange(5.0).sin())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Looks, r"Looks cannot be built: .*meta tensors(.*\n)+.*made by NumPy or device='cpu' has values"),
        (Waves, r"'waves' has no value: no reset_parameters.*\n.*reset_parameters\(\) of Waves"),
    ],
)
def test_what_constructors_compute_is_refused(module: type[nn.Module], said: str) -> None:
    with pytest.raises(ModuleError, match=said):
        dry_run(Recipe(module=module), "regression", 0, {"x": torch.ones(2, 5)}, torch.ones(2), values=False)
