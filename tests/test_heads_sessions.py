"""Heads in a generation: rows and tokens go together, q is what is drawn from, caches stay true."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import heads
import specdec_mlx as sd
import tiny
from heads import HEADS, VOCAB, WIDTH, Shown, states
from selection import FULL, in_one_test
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.heads import session as head_session
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.one_pass import PardDrafter
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.testing import check_drafter
from specdec_mlx.token_ids import to_list

target = cache(heads.target)


@cache
def drafter(name: str) -> HeadDrafter:
    """A head with random weights for a target of its width; of a family by its name."""
    if name in HEADS:
        return HeadDrafter(heads.random_head(HEADS[name], target()))
    config = tiny.CONFIGS[name]
    width = config.get("text_config", config)["hidden_size"]
    model = target() if width == WIDTH else heads.target(width=width)
    return HeadDrafter(heads.random_head(heads.mtp(name, vocab_size=VOCAB), model))


def context(**given: Any) -> DraftContext:
    return DraftContext(vocab_size=VOCAB, noise=Noise(5), **given)


PROMPT = [5, 17, 9, 33, 71, 2, 64]
ALL = [*HEADS, "qwen3_5", "deepseek_v3", "longcat_flash", "step3p5", "nemotron_h"]
"""Each kind of head, and of a family's layer; `test_heads_lossless` has all families."""


