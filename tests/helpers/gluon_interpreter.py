"""An interpreter of Gluon kernels in NumPy, since Triton's interpreter does not support Gluon.

The functions of a kernel run as Python, with `gl`, `tl`, `tma`, `mbarrier` and `warpgroup_mma` replaced. Concurrency is
modelled: warpgroups run as threads, one at a time. At every wait, arrival and asynchronous instruction a random number
decides which thread continues, and which copy or product completes next. The target of a copy is NaN from the start of
the copy to its end. A product reads its operands when it completes, not when it starts, and its result is not available
before a wait. So a missing barrier, a wrong phase, or memory released too early gives a wrong result, and a barrier too
many raises an error that names the waiting warps.

Layouts, the order of sums in a product, and time are not modelled.
"""

from __future__ import annotations

import inspect
import math
import random
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import libdevice
from triton.runtime.jit import JITCallable

from sightline.gpu.codegen import gluon_language

ROUNDED = {gl.bfloat16: ml_dtypes.bfloat16, gl.float16: np.float16}
STORED = dict.fromkeys((gl.bfloat16, gl.float16, gl.float32), np.float32) | {
    gl.float64: np.float64,
    gl.int1: np.bool_,
    gl.int32: np.int32,
    gl.int64: np.int64,
}
DTYPES = ("bfloat16", "float16", "float32", "float64", "int1", "int32", "int64")
ELEMENTWISE = (
    "where",
    "maximum",
    "minimum",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "sin",
    "cos",
    "floor",
    "ceil",
    "abs",
)
LAYOUTS = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout")


class Block(np.ndarray):
    """A tensor: an array with the rounding of its dtype, whose integers divide toward zero."""

    type = SimpleNamespace(layout=None)

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Block:
        return array.view(Block)  # scalars stay blocks

    def to(self, dtype: Any) -> Block:
        rounded = self.astype(ROUNDED[dtype]) if dtype in ROUNDED else self
        return np.asarray(rounded).astype(STORED[dtype]).view(Block)

    def __floordiv__(self, other: Any) -> Block:
        down = np.floor_divide(np.asarray(self), other)
        return block(down + ((down * other != self) & ((self < 0) != (other < 0))))

    def __mod__(self, other: Any) -> Block:
        return block(np.fmod(np.asarray(self), other))


def block(value: Any) -> Block:
    return np.asarray(value).view(Block)


class Pointer:
    """A pointer into an array; offsets count entries."""

    def __init__(self, array: np.ndarray, offset: Any) -> None:
        self.array, self.offset = array, offset

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls((memory.float() if tensor.dtype == torch.bfloat16 else memory).numpy(), tensor.storage_offset())

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.offset + offset)


