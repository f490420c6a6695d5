"""Models of neuralforecast get windows as their own `training_step` hands them over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.tasks.series.network import SeriesModule

NETWORK = "sparktorch.adapters.neuralforecast:NeuralForecastNetwork"
COLUMNS: dict[str, Any] = {"past": [(0.0, 1.0)], "future": [(0.0, 1.0), (0.0, 1.0)], "static": [(0.0, 1.0)]}


class Model(nn.Module):
    """Keeps what it is made and called with."""

    def __init__(self, h: int, input_size: int, **options: Any) -> None:
        super().__init__()
        self.h, self.input_size, self.options = h, input_size, options

    def forward(self, windows: dict[str, Any]) -> torch.Tensor:
        self.windows = windows
        return windows["insample_y"][:, -1:].expand(-1, self.h, 1)


def windows() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.rand(5, 14, 2), torch.rand(5, 21, 2), torch.rand(5, 14, 1)


def test_a_model_gets_each_kind_of_column_by_its_name() -> None:
    module = SeriesModule(NETWORK, {"model": Model, "dropout": 0.5}, 14, 7, **COLUMNS)
    past, future, static = windows()
    forecast = module(past, future, static)
    model: Any = module.module.model  # type: ignore[union-attr]
    assert (model.h, model.input_size) == (7, 14)
    lists = {name: len(model.options.pop(name)) for name in ("hist_exog_list", "futr_exog_list", "stat_exog_list")}
    assert lists == {"hist_exog_list": 1, "futr_exog_list": 2, "stat_exog_list": 1}
    assert model.options == {"dropout": 0.5}
    assert torch.equal(model.windows["hist_exog"], past[:, :, 1:])
    assert torch.equal(model.windows["futr_exog"], future)
    assert torch.equal(model.windows["stat_exog"], static[:, -1])
    assert torch.equal(model.windows["insample_mask"], torch.ones(5, 14, 1))
    assert torch.allclose(forecast, past[:, -1:, 0].expand(5, 7))


@pytest.mark.parametrize(("columns", "quantiles"), [({}, []), (COLUMNS, [0.1, 0.9])])
@pytest.mark.parametrize("name", ["NHITS", "TFT", "TiDE"])
@pytest.mark.filterwarnings("ignore")
def test_models(name: str, quantiles: list[float], columns: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "RAY_CLIENT_MODE"):
        monkeypatch.setenv(variable, "0")  # which they set
    pytest.importorskip("neuralforecast")
    module = SeriesModule(NETWORK, {"model": f"neuralforecast.models:{name}"}, 14, 7, **columns, quantiles=quantiles)
    past, future, static = windows()
    more = [part for of, part in (("future", future), ("static", static)) if of in columns]
    past = past if "past" in columns else past[:, :, :1]
    label, optimizer, losses = past[:, :7, 0], torch.optim.Adam(module.parameters(), 0.01), []
    for _ in range(30):
        forecast = module(past, *more)
        assert forecast.shape == ((5, 7, 2) if quantiles else (5, 7))
        loss = (forecast.reshape(5, 7, -1) - label[:, :, None]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0]
