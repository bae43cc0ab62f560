"""Requests to the server that run at the same time: each is answered as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models import qwen2

import specdec_mlx as sd
import tiny
from selection import cases, in_one_test
from serving import chat, complete, said, serving, text_of
from specdec_mlx.drafters.grammar import GrammarProcessor
from specdec_mlx.drafters.ngram import NGramDrafter, NGramSession
from specdec_mlx.engine.prompt_reader import PromptReader
from specdec_mlx.mlx_lm_plugin import batch
from specdec_mlx.mlx_lm_plugin.batch import SpeculatingBatch
from specdec_mlx.mlx_lm_plugin.requests import Channel, Requested
from specdec_mlx.verify.row_caches import BatchCaches, SlotCache
from specdec_mlx.verify.row_pass import SharedPasses
from test_server_requests import JSON_SCHEMA, assert_fits, schema_of
from tiny_model_folder import make_tokenizer, write_model_folder

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
    {"seed": 6, "temperature": 1.0, "extra_body": {"top_k": 500_000}},  # all of the tokens
]
"""What a request may ask for; each of another prompt, two of a length of their own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return write_model_folder(root / "target", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with serving("--model", str(folder), "--draft-length", "4") as running:
        yield running


def ask(client: openai.OpenAI, i: int = 0, **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": f"{i} {TEXT * (1 + i % 2)}"}]
    return chat(client, messages, **{"max_tokens": 90 + 7 * (i % 3)} | more)


def answer(reply: Any) -> Any:
    """Text, reason and log-probabilities of a reply."""
    choice = reply.choices[0]
    tokens = None if choice.logprobs is None else choice.logprobs.content
    logprobs = [
        (token.id, pytest.approx(token.logprob, abs=1e-3), len(token.top_logprobs or ()))
        for token in tokens or ()
    ]
    return choice.message.content, choice.finish_reason, logprobs


def answers(client: openai.OpenAI, numbers: Sequence[int], **more: Any) -> list[Any]:
    """Answers to several requests, one after the other."""
    return [answer(ask(client, i, **more)) for i in numbers]


def together(client: openai.OpenAI, kinds: Sequence[dict[str, Any]]) -> list[Any]:
    """Replies to requests that run at the same time."""
    with ThreadPoolExecutor(len(kinds)) as pool:
        return list(pool.map(lambda pair: ask(client, pair[0], **pair[1]), enumerate(kinds)))


def test_all_kinds_of_requests_run_together(client: openai.OpenAI) -> None:
    """With seeds, grammars, log-probabilities, penalties and stop words; most drafts are right."""
    alone = [answer(ask(client, i, **kind)) for i, kind in enumerate(MIXED)]
    for _ in range(2):  # the prompts are in the caches the second time
        replies = together(client, MIXED)
        assert [answer(reply) for reply in replies] == alone
        accounts = [reply.usage.speculation for reply in replies]
        batched = [account for account in accounts if account["batched"]]
        assert len(batched) >= len(MIXED) - 2
        assert sum(account["accepted"] for account in batched) > 100
    for i in (5, 6):
        assert_fits(alone[i][0])


NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
GOING_ON: list[dict[str, Any]] = [
    {"max_tokens": 1200},
    {"seed": 3, "temperature": 0.9, "response_format": schema_of(NUMBERS), "max_tokens": 500},
]


@in_one_test("kind", GOING_ON)
def test_a_stream_goes_on_without_a_seam_when_others_come(
    kind: dict[str, Any], client: openai.OpenAI
) -> None:
    """The text that it has alone, up to a stop word; a seed and a grammar go on where they were."""
    alone, expected = answers(client, range(1, 4)), said(list(ask(client, 0, stream=True, **kind)))
    if expected[1] == "length":
        kind = kind | {"stop": [expected[0][-9:]]}
        expected = said(list(ask(client, 0, stream=True, **kind)))
    assert expected[1] == "stop"
    with ThreadPoolExecutor(3) as pool:
        stream = ask(client, 0, stream=True, **kind)
        chunks = [next(stream) for _ in range(2)]
        others = [pool.submit(ask, client, i) for i in (1, 2, 3)]
        chunks += list(stream)
        assert [answer(other.result()) for other in others] == alone
    assert said(chunks) == expected
    assert chunks[-1].speculation["batched"] is True


def test_clients_that_hang_up_leave_the_others_alone(client: openai.OpenAI) -> None:
    """In the middle of a stream, and before its first token."""
    expected = answers(client, range(4))
    with ThreadPoolExecutor(8) as pool:
        streams = [ask(client, 10 + i, stream=True, max_tokens=2000) for i in range(3)]
        others = [pool.submit(ask, client, i) for i in range(4)]
        for i, stream in enumerate(streams):
            for _ in range(i):
                next(stream)
            stream.close()
        assert [answer(other.result()) for other in others] == expected


VICTIM = "! this one fails in the middle of what the others write"  # behind a digit
NUM_READ = len(make_tokenizer().encode(f"0{VICTIM}").ids)


def always(*args: Any) -> bool:
    return True


def after(number: int, holds: Callable[..., bool] = always) -> Callable[..., bool]:
    """From so many calls on, of those for which something holds."""
    calls = iter(range(10**9))
    return lambda *args: holds(*args) and next(calls) >= number


FAULTS: dict[str, tuple[type, str, Callable[..., bool]]] = {
    "admitted: its drafter is checked": (NGramDrafter, "check", always),
    "admitted: its drafter begins": (NGramDrafter, "begin", always),
    "admitted: its prompt is read": (
        PromptReader,
        "read",
        lambda reading, *args: len(reading.prompt) == NUM_READ,
    ),
    "admitted: its caches join the others": (
        SlotCache,
        "add_row",  # the first layer has the row already
        after(1, lambda rows, cache, *args: cache.offset + 1 == NUM_READ),
    ),
    "drafted for": (NGramSession, "propose", after(3)),
    "told what was kept": (NGramSession, "observe", after(3)),
    "kept to its grammar": (GrammarProcessor, "__call__", after(3)),
    "ended: its caches are taken out": (
        BatchCaches,
        "extract",
        lambda caches, row, like: caches.ends[row] == NUM_READ + 19,
    ),
    "ended: its drafter closes": (NGramSession, "close", always),
    "ended: mlx-lm is told": (
        SpeculatingBatch,
        "_said",
        lambda batch, served, row: row.finish_reason and len(served.text.prompt) == NUM_READ,
    ),
}
"""A method that raises where a condition on its arguments holds."""

PLAINLY: dict[str, Any] = {"extra_body": {"drafter": "none"}, "max_tokens": 300}


@pytest.fixture(scope="module")
def undrafted(client: openai.OpenAI) -> list[Any]:
    return answers(client, range(2), **PLAINLY)


@pytest.mark.parametrize(
    "fault",
    cases(FAULTS, "admitted: its prompt is read", "drafted for", "ended: its caches are taken out"),
)
def test_a_fault_in_a_row_is_told_to_its_client_alone(
    fault: str, client: openai.OpenAI, undrafted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is admitted, drafted for or ended: 500 for the one, their texts for the others."""
    prompt = f"{list(FAULTS).index(fault)}{VICTIM}"  # that no cache holds
    body: dict[str, Any] = {"drafter": "ngram"}
    if "grammar" in fault:
        body["response_format"] = JSON_SCHEMA
    kind, name, holds = FAULTS[fault]
    method = getattr(kind, name, lambda *args: None)

    def failing(self: Any, *args: Any) -> Any:
        if holds(self, *args):
            raise RuntimeError("a fault was put here")
        return method(self, *args)

    monkeypatch.setattr(kind, name, failing, raising=False)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(ask, client, i, **PLAINLY) for i in range(2)]
        first = ask(client, 40, stream=True, **PLAINLY | {"max_tokens": 1200})  # goes on meanwhile
        next(first)
        with pytest.raises(openai.InternalServerError, match="a fault was put here"):
            complete(client, prompt, max_tokens=20, extra_body=body)
        assert said(list(first))[1] == "length"
        assert [answer(other.result()) for other in others] == undrafted


def test_a_prompt_of_one_token_that_others_begin_with_leaves_them_alone(
    client: openai.OpenAI,
) -> None:
    """mlx-lm trims their caches to nothing for it, which still have keys."""
    expected = answers(client, range(3))
    alone = complete(client, "q", max_tokens=20, extra_body={"drafter": "none"})
    complete(client, "q" + TEXT, max_tokens=20)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(ask, client, i) for i in range(3)]
        short = [complete(client, "q", max_tokens=20) for _ in range(2)]
        assert [answer(other.result()) for other in others] == expected
    assert {text_of(reply) for reply in short} == {text_of(alone)}


def test_a_batch_that_fails_is_told_to_all_and_the_next_is_served(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's thread goes on."""
    expected = answers(client, range(3))

    def failing(self: SharedPasses, rounds: Any) -> Any:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(SharedPasses, "launch", failing)
        replies = [pool.submit(ask, client, i, extra_body={"drafter": "none"}) for i in range(3)]
        errors = [reply.exception() for reply in replies]
    assert any("out of order" in str(error) for error in errors)
    assert [answer(reply) for reply in together(client, [{}] * 3)] == expected


def test_the_prompt_of_several_choices_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first that reads it; the other rows get copies of its caches."""
    fed: list[int] = []
    call = qwen2.Model.__call__

    def counted(self: Any, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if ids.shape[0] == 1:  # of one text
            fed.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    with serving("--model", str(folder), "--draft-length", "2") as client:
        ask(client, 30)
        together(client, [{}] * 2)  # measures the model
        monkeypatch.setattr(qwen2.Model, "__call__", counted)
        reply = complete(client, f"!{TEXT * 8}", max_tokens=2, n=4, temperature=1.0)
    assert len({choice.text for choice in reply.choices}) > 1
    assert sum(size for size in fed if size > 8) <= 1.1 * reply.usage.prompt_tokens


@in_one_test("how", ["the automatic length", "a draft model", "no rows"])
def test_texts_are_those_alone_however_they_are_drafted_for(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` measures, and drafts where that pays for all; a draft model has caches for each row,
    kept for the next turn; a model without rows, which is said once, is batched by mlx-lm, a seed
    and a grammar served one after the other.
    """
    kinds = [MIXED[i] | {"max_tokens": 60} for i in (0, 0, 3, 5)]
    flags = [] if how == "the automatic length" else ["--draft-length", "2"]
    if how == "a draft model":  # whose rejected drafts may change what a seed draws
        kinds = kinds[:2] * 2
        draft = write_model_folder(folder.parent / "draft", "llama", seed=3)
        flags += ["--draft-model", str(draft)]
    with monkeypatch.context() as patch, serving("--model", str(folder), *flags) as client:
        if how == "no rows":
            patch.setattr(batch, "can_hold_rows", lambda model: False)
        alone = [answer(ask(client, i, **kind)) for i, kind in enumerate(kinds)]
        for _ in range(2):
            replies = together(client, kinds)
            assert [answer(reply) for reply in replies] == alone
            accounts = [reply.usage.speculation for reply in replies]
            assert any(account["batched"] for account in accounts)
            assert how != "a draft model" or all(account["drafted"] > 0 for account in accounts)
    said_once = sum("cannot be rows of one batch" in message for message in caplog.messages)
    assert said_once == (how == "no rows")
    caplog.clear()


def put_in(
    batch: SpeculatingBatch, prompt: list[int], max_tokens: int, ends: Sequence[int] = ()
) -> int:
    """A greedy request without a drafter; `ends` of the prompt's segments but for the last."""
    segments = [prompt[a:b] for a, b in pairwise([0, *ends, len(prompt)])]
    arguments: list[Any] = [segments, max_tokens, None, [], sd.Sampling(), [], StopSequences()]
    (uid,) = batch.insert_segments(*([argument] for argument in arguments))
    return int(uid)


def plain_batch(step_size: int) -> SpeculatingBatch:
    def incoming() -> Any:
        channel = Channel(Queue())
        requested = Requested(None, "none", channel=channel)
        return SimpleNamespace(speculation=requested, top_logprobs=0, seed=None)

    stream = mx.default_stream(mx.default_device())
    finish = lambda requested, text: text  # noqa: E731
    target = tiny.build("qwen2")
    return SpeculatingBatch(target, incoming, finish, None, stream, prefill_step_size=step_size)


def test_prompts_are_read_between_the_rounds_of_the_others() -> None:
    """A part at a time, and once for two that are the same; caches are had where segments end."""
    rows = plain_batch(step_size=8)
    first = put_in(rows, [5, 17, 99], 60)
    prompt = [*range(1, 60)]
    tokens: dict[int, list[int]] = {}
    waiting: list[int] = []
    parts: list[tuple[int, int]] = []
    held: list[list[int]] = []
    for progress, new in iter(rows.next, ([], [])):
        for token in new:
            tokens.setdefault(token.uid, []).append(token.token)
        if not waiting and len(tokens.get(first, ())) == 3:
            waiting = [put_in(rows, prompt, 9, ends=[20]) for _ in range(2)]
        for part in progress:
            if part.uid in waiting:
                parts.append((part.progress[0], len(tokens[first])))
            if part.end_of_segment and not part.end_of_prompt:
                held += [tokens for _, tokens in rows.extract_cache([part.uid]).values()]
    expected = [token.token for token in sd.speculate(rows.model, prompt, max_tokens=9)]
    assert [tokens[uid] for uid in waiting] == [expected, expected]
    assert len(tokens[first]) == 60
    assert held[-2:] == [prompt[:20], prompt[:-1]]
    assert max(after - before for (before, _), (after, _) in pairwise(parts)) <= 8
    written = [said for _, said in parts]
    assert written[-1] - written[0] >= 58 // 8, "a token of the first between any two parts"
    assert rows.prompt_cache_nbytes == 0


def test_a_request_taken_out_while_its_prompt_is_read_leaves_the_other_reader() -> None:
    """The second of two with the same prompt reads on by itself."""
    rows = plain_batch(step_size=4)
    prompt = [*range(1, 30)]
    uids = [put_in(rows, prompt, 5) for _ in range(2)]
    rows.next()
    rows.remove(uids[:1])
    tokens = [token for _, new in iter(rows.next, ([], [])) for token in new]
    assert [token.uid for token in tokens] == uids[1:] * 5
    assert tokens[-1].all_tokens[: len(prompt)] == prompt
    rows.close()
