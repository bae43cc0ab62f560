"""A drafter goes on in a later turn as if the conversation had not been interrupted."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import heads
import specdec_mlx as sd
import tiny
from selection import cases, in_one_test
from specdec_mlx.contracts import Draft, Drafter
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.pard import PardDrafter
from specdec_mlx.memory.drafter_states import (
    KEPT_ROWS,
    MOST_OWNERS,
    NAME,
    LatestFeatures,
    StatesOnCache,
)
from specdec_mlx.token_ids import to_list

LAYERS = ("step3p5", "mimo_v2_flash")  # several layers, chained and side by side


@cache
def pair(kind: str) -> tuple[nn.Module, Drafter]:
    """A target, and a drafter of this kind with random weights."""
    if kind == "draft model":
        return heads.target(), sd.ModelDrafter(heads.target(layers=2))
    if kind == "PARD":
        return heads.target(), PardDrafter(heads.target(layers=2), mask_token=1)
    if kind in (*LAYERS, "qwen3_next"):
        target, make = tiny.build(kind), heads.mtp(kind)
    else:
        target = heads.gemma4_target() if kind == "assistant" else heads.target()
        make = heads.HEADS[kind]
    return target, HeadDrafter(heads.random_head(make, target))


BLIND = ("medusa", "medusa, target's head", "assistant")
"""Kinds that draft from the target's latest state, and need nothing of earlier turns."""

KINDS = [*heads.HEADS, *LAYERS, "qwen3_next", "draft model", "PARD"]

FIRST = [(7 * i * i + 3 * i) % 59 + 1 for i in range(30)]
THEN = [5, 17, 42, 8]
HOW: dict[str, Any] = {"num_draft_tokens": 4}

Turn = Callable[[nn.Module, Drafter, list[Any]], list[int]]
"""Writes a turn on the caches. Returns the tokens that they hold then."""


def said(model: nn.Module, prompt: list[int], drafter: Drafter | None, **how: Any) -> list[int]:
    return [token.token for token in sd.speculate(model, prompt, drafter, **HOW | how)]


