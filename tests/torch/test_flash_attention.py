"""The functions of FlashAttention and torch's `varlen_attn` beside a dense definition of each sequence in float64."""

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fault_planting import Fault, assert_found
from sightline.errors import DtypeError, ParameterError, ShapeError
from sightline.torch import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, varlen_attn
from sightline.torch.flash_attention import _attend_dense, _attend_packed
from sightline.torch.nested import Packing

normal = partial(torch.randn, dtype=torch.float64)


def define(query, key, value, causal, window, softcap, slopes, scale, first=0):
    """Return (output, lse) of one sequence (n, H, d) on keys (m, G, d), in float64."""
    (n, H, d), m = query.shape, len(key)
    query, key, value = (x.double().repeat_interleave(H // x.shape[1], 1) for x in (query, key, value))
    s = torch.einsum("ihd,jhd->hij", query, key) * (d**-0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    distance = torch.arange(n)[:, None] + m - n - torch.arange(m)
    s = s if slopes is None else s - slopes.double()[:, None, None] * distance.abs()
    left, right = (window[0], 0) if causal else window
    hidden = (left >= 0) & (distance > left) | (right >= 0) & (-distance > right) | (torch.arange(m) < first)
    s = s.masked_fill(hidden, -math.inf)
    return torch.einsum("hij,jhd->ihd", torch.softmax(s, -1).nan_to_num(0.0), value), torch.logsumexp(s, -1)


class Drawn:
    """Arguments of a call."""

    def __init__(self, seed, kind):
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.B, self.H, self.kind, self.d = rng.choice([1, 2, 3]), rng.choice([2, 4, 6]), kind, rng.choice([8, 16, 32])
        self.G = rng.choice([g for g in (1, 2, 3) if self.H % g == 0])
        self.causal, self.window = rng.random() < 0.5, (rng.choice([-1, 0, 3, 17]), rng.choice([-1, 0, 2, 9]))
        self.softcap, self.scale, self.slopes = rng.choice([0.0, 5.0]), rng.choice([None, 0.3]), None
        if rng.random() < 0.4:
            self.slopes = torch.rand(self.H) if rng.random() < 0.5 else torch.rand(self.B, self.H)
        if kind == "torch's":
            self.causal, self.softcap, self.slopes = False, 0.0, None

    def define(self, sequences, first=None):
        """Return lists of outputs and lse of (query, key, value) of each sequence."""
        found = []
        for b, arrays in enumerate(sequences):
            slopes = self.slopes if self.slopes is None or self.slopes.ndim == 1 else self.slopes[b]
            formulas = self.causal, self.window, self.softcap, slopes, self.scale
            found.append(define(*arrays, *formulas, 0 if first is None else first[b]))
        return list(zip(*found, strict=True))

    @property
    def options(self):
        if self.kind == "torch's":
            return {"window_size": self.window, "scale": self.scale}
        given = {"causal": self.causal, "softcap": self.softcap, "alibi_slopes": self.slopes}
        return given | {"window_size": self.window, "softmax_scale": self.scale}


def check(found, expected, inputs=()):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=2e-6)
    if inputs:
        d_output = torch.randn_like(found[0])
        pairs = [torch.autograd.grad((x[0] * d_output).sum(), inputs) for x in (found, expected)]
        torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-9)


def check_arrays(seed):
    case = Drawn(seed, "arrays")
    shapes = (case.rng.randint(1, 40), case.H), *[(case.rng.randint(1, 50), case.G)] * 2
    arrays = [normal(case.B, *shape, case.d, requires_grad=True) for shape in shapes]
    *found, _ = flash_attn_func(*arrays, return_attn_probs=True, **case.options)
    outputs, norms = case.define(zip(*arrays, strict=True))
    check(found, (torch.stack(outputs), torch.stack(norms)), arrays)


def check_packed(seed, kind="packed"):
    case = Drawn(seed, kind)
    lengths = [[case.rng.choice([0, 1, case.rng.randint(2, 40)]) for _ in range(case.B)] for _ in range(2)]
    lengths = [lengths[0]] * 2 if case.rng.random() < 0.4 else lengths
    starts = [torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in lengths]
    starts = [starts[0]] * 2 if lengths[0] is lengths[1] else starts
    totals = (sum(lengths[0]), case.H), (sum(lengths[1]), case.G), (sum(lengths[1]), case.G)
    arrays, used = [normal(*shape, case.d, requires_grad=True) for shape in totals], None
    if kind == "torch's":
        used = [case.rng.randint(0, length) for length in lengths[1]] if case.rng.random() < 0.5 else None
        options = {"enable_gqa": True, "return_aux": SimpleNamespace(lse=True), **case.options}
        found = varlen_attn(*arrays, *starts, 1, 1, seqused_k=None if used is None else torch.tensor(used), **options)
    else:
        *found, _ = flash_attn_varlen_func(*arrays, *starts, 1, 1, return_attn_probs=True, **case.options)
    parts = [x.split(lengths[k > 0]) for k, x in enumerate(arrays)]
    outputs, norms = case.define((q, k[:u], v[:u]) for q, k, v, u in zip(*parts, used or lengths[1], strict=True))
    check(found, (torch.cat(outputs), torch.cat(norms, 1)), arrays)


def check_cache(seed):
    case = Drawn(seed, "cache")
    n, size, pages = case.rng.choice([1, 1, 3]), 4, case.rng.randint(3, 6)
    new, capacity = case.rng.choice([0, n]), size * pages
    lengths = [case.rng.randint(n - new, capacity - new) for _ in range(case.B)]
    whole = [normal(case.B, capacity, case.G, case.d) for _ in range(2)]
    query, added = normal(case.B, n, case.H, case.d), [normal(case.B, new, case.G, case.d) for _ in range(2)]
    first = [case.rng.randint(0, length + new - n) for length in lengths] if case.rng.random() < 0.3 else None
    options = case.options | ({} if first is None else {"cache_leftpad": torch.tensor(first)})
    place, kind = torch.arange(case.B), case.rng.choice(["paged", "chosen", "plain"])
    caches = [x.clone() for x in whole]
    if kind == "paged":
        table = torch.randperm(case.B * pages).reshape(case.B, pages)
        for cache, x in zip(caches, whole, strict=True):
            cache.reshape(-1, size, case.G, case.d)[table.flatten()] = x.reshape(-1, size, case.G, case.d)
        unused = torch.arange(pages) * size >= torch.tensor(lengths)[:, None] + new  # their numbers may be any
        table = table.masked_fill(unused, case.rng.choice([-1, 99]))
        caches, options = [x.reshape(-1, size, case.G, case.d) for x in caches], options | {"block_table": table.int()}
    elif kind == "chosen":
        place = torch.randperm(case.B)
        caches, options = [x[place.argsort()] for x in whole], options | {"cache_batch_idx": place.int()}
    new_rows = added if new else (None, None)
    options |= {"cache_seqlens": torch.tensor(lengths).int(), "return_softmax_lse": True}
    found = flash_attn_with_kvcache(query, *caches, *new_rows, **options)
    rows = [[torch.cat([x[b, : lengths[b]], y[b]]) for x, y in zip(whole, added, strict=True)] for b in range(case.B)]
    outputs, norms = case.define(((query[b], *pair) for b, pair in enumerate(rows)), first)
    check(found, (torch.stack(outputs), torch.stack(norms)))


TORCHS = partial(check_packed, kind="torch's")
CHECKS = {"arrays": check_arrays, "packed": check_packed, "cache": check_cache, "torch's": TORCHS}


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 25), marks=pytest.mark.wide)], ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_drawn_arguments_give_the_definition(name, seeds):
    for seed in seeds:
        CHECKS[name](seed)


