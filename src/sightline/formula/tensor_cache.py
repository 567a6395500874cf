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

__all__ = ["Memory", "held", "identity", "near"]

UNCOUNTED = ("cpu", "meta")  # places whose arrays may be written to without torch, or hold nothing
SMALL = 1 << 18  # bytes up to which arrays of the host are told by what they hold

Found = TypeVar("Found")


class Memory:
    """At most that many findings, those used last."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.found: OrderedDict[Hashable, tuple[list[weakref.ref[Any]], Any]] = OrderedDict()
        self.lock = threading.RLock()  # an array may end, and so call `forget`, while it is held

    def get(self, question: Hashable, arrays: Sequence[Any], find: Callable[[], Found]) -> Found:
        """find(), or what it gave when the same was asked of the same arrays; it must not hold on to them."""
        identities = [identity(array) for array in arrays]
        if any(one is None for one in identities):
            return find()
        key = (question, tuple(identities))
        with self.lock:
            if key in self.found:
                self.found.move_to_end(key)
                answer: Found = self.found[key][1]
                return answer
        answer = find()
        owners = [weakref.ref(_owner(array), lambda _: self.forget(key)) for array in arrays]
        with self.lock:
            self.found[key] = owners, answer
            while len(self.found) > self.most:
                self.found.popitem(last=False)
        return answer

    def forget(self, key: Hashable) -> None:
        with self.lock:
            self.found.pop(key, None)


def near(array: Any, like: Any) -> Any:
    """`arrays.convert`; small arrays of the host, as slopes and lengths are, stay on the device once they are there."""
    elsewhere = framework(like) == "torch" and like.device.type not in UNCOUNTED
    if not elsewhere or not isinstance(array, np.ndarray) or array.nbytes > SMALL:
        return convert(array, like)
    content = hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest()
    question = content, array.shape, array.dtype.str, str(like.device)
    return held(_NEAR.get(question, [], lambda: _for_all(array.copy(), like)), like)


def held(answer: Found, like: Any) -> Found:
    """What a memory keeps on `like`'s device; for good where a CUDA graph is being captured, whose replays read it.

    Where the memory lets go of it, nobody gets its place before the stream that reads it now is done.
    """
    if like.is_cuda:
        stream = _maker(like).cuda.current_stream(like.device)
        for part in answer if isinstance(answer, tuple) else (answer,):
            if hasattr(part, "record_stream"):
                part.record_stream(stream)
    if _captured(like):
        _HELD[id(answer)] = answer
    return answer


def _captured(like: Any) -> bool:
    return bool(like.is_cuda) and bool(_maker(like).cuda.is_current_stream_capturing())


def identity(array: Any) -> Hashable:
    """What tells the array and its entries from all others that live; None where nothing does."""
    if framework(array) != "torch" or array.device.type in UNCOUNTED or array.is_inference():
        return None
    return id(_owner(array)), array.data_ptr(), array.shape, array.stride(), array.dtype, array._version


def _for_all(array: Any, like: Any) -> Any:
    """`arrays.convert` to a tensor that calls outside torch.inference_mode may take too."""
    with _maker(like).inference_mode(False):
        return convert(array, like)


def _maker(array: Any) -> Any:
    """The package that made the array, which is loaded; formulas load none."""
    return sys.modules[framework(array)]


def _owner(array: Any) -> Any:
    """The tensor whose life is that of the entries: a view is made anew for every call."""
    return array if array._base is None else array._base


_NEAR = Memory(256)
_HELD: dict[int, Any] = {}
