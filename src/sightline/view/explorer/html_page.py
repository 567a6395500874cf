"""The explorer page as HTML, as a file, as a widget in a notebook, or in the browser.

The page is one file that contains the style sheet, the JavaScript program and the data. It makes no network requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tempfile
import webbrowser
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ...errors import MissingExtraError, ParameterError
from .data import Exploration
from .from_recording import from_seen
from .page_parts import manifest_text, page_file, program, serialise, style

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


def html(data: Exploration | Any) -> str:
    """Return the HTML of the explorer page as a str. The page needs no other file, and opens from a disk or a server.

    Parameters
    ----------
    data : Exploration or Seen

    Raises
    ------
    ParameterError
        data is neither an Exploration nor a Seen, or the Seen lacks statistics that the page needs; see `from_seen`.
    """
    data = data if isinstance(data, Exploration) else from_seen(data)
    manifest, arrays = serialise(data)
    script, css = program() + "\nexplorerPage();\n", style()
    blobs = "\n".join(f'<script type="text/plain" id="sl-array-{k}">{text}</script>' for k, text in enumerate(arrays))
    return Template(page_file("page.html")).substitute(
        title=escape(data.title, quote=False),
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(css),
        style=css,
        manifest=manifest_text(manifest),
        arrays=blobs,
        script=script,
    )


def save_html(data: Exploration | Any, path: str | Path) -> Path:
    """Write the page that `html` returns to a file, and return the path of the file.

    Parameters
    ----------
    data : Exploration or Seen
    path : str or Path

    Returns
    -------
    Path

    Raises
    ------
    ParameterError
        data is neither an Exploration nor a Seen, the Seen lacks statistics that the page needs, or the file cannot be
        written.
    """
    page = html(data).encode("utf-8", "replace")  # a folder's name, as the title, may not be valid UTF-8
    try:
        path = Path(path)
        path.write_bytes(page)
    except (OSError, TypeError, ValueError) as error:
        allowed = "a file that can be written, in a folder that exists"
        raise ParameterError(f"a page at {str(path)!r}: {error}", allowed, 'save_html(data, "page.html")') from error
    return path


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
        given = "the explorer in a notebook, without anywidget"
        cure = 'pip install "sightline-attention[notebook]", or save_html(data, "page.html")'
        raise MissingExtraError(given, "anywidget, or a page in a file", cure) from error

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


def _csp_hash(text: str) -> str:
    """Return the hash of an inline script or style, by which a Content-Security-Policy allows it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
