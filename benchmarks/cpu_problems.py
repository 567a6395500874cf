"""The problems for a CPU, with their targets. By default a problem is a forward pass of float32 arrays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sightline.arrays.operations import Array
from sightline.formula.expression import SYMBOLS
from sightline.statistics import Statistic, entropy, lse, mass, max_score, pooled, received, top_k

from .attention import BOTH, CAUSAL, Attention, Inputs, document_lengths, documents, padding, window
from .contenders import FLEX_ON_CPU, SIGHTLINE, TORCH, prepare_sightline, prepare_torch, variant
from .core import Call, Contender, Problem, Results
from .first_calls import FIRST_CALL
from .libraries import IN_JAX, IN_JAX_LAYOUT, JAX, ONNX_RUNTIME, OPENVINO
from .models import MODELS
from .peaks import PEAK
from .short_calls import SHORT_CALLS

PEERS = (TORCH, FLEX_ON_CPU, ONNX_RUNTIME, OPENVINO, JAX)
NUMPY, CONTIGUOUS = variant("NumPy", on_numpy=True), variant("contiguous", contiguous=True)
WITHOUT_DROPOUT, WITHOUT_STATISTICS = variant("without dropout", dropout=0.0), variant("without statistics", see=())
ON_ONE_THREAD: dict[str, Any] = {
    "contenders": (SIGHTLINE, replace(SIGHTLINE, name="one thread", threads=1)),
    "targets": {"one thread": 1.9},
}
i, j = SYMBOLS["i"], SYMBOLS["j"]
ROW_STATISTICS: dict[str, Statistic] = {  # the statistics that the forward kernel computes in its own pass
    "lse": lse(),
    "max_score": max_score(),
    "entropy": entropy(),
    "mass": mass(abs(i - j) < 64),
}
THREE = [ROW_STATISTICS[name] for name in ("max_score", "entropy", "mass")]
# Least ratios of the time without statistics to the time with them, for statistics of the forward kernel, for one of a
# second pass, and for three that share a pass. A second pass repeats Q Kᵀ and the exponential.
FUSED, SECOND_PASS, SHARED_PASS = 0.87, 0.59, 0.53
BF16: dict[str, Any] = {"dtype": "bfloat16"}
BACKWARD: dict[str, Any] = {"passes": "backward", "peers": (TORCH,)}
TRAINING: dict[str, Any] = {"passes": BOTH, "peers": (TORCH,)}


def _problem(name: str, targets: dict[str, float], peers: tuple[Contender, ...] = PEERS, **options: Any) -> Attention:
    """Return a problem on views of (B, n, H d), beside the same problem on contiguous heads, and beside the peak."""
    contenders = (SIGHTLINE, CONTIGUOUS, *peers, PEAK)
    return Attention(name=name, contenders=contenders, targets={"contiguous": 0.97} | targets, **options)


def _see(name: str, least: float, *see: Statistic) -> Attention:
    """Return a forward pass with statistics, beside the pass without statistics."""
    contenders = (SIGHTLINE, WITHOUT_STATISTICS)
    return Attention(name=f"see {name}", contenders=contenders, see=see, targets={"without statistics": least})


def _decode(dtype: str, G: int, least: float) -> Attention:
    """Return a problem of one query per sequence on a long cache of keys. The memory's bandwidth limits its speed."""
    B = 1 if dtype == "float32" else 2  # K and V of one sequence of 16 bits fit the last-level cache of a processor
    cache: dict[str, Any] = {"B": B, "H": 32, "G": G, "n": 1, "m": 8192, "d_k": 128, "contiguous": True, "unit": "B/s"}
    contenders, name = (SIGHTLINE, *PEERS, PEAK), f"decode {dtype} 32 on {G}"
    return Attention(name=name, contenders=contenders, targets={"peak": least}, dtype=dtype, **cache)


