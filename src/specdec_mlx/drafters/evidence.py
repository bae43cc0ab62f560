"""What speaks for a draft token, in classes: part of a draft's `Evidence`.

Each class has a weight of its own in what is learned of acceptance, so that there are few of them,
and they are narrow where chances change most.
"""

from __future__ import annotations

from bisect import bisect_right

WHOLE = 64
"""Parts that a share of the vote is counted in: more than 63 of 64 is all of it."""

SHARE_EDGES = (13, 23, 32, 42, 51, 61, 64)
"""Lower ends of the classes of shares, in parts of `WHOLE`."""

PLACES_EDGES = (2, 3, 6)
"""Of the number of places that vote for a token."""

DISTANCE_EDGES = (8, 32, 128, 512, 2048)
"""Of the distance of the nearest of them from the end of the text, in tokens."""

SURROUNDINGS_EDGES = (1, 2, 4, 7)
"""Of the number of tokens before a match that stand before the text's end, too."""

ELSEWHERE = 2 + len(DISTANCE_EDGES)
"""Class of the distance where no place is in the text itself."""


def share_class(count: int, total: int) -> int:
    """Class of "seen `count` times of `total`": 0 if never, 1 to 5 from sure to rare.

    1: the only time. 2: every time, more than once. 3: more than half of the times. 4: more than a
    quarter. 5: less.
    """
    if total == 0:
        return 0
    if count == total:
        return 1 if total == 1 else 2
    return 3 if 2 * count > total else 4 if 4 * count > total else 5


def vote_class(parts: int) -> int:
    """Class of a share of the vote, in parts of `WHOLE`."""
    return 1 + bisect_right(SHARE_EDGES, parts)


def places_class(num: int) -> int:
    """Class of a number of places, at least 1."""
    return 1 + bisect_right(PLACES_EDGES, num)


def distance_class(distance: int | None) -> int:
    """Class of the distance of the nearest place in the text; None: there is none."""
    return ELSEWHERE if distance is None else 1 + bisect_right(DISTANCE_EDGES, distance)


def surroundings_class(num_common: int) -> int:
    """Class of a number of common tokens."""
    return 1 + bisect_right(SURROUNDINGS_EDGES, num_common)
