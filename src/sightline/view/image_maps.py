"""The weights of a query over the patches of an image, drawn over the image itself, for one head or for several."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from . import plotting

DARKEST = 0.82  # the part of the light that a patch of weight 0 loses; the image stays visible there
MAX_COLUMNS = 6  # largest number of heads in a row
GAP = 0.04  # between two images, in widths of an image
CAPTION = 0.1  # height of a head's caption, as a share of the longer side of an image


def over_image(weights: Any, image: Any, axis: Any = None, *, title: str | None = None) -> Any:
    """Draw an image, darker where its patches have less weight, such as the weights of a class token on the patches.

    Parameters
    ----------
    weights : (rows, columns) or (H, rows, columns) array; leading axes of length 1 are dropped
        A number ≥ 0 for each patch. The light of a patch grows with the square root of its weight. A patch of weight 0
        is dark. The patch with the largest weight of the head is unchanged, and this weight is written below the image.
        Several heads are drawn as images side by side, at most six in a row.
    image : (height, width), (height, width, 3) or (height, width, 4) array
        Grey values or colours as matplotlib takes them: integers from 0 to 255, or floats from 0 to 1. The patches
        divide the image into equal rectangles.
    axis, title : as in `heatmap`

    Returns
    -------
    matplotlib axis

    Raises
    ------
    ShapeError
        The weights or the image have another shape, or there are no patches.
    ParameterError
        A weight is negative.
    MissingExtraError
        matplotlib is not installed.
    """
    values = np.asarray(plotting.drop_leading_axes(weights, 2), np.float64)
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise ShapeError(
            f"weights of shape {np.shape(weights)}",
            "(rows, columns) of patches, or (heads, rows, columns)",
            "over_image(weights_of_one_query[..., num_prefix_tokens:].unflatten(-1, grid_size), image)",
        )
    plotting.check_weights(values)
    pixels = plotting.drop_leading_axes(image, 3)
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))):
        raise ShapeError(
            f"an image of shape {np.shape(image)}",
            "(height, width), (height, width, 3) or (height, width, 4)",
            "over_image(weights, image[0].permute(1, 2, 0)) for a tensor (1, 3, height, width)",
        )
    height, width = pixels.shape[:2]
    heads = values.reshape(-1, *values.shape[-2:])
    is_one, columns = len(heads) == 1, min(len(heads), MAX_COLUMNS)
    rows = -(-len(heads) // columns)
    right, down = width * (1 + GAP), height * (1 + GAP) + (0 if is_one else max(height, width) * CAPTION)
    scale = (4.2 if is_one else 2.2) / max(height, width)  # inches for each pixel
    axis = plotting.new_axis(axis, columns * right * scale + 0.3, rows * down * scale + 0.5)
    for number, head in enumerate(heads):
        row, column = divmod(number, columns)
        frame = (column * right, column * right + width, row * down + height, row * down)
        largest = _draw(axis, pixels, head, frame)
        if not is_one:
            axis.text(frame[0], frame[2] + height * 0.02, f"head {number}: {largest:.2g}", va="top", fontsize=8)
    axis.set(xlim=(0, columns * right - width * GAP), ylim=(rows * down - height * GAP, 0), xticks=[], yticks=[])
    brightest = f"brightest patch {largest:.3g}" if is_one else "number: brightest patch"
    axis.set_xlabel(f"{brightest}, dark 0; light by the square root of the weight", fontsize=8)
    return plotting.finish(axis, title)


def _draw(axis: Any, pixels: Any, values: Any, frame: tuple[float, ...]) -> float:
    """Draw the image with the shades of one head in a frame (left, right, bottom, top); return the largest weight."""
    axis.imshow(pixels, cmap="gray", extent=frame)
    largest = float(values.max())
    shares = np.sqrt(np.maximum(values, 0) / largest) if largest > 0 else np.zeros_like(values)
    shade = np.zeros((*values.shape, 4))  # black; the last number is its opacity
    shade[..., 3] = DARKEST * (1 - shares)
    axis.imshow(shade, extent=frame, interpolation="nearest")
    return largest
