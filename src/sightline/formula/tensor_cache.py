"""A cache of results about formulas. A result is valid until an array that the formulas read is freed or written to.

The cache saves time for arrays on a device, because a read of their entries waits for all work queued on the device.
torch counts the writes to a tensor, so a tensor with the same count has the same entries. A kernel that writes to a
tensor without torch must call `torch.autograd.graph.increment_version`. NumPy does not count the writes to an array, so
results about arrays in host memory are computed on every call.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from ..arrays.operations import TORCH, convert, framework

UNVERSIONED_DEVICES = ("cpu", "meta")  # host arrays can be written to without torch; meta arrays have no entries
MAX_HASHED_BYTES = 1 << 18  # a host array of at most this many bytes is identified by a hash of its entries

T = TypeVar("T")


class TensorCache:
    """A cache of at most `max_entries` results, which drops the least recently used result first.

    It has no lock, because each method of the dictionary is one atomic function in C. A fork or an interrupt could
    leave a lock held. A thread that holds a lock could free an array, which calls `evict` and would wait forever.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.entries: OrderedDict[Hashable, tuple[list[weakref.ref[Any]], Any]] = OrderedDict()

    def get(self, tag: Hashable, arrays: Sequence[Any], compute: Callable[[], T]) -> T:
        """Return the cached result for this tag and these arrays; if there is none, compute and cache it.

        The result must not hold references to the arrays. A cached result is dropped when one of its arrays is freed.
        Nothing is cached if `identity` of an array is None.
        """
        identities = [identity(array) for array in arrays]
        if None in identities:
            return compute()
        key = (tag, tuple(identities))
        entry = self.entries.get(key)
        if entry is not None:
            with suppress(KeyError):  # another thread has just dropped the entry
                self.entries.move_to_end(key)
            cached: T = entry[1]
            return cached
        value = compute()
        owners = [weakref.ref(_base_tensor(array), lambda _: self.evict(key)) for array in arrays]
        self.entries[key] = owners, value
        with suppress(KeyError):  # other threads have dropped all entries
            while len(self.entries) > self.max_entries:
                self.entries.popitem(last=False)
        return value

    def evict(self, key: Hashable) -> None:
        self.entries.pop(key, None)


def to_device(array: Any, like: Any) -> Any:
    """Return `arrays.operations.convert(array, like)`. The copy of a small NumPy array on a device is cached."""
    if not _is_versioned(like) or not isinstance(array, np.ndarray) or array.nbytes > MAX_HASHED_BYTES:
        return convert(array, like)
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest()
    tag = digest, array.shape, array.dtype.str, str(like.device)
    return retain(_DEVICE_COPIES.get(tag, [], lambda: _convert_outside_inference(array.copy(), like)), like)


def retain(value: T, like: Any) -> T:
    """Return `value`, which a kernel on `like`'s device is about to read, and protect the memory of its tensors.

    The tensors are recorded on the current stream, so that their memory is not reused before the stream has read them.
    While a CUDA graph is captured, `value` is kept forever, because every replay of the graph reads it.
    """
    if like.is_cuda:
        stream = sys.modules["torch"].cuda.current_stream(like.device)
        for part in value if isinstance(value, tuple) else (value,):
            if hasattr(part, "record_stream"):
                part.record_stream(stream)
    if _is_capturing(like):
        _RETAINED[id(value)] = value
    return value


def _is_capturing(like: Any) -> bool:
    return bool(like.is_cuda) and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def identity(array: Any) -> Hashable:
    """Return a key for a tensor and its contents. No other existing tensor has this key, and a write changes the key.

    The result is None if the array is no torch tensor, lies on the CPU or on meta, or is an inference tensor.
    """
    if not _is_versioned(array) or array.is_inference():
        return None
    return id(_base_tensor(array)), array.data_ptr(), array.shape, array.stride(), array.dtype, array._version


def _convert_outside_inference(array: Any, like: Any) -> Any:
    """Convert as `arrays.operations.convert` does. The tensor may be used outside torch.inference_mode too."""
    with sys.modules["torch"].inference_mode(False):
        return convert(array, like)


def _is_versioned(array: Any) -> bool:
    """True for a tensor of torch on a device, whose writes torch counts."""
    return framework(array) is TORCH and array.device.type not in UNVERSIONED_DEVICES


def _base_tensor(array: Any) -> Any:
    """Return the tensor itself, or the base of a view: every call may make a new view, but not a new base."""
    return array if array._base is None else array._base


_DEVICE_COPIES = TensorCache(256)
_RETAINED: dict[int, Any] = {}
