"""The explorer where the reader is: in a notebook's cell through anywidget, else in a browser."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from .data import Exploration
from .from_recording import from_seen
from .html_page import program, save_html, serialise, style

__all__ = ["explore"]

HEIGHT = 760  # pixels of a notebook's cell

MODULE = """
export default {
  render({ model, el }) {
    const root = document.createElement('div'), arrays = model.get('arrays');
    root.tabIndex = 0;
    root.style.height = `${model.get('height')}px`;
    el.append(root);
    explorer(root, JSON.parse(model.get('manifest')), (at) => arrays[at]);
  },
};
"""


def explore(data: Exploration | Any) -> Any:
    """Show the page: a widget in a notebook, else a file in the browser.

    Parameters
    ----------
    data : Exploration or Seen

    Returns
    -------
    anywidget.AnyWidget or Path
        The widget, or the file that was opened.

    Raises
    ------
    MissingExtraError
        A notebook without anywidget.
    """
    data = data if isinstance(data, Exploration) else from_seen(data)
    if _in_notebook():
        return widget(data)
    path = save_html(data, Path(tempfile.mkdtemp(prefix="sightline-")) / "explorer.html")
    webbrowser.open(path.as_uri())
    return path


def widget(data: Exploration) -> Any:
    """The page as a widget: the same program, drawn into a cell."""
    import json

    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise MissingExtraError(
            "the explorer in a notebook, and no anywidget",
            "anywidget, or a page of its own",
            'pip install "sightline-attention[notebook]", or save_html(data, "page.html")',
        ) from error

    class Widget(anywidget.AnyWidget):
        _esm = program() + MODULE
        _css = style()
        manifest = traitlets.Unicode().tag(sync=True)
        arrays = traitlets.List(traitlets.Unicode()).tag(sync=True)
        height = traitlets.Int(HEIGHT).tag(sync=True)

    manifest, arrays = serialise(data)
    return Widget(manifest=json.dumps(manifest), arrays=arrays)


def _in_notebook() -> bool:
    """Whether IPython runs with a kernel, which displays what a cell returns."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")
