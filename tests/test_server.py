"""`specdec-mlx server` beside mlx-lm's texts: hang-ups, signals, draft models, heads, memory."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import mlx.core as mx
import mlx_lm
import openai
import psutil
import pytest
from mlx_lm.generate import make_stop_sequences
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.server import GenerationContext, Response
from mlx_lm.utils import load

import heads
import specdec_mlx as sd
import tiny
from on_ranks import free_ports
from selection import FULL, cases, in_one_test
from serving import (
    MESSAGES,
    PROMPT,
    chat,
    complete,
    post,
    posted,
    read_events,
    said,
    serving,
    text_of,
    until,
)
from specdec_mlx.contracts import DraftContext, Step, Stepwise
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.heads.one_pass import PardDrafter
from specdec_mlx.mlx_lm_plugin.conversation import Continued, Kept, continued, keeping_caches
from specdec_mlx.mlx_lm_plugin.heads import ConversationCache
from specdec_mlx.mlx_lm_plugin.requests import Channel
from tiny_model_folder import write_model_folder

ENDLESS = 800_000  # tokens that nobody waits for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return write_model_folder(root / "model", max_position_embeddings=2**20)


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Any, Any]:
    """The model and tokenizer here."""
    return mlx_lm.load(str(folder))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    flags = ("--draft-length", "4", "--stats", "--prefill-step-size", "256")
    with serving("--model", str(folder), *flags) as running:
        yield running


def plain(pair: tuple[Any, Any], prompt: str | list[Any], max_tokens: int, **options: Any) -> str:
    """mlx-lm's own text after a prompt or messages."""
    if not isinstance(prompt, str):
        prompt = pair[1].apply_chat_template(prompt, add_generation_prompt=True)
    return str(mlx_lm.generate(*pair, prompt, max_tokens=max_tokens, **options))


