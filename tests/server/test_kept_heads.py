"""A server's head goes on with a conversation as if it had read all of it at once."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import heads
from engines import PROMPT, ask, queued_together, running, settled, submit, with_flags
from selection import in_one_test
from specdec_mlx.contracts import Draft
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.drafters.drawing import ChainDraws
from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.memory.drafter_states import LatestFeatures
from specdec_mlx.server.prefix_files import ServedStates
from specdec_mlx.server.prefixes import Prefixes
from specdec_mlx.token_ids import to_list
from tiny_model_folder import write_model_folder

Drafts = dict[int, list[list[int]]]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """What is proposed, text by text."""
    proposed: Drafts = defaultdict(list)
    contexts, draft = [], ChainDraws.draft

    def noted(draws: ChainDraws, length: int | None = None) -> Draft:
        made = draft(draws, length)
        if len(made):
            contexts.append(draws._context)  # or another text may get its address
            proposed[id(draws._context)].append(to_list(made.tokens))
        return made

    monkeypatch.setattr(ChainDraws, "draft", noted)
    return proposed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "model", "llama")


def written(kind: str, target: Path, folder: Path, seed: int = 3) -> Path:
    """A folder with a random head of this kind for the target."""
    model = mlx_lm.load(str(target))[0]
    if kind == "eagle3":
        mx.random.seed(seed)
        return heads.write_eagle3(folder, model)
    head = heads.random_head(heads.dflash, model, seed)
    ends = anatomy_for_head(model)
    config = heads.layer_config(ends) | {"architectures": ["DFlashDraftModel"], "block_size": 6}
    config |= {"model_type": "qwen3", "num_hidden_layers": 2, "target_layer_ids": head.fused}
    config |= {"mask_token_id": ends.vocab_size - 1}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights: Any = tree_flatten(head.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "pt"})
    return folder


def engine_for(target: Path, head: Path, **settings: Any) -> Any:
    choice = DrafterChoice(("model",), DraftModel(str(head)))
    return running(target, flags=with_flags(choice=choice, num_draft_tokens=4), **settings)


@in_one_test("kind", ["eagle3", "dflash"])
def test_later_turns_are_drafted_as_one_text(
    kind: str, folder: Path, tmp_path: Path, drafts: Drafts
) -> None:
    """After an answer, after a client hung up, with an answer that was edited, and for two texts in
    a batch."""
    head, disk = written(kind, folder, tmp_path / kind), tmp_path / f"{kind} kept"

    def drafted(engine: Any, *prompts: str) -> list[list[list[int]]]:
        """The drafts of texts that are written together."""
        drafts.clear()  # of what the server writes when it starts
        if len(prompts) == 1:
            ask(settled(engine), prompt=prompts[0])
            return list(drafts.values())
        with queued_together(settled(engine)):
            clients = [submit(engine, prompt=prompt) for prompt in prompts]
        for client in clients:
            client.wait()
        # The last drafts are shorter if a text becomes a row of a batch sooner.
        return sorted(text[:-6] for text in drafts.values())

    with engine_for(folder, head, prompt_cache=disk) as engine:
        first = ask(engine, prompt=PROMPT).text
        hung_up = submit(settled(engine), pause_at=12, prompt=f"{PROMPT} {first} and")
        for _ in range(11):
            hung_up.next()
        hung_up.ticket.cancel()
        hung_up.resume.set()
        with pytest.raises(ConnectionError):
            hung_up.wait()
        conversations = [
            (f"{PROMPT}{first} in the hat",),
            (f"{PROMPT} {first} and the cat",),
            (f"{PROMPT}{first[:9]} on the mat",),
            (f"{PROMPT}{first} so the", f"{PROMPT}{first} or the"),
            (f"{PROMPT}{first} so the cat",),
        ]
        resumed = [drafted(engine, *prompts) for prompts in conversations]
        entries = settled(engine).prefixes.entries
        assert any(isinstance(entry.caches[-1], LatestFeatures) for entry in entries)
    for prompts, found in zip(conversations, resumed, strict=True):
        with engine_for(folder, head) as engine:
            whole = drafted(engine, *prompts)
        assert found == whole, prompts
        assert all(len(text) > 3 for text in whole)


@in_one_test("kind", ["eagle3", "dflash"])
def test_a_server_that_started_again_drafts_as_before(
    kind: str, folder: Path, tmp_path: Path, drafts: Drafts
) -> None:
    """From the head's file, beside the file of the target's caches. Also after an edited answer."""
    head, disk = written(kind, folder, tmp_path / kind), tmp_path / f"{kind} kept"
    with engine_for(folder, head, prompt_cache=disk) as engine:
        first = ask(engine, prompt=PROMPT).text
        settled(engine)
    for number, prompt in enumerate([f"{PROMPT}{first} in the hat", f"{PROMPT}{first[:9]} on"]):
        found = []
        for place in (shutil.copytree(disk, tmp_path / f"{kind} {number}"), None):
            with engine_for(folder, head, prompt_cache=place) as engine:
                settled(engine)
                drafts.clear()
                ended = ask(engine, prompt=prompt).ended
                settled(engine)
                assert ended is not None
                assert (ended.num_cached > 30) == (place is not None)
                found.append(list(drafts.values()))
        assert found[0] == found[1]


def test_a_file_of_another_head_is_refused(
    folder: Path, tmp_path: Path, drafts: Drafts, caplog: pytest.LogCaptureFixture
) -> None:
    """The server does not look at it, and says so where it has the name of a file of its own."""
    one, other = (written("dflash", folder, tmp_path / str(seed), seed) for seed in (3, 4))
    disk, prompt = tmp_path / "kept", f"{PROMPT} and the"
    with engine_for(folder, one, prompt_cache=disk) as engine:
        ask(engine, prompt=PROMPT)
    with engine_for(folder, other) as engine:
        drafts.clear()
        ask(engine, prompt=prompt)
        whole = sorted(drafts.values())
    names = {path.name.partition("-")[0] for path in disk.iterdir()}
    assert len(names) == 2, "of the model and of the head"
    with engine_for(folder, other, prompt_cache=disk) as engine:
        drafts.clear()
        ask(engine, prompt=prompt)
        assert settled(engine).prefixes.entries
        assert sorted(drafts.values()) != whole, "there was no state of this head"
    (new,) = {path.name.partition("-")[0] for path in disk.iterdir()} - names
    for path in list(disk.iterdir()):
        key, _, rest = path.name.partition("-")
        if key == new:
            path.unlink()
        else:
            path.rename(disk / f"{new}-{rest}")
    with engine_for(folder, other, prompt_cache=disk) as engine:
        ask(engine, prompt=prompt)
    assert "it is of another model or head" in caplog.text


def test_a_state_beside_one_picture_is_not_taken_beside_another(folder: Path) -> None:
    """The tokens of both prompts are the same. What stands before the picture is shared."""
    owner, prefixes, text = mlx_lm.load(str(folder))[0], Prefixes(10), [5, 9, 9, 6, 7]
    caches = make_prompt_cache(owner)
    owner(mx.array([text]), cache=caches)
    pictures = ([5, -1, -1, 6], [5, -2, -2, 6])
    one, other = (ServedStates(prefixes, None, text[:4], keys) for keys in pictures)
    one.store(owner, text, caches)
    assert [states.fetch(owner, text)[1] for states in (one, other)] == [5, 1]
