"""Draft models and trained heads of the server, its memory, and what it keeps between requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import psutil
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import load

import heads
import specdec_mlx as sd
import tiny
from selection import FULL
from serving import MESSAGES, PROMPT, chat, complete, post, posted, read_events, serving, text_of
from specdec_mlx.contracts import DraftContext, Step, Stepwise
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.heads.one_pass import PardDrafter
from specdec_mlx.mlx_lm_plugin.conversation import Continued, Kept, continued, keeping_caches
from specdec_mlx.mlx_lm_plugin.heads import ConversationCache
from tiny_model_folder import write_model_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a draft model of another architecture, a head, and a head for another width."""
    root = tmp_path_factory.mktemp("models")
    target = write_model_folder(root / "target", max_position_embeddings=8192)
    made = {
        "target": target,
        "draft": write_model_folder(root / "draft", "llama", seed=3),
        "head": heads.write_eagle3(root / "head", load(str(target))[0]),
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
    """Also at a temperature, under the rule that has one text for a seed; and of a later turn, on
    the caches that were kept of the earlier one, of which the head has seen nothing.
    """
    first = {"role": "assistant", "content": text_of(briefly(with_head))}
    turns = [*MESSAGES, first, {"role": "user", "content": "and then the hat"}]
    drawn = {"rule": "coupled", "temperature": 1.0, "seed": 5}
    for messages, body in ((MESSAGES, {}), (MESSAGES, drawn), (turns, {})):
        plain = briefly(with_head, messages, drafter="none", **body)
        for names, name in (("model", "model"), (["ngram", "model"], "ngram+model")):
            reply = briefly(with_head, messages, drafter=names, **body)
            assert text_of(reply) == text_of(plain)
            assert reply.usage.speculation["drafter"] == name
            assert reply.usage.speculation["drafted"] > 0


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
    model = tiny.build("qwen2")
    context = DraftContext(vocab_size=128)
    for drafter in (sd.ModelDrafter(model), PardDrafter(model, mask_token=127)):
        session = keeping_caches(drafter, LRUPromptCache()).begin([5, 17, 99, 3], context)
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
    flags = ("--drafter", "prompt-lookup:min_ngram=8,max_ngram=8", "--draft-length", "2")
    models = ("--model", folders["target"], "--draft-model", folders["draft"])
    with serving(*models, *flags, "--prefill-step-size", "64") as client:
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


def test_progress_keeps_the_connection_alive(folders: dict[str, str]) -> None:
    """A comment for each part of a long prompt, up to the whole of it, before the first token."""
    with (
        serving("--model", folders["target"], "--prefill-step-size", "16") as client,
        posted(client, prompt=PROMPT * 8, max_tokens=3, stream=True) as connection,
    ):
        before, *events = read_events(connection, 1).split("data: ")
    assert events
    lines = [line for line in before.splitlines() if line.startswith(": keepalive")]
    progress = [line.split()[-1].split("/") for line in lines]
    done, total = [int(part) for part, _ in progress], int(progress[0][1])
    assert done == sorted(done)
    assert done[-1] == total > 100
    assert len(done) > total / 16
