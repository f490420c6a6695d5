"""Hints for columns that a module does not take."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

__all__ = ["hints_for"]


def hints_for(error: Exception, inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns lines with options that change how columns arrive, for a module that has failed on its inputs."""
    return _assemble_hint(inputs) + _dtype_hint(error, inputs) + _shape_hint(error, inputs)


def _dtype_hint(error: Exception, inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns what to do about numbers of a dtype that a layer has refused."""
    text = str(error) if isinstance(error, RuntimeError | ValueError) else ""
    has_integers = any(not (tensor.is_floating_point() or tensor.dtype == torch.bool) for tensor in inputs.values())
    float_dtypes = {tensor.dtype for tensor in inputs.values() if tensor.is_floating_point()}
    if "indices" in text:
        cast = "cast the column of indices as int or bigint, a vector by vector_to_array first"
        return _input_dtypes_hint(inputs, f"an embedding takes whole numbers: {cast}, or", "int64")
    if has_integers and re.search("Long|long int|int64|Int", text) and re.search("[Ff]loat", text):
        return "\n     layers of floats take no whole numbers: give them columns that are cast as float or double"
    if re.search("[Dd]ouble", text) and re.search("[Ff]loat", text):
        if len(float_dtypes) > 1:
            dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in float_dtypes))
            return f"\n     columns are {dtypes}: give them one dtype, by inputDtypes"
        # All columns have one dtype, so the module's parameters must have the other.
        dtype = "float64" if torch.float32 in float_dtypes else "float32"
        return _input_dtypes_hint(inputs, f"the module's parameters are {dtype}:", dtype)
    return ""


def _input_dtypes_hint(inputs: Mapping[str, torch.Tensor], why: str, dtype: str) -> str:
    """Returns a hint at `inputDtypes` for columns of floats that have another dtype.

    The option does not apply to several columns that are packed into one tensor, which have " ... " in their name.
    """
    columns = []
    for name, tensor in inputs.items():
        has_other_dtype = tensor.is_floating_point() and str(tensor.dtype) != f"torch.{dtype}"
        if has_other_dtype and name.startswith("column ") and " ... " not in name:
            columns.append(name.removeprefix("column "))
    options = ", ".join(f"{column}: {dtype!r}" for column in columns)
    return f"\n     {why} set inputDtypes={{{options}}}" if columns else ""


def _shape_hint(error: Exception, inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns a hint at `inputShapes` if a layer, such as a convolution, wants more axes than a flat column has."""
    flat = [name for name, tensor in inputs.items() if tensor.dim() == 2 and name.startswith("column ")]
    if not flat or not re.search(r"\b[345]D\b", str(error)):
        return ""
    column = flat[0].removeprefix("column ")
    return f"\n     a flat column gets a shape by inputShapes={{{column}: [channels, height, width]}}"


def _assemble_hint(inputs: Mapping[str, torch.Tensor]) -> str:
    """Returns a hint at `assembleInputs` if several arguments are columns of numbers, else an empty string."""
    numbers = [tensor for tensor in inputs.values() if tensor.dim() == 1]
    return "\n     assembleInputs=True makes one tensor of columns of numbers" if len(numbers) > 1 else ""
