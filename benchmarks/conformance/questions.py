"""The questions, each put to every package in the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from benchmarks.conformance.peers import NotOfferedError, Peer
from benchmarks.conformance.targets import (
    HYBRID,
    PLAIN,
    VOCAB,
    WINDOWED,
    Call,
    distribution,
    plain_text,
    prompt,
)

NUM_PROMPTS = 8
NUM_DRAWS, DRAWN_TOKENS = 8000, 3
FALSE_ALARM, POWER = 1e-4, 0.99

YES, NO, REFUSES, NOT_OFFERED, FAILS = "yes", "**no**", "refuses", "not offered", "**raises**"


@dataclass(frozen=True)
class Answer:
    """One cell of the table: a word, and a sentence of evidence."""

    word: str
    evidence: str

    def to_dict(self) -> dict[str, str]:
        """The fields, for JSON."""
        return asdict(self)


class RepetitionPenalty:
    """A processor with a memory: it notes what it was shown, and lowers tokens that it has seen."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.lengths: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Subtract 1 for each time that a token stands among the last 20."""
        counts = (mx.array(tokens).reshape(-1)[-20:, None] == mx.arange(VOCAB)).sum(0)
        return logits - counts


def same_text(peer: Peer, name: str, **options: Any) -> Answer:
    """Compare greedy texts with plain decoding's, on prompts that make look-ups draft."""
    model = peer.target(name)
    accepted, too_long, wrong = 0, 0, []
    call = Call(**options)
    for seed in range(NUM_PROMPTS):
        tokens = prompt(seed)
        expected = peer.plain(model, tokens, call)
        written = peer.write(model, tokens, call)
        accepted += written.num_accepted or 0
        too_long += len(written.tokens) > call.max_tokens
        if written.tokens[: call.max_tokens] != expected:
            wrong.append(seed)
    evidence = f"{NUM_PROMPTS} texts of {call.max_tokens} tokens, {accepted} accepted"
    if too_long:
        evidence += f", {too_long} texts longer than asked"
    if wrong:
        return Answer(NO, f"{evidence}, {len(wrong)} texts differ (prompts {wrong})")
    return Answer(YES if accepted else "not exercised", evidence)


def greedy(peer: Peer) -> Answer:
    """Greedy text equal."""
    return same_text(peer, PLAIN)


def windows(peer: Peer) -> Answer:
    """Sliding window crossed."""
    return same_text(peer, WINDOWED)


def hybrids(peer: Peer) -> Answer:
    """Hybrid."""
    return same_text(peer, HYBRID)


def quantized(peer: Peer) -> Answer:
    """Quantized cache."""
    return same_text(peer, PLAIN, kv_bits=8)


def processors(peer: Peer) -> Answer:
    """Processors."""
    return same_text(peer, PLAIN, processors=(RepetitionPenalty(),))


def sampled(peer: Peer) -> Answer:
    """Distribution exact."""
    from scipy.stats import chi2, ncx2

    model, tokens = peer.target(PLAIN), prompt(0)
    law = distribution(model, tokens, 1 + DRAWN_TOKENS)
    law = law.reshape(VOCAB, -1)
    seen = np.zeros(law.shape)
    accepted = 0
    call = Call(max_tokens=1 + DRAWN_TOKENS, temp=1.0)
    for seed in range(NUM_DRAWS):
        written = peer.write(model, tokens, call.with_(seed=seed))
        accepted += written.num_accepted or 0
        first, *rest = written.tokens[: call.max_tokens]
        seen[first, int(np.ravel_multi_index(rest, (VOCAB,) * DRAWN_TOKENS))] += 1
    due, got = pooled(law.reshape(-1) * NUM_DRAWS, seen.reshape(-1))
    freedom = len(due) - 1
    p_value = float(chi2.sf(((got - due) ** 2 / due).sum(), freedom))
    limit = chi2.isf(FALSE_ALARM, freedom)
    reach = next(
        tv
        for tv in np.arange(0.01, 1, 0.005)
        if ncx2.sf(limit, freedom, NUM_DRAWS * 4 * tv**2) >= POWER
    )
    evidence = (
        f"{NUM_DRAWS} texts of {1 + DRAWN_TOKENS} tokens in {len(due)} cells, {accepted} accepted, "
        f"p = {p_value:.2g}. A total variation of {reach:.3f} over the cells is found with a "
        f"probability of {POWER:.0%}"
    )
    if p_value < FALSE_ALARM:
        return Answer(NO, evidence)
    return Answer(YES if accepted else "not exercised", evidence)