def _growth(table: str, *lengths: int, **options: Any) -> list[Attention]:
    """Return a table of one problem of one head at several lengths, which shows how its time and memory grow."""
    about, contenders = f"1 × 1 heads, n {lengths[0]:,} to {lengths[-1]:,}, d 64", (SIGHTLINE,)
    given: dict[str, Any] = {"table": table, "about": about, "is_series": True, "contenders": contenders} | options
    return [Attention(name=f"n {n}", H=1, n=n, **given) for n in lengths]


def _views(word: str, dtype: str, passes: Any) -> list[Attention]:
    """Return a table of problems on views of (B, n, H d), beside contiguous heads and torch on views."""
    table: dict[str, Any] = {
        "table": f"views {word} {dtype}",
        "group": "views",
        "about": "H × n × d, views of (B, n, H d) beside contiguous heads",
        "contenders": (SIGHTLINE, CONTIGUOUS, TORCH),
        "beside": CONTIGUOUS,
        "dtype": dtype,
        "passes": passes,
    }
    shapes = (8, 512, 64), (12, 1024, 64), (8, 4096, 64), (8, 1024, 80), (32, 1024, 128), (16, 2048, 128)
    return [
        Attention(name=f"{H} × {n} × {d}" + " causal" * (mask is CAUSAL), H=H, n=n, d_k=d, mask=mask, **table)
        for H, n, d in shapes
        for mask in (None, CAUSAL)
    ]


def _jax(table: str, lengths: tuple[int, ...], passes: tuple[Any, ...], *others: Contender) -> list[Attention]:
    """Return a table of calls under jax.jit. "backward" stands for a forward and a backward pass."""
    contenders, about = (IN_JAX, IN_JAX_LAYOUT, JAX, *others), "1 × 8 heads, d 64, float32, under jit"
    given: dict[str, Any] = {"table": table, "about": about, "contenders": contenders}
    return [
        Attention(name=f"n {n}{word}{' backward' * (each == BOTH)}", n=n, mask=mask, passes=each, **given)
        for n in lengths
        for mask, word in ((None, ""), (CAUSAL, " causal"))
        for each in passes
    ]


# -- texts of several lengths -----------------------------------------------------------------------------------------

SPREAD = 0.9  # the texts have 0.1 to 1.9 times their mean length


def prepare_padded(problem: Attention, inputs: Inputs, threads: int, prepare: Any, count: int) -> Call:
    """Prepare packed documents as a padded batch, under a mask that hides padding keys.

    The padding is not timed. The results are those at the tokens, without the padding.
    """
    lengths = document_lengths(count, SPREAD, problem.n)
    longest = int(lengths.max())
    batch = replace(problem, B=count, n=longest, m=longest, mask=padding(lengths))
    is_token = np.arange(longest) < lengths[:, None]  # (B, n)

    def pad(array: Array | None) -> Any:
        """Return an array (1, H, tokens, d) as a view (B, H, n, d) of (B, n, H d), with zeros in padding."""
        if array is None:
            return None
        padded = np.zeros((*is_token.shape, *array.shape[1::2]), np.float32)
        padded[is_token] = array[0].swapaxes(0, 1)
        return padded.swapaxes(1, 2)

    call: Call = prepare(batch, Inputs(*map(pad, (inputs.query, inputs.key, inputs.value, inputs.d_output))), threads)

    def results(result: Any) -> Results:
        named = call.results(result).items()
        return {name: array.swapaxes(1, 2)[is_token].swapaxes(0, 1)[None] for name, array in named}

    return replace(call, results=results)


def _ragged(count: int, mean: int, d: int, passes: Any) -> Attention:
    padded, of_torch = (
        partial(prepare_padded, prepare=each, count=count) for each in (prepare_sightline, prepare_torch)
    )
    ours = replace(SIGHTLINE, name="packed"), replace(SIGHTLINE, name="padded", prepare=padded)
    return Attention(
        name=f"{count} of about {mean}, d {d}" + " training" * (passes == BOTH),
        table="ragged",
        about="12 heads, 0.1 to 1.9 times so many tokens; torch padded too",
        contenders=(*ours, replace(TORCH, prepare=of_torch)),
        passes=passes,
        H=12,
        n=count * mean,
        d_k=d,
        mask=documents(count, SPREAD),
    )


