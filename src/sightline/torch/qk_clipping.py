"""QK-Clip: heads whose largest score is above a limit get smaller query and key projections."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..arrays.operations import to_numpy
from ..errors import ParameterError
from ..statistics.recording import Seen
from .layer_calls import check_module
from .watching.running_modules import module_paths

SEPARATE = (  # the query projection and the key projection
    ("q_proj", "k_proj"),  # Llama and most models of transformers
    ("query", "key"),  # BERT, ViT, sightline.torch.SelfAttention
    ("q", "k"),
    ("to_q", "to_k"),  # diffusers
    ("q_lin", "k_lin"),  # DistilBERT
    ("wq", "wk"),
    ("w_q", "w_k"),
)
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
BIASED = ("attn_logit_softcapping", "has_relative_attention_bias", "relative_position_bias_table")
BOUNDED = ("logit_scale", "clip_qkv")  # of a layer that normalises queries and keys, or clips them, without a module
NORM = re.compile(r"(?=.*(norm|ln))(^|.*_)(q|k|qk|query|key)(_|$)")  # a norm between a projection and the scores
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Projections = tuple[str, str] | Callable[[nn.Module], tuple[Sequence[Tensor], Sequence[Tensor]]]


def qk_clip(
    model: nn.Module, max_scores: Seen | Mapping[str, Any], limit: float, *, projections: Projections | None = None
) -> dict[str, dict[int, float]]:
    """Scale the query and key projections of the heads whose largest score is above a limit, in place.

    If the largest score S of a query head is above the limit, γ = limit / S. The scores Q Kᵀ · scale of the head are
    multiplied by γ, so that on the same inputs its largest score is the limit, up to the rounding of the parameters.
    Biases of the projections are scaled too. All other heads and all values keep their bits. Call the function after
    the optimizer's step, with the largest scores of the step's forward passes.

    ============================  =========================================  =======================
    layer                         queries                                    keys
    ============================  =========================================  =======================
    as many key heads as heads    √γ                                         √γ
    heads that share key heads    γ                                          unchanged
    multi-head latent attention   √γ, those with rotary positions γ          √γ, rotary ones unchanged
    ============================  =========================================  =======================

    Parameters
    ----------
    model : torch.nn.Module
    max_scores : Seen, or dict from paths of layers to the largest score of each head, of shape (H,)
        A recording of `sightline.watch` with `sightline.max_score()`, whose maximum over calls, batch and queries is
        taken, or `MonitoredStep.max_scores` of `AttentionMonitor.history`. Layers without an entry stay as they are.
        With several ranks, pass the same numbers on each, such as those of a monitor, which are over all ranks.
    limit : float
        The largest score that is allowed, above 0 and in nats like the scores. Kimi K2 was trained with 100.
    projections : (str, str) or function, optional
        For layers whose projections have unknown names, and for one projection to queries, keys and values. A pair
        names the `torch.nn.Linear` for queries and the one for keys, such as ("attn.wq", "attn.wk"). A function gets a
        layer and returns (list of views for queries, list of views for keys). The first axis of a view is the head.

    Returns
    -------
    dict from layers to dict from heads to γ, for the heads that were scaled

    Raises
    ------
    ParameterError
        `limit` is not a finite number above 0. A largest score is NaN or ∞. The recording has no `max_score()`. A layer
        is not in the model, or its projections are not found. Scaled projections do not scale the scores of a layer: it
        has a soft cap, position biases, or norms or clipping of queries and keys. A projection has an adapter, or its
        parameters are quantised or DTensors. If an error is raised, no parameter has changed.

    References
    ----------
    Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, arXiv 2507.20534, section 2.1 and algorithm 1. The paper
    describes multi-head and multi-head latent attention. For shared key heads, this function treats the keys as the
    paper treats the rotary keys that all heads share.

    Examples
    --------
    >>> import torch, sightline
    >>> from sightline.torch import qk_clip
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = 9 * torch.randn(1, 5, 8)
    >>> with torch.no_grad(), sightline.watch(model, see=sightline.max_score()) as seen:
    ...     _ = model(x, x, x)
    >>> factors = qk_clip(model, seen, limit=1.0)
    >>> with torch.no_grad(), sightline.watch(model, see=sightline.max_score()) as seen:
    ...     _ = model(x, x, x)
    >>> bool(seen["max_score"][0].score.max() <= 1.0001)
    True
    """
    check_module(model)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
        raise ParameterError(f"limit={limit!r}", "a finite number above 0", "limit=100.0")
    by_path = {path: module for module, path in module_paths(model).items()}
    changes: list[tuple[list[ScaledView], dict[int, float], int]] = []
    found: dict[str, dict[int, float]] = {}
    for path, scores in _read(max_scores).items():
        factors = {head: limit / score for head, score in scores.items() if _check(path, head, score) > limit}
        if not factors:
            continue
        if path not in by_path:
            given = f"the layer {path!r}, which {type(model).__name__} does not have"
            allowed = f"paths of its modules, such as {', '.join(list(by_path)[1:4])}"
            raise ParameterError(given, allowed, "pass the model that was watched")
        heads = _count_heads(by_path[path]) or len(scores)
        if max(scores) >= heads:
            given = f"the largest scores of {max(scores) + 1} heads of {path}"
            raise ParameterError(given, f"{heads} heads", "pass those of this model")
        found[path] = factors
        parts = _find_parts(path, by_path[path], heads, projections)
        changes.append((parts, factors, heads))
    with torch.no_grad():
        for parts, factors, heads in changes:
            for part in parts:
                part.scale([factors.get(head, 1.0) for head in range(heads)])
    return found


def _check(path: str, head: int, score: float) -> float:
    if math.isnan(score) or score == math.inf:
        cure = "resume the training from a checkpoint before it diverged, and clip from there on"
        raise ParameterError(f"the largest score {score} of head {head} of {path}", "finite scores", cure)
    return score


def _read(max_scores: Any) -> dict[str, dict[int, float]]:
    """Return the largest score of each head over all calls, batch entries and queries, by layer and head."""
    found: dict[str, dict[int, float]] = {}
    if isinstance(max_scores, Seen):
        for call in max_scores:
            scores = to_numpy(call["max_score"].score).max((0, 2))  # NaN if there is one
            layer = found.setdefault(call.layer, {})
            for head, score in zip(call.heads, map(float, scores), strict=True):
                layer[head] = max(score, layer.get(head, -math.inf), key=lambda x: (math.isnan(x), x))
        return found
    if not isinstance(max_scores, Mapping):
        allowed = "a recording with max_score(), or a dict from layers to the largest score of each head"
        cure = "qk_clip(model, monitor.history[-1].max_scores, limit=100.0)"
        raise ParameterError(f"max_scores of type {type(max_scores).__name__}", allowed, cure)
    for layer, scores in max_scores.items():
        array = to_numpy(scores)
        if array.ndim != 1:
            given = f"largest scores of {layer} of shape {array.shape}"
            raise ParameterError(given, "one for each head, (H,)", "scores.amax((0, 2))")
        found[layer] = dict(enumerate(map(float, array)))
    return found


# -- the query and key projections of a layer, found by the names that published code gives them -----------------------
# A projection is returned as views of its parameters. The first axis of a view is the head. A change of a view changes
# the parameter.


class ScaledView(NamedTuple):
    """A part of a parameter: a view (heads, …). Each head of the view is multiplied by this power of its factor."""

    view: Tensor
    power: float

    def scale(self, factors: Sequence[float]) -> None:
        """Multiply each head by the power of its factor, with one rounding to the parameter's dtype."""
        dtype = torch.promote_types(self.view.dtype, torch.float32)
        column = torch.tensor([factor**self.power for factor in factors], dtype=dtype, device=self.view.device)
        self.view.copy_(self.view.to(dtype) * column.view(-1, *[1] * (self.view.ndim - 1)))


