"""Import every public submodule of the installed wheel, with the optional packages of PYTHONPATH.

A submodule of the same name as a package that is not installed must say so, and name the cure.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import sightline
from sightline.errors import MissingExtraError

assert Path(sightline.__file__).is_relative_to(sys.prefix), f"not the wheel: {sightline.__file__}"
for name in sightline.SUBMODULES:
    try:
        module = import_module(f"sightline.{name}")
    except MissingExtraError as error:
        if find_spec(name) is not None:
            raise
        print(f"sightline.{name}: not installed, {error.cure}")
    else:
        assert Path(module.__file__ or "").is_relative_to(sys.prefix), module.__file__
        print(f"sightline.{name}: {len(module.__all__)} public names")
