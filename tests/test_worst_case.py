"""The cases in which speculation can only lose are what they are called."""

from __future__ import annotations

import pytest

from selection import FULL
from specdec_mlx import lab
from specdec_mlx.bench import worst_case
from specdec_mlx.bench.timing import Settings
from specdec_mlx.types import DraftContext


@pytest.fixture(scope="module")
def pair() -> lab.Pair:
    return lab.load_pair()


def test_the_wrong_drafter_is_wrong_at_every_token() -> None:
    """Also after some of the text has come, and never beyond its end or the vocabulary."""
    drafter = worst_case.AlwaysWrong(8, {(1, 2): [3, 7, 0, 5]})
    session = drafter.begin([1, 2], DraftContext())
    assert session.propose(3).tokens == [4, 0, 1]
    session.observe([3, 7])
    assert session.propose(9).tokens == [1, 6]
    assert len(drafter.begin([9], DraftContext()).propose(4)) == 0


@FULL
def test_every_case_is_measured_against_plain_decoding(pair: lab.Pair) -> None:
    """Without a drafter and with a wrong one nothing is accepted; the wrong one does draft."""
    settings = Settings(max_tokens=40, repeats=1)
    results = worst_case.measure(pair.target, pair.tokenizer, 1, settings)
    assert list(results) == ["no drafter", "always wrong", "random words"]
    assert results["no drafter"].drafted == 0
    assert results["always wrong"].accepted == 0
    for result in results.values():
        assert result.identical == result.texts == 1
        assert result.ratio is not None
