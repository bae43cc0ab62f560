"""What a round is made of: limits of a draft, the clock, a caller who is slow or has own rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
import tiny_text
from scripted import PROMPT, plain, target
from selection import in_one_test
from specdec_mlx import loop
from specdec_mlx import loop as clock
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import (
    Agreement,
    Draft,
    DraftContext,
    Outcome,
    Randomness,
    RoundRecord,
    TargetRows,
    Verdict,
)
from specdec_mlx.draft_length.drafting import Drafting
from specdec_mlx.draft_length.value import Auto, Fixed
from specdec_mlx.lab import check_drafter
from specdec_mlx.loop import Generation
from specdec_mlx.options import Options
from specdec_mlx.sequence import SequenceState
from specdec_mlx.target import LazyPass

VOCAB = 128


def asked(max_tokens: int, keeps_cache: bool) -> list[int]:
    """Limits that a drafter of wrong tokens is asked with, K = 4."""
    limits, text = list[int](), plain(20)

    def script(emitted: int, limit: int) -> list[int]:
        limits.append(limit)
        return [(text[emitted] + 1) % VOCAB] * limit

    caches = make_prompt_cache(target()) if keeps_cache else None
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "num_draft_tokens": 4,
        "prompt_cache": caches,
    }
    tokens = sd.speculate(target(), PROMPT, scripted.ScriptedDrafter(script), **options)
    assert [t.token for t in tokens] == text[:max_tokens]
    return limits


def test_the_last_token_wanted_is_not_drafted_unless_the_caches_are_kept() -> None:
    """It comes with the verdict; in the caller's caches it has to be in any case. A text of up to 8
    tokens is drafted from its first pass on, a longer one from the second."""
    assert asked(1, keeps_cache=False) == []
    assert asked(1, keeps_cache=True) == [1]
    assert asked(2, keeps_cache=False) == [1]
    assert asked(4, keeps_cache=False) == [3, 2, 1]
    assert asked(7, keeps_cache=True) == [4, 4, 4, 4, 3, 2, 1]
    assert asked(9, keeps_cache=False) == [4, 4, 4, 4, 3, 2, 1]
    assert asked(9, keeps_cache=True) == [4, 4, 4, 4, 4, 3, 2, 1]


@dataclass(frozen=True)
class KeepAll:
    """A lossy rule: every draft is kept whole."""

    temp: float
    name = "keep all"

    def decide(self, rows: TargetRows, draft: Draft, randomness: Randomness) -> Any:
        assert rows.greedy == (self.temp == 0)
        return Verdict(mx.array(len(draft)), rows.tokens[-1])


class OwnTokens:
    name, needs_distribution = "own tokens", False

    def decide(self, rows: TargetRows, draft: Draft, randomness: Randomness) -> Agreement:
        assert not rows.has_distribution
        return Agreement(rows.tokens)


def test_a_rule_of_the_callers_own_decides() -> None:
    """At every temperature; one that needs no distribution takes any sampler, and others none."""
    options: dict[str, Any] = {"max_tokens": 10, "num_draft_tokens": 2}
    sevens = scripted.ScriptedDrafter(lambda emitted, limit: [7] * limit)
    for temp in (0.0, 1.0):
        options |= {"rule": KeepAll(temp), "sampler": sd.Sampling(temp=temp)}
        tokens = sd.speculate(target(), PROMPT, sevens, **options)
        assert [t.token for t in tokens if t.from_draft] == [7] * 6
    options["sampler"] = sampler = functools.partial(mx.argmax, axis=-1)
    sampler.pure = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"keep all.*needs the target's distribution"):
        sd.speculate(target(), PROMPT, sevens, **options)
    drafter = scripted.OracleDrafter(plain(20), VOCAB, wrong=0.3)
    tokens = sd.speculate(target(), PROMPT, drafter, **options | {"rule": OwnTokens()})
    assert [t.token for t in tokens] == plain(10)


@dataclass(frozen=True)
class KeepsThePrompt:
    """Draws uniformly, and looks at the prompt's length when it needs it."""

    starts: list[tuple[int, int]]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        return KeepingSession(prompt, context, self.starts)


