"""Check that the output of commands on pages is real.

    python docs/extensions/commands.py [--write] PAGE ...

In a block of the language `console`, each line that starts with `$ sightline` is run, in an empty folder and with 100
columns. The lines below it must be its output, and a line ⋮ stands for any lines. `--write` replaces the lines of a
block that differs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```)", re.MULTILINE | re.DOTALL)
PROGRAM = "import sys; from sightline.cli import main; sys.argv[0] = 'sightline'; sys.exit(main())"
SOURCE = str(Path(__file__).parents[2] / "src")
SETTINGS = {"PYTHONPATH": SOURCE, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}


def output(command: str) -> str:
    """Return what a command prints."""
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words[1:]],
            cwd=folder,
            env=os.environ | SETTINGS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
    return "\n".join(line.rstrip() for line in result.stdout.rstrip().split("\n"))


def rerun(block: re.Match[str]) -> str:
    """Return a block with the outputs of its commands, or as it is if it shows these outputs."""
    commands = [line.removeprefix("$ ") for line in block.group().split("\n") if line.startswith("$ sightline")]
    real = "\n\n".join(f"$ {command}\n{output(command)}" for command in commands) + "\n"
    shown = re.escape(block.group()).replace(re.escape("⋮\n"), "(?:.*\n)*")
    return block.group() if re.fullmatch(shown, real) else real


def main(pages: list[Path], write: bool) -> int:
    """Check or write the pages, and return the number of pages that differ."""
    different = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        real = BLOCK.sub(rerun, text)
        if write:
            page.write_text(real, encoding="utf-8")
        elif real != text:
            different += 1
            old, new = text.split("\n"), real.split("\n")
            line = next((k for k, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), 0)
            print(f"{page}:{line + 1}: the page has\n  {old[line]}\nand the command prints\n  {new[line]}")
            print("cure: python docs/extensions/commands.py --write, and read the difference")
    return different


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the outputs on the pages")
    sys.exit(main(**vars(parser.parse_args())))
