"""The named benchmarks for a CPU. A benchmark's targets are limits for its measured quantities.

Tests run small versions of the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sightline.errors import ParameterError
from sightline.formula.expression import SYMBOLS
from sightline.statistics import Statistic, entropy, lse, mass, max_score, pooled, received, top_k

from .cases import Benchmark, CaseGroup, Target
from .contenders import Sightline
from .host_cases import FirstCall
from .models import MODELS
from .peers import SightlineInJax
from .ragged import RAGGED
from .short_calls import OVERHEADS, SHORT_CALLS
from .workloads import CAUSAL, Documents, Mask, Passes, ToTable, Workload, series


def window(width: int) -> Mask:
    """Return a causal window mask of `width` keys.

    For n < 1,024 the window is width · n / 4096 keys wide, at least 2, so that small versions hide keys too.
    """

    def make_function(n: int, to_table: ToTable) -> Callable[..., Any]:
        reach = width if n >= 1024 else max(width * n // 4096, 2)
        return lambda b, h, i, j: (i >= j) & (i - j < reach)

    return Mask(f"causal window {width:,}", make_function)


# names of the other libraries that have a forward pass in float32, and in 16 bits
FLOAT32_PEERS = ("torch", "flex", "onnxruntime", "openvino", "jax", "zentorch", "vllm")
SIXTEEN_BIT_PEERS = ("torch", "flex", "openvino", "jax", "zentorch", "vllm")
i, j = SYMBOLS["i"], SYMBOLS["j"]
ROW_STATISTICS = {  # the statistics that the forward kernel computes in its own pass
    "lse": lse(),
    "max_score": max_score(),
    "entropy": entropy(),
    "mass": mass(abs(i - j) < 64),
}
THREE_STATISTICS = ("max_score", "entropy", "mass")
MAX_VIEW_SLOWDOWN = 1.03  # limit of the time on views of (B, n, H d), divided by the time on contiguous heads
MAX_FUSED_SLOWDOWN = 1.15  # limit of the time with statistics of the forward kernel, divided by the time without
# Upper limits of the time with statistics of a second pass, divided by the time without statistics: for one statistic,
# and for three that share the pass. A second pass repeats Q Kᵀ and the exponential.
MAX_SECOND_PASS_SLOWDOWN, MAX_SHARED_PASS_SLOWDOWN = 1.7, 1.9
BF16 = {"dtype": "bfloat16", "peak": "bfloat16", "baselines": SIXTEEN_BIT_PEERS}
BACKWARD: dict[str, Any] = {"passes": "backward", "baselines": ("torch", "jax")}
BOTH: Passes = "forward and backward"
ONE_THREAD = ("one thread",)
DECODE_SHARES = {"float32": 0.8, "bfloat16": 0.75, "float16": 0.75}  # limits of the share of the read bandwidth
LENGTHS, LONG_LENGTHS, MEMORY_LENGTHS = (1024, 2048, 4096, 8192), (32768, 65536, 131072), [2**k for k in range(16, 21)]
WINDOW_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)

IN_JAX = SightlineInJax("sightline", "Sightline", by_position=False)
IN_JAX_LAYOUT = SightlineInJax("by position", "JAX's layout", by_position=True)
NUMPY = Sightline("numpy", "NumPy", on_numpy=True)  # the same calls on NumPy arrays, without JAX


def share(limit: float) -> Target:
    return Target("share", limit)


def faster(peer: str, limit: float) -> Target:
    return Target("faster", limit, peer)


def _problem(name: str, *targets: Target, **options: Any) -> Workload:
    """Return a problem, by default a forward pass in float32 that is compared with the libraries in FLOAT32_PEERS.

    The heads are views of (B, n, H d), unless `options` ask for contiguous heads. If torch is among the baselines, the
    same problem on contiguous heads is timed too.
    """
    baselines = options.pop("baselines", FLOAT32_PEERS)
    if "torch" in baselines and not options.get("contiguous"):
        baselines, targets = (*baselines, "contiguous"), (*targets, Target("slower", MAX_VIEW_SLOWDOWN, "contiguous"))
    return Workload(name=name, targets=targets, baselines=baselines, **options)


def _see(name: str, *see: Statistic, limit: float, **options: Any) -> Workload:
    """Return a forward pass with statistics, compared with the pass without statistics and with dense computations."""
    baselines = ("without statistics", "dense", "mha")
    return _problem(f"see {name}", Target("slower", limit, baselines[0]), see=see, baselines=baselines, **options)


def _decode(dtype: str, G: int, limit: float) -> Workload:
    """Return a problem of one query per sequence on a long cache of keys. The memory's bandwidth limits its speed."""
    B = 1 if dtype == "float32" else 2  # K and V of one sequence of 16 bits fit the last-level cache of a processor
    more = {"n": 1, "m": 8192, "d_k": 128, "peak": "read", "contiguous": True, "baselines": SIXTEEN_BIT_PEERS}
    return _problem(f"decode {dtype} 32 on {G}", share(limit), dtype=dtype, B=B, H=32, G=G, **more)


