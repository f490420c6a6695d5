"""What to do about columns that a module does not take."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

__all__ = ["hints_for"]


def hints_for(error: Exception, inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns lines about other options of the input columns, for a module that has failed on them."""
    return _together(inputs) + _other_dtype(error, inputs) + _other_shape(error, inputs)


def _other_dtype(error: Exception, inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns what to do about numbers of a dtype that a layer has refused."""
    text = str(error) if isinstance(error, RuntimeError | ValueError) else ""
    whole = any(not (tensor.is_floating_point() or tensor.dtype == torch.bool) for tensor in inputs.values())
    floats = {tensor.dtype for tensor in inputs.values() if tensor.is_floating_point()}
    if "indices" in text:
        cast = "cast the column of indices as int or bigint, a vector by vector_to_array first"
        return _asked(inputs, f"an embedding takes whole numbers: {cast}, or", "int64")
    if whole and re.search("Long|long int|int64|Int", text) and re.search("[Ff]loat", text):
        return "\n     layers of floats take no whole numbers: give them columns that are cast as float or double"
    if re.search("[Dd]ouble", text) and re.search("[Ff]loat", text):
        if len(floats) > 1:
            found = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
            return f"\n     columns are {found}: give them one dtype, by inputDtypes"
        wanted = "float64" if torch.float32 in floats else "float32"
        return _asked(inputs, f"the module's parameters are {wanted}:", wanted)
    return ""


def _asked(inputs: Mapping[str, torch.Tensor], why: str, dtype: str) -> str:
    """Returns a hint at `inputDtypes` for the columns of floats that have another dtype; packed ones have no option."""
    others = [name for name, tensor in inputs.items() if tensor.is_floating_point() and str(tensor.dtype)[6:] != dtype]
    columns = [name.removeprefix("column ") for name in others if name.startswith("column ") and " ... " not in name]
    wanted = ", ".join(f"{column}: {dtype!r}" for column in columns)
    return f"\n     {why} set inputDtypes={{{wanted}}}" if columns else ""


def _other_shape(error: Exception, inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns a hint at `inputShapes` if a layer, as a convolution, has refused a flat column for its dimensions."""
    flat = [name for name, tensor in inputs.items() if tensor.dim() == 2 and name.startswith("column ")]
    if not flat or not re.search(r"\b[345]D\b", str(error)):
        return ""
    column = flat[0].removeprefix("column ")
    return f"\n     a flat column gets a shape by inputShapes={{{column}: [channels, height, width]}}"


def _together(inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns a hint at `assembleInputs` if several arguments are columns of numbers, else an empty string."""
    numbers = [tensor for tensor in inputs.values() if tensor.dim() == 1]
    return "\n     assembleInputs=True makes one tensor of columns of numbers" if len(numbers) > 1 else ""
