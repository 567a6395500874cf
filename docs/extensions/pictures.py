"""Pictures and explorer pages that the build draws: the site shows what the library draws today, in light and in dark.

The pictures of the repository are for readers of the Markdown pages. A picture of a page without such a file is an
error. A script may draw twins of `x.png`, or they lie beside it: `x-dark.png` for dark pages, and `x-narrow.png` and
`x-narrow-dark.png` for phones.
"""

from __future__ import annotations

import shutil
from importlib import util
from pathlib import Path
from typing import Any

from docutils import nodes

# endings of the twins of a picture, and the classes by which the style sheet chooses
TWINS = {"-dark": ("only-dark",), "-narrow": ("only-light", "narrow"), "-narrow-dark": ("only-dark", "narrow")}


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


def add_twins(app: Any, doctree: nodes.document, page: str) -> None:
    """Put the twins of each picture behind the picture. The style sheet shows the one for the theme and the width."""
    for image in list(doctree.findall(nodes.image)) if app.builder.format == "html" else ():
        name, twins = image["uri"].removesuffix(".png"), {}
        is_linked = isinstance(image.parent, nodes.reference) and len(image.parent) == 1  # a link holds one picture
        holder = image.parent if is_linked else image
        for ending, classes in TWINS.items():
            twin = f"{name}{ending}.png"
            path = next((path for path in (drawn(app) / twin, Path(app.srcdir) / twin) if path.exists()), None)
            if path is None:
                continue
            copy = Path(app.outdir) / "_images" / twin.replace("/", "-")
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            twins[ending] = holder.deepcopy()
            node = next(twins[ending].findall(nodes.image))
            node["uri"] = "../" * page.count("/") + f"_images/{copy.name}"
            node["candidates"] = {"*": node["uri"]}
            node["classes"] = [*node["classes"], *classes]
        dark = [next(twins["-dark"].findall(nodes.image))] if "-dark" in twins else []
        image["classes"] += ["only-light"] * len(dark)
        for wide in (image, *dark) if "-narrow" in twins else ():
            wide["classes"] += ["wide"]
        place = holder.parent.index(holder) + 1
        holder.parent[place:place] = twins.values()


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
    app.connect("doctree-resolved", add_twins)
    app.connect("build-finished", replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
