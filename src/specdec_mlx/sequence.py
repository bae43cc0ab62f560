"""One sequence: its tokens, how its prompt is read, and how far it has come."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.arguments import argument_error, short_repr
from specdec_mlx.caches import (
    Rollback,
    check_usable,
    leaves,
    refused_after_failure,
    states_of,
    wait_for,
)
from specdec_mlx.contracts import Drafter
from specdec_mlx.errors import PromptError
from specdec_mlx.options import Options

if TYPE_CHECKING:
    from specdec_mlx.target import Verifier


def prompt_ids(prompt: Any) -> list[int]:
    """Token ids of a prompt as a list; waits for an array. PromptError for anything else."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, Sequence) and all(hasattr(kind, "__index__") for kind in {*map(type, ids)}):
        return list(map(operator.index, ids))
    expected = "token ids, a flat list of ints; generate also takes text and chat messages"
    raise PromptError(f"prompt={short_repr(prompt)}: expected {expected}, batch_generate several.")


def check_prompt(
    tokens: Sequence[int] | mx.array, embeddings: mx.array | None, drafter: Drafter | None
) -> list[int]:
    """The prompt [n] as a list; embeddings [n, D] may be fed in its place. Raises PromptError."""
    prompt = prompt_ids(tokens)
    if not prompt and embeddings is None:
        raise PromptError("The prompt is empty. Give at least one token, such as the BOS token.")
    if prompt and min(prompt) < 0:
        raise PromptError(f"The prompt holds token {min(prompt)}; token ids are >= 0.")
    if embeddings is None or len(prompt) == len(embeddings):
        return prompt
    if prompt:
        raise PromptError(
            f"input_embeddings has {len(embeddings)} rows for {len(prompt)} prompt tokens. Give "
            "one row a token."
        )
    if drafter is not None:
        raise PromptError(
            "input_embeddings without prompt tokens leaves a drafter nothing to draft from. Give "
            "the prompt tokens as well, or drafter=None."
        )
    return [0] * len(embeddings)


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise PromptError for ids that the target does not have, before they are computed with."""
    if (highest := max(tokens)) >= vocab_size:
        raise PromptError(
            f"The prompt holds token {highest}; the target has 0 to {vocab_size - 1}. Encode "
            "the prompt with the target's own tokenizer."
        )


def split_cache(
    model: nn.Module, prompt_cache: list[Any] | None, options: Options
) -> tuple[list[Any], list[Any] | None]:
    """The target's caches and, if the caller's list is longer, the draft model's.

    Raises ValueError for fewer than needed and what MLX cannot quantize so, CacheRollbackError for
    those that an interrupted generation could not bring in order.
    """
    fresh = make_prompt_cache(model, max_kv_size=options.max_kv_size)
    if options.kv_bits is not None:
        _check_quantized(model, options)
    if prompt_cache is None:
        return fresh, None
    is_list = isinstance(prompt_cache, Sequence) and all(
        hasattr(type(c), "state") for c in prompt_cache
    )
    if not is_list or len(prompt_cache) < len(fresh):
        made_by = "mlx_lm.models.cache.make_prompt_cache(model)"
        raise argument_error(
            "prompt_cache", prompt_cache, f"a list of {len(fresh)} caches from {made_by}"
        )
    check_usable(prompt_cache)
    return prompt_cache[: len(fresh)], prompt_cache[len(fresh) :] or None


def _check_quantized(model: nn.Module, options: Options) -> None:
    """Quantize caches of a pass that is never computed; ValueError where MLX does not."""
    caches = make_prompt_cache(model, max_kv_size=options.max_kv_size)
    model(mx.array([[0]]), cache=caches)
    bits, group_size = options.kv_bits, options.kv_group_size
    try:
        # of caches that rotate: mlx-lm says so, if it is due
        with suppress(NotImplementedError):
            maybe_quantize_kv_cache(caches, 0, group_size, bits)
    except ValueError as error:
        expected = f"what MLX can quantize this model's caches to ({error})"
        raise argument_error(f"kv_bits={bits}, kv_group_size", group_size, expected) from error


SHOWS_PROMPT = not mlx_lm.__version__.startswith("0.31.")
"""Before 0.32 mlx-lm's processors see the prompt's last token, and no earlier one."""


@dataclass
class SequenceState:
    """The text of one generation, prompt included.

    tokens: known to the host. embeddings: [prompt_length, D] in place of the prompt's tokens, or
    None; has_prompt: the prompt's tokens are known as well. num_handed_out: generated tokens that
    the caller has. num_history: first tokens of the prompt, which the caches held before, so that
    only drafters see them.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    embeddings: mx.array | None = None
    num_handed_out: int = 0
    has_prompt: bool = True
    num_history: int = 0

    @property
    def num_generated(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - self.prompt_length

    @property
    def end(self) -> int:
        """Prompt + what the caller has: where caches are to end."""
        return self.prompt_length + self.num_handed_out

    @property
    def not_handed_out(self) -> Sequence[int]:
        """Generated tokens that the caller does not have yet."""
        return self.tokens[self.prompt_length + self.num_handed_out :]

    @property
    def shown_at_first(self) -> Sequence[int]:
        """Tokens that logits processors see before one is drawn."""
        return self.tokens[self.num_history if SHOWS_PROMPT else self.prompt_length - 1 :]

    def num_remaining(self, besides: int = 0) -> int | None:
        """Tokens wanted beyond those known and `besides` more; None for no limit."""
        if self.max_tokens < 0:
            return None
        return self.max_tokens + self.prompt_length - len(self.tokens) - besides

    def wants_more(self, besides: int = 0) -> bool:
        """True if tokens are wanted beyond those known and `besides` more."""
        end = self.prompt_length + self.max_tokens
        return self.max_tokens < 0 or len(self.tokens) + besides < end

    def append(self, tokens: Sequence[int]) -> list[int]:
        """Add generated tokens, but no more than are wanted; those that were added."""
        added = list(tokens[: self.num_remaining()])
        self.tokens += added
        return added

    def embeddings_from(self, start: int, size: int) -> mx.array | None:
        """The caller's embeddings of a part of the prompt, if there are any."""
        if self.embeddings is None or start >= self.prompt_length:
            return None
        return self.embeddings[start - self.num_history :][:size]


def close_all(*closings: Callable[[], None]) -> None:
    """Run all of these, whatever they raise; raise that, or note it on the exception under way."""
    error = sys.exception()
    failures: list[BaseException] = []
    for close in closings:
        try:
            close()
        except BaseException as raised:
            failures.append(raised)
    for failure in failures:
        is_ordinary = isinstance(failure, Exception)
        if error is None or isinstance(error, GeneratorExit) or not is_ordinary:
            raise failure
        error.add_note(f"{type(failure).__name__} at the end of the generation: {failure}")


def bring_caches_to(
    end: int, target: Verifier, callers_cache: list[Any] | None, feed: Callable[[int], None]
) -> None:
    """Bring the caller's caches to exactly the first `end` tokens of the text; `feed` feeds more.

    Raises CacheRollbackError: they cannot be brought there, and are refused from now on.
    """
    if callers_cache is None:
        return
    caches = target.rollback
    try:
        with refused_after_failure(caches.caches):
            caches.rewind_to(end)
            while (left := end - caches.position) > 0:
                feed(left)
            target.quantize()
            mx.async_eval(states_of(caches.caches))
    finally:
        callers_cache[: len(caches.caches)] = caches.caches


@dataclass
class PromptReader:
    """Reads a prompt but for its last token, which the first round feeds.

    prompt: [n] token ids. caches: hold the prompt's first `num_read` tokens, and may hold earlier
    texts. feed: feeds so many of the next tokens. step_size: most of one pass. stops: ascending
    positions at which a pass ends. on_progress: takes positions read, and in all. seconds: of
    reading.
    """

    prompt: Sequence[int]
    caches: Rollback
    feed: Callable[[int], object]
    step_size: int = 2048
    stops: Sequence[int] = ()
    on_progress: Callable[[int, int], None] = lambda done, total: None
    stream: Any = None
    seconds: float = 0.0

    @property
    def num_read(self) -> int:
        """Tokens that the caches hold."""
        return self.caches.position

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        return len(self.prompt) - 1 - self.num_read

    def read(self) -> int:
        """Read the next part, and wait for it; returns how many tokens."""
        stop = next((stop for stop in self.stops if stop > self.num_read), len(self.prompt))
        size = min(self.num_left, self.step_size, stop - self.num_read)
        if size <= 0:
            return 0
        started = perf_counter()
        with mx.stream(self.stream):
            self.feed(size)
            wait_for(self.caches.caches)
            mx.clear_cache()
        self.on_progress(self.num_read, len(self.prompt))
        self.seconds += perf_counter() - started
        return size

    def read_all(self) -> None:
        """Read all that is left."""
        while self.read():
            pass


# of a model's first cache, ids as bytes, which a deep copy of the cache shares
NAME = "specdec_mlx_tokens"


def remember(prompt_cache: Sequence[Any] | None, tokens: Sequence[int] | mx.array) -> None:
    """Name the tokens that a prompt cache holds, for drafters of generations that go on from it.

    A generation does so at its end. The names stay with the caches through `trim_prompt_cache` and
    `copy.deepcopy`, not through a file.

    Args:
        prompt_cache: the target's caches, a draft model's may follow.
        tokens: [n] ids from the first one on; those that the caches do not hold do not count.

    Raises:
        PromptError: for what is no flat list of ids.
    """
    for cache in leaves(prompt_cache or ()):
        with suppress(AttributeError):  # of a class with slots
            setattr(cache, NAME, array("q", prompt_ids(tokens)).tobytes())
        return


def tokens_on(prompt_cache: Sequence[Any] | None) -> list[int]:
    """Tokens that a prompt cache is known to hold, from the first one on; [] where none is."""
    caches = list(prompt_cache or ())
    named = array("q", getattr(next(leaves(caches), None), NAME, b"")).tolist()
    return named[: Rollback(caches, len(named)).end]


def history_of(
    caches: list[Any] | None, given: Sequence[int] | mx.array | None
) -> tuple[list[int], int]:
    """Tokens that caches are known to hold, and how many more they hold.

    given: the caller's word for it; None takes what is remembered. Raises ValueError for more
    tokens than there are.
    """
    history = tokens_on(caches) if given is None else prompt_ids(given)
    end = Rollback(caches or [], len(history) if caches else 0).end
    if len(history) > end:
        raise argument_error(
            "history", history, f"{end} tokens at most, which is what prompt_cache holds"
        )
    return history, end - len(history)
