"""A text that is left inside a round: the caches end with the last token that was handed out.

While the tokens of a round are handed out, the next draft is made and verified. A drafter that runs
passes over caches, the target's own or those that the caller keeps for a draft model, must leave
the way back to each of these tokens open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

import specdec_mlx as sd
import tiny
from heads import HEADS, random_head
from scripted import plain
from selection import cases
from specdec_mlx import lab
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request, Schedule
from specdec_mlx.caches import check_usable, leaves
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.pard import PardDrafter
from specdec_mlx.lab.papers.cascade import Cascade
from specdec_mlx.lab.papers.early_exit import early_exit
from specdec_mlx.lab.papers.parallel_sampling import LookAhead, PaSSDrafter
from specdec_mlx.options import Options

pytestmark = pytest.mark.filterwarnings("ignore:specdec_mlx")

VOCAB = 6  # small, so that drafts by chance are right at several places in a row
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2] * 3  # past the windows of the tiny models
NUM_TOKENS = 14

target = functools.cache(functools.partial(tiny.build, vocab_size=VOCAB))


@functools.cache
def near(name: str) -> nn.Module:
    """A draft model that is right at many places, and wrong at others."""
    model = tiny.build(name, vocab_size=VOCAB)
    mx.random.seed(1)

    def shifted(weight: mx.array) -> mx.array:
        if weight.ndim < 2 or not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        return weight + 0.03 * mx.std(weight) * mx.random.normal(weight.shape)

    model.update(tree_map(shifted, model.parameters()))
    mx.eval(model.parameters())
    return model


def pass_(name: str, **options: Any) -> PaSSDrafter:
    model = target(name)
    head = LookAhead(model, 3)
    head.rows = mx.random.normal(head.rows.shape, key=mx.random.key(2))
    return PaSSDrafter(model, None, head=head, **options)


def head(kind: str, name: str) -> HeadDrafter:
    return HeadDrafter(random_head(HEADS[kind], target(name)))


Made = tuple[Any, nn.Module | None]
"""A drafter, and its model if the caller keeps that one's caches."""

DRAFTERS: dict[str, Callable[[str], Made]] = {
    "pass": lambda name: (pass_(name), None),
    "pass of trees": lambda name: (pass_(name, branches=2), None),
    "pass after look-up": lambda name: (
        sd.drafters.FirstOf(sd.PromptLookupDrafter(), pass_(name)),
        None,
    ),
    "pass beside a model": lambda name: (
        lab.TreeOf(pass_(name), sd.ModelDrafter(near(name))),
        None,
    ),
    "pass before look-up": lambda name: (Cascade(pass_(name)), None),
    "lookahead": lambda name: (lab.LookaheadDrafter(), None),
    "recycling": lambda name: (lab.RecyclingDrafter(), None),
    "early exit": lambda name: (made := early_exit(target(name), 2), made.model),
    "model": lambda name: (sd.ModelDrafter(near(name)), near(name)),
    "model of trees": lambda name: (sd.ModelDrafter(near(name), branches=2), near(name)),
    "model before look-up": lambda name: (Cascade(sd.ModelDrafter(near(name))), near(name)),
    "guessed by look-up": lambda name: (
        lab.GuessedDrafter(near(name), drafter="suffix"),
        near(name),
    ),
    "guessed by a model": lambda name: (
        lab.GuessedDrafter(near(name), drafter=sd.ModelDrafter(target(name))),
        near(name),
    ),
    "pard": lambda name: (PardDrafter(near(name), mask_token=1), near(name)),
    "eagle3": lambda name: (head("eagle3", name), None),
    "medusa": lambda name: (head("medusa", name), None),
}
TARGETS = ("llama", "gemma3_text", "qwen3_next", "falcon_h1", "mamba2")
"""Windows, hybrids, and recurrences alone."""

ALL_TARGETS = ("pass", "model", "guessed by a model")

CASES = [
    (kind, name)
    for kind in DRAFTERS
    for name in (TARGETS if kind in ALL_TARGETS else ("llama", "falcon_h1"))
]
IN_SHORT = [
    ("pass", "llama"),
    ("pass before look-up", "falcon_h1"),
    ("guessed by a model", "mamba2"),
    ("model", "gemma3_text"),
]


def left_after(num_tokens: int, way: str, tokens: Any) -> tuple[list[int], Any]:
    """Take so many tokens, and leave: by `close`, by an exception, or by dropping the generator."""
    taken = [next(tokens) for _ in range(num_tokens)]
    if way == "close":
        tokens.close()
    elif way == "throw":
        with suppress(ZeroDivisionError):
            tokens.throw(ZeroDivisionError("the caller"))
    return [item.token for item in taken], taken[-1].stats


