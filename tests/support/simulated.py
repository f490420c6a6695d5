# ruff: noqa: SIM905 - lists of names are read as text
"""A simulated accelerator, "sim:0" and "sim:1", to see without a GPU where code puts its tensors.

    from tests.support import simulated  # from then on there is torch.sim; in a child process, for it patches torch
    with simulated.synchronisations() as waits:
        model.to("sim:0")(batch)  # RuntimeError: Expected all tensors to be on the same device, but got ...
    assert not waits, waits  # ['item: loop.py: loss.item() < step < train']

Its tensors are plain tensors under PyTorch's PrivateUse1 key, in the CPU's memory, which DLPack hands over with the
device in its capsule rewritten: views, autograd, optimizers, DDP's reducer and FSDP2 are PyTorch's own. One fallback,
`_kernel`, runs every operator: it compares devices as CUDA does, has the CPU's kernel compute on that memory and labels
what comes out. As on CUDA, CPU scalars in pointwise operators, CPU indices into a device tensor and copies pass, while
`numpy()`, CPU generators, use in a forked child and random state saved for the CPU only are caught. A device has
`MEMORY` bytes, counted by the storages of its tensors.

Waits are `item`, `bool`, `tolist`, `cpu()`, `nonzero`, masks, `unique`, `equal`, `synchronize()` and blocking copies.

What it cannot show (docs/gpu.md says it, too):

- time and asynchrony: streams and events have no queue; a missing wait_stream, record_stream or pin_memory is fine;
- NCCL: c10d's operators go to the group's Gloo, for CPU tensors and for these;
- CUDA's numbers: the kernels are the CPU's. Where PyTorch chooses by device (attention, LSTM, layouts of gradients) the
  last bits differ from the CPU's. Waits inside CUDA's kernels (multinomial) are not seen. autocast casts nothing;
- what raises here and not there: growing by resize_, sparse COO, products of sparse rows, LSTMCell;
- what torch decides in C++ for devices it knows: torch.compile, ScriptModules, pinned memory and so DDP's search for
  unused parameters and its static graph, and PowerSGD;
- "cuda" as a name: the type is "sim".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
COUNT = int(os.environ.get("SIM_DEVICES", "2"))
MEMORY = int(os.environ.get("SIM_MEMORY", str(8 << 30)))  # bytes of each device

_CPU, _KEYS = torch.device("cpu"), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CSR_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsrCPU)
_TAGS: Any = torch.Tag
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PROCESS = os.getpid()
_GENERATORS = [torch.Generator() for _ in range(COUNT)]
_DLPACK_CPU, _DLPACK_PRIVATEUSE1 = 1, 12

# The CPU's kernels serve these: they touch no memory.
_VIEWS = """as_strided view _reshape_alias unfold view_as_real view_as_complex resize_ is_set_to set_ set_.source_Tensor
set_.source_Storage set_.source_Storage_storage_offset""".split()
# PyTorch composes these of others on unknown devices, and has kernels of their own on the CPU and on CUDA.
_COMPOSED = """convolution convolution_backward native_layer_norm native_group_norm addr addr.out _stack _stack.out
all.dims any.dims all.dims_out any.dims_out linalg__powsum silu_backward mish_backward""".split()
# What a tensor in the layout of sparse rows is made of.
_OF_CSR = "crow_indices col_indices values _nnz sparse_dim dense_dim".split()
# Where torch would look for cuDNN's.
_RNN = {"lstm.input": "lstm_impl", "lstm.data": "lstm_data_impl", "gru.input": "gru_impl", "gru.data": "gru_impl_data"}

_thread = threading.local()
_recorders: list[list[str]] = []
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


# ---- Tensors and their memory ----


class _Memory:
    """How many bytes the tensors of a device hold, and have held at most."""

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._sizes: dict[int, int] = {}  # by address
        self._lock = threading.RLock()  # a storage may be freed while another one is counted

    def take(self, tensor: torch.Tensor) -> None:
        """Counts new memory, until it is freed."""
        storage = tensor.untyped_storage()
        self.resize(storage.data_ptr(), storage.nbytes())
        weakref.finalize(storage, self.resize, storage.data_ptr(), None)

    def resize(self, address: int, size: int | None) -> None:
        """Counts memory as so many bytes from now on; `None` forgets it."""
        with self._lock:
            more = (size or 0) - self._sizes.get(address, 0)
            if self.held + more > MEMORY:
                raise torch.OutOfMemoryError(
                    f"SIM out of memory. Tried to allocate {more} bytes. {MEMORY - self.held} of {MEMORY} are free."
                )
            self.held += more
            self.peak = max(self.peak, self.held)
            if size is None:
                self._sizes.pop(address, None)
            else:
                self._sizes[address] = size


_memories = [_Memory() for _ in range(COUNT)]


def _labelled(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of that device on the memory of `tensor`, which it keeps alive."""
    if _is_in_bad_fork():
        raise RuntimeError("Cannot re-initialize SIM in forked subprocess: use the 'spawn' start method")
    capsule = torch._C._to_dlpack(tensor)
    head = _capsule_pointer(capsule, b"dltensor")  # C's: data, device type and index, ndim, dtype, shape, strides
    kind = (_DLPACK_CPU, 0) if device == _CPU else (_DLPACK_PRIVATEUSE1, _index(device))
    (ctypes.c_int32 * 2).from_address(head + 8)[:] = kind
    if 1 in tensor.shape:  # DLPack rewrites the strides of such dimensions, and kernels choose by strides
        strides = ctypes.c_void_p.from_address(head + 32).value
        assert strides is not None
        (ctypes.c_int64 * tensor.dim()).from_address(strides)[:] = tensor.stride()
    same: torch.Tensor = torch._C._from_dlpack(capsule)
    return same.conj() if tensor.is_conj() else torch._neg_view(same) if tensor.is_neg() else same


