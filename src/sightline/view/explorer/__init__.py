"""The explorer: one HTML page that shows the attention weights of every head of every layer.

`from_weights` makes the data of a page. `save_html` writes the page, and `explore` shows it in a notebook or a browser.
Both accept the data, or the `Seen` that `sightline.watch` returns.
"""

from .data import Exploration, Links, ShownLayer, Text, from_weights
from .from_recording import from_seen
from .html_page import explore, html, save_html

__all__ = ["Exploration", "Links", "ShownLayer", "Text", "explore", "from_seen", "from_weights", "html", "save_html"]
