"""Sightline: exact scaled dot-product attention with masks and scores written as formulas, and weights to look at."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api.from_disk import attention_from_disk
from .api.functions import attention, explain, tiles
from .api.tangent import attention_tangent
from .api.vjp import attention_vjp
from .call.partition.parts import merge
from .cpu.runtime.thread_count import threads
from .formula.block_lists import blocks
from .formula.expression import SYMBOLS, Expression, where
from .formula.expression_methods import PASSES
from .formula.library import (
    alibi,
    alibi_slopes,
    bias,
    causal,
    dense,
    documents,
    padding,
    prefix,
    relative_bias,
    softcap,
    window,
)
from .formula.tables import Table, table
from .kv_cache import KVCache
from .statistics import (
    OVERVIEW,
    entropy,
    lse,
    mass,
    max,
    max_score,
    min,
    pooled,
    received,
    scores,
    sum,
    top_k,
    weighted_sum,
    weights,
)
from .statistics.recording import Seen

__all__ = [
    "OVERVIEW",
    "Expression",
    "KVCache",
    "Table",
    "alibi",
    "alibi_slopes",
    "attention",
    "attention_from_disk",
    "attention_tangent",
    "attention_vjp",
    "b",
    "bias",
    "blocks",
    "causal",
    "dense",
    "documents",
    "entropy",
    "explain",
    "h",
    "i",
    "j",
    "lse",
    "m",
    "mass",
    "max",
    "max_score",
    "merge",
    "min",
    "n",
    "p",
    "padding",
    "pooled",
    "prefix",
    "received",
    "relative_bias",
    "s",
    "scores",
    "softcap",
    "sum",
    "table",
    "threads",
    "tiles",
    "top_k",
    "weighted_sum",
    "weights",
    "where",
    "window",
]

__version__ = "0.1.0"
# Each is imported when first accessed.
FRAMEWORKS = ("equinox", "flax", "jax", "keras", "lightning", "torch", "transformers")
SUBMODULES = ("data", "eviction", "positions", "view", *FRAMEWORKS)
MODULES_OF_MODELS = {
    "AttentionMonitor": "torch.watching.model_monitor",
    "watch": "torch.watching.model_watch",
}  # names that need torch

b, h, i, j, s, p, n, m = (SYMBOLS[name] for name in "bhijspnm")


PASSES.picture = lambda *a, **k: import_module(f"{__name__}.view.formula_pictures").formula_picture(*a, **k)
Seen.load_explorer = lambda: import_module(f"{__name__}.view.explorer")


if TYPE_CHECKING:
    from .torch.watching.model_monitor import AttentionMonitor as AttentionMonitor
    from .torch.watching.model_watch import watch as watch


def __getattr__(name: str) -> Any:
    if name in MODULES_OF_MODELS:
        import_module(f"{__name__}.torch")  # without torch, its error names what to install
        return getattr(import_module(f"{__name__}.{MODULES_OF_MODELS[name]}"), name)
    if name in SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *SUBMODULES, *MODULES_OF_MODELS))
