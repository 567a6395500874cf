"""Attention rollout of a vision transformer: how much of each patch reaches the class token, in O(n) memory per layer.

    python examples/vit_rollout.py [--layers 12] [--size 224]

The rollout is the product of the layers' matrices (Ā + I) / 2, where Ā are the weights averaged over heads and I stands
for the residual connection. The class token needs only one row of this product, from the last layer to the first:

    r ← (r Ā + r) / 2

The model runs its layers from the first to the last, so each product r Ā is computed after the model has run. r Ā is
the gradient of r · (Ā x) with respect to x, and `weighted_sum(x)` returns Ā x. For this gradient torch keeps the
queries and keys of each layer, n × d numbers, and no n × n matrix.

Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from rich.console import Console

import sightline
import sightline.transformers


def rollout(model: Any, pixels: Any, num_tokens: int, token: int = 0) -> Any:
    """Return (B, n): the share that each of the n tokens has in one token after all layers. The shares add up to 1.

    If parameters of the model require gradients, torch also keeps what those gradients need.
    """
    x = torch.ones(len(pixels), 1, num_tokens, 1, device=pixels.device, requires_grad=True)
    with torch.enable_grad(), sightline.watch(model, see=[sightline.weighted_sum(x).mean("heads")]) as seen:
        model(pixels)
    row = torch.zeros(len(pixels), num_tokens, device=pixels.device)
    row[:, token] = 1
    for sums in reversed(seen["weighted_sum"]):  # Ā x, (B, n, 1)
        (flow,) = torch.autograd.grad(sums, x, row[..., None])
        row = (flow[:, 0, :, 0] + row) / 2
    return row


def dense_rollout(model: Any, pixels: Any, token: int = 0) -> Any:
    """Return what `rollout` returns, computed from the stored weights of all layers and heads."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(pixels, output_attentions=True).attentions
    product = torch.eye(attentions[0].shape[-1], dtype=attentions[0].dtype)
    for weights in attentions:
        product = (weights.mean(1) @ product + product) / 2
    return product[:, token]


def main(layers: int = 12, size: int = 224) -> float:
    """Print the patches with the largest share, and return the largest difference from the dense rollout."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(num_hidden_layers=layers, image_size=size, hidden_size=192, num_attention_heads=3)
    model = transformers.ViTModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    patches = size // config.patch_size
    pixels = torch.randn(1, 3, size, size)
    found = rollout(model, pixels, patches**2 + 1)
    difference = float((found - dense_rollout(model, pixels)).abs().max())
    console = Console()
    for index in found[0, 1:].topk(3).indices.tolist():
        row, column = divmod(index, patches)
        console.print(f"patch ({row}, {column}) has a share of {found[0, 1 + index]:.4f} in the class token")
    console.print(f"largest difference from the dense rollout {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=224)
    main(**vars(parser.parse_args()))
