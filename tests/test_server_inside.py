"""The server in this process, so that its models can be counted and its memory measured."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from mlx_lm.models import llama

import specdec_mlx as sd
import tiny
from selection import FULL
from serving import PROMPT, chat, complete, serving, text_of
from specdec_mlx.mlx_lm_plugin.conversation import Kept, continued, keeping_caches
from specdec_mlx.mlx_lm_plugin.heads import ConversationCache
from tiny_model_folder import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft model of another architecture."""
    root = tmp_path_factory.mktemp("models")
    write_model_folder(root / "draft", "llama", seed=3)
    return write_model_folder(root / "target", max_position_embeddings=8192)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of positions with each pass of a llama, the draft model here."""
    positions: list[int] = []
    call = llama.Model.__call__

    def counted(self: Any, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        positions.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(llama.Model, "__call__", counted)
    return positions


@pytest.mark.parametrize("drafters", [[], ["--drafter", "prompt-lookup:min_ngram=8,max_ngram=8"]])
def test_the_draft_model_reads_a_conversation_once(
    drafters: list[str], folder: Path, fed: list[int]
) -> None:
    """Later turns feed it what is new, and little more after a rejection, as its window is full."""
    flags = ["--model", str(folder), "--draft-model", str(folder.parent / "draft"), *drafters]
    named = [*(["prompt-lookup"] if drafters else []), "model"]
    with serving(*flags, "--draft-length", "2", "--prefill-step-size", "64") as client:
        messages: list[dict[str, str]] = []
        lengths: list[int] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"{turn} {PROMPT} " * 3})
            plain = chat(client, messages, max_tokens=16, extra_body={"drafter": "none"})
            fed.clear()
            reply = chat(client, messages, max_tokens=16, extra_body={"drafter": named})
            assert text_of(reply) == text_of(plain)
            assert reply.usage.speculation["drafted"] > 0
            new = reply.usage.total_tokens - (lengths[-1] if lengths else 0)
            lengths.append(reply.usage.total_tokens)
            assert sum(fed) < new + 4 * 16, (turn, sum(fed), new)
            messages.append({"role": "assistant", "content": text_of(plain)})
        assert lengths[-1] > 3 * new


def test_kept_caches_are_those_of_a_model_that_read_it_all() -> None:
    """Turn by turn the drafts are the same as without a store, after rewinds of all kinds."""
    model, small = tiny.build("qwen2"), tiny.build("qwen2", seed=4)
    store = ConversationCache(10)
    plain = sd.FirstOf(sd.PromptLookupDrafter(8, 8), sd.ModelDrafter(small))
    kept = keeping_caches(plain, store)
    assert isinstance(kept, sd.FirstOf)
    assert isinstance(kept.drafters[1], Kept)
    text = [5, 17, 99, 3]
    for turn in range(5):
        counts = []
        for drafter in (kept, plain):
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
    prompt = [5, 17, 99, 3]
    list(sd.speculate(model, prompt, drafter, max_tokens=11, draft_length=3))
    caches, rest = store.fetch_nearest_cache(drafter.place, [*prompt, 1])
    assert caches is None or len(rest) >= 1
    _, held = store._lru._lrus["assistant"][0]
    fresh = small.make_cache()
    small(mx.array([held]), cache=fresh)
    stored = store._trie.get(drafter.place, held).prompt_cache
    for one, other in zip(fresh, stored, strict=True):
        for ours, theirs in zip(one.cache, other.cache, strict=True):
            assert mx.allclose(ours, theirs, atol=1e-5).item()


@FULL
def test_memory_is_steady_over_200_requests(folder: Path) -> None:
    """With a draft model, streams, turns and clients that come back: nothing is kept for ever."""
    process = psutil.Process()
    flags = ["--model", str(folder), "--draft-model", str(folder.parent / "draft")]
    with serving(*flags, "--drafter", "prompt-lookup") as client:

        def ask(i: int) -> None:
            messages = [{"role": "user", "content": f"{i % 25} {PROMPT}"}]
            if i % 4 == 0:
                list(complete(client, f"{i} {PROMPT}", max_tokens=6, stream=True))
            else:
                body = {"drafter": ["prompt-lookup", "model", "ngram"][i % 3]}
                chat(client, messages, max_tokens=16, extra_body=body)

        for i in range(60):
            ask(i)
        mx.clear_cache()
        resident, active = process.memory_info().rss, mx.get_active_memory()
        for i in range(60, 260):
            ask(i)
        mx.clear_cache()
        assert mx.get_active_memory() - active < 2e6
        assert process.memory_info().rss - resident < 25e6


def test_progress_keeps_the_connection_alive(folder: Path) -> None:
    """A comment for each part of a long prompt, up to the whole of it, before the first token."""
    with serving("--model", str(folder), "--prefill-step-size", "16") as client:
        port = int(client.base_url.port or 0)
        body = json.dumps({"prompt": PROMPT * 8, "max_tokens": 3, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall((head + body).encode())
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(4096)
    lines = received.decode().splitlines()
    progress = [line.split()[-1].split("/") for line in lines if line.startswith(": keepalive")]
    done = [int(part) for part, _ in progress]
    total = int(progress[0][1])
    assert done == sorted(done)
    assert done[-1] == total > 100
    assert len(done) > total / 16
    first_data = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert all(line.startswith("data: ") or not line for line in lines[first_data:])


def test_the_default_drafter_is_still_the_best_of_several_in_later_turns() -> None:
    """Whatever changes the drafters in a combination leaves the combination what it is."""
    best = sd.BestOf(sd.SuffixDrafter(), sd.NGramDrafter())
    for changed in (continued(best, [1, 2]), keeping_caches(best, ConversationCache())):
        assert type(changed) is sd.BestOf
        assert len(changed.drafters) == 2
