"""Trained heads and draft models beside pictures: the text stays mlx-vlm's own, whatever drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import heads
import specdec_mlx as sd
import tiny
from engines import running, settled, with_flags
from live import listening
from scripted import OracleDrafter
from specdec_mlx.contracts import Draft, DraftContext
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.retokenized import Retokenized
from specdec_mlx.models.anatomy import StateReader, keys_values_of
from specdec_mlx.models.loading import load_model
from specdec_mlx.server.app import make_app
from specdec_mlx.token_ids import to_list
from tiny_model_folder import write_model_folder

pytestmark = pytest.mark.full
pytest.importorskip("mlx_vlm")

import tiny_vision  # noqa: E402  needs mlx-vlm
from test_server_pictures import LOOK, SHOWN, chat, openai, post, text, user  # noqa: E402
from test_server_pictures import expected as served_text  # noqa: E402
from test_vision import NEXT, PROMPT, TWO, expected, images, load, written  # noqa: E402
from tiny_vision import CONFIGS, IDS, MARK, VOCAB  # noqa: E402

KINDS = ("mtp", "eagle1", "eagle3", "dflash", "medusa", "assistant")
"""A prediction layer, heads that draft token by token, in one pass, and from the target's cache."""
RECURRENT = ("qwen3_5", "assistant")
"""A pair that is never published: the caches of a recurrent target may lag behind its text."""


@cache
def drafter(kind: str, name: str) -> HeadDrafter:
    """A random head for a vision model, which is nearly always wrong."""
    sizes = {"hidden_size": 64, "vocab_size": VOCAB}
    make = heads.mtp("qwen3_5", **sizes) if kind == "mtp" else heads.HEADS[kind]
    return HeadDrafter(heads.random_head(make, load(name)[0]))


def rows_of(name: str, prompt: str, more: Sequence[int], head: HeadDrafter, seed: int = 0) -> Any:
    """The states of a fresh pass over a prompt with pictures, and over further tokens."""
    model, processor = load(name)
    tokens, options = sd.vision.read_prompt(model, processor, prompt, images(prompt, seed))
    caches = options["prompt_cache"]
    reader = StateReader(model, head.features, lambda index: keys_values_of(caches, index))
    whole = options["input_embeddings"][None]
    reader.read(lambda: model(mx.array([tokens]), caches, input_embeddings=whole)[0])
    parts = [reader.features]
    if more:
        reader.read(lambda: model(mx.array([list(more)]), caches)[0])
        parts.append(reader.features)
    return tokens, parts


class PartlyRight:
    """A head whose drafts are right at about half of the positions, and checked on the way."""

    def __init__(self, name: str, head: HeadDrafter, written_text: Sequence[int]) -> None:
        self.name, self.head, self.text = name, head, written_text
        self.features, self.compared = head.features, 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> PartlyRight:
        self.context, self.tokens, self.start = context, list(prompt), len(prompt)
        self.session: Any = self.head.begin(prompt, context)
        self.see = self.session.see
        self.script = OracleDrafter(self.text, VOCAB, wrong=0.5).script()
        return self

    def observe(self, tokens: Sequence[int]) -> None:
        self.session.observe(tokens)
        self.tokens += tokens

    def propose(self, limit: int) -> Draft:
        draft = self.session.propose(limit)
        fresh = self.head.begin(self.tokens, self.context)
        emitted = self.tokens[self.start : -1]
        for rows in rows_of(self.name, TWO, emitted, self.head)[1]:
            fresh.see(rows)
        assert to_list(draft.tokens) == to_list(fresh.propose(limit).tokens)
        self.compared += len(draft)
        done = len(self.tokens) - self.start
        return Draft(self.script[done : done + len(draft)])


