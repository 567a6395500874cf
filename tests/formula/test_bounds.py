"""Intervals contain every value; empty and full tiles are sound, precise for the usual masks, and cheap to compute."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sightline
from sightline import causal, documents, i, j, p, padding, prefix, s, table, where, window
from sightline.arrays.operations import namespace
from sightline.call.problem import make_problem
from sightline.errors import MaskError
from sightline.formula import tile_ranges
from sightline.formula.evaluate_array import ARRAY_RULES
from sightline.formula.expression import SYMBOLS, apply, table_lookup, walk
from sightline.formula.interval_arithmetic import compute_intervals
from sightline.formula.operators import OPERATORS
from sightline.formula.tables import TableBounds
from sightline.formula.tile_ranges import find_tile_ranges, find_witness
from sightline.reference.accuracy import compute_baseline
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from strategies import generators, masks, reals, wholes

NAMESPACE = namespace(np.zeros(1))
NUMBERS = st.one_of(
    st.integers(-9, 9).map(float),
    st.floats(-1e3, 1e3),
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, 0.5, 1e300, -1e-300]),
)


def samples(rng, low, high, whole):
    """Numbers of an interval, including its ends."""
    inside = rng.uniform(max(low, -1e300), min(high, 1e300), 20) if low < high else np.array([low])
    inside = np.concatenate([[low, high], np.clip(inside, low, high), np.clip(np.round(inside), low, high)])
    return inside[inside == np.round(inside)] if whole else inside


@pytest.mark.parametrize("name", OPERATORS)
def test_intervals_contain_every_value_of_an_operator(name):
    rule = OPERATORS[name]

    @settings(max_examples=60)
    @given(st.data(), st.booleans(), generators())
    def holds(data, whole, rng):
        inputs, taken, whole = [], [], whole or name == "bitwise_and"
        for place in range(rule.arity):
            if place in rule.conditions:
                low, high = data.draw(st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]))
                values = np.array([low, high])[rng.integers(0, 2, 40)] != 0
            else:
                low, high = sorted((data.draw(NUMBERS), data.draw(NUMBERS)))
                if whole:
                    low, high = (float(np.clip(np.round(end), -(2**20), 2**20)) for end in (low, high))
                values = rng.choice(samples(rng, low, high, whole), 40)
                values = values.astype(np.int64) if whole else values
            inputs.append((np.array([low]), np.array([high])))
            taken.append(values)
        with np.errstate(all="ignore"):
            result = ARRAY_RULES[name](NAMESPACE, *promoted(name, taken)).astype(float)
        low, high = bounds_of(name, inputs, whole)
        assert ((low <= result) & (result <= high) | np.isnan(result) & (low == -np.inf) & (high == np.inf)).all()

    holds()


def promoted(name, taken):
    """Arguments with the dtypes that `evaluate` passes: operators that always return floats get floats."""
    floats = OPERATORS[name].kind(("int",) * len(taken)) == "float"
    return [x.astype(float) if floats and x.dtype != bool else x for x in taken]


def bounds_of(name, inputs, whole):
    """Bounds of one operator applied to symbols with these intervals."""
    rule, names = OPERATORS[name], iter("ijb" if whole else "sss")
    box, nodes = {}, []
    for place, (low, high) in enumerate(inputs):
        if place in rule.conditions:
            node = table(np.array([False, True]))[SYMBOLS["h" if place == 0 else "n"]]
            box["h" if place == 0 else "n"] = (low, high)
        elif whole:
            node = SYMBOLS[next(names)]
            box[node.name] = (low, high)
        else:
            entries = np.array([low[0], high[0]])
            node = table(entries)[SYMBOLS["m"]]
            box["m"] = (np.array([0.0]), np.array([1.0]))
        nodes.append(node)
    formula = apply(name, *nodes)
    return compute_intervals(formula, box)[id(formula)]


EXTENT = (2, 3, 40, 50)


def at_every_pair(formula):
    return formula.array(EXTENT[2], EXTENT[3], batch=EXTENT[0], heads=EXTENT[1])


@settings(max_examples=250)
@given(st.one_of(masks(EXTENT), wholes(EXTENT), reals(EXTENT)), st.data())
def test_intervals_contain_every_value_of_a_formula(formula, data):
    """Over a rectangle of (b, h, i, j), for every part of the formula."""
    ranges = []
    for length in EXTENT:
        first = data.draw(st.integers(0, length - 1))
        ranges.append((first, data.draw(st.integers(first, length - 1))))
    box = {name: (np.array([float(a)]), np.array([float(z)])) for name, (a, z) in zip("bhij", ranges, strict=True)}
    box |= {name: (np.array([float(k)]),) * 2 for name, k in (("n", EXTENT[2]), ("m", EXTENT[3]))}
    found = compute_intervals(formula, box)
    inside = tuple(slice(a, z + 1) for a, z in ranges)
    for node in walk(formula):
        low, high = found[id(node)]
        values = at_every_pair(node)[inside].astype(float)
        unknown = (low == -np.inf) & (high == np.inf)
        assert (unknown | (low <= values) & (values <= high)).all(), str(node)


@settings(max_examples=200)
@given(generators(), st.integers(1, 4))
def test_table_bounds_contain_every_entry_of_a_range(rng, axes):
    lengths = rng.integers(1, [70, 40, 12, 9][:axes][-1] + 1, axes)
    values = np.broadcast_to(rng.normal(size=np.where(rng.random(axes) < 0.2, 1, lengths)), lengths)
    first = [rng.integers(0, length, 30) for length in lengths]
    last = [np.minimum(a + rng.integers(0, length, 30), length - 1) for a, length in zip(first, lengths, strict=True)]
    least, greatest = TableBounds(values).over(list(zip(first, last, strict=True)))
    for k in range(30):
        inside = values[tuple(slice(a[k], z[k] + 1) for a, z in zip(first, last, strict=True))]
        assert least[k] <= inside.min()
        assert greatest[k] >= inside.max()
        if all(a[k] == z[k] for a, z in zip(first, last, strict=True)):
            assert least[k] == greatest[k] == inside.min()


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor], ids=["NumPy", "torch"])
def test_the_bounds_of_repeated_entries_need_no_copy(convert):
    """A copy of every entry would take 8 TB."""
    row = np.arange(10.0**6)
    values = convert(row)
    values = np.broadcast_to(values, (10**6, 10**6)) if convert is np.asarray else values.expand(10**6, 10**6)
    bounds = TableBounds(values)
    least, greatest = bounds.over([(np.array([0, 5]), np.array([10**6 - 1, 900_000])), (0, np.array([10**6, 15]))])
    np.testing.assert_array_equal(least, [0, 0])
    np.testing.assert_array_equal(greatest, [10**6 - 1, 15])


# -- tiles -----------------------------------------------------------------------------------------------------------


def tiles_of(ranges):
    """(B, H, query blocks, key blocks): 0 empty, 1 full, 2 partial."""
    B, H, _, _ = ranges.extent
    kinds = np.zeros((B, H, ranges.query_blocks, ranges.key_blocks), int)
    for b, h, block in np.ndindex(B, H, ranges.query_blocks):
        for entry in ranges.row(b, h, block):
            kinds[b, h, block, ranges.first[entry] : ranges.last[entry]] = 1 if ranges.full[entry] else 2
    return kinds


def truth_of(mask, extent, query_block, key_block):
    """The same array, from every value of the mask."""
    B, H, n, m = extent
    values = mask.array(n, m, batch=B, heads=H).reshape(extent)
    kinds = np.zeros((B, H, -(-n // query_block), -(-m // key_block)), int)
    for at in np.ndindex(kinds.shape):
        b, h, r, c = at
        tile = values[b, h, r * query_block : (r + 1) * query_block, c * key_block : (c + 1) * key_block]
        kinds[at] = 1 if tile.all() else 2 if tile.any() else 0
    return kinds


@settings(max_examples=150)
@given(masks(EXTENT), st.sampled_from([1, 4, 16, 64]), st.sampled_from([1, 8, 16, 64]))
@example(np.minimum(np.sqrt(i - 5.0), 3.0) <= 3.0, 4, 8)  # NaN at i < 5
@example(np.exp(i * 100.0) * 0 <= 0, 4, 8)  # ∞ · 0
@example(i // (j - 3) < 5, 4, 8)
@example(~(np.log(j - 4.0) < 100), 4, 8)
def test_empty_tiles_have_no_pair_and_full_tiles_all_pairs(mask, query_block, key_block):
    ranges = find_tile_ranges(mask, EXTENT, query_block, key_block)
    found, truth = tiles_of(ranges), truth_of(mask, EXTENT, query_block, key_block)
    assert (truth[found == 0] == 0).all()
    assert (truth[found == 1] == 1).all()
    counted = {kind: int((found == k).sum()) for k, kind in enumerate(("empty", "full", "partial"))}
    assert ranges.tiles == counted


USUAL = {
    "causal": causal(),
    "lower right": causal("lower right"),
    "window": window(7, 2),
    "wide window": (i >= j) & (i - j < 33),
    "prefix": causal() | prefix(11),
    "documents": documents(lengths=[3, 20, 0, 17, 10]),
    "sorted documents": documents(np.sort(np.random.default_rng(0).integers(0, 5, (2, 50)))) & causal(),
    "padding": padding([0, 33]),
    "everything": where(i >= 0, i >= 0, i < 0),
}


@pytest.mark.parametrize("blocks", [(1, 1), (4, 8), (16, 16), (64, 8)])
@pytest.mark.parametrize("name", USUAL)
def test_usual_masks_have_no_unnecessary_partial_tile(name, blocks):
    extent = (2, 3, 50, 50) if "documents" in name else EXTENT  # a document table has the length of both axes
    found = tiles_of(find_tile_ranges(USUAL[name], extent, *blocks))
    assert np.array_equal(found, truth_of(USUAL[name], extent, *blocks))


@settings(max_examples=150)
@given(masks(EXTENT))
def test_find_witness_finds_a_pair_if_there_is_one(condition):
    at, values = find_witness(condition, EXTENT), at_every_pair(condition)
    assert (at is not None) == values.any()
    if at is not None:
        assert values[at]


@settings(max_examples=50)
@given(masks(EXTENT))
def test_sparsity_is_the_share_of_hidden_pairs(mask):
    batch, heads, n, m = EXTENT
    assert mask.sparsity(n, m, batch=batch, heads=heads) == pytest.approx(1 - at_every_pair(mask).mean(), abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(300, 200), (1, 1), (0, 5)])
def test_sparsity_of_whole_and_cut_tiles(n, m):
    mask = causal() & (j >= 0)
    allowed = sum(min(i + 1, m) for i in range(n))
    assert mask.sparsity(n, m) == (1 - allowed / (n * m) if n * m else 0)


def test_lengths_may_be_integers_of_numpy():
    n = np.int32(100_000)
    assert causal().sparsity(n) == causal().sparsity(100_000)


def test_sparsity_is_the_mean_over_the_sequences_and_heads_of_the_masks_arrays():
    assert sightline.padding([4, 2]).sparsity(4) == 0.25
    array = np.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4) % 5 == 0
    assert sightline.dense(array).sparsity(4) == pytest.approx(1 - array.mean(), abs=1e-12)


@pytest.mark.parametrize("formula", [i - j, s < 0], ids=repr)
def test_only_masks_have_a_sparsity(formula):
    with pytest.raises(MaskError, match="sparsity"):
        formula.sparsity(4)


@pytest.mark.parametrize("extent", [(0, 2, 5, 5), (1, 0, 5, 5), (1, 1, 0, 5), (1, 1, 5, 0)])
def test_no_pairs_no_tiles(extent):
    assert find_tile_ranges(causal(), extent, 4, 4).tiles == {"empty": 0, "full": 0, "partial": 0}


# -- cost ------------------------------------------------------------------------------------------------------------

LONG = 1 << 20


def long_documents():
    lengths = np.random.default_rng(0).integers(1, 1000, 4096)
    lengths = lengths[np.cumsum(lengths) <= LONG]
    return documents(lengths=np.append(lengths, LONG - lengths.sum()))


@pytest.mark.parametrize("make", [lambda: (i >= j) & (i - j < 256), long_documents], ids=["window", "documents"])
def test_tile_ranges_of_a_million_positions_evaluate_few_boxes(make, monkeypatch):
    """The number of boxes and the memory grow with n and not with n²."""
    boxes, compute = [], tile_ranges.compute_intervals

    def count(formula, box):
        boxes.append(max(np.size(end) for interval in box.values() for end in interval))
        return compute(formula, box)

    monkeypatch.setattr(tile_ranges, "compute_intervals", count)
    ranges = find_tile_ranges(make(), (1, 1, LONG, LONG), 64, 64)
    assert ranges.tiles["full"] + ranges.tiles["partial"] < 32 * LONG / 64
    assert LONG / 64 < sum(boxes) < LONG  # 35 and 40 for each block of queries
    tracemalloc.start()
    find_tile_ranges(make(), (1, 1, LONG, LONG), 64, 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 128 * LONG  # bytes; the dense mask would take 2⁴⁰


# -- reads outside a table ---------------------------------------------------------------------------------------------

ROW = table(np.arange(5.0))
GUARDED = {  # masks, scores and conditions of `mass` in which no value that counts depends on a read beyond 4
    "by and": {"mask": (ROW[j] > 0) & (j < 5)},
    "by or, not and where": {"mask": ~((j >= 5) | where(j < 3, ROW[j] > 9, ROW[j - 2] < 0))},
    "by a read": {"mask": table(np.arange(9) < 5)[j] & (ROW[j] > 0)},
    "by a condition beside one of s": {"score": where((s > 0) & (j < 5), s + ROW[j], s)},
    "inside a condition of s": {"score": where(s > 0, where(j < 5, s + ROW[j], s), s)},
    "in a sum": {"see": [sightline.sum(where(j < 5, p * ROW[j], 0), over=j)]},
    "in mass": {"see": [sightline.mass((j < 5) & (ROW[j] > 0))]},
    "in mass, by the mask": {"mask": j < 5, "see": [sightline.mass(ROW[j] > 2)]},
    "in mass, by the score": {"score": where(j < 5, s, -np.inf), "see": [sightline.mass(ROW[j] > 2)]},
}


@pytest.mark.parametrize("name", GUARDED)
def test_reads_that_are_guarded_raise_no_error(rng, name):
    """The expected results read a longer table. The second call uses what the first one prepared."""
    x = rng.normal(size=(1, 2, 9, 4))
    longer = table_lookup(lambda old: old.with_array(np.resize(old.array, 9)))
    problem = make_problem(x, x, x, **GUARDED[name]).map_formulas(lambda formula: formula.rewrite(lookup=longer))
    exact, rough = compute_stages(problem), compute_baseline(problem)
    factors = [statistic.factor.array(9) for statistic in problem.see]
    for _ in range(2):
        output, seen = sightline.attention(x, x, x, **({"see": ()} | GUARDED[name]))
        assert_within_budget(output, exact.output, rough.output)
        for found, factor in zip(seen, factors, strict=True):
            assert_within_budget(found, *((each * factor).sum(-1) for each in (exact.weights, rough.weights)))
