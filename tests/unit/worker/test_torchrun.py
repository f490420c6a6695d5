"""What a user's function changes in its process is undone, because Spark reuses the process."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from sparktorch.worker.torchrun import left_as_before


def test_environment_paths_and_torchs_defaults_are_as_before_also_after_an_error(tmp_path: object) -> None:
    def state() -> tuple[object, ...]:
        defaults = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        return dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), defaults

    def litter() -> None:
        with left_as_before():
            os.environ["LITTER"] = "1"
            del os.environ["PATH"]
            os.chdir(str(tmp_path))
            sys.path.insert(0, "/nowhere")
            sys.argv = ["other"]
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.set_grad_enabled(False)
            raise ZeroDivisionError

    before = state()
    with pytest.raises(ZeroDivisionError):
        litter()
    assert state() == before
    assert torch.ones(1).device.type == "cpu"
