"""Text in, text out: `stream_generate` and `generate` beside mlx-lm's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice, product
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizers.processors import TemplateProcessing

import scripted
import specdec_mlx as sd
import tiny_text
from selection import in_one_test

PROMPT = "the cat and the hat in the rain, the cat"
NUM_TOKENS = 32

CLOCKED = {"prompt_tps", "generation_tps", "peak_memory"}
"""Fields that depend on the machine; `logprobs` and `from_draft` are compared on their own."""


@cache
def tokenizer() -> TokenizerWrapper:
    return tiny_text.tokenizer()


def theirs(prompt: Any = PROMPT, tok: Any = None, **kwargs: Any) -> list[GenerationResponse]:
    kwargs.setdefault("max_tokens", NUM_TOKENS)
    return list(mlx_lm.stream_generate(tiny_text.model(), tok or tokenizer(), prompt, **kwargs))


def ours(
    prompt: Any = PROMPT, tok: Any = None, **kwargs: Any
) -> list[sd.generation.SpeculativeResponse]:
    kwargs.setdefault("max_tokens", NUM_TOKENS)
    return list(sd.stream_generate(tiny_text.model(), tok or tokenizer(), prompt, **kwargs))


@cache
def plain_ids() -> tuple[int, ...]:
    return tuple(r.token for r in theirs(max_tokens=NUM_TOKENS + 20))


def oracle(wrong: float = 0.2) -> scripted.OracleDrafter:
    return scripted.OracleDrafter(list(plain_ids()), tiny_text.VOCAB, wrong=wrong)


def assert_same(got: Sequence[Any], expected: Sequence[GenerationResponse]) -> None:
    """Every field of mlx-lm's response that does not depend on a clock is equal."""
    assert [r.token for r in got] == [r.token for r in expected]
    fields = {f.name for f in dataclasses.fields(GenerationResponse)}
    for mine, other in zip(got, expected, strict=True):
        for name in fields - CLOCKED - {"logprobs", "from_draft"}:
            assert getattr(mine, name) == getattr(other, name), name
        for name in CLOCKED:
            assert getattr(mine, name) > 0
        assert mine.from_draft == (mine.origin == "draft")
        assert mine.logprobs.shape == other.logprobs.shape
        assert mx.allclose(mine.logprobs, other.logprobs, atol=1e-4)


WAYS: list[Callable[[], dict[str, Any]]] = [
    *(dict, lambda: {"drafter": "ngram:max_order=3,num_draft=2"}),
    *(lambda: {"drafter": oracle()}, lambda: {"drafter": [oracle(), "prompt-lookup"]}),
    *(lambda: {"draft_model": tiny_text.model(seed=5)}, lambda: {"drafter": "prompt-lookup"}),
]


@in_one_test(("way", "length"), product(WAYS, [4, "auto"]))
def test_responses_are_mlx_lms_own(way: Callable[[], dict[str, Any]], length: int | str) -> None:
    """Text pieces, tokens, counts, log-probabilities and finish reason, response by response."""
    got = ours(num_draft_tokens=length, **way())
    assert_same(got, theirs())
    assert got[0].origin == "plain"
    assert got[-1].stats.emitted == len(got)


def test_text_pieces_join_to_the_same_text() -> None:
    """Bytes of half a character are held back alike by both of mlx-lm's detokenizers, in the
    middle of an accepted block too. mlx-lm's name for the draft length is taken."""
    naive = TokenizerWrapper(tokenizer()._tokenizer, NaiveStreamingDetokenizer)
    for tok in (tokenizer(), naive):
        got, expected = ours(tok=tok, drafter=oracle(), num_draft_tokens=5), theirs(tok=tok)
        assert len(got[-1].stats.accept_histogram) == 6
        assert [r.text for r in got] == [r.text for r in expected]
        assert "" in [r.text for r in got]  # something was held back
        given = tiny_text.model(), tok, PROMPT
        text = mlx_lm.generate(*given, max_tokens=NUM_TOKENS)
        assert "".join(r.text for r in got) == text
        assert sd.generate(*given, max_tokens=NUM_TOKENS, drafter=oracle()) == text


