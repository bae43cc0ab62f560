"""Structured output: a logits processor that enforces a grammar, and a drafter of forced tokens.

Where a grammar allows only one token, the token is drafted for free and always accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    LogitsProcessor,
    LookUpSession,
    TextIndex,
    all_drafters,
)
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.thoughts import Thought
from specdec_mlx.errors import GrammarError, MissingPackageError
from specdec_mlx.models.loading import PerModel, unwrapped
from specdec_mlx.token_ids import to_list

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_schema", "regex", "lark"]

JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written on one line, as by `json.dumps`, so that its structure is forced."""

FORCED = 64  # evidence for a forced token, as for the longest match of prompt lookup


@dataclass(frozen=True)
class Grammar:
    """The texts that may be generated. Needs the extra `grammar` (llguidance).

    Attributes:
        kind: "json_schema", "regex" or "lark".
        text: a JSON schema, a regular expression, or a grammar in Lark's notation. Raises
            GrammarError for a text that is not of this kind.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if message := _llguidance().LLMatcher.validate_grammar(self.compiled):
            raise GrammarError(f"This is no {self.kind} that can be followed: {message}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits a schema. The schema is JSON or the object that `json.loads` returns."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from beginning to end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """Text that follows from the rule `start`."""
        return cls("lark", rules)

    @cached_property
    def compiled(self) -> str:
        """The grammar in llguidance's notation."""
        convert = getattr(_llguidance().LLMatcher, f"grammar_from_{self.kind}")
        style = {"overrides": JSON_STYLE} if self.kind == "json_schema" else {}
        try:
            return str(convert(self.text, **style))
        except ValueError as error:
            raise GrammarError(f"This is no {self.kind} that can be followed: {error}") from error

    def begin(self, tokenizer: LLTokenizer) -> LLMatcher:
        """A matcher before the first token. The first call compiles the grammar."""
        known = _begun.get(self)
        if known is None or known[0] is not tokenizer:
            new = _llguidance().LLMatcher(tokenizer, self.compiled, log_level=0)
            known = _begun[self] = tokenizer, new
        # A copy shares the compiled grammar and has its own position.
        return known[1].deep_copy()


_begun: WeakKeyDictionary[Grammar, tuple[LLTokenizer, LLMatcher]] = WeakKeyDictionary()


