"""Text in, text out: `stream_generate` and `generate` beside mlx-lm's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import GenerationResponse, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
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


def with_ends(*token_ids: int) -> TokenizerWrapper:
    """A tokenizer with more end tokens."""
    return tiny_text.tokenizer(eos_token_ids=token_ids)


def naive() -> TokenizerWrapper:
    """A tokenizer with mlx-lm's other detokenizer, which holds text back differently."""
    return TokenizerWrapper(tokenizer()._tokenizer, NaiveStreamingDetokenizer)


def theirs(prompt: Any = PROMPT, tok: Any = None, **kwargs: Any) -> list[GenerationResponse]:
    kwargs.setdefault("max_tokens", NUM_TOKENS)
    return list(
        mlx_lm.stream_generate(
            kwargs.pop("model", None) or tiny_text.model(), tok or tokenizer(), prompt, **kwargs
        )
    )


def ours(
    prompt: Any = PROMPT, tok: Any = None, **kwargs: Any
) -> list[sd.responses.SpeculativeResponse]:
    kwargs.setdefault("max_tokens", NUM_TOKENS)
    model = kwargs.pop("model", None) or tiny_text.model()
    return list(sd.stream_generate(model, tok or tokenizer(), prompt, **kwargs))


@cache
def plain_ids() -> tuple[int, ...]:
    """What the tiny model writes after PROMPT, longer than any test needs."""
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
        assert mine.logprobs.shape == other.logprobs.shape
        assert mx.allclose(mine.logprobs, other.logprobs, atol=1e-4)


DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "by name": {"drafter": "prompt-lookup"},
    "by name with options": {"drafter": "ngram:max_order=3,num_draft=2"},
    "oracle": {"drafter": oracle},
    "draft model": {"draft_model": lambda: tiny_text.model(seed=5)},
    "itself": {"draft_model": tiny_text.model},
    "in the place of a draft model": {"draft_model": oracle},
    "by name in that place": {"draft_model": "prompt-lookup"},
}


def made(name: str) -> dict[str, Any]:
    return {key: v() if callable(v) else v for key, v in DRAFTERS[name].items()}


