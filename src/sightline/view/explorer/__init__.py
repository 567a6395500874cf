"""The explorer: one page that shows who looks at whom, every head of every layer, opened from a disk or in a notebook."""

from .data import Exploration, Layer, Links, Text, from_weights
from .writing import html, save_html

__all__ = ["Exploration", "Layer", "Links", "Text", "from_weights", "html", "save_html"]
