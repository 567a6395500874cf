"""Drawn calls that are repeated: with other contents until they are direct, then with other lengths of every array.

Each array of a call (query, key, value, tables, masks, biases, sinks) has a drawn dtype, memory and library. All arrays
of a call stay in their memory layout while the contents change. `Repetition.check` compares every call with the float64
definition, which reads copies. One call has few entries, and all of them may be rounded well by luck in the dense
computation that sets the budget of errors. So the rows of all calls of a repetition are compared together.
"""

import tempfile
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

import sightline
from cached_calls import run_in_python
from gradient_checks import check as check_gradients
from sightline import b, h, i, j, m, n, s, table, where
from sightline.arrays.operations import to_numpy
from sightline.call.kernel import Gradients
from sightline.errors import SightlineError
from sightline.reference.accuracy import NUM_ORDERS, compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import LAYOUTS, assert_within_budget
from strategies import Case, to_torch

# -- memory ------------------------------------------------------------------------------------------------------------


def _in_records(array):
    """A field of an array of records."""
    records = np.zeros(array.shape, [("before", np.int8), ("entry", array.dtype), ("after", np.int16)])
    records["entry"] = array
    return records["entry"]


def _in_file(array):
    """A memory map of a file that cannot be written to."""
    with tempfile.TemporaryFile() as file:
        file.write(np.ascontiguousarray(array).tobytes() or b"\0")
        file.flush()
        return np.asarray(np.memmap(file, array.dtype, "r", shape=array.shape)) if array.size else array


def _read_only(array):
    array.flags.writeable = False
    return array


MEMORY = {  # by name: a function that returns an equal array in another memory; "repeated" ones have other contents
    **{name: LAYOUTS[name] for name in ("contiguous", "Fortran", "backwards", "gaps", "unaligned")},
    "one axis turned": lambda x: np.moveaxis(np.array(np.moveaxis(x, 0, -1)), -1, 0),
    "records": _in_records,
    "file": _in_file,
    "read-only": lambda x: _read_only(np.array(x)),
    "read-only and turned": lambda x: _read_only(np.array(x.T).T),
    "read-only with gaps": lambda x: _read_only(LAYOUTS["gaps"](x)),
    "read-only and backwards": lambda x: _read_only(LAYOUTS["backwards"](x)),
    "repeated along the first axis": lambda x: np.broadcast_to(x[:1].copy(), x.shape),
    "repeated along the last axis": lambda x: np.broadcast_to(x[..., :1].copy(), x.shape),
}
LIBRARIES = {"numpy": ["numpy"], "torch": ["torch"], "tables of NumPy": ["numpy"], "both": ["numpy", "torch"]}
DTYPES = (np.float32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
TABLE_DTYPES = {
    "b": (bool,),
    "i": (np.int64, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint32),
    "f": (np.float32, np.float64, np.float16),
}

# -- formulas ----------------------------------------------------------------------------------------------------------


class Contents:
    """Draws the arrays of one call of a `Repetition`, in the order in which the formulas ask for them.

    B, H, n, m : the extent
    few : the length of the tables whose length follows from nothing else
    index : a constant index, the same in every call of a repetition
    copies : NumPy copies of the arrays. If they are given, they are the arrays.
    """

    def __init__(self, rng, call, extent, few, copies=None):
        self.rng, self.call, self.few, self.index = rng, call, few, call.index
        self.B, self.H, self.n, self.m = extent
        self.given, self.copies = copies, []

    def add(self, kind, values):
        """Return the values as the next array of the call, in the drawn dtype, memory and library."""
        index = len(self.copies)
        if self.given is not None:
            self.copies.append(self.given[index])
            return self.given[index]
        place, dtypes = self.call.places[index], TABLE_DTYPES[kind]
        array = self.call.memory[place.memory](np.asarray(values, dtypes[place.dtype % len(dtypes)]))
        self.copies.append(np.array(array))
        return to_torch(array) if place.library == "torch" and array.dtype != np.uint32 else array

    def integers(self, low, high, *shape):
        return self.add("i", self.rng.integers(low, max(high, low + 1), shape))

    def floats(self, *shape):
        return self.add("f", self.rng.normal(size=shape))

    def booleans(self, *shape):
        return self.add("b", self.rng.random(shape) < 0.7)

    def number(self, low, high):
        """A number of a formula; other calls have other numbers."""
        return self.choose(range(low, high))

    def choose(self, choices):
        """One of the choices; other calls have others."""
        if self.given is not None:
            self.copies.append(self.given[len(self.copies)])
        else:
            self.copies.append(choices[self.rng.integers(len(choices))])
        return self.copies[-1]


def _row(c):
    """A function that reads a row of a table at a constant."""
    limits = table(c.integers(1, c.m + 1, c.few, c.B))
    return lambda b, h, i, j: j < limits[c.index][b]


MASKS = {
    "none": lambda c: None,
    "causal": lambda c: i >= j,
    "window": lambda c: (i >= j) & (i - j < c.number(2, 30)),
    "padding": lambda c: sightline.padding(c.integers(0, c.m + 1, c.B)),
    "documents": lambda c: sightline.documents(c.integers(0, 4, c.B, max(c.n, c.m))),
    "one list of documents": lambda c: sightline.documents(c.integers(0, 3, max(c.n, c.m))),
    "dense": lambda c: c.booleans(c.B, 1, c.n, c.m),
    "dense for heads": lambda c: sightline.dense(c.booleans(c.H, c.n, c.m)),
    "dense rows": lambda c: c.booleans(c.n, c.m),
    "a row of keys": lambda c: c.booleans(c.B, 1, 1, c.m),
    "constant index": lambda c: j < table(c.integers(0, c.m + 1, c.few))[c.index],
    "constant index from the end": lambda c: j < table(c.integers(0, c.m + 1, c.few))[-1 - c.index],
    "constant beside a symbol": lambda c: j < table(c.integers(0, c.m + 1, c.H, c.few))[h, c.index],
    "row of a function": _row,
    "index from heads": lambda c: j < table(c.integers(0, c.m + 1, c.few))[h * 2],
    "index from a shifted batch": lambda c: j < table(c.integers(0, c.m + 1, c.few))[b + 1],
    "index by number": lambda c: j < table(c.integers(0, c.m + 1, c.few + 9))[h + c.number(2, 9)],
    "index by a length": lambda c: j <= table(c.integers(0, c.m, c.n + c.few))[n],
    "index by a table": lambda c: j < table(c.integers(0, c.m + 1, c.few))[table(c.integers(0, c.few, c.B))[b]],
    "guarded": lambda c: (j < c.few) & table(c.booleans(c.few))[j],
    "clipped": lambda c: table(c.booleans(c.few))[np.clip(i - j, 0, c.few - 1)],
}
SCORES = {
    "none": lambda c: None,
    "slopes": lambda c: sightline.alibi(c.floats(c.H)),
    "table by head": lambda c: s + table(c.floats(c.H))[h] * (i - j) / 8,
    "bias": lambda c: sightline.bias(c.floats(1, c.H, c.n, c.m)),
    "bias of rows": lambda c: sightline.bias(c.floats(c.n, c.m)),
    "bias that hides": lambda c: sightline.bias(c.add("f", np.where(c.rng.random((c.n, c.m)) < 0.2, -np.inf, 0.5))),
    "constant index": lambda c: s * table(c.floats(c.few))[c.index],
    "constant beside a symbol": lambda c: s + table(c.floats(c.H, c.few))[h, c.index] * j / 9,
    "relative": lambda c: s + table(c.floats(c.H, c.n + c.m - 1))[h, i - j + m - 1],
    "index by a length": lambda c: s * table(c.floats(c.m + c.few))[m],
    "remainder": lambda c: s + table(c.floats(c.H, 7))[h, (i - j) % 7],
    "chosen": lambda c: where(table(c.booleans(c.few))[c.index], s, s / 2 - c.number(3, 9)),
}


MIN_ROWS = 24  # of output, so that the dense computation does not round every row well by luck
SEEDS = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)  # of dropout


