"""`sightline demo`: compute attention on activations of a trained model.

The command shows which kernel ran, its error, its time and the weights.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ..api.functions import attention, explain
from ..arrays.operations import Array
from ..call.problem import make_problem
from ..data import Activations, Layer, load
from ..formula.expression import Expression
from ..formula.library import padding
from ..reference.accuracy import budget_used, compute_baseline, term_sizes
from ..statistics import lse, weights
from . import head_patterns
from .console import key_value_table, make_console, make_table, note, progress, section, weight_map
from .timing import format_speedups, interleave, speedups, time_calls

PICTURE_PATH = "sightline-demo.png"
SENTENCE_INDEX = 1  # index of the longer of the two sentences
COPIES = (2, 6)  # number of copies of the paragraph's activations along the axes of (batches, positions)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `demo` and its options to the command line."""
    command = commands.add_parser(
        "demo",
        help="check, time and draw attention on activations of a trained model",
        description="Computes attention on activations of a trained encoder with the default kernel. Shows which "
        "kernel ran and why, its error against the float64 definition and against the model's own results, its time, "
        "the weights of one head as a picture, and which tokens every head of the encoder attends to.",
    )
    add = command.add_argument
    add(
        "--output",
        metavar="PATH",
        help="file of the picture: .png, .svg or .pdf; the picture of all heads and the explorer page are written to "
        f"the same folder (default: {PICTURE_PATH})",
    )
    add("--layer", type=int, default=3, choices=(0, 3), help="layer of the model (default: 3)")
    add("--head", type=int, default=1, choices=range(12), metavar="0-11", help="head to draw (default: 1)")
    add("--repeats", type=int, default=7, help="timed runs; their median is shown (default: 7)")
    sentence = "sentence for the encoder, if the encoder is installed"
    add("--sentence", metavar="TEXT", default=head_patterns.SENTENCE, help=sentence)
    command.set_defaults(run=demo)


def demo(options: argparse.Namespace) -> None:
    """Run the demo, print its results, and write its pictures, which need matplotlib, and the explorer page."""
    console, layer, output = make_console(), options.layer, options.output
    cat, moby = load("minilm_cat"), load("minilm_moby")
    activations, mask = cat.layers[layer], padding(cat.lengths)
    console.print(Text("softmax(Q Kᵀ / √d_k + M) V   on activations of a trained model", style="bold"))
    size = f"{len(cat.texts)} sentences of {activations.query.shape[-2]} tokens"
    note(console, f"all-MiniLM-L6-v2, layer {layer}, 12 heads, d_k = d_v = 32, {size}")
    for text in cat.texts:
        note(console, f"  “{text}”")
    started = time.perf_counter()
    out, (_, seen) = attention(activations.query, activations.key, activations.value, mask=mask, see=[lse(), weights()])
    first = time.perf_counter() - started
    section(console, "Which kernel ran, and why")
    page = str(explain(activations.query, activations.key, activations.value, mask=mask, see=[lse(), weights()]))
    lines = [(line[:14].strip(), line[14:]) for line in page.splitlines()]
    console.print(key_value_table([*lines, ("first call", f"{first:.2f} s, including the generation of the kernel")]))
    _print_errors(console, activations, mask, out, seen)
    _print_times(console, cat, moby, layer, max(options.repeats, 1))
    _print_weights(console, cat, seen, layer, options.head, output)
    path = Path(output or PICTURE_PATH)
    head_patterns.print_heads(console, options.sentence, path.with_name(f"{path.stem}-heads{path.suffix}"))
    section(console, "Next")
    console.print('your model    sightline view --model ./my-model "a text"')
    console.print("your program  sightline.attention(query, key, value, mask=sightline.causal())")
    console.print("learn more    docs/first-steps.md, in ten minutes; docs/course, from the start")


def _print_errors(console: Console, layer: Layer, mask: Expression, out: Array, seen: Array) -> None:
    section(console, "Error")
    differences, shares = measure_errors(layer, mask, out, seen)
    rows = [(name, *(f"{error:.1e}" for error in errors)) for name, errors in differences.items()]
    console.print(make_table("largest difference", "output", "weights", rows=rows))
    used = f"The output uses {shares[0]:.2f} of its rounding-error budget, the weights use {shares[1]:.2f}."
    note(console, f"{used}\nThe budget is twice the error of plain float32, plus 2 units in the last place.")


def measure_errors(
    layer: Layer, mask: Expression, out: Array, seen: Array
) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
    """Return the largest differences of outputs and of weights, and the shares of their rounding-error budgets.

    The differences are those between every two of Sightline, the float64 definition and the model, by their names.
    `sightline.reference.accuracy` says what the budgets are.
    """
    wide = [array.astype(np.float64) for array in (layer.query, layer.key, layer.value)]
    true, (true_weights,) = attention(*wide, mask=mask, see=[weights()], kernel="reference")
    assert layer.weights is not None
    pairs = {
        "Sightline and the float64 definition": ((out, true), (seen, true_weights)),
        "the model and the float64 definition": ((layer.output, true), (layer.weights, true_weights)),
        "Sightline and the model": ((out, layer.output), (seen, layer.weights)),
    }
    differences = {name: (_difference(*outputs), _difference(*matrices)) for name, (outputs, matrices) in pairs.items()}
    problem = make_problem(layer.query, layer.key, layer.value, mask=mask)
    rough, terms = compute_baseline(problem), term_sizes(problem, true_weights)
    return differences, (budget_used(out, true, rough.output, terms), budget_used(seen, true_weights, rough.weights))


