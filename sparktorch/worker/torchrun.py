"""The environment that torchrun gives to a process, so that scripts and libraries find their rank in it."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from sparktorch.base.no_op import no_op
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.process_group import abandon, opening
from sparktorch.distributed.store import host_store
from sparktorch.errors import RankError

__all__ = ["left_as_before", "run_script", "torchrun_environment"]


@contextmanager
def torchrun_environment(world: World, client: Client, *, hosts_store: bool = False) -> Iterator[None]:
    """Context with the environment variables of torchrun, after which the process is as before.

    See `torch/distributed/elastic/agent/server/local_elastic_agent.py` and `torch/distributed/rendezvous.py`.
    Scripts pass `LOCAL_RANK` to `set_device`, so it is the index of the rank's device, which Spark may have chosen; on
    CPUs, it is the rank's index on its host. If `hosts_store`, rank 0 hosts a store at `MASTER_ADDR` and `MASTER_PORT`,
    as torchrun's agent does: then `init_process_group` without arguments joins the ranks.
    """
    address = world.address or "127.0.0.1"
    store = None
    offer = {"host": world.host, "address": address, "port": "0", "id": uuid.uuid4().hex}
    if hosts_store and world.is_main:
        store, port = host_store(address)
        offer["port"] = str(port)
    offers = client.agree("torchrun", offer)
    main = offers[0]
    hosts = list(dict.fromkeys(peer["host"] for peer in offers))
    index = torch.device(world.device).index
    values = {
        "RANK": world.rank,
        "LOCAL_RANK": world.local_rank if index is None else index,
        "WORLD_SIZE": world.world_size,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": hosts.index(world.host),
        "GROUP_WORLD_SIZE": len(hosts),
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": main["address"],
        "MASTER_PORT": main["port"],
        "TORCHELASTIC_RUN_ID": main["id"],
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", world.threads),
    }
    with left_as_before(), opening(world):
        os.environ.update({name: str(value) for name, value in values.items()})
        yield
        if hosts_store:
            client.agree("torchrun-end", {})  # Other ranks may need the store until all are here.
    del store  # It has lived until here; without a reference, it ends.


@contextmanager
def left_as_before() -> Iterator[None]:
    """Context after which environment, arguments, import path, folder and torch's defaults are as before."""
    environment = dict(os.environ)
    argv = sys.argv
    path = list(sys.path)
    folder = os.getcwd()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    grad = torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.argv = argv
        sys.path[:] = path
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(precision)


def run_script(
    path: Path, source: str, arguments: Sequence[str], *, report: Callable[[BaseException], object] = no_op
) -> None:
    """Runs a script as `python path arguments` would, in this process.

    `path` is the script's path on the driver, and `source` its text. If this host has the same folder, the script can
    import the modules in it. If the script raises an exception, `report` is called with it before the process group is
    closed. A `RankError` says that the exit status is not 0.
    """
    with tempfile.TemporaryDirectory(prefix="sparktorch-") as folder:
        name = path.name
        file = Path(folder, path.name)
        file.write_text(source, encoding="utf-8")
        main = sys.modules.get("__main__")
        sys.argv = [str(file), *arguments]
        sys.path = [folder, str(path.parent), *sys.path]
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                trace = "".join(traceback.format_exception(error))
                raise RankError(f"{name} has ended with exit status {error.code}", trace=trace) from None
        except Exception as error:
            abandon(error, report)
            raise
        finally:
            if main is not None:
                sys.modules["__main__"] = main
            if dist.is_initialized():
                dist.destroy_process_group()
