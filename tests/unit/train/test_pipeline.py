"""What a module's units are, where it is cut, and that its stages compute what it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, GemmaConfig

from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.pipeline.checks import check_equal
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.sharding.arguments import Arguments
from tests.support.nets import Chain, Paired, Unit
from tests.support.staged_nets import Keeping, normed
from tests.support.tiny_transformers import llama, mixtral, qwen

ROWS = Arguments.of((torch.randn(2, 5, generator=torch.Generator().manual_seed(0)),), {})
TOKENS = torch.tensor([[3, 4, 5, 6, 0], [7, 8, 9, 3, 4]])
TEXT = Arguments.of((), {"input_ids": TOKENS, "attention_mask": TOKENS.sign()})


def gemma() -> GemmaConfig:
    """Of a model that multiplies what its table returns."""
    values = {**llama(num_hidden_layers=3).to_dict(), "tie_word_embeddings": False}
    del values["model_type"], values["architectures"]
    return GemmaConfig(**values)


@pytest.mark.parametrize(
    ("make", "given", "stages"),
    [
        (normed, ROWS, 3),
        (partial(Paired, dropout=0.5), ROWS, 4),
        (partial(Chain, skips=True, dropout=0.5), ROWS, 4),
        (Keeping, ROWS, 2),
        (partial(AutoModelForCausalLM.from_config, llama(num_hidden_layers=3)), TEXT, 4),
        (partial(AutoModelForSequenceClassification.from_config, llama()), TEXT, 2),
        (partial(AutoModel.from_config, qwen()), TEXT, 2),
        (partial(AutoModelForCausalLM.from_config, mixtral()), TEXT, 3),
        (partial(AutoModelForCausalLM.from_config, gemma()), TEXT, 3),
    ],
)
def test_stages_compute_what_the_module_computes(make: Any, given: Arguments, stages: int) -> None:
    module = make()
    modes = [part.training for part in module.modules()]
    cut = Cut(module, stages, [])
    check_equal(cut, given, module)
    assert {*cut.stage_of.values()} == {*range(stages)}
    assert [part.training for part in module.modules()] == modes
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_rank_keeps_the_tensors_of_its_stages() -> None:
    module = AutoModelForCausalLM.from_config(llama(num_hidden_layers=3))
    cut = Cut(module, 4, [])
    cut.keep([1, 3])
    assert {name for name, _ in module.named_parameters()} == {
        n for n, stage in cut.stage_of.items() if stage in (1, 3)
    }
    assert cut.outline.state.keys() == AutoModelForCausalLM.from_config(llama(num_hidden_layers=3)).state_dict().keys()
    assert cut.stage_of["lm_head.weight"] == cut.stage_of["model.norm.weight"] == 3


def linear(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(one, other, bias=False) for one, other in pairwise(widths)))


@pytest.mark.parametrize(
    ("module", "stages", "split", "starts"),
    [
        (linear(2, 8, 8, 8, 8), 2, [], [0, 2]),
        (linear(2, 8, 8, 8, 8), 3, [], [0, 2, 3]),
        (nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4, 4), nn.Tanh()), 3, [], [0, 2, 3]),
        (linear(2, 8, 8, 8, 8), 2, ["1"], [0, 1]),
        (nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4, 4), nn.Tanh()), 3, ["1", "2.1"], [0, 1, 3]),
        (Chain(), 3, ["layers.1", "out"], [0, 2, 4]),
    ],
)
def test_the_largest_stage_has_as_few_parameters_as_can_be_or_split_says_where_stages_begin(
    module: nn.Module, stages: int, split: list[str], starts: list[int]
) -> None:
    assert Cut(module, stages, split).starts == starts


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.Linear(5, 5))
        self[1].weight = self[0].weight


class Cuts(Paired):
    """Makes other stages of its own ones."""

    def __init__(self, made: Callable[[Any, list[nn.Module]], list[Any]]) -> None:
        super().__init__()
        self.made = made

    def stages(self) -> list[Any]:
        return self.made(self, super().stages())


class Changes(Paired):
    """Changes what it returns, which its stages do not."""

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, super().forward(x))


def unlike(module: Any, _: list[nn.Module]) -> list[nn.Module]:
    return [module.first, module.norm, module.second, nn.Flatten(0)]


def zeroed() -> nn.Module:
    """Returns a module whose output is zero whatever is before its head."""
    module = Cuts(lambda m, stages: [m.first, m.norm, m.second, stages[-1]])
    for parameter in module.second[3].parameters():
        nn.init.zeros_(parameter)
    return module


def otherwise(module: Any, stages: list[nn.Module]) -> list[nn.Module]:
    """Returns stages that return the same, with other gradients."""
    first, *others = stages
    return [first, Unit(lambda x: x * 2 - x.detach()), *others]


class Counting(Paired):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        return super().forward(x)


class Centring(Paired):
    def stages(self) -> list[nn.Module]:
        return [Unit(lambda x: x - x.mean(0)), *super().stages()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.stages = nn.Linear(5, 1), nn.ModuleList([nn.Linear(1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.stages[0](self.one(x))
        return found


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Without, r"(?s)Without cannot be cut into stages.*has no method stages\(\).*def stages\(self\)"),
        (partial(Cuts, lambda m, stages: []), r"Cuts has a method stages\(\) that returns no list of modules"),
        (partial(Cuts, lambda m, stages: stages[:-2]), r"(?s)'second.3.weight' is in none of.*def stages\(self\)"),
        (Tied, "'0.weight' is in stages 0 and 1"),
        (partial(Cuts, unlike), r"(?s)compute something else than it: other outputs.*def stages\(self\)"),
        (partial(Cuts, lambda m, stages: [*stages, Unit(lambda x: x[:1])]), "compute something else than it"),
        (zeroed, "compute something else than it"),
        (partial(Cuts, otherwise), "other outputs or gradients"),
        (partial(Changes, lambda m, out: out * (1 if m.training else 2)), "compute something else than it"),
        (Centring, r"(?s)two rows at a time, compute something else.*compute each row by itself"),
        (Counting, "changes buffer 'seen'"),
        (lambda: Counting().eval(), "changes buffer 'seen'"),
        (partial(Changes, lambda m, out: out.mean()), r"returns a tensor of shape \(\) for 2 rows"),
        (
            partial(Cuts, lambda m, stages: [*m.second, *m.first, m.norm]),
            r"(?s)the stages of Cuts, one after another, fail: RuntimeError.*def stages\(self\)",
        ),
    ],
)
def test_a_module_that_is_not_the_composition_of_its_stages_is_refused(module: Any, says: str) -> None:
    made = module()
    with pytest.raises(ModuleError, match=says):
        check_equal(Cut(made, 2, []), ROWS, made)


def test_a_module_that_draws_in_evaluation_is_not_compared_with_its_stages() -> None:
    module = Changes(lambda _, out: out + torch.randn_like(out))
    check_equal(Cut(module, 2, []), ROWS, module)


@pytest.mark.parametrize(
    ("stages", "split", "says"),
    [
        (9, [], "makes 9 stages, and Paired has 5 units with parameters"),
        (2, ["layers.7"], r"names 'layers.7', and the 2 stages of Paired begin, but for the first, with 1 of: .*norm"),
        (3, ["norm", "first.2"], "names 'norm', 'first.2'"),
    ],
)
def test_options_that_do_not_fit_the_units_are_refused(stages: int, split: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Cut(Paired(), stages, split)


def test_stages_all_have_a_parameter_to_train() -> None:
    module = Paired()
    module.first.requires_grad_(False)
    with pytest.raises(ModuleError, match="stage 0 of the pipeline has no parameter to train"):
        Cut(module, 2, ["norm"])
