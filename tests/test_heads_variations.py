"""`check` on a trained head: whether another reading of its files would be accepted more often.

The target here is a table: its next token follows from the last one alone. So a multi-token
prediction layer that passes on the embedding of the token it is given is always right, and what
makes it wrong is known.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import heads
import specdec_mlx as sd
import tiny
from selection import cases
from specdec_mlx.checks import texts
from specdec_mlx.checks.report import Part
from specdec_mlx.checks.subject import Subject, Work
from specdec_mlx.checks.texts import VARIATIONS_NAME, check_variations
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.mtp_families import FAMILIES
from specdec_mlx.rules.block import Block
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.keys_values import keys_values_of
from specdec_mlx.target.taps import Taps
from specdec_mlx.types import DraftContext

WIDTH, VOCAB = 64, 97
PROMPTS = [[5, 17, 9], [33, 71, 2, 64]]
FAMILY = FAMILIES["qwen3_5"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts as short as will do."""
    monkeypatch.setattr(texts, "VARIED_TOKENS", 16)


def table() -> nn.Module:
    """A target that writes token x + 1 after x: its layers add nothing, and its head looks back."""
    model = heads.target(width=WIDTH, vocab=VOCAB, layers=2)
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    model.model.norm.weight = mx.ones(WIDTH)
    embeddings = mx.random.normal((VOCAB, WIDTH), key=mx.random.key(3))
    model.model.embed_tokens.weight = embeddings
    model.lm_head.weight = embeddings[mx.arange(VOCAB) - 1]
    return model


def right_head(model: nn.Module) -> HeadDrafter:
    """A layer that passes on the embedding of the token that it is given."""
    drafter = HeadDrafter(heads.random_head(heads.mtp("qwen3_5"), model))
    head: Any = drafter.head
    scale = 0.25 * mx.where(mx.arange(WIDTH) % 2 == 0, 1.0, -1.0)
    head.embedding_norm.weight = scale
    head.projection.weight = mx.concatenate([mx.diag(1 / scale), mx.zeros((WIDTH, WIDTH))], axis=1)
    layer = head.body.layers[0]
    layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
    silenced = [
        (name, mx.zeros_like(value))
        for name, value in tree_flatten(layer.mlp.parameters())
        if "down_proj" in name
    ]
    layer.mlp.load_weights(silenced, strict=False)
    head.body.norm.weight = mx.ones(WIDTH)
    return drafter


def config_file() -> dict[str, Any]:
    return {"model_type": "qwen3_5", "text_config": tiny.CONFIGS["qwen3_5"]["text_config"]}


def checked(model: nn.Module, drafter: HeadDrafter) -> Part:
    """The check's part on it."""
    subject = Subject(model, drafter, sd.Sampling(), Block(), PROMPTS, VOCAB, draft_length=3)
    return check_variations(subject, drafter, Work(time.perf_counter() + 60))


def written(drafter: HeadDrafter, folder: Path, *, shifted: bool) -> Path:
    """The head's file, its norms as w - 1 as Qwen's are, or shifted; not marked as MLX's."""
    tensors = heads.as_published(drafter.head, FAMILY, config_file()["text_config"])
    less = 0.0 if shifted else 1.0
    arrays = {
        name: np.array(value - less if "norm" in name and value.ndim == 1 else value)
        for name, value in tensors.items()
    }
    return heads.Reference(config_file(), arrays, {}).write(folder)


def test_a_head_read_as_it_was_meant_has_no_better_reading(tmp_path: Path) -> None:
    """Everything that it drafts is accepted, and the other norms are worse."""
    model = table()
    loaded = sd.load_head(written(right_head(model), tmp_path, shifted=False), model)
    part = checked(model, loaded)
    assert part.numbers["accepted_as_read"] > 0.95
    assert part.numbers["accepted_otherwise"]["norms plus one"] < 0.5
    assert "no other reading of its files does better" in part.verdict


def test_a_shifted_file_is_found_and_what_to_load_it_with(tmp_path: Path) -> None:
    """The loader adds the ones that are there already; with its advice the head is right."""
    model = table()
    folder = written(right_head(model), tmp_path, shifted=True)
    wrong = sd.load_head(folder, model)
    report = sd.check(model, None, drafter=wrong, prompts=PROMPTS[:1], budget=20, progress=False)
    assert report["greedy text"].status == "passed"
    part = report[VARIATIONS_NAME]
    assert part.numbers["accepted_as_read"] < 0.5
    assert "this file looks already shifted; load it with norms_less_one=False" in part.verdict
    part = checked(model, sd.load_head(folder, model, norms_less_one=False))
    assert part.numbers["accepted_as_read"] > 0.95


def test_the_other_order_is_found() -> None:
    """A projection whose halves stand the other way round."""
    model = table()
    drafter = right_head(model)
    head: Any = drafter.head
    halves = mx.split(head.projection.weight, 2, axis=1)
    head.projection.weight = mx.concatenate(halves[::-1], axis=1)
    assert "with the other order of state and embedding" in checked(model, drafter).verdict


LAYERS = {"mtp": "qwen3_5", "mtp stack": "step3p5"}
VARIED = ["eagle3", "eagle1", "dflash", *LAYERS, "medusa", "assistant"]


@pytest.mark.parametrize("kind", cases(VARIED, "eagle3", *LAYERS, "medusa"))
def test_a_variation_reads_otherwise_and_leaves_the_head_as_it_was(kind: str) -> None:
    """Each changes what is drafted from, and nothing of it stays; not even after an exception."""
    model = tiny.build("qwen3_5")
    make = heads.mtp(LAYERS[kind]) if kind in LAYERS else heads.HEADS[kind]
    head = heads.random_head(make, model)
    drafter = HeadDrafter(head)
    before = logits_of(model, drafter)
    for variation in head.variations():
        with variation.applied():
            assert not mx.array_equal(logits_of(model, drafter), before), variation.name
        assert mx.array_equal(logits_of(model, drafter), before), variation.name
        with pytest.raises(KeyError), variation.applied():
            raise KeyError
        assert mx.array_equal(logits_of(model, drafter), before), variation.name


def logits_of(model: nn.Module, drafter: HeadDrafter) -> mx.array:
    """Distributions of a draft of three tokens, shown the states of a fresh pass."""
    text = [5, 17, 99, 3, 64]
    caches = make_prompt_cache(model)
    taps = Taps(model, drafter.features, lambda index: keys_values_of(caches, index))
    taps.read(lambda: model(mx.array([text[:-1]]), cache=caches)[0])
    context = DraftContext(sampling=sd.Sampling(temp=1.0), noise=Noise(1), vocab_size=128)
    session = drafter.begin(text, context)
    session.see(taps.features)
    logprobs = session.propose(3).logprobs
    assert logprobs is not None
    return logprobs
