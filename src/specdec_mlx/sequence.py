"""One sequence: its tokens, the reading of its prompt, and its position."""

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
    """Token ids of a prompt as a list. Waits for an array. Raises PromptError."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, Sequence) and all(hasattr(kind, "__index__") for kind in {*map(type, ids)}):
        return list(map(operator.index, ids))
    expected = "token ids, a flat list of ints; generate also takes text and chat messages"
    raise PromptError(f"prompt={short_repr(prompt)}: expected {expected}, batch_generate several.")


def check_prompt(
    tokens: Sequence[int] | mx.array, embeddings: mx.array | None, drafter: Drafter | None
) -> list[int]:
    """The prompt [n] as a list. Raises PromptError.

    embeddings: [n, D] that are fed in place of the prompt's tokens, or None.
    """
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
    # Placeholders give the prompt its length. They are never fed.
    return [0] * len(embeddings)


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    if (highest := max(tokens)) >= vocab_size:
        raise PromptError(
            f"The prompt holds token {highest}; the target has 0 to {vocab_size - 1}. Encode "
            "the prompt with the target's own tokenizer."
        )


def split_cache(
    model: nn.Module, prompt_cache: list[Any] | None, options: Options
) -> tuple[list[Any], list[Any] | None]:
    """The target's caches and, if the caller's list is longer, the draft model's.

    Raises:
        ValueError: there are too few caches, or MLX cannot quantize this model's caches so.
        CacheRollbackError: an interrupted generation has left the caches unusable.
    """
    fresh = make_prompt_cache(model, max_kv_size=options.max_kv_size)
    if options.kv_bits is not None:
        _check_quantized(model, options)
    if prompt_cache is None:
        return fresh, None
    is_list = isinstance(prompt_cache, list) and all(
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
    caches = make_prompt_cache(model, max_kv_size=options.max_kv_size)
    # Only shapes matter, and lazy arrays have them: this pass is never computed.
    model(mx.array([[0]]), cache=caches)
    bits, group_size = options.kv_bits, options.kv_group_size
    try:
        # raised for rotating caches; mlx-lm raises it again when quantization is due
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

    Attributes:
        tokens: all tokens that the host knows.
        prompt_length: the number of them that are the prompt.
        max_tokens: most tokens to generate, -1 for no limit.
        embeddings: [prompt_length, D] in place of the prompt's tokens, or None.
        num_handed_out: generated tokens that the caller has.
        has_prompt: the prompt's tokens are known, whatever is fed.
        num_history: tokens at the front of the prompt that were in the caches before this
            generation. Only drafters see them.
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
        return len(self.tokens) - self.prompt_length

    @property
    def end(self) -> int:
        """Length of the prompt and the tokens handed out, at which the caches end."""
        return self.prompt_length + self.num_handed_out

    @property
    def not_handed_out(self) -> Sequence[int]:
        return self.tokens[self.prompt_length + self.num_handed_out :]

    @property
    def shown_at_first(self) -> Sequence[int]:
        """Tokens that logits processors see before the first token is drawn."""
        return self.tokens[self.num_history if SHOWS_PROMPT else self.prompt_length - 1 :]

    def num_remaining(self, besides: int = 0) -> int | None:
        """Tokens wanted after the known tokens and `besides` others. None for no limit."""
        if self.max_tokens < 0:
            return None
        return self.max_tokens + self.prompt_length - len(self.tokens) - besides

    def wants_more(self, besides: int = 0) -> bool:
        """True if tokens are wanted after the known tokens and `besides` others."""
        end = self.prompt_length + self.max_tokens
        return self.max_tokens < 0 or len(self.tokens) + besides < end

    def append(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens up to max_tokens. Returns the appended tokens."""
        added = list(tokens[: self.num_remaining()])
        self.tokens += added
        return added

    def embeddings_from(self, start: int, size: int) -> mx.array | None:
        """Embeddings of `size` positions from `start` on, or None outside the prompt."""
        if self.embeddings is None or start >= self.prompt_length:
            return None
        return self.embeddings[start - self.num_history :][:size]


