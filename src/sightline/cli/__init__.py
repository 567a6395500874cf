"""The command line: `sightline demo`, `explain TEXT`, `view --model DIR TEXT`, `info`, `bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import SightlineError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when done, 2 for an error, whose message goes to standard error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without these signs still gets the words
    options = parser().parse_args(arguments)
    try:
        code: int | None = options.run(options)
    except SightlineError as error:
        print(f"sightline {options.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:  # not of a file the user named
            raise
        print(f"sightline {options.command}: {error.filename!r}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code or 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="sightline", description="Exact scaled dot-product attention, written as a formula and open to inspection."
    )
    top.add_argument("--version", action="version", version=f"sightline {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    _add_demo(commands)
    _add_explain(commands)
    _add_view(commands)
    info = commands.add_parser("info", help="this machine, the frameworks found, and what each kernel can do")
    info.set_defaults(run=_info)
    _add_bench(commands)
    return top


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="real activations of a trained model: checked, timed and drawn",
        description="Attention over real activations of a trained encoder with the default kernel: which kernel ran "
        "and why, how far it is from the float64 definition and from the model's own numbers, how long it took, one "
        "head's weights as a picture, and what every head of the encoder looks at in a sentence.",
    )
    demo.add_argument(
        "--output",
        metavar="PATH",
        help="the picture: .png, .svg or .pdf; that of every head and the explorer's page go beside it "
        "(default: sightline-demo.png)",
    )
    demo.add_argument("--layer", type=int, default=3, choices=(0, 3), help="layer of the model (default: 3)")
    demo.add_argument("--head", type=int, default=1, choices=range(12), metavar="0-11", help="head drawn (default: 1)")
    demo.add_argument("--repeats", type=int, default=7, help="timed runs, of which the median counts (default: 7)")
    demo.add_argument("--sentence", metavar="TEXT", help="what the encoder reads, where it is installed")
    demo.set_defaults(run=_demo)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from ..walkthrough import MASKS, TEXT

    explain = commands.add_parser(
        "explain",
        help="attention over a short text, every stage with its shape and numbers",
        description="Walks a text through attention: tokens, embeddings, query, key and value, rotation, scores, "
        "scaling, mask, softmax, weighted values, and one pair of tokens through all of them.",
    )
    explain.add_argument("text", nargs="?", default=TEXT, help=f"of spaces and a c e h t r (default: {TEXT!r})")
    explain.add_argument("--d-model", type=int, default=512, help="width of embeddings (default: 512)")
    explain.add_argument("--d-k", type=int, default=64, help="width of query, key and value, even (default: 64)")
    explain.add_argument("--seed", type=int, default=0, help="draws embeddings and projections (default: 0)")
    explain.add_argument("--mask", default="none", help=f"{MASKS} (default: none)")
    explain.add_argument(
        "--pair", type=int, nargs=2, metavar=("QUERY", "KEY"), help="the pair to follow (default: the first c and r)"
    )
    explain.add_argument(
        "--figure", metavar="PATH", help="write the weights there, and the effect of scaling to PATH with -scaling"
    )
    explain.set_defaults(run=_explain)


def _add_view(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    view = commands.add_parser(
        "view",
        help="a local model reads a text, and a page shows who looked at whom",
        description="Runs a Hugging Face model from a directory on a text and writes the explorer: one HTML file that "
        "shows every head of every layer. Nothing is downloaded, and the page asks for nothing.",
    )
    view.add_argument("text", nargs="*", help="one text, or several, which are padded to one length")
    view.add_argument("--model", required=True, metavar="DIR", help="what save_pretrained wrote, tokenizer included")
    view.add_argument("--text-file", metavar="PATH", help="a text in a file")
    view.add_argument("--output", metavar="PATH", help="the page (default: sightline-view.html)")
    view.add_argument("--open", action="store_true", help="open it in the browser")
    view.set_defaults(run=_view)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="named problems, timed in turn with other libraries and beside the machine's own peaks",
        description="Times named problems: this library and every peer that is installed, in turn in one run, after "
        "each answer was checked against the float64 definition. The extra `bench` installs the peers.",
    )
    bench.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: problems and peers of a GPU, CUDA's or ROCm's"
    )
    bench.add_argument("--only", action="append", metavar="WORD", help="problems with this in their name, or a pattern")
    bench.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="problems of this dtype")
    bench.add_argument("--list", action="store_true", help="name the problems and their targets, and stop")
    bench.add_argument("--threads", type=int, help="for every contender (default: every processor)")
    bench.add_argument("--seconds", type=float, help="for the rounds of one problem (default: 10; on a GPU 2)")
    bench.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs; no targets")
    bench.add_argument("--json", metavar="PATH", help="write everything found, every round's time too")
    bench.add_argument("--figures", metavar="FOLDER", help="draw it there")
    bench.set_defaults(run=_bench)


def _demo(options: argparse.Namespace) -> None:
    from .demo_command import demo

    given = {} if options.sentence is None else {"sentence": options.sentence}
    demo(options.output, options.layer, options.head, options.repeats, **given)


def _explain(options: argparse.Namespace) -> None:
    from ..walkthrough import walk_through
    from .explain_command import explain, write_figures

    pair = None if options.pair is None else (options.pair[0], options.pair[1])
    walk = walk_through(
        options.text, d_model=options.d_model, d_k=options.d_k, seed=options.seed, mask=options.mask, pair=pair
    )
    explain(walk, options.seed)
    if options.figure is not None:
        write_figures(walk, options.figure)


def _view(options: argparse.Namespace) -> None:
    from .view_command import collect_texts, view

    texts = collect_texts(options.text, options.text_file)
    view(options.model, texts, output=options.output, open_browser=options.open)


def _info(_: argparse.Namespace) -> None:
    from .info_command import info

    info()


def _bench(options: argparse.Namespace) -> int:
    from .bench_command import bench

    return bench(options)
