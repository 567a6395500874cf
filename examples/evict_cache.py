"""A key/value cache kept small by what its keys received, in a decoding loop, beside one that keeps everything.

    python examples/evict_cache.py [--output sightline-evict.png]

A model of one attention layer learns, in seconds, to recall: it reads facts (a name and its value) and answers
questions (a name). Then it decodes long conversations, each about a few of its facts, as conversations are. One cache
keeps every key; one keeps the newest; one keeps the newest few and, for each head of keys, those that received most.

Sources: Zhang et al., "H2O: Heavy-Hitter Oracle", 2023, sums what a key received; Li et al., "SnapKV", 2024, chooses by
the last queries of the prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import sightline

NAMES, VALUES, WIDTH, HEADS, KEY_HEADS = 64, 16, 64, 4, 2
D = WIDTH // HEADS
FACTS, OPENING, QUESTIONS, TOPIC = 48, 16, 96, 6  # facts, questions of the prompt, questions decoded, facts asked for
BUDGET, NEWEST = 24, 8  # keys kept after an eviction, the newest of them whatever they received
SLACK = 8  # keys appended between evictions
OUTPUT = Path("sightline-evict.png")


class Recall(nn.Module):
    """One layer of attention with 4 heads of queries on 2 of keys; a token is a name with its value, or with none."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.value = nn.Embedding(NAMES, WIDTH), nn.Embedding(VALUES + 1, WIDTH)  # the last one asks
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, heads * D, bias=False) for heads in (HEADS, KEY_HEADS, KEY_HEADS))

    def project(self, names: Any, values: Any) -> list[Any]:
        """names, values (batch, n) → query (batch, HEADS, n, D), key and value (batch, KEY_HEADS, n, D)."""
        x = self.norm(self.name(names) + self.value(values))
        return [part(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in self.parts]

    def answer(self, mixed: Any) -> Any:
        """Attention's output (batch, HEADS, n, D) → logits (batch, n, VALUES)."""
        return self.out(mixed.transpose(1, 2).flatten(-2))


@dataclass
class Conversations:
    """Facts, then questions; (batch, n) int64 each."""

    names: Any
    values: Any  # VALUES where the token is a question
    answers: Any  # of the questions


def conversations(batch: int, facts: int, questions: int, topic: int) -> Conversations:
    """Questions ask for `topic` of the facts nine times in ten, else for any."""
    names = torch.stack([torch.randperm(NAMES)[:facts] for _ in range(batch)])
    values = torch.randint(VALUES, (batch, facts))
    topics = torch.stack([torch.randperm(facts)[:topic] for _ in range(batch)])
    near, far = topics.gather(1, torch.randint(topic, (batch, questions))), torch.randint(facts, (batch, questions))
    asked = torch.where(torch.rand(batch, questions) < 0.9, near, far)
    blank = torch.full((batch, questions), VALUES)
    return Conversations(
        torch.cat([names, names.gather(1, asked)], 1), torch.cat([values, blank], 1), values.gather(1, asked)
    )


def train(steps: int = 60, batch: int = 32, facts: int = 32) -> Recall:
    """A model that recalls."""
    torch.manual_seed(0)
    model = Recall()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        given = conversations(batch, facts, facts, facts)
        mixed = sightline.attention(*model.project(given.names, given.values), mask=sightline.causal())
        loss = functional.cross_entropy(model.answer(mixed)[:, facts:].flatten(0, 1), given.answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


Choice = Callable[[Any, int], Any]  # (received (batch, KEY_HEADS, m), keys to keep) → their places, ascending


def newest(received: Any, count: int) -> Any:
    """The last `count` keys."""
    return torch.arange(received.shape[-1] - count, received.shape[-1]).expand(*received.shape[:-1], count)


def heavy_hitters(received: Any, count: int) -> Any:
    """The newest few, and of the others those that received most."""
    older = received.shape[-1] - NEWEST
    chosen = received[..., :older].topk(count - NEWEST).indices.sort().values
    return torch.cat([chosen, newest(received, NEWEST)], -1)


@dataclass
class Run:
    """How decoding went with one cache."""

    right: float  # share of the questions
    keys: int  # the most that lay in the cache
    size: int  # bytes of its storage


def sum_groups(received: Any) -> Any:
    """Of query heads (batch, HEADS, m) → of the heads of keys they share (batch, KEY_HEADS, m)."""
    return received.unflatten(1, (KEY_HEADS, -1)).sum(2)


def gather_rows(array: Any, places: Any) -> Any:
    """The rows of keys or values (batch, KEY_HEADS, m, D) at places (batch, KEY_HEADS, count)."""
    return array.gather(2, places[..., None].expand(*places.shape, array.shape[-1]))


def decode(model: Recall, given: Conversations, choose: Choice | None) -> tuple[Run, Any]:
    """Read the prompt at once, then the questions one by one; what the prompt's keys received comes beside the run."""
    prompt = FACTS + OPENING
    query, key, value = model.project(given.names, given.values)
    _, (opening,) = sightline.attention(
        *(part[:, :, :prompt] for part in (query, key, value)),
        mask=sightline.causal(),
        see=[sightline.received(last=OPENING)],
    )
    received = sum_groups(opening)  # (batch, KEY_HEADS, m), of the last queries of the prompt
    cache = sightline.KVCache(capacity=BUDGET + SLACK if choose else key.shape[2])
    places = choose(received, BUDGET) if choose else newest(received, prompt)
    cache.append(*(gather_rows(part[:, :, :prompt], places) for part in (key, value)))
    received, right, most = received.gather(2, places), 0, 0
    for t in range(prompt, prompt + QUESTIONS):
        now = slice(t, t + 1)
        cache.append(key[:, :, now], value[:, :, now])
        mixed, (step_received,) = sightline.attention(query[:, :, now], cache, see=[sightline.received()])
        received = functional.pad(received, (0, 1)) + sum_groups(step_received)
        answers = model.answer(mixed)[:, 0].argmax(-1)
        right += int((answers == given.answers[:, t - FACTS]).sum())
        most = max(most, received.shape[-1])
        if choose and received.shape[-1] == BUDGET + SLACK:
            places = choose(received, BUDGET)
            key_kept, value_kept = gather_rows(cache.key, places), gather_rows(cache.value, places)
            cache.reset()
            cache.append(key_kept, value_kept)
            received = received.gather(2, places)
    return Run(right / (QUESTIONS * len(given.names)), most, cache.nbytes), opening


CHOICES: dict[str, Choice | None] = {
    "everything": None,
    f"the newest {BUDGET}": newest,
    f"{BUDGET} by received()": heavy_hitters,
}


def main(batch: int = 32, output: Path | None = OUTPUT) -> dict[str, Run]:
    """Train, decode with each cache, tell."""
    model, console = train(), Console(highlight=False)
    given = conversations(batch, FACTS, OPENING + QUESTIONS, TOPIC)
    with torch.no_grad():
        found = {name: decode(model, given, choose) for name, choose in CHOICES.items()}
    console.print(
        f"[bold]{batch} conversations[/]: {FACTS} facts, {OPENING} questions read at once, {QUESTIONS} decoded"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, head in enumerate(("the cache keeps", "keys at most", "KiB", "answers right")):
        table.add_column(head, justify="right" if place else "left")
    for name, (run, _) in found.items():
        table.add_row(name, str(run.keys), f"{run.size / 1024:,.0f}", f"{run.right:.1%}")
    console.print(table)
    console.print(f"Guessing is right {1 / VALUES:.0%}. Chosen for each head of keys apart.", style="dim")
    if output is not None:
        from sightline.view import received_by_key, save

        opening = found["everything"][1][0]
        save(received_by_key(opening, title="what each key received of the prompt's last 16 queries").figure, output)
        console.print(f"Wrote {output}")
    return {name: run for name, (run, _) in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    main(**vars(parser.parse_args()))
