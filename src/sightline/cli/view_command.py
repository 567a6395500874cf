"""`sightline view`: a local model reads a text, and the explorer's page shows who looked at whom."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

import sightline

from ..errors import MissingExtraError, ParameterError
from ..view.explorer import Exploration, from_seen, save_html
from ..view.explorer.data import BASE64_RATIO, PAGE_BYTES, TOP_ENTRIES
from .console import make_console, progress

__all__ = ["collect_texts", "load_model", "view"]

EXAMPLE = 'sightline view --model ./my-model "the cat ate the rat"'
STEPS = ("reading the model", "the model reads", "writing the page")
MAX_MAP_SIDE = 256  # cells of a pooled map each way, where the weights are too many for a page


def view(
    folder: str,
    texts: Sequence[str],
    *,
    output: str | None = None,
    open_browser: bool = False,
    console: Console | None = None,
    load: Callable[[Path], tuple[Any, Any]] | None = None,
) -> Path:
    """Run the model in the folder on the texts and write the page.

    Parameters
    ----------
    folder : str
        What `save_pretrained` wrote: configuration, weights and tokenizer. Nothing is downloaded.
    texts : list of str
        Several are padded to one length and can be chosen on the page.
    output : str, default "sightline-view.html"
    open_browser : bool
        Open the page in the browser.
    load : function of the folder, optional
        Gives (model, tokenizer) in place of transformers' own loading.

    Raises
    ------
    ParameterError
        No such folder, no model in it, a model whose attention cannot be watched.
    MissingExtraError
        transformers or torch are not installed.
    """
    console = make_console() if console is None else console
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ParameterError(f"a model in {folder!r}, which is no directory", "what save_pretrained wrote", EXAMPLE)
    watch = _import_transformers().watch
    with progress(console) as bar:
        task = bar.add_task(STEPS[0], total=len(STEPS))
        model, tokenizer = (load or load_model)(path)
        bar.update(task, advance=1, description=STEPS[1])
        seen = _run_model(model, tokenizer, texts, watch)
        bar.update(task, advance=1, description=STEPS[2])
        data = from_seen(seen, title=path.resolve().name)
        written = save_html(data, output or "sightline-view.html")
        bar.update(task, advance=1)
    console.print(_summary(written, data))
    if open_browser:
        webbrowser.open(written.resolve().as_uri())
    return written


def collect_texts(given: Sequence[str], file: str | None) -> list[str]:
    """The texts of the command line: words, a file, or both.

    Raises
    ------
    ParameterError
        None at all, or a file that cannot be read as UTF-8 text.
    """
    texts = list(given)
    if file is not None:
        try:
            texts.append(Path(file).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"the text in {file!r}: {error}", "a file of UTF-8 text", EXAMPLE) from error
    if not texts or not all(text.strip() for text in texts):
        raise ParameterError("no text, or an empty one", "one text or more", EXAMPLE)
    return texts


def _import_transformers() -> Any:
    """`sightline.transformers`, which needs transformers and torch."""
    try:
        return import_module("sightline.transformers")
    except MissingExtraError:
        raise
    except ImportError as error:
        raise MissingExtraError(
            f"a model to be run, and no {error.name or 'transformers'}",
            "transformers 5 and torch",
            'pip install "sightline-attention[transformers]"',
        ) from error


def load_model(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of the folder; nothing is looked for elsewhere."""
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(path, local_files_only=True)
    except Exception as error:  # readers of tokenizers, configurations and weights each have errors of their own
        reason = str(error).strip().partition("\n")[0]
        raise ParameterError(f"the model in {str(path)!r}: {reason}", "what save_pretrained wrote", EXAMPLE) from error
    return model.eval(), tokenizer


def _run_model(model: Any, tokenizer: Any, texts: Sequence[str], watch: Any) -> Any:
    """What the model's attentions did on the texts, padded on the right to one length."""
    torch = import_module("torch")
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)  # hidden, so any will do
    inputs = tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1, truncation=True)
    lengths = inputs["attention_mask"].sum(-1).tolist()
    pairs = zip(inputs["input_ids"].tolist(), lengths, strict=True)
    labels: Any = [tokenizer.convert_ids_to_tokens(numbers[:length]) for numbers, length in pairs]
    if model.config.is_encoder_decoder:  # the decoder reads the text too
        inputs["decoder_input_ids"] = inputs["input_ids"]
        labels = {"encoder": labels, "decoder": labels}
    see = _statistics(model.config, *inputs["input_ids"].shape)
    with torch.no_grad(), watch(model, see=see, tokens=labels) as seen:
        model(**inputs)
    return seen


def _statistics(config: Any, batch: int, n: int) -> list[Any]:
    """The weights, where a page holds those of all heads; else what is made of them without n² memory."""
    heads = getattr(config, "num_hidden_layers", 1) * getattr(config, "num_attention_heads", 1)
    if 4 * BASE64_RATIO * batch * heads * n * n <= PAGE_BYTES:
        return [sightline.weights()]
    side = min(MAX_MAP_SIDE, n)
    return [
        sightline.pooled(side, side),
        sightline.top_k(min(TOP_ENTRIES, n)),
        sightline.entropy(),
        sightline.received(),
    ]


def _summary(path: Path, data: Exploration) -> str:
    layers = data.texts[0].layers
    heads, tokens = max(len(layer.entropy) for layer in layers), max(len(layer.queries) for layer in layers)
    many = f"{len(data.texts)} texts, " if len(data.texts) > 1 else ""
    return (
        f"Wrote {path} ({path.stat().st_size / 2**20:.1f} MiB): {many}{len(layers)} layers of up to {heads} heads, "
        f"{tokens:,} tokens. Any browser opens it, without a network."
    )
