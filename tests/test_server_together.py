"""Requests to the server that run at the same time: each is answered as if it were alone."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import openai
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models import qwen2

import specdec_mlx as sd
import tiny
from selection import in_one_test
from serving import serving
from specdec_mlx.batch.prompts import PromptReading
from specdec_mlx.batch.rows import RowToken
from specdec_mlx.drafters.grammar import GrammarProcessor
from specdec_mlx.drafters.ngram import NGramDrafter, NGramSession
from specdec_mlx.drafters.prompt_lookup import PromptLookupSession
from specdec_mlx.loop import Token
from specdec_mlx.mlx_lm_plugin import batch
from specdec_mlx.mlx_lm_plugin.batch import Incoming, SpeculatingBatch, on_the_host
from specdec_mlx.mlx_lm_plugin.channel import Channel
from specdec_mlx.mlx_lm_plugin.requests import Requested
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target.row_caches import RowCaches, RowsCache
from specdec_mlx.target.row_pass import RowPasses
from test_server_requests import JSON_SCHEMA, MODEL, assert_fits
from tiny_model_folder import write_model_folder

TEXT = "the cat in the hat and the other cat in the hat and "

MIXED: list[dict[str, Any]] = [
    {},
    {"extra_body": {"drafter": "ngram", "draft_length": 2}},
    {"extra_body": {"drafter": "none"}},
    {"seed": 3, "temperature": 0.8},
    {"seed": 4, "temperature": 1.2, "top_p": 0.9, "extra_body": {"rule": "coupled"}},
    {"response_format": JSON_SCHEMA},
    {"response_format": JSON_SCHEMA, "seed": 5, "temperature": 1.0},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"stop": ["zz", "e"]},
    {"extra_body": {"repetition_penalty": 1.3}},
    {"prediction": {"type": "content", "content": TEXT * 3}},
    {"logit_bias": {"100": 2.0}},
]
"""What a request may ask for; each of another prompt, two of a length of their own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(
        tmp_path_factory.mktemp("models") / "target", max_position_embeddings=8192
    )


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with serving("--model", str(folder), "--draft-length", "4") as running:
        yield running


def ask(client: openai.OpenAI, i: int = 0, **more: Any) -> Any:
    options = {"max_tokens": 90 + 7 * (i % 3), "temperature": 0.0} | more
    messages: list[Any] = [{"role": "user", "content": f"{i} {TEXT * (1 + i % 2)}"}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def answer(reply: Any) -> Any:
    """Text, reason and log-probabilities of a reply."""
    choice = reply.choices[0]
    tokens = None if choice.logprobs is None else choice.logprobs.content
    logprobs = [
        (token.id, pytest.approx(token.logprob, abs=1e-3), len(token.top_logprobs or ()))
        for token in tokens or ()
    ]
    return choice.message.content, choice.finish_reason, logprobs


def said(chunks: list[Any]) -> tuple[str, str]:
    """Text and reason of a stream."""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return text, chunks[-1].choices[0].finish_reason


def test_all_kinds_of_requests_run_together(client: openai.OpenAI) -> None:
    """With seeds, grammars, log-probabilities, penalties and stop words; most drafts are right."""
    alone = [answer(ask(client, i, **kind)) for i, kind in enumerate(MIXED)]
    for _ in range(2):  # the prompts are in the caches the second time
        with ThreadPoolExecutor(len(MIXED)) as pool:
            replies = list(pool.map(lambda i: ask(client, i, **MIXED[i]), range(len(MIXED))))
        assert [answer(reply) for reply in replies] == alone
        accounts = [reply.usage.speculation for reply in replies]
        assert sum(account["batched"] for account in accounts) >= len(MIXED) - 2
        batched = [account for account in accounts if account["batched"]]
        assert sum(account["accepted"] for account in batched) > 100
    for i in (5, 6):
        assert_fits(alone[i][0])


@pytest.mark.parametrize("kind", [{}, {"seed": 3, "temperature": 0.9}, {"response_format": None}])
def test_a_stream_goes_on_as_a_row_when_others_come(
    kind: dict[str, Any], client: openai.OpenAI
) -> None:
    """The numbers of a seed, and a grammar, go on where they were."""
    if "response_format" in kind:
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
        wanted = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}
        kind = {"response_format": wanted}
    expected = said(list(ask(client, 0, stream=True, **kind | {"max_tokens": 700})))
    with ThreadPoolExecutor(3) as pool:
        stream = ask(client, 0, stream=True, **kind | {"max_tokens": 700})
        chunks = [next(stream) for _ in range(2)]
        others = [pool.submit(ask, client, i) for i in (1, 2, 3)]
        chunks += list(stream)
        for other in others:
            other.result()
    assert said(chunks) == expected
    assert chunks[-1].speculation["batched"] is True


