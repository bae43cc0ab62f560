"""How regularly one token has followed others, as a class: part of a draft's `Evidence`."""

from __future__ import annotations


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
