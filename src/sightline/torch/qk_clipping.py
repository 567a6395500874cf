"""QK-Clip: heads whose largest score is above a limit get smaller query and key projections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..arrays.operations import to_numpy
from ..errors import ParameterError
from ..recording import Seen
from .hooks import check_module
from .query_key_projections import Projections, ScaledView, count_heads, find_parts
from .running_modules import module_paths


def qk_clip(
    model: nn.Module,
    max_scores: Seen | Mapping[str, Any],
    limit: float,
    *,
    projections: Projections | None = None,
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
        For layers whose projections have unknown names. A pair names the `torch.nn.Linear` for queries and the one for
        keys in each layer, such as ("attn.wq", "attn.wk"). A function gets a layer and returns (list of views for
        queries, list of views for keys). The first axis of a view of a parameter is the head.

    Returns
    -------
    dict from layers to dict from heads to γ, for the heads that were scaled

    Raises
    ------
    ParameterError
        `limit` is not a finite number above 0. A largest score is NaN or ∞. The recording has no `max_score()`. A layer
        is not in the model, or its projections are not found. A layer with one projection to queries, keys and values
        cannot be called with tokens alone. Scaled projections do not scale the scores of a layer: it has a soft cap,
        position biases, or norms or clipping of queries and keys. A projection has an adapter, or its parameters are
        quantised or DTensors. If an error is raised, no parameter has changed.

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
    lengths = {call.layer: call.n for call in max_scores} if isinstance(max_scores, Seen) else {}
    for path, scores in _read(max_scores).items():
        factors = {head: limit / score for head, score in scores.items() if _check(path, head, score) > limit}
        if not factors:
            continue
        if path not in by_path:
            raise ParameterError(
                f"the layer {path!r}, which {type(model).__name__} does not have",
                f"paths of its modules, such as {', '.join(list(by_path)[1:4])}",
                "pass the model that was watched",
            )
        heads = count_heads(by_path[path]) or len(scores)
        if max(scores) >= heads:
            raise ParameterError(
                f"the largest scores of {max(scores) + 1} heads of {path}", f"{heads} heads", "pass those of this model"
            )
        found[path] = factors
        parts = find_parts(path, by_path[path], heads, projections, lengths.get(path, 4))
        changes.append((parts, factors, heads))
    with torch.no_grad():
        for parts, factors, heads in changes:
            for part in parts:
                part.scale([factors.get(head, 1.0) for head in range(heads)])
    return found


def _check(path: str, head: int, score: float) -> float:
    if math.isnan(score) or score == math.inf:
        raise ParameterError(
            f"the largest score {score} of head {head} of {path}",
            "finite scores",
            "resume the training from a checkpoint before it diverged, and clip from there on",
        )
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
        raise ParameterError(
            f"max_scores of type {type(max_scores).__name__}",
            "a recording with max_score(), or a dict from layers to the largest score of each head",
            "qk_clip(model, monitor.history[-1].max_scores, limit=100.0)",
        )
    for layer, scores in max_scores.items():
        array = to_numpy(scores)
        if array.ndim != 1:
            raise ParameterError(
                f"largest scores of {layer} of shape {array.shape}", "one for each head, (H,)", "scores.amax((0, 2))"
            )
        found[layer] = dict(enumerate(map(float, array)))
    return found