PROBLEMS: tuple[Problem, ...] = (
    _problem("forward float32 d64", {"peak": 0.9, "torch": 1.35, "ONNX Runtime": 1.1}),
    _problem("forward float32 d128", {"peak": 0.9, "OpenVINO": 1.05}, d_k=128),
    _problem("forward float32 n1024", {"torch": 1.35, "ONNX Runtime": 1.1}, n=1024),
    _problem("forward float32 causal n1024", {"torch": 1.6}, mask=CAUSAL, n=1024),
    _problem("forward float32 causal n4096", {"torch": 1.45}, mask=CAUSAL),
    _problem("forward bfloat16 d64", {"peak": 0.8, "torch": 2.3, "OpenVINO": 1.1}, **BF16),
    _problem("forward bfloat16 d128", {"peak": 0.86, "torch": 2.3, "OpenVINO": 1.1}, d_k=128, **BF16),
    _problem("forward float16 d64", {"torch": 1.9}, dtype="float16"),
    _problem("backward float32 d64", {"peak": 0.88, "torch": 1.35}, **BACKWARD),
    _problem("backward float32 d128", {"peak": 0.88, "torch": 1.24}, d_k=128, **BACKWARD),
    _problem("backward float32 causal", {"torch": 1.4}, mask=CAUSAL, **BACKWARD),
    _problem("backward bfloat16 d64", {"peak": 0.7, "torch": 1.7}, **BF16, **BACKWARD),
    _problem("both n3001 d80", {"torch": 1.3}, H=6, n=3001, d_k=80, **TRAINING),
    _problem("forward window 256", {"torch": 20, "FlexAttention": 4}, mask=window(256)),
    _problem("forward 16 documents n8192", {"torch": 10}, mask=documents(16), n=8192),
    _problem("forward dropout 0.1", {"torch": 7, "without dropout": 0.74}, (TORCH, WITHOUT_DROPOUT), dropout=0.1),
    _problem("forward d_v 32", {"torch": 3}, d_v=32),
    _problem("forward d_v 128", {"torch": 3}, d_v=128),
    # n is 2,048 here: the bias, torch's weights and their two gradients are (1, H, n, n), half a GiB each at n 4,096
    _problem("both bias n2048", {"torch": 2.5}, n=2048, bias=True, **TRAINING),
    *(_decode("float32", G, 0.8) for G in (8, 32)),
    *(_decode(dtype, G, 0.75) for dtype in ("bfloat16", "float16") for G in (8, 32)),
    Attention(name="overhead", contenders=(SIGHTLINE, NUMPY, TORCH), n=16, targets={"torch": 1}),
    FIRST_CALL,
    Attention(name="threads forward", **ON_ONE_THREAD),
    Attention(name="threads backward", passes="backward", **ON_ONE_THREAD),
    *(_see(name, FUSED, statistic) for name, statistic in ROW_STATISTICS.items()),
    _see("three of rows", FUSED, *THREE),
    _see("received", SECOND_PASS, received()),
    _see("top_k 8", SECOND_PASS, top_k(8)),
    _see("pooled 256", SECOND_PASS, pooled(256, 256)),
    _see("three of a second pass", SHARED_PASS, received(), top_k(8), pooled(32, 32)),
    *_growth("growth window 256", *(2**k for k in range(16, 21)), mask=window(256)),
    *_growth("growth pooled 512", 32768, 65536, 131072, mask=window(4096), see=(pooled(512, 512),)),
    *(each for dtype in ("float32", "bfloat16") for each in _views("forward", dtype, "forward")),
    *(each for dtype in ("float32", "bfloat16") for each in _views("training", dtype, BOTH)),
    *(_ragged(*size, each) for size in ((32, 64, 32), (32, 64, 64), (8, 256, 64)) for each in ("forward", BOTH)),
    *SHORT_CALLS,
    *MODELS,
    *_jax("JAX", (1024, 2048, 4096), ("forward", BOTH)),
    *_jax("JAX short calls", (1, 16, 64), ("forward",), NUMPY),
)
