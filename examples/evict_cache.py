"""Evict keys from a key/value cache in a decoding loop by the attention weight that they received.

    python examples/evict_cache.py [--output sightline-evict.png]

A model of one attention layer learns in seconds to recall: it reads facts (a name and its value) and answers questions
(a name). Then it decodes long conversations; most questions of a conversation are about a few of its facts. The example
compares three caches: one with every key; one with the newest keys; one with a few newest keys and, for each key head,
the keys that received most weight.

Sources: Zhang et al., "H2O: Heavy-Hitter Oracle", 2023, sums the weight that a key received; Li et al., "SnapKV", 2024,
selects keys by the last queries of the prompt.
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
FACTS, OPENING, QUESTIONS, TOPIC = 48, 16, 96, 6  # facts; questions in the prompt; decoded questions; topic's facts
BUDGET, NEWEST = 24, 8  # keys left after an eviction; the newest of them are never evicted
SLACK = 8  # keys appended between evictions
OUTPUT = Path("sightline-evict.png")


class Recall(nn.Module):
    """One layer of attention with 4 query heads and 2 key heads. A token is a name with a value, or a question."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.value = nn.Embedding(NAMES, WIDTH), nn.Embedding(VALUES + 1, WIDTH)  # last value: a question
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, heads * D, bias=False) for heads in (HEADS, KEY_HEADS, KEY_HEADS))

    def project(self, names: Any, values: Any) -> list[Any]:
        """names, values (batch, n) → query (batch, HEADS, n, D), key and value (batch, KEY_HEADS, n, D)."""
        x = self.norm(self.name(names) + self.value(values))
        return [part(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in self.parts]

    def answer(self, output: Any) -> Any:
        """Attention's output (batch, HEADS, n, D) → logits (batch, n, VALUES)."""
        return self.out(output.transpose(1, 2).flatten(-2))


@dataclass
class Conversations:
    """Facts followed by questions. All arrays are int64, with an entry for each token or each question."""

    names: Any  # (batch, facts + questions)
    values: Any  # (batch, facts + questions), VALUES where the token is a question
    answers: Any  # (batch, questions)


def conversations(batch: int, facts: int, questions: int, topic: int) -> Conversations:
    """Return random conversations; nine of ten questions are about `topic` of the facts, the others about any fact."""
    names = torch.stack([torch.randperm(NAMES)[:facts] for _ in range(batch)])
    values = torch.randint(VALUES, (batch, facts))
    topics = torch.stack([torch.randperm(facts)[:topic] for _ in range(batch)])
    of_topic, of_any = (
        topics.gather(1, torch.randint(topic, (batch, questions))),
        torch.randint(facts, (batch, questions)),
    )
    fact = torch.where(torch.rand(batch, questions) < 0.9, of_topic, of_any)
    blank = torch.full((batch, questions), VALUES)
    all_names, all_values = torch.cat([names, names.gather(1, fact)], 1), torch.cat([values, blank], 1)
    return Conversations(all_names, all_values, values.gather(1, fact))


def train(steps: int = 60, batch: int = 32, facts: int = 32) -> Recall:
    """Return a model that recalls facts."""
    torch.manual_seed(0)
    model = Recall()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        given = conversations(batch, facts, facts, facts)
        output = sightline.attention(*model.project(given.names, given.values), mask=sightline.causal())
        loss = functional.cross_entropy(model.answer(output)[:, facts:].flatten(0, 1), given.answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


Choice = Callable[[Any, int], Any]  # (received (batch, KEY_HEADS, m), number of keys) → ascending indices of the keys


def newest(received: Any, count: int) -> Any:
    """Return the indices of the last `count` keys."""
    return torch.arange(received.shape[-1] - count, received.shape[-1]).expand(*received.shape[:-1], count)


def heavy_hitters(received: Any, count: int) -> Any:
    """Return the indices of the `NEWEST` newest keys and of the other keys that received most weight."""
    older = received.shape[-1] - NEWEST
    chosen = received[..., :older].topk(count - NEWEST).indices.sort().values
    return torch.cat([chosen, newest(received, NEWEST)], -1)


@dataclass
class Run:
    """Results of decoding with one cache."""

    right: float  # share of the questions that are answered right
    keys: int  # largest number of keys in the cache
    size: int  # bytes of the cache's storage


def sum_groups(received: Any) -> Any:
    """Sum over the query heads (batch, HEADS, m) of each key head → (batch, KEY_HEADS, m)."""
    return received.unflatten(1, (KEY_HEADS, -1)).sum(2)


def gather_rows(array: Any, indices: Any) -> Any:
    """Return the rows of keys or values (batch, KEY_HEADS, m, D) at indices (batch, KEY_HEADS, count)."""
    return array.gather(2, indices[..., None].expand(*indices.shape, array.shape[-1]))


def decode(model: Recall, given: Conversations, choose: Choice | None) -> tuple[Run, Any]:
    """Process the prompt in one call, then each question in a call of its own, on a cache that `choose` keeps small.

    Return the run, and the weight (batch, HEADS, m) that the keys of the prompt received from its last queries.
    """
    prompt = FACTS + OPENING
    query, key, value = model.project(given.names, given.values)
    _, (opening,) = sightline.attention(
        *(part[:, :, :prompt] for part in (query, key, value)),
        mask=sightline.causal(),
        see=[sightline.received(last=OPENING)],
    )
    received = sum_groups(opening)  # (batch, KEY_HEADS, m), of the last queries of the prompt
    cache = sightline.KVCache(capacity=BUDGET + SLACK if choose else key.shape[2])
    indices = choose(received, BUDGET) if choose else newest(received, prompt)
    cache.append(*(gather_rows(part[:, :, :prompt], indices) for part in (key, value)))
    received, right, most = received.gather(2, indices), 0, 0
    for t in range(prompt, prompt + QUESTIONS):
        now = slice(t, t + 1)
        cache.append(key[:, :, now], value[:, :, now])
        output, (step_received,) = sightline.attention(query[:, :, now], cache, see=[sightline.received()])
        received = functional.pad(received, (0, 1)) + sum_groups(step_received)
        answers = model.answer(output)[:, 0].argmax(-1)
        right += int((answers == given.answers[:, t - FACTS]).sum())
        most = max(most, received.shape[-1])
        if choose and received.shape[-1] == BUDGET + SLACK:
            indices = choose(received, BUDGET)
            left = gather_rows(cache.key, indices), gather_rows(cache.value, indices)
            cache.reset()
            cache.append(*left)
            received = received.gather(2, indices)
    return Run(right / (QUESTIONS * len(given.names)), most, cache.nbytes), opening


CHOICES: dict[str, Choice | None] = {
    "everything": None,
    f"the newest {BUDGET}": newest,
    f"{BUDGET} by received()": heavy_hitters,
}


def main(batch: int = 32, output: Path | None = OUTPUT) -> dict[str, Run]:
    """Train a model, decode with each cache and print the results."""
    model, console = train(), Console(highlight=False)
    given = conversations(batch, FACTS, OPENING + QUESTIONS, TOPIC)
    with torch.no_grad():
        found = {name: decode(model, given, choose) for name, choose in CHOICES.items()}
    console.print(
        f"[bold]{batch} conversations[/]: {FACTS} facts and {OPENING} questions in the prompt, {QUESTIONS} decoded"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, title in enumerate(("the cache has", "keys at most", "KiB", "right answers")):
        table.add_column(title, justify="right" if column else "left")
    for name, (run, _) in found.items():
        table.add_row(name, str(run.keys), f"{run.size / 1024:,.0f}", f"{run.right:.1%}")
    console.print(table)
    console.print(f"Guessing is right {1 / VALUES:.0%}. Each key head has its own choice of keys.", style="dim")
    if output is not None:
        from sightline.view import received_by_key, save

        opening = found["everything"][1][0]
        save(received_by_key(opening, title="weight that each key received from 16 queries").figure, output)
        console.print(f"Wrote {output}")
    return {name: run for name, (run, _) in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    main(**vars(parser.parse_args()))
