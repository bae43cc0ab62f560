"""Whole texts with heads on real targets: the target's own, whatever the head proposes.

The heads have random weights, and so are nearly always wrong. Where it matters that some of a draft
is kept, part of what they propose is replaced by what is coming; their caches and rows are the same
as if they had proposed it themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import distribution
import heads
import specdec_mlx as sd
import tiny
from scripted import OracleDrafter
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.caches import Rollback, leaves
from specdec_mlx.contracts import Draft, DraftContext, FeatureRows, Features
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.gemma4_assistant import AssistantSource
from specdec_mlx.drafters.heads.mtp import FAMILIES
from specdec_mlx.lab.proof import texts
from specdec_mlx.lab.proof.report import Finding
from specdec_mlx.lab.proof.subject import Subject, Work
from specdec_mlx.lab.proof.texts import check_state, check_variations
from specdec_mlx.models.anatomy import StateReader, keys_values_of
from specdec_mlx.rules import Block
from specdec_mlx.sampling import Noise
from specdec_mlx.token_ids import to_list

KINDS = ("eagle3", "eagle1", "dflash", "medusa", "assistant")
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 40  # past the windows of the tiny models


target = cache(tiny.build)


def text_of(model: nn.Module, drafter: Any, max_tokens: int = 24, **options: Any) -> list[int]:
    steps = sd.speculate(model, PROMPT, drafter, max_tokens=max_tokens, **options)
    return [step.token for step in steps]


@cache
def plain(name: str) -> list[int]:
    return text_of(target(name), None, NUM_TOKENS)


@cache
def drafter(kind: str, name: str) -> HeadDrafter:
    """A random head of a kind for a target; "mtp" is the layer of its own family."""
    make = heads.mtp(name) if kind == "mtp" else heads.HEADS[kind]
    return HeadDrafter(heads.random_head(make, target(name)))


class PartlyRight:
    """A head whose drafts are right at about half of the positions, and checked on the way."""

    def __init__(self, head: HeadDrafter, model: nn.Module, text: Sequence[int]) -> None:
        self.head, self.model, self.text = head, model, text
        self.features, self.compared = head.features, 0

    def begin(self, prompt: Sequence[int], context: DraftContext) -> PartlyRight:
        self.context, self.tokens, self.start = context, list(prompt), len(prompt)
        self.session: Any = self.head.begin(prompt, context)
        self.see = self.session.see
        self.script = OracleDrafter(self.text, context.vocab_size, wrong=0.5).script()
        return self

    def observe(self, tokens: Sequence[int]) -> None:
        self.session.observe(tokens)
        self.tokens += tokens

    def propose(self, limit: int) -> Draft:
        draft = self.session.propose(limit)
        fresh = self.head.begin(self.tokens, self.context)
        fresh.see(rows_of(self.model, self.tokens[:-1], self.features))
        assert to_list(draft.tokens) == to_list(fresh.propose(limit).tokens)
        self.compared += len(draft)
        start = len(self.tokens) - self.start
        return Draft(self.script[start : start + len(draft)])


def rows_of(
    model: nn.Module, tokens: Sequence[int], wanted: Features, caches: list[Any] | None = None
) -> FeatureRows:
    """The states of a pass over these tokens, by default a fresh one."""
    caches = caches or make_prompt_cache(model)
    taps = StateReader(model, wanted, lambda index: keys_values_of(caches, index))
    taps.read(lambda: model(mx.array([tokens]), cache=caches)[0])
    assert taps.features is not None
    return taps.features


OTHER_CACHES = ("deepseek_v3", "llama", "mimo", "nemotron_h", "qwen3_next", "mimo_v2_flash")
"""Of families' own layers: one of each kind of caches, of targets and of layers. That the layers
of all families are what they should be is in `test_heads_parity`."""

IN_SHORT = (
    ("eagle3", "qwen2"),
    ("dflash", "gemma3_text"),
    ("medusa", "deepseek_v3"),
    ("assistant", "gemma4"),
    ("mtp", "qwen3_5"),
    ("mtp", "longcat_flash"),
    ("mtp", "step3p5"),
)
TABLE = [*IN_SHORT, ("eagle1", "qwen3_moe"), ("eagle3", "qwen3_5")]
TABLE += [("mtp", name) for name in OTHER_CACHES]
"""Each kind of head, on plain caches and others."""


@pytest.mark.parametrize(("kind", "name"), cases(TABLE, *IN_SHORT[::2]))
def test_a_head_after_any_verdict_is_as_after_a_fresh_pass(kind: str, name: str) -> None:
    """On every kind of cache, over drafts kept in part, whole and not at all; and the text."""
    reader = PartlyRight(drafter(kind, name), target(name), plain(name))
    tokens = list(
        sd.speculate(target(name), PROMPT, reader, max_tokens=NUM_TOKENS, num_draft_tokens=4)
    )
    assert [t.token for t in tokens] == plain(name)
    stats = tokens[-1].stats
    assert stats.accepted > 5
    assert stats.drafted - stats.accepted > 5
    assert reader.compared == stats.drafted


SOME = cases(IN_SHORT, ("eagle3", "qwen2"), ("assistant", "gemma4"), ("mtp", "step3p5"))
SEEDED: dict[str, Any] = {"sampler": sd.Sampling(temp=1.0), "seed": 3, "rule": "coupled"}


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_the_text_is_the_targets_own_at_any_draft_length(kind: str, name: str) -> None:
    """With heads that are nearly always wrong; so is a seed's, under the coupled rule."""
    for options in (
        {"num_draft_tokens": 8},
        {"num_draft_tokens": "auto"},
        {"num_draft_tokens": 4, **SEEDED},
    ):
        texts = (text_of(target(name), one, **options) for one in (drafter(kind, name), None))
        assert len({tuple(text) for text in texts}) == 1, options


