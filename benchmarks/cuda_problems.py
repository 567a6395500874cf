"""The problems for a GPU, with their targets, which were set for an H200.

Unless a problem says otherwise, it has bfloat16 arrays, 16 heads of width 128, and 16,384 tokens in all its sequences
together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sightline.statistics import Statistic, received

from .attention import CAUSAL, Attention, Mask, Passes, documents, window
from .contenders import FLEX, SIGHTLINE, prepare_torch, variant
from .core import Contender
from .cpu_problems import ROW_STATISTICS, THREE
from .cuda import PEAK

TOKENS = 16384
PASSES: tuple[Passes, ...] = ("forward", "backward")


def _fused(name: str, backend: str) -> Contender:
    lacks = ("bias", "dropout", "mask but the causal one", "statistics")
    return Contender(name, partial(prepare_torch, backend=backend), lacks=lacks)


TRITON = variant("Sightline", kernel="triton")  # our own kernel, even where `attention` would choose one of torch's
PLANNED = replace(SIGHTLINE, name="as planned")
WITHOUT_STATISTICS = variant("without statistics", kernel="triton", see=())
FLASH, CUDNN = _fused("torch, flash", "FLASH_ATTENTION"), _fused("torch, cuDNN", "CUDNN_ATTENTION")
FUSED_PEERS = (FLASH, CUDNN, _fused("torch, memory-efficient", "EFFICIENT_ATTENTION"), FLEX)


MASKS = {"documents": documents(16), "window": window(1024)}  # FlexAttention computes them, fused kernels do not


def _problem(name: str, n: int, *peers: Contender, **options: Any) -> Attention:
    given: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "H": 16, "d_k": 128, "B": max(TOKENS // n, 1)}
    return Attention(name=name, n=n, contenders=(TRITON, *peers, PEAK), **(given | options))


def _plain(passes: Passes, n: int, mask: Mask | None) -> Attention:
    """Return a problem that torch's fused kernels support."""
    name, least = f"{passes} {'causal' if mask else 'full'} n{n}", 0.95 if passes == "forward" else 0.90
    targets = {FLASH.name: least, CUDNN.name: least}
    return _problem(name, n, *FUSED_PEERS, PLANNED, passes=passes, mask=mask, targets=targets)


def _see(name: str, *see: Statistic, least: float = 0.91) -> Attention:
    targets = {WITHOUT_STATISTICS.name: least}
    return _problem(f"see {name}", 8192, WITHOUT_STATISTICS, see=see, targets=targets)


PROBLEMS: tuple[Attention, ...] = (
    *(_plain(passes, n, mask) for passes in PASSES for n in (8192, 16384) for mask in (None, CAUSAL)),
    *(
        _problem(f"{passes} {name}", 8192, FLEX, passes=passes, mask=mask, targets={FLEX.name: 1.3})
        for name, mask in MASKS.items()
        for passes in PASSES
    ),
    _problem("decode", 1, *FUSED_PEERS, B=1, H=32, G=8, m=65536, unit="B/s", targets={PEAK.name: 0.85}),
    *(_see(name, statistic) for name, statistic in ROW_STATISTICS.items()),
    _see("three of rows", *THREE),
    _see("received", received(), least=0.59),
)