def test_clients_that_hang_up_leave_the_others_alone(client: openai.OpenAI) -> None:
    """In the middle of a stream, and before its first token."""
    expected = [answer(ask(client, i)) for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        streams = [ask(client, 10 + i, stream=True, max_tokens=2000) for i in range(3)]
        others = [pool.submit(ask, client, i) for i in range(2)]
        for i, stream in enumerate(streams):
            for _ in range(i):
                next(stream)
            stream.close()
        others += [pool.submit(ask, client, i) for i in (2, 3)]
        assert [answer(other.result()) for other in others] == expected
    assert answer(ask(client, 0)) == expected[0]


def test_what_goes_wrong_with_one_is_told_to_it_alone(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter, or a grammar, that raises in the middle: an error in words; the others go on."""
    expected = [answer(ask(client, i)) for i in range(3)]
    follow = GrammarProcessor.__call__

    def drafting(self: PromptLookupSession, limit: int) -> Any:
        raise RuntimeError("no idea")

    def following(self: GrammarProcessor, tokens: mx.array, logits: mx.array) -> Any:
        if self.start is not None and tokens.shape[0] > self.start + 12:
            raise RuntimeError("lost")
        return follow(self, tokens, logits)

    monkeypatch.setattr(PromptLookupSession, "propose", drafting)
    monkeypatch.setattr(GrammarProcessor, "__call__", following)
    bad: list[dict[str, Any]] = [
        {"extra_body": {"drafter": "prompt-lookup"}},
        {"response_format": JSON_SCHEMA},
    ]
    with ThreadPoolExecutor(5) as pool:
        good = [pool.submit(ask, client, i) for i in range(3)]
        failing = [pool.submit(ask, client, 7, **kind) for kind in bad]
        assert [answer(other.result()) for other in good] == expected
        for other, words in zip(failing, ("no idea", "lost"), strict=True):
            with pytest.raises(openai.InternalServerError, match=words):
                other.result()


VICTIM = "! this one fails in the middle of what the others write"

Place = tuple[type, str, Callable[..., bool]]
"""A method that raises where a condition on its arguments holds."""


def is_victims(reading: PromptReading, *args: Any) -> bool:
    return len(reading.prompt) in VICTIMS_LENGTHS


VICTIMS_LENGTHS: set[int] = set()
"""Tokens of the victim's prompt."""


def after(number: int) -> Callable[..., bool]:
    """From so many calls on."""
    calls = iter(range(10**9))
    return lambda *args: next(calls) >= number


FAULTS: dict[str, Place] = {
    "admitted: its drafter is checked": (NGramDrafter, "check", lambda *args: True),
    "admitted: its drafter begins": (NGramDrafter, "begin", lambda *args: True),
    "admitted: its prompt is read": (PromptReading, "read", is_victims),
    "admitted: its caches join the others": (
        RowsCache,
        "add_row",
        lambda rows, cache, *args: cache.offset + 1 in VICTIMS_LENGTHS and rows in rows_of_layer(1),
    ),
    "drafted for": (NGramSession, "propose", after(3)),
    "told what was kept": (NGramSession, "observe", after(3)),
    "ended: its caches are taken out": (
        RowCaches,
        "extract",
        lambda caches, row, like: caches.ends[row] in {n + 19 for n in VICTIMS_LENGTHS},
    ),
    "ended: its drafter closes": (NGramSession, "close", lambda *args: True),
    "ended: mlx-lm is told": (
        SpeculatingBatch,
        "_said",
        lambda batch, served, row: row.finish_reason and len(served.text.prompt) in VICTIMS_LENGTHS,
    ),
}


def rows_of_layer(layer: int) -> list[Any]:
    """Caches of that layer in all batches: the layers before it have the row already."""
    made = [found for found in gc.get_objects() if isinstance(found, RowCaches)]
    return [rows.caches[layer] for rows in made if rows.caches]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_row_is_told_to_its_client_alone(
    fault: str, client: openai.OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is admitted, drafted for or ended: 500 for the one, their texts for the others."""
    tokenizer = mlx_lm.load(str(folder))[1]
    VICTIMS_LENGTHS.clear()
    prompt = f"{fault}: {VICTIM}"  # that no cache holds
    VICTIMS_LENGTHS.add(len(tokenizer.encode(prompt)))
    options: dict[str, Any] = {"extra_body": {"drafter": "none"}, "max_tokens": 300}
    expected = [answer(ask(client, i, **options)) for i in range(3)]
    kind, name, holds = FAULTS[fault]
    method = getattr(kind, name, lambda *args: None)

    def failing(self: Any, *args: Any) -> Any:
        if holds(self, *args):
            raise RuntimeError("a fault was put here")
        return method(self, *args)

    monkeypatch.setattr(kind, name, failing, raising=False)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, client, i, **options) for i in range(3)]
        first = ask(client, 40, stream=True, **options)
        next(first)
        with pytest.raises(openai.InternalServerError, match="a fault was put here"):
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=20, extra_body={"drafter": "ngram"}
            )
        assert said(list(first))[1] == "length"
        assert [answer(other.result()) for other in others] == expected


def test_a_prompt_of_one_token_that_others_begin_with_leaves_them_alone(
    client: openai.OpenAI,
) -> None:
    """mlx-lm trims their caches to nothing for it, which still have keys."""
    begin = {"model": MODEL, "max_tokens": 20, "temperature": 0.0}
    expected = [answer(ask(client, i, max_tokens=200)) for i in range(4)]
    alone = client.completions.create(prompt="q", **begin, extra_body={"drafter": "none"})
    client.completions.create(prompt="q" + TEXT, **begin)
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(ask, client, i, max_tokens=200) for i in range(4)]
        short = [client.completions.create(prompt="q", **begin) for _ in range(2)]
        assert [answer(other.result()) for other in others] == expected
    assert {reply.choices[0].text for reply in short} == {alone.choices[0].text}


def test_a_batch_that_fails_is_told_to_all_and_the_next_is_served(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's thread goes on."""
    expected = [answer(ask(client, i)) for i in range(3)]
    launch = RowPasses.launch
    count = 0

    def failing(self: RowPasses, rounds: Any) -> Any:
        nonlocal count
        count += 1
        if count == 8:
            raise RuntimeError("out of order")
        return launch(self, rounds)

    monkeypatch.setattr(RowPasses, "launch", failing)
    with ThreadPoolExecutor(3) as pool:
        replies = [pool.submit(ask, client, i, extra_body={"drafter": "none"}) for i in range(3)]
        errors = [reply.exception() for reply in replies]
    assert any("out of order" in str(error) for error in errors)
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(lambda i: answer(ask(client, i)), range(3)))
    assert again == expected


def test_the_automatic_length_serves_the_same_texts(folder: Path) -> None:
    """It measures, drafts where that pays for all, and changes no text."""
    with serving("--model", str(folder)) as client:
        expected = [answer(ask(client, i, max_tokens=200)) for i in range(4)]
        for _ in range(2):
            with ThreadPoolExecutor(4) as pool:
                got = pool.map(lambda i: answer(ask(client, i, max_tokens=200)), range(4))
                assert list(got) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_the_texts_of_their_seeds(stream: bool, client: openai.OpenAI) -> None:
    """`n` of them, each with its index; a prompt's tokens are counted once."""
    kind = {"temperature": 1.0, "seed": 11, "extra_body": {"rule": "match"}}
    alone = [ask(client, 20, **kind | {"seed": 11 + i}) for i in range(3)]
    expected = [answer(reply) for reply in alone]
    if stream:
        options = {"include_usage": True}
        chunks = list(ask(client, 20, n=3, stream=True, stream_options=options, **kind))
        got = [
            said([chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == i])
            for i in range(3)
        ]
        assert got == [(text, reason) for text, reason, _ in expected]
        usage = chunks[-1].usage
        assert not chunks[-1].choices
    else:
        reply = ask(client, 20, n=3, logprobs=True, **kind)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        got = [(choice.message.content, choice.finish_reason) for choice in reply.choices]
        assert got == [(text, reason) for text, reason, _ in expected]
        assert all(choice.logprobs.content for choice in reply.choices)
        usage = reply.usage
    assert usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert len(usage.speculation["choices"]) == 3
    assert usage.speculation["batched"] is True


def test_the_prompt_of_several_choices_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whom it is read first; the other rows get copies of its caches."""
    fed: list[int] = []
    call = qwen2.Model.__call__

    def counted(self: Any, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if ids.shape[0] == 1:  # of one text
            fed.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    with serving("--model", str(folder), "--draft-length", "2") as client:
        ask(client, 30)
        with ThreadPoolExecutor(2) as pool:  # what is measured once is behind us
            list(pool.map(lambda i: ask(client, i), range(2)))
        monkeypatch.setattr(qwen2.Model, "__call__", counted)
        reply = client.completions.create(
            model=MODEL, prompt=f"!{TEXT * 8}", max_tokens=2, n=4, temperature=1.0
        )
    assert len({choice.text for choice in reply.choices}) > 1
    wide = [size for size in fed if size > 8]
    assert sum(wide) <= 1.1 * reply.usage.prompt_tokens


def test_choices_end_together_where_one_fails(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error in words, and nothing is left behind."""

    def drafting(self: PromptLookupSession, limit: int) -> Any:
        raise RuntimeError("no idea")

    monkeypatch.setattr(PromptLookupSession, "propose", drafting)
    broken = {"n": 2, "extra_body": {"drafter": "prompt-lookup"}}
    with pytest.raises(openai.InternalServerError, match="no idea"):
        ask(client, 8, **broken)
    with pytest.raises(openai.APIError, match="no idea"):
        list(ask(client, 8, stream=True, **broken))
    with pytest.raises(openai.BadRequestError, match="Unknown rule"):
        ask(client, 8, n=2, extra_body={"rule": "nothing"})
    stream = ask(client, 8, n=3, stream=True, max_tokens=2000)
    next(stream)
    stream.close()
    assert ask(client, 8, n=2).choices[1].message.content


def test_a_draft_model_drafts_for_each_row(folder: Path) -> None:
    """With caches of its own for each, that are kept for the next turn."""
    draft = write_model_folder(folder.parent / "draft", "llama", seed=3)
    flags = ("--model", str(folder), "--draft-model", str(draft), "--draft-length", "2")
    with serving(*flags) as client:
        expected = [answer(ask(client, i, extra_body={"drafter": "none"})) for i in range(3)]
        for _ in range(2):
            with ThreadPoolExecutor(3) as pool:
                replies = list(pool.map(lambda i: ask(client, i), range(3)))
            assert [answer(reply) for reply in replies] == expected
            accounts = [reply.usage.speculation for reply in replies]
            assert all(account["drafted"] > 0 for account in accounts)
            assert any(account["batched"] for account in accounts)


def test_a_model_without_rows_is_batched_by_mlx_lm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; a seed and a grammar are served one after the other then."""
    monkeypatch.setattr(batch, "can_hold_rows", lambda model: False)
    kinds = [MIXED[i] for i in (0, 0, 3, 5, 9)]
    with serving("--model", str(folder), "--draft-length", "3") as client:
        alone = [answer(ask(client, i, **kind)) for i, kind in enumerate(kinds)]
        with ThreadPoolExecutor(len(kinds)) as pool:
            replies = list(pool.map(lambda i: ask(client, i, **kinds[i]), range(len(kinds))))
        assert [answer(reply) for reply in replies] == alone
    assert sum("cannot be rows of one batch" in message for message in caplog.messages) == 1


@in_one_test("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_log_probabilities_come_without_waiting(dtype: mx.Dtype) -> None:
    """In any type; as numbers of the host."""
    rows = mx.log(mx.array([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]])).astype(dtype)
    mx.eval(rows)
    row = RowToken(0, Token(2, "plain", SpeculationStats(), rows, 1), None)
    values = on_the_host(row, mx.new_stream(mx.cpu))
    assert isinstance(values, np.ndarray)
    assert values[2].item() == pytest.approx(math.log(0.375), rel=2e-2)


def put_in(
    together: SpeculatingBatch, prompt: list[int], max_tokens: int, ends: Sequence[int] = ()
) -> int:
    """A greedy request without a drafter; `ends` of the prompt's segments but for the last."""
    cuts = [0, *ends, len(prompt)]
    segments = [prompt[a:b] for a, b in pairwise(cuts)]
    arguments: list[Any] = [segments, max_tokens, None, [], sd.Sampling(), [], StopSequences()]
    (uid,) = together.insert_segments(*([argument] for argument in arguments))
    return int(uid)


def plain_batch(step_size: int) -> SpeculatingBatch:
    def incoming() -> Incoming:
        return Incoming(Channel(Queue()), Requested(None, "none"), 0, None, lambda text: text)

    stream = mx.default_stream(mx.default_device())
    target = tiny.build("qwen2")
    return SpeculatingBatch(target, incoming, None, stream, prefill_step_size=step_size)


def test_prompts_are_read_between_the_rounds_of_the_others() -> None:
    """A part at a time, and once for two that are the same; caches are had where segments end."""
    together = plain_batch(step_size=8)
    first = put_in(together, [5, 17, 99], 60)
    prompt = [*range(1, 60)]
    tokens: dict[int, list[int]] = {}
    waiting: list[int] = []
    parts: list[tuple[int, int]] = []
    held: list[list[int]] = []
    while True:
        progress, new = together.next()
        if not progress and not new:
            break
        for token in new:
            tokens.setdefault(token.uid, []).append(token.token)
        if not waiting and len(tokens.get(first, ())) == 3:
            waiting = [put_in(together, prompt, 9, ends=[20]) for _ in range(2)]
        for part in progress:
            if part.uid in waiting:
                parts.append((part.progress[0], len(tokens[first])))
            if part.end_of_segment and not part.end_of_prompt:
                held += [tokens for _, tokens in together.extract_cache([part.uid]).values()]
    expected = [token.token for token in sd.speculate(together.model, prompt, max_tokens=9)]
    assert [tokens[uid] for uid in waiting] == [expected, expected]
    assert len(tokens[first]) == 60
    assert held[-2:] == [prompt[:20], prompt[:-1]]
    steps = [after - before for (before, _), (after, _) in pairwise(parts)]
    assert max(steps) <= 8
    written = [said for _, said in parts]
    assert written[-1] - written[0] >= 58 // 8, "a token of the first between any two parts"
    assert together.prompt_cache_nbytes == 0


def test_a_request_taken_out_while_its_prompt_is_read_leaves_the_other_reader() -> None:
    """The second of two with the same prompt reads on by itself."""
    together = plain_batch(step_size=4)
    prompt = [*range(1, 30)]
    uids = [put_in(together, prompt, 5) for _ in range(2)]
    together.next()
    together.remove(uids[:1])
    tokens = []
    while (news := together.next()) != ([], []):
        tokens += news[1]
    assert [token.uid for token in tokens] == uids[1:] * 5
    assert tokens[-1].all_tokens[: len(prompt)] == prompt
    together.close()
