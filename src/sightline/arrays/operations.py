"""Functions for arrays of any library, and one object for each library, which knows what its arrays can do.

    framework(array)  →  NUMPY, TORCH, JAX, or the object of another library with the array API

The module that defines an array's type names the library, so this module imports no library.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..errors import DtypeError

Array = np.ndarray[Any, np.dtype[Any]]  # an array of NumPy, for annotations
FLOATS = ("float16", "bfloat16", "float32", "float64")
MAX_COMPARED_BYTES = 1 << 10  # the entries of a larger array are compared by a checksum of 32 bits


def _header_address(array: Any) -> int:
    """Return the address of a NumPy array's first entry: the field `data` of PyArrayObject in NumPy's C API.

    The field follows the head of the Python object. This read takes a quarter of the time that `__array_interface__`
    takes.
    """
    return _pointer_at(id(array) + _HEAD).value or 0


_pointer_at, _HEAD, _probe = ctypes.c_void_p.from_address, object.__basicsize__, np.zeros(1)
numpy_address = _header_address if _header_address(_probe) == _probe.ctypes.data else lambda array: array.ctypes.data


@dataclass(frozen=True, eq=False)
class Framework:
    """A library of arrays: NumPy, JAX, or another one with the array API. `Torch` is the subclass for torch.

    Kernels read the arrays of these libraries as NumPy arrays. The functions below with the names of methods say
    what the methods return.

    name : the name of the package
    is_native : True for NumPy, torch and JAX, whose arrays can be indexed by lists and by arrays
    has_device : True if a new array needs a device; NumPy has none, and JAX chooses it
    has_memory : True if kernels of the CPU read and write the memory of its arrays
    draw_seed : () → a seed of dropout; the field is None if the caller must give the seed, as with NumPy
    """

    name: str
    is_native: bool = False
    has_device: bool = True
    has_memory: bool = False
    draw_seed: Callable[[], int] | None = None

    def namespace(self, array: Any) -> Any:
        if self is NUMPY and hasattr(np, "astype"):  # NumPy 2.1, which needs no wrapper; its import takes 0.1 s
            return np
        from array_api_compat import array_namespace

        return array_namespace(array)

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array)

    detach = to_numpy

    def min_max(self, array: Any) -> tuple[float, float]:
        """Return (smallest, largest) of the array's entries, (NaN, NaN) if any entry is NaN."""
        array = self.to_numpy(array)
        return float(array.min()), float(array.max())

    address = staticmethod(numpy_address)  # of the first entry

    def strides(self, array: Any) -> tuple[int, ...] | None:
        """Return the strides of the array in bytes; None if the array has no strides."""
        return getattr(array, "strides", None)

    def make_empty(self, shape: tuple[int, ...], dtype: Any, heads_in_rows: bool = False) -> Callable[[], Any]:
        """Return a function without arguments that allocates an array in host memory as `operations.empty` does.

        `dtype` is a dtype of the library or its name.
        """
        dtype = resolve_dtype(np, dtype) if isinstance(dtype, str) else dtype
        if heads_in_rows:
            *lead, heads, positions, width = shape
            memory_shape = *lead, positions, heads, width
            return lambda: np.empty(memory_shape, dtype).swapaxes(-3, -2)
        return partial(np.empty, shape, dtype)

    def count_write(self, array: Any) -> None:
        """Tell the array's library that generated code has written to the array. Only torch counts writes."""

    def finish_lse(self, lse: Any, output: Any) -> Any:
        """Return lse, which is float64, as users receive it: float64 if the output is float64, else float32."""
        return lse.astype(np.float64 if output.dtype == np.float64 else np.float32)


