"""A machine of NumPy that runs Gluon kernels: their own Python, with a stand-in for the language.

Triton's interpreter knows nothing of Gluon. Here a kernel's functions run as they are written, with `gl`, `tl`, `tma`,
`mbarrier` and `warpgroup_mma` replaced. What makes such a kernel hard is kept: groups of warps run as threads, one at a
time, and a random number decides at every wait, arrival and asynchronous instruction who goes on and which copy or
product is done next. Memory a copy will write is NaN from the moment it is asked for, memory is read when a product is
done, not when it is asked for, and the sum of a product cannot be had before it is waited for. So a barrier too few, a
phase mistaken or memory given back too early is a wrong result, and a barrier too many is an error that names who waits.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITCallable

ROUNDED = {gl.bfloat16: ml_dtypes.bfloat16, gl.float16: np.float16}
STORED = {
    gl.bfloat16: np.float32, gl.float16: np.float32, gl.float32: np.float32, gl.float64: np.float64,
    gl.int1: np.bool_, gl.int32: np.int32, gl.int64: np.int64,
}  # fmt: skip


class Block(np.ndarray):
    type = SimpleNamespace(layout=None)
    """A tensor of the language: an array that rounds as its type does; whole numbers divide toward zero."""

    def to(self, dtype: Any, **_: Any) -> Block:
        rounded = self.astype(ROUNDED[dtype]) if dtype in ROUNDED else self
        return np.asarray(rounded).astype(STORED[dtype]).view(Block)

    def __floordiv__(self, other: Any) -> Any:
        return block(np.trunc(np.true_divide(self, other)).astype(np.result_type(self, other)))

    def __mod__(self, other: Any) -> Any:
        return block(np.fmod(self, other))


def block(value: Any) -> Block:
    return np.asarray(value).view(Block)


class Pointer:
    """An address in an array: what is added counts elements."""

    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.offset + offset)


class Shared:
    """Shared memory, or a view of it, NaN until it is written."""

    def __init__(self, array: np.ndarray, dtype: Any, fenced: set[int]) -> None:
        self.array, self.dtype, self.shape, self.unfenced = array, dtype, list(array.shape), fenced

    def _view(self, array: np.ndarray) -> Shared:
        assert np.shares_memory(array, self.array)
        return Shared(array, self.dtype, self.unfenced)

    def index(self, place: int) -> Shared:
        assert 0 <= place < len(self.array)
        return self._view(self.array[place])

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(self.array.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(self.array.transpose(order))

    def store(self, value: Block) -> None:
        self.array[...] = value
        self.unfenced.add(threading.get_ident())


class Barrier:
    """An mbarrier: a phase ends when all who count have arrived and every byte that was expected has."""

    def __init__(self) -> None:
        self.count = self.phase = self.waiting = self.missing = 0

    def arrive(self, count: int = 1) -> None:
        assert 0 < count <= self.waiting, "more arrivals than the barrier counts"
        self.waiting -= count
        self._end()

    def received(self, size: int) -> None:
        self.missing -= size
        self._end()

    def _end(self) -> None:
        if self.waiting == 0 and self.missing == 0:
            self.phase, self.waiting = self.phase + 1, self.count


class Barriers:
    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, place: int) -> Barrier:
        assert 0 <= place < len(self.all)
        return self.all[place]


class Descriptor:
    """A matrix copied in tiles: what lies outside is read as 0 and not written."""

    def __init__(self, tensor: torch.Tensor, block_shape: list[int], dtype: Any) -> None:
        self.array = tensor.float().numpy() if tensor.dtype != torch.float32 else tensor.numpy()
        self.block_shape, self.dtype, self.layout, self.tensor = block_shape, dtype, None, tensor
        self.nbytes_per_cta = math.prod(block_shape)

    def _slices(self, corner: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        here, there = [], []
        for first, length, size in zip(corner, self.block_shape, self.array.shape, strict=True):
            assert first >= 0
            inside = max(0, min(length, size - first))
            here.append(slice(0, inside))
            there.append(slice(first, first + inside))
        return tuple(here), tuple(there)

    def load(self, corner: list[int], memory: Shared) -> None:
        here, there = self._slices(corner)
        tile = np.zeros(self.block_shape, np.float32)
        tile[here] = self.array[there]
        memory.array[...] = tile.reshape(memory.array.shape)

    def store(self, corner: list[int], memory: Shared) -> None:
        here, there = self._slices(corner)
        tile = torch.from_numpy(memory.array.reshape(self.block_shape)[here].copy())
        self.tensor[there] = tile.to(self.tensor.dtype)


class Product:
    """A sum of products that is on its way."""

    def __init__(self) -> None:
        self.value: Block | None = None


class Stop(BaseException):
    """Ends the threads of a machine that has failed."""


class Warps:
    """A group of warps: a thread, what it waits for, and its products and stores in order."""

    def __init__(self, name: str) -> None:
        self.name, self.go = name, threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.why, self.done = "", False
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []


class Machine:
    """One block of threads at a time; `seed` decides the order in which everything happens."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.back = threading.Semaphore(0)
        self.warps: list[Warps] = []
        self.loads: list[Callable[[], None]] = []
        self.failure: BaseException | None = None
        self.program = (0, 0, 0)
        self.unfenced: set[int] = set()
        self.here = threading.local()
        self.known: dict[int, Any] = {}
        self.stands = self._language()

    def launch(self, kernel: JITCallable, grid: tuple[int, ...], *arguments: Any) -> None:
        """The kernel for every program of the grid, in a random order."""
        function = self.emulated(kernel)
        programs = list(np.ndindex(*grid, *(1,) * (3 - len(grid))))
        self.random.shuffle(programs)
        for self.program in programs:
            with np.errstate(all="ignore"):
                function(*(self._argument(a) for a in arguments))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, JITCallable):
            return self.emulated(value)
        if isinstance(value, tuple):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, torch.Tensor):
            return Pointer(value.view(-1).numpy())
        return value

    # the language

    def emulated(self, jit: JITCallable) -> Callable[..., Any]:
        """The function with this machine's words in the place of the language's."""
        if id(jit) not in self.known:
            room: dict[str, Any] = {}
            function = FunctionType(jit.fn.__code__, room, jit.fn.__name__, jit.fn.__defaults__)
            self.known[id(jit)] = function
            for name, value in jit.fn.__globals__.items():
                room[name] = self._word(value)
        return self.known[id(jit)]

    def _word(self, value: Any) -> Any:
        if isinstance(value, JITCallable):
            return lambda *a, **k: self.emulated(value)(*a, **k)
        if isinstance(value, tl.constexpr):
            return value.value
        hashable = isinstance(value, ModuleType) or callable(value)
        return self.stands.get(value, value) if hashable and value.__hash__ is not None else value

    def _language(self) -> dict[Any, Any]:
        def reduced(how: Callable[..., Any]) -> Callable[..., Any]:
            return lambda value, axis=None, **_: block(how(value, axis=axis))

        def elementwise(how: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *values, **_: block(how(*values))

        names: dict[str, Any] = {
            name: elementwise(getattr(np, name))
            for name in ("where", "maximum", "minimum", "exp", "exp2", "log", "log2", "sqrt", "floor", "ceil", "abs",
                         "sin", "cos")
        }  # fmt: skip
        names |= {
            "max": reduced(np.max),
            "sum": reduced(np.sum),
            "arange": lambda start, end, *_: block(np.arange(start, end, dtype=np.int32)),
            "zeros": lambda shape, dtype, *_: block(np.zeros(shape, STORED[dtype])),
            "full": lambda shape, value, dtype, *_: block(np.full(shape, value, STORED[dtype])),
            "cast": lambda value, dtype, **_: block(value).to(dtype),
            "convert_layout": lambda value, *_, **__: value,
            "static_range": range,
            "static_assert": lambda condition, *_: None,
            "program_id": lambda axis: block(np.int32(self.program[axis])),
            "broadcast": lambda *values: tuple(map(block, np.broadcast_arrays(*values))),
            "fma": lambda x, y, z: block(x * y + z),
            "PropagateNan": tl.PropagateNan,
            "load": self._load,
            "store": self._store,
            "allocate_shared_memory": lambda dtype, shape, *_: Shared(
                np.full(shape, np.nan, np.float32), dtype, self.unfenced
            ),
            "warp_specialize": self._specialize,
            "inf": math.inf,
            "constexpr": None,
            "tensor": Block,
        }
        names |= {word: lambda *_, **__: None for word in ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout")}
        names |= {dtype.name: dtype for dtype in STORED}
        names |= {"int1": gl.int1, "float32": gl.float32, "float64": gl.float64, "int32": gl.int32, "int64": gl.int64,
                  "bfloat16": gl.bfloat16, "float16": gl.float16}  # fmt: skip
        language = SimpleNamespace(**names)
        language.math = language
        barriers = SimpleNamespace(
            allocate_mbarrier=lambda batch: Barriers(batch), init=self._init, expect=self._expect,
            arrive=self._arrive, wait=self._wait,
        )  # fmt: skip
        copies = SimpleNamespace(async_load=self._async_load, async_store=self._async_store, store_wait=self._store_wait)
        return {
            gl: language,
            tl: language,
            hopper.mbarrier: barriers,
            hopper.tma: copies,
            hopper.warpgroup_mma: self._product,
            hopper.warpgroup_mma_wait: self._product_wait,
            hopper.fence_async_shared: self._fence,
        }

    def _load(self, pointer: Pointer, mask: Any = True, other: Any = 0, **_: Any) -> Any:
        places, mask = np.broadcast_arrays(pointer.offset, mask)
        flat = pointer.array.reshape(-1)
        assert np.all((places >= 0) & (places < flat.size) | ~mask), "a read outside the array"
        value = flat[np.where(mask, places, 0)]
        return block(np.where(mask, value, np.asarray(other, flat.dtype)))

    def _store(self, pointer: Pointer, value: Any, mask: Any = True, **_: Any) -> None:
        places, value, mask = np.broadcast_arrays(pointer.offset, value, mask)
        flat = pointer.array.reshape(-1)
        assert np.all((places >= 0) & (places < flat.size) | ~mask), "a write outside the array"
        flat[places[mask]] = value[mask]

    # what goes on beside the threads

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.waiting = count

    def _expect(self, barrier: Barrier, size: int) -> None:
        barrier.missing += size
        barrier.arrive()
        self._pause("", lambda: True)

    def _arrive(self, barrier: Barrier, *, count: int = 1) -> None:
        barrier.arrive(count)
        self._pause("", lambda: True)

    def _wait(self, barrier: Barrier, parity: int) -> None:
        self._pause(f"a barrier to end a phase of parity {parity}", lambda: barrier.phase & 1 != parity)

    def _async_load(self, matrix: Descriptor, corner: list[int], barrier: Barrier, memory: Shared) -> None:
        memory.array[...] = np.nan

        def done() -> None:
            matrix.load(corner, memory)
            barrier.received(matrix.nbytes_per_cta)

        self.loads.append(done)
        self._pause("", lambda: True)

    def _fence(self) -> None:
        self.unfenced.discard(threading.get_ident())

    def _async_store(self, matrix: Descriptor, corner: list[int], memory: Shared) -> None:
        assert threading.get_ident() not in self.unfenced, "memory written, not fenced, and read by a copy"
        self.here.warps.stores.append(lambda: matrix.store(corner, memory))
        self._pause("", lambda: True)

    def _store_wait(self, pending: int) -> None:
        stores = self.here.warps.stores
        self._pause("its stores", lambda: len(stores) <= pending)

    def _product(self, a: Any, b: Shared, total: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async, "products here are asynchronous"
        product = Product()

        def done() -> None:
            left = a.array if isinstance(a, Shared) else a
            product.value = block(left @ b.array + total if use_acc else left @ b.array).astype(np.float32)

        self.here.warps.products.append(done)
        self._pause("", lambda: True)
        return product

    def _product_wait(self, outstanding: int, deps: list[Any]) -> Any:
        products = self.here.warps.products
        self._pause("its products", lambda: len(products) <= outstanding)
        values = tuple(d.value if isinstance(d, Product) else d for d in deps)
        assert all(v is not None for v in values), "a sum taken before it was waited for"
        return values[0] if len(values) == 1 else values

    # who goes next

    def _specialize(self, parts: list[tuple[Callable[..., Any], tuple[Any, ...]]], *_: Any) -> None:
        self.warps = [Warps(f"group {place}, {function.__name__}") for place, (function, _) in enumerate(parts)]
        threads = [
            threading.Thread(target=self._run, args=(warps, function, arguments), daemon=True)
            for warps, (function, arguments) in zip(self.warps, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            self._schedule()
        finally:
            for warps in self.warps:
                warps.go.release()  # whoever still waits ends
            for thread in threads:
                thread.join()
        assert not self.loads, "a copy nobody waited for"
        assert not any(warps.products or warps.stores for warps in self.warps), "work nobody waited for"

    def _schedule(self) -> None:
        while not all(warps.done for warps in self.warps):
            choices = list(self._choices())
            if not choices:
                self.failure = AssertionError(
                    "nobody can go on: " + "; ".join(f"{w.name} waits for {w.why}" for w in self.warps if not w.done)
                )
                raise self.failure
            self.random.choice(choices)()
            if self.failure is not None:
                raise self.failure

    def _choices(self) -> Iterator[Callable[[], None]]:
        for warps in self.warps:
            if not warps.done and warps.ready():
                yield lambda warps=warps: self._continue(warps)
            for queue in (warps.products, warps.stores):  # each in its own order
                if queue:
                    yield lambda queue=queue: queue.pop(0)()
        for load in self.loads:
            yield lambda load=load: (self.loads.remove(load), load())  # type: ignore[func-returns-value]

    def _continue(self, warps: Warps) -> None:
        warps.go.release()
        self.back.acquire()

    def _pause(self, why: str, ready: Callable[[], bool]) -> None:
        """Let somebody else go on, until `ready`."""
        warps = getattr(self.here, "warps", None)
        if warps is None:  # before there are groups
            return
        warps.why, warps.ready = why, ready
        self.back.release()
        warps.go.acquire()
        if self.failure is not None:
            raise Stop

    def _run(self, warps: Warps, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.here.warps = warps
        warps.go.acquire()
        try:
            with np.errstate(all="ignore"):
                if self.failure is None:
                    function(*arguments)
        except Stop:
            return
        except BaseException as error:
            self.failure = error
        warps.done = True
        self.back.release()
