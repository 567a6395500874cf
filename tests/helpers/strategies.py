"""Hypothesis strategies of attention problems: shapes, dtypes, formulas, sinks, strides, and NaN or ∞ in some keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import sightline
from sightline import b, h, i, j, m, n, s, table, where
from sightline.api.kernels import KERNELS
from sightline.call.problem import Problem, make_problem
from sightline.reference.testing import LAYOUTS

# kernels for arrays of the host, and all masks
ON_HOST = tuple(kernel for kernel in KERNELS if kernel.name not in ("triton", "gather"))

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LARGEST = 60_000  # scores in one problem, so that a draw takes a few milliseconds


@dataclass(eq=False)
class Case:
    """The NumPy arguments of one call."""

    query: Any
    key: Any
    value: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        return self.query, self.key, self.value

    def make_problem(self, **more: Any) -> Problem:
        return make_problem(*self.arrays, **(self.options | more))

    def as_torch(self) -> Case:
        """Return the same call on tensors with the same strides; negative or unaligned strides are copied."""
        options = dict(self.options)
        if options.get("sinks") is not None:
            options["sinks"] = to_torch(options["sinks"])
        return Case(*(to_torch(x) for x in self.arrays), options)

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        shapes = " ".join(f"{name}{x.shape}" for name, x in zip("qkv", self.arrays, strict=True))
        return f"Case({self.query.dtype} {shapes} {self.options})"


def to_torch(array: Any) -> Any:
    import torch

    if any(stride < 0 for stride in array.strides) or not array.flags.aligned or not array.flags.writeable:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def generators() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


# -- formulas ------------------------------------------------------------
# The strategies below take the extent (B, H, n, m) of the problem, which determines the lengths of tables.


@st.composite
def lookups(draw: Any, extent: tuple[int, ...], kind: str) -> Any:
    """A table of one to four axes, indexed by shifted symbols, clipped or wrapped to its lengths."""
    rng, axes = draw(generators()), draw(st.integers(1, 4))
    lengths = tuple(draw(st.integers(1, 7)) for _ in range(axes))
    values = {
        "bool": lambda: rng.random(lengths) < 0.7,
        "int": lambda: rng.integers(-4, 12, lengths, dtype=draw(st.sampled_from([np.int64, np.int32, np.int8]))),
        "float": lambda: rng.normal(size=lengths).astype(draw(st.sampled_from([np.float64, np.float32, np.float16]))),
    }[kind]()
    index = draw(st.permutations([b, h, i, j]))
    shift = draw(st.integers(-2, 2))
    wrap = draw(st.booleans())
    return table(values)[
        tuple((a + shift) % k if wrap else np.clip(a + shift, 0, k - 1) for a, k in zip(index, lengths, strict=False))
    ]


@st.composite
def wholes(draw: Any, extent: tuple[int, ...], depth: int = 2) -> Any:
    """Integer formulas."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from("bhiijjnm").map(dict(zip("bhijnm", (b, h, i, j, n, m), strict=True)).get))
    x = draw(wholes(extent, depth - 1))
    other = st.one_of(st.integers(-7, 20), wholes(extent, depth - 1))
    make = draw(
        st.sampled_from(
            [
                lambda: x + draw(other),
                lambda: draw(other) - x,
                lambda: x * draw(st.integers(-3, 4)),
                lambda: x // draw(other),
                lambda: x % draw(other),
                lambda: -x,
                lambda: abs(x),
                lambda: np.minimum(x, draw(other)),
                lambda: np.maximum(x, draw(other)),
                lambda: np.floor(x * 0.37),
                lambda: draw(lookups(extent, "int")),
                lambda: where(x > draw(other), x, draw(other)),
            ]
        )
    )
    return make()