class KeepingSession:
    def __init__(self, prompt: Any, context: DraftContext, starts: Any) -> None:
        self.prompt, self.context, self.starts = prompt, context, starts
        self.text = list(prompt)

    def propose(self, limit: int) -> Draft:
        start = len(self.text) - len(self.prompt)
        self.starts.append((start, len(self.prompt)))
        if not limit:
            return Draft()
        rows = mx.full((limit, VOCAB), -math.log(VOCAB))
        noise = self.context.draft_gumbels(start, limit)
        return Draft(mx.argmax(rows + noise, axis=-1), rows)

    def observe(self, tokens: Sequence[int]) -> None:
        self.text += tokens


def in_the_loop(drafter: Any) -> None:
    list(
        sd.speculate(
            target(), PROMPT, drafter, num_draft_tokens=2, sampler=sd.Sampling(1.0), seed=1
        )
    )


def in_a_batch(drafter: Any) -> None:
    how = {"num_draft_tokens": 2, "sampler": sd.Sampling(1.0), "max_tokens": 20}
    list(
        sd.batch_stream_generate(target(), tiny_text.tokenizer(), [PROMPT], drafter=drafter, **how)
    )


PLACES = {
    "the loop": in_the_loop,
    "a batch": in_a_batch,
    "the first of two": lambda one: in_the_loop(sd.drafters.FirstOf(sd.NGramDrafter(), one)),
    "the conformance test": lambda one: check_drafter(one, vocab_size=VOCAB, num_draws=50),
}


@in_one_test("place", PLACES)
def test_the_prompt_that_a_drafter_keeps_stays_as_it_was(place: str) -> None:
    """So that it counts the tokens emitted, and no two of its drafts are drawn from one noise."""
    starts: list[tuple[int, int]] = []
    PLACES[place](KeepsThePrompt(starts))
    if place != "the conformance test":
        assert {length for _, length in starts} == {len(PROMPT)}
        places = [start for start, _ in starts]
        assert places == sorted(set(places))
        assert len(places) > 5


class FakeTime:
    """A clock that passes move on by a second, and the caller by as much as he likes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, then: float) -> None:
        self.now = max(self.now, then)


@dataclass
class TimedPass:
    draft: Draft
    num_fed: int
    wait: Callable[[], None]
    logprobs, features = mx.zeros((9, 1)), None

    def draw_next(self) -> mx.array:
        return mx.array([1], mx.uint32)

    def read(self) -> Outcome:
        self.wait()
        return Outcome(accepted=[], tokens=[1])


class TimedTarget:
    """A target that writes 1s, whose passes take a second each, one after the other."""

    remembers, kernels = False, None

    def __init__(self, time: FakeTime) -> None:
        self.time, self.free_at, self.rollback = time, 0.0, Rollback([])
        self.extend_history = self.measure_width = lambda *about: None

    def launch(self, pending: Any, draft: Draft, *about: Any) -> TimedPass:
        done_at = self.free_at = max(self.free_at, self.time.now) + 1.0
        num_fed = len(pending) + len(draft)
        self.rollback.checkpoint()
        self.rollback.advance(num_fed)
        return TimedPass(draft, num_fed, lambda: self.time.wait_until(done_at))

    def feed(self, tokens: mx.array, embeddings: Any) -> None:
        self.rollback.advance(len(tokens))


class WantsTwo(Auto):
    """A fixed length that wants the seconds of two rounds, and notes those of steady ones."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.wanted, self.steady = length, 2, list[float]()

    def limit(self, part: str, cheap: bool) -> int:
        return self.length

    def cut(self, part: str, draft: Draft) -> int:
        return len(draft)

    def wants_timing(self, num_drafted: int) -> bool:
        return self.wanted > 0

    def record(self, round_: RoundRecord) -> None:
        if round_.steady:
            self.steady.append(round_.seconds)
            self.wanted -= 1


