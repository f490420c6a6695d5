"""What a fit changes about its process, generators and switches of torch, and puts back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import is_host, module_of

__all__ = [
    "generators_state",
    "reproducible",
    "seed_all",
    "set_generators_state",
    "switched",
    "tf32_allowed",
    "untouched_generators",
]

_CUDNN: Any = torch.backends.cudnn  # whose parts torch's own types leave out
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def reproducible(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """A block with the generators and the switches of one fit; a reused process has its own back afterwards.

    All generators start from the configuration's seed, the same in every rank.
    """
    with untouched_generators(device), switched(config, device):
        seed_all(config.seed)
        yield


@contextmanager
def switched(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """A block in which torch computes as `deterministic` and the precision "tf32" ask for."""
    with ExitStack() as stack:
        if config.deterministic:
            stack.enter_context(_deterministic())
        stack.enter_context(tf32_allowed(config.precision == "tf32", device))
        yield


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, those of GPUs included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # all that NumPy takes
    torch.manual_seed(seed)


def generators_state(device: torch.device) -> dict[str, Any]:
    """Returns where the generators stand, of plain values and tensors."""
    version, of_python, gauss = random.getstate()
    kind, of_numpy, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(of_python), gauss],
        "numpy": [kind, torch.from_numpy(of_numpy.astype(np.int64)), *rest],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "device": None if is_host(device) else module_of(device).get_rng_state(device),
    }


def set_generators_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts the generators where `generators_state` found them."""
    version, of_python, gauss = state["python"]
    random.setstate((version, tuple(of_python), gauss))
    kind, of_numpy, *rest = state["numpy"]
    np.random.set_state((kind, of_numpy.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state.get("device") is not None and not is_host(device):
        module_of(device).set_rng_state(state["device"], device)


@contextmanager
def untouched_generators(device: torch.device) -> Iterator[None]:
    """A block after which the generators stand where they stood before it."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        devices, kind = ([], "cuda") if is_host(device) else ([device], device.type)
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _deterministic() -> Iterator[None]:
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ[_WORKSPACE]


@contextmanager
def tf32_allowed(allowed: bool, device: torch.device) -> Iterator[None]:
    """A block in which CUDA may multiply float32 in TF32, or may not: torch lets convolutions by itself."""
    if device.type != "cuda":
        yield
        return

    # The older switches set the newer ones, too. Set by the newer ones alone, to read an older one is an error, and
    # torch.compile does (aten/src/ATen/Context.cpp, `allowTF32CuBLAS`).
    def switch(products: bool, convolutions: bool) -> None:
        torch.set_float32_matmul_precision("high" if products else "highest")
        torch.backends.cudnn.allow_tf32 = convolutions
        for kind in (_CUDNN.conv, _CUDNN.rnn):  # or one for all backends would hold
            kind.fp32_precision = "tf32" if convolutions else "ieee"

    mkldnn: Any = torch.backends.mkldnn  # whose products the first switch sets, too
    kinds: tuple[Any, ...] = (torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, mkldnn.matmul)
    before = [kind.fp32_precision for kind in kinds]
    older = "high" if before[0] == "tf32" else "highest"
    with suppress(RuntimeError):  # the user has set the newer ones alone
        older = torch.get_float32_matmul_precision()
    switch(allowed, allowed)
    try:
        yield
    finally:
        switch(before[0] == "tf32", before[1] == "tf32")
        torch.set_float32_matmul_precision(older)
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision
