"""Checks of the inputs of attention layers, and the conversion of arrays of masks to formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..arrays.kinds import check_kind, check_memory, refuse_subclass
from ..arrays.operations import check_float_dtype, dtype_name
from ..errors import DtypeError, MaskError, SightlineError
from ..formula.expression import Expression
from ..formula.library import dense
from ..formula.torch_masks import is_causal_bias
from .functional import align_mask, read_causal_bias
from .interception import is_intercepted

Projected = TypeVar("Projected")

CURES_OF_FORMULAS = {  # the end of a call of torch.as_tensor, for a formula given as this argument
    "attn_mask": "~mask.array(n, m)), or is_causal=True for causal()",
    "key_padding_mask": "~mask.array(1, m, batch=N).reshape(N, m)) for a formula of b and j, such as padding(lengths)",
}


def check_inputs(**inputs: Any) -> None:
    """Raise DtypeError unless the named inputs of a layer's projections are tensors of kinds that torch can project."""
    for name, array in inputs.items():
        if not isinstance(array, Tensor):
            raise DtypeError(f"{name} is a {type(array).__name__}", "a tensor of torch", f"torch.as_tensor({name})")
        if type(array) is not Tensor or array.layout is not torch.strided or array.is_nested:
            check_kind(name, array)


def project(projections: Callable[..., Projected], **inputs: Tensor) -> Projected:
    """Return projections(*inputs). If torch raises an error that an input's kind explains, raise DtypeError instead."""
    try:
        return read_tensors(projections, **inputs)
    except SightlineError:
        raise
    except Exception:
        for name, array in inputs.items():
            check_kind(name, array)
            check_float_dtype(name, array)
        raise


def read_tensors(function: Callable[..., Projected], **tensors: Any) -> Projected:
    """Return function(*tensors). Raise DtypeError if a tensor has no memory, or if its class explains an error."""
    is_read = not is_intercepted()
    for name, tensor in tensors.items() if is_read else ():
        if type(tensor) is Tensor:
            check_memory(name, tensor)  # torch itself would read at the address 0
    try:
        return function(*tensors.values())
    except Exception as error:  # classes of tensors raise errors of every kind
        if is_read:
            refuse_subclass(list(tensors.items()), error)
        raise


def read_mask(mask: Any, hides: bool, query: Tensor, key: Tensor, value: Tensor) -> Expression:
    """Return the formula of a mask that is an array or a CausalBias of torch.

    `hides` is True if the entries of an array that are not 0 hide the key.
    """
    if is_causal_bias(mask):
        return read_causal_bias(mask, query, key)
    check_kind("mask", mask)
    array = mask if isinstance(mask, Tensor) else np.asarray(mask)
    if not getattr(array.dtype, "name", dtype_name(array)).startswith(("bool", "int", "uint", "float", "bfloat")):
        raise MaskError(
            f"mask is an array of {dtype_name(array)}",
            "booleans or real numbers, or a formula",
            "pass an array of True and False",
        )
    compare: Any = np.equal if hides else np.not_equal
    if isinstance(array, Tensor):
        compare = torch.eq if hides else torch.ne
    return dense(align_mask(read_tensors(lambda mask: compare(mask, 0), mask=array), query, key, value))


def check_array_mask(name: str, array: Any) -> None:
    """Raise MaskError or DtypeError unless `attn_mask` or `key_padding_mask` is None or a tensor that can be read."""
    if array is None:
        return
    allowed = "a torch tensor: booleans where True hides, or floats that are added to the scores; or None"
    if not isinstance(array, Tensor):
        given, cure = f"a {type(array).__name__}", f"{name}=torch.as_tensor(array)"
        if isinstance(array, Expression):
            given, cure = "a formula", f"{name}=torch.as_tensor({CURES_OF_FORMULAS[name]}"
        raise MaskError(f"{name} is {given}", allowed, cure)
    check_kind(name, array)
    if not (array.is_floating_point() or array.dtype is torch.bool):
        zeros_and_ones = f"{name}=mask == 0 if the tensor holds zeros and ones, and 1 attends"
        lengths = "; key_padding_mask=torch.arange(m) >= lengths[:, None] if the tensor holds lengths"
        cure = zeros_and_ones + lengths * (name == "key_padding_mask")
        raise MaskError(f"{name} is a tensor of {str(array.dtype).removeprefix('torch.')}", allowed, cure)
