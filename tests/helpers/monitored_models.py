"""A small causal model in float64, and the statistics of its heads by their definition."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import sightline


class CausalAttention(nn.Module):
    """Causal attention of `heads` query heads on `key_heads` key heads, with biases."""

    def __init__(self, width, heads, key_heads):
        super().__init__()
        self.heads = heads
        for name, count in (("q_proj", heads), ("k_proj", key_heads), ("v_proj", key_heads)):
            self.add_module(name, nn.Linear(width, count * width // heads))

    def project(self, x):
        """Return query, key and value (B, H, n, d)."""
        width = x.shape[-1] // self.heads
        projections = self.q_proj, self.k_proj, self.v_proj
        return [projection(x).unflatten(-1, (-1, width)).transpose(1, 2) for projection in projections]

    def forward(self, x):
        query, key, value = self.project(x)
        groups = key.shape[1] != self.heads
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups)
        return output.transpose(1, 2).flatten(2)


class CausalModel(nn.Module):
    """Two layers. `reentrant` is the kind of their checkpoints; None for no checkpoints."""

    def __init__(self, heads=4, key_heads=4, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.layers = nn.ModuleList([CausalAttention(16, heads, key_heads) for _ in range(2)]).double()
        with torch.no_grad():
            for layer in self.layers:
                layer.q_proj.weight.mul_(8)

    def forward(self, x):
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def make_batch(seed, size=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, 16, generator=generator, dtype=torch.float64, requires_grad=True)


@torch.no_grad()
def define(model, batches):
    """Return for each layer the rows (max_score, entropy, first_key) of its heads (3, H), over all batches."""
    found = {}
    for batch in batches:
        x = batch
        for number, layer in enumerate(model.layers):
            query, key, _ = layer.project(x)
            scores = query @ key.repeat_interleave(layer.heads // key.shape[1], 1).mT / query.shape[-1] ** 0.5
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            found.setdefault(f"layers.{number}", []).append(scores)
            x = x + layer(x)
    rows = {}
    for layer, parts in found.items():
        scores = torch.cat(parts)
        weights = scores.softmax(-1)
        entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
        rows[layer] = torch.stack([scores.amax((0, 2, 3)), entropy, weights[..., 0].mean((0, 2))]).numpy()
    return rows


def record_ranks(group):
    """Record a step of this rank's batch, with numbers over all ranks and with its own; return both."""
    model = CausalModel()
    rank = torch.distributed.get_rank()
    found = []
    for over_ranks in (True, False):
        monitor = sightline.AttentionMonitor(model, every=1, over_ranks=over_ranks)
        with monitor.step(0):
            model(make_batch(rank, 1 + rank))
        found.append({layer: tuple(heads) for layer, heads in monitor.history[0].layers.items()})
    return found