def _find_parts(path: str, layer: nn.Module, heads: int, named: Projections | None) -> list[ScaledView]:
    """Return the parts to multiply by powers of a factor γ of each query head, so that its scores are multiplied by γ.

    Rotary keys of multi-head latent attention, which all heads share, are not scaled. `path` is for errors: raise
    ParameterError if the projections are not found, or if scaling them does not scale the scores.
    """
    if callable(named):
        queries, keys = named(layer)
        _check_parameters(path, (*queries, *keys))
        return _with_powers(queries, keys)
    biased = [name for name in BIASED if not any(getattr(layer, name, None) is one for one in (None, False))]
    if biased:
        given = f"{path}, whose scores are not only products of queries and keys ({biased[0]})"
        cure = "leave the layer out of max_scores, or pass projections=function if its scores may be scaled"
        raise ParameterError(given, "layers whose scores are Q Kᵀ · scale", cure)
    if named is None and hasattr(layer, "kv_b_proj") and hasattr(layer, "qk_nope_head_dim"):
        return _latent(path, layer, heads)
    norms = [name for name, child in layer.named_children() if NORM.match(name) and not isinstance(child, nn.Identity)]
    norms += ["qk_norm"] * (getattr(layer, "qk_norm", None) is True)
    norms += [name for name in BOUNDED if getattr(layer, name, None) is not None]
    norms += ["config.clip_qkv"] * (getattr(getattr(layer, "config", None), "clip_qkv", None) is not None)
    if norms:
        given = f"{path}, which normalises or clips queries or keys after their projections ({', '.join(norms)})"
        cure = "leave the layer out of max_scores, since its scores are bounded already"
        raise ParameterError(given, "projections whose results are the queries and keys", cure)
    return _find(path, layer, heads, named)


def _count_heads(layer: nn.Module) -> int | None:
    """Return the number of query heads that the layer, or its configuration, says; None if neither does."""
    for owner in (layer, getattr(layer, "config", None)):
        for name in HEAD_COUNTS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    return None