@pytest.mark.parametrize("length", [4, "auto"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_responses_are_mlx_lms_own(name: str, length: int | str) -> None:
    """Text pieces, tokens, counts, log-probabilities and finish reason, response by response."""
    assert_same(ours(draft_length=length, **made(name)), theirs())


@in_one_test("make", [tokenizer, naive])
def test_text_pieces_join_to_the_same_text(make: Any) -> None:
    """Bytes of half a character are held back alike, in the middle of an accepted block too."""
    got, expected = ours(tok=make(), drafter=oracle(), draft_length=5), theirs(tok=make())
    assert [r.text for r in got] == [r.text for r in expected]
    assert "" in [r.text for r in got]  # something was held back
    text = mlx_lm.generate(tiny_text.model(), make(), PROMPT, max_tokens=NUM_TOKENS)
    assert "".join(r.text for r in got) == text
    assert (
        sd.generate(tiny_text.model(), make(), PROMPT, max_tokens=NUM_TOKENS, drafter=oracle())
        == text
    )


def test_origin_and_stats_are_beside_mlx_lms_fields() -> None:
    """from_draft says what origin says, and the account adds up to the responses."""
    got = ours(drafter=oracle(0.3), draft_length=4)
    assert got[0].origin == "plain"
    assert {r.origin for r in got[1:-1]} == {"draft", "correction", "bonus"}
    assert [r.from_draft for r in got] == [r.origin == "draft" for r in got]
    stats = got[-1].stats
    assert stats.emitted == len(got) == got[-1].generation_tokens
    assert stats.emitted + stats.cut == stats.accepted + stats.target_passes
    assert stats.target_passes < len(got)
    assert {r.origin for r in ours(drafter=None)} == {"plain"}


@in_one_test("form", ["str", "list", "tuple", "mx.array"])
def test_a_prompt_may_be_text_or_ids(form: str) -> None:
    """All forms give one text."""
    ids = tokenizer().encode(PROMPT)
    prompt = {"str": PROMPT, "list": ids, "tuple": tuple(ids), "mx.array": mx.array(ids)}[form]
    assert_same(ours(prompt, drafter="prompt-lookup"), theirs(ids))


def test_special_tokens_are_added_unless_the_prompt_begins_with_one() -> None:
    """As in mlx-lm: a BOS token in the text is not doubled."""
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
    """finish_reason 'stop', nothing after it, also where max_tokens would end the text there."""
    ids = list(plain_ids())
    first = ids.index(ids[at])
    other = next(i for i in range(260) if i not in ids)
    for ends in ([ids[at]], [other, ids[at], 259]):
        for num_tokens in (NUM_TOKENS, first + 1):
            options = {"tok": with_ends(*ends), "max_tokens": num_tokens}
            got = ours(drafter=oracle(0.0), draft_length=length, **options)
            assert_same(got, theirs(**options))
            assert [r.token for r in got] == ids[: first + 1]
            assert [r.finish_reason for r in got] == [*[None] * first, "stop"]


@in_one_test("num_tokens", [1, 2, 5, 6, 11])
def test_the_length_is_exact_in_the_middle_of_a_block(num_tokens: int) -> None:
    """finish_reason 'length' at max_tokens; -1 goes on until an end token."""
    got = ours(max_tokens=num_tokens, drafter=oracle(0.0), draft_length=4)
    assert len(got) == num_tokens
    assert got[-1].finish_reason == "length"
    assert_same(got, theirs(max_tokens=num_tokens))
    tok = with_ends(plain_ids()[NUM_TOKENS + num_tokens])
    assert_same(ours(tok=tok, max_tokens=-1, drafter=oracle()), theirs(tok=tok, max_tokens=-1))


def test_closing_the_stream_brings_the_callers_caches_into_line() -> None:
    """After a consumer's break the caches hold the prompt and the tokens handed out."""
    caches = make_prompt_cache(tiny_text.model())
    stream = sd.stream_generate(
        tiny_text.model(), tokenizer(), PROMPT, drafter=oracle(0.0), prompt_cache=caches
    )
    for _ in range(3):
        next(stream)
    stream.close()
    assert {c.offset for c in caches} == {len(tokenizer().encode(PROMPT)) + 3}


def test_num_draft_tokens_is_the_draft_length() -> None:
    """mlx-lm's name for K; without a drafter it is taken and changes nothing."""
    for length in (1, 3, 6):
        got = ours(drafter=oracle(0.0), num_draft_tokens=length, max_tokens=14)
        assert len(got[-1].stats.accept_histogram) == length + 1
    assert_same(ours(num_draft_tokens=3), theirs(num_draft_tokens=3))


def test_options_of_mlx_lm_pass_through() -> None:
    """Caches of earlier turns, a window, prefill steps with progress, and logits processors."""
    caches = {stream: make_prompt_cache(tiny_text.model()) for stream in (ours, theirs)}
    for prompt in (PROMPT, " and then the rain"):
        expected = theirs(prompt, max_tokens=12, prompt_cache=caches[theirs])
        got = ours(prompt, max_tokens=12, prompt_cache=caches[ours], drafter="prompt-lookup")
        assert [r.token for r in got] == [r.token for r in expected]

    def processors() -> Any:
        return make_logits_processors({5: 2.0}, 1.3, 8)

    for options in ({"max_kv_size": lambda: 16}, {"logits_processors": processors}):
        expected = theirs(**{name: make() for name, make in options.items()})
        drafter = scripted.OracleDrafter([r.token for r in expected], tiny_text.VOCAB, wrong=0.3)
        made = {name: make() for name, make in options.items()}
        assert_same(ours(drafter=drafter, draft_length=4, **made), expected)
        assert [r.token for r in expected] != list(plain_ids()[:NUM_TOKENS])

    def reports(stream: Any, **kwargs: Any) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        options = {"max_tokens": 2, "prefill_step_size": 7, **kwargs}
        stream(prompt_progress_callback=lambda *progress: seen.append(progress), **options)
        return seen

    assert reports(ours, drafter="ngram") == reports(theirs)
    assert len(reports(theirs)) > 3


@in_one_test("name", ["none", "by name", "oracle", "itself"])
def test_a_seed_makes_sampling_reproducible(name: str) -> None:
    """The same seed, the same text, whatever was drawn before; another seed, another text."""
    options = {"sampler": sd.Sampling(temp=1.0, top_p=0.95), "draft_length": 3, **made(name)}

    def run(seed: int) -> list[int]:
        mx.random.uniform()
        return [r.token for r in ours(seed=seed, **options)]

    assert run(1) == run(1)
    assert run(1) != run(2)


@in_one_test("length", [1, 4])
def test_mlx_lms_own_sampler_follows_the_global_seed(length: int) -> None:
    """Code that seeds MLX and gives make_sampler's sampler stays reproducible, at a fixed K."""
    drafter = oracle()  # and the model is made, which seeds MLX too

    def run() -> list[int]:
        mx.random.seed(9)
        sampler = make_sampler(temp=1.0)
        return [r.token for r in ours(sampler=sampler, drafter=drafter, draft_length=length)]

    assert run() == run()


def test_verbose_prints_the_text_the_speeds_and_the_stats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """mlx-lm's three closing lines stay, and ours follow."""
    options = {"max_tokens": NUM_TOKENS, "verbose": True}
    text = mlx_lm.generate(tiny_text.model(), tokenizer(), PROMPT, **options)
    lines_of_mlx_lm = capsys.readouterr().out.splitlines()
    assert text == sd.generate(
        tiny_text.model(), tokenizer(), PROMPT, drafter=oracle(), draft_length=4, **options
    )
    printed = capsys.readouterr().out
    assert text in printed
    first_words = [line.split(" ")[0] for line in lines_of_mlx_lm[-3:]]
    assert first_words == ["Prompt:", "Generation:", "Peak"]
    assert [line.split(" ")[0] for line in printed.splitlines()[-5:-2]] == first_words
    assert f"Speculation: {NUM_TOKENS} tokens in" in printed
    assert "accepted" in printed.splitlines()[-2]
    sd.generate(tiny_text.model(), tokenizer(), PROMPT, max_tokens=2)
    assert capsys.readouterr().out == ""


def test_code_that_takes_a_response_apart_keeps_working() -> None:
    """A response is mlx-lm's class, its fields come first and in mlx-lm's order."""
    response = ours(max_tokens=1)[0]
    names = [f.name for f in dataclasses.fields(GenerationResponse)]
    assert isinstance(response, GenerationResponse)
    assert [f.name for f in dataclasses.fields(response)] == [*names, "stats", "origin", "drafter"]
    text, token, *_rest = (getattr(response, name) for name in names)
    again = type(response)(text, token, *_rest)
    assert again.finish_reason == "length"
    assert dataclasses.replace(response, text="x").token == response.token
    match response:
        case GenerationResponse(token=token, finish_reason="length"):
            assert token == plain_ids()[0]
        case _:
            pytest.fail("a response no longer matches mlx-lm's class")


@pytest.mark.parametrize("with_draft", [False, True])
def test_the_wired_limit_covers_target_and_draft(
    with_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's context manager gets both models and the stream, around the whole generation."""
    events: list[Any] = []

    @contextmanager
    def spy(models: Any, streams: Any = None) -> Any:
        events.append(([id(model) for model in models], streams))
        yield
        events.append("left")

    monkeypatch.setattr("specdec_mlx.responses.wired_limit", spy)
    target, draft = tiny_text.model(), tiny_text.model(seed=5)
    options: dict[str, Any] = {"max_tokens": 4, "draft_model": draft if with_draft else None}
    stream = sd.stream_generate(target, tokenizer(), PROMPT, **options)
    next(stream)
    expected = [id(target), id(draft)] if with_draft else [id(target)]
    assert events == [(expected, [generation_stream])]
    list(stream)
    assert events[1:] == ["left"]


def test_nothing_runs_before_the_first_response_is_asked_for() -> None:
    """stream_generate returns a generator; mistakes in its arguments are raised at the call."""
    stream: Any = sd.stream_generate(tiny_text.model(), tokenizer(), PROMPT, max_tokens=3)
    assert stream.gi_frame is not None
    stream.close()
    with pytest.raises(sd.errors.PromptError, match="empty"):
        sd.stream_generate(tiny_text.model(), tokenizer(), "")
    options: Any = {"temperature": 1.0}
    with pytest.raises(TypeError, match="temperature"):
        sd.stream_generate(tiny_text.model(), tokenizer(), PROMPT, **options)
