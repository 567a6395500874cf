"""Before any test or documentation runs: Keras's backend, and a cache of kernels that is not the user's."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.pop("SIGHTLINE_THREADS", None)

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the folder of the process that started them
    FOLDER, OWNER = tempfile.mkdtemp(prefix="sightline-tests-"), os.getpid()
    os.environ["SIGHTLINE_CACHE"] = FOLDER

    @atexit.register
    def remove() -> None:
        if os.getpid() == OWNER:  # not a fork of it
            shutil.rmtree(FOLDER, ignore_errors=True)