@st.composite
def reals(draw: Any, extent: tuple[int, ...], depth: int = 2) -> Any:
    """Float formulas without s."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(wholes(extent, 1)) * draw(st.sampled_from([0.5, 0.37, -1.25]))
    x = draw(reals(extent, depth - 1))
    make = draw(
        st.sampled_from(
            [
                lambda: x + draw(reals(extent, depth - 1)),
                lambda: x - draw(wholes(extent, 1)),
                lambda: x * draw(st.sampled_from([0.5, -2.0, 0.0])),
                lambda: x / draw(wholes(extent, 1)),
                lambda: x // 3.5,
                lambda: x % 2.5,
                lambda: np.tanh(x / 8) * 0.9,  # without the factor, rounding would decide whether the value is 1
                lambda: np.sin(x),
                lambda: np.cos(x),
                lambda: np.sqrt(x),
                lambda: np.log(x),
                lambda: np.log2(abs(x) + 1),
                lambda: np.log1p(abs(x)),
                lambda: np.exp(-abs(x)),
                lambda: np.exp2(np.minimum(x, 4.0)),
                lambda: abs(x) ** 1.5,
                lambda: np.clip(x, -2.0, 5.0),
                lambda: np.ceil(x),
                lambda: draw(lookups(extent, "float")),
            ]
        )
    )
    return make()


@st.composite
def conditions(draw: Any, extent: tuple[int, ...]) -> Any:
    """A comparison, or a table of bools."""
    kind = draw(st.sampled_from([wholes, wholes, reals, None]))
    if kind is None:
        return draw(lookups(extent, "bool"))
    x, y = draw(kind(extent)), draw(st.one_of(kind(extent), st.integers(-3, 30)))
    compare = draw(st.sampled_from(["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"]))
    return getattr(np, compare)(x, y)


@st.composite
def ready_masks(draw: Any, extent: tuple[int, ...]) -> Any:
    """Every mask of the library."""
    B, _, rows, columns = extent
    rng, longest = draw(generators()), max(rows, columns, 1)
    small = st.integers(1, 40)

    def dense() -> Any:
        shape = [length if draw(st.booleans()) else 1 for length in extent][draw(st.integers(0, 3)) :]
        return sightline.dense(rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.9])))

    def lists_of_blocks() -> Any:
        size = draw(st.sampled_from([1, 7, (1, 16), 64]))
        query_size, key_size = size if isinstance(size, tuple) else (size, size)
        lead = [length if draw(st.booleans()) else 1 for length in extent[:2]]
        shape = *lead, -(-rows // query_size), draw(st.integers(0, 3))
        return sightline.blocks(rng.integers(-1, max(-(-columns // key_size), 1), shape), size)

    def split(length: int) -> Any:
        return rng.multinomial(length, [0.25] * 4)

    make = draw(
        st.sampled_from(
            [
                sightline.causal,
                lambda: sightline.causal("lower right"),
                lambda: sightline.window(draw(small), draw(st.integers(0, 9))),
                lambda: sightline.prefix(draw(small)),
                lambda: sightline.padding(rng.integers(0, columns + 1, max(B, 1))),
                lambda: sightline.documents(np.sort(rng.integers(0, 4, longest))),
                lambda: sightline.documents(rng.integers(0, 3, (max(B, 1), longest))),
                lambda: sightline.documents(
                    lengths=split(rows), key_lengths=None if rows == columns else split(columns)
                ),
                dense,
                lists_of_blocks,
            ]
        )
    )
    return make()


def masks(extent: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Library masks and conditions, and their combinations by &, |, ^, ~ and where."""
    leaves = st.one_of(ready_masks(extent), ready_masks(extent), conditions(extent))

    def joined(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.tuples(parts, parts).map(lambda p: p[0] & p[1]),
            st.tuples(parts, parts).map(lambda p: p[0] | p[1]),
            st.tuples(parts, parts).map(lambda p: p[0] ^ p[1]),
            parts.map(lambda p: ~p),
            st.tuples(parts, parts, parts).map(lambda p: where(*p)),
        )

    return st.recursive(leaves, joined, max_leaves=4)


def biases(rng: np.random.Generator, draw: Any, extent: tuple[int, ...], hides: bool) -> Any:
    """Return a float array over some of b, h, i, j; with `hides`, a tenth of its entries are −∞."""
    array = rng.normal(size=[length if draw(st.booleans()) else 1 for length in extent][draw(st.integers(0, 3)) :])
    return np.where(rng.random(array.shape) < 0.1, -np.inf, array) if hides else array


@st.composite
def scores(draw: Any, extent: tuple[int, ...], hides: bool = True) -> Any:
    """Score formulas; with `hides`, some are −∞ at some pairs. All are continuous in s, so rounding decides nothing."""
    rng, H = draw(generators()), extent[1]
    inner = draw(
        st.sampled_from(
            [
                lambda: s,
                lambda: s * draw(st.sampled_from([0.5, -1.0, 2])),
                lambda: s + np.clip(draw(reals(extent)), -3.0, 3.0),
                lambda: s - table(rng.random(max(H, 1)))[h] * abs(i - j) / 8,
            ]
        )
    )()
    outer = [
        lambda x: x,
        lambda x: sightline.softcap(draw(st.sampled_from([1.0, 5.0, 30.0]))).with_scores(x),
        lambda x: sightline.alibi(rng.random(max(H, 1))).with_scores(x),
        lambda x: sightline.relative_bias(rng.normal(size=(max(H, 1), 2 * draw(st.integers(0, 8)) + 1))).with_scores(x),
        lambda x: sightline.bias(biases(rng, draw, extent, hides)).with_scores(x),
        lambda x: where(draw(masks(extent)), x, -np.inf if hides else -1.0),
        lambda x: np.tanh(x) * 3.0,
        lambda x: np.exp(np.minimum(x, 1.5)),
        lambda x: abs(x),
        lambda x: np.minimum(x, 0.5) + np.maximum(x, -0.5),
        lambda x: (abs(x) + 0.1) ** 1.5,
        lambda x: x**2 / 4,
        lambda x: np.log(1 + np.exp(x)),
        lambda x: np.log2(x * x + 1) - np.exp2(-abs(x)),
        lambda x: np.sqrt(x * x + 1) * np.sin(x) + np.cos(x),
        lambda x: where(x > 0, x, 0.1 * x),
        lambda x: x / (1 + abs(x)),
        lambda x: x * table(rng.normal(size=max(H, 1)))[h],
    ]
    return draw(st.sampled_from(outer))(inner)


