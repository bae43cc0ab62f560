"""The subject of a check: a target, a drafter, a sampling, a rule and prompts.

Thousands of short texts share passes, and `Remembered` looks these up. Loop, session, rule and
noise run as usual. The sessions of `Alone` feed the target themselves, because outside of the loop
nobody shows them the target's states.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from types import SimpleNamespace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from numpy.typing import NDArray

from specdec_mlx.caches import STRATEGIES, Rollback, TrimToPath
from specdec_mlx.contracts import (
    AcceptanceRule,
    Draft,
    DraftContext,
    Drafter,
    Session,
    shares_noise,
)
from specdec_mlx.duck_typed import as_drafter, as_given, begin_session
from specdec_mlx.exactness.feature_feed import FeatureFeed
from specdec_mlx.exactness.probe import places_of
from specdec_mlx.lab.proposing import proposing
from specdec_mlx.loop import Token, speculate
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.ranks import Ranks
from specdec_mlx.sampling import Noise, Sampling
from specdec_mlx.target import Verifier, check_drafted
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.trees.tree_pass import VIEWS, view_class

Item = TypeVar("Item")

Probs = NDArray[np.float64]  # probabilities [V] of the next token, float64


@dataclass(frozen=True, eq=False)
class Subject:
    """The setting that a check is about.

    Attributes:
        model: the target.
        drafter: None for plain decoding.
        sampling: of the target's tokens.
        rule: the acceptance rule.
        prompts: token ids.
        vocab_size: V.
        num_draft_tokens: draft length of the loop.
        seed: of all draws.
        tokenizer: the target's.
        end_tokens: ids that end a text.
        ties: of greedy texts (see `Options`).
    """

    model: nn.Module
    drafter: Drafter | None
    sampling: Sampling
    rule: AcceptanceRule
    prompts: Sequence[list[int]]
    vocab_size: int
    num_draft_tokens: int | str = 4
    seed: int = 0
    tokenizer: Any = None
    end_tokens: Collection[int] = ()
    ties: str | None = None

    @property
    def num_asked(self) -> int:
        """Draft length outside of the loop, where nothing is automatic."""
        return 4 if isinstance(self.num_draft_tokens, str) else self.num_draft_tokens

    def begin(self, prompt: Sequence[int], **options: Any) -> Session:
        """A session outside of the loop. `options` go to its `DraftContext`."""
        context = DraftContext(
            sampling=self.sampling,
            noise=Noise(self.seed),
            coupled=shares_noise(self.rule),
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            **options,
        )
        assert self.drafter is not None
        return Alone(self.drafter, self.model).begin(prompt, context)

    def text(
        self, prompt: Sequence[int], num_tokens: int, *, room: int = 0, **options: Any
    ) -> list[Token]:
        """Generate `num_tokens` with the loop, greedily if `options` have no sampler.

        Args:
            prompt: token ids.
            num_tokens: length of the result.
            room: tokens that may be drafted beyond the result.
            **options: of `speculate`.
        """
        options |= {"rule": self.rule, "num_draft_tokens": self.num_draft_tokens, "seed": self.seed}
        options |= {"tokenizer": self.tokenizer, "max_tokens": num_tokens + room}
        tokens = speculate(self.model, prompt, self.drafter, **options)
        return list(islice(tokens, num_tokens))


@dataclass
class Work:
    """The time and the progress of a part.

    Attributes:
        until: end of the time, by `time.perf_counter`.
        say: receives the number of samples so far.
        ranks: None without ranks. Otherwise all ranks follow the clock of rank 0.
    """

    until: float
    say: Callable[[int], None] = lambda num_samples: None
    ranks: Ranks | None = None

    def has_time(self, seconds: float = 0.0) -> bool:
        has_time = time.perf_counter() + seconds < self.until
        if self.ranks is None:
            return has_time
        mx.synchronize()  # passes on other streams have collectives of their own
        return bool(self.ranks.gather([has_time])[0][0])

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the first item, and more items while there is time."""
        for i, item in enumerate(items):
            if i > 0 and not self.has_time():
                return
            self.say(i)
            yield item

    def share(self, fraction: float, say: Callable[[int], None]) -> Work:
        now = time.perf_counter()
        return replace(self, until=now + fraction * (self.until - now), say=say)


@dataclass(frozen=True, eq=False)
class Place:
    """A place in the target's own text.

    Attributes:
        tokens: [n] before the place.
        target_probs: [V], from a single-token pass.
        draft: proposal of the drafter.
        draft_probs: [V] of the first drafted token. None without a draft.
    """

    tokens: list[int]
    target_probs: Probs
    draft: Draft
    draft_probs: Probs | None


def walk(subject: Subject, prompt: list[int], num_tokens: int) -> Iterator[Place]:
    """Yield the places of a text of the target. The drafter follows the text."""
    tokens, session = list(prompt), subject.begin(prompt)
    # The target writes the text alone, so a faulty rule cannot choose the places.
    plainly = replace(subject, drafter=None)
    for token in plainly.text(prompt, num_tokens, sampler=subject.sampling):
        draft = session.propose(1)
        target_probs = probabilities(subject.sampling.log_distribution(token.logprobs))
        yield Place(list(tokens), target_probs, draft, first_probs(draft, subject.vocab_size))
        if token.token in subject.end_tokens:
            return
        session.observe([token.token])
        tokens.append(token.token)


def first_probs(draft: Draft, vocab_size: int) -> Probs | None:
    """Distribution [V] of a draft's first token, or None. DraftError for an invalid token."""
    if not len(draft):
        return None
    if draft.logprobs is not None:
        return probabilities(draft.logprobs[0])
    tokens = to_list(draft.tokens)
    check_drafted(tokens, vocab_size)
    probs: Probs = np.eye(1, vocab_size, tokens[0])[0]
    return probs


