"""The named problems, one table, each with what it is held to. Tests take small versions of the same table.

FLOPs. A multiplication and an addition count as two. With A the allowed pairs (i, j) of a head,

    forward    2 A (d_k + d_v)         S = Q Kᵀ, O = P V
    backward   2 A (3 d_k + 2 d_v)     S once more, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q

and nothing for the softmax, as is the custom (Dao, "FlashAttention-2", 2023, section 4.1, where the backward pass is
2.5 times the forward). Hidden pairs count nothing, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, Union

import numpy as np

from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Expression
from ..formula.library import bias
from ..formula.render_array import evaluate
from ..formula.runs import find_runs
from ..formula.table import Table

__all__ = ["PROBLEMS", "FirstCall", "Inputs", "Mask", "Problem", "Race", "Series", "Target", "select"]

Array = np.ndarray[Any, np.dtype[Any]]

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes
SEED = 1706
COUNTED = 64  # queries and keys in the tiles that allowed pairs are counted by


@dataclass(frozen=True)
class Target:
    """One thing a problem is held to.

    Parameters
    ----------
    measure
        "share": of the machine's peak, at least. "faster": another's time over ours, at least. "slower": ours over
        another's, at most. "efficiency": the gain over one thread, over the threads, at least. "seconds": a time, at
        most. "spread": the largest time per token over the smallest, at most. "growth": bytes beyond inputs and
        outputs that a longer problem needs more, over the bytes its inputs and outputs have more, at most.
    limit : the number that must be reached or kept
    who : the contender meant: the other one of a ratio, the one whose seconds count
    """

    measure: Literal["share", "faster", "slower", "efficiency", "seconds", "spread", "growth"]
    limit: float
    who: str = "sightline"

    @property
    def at_least(self) -> bool:
        return self.measure in ("share", "faster", "efficiency")

    def kept(self, value: float) -> bool:
        """Whether the measured value reaches or keeps the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Mask:
    """A mask as every library can take it.

    Parameters
    ----------
    words : what it is called
    write : (n, read) to a function of (b, h, i, j)
        `read` makes an array something to be indexed by those: a table for our symbols, a tensor for FlexAttention.
    """

    words: str
    write: Callable[[int, Callable[[Any], Any]], Callable[..., Any]]

    def formula(self, n: int) -> Expression:
        """The mask in our language."""
        made: Expression = self.write(n, Table)(*(SYMBOLS[name] for name in "bhij"))
        return made


