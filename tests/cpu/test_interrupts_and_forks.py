"""Calls in children that are forked while other threads call."""

import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parent.parent / "helpers"
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks of POSIX")


def printed(program, *arguments, timeout):
    """Return what a program of the helpers prints."""
    command = [sys.executable, str(HELPERS / program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- forks ---------------------------------------------------------------------------------------------------------


@posix
def test_children_of_forks_call():
    assert printed("forked_calls.py", 0, 20, timeout=300) == "children: 20\n"


@posix
@pytest.mark.soak
@pytest.mark.parametrize("packages", [[], ["torch"]], ids=["alone", "with torch"])
@pytest.mark.parametrize("seed", [1, 2])
def test_children_of_many_forks_call(seed, packages):
    assert printed("forked_calls.py", seed, 1000, *packages, timeout=3600) == "children: 1000\n"
