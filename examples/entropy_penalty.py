"""A penalty on low entropy leads a model out of collapsed attention: its gradient comes through the kernel.

    python examples/entropy_penalty.py [--steps 200] [--output sightline-entropy.png]

The task is to tell which kind of token a text has most of, so a query must look at all of them. Queries and keys are
drawn eight times too wide, and softmax starts with all its weight on one token. There its gradient is next to 0, and
training on the task alone stays. The second run adds max(0, floor − entropy) of every head to the loss.

Source: Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", 2023.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import sightline

KINDS, LENGTH, WIDTH, HEADS, BATCH = 8, 32, 32, 4, 32
TOO_WIDE = 8
FLOOR = 0.9 * math.log(LENGTH)  # nats; ln LENGTH is the entropy of equal weights
OUTPUT = Path("sightline-entropy.png")


class Counter(nn.Module):
    """One layer of attention over a text; the first token's output tells the kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.place = nn.Embedding(KINDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.before, self.between, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, KINDS)
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH] *= TOO_WIDE

    def forward(self, text: Any) -> tuple[Any, Any]:
        """text (batch, length) int64 → logits (batch, kinds), entropy (batch, heads, length) in nats."""
        x = self.kind(text) + self.place.weight
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed, (entropy,) = sightline.attention(*heads, see=[sightline.entropy()])
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.wide(self.between(x))
        return self.head(self.last(x)[:, 0]), entropy


@dataclass
class Run:
    """What a training did, step by step."""

    right: list[float] = field(default_factory=list)  # share of the batch
    entropy: list[float] = field(default_factory=list)  # nats, mean of heads and queries


def texts(count: int) -> tuple[Any, Any]:
    """(count, length) tokens, one kind more likely than the others, and the kind that each has most of."""
    text, likely = torch.randint(KINDS, (count, LENGTH)), torch.randint(KINDS, (count, 1))
    text = torch.where(torch.rand(count, LENGTH) < 0.2, likely, text)
    return text, functional.one_hot(text, KINDS).sum(1).argmax(-1)


def train(steps: int, penalty: float, seed: int = 0) -> Run:
    """Train with `penalty` times the mean of max(0, FLOOR − entropy) over the heads beside the loss."""
    torch.manual_seed(seed)
    model, run = Counter(), Run()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        text, kind = texts(BATCH)
        logits, entropy = model(text)
        loss = functional.cross_entropy(logits, kind)
        loss = loss + penalty * (FLOOR - entropy.mean((0, 2))).relu().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.right.append((logits.argmax(-1) == kind).float().mean().item())
        run.entropy.append(entropy.mean().item())
    return run


def draw(runs: dict[str, Run], path: Path) -> None:
    """Entropy and accuracy of each run by step."""
    from sightline.view import plotting, save

    figure = plotting.new_figure(8, 3)
    for axis, name in zip(figure.subplots(1, 2), ("entropy", "right"), strict=True):
        for (label, run), colour in zip(runs.items(), (plotting.ORANGE, plotting.BLUE), strict=True):
            axis.plot(smooth(getattr(run, name)), color=colour, label=label, linewidth=1.4)
        plotting.set_title(axis, {"entropy": "entropy of the heads, nats", "right": "share of texts told right"}[name])
        axis.set(xlabel="step", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    save(figure, path)


def smooth(values: list[float], over: int = 20) -> list[float]:
    """Each value with those before it, averaged."""
    return [sum(values[max(k - over + 1, 0) : k + 1]) / min(k + 1, over) for k in range(len(values))]


def main(steps: int = 200, output: Path | None = OUTPUT) -> dict[str, Run]:
    """Train twice from the same numbers and tell both."""
    runs = {"the task alone": train(steps, 0.0), "with the penalty": train(steps, 1.0)}
    console = Console(highlight=False)
    console.print(
        "[bold]Which kind of token is there most of?[/]  One layer, 4 heads, 32 tokens, queries and keys too wide"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, head in enumerate(("", "entropy, first step", "entropy, last steps", "right, last steps")):
        table.add_column(head, justify="right" if place else "left")
    for name, run in runs.items():
        table.add_row(name, f"{run.entropy[0]:.2f}", f"{smooth(run.entropy)[-1]:.2f}", f"{smooth(run.right)[-1]:.0%}")
    console.print(table)
    console.print(
        f"Entropy in nats, at most ln {LENGTH} = {math.log(LENGTH):.2f}; guessing is right {1 / KINDS:.0%}.",
        style="dim",
    )
    if output is not None:
        draw(runs, output)
        console.print(f"Wrote {output}")
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    main(**vars(parser.parse_args()))