class Shared:
    """Shared memory, or a view of it; NaN until it is written."""

    def __init__(self, array: np.ndarray, dtype: Any, fenced: set[int]) -> None:
        self.array, self.dtype, self.shape, self.unfenced = array, dtype, list(array.shape), fenced

    def _view(self, array: np.ndarray) -> Shared:
        assert np.shares_memory(array, self.array)
        return Shared(array, self.dtype, self.unfenced)

    def index(self, place: int) -> Shared:
        assert 0 <= place < len(self.array)
        return self._view(self.array[int(place)])

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(self.array.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(self.array.transpose(order))

    def store(self, value: Block) -> None:
        self.array[...] = value
        self.unfenced.add(threading.get_ident())


class Barrier:
    """An mbarrier: a phase ends when `count` arrivals and all expected bytes have arrived."""

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
    def __init__(self, batch: int) -> None:
        self.all = [Barrier() for _ in range(batch)]

    def index(self, place: int) -> Barrier:
        assert 0 <= place < len(self.all)
        return self.all[place]


class Matrices:
    """A tensor that is copied in tiles: entries outside the tensor are read as 0 and not written."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        base = descriptor.base
        self.tensor = base.as_strided(descriptor.shape, descriptor.strides, base.storage_offset())
        self.block_shape, self.layout = descriptor.block_shape, None
        self.dtype = getattr(gl, str(base.dtype).removeprefix("torch."))
        self.nbytes_per_cta = math.prod(self.block_shape) * base.element_size()

    def _inside(self, corner: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the slices of the tile and of the tensor where both overlap."""
        assert all(first >= 0 for first in corner)
        there = tuple(
            slice(int(first), max(int(first), min(int(first) + length, size)))
            for first, length, size in zip(corner, self.block_shape, self.tensor.shape, strict=True)
        )
        return tuple(slice(0, part.stop - part.start) for part in there), there

    def load(self, corner: list[Any], memory: Shared) -> None:
        here, there = self._inside(corner)
        tile = np.zeros(self.block_shape, np.float32)
        tile[here] = self.tensor[there].float().numpy()
        memory.array[...] = tile.reshape(memory.array.shape)

    def store(self, corner: list[Any], memory: Shared) -> None:
        here, there = self._inside(corner)
        self.tensor[there] = torch.from_numpy(memory.array.reshape(self.block_shape)[here].copy()).to(self.tensor.dtype)


class Product:
    """An asynchronous matrix product; `value` is None until it completes."""

    def __init__(self) -> None:
        self.value: Block | None = None


class Stop(BaseException):
    """Ends the threads of a failed machine."""


class Warps:
    """A group of warps: a thread, the condition it waits for, and its pending products and stores in order."""

    def __init__(self, name: str) -> None:
        self.name, self.go = name, threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.why, self.done = "", False
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []


def broken(function: JITCallable, before: str, after: str) -> FunctionType:
    """Return a function whose source has the text `after` in place of `before`."""
    source = textwrap.dedent(inspect.getsource(function.fn))
    assert source.count(before) == 1, f"{before!r} occurs {source.count(before)} times in {function.__name__}, not once"
    namespace = dict(function.fn.__globals__)
    exec(source[source.index("def ") :].replace(before, after), namespace)
    return namespace[function.__name__]


class Machine:
    """Runs the programs of a kernel one at a time; `seed` determines the order of all events.

    `instead` maps functions to the functions that replace them.
    """

    def __init__(self, seed: int, instead: Mapping[JITCallable, FunctionType] | None = None) -> None:
        self.random = random.Random(seed)
        self.instead = {id(function): other for function, other in (instead or {}).items()}
        self.program = 0
        self.warps: list[Warps] = []
        self.loads: list[Callable[[], None]] = []
        self.failure: BaseException | None = None
        self.unfenced: set[int] = set()
        self.here = threading.local()
        self.back = threading.Semaphore(0)
        self.emulated_functions: dict[int, FunctionType] = {}
        self.replacements = self._language()

    def launch(self, kernel: JITCallable, programs: int, **arguments: Any) -> None:
        """Run every program of the kernel, in a random order."""
        function = self.emulated(kernel)
        annotations = kernel.fn.__annotations__
        converted = {name: self._argument(value, str(annotations.get(name))) for name, value in arguments.items()}
        for program in self.random.sample(range(programs), programs):
            self.program = program
            with np.errstate(all="ignore"):
                function(**converted)

    def _argument(self, value: Any, kind: str = "") -> Any:
        if isinstance(value, JITCallable):
            return self.emulated(value)
        if isinstance(value, tuple):
            parts = [self._argument(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, TensorDescriptor):
            return Matrices(value)
        if isinstance(value, torch.Tensor):
            return Pointer.to(value)
        if isinstance(value, float):
            return block(np.float64(value) if "float64" in kind else np.float32(value))
        if isinstance(value, int):
            return block(np.int32(value) if abs(value) < 2**31 else np.int64(value))
        return value

    # -- the language

    def emulated(self, jit: JITCallable) -> FunctionType:
        """Return the function with the language replaced by this machine."""
        if id(jit) not in self.emulated_functions:
            function = self.instead.get(id(jit), jit.fn)
            scope: dict[str, Any] = {"__builtins__": __builtins__}
            emulated = FunctionType(function.__code__, scope, jit.__name__, function.__defaults__)
            self.emulated_functions[id(jit)] = emulated
            for name, value in function.__globals__.items():
                scope.setdefault(name, self._global(value))
        return self.emulated_functions[id(jit)]

    def _global(self, value: Any) -> Any:
        if isinstance(value, JITCallable):
            return lambda *args, **kwargs: self.emulated(value)(*args, **kwargs)
        if isinstance(value, tl.constexpr):
            return value.value
        return self.replacements.get(value, value) if isinstance(value, ModuleType) or callable(value) else value

    def _language(self) -> dict[Any, Any]:
        def lifted(function: Callable[..., Any]) -> Callable[..., Block]:
            return lambda *values, **_: block(function(*values))

        names: dict[str, Any] = {name: lifted(getattr(np, name)) for name in ELEMENTWISE}
        names |= {name: lambda *_, **__: None for name in LAYOUTS}
        names |= {name: getattr(gl, name) for name in DTYPES}
        names |= {
            "constexpr": None,
            "PropagateNan": tl.PropagateNan,
            "static_range": range,
            "program_id": lambda axis: block(np.int32(self.program)),
            "arange": lambda start, end, *_: block(np.arange(start, end, dtype=np.int32)),
            "zeros": lambda shape, dtype, *_: block(np.zeros(shape, STORED[dtype])),
            "full": lambda shape, value, dtype, *_: block(np.full(shape, value, STORED[dtype])),
            "cast": lambda value, dtype: block(value).to(dtype),
            "convert_layout": lambda value, *_, **__: value,
            "broadcast": lambda *values: tuple(map(block, np.broadcast_arrays(*values))),
            "max": lifted(np.max),
            "sum": lifted(np.sum),
            "fma": lifted(lambda x, y, z: x * y + z),
            "load": self._load,
            "store": self._store,
            "allocate_shared_memory": self._allocate,
            "warp_specialize": self._specialize,
        }
        language = SimpleNamespace(**names)
        barriers = SimpleNamespace(
            allocate_mbarrier=Barriers, init=self._init, expect=self._expect, arrive=self._arrive, wait=self._wait
        )
        copies = SimpleNamespace(
            async_load=self._async_load, async_store=self._async_store, store_wait=self._store_wait
        )
        return {
            **dict.fromkeys([gl, tl, gluon_language], language),
            libdevice: SimpleNamespace(exp=lifted(np.exp), pow=lifted(np.power), tanh=lifted(np.tanh)),
            hopper.mbarrier: barriers,
            hopper.tma: copies,
            hopper.warpgroup_mma: self._product,
            hopper.warpgroup_mma_wait: self._product_wait,
            hopper.fence_async_shared: self._fence,
        }

    def _allocate(self, dtype: Any, shape: list[int], *_: Any) -> Shared:
        return Shared(np.full(shape, np.nan, np.float32), dtype, self.unfenced)

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

    # -- asynchronous operations

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

    def _async_load(self, matrix: Matrices, corner: list[int], barrier: Barrier, memory: Shared) -> None:
        memory.array[...] = np.nan

        def done() -> None:
            matrix.load(corner, memory)
            barrier.received(matrix.nbytes_per_cta)

        self.loads.append(done)
        self._pause("", lambda: True)

    def _fence(self) -> None:
        self.unfenced.discard(threading.get_ident())

    def _async_store(self, matrix: Matrices, corner: list[int], memory: Shared) -> None:
        assert threading.get_ident() not in self.unfenced, "a copy reads memory that was written without a fence"
        self.here.warps.stores.append(lambda: matrix.store(corner, memory))
        self._pause("", lambda: True)

    def _store_wait(self, pending: int) -> None:
        stores = self.here.warps.stores
        self._pause("its stores", lambda: len(stores) <= pending)

    def _product(self, a: Any, b: Shared, total: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async, "only asynchronous products are supported"
        product = Product()

        def done() -> None:
            left = a.array if isinstance(a, Shared) else a
            assert left.dtype == b.array.dtype == total.dtype == np.float32
            product.value = block(left @ b.array + total if use_acc else left @ b.array)

        self.here.warps.products.append(done)
        self._pause("", lambda: True)
        return product

    def _product_wait(self, outstanding: int, deps: list[Any]) -> Any:
        products = self.here.warps.products
        self._pause("its products", lambda: len(products) <= outstanding)
        values = tuple(d.value if isinstance(d, Product) else d for d in deps)
        assert all(v is not None for v in values), "a product is read before a wait"
        return values[0] if len(values) == 1 else values

    # -- scheduling

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
                warps.go.release()  # ends the threads that still wait
            for thread in threads:
                thread.join()
        assert not self.loads, "a copy without a wait"
        assert not any(warps.products or warps.stores for warps in self.warps), "products or stores without a wait"

    def _schedule(self) -> None:
        while not all(warps.done for warps in self.warps):
            choices = list(self._choices())
            if not choices:
                self.failure = AssertionError(
                    "deadlock: " + "; ".join(f"{w.name} waits for {w.why}" for w in self.warps if not w.done)
                )
                raise self.failure
            self.random.choice(choices)()
            if self.failure is not None:
                raise self.failure

    def _choices(self) -> Iterator[Callable[[], None]]:
        for warps in self.warps:
            if not warps.done and warps.ready():
                yield lambda warps=warps: self._continue(warps)
            for queue in (warps.products, warps.stores):  # each queue in order
                if queue:
                    yield lambda queue=queue: queue.pop(0)()
        for load in self.loads:
            yield lambda load=load: (self.loads.remove(load), load())  # type: ignore[func-returns-value]

    def _continue(self, warps: Warps) -> None:
        warps.go.release()
        self.back.acquire()

    def _pause(self, why: str, ready: Callable[[], bool]) -> None:
        """Let other threads run until `ready()` is True; `why` names the condition in errors."""
        warps = getattr(self.here, "warps", None)
        if warps is None:  # before `warp_specialize`
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
