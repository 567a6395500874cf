"""The colours of all that the package shows: pictures, terminal, explorer page and documentation site.

`LIGHT` and `DARK` are two themes with the same names. Every text colour, and every colour of `SERIES` that is used for
text, has a contrast of at least 4.5 with the ground and with raised surfaces, as level AA of the Web Content
Accessibility Guidelines 2.2 asks. The colours of the weights are of one hue and monotone in lightness, so that readers
with a colour vision deficiency and prints in grey keep the order. Blue and orange start from the palette of Okabe and
Ito ("Color Universal Design", 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

RGB = tuple[int, int, int]


@dataclass(frozen=True)
class Theme:
    """The colours of one theme, as #rrggbb."""

    ground: str  # the page, and the background of a picture
    raised: str  # buttons, fields and code
    hidden: str  # cells of pairs that a mask hides, and of weights that are 0
    ink: str  # text
    muted: str  # secondary text, and labels of axes
    line: str  # borders and grids
    cross: str  # lines through the cell under the pointer
    blue: str  # what a query attends to; Sightline in a comparison; links
    orange: str  # what a key receives; the other side of a comparison
    yellow: str  # tokens that a search found
    weights: tuple[str, ...]  # from the smallest weight to the largest, at equal distances
    signed: tuple[str, ...]  # of numbers with a sign, from the most negative to the most positive
    series: tuple[str, ...]  # of the lines and bars of one picture, in this order; only the first four may colour text


LIGHT = Theme(
    ground="#fbfaf8",
    raised="#ffffff",
    hidden="#f1efea",
    ink="#1f1f1d",
    muted="#6a6862",
    line="#e4e1da",
    cross="#8d8a82",
    blue="#0069a6",
    orange="#b84a00",
    yellow="#b58900",
    weights=("#dae6ef", "#bcd3e4", "#8ebbd8", "#5494c2", "#2469a2", "#0d4176", "#081d41"),
    signed=("#7a3000", "#d07a3a", "#f0cfb4", "#f1efea", "#bcd3e4", "#5494c2", "#0d4176"),
    series=("#0069a6", "#b84a00", "#007a5a", "#9a4a88", "#3d8fc4", "#c98a00", "#a79a00", "#7f7f7f", "#a8a6a0"),
)
DARK = Theme(
    ground="#141618",
    raised="#1b1e21",
    hidden="#1d2023",
    ink="#eceae4",
    muted="#9c9a92",
    line="#2c3034",
    cross="#83817a",
    blue="#56b4e9",
    orange="#e69f00",
    yellow="#f0e442",
    weights=("#22384a", "#1f4a6b", "#1f5980", "#347ea3", "#68a7b8", "#acd0cb", "#f7f4de"),
    signed=("#f6c793", "#c4702e", "#573420", "#1d2023", "#1f4a6b", "#347ea3", "#acd0cb"),
    series=("#56b4e9", "#e69f00", "#2fb58a", "#d68fc6", "#8ccaf0", "#f0c35e", "#d6cb3c", "#9a9a9a", "#6f6d68"),
)
THEMES = {"light": LIGHT, "dark": DARK}

SERIES, SIGNED = LIGHT.series, LIGHT.signed


def rgb(colour: str) -> RGB:
    """Return a colour #rrggbb as three numbers from 0 to 255."""
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


def to_hex(colour: RGB) -> str:
    """Return three numbers from 0 to 255 as #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def luminance(colour: RGB) -> float:
    """Return the relative luminance of a colour in sRGB, from 0 for black to 1 for white (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: RGB, other: RGB) -> float:
    """Return the contrast (L₁ + 0.05) / (L₂ + 0.05) of two colours, from 1 to 21, where L₁ ≥ L₂ (WCAG 2.2)."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def dark_twins() -> dict[RGB, RGB]:
    """Return the colour of the dark theme for each colour of the light theme. That of black is the colour of text."""
    light, dark = (
        [rgb(colour) for value in vars(theme).values() for colour in ([value] if isinstance(value, str) else value)]
        for theme in (LIGHT, DARK)
    )
    return dict(zip(light, dark, strict=True)) | {(0, 0, 0): rgb(DARK.ink)}


def text_on(colour: RGB) -> RGB:
    """Return black or white, whichever has the larger contrast with the given colour."""
    black, white = (0, 0, 0), (255, 255, 255)
    return max(black, white, key=lambda text: contrast(text, colour))


def interpolate(colours: tuple[str, ...], share: float) -> RGB:
    """Return the colour at a share from 0 to 1 of the way through the colours, which have equal distances."""
    at = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    first = min(int(at), len(colours) - 2)
    ends = zip(rgb(colours[first]), rgb(colours[first + 1]), strict=True)
    red, green, blue = (round(low + (high - low) * (at - first)) for low, high in ends)
    return red, green, blue


def css_variables(theme: Theme) -> str:
    """Return the theme's colours as CSS custom properties, such as `--ground: #fbfaf8;`."""
    return " ".join(f"--{name}: {value};" for name, value in vars(theme).items() if isinstance(value, str))
