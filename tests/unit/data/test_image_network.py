"""The network of images that have no trained one."""

from __future__ import annotations

import pytest
import torch

from sparktorch.tasks.images.network import ImageNetwork


@pytest.mark.parametrize("shape", [[3, 1, 1], [1, 28, 28], [3, 33, 20], [3, 128, 96]])
def test_it_scores_images_of_any_size_and_begins_at_the_same_scale(shape: list[int]) -> None:
    torch.manual_seed(0)
    network = ImageNetwork(classes=5, shape=shape)
    scores = network(torch.rand(2, *shape))
    assert scores.shape == (2, 5)
    assert scores.abs().max() < 10


def test_the_score_of_an_image_does_not_depend_on_the_others_of_its_batch() -> None:
    torch.manual_seed(0)
    network, images = ImageNetwork(classes=3, shape=[3, 12, 12]), torch.rand(4, 3, 12, 12)
    torch.testing.assert_close(network(images)[:1], network(images[:1]), atol=1e-5, rtol=0)


def test_it_learns_to_tell_rows_from_columns() -> None:
    torch.manual_seed(0)
    network, stripes = ImageNetwork(classes=2, shape=[3, 8, 8]), torch.zeros(16, 3, 8, 8)
    for number in range(16):
        stripes[number, :, number // 2] = 1
    labels = torch.arange(16) % 2
    stripes[labels == 1] = stripes[labels == 1].transpose(2, 3)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(network(stripes), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (network(stripes).argmax(1) == labels).all()