def pooled(due: np.ndarray, got: np.ndarray, least: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
    """Join rare cells, most frequent first, until each expects at least `least`."""
    order = np.argsort(-due)
    pools, number, mass = np.zeros(len(due), int), 0, 0.0
    for cell in order:
        pools[cell], mass = number, mass + due[cell]
        if mass >= least:
            number, mass = number + 1, 0.0
    if mass:
        pools[pools == number] = number - 1
    return np.bincount(pools, due), np.bincount(pools, got)


def seeds(peer: Peer) -> Answer:
    """One seed, one text."""
    model = peer.target(PLAIN)
    again = plain = accepted = 0
    for seed in range(NUM_PROMPTS):
        tokens, call = prompt(seed), Call(temp=1.0, seed=seed)
        first = peer.write(model, tokens, call)
        again += first.tokens == peer.write(model, tokens, call).tokens
        plain += first.tokens == undrafted(peer, model, tokens, call)
        accepted += first.num_accepted or 0
    evidence = (
        f"{again} of {NUM_PROMPTS} texts repeat, {plain} equal the text without drafts, "
        f"{accepted} accepted"
    )
    if again < NUM_PROMPTS:
        return Answer(NO, evidence)
    return Answer(YES if plain == NUM_PROMPTS else "repeats; drafts change it", evidence)


def undrafted(peer: Peer, model: nn.Module, tokens: list[int], call: Call) -> list[int]:
    """The package's text of a seed without drafting: its own plain mode, or mlx-lm's."""
    if peer.package == "specdec-mlx":
        import specdec_mlx as sd

        steps = sd.speculate(
            model,
            tokens,
            max_tokens=call.max_tokens,
            sampler=make_sampler(call.temp),
            seed=call.seed,
        )
        return [token.token for token in steps]
    return peer.plain(model, tokens, call)


def rewound(peer: Peer) -> Answer:
    """Rewind after a rejection: the caches continue as plain decoding's would."""
    return continued(peer, None)


def interrupted(peer: Peer) -> Answer:
    """Closed in the middle: the caches continue from the tokens that the caller has."""
    return continued(peer, 17)


def raised(peer: Peer) -> Answer:
    """An exception in the middle: the next call is right, and so are the caches."""
    model, wrong, texts = peer.target(PLAIN), [], 0
    for seed in range(NUM_PROMPTS):
        tokens, cache = prompt(seed), make_prompt_cache(model)
        try:
            peer.write(model, tokens, Call(cache=cache, processors=(RaisesAt(20),)))
        except BrokenProcessorError:
            texts += 1
        expected = peer.plain(model, tokens, Call())
        if peer.write(model, tokens, Call()).tokens != expected or not is_prefix(
            model, cache, tokens
        ):
            wrong.append(seed)
    evidence = f"{texts} of {NUM_PROMPTS} texts broken off by a processor"
    if wrong:
        return Answer(NO, f"{evidence}; prompts {wrong}: the next text or the caches are wrong")
    return Answer(YES if texts else "not exercised", evidence)


class BrokenProcessorError(RuntimeError):
    """What the processor raises."""


class RaisesAt:
    """A processor that fails at its n-th call."""

    def __init__(self, number: int) -> None:
        """Pass logits on for `number` calls."""
        self.left = number

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Pass logits on, or fail."""
        self.left -= 1
        if self.left < 0:
            raise BrokenProcessorError
        return logits


def is_prefix(model: nn.Module, cache: list[Any], tokens: list[int]) -> bool:
    """Whether caches hold what plain passes over some prefix of the plain text have in them."""
    length = cache[0].offset
    text = [*tokens, *plain_text(model, tokens, Call())]
    fresh = make_prompt_cache(model)
    model(mx.array([text[:length]]), cache=fresh)
    probe = mx.array([[1, 2, 3]])
    return bool(mx.allclose(model(probe, cache=cache), model(probe, cache=fresh), atol=1e-4))


def continued(peer: Peer, close_after: int | None) -> Answer:
    """Write, then go on with plain decoding from the same caches."""
    model, wrong, accepted = peer.target(PLAIN), [], 0
    length = close_after or 60
    for seed in range(NUM_PROMPTS):
        tokens, cache = prompt(seed), make_prompt_cache(model)
        written = peer.write(model, tokens, Call(cache=cache, close_after=close_after))
        accepted += written.num_accepted or 0
        text = [*tokens, *written.tokens]
        num_fed = cache[0].offset
        rest = text[num_fed:] or None
        if rest is None:  # a cache that holds the last token too; go on with a token of our own
            rest = [1]
            text = [*text, 1]
        goes_on = plain_text(model, rest, Call(max_tokens=20, cache=cache))
        expected = plain_text(model, text, Call(max_tokens=20))
        if num_fed > len(text) or goes_on != expected:
            wrong.append(seed)
    evidence = f"{NUM_PROMPTS} texts of {length} tokens continued by 20, {accepted} accepted"
    if wrong:
        return Answer(NO, f"{evidence}; {len(wrong)} go on differently (prompts {wrong})")
    return Answer(YES if accepted else "not exercised", evidence)


def several(peer: Peer) -> Answer:
    """Two and four texts at once: drafts change nothing in a batch."""
    if peer.together is None:
        raise NotOfferedError("no batches with drafts")
    model, wrong, alone = peer.target(PLAIN), [], 0
    for count in (2, 4):
        prompts = [prompt(seed, 80 + 8 * seed) for seed in range(count)]
        drafted, plain = (peer.together(model, prompts, Call(), flag) for flag in (True, False))
        wrong += [(count, row) for row in range(count) if drafted[row] != plain[row]]
        alone += sum(
            drafted[row] == peer.plain(model, prompts[row], Call()) for row in range(count)
        )
    evidence = (
        "2 and 4 texts of 60 tokens, prompts of different lengths, beside the same batch without "
        f"drafts; {alone} of 6 equal the text alone"
    )
    return Answer(NO, f"{evidence}; other texts: {wrong}") if wrong else Answer(YES, evidence)


QUESTIONS: dict[str, Callable[[Peer], Answer]] = {
    "greedy text equal": greedy,
    "distribution exact": sampled,
    "rewinds after a rejection": rewound,
    "sliding window crossed": windows,
    "hybrid": hybrids,
    "quantized cache": quantized,
    "processors": processors,
    "one seed, one text": seeds,
    "several at once": several,
    "closed in the middle": interrupted,
    "exception in the middle": raised,
}
"""Columns of the table."""


def answers(peer: Peer, asked: list[str] | None = None) -> Iterator[tuple[str, Answer]]:
    """Put the questions to a package, one after the other."""
    for column in asked or QUESTIONS:
        try:
            yield column, QUESTIONS[column](peer)
        except NotOfferedError as error:
            yield column, Answer(NOT_OFFERED, str(error))
        except (ValueError, NotImplementedError) as error:
            # MLX's own errors begin with the operation in brackets: nobody refused anything
            word = FAILS if str(error).startswith("[") else REFUSES
            yield column, Answer(word, f"{type(error).__name__}: {error}")
        except Exception as error:
            yield column, Answer(FAILS, f"{type(error).__name__}: {error}"[:300])
