"""Pictures of masks, scores and weights: in the terminal, in a notebook, as files (with matplotlib).

>>> import sightline
>>> print(sightline.causal().show(4).text(colour=False))
i ≥ j   4 queries × 4 keys, 10 of 16 pairs allowed (62.5%)
   ┌────────┐
 0 │██ · · ·│
   │████ · ·│
   │██████ ·│
 3 │████████│
   └────────┘
    0      3
"""

from .heatmap import heatmap
from .picture import Picture, formula_picture
from .plotting import save
from .scaling import ScalingEffect, effect_of_scaling, scaling_figure

__all__ = [
    "Picture",
    "ScalingEffect",
    "effect_of_scaling",
    "formula_picture",
    "heatmap",
    "save",
    "scaling_figure",
]
