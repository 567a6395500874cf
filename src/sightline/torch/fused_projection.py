"""One projection to queries, keys and values: a trial shows which of its rows reach the scores of which head."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..statistics import scores
from .attention_finder import FINDER
from .watcher import Watcher

FACTOR = 0.25  # of all scores in the second trial; its powers 1/2 and 1 are exact
_owners: WeakKeyDictionary[nn.Module, tuple[Tensor, float]] = WeakKeyDictionary()  # by projection


@torch.enable_grad()
def find_owners(layer: nn.Module, name: str, rows: int, heads: int, length: int) -> tuple[Tensor, float]:
    """Return the head of each row to scale, −1 for the other rows, and the power of a head's factor for its rows.

    A copy of the layer computes its scores for `length` random tokens. A row has a head if the row changes the scores
    of this head alone. Rows of keys that several heads share are not scaled. A second trial scales the rows. ValueError
    is raised if this does not scale the scores, and any error that the layer raises if it is called with tokens alone.
    """
    projection = getattr(layer, name)
    if projection not in _owners:
        twin = deepcopy(layer).float()
        twin.eval()  # some layers return None
        scale = torch.ones(rows, device=next(twin.parameters()).device, requires_grad=True)
        first = _compute_scores(twin, name, scale, length)
        by_head = [torch.autograd.grad(first[:, head].sum(), scale, retain_graph=True)[0] for head in range(heads)]
        reached = torch.stack(by_head) != 0
        counts, first = reached.sum(0), first.detach()
        owners = torch.where(counts == 1, reached.int().argmax(0), -1)
        power = 1.0 if (counts > 1).any() else 0.5
        second = _compute_scores(twin, name, torch.where(owners < 0, 1.0, FACTOR**power), length)
        if not torch.allclose(second, first * FACTOR, rtol=1e-3, atol=1e-4 * float(first.abs().max())):
            raise ValueError("the layer's scores are not only products of its queries and keys")
        _owners[projection] = owners, power
    return _owners[projection]


def _compute_scores(layer: nn.Module, name: str, scale: Tensor, length: int) -> Tensor:
    """Return the scores (1, heads, n, n) of random tokens, 0 where hidden, with the projection's results scaled."""
    for module in layer.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    projection: Any = getattr(layer, name)
    projection.register_forward_hook(lambda module, inputs, output: output * scale)
    rng, width = torch.Generator("cpu").manual_seed(0), projection.weight.numel() // len(scale)
    tokens = torch.randn(1, length, width, generator=rng, device="cpu")
    pairs = getattr(layer, "rotary_dim", None)  # of CodeGen, where the two components of a pair share an angle
    angle = torch.zeros(1, length, pairs // 2 if pairs else getattr(layer, "head_dim", 0), device=scale.device)
    known = {
        "position_ids": torch.arange(length, device=scale.device)[None],
        "position_embeddings": (angle.cos(), angle.sin()),
        "attention_mask": None,
    }
    options = {key: known[key] for key in inspect.signature(layer.forward).parameters if key in known}
    watcher = Watcher(layer, [scores()], None, None, None, FINDER, handwritten=True)
    with FINDER.serving(watcher), watcher.modules.follow():
        layer(tokens.to(scale.device), **options)
    if len(watcher.seen.calls) != 1:
        raise ValueError(f"{len(watcher.seen.calls)} calls of attention in one run of the layer")
    found: Tensor = watcher.seen.calls[0]["scores"]
    return found.masked_fill(~found.isfinite(), 0.0)