PAIRS = [(name, kind) for name in CONFIGS for kind in KINDS if (name, kind) != RECURRENT]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_head_beside_pictures_reads_the_targets_states(name: str, kind: str) -> None:
    """Of each position, pictures included: its drafts after any verdict are those of a fresh pass.

    The text is mlx-vlm's own, over drafts that are kept in part.
    """
    text = expected(name, TWO)
    reader = PartlyRight(name, drafter(kind, name), text)
    tokens, stats = written(name, TWO, drafter=reader)
    assert tokens == text
    assert 3 < stats.accepted < stats.drafted
    assert reader.compared == stats.drafted


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_changes_no_text_beside_pictures(name: str, kind: str) -> None:
    """At any draft length, for a seed, in small parts, and in a second turn."""
    one = drafter(kind, name)
    tokens, stats = written(name, drafter=one, num_draft_tokens="auto", prefill_step_size=8)
    assert tokens == expected(name, prefill_step_size=8)
    seeded = {"sampler": sd.Sampling(temp=0.8), "seed": 3}
    assert written(name, drafter=one, **seeded)[0] == written(name, **seeded)[0]
    cache = load(name)[0].make_cache()
    first, stats = written(name, num_tokens=6, prompt_cache=cache, drafter=one)
    assert first == expected(name, num_tokens=6)
    assert stats.drafted > 0
    second = written(name, NEXT, prompt_cache=cache, drafter=one)[0]
    assert second == expected(name, more=[*first, *NEXT])


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_picture_shows_reaches_the_head(name: str, kind: str) -> None:
    """Another picture gives other logits of the draft, although the tokens are the same."""
    made = []
    for seed in (0, 7):
        one = drafter(kind, name)
        tokens, rows = rows_of(name, PROMPT, [], one, seed)
        session: Any = one.begin([*tokens, 40], DraftContext(vocab_size=VOCAB))
        for part in rows:
            session.see(part)
        session.source.begin_draft(2)
        made.append(session.source.next_logits(None))
    finite = mx.isfinite(made[0])
    difference = mx.where(finite, mx.abs(made[0] - made[1]), 0)
    assert float(difference.max()) > 1e-3


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB}


@pytest.mark.parametrize("vocab", [VOCAB, IDS[MARK]])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_model_beside_pictures_changes_no_text(name: str, vocab: int) -> None:
    """It reads a picture as the tokens that stand for it, also if it has no rows for them."""
    small = tiny.build("llama", **SMALL | {"vocab_size": vocab}, layer_types=["full_attention"] * 2)
    model, processor = load(name)
    plain, drafted = (
        sd.vision.generate(model, processor, TWO, images(TWO), drafter=None, max_tokens=16, **more)
        for more in ({}, {"draft_model": small, "num_draft_tokens": 4})
    )
    assert plain.tokens == expected(name, TWO, num_tokens=16)[: len(plain.tokens)]
    assert drafted == plain
    assert drafted.stats.drafted > 5


def test_a_draft_model_with_other_tokens_reads_the_marks_of_pictures(tmp_path: Path) -> None:
    """Its drafts are carried over as text; a mark is a word to it."""
    name = "qwen2_5_vl"
    small, tokenizer = load_model(write_model_folder(tmp_path))
    model, processor = load(name)
    one = sd.ModelDrafter(small, tokenizer)
    tokens, options = sd.vision.read_prompt(model, processor, TWO, images(TWO))
    context = DraftContext(tokenizer=options["tokenizer"], vocab_size=VOCAB)
    assert isinstance(one.begin(tokens, context), Retokenized)
    text = sd.vision.generate(model, processor, TWO, images(TWO), drafter=one, max_tokens=12)
    assert text == sd.vision.generate(
        model, processor, TWO, images(TWO), drafter=None, max_tokens=12
    )


# The server ---------------------------------------------------------------------------------------


def test_the_server_drafts_with_a_head_beside_pictures(tmp_path: Path, caplog: Any) -> None:
    """The head of --draft-model before and after a picture has the model loaded anew."""
    (tmp_path / "model").mkdir()
    folder = tiny_vision.write_folder(tmp_path / "model")
    head = heads.write_eagle3(tmp_path / "head", load("qwen2_5_vl")[0])
    flags = with_flags(choice=DrafterChoice(["model"], DraftModel(head)), num_draft_tokens=4)
    caplog.set_level("INFO")
    with (
        running(folder, flags=flags) as engine,
        listening(make_app(engine, engine.settings), lifespan="off") as port,
    ):
        for picture, seeds in ((False, []), (True, [0]), (True, [1])):
            content = [*(openai(seed) for seed in seeds), text(LOOK)]
            body = {"messages": [user(*content)], "max_tokens": 12}
            said = post(port, "/v1/chat/completions", body, drafted := [])[0]
            settled(engine)
            assert sum(drafted) > 0
            if picture:
                served = ("qwen2_5_vl", engine, port)
                assert said == served_text(served, f"{SHOWN}{LOOK}<|bos|>", seeds)
        assert chat(port, user(openai(0), text(LOOK)))[0]
    assert "does not draft beside pictures" not in caplog.text
