"""Images and the weights that meet them have their channels last; all else stays as it is."""

from __future__ import annotations

import torch
from torch import nn

from sparktorch.train.numerics.channels_last import channels_last


class Two(nn.Module):
    """A convolution and a layer, each with an input."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 2)
        self.layer = nn.Linear(5, 2)

    def forward(self, images: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return images, rows, self.convolution(images)


def test_inputs_and_weights_of_four_axes_have_the_channels_last() -> None:
    torch.manual_seed(0)
    images, rows = torch.randn(2, 3, 6, 6), torch.randn(2, 5)
    module = Two()
    names, expected = list(module.state_dict()), module(images, rows)[2]
    channels_last(module)
    for given in (module(images, rows), module(images=images, rows=rows)):
        assert given[0].stride() == (108, 1, 18, 3)
        assert given[1] is rows
        assert given[2].is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(given[2], expected)
    assert module.convolution.weight.stride() == (12, 1, 6, 3)
    assert list(module.state_dict()) == names
