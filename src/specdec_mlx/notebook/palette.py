"""Colours that colour-blind people can tell apart, on light pages and on dark ones."""

from __future__ import annotations

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008)."""

BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = COLOURS

GREY = "#7F7F7F"
"""Contrast of 4 to white and to the near-black of dark pages."""

MARKERS = "osD^vP"  # lines differ in these too


def translucent(colour: str, opacity: float) -> str:
    """CSS of a colour such as `#0072B2` that lets the page shine through."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"
