"""Build the sdist and the wheel, and check the wheel in an empty environment. `make wheel-test` runs this program.

    python .ci/wheel/check.py [FOLDER]

FOLDER receives the sdist and the wheel if every check passed. The wheel is built from the sdist. Both are built twice,
from the repository and from a copy of its files, and the bytes of both builds must be equal. The environment is a
temporary folder with the wheel and its required dependencies; the programs run there, so that they cannot import from
the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parents[1]
SOURCE = ROOT / "src"
METADATA = ("Name", "Version", "Summary", "Author", "License-Expression", "License-File", "Keywords", "Requires-Python")
EMPTY = """
from importlib.metadata import version
from importlib.util import find_spec
import sightline
assert not [name for name in ("torch", "jax", "keras", "matplotlib") if find_spec(name)], "the environment is not empty"
assert version("sightline-attention") == sightline.__version__, "the wheel has two versions"
"""


def main(output: Path | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="sightline-wheel-") as name:
        folder = Path(name)
        built = build_twice(folder)
        run(sys.executable, "-m", "twine", "check", "--strict", *built, quiet=True)
        [wheel] = (path for path in built if path.suffix == ".whl")
        check_contents(wheel)
        check_metadata(wheel)
        python = create_environment(folder / "environment", wheel)
        work = folder / "work"
        work.mkdir()
        check_without_extras(python, work)
        packages = os.pathsep.join(path for path in sys.path if Path(path).name == "site-packages")
        print("Optional packages of the environment of the tests:", flush=True)
        run(python, PROGRAMS / "import_extras.py", cwd=work, packages=packages)
        check_types(python, work)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            for path in built:
                shutil.copy2(path, output)


def build_twice(folder: Path) -> list[Path]:
    """Return the paths of the sdist and of the wheel. Stop if a second build, from a copy of the files, differs."""
    copy = folder / "copy"
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():  # a deleted file is listed until the deletion is committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)  # with the current time, and other permissions
            (copy / name).chmod(0o700 if os.access(ROOT / name, os.X_OK) else 0o600)
    first, second = (build(source, folder / name) for source, name in ((ROOT, "dist"), (copy, "again")))
    for one, other in zip(first, second, strict=True):
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            sys.exit(f"two builds differ: {one} and {other}")
    print(f"two builds are equal: {', '.join(path.name for path in first)}", flush=True)
    return first


def build(source: Path, target: Path) -> list[Path]:
    """Build the sdist, and the wheel from it. Return both, sorted. The times in them are that of the last commit."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", git("log", "-1", "--format=%ct").strip())
    run(sys.executable, "-m", "build", "--outdir", target, source, quiet=True)
    return sorted(target.iterdir())


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return what a command of git prints in a repository."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


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


def check_metadata(wheel: Path) -> None:
    """Check that the wheel says what an index shows: names, license, versions of Python, a description."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = message_from_string(archive.read(name).decode())
    missing = [field for field in METADATA if not found[field]]
    if missing or len(found.get_payload()) < 1000:
        sys.exit(f"{wheel.name}: the metadata lack {missing or 'a description'}")


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
    for arguments in (["demo", "--repeats", "1"], ["explain", "to be or not to be"], ["info"], ["bench", "--help"]):
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
    main(*map(Path, sys.argv[1:]))