def test_a_completion_is_mlx_lms_text_in_fewer_passes(
    client: openai.OpenAI, pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The account is in `usage`, and with --stats in the log; of a stream, in its last chunk, and
    in its usage, if that is asked for. The end of a cache is no end.
    """
    caplog.set_level(logging.INFO)
    reply = complete(client)
    assert text_of(reply) == plain(pair, PROMPT, 60)
    account = reply.usage.speculation
    assert (account["drafter"], account["batched"]) == ("auto", False)
    assert account["emitted"] == reply.usage.completion_tokens == 60
    assert account["target_passes"] + account["accepted"] == 60 + account["cut"]
    assert account["accepted"] > 0
    until(lambda: "Speculation: 60 tokens in" in caplog.text)
    chunks = list(complete(client, stream=True))
    with_usage = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert said(chunks)[0] == said(with_usage)[0] == text_of(reply)
    assert chunks[-1].speculation["emitted"] == 60
    assert with_usage[-1].usage.speculation["emitted"] == 60
    longer = PROMPT + text_of(reply)
    for _ in range(2):  # at least one token is left to feed
        assert text_of(complete(client, longer, max_tokens=20)) == plain(pair, longer, 20)


def test_every_turn_is_that_of_a_fresh_run_of_the_conversation(
    client: openai.OpenAI, pair: tuple[Any, Any]
) -> None:
    """Conversations by turns, with a penalty and without; later turns read from the cache."""
    conversations: dict[float, list[Any]] = {0.0: [], 1.5: []}
    for turn in ("the cat in the hat", "another hat", "the end in the hat"):
        for penalty, messages in conversations.items():
            messages.append({"role": "user", "content": f"{turn} {penalty}"})
            reply = chat(client, messages, extra_body={"repetition_penalty": penalty})
            processors = make_logits_processors(repetition_penalty=penalty or None)
            assert text_of(reply) == plain(pair, messages, 60, logits_processors=processors)
            assert reply.usage.speculation["batched"] is False
            if len(messages) > 1:
                assert reply.usage.prompt_tokens_details.cached_tokens > 40
            messages.append({"role": "assistant", "content": text_of(reply)})


def test_requests_may_choose_drafter_length_and_rule(folder: Path) -> None:
    """Each is seen in the account, also of a draft model after the drafters given; not in texts."""
    flags = ("--draft-model", str(folder), "--drafter", "prompt-lookup:min_ngram=8,max_ngram=8")
    with serving("--model", str(folder), *flags, "--draft-length", "3") as client:
        expected = text_of(complete(client))

        def account(**body: Any) -> dict[str, Any]:
            reply = complete(client, extra_body=body)
            assert text_of(reply) == expected
            return dict(reply.usage.speculation)

        assert account()["drafter"] == "prompt-lookup+model"
        assert account(drafter="none").get("drafted", 0) == 0
        assert len(account(drafter="ngram", draft_length=2)["acceptance_by_position"]) == 2
        several = account(drafter=["ngram", "prompt-lookup"], draft_length=6)
        assert several["drafter"] == "ngram+prompt-lookup"
        assert account(drafter="ngram", num_draft_tokens=1)["drafted"] > 0
        longest = account(drafter="model", draft_length=100_000)["acceptance_by_position"]
        assert 4 < len(longest) <= 64
        alone = account(drafter="model")
        assert alone["accepted"] == alone["drafted"] == 45

        for rule, keeps_all in (("rejection", True), ("match", False)):
            body = {"drafter": "model", "rule": rule}
            drawn = complete(client, temperature=1, seed=5, extra_body=body).usage.speculation
            assert (drawn["accepted"] == drawn["drafted"] > 0) is keeps_all


@in_one_test("body", [{"stream": True}, {}, {"n": 3, "prompt": PROMPT * 100}])
def test_a_client_that_hangs_up_leaves_nothing_behind(
    body: dict[str, Any],
    client: openai.OpenAI,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its generation ends, so that the next request is alone; and no traceback.

    In a stream that has become a row, before a reply, and while the prompt of several choices is
    read.
    """
    caplog.set_level(logging.INFO)
    caplog.clear()
    with posted(client, max_tokens=ENDLESS, **body) as connection:
        if "stream" in body:
            read_events(connection, 3)
            assert complete(client, "beside", max_tokens=5).usage.speculation["batched"]
        else:
            until(lambda: "Prompt processing progress" in caplog.text)
    assert complete(client, "and now", max_tokens=5).usage.completion_tokens == 5
    then = {"prompt": "and then", "max_tokens": 5}
    until(lambda: not complete(client, **then).usage.speculation["batched"])
    until(lambda: "Client hung up" in caplog.text)
    assert "Traceback" not in caplog.text + capsys.readouterr().err


@contextmanager
def process(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Any, Path]]:
    """A server as a process, a client of it, and its log."""
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", folder.parent / f"{port}.log"
    command = [sys.executable, "-m", "specdec_mlx", "server", "--model", str(folder)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--port", f"{port}", *flags], stdout=output, stderr=output
        )

    def is_ready() -> bool:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    try:
        until(is_ready)
        yield server, openai.OpenAI(base_url=url, api_key="none"), log
    finally:
        server.kill()
        server.wait()


MANY = {"max_tokens": 100_000, "stream": True}

STATES: dict[str, list[dict[str, Any]]] = {
    "idle": [],
    "lone": [MANY],
    "batched": [MANY, MANY | {"prompt": "another"}],
    "batched and interrupted": [MANY, MANY | {"prompt": "another"}],
    "the prompt of one is read": [{"prompt": "a" * 100_000}],
    "prompts are read": [{"prompt": "a" * 100_000}, {"prompt": "b" * 99_000}],
}


