"""The recommender's `preprocess`, which makes indices and features from ids, its network, and its loss."""

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

# If samples are users, the rows of a user with this number of rows have the whole penalty; see `Towers`.
_USUAL_ROWS = 20


class IdIndex:
    """Looks up users or items by their ids.

    Attributes:
        ids: The ids: strings or whole numbers. The index of an id is the position that it has here.
        features: The features less their mean, divided by their standard deviation, float32 of shape `(ids, features)`.
    """

    def __init__(self, table: pa.StructArray) -> None:
        """Sorts the ids; `table` has the id as its first field, and numbers, the features, as others."""
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
        """Returns the numbers that are looked up: whole numbers themselves, and hashes of strings, of 64 bits."""
        if pa.types.is_integer(self.ids.type):
            numbers: npt.NDArray[Any] = ids.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            return numbers
        texts = ids.cast(pa.string()).fill_null("").to_numpy(zero_copy_only=False)
        return pd.util.hash_array(texts.astype(object), categorize=False)

    def _standardised(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        scaled: npt.NDArray[np.float32] = ((values - self._mean) / self._scale).astype(np.float32)
        return scaled

    def indices(self, ids: pa.Array) -> Int64:
        """Returns the index of each id, int64 of shape `(rows,)`; -1 for null, and for an unknown id."""
        keys = self._keys(ids)
        nearest = np.searchsorted(self._sorted, keys).clip(max=len(self._sorted) - 1)
        is_known = (self._sorted[nearest] == keys) & ids.is_valid().to_numpy(zero_copy_only=False)
        return np.where(is_known, self._order[nearest], -1)

    def features_of(self, indices: Int64, columns: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Returns features of shape `(*indices.shape, features)`.

        Args:
            indices: The indices of ids, of shape `(rows,)`, or `(rows, items)` with the row's own item first.
            columns: The columns by name, which have the features of the row's own id where it is unknown.
        """
        features = self.features[indices]
        has_items_axis = indices.ndim > 1
        is_unknown = (indices[:, 0] if has_items_axis else indices) < 0
        if self._names and is_unknown.any():
            raw = np.stack([np.asarray(columns[name])[is_unknown] for name in self._names], axis=1)
            features_of_row = features[:, 0] if has_items_axis else features  # It shares its memory with `features`.
            features_of_row[is_unknown] = self._standardised(raw)
        return features


@dataclass(frozen=True)
class Pairs:
    """A `preprocess` that makes indices and features from the columns of users and items.

    Attributes:
        user: The column of users.
        item: The column of items.
        users: The known users: structs with the id and the features as fields, named as the columns are.
        items: The known items, likewise.
        negatives: The number of other items that are drawn for each row.
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
        # The indices are not pickled: they can be computed from the other attributes.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __call__(self, columns: Mapping[str, Any], *, epoch: int | None, generator: Any) -> dict[str, torch.Tensor]:
        """Returns the indices `user` and `item`, int64, and `user_features` and `item_features`, float32.

        `user` and `item` have the shape `(rows,)`. With `negatives`, `item` has the shape `(rows, 1 + negatives)`, and
        the row's own item comes first. Features have another axis behind these. They are left out if neither users nor
        items have any.
        """
        users = self.user_index
        items = self.item_index
        user = users.indices(pa.array(columns[self.user]))
        item = items.indices(pa.array(columns[self.item]))
        if self.negatives:
            item = np.concatenate([item[:, None], self._draw_negatives(user, item, epoch)], axis=1)
        tensors = {"user": torch.from_numpy(user), "item": torch.from_numpy(item)}
        if users.features.size or items.features.size:
            tensors["user_features"] = torch.from_numpy(users.features_of(user, columns))
            tensors["item_features"] = torch.from_numpy(items.features_of(item, columns))
        return tensors

    def _draw_negatives(self, user: Int64, item: Int64, epoch: int | None) -> Int64:
        """Draws other items for each row, uniformly and by a hash of row and epoch, so that all ranks draw the same.

        Returns the indices of the items, of shape `(rows, negatives)`.
        """
        count = len(self.items)
        hash_of_row = mix_words(self.seed, -1 if epoch is None else epoch, user, item)
        # `mix_positions` is typed for one hash, and takes an array of them as well.
        draws = mix_positions(hash_of_row[:, None], np.arange(self.negatives))  # type: ignore[arg-type]
        # An offset from 1 to `count - 1` leads to another item, never back to the row's own.
        offsets = 1 + (draws % np.uint64(max(1, count - 1))).astype(np.int64)
        return (item[:, None] + offsets) % count


class Towers(nn.Module):
    """Scores pairs: the product of the user's vector and the item's vector, plus both biases, plus a constant.

    A vector comes from a table, by the id. If there are features, the outputs of layers for them are added to it.
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
            rank: Number of elements of a vector, without its bias.
            mean: The constant.
            user_features: Number of features of a user.
            item_features: Number of features of an item.
            hidden: Sizes of the hidden layers over features.
            sparse: Whether the gradients of the tables are sparse. With `ranks_all`, only the users' are.
            user_bias: Whether users have a bias. Where items are ranked, it has no effect, and its gradients are
                rounding errors, with which Adagrad would take large steps.
            scale: The factor of products and biases, which makes these independent of the unit of ratings.
            ranks_all: Whether each step reaches all items, as the cross-entropy over all of them does.
        """
        super().__init__()
        self.mean = mean
        self.scale = scale
        self.user_bias = user_bias
        self.users = _Table(users, rank + 1, sparse=sparse)
        self.items = _Table(items, rank + 1, sparse=sparse and not ranks_all)
        self.user_layers = perceptron(user_features, hidden, rank + 1) if user_features else None
        self.item_layers = perceptron(item_features, hidden, rank + 1) if item_features else None

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

        - An unknown id, -1, has a score only if it has features; otherwise the score is NaN.
        - With `penalised`, the vector of an unknown id is zero instead. The scores come with another tensor, of shape
          `(rows,)`: the sum of the squares of the user's vector and the row's own item's.
        - With a `catalogue`, the features of all items, scores are replaced by the cross-entropy of the row's item
          among all items, which comes with the same sum of squares.
        """
        if catalogue is not None:
            return self._cross_entropy(user, item, user_features, item_features, catalogue)
        has_items_axis = item.dim() > 1
        user_vectors = self.user_vectors(user, user_features)
        item_vectors = self.item_vectors(item, item_features)
        products = torch.einsum("r...d,rd->r...", item_vectors[..., :-1], user_vectors[:, :-1])
        biases = (user_vectors[:, -1:] if has_items_axis else user_vectors[:, -1]) + item_vectors[..., -1]
        scores = self.scale * (products + biases) + self.mean
        if penalised:
            first_item_vectors = item_vectors[:, 0] if has_items_axis else item_vectors
            return scores, user_vectors.square().sum(1) + first_item_vectors.square().sum(1)
        lacks_user_vector = (user < 0) if self.user_layers is None else torch.zeros_like(user, dtype=torch.bool)
        lacks_item_vector = (item < 0) if self.item_layers is None else torch.zeros_like(item, dtype=torch.bool)
        if has_items_axis:
            lacks_user_vector = lacks_user_vector[:, None]
        return scores.masked_fill(lacks_user_vector | lacks_item_vector, math.nan)

    def _cross_entropy(
        self,
        user: torch.Tensor,
        item: torch.Tensor,
        user_features: torch.Tensor | None,
        item_features: torch.Tensor | None,
        catalogue: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cross-entropy of each row's item among all items, and the sum of squares as `forward` does.

        The rows of a user follow each other: all items are scored once for each such run of rows. The more rows a user
        has, the smaller is the part of its squares that each row gets: all rows together get as many as the square root
        of their number says.
        """
        _, run, counts = torch.unique_consecutive(user, return_inverse=True, return_counts=True)
        first_rows = counts.cumsum(0) - counts
        user_vectors = self.user_vectors(user[first_rows], None if user_features is None else user_features[first_rows])
        all_vectors = self.item_vectors(torch.arange(len(catalogue), device=user.device), catalogue)
        chosen_vectors = self.item_vectors(item, item_features)
        # The logarithm of a sum over all items normalises the scores.
        log_sum = torch.addmm(all_vectors[:, -1], user_vectors[:, :-1], all_vectors[:, :-1].T).logsumexp(1)
        scores = (user_vectors[run, :-1] * chosen_vectors[:, :-1]).sum(1) + chosen_vectors[:, -1]
        user_squares = user_vectors.square().sum(1) * (_USUAL_ROWS / counts).sqrt()
        return log_sum[run] - scores, user_squares[run] + chosen_vectors.square().sum(1)


def _vectors(
    table: nn.Embedding, layers: nn.Module | None, index: torch.Tensor, features: torch.Tensor | None
) -> torch.Tensor:
    """Returns vectors with biases, to which layers add their outputs for features; an unknown id has zeros."""
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
    """A training step with the loss of `Towers`: the squared error, or the cross-entropy of the row's own item.

    - With a `catalogue`, the cross-entropy is over all items.
    - Without a `catalogue`, it is estimated from the items that were drawn, each of which stands for
      `(items - 1) / negatives` items. Source: Blanc and Rendle, "Adaptive sampled softmax with kernel based sampling",
      ICML 2018, section 2.2.
    - If samples are groups, each with the rows of a user, the label is the rating.

    Attributes:
        items: Number of items to choose from; `None` for the squared error.
        penalty: Factor of the sum of squares of a row's vectors.
        scale: The factor of products and biases. The penalty is multiplied by its square, and so has the unit of
            squared errors.
        alpha: What a unit of `log(1 + rating)` adds to the weight of a row in its group.
        catalogue: Features of all items, float32 of shape `(items, features)`.
    """

    items: int | None
    penalty: float
    scale: float = 1.0
    alpha: float = 0.0
    catalogue: npt.NDArray[np.float32] | None = field(default=None, compare=False)

    def __call__(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss of each row, or the mean of each group. In evaluation, losses have no penalty."""
        if self.catalogue is not None:
            catalogue = torch.from_numpy(self.catalogue).to(batch.inputs[0].device)
            losses, squares = module(*batch.inputs, catalogue=catalogue)
        else:
            scores, squares = module(*batch.inputs, penalised=True)
            losses = self._losses(scores, batch)
        if module.training:
            losses = losses + self.penalty * self.scale**2 * squares
        return losses if batch.sizes is None else self._group_means(losses, batch.sizes, batch.label)

    def _losses(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns squared errors, or estimates of cross-entropies; the first score of a row is for its own item."""
        if self.items is None:
            assert batch.label is not None
            return (scores - batch.label).square()
        negatives = scores.shape[1] - 1
        log_weight = math.log(max(1, self.items - 1) / negatives)
        return torch.cat([scores[:, :1], scores[:, 1:] + log_weight], 1).logsumexp(1) - scores[:, 0]

    def _group_means(self, losses: torch.Tensor, sizes: torch.Tensor, ratings: torch.Tensor | None) -> torch.Tensor:
        """Returns the weighted mean of each group: `1 + alpha * log(1 + rating)` is a row's weight, 0 without a rating.

        Without ratings, all rows have the same weight.
        """
        group = torch.arange(len(sizes)).repeat_interleave(sizes).to(losses.device)
        weights = torch.ones_like(losses)
        if ratings is not None:
            weights = (1 + self.alpha * ratings.log1p()) * (ratings > 0)
        terms = torch.stack([losses * weights, weights], 1)
        total, weight = losses.new_zeros(len(sizes), 2).index_add(0, group, terms).unbind(1)
        # A group in which no row has a weight has the mean 0.
        return total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
