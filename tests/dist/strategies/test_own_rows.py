"""A divided output layer whose ranks exchange columns for rows: no rank has all columns of all rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sparktorch.adapters.huggingface.folder import opened
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.plan.memory import plan
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import whole
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy
from sparktorch.train.tensor_parallel.styles import check_plan
from tests.support.ranks import in_group
from tests.support.strategies import close, job_for, plain, trained
from tests.support.tiny_transformers import llama

OWN = "colwise_own_rows"


class Speller(nn.Module):
    """Scores of twelve words at three places, of which each row's loss is computed within the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 3 * 8), nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.norm(torch.tanh(self.first(x)).view(-1, 3, 8)))
        return (scores.logsumexp(-1) - scores[..., 0]).mean(1)


def test_ranks_train_what_one_plain_loop_trains() -> None:
    recipe, sizes = {"module": Speller}, {"tensor": 2, "shard": 2, "plan": {"head": OWN}}
    close(trained(job_for(recipe=recipe, sizes=sizes), 4), plain(recipe))


class Scores(nn.Module):
    """A layer whose output is used in the way that is asked for, beside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(5, 64), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, *, kind: str = "plain") -> Any:
        if kind == "turned":
            return self.head(x[None])[0]
        if kind == "few":
            return self.other(x)[:2]
        scores = torch.tanh(self.head(x))
        if kind == "aside":
            return self.other(x)
        return {"scores": scores, "all": self.other(x)} if kind == "both" else scores


class Repeated(nn.Module):
    """Scores that are computed again backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda x: self.head(x).tanh(), x, use_reentrant=False)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        sizes = [getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors]
        self.found = max([self.found, *sizes])
        return output


def used(world: World) -> None:
    """Looks at what a rank of two gets, of 2 and of 30 rows."""
    config = job_for(sizes={"tensor": 2, "plan": {"head": OWN}}).config
    torch.manual_seed(0)
    plain = Scores()
    own = copy.deepcopy(plain)
    module = build_strategy(config, world).prepare(own, Start())
    rows = torch.randn(32, 5)
    own_rows = slice(2, 32) if world.rank else slice(0, 2)
    mine = rows[own_rows]
    count = len(mine)
    with Largest() as largest:
        output = module(mine)
        output.square().sum().backward()
    assert largest.found <= 4 * max(count * 64, 32 * 32)  # its own rows, or its columns of all rows
    expected = plain(rows)
    expected.square().sum().backward()
    assert torch.allclose(output, expected[own_rows], atol=1e-6)
    gradients = {name: whole(p.grad) for name, p in own.named_parameters() if p.grad is not None}
    assert all(torch.allclose(gradients[f"head.{n}"], p.grad, atol=1e-5) for n, p in plain.head.named_parameters())
    output = module(mine, kind="aside")
    assert torch.allclose(output, plain(mine, kind="aside"))
    output.sum().backward()
    assert float(whole(own.other.bias.grad)) == 32
    outputs = module(mine, kind="both")
    outputs["scores"].sum().backward()
    assert [tuple(outputs[name].shape) for name in ("scores", "all")] == [(count, 64), (count, 1)]
    with pytest.raises(ModuleError, match="for 32 rows"):  # that pass has no rows of this rank only
        module(mine, kind="few")
    for says, arguments, given in (
        (r"layer returns a value of type Tensor of shape \(1, 32, 32\) for 2 \+ 30 rows", {"kind": "turned"}, mine),
        (r"for 0 \+ 2 rows, and ranks that share layers each take their own rows", {}, mine[: 2 * world.rank]),
    ):
        module = build_strategy(config, world).prepare(copy.deepcopy(plain), Start())
        with pytest.raises(ModuleError, match=says):
            module(given, **arguments)
    repeated = build_strategy(config, world).prepare(Repeated(), Start())(mine)
    repeated.sum().backward()
    assert tuple(repeated.shape) == (count, 8)


def test_a_rank_gets_all_columns_of_its_own_rows_and_never_has_those_of_all_rows() -> None:
    in_group(2, used)


def test_the_plan_counts_own_rows_of_the_scores() -> None:
    first = Batch((torch.ones(2, 5),), torch.ones(2), None, 2, names=("x",))
    counted = {}
    for style in (OWN, "colwise_gather_output"):
        params = {"tensor": 2, "plan": {"head": style}}
        config = TrainConfig(task="regression", batch_size=64, strategy="mesh", strategy_params=params)
        counted[style] = plan(Recipe(module=Speller, optimizer="SGD"), config, 2, first).needs[-1]
    scores = 4 * 3 * 12  # bytes of a row, which are kept in the place of those of two rows
    own, gathered = counted[OWN], counted["colwise_gather_output"]
    assert own.parameters == gathered.parameters
    assert gathered.activations - own.activations >= 32 * scores
    assert gathered.sent - own.sent == 64 * scores // 2  # in a step; half as many bytes


@pytest.mark.parametrize("staged", [False, True])
def test_logits_of_a_language_model_are_those_of_own_rows_but_in_a_pipeline(staged: bool) -> None:
    found = opened(llama("LlamaForCausalLM"), {}, seed=0)
    assert found is not None
    styles = check_plan(HuggingFaceRecipe(**found).build_module(0), {}, 2, staged=staged)
    assert styles["lm_head"] == ("colwise_gather_output" if staged else OWN)
