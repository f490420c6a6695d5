"""Sets the process's random generators and torch's global switches for a fit, and restores them afterwards."""

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

# Torch's types lack some attributes of this module.
_CUDNN: Any = torch.backends.cudnn
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def reproducible(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Context in which generators and switches are set for a fit; at its end, both are as before.

    The process may be reused, so it must not notice the fit. All generators start from the configuration's seed, the
    same in every rank.
    """
    with untouched_generators(device), switched(config, device):
        seed_all(config.seed)
        yield


@contextmanager
def switched(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Context that applies `deterministic` and the precision "tf32" to torch."""
    with ExitStack() as stack:
        if config.deterministic:
            stack.enter_context(_deterministic())
        stack.enter_context(tf32_allowed(config.precision == "tf32", device))
        yield


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, on GPUs, too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits.
    torch.manual_seed(seed)


def generators_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of the generators of Python, NumPy, torch and the device, as plain values and tensors."""
    version, python_words, gauss = random.getstate()
    algorithm, numpy_words, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(python_words), gauss],
        "numpy": [algorithm, torch.from_numpy(numpy_words.astype(np.int64)), *rest],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "device": None if is_host(device) else module_of(device).get_rng_state(device),
    }


def set_generators_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores a state that `generators_state` returned."""
    version, python_words, gauss = state["python"]
    random.setstate((version, tuple(python_words), gauss))
    algorithm, numpy_words, *rest = state["numpy"]
    np.random.set_state((algorithm, numpy_words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state.get("device") is not None and not is_host(device):
        module_of(device).set_rng_state(state["device"], device)


@contextmanager
def untouched_generators(device: torch.device) -> Iterator[None]:
    """Context that restores the state of the generators at its end."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        devices = [] if is_host(device) else [device]
        # Torch asks for a type of accelerator even if there is no accelerator whose generator it must restore.
        device_type = device.type if devices else "cuda"
        with torch.random.fork_rng(devices, device_type=device_type):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Context in which torch, cuDNN and cuBLAS choose deterministic kernels."""
    mode = torch.get_deterministic_debug_mode()
    benchmark = torch.backends.cudnn.benchmark
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
    """Context that allows or forbids TF32 on CUDA; by default, torch allows it in convolutions only."""
    if device.type != "cuda":
        yield
        return

    # The older switches set the newer ones, too. If only the newer ones are set, reading an older one raises, and
    # torch.compile reads one (aten/src/ATen/Context.cpp, `allowTF32CuBLAS`).
    def switch(*, products: bool, convolutions: bool) -> None:
        torch.set_float32_matmul_precision("high" if products else "highest")
        torch.backends.cudnn.allow_tf32 = convolutions
        for operation in (_CUDNN.conv, _CUDNN.rnn):  # Otherwise, torch's switch for all backends would apply.
            operation.fp32_precision = "tf32" if convolutions else "ieee"

    cuda_products: Any = torch.backends.cuda.matmul
    # The older switch for products sets the switch of mkldnn, too.
    mkldnn: Any = torch.backends.mkldnn
    operations = (cuda_products, _CUDNN.conv, _CUDNN.rnn, mkldnn.matmul)
    precisions_before = [operation.fp32_precision for operation in operations]
    products_before = cuda_products.fp32_precision
    convolutions_before = _CUDNN.conv.fp32_precision
    older_switch = "high" if products_before == "tf32" else "highest"
    with suppress(RuntimeError):  # It raises if the user has set only the newer switches.
        older_switch = torch.get_float32_matmul_precision()
    switch(products=allowed, convolutions=allowed)
    try:
        yield
    finally:
        switch(products=products_before == "tf32", convolutions=convolutions_before == "tf32")
        torch.set_float32_matmul_precision(older_switch)
        for operation, precision in zip(operations, precisions_before, strict=True):
            operation.fp32_precision = precision