def until(number: int) -> Turn:
    """The length ends the text, also inside a round."""

    def turn(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
        text = said(model, FIRST, drafter, max_tokens=number, prompt_cache=caches)
        return [*FIRST, *text]

    return turn


def closed(number: int) -> Turn:
    """The caller closes the generator, as a stop string, an end token and a hang-up do."""

    def turn(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
        tokens = sd.speculate(model, FIRST, drafter, max_tokens=40, prompt_cache=caches, **HOW)
        with closing(tokens):
            return [*FIRST, *(token.token for token in islice(tokens, number))]

    return turn


class BrokenError(Exception):
    pass


def failing(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
    """A logits processor raises in the middle of a text."""
    calls, text = 0, list(FIRST)

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise BrokenError
        return logits

    how = {"max_tokens": 40, "prompt_cache": caches, "logits_processors": [processor]}
    with suppress(BrokenError):
        text += (token.token for token in sd.speculate(model, FIRST, drafter, **HOW | how))
    assert len(FIRST) < len(text) < len(FIRST) + 40
    return text


def failing_in_prompt(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
    """A second turn fails while its prompt is read."""
    text = until(9)(model, drafter, caches)

    def progress(done: int, total: int) -> None:
        if done > 4:
            raise BrokenError

    how = {"prefill_step_size": 3, "prompt_progress_callback": progress}
    with pytest.raises(BrokenError):
        said(model, FIRST, drafter, max_tokens=9, prompt_cache=caches, **how)
    return text


def two_turns(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
    text = until(7)(model, drafter, caches)
    text += [3, 4]
    return [*text, *said(model, [3, 4], drafter, max_tokens=6, prompt_cache=caches)]


def one_token(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
    """The text was hardly begun, so that nothing was drafted."""
    return until(1)(model, drafter, caches)


def shortened(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
    """The caller trims the caches, if they can be trimmed, because an earlier turn was edited."""
    text = until(12)(model, drafter, caches)
    return text[: len(text) - trim_prompt_cache(caches, 15)]


def copied(model: nn.Module, drafter: Drafter, caches: list[Any]) -> list[int]:
    """The caller goes on from a copy, after another text was written behind the original."""
    text = until(9)(model, drafter, caches)
    before = copy.deepcopy(caches)
    said(model, [60, 61], drafter, max_tokens=9, prompt_cache=caches)
    caches[:] = before
    return text


ENDS: dict[str, Turn] = {
    "length": until(12),
    "length, one token fewer": until(11),
    "closed": closed(7),
    "closed after one token": closed(1),
    "error": failing,
    "error in the prompt": failing_in_prompt,
    "two turns": two_turns,
    "one token": one_token,
    "shortened": shortened,
    "copied": copied,
}


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What is proposed, draft by draft."""
    proposed: list[list[int]] = []
    propose = WritingSession.propose

    def noted(session: WritingSession, limit: int) -> Draft:
        draft = propose(session, limit)
        if len(draft):
            proposed.append(to_list(draft.tokens))
        return draft

    monkeypatch.setattr(WritingSession, "propose", noted)
    return proposed


def after(
    kind: str, end: str, drafts: list[list[int]], then: list[int] = THEN
) -> tuple[list[list[int]], list[list[int]]]:
    """The drafts of a turn after another, and those of the whole text in one."""
    model, drafter = pair(kind)
    caches = make_prompt_cache(model)
    text = ENDS[end](model, drafter, caches)
    drafts.clear()
    later = said(model, then, drafter, max_tokens=16, prompt_cache=caches)
    resumed = list(drafts)
    drafts.clear()
    whole = said(
        model, [*text, *then], drafter, max_tokens=16, prompt_cache=make_prompt_cache(model)
    )
    assert later == whole
    return resumed, list(drafts)


@in_one_test("end", ENDS)
@pytest.mark.parametrize("kind", cases(KINDS, "eagle3", "dflash", "mimo_v2_flash", "draft model"))
def test_a_conversation_in_turns_is_drafted_as_one_text(
    kind: str, end: str, drafts: list[list[int]]
) -> None:
    """Draft by draft, after every way that a turn can end."""
    resumed, whole = after(kind, end, drafts)
    assert resumed == whole
    assert len(whole) > 3


@in_one_test("kind", ("eagle1", "eagle3", "dflash"))
def test_the_kept_state_is_what_makes_the_drafts_alike(
    kind: str, drafts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it they are others, so that the test above can fail."""
    monkeypatch.setattr(StatesOnCache, "fetch", lambda *_: (None, 0))
    resumed, whole = after(kind, "length", drafts)
    assert resumed != whole


@in_one_test("kind", KINDS)
def test_a_text_may_have_fewer_tokens_than_a_head_has_layers(kind: str) -> None:
    """Later layers have no state then, and the text is the plain text."""
    model, drafter = pair(kind)
    for number in range(1, heads.NUM_MTP_LAYERS + 2):
        how = {"max_tokens": 3, "prompt_cache": make_prompt_cache(model)}
        plain = said(model, FIRST[:number], None, max_tokens=3)
        assert said(model, FIRST[:number], drafter, **how) == plain


# What is not trusted ------------------------------------------------------------------------------


def resumed_by(
    kind: str, caches: list[Any], prompt: list[int], drafts: list[list[int]], **how: Any
) -> list[list[int]]:
    model, drafter = pair(kind)
    drafts.clear()
    said(model, prompt, drafter, max_tokens=16, prompt_cache=caches, **how)
    return list(drafts)


@in_one_test("kind", ["eagle3", "dflash"])
def test_a_state_is_for_the_head_that_made_it(kind: str, drafts: list[list[int]]) -> None:
    """Another head of the same kind begins anew, as it does without a state."""
    model, drafter = pair(kind)
    other = HeadDrafter(heads.random_head(heads.HEADS[kind], model, seed=8))
    expected = []
    for first in (drafter, None):
        caches = make_prompt_cache(model)
        said(model, FIRST, first, max_tokens=12, prompt_cache=caches)
        drafts.clear()
        said(model, THEN, other, max_tokens=16, prompt_cache=caches)
        expected.append(list(drafts))
    assert expected[0] == expected[1]
    assert expected[0] != resumed_by(kind, caches, THEN, drafts)


@in_one_test("kind", ["eagle3", "dflash", "draft model"])
def test_a_state_of_other_tokens_is_cut_or_left_out(kind: str, drafts: list[list[int]]) -> None:
    """A caller who wrote on the caches elsewhere, names other tokens, or put an earlier state on
    them: the text is the same, and positions that nobody named are not counted as read."""
    model, drafter = pair(kind)

    def second_turn(change: Callable[[list[Any]], Any], **how: Any) -> Any:
        caches = make_prompt_cache(model)
        text = said(model, FIRST, drafter, max_tokens=12, prompt_cache=caches)
        change(caches)
        plain = copy.deepcopy(caches)
        drafts.clear()
        given = said(model, THEN, drafter, max_tokens=16, prompt_cache=caches, **how)
        assert given == said(model, THEN, None, max_tokens=16, prompt_cache=plain)
        return [*FIRST, *text], StatesOnCache(caches)

    def written_elsewhere(caches: list[Any]) -> None:
        model(mx.array([[7, 8, 9]]), cache=caches)

    text, states = second_turn(written_elsewhere)
    before, _ = states.fetch(owner_of(kind), [*text, *THEN])
    assert before is not None, "the state of the first turn, since none was stored behind it"
    assert len(states._states()) == 0
    wrong = [*FIRST[:20], *(9 for _ in range(22))]
    second_turn(lambda caches: None, history=wrong)
    held = second_turn(lambda caches: trim_prompt_cache(caches, 42), history=[])[1]
    caches, length = held.fetch(owner_of(kind), THEN)
    assert (caches is not None, length) == (True, len(THEN))


def owner_of(kind: str) -> nn.Module:
    drafter: Any = pair(kind)[1]
    model: nn.Module = drafter.model
    return model


@in_one_test("kind", ["eagle3", "dflash"])
def test_behind_a_far_cut_a_head_goes_on_without_the_row_before_the_cut(
    kind: str, drafts: list[list[int]]
) -> None:
    """And after a turn of another drafter without the positions of that turn; later turns go on
    from there."""
    model, drafter = pair(kind)
    for far in (True, False):
        caches = make_prompt_cache(model)
        text = said(model, FIRST, drafter, max_tokens=KEPT_ROWS + 20, prompt_cache=caches)
        if far:
            trim_prompt_cache(caches, KEPT_ROWS + 10)
            text = [*FIRST, *text][: -KEPT_ROWS - 10]
        else:
            text = [*FIRST, *text, *THEN]
            text += said(model, THEN, None, max_tokens=5, prompt_cache=caches)
        for _ in range(3):
            expected = said(model, THEN, None, max_tokens=9, prompt_cache=copy.deepcopy(caches))
            assert said(model, THEN, drafter, max_tokens=9, prompt_cache=caches) == expected
            text += [*THEN, *expected]
        state, length = StatesOnCache(caches).fetch(drafter.head, text)  # type: ignore[attr-defined]
        assert length == len(text)
        assert state is not None
        skipped = 0 if far and kind == "dflash" else 1 if far else 9
        assert state[-1].num_skipped in (skipped, skipped + (not far and kind == "eagle3"))
        is_open = int(kind == "eagle3")
        assert state[0].offset == len(text) - state[-1].num_skipped - is_open


def test_states_are_few_and_go_with_their_owners() -> None:
    """The latest of so many drafters; a drafter that is gone takes its state along; rows that go
    far back are not kept."""
    model = heads.target()
    caches = make_prompt_cache(model)
    drafters = [
        HeadDrafter(heads.random_head(heads.eagle1, model, seed)) for seed in range(MOST_OWNERS + 2)
    ]
    said(model, FIRST * 4, drafters[0], max_tokens=4, prompt_cache=caches)
    (state,) = getattr(caches[0], NAME)
    assert isinstance(state.caches[-1], LatestFeatures)
    assert state.caches[-1].rows.shape[0] == KEPT_ROWS
    for drafter in drafters:
        said(model, THEN, drafter, max_tokens=4, prompt_cache=caches)
    owners = [id(state.owner()) for state in getattr(caches[0], NAME)]
    assert owners == [id(drafter.head) for drafter in drafters[2:]]
    del drafters, drafter
    gc.collect()
    said(model, THEN, sd.ModelDrafter(model), max_tokens=4, prompt_cache=caches)
    assert len(getattr(caches[0], NAME)) == 1
