"""What a user's function changes in its process is undone, because Spark reuses the process."""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest
import torch

from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.store import connect, host_store
from sparktorch.worker.torchrun import left_as_before, torchrun_environment


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


@pytest.mark.parametrize(("device", "index"), [("cuda:5", "5"), ("xpu:0", "0"), ("cpu", "1")])
def test_a_script_that_takes_the_device_of_its_local_rank_takes_that_of_its_rank(device: str, index: str) -> None:
    server, port = host_store("127.0.0.1")
    world = World(local_rank=1, local_size=2, address="127.0.0.1", device=device)
    with torchrun_environment(world, Client(partial(connect, "127.0.0.1", port, "fit"), world)):
        assert os.environ["LOCAL_RANK"] == index
    assert "LOCAL_RANK" not in os.environ
    del server