@pytest.mark.parametrize("state", cases(STATES, "batched"))
def test_a_signal_ends_the_server_whatever_it_does(state: str, folder: Path) -> None:
    """With exit code 0; the memory has what was written by then."""
    requests = STATES[state]
    file = folder.parent / f"{state}.memory"
    flags = ("--memory", str(file), "--prefill-step-size", "64", "--request-models", "given")
    with process(folder, *flags) as (server, client, log):
        connections = [posted(client, **body) for body in requests]
        until(lambda: not requests or re.search(r"progress: \d+/\d+", log.read_text()))
        for connection, body in zip(connections, requests, strict=True):
            if "stream" in body:
                read_events(connection, 30)
        server.send_signal(signal.SIGINT if "interrupted" in state else signal.SIGTERM)
        assert server.wait(timeout=240) == 0
        for connection in connections:
            connection.close()
    assert "Traceback" not in log.read_text()
    if MANY in requests:
        assert len(sd.Memory.load(file)) > 20


def context(prompt: list[int]) -> GenerationContext:
    return GenerationContext(False, False, lambda *a: {}, None, "normal", prompt)  # type: ignore[arg-type]


def test_a_channel_hides_the_seam(pair: tuple[Any, Any]) -> None:
    """Text, stop sequences and the client's stop reach across it; its end is not the end."""
    tokenizer, queue = pair[1], Queue[Any]()
    tokens = tokenizer.encode("één the cat")  # each é is two tokens
    channel, later = Channel(queue), context([1, *tokens[:3]])

    def speak(part: list[int]) -> None:
        detokenizer = tokenizer.detokenizer
        for token in part:
            detokenizer.add_token(token)
            channel.put(Response(detokenizer.last_segment, token, 0.0, None, ()))

    for item in (context([1]), (1, 2)):
        channel.put(item)
    speak(tokens[:3])
    channel.pausing = True
    channel.put(None)
    assert channel.alive
    channel.resume(tokenizer.detokenizer, make_stop_sequences(tokenizer, ["én the"]).matcher())
    for item in (later, (3, 4)):
        channel.put(item)
    speak(tokens[3:])
    first, progress, *responses, end = [queue.get_nowait() for _ in range(queue.qsize())]
    assert (first.prompt, progress, end) == ([1], (1, 2), None)
    assert "".join(r.text for r in responses if r.finish_reason is None) == "één"
    assert responses[-1].finish_reason == "stop"
    assert later._should_stop
    assert not channel.alive


# Draft models and trained heads, and what is kept between requests


@pytest.fixture(scope="module")
def folders(folder: Path) -> dict[str, str]:
    """The target, a draft model of another architecture, a head, and a head for another width."""
    root = folder.parent
    made = {
        "target": folder,
        "draft": write_model_folder(root / "draft", "llama", seed=3),
        "head": heads.write_eagle3(root / "head", load(str(folder))[0]),
        "wide": heads.write_eagle3(root / "wide", heads.target(width=128, vocab=300, layers=4)),
    }
    return {name: str(folder) for name, folder in made.items()}


@pytest.fixture(scope="module")
def with_head(folders: dict[str, str]) -> Iterator[openai.OpenAI]:
    flags = ("--model", folders["target"], "--draft-model", folders["head"], "--draft-length", "3")
    with serving(*flags) as running:
        yield running


def briefly(client: openai.OpenAI, messages: list[Any] = MESSAGES, **body: Any) -> Any:
    return chat(client, messages, max_tokens=24, extra_body=body)


def refused(client: openai.OpenAI, **more: Any) -> str:
    """The answer to a request that is the client's error."""
    body = {"messages": MESSAGES, "max_tokens": 2, **more}
    status, answer = post(client, "chat/completions", body)
    assert 400 <= status < 500
    return answer