@dataclass
class Place:
    """How the arrays at one place of a call are made.

    library : "numpy" or "torch", of tables and masks
    dtype : the number of the dtype in `TABLE_DTYPES`
    memory : the name of the memory in `MEMORY`
    """

    library: str
    dtype: int
    memory: str = "contiguous"


class Repetition:
    """A drawn structure of a call, and its calls."""

    def __init__(self, seed, memory=MEMORY):
        self.rng, self.memory = np.random.default_rng(seed), memory
        rng = self.rng
        kind = str(rng.choice(list(LIBRARIES)))
        self.in_torch = kind != "numpy"
        self.dtype = DTYPES[rng.integers(len(DTYPES))]
        self.places = [Place(str(rng.choice(LIBRARIES[kind])), int(rng.integers(99))) for _ in range(6)]
        self.operands = [Place(kind, 0) for _ in "qkv"]
        self.draw_memory()
        self.mask, self.score = str(rng.choice(list(MASKS))), str(rng.choice(list(SCORES)))
        self.has_sinks, self.sees = rng.random() < 0.2, rng.random() < 0.3
        self.differentiates = self.in_torch and rng.random() < 0.3
        self.B, self.G, self.group = (int(x) for x in rng.integers(1, 3, 3))
        self.d = int(rng.choice([3, 8, 16]))
        self.queries = int(rng.integers(1, rng.choice([4, 40, 100])))
        self.index = int(rng.integers(0, 6))
        self.options = {"threads": 1} if rng.random() < 0.3 else {}
        self.is_direct = bool(rng.choice([True, False]))
        self.dropout = float(rng.choice([0.1, 0.5])) if rng.random() < 0.2 else 0.0
        # for each call: the result, the definition's result, the sizes of its terms, the dense computation's results
        self.results = {"output": [], "lse": []}

    def __repr__(self):
        calls = f"{self.B}×{self.G}×{self.group} d={self.d} mask={self.mask!r} score={self.score!r} index={self.index}"
        kind = f"{np.dtype(self.dtype)} in_torch={self.in_torch} sinks={self.has_sinks} sees={self.sees}"
        kind += f" dropout={self.dropout} differentiates={self.differentiates}"
        return f"{calls} {kind} {self.operands} {self.places}"

    def draw_memory(self):
        """Draw the memory of each array anew."""
        for place in (*self.operands, *self.places):
            place.memory = str(self.rng.choice(list(self.memory)))

    def draw_extent(self):
        """Return n, m and the length of tables that follows from nothing else.

        The calls of one family have the same small number of queries, or any large one.
        """
        n = int(self.rng.integers(64, 80)) if self.queries >= 64 else self.queries
        return n, int(self.rng.integers(1, 90 if n < 4 else 40)), int(self.rng.integers(1, 9))

    def check(self, lengths=3):
        """Run every call of the repetition. Return how many calls ran, and how many were refused, as they should be."""
        counts = [0, 0]
        with pytest.MonkeyPatch.context() as patch:
            if not self.is_direct:
                run_in_python(patch)
            for extent in range(lengths):
                size = self.draw_extent()
                if self.rng.random() < 0.5:
                    self.draw_memory()
                for _ in range(4 if extent == 0 else 3):
                    counts[self.check_call(*size)] += 1
                if self.rng.random() < 0.5:  # other lengths of tables, the same of query, key and value
                    counts[self.check_call(*size[:2], int(self.rng.integers(1, 9)))] += 1
            for _ in range(40):
                if sum(len(call[0]) for call in self.results["output"]) < MIN_ROWS:
                    counts[self.check_call(*self.draw_extent())] += 1
        for name, results in self.results.items():
            if results:
                actual, oracle, terms = (np.concatenate([call[k] for call in results]) for k in range(3))
                baseline = np.concatenate([call[3] for call in results], axis=1)
                assert_within_budget(actual, oracle, baseline, f"{name} of {self}", terms)
        return counts

    def check_call(self, n, m, few):
        """Check a call with new contents. Return True if it is refused, as the definition refuses it."""
        B, G, H = self.B, self.G, self.G * self.group
        shapes = (B, H, n, self.d), (B, G, m, self.d), (B, G, m, self.d)
        arrays = [
            self.memory[place.memory](self.rng.normal(size=shape).astype(self.dtype))
            for place, shape in zip(self.operands, shapes, strict=True)
        ]
        contents = Contents(self.rng, self, (B, H, n, m), few)
        failure = expected = None
        try:
            given = self.build(contents)
        except SightlineError as error:  # a constant index from the end
            failure = error
        try:
            copies = self.build(Contents(np.random.default_rng(0), self, (B, H, n, m), few, contents.copies))
            case = Case(*map(np.array, arrays), copies)
            problem = case.make_problem()
        except SightlineError as error:
            expected = error
        if failure is None:
            operands = [to_torch(x) for x in arrays] if self.in_torch else arrays
            for x in operands if self.differentiates else ():
                x.requires_grad_()
            try:
                answer = sightline.attention(*operands, **given, **self.options)
            except SightlineError as error:
                failure = error
        assert type(failure) is type(expected), f"{failure!r} beside the definition's {expected!r} of {self}"
        if failure is not None:
            return True
        output, lse = (answer[0], answer[1][0]) if "see" in given else (answer, None)
        oracle, baseline = compute_stages(problem), compute_baseline(problem)
        terms = term_sizes(problem, oracle.weights)
        self.keep("output", to_numpy(output).astype(self.dtype), oracle.output, terms, baseline.output)
        if lse is not None:
            own = to_numpy(lse).astype(problem.accumulator)
            self.keep("lse", own, oracle.lse, np.ones_like(oracle.lse), baseline.lse)
        if self.differentiates:
            self.check_gradients(case, operands, output, lse)
        return False

    def keep(self, name, actual, oracle, terms, baseline):
        """Keep a result of a call, for the comparison of all calls. The lse of all calls is one row of the budget."""
        shape = (-1,) if name == "lse" else (-1, oracle.shape[-1])
        orders = np.resize(baseline, (NUM_ORDERS, *oracle.shape)).reshape(NUM_ORDERS, *oracle.reshape(shape).shape)
        self.results[name].append((*(x.reshape(shape) for x in (actual, oracle, terms)), orders))

    def build(self, contents):
        """Return the options of a call."""
        options = {"mask": MASKS[self.mask](contents), "score": SCORES[self.score](contents)}
        if self.has_sinks:
            options["sinks"] = contents.floats(contents.H)
        if self.sees:
            options["see"] = [sightline.lse()]
        if self.dropout:
            options |= {"dropout": self.dropout, "seed": contents.choose(SEEDS)}
        return options

    def check_gradients(self, case, operands, output, lse):
        def differentiate(_, d_output, d_lse, __):
            total = (output * d_output).sum()
            if lse is not None:
                total = total + (torch.where(torch.isfinite(lse), lse, 0.0) * d_lse).sum()
            query, key, value = torch.autograd.grad(total, operands)
            return Gradients(query, key, value, None, None)

        case.options.pop("see", None)
        check_gradients(case, "torch", differentiate, has_lse=lse is not None)
