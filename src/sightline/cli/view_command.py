"""`sightline view`: run a local model on texts and write the explorer, a page that shows its attention weights."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import sightline

from ..errors import ParameterError
from ..view.explorer import Exploration, from_seen, save_html
from ..view.explorer.data import PAGE_BYTES, TOP_ENTRIES
from ..view.explorer.page_parts import BASE64_RATIO
from .console import make_console, progress

EXAMPLE = 'sightline view --model ./my-model "the cat ate the rat"'
PAGE = "sightline-view.html"
MODEL_FOLDER = "a directory that save_pretrained wrote"
STEPS = ("loading the model", "running the model", "writing the page")
ROUNDED_BYTES = 0.375  # bytes on the page for one weight of a trained model, rounded to 8 bits and compressed
MAX_MAP_SIDE = 256  # largest number of cells per side of the pooled map that replaces weights too large for a page


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `view` and its options to the command line."""
    command = commands.add_parser(
        "view",
        help="write a page that shows the attention weights of a local model",
        description="Runs a Hugging Face model from a directory on a text and writes the explorer: one HTML file that "
        "shows every head of every layer. The command downloads nothing, and the page needs no network.",
    )
    add = command.add_argument
    add("text", nargs="*", help="one text, or several, which are padded to one length")
    add("--model", required=True, metavar="DIR", help="directory that save_pretrained wrote, with tokenizer")
    add("--text-file", metavar="PATH", help="file that holds one more text")
    add("--output", metavar="PATH", default=PAGE, help=f"file of the page (default: {PAGE})")
    add("--open", action="store_true", help="open the page in the browser")
    command.set_defaults(run=view)


def view(options: argparse.Namespace) -> None:
    """Run the model in the folder on the texts, write the explorer page, and print what it has."""
    texts = collect_texts(options.text, options.text_file)
    console, path = make_console(), Path(options.model).expanduser()
    if not path.is_dir():
        raise ParameterError(f"a model in {options.model!r}, which is no directory", MODEL_FOLDER, EXAMPLE)
    import_module("sightline.transformers")
    with progress(console) as bar:
        task = bar.add_task(STEPS[0], total=len(STEPS))
        model, tokenizer = load_model(path)
        bar.update(task, advance=1, description=STEPS[1])
        seen = run_model(model, tokenizer, texts)
        bar.update(task, advance=1, description=STEPS[2])
        data = from_seen(seen)
        written = save_html(data, options.output)
        bar.update(task, advance=1)
    console.print(_summary(written, data))
    if options.open:
        webbrowser.open(written.resolve().as_uri())


def collect_texts(given: Sequence[str], file: str | None) -> list[str]:
    """Return the texts of the command line, followed by the text of the file if one is given.

    Raises
    ------
    ParameterError
        There is no text, a text is empty, or the file cannot be read as UTF-8 text.
    """
    texts = list(given)
    if file is not None:
        try:
            texts.append(Path(file).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"the text in {file!r}: {error}", "a file of UTF-8 text", EXAMPLE) from error
    if not texts or not all(text.strip() for text in texts):
        raise ParameterError("no text, or an empty text", "one or more texts that are not empty", EXAMPLE)
    return texts


def load_model(path: Path) -> tuple[Any, Any]:
    """Return the (model, tokenizer) that the folder `path` contains. Nothing is downloaded."""
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers, configurations and weights raise many kinds of errors
        reason = str(error).strip().partition("\n")[0]
        raise ParameterError(f"the model in {str(path)!r}: {reason}", MODEL_FOLDER, EXAMPLE) from error
    return model.eval(), tokenizer


def run_model(model: Any, tokenizer: Any, texts: Sequence[str], see: Sequence[Any] | None = None) -> Any:
    """Run the model on the texts, which are padded on the right to one length, and return the recording.

    By default the recording has the statistics that a page shows.
    """
    torch = import_module("torch")
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)  # hidden, so any token does
    inputs = tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1, truncation=True)
    lengths = inputs["attention_mask"].sum(-1).tolist()
    pairs = zip(inputs["input_ids"].tolist(), lengths, strict=True)
    labels: Any = [tokenizer.convert_ids_to_tokens(numbers[:length]) for numbers, length in pairs]
    if model.config.is_encoder_decoder:  # the decoder gets the encoder's text
        inputs["decoder_input_ids"] = inputs["input_ids"]
        labels = {"encoder": labels, "decoder": labels}
    see = _statistics(model.config, *inputs["input_ids"].shape) if see is None else see
    with torch.no_grad(), sightline.watch(model, see=see, tokens=labels) as seen:
        model(**inputs)
    return seen


def _statistics(config: Any, batch: int, n: int) -> list[Any]:
    """Return the statistics to record: `weights()` if all weights can fit on a page, else statistics of O(n) memory."""
    heads = getattr(config, "num_hidden_layers", 1) * getattr(config, "num_attention_heads", 1)
    if ROUNDED_BYTES * BASE64_RATIO * batch * heads * n * n <= PAGE_BYTES:
        return [sightline.weights()]
    top = sightline.top_k(TOP_ENTRIES)
    return [sightline.pooled(MAX_MAP_SIDE, MAX_MAP_SIDE), top, sightline.entropy(), sightline.received()]


def _summary(path: Path, data: Exploration) -> str:
    layers = data.texts[0].layers
    heads, tokens = max(len(layer.entropy) for layer in layers), max(len(layer.queries) for layer in layers)
    texts = f"{len(data.texts)} texts, " if len(data.texts) > 1 else ""
    return (
        f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB): {texts}{len(layers)} layers of up to {heads} heads, "
        f"{tokens:,} tokens. Any browser can open the page, without a network."
    )
