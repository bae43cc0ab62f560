"""Look-ups of other projects draft what their descriptions say, counted on small texts."""

from __future__ import annotations

import pytest

from benchmarks.described_lookups import (
    METHODS,
    Cache,
    ContextCopy,
    Described,
    DescribedDrafter,
    MapKey,
    MapKeyFourValues,
    Mod,
    Ramp,
    RampThroughout,
    Simple,
    passes_of_the_better,
)
from specdec_mlx.draft_length.value import Fixed
from specdec_mlx.drafters.ngram import NGramCounts
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.replay import replay_text
from specdec_mlx.lab.bench.timing import Settings
from specdec_mlx.lab.prompts import RecordedText

COUNTING = list(range(100))
WRONG = 999


def drafted(index: Described, limit: int = 100) -> list[int]:
    return list(index.draft(limit).tokens)


def after(index: Described, tokens: list[int]) -> list[int]:
    """The draft after more text."""
    index.append(tokens)
    return drafted(index)


def test_ngram_simple_copies_48_tokens_from_the_last_place_of_12() -> None:
    """Fewer matching tokens draft nothing, and a draft length cuts the copy."""
    index = Simple([*COUNTING, *COUNTING[:12], *range(500, 600)])
    assert after(index, COUNTING[:11]) == []
    assert after(index, [11]) == list(range(500, 548))
    assert drafted(index, 5) == list(range(500, 505))


def test_ngram_map_k_drafts_no_more_than_its_key_had_accepted() -> None:
    """Another key is not affected, and a draft that was cut short is not judged."""
    index = MapKey(COUNTING)
    assert after(index, COUNTING[:12]) == COUNTING[12:60]
    index.append([12, 13, 14, WRONG])
    # The latest place follows, where the wrong token came after three.
    assert after(index, COUNTING[:12]) == [12, 13, 14]
    assert len(after(index, COUNTING[:30])) == 48

    index = MapKey(COUNTING)
    index.append(COUNTING[:12])
    assert len(index.draft(2)) == 2
    index.append([12, 13])
    assert after(index, COUNTING[:12]) == [12, 13, *COUNTING[:12]]


def test_ngram_map_k4v_drafts_a_value_that_is_clearly_the_most_frequent() -> None:
    """Twice at the least, and twice as often as the others together."""
    key, value, other = COUNTING[:8], list(range(50, 58)), list(range(60, 68))
    for values, draft in [
        ([value], []),
        ([value, value], value),
        ([value, other, value], value),
        ([value, other, value, other], []),
        ([value, other, value, other[::-1], value], []),
    ]:
        text = [token for one in values for token in (*key, *one)]
        assert drafted(MapKeyFourValues([*text, *key])) == draft, values


def test_ngram_mod_follows_a_pool_of_all_texts_and_drops_short_drafts() -> None:
    """Of 24 tokens each. 48 tokens are drafted at the least, and 64 at most."""
    pool: dict[tuple[int, ...], int] = {}
    assert drafted(Mod(COUNTING, pool)) == []
    assert drafted(Mod(COUNTING[:24], pool)) == COUNTING[24:88]
    assert drafted(Mod(COUNTING[20:52], pool)) == COUNTING[52:]
    assert drafted(Mod(COUNTING[30:53], {**pool})) == []
    assert drafted(Mod(COUNTING[30:60], pool)) == []  # 40 are left


def test_ngram_cache_filters_by_sightings_and_share_and_asks_earlier_texts_last() -> None:
    """One sighting after three tokens is enough in the text itself, and not in earlier texts."""
    earlier = NGramCounts(2, 5, 1000)
    index = Cache([1, 2, 3, 4, 5, 9, 1, 2, 3], earlier)
    assert drafted(index) == [4, 5, 9, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5, 9, 1]
    assert drafted(Cache([3, 4, 8, 8, 3], earlier)) == []  # one sighting after one token
    index.close(9)
    assert drafted(Cache([1, 2, 3], earlier)) == []
    Cache([1, 2, 3, 4], earlier).close(4)
    assert drafted(Cache([1, 2, 3], earlier)) == [4]


@pytest.mark.parametrize(("match", "length"), [(5, 0), (6, 8), (7, 12), (8, 16), (9, 24), (12, 24)])
def test_context_copy_takes_longer_blocks_after_longer_matches(match: int, length: int) -> None:
    """Of the prompt alone."""
    index = ContextCopy([*COUNTING, WRONG])
    assert after(index, COUNTING[20 : 20 + match]) == COUNTING[20 + match :][:length]


def test_context_copy_pauses_where_its_blocks_are_wrong() -> None:
    """After the fourth wrong block, for 64 tokens; what was generated is never copied."""
    index = ContextCopy(COUNTING)
    for _ in range(4):
        assert after(index, COUNTING[:6])
        index.append([WRONG])
    assert after(index, COUNTING[:6]) == []
    index.append([WRONG] * 45)
    assert after(index, COUNTING[:6]) == []
    assert after(index, COUNTING[:6]) == COUNTING[6:14]
    assert after(index, [WRONG] * 7) == []

    never = RampThroughout(COUNTING)
    for _ in range(9):
        assert after(never, COUNTING[:6])
        never.append([WRONG])


def test_ramp_copies_48_tokens_and_finds_its_place_again_after_a_mismatch() -> None:
    """By three tokens, where the tokens before are most alike."""
    near, far = [*range(40), 1, 2, 3, 700], [*range(200, 240), 1, 2, 3, 800]
    for prompt in ([*near, *far], [*far, *near]):
        index = Ramp([*prompt, *range(300, 400)])
        changed = [*range(20, 38), WRONG, 39, 1, 2, 3]
        assert after(index, changed)[0] == 700
        assert len(after(index, list(range(300, 306)))) == 48
    assert drafted(ContextCopy([*near, *far, *changed])) == []


def test_a_method_that_is_right_saves_the_passes_of_its_drafts() -> None:
    """13 tokens one by one, 48 with the token after them, and the last 8.

    12 tokens make a match, and the pass after a pass without a draft is launched ahead.
    """
    text = RecordedText("one", "x", COUNTING, COUNTING[:70])
    sample = replay_text(
        text,
        METHODS["ngram-simple"](),
        Fixed(64),
        linear_cost(0.1),
        max_tokens=70,
        vocab_size=1000,
    )
    assert (sample.passes, sample.accepted) == (15, 55)


def test_an_oracle_of_two_drafters_takes_the_better_draft_in_each_round() -> None:
    """40 tokens of either half of the prompt, and the passes in which each drafter was first."""
    low, high = [*range(50)], [*range(100, 150)]
    text = RecordedText("one", "x", [*low, *high], [*low[:40], *high[:40]])
    record = Record("", {}, Settings(80, vocab_size=1000), [text])

    def half(part: list[int]) -> DescribedDrafter:
        return DescribedDrafter(str(part[0]), lambda _: Simple(part, 2))

    # Two tokens of a half match. Of the 38 after them a pass takes 20, and the next takes 18 with
    # a token of the other half.
    assert passes_of_the_better(record, [half(low)], 19) == [2 + 2 + 39]
    assert passes_of_the_better(record, [half(low), half(high)], 19) == [2 + 2 + 1, 2]
