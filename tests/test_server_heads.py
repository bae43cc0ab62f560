"""The server with a trained head: by its flag, and by the request's own words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import load

import heads
import specdec_mlx as sd
import tiny
from serving import post, serving
from specdec_mlx.contracts import DraftContext, Step, Stepwise
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.heads.one_pass import PardDrafter
from specdec_mlx.mlx_lm_plugin.conversation import Continued, continued, keeping_caches
from tiny_model_folder import write_model_folder

PROMPT = "the cat in the hat and the other cat in the hat"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a head for it, and one for another width."""
    base = tmp_path_factory.mktemp("heads")
    target = write_model_folder(base / "target")
    head = heads.write_eagle3(base / "head", load(str(target))[0])
    wide = heads.write_eagle3(base / "wide", heads.target(width=128, vocab=300, layers=4))
    return {"target": str(target), "head": str(head), "wide": str(wide)}


@pytest.fixture(scope="module")
def client(folders: dict[str, str]) -> Iterator[openai.OpenAI]:
    flags = ("--model", folders["target"], "--draft-model", folders["head"], "--draft-length", "3")
    with serving(*flags) as running:
        yield running


def complete(client: openai.OpenAI, messages: list[Any] = MESSAGES, **more: Any) -> Any:
    options = {"max_tokens": 24, "temperature": 0.0, "messages": messages, **more}
    return client.chat.completions.create(model="default_model", **options)


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def refused(client: openai.OpenAI, **more: Any) -> str:
    """Status and answer of a request that is refused."""
    body = {"messages": MESSAGES, "max_tokens": 2, **more}
    status, answer = post(client, "chat/completions", body)
    assert status >= 400
    return f"{status} {json.dumps(answer)}"


def test_a_head_drafts_and_the_text_is_plain_decodings(client: openai.OpenAI) -> None:
    """And so it is at a temperature, under the rule that has one text for a seed."""
    reply, plain = complete(client), complete(client, extra_body={"drafter": "none"})
    assert text_of(reply) == text_of(plain)
    assert reply.usage.speculation["drafter"] == "model"
    assert reply.usage.speculation["drafted"] > 0
    assert plain.usage.speculation["drafter"] == "none"
    texts = [
        text_of(complete(client, temperature=1.0, seed=5, extra_body={"rule": "coupled"} | chosen))
        for chosen in ({}, {"drafter": "none"})
    ]
    assert texts[0] == texts[1]


def test_a_later_turn_is_drafted_for_too(client: openai.OpenAI) -> None:
    """On the caches that were kept of the earlier one, of which the head has seen nothing."""
    first = complete(client)
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "and then the hat"},
    ]
    plain = complete(client, turns, extra_body={"drafter": "none"})
    again = complete(client, turns)
    both = complete(client, turns, extra_body={"drafter": ["ngram", "model"]})
    assert text_of(again) == text_of(plain) == text_of(both)
    assert again.usage.speculation["drafted"] > 0
    assert both.usage.speculation["drafter"] == "ngram+model"


def test_a_request_may_name_a_head_as_its_draft_model(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """Of a server that has none; one that does not fit is refused, and so are torch's files."""
    with serving("--model", folders["target"], "--draft-length", "3") as running:
        plain = complete(running, extra_body={"drafter": "none"})
        reply = complete(running, extra_body={"draft_model": folders["head"]})
        assert text_of(reply) == text_of(plain)
        assert reply.usage.speculation["drafted"] > 0
        assert "was trained for a target" in refused(running, draft_model=folders["wide"])
        assert text_of(complete(running)) == text_of(plain)
        # torch's files are not read on request, least of all one that points far out of its bytes
        (tmp_path / "config.json").write_bytes(Path(folders["head"], "config.json").read_bytes())
        heads.torch_file(tmp_path / "pytorch_model.bin", shape=4, offset=10**12)
        said = refused(running, draft_model=str(tmp_path))
        assert "torch.save wrote is not read here. Start the server with it" in said
        assert said.startswith("4")
        assert complete(running).choices


def test_a_head_of_another_target_is_refused_when_it_is_asked(folders: dict[str, str]) -> None:
    """By its flag; without it the server goes on."""
    with serving("--model", folders["target"], "--draft-model", folders["wide"]) as running:
        assert "was trained for a target" in refused(running)
        assert complete(running, extra_body={"drafter": "ngram"}).choices


def test_a_draft_model_whose_caches_are_kept_still_stops_in_the_middle() -> None:
    """By the draft length's decision."""
    model = tiny.build("qwen2")
    context = DraftContext(vocab_size=128)
    for drafter in (sd.ModelDrafter(model), PardDrafter(model, mask_token=127)):
        session = keeping_caches(drafter, LRUPromptCache()).begin([5, 17, 99, 3], context)
        assert isinstance(session, Stepwise)
        if isinstance(session, Stepwise):
            assert len(session.propose_while(4, lambda evidence: Step.STOP_AFTER)) == 1


def test_a_head_is_not_shown_tokens_whose_states_it_did_not_see(folders: dict[str, str]) -> None:
    """Its rows begin with the prompt; a look-up beside it is shown the turns before as well."""
    head = load_head(folders["head"], load(folders["target"])[0])
    look_up = sd.NGramDrafter()
    both = continued(sd.FirstOf(look_up, head), [1, 2])
    assert isinstance(both, sd.FirstOf)
    assert list(both.drafters) == [Continued(look_up, [1, 2]), head]