# -- arrays --------------------------------------------------------------

lengths = st.one_of(st.integers(1, 9), st.integers(1, 40), st.integers(1, 150), st.just(0))
widths = st.one_of(st.integers(1, 8), st.integers(1, 80), st.sampled_from([16, 32, 64]))


@st.composite
def shapes(draw: Any, largest: int = LARGEST) -> tuple[tuple[int, ...], ...]:
    """Matching shapes of query, key and value: with and without heads, leading axes that broadcast."""
    rows, columns, d_k, d_v = draw(lengths), draw(lengths), draw(widths), draw(widths)
    axes = draw(st.sampled_from([2, 3, 4, 4, 4, 5, 6]))
    groups, group = (draw(st.integers(1, 3)), draw(st.integers(1, 3))) if axes > 3 else (1, 1)
    lead = [draw(st.sampled_from([1, 2, 3, 1, 2, 0])) for _ in range({2: 0, 3: 1}.get(axes, axes - 3))]
    while int(np.prod(lead)) * groups * group * rows * columns > largest:
        rows, columns, lead = (
            rows // 2,
            columns // 2,
            lead[:1] * len(lead) if max(lead, default=1) < 3 else [1] * len(lead),
        )
    heads = {"q": (groups * group,), "k": (groups,), "v": (groups,)} if axes > 3 else dict.fromkeys("qkv", ())
    tails = {"q": (rows, d_k), "k": (columns, d_k), "v": (columns, d_v)}
    found = []
    for name in "qkv":
        own = [length if draw(st.integers(0, 4)) else 1 for length in lead]
        skip = draw(st.integers(0, max(axes - 4, 0)))  # with four axes or more, outer ones may be missing
        found.append((*own[skip:], *heads[name], *tails[name]))
    return tuple(found)


@st.composite
def cases(
    draw: Any,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    dropout: bool = True,
    poison: bool = True,
    hides: bool = True,
    layouts: tuple[str, ...] = tuple(LAYOUTS),
    largest: int = LARGEST,
) -> Case:
    """A valid call of `sightline.attention`."""
    rng, dtype = draw(generators()), DTYPES[draw(st.sampled_from(dtypes))]
    shape = draw(shapes(largest))
    layout = [draw(st.sampled_from(layouts)) for _ in range(3)]
    arrays = [rng.normal(size=one).astype(dtype) for one in shape]
    case = Case(*(LAYOUTS[name](x) for name, x in zip(layout, arrays, strict=True)))
    extent = case.make_problem().extent
    if draw(st.integers(0, 3)):
        case.options["mask"] = draw(masks(extent))
    if draw(st.booleans()):
        case.options["score"] = draw(scores(extent, hides=hides))
    if draw(st.integers(0, 3)) == 0:
        case.options["scale"] = draw(st.sampled_from([0.0, -0.5, 1.0, 0.125]))
    if draw(st.integers(0, 3)) == 0:
        case.options["sinks"] = rng.normal(size=extent[1]).astype(draw(st.sampled_from([dtype, np.float32])))
    if dropout and draw(st.integers(0, 5)) == 0:
        case.options |= {"dropout": draw(st.sampled_from([0.1, 0.5, 1.0])), "seed": draw(st.integers(0, 2**64 - 1))}
    if poison and draw(st.integers(0, 2)) == 0:
        poisoned(draw, rng, case)
    return case


def poisoned(draw: Any, rng: np.random.Generator, case: Case) -> None:
    """Put NaN, ∞ or −∞ into keys and values: at positions hidden from all queries, or at any positions."""
    problem = case.make_problem()
    if 0 in problem.extent or problem.d_v == 0:
        return
    bad = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    seen = np.ones(problem.extent, bool) if problem.mask is None else dense_mask(problem)
    hidden = draw(st.booleans())
    unseen = np.flatnonzero(~seen.any((0, 1, 2))) if hidden else rng.permutation(problem.m)[:2]
    # A visible NaN value reaches the output if its weight is not 0; with large scores, rounding decides that.
    tame = hidden or not case.options.keys() & {"score", "scale"}
    which = draw(st.sampled_from([[1], [2], [1, 2]])) if tame else [1]
    arrays = [np.array(x) for x in case.arrays]  # layouts share memory between rows, so copies
    for k in which:
        columns = slice(None) if draw(st.booleans()) else slice(0, 1)
        arrays[k][..., unseen, columns] = bad
    case.query, case.key, case.value = arrays


def dense_mask(problem: Problem) -> Any:
    """Return the mask as a (B, H, n, m) bool array."""
    B, H, rows, columns = problem.extent
    return problem.mask.array(rows, columns, batch=B, heads=H).reshape(problem.extent)