@pytest.mark.parametrize("lets_go", [True, False])
def test_an_assistant_lets_the_caches_grow_in_place(lets_go, monkeypatch):
    """Their memory stays where it is from pass to pass; held for longer it would be copied."""
    if not lets_go:
        monkeypatch.setattr(AssistantSource, "end_draft", lambda self: None)
    model, one = target("qwen2"), drafter("assistant", "qwen2")
    caches, places = make_prompt_cache(model), set()
    options: dict[str, Any] = {"prompt_cache": caches, "max_tokens": 20, "num_draft_tokens": 3}
    for _ in sd.speculate(model, PROMPT * 10, one, **options):
        mx.eval(caches[-1].keys)
        places.add(np.asarray(memoryview(caches[-1].keys)).ctypes.data)
    assert (len(places) == 1) == lets_go


def test_the_caches_of_an_earlier_turn_are_attended_to() -> None:
    """A second turn's first draft is that of a session that was shown the whole text."""
    model, one = target("gemma4"), drafter("assistant", "gemma4")
    text = [*PROMPT, 7, 7, 21]
    context = DraftContext(vocab_size=128)

    def draft_after(begin: int) -> list[int]:
        caches = make_prompt_cache(model)
        if begin:
            model(mx.array([text[:begin]]), cache=caches)
        session = one.begin(text[begin:], context)
        session.see(rows_of(model, text[begin:-1], one.features, caches))
        return to_list(session.propose(4).tokens)

    assert draft_after(0) == draft_after(len(PROMPT))


@pytest.mark.parametrize(("kind", "name"), [*SOME, ("assistant", "quantized")])
def test_a_second_turn_and_an_early_end_leave_the_text_alone(kind: str, name: str) -> None:
    """A head may not know the earlier turn; the caches hold what was handed out, packed or not."""
    options, found = dict[str, Any](), []
    if name == "quantized":  # with heads of 32, the smallest group
        model = tiny.build("qwen2", num_attention_heads=2, num_key_value_heads=1)
        head = HeadDrafter(heads.random_head(heads.HEADS[kind], model))
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    else:
        model, head = target(name), drafter(kind, name)
    for one in (None, head):
        kept = options["prompt_cache"] = make_prompt_cache(model)
        loop = sd.speculate(model, PROMPT, one, num_draft_tokens=3, **options)
        first = [next(loop).token for _ in range(5)]
        loop.close()
        lengths = {cache.offset for cache in leaves(kept) if hasattr(cache, "offset")}
        assert lengths == {len(PROMPT) + 5}
        second = sd.speculate(model, [7, 7, 21], one, max_tokens=12, **options)
        found.append(first + [t.token for t in second])
    assert found[0] == found[1]


# Drawn at random ----------------------------------------------------------------------------------

NUM_TEXTS = 200


RULES = [("rejection", "temperature 1"), ("block", "top-k")]


@FULL
@pytest.mark.parametrize(("kind", "way"), zip(KINDS, cycle(RULES), strict=False))
def test_texts_follow_the_targets_law_with_the_heads_q(kind: str, way: tuple[str, str]) -> None:
    """Chi-square of the joint of three tokens of a model with six, by rule and setting."""
    model = distribution.tiny_llama(distribution.TARGET)
    one = HeadDrafter(heads.random_head(heads.HEADS[kind], model))
    rule, sampling = way[0], distribution.SETTINGS[way[1]]
    count = distribution.generate(model, one, sampling, NUM_TEXTS, rule)
    p = distribution.p_value(count.texts, distribution.joint_law(sampling))
    assert p > 1e-4 / len(KINDS)
    assert min(count.accepted, count.rejected) > NUM_TEXTS / 8


# The users' own check -----------------------------------------------------------------------------