def check_holds(model: nn.Module, caches: list[Any], text: list[int]) -> None:
    """Hold caches to those of a fresh reading of the text: positions, and the next logits."""
    fresh = make_prompt_cache(model)
    model(mx.array([text]), cache=fresh)
    ends, due = ([getattr(c, "offset", None) for c in leaves(x)] for x in (caches, fresh))
    assert ends == due
    logits, right = (model(mx.array([[4]]), cache=x)[0, -1] for x in (caches, fresh))
    assert mx.allclose(logits, right, atol=1e-3)


@pytest.mark.parametrize(("kind", "name"), cases(CASES, *IN_SHORT))
def test_caches_end_with_the_last_token_that_was_handed_out(kind: str, name: str) -> None:
    """Left after each number of tokens, with drafts of a fixed length and of the automatic one."""
    model, (drafter, small) = target(name), DRAFTERS[kind](name)
    written = plain(NUM_TOKENS, PROMPT, model)
    rounds: list[tuple[int, int]] = []
    for place in range(1, NUM_TOKENS):
        own = make_prompt_cache(model)
        caches = own + (make_prompt_cache(small) if small else [])
        tokens = sd.speculate(
            model, PROMPT, drafter, max_tokens=NUM_TOKENS + 4, prompt_cache=caches,
            num_draft_tokens="auto" if place % 4 == 0 else 4,
        )  # fmt: skip
        taken, stats = left_after(place, ("close", "throw", "drop")[place % 3], tokens)
        del tokens
        rounds += stats.rounds
        assert taken == written[:place]
        text, num_own = [*PROMPT, *taken], len(own)
        for owner, held in ((model, caches[:num_own]), (small, caches[num_own:])):
            if owner is not None:
                check_holds(owner, held, text)
    if kind not in HEADS:
        assert any(num_accepted for _, num_accepted in rounds), "no round has a middle"


def raised_by(call: Callable[[], object], *, elsewhere: bool = False) -> BaseException | None:
    """What a call raises, here or in another thread."""
    if elsewhere:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(call).exception()
    try:
        call()
    except Exception as error:
        return error
    return None


def told(error: BaseException) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", cases(["close", "collect", "next"], "close", "next"))
def test_caches_left_to_another_thread_hold_the_text_or_are_refused_with_the_reason(
    way: str,
) -> None:
    """MLX computes an array only in the thread that made it: whatever of the target's or a draft
    model's caches is not computed yet cannot be brought in order from another thread.
    """
    model, small = target("qwen3_next"), near("qwen3_next")
    num_refused = num_held = 0
    for place in range(1, NUM_TOKENS):
        own = make_prompt_cache(model)
        drafter = sd.ModelDrafter(small) if place % 2 else sd.SuffixDrafter()
        caches = own + (make_prompt_cache(small) if place % 2 else [])
        left = [
            sd.speculate(
                model, PROMPT, drafter, max_tokens=40, prompt_cache=caches, num_draft_tokens=4
            )
        ]
        taken = [next(left[0]).token for _ in range(place)]

        def leave(left: Any = left, taken: Any = taken) -> None:
            if way == "next":
                taken += [next(left[0]).token for _ in range(3)]
            if way != "collect":
                left[0].close()
            left.clear()

        error = raised_by(leave, elsewhere=True)
        assert error is None or "in another thread than the one that began it" in told(error)
        if (refusal := raised_by(functools.partial(check_usable, caches))) is not None:
            assert "in another thread than the one that began it" in str(refusal)
            num_refused += 1
        else:
            mx.eval([cache.state for cache in caches])
            check_holds(model, caches[: len(own)], [*PROMPT, *taken])
            num_held += 1
    assert num_held > 0
    assert num_refused > 0


@pytest.mark.parametrize("name", cases(("llama", "qwen3_next"), "qwen3_next"))
def test_caches_of_a_batch_can_be_read_in_another_thread(name: str) -> None:
    options = Options(num_draft_tokens=3)
    batch = BatchGeneration(target(name), None, options, Schedule(2), returns_caches=True)
    for prompt in (PROMPT, PROMPT[:9]):
        batch.insert(Request(prompt, 5))
    ended = [row.prompt_cache for row in batch.run() if row.finish_reason is not None]
    assert len(ended) == 2
    reading = functools.partial(list, (mx.eval([c.state for c in one]) for one in ended))
    assert raised_by(reading, elsewhere=True) is None