def test_special_tokens_are_added_unless_the_prompt_begins_with_one() -> None:
    fast = tiny_text.bpe()
    bos = fast.token_to_id(tiny_text.BOS)
    fast.post_processor = TemplateProcessing(
        single=f"{tiny_text.BOS} $A", special_tokens=[(tiny_text.BOS, bos)]
    )
    tok = tiny_text.tokenizer(fast)
    for prompt in ("the cat", f"{tiny_text.BOS}the cat"):
        got, expected = ours(prompt, tok), theirs(prompt, tok)
        assert got[0].prompt_tokens == 1 + len(tok.encode("the cat", add_special_tokens=False))
        assert_same(got, expected)


@in_one_test("length", [1, 4])
@in_one_test("at", [0, 1, 2, 3, 5, 9])
def test_an_end_token_inside_an_accepted_block_stops(at: int, length: int) -> None:
    """finish_reason 'stop', nothing after it, also where max_tokens would end the text there, or
    nowhere."""
    ids = list(plain_ids())
    first = ids.index(ids[at])
    other = next(i for i in range(260) if i not in ids)
    for ends in ([ids[at]], [other, ids[at], 259]):
        for num_tokens in (NUM_TOKENS, first + 1, -1):
            tok = tiny_text.tokenizer(eos_token_ids=ends)
            options = {"tok": tok, "max_tokens": num_tokens}
            got = ours(drafter=oracle(0.0), num_draft_tokens=length, **options)
            assert_same(got, theirs(**options))
            assert [r.token for r in got] == ids[: first + 1]
            assert [r.finish_reason for r in got] == [*[None] * first, "stop"]


def test_options_of_mlx_lm_pass_through() -> None:
    """Caches of earlier turns, a window, prefill steps with progress, and logits processors."""
    caches = {stream: make_prompt_cache(tiny_text.model()) for stream in (ours, theirs)}
    for prompt in (PROMPT, " and then the rain"):
        expected = theirs(prompt, max_tokens=12, prompt_cache=caches[theirs])
        given = tiny_text.model(), tokenizer(), prompt
        options = {"prompt_cache": caches[ours], "drafter": "prompt-lookup"}
        stream = sd.stream_generate(*given, max_tokens=99, **options)
        assert [r.token for r in islice(stream, 12)] == [r.token for r in expected]
        stream.close()

    def processors() -> Any:
        return make_logits_processors({5: 2.0}, 1.3, 8)

    for options in ({"max_kv_size": lambda: 16}, {"logits_processors": processors}):
        expected = theirs(**{name: make() for name, make in options.items()})
        drafter = scripted.OracleDrafter([r.token for r in expected], tiny_text.VOCAB, wrong=0.3)
        made = {name: make() for name, make in options.items()}
        assert_same(ours(drafter=drafter, num_draft_tokens=4, **made), expected)
        assert [r.token for r in expected] != list(plain_ids()[:NUM_TOKENS])

    def reports(stream: Any, **kwargs: Any) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        options = {"max_tokens": 2, "prefill_step_size": 7, **kwargs}
        stream(prompt_progress_callback=lambda *progress: seen.append(progress), **options)
        return seen

    assert reports(ours, drafter="ngram") == reports(theirs)
    assert len(reports(theirs)) > 3


def test_verbose_prints_the_text_the_speeds_and_the_stats(capsys: Any) -> None:
    given = tiny_text.model(), tokenizer(), PROMPT
    options: dict[str, Any] = {"verbose": True, "max_tokens": NUM_TOKENS}
    text = mlx_lm.generate(*given, **options)
    speeds = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert text == sd.generate(*given, drafter=oracle(), num_draft_tokens=4, **options)
    printed = capsys.readouterr().out
    assert text in printed
    assert [line.split(" ")[0] for line in printed.splitlines()[-5:-2]] == speeds
    assert f"Speculation: {NUM_TOKENS} tokens in" in printed
    sd.generate(*given, max_tokens=2)
    assert capsys.readouterr().out == ""


def test_code_that_takes_a_response_apart_keeps_working() -> None:
    """A response is mlx-lm's class, its fields come first and in mlx-lm's order."""
    (response,) = ours(max_tokens=1)
    fields = dataclasses.fields(GenerationResponse)
    assert isinstance(response, GenerationResponse)
    assert dataclasses.fields(type(response))[: len(fields)] == fields
    assert response.__match_args__[: len(fields)] == GenerationResponse.__match_args__
    assert dataclasses.replace(response, text="x").token == response.token
