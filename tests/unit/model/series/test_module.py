"""A module gets scaled windows and those numbers that it asks for, and its forecasts are in the units of the series."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import mean_pinball_loss
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError
from sparktorch.tasks.series.loss import QuantileLoss, SeriesStep
from sparktorch.tasks.series.network import SeriesModule, SeriesNetwork

PAST, FUTURE, STATIC = [(2.0, 4.0)], [(0.0, 0.0), (1.0, 2.0)], [(3.0, 1.0)]


class Seen(nn.Module):
    """Keeps what it gets, and forecasts the last value."""

    def __init__(self, horizon: int, past_columns: int, future_columns: int, extra: int = 0) -> None:
        super().__init__()
        self.told = (horizon, past_columns, future_columns, extra)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        self.parts = parts
        return self.weight * parts[0][:, -1:, 0].expand(-1, self.told[0])


class Returns(nn.Module):
    """Returns what it was made with."""

    def __init__(self, found: torch.Tensor) -> None:
        super().__init__()
        self.found = found

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        return self.found


def windows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    past = torch.rand(5, 4, 2, generator=generator) * 10 + 1e3
    return past, torch.rand(5, 6, 2, generator=generator), torch.rand(5, 4, 1, generator=generator)


def test_a_module_gets_scaled_windows_and_what_is_known_ahead_twice() -> None:
    module = SeriesModule(Seen, {"extra": 7}, 4, 2, PAST, FUTURE, STATIC)
    past, future, static = windows()
    found = module(past, future, static)
    target, seen = past[:, :, 0].double(), module.module
    assert isinstance(seen, Seen)
    assert seen.told == (2, 4, 2, 7)
    scaled = (target - target.mean(1, keepdim=True)) / target.std(1, correction=0, keepdim=True)
    known = torch.stack([future[..., 0], (future[..., 1] - 1) / 2], 2)
    want = torch.cat([scaled.float().unsqueeze(2), (past[..., 1:] - 2) / 4, known[:, :4]], 2)
    assert torch.allclose(seen.parts[0], want, atol=1e-4)
    assert torch.equal(seen.parts[1], known[:, 4:])
    assert torch.equal(seen.parts[2], static[:, -1] - 3)
    assert torch.allclose(found, past[:, -1:, 0].expand(-1, 2))


@pytest.mark.parametrize(("value", "unit"), [(0.0, 5.0), (-0.5, 0.5)])
def test_a_constant_context_is_scaled_by_its_size_and_zeros_by_the_deviation_of_all_rows(
    value: float, unit: float
) -> None:
    module, step = SeriesModule(Seen, {}, 4, 2, deviation=5.0), SeriesStep("L1Loss", deviation=5.0)
    past = torch.full((3, 4, 1), value)
    assert torch.equal(module(past), torch.full((3, 2), value))
    assert module.module.parts[0].abs().max() == 0  # type: ignore[union-attr]
    assert torch.allclose(
        step(module, Batch((past,), torch.full((3, 2), value + 10), None, 3))[0], torch.tensor(10 / unit)
    )
    module = SeriesModule(Returns(torch.ones(3, 2)), {}, 4, 2, deviation=5.0)
    assert torch.equal(module(past), torch.full((3, 2), value + unit))


def test_an_instance_is_copied() -> None:
    network = SeriesNetwork(4, 2)
    module = SeriesModule(network, {}, 4, 2)
    module(windows()[0][..., :1]).sum().backward()
    assert all(parameter.grad is None for parameter in network.parameters())
    assert torch.equal(network.linear.weight, module.module.linear.weight)  # type: ignore[union-attr]


def test_its_graph_takes_any_number_of_windows() -> None:
    network = SeriesNetwork(4, 2, 4, 2, 1, [0.1, 0.9], season=2)
    module = SeriesModule(network, {}, 4, 2, PAST, FUTURE, STATIC, quantiles=[0.1, 0.9])
    inputs, batch = windows(), torch.export.Dim("batch")
    graph = torch.export.export(module, inputs, dynamic_shapes={"past": {0: batch}, "more": ({0: batch}, {0: batch})})
    few = [part[:3] for part in inputs]
    assert torch.allclose(graph.module()(*few), module(*few))


def test_a_module_gets_a_learned_vector_for_each_category_and_zeros_for_null_and_unknown_ones() -> None:
    known = [["a", "b", "c", "d", "e"], None, [True]]
    module = SeriesModule(Seen, {}, 4, 2, PAST, FUTURE, [(0.0, 1.0), (3.0, 1.0), (0.0, 1.0)], categories=known)
    past, future, size = windows()
    kind, flag = torch.tensor([0.0, 1, 2, 6, 6]), torch.tensor([2.0, 0, 1, 2, 2])
    static = torch.stack([kind, size[:, -1, 0], flag], 1).unsqueeze(1).expand(-1, 4, -1)
    module(past, future, static)
    vectors = module.module.parts[2]  # type: ignore[union-attr]
    assert vectors.shape == (5, 1 + 4 + 2)
    assert torch.equal(vectors[:, 0], size[:, -1, 0] - 3)
    assert (vectors[:2, 1:5] == 0).all()
    assert (vectors[1:3, 5:] == 0).all()
    assert torch.equal(vectors[3], torch.cat([vectors[3, :1], vectors[4, 1:]]))
    assert (vectors[2:, 1:5] != 0).all()
    assert not torch.equal(vectors[2, 1:5], vectors[3, 1:5])
    module.module.parts[2].sum().backward()  # type: ignore[union-attr, operator]
    assert all(weight.grad is not None for weight in module.embeddings.parameters())


@pytest.mark.parametrize(("shape", "quantiles"), [((2, 3), []), ((3, 4), []), ((3, 3, 2), [0.1, 0.5, 0.9])])
def test_an_output_of_another_shape_is_refused(shape: tuple[int, ...], quantiles: list[float]) -> None:
    module = SeriesModule(Returns(torch.zeros(shape)), {}, 4, 2, quantiles=quantiles)
    with pytest.raises(ModuleError, match=r"returned shape(.|\n)*\(samples, horizon"):
        module(torch.rand(3, 4, 1))


@pytest.mark.parametrize(("shape", "quantiles"), [((3, 2), []), ((3, 2, 1), []), ((3, 2, 3), [0.1, 0.5, 0.9])])
def test_without_quantiles_a_last_axis_of_one_may_be_there(shape: tuple[int, ...], quantiles: list[float]) -> None:
    module = SeriesModule(Returns(torch.zeros(shape)), {}, 4, 2, quantiles=quantiles)
    assert module(torch.rand(3, 4, 1)).shape == ((3, 2, 3) if quantiles else (3, 2))


@pytest.mark.parametrize(("quantiles", "hidden"), [([], [8, 4]), ([0.1, 0.5, 0.9], [])])
@pytest.mark.parametrize("columns", [{}, {"past": PAST}, {"future": FUTURE, "static": STATIC}])
def test_the_network_forecasts_from_all_kinds_of_columns(
    quantiles: list[float], hidden: list[int], columns: dict[str, Any]
) -> None:
    module = SeriesModule(SeriesNetwork, {"hidden": hidden}, 4, 2, **columns, quantiles=quantiles)
    past, future, static = windows()
    past = past[..., : 1 + len(columns.get("past", ()))]
    more = [part for name, part in (("future", future), ("static", static)) if name in columns]
    found = module(past, *more)
    assert found.shape == ((5, 2, 3) if quantiles else (5, 2))
    if "past" not in columns:
        assert torch.allclose(module(2 * past + 5, *more), 2 * found + 5)


@pytest.mark.parametrize("scaling", ["window", None])
def test_the_loss_is_that_of_scaled_forecasts(scaling: str | None) -> None:
    module = SeriesModule(SeriesNetwork, {}, 4, 2, scaling=scaling)
    past, label = windows()[0][..., :1], torch.rand(5, 2) * 1e6
    step = SeriesStep("HuberLoss", {"delta": 0.5}, scaling)
    found = step(module, Batch((past,), label, None, 5))
    mean, deviation = past.mean(1), past.std(1, correction=0)
    if scaling is None:
        mean, deviation = torch.zeros(5, 1), torch.ones(5, 1)
    loss = nn.HuberLoss(reduction="none", delta=0.5)
    want = loss((module(past) - mean) / deviation, (label - mean) / deviation)
    assert torch.allclose(found, want, rtol=1e-4)


def test_the_quantile_loss_is_that_of_scikit_learn() -> None:
    torch.manual_seed(1)
    quantiles, output, label = [0.1, 0.5, 0.8], torch.randn(50, 4, 3), torch.randn(50, 4)
    want = [mean_pinball_loss(label, output[..., place], alpha=q) for place, q in enumerate(quantiles)]
    assert float(QuantileLoss(quantiles)(output, label)) == pytest.approx(sum(want) / 3, rel=1e-6)
    assert QuantileLoss(quantiles, reduction="none")(output, label).shape == (50, 4, 3)
