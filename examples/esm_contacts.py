"""Predict the contacts of a protein from the attention of ESM-2, with one map in memory instead of one for each head.

    python examples/esm_contacts.py [--layers 6] [--width 320] [--heads 20] [--length 512]

A map is the matrix of a head's weights. The contacts are a logistic regression on the maps of all heads, after each map
was made symmetric and corrected. With the weights P of one head on the residues, S = P + Pᵀ and the row sums a of S,

    logit = Σ w (S − a aᵀ / Σ a) + bias        over all layers and heads.

The sum Σ w P is one map, which a watch adds up while the model runs. The corrections need only the vectors a: the
weight that each residue gives to residues, and the weight that it receives from them. The script makes a model with
random weights, and compares the result with that of transformers, which stacks the maps of all heads.

Sources: Rao et al., "Transformer protein language models are unsupervised structure learners", 2020. Dunn, Wahl and
Gloor, "Mutual information without the influence of phylogeny or entropy dramatically improves residue contact
prediction", 2008 (average product correction).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from rich.console import Console

import sightline
import sightline.transformers
from sightline import j, m


def predict_contacts(model: Any, tokens: Any) -> Any:
    """Return what `model.predict_contacts` of a `transformers.EsmModel` returns without padding: contact probabilities.

    tokens (B, n) int64, from <cls> to <eos> → (B, n − 2, n − 2). Memory beyond the model: a few maps.
    """
    regression = model.contact_head.regression
    factors = regression.weight.detach().view(model.config.num_hidden_layers, -1)  # (layers, heads)
    residues = slice(1, -1)
    see = [
        sightline.weights().sum("heads", weights=factors).sum("layers"),
        sightline.mass((j > 0) & (j < m - 1)),
        sightline.received(),
        sightline.weights().rows([0, -1]),  # what <cls> and <eos> give, to subtract it from what residues receive
    ]
    with torch.no_grad(), sightline.watch(model, see=see) as seen:
        model(tokens)
        pairs = seen[repr(see[0])][:, residues, residues]
        given, received, of_ends = (torch.stack(seen[repr(one)]) for one in see[1:])
        sums = (given + received - of_ends.sum(-2))[..., residues]  # (layers, B, heads, n − 2)
        shares = factors[:, None] / sums.sum(-1)
        logits = pairs + pairs.mT - torch.einsum("lbh,lbhi,lbhj->bij", shares, sums, sums)
        if regression.bias is not None:
            logits += regression.bias
        return logits.sigmoid_()


def random_model(layers: int, width: int, heads: int, length: int) -> tuple[Any, Any]:
    """Return an ESM-2 with random weights, and a protein of this many tokens (1, length)."""
    torch.manual_seed(0)
    config = transformers.EsmConfig(
        vocab_size=33,
        pad_token_id=1,
        mask_token_id=32,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
    )
    tokens = torch.randint(4, 24, (1, length))
    tokens[:, 0], tokens[:, -1] = 0, 2  # <cls> and <eos>
    return transformers.EsmModel(config, add_pooling_layer=False).eval(), tokens


def main(layers: int = 6, width: int = 320, heads: int = 20, length: int = 512) -> float:
    """Print and return the largest difference from the contacts of transformers."""
    model, tokens = random_model(layers, width, heads, length)
    contacts = predict_contacts(model, tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model.predict_contacts(tokens, torch.ones_like(tokens))
    difference = float((contacts - expected).abs().max())
    console = Console()
    console.print(
        f"{layers} layers of {heads} heads, {length} tokens: one map of {contacts.numel() * 4 / 2**20:.1f} MiB"
    )
    console.print(f"instead of {layers * heads}; largest difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 320), ("heads", 20), ("length", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
