"""What FSDP gathers at once: the blocks that a module repeats, and large parts beside them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.adapters.huggingface.folder import opened
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.sharding.units import ShardingOptions, units
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy
from tests.support.attention_nets import Encoder
from tests.support.nets import Tower
from tests.support.tiny_transformers import llama, mixtral


def kinds(module: nn.Module, **options: Any) -> Counter[str]:
    """Returns how many units there are of each class."""
    return Counter(type(part).__name__ for part in units(module, ShardingOptions(**options)))


def model_of(config: Any) -> nn.Module:
    made = opened(config, {}, seed=0)
    assert made is not None
    return HuggingFaceRecipe(**made).build_module(0)


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU())


class Residual(nn.Module):
    """A block with parts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.network(x)
        return output


class Stage(nn.Module):
    """Blocks, and a layer before them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(self.down, *self.blocks)(x)


class MixtureBlock(nn.Module):
    """A block most of which are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[0](self.attention(x))


class Held(nn.Module):
    """Holds two layers that another module calls, without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)


class Headed(nn.Module):
    """A model of transformers, and large layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model_of(llama())
        self.head = nn.Sequential(nn.Linear(20, 90), nn.Linear(90, 90))


@pytest.mark.parametrize(
    ("module", "least", "wanted"),
    [
        (model_of(llama()), 1000, {"LlamaDecoderLayer": 2}),
        (model_of(llama()), 100, {"LlamaDecoderLayer": 2, "Embedding": 1, "Linear": 1}),
        (model_of(mixtral()), 1000, {"MixtralDecoderLayer": 2}),
        (Headed(), 1000, {"LlamaDecoderLayer": 2, "Linear": 2}),
        (Encoder(layers=2), 200, {"TransformerEncoderLayer": 2}),
        (nn.Sequential(*(convolution() for _ in range(3)), nn.Linear(2, 1)), 1, {"Sequential": 3, "Linear": 1}),
        (nn.Sequential(*(nn.Sequential(Residual(), Residual()) for _ in range(2))), 1, {"Residual": 4}),
        (nn.Sequential(*map(Stage, (1, 1, 9, 1))), 21, {"Residual": 12}),
        (nn.ModuleDict({name: Stage(3) for name in "qd"}), 21, {"Residual": 6}),
        (nn.ModuleList(nn.Sequential(Stage(2), Stage(2)) for _ in range(2)), 41, {"Residual": 8}),
        (nn.Sequential(MixtureBlock(), MixtureBlock()), 1, {"MixtureBlock": 2}),
        (nn.ModuleList(Held() for _ in range(2)), 1, {"Linear": 4}),
        (nn.ModuleDict({name: Residual() for name in "ab"}), 1, {"Residual": 2}),
        (nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)), 50, {"Linear": 1}),
    ],
    ids=[
        "llama",
        "llama's ends",
        "experts",
        "a head",
        "torch's",
        "layers in a row",
        "stages",
        "uneven",
        "towers",
        "members",
        "a mixture",
        "no forward",
        "a dict",
        "an MLP",
    ],
)
def test_units_are_the_blocks_of_a_module_and_large_parts_beside_them(
    module: nn.Module, least: int, wanted: dict[str, int]
) -> None:
    assert kinds(module, min_parameters=least) == wanted


def test_parts_are_gathered_by_themselves_if_they_are_large_or_of_a_class() -> None:
    tower = Tower()
    assert units(tower, ShardingOptions(min_parameters=91)) == []  # smaller ones go with the whole
    assert units(tower, ShardingOptions(min_parameters=90)) == list(tower.blocks)
    assert tower.last in units(tower, ShardingOptions(min_parameters=1))
    assert tower.tied not in units(tower, ShardingOptions(min_parameters=1))
    by_class = units(tower, ShardingOptions(wrap_classes=["Sequential"]))
    assert by_class == [tower.first, *tower.blocks]
    with pytest.raises(ModuleError, match="no part of class 'Sequental'"):
        units(tower, ShardingOptions(wrap_classes=["Sequental"]))


class TiedBlocks(nn.Module):
    """Blocks, of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.blocks[1].network[0].weight = self.blocks[0].network[0].weight  # type: ignore[index,union-attr]


def test_a_block_with_a_tied_weight_is_gathered_in_its_other_parts() -> None:
    module = TiedBlocks()
    assert kinds(module, min_parameters=1) == {"Residual": 1, "Linear": 2}


def activations(recompute: bool) -> int:
    """Returns the bytes that autograd keeps of a pass of a Llama with default options, but for parameters."""
    shape = {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1408, "num_attention_heads": 8}
    module = model_of(llama("LlamaModel", **shape, vocab_size=20, max_position_embeddings=64))
    options = {"activation_checkpointing": True} if recompute else {}
    strategy = build_strategy(TrainConfig(strategy="zero3", strategy_params=options), World())
    prepared = strategy.prepare(module, Start())
    sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        kept.append(tensor)  # no other storage gets the address of one
        return tensor

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        prepared(input_ids=torch.ones(2, 64, dtype=torch.int64))
    return sum(sizes.values())


def test_activation_checkpointing_keeps_few_of_the_activations_of_a_transformer() -> None:
    assert 0 < activations(recompute=True) <= 0.15 * activations(recompute=False)
