"""The explorer: one HTML page that shows the attention weights of every head of every layer.

>>> import sightline.data
>>> from sightline.view import explorer
>>> cat = sightline.data.load("minilm_cat")
>>> tokens = [row[:length] for row, length in zip(cat.tokens, cat.lengths)]
>>> data = explorer.from_weights(tokens, [layer.weights for layer in cat.layers.values()], names=["Layer 0", "Layer 3"])
>>> page = explorer.html(data)

`explorer.save_html(data, "page.html")` writes the page. `explorer.explore(data)` shows the page in a notebook or a
browser. `html`, `save_html` and `explore` also accept the `Seen` that `sightline.watch` returns.
"""

from .data import Exploration, Links, ShownLayer, Text, from_weights
from .from_recording import from_seen
from .html_page import explore, html, save_html

__all__ = ["Exploration", "Links", "ShownLayer", "Text", "explore", "from_seen", "from_weights", "html", "save_html"]
