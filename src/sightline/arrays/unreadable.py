"""Kinds of arrays: the errors for arrays whose entries this library cannot read.

`check_kind` checks each array of a call. Its callers are `validation.check_arrays` for query, key and value,
`validation.read_sinks` for sinks, and `Table` for masks, biases and tables, for example. `check_device` raises the
error for a tensor on another device, `check_memory` for one without memory. Shapes and dtypes are checked elsewhere.

A subclass of torch's Tensor may compute attention by itself, so `check_kind` accepts it. If the subclass then fails,
`refuse_subclass` raises the error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeviceError, DtypeError
from .operations import JAX, TORCH, device, framework, is_traced


class Unreadable(NamedTuple):
    """What is known of arrays that cannot be read. `{x}` in `cure` stands for the array's name."""

    description: str
    cure: str


MASKED_ARRAY = Unreadable("a masked array of NumPy", "hide entries with mask=, and pass {x}.filled(0)")
CURES = {"KVCache": "attention(query, cache): the cache stands for key and value"}  # for other objects, by their class
SPARSE_JAX = Unreadable("a sparse array of JAX", "{x}.todense()")
# classes of torch by name; a subclass of one counts too
TORCH_CLASSES = {
    "UninitializedTensorMixin": Unreadable(
        "an uninitialized parameter, which has no entries", "call the lazy module once before its parameters are used"
    ),
    "MaskedTensor": Unreadable("a masked tensor of torch", "hide entries with mask=, and pass {x}.get_data()"),
    "CausalBias": Unreadable(
        "a CausalBias of torch, which has no entries",
        "pass it as mask= of sightline.attention, or as attn_mask= of sightline.torch.scaled_dot_product_attention",
    ),
}
# what to do with a tensor of a class of torch that does not compute this library's operator
CLASS_CURES = {
    "DTensor": "sightline.torch.distributed.attention, or {x}.to_local()",
    "FakeTensor": "make all tensors of the call by one FakeTensorMode",
    "FunctionalTensor": "call attention inside the FunctionalTensorMode of {x}",
}
READABLE = ("__array__", "__array_interface__", "__dlpack__")  # NumPy reads an object that has one of these


def is_array(value: Any) -> bool:
    """True for tensors of torch, and for other objects with shape and dtype."""
    # to read the shape of some tensors raises an error
    return framework(value) is TORCH or (hasattr(value, "dtype") and hasattr(value, "shape"))


def check_kind(name: str, array: Any) -> None:
    """Raise DtypeError unless the array has shape, dtype and entries that can be read. The message has its `name`."""
    if type(array) is not np.ndarray:
        check_class(name, array)
        _refuse(name, _find_kind(array))


def check_class(name: str, array: Any) -> None:
    """Raise DtypeError if the array is a tensor of torch whose class cannot be read, whatever its layout."""
    if framework(array) is TORCH and not _is_plain(array):
        _refuse(name, _find_class(array))