def _allocated(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of that device on new memory, which is counted."""
    _memories[_index(device)].take(tensor)
    return _labelled(device, tensor)


# ---- Waits ----


@contextlib.contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Lists the host's waits for devices, in all threads, each with its file, line and callers outside torch."""
    waits: list[str] = []
    _recorders.append(waits)
    try:
        yield waits
    finally:
        _recorders[:] = [other for other in _recorders if other is not waits]


def _note_wait(what: str) -> None:
    if not _recorders:
        return
    ours = (_TORCH, contextlib.__file__, __file__)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(ours)]
    callers = " < ".join(frame.name for frame in reversed(frames))
    line = f"{what}: {os.path.basename(frames[-1].filename)}: {frames[-1].line} < {callers}"
    for waits in _recorders:
        waits.append(line)


# ---- Operators ----


def _each(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_each(function, item) for item in value)
    return function(value) if isinstance(value, torch.Tensor) else value


class _Call:
    """One operator's call: its arguments on the CPU, and the tensors of the device that they stand for."""

    def __init__(self, op: Any) -> None:
        self._base, tags = op._schema.name.split("::")[1], {*op.tags}
        self._takes_scalars = _TAGS.pointwise in tags or self._base in ("fill_", "index_fill_", "_index_put_impl_")
        self.devices: list[torch.device] = []
        self.origins: dict[int, torch.Tensor] = {}
        self.small: list[tuple[torch.Tensor, torch.Tensor]] = []  # outputs that kernels may resize

    def lowered(self, argument: Any, value: torch.Tensor) -> torch.Tensor:
        """Returns an argument on the CPU, having compared its device with that of the others."""
        indexes = argument.name == "indices" and "index" in self._base
        if value.is_cpu and (indexes or (self._takes_scalars and value.dim() == 0)):
            if indexes and value.dim():
                _note_wait("host to device")
            return value
        self.devices.append(value.device)
        if value.device != self.devices[0]:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {argument.name} is on {value.device}, "
                f"different from other tensors on {self.devices[0]} (when checking argument in {self._base})"
            )
        host = _labelled(_CPU, value)
        if argument.is_out and value.numel() < 2:  # borrowed memory cannot grow
            host = torch.empty(0, dtype=value.dtype, device="cpu")
            self.small.append((value, host))
        self.origins[id(host)] = value
        return host

    def raised(self, device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what an operator returned as a tensor of the device."""
        if id(tensor) in self.origins:
            return self.origins[id(tensor)]
        address = tensor.untyped_storage().data_ptr()
        shared = any(address == origin.untyped_storage().data_ptr() for origin in self.origins.values())
        return _labelled(device, tensor) if shared else _allocated(device, tensor)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs any operator: compares devices, as CUDA does, and computes with the CPU's kernel on the same memory."""
    schema = {argument.name: argument for argument in op._schema.arguments}
    call, base, tags = _Call(op), op._schema.name.split("::")[1], {*op.tags}
    args = tuple(
        _each(functools.partial(call.lowered, argument), value)
        for argument, value in zip(schema.values(), args, strict=False)
    )
    kwargs = {name: _each(functools.partial(call.lowered, schema[name]), value) for name, value in kwargs.items()}
    device = call.devices[0] if call.devices else torch.device(kwargs["device"])
    if "device" in kwargs:
        kwargs["device"] = _CPU
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    if "generator" in schema:
        kwargs["generator"] = _GENERATORS[_index(device)]
    masked = base == "_index_put_impl_" and torch.bool in [getattr(index, "dtype", None) for index in args[1]]
    unknown = tags & {_TAGS.data_dependent_output, _TAGS.dynamic_output_shape} and kwargs.get("output_size") is None
    if (masked and args[2].numel() > 1) or unknown:
        _note_wait(base)
    numbers = any(
        argument.type.kind() == "TensorType" and isinstance(value, int | float)
        for argument, value in zip(schema.values(), args, strict=False)
    )
    result = (op.overloadpacket if numbers else op)(*args, **kwargs)  # numbers for tensors: another overload takes them
    for value, host in call.small:
        if value.shape != host.shape:
            value.set_(_allocated(device, host))
        _labelled(_CPU, value).copy_(host)
    return _each(functools.partial(call.raised, device), result)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.is_cpu != target.is_cpu and not non_blocking:
        _note_wait("host to device" if source.is_cpu else "device to host")
    _labelled(_CPU, target).copy_(_labelled(_CPU, source))
    return target


def _to_copy(
    source: torch.Tensor, *, device: torch.device | None = None, non_blocking: bool = False, **options: Any
) -> torch.Tensor:
    if device == _CPU and non_blocking:  # PyTorch would ask for pinned memory
        return torch.empty_like(source, device=device, **options).copy_(source, non_blocking=True)
    options.update(device=device, non_blocking=non_blocking)
    copied: torch.Tensor = torch.ops.aten._to_copy.default.redispatch(_KEYS, source, **options)
    return copied


def _dropout(value: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from the device's generator, as the CPU's own kernel would not."""
    kept = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p)
    return (value * kept).mul_(1 / (1 - p)), kept


# ---- torch.sim, which is this module: what torch and its users ask of a device's ----


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    if index is not None and not 0 <= index < COUNT:
        raise RuntimeError(f"SIM error: invalid device ordinal {index}")
    return current_device() if index is None else index


def is_available() -> bool:
    return COUNT > 0


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return os.getpid() != _PROCESS


def device_count() -> int:
    return COUNT


def current_device() -> int:
    return getattr(_thread, "index", 0)


def set_device(device: Any) -> int:
    before, _thread.index = current_device(), _index(device)
    return before


def device(device: Any) -> Any:
    return torch.accelerator.device_index(_index(device))


class Stream(torch.Stream):
    """A stream without a queue, equal to all others: its work is over when it has begun."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return torch.Stream.__new__(cls, NAME)  # type: ignore[call-overload,no-any-return]

    def synchronize(self) -> None:
        _note_wait("synchronize")

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event(torch.Event):
    """An event which has always happened already."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        return torch.Event.__new__(cls, NAME)  # type: ignore[call-overload,no-any-return]

    def synchronize(self) -> None:
        _note_wait("synchronize")

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


default_stream = current_stream


def synchronize(device: Any = None) -> None:
    _note_wait("synchronize")


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return _GENERATORS[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    _GENERATORS[_index(device)].set_state(state)


def manual_seed_all(seed: int) -> None:
    for generator in _GENERATORS:
        generator.manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return MEMORY - _memories[_index(device)].held, MEMORY


def memory_allocated(device: Any = None) -> int:
    return _memories[_index(device)].held


def max_memory_allocated(device: Any = None) -> int:
    return _memories[_index(device)].peak


def reset_peak_memory_stats(device: Any = None) -> None:
    memory = _memories[_index(device)]
    memory.peak = memory.held


def empty_cache() -> None:
    """Does nothing: what is freed here is free."""


# ---- What torch decides in C++, or by a device's name ----


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Refuses what CUDA does not pin."""
    if not tensor.is_cpu:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    if 0 in tensor.stride() and tensor.numel() > 1:
        raise RuntimeError("more than one element of the written-to tensor refers to a single memory location")
    return tensor


def _patch() -> None:  # noqa: C901 - one small function after the other
    apply, to, data = torch.nn.Module._apply, torch.Tensor.to, torch._C.TensorBase.data
    resize, new_storage = torch.UntypedStorage.resize_, torch._C.StorageBase.__new__

    def apply_swapping(module: Any, fn: Any, recurse: bool = True) -> Any:
        with mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True):
            return apply(module, fn, recurse)  # its parameters stay the same objects, as on CUDA

    def to_current(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        def here(value: Any) -> Any:
            return torch.device(NAME, current_device()) if value in (NAME, torch.device(NAME)) else value

        return to(tensor, *map(here, args), **{name: here(value) for name, value in kwargs.items()})

    def new(cls: Any, *args: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        if torch.device(device).type != NAME:
            return new_storage(cls, *args, device=device, **kwargs)
        host = torch.empty(*args, dtype=torch.uint8, device="cpu")
        return _allocated(torch.device(device), host).untyped_storage()

    def set_data(tensor: Any, value: Any) -> None:
        if tensor.device.type == value.device.type:
            data.__set__(tensor, value)
        else:  # as FSDP moves parameters; PyTorch refuses it for what is neither the CPU's nor CUDA's
            trained = isinstance(tensor, torch.nn.Parameter)
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(value, tensor.requires_grad) if trained else value)

    def resize_storage(storage: Any, size: int) -> Any:
        if storage.device.type != NAME or size > storage.nbytes():
            return resize(storage, size)
        _memories[_index(storage.device)].resize(storage.data_ptr(), size)  # the memory stays, and does not count
        return storage

    for owner, name, function in (
        (torch.nn.Module, "_apply", apply_swapping),
        (torch.Tensor, "to", to_current),
        (torch.Tensor, "data", property(data.__get__, set_data)),
        (torch.Tensor, "pin_memory", _pin_memory),
        (torch.Tensor, "is_pinned", lambda self, device=None: False),
        (torch.UntypedStorage, "__new__", new),
        (torch.UntypedStorage, "resize_", resize_storage),
        (torch._C, "_accelerator_getDeviceIndex", current_device),
        (torch._C, "_accelerator_setDeviceIndex", set_device),
        (torch._C, "_accelerator_exchangeDevice", set_device),
        (torch._C, "_accelerator_maybeExchangeDevice", set_device),
        (torch._C, "_accelerator_getStream", current_stream),
        (torch._C, "_accelerator_synchronizeDevice", synchronize),
        (torch._C, "_accelerator_emptyHostCache", empty_cache),
    ):
        setattr(owner, name, function)
    engine: Any = torch.autograd
    alone = engine.set_multithreading_enabled(False)(engine.graph._engine_run_backward)  # sim:1 has no queue
    engine._engine_run_backward = engine.graph._engine_run_backward = alone


def _register() -> list[torch.library.Library]:
    """Registers the operators; returns what must live as long as they do."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=sys.modules[__name__])
    aten, c10d, every = (torch.library.Library(name, "IMPL") for name in ("aten", "c10d", "_"))
    every.fallback(_kernel, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own: dict[str, Any] = {
        "_copy_from": _copy_from,
        "_to_copy": _to_copy,
        "native_dropout": _dropout,
        "record_stream": lambda *_: None,
        "_efficientzerotensor": torch.ops.aten.zeros.default,
    }
    for name in _VIEWS + _COMPOSED:
        op = functools.reduce(getattr, (name if "." in name else f"{name}.default").split("."), torch.ops.aten)
        own[name] = functools.partial(*((op.redispatch, _KEYS) if name in _VIEWS else (_kernel, op)))
    for name, run in own.items():
        aten.impl(name, run, "PrivateUse1")
    for name, decomposition in _RNN.items():
        for key in "PrivateUse1", "AutogradPrivateUse1":
            aten.impl(name, getattr(torch._decomp.decompositions, decomposition), key)
    for name in _OF_CSR:
        op = getattr(torch.ops.aten, name).default
        aten.impl(name, functools.partial(op.redispatch, _CSR_KEYS), "SparseCsrPrivateUse1")
    for key in "Conjugate", "Negative":  # `_labelled` keeps these bits
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the kernels which these replace
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            if name.startswith("c10d::"):
                op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
                c10d.impl(name.removeprefix("c10d::"), functools.partial(_kernel, op), "PrivateUse1")
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    return [aten, c10d, every]


_libraries = _register()
_patch()
manual_seed_all(torch.initial_seed())