def handed_out(policy: Any, away: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds between 12 tokens that are handed out to a caller who is `away` with each."""
    time = FakeTime()
    for module in (clock, loop):
        monkeypatch.setattr(module, "perf_counter", time)
    fake, sequence = TimedTarget(time), SequenceState([1, 2], 2, 12)
    drafter = policy and scripted.ScriptedDrafter(lambda emitted, limit: [3] * limit)
    drafting = Drafting(drafter, policy, fake, sequence, keeps_cache=False, stream=mx.cpu)
    generation = Generation(fake, sequence, drafting, DraftContext(), Options(stream=mx.cpu))
    times = []
    for _ in generation.run():
        times.append(time.now)
        time.now += away
    return [b - a for a, b in pairwise(times)]


def test_the_policy_learns_and_nobody_is_waited_for_without_need(monkeypatch) -> None:
    """A caller who is away for four seconds with each token: the rounds wanted are timed all the
    same, a second each. A quick one's are steady by themselves; and a policy may want no seconds,
    or there is none."""
    for length in (0, 1):
        policy = WantsTwo(length)
        gaps = handed_out(policy, 4.0, monkeypatch)
        assert (policy.steady[:2], policy.wanted) == ([1.0, 1.0], 0)
        assert sorted(gaps)[:-3] == [4.0] * (len(gaps) - 3), "only the timed rounds are waited for"
    policy = WantsTwo(0)
    assert handed_out(policy, 0.1, monkeypatch)[1:] == pytest.approx([1.0] * 10)
    assert policy.steady == pytest.approx([1.0] * len(policy.steady))
    assert len(policy.steady) >= 9  # not the first and last: the mode changes
    policy = WantsTwo(0)
    policy.wanted = 0
    assert handed_out(policy, 4.0, monkeypatch)[1:] == [4.0] * 10
    assert policy.steady == [1.0]  # the first, before any token was handed out
    assert handed_out(None, 4.0, monkeypatch)[1:] == [4.0] * 10
    for away, waited, own in ((0.1, 0.0, True), (0.3, 0.0, False), (0.3, 0.6, True)):
        # else the caller's time may stand on top: a launch on a CPU takes as long as a pass
        assert clock.RoundClock(2.0, waited=waited, away=away).was_undisturbed is own


def test_the_hosts_other_work_is_what_drafting_launching_and_waiting_leave() -> None:
    """Of ten seconds one is for the draft, two build the pass, and three wait for it."""
    times = iter([0.0, 0.0, 1.0, 3.0, 10.0])
    of_round = clock.RoundClock(waited=3.0, now=lambda: next(times))
    of_round.start()
    of_round.draft_begins()
    of_round.launch_begins()
    launched = of_round.launched(Mock(spec=LazyPass, draft=Draft([5]), num_fed=2))
    assert (launched.draft_seconds, launched.launch_seconds) == (1.0, 2.0)
    assert of_round.handed_over(None, Mock(spec=Drafting)) == 4.0


def test_without_a_drafter_the_next_pass_waits_only_where_ranks_meet_after_the_tokens() -> None:
    generation = Mock(spec=Generation, drafting=Mock(drafter=None))
    assert Generation.next_round(generation, Mock(), Mock(), None, emits_first=True) is None
    generation.verify.assert_not_called()
    launched = Generation.next_round(generation, Mock(), Mock(), None, emits_first=False)
    assert launched is generation.verify.return_value


class FromThirdRound(Fixed):
    rounds = 0

    def limit(self, *about: Any, **more: Any) -> int:
        return 2 if self.rounds >= 3 else 0

    def record(self, round_: RoundRecord) -> None:
        object.__setattr__(self, "rounds", self.rounds + 1)


def test_an_expensive_drafter_is_considered_while_passes_run_ahead() -> None:
    """It cannot be asked in vain, so the policy's word is enough to leave pipelined mode."""
    drafter, policy = scripted.OracleDrafter(plain(20), VOCAB), FromThirdRound(2)
    *_, last = sd.speculate(target(), PROMPT, drafter, max_tokens=12, num_draft_tokens=policy)
    assert [drafted for drafted, _ in last.stats.rounds] == [0, 0, 0, 0, 2, 2, 1]
    assert last.stats.ahead == 2  # the third and fourth; nothing runs ahead of the first token


class Cheap(scripted.ScriptedSession):
    """A drafter, and its session, that is free to ask."""

    cheap = True

    def begin(self, *about: Any) -> Cheap:
        return self


def test_passes_run_ahead_where_looking_is_free_and_finds_nothing() -> None:
    """Not at first, and not while drafts are likely."""
    text = plain(60)
    for found, least, most in ((0, 45, 55), (30, 15, 25), (60, 0, 0)):
        drafter = Cheap(lambda n, k, found=found: text[n : min(n + k, found)])  # type: ignore[misc]
        *_, last = sd.speculate(target(), PROMPT, drafter, max_tokens=60, num_draft_tokens=3)
        assert least <= last.stats.ahead <= most, found


@pytest.mark.parametrize("which", ["look-up", "model", "look-up, then model"])
@in_one_test(("temp", "length"), product([0.0, 1.0], [4, "auto"]))
def test_no_drafter_is_asked_and_no_draft_model_runs_before_the_first_token(
    which: str, temp: float, length: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target reads the prompt but for its last token, and that one. The drafter is shown the
    first token by itself, and then asked; for a single token a draft model reads nothing at all.
    """
    passes, kind, draft_model = (
        list[tuple[bool, int]](),
        type(target()),
        tiny.build("qwen2", seed=7),
    )
    call = kind.__call__

    def noting(one: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        passes.append((one is target(), tokens.size))
        return call(one, tokens, *args, **kwargs)  # type: ignore[no-any-return]

    monkeypatch.setattr(kind, "__call__", noting)
    options: dict[str, Any] = {"num_draft_tokens": length, "sampler": sd.Sampling(temp=temp)}
    for num_tokens in (1, 20):
        look_up = Cheap(lambda emitted, limit: [7] * limit if emitted % 2 else [])
        both: dict[str, Any] = {"look-up": look_up, "model": sd.ModelDrafter(draft_model)}
        drafter = sd.drafters.FirstOf(*(both[name] for name in which.split(", then ")))
        passes.clear()
        tokens = sd.speculate(target(), PROMPT, drafter, max_tokens=num_tokens, seed=3, **options)
        text = [next(tokens).token]
        assert look_up.limits == []
        assert num_tokens == 1 or passes == [(True, len(PROMPT) - 1), (True, 1)]
        text += [item.token for item in tokens]
        assert look_up.observed in ([], text)
        assert num_tokens == 20 or all(is_target for is_target, _ in passes)
    if length == 4:
        assert ("look-up" in which) == (len(look_up.limits) > 0)
        assert ("model" in which) == (not all(is_target for is_target, _ in passes))


# What a text leaves as it goes --------------------------------------------------------------------


def test_buffers_are_freed_after_every_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CLEAR_CACHE_EVERY", 4)
    monkeypatch.setattr(mx, "clear_cache", freed := Mock())
    tokens = sd.speculate(target(), PROMPT, max_tokens=12)
    counts = [freed.call_count for _ in tokens]
    assert [count - counts[0] for count in counts] == [n // 4 for n in range(1, 13)]


def test_the_prompt_is_reported_as_read_before_the_first_token() -> None:
    seen: list[tuple[int, int]] = []
    tokens = sd.speculate(
        target(), PROMPT, max_tokens=4, prompt_progress_callback=lambda *part: seen.append(part)
    )
    with closing(tokens):
        next(tokens)
    assert seen[-1] == (len(PROMPT), len(PROMPT))


class Noting(Fixed):
    """A fixed length that keeps the account of every round."""

    def record(self, round_: RoundRecord) -> None:
        vars(self).setdefault("rounds", []).append(round_)


def test_a_round_is_told_how_long_the_text_in_the_caches_was() -> None:
    """Prompt and text but for the tokens that its pass fed."""
    length = Noting(2)
    drafter = scripted.OracleDrafter(plain(20), VOCAB)
    list(sd.speculate(target(), PROMPT, drafter, max_tokens=10, num_draft_tokens=length))
    rounds: list[RoundRecord] = vars(length)["rounds"]
    ends = accumulate((round_.emitted for round_ in rounds), initial=len(PROMPT))
    assert [round_.context for round_ in rounds] == [end - 1 for end in ends][:-1]


def test_the_way_back_is_dropped_after_rounds_without_a_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is a drafter: a text without one has its way back once, for the prompt."""
    drop, dropped = Rollback.drop_checkpoints, list[int]()

    def noting(rollback: Rollback) -> None:
        dropped.append(rollback.position)
        drop(rollback)

    monkeypatch.setattr(Rollback, "drop_checkpoints", noting)
    nothing = scripted.ScriptedDrafter(lambda emitted, limit: [])
    counts = []
    for drafter in (None, nothing):
        dropped.clear()
        list(sd.speculate(target(), PROMPT, drafter, max_tokens=10, num_draft_tokens=2))
        counts.append(len(dropped))
    assert counts[0] == 1
    assert counts[1] >= 6


def test_a_single_token_that_is_right_is_a_hit() -> None:
    """Where every second round keeps a token, nothing runs ahead of the next draft."""
    text = plain(60)
    drafter = Cheap(lambda n, k: text[n : n + 1] if n % 3 == 1 else [])
    *_, last = sd.speculate(target(), PROMPT, drafter, max_tokens=60, num_draft_tokens=3)
    assert {accepted for drafted, accepted in last.stats.rounds if drafted} == {1}
    assert last.stats.ahead == 0