def test_a_head_drafts_and_the_text_is_plain_decodings(with_head: openai.OpenAI) -> None:
    """Also at a temperature, where a seed has one text if no rule is named; and of a later turn, on
    the caches that were kept of the earlier one, of which the head has seen nothing; and of
    several at once.
    """
    first = {"role": "assistant", "content": text_of(briefly(with_head))}
    turns = [*MESSAGES, first, {"role": "user", "content": "and then the hat"}]
    drawn = {"temperature": 1.0, "seed": 5}
    for messages, body in ((MESSAGES, {}), (MESSAGES, drawn), (turns, {})):
        plain = briefly(with_head, messages, drafter="none", **body)
        for names, name in (("model", "model"), (["ngram", "model"], "ngram+model")):
            reply = briefly(with_head, messages, drafter=names, **body)
            assert text_of(reply) == text_of(plain)
            assert reply.usage.speculation["drafter"] == name
            assert reply.usage.speculation["drafted"] > 0
    asked = [[{"role": "user", "content": word * 3}] for word in ("the hat ", "a rain ", "in ")]

    def long(messages: list[Any], drafter: str) -> Any:
        return chat(with_head, messages, max_tokens=150, extra_body={"drafter": drafter})

    plain = [text_of(long(messages, "none")) for messages in asked]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(long, asked, ["model"] * 3))
    assert list(map(text_of, replies)) == plain
    accounts = [reply.usage.speculation for reply in replies]
    assert sum(account["drafted"] for account in accounts if account["batched"]) > 100


