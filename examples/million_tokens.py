"""Compute attention over a million tokens, forward and backward, and measure the memory besides inputs and results.

    python -m examples.million_tokens [--tokens 1048576]

The mask has four conditions in one formula: causal, inside the document, and either in a window of 4,096 keys or among
the sixteen first tokens of the document. Three lengths are measured: a quarter of the tokens, half of them, and all.

Sources: Beltagy et al., "Longformer", 2020, section 3.1 (windows); Xiao et al., "Efficient streaming language models
with attention sinks", 2024, section 3.2 (first tokens).
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import sightline
from benchmarks.peak_memory import peak_memory
from sightline import i, j, table

TOKENS, WIDTH = 1 << 20, 64
WINDOW, FIRST_TOKENS, DOCUMENTS = 4096, 16, 24


class Measurement(NamedTuple):
    """What one length costs: seconds of forward and backward pass, and bytes."""

    tokens: int
    seconds: float
    inputs: int  # query, key and value
    results: int  # output and three gradients
    extra: int | None  # peak bytes besides inputs and results; None where the system does not count them


def document_starts(tokens: int, seed: int = 0) -> Any:
    """Return (tokens,) int64: the position of the first token of each token's document."""
    drawn = np.random.default_rng(seed).choice(np.arange(1, tokens), min(DOCUMENTS, tokens) - 1, replace=False)
    starts = np.concatenate([[0], np.sort(drawn)])
    return np.repeat(starts, np.diff(starts, append=tokens))


def long_mask(starts: Any) -> Any:
    """Return the mask: causal, inside the document, and in the window or among the document's first tokens."""
    start = table(starts)[i]
    return (i >= j) & (j >= start) & ((i - j < WINDOW) | (j - start < FIRST_TOKENS))


def measure(tokens: int) -> Measurement:
    """Run forward and backward pass once or more, and return time and memory."""
    mask = long_mask(document_starts(tokens))
    seconds = []

    def draw() -> list[Any]:
        torch.manual_seed(0)
        leaves = [torch.randn(1, 1, tokens, WIDTH, requires_grad=True) for _ in range(3)]
        return [*leaves, torch.randn(1, 1, tokens, WIDTH)]

    def run(inputs: list[Any]) -> Any:
        *leaves, d_output = inputs
        begin = time.perf_counter()
        output = sightline.attention(*leaves, mask=mask)
        gradients = torch.autograd.grad(output, leaves, d_output)
        seconds.append(time.perf_counter() - begin)
        return output, gradients

    peak = peak_memory(run, draw)
    if peak is None:
        run(draw())
    one = tokens * WIDTH * 4
    return Measurement(tokens, min(seconds), 3 * one, 4 * one, None if peak is None else peak - 4 * one)


def main(tokens: int = TOKENS) -> list[Measurement]:
    """Measure three lengths and print them."""
    measure(min(tokens, 256))  # libraries load and the kernels are compiled
    found = [measure(length) for length in (tokens // 4, tokens // 2, tokens)]
    shown = Table(title=f"window {WINDOW:,}, {FIRST_TOKENS} first tokens, {DOCUMENTS} documents, float32")
    for name in ("tokens", "seconds", "inputs", "results", "extra memory"):
        shown.add_column(name, justify="right")
    for one in found:
        extra = "unknown" if one.extra is None else f"{one.extra / 2**20:.1f} MiB"
        sizes = (f"{size / 2**20:.0f} MiB" for size in (one.inputs, one.results))
        shown.add_row(f"{one.tokens:,}", f"{one.seconds:.2f}", *sizes, extra)
    Console(highlight=False).print(shown)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    main(**vars(parser.parse_args()))
