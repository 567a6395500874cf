"""Build the sdist and the wheel, and check the wheel in an empty environment. `make wheel-test` runs this program.

The wheel is built from the sdist. The environment is a temporary folder with the wheel and its required dependencies;
the programs run there, so that they cannot import from the repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parents[1]
SOURCE = ROOT / "src"
EMPTY = """
from importlib.metadata import version
from importlib.util import find_spec
import sightline
assert not [name for name in ("torch", "jax", "keras", "matplotlib") if find_spec(name)], "the environment is not empty"
assert version("sightline-attention") == sightline.__version__, "the wheel has two versions"
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sightline-wheel-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, quiet=True)
        run(sys.executable, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir(), quiet=True)
        [wheel] = (folder / "dist").glob("*.whl")
        check_contents(wheel)
        python = create_environment(folder / "environment", wheel)
        work = folder / "work"
        work.mkdir()
        check_without_extras(python, work)
        packages = os.pathsep.join(path for path in sys.path if Path(path).name == "site-packages")
        print("Optional packages of the environment of the tests:", flush=True)
        run(python, PROGRAMS / "import_extras.py", cwd=work, packages=packages)
        check_types(python, work)


def run(*command: str | Path, cwd: Path | None = None, quiet: bool = False, packages: str = "") -> None:
    """Run a command. `packages` is a PYTHONPATH of folders whose packages the command can import."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    if packages:
        environment |= {"PYTHONPATH": packages, "KERAS_BACKEND": "torch"}
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=quiet, text=True, check=False
    )
    if result.returncode:
        shown = f"{result.stdout}{result.stderr}" if quiet else ""
        sys.exit(f"{shown}{' '.join(map(str, command))}: exit code {result.returncode}")


def check_contents(wheel: Path) -> None:
    """Check that the wheel has the files of src/sightline, its own metadata, and nothing else."""
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(SOURCE).as_posix() for path in files}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if found != expected:
        sys.exit(f"{wheel.name} lacks {sorted(expected - found)} and has {sorted(found - expected)} in addition")
    print(f"{wheel.name}: {len(found)} files, {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)


def create_environment(folder: Path, wheel: Path) -> Path:
    """Create an environment with the wheel and its required dependencies, and return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", wheel)
    return python


def check_without_extras(python: Path, work: Path) -> None:
    """Run the user's program and the commands that need no optional package."""
    run(python, "-c", EMPTY, cwd=work)
    run(python, PROGRAMS / "user_program.py", cwd=work)
    command = python.parent / "sightline"
    for arguments in (["demo", "--repeats", "1"], ["explain", "to be or not to be"], ["info"], ["bench", "--list"]):
        run(command, *arguments, cwd=work, quiet=True)
    run(python, "-m", "sightline", "--version", cwd=work)
    page = work / "sightline-demo-heads.html"
    if "<script" not in page.read_text(encoding="utf-8"):
        sys.exit("`sightline demo` wrote a page without its programs")


def check_types(python: Path, work: Path) -> None:
    """Check the user's program with `mypy --strict` against the types in the wheel."""
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", work / "mypy"]
    run(*mypy, "--python-executable", python, PROGRAMS / "user_program.py", cwd=work)


if __name__ == "__main__":
    main()
