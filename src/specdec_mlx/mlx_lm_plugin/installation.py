"""mlx-lm's own calls speculate: `install()`, `uninstall()`, `with installed():`.

`generate_step` and `speculative_generate_step` of `mlx_lm.generate` are replaced. `mlx_lm.generate`
and `mlx_lm.stream_generate` look them up when they run, wherever they were imported.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from specdec_mlx.contracts import AcceptanceRule, Drafter, LogitsProcessor
from specdec_mlx.draft_length.policy import DraftLength, make_draft_length
from specdec_mlx.drafters.draft_models import choose_drafter
from specdec_mlx.drafters.grammar import Grammar, GrammarProcessor
from specdec_mlx.drafters.registry import DEFAULT_DRAFTER
from specdec_mlx.loop import Token, speculate
from specdec_mlx.mlx_lm_plugin.compatible import check_steps, generate_module
from specdec_mlx.mlx_lm_plugin.conversation import continued, remember, tokens_on
from specdec_mlx.rules.registry import make_rule
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target.next_token import is_pure
from specdec_mlx.token_ids import to_list

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 256  # default of mlx-lm's steps


@dataclass(eq=False)
class Speculation:
    """How mlx-lm's calls speculate while this is in force, and the account of the latest one.

    drafter, draft_length, rule, tokenizer: as in `speculate`. grammar: of each text, for which the
    tokenizer must be known, or None. stats: of the latest generation, None before the first.
    """

    drafter: Drafter | None
    draft_length: int | str | DraftLength = "auto"
    rule: str | AcceptanceRule = "auto"
    tokenizer: Any = None
    grammar: Grammar | None = None
    stats: SpeculationStats | None = None

    def tokens(
        self,
        prompt: mx.array,
        model: nn.Module,
        drafter: Drafter | None,
        *,
        draft_length: int | str | DraftLength | None = None,
        prompt_cache: list[Any] | None = None,
        **options: Any,
    ) -> Generator[Token, None, None]:
        """Tokens of one generation, with arguments of `speculate`; drafters see earlier turns."""
        if self.grammar is not None:
            processor = GrammarProcessor(self.grammar, self.tokenizer)
            options["logits_processors"] = [*(options.get("logits_processors") or ()), processor]
        earlier = tokens_on(prompt_cache)
        tokens = speculate(
            model,
            prompt,
            continued(drafter, earlier),
            draft_length=self.draft_length if draft_length is None else draft_length,
            rule=self.rule,
            tokenizer=self.tokenizer,
            prompt_cache=prompt_cache,
            **options,
        )
        processors = options.get("logits_processors") or ()
        if not all(is_pure(f) for f in processors):
            max_tokens = options.get("max_tokens", DEFAULT_MAX_TOKENS)
            tokens = _showing_last(tokens, processors, to_list(prompt), max_tokens)
        return self._accounted(tokens, [*earlier, *to_list(prompt)], prompt_cache)

    def _accounted(
        self,
        tokens: Generator[Token, None, None],
        held: list[int],
        prompt_cache: list[Any] | None,
    ) -> Generator[Token, None, None]:
        """Pass the tokens on; keep the account, and the tokens that the caches hold."""
        try:
            with closing(tokens):
                for token in tokens:
                    self.stats = token.stats
                    held.append(token.token)
                    yield token
        finally:
            remember(prompt_cache, held)


class _InForce:
    """Speculations in force, the latest last, and mlx-lm's own steps while there are any."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stack: list[Speculation] = []
        self.steps: dict[str, tuple[Any, Any]] = {}  # mlx-lm's own and ours, by name

    def add(self, speculation: Speculation) -> None:
        with self.lock:
            if not self.stack:
                self._replace()
            self.stack.append(speculation)

    def remove(self, speculation: Speculation) -> None:
        """Take out, wherever it stands; the last one restores names that are still ours."""
        with self.lock:
            self.stack = [s for s in self.stack if s is not speculation]
            for name, (original, ours) in self.steps.items() if not self.stack else ():
                if getattr(generate_module(), name) is ours:
                    setattr(generate_module(), name, original)

    def latest(self) -> Speculation | None:
        with self.lock:
            return self.stack[-1] if self.stack else None

    def _replace(self) -> None:
        check_steps()
        makers = {"generate_step": _step, "speculative_generate_step": _speculative_step}
        for name, make in makers.items():
            original = getattr(generate_module(), name)
            self.steps[name] = original, make(original)
            setattr(generate_module(), name, self.steps[name][1])


_in_force = _InForce()
_installed = ExitStack()  # what `uninstall` undoes