def _causal(n: int, read: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda b, h, i, j: i >= j


def _window(width: int) -> Mask:
    """A causal window; in short sequences the share of 4,096 it has there, so that small versions hide something too."""

    def write(n: int, read: Callable[[Any], Any]) -> Callable[..., Any]:
        reach = width if n >= 1024 else max(width * n // 4096, 2)
        return lambda b, h, i, j: (i >= j) & (i - j < reach)

    return Mask(f"causal window {width:,}", write)


def _documents(count: int) -> Mask:
    """That many documents of unequal lengths, half to one and a half of their mean."""

    def write(n: int, read: Callable[[Any], Any]) -> Callable[..., Any]:
        ends = np.cumsum(np.random.default_rng(SEED).uniform(0.5, 1.5, count))
        ids = read(np.searchsorted(ends / ends[-1], (np.arange(n) + 0.5) / n))
        return lambda b, h, i, j: ids[i] == ids[j]

    return Mask(f"{count} documents", write)


CAUSAL = Mask("causal", _causal)
Passes = Literal["forward", "backward", "forward and backward"]


@dataclass(frozen=True, kw_only=True)
class Race:
    """Contenders on the same arrays, in turn. Names of axes as in `sightline.problem`; G = 0 means H, m = 0 means n."""

    name: str
    targets: tuple[Target, ...] = ()
    passes: Passes = "forward"
    dtype: str = "float32"
    B: int = 1
    H: int = 8
    G: int = 0
    n: int = 4096
    m: int = 0
    d_k: int = 64
    d_v: int = 0
    mask: Mask | None = None
    bias: bool = False  # (1, H, n, m) added to the scores, its gradient wanted
    dropout: float = 0.0
    peak: str = "float32"  # what a share is taken of: an entry of `peaks.Peaks`
    against: tuple[str, ...] = ("torch",)  # peers and variants of our own, by their names in `peers`

    def __post_init__(self) -> None:
        for name, value in (("G", self.H), ("m", self.n), ("d_v", self.d_k)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def about(self) -> str:
        """The shape in one line."""
        parts = [f"{self.B} × {self.H} heads" + (f" on {self.G}" if self.G != self.H else "")]
        parts.append(f"n {self.n:,}" + (f", m {self.m:,}" if self.m != self.n else ""))
        parts.append(f"d {self.d_k}" if self.d_k == self.d_v else f"d_k {self.d_k}, d_v {self.d_v}")
        parts += [self.dtype, *([self.mask.words] if self.mask else []), *(["bias"] if self.bias else [])]
        return ", ".join([*parts, *([f"dropout {self.dropout}"] if self.dropout else [])])

    @property
    def extent(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.n, self.m

    @property
    def formula(self) -> Expression | None:
        """The mask in our language."""
        return None if self.mask is None else self.mask.formula(self.n)

    @cached_property
    def allowed(self) -> int:
        """Pairs the mask allows, over all batches and heads."""
        return allowed_pairs(self.formula, self.extent)

    @property
    def flops(self) -> int:
        """As the head of this file counts them."""
        forward, backward = 2 * (self.d_k + self.d_v), 2 * (3 * self.d_k + 2 * self.d_v)
        each = {"forward": forward, "backward": backward, "forward and backward": forward + backward}
        return self.allowed * each[self.passes]

    @property
    def bytes_moved(self) -> int:
        """Bytes of inputs and outputs, each moved once; gradients have the bytes of what they belong to."""
        queries, keys = self.B * self.H * self.n, self.B * self.G * self.m
        inputs = (queries + keys) * self.d_k + keys * self.d_v + self.bias * self.H * self.n * self.m
        output = queries * self.d_v
        passes = {"forward": inputs + output, "backward": 2 * (inputs + output)}
        return passes.get(self.passes, 2 * inputs + output) * SIZES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.B * self.H * self.n * self.d_v * SIZES[self.dtype]

    def small(self) -> Race:
        """The same problem on arrays a test can hold; no targets."""
        heads = min(self.H, 4)
        group = self.H // self.G
        sizes = {"H": heads, "G": max(heads // group, 1), "B": min(self.B, 2)}
        sizes |= {"n": min(self.n, 150), "m": min(self.m, 150)}
        return replace(self, targets=(), **sizes)


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """The first call of a new problem, in a process that has called another before: compiled, then from the disk."""

    name: str
    n: int = 256
    d: int = 64
    targets: tuple[Target, ...] = ()

    @property
    def about(self) -> str:
        return f"8 heads, n {self.n:,}, d {self.d}, float32, causal; fresh processes"

    def small(self) -> FirstCall:
        return replace(self, n=32, targets=())


@dataclass(frozen=True, kw_only=True)
class Series:
    """One problem at several points along an axis, for what grows and what must not.

    Parameters
    ----------
    axis : "n", or "allowed": the share of pairs the mask allows
    points : the problem at each point, in order
    """

    name: str
    axis: Literal["n", "allowed"]
    points: tuple[Race, ...]
    targets: tuple[Target, ...] = ()

    @property
    def about(self) -> str:
        first, last = self.points[0], self.points[-1]
        reach = f"n {first.n:,} to {last.n:,}" if self.axis == "n" else f"n {first.n:,}, {len(self.points)} windows"
        words = f", {first.mask.words}" if self.axis == "n" and first.mask else ""
        return f"{first.B} × {first.H} heads, {reach}, d {first.d_k}, {first.dtype}{words}"

    def small(self) -> Series:
        points = tuple(
            replace(point.small(), n=size, m=size)
            for point, size in zip(self.points, (64 * (k + 1) for k in range(len(self.points))), strict=True)
        )
        return replace(self, points=points, targets=())


Problem = Union[Race, FirstCall, Series]  # noqa: UP007 - three dataclasses of one table


@dataclass(frozen=True)
class Inputs:
    """The arrays of a race, float32 that hold numbers of its dtype, so that every contender reads the same."""

    query: Array
    key: Array
    value: Array
    d_output: Array | None  # where a backward pass is timed
    bias: Array | None

    @classmethod
    def of(cls, race: Race) -> Inputs:
        """Standard normal numbers, the same on every run."""
        rng = np.random.default_rng(SEED)

        def drawn(*shape: int) -> Array:
            return rounded(rng.standard_normal(shape, np.float32), race.dtype)

        query, key = drawn(race.B, race.H, race.n, race.d_k), drawn(race.B, race.G, race.m, race.d_k)
        value = drawn(race.B, race.G, race.m, race.d_v)
        back = drawn(race.B, race.H, race.n, race.d_v) if race.passes != "forward" else None
        return cls(query, key, value, back, drawn(1, race.H, race.n, race.m) if race.bias else None)

    @property
    def score(self) -> Expression | None:
        """The score in our language."""
        return None if self.bias is None else bias(self.bias)


def rounded(array: Array, dtype: str) -> Array:
    """float32 numbers rounded to those a dtype has."""
    from ..arrays import resolve

    return array if dtype == "float32" else array.astype(resolve(np, dtype)).astype(np.float32)


def allowed_pairs(mask: Expression | None, extent: tuple[int, int, int, int]) -> int:
    """Pairs a mask allows, over all batches and heads, counted by tiles: full ones by their size, partial ones by look."""
    B, H, n, m = extent
    if mask is None:
        return B * H * n * m
    runs = find_runs(mask, extent, COUNTED, COUNTED)
    count = 0
    for row, (first, last, full) in _spans(runs):
        group, block = divmod(row, runs.query_blocks)
        b, h = divmod(group, runs.heads)
        i = np.arange(block * COUNTED, min((block + 1) * COUNTED, n))[:, None]
        j = np.arange(first * COUNTED, min(last * COUNTED, m))
        if full:
            count += i.size * j.size
            continue
        symbols = {"b": np.asarray(b), "h": np.asarray(h), "i": i, "j": j, "n": n, "m": m}
        seen = evaluate(mask, symbols, xp=np, float_dtype=np.dtype("float64"), like=i)
        count += int(np.broadcast_to(seen, (i.size, j.size)).sum())
    return count * (B // runs.batches) * (H // runs.heads)


def _spans(runs: Any) -> Iterator[tuple[int, tuple[int, int, bool]]]:
    owner = np.repeat(np.arange(runs.start.size - 1), np.diff(runs.start))
    for row, first, last, full in zip(owner, runs.first, runs.last, runs.full, strict=True):
        yield int(row), (int(first), int(last), bool(full))


def select(problems: Sequence[Problem], only: Sequence[str] = (), dtype: str | None = None) -> tuple[Problem, ...]:
    """The problems whose name has one of the words in it or fits it as a pattern, and whose dtype is this.

    Raises
    ------
    ParameterError
        None is left.
    """

    def fits(problem: Problem) -> bool:
        named = any(word in problem.name or fnmatchcase(problem.name, word) for word in only)
        return (named or not only) and (dtype is None or getattr(problem, "dtype", "float32") == dtype)

    found = tuple(problem for problem in problems if fits(problem))
    if not found:
        asked = " or ".join(only) + (f" in {dtype}" if dtype else "")
        raise ParameterError(
            f"no problem called {asked}", "names and patterns of `sightline bench --list`", "--only d64"
        )
    return found


# -- the table -----------------------------------------------------------------------------------------------------------

WIDE = ("torch", "flex", "onnxruntime", "openvino", "jax")  # forward passes in float32
NARROW = ("torch", "flex", "openvino", "jax")  # in 16 bits


def share(limit: float) -> Target:
    return Target("share", limit)


def faster(than: str, limit: float) -> Target:
    return Target("faster", limit, than)


def _forward(name: str, *targets: Target, against: tuple[str, ...] = WIDE, **sizes: Any) -> Race:
    return Race(name=f"forward {name}", targets=targets, against=against, **sizes)


def _backward(name: str, *targets: Target, **sizes: Any) -> Race:
    return Race(name=f"backward {name}", targets=targets, passes="backward", against=("torch", "jax"), **sizes)


BF16 = {"dtype": "bfloat16", "peak": "bfloat16"}
SHARED = {"H": 32, "G": 8, "n": 1, "m": 8192, "d_k": 128, "peak": "read", "against": NARROW}
TINY = {"n": 16, "against": ("torch", "numpy")}
ONE = ("one thread",)
GROWN = tuple(2**k for k in range(16, 21))
WINDOWS = (64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS = (1024, 2048, 4096, 8192)

PROBLEMS: tuple[Problem, ...] = (
    _forward("float32 d64", share(0.90), faster("torch", 1.25), faster("onnxruntime", 1.05), against=(*WIDE, "mha")),
    _forward("float32 d128", share(0.92), faster("openvino", 1.05), d_k=128),
    _forward("float32 causal n1024", faster("torch", 1.6), mask=CAUSAL, n=1024),
    _forward("float32 causal n4096", faster("torch", 1.45), mask=CAUSAL),
    _forward("bfloat16 d64", share(0.80), faster("torch", 2.2), faster("openvino", 1.1), against=NARROW, **BF16),
    _forward(
        "bfloat16 d128", share(0.86), faster("torch", 2.2), faster("openvino", 1.1), against=NARROW, d_k=128, **BF16
    ),
    _forward("float16 d64", faster("torch", 1.9), against=NARROW, dtype="float16"),
    _backward("float32 d64", share(0.93), faster("torch", 1.35)),
    _backward("float32 d128", share(0.93), faster("torch", 1.24), d_k=128),
    _backward("float32 causal", faster("torch", 1.4), mask=CAUSAL),
    _backward("bfloat16 d64", share(0.70), faster("torch", 1.7), **BF16),
    Race(name="both n3001 d80", targets=(faster("torch", 1.3),), passes="forward and backward", H=6, n=3001, d_k=80),
    _forward("window 256", faster("torch", 20), faster("flex", 4), mask=_window(256)),
    _forward("16 documents n8192", faster("torch", 10), mask=_documents(16), n=8192),
    _forward(
        "dropout 0.1",
        faster("torch", 7),
        Target("slower", 1.35, "without dropout"),
        dropout=0.1,
        against=("torch", "without dropout"),
    ),
    _forward("d_v 32", faster("torch", 3), d_v=32),
    _forward("d_v 128", faster("torch", 3), d_v=128),
    # n 2,048: at 4,096 bias, its gradient and torch's copies of both take gigabytes, and no other ratio comes out
    Race(name="both bias n2048", targets=(faster("torch", 2.5),), passes="forward and backward", n=2048, bias=True),
    Race(name="decode float32", targets=(share(0.75),), **SHARED),
    # two sequences: the keys and values of one in bfloat16 would fit the last cache of this size of machine
    Race(name="decode bfloat16", targets=(share(0.75),), dtype="bfloat16", B=2, **SHARED),
    Race(name="overhead", targets=(faster("torch", 1.0), Target("seconds", 1e-5, "numpy")), **TINY),
    FirstCall(name="first call", targets=(Target("seconds", 0.3, "compiled"), Target("seconds", 0.03, "from disk"))),
    Race(name="threads forward", targets=(Target("efficiency", 0.95, "one thread"),), against=ONE),
    Race(name="threads backward", targets=(Target("efficiency", 0.95, "one thread"),), against=ONE, passes="backward"),
    Series(
        name="growth window 256",
        axis="n",
        points=tuple(Race(name=f"n {n}", H=1, n=n, mask=_window(256), against=()) for n in GROWN),
        targets=(Target("spread", 1.15), Target("growth", 0.02)),
    ),
    Series(
        name="cost by length",
        axis="n",
        points=tuple(Race(name=f"n {n}", n=n, mask=_window(256), against=("torch", "flex")) for n in LENGTHS),
    ),
    Series(
        name="cost by area",
        axis="allowed",
        points=tuple(Race(name=f"w {w}", mask=_window(w), against=("torch", "flex")) for w in WINDOWS),
    ),
)