@pytest.mark.parametrize("name", ALL)
def test_a_draft_follows_from_the_text_and_its_rows_alone(name: str) -> None:
    """Whatever was drafted, accepted or shown in chunks before: as a fresh session would draft."""
    one = drafter(name)
    shown = Shown(one, PROMPT, context(), chunk=2)
    lengths = [4, 3, 0, 5, 2]
    emitted: list[list[int]] = [[0, 1], [8], [3, 4, 5], [], [90]]
    for length, more in zip(lengths, emitted, strict=True):
        got = to_list(shown.propose(length).tokens)
        fresh = Shown(one, shown.text, context())
        assert got == to_list(fresh.propose(length).tokens)
        assert len(got) == min(length, 5)
        accepted = got[: len(got) // 2]
        shown.emit(*accepted, *more, 11)


@pytest.mark.parametrize("name", ALL)
def test_a_draft_depends_on_every_row_and_every_token(name: str) -> None:
    """Of the text before it; Medusa's on the last row."""
    one = drafter(name)
    assert len(Shown(one, PROMPT[:1], context()).propose(4)) == 0, "before a row was shown"
    probs = first_probs(one, PROMPT)
    for position in range(len(PROMPT) - 1):
        changed = list(PROMPT)
        changed[position + 1] += 1
        by_token = mx.abs(first_probs(one, changed) - probs).max().item()
        reads_all = name not in ("dflash", "assistant")
        reads_token = "medusa" not in name and (reads_all or position == len(PROMPT) - 2)
        assert (by_token > 0) == reads_token, position


def first_probs(drafter: HeadDrafter, prompt: Sequence[int]) -> mx.array:
    """Probabilities that the first token is drawn from at temperature 1."""
    sampled = context(sampling=sd.Sampling(temp=1.0))
    logprobs = Shown(drafter, prompt, sampled).propose(1).logprobs
    assert logprobs is not None
    return mx.exp(logprobs)


@in_one_test("name", HEADS)
def test_what_is_handed_over_is_what_was_drawn_from(name: str) -> None:
    """Normalised, filtered, and the argmax of it with the draft's noise; greedy: a point mass."""
    sampling = sd.Sampling(temp=0.7, top_p=0.9)
    given = context(sampling=sampling)
    draft = Shown(drafter(name), PROMPT, given).propose(3)
    assert draft.logprobs is not None
    assert draft.logprobs.shape == (3, VOCAB)
    assert mx.allclose(mx.exp(draft.logprobs).sum(-1), mx.ones(3), atol=1e-5)
    noise = given.draft_gumbels(0, 3)
    assert to_list(draft.tokens) == mx.argmax(draft.logprobs + noise, axis=-1).tolist()
    assert not mx.isinf(draft.logprobs).all()
    assert mx.isinf(draft.logprobs).any(), "top-p left everything in"
    greedy = HeadDrafter(drafter(name).head, greedy=True)
    assert Shown(greedy, PROMPT, given).propose(2).logprobs is None
    for given in (context(sampling=sd.Sampling()), context()):
        assert Shown(drafter(name), PROMPT, given).propose(2).logprobs is None
    with pytest.raises(ValueError, match="draft_temp=-1"):
        HeadDrafter(drafter(name).head, draft_temp=-1)


def test_tokens_outside_of_the_draft_vocabulary_have_no_mass() -> None:
    """And all others do; in another order logits find their places."""
    probs = first_probs(drafter("eagle3"), PROMPT)
    assert [i for i in range(VOCAB) if probs[0, i] > 0] == list(range(0, VOCAB, 3))
    logits = mx.array([[1.0, 2.0, 3.0]])
    assert DraftVocabulary(mx.array([2, 0, -2]), 3).widen(logits).tolist() == [[3, 2, 1]]


@in_one_test("name", HEADS)
def test_processors_see_the_text_and_the_draft(name: str) -> None:
    """Before each token: prompt, emitted, and what was drafted so far."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    shown = Shown(drafter(name), PROMPT, context(logits_processors=[processor]))
    shown.emit(1)
    drafted = to_list(shown.propose(3).tokens)
    assert seen == [[*PROMPT, 1, *drafted[:i]] for i in range(3)]


@pytest.mark.parametrize("name", ["eagle3", "qwen3_5", "dflash", "medusa"])
def test_a_long_text_is_read_as_it_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows do not pile up: of a long prompt, and of a long stretch without drafts."""
    most = 8
    monkeypatch.setattr(head_session, "MOST_WAITING", most)
    shown = Shown(drafter(name), [i % VOCAB for i in range(5 * most)], context(), chunk=6)
    for more in (0, 2 * most):
        for i in range(more):
            shown.emit(i % VOCAB)
            assert shown.session.waiting.num_rows <= most
        fresh = Shown(drafter(name), shown.text, context())
        assert to_list(shown.propose(3).tokens) == to_list(fresh.propose(3).tokens)


def test_keys_differ_by_content_options_and_reading() -> None:
    """The costs of a head that is read otherwise are the same, its acceptance is not."""
    keys = {drafter(name).key for name in HEADS} | {HeadDrafter(drafter("eagle1").head, True).key}
    assert len(keys) == len(HEADS) + 1
    for name in ("eagle1", "medusa", "assistant", "deepseek_v3"):
        one = drafter(name)
        key = one.key
        other_state = next(v for v in one.head.variations() if v.name.startswith("state "))
        with other_state.applied():
            assert one.key != key
        assert one.key == key


@in_one_test("name", ["medusa", "medusa, target's head"])
def test_medusa_is_its_formula(name: str) -> None:
    """Head i: x + silu(W x + b) for each block, then a matrix, of the last state shown."""
    one = drafter(name)
    head = one.head
    matrices = head.lm_heads if name == "medusa" else [target().lm_head] * 5
    expected = []
    for blocks, matrix in zip(head.blocks, matrices, strict=True):
        x = np.array(states(one, len(PROMPT) - 2, 1).head_input)[0].astype(np.float64)
        for block in blocks:
            y = np.array(block.weight) @ x + np.array(block.bias)
            x = x + y / (1 + np.exp(-y))
        expected.append(int(np.argmax(np.array(matrix.weight) @ x)))
    for length in (9, 2):
        assert to_list(Shown(one, PROMPT, context()).propose(length).tokens) == expected[:length]


# PARD ---------------------------------------------------------------------------------------------


small = cache(partial(tiny.build, "qwen2", vocab_size=VOCAB))
MASK = VOCAB - 1


def test_pard_drafts_what_stands_behind_its_masks() -> None:
    """The last rows of one pass over text and masks; its caches hold no mask afterwards."""
    session = PardDrafter(small(), mask_token=MASK).begin(PROMPT, context())
    text = list(PROMPT)
    for length, emitted in ((4, 2), (1, 1), (6, 0), (3, 3)):
        got = to_list(session.propose(length).tokens)
        logits = small()(mx.array([[*text, *[MASK] * (length - 1)]]))[0, -length:]
        assert got == mx.argmax(logits, axis=-1).tolist()
        assert session.rollback.position == session.rollback.caches[0].offset == len(text)
        tokens = [*got[:emitted], 50]
        session.observe(tokens)
        text += tokens


WHOLE: dict[str, Callable[[], Any]] = {
    "pard": lambda: PardDrafter(small(), mask_token=MASK),
    "early exit": lambda: sd.drafters.early_exit(target(), 2),
}


@FULL
@pytest.mark.parametrize("name", WHOLE)
def test_drafters_that_read_tokens_conform(name: str) -> None:
    """To `check_drafter`."""
    check_drafter(WHOLE[name](), vocab_size=VOCAB, num_draws=400)


@in_one_test("name", WHOLE)
@in_one_test("length", [1, 4])
def test_their_text_is_the_targets_own(name: str, length: int) -> None:
    """Greedy, and a seed's under the coupled rule."""
    for options in ({}, {"sampler": sd.Sampling(temp=1.0), "seed": 3, "rule": "coupled"}):
        plain, drafted = (
            sd.speculate(target(), PROMPT, one, max_tokens=24, draft_length=length, **options)
            for one in (None, WHOLE[name]())
        )
        assert [t.token for t in drafted] == [t.token for t in plain]


@in_one_test("name", ["eagle1", "eagle3", "qwen3_5"])
def test_what_is_read_ahead_of_a_draft_is_keys_and_values_alone(name: str) -> None:
    """No attention and no logits are computed but at the last position, which drafts."""
    one, text, dot = drafter(name), list(range(40)), io.StringIO()
    session = Shown(one, text, context()).session
    named: Any = tree_flatten(session.read())
    mx.export_to_dot(dot, *(leaf for _, leaf in named if isinstance(leaf, mx.array)))
    operations = set(re.findall(r'label ="(\w+)"', dot.getvalue()))
    assert operations.isdisjoint({"ScaledDotProductAttention", "Softmax"})
    assert session.waiting.num_rows == 1
    fresh = Shown(one, text, context())
    assert to_list(session.propose(3).tokens) == to_list(fresh.propose(3).tokens)
