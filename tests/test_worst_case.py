"""The cases in which speculation can only lose are what they are called."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks import worst_case
from selection import FULL
from specdec_mlx import lab
from specdec_mlx.bench.contenders import Contender, Emitted
from specdec_mlx.bench.timing import Settings
from specdec_mlx.types import DraftContext


def test_the_wrong_drafter_is_wrong_at_every_token() -> None:
    """Also after some of the text has come, and never beyond its end or the vocabulary."""
    drafter = worst_case.AlwaysWrong(8, {(1, 2): [3, 7, 0, 5]})
    session = drafter.begin([1, 2], DraftContext())
    assert session.propose(3).tokens == [4, 0, 1]
    session.observe([3, 7])
    assert session.propose(9).tokens == [1, 6]
    assert len(drafter.begin([9], DraftContext()).propose(4)) == 0


def test_a_shuffled_model_has_the_same_numbers_elsewhere() -> None:
    """Weight by weight, so that it takes as long as it did and knows nothing."""
    before = dict(tree_flatten(lab.load_pair().draft.parameters()))
    after = dict(tree_flatten(worst_case.shuffled(lab.load_pair().draft).parameters()))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert after[name].shape == weight.shape
        assert not mx.array_equal(after[name], weight)
        assert mx.array_equal(mx.sort(after[name].flatten()), mx.sort(weight.flatten()))


def test_a_timed_text_has_one_token_more_to_come() -> None:
    """The contender is asked for one more than are timed, and is the same otherwise."""
    asked = []

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        asked.append((prompt, max_tokens, seed))
        yield from ()

    contender = Contender("d", "4", start, "block")
    list(worst_case.unended(contender).start([1, 2], 7, 3))
    assert asked == [([1, 2], 8, 3)]
    assert worst_case.unended(contender).key == contender.key


@FULL
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_every_case_is_what_it_is_called(temp: float) -> None:
    """Nothing is drafted without a drafter or with K = 0; what is always wrong is never accepted.

    A useless model is tried, and then paused. Texts have runs of one character, which even shuffled
    weights guess right: rounds are counted less the tokens that their drafts brought.
    """
    target, draft, tokenizer = lab.load_pair()
    settings = Settings(max_tokens=80, repeats=1)
    useless = worst_case.shuffled(draft)
    results = worst_case.measure(target, tokenizer, 1, temp, settings, useless)
    assert len(results) == 5 - (temp > 0)
    for name in (worst_case.NO_DRAFTER, worst_case.NEVER_ASKED):
        assert results[name].drafting_share == 0
    paused = results[worst_case.PAUSED]
    assert paused.drafting_share - paused.accepted / paused.target_passes < 0.1
    if temp == 0:
        assert results[worst_case.ALWAYS_WRONG].accepted == 0
    assert all(r.tokens == 80 and r.ratio is not None for r in results.values())
