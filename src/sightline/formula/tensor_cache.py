"""What was found out about formulas, kept while the arrays they read live and are not written to.

Arrays on a device are worth it: to look at their entries waits for all the device has to do. torch counts what it
writes to a tensor, so one seen before with the same count has the same entries; whoever writes past torch, as a kernel
of their own does, calls `torch.autograd.graph.increment_version`. Nothing counts what is written to arrays in the
host's memory: these are looked at each time.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..arrays import convert, framework

__all__ = ["TensorCache", "identity", "retain", "to_device"]

UNVERSIONED_DEVICES = ("cpu", "meta")  # places whose arrays may be written to without torch, or hold nothing
MAX_HASHED_BYTES = 1 << 18  # bytes up to which arrays of the host are told by what they hold

Value = TypeVar("Value")


class TensorCache:
    """At most that many findings, those used last."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.entries: OrderedDict[Hashable, tuple[list[weakref.ref[Any]], Any]] = OrderedDict()
        self.lock = threading.RLock()  # an array may end, and so call `evict`, while it is held

    def get(self, tag: Hashable, arrays: Sequence[Any], compute: Callable[[], Value]) -> Value:
        """find(), or what it gave when the same was asked of the same arrays; it must not hold on to them."""
        identities = [identity(array) for array in arrays]
        if any(one is None for one in identities):
            return compute()
        key = (tag, tuple(identities))
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                value: Value = self.entries[key][1]
                return value
        value = compute()
        owners = [weakref.ref(_base_tensor(array), lambda _: self.evict(key)) for array in arrays]
        with self.lock:
            self.entries[key] = owners, value
            while len(self.entries) > self.max_entries:
                self.entries.popitem(last=False)
        return value

    def evict(self, key: Hashable) -> None:
        with self.lock:
            self.entries.pop(key, None)


def to_device(array: Any, like: Any) -> Any:
    """`arrays.convert`; small arrays of the host, as slopes and lengths are, stay on the device once they are there."""
    is_on_device = framework(like) == "torch" and like.device.type not in UNVERSIONED_DEVICES
    if not is_on_device or not isinstance(array, np.ndarray) or array.nbytes > MAX_HASHED_BYTES:
        return convert(array, like)
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest()
    tag = digest, array.shape, array.dtype.str, str(like.device)
    return retain(_DEVICE_COPIES.get(tag, [], lambda: _convert_outside_inference(array.copy(), like)), like)


def retain(value: Value, like: Any) -> Value:
    """What a memory keeps on `like`'s device; for good where a CUDA graph is being captured, whose replays read it.

    Where the memory lets go of it, nobody gets its place before the stream that reads it now is done.
    """
    if like.is_cuda:
        stream = _framework_of(like).cuda.current_stream(like.device)
        for part in value if isinstance(value, tuple) else (value,):
            if hasattr(part, "record_stream"):
                part.record_stream(stream)
    if _is_capturing(like):
        _RETAINED[id(value)] = value
    return value


def _is_capturing(like: Any) -> bool:
    return bool(like.is_cuda) and bool(_framework_of(like).cuda.is_current_stream_capturing())


def identity(array: Any) -> Hashable:
    """What tells the array and its entries from all others that live; None where nothing does."""
    if framework(array) != "torch" or array.device.type in UNVERSIONED_DEVICES or array.is_inference():
        return None
    return id(_base_tensor(array)), array.data_ptr(), array.shape, array.stride(), array.dtype, array._version


def _convert_outside_inference(array: Any, like: Any) -> Any:
    """`arrays.convert` to a tensor that calls outside torch.inference_mode may take too."""
    with _framework_of(like).inference_mode(False):
        return convert(array, like)


def _framework_of(array: Any) -> Any:
    """The package that made the array, which is loaded; formulas load none."""
    return sys.modules[framework(array)]


def _base_tensor(array: Any) -> Any:
    """The tensor whose life is that of the entries: a view is made anew for every call."""
    return array if array._base is None else array._base


_DEVICE_COPIES = TensorCache(256)
_RETAINED: dict[int, Any] = {}
