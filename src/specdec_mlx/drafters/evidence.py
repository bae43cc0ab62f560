"""What speaks for a draft token: the features from which acceptance is predicted.

No acceptance rule reads them. They only help to choose how many tokens to draft.
"""

from __future__ import annotations

from typing import NamedTuple


class Evidence(NamedTuple):
    """What speaks for one draft token, as far as its drafter knows.

    match: how many tokens of the text the draft was found by, or another strength >= 0 of the
        drafter's own; 0: nothing known.
    after_one, after_two: how regularly this token has followed the one, the two tokens before it,
        a class out of `share_class`; 0: nothing known.
    """

    match: int = 0
    after_one: int = 0
    after_two: int = 0


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
