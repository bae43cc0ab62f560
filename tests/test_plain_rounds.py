"""The benchmark of rounds without a draft: its cases are what they are called."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from selection import FULL
from specdec_mlx import lab
from specdec_mlx.bench import plain_rounds
from specdec_mlx.bench.contenders import Contender, Emitted
from specdec_mlx.bench.plain_rounds import CASES, NEVER_ASKED, NO_DRAFTER, PAUSED
from specdec_mlx.bench.timing import Settings


def test_a_shuffled_model_has_the_same_numbers_elsewhere() -> None:
    """Weight by weight, so that it takes as long as it did and knows nothing."""
    before = dict(tree_flatten(lab.load_pair().draft.parameters()))
    after = dict(tree_flatten(plain_rounds.shuffled(lab.load_pair().draft).parameters()))
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
    list(plain_rounds.unended(contender).start([1, 2], 7, 3))
    assert asked == [([1, 2], 8, 3)]
    assert plain_rounds.unended(contender).key == contender.key


@FULL
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_next_to_nothing_is_drafted(temp: float) -> None:
    """Nothing without a drafter or with K = 0; a useless model is tried, and then paused.

    Texts have runs of one character, which even shuffled weights guess right: rounds are counted
    less the tokens that their drafts brought.
    """
    pair = lab.load_pair()
    (task,) = plain_rounds.lab_tasks(pair.tokenizer, 1)
    settings = Settings(max_tokens=80, repeats=1)
    useless = plain_rounds.shuffled(pair.draft)
    results = plain_rounds.measure(pair.target, useless, [task], temp, settings)
    assert tuple(r.drafter for r in results) == CASES
    shares = {r.drafter: r.drafting_share for r in results}
    assert shares[NO_DRAFTER] == shares[NEVER_ASKED] == 0
    (paused,) = (r for r in results if r.drafter == PAUSED)
    assert paused.drafting_share - paused.accepted / paused.target_passes < 0.1
    assert all(r.tokens == 80 and r.ratio is not None for r in results)
