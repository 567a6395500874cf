"""Calls that take microseconds, made as programs make them, beside torch's.

Every call gets other tensors with other contents. Masks, biases and lengths are new tensor objects at every call, since
a model makes a new one for every batch. What a program does to call attention belongs to the timed call: Sightline
makes a formula of the lengths, and torch makes a bool mask of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sightline.api.functions import attention
from sightline.formula import library
from sightline.statistics import entropy

from . import check
from .attention import BOTH, CAUSAL, Attention, Inputs, padding
from .contenders import name_results
from .core import SEED, Call, Contender

# A function of query, key, value and an extra argument: the bias, the mask or the lengths of the call, or None.
Function = Callable[[Any, Any, Any, Any], Any]

POOL_SIZE = 16  # number of prepared inputs that the calls of a contender use in rotation
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
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # (a remark, options of `ShortCall`) by the name of the kind
    "plain": ("", {}),
    "causal": ("", {"mask": CAUSAL}),
    "padding mask": ("", {}),
    "padding formula": (", torch makes a bool mask", {}),
    "bias": ("", {"bias": True}),
    "entropy": (", torch without", {"see": (entropy(),)}),
    "training causal": ("", {"mask": CAUSAL, "passes": BOTH}),
    "training padding mask": ("", {"passes": BOTH}),
    "training dropout": (f", dropout {DROPOUT}", {"dropout": DROPOUT, "passes": BOTH}),
}


@dataclass(frozen=True, kw_only=True)
class ShortCall(Attention):
    """A call of one of the `KINDS` at one shape, with as many keys as queries."""

    kind: str
    contiguous: bool = True

    def small(self) -> ShortCall:
        B, H, n = min(self.B, 2), min(self.H, 2), min(self.n, SMALL_LENGTH)
        return replace(self, B=B, H=H, G=H, n=n, m=n)

    def inputs(self) -> Pool:
        return Pool(self)

    def error(self, call: Call, inputs: Pool) -> float:
        """Return the largest share of the budget that the results for the first and for the last input use.

        The contender is first called on every input, so that the check finds a result that belongs to other inputs.
        """
        for _ in inputs.inputs:
            call.run(call.setup())
        shares = []
        for place in (0, len(inputs.inputs) - 1):
            inputs.place = place - 1
            problem = replace(self, mask=inputs.masks[place], seed=set_seed(place))
            results = name_results(problem, call.run(call.setup()))
            shares.append(check.error_of(problem, inputs.inputs[place], results))
        return max(shares)


def set_seed(state: int) -> int:
    """Set torch's generator, and return the seed of dropout that Sightline's next call draws."""
    import torch

    from sightline.torch.operator import make_seed

    torch.manual_seed(state)
    seed = int(make_seed(None))
    torch.manual_seed(state)
    return seed


class Pool:
    """Prepared inputs of one problem, which the calls of the contenders use in rotation.

    The lengths of a padded batch are uniform from half of n to n, and the longest is n. A batch of one text has a
    random length too, like a text that was padded to a fixed length.
    """

    def __init__(self, problem: ShortCall, size: int = POOL_SIZE) -> None:
        import torch

        self.place, self.inputs, self.masks, self.tensors = 0, list[Inputs](), list[Any](), list[list[Any]]()
        for index in range(size):
            rng = np.random.default_rng([SEED, index])
            inputs, lengths = Inputs.of(problem, rng), rng.integers(-(-problem.n // 2), problem.n + 1, problem.B)
            lengths[1:2] = problem.n
            self.inputs.append(inputs)
            extra, mask = inputs.bias, problem.mask
            if "padding" in problem.kind:
                is_token = np.arange(problem.n) < lengths[:, None, None, None]
                extra, mask = lengths if "formula" in problem.kind else is_token, padding(lengths)
            self.masks.append(mask)
            arrays = inputs.query, inputs.key, inputs.value, inputs.d_output, extra
            self.tensors.append([None if array is None else torch.from_numpy(array) for array in arrays])
            for tensor in self.tensors[-1][:3]:
                tensor.requires_grad_(problem.passes == BOTH)

    def next(self) -> list[Any]:
        """Return (query, key, value, d_output, extra argument) of the next call; the extra argument is a new object.

        An argument that the problem does not have is None.
        """
        self.place = (self.place + 1) % len(self.inputs)
        *operands, extra = self.tensors[self.place]
        return [*operands, None if extra is None else extra.clone()]


# -- the contenders, with the functions by the name of the kind without "training" -----------------------------------


def with_signature_of_torch(attend: Callable[..., Any]) -> dict[str, Function]:
    """Return the calls of a function that has the signature of torch's attention function."""
    return {
        "plain": lambda query, key, value, _: attend(query, key, value),
        "causal": lambda query, key, value, _: attend(query, key, value, is_causal=True),
        "padding mask": lambda query, key, value, mask: attend(query, key, value, mask),
        "bias": lambda query, key, value, bias: attend(query, key, value, bias),
        "dropout": lambda query, key, value, _: attend(query, key, value, dropout_p=DROPOUT),
    }


def sightline_functions() -> dict[str, Function]:
    """Return Sightline's calls, with torch's signature where one can express the call."""
    from sightline.torch import scaled_dot_product_attention

    return with_signature_of_torch(scaled_dot_product_attention) | {
        "padding formula": lambda query, key, value, n: attention(query, key, value, mask=library.padding(n)),
        "entropy": lambda query, key, value, _: attention(query, key, value, see=[entropy()]),
    }


def torch_functions() -> dict[str, Function]:
    """Return torch's calls. Torch has no statistics, so "entropy" is a plain call."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention

    def with_lengths(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return attend(query, key, value, (torch.arange(key.shape[-2]) < lengths[:, None])[:, None, None])

    functions = with_signature_of_torch(attend)
    return functions | {"padding formula": with_lengths, "entropy": functions["plain"]}


def prepare_call(problem: ShortCall, pool: Pool, threads: int, functions: Callable[[], dict[str, Function]]) -> Call:
    """Prepare the function of the problem's kind, on inputs of the pool."""
    import torch

    function = functions()[problem.kind.removeprefix("training ")]

    def infer(arguments: list[Any]) -> Any:
        query, key, value, _, extra = arguments
        return function(query, key, value, extra)

    def train(arguments: list[Any]) -> Any:
        query, key, value, d_output, extra = arguments
        output = function(query, key, value, extra)
        return output, torch.autograd.grad(output, (query, key, value), d_output)

    return Call(train if problem.passes == BOTH else infer, setup=pool.next)


SIGHTLINE = Contender("Sightline", partial(prepare_call, functions=sightline_functions), is_ours=True)
TORCH = Contender("torch", partial(prepare_call, functions=torch_functions), changes={"see": ()})


def short_call(kind: str, shape: tuple[int, int, int, int], **options: Any) -> ShortCall:
    """Return a call of a kind in `KINDS` at a shape (B, H, n, d). By default its name is the shape."""
    B, H, n, d = shape
    given = {"name": " × ".join(map(str, shape)), "contenders": (SIGHTLINE, TORCH)} | KINDS[kind][1] | options
    return ShortCall(kind=kind, B=B, H=H, n=n, d_k=d, **given)


SHORT_CALLS = tuple(
    short_call(kind, shape, table=f"short calls {kind}", group="short calls", about=f"B × H × n × d, float32{remark}")
    for kind, (remark, _) in KINDS.items()
    for shape in SHAPES
)