class Torch(Framework):
    """torch, whose tensors have a device and a history."""

    def namespace(self, array: Any) -> Any:
        from array_api_compat import torch  # torch.compile warns about the caches in array_namespace

        return torch

    def to_numpy(self, array: Any) -> Any:
        array = self.detach(array)
        return (array.float() if str(array.dtype) == "torch.bfloat16" else array).cpu().numpy()

    def detach(self, array: Any) -> Any:
        return array.detach().resolve_conj().resolve_neg()

    def min_max(self, array: Any) -> tuple[float, float]:
        if str(array.dtype) in ("torch.uint16", "torch.uint32"):  # torch's aminmax lacks these dtypes
            return super().min_max(array)
        smallest, largest = array.detach().aminmax()  # without a copy to the host, and with all threads
        return float(smallest), float(largest)

    def address(self, array: Any) -> int:
        return array.data_ptr()  # type: ignore[no-any-return]

    def strides(self, array: Any) -> tuple[int, ...] | None:
        has_strides = "strided" in str(array.layout) and not hasattr(array, "mask")
        return tuple([array.itemsize * stride for stride in array.stride()]) if has_strides else None

    def make_empty(self, shape: tuple[int, ...], dtype: Any, heads_in_rows: bool = False) -> Callable[[], Any]:
        torch = sys.modules["torch"]
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if heads_in_rows:
            *lead, heads, positions, width = shape
            strides = torch.empty((*lead, positions, heads, width), device="meta").swapaxes(-3, -2).stride()
            return partial(torch.empty_strided, shape, strides, dtype=dtype, device="cpu")
        example = torch.empty((), dtype=dtype, device="cpu").expand(shape)  # it has the memory of one number
        return partial(torch.empty_like, example)  # half the time of `torch.empty` with a dtype

    def count_write(self, array: Any) -> None:
        sys.modules["torch"].autograd.graph.increment_version(array)

    def finish_lse(self, lse: Any, output: Any) -> Any:
        return lse if output.dtype == lse.dtype else lse.float()


NUMPY = Framework("numpy", is_native=True, has_device=False, has_memory=True)
JAX = Framework("jax", is_native=True, has_device=False)
TORCH = Torch(
    "torch",
    is_native=True,
    has_memory=True,
    draw_seed=lambda: int(sys.modules["torch"].randint(2**63 - 1, (), device="cpu")),
)
_BY_PACKAGE = {"numpy": NUMPY, "jax": JAX, "jaxlib": JAX}
_OTHERS: dict[str, Framework] = {}


def framework(array: Any) -> Framework:
    """Return the library that defines the array's type. Each library has one object, so objects compare by `is`."""
    if isinstance(array, np.ndarray):
        return NUMPY
    torch = sys.modules.get("torch")  # torch.compile cannot trace the bases of torch.nn.Parameter
    if torch is not None and isinstance(array, torch.Tensor):
        return TORCH
    for base in type(array).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _BY_PACKAGE:
            return _BY_PACKAGE[package]
    package = type(array).__module__.partition(".")[0]
    return _OTHERS.setdefault(package, Framework(package))


def is_compiling() -> bool:
    """True while torch.compile traces."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def needs_gradient(array: Any) -> bool:
    """True if torch records a graph and the array requires a gradient."""
    return bool(getattr(array, "requires_grad", False)) and bool(sys.modules["torch"].is_grad_enabled())


_untraced: Callable[..., Any] | None = None


def may_break_graph() -> bool:
    """True while torch.compile traces a function and may break its graph. False in torch.export: it needs one graph."""
    compiler = sys.modules["torch"].compiler if is_compiling() else None  # torch 2.6 has no `is_exporting`
    return compiler is not None and compiler.is_dynamo_compiling() and not getattr(compiler, "is_exporting", bool)()


def untraced() -> Callable[..., Any]:
    """Return a function (function, *arguments) that runs in eager mode. torch.compile breaks its graph here, too."""
    global _untraced
    if _untraced is None:
        _untraced = sys.modules["torch"].compiler.disable(lambda function, *rest, **named: function(*rest, **named))
    return _untraced


def is_traced(array: Any) -> bool:
    """True if the entries of the array are unknown, because torch.compile or JAX traces."""
    return is_compiling() or isinstance(array, getattr(sys.modules.get("jax.core"), "Tracer", ()))


def store_first(values: dict[str, Any], name: str, value: Any) -> Any:
    """Return the value that was first stored under this name, `value` if it is the first one."""
    if is_compiling():  # torch.compile of torch 2.11 does not trace `setdefault` of an object's dict
        values[name] = value
        return value
    return values.setdefault(name, value)  # it is atomic


def namespace(array: Any) -> Any:
    """Return the array-API namespace of the array."""
    return framework(array).namespace(array)


def device(array: Any) -> str:
    """Return the device of the array as text: "cpu", "cuda:0"; "cpu" for JAX, which places its arrays itself."""
    return str(getattr(array, "device", "cpu")) if framework(array).has_device else "cpu"


def device_option(like: Any) -> dict[str, Any]:
    """Return the option `device` of a new array in `like`'s library and on its device; {} if there is none to give."""
    return {"device": like.device} if framework(like).has_device else {}


