"""Setup for tests and documentation: Keras's backend, a separate kernel cache, no files of libraries not installed."""

import atexit
import os
import shutil
import tempfile
from importlib.util import find_spec

collect_ignore = ["docs/conf.py", "docs/extensions"]  # for Sphinx, which only `make docs` installs
if find_spec("transformers") is None:
    collect_ignore += ["src/sightline/transformers", "docs/watching-models.md"]

if find_spec("triton") is None:
    collect_ignore += ["src/sightline/gpu", "docs/gpu-kernels.md"]

if find_spec("tensorflow") is None:
    collect_ignore += ["src/sightline/keras/tensorflow_attention.py"]

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.pop("SIGHTLINE_THREADS", None)

if "PYTEST_XDIST_WORKER" not in os.environ:  # xdist workers use the folder of the process that started them
    FOLDER, OWNER = tempfile.mkdtemp(prefix="sightline-tests-"), os.getpid()
    os.environ["SIGHTLINE_CACHE"] = FOLDER

    @atexit.register
    def remove() -> None:
        if os.getpid() == OWNER:  # not in a forked process
            shutil.rmtree(FOLDER, ignore_errors=True)