FAULTS = {
    "positions from the first key": (check_arrays, Fault(flash_attn_func, "i + (m - n)", "i + 0")),
    "a window too wide": (check_arrays, Fault(_attend_dense, "position - left", "position - left - 1")),
    "the ends of other keys": (check_packed, Fault(_attend_packed, "key_starts[1:]", "key_starts[:-1]")),
    "keys past those in use": (TORCHS, Fault(Packing.of.__func__, "start + length", "start + length + 1")),
    "new rows not read": (check_cache, Fault(flash_attn_with_kvcache, "padding(lengths)", "padding(lengths - new)")),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_seen(name, monkeypatch):
    run, fault = FAULTS[name]
    assert_found(fault, monkeypatch, lambda: [run(seed) for seed in range(25)], "not close|not equal")


X, S, CACHE, T = torch.randn(6, 2, 8), torch.tensor([0, 2, 6]), torch.zeros(2, 4, 2, 8), torch.tensor
ARRAYS = partial(flash_attn_func, q=X[None], k=X[None], v=X[None])
PACK = partial(flash_attn_varlen_func, X, X, X, cu_seqlens_q=S, cu_seqlens_k=S, max_seqlen_q=4, max_seqlen_k=4)
CACHE_CALL = partial(flash_attn_with_kvcache, q=CACHE[:1, :1], k_cache=CACHE[:1], v_cache=CACHE[:1])
REFUSED = [  # a call, an argument that errors name, and values of it
    (PACK, "cu_seqlens_q", [T([0, 4, 2]), T([1, 2, 6]), T([0, 2, 5]), S.float(), S[None], None]),
    (PACK, "cu_seqlens_k", [T([0, 2, 5]), T([0, 6]), [0, 2, 6], None]),
    (partial(varlen_attn, X, X, X, S, S, 4, 4), "seqused_k", [T([3, 0]), T([-1, 0]), T([1]), [1, 1]]),
    (partial(varlen_attn, X, X[:, :1], X[:, :1], S, S, 4, 4), "enable_gqa", [False]),
    (ARRAYS, "alibi_slopes", [torch.ones(3), torch.ones(2, 2), torch.ones(1, 1, 2), [1.0, 1.0]]),
    (ARRAYS, "window_size", [None, 3, (3,), (1, 2, 3), (0.5, 2)]),
    (partial(ARRAYS, return_attn_probs=True), "dropout_p", [0.1]),
    (CACHE_CALL, "cache_seqlens", [-1, 5, 0.5, T([1, 1])]),
    (CACHE_CALL, "cache_leftpad", [[0], T([0.5]), T([0, 0])]),
    (CACHE_CALL, "cache_batch_idx", [T([1]), T([-1]), T([0, 0])]),
    (CACHE_CALL, "block_table", [T([[1]]), T([[-1]]), T([0]), T([[0], [0]]), T([[0.5]]), [[0]]]),
    (partial(CACHE_CALL, block_table=T([[0]])), "cache_batch_idx", [T([0])]),
    (partial(CACHE_CALL, v=CACHE[:1], cache_seqlens=0), "k", [None, CACHE, CACHE[:1, :, :1], CACHE[:1].double()]),
    (partial(CACHE_CALL, k=CACHE[:1] + 1, cache_seqlens=0), "v", [CACHE, CACHE[:1, :, :1], CACHE[:1].double()]),
    (partial(CACHE_CALL, k=CACHE[:1] + 1, v=CACHE[:1] + 1, cache_seqlens=0), "window_size", [3, (0.5, 2)]),
    (CACHE_CALL, "rotary_sin", [X]),
    (partial(CACHE_CALL, k_cache=CACHE[:1]), "q", [CACHE[:1, :1].int()]),
    (CACHE_CALL, "k_cache", [CACHE[0], CACHE[:1].double(), CACHE[:1].bfloat16(), None]),
    (CACHE_CALL, "v_cache", [CACHE[:1, :3], CACHE[0], CACHE[:1].double()]),
]


@pytest.mark.parametrize(("call", "name", "values"), REFUSED)
def test_what_cannot_be_right_is_refused(call, name, values):
    for value in values:
        with pytest.raises((ParameterError, ShapeError, DtypeError), match=rf"\b{name}\b"):
            call(**{name: value})
    assert not CACHE.any()  # nothing was written
