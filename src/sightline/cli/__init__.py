"""The `sightline` command and its subcommands `demo`, `explain`, `view`, `info` and `bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import SightlineError
from . import bench_command, demo_command, explain_command, info_command, view_command

__all__ = ["main"]

EXAMPLES = """\
examples:
  sightline demo                          a trained model: checked, timed, drawn
  sightline explain "to be or not to be"  every stage of attention on a text
  sightline explain --mask causal         the same, with a mask
  sightline view --model DIR "a text"     a page with every head of a model
  sightline bench                         times beside torch's, on this machine

`sightline COMMAND --help` lists the options of a command."""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter of the help text that leaves out the line which argparse prints for the placeholder COMMAND."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name. If they name none, print the help. Return the process's exit code.

    The code is 0 for success. It is 2 for a `SightlineError` or an error of a named file, whose message is printed to
    standard error, and 130 for Ctrl-C.
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
    for module in (demo_command, explain_command, view_command, info_command, bench_command):
        module.add_command(commands)
    return top
