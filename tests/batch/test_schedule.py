"""The schedule of a batch: who joins, what is read before a round, what is read together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from specdec_mlx.batch.schedule import MOST_AT_ONCE, BatchText, Request, Schedule
from specdec_mlx.sequence import PromptReader

STEP = 10


def begun(schedule: Schedule, uid: int, request: Request) -> BatchText:
    """A text that has begun, of a target whose caches are a position."""
    place: Any = SimpleNamespace(position=request.num_read, caches=[])

    def feed(size: int) -> None:
        place.position += size

    reader = PromptReader(list(request.prompt), place, feed, STEP, stream=mx.cpu)
    drafting = SimpleNamespace(features=None)
    generation: Any = SimpleNamespace(reader=reader, drafting=drafting)
    text = BatchText(uid, request, generation, generation)
    schedule.reading.append(text)
    return text


def begin_all(schedule: Schedule) -> list[BatchText]:
    texts = []
    while taken := schedule.take():
        texts.append(begun(schedule, *taken))
    return texts


def of_sizes(*sizes: int, **options: Any) -> Schedule:
    """Texts that wait, with prompts of so many tokens to read, each its own."""
    schedule = Schedule(**options)
    for i, size in enumerate(sizes):
        schedule.insert(Request([i] * (size + 1)))
    return schedule


def test_texts_join_in_their_order_where_there_is_a_place() -> None:
    """Those being read and written take places; at most so many are read at a time."""
    schedule = of_sizes(*[5] * 20, max_texts=12)
    texts = begin_all(schedule)
    assert [text.uid for text in texts] == list(range(MOST_AT_ONCE))
    schedule.join(texts)
    assert [text.uid for text in begin_all(schedule)] == list(range(8, 12))
    assert (schedule.num_open, schedule.has_place, schedule.take()) == (20, False, None)
    texts[3].finish_reason = "length"
    schedule.move_ended()
    assert [text.uid for text in schedule.leaving] == [3]
    assert [text.uid for text in begin_all(schedule)] == [12]


def test_a_prompt_that_is_being_read_is_waited_for_and_shared() -> None:
    """Others come first meanwhile; then nothing of it is left to read."""
    schedule = of_sizes(5, 5)
    again, elsewhere = [Request([0] * 6, prompt_cache=held) for held in (None, [object()])]
    schedule.insert(again)
    schedule.insert(elsewhere)
    texts = begin_all(schedule)
    assert [text.uid for text in texts] == [0, 1, 3], "after other caches it is another prompt"
    texts[0].reader.read()
    schedule.share(texts[0])
    schedule.join(texts[:1])
    (shared,) = begin_all(schedule)
    assert (shared.uid, shared.request.num_read, shared.reader.num_left) == (2, 5, 0)
    assert again.num_read == 0, "the caller's request is as it was"


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_step_of_prompts_is_read_between_the_rounds_of_others(is_beside: bool) -> None:
    """Where nothing is written a step of each; what is read already is let in in any case."""
    schedule = of_sizes(25, 25, 0)
    texts = begin_all(schedule)
    if is_beside:
        schedule.writing = [begun(Schedule(), 9, Request([1]))]
    asked = []
    for text in schedule.to_read():
        asked.append(text.uid)
        text.reader.read()
    assert asked == ([0, 2] if is_beside else [0, 1, 2])
    assert [text.reader.num_read for text in texts] == ([10, 0, 0] if is_beside else [10, 10, 0])


@pytest.mark.parametrize(
    ("sizes", "slope", "is_together"),
    [
        pytest.param((4, 5, 6), 0.2, True, id="padding costs less than two passes"),
        pytest.param((4, 5, 6), 1.0, False, id="padding costs more"),
        pytest.param((4, 5, 10), 0.0, False, id="one is longer than a step"),
        pytest.param((4, 0), 0.0, False, id="nothing to read in one"),
        pytest.param((4,), 0.0, False, id="alone"),
    ],
)
def test_new_short_prompts_are_read_in_one_pass_if_that_is_cheaper(
    sizes: tuple[int, ...], slope: float, is_together: bool
) -> None:
    schedule = of_sizes(*sizes)
    texts = begin_all(schedule)
    assert schedule.to_read_together(slope) == (texts if is_together else [])
    schedule.insert(Request([0] * (sizes[0] + 1)))
    assert not schedule.to_read_together(slope), "another waits for what one of them reads"


def test_a_text_may_be_taken_out_wherever_it_is() -> None:
    schedule = of_sizes(3, 3, 3, max_texts=2)
    reading, writing = begin_all(schedule)
    schedule.join([writing])
    for uid in range(3):
        schedule.remove(uid)
    assert (reading.finish_reason, writing.finish_reason, schedule.waiting) == (
        *("removed", "removed"),
        [],
    )


def test_after_a_failure_what_was_not_written_waits_again() -> None:
    """In front, as it was asked for; what was taken out meanwhile does not come back."""
    schedule = of_sizes(5, 5, 5, 5, max_texts=3)
    written, read, removed = begin_all(schedule)
    schedule.join([written])
    schedule.remove(removed.uid)
    assert schedule.clear() == [written, read, removed]
    assert [uid for uid, _ in schedule.waiting] == [1, 3]
    assert schedule.waiting[0][1] is read.request
    assert schedule.num_open == 2
