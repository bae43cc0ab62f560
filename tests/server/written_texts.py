"""Texts in tokens of any cut, and what a `TextState` makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_mlx.drafters.thoughts import Thought
from specdec_mlx.server.requests import Event, TextRequest, Transcript
from specdec_mlx.server.text.state import TextState

END, THINK, UNTHINK = "<|end|>", "<think>", "</think>"
CALL, UNCALL = "<tool_call>", "</tool_call>"
PIECES = [
    "th",
    "the",
    " the",
    "ab",
    "ba",
    "aba",
    ".\n",
    "\n\n",
    "a<",
    "><",
    '{"',
    '": ',
    '"}',
    "} ",
]
MARKS = [THINK, UNTHINK, CALL, UNCALL]

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


def _spelled(text: str) -> str:
    """A text in the alphabet of byte-level vocabularies."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(word for word, _ in level.pre_tokenize_str(text))


@cache
def tokenizer(parser: str | None = "json_tools", marks: Sequence[str] = ()) -> TokenizerWrapper:
    """A byte-level tokenizer whose vocabulary has some words as well.

    parser: of tool calls, by mlx-lm's name. marks: tokens of their own, besides the thoughts'.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, *map(_spelled, PIECES)])}
    fast = Tokenizer(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END, special=True)])
    fast.add_tokens([AddedToken(mark, special=False) for mark in (THINK, UNTHINK, *marks)])
    own: dict[str, Any] = {}
    if parser is not None:
        module = import_module(f"mlx_lm.tool_parsers.{parser}")
        own = {name: getattr(module, name) for name in ("tool_call_start", "tool_call_end")}
        own["tool_parser"] = module.parse_tool_call
    hugging_face = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END)
    return TokenizerWrapper(hugging_face, BPEStreamingDetokenizer, **own)


def cut(text: str, seed: int | None = None, **how: Any) -> list[int]:
    """A text's tokens: one a byte, but for marks; with a `seed` at random, words among them."""
    vocab, level = tokenizer(**how).get_vocab(), random.Random(seed)
    marks = [mark for mark in MARKS if mark in vocab]
    tokens: list[int] = []
    for text_before_end in text.split(END):
        place = 0
        while place < len(text_before_end):
            rest = text_before_end[place:]
            mark = next(filter(rest.startswith, marks), None)
            words = [*filter(rest.startswith, [*PIECES, *marks]), rest[0]]
            word = (mark or rest[0]) if seed is None else level.choice(words)
            spelled = word if word in marks else _spelled(word)
            tokens += [vocab[spelled]] if spelled in vocab else [vocab[char] for char in spelled]
            place += len(word)
        tokens.append(vocab[END])
    return tokens[:-1]


def events_of(
    tokens: Iterable[int],
    *,
    in_thought: bool = False,
    thought: Thought | None = None,
    most: int | None = None,
    how: dict[str, Any] | None = None,
    logprobs: Iterable[mx.array] | None = None,
    **asked: Any,
) -> Iterator[Event]:
    """The events of a text's tokens, `most` of them at most, as an engine hands them over."""
    request = TextRequest(**{"messages": [{"role": "user", "content": "go"}], **asked})
    state = TextState(tokenizer(**how or {}), request, [], in_thought, thought)
    rows = iter(logprobs) if logprobs is not None else None
    for token in list(tokens)[:most]:
        yield from state.add(token, next(rows) if rows is not None else None, False)
        if state.ended is not None:
            break
    yield from state.end(state.ended or "length")


def written(text: str, seed: int | None = None, **how: Any) -> Transcript:
    """A text put together again from its events; `END` in it is the end token."""
    whole = Transcript()
    for event in events_of(cut(text, seed, **how.get("how", {})), **how):
        whole.add(event)
    return whole


def said(whole: Transcript) -> tuple[Any, ...]:
    """What a client sees of a text, but for the ids of its calls."""
    assert whole.ended is not None
    calls = [(call["name"], call["arguments"]) for call in whole.calls]
    return whole.text, whole.thoughts, calls, whole.ended.reason, whole.ended.stop
