"""A module built without values gets those that its constructor alone would have made, bit for bit, part by part."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparktorch.base.deferred import deferred
from sparktorch.errors import ModuleError


class Every(nn.Module):
    """Parameters and buffers made in the ways that constructors make them."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 5, 8))
        nn.init.trunc_normal_(self.position, a=-1, b=1)  # draws until all values are within bounds
        self.token = nn.Parameter(torch.randn(1, 1, 8) * 0.1)
        self.table = nn.Embedding(10, 8, padding_idx=3)  # writes a row
        self.hidden = nn.Linear(8, 8)
        self.hidden.weight.data.normal_(0, 0.5)
        with torch.no_grad():
            self.hidden.bias[2:4] = 7.0
        self.square = nn.Linear(8, 6)
        nn.init.orthogonal_(self.square.weight)  # a decomposition, and a sign
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.table.weight
        of_numpy = torch.from_numpy(np.arange(8.0, dtype=np.float32))
        self.hidden.bias.data.copy_(of_numpy)
        of_numpy.mul_(3).add_(self.token.detach().view(-1))
        self.of_numpy = nn.Parameter(of_numpy)
        self.part = nn.Parameter(torch.randn(100)[:3])
        self.of_its_own = nn.init.normal_(nn.Parameter(torch.empty(4, 4)), generator=torch.Generator().manual_seed(4))
        self.mask = nn.Parameter(torch.bernoulli(torch.full((6,), 0.5)))
        self.order = nn.Parameter(torch.randperm(9).float())
        mean = torch.tensor([0.1, 0.2, 0.3])
        mean.mul_(255.0)
        self.register_buffer("mean", mean.view(3, 1) * 1.0)
        self.register_buffer("inverse", 1 / mean)
        turned = torch.polar(torch.ones(3), torch.arange(3.0))
        self.register_buffer("turned", turned.conj())
        self.register_buffer("sines", turned.conj().imag)
        rates = torch.arange(6.0)
        self.register_buffer("large", rates[rates > 2])
        self.scale = torch.sqrt(torch.FloatTensor([3]))  # no buffer
        copied = copy.deepcopy(self.table)
        with torch.no_grad():
            copied.weight[0].zero_()
        self.copied = copied
        self.norms = nn.ModuleList(copy.deepcopy(nn.BatchNorm1d(3)) for _ in range(2))
        self.hidden = self.hidden.float().to("cpu")  # changes nothing
        torch.set_default_dtype(torch.float64)
        self.wide = nn.Parameter(torch.ones(3) * 2)
        torch.set_default_dtype(torch.float32)
        self.register_buffer("waves", self._waves(), persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]

    def _waves(self) -> torch.Tensor:
        found, place = torch.zeros(6, 8), torch.arange(6).unsqueeze(1).float()
        rate = torch.exp(torch.arange(0, 8, 2).float() * (-math.log(10000.0) / 8))
        found[:, 0::2], found[:, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
        return found


def drawn_again() -> nn.Module:
    """Layers that were copied, and then initialised by the whole."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def draw(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(0, 0.02)
            part.bias.data.zero_()

    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).apply(draw)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "drawn again": drawn_again,
    "every way": Every,
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "copied layers": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    ),
    "drawn again by the whole": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "channels last": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last),
    "recurrent": lambda: nn.LSTM(3, 5, 2),
    "statistics": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.PReLU()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),  # compares tensors
}


def tensors(module: nn.Module) -> dict[str, Any]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


@pytest.mark.parametrize("case", MODULES)
def test_parts_get_the_values_of_the_constructor_in_any_order(case: str) -> None:
    check_values(MODULES[case])


def check_values(make: Callable[[], nn.Module]) -> None:
    """Compares what a constructor makes with what parts get one by one, the last one first."""
    torch.manual_seed(3)
    expected, after = make(), torch.get_rng_state()
    torch.manual_seed(3)
    built = deferred(make)
    assert torch.equal(torch.get_rng_state(), after)  # what is made next gets the same random numbers
    assert all(tensor.untyped_storage().device.type == "meta" for tensor in built.module.parameters() if _fake(tensor))
    for part in reversed([*built.module.children(), built.module]):
        built.materialise(part)
    assert torch.equal(torch.get_rng_state(), after)
    found, wanted = tensors(built.module), tensors(expected)
    assert {name: type(tensor) for name, tensor in found.items()} == {n: type(tensor) for n, tensor in wanted.items()}
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor.resolve_neg(), found[name])] == []
    assert len(list(built.module.parameters())) == len(list(expected.parameters()))  # tied ones are tied
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())


def _fake(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"


def test_one_part_is_made_at_a_time() -> None:
    built = deferred(Every)
    built.materialise(built.module.hidden)  # type: ignore[arg-type]
    assert not _fake(built.module.hidden.weight)  # type: ignore[arg-type, union-attr]
    assert _fake(built.module.square.weight)  # type: ignore[arg-type, union-attr]


def test_a_tensor_that_is_no_buffer_gets_its_value_too() -> None:
    built = deferred(Every)
    built.materialise(built.module)
    assert built.module.scale.item() == pytest.approx(3**0.5)  # type: ignore[operator, union-attr]


def test_a_recurrent_module_computes_with_its_values() -> None:
    torch.manual_seed(1)
    expected = nn.LSTM(3, 5, 2)
    torch.manual_seed(1)
    built = deferred(lambda: nn.LSTM(3, 5, 2))
    built.materialise(built.module)
    x = torch.ones(4, 1, 3)
    assert torch.equal(built.module(x)[0], expected(x)[0])


def test_attributes_and_hooks_of_parameters_are_kept() -> None:
    def marked() -> nn.Module:
        made = nn.Linear(2, 2)
        made.weight.no_decay = True  # type: ignore[attr-defined]
        made.weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[no-untyped-call]
        return made

    built = deferred(marked)
    built.materialise(built.module)
    built.module(torch.ones(1, 2)).sum().backward()
    weight = built.module.weight
    assert weight.no_decay  # type: ignore[union-attr]
    assert not weight.grad.any()  # type: ignore[union-attr]
    assert vars(weight) == {"no_decay": True}
    assert built.module.bias.grad.all()  # type: ignore[union-attr]


def test_saved_values_take_the_place_of_tensors_that_the_caller_has_made() -> None:
    given = torch.full((4, 2), 0.5)

    def made() -> nn.Module:
        found = nn.Embedding.from_pretrained(given, freeze=False)
        found.register_buffer("mean", given)
        return found

    saved = {"weight": torch.full((4, 2), 7.0), "mean": torch.full((4, 2), 8.0)}
    built = deferred(made, saved)
    built.materialise(built.module)
    assert all(torch.equal(built.module.state_dict()[name], value) for name, value in saved.items())
    assert torch.equal(given, torch.full((4, 2), 0.5))


def loaded(path: str) -> nn.Module:
    made = nn.Linear(3, 1, bias=False)
    made.weight = nn.Parameter(torch.load(path))
    return made


def listed() -> nn.Module:
    made = nn.Linear(3, 1)
    made.shapes = [made.weight]  # type: ignore[assignment]
    return made


class Scale:
    """Holds a tensor in a slot."""

    __slots__ = ("factor", "unset")

    def __init__(self) -> None:
        self.factor = torch.linspace(0.5, 1, 4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Schedule:
    """Holds a tensor, and itself."""

    def __init__(self) -> None:
        self.betas, self.own = torch.linspace(0.5, 1, 4), self

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.betas


def closed_over() -> Callable[[torch.Tensor], torch.Tensor]:
    factor = torch.linspace(0.5, 1, 4)
    return lambda x: x * factor


HELD: dict[str, Callable[[], Any]] = {
    "a Schedule": Schedule,
    "a Scale": Scale,
    "a function": closed_over,
    "a method": lambda: Schedule().noise,
    "a partial": lambda: partial(torch.mul, torch.linspace(0.5, 1, 4)),
    "a dict": lambda: {"schedules": [{Schedule()}]},
    "a tuple": lambda: (nn.Linear(2, 2),),  # no part of the module
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("what", HELD)
def test_a_tensor_within_what_a_module_holds_is_refused(what: str, exact: bool) -> None:
    def make() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 1))
        made[0].held = HELD[what]()
        return made

    with pytest.raises(ModuleError, match=rf"0\.held holds a tensor in {what}"):
        deferred(make, exact=exact)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # which is deprecated
def test_parts_and_real_tensors_may_be_held() -> None:
    def make() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 1))
        made.first, made.call = [made[0]], made[0].forward  # type: ignore[assignment]
        made.append(torch.compile(nn.Linear(1, 1)))  # type: ignore[arg-type]
        made.append(torch.jit.script(nn.Linear(1, 1)))
        made.real = [torch.from_numpy(np.ones(3))]  # type: ignore[assignment]
        return made

    built = deferred(make)
    built.materialise(built.module)
    assert built.module.first[0] is built.module[0]  # type: ignore[index]


@pytest.mark.parametrize("exact", [True, False])
def test_what_cannot_be_made_again_is_refused(exact: bool, tmp_path: Path) -> None:
    torch.save(torch.ones(1, 3), tmp_path / "weight.pt")
    cases: dict[str, Callable[[], nn.Module]] = {
        "comes from outside of the module's constructor, as by torch.load": lambda: loaded(str(tmp_path / "weight.pt")),
        "shapes holds the parameter 'weight' in a list": listed,
        r"converts 'weight' of Linear, as by \.to\(dtype\)": lambda: nn.Linear(3, 1).half(),
    }
    for said, make in cases.items():
        with pytest.raises(ModuleError, match=said):
            deferred(make, exact=exact)
    assert nn.Linear(3, 1).half().weight.dtype == torch.float16  # outside, all is as before


@pytest.mark.parametrize("exact", [True, False])
def test_what_the_constructor_computes_from_values_is_that_of_the_values(exact: bool) -> None:
    assert deferred(Every, exact=exact).module.rates == Every().rates


def test_shapes_alone_need_no_random_numbers() -> None:
    before = torch.get_rng_state()
    built = deferred(partial(nn.Linear, 1 << 20, 1 << 20), exact=False)
    assert built.module.weight.numel() == 1 << 40  # type: ignore[operator, union-attr]
    assert torch.equal(torch.get_rng_state(), before)


def test_saved_values_take_the_place_of_those_of_the_constructor() -> None:
    torch.manual_seed(1)
    saved = {name: value for name, value in Every().state_dict().items() if name != "table.weight"}  # a tied name
    torch.manual_seed(2)
    built = deferred(Every, saved)
    built.check_saved()
    built.materialise(built.module)
    assert all(torch.equal(built.module.state_dict()[name], value) for name, value in saved.items())
    assert torch.equal(built.module.waves, Every().waves)  # type: ignore[arg-type]
    assert built.module.tied.weight is built.module.table.weight  # type: ignore[union-attr]


def test_a_value_that_is_not_saved_is_drawn_as_without_any_saved() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.register_buffer("noise", torch.randn(4), persistent=False)

    torch.manual_seed(5)
    expected = Half()
    torch.manual_seed(5)
    built = deferred(Half, {name: torch.zeros_like(value) for name, value in expected.state_dict().items()})
    built.materialise(built.module)
    assert torch.equal(built.module.noise, expected.noise)  # type: ignore[arg-type]
    assert not built.module.first.weight.any()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"weight": torch.zeros(2, 3)}, "lack 'bias'"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)}, "have 'more'"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"'weight' has the shape \(3, 2\)"),
    ],
)
def test_values_of_another_module_are_refused(saved: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ModuleError, match=said):
        deferred(lambda: nn.Linear(3, 2), saved).check_saved()
