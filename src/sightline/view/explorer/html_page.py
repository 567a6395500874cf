"""The HTML page of the explorer: one file that contains the style sheet, the JavaScript program and the data.

The page makes no network requests.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from string import Template
from typing import Any

from ...errors import ParameterError
from .data import Exploration
from .from_recording import from_seen
from .page_parts import manifest_text, page_file, program, serialise, style


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
        title=_escape(data.title),
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

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from sightline.view.explorer import from_weights, save_html
    >>> page = from_weights(["the", "cat"], np.eye(2)[None])  # one head, two tokens
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_html(page, f"{folder}/page.html").name
    'page.html'
    """
    page = html(data).encode("utf-8", "replace")  # a folder's name, as the title, may not be valid UTF-8
    try:
        path = Path(path)
        path.write_bytes(page)
    except (OSError, TypeError, ValueError) as error:
        raise ParameterError(
            f"a page at {str(path)!r}: {error}",
            "a file that can be written, in a folder that exists",
            'save_html(data, "page.html")',
        ) from error
    return path


def _csp_hash(text: str) -> str:
    """Return the hash of an inline script or style, by which a Content-Security-Policy allows it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