def test_a_request_may_name_a_head_as_its_draft_model(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """Of a server that has none; one that does not fit is refused, and so are torch's files.

    One that the server was started with is refused when it is asked; without it the server goes on.
    """
    with serving("--model", folders["target"], "--draft-length", "3") as client:
        plain, reply = briefly(client, drafter="none"), briefly(client, draft_model=folders["head"])
        assert text_of(reply) == text_of(plain)
        assert reply.usage.speculation["drafted"] > 0
        assert "was trained for a target" in refused(client, draft_model=folders["wide"])
        assert text_of(briefly(client)) == text_of(plain)
        # torch's files are not read on request, least of all one that points far out of its bytes
        (tmp_path / "config.json").write_bytes(Path(folders["head"], "config.json").read_bytes())
        heads.torch_file(tmp_path / "pytorch_model.bin", shape=4, offset=10**12)
        answer = refused(client, draft_model=str(tmp_path))
        assert "torch.save wrote is not read here. Start the server with it" in answer
        assert briefly(client).choices
    with serving("--model", folders["target"], "--draft-model", folders["wide"]) as client:
        assert "was trained for a target" in refused(client)
        assert briefly(client, drafter="ngram").choices


def test_a_draft_model_whose_caches_are_kept_still_stops_in_the_middle() -> None:
    """By the draft length's decision."""
    model, where = tiny.build("qwen2"), DraftContext(vocab_size=128)
    for drafter in (sd.ModelDrafter(model), PardDrafter(model, mask_token=127)):
        session = keeping_caches(drafter, LRUPromptCache()).begin([5, 17, 99, 3], where)
        assert isinstance(session, Stepwise)
        assert len(session.propose_while(4, lambda evidence: Step.STOP_AFTER)) == 1


def test_combinations_stay_what_they_are_in_later_turns(folders: dict[str, str]) -> None:
    """And a head, whose rows begin with the prompt, is not shown the turns before."""
    head = load_head(folders["head"], load(folders["target"])[0])
    look_up = sd.NGramDrafter()
    for kind in (sd.FirstOf, sd.BestOf):
        both = continued(kind(look_up, head), [1, 2])
        assert type(both) is kind
        assert list(both.drafters) == [Continued(look_up, [1, 2]), head]
        assert type(keeping_caches(both, ConversationCache())) is kind


def test_the_draft_model_reads_a_conversation_once(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later turns feed it what is new, and little more after a rejection, as its window is full."""
    fed: list[int] = []
    call = llama.Model.__call__

    def counted(self: Any, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        fed.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(llama.Model, "__call__", counted)
    models = ("--model", folders["target"], "--draft-model", folders["draft"])
    with serving(*models, "--draft-length", "2", "--prefill-step-size", "64") as client:
        messages: list[dict[str, str]] = []
        total = 0
        for turn in range(4):
            messages.append({"role": "user", "content": f"{turn} {PROMPT} " * 3})
            plain = chat(client, messages, max_tokens=16, extra_body={"drafter": "none"})
            fed.clear()
            reply = chat(client, messages, max_tokens=16)
            assert text_of(reply) == text_of(plain)
            assert reply.usage.speculation["drafted"] > 0
            new, total = reply.usage.total_tokens - total, reply.usage.total_tokens
            assert sum(fed) < new + 4 * 16, (turn, sum(fed), new)
            messages.append({"role": "assistant", "content": text_of(plain)})
        assert total > 3 * new


def test_kept_caches_are_those_of_a_model_that_read_it_all() -> None:
    """Turn by turn the drafts are the same as without a store, after rewinds of all kinds."""
    model, small = tiny.build("qwen2"), tiny.build("qwen2", seed=4)
    store = ConversationCache(10)
    plain = sd.FirstOf(sd.PromptLookupDrafter(8, 8), sd.ModelDrafter(small))
    text = [5, 17, 99, 3]
    for turn in range(5):
        counts = []
        for drafter in (keeping_caches(plain, store), plain):
            got = list(sd.speculate(model, text, drafter, max_tokens=9 + turn, draft_length=3))
            counts.append((got[-1].stats.drafted, got[-1].stats.accepted))
        assert counts[0] == counts[1]
        text = [*text, *(token.token for token in got), turn + 1, 7]
    assert len(store) == 1


def test_a_draft_model_without_a_way_back_is_not_stored_wrongly() -> None:
    """Recurrent caches go back to a mark at most: what is stored is what they hold."""
    model, small = tiny.build("qwen2"), tiny.build("mamba")
    store = ConversationCache(10)
    drafter = Kept(sd.ModelDrafter(small), store)
    list(sd.speculate(model, [5, 17, 99, 3], drafter, max_tokens=11, draft_length=3))
    _, held = store._lru._lrus["assistant"][0]
    fresh = small.make_cache()
    small(mx.array([held]), cache=fresh)
    stored = store._trie.get(drafter.place, held).prompt_cache
    for one, other in zip(fresh, stored, strict=True):
        for ours, theirs in zip(one.cache, other.cache, strict=True):
            assert mx.allclose(ours, theirs, atol=1e-5).item()


@FULL
def test_memory_is_steady_over_200_requests(folders: dict[str, str]) -> None:
    """With a draft model, streams, turns and clients that come back: nothing is kept for ever."""
    process = psutil.Process()
    flags = ("--model", folders["target"], "--draft-model", folders["draft"])
    with serving(*flags, "--drafter", "prompt-lookup") as client:

        def used_after(numbers: range) -> tuple[int, int]:
            """Bytes that are active, and resident, after requests."""
            for i in numbers:
                messages = [{"role": "user", "content": f"{i % 25} {PROMPT}"}]
                body = {"drafter": ["prompt-lookup", "model", "ngram"][i % 3]}
                if i % 4 == 0:
                    list(complete(client, f"{i} {PROMPT}", max_tokens=6, stream=True))
                else:
                    chat(client, messages, max_tokens=16, extra_body=body)
            mx.clear_cache()
            return mx.get_active_memory(), process.memory_info().rss

        active, resident = used_after(range(60))
        active_then, resident_then = used_after(range(60, 260))
        assert active_then - active < 2e6
        assert resident_then - resident < 25e6


def test_progress_keeps_the_connection_alive(folders: dict[str, str]) -> None:
    """A comment for each part of a long prompt, up to the whole of it, before the first token."""
    with (
        serving("--model", folders["target"], "--prefill-step-size", "16") as client,
        posted(client, prompt=PROMPT * 8, max_tokens=3, stream=True) as connection,
    ):
        before, *events = read_events(connection, 1).split("data: ")
    assert events
    progress = re.findall(r"^: keepalive (\d+)/(\d+)", before, re.MULTILINE)
    done, total = [int(part) for part, _ in progress], int(progress[0][1])
    assert done == sorted(done)
    assert done[-1] == total > 100
    assert len(done) > total / 16
