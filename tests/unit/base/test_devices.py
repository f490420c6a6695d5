"""What differs between devices and hosts: names, variables, switches, what NCCL says, and how much memory there is."""

from __future__ import annotations

import math
import os
import resource
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base import host_memory
from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import backend_of, is_kind, visible_devices
from sparktorch.base.host_memory import available_bytes, forget_peaks, peaks
from sparktorch.base.world import World
from sparktorch.distributed.process_group import is_communication, opening, process_group, set_up_error
from sparktorch.errors import ModuleError
from sparktorch.train.numerics.determinism import tf32_allowed
from sparktorch.train.recipe.recipe import makes_sparse_gradients
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.ddp import DDP, DDPOptions
from tests.support.nets import Lookup

CUDA = torch.device("cuda:0")
# As torch 2.13 words them: the first line is its own, the second one of `getNcclErrorDetailStr`, then NCCL's.
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:4000, {what}, NCCL version 2.27.7\n{code}: {detail}\nLast error:\n{last}"
DUPLICATE = NCCL.format(
    what="invalid usage (run with NCCL_DEBUG=WARN for details)",
    code="ncclInvalidUsage",
    detail="This usually reflects invalid usage of NCCL library.",
    last="Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
)
NO_ROOM = NCCL.format(
    what="unhandled system error (run with NCCL_DEBUG=INFO for details)",
    code="ncclSystemError",
    detail="System call (e.g. socket, malloc) or external library call failed or device error.",
    last="Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)",
)
PEER_GONE = NCCL.format(
    what="remote process exited or there was a network error",
    code="ncclRemoteError",
    detail="A call failed possibly due to a network error or a remote process exiting prematurely.",
    last="socketProgress: Connection closed by remote peer",
)


def test_an_accelerators_group_reduces_tensors_on_the_cpu_too() -> None:
    assert backend_of("cpu") == "gloo"
    assert backend_of("cuda:3") == "cpu:gloo,cuda:nccl"
    assert backend_of("xpu:0") == "cpu:gloo,xpu:xccl"


def test_a_type_of_accelerator_has_no_number() -> None:
    assert [name for name in ("cuda", "xpu", "cuda:0", "gpu", "mps", "cpu", "") if is_kind(name)] == ["cuda", "xpu"]


def test_the_variable_that_hides_devices_is_that_of_their_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0")
    assert (visible_devices("cuda"), visible_devices("xpu"), visible_devices("npu")) == ("1,2", "0", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert visible_devices("cuda") == "3"
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    assert visible_devices("cuda") == "1,2"


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (DUPLICATE, "Duplicate GPU detected : rank 1 and rank 0", "One rank needs one device"),
        (NO_ROOM, "shared memory segment", "/dev/shm"),
    ],
)
def test_what_keeps_nccl_from_starting_is_named_and_is_no_lost_rank(text: str, what: str, hint: str) -> None:
    error = set_up_error(dist.DistBackendError(text))
    assert error is not None
    assert what in error.what
    assert hint in error.hint
    assert not is_communication(error)


def test_a_peer_that_is_gone_while_nccl_starts_is_a_lost_rank() -> None:
    assert set_up_error(dist.DistBackendError(PEER_GONE)) is None
    assert set_up_error(RuntimeError("Gloo connectFullMesh failed")) is None
    assert is_communication(dist.DistBackendError(PEER_GONE))


def test_a_failure_is_told_while_the_group_still_stands(tmp_path: Path) -> None:
    told: list[Any] = []
    store = dist.FileStore(str(tmp_path / "store"), 1)

    def report(error: BaseException) -> None:
        told.append((str(error), dist.is_initialized()))
        raise RuntimeError("the store is gone")

    with (
        pytest.raises(ValueError, match="planted"),
        process_group(World(), store, timeout=timedelta(seconds=20), lone=True, report=report),
    ):
        raise ValueError("planted")
    assert told == [("planted", True)]
    assert not dist.is_initialized()


