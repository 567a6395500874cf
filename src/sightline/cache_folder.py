"""The folder of the cache on disk, which has kernels of the CPU.

SIGHTLINE_CACHE=off disables the cache. SIGHTLINE_CACHE=/a/folder selects its folder.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SIGHTLINE_CACHE"


def cache_setting() -> str:
    """Return the value of SIGHTLINE_CACHE: "off" for "OFF" and "Off" too, and "" if the variable is not set."""
    setting = os.environ.get(CACHE_VARIABLE, "").strip()
    return "off" if setting.lower() == "off" else setting


def cache_folder() -> Path:
    """Return the folder of the cache on disk, which need not exist.

    Raises
    ------
    OSError
        SIGHTLINE_CACHE is "off" or is not an absolute path, or it is not set and the user has no home folder.
    """
    setting = cache_setting()
    if setting == "off":
        raise OSError(f"{CACHE_VARIABLE}=off")
    if setting:
        path = Path(os.path.expanduser(setting))
        if not path.is_absolute():
            raise OSError(f"{CACHE_VARIABLE}={setting} is neither off nor an absolute path")
        return path
    from platformdirs import user_cache_path

    try:
        path = user_cache_path("sightline", appauthor=False)
    except RuntimeError:  # newer versions of platformdirs raise it, older ones return a path that begins with ~
        path = Path("~")
    if not path.is_absolute():
        raise OSError(f"the user has no home folder; set HOME, or {CACHE_VARIABLE}=/a/folder")
    return path