def place(array: Any) -> str:
    """Return library and device of the array as text, such as "torch on cuda:0"."""
    return f"{framework(array).name} on {device(array)}"


def dtype_name(array: Any) -> str:
    """Return the name of the array's dtype without a package: "float32" for NumPy and for torch, for example."""
    if type(array) is np.ndarray:
        return _numpy_name(array.dtype)
    return str(array.dtype).rpartition(".")[2]


@lru_cache(64)
def _numpy_name(dtype: Any) -> str:
    """Return the name of a NumPy dtype. The name is cached, because NumPy takes microseconds to build it."""
    return str(dtype)


def check_float_dtype(name: str, array: Any) -> None:
    """Raise DtypeError unless the dtype of the array is in `FLOATS`; `name` is the array's name in the message."""
    if dtype_name(array) not in FLOATS:
        raise DtypeError(f"{name} has dtype {dtype_name(array)}", ", ".join(FLOATS), f"cast {name} to one of these")


def accumulator(name: str) -> str:
    """Return the dtype that sums are computed in: "float64" for "float64", "float32" for every narrower float."""
    return "float64" if name == "float64" else "float32"


def resolve_dtype(xp: Any, name: str) -> Any:
    """Return the dtype object that has this name in the namespace.

    NumPy's bfloat16 comes from the package ml_dtypes. Raise DtypeError if that package is needed but not installed.
    """
    if hasattr(xp, name):
        return getattr(xp, name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeError(f"dtype {name} in {xp.__name__}", "dtypes the library has", "pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, name))


def to_numpy(array: Any) -> Any:
    """Return the array as a NumPy array, without a copy if memory can be shared; torch's bfloat16 becomes float32."""
    return framework(array).to_numpy(array)


def to_host(array: Any) -> Any:
    """Return the array itself if it lies in host memory, else a NumPy copy of the array."""
    return array if device(array) == "cpu" else to_numpy(array)


def convert(array: Any, like: Any) -> Any:
    """Return the array converted to the library and the device of `like`, without a copy if both are on the CPU.

    If `array` and `like` come from the same library, `array` itself is returned, even if their devices differ.
    """
    if framework(array) is framework(like):
        return array
    return map_entries(lambda entries: _convert(entries, like), array)


def _convert(array: Any, like: Any) -> Any:
    host = to_numpy(array)
    if not framework(like).has_device:
        return host
    # torch cannot share memory that is read-only, or whose strides are negative or not whole numbers of entries
    if not host.flags.writeable or any(stride < 0 or stride % host.itemsize for stride in host.strides):
        host = host.copy()
    xp = namespace(like)
    if dtype_name(host) == "bfloat16":
        return xp.asarray(host.view(np.int16), device=like.device).view(xp.bfloat16)
    return xp.asarray(host, device=like.device)


def broadcast_to(array: Any, shape: tuple[int, ...]) -> Any:
    """Return the array broadcast to that shape, as a view. Lengths in `shape` may be symbols of torch.compile."""
    if hasattr(array, "expand"):
        return array.expand(shape)
    return (np if isinstance(array, np.ndarray) else namespace(array)).broadcast_to(array, shape)


def swap_heads(array: Any) -> Any:
    """Return a view (..., n, H, d) of an array (..., H, n, d), or the reverse."""
    if hasattr(array, "swapaxes"):
        return array.swapaxes(-3, -2)
    return namespace(array).moveaxis(array, -3, -2)


def drop_repeats(array: Any) -> Any:
    """Return a view of the array in which every axis of stride 0 has length 1; the array itself if it has no such axis.

    Entries repeat along an axis of stride 0. `broadcast_to` makes such axes.
    """
    strides = framework(array).strides(array)
    if strides is None:
        return array
    repeats = [stride == 0 and length > 1 for stride, length in zip(strides, array.shape, strict=True)]
    return array[tuple([slice(0, 1) if one else slice(None) for one in repeats])] if any(repeats) else array


def map_entries(function: Callable[[Any], Any], array: Any) -> Any:
    """Return function(array), for a function that computes each entry of the result from one entry of the array.

    The function is applied to `drop_repeats(array)`. So a copy does not store entries that repeat, and the result is a
    view with the same axes of stride 0.
    """
    entries = drop_repeats(array)
    return function(array) if entries is array else broadcast_to(function(entries), tuple(array.shape))


def detach(array: Any) -> Any:
    """Return the array without its autograd history. A conjugate or negative view of torch is copied to new memory."""
    return framework(array).detach(array)


def address_of(array: Any) -> int:
    """Return the address of the first entry of an array in CPU memory."""
    return int(framework(array).address(array))


def strides_of(array: Any) -> tuple[int, ...]:
    """Return the strides of an array in bytes; () if it has none."""
    return framework(array).strides(array) or ()


def memory_layout(array: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return (name of the dtype, shape, strides in bytes) of an array in CPU memory.

    Code that was made for the memory layout of one array can read another array only if both layouts are equal.
    """
    return dtype_name(array), tuple(array.shape), strides_of(array)


def checksum(array: Any) -> bytes | int:
    """Return a value that changes with the entries of a NumPy array: the bytes of a small array, else their CRC-32."""
    if array.nbytes <= MAX_COMPARED_BYTES:
        return bytes(array.tobytes())
    array = drop_repeats(array)
    return zlib.crc32(array.ravel(order="K").view(np.uint8))


def empty(shape: tuple[int, ...], name: str, like: Any, heads_in_rows: bool = False) -> Any:
    """Return a new array of that shape and dtype with undefined entries, in `like`'s library and in host memory.

    With `heads_in_rows` the axes −3 and −2 are swapped in memory; see `has_heads_in_rows`.
    """
    return framework(like).make_empty(shape, name, heads_in_rows)()


def is_one(length: Any) -> bool:
    """True if the length is 1. While torch.export traces, a length that depends on data counts as longer."""
    return is_true(length == 1)


def is_true(condition: Any) -> bool:
    """Return a condition on lengths; False if a length depends on data and torch.export traces."""
    shapes = sys.modules.get("torch.fx.experimental.symbolic_shapes")
    guard = getattr(shapes, "guard_or_false", getattr(shapes, "guard_size_oblivious", bool))  # the second before 2.7
    return bool(guard(condition))


def has_heads_in_rows(query: Any) -> bool:
    """True if a row of memory holds the heads of a position side by side, as in a view of (B, n, H · d).

    The output of such a query has the same order in memory, so that joining its heads to (B, n, H · d) needs no copy.
    For a query on a GPU the result is False, because the kernels of GPUs write contiguous outputs.
    """
    if query.ndim < 4 or is_one(query.shape[-3]) or is_one(query.shape[-2]) or device(query) != "cpu":
        return False
    *_, head_stride, row_stride, _ = framework(query).strides(query) or ()
    return bool(abs(head_stride) < abs(row_stride))


def itemsize(dtype: str) -> int:
    """Return the bytes of one number of the dtype."""
    return {"float16": 2, "bfloat16": 2, "float32": 4}.get(dtype, 8)
