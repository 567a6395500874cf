"""The groups "short calls" and "overhead": calls that take microseconds, made as programs make them, beside torch's.

Every call gets other tensors with other contents. Masks, biases and lengths are new tensor objects at every call, since
a model makes a new one for every batch. What a program does to call attention belongs to the timed call: Sightline
makes a formula of the lengths, and torch makes a bool mask of them.

The overheads are calls of one query and one key of width 8, whose kernel computes almost nothing. A training step is
compared with an empty `torch.autograd.Function`. No function with a backward pass of its own can be faster than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sightline.api.functions import attention
from sightline.formula.library import bias, causal, padding
from sightline.statistics import entropy

from .cases import SEED, CaseGroup, Contender, TimedCall
from .check import share_of_budget
from .contenders import name_results
from .workloads import CAUSAL, Inputs, Passes, Workload, padding_mask

Array = np.ndarray[Any, np.dtype[Any]]
# A function of query, key, value and an extra argument: the bias, the mask or the lengths of the call, or None.
Function = Callable[[Any, Any, Any, Any], Any]

POOL_SIZE = 16  # number of prepared inputs that the calls of a contender use in rotation
CHECKED_INPUTS = (0, POOL_SIZE - 1)  # indices of the inputs for which the results are checked
DROPOUT = 0.1
SMALL_LENGTH = 20  # largest number of queries in a small version
SHAPES = (  # (B, H, n, d)
    (1, 12, 12, 32),
    (1, 8, 1, 64),
    (4, 12, 9, 32),
    (1, 8, 16, 64),
    (32, 12, 32, 32),
    (1, 12, 128, 64),
    (8, 12, 128, 64),
    (1, 12, 512, 64),
)
OVERHEAD_SHAPE = (1, 1, 1, 8)
BOTH_PASSES: Passes = "forward and backward"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # (a remark, options of `ShortCall`) by the name of the kind
    "plain": ("", {}),
    "causal": ("", {"mask": CAUSAL}),
    "padding mask": ("", {}),
    "padding formula": ("torch makes a bool mask", {}),
    "bias": ("", {"bias": True}),
    "entropy": ("torch without", {"see": (entropy(),)}),
    "training causal": ("", {"mask": CAUSAL, "passes": BOTH_PASSES}),
    "training padding mask": ("", {"passes": BOTH_PASSES}),
    "training dropout": (f"dropout {DROPOUT}", {"dropout": DROPOUT, "passes": BOTH_PASSES}),
}
OVERHEAD_KINDS = ("plain", "causal", "padding mask", "bias", "entropy")
TRAINING_KINDS = OVERHEAD_KINDS[:3]


# -- the functions --------------------------------------------------------------------------------------------------


OWN_SIGNATURE: dict[str, Function] = {  # calls of `sightline.attention` by `ShortCall.function`
    "plain": lambda query, key, value, _: attention(query, key, value),
    "causal": lambda query, key, value, _: attention(query, key, value, mask=causal()),
    "padding mask": lambda query, key, value, mask: attention(query, key, value, mask=mask),
    "padding formula": lambda query, key, value, lengths: attention(query, key, value, mask=padding(lengths)),
    "bias": lambda query, key, value, added: attention(query, key, value, score=bias(added)),
    "entropy": lambda query, key, value, _: attention(query, key, value, see=[entropy()]),
}


def with_signature_of_torch(attend: Callable[..., Any]) -> dict[str, Function]:
    """Return, by kind of call, functions that call `attend`, which has the signature of torch's attention function."""
    return {
        "plain": lambda query, key, value, _: attend(query, key, value),
        "causal": lambda query, key, value, _: attend(query, key, value, is_causal=True),
        "padding mask": lambda query, key, value, mask: attend(query, key, value, mask),
        "bias": lambda query, key, value, bias: attend(query, key, value, bias),
        "dropout": lambda query, key, value, _: attend(query, key, value, dropout_p=DROPOUT),
    }


def sightline_functions() -> dict[str, Function]:
    """Return Sightline's function for each kind of call, by name, with torch's signature where one can express it."""
    from sightline.torch import scaled_dot_product_attention

    return OWN_SIGNATURE | with_signature_of_torch(scaled_dot_product_attention)


