"""Pairs of users and items: what is known of both, as a `preprocess`; their network, and its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.data.sampling.plan import mix_positions, mix_words
from sparktorch.tasks.shared.layers import perceptron

__all__ = ["IdIndex", "PairLoss", "Pairs", "Towers"]

Int64 = npt.NDArray[np.int64]

_USUAL_ROWS = 20  # A user of so many rows has the whole penalty in each, where its rows are one sample.


class IdIndex:
    """Users, or items, of which a table has the id in its first column, and features, numbers, in the others.

    Attributes:
        ids: The ids: strings or whole numbers. An id's index is its position among them.
        features: Their features less the mean, in units of the standard deviation, float32 of shape `(ids, features)`.
    """

    def __init__(self, table: pa.StructArray) -> None:
        """Sorts the ids for look-ups; a string is known by a hash of 64 bits."""
        self.ids, *columns = table.flatten()
        self._names = [field.name for field in table.type][1:]
        keys = self._keys(self.ids)
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        values = np.empty((len(self.ids), len(columns)))
        for index, column in enumerate(columns):
            values[:, index] = column.to_numpy(zero_copy_only=False)
        self._mean, self._scale = values.mean(axis=0), values.std(axis=0)
        self._scale[self._scale == 0] = 1.0
        self.features = self._standardised(values)

    def _keys(self, ids: pa.Array) -> npt.NDArray[Any]:
        if pa.types.is_integer(self.ids.type):
            numbers: npt.NDArray[Any] = ids.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            return numbers
        texts = ids.cast(pa.string()).fill_null("").to_numpy(zero_copy_only=False)
        return pd.util.hash_array(texts.astype(object), categorize=False)

    def _standardised(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        scaled: npt.NDArray[np.float32] = ((values - self._mean) / self._scale).astype(np.float32)
        return scaled

    def indices(self, ids: pa.Array) -> Int64:
        """Returns the index of each id, int64 of shape `(rows,)`; -1 for null, and for one that is not known."""
        keys = self._keys(ids)
        nearest = np.searchsorted(self._sorted, keys).clip(max=len(self._sorted) - 1)
        is_known = (self._sorted[nearest] == keys) & ids.is_valid().to_numpy(zero_copy_only=False)
        return np.where(is_known, self._order[nearest], -1)

    def features_of(self, indices: Int64, columns: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Returns the features of indices, of shape `(*indices.shape, features)`; those of unknown ids by `columns`."""
        features = self.features[indices]
        is_new = (indices if indices.ndim == 1 else indices[:, 0]) < 0
        if self._names and is_new.any():
            rows = np.stack([np.asarray(columns[name])[is_new] for name in self._names], axis=1)
            (features if indices.ndim == 1 else features[:, 0])[is_new] = self._standardised(rows)
        return features


@dataclass(frozen=True)
class Pairs:
    """A `preprocess` that makes indices and features of the columns of a user and an item.

    Attributes:
        user: The column of users.
        item: The column of items.
        users: The known users: structs of the id and of each feature, by the name of its column.
        items: The known items, likewise.
        negatives: Number of other items that are drawn for each row.
        seed: Seed of the draws.
    """

    user: str
    item: str
    users: pa.StructArray
    items: pa.StructArray
    negatives: int = 0
    seed: int = 0

    @cached_property
    def user_index(self) -> IdIndex:
        """The known users, for look-ups."""
        return IdIndex(self.users)

    @cached_property
    def item_index(self) -> IdIndex:
        """The known items, for look-ups."""
        return IdIndex(self.items)

    def __getstate__(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name) for field in fields(self)
        }  # What look-ups need is left out, and made anew.

    def __call__(self, columns: Mapping[str, Any], *, epoch: int | None, generator: Any) -> dict[str, torch.Tensor]:
        """Returns `user`, int64 of shape `(rows,)`, and `item`; and both's features, if one of them has any.

        `item` has the shape `(rows,)`, or with `negatives`, `(rows, 1 + negatives)`: the row's own item first. Features
        have one axis more, and are float32.
        """
        users, items = self.user_index, self.item_index
        user, item = users.indices(pa.array(columns[self.user])), items.indices(pa.array(columns[self.item]))
        if self.negatives:
            item = np.concatenate([item[:, None], self._drawn(user, item, epoch)], axis=1)
        tensors = {"user": torch.from_numpy(user), "item": torch.from_numpy(item)}
        if users.features.size or items.features.size:
            tensors["user_features"] = torch.from_numpy(users.features_of(user, columns))
            tensors["item_features"] = torch.from_numpy(items.features_of(item, columns))
        return tensors

    def _drawn(self, user: Int64, item: Int64, epoch: int | None) -> Int64:
        """Draws other items for each row, uniformly, by a hash of the row and the epoch: the same in any rank."""
        count = len(self.items)
        base = mix_words(self.seed, -1 if epoch is None else epoch, user, item)
        # Each row has a base of its own, where the function's type names a single one.
        draws = mix_positions(base[:, None], np.arange(self.negatives))  # type: ignore[arg-type]
        return (item[:, None] + 1 + (draws % np.uint64(max(1, count - 1))).astype(np.int64)) % count


