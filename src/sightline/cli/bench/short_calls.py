"""The group "short calls": calls of microseconds, as a program makes them, beside the same calls of torch.

Every call gets other tensors with other contents. Masks, biases and lengths are new tensor objects at every call, since
a model makes a new one for every batch. What a program does to call attention belongs to the timed call: Sightline
makes a formula of the lengths, and torch makes a bool mask of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ...api.functions import attention
from ...arrays.operations import resolve_dtype
from ...formula.library import padding
from ...statistics import Statistic, entropy
from .cases import Case, CaseContender, CaseGroup
from .check import share_of_budget
from .implementations import PreparedCall, Results, name_results, to_float32
from .workloads import CAUSAL, SEED, Inputs, Mask, Workload

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[[Any, Any, Any, Any], Any]  # a function of query, key, value and the extra argument of its kind

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


@dataclass(frozen=True)
class CallKind:
    """A kind of call.

    Parameters
    ----------
    name : name in tables
    function : key of the called function in `sightline_functions` and `torch_functions`
    description : a remark on the kind, such as what torch computes instead; "" for none
    extra : the argument besides query, key and value: a bool mask (B, 1, 1, n), the lengths (B,), a bias (1, H, n, n)
    training : True if the gradients of query, key and value are computed too
    """

    name: str
    function: str
    description: str = ""
    extra: Literal["", "mask", "lengths", "bias"] = ""
    training: bool = False

    @property
    def see(self) -> tuple[Statistic, ...]:
        return (entropy(),) if self.function == "entropy" else ()


KINDS = (
    CallKind("plain", "plain"),
    CallKind("causal", "causal"),
    CallKind("padding mask", "padding mask", extra="mask"),
    CallKind("padding formula", "padding formula", "torch makes a bool mask", extra="lengths"),
    CallKind("bias", "bias", extra="bias"),
    CallKind("entropy", "entropy", "torch without"),
    CallKind("training causal", "causal", training=True),
    CallKind("training padding mask", "padding mask", extra="mask", training=True),
    CallKind("training dropout", "dropout", f"dropout {DROPOUT}", training=True),
)


# -- the functions --------------------------------------------------------------------------------------------------


def sightline_functions() -> dict[str, Function]:
    """Return Sightline's function for each kind of call: torch's signature if it can express the call."""
    from ...torch import scaled_dot_product_attention

    def with_lengths(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return attention(query, key, value, mask=padding(lengths))

    def with_entropy(query: Any, key: Any, value: Any, _: Any) -> Any:
        return attention(query, key, value, see=[entropy()])

    functions = _functions_with_signature_of_torch(scaled_dot_product_attention)
    return functions | {"padding formula": with_lengths, "entropy": with_entropy}


def torch_functions() -> dict[str, Function]:
    """Return torch's function for each kind of call."""
    import torch

    scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention

    def with_lengths(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        mask = torch.arange(key.shape[-2], device=lengths.device) < lengths[:, None]
        return scaled_dot_product_attention(query, key, value, mask[:, None, None])

    functions = _functions_with_signature_of_torch(scaled_dot_product_attention)
    return functions | {"padding formula": with_lengths, "entropy": functions["plain"]}


def _functions_with_signature_of_torch(attend: Callable[..., Any]) -> dict[str, Function]:
    return {
        "plain": lambda query, key, value, _: attend(query, key, value),
        "causal": lambda query, key, value, _: attend(query, key, value, is_causal=True),
        "padding mask": lambda query, key, value, mask: attend(query, key, value, mask),
        "bias": lambda query, key, value, bias: attend(query, key, value, bias),
        "dropout": lambda query, key, value, _: attend(query, key, value, dropout_p=DROPOUT),
    }


# -- the inputs -----------------------------------------------------------------------------------------------------


class Pool:
    """Prepared inputs of one case, which the calls of a contender use in rotation.

    `workloads` and `inputs` state the same problems for the check. The arguments of calls are tensors, or arrays if
    `on_numpy` is True.
    """

    def __init__(self, case: ShortCall, size: int, on_numpy: bool = False) -> None:
        self.workloads: list[Workload] = []
        self.inputs: list[Inputs] = []
        self.arguments: list[tuple[Any, ...]] = []
        for index in range(size):
            workload, inputs, extra = _draw(case, np.random.default_rng([SEED, index]))
            self.workloads.append(workload)
            self.inputs.append(inputs)
            arrays = inputs.query, inputs.key, inputs.value, extra, inputs.d_output
            self.arguments.append(arrays if on_numpy else _to_tensors(arrays, case))
        self.position = 0

    def next(self) -> tuple[Any, ...]:
        """Return the arguments of the next call."""
        self.position = (self.position + 1) % len(self.arguments)
        return self.at(self.position)

    def at(self, index: int) -> tuple[Any, ...]:
        """Return (query, key, value, extra argument, d_output) of one call; the extra argument is a new object."""
        query, key, value, extra, d_output = self.arguments[index]
        if extra is not None:
            extra = extra.copy() if isinstance(extra, np.ndarray) else extra.clone()
        return query, key, value, extra, d_output


def _draw(case: ShortCall, rng: np.random.Generator) -> tuple[Workload, Inputs, Array | None]:
    """Draw one problem of a case: the problem for the check, its inputs, and the extra argument of the call."""
    B, H, n, d = case.shape
    dtype = resolve_dtype(np, case.dtype)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(dtype).astype(np.float32)

    query, key, value = (draw(B, H, n, d) for _ in range(3))
    d_output = draw(B, H, n, d) if case.kind.training else None
    bias = draw(1, H, n, n) if case.kind.extra == "bias" else None
    lengths = _draw_lengths(rng, B, n)
    extras = {"mask": np.arange(n) < lengths[:, None, None, None], "lengths": lengths, "bias": bias, "": None}
    mask = CAUSAL if case.kind.function == "causal" else None
    if case.kind.extra in ("mask", "lengths"):
        mask = Mask("padding", lambda n, to_table: lambda b, h, i, j: j < to_table(lengths)[b])
    passes: Literal["forward", "forward and backward"] = "forward and backward" if case.kind.training else "forward"
    workload = Workload(
        name=case.name,
        passes=passes,
        B=B,
        H=H,
        n=n,
        d_k=d,
        dtype=case.dtype,
        mask=mask,
        bias=bias is not None,
        dropout=DROPOUT if case.kind.function == "dropout" else 0.0,
        see=case.kind.see,
    )
    return workload, Inputs(query, key, value, d_output, bias), extras[case.kind.extra]


def _draw_lengths(rng: np.random.Generator, B: int, n: int) -> Array:
    """Draw the lengths (B,) of a padded batch: the longest is n, the others are uniform from half of n to n.

    A batch of one text, padded to a fixed length, has a random length too.
    """
    lengths = rng.integers(max((n + 1) // 2, 1), n, size=B, endpoint=True)
    if B > 1:
        lengths[rng.integers(B)] = n
    return lengths


def _to_tensors(arrays: tuple[Array | None, ...], case: ShortCall) -> tuple[Any, ...]:
    """Return the arrays as tensors on the case's device, arrays of floats in its dtype.

    In training the first three, query, key and value, require gradients.
    """
    import torch

    def convert(array: Array) -> Any:
        dtype = getattr(torch, case.dtype) if array.dtype == np.float32 else None
        return torch.from_numpy(array).to(case.device, dtype)

    tensors = [None if array is None else convert(array) for array in arrays]
    for tensor in tensors[:3]:
        assert tensor is not None
        tensor.requires_grad_(case.kind.training)
    return tuple(tensors)


# -- the cases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShortCall(Case):
    """One kind of call at one shape (B, H, n, d), with as many keys as queries. `device` is torch's name of it."""

    kind: CallKind
    shape: tuple[int, int, int, int]
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def name(self) -> str:  # type: ignore[override]
        return " × ".join(map(str, self.shape))

    def small(self) -> ShortCall:
        B, H, n, d = self.shape
        return replace(self, shape=(min(B, 2), min(H, 2), min(n, SMALL_LENGTH), d))

    def contenders(self, threads: int) -> Iterator[CaseContender]:
        pool = Pool(self, POOL_SIZE)
        for name, label, functions in (
            ("sightline", "Sightline", sightline_functions),
            ("torch", "torch", torch_functions),
        ):
            call = partial(train if self.kind.training else infer, functions()[self.kind.function])
            is_peer = name == "torch"
            is_random = is_peer and self.kind.function == "dropout"  # torch draws the dropped weights itself
            check = None if is_random else partial(share_of_pool, call, pool, is_peer)
            prepared = PreparedCall(call, to_float32, pool.next, threads, includes_host=True)
            yield CaseContender(name, label, prepared, check, is_peer)


def infer(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Return the result of the function; `arguments` are those of `Pool.at`."""
    query, key, value, extra, _ = arguments
    return function(query, key, value, extra)


def train(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Return (output, gradients of query, key and value); `arguments` are those of `Pool.at`."""
    import torch

    query, key, value, extra, d_output = arguments
    output = function(query, key, value, extra)
    return output, torch.autograd.grad(output, (query, key, value), d_output)


def share_of_pool(call: Callable[[Any], Any], pool: Pool, is_peer: bool) -> float:
    """Return the largest share of the rounding-error budget that the checked inputs' results use.

    All other inputs of the pool are used first, so that the check finds a result which belongs to other inputs.
    """
    for _ in pool.arguments:
        call(pool.next())
    shares = []
    for index in CHECKED_INPUTS:
        with _known_seed(index) as seed:
            result = call(pool.at(index))
        workload = replace(pool.workloads[index], seed=seed)
        workload = replace(workload, see=()) if is_peer else workload
        shares.append(share_of_budget(workload, pool.inputs[index], _name_results(workload, result)))
    return max(shares)


def _name_results(workload: Workload, result: Any) -> Results:
    if workload.passes == "forward":
        return name_results(workload, result)
    output, gradients = result
    named = zip(("query", "key", "value"), map(to_float32, gradients), strict=True)
    return {"output": to_float32(output.detach()), **dict(named)}


@contextmanager
def _known_seed(state: int) -> Iterator[int]:
    """Set torch's generator within the context, and yield the seed of dropout that Sightline's next call draws."""
    import torch

    from ...torch.operator_schema import make_seed

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(state)
        seed = int(make_seed(None))
        torch.manual_seed(state)
        yield seed


def _make_groups(dtype: str, device: str) -> tuple[CaseGroup, ...]:
    return tuple(
        CaseGroup(
            name=f"short calls {kind.name}",
            group="short calls",
            description=", ".join(filter(None, [f"B × H × n × d, {dtype}", kind.description])),
            cases=tuple(ShortCall(kind, shape, dtype, device) for shape in SHAPES),
            packages=("torch",),
            pip="torch",
            peer="torch",
        )
        for kind in KINDS
    )


SHORT_CALLS = _make_groups("float32", "cpu")
CUDA_SHORT_CALLS = _make_groups("bfloat16", "cuda")
