"""Colours that colour-blind people can tell apart, on light pages and on dark ones."""

from __future__ import annotations

BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
)
"""Okabe and Ito (2008)."""

GREY = "#7F7F7F"
"""As far from white as from the near-black of dark pages: a contrast of 4 to both."""

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = "osD^vP"
"""Colour never is the only difference."""


def translucent(colour: str, opacity: float) -> str:
    """CSS of a colour such as `#0072B2` that lets the page shine through."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"