class GrammarProcessor:
    """Logits processor that allows only tokens that a grammar allows.

    Once the text is complete and cannot go on, only the end token is allowed. The processor follows
    the tokens of each call, backwards too, so calls for rejected rows do no harm.

    Args:
        grammar: the grammar.
        tokenizer: the target's tokenizer. Compiling a large tokenizer takes seconds the first time.
        start: number of tokens before the text. None takes the number in the first call, so make a
            processor for each generation.
        thought: the marks of a thought that may come before the text. The grammar begins after it.

    Raises GrammarError for a grammar that outgrows the matcher's limits.
    """

    pure = True

    def __init__(
        self,
        grammar: Grammar,
        tokenizer: Any,
        start: int | None = None,
        thought: Thought | None = None,
    ) -> None:
        self.grammar = grammar
        self.tokenizer = compiled_tokenizer(tokenizer)
        self.start, self.thought = start, thought
        self.place = self.beginning()

    def beginning(self) -> GrammarPosition:
        place = GrammarPosition(self.grammar.begin(self.tokenizer), self.thought)
        place.go_to([])
        return place

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V] with -inf for the tokens that may not follow `tokens` [n]."""
        if self.start is None:
            self.start = tokens.shape[0]
        if not self.place.go_to(to_list(tokens[self.start :])):
            return logits  # after a draft token that will be rejected
        return mx.where(self.place.allowed(logits.shape[-1]), logits, -mx.inf)


@dataclass(frozen=True)
class GrammarDrafter(Drafter):
    """Drafts the tokens that a `GrammarProcessor` of the generation forces.

    Where nothing is forced there is no draft. Combine it with another drafter:
    `FirstOf(GrammarDrafter(), PromptLookupDrafter())`.
    """

    def check(self, context: DraftContext) -> None:
        """Raise GrammarError if nothing is forced in this generation."""
        self._processor(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        processor = self._processor(context)
        # A known start means that the text began before this prompt ended.
        start = len(prompt) if processor.start is None else processor.start
        return LookUpSession(GrammarIndex(processor.beginning(), prompt[start:]))

    def _processor(self, context: DraftContext) -> GrammarProcessor:
        for processor in context.logits_processors:
            if isinstance(processor, GrammarProcessor):
                return processor
        raise GrammarError(
            "GrammarDrafter drafts what a grammar forces, and this generation has none. Give "
            "logits_processors=[GrammarProcessor(grammar, tokenizer)] as well."
        )


def with_forced(drafter: Drafter | None, processors: Sequence[LogitsProcessor]) -> Drafter | None:
    """The drafter, after a `GrammarDrafter` if one of the processors has a grammar."""
    if drafter is None:
        return None
    is_there = any(isinstance(one, GrammarDrafter) for one in all_drafters(drafter))
    if is_there or not any(isinstance(one, GrammarProcessor) for one in processors):
        return drafter
    return FirstOf(GrammarDrafter(), drafter)


class GrammarIndex(TextIndex):
    """A text and its position in the grammar, which moves when a draft is asked for."""

    def __init__(self, place: GrammarPosition, text: Sequence[int]) -> None:
        self.place, self.text = place, list(text)

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """At most `limit` forced tokens. No draft after a token that is not allowed."""
        may_force = limit > 0 and self.place.go_to([*self.text, *more])
        tokens = self.place.forced()[:limit] if may_force else []
        return Draft(tokens, evidence=(FORCED,) * len(tokens))

    def append(self, tokens: Sequence[int]) -> None:
        self.text += tokens


@dataclass
class GrammarPosition:
    """A position in a grammar.

    Attributes:
        matcher: the matcher of the grammar, after `path`.
        thought: the marks of the thought before the text, or None.
        path: the longest beginning of the text that is allowed.
        is_thinking: the thought is not closed yet, and the grammar has not begun.
        opening: the token that must continue a thought's opening or may begin it, or empty.
    """

    matcher: LLMatcher
    thought: Thought | None = None
    path: Sequence[int] = ()
    is_thinking: bool = False
    opening: Sequence[int] = ()

    def go_to(self, text: Sequence[int]) -> bool:
        """Go to the end of `text`. Returns True if the grammar allows all of it."""
        if self.thought is not None:
            start = self.thought.answer_start(text)
            self.is_thinking, place = start is None, len(text)
            may_open = self.is_thinking or not text
            self.opening = self.thought.opens[place : place + 1] if may_open else ()
            text = () if start is None else text[start:]
        pairs = enumerate(zip(self.path, text, strict=False))
        # After a rejection the text may have changed before the end of the path.
        shared = next((i for i, (a, b) in pairs if a != b), min(len(self.path), len(text)))
        self.matcher.rollback(len(self.path) - shared)
        taken = self.matcher.try_consume_tokens(list(text[shared:]))
        self._check()
        self.path = list(text[: shared + taken])
        return len(self.path) == len(text) or self.matcher.is_stopped()

    def allowed(self, vocab_size: int) -> mx.array:
        """Booleans [V], true for tokens that may follow."""
        if self.thought is not None and self.is_thinking:
            flags = np.full(vocab_size, not self.opening)
            flags[list(self.thought.eos_ids)] = False
        else:
            flags = self._flags()[:vocab_size].astype(bool)
            # Padded ids of the model are never allowed.
            flags = np.pad(flags, (0, vocab_size - len(flags)))
        flags[list(self.opening)] = True
        return mx.array(flags)

    def forced(self) -> list[int]:
        """The tokens that must follow, with an end token. Empty where a thought may begin."""
        if self.is_thinking or self.opening:
            return []
        tokens = list(self.matcher.compute_ff_tokens())
        taken = self.matcher.try_consume_tokens(tokens)
        if self.matcher.is_stopped():  # only an end token is allowed then
            tokens.append(int(np.flatnonzero(self._flags())[0]))
        self.matcher.rollback(taken)
        self._check()
        return tokens

    def _flags(self) -> np.ndarray:
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")

    def _check(self) -> None:
        if self.matcher.is_error():
            raise GrammarError(f"The grammar cannot be followed: {self.matcher.get_error()}")


@PerModel
def compiled_tokenizer(tokenizer: Any) -> LLTokenizer:
    """A tokenizer in llguidance's form. Raises GrammarError for tokenizers without a fast form."""
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    fast = unwrapped(tokenizer)
    _llguidance()
    from llguidance.hf import from_tokenizer

    eos_ids = sorted(tokenizer.eos_token_ids)
    try:
        try:
            return from_tokenizer(fast, eos_token=eos_ids)
        except TypeError:  # versions that guidance pins take one end token
            return from_tokenizer(fast, eos_token=fast.eos_token_id)
    except ValueError as error:
        raise GrammarError(f"{type(fast).__name__} cannot be used here: {error}") from error


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingPackageError(
            "Grammars need llguidance: pip install 'specdec-mlx[grammar]'"
        ) from error
    return llguidance
