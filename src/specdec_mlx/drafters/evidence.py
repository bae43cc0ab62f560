"""Classes of shares and of counts in a draft token's `Evidence`, each with a learned weight."""

from __future__ import annotations

from bisect import bisect_right

SHARE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)
"""Lower ends of the classes of a share of the votes, or of the times that something was seen."""

PLACES_EDGES = (2, 3, 6)
"""Of the number of places that vote for a token, or of the times that it was seen."""


def share_class(share: float) -> int:
    """Class of a share, 1 to 8."""
    return 1 + bisect_right(SHARE_EDGES, share)


def places_class(num: int) -> int:
    """Class of a number of places, at least 1; 1 to 4."""
    return 1 + bisect_right(PLACES_EDGES, num)