def probabilities(logprobs: mx.array) -> Probs:
    """Log-probabilities [V] as probabilities that sum to 1 in float64."""
    probs = np.exp(np.array(logprobs.astype(mx.float32), np.float64))
    normalised: Probs = probs / probs.sum()
    return normalised


# Stand-ins

MOST_ROWS = 1000


class Remembered(nn.Module):  # type: ignore[misc]
    """A model that looks its logits up, for texts that all begin with the same context.

    Its cache holds the tokens that were fed. If a rollback is missing, another row is found, so the
    fault still shows.
    """

    def __init__(self, model: nn.Module, context: list[int]) -> None:
        super().__init__()
        caches = make_prompt_cache(model)
        if len(context) > 1:
            begun = mx.array(context[:-1])
            list(generate_step(begun, model, max_tokens=0, prompt_cache=caches))
        inside = mx.full((vocab_size_of(model),), mx.nan)
        # MLX would take attributes of the module for weights and layers.
        self._memo: Any = SimpleNamespace(
            model=model, context=tuple(context), caches=caches, inside=inside, known={}
        )
        for place in places_of(self):  # Rows are looked up, so wide passes are exact.
            place.exact |= {(True, ""): True, (False, ""): True}

    def make_cache(self) -> list[_TokenCache]:
        return [_TokenCache()]

    def __call__(self, ids: mx.array, cache: list[_TokenCache]) -> mx.array:
        """Logits [1, S, V] after each of `ids` [1, S]. They are NaN inside the context."""
        rows = ids[:, None, :, None]
        fed_ids, _ = cache[0].update_and_fetch(rows, rows)
        fed = to_list(fed_ids[0, 0, :, 0])
        layout = getattr(cache[0], "rows", None)
        sees = np.tri(ids.shape[1]).tolist() if layout is None else layout.sees.tolist()
        # Columns of `sees` are the fed tokens from `start`, and a row's true columns are its path.
        start = len(fed) - len(sees[0])
        texts = [[*fed[:start], *compress(fed[start:], row)] for row in sees]
        # The longest text first, because its pass also gives the rows of its beginnings.
        return mx.stack([self.after(text) for text in reversed(texts)][::-1])[None]

    def after(self, tokens: Sequence[int]) -> mx.array:
        """Logits [V] after a text. They are NaN for a text that ends inside the context."""
        memo, text = self._memo, tuple(tokens)
        num_common = len(memo.context)
        if len(text) < num_common and text == memo.context[: len(text)]:
            return memo.inside  # type: ignore[no-any-return]
        if text not in memo.known:
            start, caches = 0, make_prompt_cache(memo.model)
            if text[:num_common] == memo.context:
                # The context was read once. A copy continues from its last token.
                start, caches = num_common - 1, copy.deepcopy(memo.caches)
            logits = memo.model(to_ids(text[start:])[None], cache=caches)[0]
            mx.eval(logits)
            # Rows are as wide as the vocabulary, so memory needs a limit.
            if len(memo.known) >= MOST_ROWS:
                memo.known.clear()
            for end, row in enumerate(logits, start + 1):
                memo.known.setdefault(text[:end], row)
        return memo.known[text]  # type: ignore[no-any-return]


class _TokenCache(KVCache):  # type: ignore[misc]
    """Tokens in place of keys. Each row of a tree is looked up by its own path."""


STRATEGIES[_TokenCache] = TrimToPath()
VIEWS[_TokenCache] = view_class(_TokenCache)


def with_remembered_models(part: Any, context: list[int]) -> Any:
    """A drafter whose models, and whose drafters' models, are replaced by `Remembered`."""
    if type(part) is tuple:
        return tuple(with_remembered_models(entry, context) for entry in part)
    part = as_given(part)
    if isinstance(part, type) or not hasattr(part, "begin"):
        return Remembered(part, context) if isinstance(part, nn.Module) else part
    if not dataclasses.is_dataclass(part) or as_drafter(part).features is not None:
        return part
    changed = copy.copy(part)
    for member in dataclasses.fields(part):
        value = with_remembered_models(getattr(part, member.name), context)
        # Drafters are frozen dataclasses.
        object.__setattr__(changed, member.name, value)
    return as_drafter(changed)


@dataclass(frozen=True, eq=False)
class Alone(Drafter):
    """A drafter that runs the target itself, if its sessions read the target's states.

    Attributes:
        drafter: the wrapped drafter.
        model: the target.
        see: receives each draft and its limit.
    """

    drafter: Drafter
    model: nn.Module = field(repr=False)
    see: Callable[[Draft, int], object] = field(default=lambda draft, limit: None, repr=False)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> _AloneSession:
        return _AloneSession(self, prompt, context)


class _AloneSession(Session):
    """A session, and the target's passes over its text."""

    def __init__(self, alone: Alone, prompt: Sequence[int], context: DraftContext) -> None:
        self._alone, self._tokens = alone, list(prompt)
        self._session = begin_session(alone.drafter, list(prompt), context)
        self._target = Verifier(alone.model, Rollback.of(alone.model), probe=False)
        self._feed = FeatureFeed.between(alone.drafter, self._session, self._target)
        self.cheap = self._session.cheap
        self._read()

    def propose(self, limit: int) -> Draft:
        draft = proposing(self._session, "")(limit)
        self._alone.see(draft, limit)
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._read()
        self._session.observe(tokens)

    def close(self, length: int) -> None:
        self._session.close(length)

    def _read(self) -> None:
        start = self._target.rollback.position
        # The last token has no state yet, because the next pass reads it.
        unread = self._tokens[start:-1]
        if unread and self._feed is not None:
            self._target.feed(to_ids(unread))
            self._feed.show_fed(start)
