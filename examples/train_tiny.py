"""Train a small transformer on the characters of this project's README, with torch's attention and with Sightline's.

    python examples/train_tiny.py [--steps 300] [--compile]

Both runs start from the same weights and use the same text. Compare the difference of their losses with the difference
between two seeds: the last column is a run with another seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import sightline.torch

TEXT = Path(__file__).parents[1] / "README.md"
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 64, 16
ATTENTIONS: dict[str, Callable[..., Any]] = {
    "torch": functional.scaled_dot_product_attention,
    "sightline": sightline.torch.scaled_dot_product_attention,
}


class Layer(nn.Module):
    """A pre-norm transformer layer: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        """x (batch, context, WIDTH) → the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        output = self.attend(*heads, is_causal=True)
        x = x + self.out(output.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A causal language model on characters with learned positions."""

    def __init__(self, characters: int, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer(attend) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: Any) -> Any:
        """text (batch, context) int64 → logits (batch, context, characters) of the next character."""
        return self.head(self.norm(self.layers(self.character(text) + self.position.weight[: text.shape[1]])))


def train(attend: Callable[..., Any], steps: int, seed: int = 0, backend: str = "") -> list[float]:
    """Return the loss of every step in nats per character; `backend` names a backend of torch.compile, if any."""
    torch.manual_seed(seed)
    readme = TEXT.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(readme)))}
    text = torch.tensor([numbers[character] for character in readme])
    model: Any = Model(len(numbers), attend)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if backend:
        model = torch.compile(model, backend=backend)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        batch = text[starts]
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Print the losses of all runs in columns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    backend = "inductor" if given.compile else ""
    runs = {name: train(attend, given.steps, backend=backend) for name, attend in ATTENTIONS.items()}
    runs["torch, another seed"] = train(ATTENTIONS["torch"], given.steps, seed=1, backend=backend)
    print("step", *runs, sep="  ")
    for step in sorted({*range(0, given.steps, max(given.steps // 10, 1)), given.steps - 1}):
        print(f"{step:4}", *(f"{losses[step]:.6f}" for losses in runs.values()), sep="  ")


if __name__ == "__main__":
    main()
