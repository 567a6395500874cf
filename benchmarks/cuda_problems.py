"""The named problems for a GPU, with their targets.

Unless a problem says otherwise, it has bfloat16 arrays, 16 heads of width 128, and 16,384 tokens in all its sequences
together. The targets were set for an H200. Figures that others published for cuDNN 9.19 on an H200 are printed for
comparison only; no target uses these figures.
"""

from __future__ import annotations

from typing import Any

from sightline.statistics import Statistic, received

from .cases import BEST, Benchmark, Target
from .cpu_problems import MAX_SECOND_PASS_SLOWDOWN, ROW_STATISTICS, THREE_STATISTICS, window
from .host_cases import Planning
from .short_calls import CUDA_SHORT_CALLS
from .workloads import CAUSAL, Documents, Mask, Score, ToTable, Workload

TOKENS = 16384
DEFAULT_SHAPE: dict[str, Any] = {"dtype": "bfloat16", "H": 16, "d_k": 128, "peak": "matmul"}
FUSED_PEERS = ("flash", "cudnn", "efficient", "flex")
PUBLISHED = {  # published TFLOP/s of cuDNN 9.19 on an H200, by (pass, n, mask)
    ("forward", 8192, "full"): 691,
    ("backward", 8192, "full"): 594,
    ("forward", 8192, "causal"): 644,
    ("backward", 8192, "causal"): 541,
    ("forward", 16384, "full"): 702,
    ("backward", 16384, "full"): 612,
}
MIN_SPEED_OF_BEST = {"forward": 0.95, "backward": 0.90}  # lower limits of the best peer's time / Sightline's time
MIN_SPEEDUP_OVER_FLEX = 1.3
MAX_FUSED_SLOWDOWN = 1.10  # limit of the time with statistics of the forward kernel, divided by the time without
MIN_SHARE_OF_COPY = 0.85
MAX_PLANNING_SECONDS = 0.020


def _softcap(cap: float) -> Score:
    def make_function(H: int, to_table: ToTable) -> Any:
        import torch  # FlexAttention compiles torch.tanh, and Sightline's formulas accept torch.tanh too

        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)

    return Score(f"softcap {cap:g}", make_function)


def _alibi(H: int, to_table: ToTable) -> Any:
    from sightline.formula.library import alibi_slopes

    slopes = to_table(alibi_slopes(H).astype("float32"))
    return lambda s, b, h, i, j: s - slopes[h] * (i - j)


def _prefix(length: int) -> Mask:
    """Return a causal mask that also allows the first `length` keys to every query.

    For n < 8,192 the number of these keys is length · n / 8192, and at least 2.
    """

    def make_function(n: int, to_table: ToTable) -> Any:
        prefix = min(length, max(length * n // 8192, 2))
        return lambda b, h, i, j: (j < prefix) | (i >= j)

    return Mask(f"prefix {length:,}", make_function)


def _workload(name: str, n: int, *targets: Target, **more: Any) -> Workload:
    return Workload(name=name, n=n, B=max(TOKENS // n, 1), targets=targets, **(DEFAULT_SHAPE | more))


def _fused(passes: Any, n: int, mask: Mask | None) -> Workload:
    """Return a problem that torch's fused kernels support."""
    mask_name = "causal" if mask else "full"
    figure = PUBLISHED.get((passes, n, mask_name))
    published = f"cuDNN 9.19, as published for an H200: {figure} TFLOP/s" if figure else ""
    target, baselines = Target("faster", MIN_SPEED_OF_BEST[passes], BEST), (*FUSED_PEERS, "planned")
    more: dict[str, Any] = {"passes": passes, "mask": mask, "baselines": baselines, "published": published}
    return _workload(f"{passes} {mask_name} n{n}", n, target, **more)


def _formula(name: str, passes: Any, **formulas: Any) -> Workload:
    """Return a problem that FlexAttention supports and torch's fused kernels do not."""
    target = Target("faster", MIN_SPEEDUP_OVER_FLEX, "flex")
    return _workload(f"{passes} {name}", 8192, target, passes=passes, baselines=("flex",), **formulas)


def _see(name: str, *see: Statistic, limit: float, baselines: tuple[str, ...] = ()) -> Workload:
    """Return a forward pass with statistics, compared with the pass without statistics."""
    target = Target("slower", limit, "without statistics")
    return _workload(f"see {name}", 8192, target, see=see, baselines=("without statistics", *baselines))


FORMULAS: dict[str, dict[str, Any]] = {
    "softcap": {"score": _softcap(30.0), "mask": CAUSAL},
    "alibi": {"score": Score("ALiBi", _alibi), "mask": CAUSAL},
    "documents": {"mask": Documents(16)},
    "window": {"mask": window(1024)},
    "prefix": {"mask": _prefix(1024)},
}
PASSES = ("forward", "backward")

BENCHMARKS: tuple[Benchmark, ...] = (
    *(_fused(passes, n, mask) for passes in PASSES for n in (8192, 16384) for mask in (None, CAUSAL)),
    *(_formula(name, passes, **formulas) for name, formulas in FORMULAS.items() for passes in PASSES),
    Workload(
        name="decode",
        H=32,
        G=8,
        n=1,
        m=65536,
        d_k=128,
        dtype="bfloat16",
        peak="copy",
        cuda_graph=True,
        baselines=FUSED_PEERS,
        targets=(Target("share", MIN_SHARE_OF_COPY),),
    ),
    *(_see(name, statistic, limit=MAX_FUSED_SLOWDOWN) for name, statistic in ROW_STATISTICS.items()),
    _see("three of rows", *(ROW_STATISTICS[name] for name in THREE_STATISTICS), limit=MAX_FUSED_SLOWDOWN),
    _see("received", received(), limit=MAX_SECOND_PASS_SLOWDOWN, baselines=("dense",)),
    Planning(
        name="planning",
        mask=window,
        width=4096,
        n=131072,
        targets=(Target("seconds", MAX_PLANNING_SECONDS, "new mask"),),
    ),
    *CUDA_SHORT_CALLS,
)
