"""Draw the pictures of docs/gallery.md by running the examples of the page.

    python examples/draw_gallery.py [--folder docs/gallery]

An example that follows a picture on the page assigns a matplotlib figure or axis to `picture`. The script saves that
figure under the name of the picture. So the code on the page is the code that draws. Figures of plain matplotlib get
the colours of the site. The script also writes each picture without text to the folder `small`, for the tables at the
head of the page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from doctest import DocTestParser
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from rich.console import Console

from sightline.view.palette import LIGHT
from sightline.view.plotting import colour_map
from sightline.view.styled_figure import STYLE, dark_colours

PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"
FOLDER = PAGE.parent / "gallery"
# The site shows a picture 21em = 336 pixels high: an inch becomes 100 pixels. The picture of ten masks has 40em.
WIDTH, HEIGHT, TALL = 4.6, 3.36, 6.4  # in inches; a wider picture would have small text on a phone
WIDE = 6.2  # for a row of cells with numbers
TICK_SIZE, LABEL_SIZE = 8.6, 9.4  # in points: 12 and 13 pixels of the page
MARGIN = 0.03
DPI, SMALL_DPI = 150, 90
PICTURE_OR_CODE = re.compile(r"^!\[[^]]*\]\(gallery/(\S+)\)|^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def read_examples(page: str) -> Iterator[tuple[str | None, str]]:
    """Yield (name of the picture before an example, code of the example). The name is None if no picture is there."""
    picture = None
    for match in PICTURE_OR_CODE.finditer(page):
        if match[1]:
            picture = match[1]
        else:
            yield picture, "".join(example.source for example in DocTestParser().get_examples(match[2]))
            picture = None


def fit(figure: Any) -> None:
    """Give a figure the size at which the site shows it, and its texts the sizes of the page's."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(WIDE if width > 3 * height else WIDTH, TALL if height > 2 * width else HEIGHT)
    for axes in figure.axes:
        axes.tick_params(which="both", labelsize=TICK_SIZE)
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        legend = axes.get_legend()
        for text in [*ticks, *axes.texts, *(legend.get_texts() if legend else ())]:
            text.set_fontsize(TICK_SIZE)
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title):
            text.set_fontsize(LABEL_SIZE)


def crop(figure: Any) -> Any:
    """Return the whole height of a figure, and the width of what it shows, in inches."""
    from matplotlib.transforms import Bbox

    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    titles = [
        axes._left_title.get_window_extent().transformed(figure.dpi_scale_trans.inverted()) for axes in figure.axes
    ]
    drawn = Bbox.union([figure.get_tightbbox(), *titles])
    return Bbox([[drawn.x0 - MARGIN, 0], [drawn.x1 + MARGIN, figure.get_figheight()]])


def remove_text(figure: Any) -> None:
    """Remove titles, labels, ticks, legends, colour bars and lines between pairs, which a small picture cannot show."""
    for axes in figure.axes:
        axes.grid(visible=False, which="minor")
        axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
        for place in ("left", "center", "right"):
            axes.set_title("", loc=place)
        axes.set_visible(axes.get_label() != "<colorbar>")
        for text in [*axes.texts, *filter(None, [axes.get_legend()])]:
            text.remove()


def save_both(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure for light pages, and with "-dark" behind its name for dark pages."""
    figure.savefig(path, **options)
    with dark_colours(figure):
        figure.savefig(path.with_stem(f"{path.stem}-dark"), **options)


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw all pictures to the folder and return the paths of the light ones."""
    (folder / "small").mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {}
    written = []
    sides = {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
    sizes = {f"{axis}tick.major.size": 0 for axis in "xy"}
    colormaps.register(colours := colour_map(), force=True)
    style = STYLE | sides | sizes | {"figure.facecolor": LIGHT.ground, "image.cmap": colours.name}
    for picture, code in read_examples(PAGE.read_text(encoding="utf-8")):
        with rc_context(style):
            exec(compile(code, f"<the example of {picture}>", "exec"), names)
        if picture is not None:
            figure = names.pop("picture").figure  # `figure.figure` of a figure is itself
            fit(figure)
            written.append(folder / picture)
            save_both(figure, written[-1], dpi=DPI, bbox_inches=crop(figure))
            remove_text(figure)
            save_both(figure, folder / "small" / picture, dpi=SMALL_DPI, bbox_inches="tight", pad_inches=0.02)
    size = sum(path.stat().st_size for path in written)
    Console(highlight=False).print(f"Wrote {len(written)} pictures, {size / 1000:.0f} kB, to {folder}")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
