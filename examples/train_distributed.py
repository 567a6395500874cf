"""Train a small transformer on sequences that are divided among the processes of a group.

    torchrun --nproc-per-node 2 examples/train_distributed.py [--steps 200]

Every process has all weights and a part of every sequence. The losses do not depend on the number of processes, apart
from rounding: compare them with those of --nproc-per-node 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sightline import i, j
from sightline.torch.distributed import attention, shard

TEXT = Path(__file__).parents[1] / "README.md"
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 512, 4
LAYOUT = "zigzag"  # balances the work of a causal mask


class Layer(nn.Module):
    """A pre-norm transformer layer: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        """x (batch, positions of this rank, WIDTH) → the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        output = attention(*heads, mask=i >= j, layout=LAYOUT)  # i and j are positions in the whole sequence
        x = x + self.out(output.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A causal language model on characters with learned positions."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: Any, positions: Any) -> Any:
        """text (batch, positions of this rank), positions (positions of this rank,) → logits of the next character."""
        return self.head(self.norm(self.layers(self.character(text) + self.position(positions))))


def train(steps: int, seed: int = 0) -> list[float]:
    """Return the loss of every step in nats per character, the mean over the whole sequences."""
    torch.manual_seed(seed)  # every rank begins with the same weights and draws the same sequences
    readme = TEXT.read_text(encoding="utf-8")
    numbers = {character: number for number, character in enumerate(sorted(set(readme)))}
    text = torch.tensor([numbers[character] for character in readme])
    model = DistributedDataParallel(Model(len(numbers)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = shard(torch.arange(CONTEXT), layout=LAYOUT, axis=0)
    losses = []
    for _ in range(steps):
        whole = text[torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]
        given, following = (shard(x, layout=LAYOUT, axis=1) for x in (whole[:, :-1], whole[:, 1:]))
        loss = functional.cross_entropy(model(given, positions).flatten(0, 1), following.flatten())
        optimiser.zero_grad()
        loss.backward()  # a call of all ranks; DistributedDataParallel averages the gradients
        optimiser.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main() -> None:
    """Train, and print the losses on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    losses = train(steps)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{ranks} ranks, {CONTEXT // ranks} of {CONTEXT} positions on each")
        for step in sorted({*range(0, steps, max(steps // 10, 1)), steps - 1}):
            print(f"step {step:4}  loss {losses[step]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
