"""The `sightline` command and its subcommands `demo`, `explain`, `view`, `info` and `bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import SightlineError

__all__ = ["main"]

EXAMPLES = """\
examples:
  sightline demo                          a trained model: checked, timed, drawn
  sightline explain "to be or not to be"  every stage of attention on a text
  sightline explain --mask causal         the same, with a mask
  sightline view --model DIR "a text"     a page with every head of a model
  sightline bench --list                  the benchmarks and their targets

`sightline COMMAND --help` lists the options of a command."""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter of the help text that leaves out the line which argparse prints for the placeholder COMMAND."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name. If they name none, print the help. Return the process's exit code.

    The code is 0 for success. It is 1 if `bench` found that Sightline gave a wrong output or raised an error. It is 2
    for every other error, whose message is printed to standard error. It is 130 for Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # prints "?" for a character that the stream's encoding lacks
    options = parser().parse_args(arguments)
    try:
        code: int | None = options.run(options)
    except SightlineError as error:
        print(f"sightline {options.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:  # then the error does not concern a file that the user named
            raise
        print(f"sightline {options.command}: {error.filename!r}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code or 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with all subcommands and their options."""
    top = argparse.ArgumentParser(
        prog="sightline",
        description="Exact scaled dot-product attention, softmax(Q Kᵀ / √d_k + M) V.\n"
        "You write its mask and score as formulas, and you can inspect its weights.",
        epilog=EXAMPLES,
        formatter_class=_HelpFormatter,
        add_help=False,
    )
    top.set_defaults(run=lambda _: top.print_help())
    commands = top.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    options = top.add_argument_group("options")  # after the commands
    options.add_argument("-h", "--help", action="help", help="show this help")
    options.add_argument("--version", action="version", version=f"sightline {__version__}", help="show the version")
    _add_demo(commands)
    _add_explain(commands)
    _add_view(commands)
    info = commands.add_parser("info", help="show this machine, the libraries, and what each kernel supports")
    info.set_defaults(run=_info)
    _add_bench(commands)
    return top


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="check, time and draw attention on activations of a trained model",
        description="Computes attention on activations of a trained encoder with the default kernel. Shows which "
        "kernel ran and why, its error against the float64 definition and against the model's own results, its time, "
        "the weights of one head as a picture, and which tokens every head of the encoder attends to.",
    )
    add = demo.add_argument
    add(
        "--output",
        metavar="PATH",
        help="file of the picture: .png, .svg or .pdf; the picture of all heads and the explorer page are written to "
        "the same folder (default: sightline-demo.png)",
    )
    add("--layer", type=int, default=3, choices=(0, 3), help="layer of the model (default: 3)")
    add("--head", type=int, default=1, choices=range(12), metavar="0-11", help="head to draw (default: 1)")
    add("--repeats", type=int, default=7, help="timed runs; their median is shown (default: 7)")
    add("--sentence", metavar="TEXT", help="sentence for the encoder, if the encoder is installed")
    demo.set_defaults(run=_demo)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .walkthrough import MASKS, MAX_MERGES, TEXT

    explain = commands.add_parser(
        "explain",
        help="show every stage of attention on a text, with shapes and numbers",
        description="Shows every stage of attention on a text: tokens, embeddings, query, key and value, rotation, "
        "scores, scaling, mask, softmax, weighted values. Then follows one pair of tokens through all stages. The "
        "tokens come from byte-pair merges that are learned from the text, step by step. Embeddings and projections "
        "are random, not trained.",
    )
    add = explain.add_argument
    add("text", nargs="*", help=f"any text (default: {TEXT!r}, whose tokens are published)")
    merges = f"largest number of merges that are learned from the text (default: {MAX_MERGES})"
    add("--merges", type=int, metavar="N", help=merges)
    add("--d-model", type=int, default=512, help="width of the embeddings (default: 512)")
    add("--d-k", type=int, default=64, help="width of query, key and value; even (default: 64)")
    add("--seed", type=int, default=0, help="seed of the embeddings and projections (default: 0)")
    add("--mask", default="none", help=f"{MASKS} (default: none)")
    positions = "positions to follow (default: c and r of the published text, else the last and the first)"
    add("--pair", type=int, nargs=2, metavar=("QUERY", "KEY"), help=positions)
    figures = "draw the weights to PATH, and the effect of scaling to a second file, -scaling"
    add("--figure", metavar="PATH", help=figures)
    explain.set_defaults(run=_explain)


def _add_view(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    view = commands.add_parser(
        "view",
        help="write a page that shows the attention weights of a local model",
        description="Runs a Hugging Face model from a directory on a text and writes the explorer: one HTML file that "
        "shows every head of every layer. The command downloads nothing, and the page needs no network.",
    )
    add = view.add_argument
    add("text", nargs="*", help="one text, or several, which are padded to one length")
    add("--model", required=True, metavar="DIR", help="directory that save_pretrained wrote, with tokenizer")
    add("--text-file", metavar="PATH", help="file that holds one more text")
    add("--output", metavar="PATH", help="file of the page (default: sightline-view.html)")
    add("--open", action="store_true", help="open the page in the browser")
    view.set_defaults(run=_view)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="time named problems against other libraries and measured peaks",
        description="Times Sightline and every installed peer library on named problems, alternating between them, "
        "after each output was checked against the float64 definition. The extra `bench` installs the peers.",
    )
    add = bench.add_argument
    devices = "cuda: a GPU, CUDA or ROCm, with its own problems and peers"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=devices)
    only = "run problems whose name contains WORD or matches it as a pattern"
    add("--only", action="append", metavar="WORD", help=only)
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="run problems of this dtype")
    add("--list", action="store_true", help="list the problems and their targets, and stop")
    add("--threads", type=int, help="threads of every contender (default: all usable processors)")
    add("--seconds", type=float, help="timing budget of one problem (default: 10; 2 on a GPU)")
    add("--quick", action="store_true", help="tiny sizes, to test that everything runs; times and ratios mean nothing")
    ranks = "instead, time attention over 1, 2 and 4 processes and compare with the times that the cost model predicts"
    add("--ranks", action="store_true", help=ranks)
    add("--json", metavar="PATH", help="write all results to PATH, with the time of every round")
    add("--figures", metavar="FOLDER", help="draw the results to FOLDER")
    bench.set_defaults(run=_bench)


def _demo(options: argparse.Namespace) -> None:
    from .demo_command import demo

    given = {} if options.sentence is None else {"sentence": options.sentence}
    demo(options.output, options.layer, options.head, options.repeats, **given)


def _explain(options: argparse.Namespace) -> None:
    from .explain_command import explain, write_figures
    from .walkthrough import TEXT, walk_through

    text = " ".join(options.text) if options.text else TEXT  # words without quotes are one text

    pair = None if options.pair is None else (options.pair[0], options.pair[1])
    sizes = {"d_model": options.d_model, "d_k": options.d_k, "seed": options.seed}
    walk = walk_through(text, max_merges=options.merges, mask=options.mask, pair=pair, **sizes)
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
    if options.ranks:
        from .bench.rank_scaling import bench_ranks

        bench_ranks(options.quick)
        return 0
    from .bench_command import bench

    return bench(options)
