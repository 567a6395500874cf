"""Pictures and explorer pages that the build draws: the site shows what the library draws today.

The pictures of the repository are for readers of the Markdown pages. A picture of a page without such a file is an
error.
"""

from __future__ import annotations

import shutil
from importlib import util
from pathlib import Path
from typing import Any


def draw(app: Any) -> None:
    """Run each script of `drawn_pictures`."""
    for folder, script in app.config.drawn_pictures.items():
        path = app.srcdir.parent / "examples" / f"{script}.py"
        spec = util.spec_from_file_location(script, path)
        module = util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        module.main(drawn(app) / folder)


def drawn(app: Any) -> Path:
    """Return the folder that receives the pictures."""
    return Path(app.doctreedir).parent / "pictures"


def replace(app: Any, error: Exception | None) -> None:
    """Write the drawn pictures over the files that the builder copied, and drawn pages to the folder `_static`."""
    for source, name in app.builder.images.items() if error is None else ():
        if (path := drawn(app) / source).exists():
            shutil.copyfile(path, Path(app.outdir) / "_images" / name)
    for page in drawn(app).rglob("*.html") if error is None else ():
        shutil.copyfile(page, Path(app.outdir) / "_static" / page.name)


def setup(app: Any) -> dict[str, bool]:
    """Draw before the pages are read, and replace after they are written."""
    app.add_config_value("drawn_pictures", {}, "env")
    app.connect("builder-inited", draw)
    app.connect("build-finished", replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
