"""The named problems of a GPU: bfloat16, 16,384 tokens in all, 16 heads, d 128, each with what it is held to.

Targets were set for an H200. Beside them stand figures published for cuDNN 9.19 on one: others measured them, on their
machine, and they are there to be looked at, not judged by.
"""

from __future__ import annotations

from typing import Any

from ..statistics import Statistic, received
from .problems import CAUSAL, ROWS, documents, window
from .races import BEST, Mask, Planning, Problem, Race, Read, Score, Target

__all__ = ["PROBLEMS"]

TOKENS = 16384
SHAPE: dict[str, Any] = {"dtype": "bfloat16", "H": 16, "d_k": 128, "peak": "matmul"}
FUSED = ("flash", "cudnn", "efficient", "flex")
PUBLISHED = {  # TFLOP/s of cuDNN 9.19 on an H200, by passes, length and mask
    ("forward", 8192, "full"): 691,
    ("backward", 8192, "full"): 594,
    ("forward", 8192, "causal"): 644,
    ("backward", 8192, "causal"): 541,
    ("forward", 16384, "full"): 702,
    ("backward", 16384, "full"): 612,
}
OF_BEST = {"forward": 0.95, "backward": 0.90}  # the best peer's time over ours
OF_FLEX = 1.3
RIDING, AGAIN = 1.10, 1.7  # times a plain pass: along with it, and with Q Kᵀ and its power once more
OF_COPY = 0.85
PLANNED = 0.020  # s


def _softcap(cap: float) -> Score:
    def write(H: int, read: Read) -> Any:
        import torch  # whose tanh FlexAttention can compile and formulas understand

        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)

    return Score(f"softcap {cap:g}", write)


def _alibi(H: int, read: Read) -> Any:
    from ..formula.library import alibi_slopes

    slopes = read(alibi_slopes(H).astype("float32"))
    return lambda s, b, h, i, j: s - slopes[h] * (i - j)


def _prefix(length: int) -> Mask:
    """All of the first keys, the others causally; in short sequences the share it has of 8,192."""

    def write(n: int, read: Read) -> Any:
        seen = min(length, max(length * n // 8192, 2))
        return lambda b, h, i, j: (j < seen) | (i >= j)

    return Mask(f"prefix {length:,}", write)


def _race(name: str, n: int, *targets: Target, **more: Any) -> Race:
    return Race(name=name, n=n, B=max(TOKENS // n, 1), targets=targets, **(SHAPE | more))


def _fused(passes: Any, n: int, mask: Mask | None) -> Race:
    """A problem that torch's fused kernels know."""
    kind = "causal" if mask else "full"
    figure = PUBLISHED.get((passes, n, kind))
    said = f"cuDNN 9.19, as published for an H200: {figure} TFLOP/s" if figure else ""
    target = Target("faster", OF_BEST[passes], BEST)
    return _race(
        f"{passes} {kind} n{n}",
        n,
        target,
        passes=passes,
        mask=mask,
        against=(*FUSED, "planned"),
        published=said,
    )


def _formula(name: str, passes: Any, **formulas: Any) -> Race:
    """A problem they do not know, beside FlexAttention."""
    target = Target("faster", OF_FLEX, "flex")
    return _race(f"{passes} {name}", 8192, target, passes=passes, against=("flex",), **formulas)


def _see(name: str, *see: Statistic, limit: float, against: tuple[str, ...] = ()) -> Race:
    target = Target("slower", limit, "without statistics")
    return _race(f"see {name}", 8192, target, see=see, against=("without statistics", *against))


FORMULAS: dict[str, dict[str, Any]] = {
    "softcap": {"score": _softcap(30.0), "mask": CAUSAL},
    "alibi": {"score": Score("ALiBi", _alibi), "mask": CAUSAL},
    "documents": {"mask": documents(16)},
    "window": {"mask": window(1024)},
    "prefix": {"mask": _prefix(1024)},
}
PASSES = ("forward", "backward")

PROBLEMS: tuple[Problem, ...] = (
    *(_fused(passes, n, mask) for passes in PASSES for n in (8192, 16384) for mask in (None, CAUSAL)),
    *(_formula(name, passes, **formulas) for name, formulas in FORMULAS.items() for passes in PASSES),
    Race(
        name="decode",
        H=32,
        G=8,
        n=1,
        m=65536,
        d_k=128,
        dtype="bfloat16",
        peak="copy",
        captured=True,
        against=FUSED,
        targets=(Target("share", OF_COPY),),
    ),
    *(_see(name, statistic, limit=RIDING) for name, statistic in ROWS.items()),
    _see("three of rows", ROWS["max_score"], ROWS["entropy"], ROWS["mass"], limit=RIDING),
    _see("received", received(), limit=AGAIN, against=("dense",)),
    Planning(name="planning", mask=window, width=4096, n=131072, targets=(Target("seconds", PLANNED, "new mask"),)),
)