def _step(original: Any) -> Any:
    """`generate_step`, with the drafter that is in force."""

    @functools.wraps(original)
    def generate_step(
        prompt: mx.array, model: nn.Module, stream: Any = generation_stream, **options: Any
    ) -> Any:
        speculation = _in_force.latest()
        if speculation is None or not _can_draft(prompt, model, options):
            return original(prompt, model, stream, **options)
        tokens = speculation.tokens(prompt, model, speculation.drafter, stream=stream, **options)
        return _each(tokens, lambda token: (token.token, token.logprobs))

    return generate_step


def _speculative_step(original: Any) -> Any:
    """`speculative_generate_step`, with any drafter in the place of the draft model."""

    @functools.wraps(original)
    def speculative_generate_step(
        prompt: mx.array,
        model: nn.Module,
        draft_model: nn.Module | Drafter | str,
        stream: Any = generation_stream,
        *,
        num_draft_tokens: int | None = None,
        **options: Any,
    ) -> Any:
        speculation = _in_force.latest()
        if speculation is None:
            if num_draft_tokens is not None:
                options["num_draft_tokens"] = num_draft_tokens
            return original(prompt, model, draft_model, stream, **options)
        drafter = choose_drafter(None, draft_model)
        tokens = speculation.tokens(
            prompt, model, drafter, draft_length=num_draft_tokens, stream=stream, **options
        )
        return _each(tokens, lambda token: (token.token, token.logprobs, token.from_draft))

    return speculative_generate_step


def _can_draft(prompt: mx.array, model: nn.Module, options: dict[str, Any]) -> bool:
    """True if there is a text to draft from, and nothing that mlx-lm refuses itself."""
    if options.get("input_embeddings") is None:
        return True
    from mlx_lm.utils import does_model_support_input_embeddings

    return len(prompt) > 0 and bool(does_model_support_input_embeddings(model))


def _showing_last(
    tokens: Generator[Token, None, None],
    processors: Sequence[LogitsProcessor],
    history: list[int],
    max_tokens: int,
) -> Generator[Token, None, None]:
    """Call the processors once more with the last token, since mlx-lm's are a step ahead."""
    with closing(tokens):
        for n, token in enumerate(tokens, start=1):
            history.append(token.token)
            if n == max_tokens and token.stats.cut == 0:  # else it was judged, and then cut off
                for processor in processors:
                    processor(mx.array(history), token.logprobs[None])
            yield token


def _each(tokens: Generator[Token, None, None], shape: Callable[[Token], T]) -> Iterator[T]:
    with closing(tokens):
        yield from map(shape, tokens)


def install(
    drafter: Drafter | nn.Module | str | None = DEFAULT_DRAFTER, **options: Any
) -> Speculation:
    """Let mlx-lm's own calls speculate, in the whole process, until `uninstall`.

    A call's own `draft_model=` counts instead: a draft model, a drafter or a drafter's name, with
    `num_draft_tokens=` as the draft length. A second `install` replaces the first.

    Args:
        drafter: a drafter, the name of one with options ("ngram:max_order=3"), or a draft model;
            None for plain decoding.
        options: draft_length, rule and tokenizer, see `Speculation`.

    Returns:
        The speculation in force, with the account of the latest generation.

    Raises:
        MlxLmVersionError: this mlx-lm cannot be extended.
        UnknownNameError: no drafter, draft length or rule has this name.
        ValueError: options that they do not take.
    """
    block = installed(drafter, **options)
    speculation = block.__enter__()
    uninstall()
    _installed.push(block)
    return speculation


def uninstall() -> None:
    """Undo `install`; without one, do nothing. mlx-lm is then exactly as it was."""
    _installed.close()


@contextmanager
def installed(
    drafter: Drafter | nn.Module | str | None = DEFAULT_DRAFTER,
    *,
    draft_length: int | str | DraftLength = "auto",
    rule: str | AcceptanceRule = "auto",
    tokenizer: Any = None,
) -> Iterator[Speculation]:
    """Let mlx-lm's own calls speculate inside the `with` block; arguments as for `install`.

    Blocks may be nested, and overlap in threads: the one entered last counts for new generations.
    """
    make_draft_length(draft_length)  # to raise now rather than at the first token
    make_rule(rule)
    given = (None, drafter) if isinstance(drafter, nn.Module) else (drafter, None)
    with in_force(Speculation(choose_drafter(*given), draft_length, rule, tokenizer)) as made:
        yield made


@contextmanager
def in_force(speculation: Speculation) -> Iterator[Speculation]:
    """Like `installed`, for a speculation that was made before."""
    _in_force.add(speculation)
    try:
        yield speculation
    finally:
        _in_force.remove(speculation)