def _check_parameters(path: str, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.dtype not in FLOAT_DTYPES or hasattr(parameter, "placements"):
            kind = "a DTensor" if hasattr(parameter, "placements") else str(parameter.dtype)
            allowed = "whole parameters of float64, float32, bfloat16 or float16"
            cure = "clip the parameters that the optimizer updates, before they are divided or quantised"
            raise ParameterError(f"a projection of {path} that is {kind}", allowed, cure)


def _with_powers(queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[ScaledView]:
    """Return the views with their powers. Only queries are scaled if query heads share a key head."""
    if any(len(query) != len(key) for query in queries for key in keys):
        return [ScaledView(view, 1.0) for view in queries]
    return [ScaledView(view, 0.5) for view in (*queries, *keys)]


def _find(path: str, layer: nn.Module, heads: int, named: tuple[str, str] | None) -> list[ScaledView]:
    """Return the views of the query and key projections."""
    for names in SEPARATE if named is None else (named,):
        found = [
            reduce(lambda part, name: getattr(part, name, None), name.split("."), cast(Any, layer)) for name in names
        ]
        if all(isinstance(child, nn.Module) for child in found):
            rows = [_rows(f"{path}.{name}", child) for name, child in zip(names, found, strict=True)]
            width = _divide(path, len(rows[0][0]), heads)
            groups = _divide(path, len(rows[1][0]), width)
            _divide(path, heads, groups)
            return _with_powers([_split(x, heads) for x in rows[0]], [_split(x, groups) for x in rows[1]])
    if named is None and isinstance(layer, nn.MultiheadAttention):
        _check_parameters(path, layer.parameters())
        return _with_powers(*_multi_head(layer))
    reason = f"it has {', '.join(name for name, _ in layer.named_children()) or 'no modules'}"
    if named is not None:
        given = f"projections={named!r} of {path}, a {type(layer).__name__} without these ({reason})"
        allowed = "a pair of names of modules in the layer, of the query projection and of the key projection"
        cure = 'names that the layer has, or no projections= if they are published names such as "q_proj" and "k_proj"'
        raise ParameterError(given, allowed, cure)
    given = f"{path}, a {type(layer).__name__} whose query and key projections are not known ({reason})"
    cure = "projections=(name of the query projection, name of the key projection), or a function that returns views"
    raise ParameterError(given, f"projections named {', '.join('/'.join(names) for names in SEPARATE)}", cure)


def _rows(path: str, projection: nn.Module) -> list[Tensor]:
    """Return views of weight and bias whose first axis is the output of the projection."""
    parameters = dict(projection.named_parameters())
    is_transposed = type(projection).__name__ == "Conv1D"  # of transformers: weight (in, out)
    if not parameters.keys() <= {"weight", "bias"} or not (isinstance(projection, nn.Linear) or is_transposed):
        given = f"{path}, a {type(projection).__name__} with the parameters {', '.join(parameters) or 'none'}"
        cure = "merge adapters into the weights first, or pass projections=function that returns views by head"
        raise ParameterError(given, "torch.nn.Linear, with a weight and at most a bias", cure)
    _check_parameters(path, parameters.values())
    weight = parameters["weight"]
    return [weight.mT if is_transposed else weight, *([parameters["bias"]] if "bias" in parameters else [])]


def _split(rows: Tensor, heads: int) -> Tensor:
    """Return rows (heads · d, …) as a view (heads, d, …)."""
    return torch.unflatten(rows, 0, (heads, -1))


def _divide(path: str, rows: int, heads: int) -> int:
    if heads < 1 or rows % heads:
        given, allowed = f"a projection of {path} of {rows} rows for {heads} heads", "as many rows for each head"
        raise ParameterError(given, allowed, "projections=function that returns views of the projections by head")
    return rows // heads


def _multi_head(layer: nn.MultiheadAttention) -> tuple[list[Tensor], list[Tensor]]:
    """Return the views of torch's layer. The key that `add_bias_kv` adds is scaled with the others."""
    queries: list[Any] = [layer.q_proj_weight]
    keys: list[Any] = [layer.k_proj_weight]
    if layer.in_proj_weight is not None:
        queries, keys = [[rows] for rows in layer.in_proj_weight.chunk(3)[:2]]
    if layer.in_proj_bias is not None:
        for views, rows in zip((queries, keys), layer.in_proj_bias.chunk(3), strict=False):
            views.append(rows)
    if layer.bias_k is not None:
        keys.append(layer.bias_k.flatten())
    return [_split(x, layer.num_heads) for x in queries], [_split(x, layer.num_heads) for x in keys]


def _latent(path: str, layer: Any, heads: int) -> list[ScaledView]:
    """Return the parts of multi-head latent attention, as DeepSeek's code lays them out."""
    name = "q_b_proj" if isinstance(getattr(layer, "q_b_proj", None), nn.Module) else "q_proj"
    content, parts = layer.qk_nope_head_dim, []
    for rows in _rows(f"{path}.{name}", getattr(layer, name)):
        query = _split(rows, heads)
        parts += [ScaledView(query[:, :content], 0.5), ScaledView(query[:, content:], 1.0)]
    parts += [ScaledView(_split(rows, heads)[:, :content], 0.5) for rows in _rows(f"{path}.kv_b_proj", layer.kv_b_proj)]
    return parts
