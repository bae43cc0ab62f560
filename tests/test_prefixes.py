"""What the server has read it does not read again: after going back, and after it was killed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

import tiny
from selection import cases
from serving import chat, serving, text_of
from specdec_mlx.mlx_lm_plugin.heads import ConversationCache
from specdec_mlx.mlx_lm_plugin.prefixes import stateful
from tiny_model_folder import write_model_folder

RUNS = [name for name in tiny.architecture_files() if name not in (*tiny.CANNOT_RUN, "phi3small")]
TEXT = [(7 * i * i + 3 * i) % 89 + 1 for i in range(90)]
CUTS = [0, 11, 40, 62, 63, 90]  # past the window of 16
OTHER = [5, 17, 80, 3]

built = cache(tiny.build)


def read(model: Any, caches: list[Any], tokens: list[int], cuts: list[int]) -> mx.array:
    """Feed the tokens in parts; the logits after the last part."""
    for start, end in pairwise(cuts):
        logits = model(mx.array([tokens[start:end]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return logits[0]


@pytest.mark.parametrize("name", cases(RUNS, "qwen3_next", "gemma3_text", "llama4", "mamba2"))
def test_going_back_to_a_point_is_as_if_no_more_had_been_read(name: str) -> None:
    """Logits after it are bit-equal to those of caches that read so far in the same parts. Attention
    alone goes back anywhere, and some of it rounds by the width of a pass."""
    model, store = built(name), ConversationCache(10)
    caches = make_prompt_cache(model)
    for start, end in pairwise(CUTS):
        read(model, caches, TEXT, [start, end])
        store.insert_cache("model", TEXT[:end], copy.deepcopy(caches))
    assert len(store) == 1
    tolerance = 0.0 if stateful(caches) else 1e-4
    for kept, point in ((90, 90), (89, 63), (63, 63), (62, 62), (50, 40), (12, 11), (8, 0)):
        tokens = [*TEXT[:kept], *OTHER]
        found, rest = store.fetch_nearest_cache("model", tokens)
        position = len(tokens) - len(rest)
        assert point <= position <= kept, "windows and chunks may have room to go back a bit"
        cuts = [0, *(cut for cut in CUTS if 0 < cut < position), *[position] * (position > 0)]
        expected = read(model, make_prompt_cache(model), tokens, [*cuts, len(tokens)])
        if found is not None:
            got = read(model, found, tokens, [position, len(tokens)])
            assert mx.allclose(got, expected, rtol=tolerance, atol=tolerance).item(), kept
    store.insert_cache("model", TEXT, copy.deepcopy(caches))
    assert store.nbytes == sum(c.nbytes for c in next(iter(entries(store))))


@pytest.fixture(scope="module", params=["qwen3_next", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is recurrent in part, or has windows of 16."""
    root = tmp_path_factory.mktemp("models")
    return write_model_folder(root / "model", request.param, max_position_embeddings=2**20)


SYSTEM = {"role": "system", "content": "You are the cat in the hat and say so in the other hat."}
SAID = ["in the hat", "and then the other one", "on the mat", "there and then and there"]


def asked(turns: list[str], system: Any = SYSTEM) -> list[dict[str, str]]:
    """A conversation of what a user and the model said in turn."""
    roles = ["user", "assistant"] * len(turns)
    return [system, *({"role": r, "content": t} for r, t in zip(roles, turns, strict=False))]


def cached(reply: Any) -> int:
    return int(reply.usage.prompt_tokens_details.cached_tokens)


def test_a_turn_reads_only_what_is_new_and_says_what_a_fresh_run_says(folder: Path) -> None:
    """Turn by turn; with what was said last said otherwise, as where thoughts are left out; and
    in another conversation with the same system prompt."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    turns: list[str] = []
    read_in_all = 0

    def answer(turns: list[str]) -> tuple[str, Any]:
        messages = asked(turns)
        reply = chat(client, messages, max_tokens=24, extra_body={"draft_length": 3})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert text_of(reply) == mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)
        return text_of(reply), reply

    with serving("--model", str(folder), "--prefill-step-size", "16") as client:
        for question in SAID:
            turns.append(question)
            text, reply = answer(turns)
            read_in_all += reply.usage.prompt_tokens - cached(reply) + reply.usage.completion_tokens
            turns.append(text)
        assert read_in_all <= reply.usage.total_tokens + 2 * len(SAID)
        end = reply.usage.prompt_tokens - 1
        assert cached(answer([*turns[:-1], turns[-1][::-1], "why"])[1]) == end
        assert cached(answer([*turns[:-3], turns[-3][::-1], "why"])[1]) < end
        assert cached(answer(["another one"])[1]) == len(tokenizer.encode(SYSTEM["content"])) + 3


def entries(store: ConversationCache) -> Iterator[list[Any]]:
    """What the store holds, a list of caches for each conversation."""
    for model, tokens in store._lru._lrus["assistant"]:
        yield store._trie.get(model, tokens).prompt_cache