def _views(dtype: str, word: str, passes: Passes) -> CaseGroup:
    """Return a group of problems on views of (B, n, H d), compared with contiguous heads and with torch on views."""
    shapes = (8, 512, 64), (12, 1024, 64), (8, 4096, 64), (8, 1024, 80), (32, 1024, 128), (16, 2048, 128)
    more: dict[str, Any] = {"dtype": dtype, "passes": passes, "baselines": ("contiguous", "torch")}
    cases = tuple(
        Workload(name=f"{H} × {n} × {d}" + " causal" * (mask is not None), H=H, n=n, d_k=d, mask=mask, **more)
        for H, n, d in shapes
        for mask in (None, CAUSAL)
    )
    name, description = f"views {word} {dtype}", "H × n × d, views of (B, n, H d) beside contiguous heads"
    return CaseGroup(name=name, group="views", description=description, cases=cases, beside="contiguous")


def _jax(name: str, lengths: tuple[int, ...], passes: tuple[Passes, ...], *others: Sightline) -> CaseGroup:
    """Return a group of calls under jax.jit, without and with the causal mask, of 8 heads of width 64.

    A case with "backward" in its name has a forward and a backward pass. `others` are more contenders.
    """
    cases = tuple(
        Workload(
            name=f"n {n}" + " causal" * (mask is not None) + " backward" * (each == BOTH),
            n=n,
            mask=mask,
            passes=each,
            ours=IN_JAX,
            baselines=(IN_JAX_LAYOUT, "jax", *others),
        )
        for n in lengths
        for mask in (None, CAUSAL)
        for each in passes
    )
    description = "1 × 8 heads, d 64, float32, under jit"
    return CaseGroup(name=name, group=name, description=description, cases=cases, peer="jax")


def _tangent(n: int, *operands: str) -> Workload:
    """Return a problem that computes the output and its tangent in one call, for tangents of these operands."""
    baselines = ("dense", "without tangents")
    return Workload(name=f"n {n} {', '.join(operands)}", H=2, n=n, peak="", tangents=operands, baselines=baselines)


TANGENTS = CaseGroup(
    name="tangents",
    group="tangents",
    description="1 × 2 heads, d 64, float32, output and tangent by torch.func.jvp",
    cases=tuple(
        _tangent(n, *operands) for n in (1024, 4096) for operands in (("query", "key", "value"), ("query",), ("value",))
    ),
    peer="dense",
    beside="without tangents",
)