def torch_functions() -> dict[str, Function]:
    """Return torch's function for each kind of call, by name. Torch has no statistics, so "entropy" is a plain call."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention

    def with_lengths(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        mask = torch.arange(key.shape[-2], device=lengths.device) < lengths[:, None]
        return attend(query, key, value, mask[:, None, None])

    functions = with_signature_of_torch(attend)
    return functions | {"padding formula": with_lengths, "entropy": functions["plain"]}


def empty_functions() -> dict[str, Function]:
    """Return for each training kind a function whose output is not written, and whose gradients are d_output itself."""
    import torch

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            return torch.empty_like(inputs[0])

        @staticmethod
        def backward(ctx: Any, *d_output: Any) -> Any:
            return d_output * 3  # a tuple of three gradients

    return dict.fromkeys(TRAINING_KINDS, lambda *inputs: Empty.apply(*inputs[:3]))  # type: ignore[no-untyped-call]


# -- the inputs -----------------------------------------------------------------------------------------------------


class InputPool:
    """Prepared inputs of one case, which the calls of the contenders use in rotation.

    `cases` and `inputs` state the same problems for the check.
    """

    def __init__(self, case: ShortCall, size: int = POOL_SIZE) -> None:
        self.cases, self.inputs, self.arrays, self.position = list[ShortCall](), list[Inputs](), list[Any](), 0
        for index in range(size):
            rng = np.random.default_rng([SEED, index])
            inputs, lengths = Inputs.of(case, rng), draw_lengths(rng, case.B, case.n)
            is_token = np.arange(case.n) < lengths[:, None, None, None]
            extra = {"padding mask": is_token, "padding formula": lengths}.get(case.function, inputs.bias)
            self.cases.append(case if extra is inputs.bias else replace(case, mask=padding_mask(lengths)))
            self.inputs.append(inputs)
            self.arrays.append((inputs.query, inputs.key, inputs.value, extra, inputs.d_output))
        self.tensors = [_to_tensors(arrays, case) for arrays in self.arrays]

    def next(self, on_numpy: bool = False) -> tuple[Any, ...]:
        """Return (query, key, value, extra argument, d_output) of the next call; the extra argument is a new object.

        The values are tensors, or arrays if `on_numpy` is True. An argument that the case does not have is None.
        """
        self.position = (self.position + 1) % len(self.arrays)
        *arrays, extra, d_output = (self.arrays if on_numpy else self.tensors)[self.position]
        if extra is not None:
            extra = extra.copy() if on_numpy else extra.clone()
        return *arrays, extra, d_output


def draw_lengths(rng: np.random.Generator, B: int, n: int) -> Array:
    """Draw the lengths (B,) of a padded batch: the longest is n, the others are uniform from half of n to n.

    A batch of one text has a random length too, like a text that was padded to a fixed length.
    """
    lengths = rng.integers(max((n + 1) // 2, 1), n, size=B, endpoint=True)
    if B > 1:
        lengths[rng.integers(B)] = n
    return lengths


def _to_tensors(arrays: tuple[Array | None, ...], case: ShortCall) -> tuple[Any, ...]:
    """Return the arrays as tensors on the case's device. Arrays of floats get the case's dtype.

    In training, query, key and value require gradients.
    """
    import torch

    def convert(array: Array) -> Any:
        dtype = getattr(torch, case.dtype) if array.dtype == np.float32 else None
        return torch.from_numpy(array).to(case.device, dtype)

    query, key, value, *others = (None if array is None else convert(array) for array in arrays)
    return *(tensor.requires_grad_(case.is_training) for tensor in (query, key, value) if tensor is not None), *others


# -- the contenders and the cases -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Caller(Contender):
    """A contender that calls a function of a table, such as `torch_functions()`, on the inputs of a pool."""

    name: str
    label: str
    functions: Callable[[], dict[str, Function]]
    is_peer: bool = False
    on_numpy: bool = False
    has_results: bool = True
    packages: tuple[str, ...] = ("torch",)
    pip: str = "torch"

    def reference(self, case: ShortCall) -> ShortCall | None:
        """Return the case that the results are checked against; None for no check. A peer's case has no statistics.

        A peer is not checked if it has no results, or if torch's own random numbers choose the dropped weights.
        """
        if not self.is_peer:
            return case
        return replace(case, see=()) if self.has_results and not case.dropout else None

    def prepare(self, case: ShortCall, pool: InputPool, threads: int) -> TimedCall:
        call = partial(train if case.is_training else infer, self.functions()[case.function])
        setup = partial(pool.next, self.on_numpy)
        return TimedCall(call, setup=setup, threads=threads, includes_host=True)


SIGHTLINE = Caller("sightline", "Sightline", sightline_functions)
NUMPY = Caller("numpy", "NumPy", lambda: OWN_SIGNATURE, on_numpy=True)
TORCH = Caller("torch", "torch", torch_functions, is_peer=True)
EMPTY = Caller("empty", "empty pair", empty_functions, is_peer=True, has_results=False)


def infer(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Return the result of the function; `arguments` are those of `InputPool.next`."""
    query, key, value, extra, _ = arguments
    return function(query, key, value, extra)