def test_variables_are_set_while_a_group_opens_and_the_users_own_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    watches = ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "ENABLE_MONITORING")
    ours = (*(f"TORCH_NCCL_{name}" for name in watches), "NCCL_SOCKET_IFNAME")
    older = ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name in (*ours, *older, "GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with opening(World(address="127.0.0.1")):
        assert [os.environ[name] for name in ours] == ["0", "0", "0", "=lo"]
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "0"
    assert not [name for name in (*ours, "TORCH_FR_BUFFER_SIZE") if name in os.environ]
    with opening(World(device="cuda:0")):
        assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    for name in older:
        monkeypatch.setenv(name, "1")
    with opening(World(address="127.0.0.1")):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
        assert not {ours[0], "TORCH_FR_BUFFER_SIZE"} & set(os.environ)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_sparse_gradients_are_refused_where_nccl_would_have_to_add_them_up() -> None:
    strategy = DDP(TrainConfig(), World(world_size=2, device="cuda:0"), DDPOptions())
    with pytest.raises(ModuleError, match="the gradients of 'table', a Embedding, are sparse"):
        strategy.prepare(Lookup(), Start())


class Wide(nn.Module):
    """Has a part that is called so, and sparse ones that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Linear(5, 1)
        self.table = nn.Embedding.from_pretrained(torch.ones(3, 2), sparse=True)


def test_gradients_are_sparse_where_an_embedding_that_is_trained_says_so() -> None:
    assert [name for name, part in Lookup().named_modules() if makes_sparse_gradients(part)] == ["table"]
    assert not [name for name, part in Wide().named_modules() if makes_sparse_gradients(part)]


def test_the_older_switches_of_tf32_can_be_read_whatever_a_fit_has_set() -> None:
    cuda: Any = torch.backends
    before = cuda.cuda.matmul.fp32_precision, cuda.cudnn.conv.fp32_precision
    for allowed in (True, False):
        with tf32_allowed(allowed, CUDA):  # torch.compile reads these
            assert (cuda.cuda.matmul.allow_tf32, cuda.cudnn.allow_tf32) == (allowed, allowed)
            assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    assert (cuda.cuda.matmul.fp32_precision, cuda.cudnn.conv.fp32_precision) == before


def test_the_users_own_precision_is_there_again_after_a_fit() -> None:
    try:
        torch.set_float32_matmul_precision("medium")
        with tf32_allowed(False, CUDA):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


MEBIBYTE = 1 << 20


def _left_of_address_space() -> float:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 64 * MEBIBYTE, hard))
    return available_bytes()


def test_a_process_may_take_what_its_machine_has_and_its_address_space_holds() -> None:
    assert MEBIBYTE < available_bytes() < math.inf
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert 32 * MEBIBYTE < pool.submit(_left_of_address_space).result() <= 64 * MEBIBYTE


def grouped(kinds: str, limits: tuple[str, ...], use: str, cache: str, root: Path) -> None:
    for folder, limit, taken, cached in (
        (root, "max", 900, 0),
        (root / "o", "1000", 900, 250),
        (root / "o/i", "2000", 600, 0),
    ):
        folder.mkdir()
        for name, text in ((limits[0], limit), (use, str(taken)), ("memory.stat", f"anon 1\n\n{cache} {cached}\n")):
            (folder / name).write_text(text.replace("max", "max" if not kinds else str(2**63 - 4096)))


@pytest.mark.parametrize("kinds", ["", "memory", "memory,hugetlb"])
def test_a_group_has_left_what_its_limit_its_use_and_the_kernels_cache_leave(
    kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kinds.partition(",")[0]
    files = host_memory._GROUPS[kind]
    monkeypatch.setitem(host_memory._GROUPS, kind, files._replace(root=str(tmp_path / "root")))
    grouped(kinds, files.limits, files.use, files.cache, tmp_path / "root")

    def left(path: str) -> list[float]:
        return host_memory._left_in_groups(path, kinds)

    assert left("/o/i") == [1400, 350, math.inf]
    assert left("/not/there")[-1] == math.inf  # a container that sees its own group as the root
    if not kinds:
        (tmp_path / "root/o/i/memory.high").write_text("700\n")  # from there on, the kernel slows a group down
        assert left("/o/i")[0] == 100
    (tmp_path / "root/o" / files.use).write_text("unknown\n")
    assert left("/o") == [1000, math.inf]
    assert not host_memory._left_in_groups("/o", "cpuset")


def test_what_yarn_counts_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # The groups that this machine has tests in are not YARN's.
    monkeypatch.setattr(host_memory, "_left_in_groups", lambda path, kinds: [math.inf])
    monkeypatch.setenv("CONTAINER_ID", "container_1_1_01_000002")
    assert available_bytes() == 0
    # A NodeManager may limit its containers by groups; those of this machine cannot be made here.
    monkeypatch.setattr(host_memory, "_left_in_groups", lambda path, kinds: [5 * MEBIBYTE])
    assert available_bytes() == 5 * MEBIBYTE


def test_the_peak_is_that_since_it_was_last_forgotten() -> None:
    hoard = bytearray(b"x" * 300_000_000)
    high = peaks("cpu")
    del hoard
    forget_peaks("cpu")
    low = peaks("cpu")
    assert low.keys() == {"peak_memory"}
    assert high["peak_memory"] - low["peak_memory"] > 250_000_000