def _difference(x: Array, y: Array) -> float:
    return float(np.abs(x.astype(np.float64) - y).max())


def _print_times(console: Console, cat: Activations, moby: Activations, layer: int, repeats: int) -> None:
    section(console, "Time", f"median of {repeats} alternating turns, ms")
    batch, copies = COPIES
    small, large = cat.layers[layer], moby.layers[3]
    arrays = [np.tile(x, (batch, 1, copies, 1)) for x in (large.query, large.key, large.value)]
    problems: dict[str, tuple[list[Array], Array | None]] = {
        "short: the sentences": ([small.query, small.key, small.value], cat.lengths),
        f"long: a paragraph, {batch} × {copies} copies": (arrays, None),
    }
    measured: dict[str, dict[str, list[float]]] = {}
    rows = []
    with progress(console) as bar:
        task = bar.add_task("timing", total=len(problems) * repeats)
        for name, (given, lengths) in problems.items():
            times = compare_times(given, lengths, repeats, lambda: bar.advance(task))
            measured[name.partition(":")[0]] = times
            shape = " × ".join(f"{length:,}" for length in given[0].shape[:-1])
            rows.append((name, shape, *(f"{1e3 * statistics.median(seconds):.2f}" for seconds in times.values())))
    console.print(make_table("", "B × H × n", *times, rows=rows, left=2))
    for line in describe_times(measured):
        console.print(line)
    if "torch SDPA" not in times:
        note(console, "torch is not installed. With torch (pip install torch), its attention is timed too.")


def describe_times(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return sentences that compare Sightline's time with the time of torch and of NumPy, for each input.

    `measured` has for each input, such as "short", the seconds of each library by name, Sightline's first.
    """
    lines = []
    for name, times in measured.items():
        (first, ours), *others = times.items()
        lines += [f"On {name} input, {_compare(first, ours, other, seconds)}." for other, seconds in others]
    return lines


def _compare(first: str, ours: Sequence[float], second: str, others: Sequence[float]) -> str:
    found = speedups(ours, others)
    if found is None:
        return f"times beside {second} are not reliable: this machine is busy"
    low, high = found
    if low < 1 < high or "1.0" in map(format_speedups, found, found):
        return f"{second} and {first} take about the same time"
    if high < 1:
        first, second, low, high = second, first, 1 / high, 1 / low
    return f"{first} is faster: {second} takes {format_speedups(low, high)} times as long"


def compare_times(
    arrays: list[Array], lengths: Array | None, repeats: int, on_round: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of a call of Sightline, of torch's attention and of plain NumPy in each turn, by name.

    torch's attention is left out if torch is not installed. `on_round` is called after each round of turns.
    """
    turns = {name: partial(time_calls, call) for name, call in _make_calls(arrays, lengths).items()}
    return interleave(turns, repeats, on_round=on_round)


def _make_calls(arrays: list[Array], lengths: Array | None) -> dict[str, Callable[[Any], Any]]:
    query, key, value = arrays
    mask = None if lengths is None else padding(lengths)
    allowed = True if lengths is None else (np.arange(key.shape[-2]) < lengths[:, None])[:, None, None, :]

    def numpy_attention(_: Any) -> Array:
        scores = query @ key.swapaxes(-1, -2) / np.float32(math.sqrt(query.shape[-1]))
        scores = np.where(allowed, scores, np.float32(-np.inf))
        p = np.exp(scores - scores.max(-1, keepdims=True))
        result: Array = p / p.sum(-1, keepdims=True) @ value
        return result

    calls: dict[str, Callable[[Any], Any]] = {"Sightline": lambda _: attention(query, key, value, mask=mask)}
    if find_spec("torch") is not None:
        import torch

        q, k, v = (torch.from_numpy(x) for x in arrays)
        hidden = None if lengths is None else torch.from_numpy(np.asarray(allowed))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["torch SDPA"] = lambda _: sdpa(q, k, v, attn_mask=hidden)
    calls["NumPy"] = numpy_attention
    return calls


def _print_weights(console: Console, cat: Activations, seen: Array, layer: int, head: int, output: str | None) -> None:
    from ..view import heatmap, save

    tokens = cat.tokens[SENTENCE_INDEX]
    section(console, f"Weights of layer {layer}, head {head}", "one row per query; in hundredths, or as shades")
    console.print(weight_map(console, seen[SENTENCE_INDEX, head], tokens))
    if output is None and not find_spec("matplotlib"):
        note(console, '\nNo picture: install matplotlib (pip install "sightline-attention[plot]").')
        return
    title = f"all-MiniLM-L6-v2, layer {layer}, head {head}"
    path = save(heatmap(seen[SENTENCE_INDEX, head], tokens, title=title).figure, Path(output or PICTURE_PATH))
    console.print(f"\nWrote {path}")