def train(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Return (output, gradients of query, key and value); `arguments` are those of `InputPool.next`."""
    import torch

    query, key, value, extra, d_output = arguments
    output = function(query, key, value, extra)
    return output, torch.autograd.grad(output, (query, key, value), d_output)


@dataclass(frozen=True, kw_only=True)
class ShortCall(Workload):
    """A call of one of the `KINDS` at one shape, with as many keys as queries."""

    kind: str
    device: str = "cpu"  # torch's name of the device
    contiguous: bool = True
    ours: Contender | str = SIGHTLINE
    baselines: tuple[Contender | str, ...] = (TORCH,)

    @classmethod
    def of(cls, kind: str, shape: tuple[int, int, int, int], **more: Any) -> ShortCall:
        """Return a call of a kind in `KINDS` at a shape (B, H, n, d). By default its name is the shape."""
        B, H, n, d = shape
        options: dict[str, Any] = {"name": _name(shape), "B": B, "H": H, "n": n, "d_k": d} | KINDS[kind][1] | more
        return cls(kind=kind, **options)

    @property
    def is_training(self) -> bool:
        return self.passes != "forward"

    @property
    def function(self) -> str:
        """The name of the function to call, such as a key of `torch_functions()`: the kind without "training"."""
        return self.kind.removeprefix("training ")

    def small(self) -> ShortCall:
        shape = B, H, n, _ = min(self.B, 2), min(self.H, 2), min(self.n, SMALL_LENGTH), self.d_k
        name = self.name if (B, H, n) == (self.B, self.H, self.n) else _name(shape)
        return replace(self, name=name, B=B, H=H, G=H, n=n, m=n)

    def make_inputs(self) -> Any:
        return InputPool(self)

    def share_of_budget(self, prepared: TimedCall, pool: Any) -> float:
        """Return the largest share of the rounding-error budget that the checked inputs' results use.

        The contender is first called on every input of the pool, so that the check detects results of other inputs.
        """
        for _ in pool.arrays:
            prepared.call(prepared.setup())
        shares = []
        for index in CHECKED_INPUTS:
            pool.position = index - 1
            with _known_seed(index) as seed:
                result = prepared.call(prepared.setup())
            case = replace(pool.cases[index], seed=seed, see=self.see)
            shares.append(share_of_budget(case, pool.inputs[index], name_results(case, result)))
        return max(shares)


@contextmanager
def _known_seed(state: int) -> Iterator[int]:
    """Set torch's generator within the context, and yield the seed of dropout that Sightline's next call draws."""
    import torch

    from sightline.torch.operator_schema import make_seed

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(state)
        seed = int(make_seed(None))
        torch.manual_seed(state)
        yield seed


def _name(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _short_calls(dtype: str, device: str) -> tuple[CaseGroup, ...]:
    return tuple(
        CaseGroup(
            name=f"short calls {kind}",
            group="short calls",
            description=f"B × H × n × d, {dtype}" + (f", {remark}" if remark else ""),
            cases=tuple(ShortCall.of(kind, shape, dtype=dtype, device=device) for shape in SHAPES),
        )
        for kind, (remark, _) in KINDS.items()
    )


def _overhead(name: str, remark: str, kinds: tuple[str, ...], beside: str = "", **more: Any) -> CaseGroup:
    titles = {"entropy": "see=[entropy()]"}
    cases = tuple(ShortCall.of(kind, OVERHEAD_SHAPE, name=titles.get(kind, kind), **more) for kind in kinds)
    description = f"1 × 1 × 1 × 8, one key, float32{remark}"
    return CaseGroup(name=name, group=name, description=description, cases=cases, beside=beside)


SHORT_CALLS = _short_calls("float32", "cpu")
CUDA_SHORT_CALLS = _short_calls("bfloat16", "cuda")
TRAINING: dict[str, Any] = {"passes": BOTH_PASSES, "baselines": (TORCH, EMPTY)}
OVERHEADS = (
    _overhead("overhead by kind", "", OVERHEAD_KINDS, baselines=(NUMPY, TORCH)),
    _overhead("overhead training", ", forward and backward", TRAINING_KINDS, "empty", **TRAINING),
)
