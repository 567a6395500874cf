"""Repair collapsed attention with a penalty on low entropy, whose gradient the kernel computes.

    python examples/entropy_penalty.py [--steps 200] [--output sightline-entropy.png]

The task is to predict which kind of token is the most frequent in a text, so a query must attend to all tokens. The
weights of queries and keys are initialised eight times too large, so softmax starts with almost all weight on one
token. The gradient of softmax is then nearly 0, and a first run, which trains on the task alone, makes no progress. A
second run adds max(0, floor − entropy) of every head to the loss.

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
INIT_FACTOR = 8  # of the weights of queries and keys
FLOOR = 0.9 * math.log(LENGTH)  # nats; ln LENGTH is the entropy of equal weights
OUTPUT = Path("sightline-entropy.png")


class Counter(nn.Module):
    """One transformer layer on a text; the output of the first token predicts the kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.position = nn.Embedding(KINDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, KINDS)
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH] *= INIT_FACTOR

    def forward(self, text: Any) -> tuple[Any, Any]:
        """text (batch, length) int64 → logits (batch, kinds), entropy (batch, heads, length) in nats."""
        x = self.kind(text) + self.position.weight
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        output, (entropy,) = sightline.attention(*heads, see=[sightline.entropy()])
        x = x + self.out(output.transpose(1, 2).flatten(-2))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x)[:, 0]), entropy


@dataclass
class Run:
    """Measurements of a training run, one number per step."""

    right: list[float] = field(default_factory=list)  # share of the batch that is predicted right
    entropy: list[float] = field(default_factory=list)  # nats, mean over texts, heads and queries


def texts(count: int) -> tuple[Any, Any]:
    """Return tokens (count, length), with one kind more likely than the others, and the most frequent kind (count,)."""
    text, likely = torch.randint(KINDS, (count, LENGTH)), torch.randint(KINDS, (count, 1))
    text = torch.where(torch.rand(count, LENGTH) < 0.2, likely, text)
    return text, functional.one_hot(text, KINDS).sum(1).argmax(-1)


def train(steps: int, penalty: float, seed: int = 0) -> Run:
    """Train with the loss of the task plus `penalty` times the mean over heads of max(0, FLOOR − entropy)."""
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
    """Draw entropy and accuracy of each run by step."""
    from sightline.view import plotting, save
    from sightline.view.palette import LIGHT

    figure = plotting.new_figure(8, 3)
    for axis, name in zip(figure.subplots(1, 2), ("entropy", "right"), strict=True):
        for (label, run), colour in zip(runs.items(), (LIGHT.orange, LIGHT.blue), strict=True):
            axis.plot(smooth(getattr(run, name)), color=colour, label=label, linewidth=1.4)
        plotting.set_title(axis, {"entropy": "entropy of the heads, nats", "right": "share of right predictions"}[name])
        axis.set(xlabel="step", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    save(figure, path)


def smooth(values: list[float], over: int = 20) -> list[float]:
    """Return the moving average over the last `over` values."""
    return [sum(values[max(k - over + 1, 0) : k + 1]) / min(k + 1, over) for k in range(len(values))]


def main(steps: int = 200, output: Path | None = OUTPUT) -> dict[str, Run]:
    """Train twice from the same initial weights, without and with the penalty, and print both results."""
    runs = {"the task alone": train(steps, 0.0), "with the penalty": train(steps, 1.0)}
    console = Console(highlight=False)
    console.print(
        "[bold]Which kind of token is the most frequent?[/]  One layer, 4 heads, 32 tokens, too large weights"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, title in enumerate(("", "entropy, first step", "entropy, last steps", "right, last steps")):
        table.add_column(title, justify="right" if column else "left")
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