def test_a_head_out_of_step_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted positions stay in its caches."""
    model = distribution.tiny_llama(distribution.TARGET)
    one = HeadDrafter(heads.random_head(heads.HEADS["eagle1"], model))
    prompts = [[1, 4, 1, 5], [2, 0, 3], [5, 5, 1]]
    subject = Subject(model, one, sd.Sampling(temp=1.0), Block(), prompts, 6)
    work = Work(time.perf_counter() + 60)
    assert check_state(subject, work).status == "passed"
    monkeypatch.setattr(Rollback, "rewind_to", lambda self, position: position)
    assert check_state(subject, work).status == "failed"


# Other readings of its files, on a target whose next token follows from the last one alone --------

WIDTH, VOCAB = 64, 97
PROMPTS = [[5, 17, 9], [33, 71, 2, 64]]


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
    silenced = [
        (name, mx.zeros_like(value))
        for name, value in tree_flatten(head.body.parameters())
        if "down_proj" in name or "o_proj" in name
    ]
    head.body.load_weights(silenced, strict=False)
    head.body.norm.weight = mx.ones(WIDTH)
    return drafter


def checked(model: nn.Module, drafter: HeadDrafter) -> Finding:
    """The check's part on it, of texts as short as will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "VARIED_TOKENS", 16)
        subject = Subject(
            model, drafter, sd.Sampling(), Block(), PROMPTS, VOCAB, num_draft_tokens=3
        )
        return check_variations(subject, drafter, Work(time.perf_counter() + 60))


def written(drafter: HeadDrafter, folder: Path, *, shifted: bool) -> Path:
    """The head's file, its norms as w - 1 as Qwen's are, or shifted; not marked as MLX's."""
    text = tiny.CONFIGS["qwen3_5"]["text_config"]
    tensors = heads.as_published(drafter.head, FAMILIES["qwen3_5"], text)
    less = 0.0 if shifted else 1.0
    arrays = {
        name: np.array(value - less if "norm" in name and value.ndim == 1 else value)
        for name, value in tensors.items()
    }
    config = {"model_type": "qwen3_5", "text_config": text}
    return heads.Reference(config, arrays, {}).write(folder)


@FULL
@in_one_test("shifted", [False, True])
def test_a_shifted_file_is_found_and_what_to_load_it_with(shifted: bool, tmp_path: Path) -> None:
    """The loader adds the ones that are there already; with its advice the head is right."""
    model = table()
    folder = written(right_head(model), tmp_path, shifted=shifted)
    part = checked(model, sd.load_head(folder, model))
    assert (part.numbers["accepted_as_read"] < 0.5) == shifted
    if shifted:
        assert "this file looks already shifted; load it with norms_less_one=False" in part.verdict
        part = checked(model, sd.load_head(folder, model, norms_less_one=False))
    assert part.numbers["accepted_as_read"] > 0.95
    assert part.numbers["accepted_otherwise"]["norms plus one"] < 0.5
    assert "no other reading of its files does better" in part.verdict


@FULL
def test_the_other_order_is_found() -> None:
    """A projection whose halves stand the other way round; the report says so, and the text."""
    model = table()
    drafter = right_head(model)
    head: Any = drafter.head
    halves = mx.split(head.projection.weight, 2, axis=1)
    head.projection.weight = mx.concatenate(halves[::-1], axis=1)
    report = lab.check(model, None, drafter=drafter, prompts=PROMPTS[:1], budget=20, progress=False)
    assert report["greedy text"].status == "passed"
    assert "with the other order of state and embedding" in report["head's variants"].verdict


LAYERS = {"mtp": "qwen3_5", "mtp stack": "step3p5"}
VARIED = ["eagle3", "eagle1", "dflash", *LAYERS, "medusa", "assistant"]


@pytest.mark.parametrize("kind", cases(VARIED, "eagle3", *LAYERS, "medusa"))
def test_a_variation_reads_otherwise_and_leaves_the_head_as_it_was(kind: str) -> None:
    """Each changes what is drafted from; the head, whose weights it shares, drafts as before."""
    model = tiny.build("qwen3_5")
    make = heads.mtp(LAYERS[kind]) if kind in LAYERS else heads.HEADS[kind]
    head = heads.random_head(make, model)
    drafter = HeadDrafter(head)
    before = logits_of(model, drafter)
    for variation in head.variations():
        otherwise = replace(drafter, head=variation.head)
        assert not mx.array_equal(logits_of(model, otherwise), before), variation.name
        assert mx.array_equal(logits_of(model, drafter), before), variation.name
        assert variation.head.anatomy is head.anatomy, "the target was copied"


def logits_of(model: nn.Module, drafter: HeadDrafter) -> mx.array:
    """Distributions of a draft of three tokens, shown the states of a fresh pass."""
    context = DraftContext(sampling=sd.Sampling(temp=1.0), noise=Noise(1), vocab_size=128)
    session = drafter.begin(PROMPT, context)
    session.see(rows_of(model, PROMPT[:-1], drafter.features))
    logprobs = session.propose(3).logprobs
    assert logprobs is not None
    return logprobs
