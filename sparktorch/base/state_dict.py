"""State dicts as safetensors bytes, the only form in which weights are sent and stored."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.errors import ModuleError

__all__ = [
    "WRAPPER",
    "apart",
    "check_returned",
    "check_state",
    "entries",
    "extra_states",
    "pack_state",
    "packed_weights",
    "unpack_state",
    "unpacked_weights",
]

WRAPPER = "_checkpoint_wrapped_module."  # torch's wrapper for activation checkpointing adds this to names of modules.
_EXTRA = "_extra_state"  # Under this name, a state dict has the result of `get_extra_state`.

_FOLDER = b"folder "  # safetensors bytes begin with the length of their header, which is never this large.


@cache
def _is_saved(dtype: torch.dtype) -> bool:
    """Whether the installed version of safetensors stores tensors of a dtype: older versions know fewer dtypes."""
    from safetensors.torch import save

    try:
        # A fake tensor, which has no data, could not be saved.
        with unset_fake_temporarily(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save({"": torch.empty(1, dtype=dtype, device="cpu")})
    except Exception:  # Each version of safetensors raises another type.
        return False
    return True


def check_state(state: Mapping[str, object]) -> None:
    """Refuses entries of a state dict, by name, that are no dense tensors, or whose dtype safetensors lacks."""
    for name, value in state.items():
        kind = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and not value.is_quantized and _is_saved(value.dtype):
                continue
            kind = f"a tensor of {value.dtype}, {value.layout}"
        raise ModuleError(
            f"the module's state_dict() holds {kind} under {name!r}, and models are saved by safetensors, as dense "
            "tensors",
            hint="register it with persistent=False, or as a buffer of another dtype, such as torch.float32; or leave "
            "get_extra_state out",
            param="module",
            code="ST-STATE-DICT",
        )


def check_returned(module: nn.Module) -> None:
    """Refuses a module whose state dict has other entries than its parameters and buffers, or lacks a parameter.

    So each entry can be copied back into its tensor, without `load_state_dict`.
    """
    state = module.state_dict(keep_vars=True)
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    extra = {name for name, _ in extra_states(module)}
    in_state = {id(value) for value in state.values()}
    foreign = [name for name, value in state.items() if id(value) not in registered and name not in extra]
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in in_state]
    if foreign or missing:
        what = f"holds {foreign[0]!r}, which is no parameter or buffer" if foreign else f"lacks {missing[0]!r}"
        raise ModuleError(
            f"the state_dict() of {type(module).__qualname__} {what}, as by a hook",
            hint="register what must be saved as parameters or buffers; or leave modelDir out",
            param="module",
            code="ST-STATE-DICT",
        )


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts of a module that have extra state, after the name that the state has in the state dict."""
    for path, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}.{_EXTRA}".removeprefix(".").replace(WRAPPER, ""), part


def pack_state(state: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the state dict as safetensors bytes; each of several tensors that share memory is written in full."""
    from safetensors.torch import save

    return save(apart(state))


def apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors on the CPU, none of which shares memory with another, as safetensors requires."""
    addresses: set[int] = set()
    tensors = {}
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    return tensors


def entries(content: bytes) -> frozenset[str]:
    """Returns the names in a state dict from the header of its safetensors bytes; none if there are no bytes."""
    if not content:
        return frozenset()
    size = int.from_bytes(content[:8], "little")
    return frozenset(json.loads(content[8 : 8 + size]))


def packed_weights(weights: Mapping[str, torch.Tensor]) -> bytes:
    """Returns weights as safetensors bytes, or the path of the folder that holds them."""
    if isinstance(weights, WeightsFolder):
        return _FOLDER + json.dumps({"path": weights.path, "token": weights.token}).encode()
    return pack_state(weights)


def unpacked_weights(content: bytes) -> bytes | WeightsFolder:
    """Returns what `packed_weights` has packed: safetensors bytes, or the folder."""
    if content.startswith(_FOLDER):
        return WeightsFolder(**json.loads(content.removeprefix(_FOLDER)))
    return content


def unpack_state(content: bytes) -> dict[str, torch.Tensor]:
    """Returns the state dict in safetensors bytes, on the CPU."""
    from safetensors.torch import load

    return load(content)
