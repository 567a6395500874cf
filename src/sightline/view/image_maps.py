"""The weights of a query over the patches of an image, drawn over the image itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from . import plotting

DARKEST = 0.82  # the part of the light that a patch of weight 0 loses; the image stays visible there


def over_image(weights: Any, image: Any, axis: Any = None, *, title: str | None = None) -> Any:
    """Draw an image, darker where its patches have less weight, such as those that a class token looks at.

    Parameters
    ----------
    weights : (rows, columns) array; leading axes of length 1 are dropped
        A number ≥ 0 for each patch. The light of a patch grows with the square root of its weight, from a dark image at
        0 to the unchanged image at the largest weight, which is written below the image.
    image : (height, width), (height, width, 3) or (height, width, 4) array
        Grey values or colours as matplotlib takes them: integers from 0 to 255, or floats from 0 to 1. The patches
        divide it evenly.
    axis : matplotlib axis, optional
        The axis to draw on; by default that of a new figure, which is `axis.figure`.
    title : str, optional

    Returns
    -------
    matplotlib axis

    Raises
    ------
    ShapeError
        The weights are not a matrix, or the image has another shape.
    MissingExtraError
        matplotlib is not installed.
    """
    values = np.asarray(plotting.drop_leading_axes(weights, 2), np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise ShapeError(
            f"weights of shape {np.shape(weights)}",
            "(rows, columns) of patches",
            "over_image(row[num_prefix_tokens:].reshape(14, 14), image)",
        )
    pixels = plotting.drop_leading_axes(image, 3)
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))):
        raise ShapeError(
            f"an image of shape {np.shape(image)}",
            "(height, width), (height, width, 3) or (height, width, 4)",
            "over_image(weights, image[0].permute(1, 2, 0)) for a tensor (1, 3, height, width)",
        )
    height, width = pixels.shape[:2]
    scale = 4.2 / max(height, width)
    axis = plotting.new_axis(axis, width * scale + 0.3, height * scale + 0.5)
    axis.imshow(pixels, cmap="gray", extent=(0, width, height, 0))
    largest = float(values.max())
    shares = np.sqrt(np.maximum(values, 0) / largest) if largest > 0 else np.zeros_like(values)
    shade = np.zeros((*values.shape, 4))  # black; the last number is its opacity
    shade[..., 3] = DARKEST * (1 - shares)
    axis.imshow(shade, extent=(0, width, height, 0), interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.set_xlabel(f"brightest patch {largest:.3g}, dark 0; light by the square root of the weight", fontsize=8)
    return plotting.finish(axis, title)
