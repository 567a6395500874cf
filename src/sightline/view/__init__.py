"""Pictures of masks, scores and weights, in a terminal, in a notebook or as files (with matplotlib)."""

from .formula_pictures import Picture, formula_picture
from .heatmaps import entropy_by_head, head_grid, heatmap, over_image
from .plotting import save
from .tile_maps import tile_map
from .token_charts import arcs, received_by_key

__all__ = [
    "Picture",
    "arcs",
    "entropy_by_head",
    "formula_picture",
    "head_grid",
    "heatmap",
    "over_image",
    "received_by_key",
    "save",
    "tile_map",
]