BENCHMARKS: tuple[Benchmark, ...] = (
    _problem(
        "forward float32 d64",
        share(0.90),
        faster("torch", 1.35),
        faster("onnxruntime", 1.1),
        baselines=(*FLOAT32_PEERS, "mha"),
    ),
    _problem("forward float32 d128", share(0.90), faster("openvino", 1.05), d_k=128),
    _problem("forward float32 n1024", faster("torch", 1.35), faster("onnxruntime", 1.1), n=1024),
    _problem("forward float32 causal n1024", faster("torch", 1.6), mask=CAUSAL, n=1024),
    _problem("forward float32 causal n4096", faster("torch", 1.45), mask=CAUSAL),
    _problem("forward bfloat16 d64", share(0.80), faster("torch", 2.3), faster("openvino", 1.1), **BF16),
    _problem("forward bfloat16 d128", share(0.86), faster("torch", 2.3), faster("openvino", 1.1), d_k=128, **BF16),
    _problem("forward float16 d64", faster("torch", 1.9), baselines=SIXTEEN_BIT_PEERS, dtype="float16"),
    _problem("backward float32 d64", share(0.88), faster("torch", 1.35), **BACKWARD),
    _problem("backward float32 d128", share(0.88), faster("torch", 1.24), d_k=128, **BACKWARD),
    _problem("backward float32 causal", faster("torch", 1.4), mask=CAUSAL, **BACKWARD),
    _problem("backward bfloat16 d64", share(0.70), faster("torch", 1.7), **(BF16 | BACKWARD)),
    _problem("both n3001 d80", faster("torch", 1.3), passes=BOTH, H=6, n=3001, d_k=80, baselines=("torch",)),
    _problem("forward window 256", faster("torch", 20), faster("flex", 4), mask=window(256)),
    _problem("forward 16 documents n8192", faster("torch", 10), mask=Documents(16), n=8192),
    _problem(
        "forward dropout 0.1",
        faster("torch", 7),
        Target("slower", 1.35, "without dropout"),
        dropout=0.1,
        baselines=("torch", "without dropout"),
    ),
    _problem("forward d_v 32", faster("torch", 3), d_v=32),
    _problem("forward d_v 128", faster("torch", 3), d_v=128),
    # n is 2,048 here: the bias, torch's weights and their two gradients are (1, H, n, n), half a GiB each at n 4,096
    _problem("both bias n2048", faster("torch", 2.5), passes=BOTH, n=2048, bias=True, baselines=("torch",)),
    *(_decode(dtype, G, limit) for dtype, limit in DECODE_SHARES.items() for G in (8, 32)),
    _problem(
        "overhead",
        faster("torch", 1.0),
        Target("seconds", 1e-5, "numpy"),
        n=16,
        peak="",
        baselines=("torch", "numpy", "zentorch", "vllm"),
    ),
    FirstCall(name="first call", targets=(Target("seconds", 0.3, "compiled"), Target("seconds", 0.03, "from disk"))),
    _problem("threads forward", faster("one thread", 1.9), baselines=ONE_THREAD),
    _problem("threads backward", faster("one thread", 1.9), baselines=ONE_THREAD, passes="backward"),
    series(
        "growth window 256",
        "n",
        Target("spread", 1.15),
        Target("extra", 0.05),
        points=[Workload(name=f"n {n}", H=1, n=n, mask=window(256), baselines=()) for n in MEMORY_LENGTHS],
    ),
    *(_see(name, statistic, limit=MAX_FUSED_SLOWDOWN) for name, statistic in ROW_STATISTICS.items()),
    _see("three of rows", *(ROW_STATISTICS[name] for name in THREE_STATISTICS), limit=MAX_FUSED_SLOWDOWN),
    _see("received", received(), limit=MAX_SECOND_PASS_SLOWDOWN, peak=""),
    _see("top_k 8", top_k(8), limit=MAX_SECOND_PASS_SLOWDOWN, peak=""),
    _see("pooled 256", pooled(256, 256), limit=MAX_SECOND_PASS_SLOWDOWN, peak=""),
    _see("three of a second pass", received(), top_k(8), pooled(32, 32), limit=MAX_SHARED_PASS_SLOWDOWN, peak=""),
    series(
        "growth pooled 512",
        "n",
        Target("spread", 1.15),
        Target("growth", 1.15 * LONG_LENGTHS[-1] / LONG_LENGTHS[0]),
        points=[
            Workload(name=f"n {n}", H=1, n=n, mask=window(4096), see=(pooled(512, 512),), baselines=())
            for n in LONG_LENGTHS
        ],
    ),
    series(
        "cost by length",
        "n",
        points=[Workload(name=f"n {n}", n=n, mask=window(256), baselines=("torch", "flex")) for n in LENGTHS],
    ),
    series(
        "cost by area",
        "allowed",
        points=[Workload(name=f"w {w}", mask=window(w), baselines=("torch", "flex")) for w in WINDOW_WIDTHS],
    ),
    *(_views(dtype, *each) for dtype in ("float32", "bfloat16") for each in (("forward",) * 2, ("training", BOTH))),
    RAGGED,
    *SHORT_CALLS,
    *OVERHEADS,
    *MODELS,
    _jax("JAX", (1024, 2048, 4096), ("forward", BOTH)),
    _jax("JAX short calls", (1, 16, 64), ("forward",), NUMPY),
    TANGENTS,
)


def select(
    benchmarks: Sequence[Benchmark], only: Sequence[str] = (), dtype: str | None = None
) -> tuple[Benchmark, ...]:
    """Return the benchmarks that `only` and `dtype` select.

    A benchmark is selected if its name contains or matches one of the patterns in `only` and its dtype is `dtype`. If
    `only` is empty, every name is selected. If `dtype` is None, every dtype is selected.

    Raises
    ------
    ParameterError
        No benchmark is selected.
    """

    def fits(benchmark: Benchmark) -> bool:
        matches_name = any(word in benchmark.name or fnmatchcase(benchmark.name, word) for word in only)
        return (matches_name or not only) and (dtype is None or benchmark.dtype == dtype)

    found = tuple(benchmark for benchmark in benchmarks if fits(benchmark))
    if not found:
        filters = " or ".join(only) + (f" in {dtype}" if dtype else "")
        raise ParameterError(
            f"no problem called {filters}",
            "names from `python -m benchmarks --list` with the same --device, or patterns of names",
            f'--only "{benchmarks[0].name}"',
        )
    return found