def close_all(*closings: Callable[[], None]) -> None:
    """Run all closings. Raise the first failure, or note it on the exception under way."""
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
    """Bring the caller's caches to exactly the first `end` tokens of the text.

    Raises CacheRollbackError if this fails. Later generations then refuse the caches.

    Args:
        end: tokens that the caches hold afterwards.
        target: the target with its caches.
        callers_cache: the caller's list, or None if the caller keeps no caches.
        feed: feeds at most so many of the next tokens.
    """
    if callers_cache is None:
        return
    caches = target.rollback
    try:
        with refused_after_failure(caches.caches):
            caches.rewind_to(end)
            # A recurrent cache returns to a checkpoint before `end`, and the tokens in between are
            # fed again.
            while (left := end - caches.position) > 0:
                feed(left)
            target.quantize()
            mx.async_eval(states_of(caches.caches))
    finally:
        # Quantization replaces entries of the list, even if something fails later.
        callers_cache[: len(caches.caches)] = caches.caches


@dataclass
class PromptReader:
    """Reads a prompt except for its last token, which the first round feeds.

    Attributes:
        prompt: [n] token ids.
        caches: the caches. They hold the first `num_read` tokens of the prompt, and perhaps earlier
            texts.
        feed: feeds so many of the next tokens.
        step_size: most positions of one pass.
        stops: ascending positions at which a pass must end.
        on_progress: called with (positions read, positions in all).
        stream: the MLX stream to run on.
        seconds: time spent on reading.
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
        return self.caches.position

    @property
    def num_left(self) -> int:
        """Tokens still to read. The last token of the prompt is not among them."""
        return len(self.prompt) - 1 - self.num_read

    def read(self) -> int:
        """Read the next part and wait for it. Returns its number of tokens."""
        stop = next((stop for stop in self.stops if stop > self.num_read), len(self.prompt))
        size = min(self.num_left, self.step_size, stop - self.num_read)
        if size <= 0:
            return 0
        started = perf_counter()
        with mx.stream(self.stream):
            self.feed(size)
            # Without the wait the graphs of all parts would pile up in memory.
            wait_for(self.caches.caches)
            mx.clear_cache()
        self.on_progress(self.num_read, len(self.prompt))
        self.seconds += perf_counter() - started
        return size

    def read_all(self) -> None:
        while self.read():
            pass


# Attribute of a model's first cache: its token ids as bytes, which a deep copy shares.
NAME = "specdec_mlx_tokens"


def remember(prompt_cache: Sequence[Any] | None, tokens: Sequence[int] | mx.array) -> None:
    """Write the tokens that a prompt cache holds onto the cache, for drafters of later generations.

    Every generation does so at its end. The tokens stay with the caches through `trim_prompt_cache`
    and `copy.deepcopy`, not through a file.

    Args:
        prompt_cache: the target's caches; a draft model's may follow.
        tokens: [n] ids from the first position on. Ids beyond the end of the caches are ignored.

    Raises:
        PromptError: `tokens` is no flat list of ids.
    """
    for cache in leaves(prompt_cache or ()):
        with suppress(AttributeError):  # of a class with slots
            setattr(cache, NAME, array("q", prompt_ids(tokens)).tobytes())
        return


def tokens_on(prompt_cache: Sequence[Any] | None) -> list[int]:
    caches = list(prompt_cache or ())
    remembered = array("q", getattr(next(leaves(caches), None), NAME, b"")).tolist()
    # The caller may have trimmed the caches since.
    return remembered[: Rollback(caches, len(remembered)).end]


def history_of(
    caches: list[Any] | None, declared: Sequence[int] | mx.array | None
) -> tuple[list[int], int]:
    """Tokens that the caches are known to hold, and the number of further, unknown tokens.

    declared: the caller's own list; None takes the remembered tokens. Raises ValueError if it has
    more tokens than the caches.
    """
    history = tokens_on(caches) if declared is None else prompt_ids(declared)
    end = Rollback(caches or [], len(history) if caches else 0).end
    if len(history) > end:
        raise argument_error(
            "history", history, f"{end} tokens at most, which is what prompt_cache holds"
        )
    return history, end - len(history)
