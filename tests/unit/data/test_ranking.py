"""Losses and metrics of rankings: those of plain loops and of scikit-learn, for groups of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from sparktorch.errors import ModuleError
from sparktorch.tasks.ranking.loss import LOSSES, ndcg, reciprocal_rank
from tests.support.ranking import PLAIN

SIZES = torch.tensor([7, 1, 2, 30, 3, 12, 1, 5])


def graded(*, ties: bool = False, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scores and grades of the groups; no row of the third one has a grade above 0."""
    random = np.random.default_rng(seed)
    count = int(SIZES.sum())
    scores = random.integers(0, 4, count) / 2 if ties else random.normal(size=count)
    labels = random.integers(0, 5, count).astype(float)
    labels[8:10] = 0
    return torch.from_numpy(scores), torch.from_numpy(labels)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_a_loop_over_groups(name: str) -> None:
    scores, labels = graded()
    scores.requires_grad_()
    losses = LOSSES[name](scores, labels, SIZES)
    pairs = zip(scores.split(SIZES.tolist()), labels.split(SIZES.tolist()), strict=True)
    expected = torch.stack([PLAIN[name](*pair) for pair in pairs])
    torch.testing.assert_close(losses, expected)
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((each * weights).sum(), scores)[0] for each in (losses, expected))
    torch.testing.assert_close(found, wanted)
    assert found.abs().sum() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_several_members_is_the_mean_of_theirs(name: str) -> None:
    _, labels = graded()
    scores = torch.stack([graded(seed=seed)[0] for seed in range(3)], 1)
    losses = LOSSES[name](scores, labels.unsqueeze(1).expand(-1, 3), SIZES)
    torch.testing.assert_close(losses, sum(LOSSES[name](of, labels, SIZES) for of in scores.unbind(1)) / 3)


@pytest.mark.parametrize("labels", [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("name", LOSSES)
def test_a_group_of_one_grade_gives_finite_losses_and_gradients(name: str, labels: list[float]) -> None:
    scores = torch.tensor([0.5, -1.0, 0.0], requires_grad=True)
    losses = LOSSES[name](scores, torch.tensor(labels), torch.tensor([3]))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.isfinite().all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_large_scores_and_of_groups_of_one_row_is_finite(name: str) -> None:
    scores = torch.tensor([1e4, -1e4, 3.0, 0.0], requires_grad=True)
    losses = LOSSES[name](scores, torch.tensor([0.0, 2.0, 1.0, 0.0]), torch.tensor([2, 1, 1]))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.isfinite().all()
    assert losses[1:].tolist() == [0, 0]
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [None, 1, 3, 10])
def test_ndcg_is_that_of_scikit_learn(k: int | None, ties: bool) -> None:
    scores, labels = graded(ties=ties)
    found = ndcg(scores, labels, SIZES, k=k)
    for value, of_group, grades in zip(found, scores.split(SIZES.tolist()), labels.split(SIZES.tolist()), strict=True):
        if len(grades) > 1:  # scikit-learn refuses groups of one
            assert float(value) == pytest.approx(ndcg_score([grades.numpy()], [of_group.numpy()], k=k), abs=1e-12)
        else:
            assert float(value) == float(grades[0] > 0)


def test_the_reciprocal_rank_is_that_of_the_first_relevant_row_behind_its_ties() -> None:
    sizes = torch.tensor([3, 3, 2, 4])
    scores = torch.tensor([3.0, 2.0, 1.0, 1.0, 5.0, 4.0, 0.0, 0.0, 2.0, 2.0, 2.0, 1.0])
    labels = torch.tensor([0.0, 2.0, 1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 4.0])
    assert reciprocal_rank(scores, labels, sizes).tolist() == pytest.approx([1 / 2, 1, 0, 1 / 3])


def test_a_module_with_several_scores_a_row_is_refused() -> None:
    with pytest.raises(ModuleError, match=r"scores of shape \(4, 2\) for labels of shape \(4,\)"):
        LOSSES["listnet"](torch.zeros(4, 2), torch.zeros(4), torch.tensor([4]))
