"""The explorer in a notebook cell, where anywidget shows it, or in a browser if there is no notebook."""

from __future__ import annotations

import json
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from .data import Exploration
from .from_recording import from_seen
from .html_page import save_html
from .page_parts import program, serialise, style

HEIGHT = 760  # height of the widget in a notebook cell, in pixels

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
    """Show the explorer page: in a notebook as a widget, elsewhere as a file that the browser opens.

    Parameters
    ----------
    data : Exploration or Seen

    Returns
    -------
    anywidget.AnyWidget or Path
        The widget in a notebook; elsewhere the path of the file that the browser opens.

    Raises
    ------
    MissingExtraError
        The page should be shown in a notebook, but anywidget is not installed.
    ParameterError
        data is neither an Exploration nor a Seen, or the Seen lacks statistics that the page needs; see `from_seen`.
    """
    data = data if isinstance(data, Exploration) else from_seen(data)
    if _in_notebook():
        return widget(data)
    path = save_html(data, Path(tempfile.mkdtemp(prefix="sightline-")) / "explorer.html")
    webbrowser.open(path.as_uri())
    return path


def widget(data: Exploration) -> Any:
    """Return a widget that shows the explorer page in a notebook cell, by running the page's JavaScript program."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise MissingExtraError(
            "the explorer in a notebook, without anywidget",
            "anywidget, or a page in a file",
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
    """Return True if IPython runs with a notebook kernel, which displays the result of a cell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")
