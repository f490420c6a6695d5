"""Batches on their way to a device: what tensors of any layout are made of."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from sparktorch.base.batch import Batch, components, count_tokens, rebuilt

with warnings.catch_warnings():  # torch says once that the layout is in beta
    warnings.simplefilter("ignore")
    SPARSE = torch.sparse_csr_tensor([0, 1, 3], [2, 0, 1], [7.0, 8.0, 9.0], (2, 3), check_invariants=True)
TENSORS = {
    "strided": torch.arange(6.0).view(2, 3),
    "sparse_csr": SPARSE,
    "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5])),
}


@pytest.mark.parametrize("layout", TENSORS)
def test_a_tensor_is_rebuilt_of_strided_components(layout: str) -> None:
    tensor = TENSORS[layout]
    parts = components(tensor)
    assert all(part.layout is torch.strided for part in parts)
    seen: list[int] = []

    def copied(part: torch.Tensor) -> torch.Tensor:
        seen.append(part.data_ptr())
        return part.clone()

    again = rebuilt(tensor, copied)
    assert seen == [part.data_ptr() for part in parts]
    assert (again.layout, again.dtype) == (tensor.layout, tensor.dtype)
    for part, other in zip(components(again), parts, strict=True):
        assert torch.equal(part, other)
        assert part.data_ptr() != other.data_ptr()


def test_a_batch_weighs_what_its_components_do() -> None:
    batch = Batch(tuple(TENSORS.values()), torch.zeros(2), None, 2)
    assert batch.nbytes == 6 * 4 + (6 * 8 + 3 * 4) + (5 * 4 + 3 * 8) + 2 * 4


def test_tokens_are_counted_up_to_the_last_that_is_shown_or_has_a_label() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]])  # padded behind, in front, and behind
    assert count_tokens({"attention_mask": mask}).tolist() == [2, 4, 1]  # type: ignore[union-attr]
    labels = torch.full((3, 4), -100)
    labels[2, 2] = 5
    assert count_tokens({"attention_mask": mask, "labels": labels}).tolist() == [2, 4, 3]  # type: ignore[union-attr]
    assert count_tokens({"input_ids": mask}) is None


def test_a_batch_loses_the_tokens_behind_its_longest_row() -> None:
    ids, mask = torch.arange(8).view(2, 4), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    names = ("attention_mask", "input_ids", "other")
    tokens = count_tokens({"attention_mask": mask})
    whole = Batch((mask, ids, torch.ones(2, 4, 2)), None, None, 2, names=names, tokens=tokens)
    assert whole.trimmed() is whole  # the other one may have something of each token
    batch = Batch((mask, ids, torch.ones(2, 3)), None, None, 2, names=names, tokens=tokens)
    labelled = replace(batch, label=ids)
    assert labelled.trimmed() is labelled  # and so may labels
    assert [tuple(tensor.shape) for tensor in batch.trimmed().inputs] == [(2, 2), (2, 2), (2, 3)]
    assert [tuple(tensor.shape) for tensor in batch.slice(1, 2).trimmed().inputs] == [(1, 1), (1, 1), (1, 3)]


def test_padded_inputs_are_made_longer_with_their_own_value_and_a_mask_without_data() -> None:
    values, mask = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    batch = Batch((torch.zeros(2), values, mask), None, None, 2, lengths={1: torch.tensor([3, 2])}, pads={1: -7.0})
    found = batch.padded({1: 5})
    assert torch.equal(found.inputs[1], torch.cat([values, torch.full((2, 2, 4), -7.0)], 1))
    assert torch.equal(found.inputs[2], torch.cat([mask, torch.zeros(2, 2, dtype=torch.bool)], 1))
    assert found.inputs[0] is batch.inputs[0]