def _is_plain(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _refuse(name: str, kind: Unreadable | None) -> None:
    if kind is not None:
        cure = kind.cure.format(x=_argument(name))
        raise DtypeError(f"{name} is {kind.description}", "plain arrays, with entries in memory", cure)


def _argument(name: str) -> str:
    return name if name.isidentifier() else "array"


def _find_class(tensor: Any) -> Unreadable | None:
    """Return the kind of a tensor whose class cannot be read; None for all others."""
    if is_traced(tensor):  # torch.compile cannot trace the bases of some classes
        return TORCH_CLASSES.get(type(tensor).__name__)
    for base in type(tensor).__mro__:
        if base.__name__ in TORCH_CLASSES and base.__module__.startswith("torch."):
            return TORCH_CLASSES[base.__name__]
    try:
        _ = tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
    except Exception as error:  # raised by the class's own __torch_function__
        return Unreadable(f"a {type(tensor).__name__}, which has no shape and dtype: {error}", "pass a plain tensor")
    return None


def _find_kind(array: Any) -> Unreadable | None:
    """Return the kind of an array that cannot be read; None for all others. `_find_class` checks classes of torch."""
    if framework(array) is TORCH:
        return _find_layout(array)
    if not is_array(array):
        name = type(array).__name__
        has_entries = False
        with suppress(Exception):  # formulas and objects of other libraries raise errors of every kind
            has_entries = np.asarray(array).dtype.kind in "biuf"
        cure = "{x}=numpy.asarray({x})" if has_entries else CURES.get(name, "pass an array as {x}")
        return Unreadable("None" if array is None else f"a {name}", cure)
    # a masked array has loaded `numpy.ma`; an import here could be the first one, in a fork
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        return MASKED_ARRAY
    if framework(array) is JAX:
        return None if isinstance(array, sys.modules["jax"].Array) else SPARSE_JAX
    if any(hasattr(array, method) for method in READABLE):
        return None
    return Unreadable(f"a {type(array).__name__}, which NumPy cannot read", "pass a plain array of its entries")


def _find_layout(tensor: Any) -> Unreadable | None:
    """Return the kind of a tensor that is nested, quantized or not strided; None for all others."""
    if str(tensor.layout) == "torch.strided" and not (tensor.is_nested or tensor.is_quantized):
        return None
    layout = str(tensor.layout)
    if tensor.is_nested:
        return Unreadable(
            "a nested tensor" if "jagged" in layout else "a nested tensor in the strided layout",
            "attention takes query, key and value nested with layout=torch.jagged, and formulas as masks; for other "
            "arguments and functions pass {x}.values() and mask=sightline.documents(lengths=...)",
        )
    if tensor.is_quantized:
        return Unreadable(f"a quantized tensor, {tensor.dtype}", "{x}.dequantize()")
    return Unreadable(f"a {'sparse ' * ('sparse' in layout)}tensor in the layout {layout}", "{x}.to_dense()")


def check_memory(name: str, array: Any) -> None:
    """Raise DtypeError if an array is a meta tensor, or a torch tensor on the CPU without memory of its own."""
    if framework(array) is not TORCH or not array.numel() or not (array.is_cpu or array.is_meta):
        return
    torch = sys.modules["torch"]
    with suppress(Exception):  # tensors that wrap others have no storage; their classes raise errors of every kind
        if array.is_cpu and array.detach().data_ptr():
            return
    what = f"{name} of shape {tuple(array.shape)} has no memory"
    if torch._C._functorch.is_functorch_wrapped_tensor(array):
        what += ", because a transform of torch.func made it"
    elif array.is_meta:
        what += ", because it is a meta tensor"
    elif torch._is_functional_tensor(array):
        what += ", because it is a functional tensor, which wraps another one"
    elif not _is_plain(array):
        what += f", because it is a {type(array).__name__}, which wraps other tensors"
    raise DtypeError(
        what,
        "tensors whose entries are in memory",
        f"restore the storage of {_argument(name)}, or pass a plain copy of its entries",
    )


def check_device(what: str, array: Any, query: Any) -> None:
    """Raise DeviceError if the array has the query's framework but lies on another device than the query.

    An array of another framework is later converted to the query's device. If the entries of such an array are not in
    memory, raise DtypeError.
    """
    if framework(array) is not framework(query):
        check_memory(what, array)
    elif device(array) != device(query):
        own, other = device(array), device(query)
        raise DeviceError(f"{what} on {own}, query on {other}", "one device", f"move the {what} to {other}")


def refuse_subclass(named: Sequence[tuple[str, Any]], error: Exception) -> None:
    """If a tensor's class is a subclass of torch's, raise DtypeError, whose cause is the error of torch's operator.

    named : pairs (name, tensor); the tensor may be None
    error : the error that torch, or the class of a tensor, raised
    """
    for name, tensor in named:
        if tensor is not None and not _is_plain(tensor):
            kind = type(tensor).__name__
            reason = str(error).strip().partition("\n")[0]
            cure = CLASS_CURES.get(kind, "pass the plain tensors that {x} holds")
            raise DtypeError(
                f"{name} is a {kind}, with which torch does not compute attention: {type(error).__name__}: {reason}",
                "tensors, and tensors of classes that compute torch.ops.sightline.attention",
                cure.format(x=_argument(name)),
            ) from error