class Towers(nn.Module):
    """Scores of pairs: the product of a vector of the user and one of the item, a bias of each, and a constant.

    A vector is that of the id in a table, plus what layers make of the features, if there are any.
    """

    def __init__(
        self,
        users: int,
        items: int,
        rank: int,
        mean: float = 0.0,
        user_features: int = 0,
        item_features: int = 0,
        hidden: Sequence[int] = (64,),
        sparse: bool = False,
        user_bias: bool = True,
        scale: float = 1.0,
        ranks_all: bool = False,
    ) -> None:
        """Makes tables and layers.

        Args:
            users: Number of users.
            items: Number of items.
            rank: Number of elements of a vector.
            mean: The constant.
            user_features: Number of features of a user.
            item_features: Number of features of an item.
            hidden: Sizes of the hidden layers over features.
            sparse: Whether the gradients of the tables are sparse; with `ranks_all`, that of the users alone.
            user_bias: Whether users have a bias. Where items are ranked, it counts for nothing, and its gradients are
                rounding errors, of which Adagrad would make large steps.
            scale: The factor of products and biases, so that these do not depend on the unit of ratings.
            ranks_all: Whether each step reaches all items, as the cross-entropy over all of them does.
        """
        super().__init__()
        self.mean, self.scale, self.user_bias = mean, scale, user_bias
        self.users = _Table(users, rank + 1, sparse=sparse)
        self.items = _Table(items, rank + 1, sparse=sparse and not ranks_all)
        self.user_layers, self.item_layers = (
            perceptron(features, hidden, rank + 1) if features else None for features in (user_features, item_features)
        )

    def user_vectors(self, user: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        """Returns vectors of users with their biases at the end, of shape `(*user.shape, rank + 1)`."""
        vectors = _vectors(self.users, self.user_layers, user, features)
        return vectors if self.user_bias else nn.functional.pad(vectors[..., :-1], (0, 1))

    def item_vectors(self, item: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        """Returns vectors of items with their biases at the end, of shape `(*item.shape, rank + 1)`."""
        return _vectors(self.items, self.item_layers, item, features)

    def forward(
        self,
        user: torch.Tensor,
        item: torch.Tensor,
        user_features: torch.Tensor | None = None,
        item_features: torch.Tensor | None = None,
        *,
        penalised: bool = False,
        catalogue: torch.Tensor | None = None,
    ) -> Any:
        """Returns the score of each pair, of the shape of `item`, `(rows,)` or `(rows, items)`.

        NaN is the score of an id -1 without features. If `penalised`, its vector is zero instead; then scores are
        returned with the sum of squares of both vectors of each row and its first item. With a `catalogue`, the
        features of all items, the cross-entropy of the row's item among all of them is returned in place of scores.
        """
        if catalogue is not None:
            return self._cross_entropy(user, item, user_features, item_features, catalogue)
        user_vectors, item_vectors = self.user_vectors(user, user_features), self.item_vectors(item, item_features)
        products = torch.einsum("r...d,rd->r...", item_vectors[..., :-1], user_vectors[:, :-1])
        biases = (user_vectors[:, -1] if item.dim() == 1 else user_vectors[:, -1:]) + item_vectors[..., -1]
        scores = self.scale * (products + biases) + self.mean
        if penalised:
            first = item_vectors if item.dim() == 1 else item_vectors[:, 0]
            return scores, user_vectors.square().sum(1) + first.square().sum(1)
        new_user = (user < 0) if self.user_layers is None else torch.zeros_like(user, dtype=torch.bool)
        new_item = (item < 0) if self.item_layers is None else torch.zeros_like(item, dtype=torch.bool)
        return scores.masked_fill((new_user if item.dim() == 1 else new_user[:, None]) | new_item, math.nan)

    def _cross_entropy(
        self,
        user: torch.Tensor,
        item: torch.Tensor,
        user_features: torch.Tensor | None,
        item_features: torch.Tensor | None,
        catalogue: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cross-entropy of each row's item among all items, and the squares as `forward`.

        All items are scored once for each run of rows of a user. The more rows a user has, the less its squares count
        in each: in all of them together, they count as the square root of their number.
        """
        _, run, counts = torch.unique_consecutive(user, return_inverse=True, return_counts=True)
        first_rows = counts.cumsum(0) - counts
        user_vectors = self.user_vectors(user[first_rows], None if user_features is None else user_features[first_rows])
        all_vectors = self.item_vectors(torch.arange(len(catalogue), device=user.device), catalogue)
        chosen_vectors = self.item_vectors(item, item_features)
        log_sum = torch.addmm(all_vectors[:, -1], user_vectors[:, :-1], all_vectors[:, :-1].T).logsumexp(1)
        scores = (user_vectors[run, :-1] * chosen_vectors[:, :-1]).sum(1) + chosen_vectors[:, -1]
        user_squares = user_vectors.square().sum(1) * (_USUAL_ROWS / counts).sqrt()
        return log_sum[run] - scores, user_squares[run] + chosen_vectors.square().sum(1)


def _vectors(
    table: nn.Embedding, layers: nn.Module | None, index: torch.Tensor, features: torch.Tensor | None
) -> torch.Tensor:
    vectors = table(index.clamp(min=0)) * (index >= 0).unsqueeze(-1)
    with_features: torch.Tensor = vectors if layers is None else vectors + layers(features)
    return with_features


class _Table(nn.Embedding):
    """An embedding of vectors with a bias at the end."""

    def reset_parameters(self) -> None:
        """Draws the vectors; biases are 0."""
        with torch.no_grad():
            self.weight.normal_(std=0.1)
            self.weight[:, -1].zero_()


@dataclass(frozen=True)
class PairLoss:
    """The loss of `Towers`, as a training step: the squared error, or the cross-entropy of the row's item.

    The cross-entropy is that among all items of the `catalogue`. Without one, it is estimated by the items that were
    drawn: each stands for `(items - 1) / negatives`. Source: Blanc and Rendle, "Adaptive sampled softmax with kernel
    based sampling", ICML 2018, section 2.2. Where samples are groups, those of a user, the label is the rating.

    Attributes:
        items: Number of items to choose from; `None` for the squared error.
        penalty: Factor of the sum of squares of a row's vectors.
        scale: The factor of products and biases, whose square makes the penalty one of the unit of squared errors.
        alpha: What a unit of `log(1 + rating)` adds to the weight of a row in its group.
        catalogue: Features of all items, float32 of shape `(items, features)`.
    """

    items: int | None
    penalty: float
    scale: float = 1.0
    alpha: float = 0.0
    catalogue: npt.NDArray[np.float32] | None = field(default=None, compare=False)

    def __call__(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss of each row, or the mean of each group, in evaluation without the penalty."""
        if self.catalogue is not None:
            catalogue = torch.from_numpy(self.catalogue).to(batch.inputs[0].device)
            losses, squares = module(*batch.inputs, catalogue=catalogue)
        else:
            scores, squares = module(*batch.inputs, penalised=True)
            losses = self._losses(scores, batch)
        if module.training:
            losses = losses + self.penalty * self.scale**2 * squares
        return losses if batch.sizes is None else self._of_groups(losses, batch.sizes, batch.label)

    def _losses(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.items is None:
            assert batch.label is not None
            return (scores - batch.label).square()
        stands_for = math.log(max(1, self.items - 1) / (scores.shape[1] - 1))
        return torch.cat([scores[:, :1], scores[:, 1:] + stands_for], 1).logsumexp(1) - scores[:, 0]

    def _of_groups(self, losses: torch.Tensor, sizes: torch.Tensor, ratings: torch.Tensor | None) -> torch.Tensor:
        """Returns the mean of each group, weighted as `confidence`."""
        group = torch.arange(len(sizes)).repeat_interleave(sizes).to(losses.device)
        weights = torch.ones_like(losses) if ratings is None else (1 + self.alpha * ratings.log1p()) * (ratings > 0)
        weighted = torch.stack([losses * weights, weights], 1)
        total, weight = losses.new_zeros(len(sizes), 2).index_add(0, group, weighted).unbind(1)
        return total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
