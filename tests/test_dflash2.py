"""DFlash 2 and DSpark against their authors' torch code, on published names and shapes.

A block is drafted in one pass, and each place then corrected by the token before it. A wrong
reading gives lossless text all the same, only slower: each control is one that has to be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import heads
import specdec_mlx as sd
from selection import each
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters import drawing
from specdec_mlx.drafters.heads.loading import known_kind
from specdec_mlx.drafters.heads.one_pass import CorrectedSession, GroupedConvolution, Markov
from specdec_mlx.errors import HeadError
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list

NAMES = ("dflash2", "dspark_qwen3", "dspark_gemma4")
READ = (1, 3, 5)  # layers that the rows of the fixtures are of
TOLERANCE = 1e-4  # of the largest logit

Change = Callable[[pytest.MonkeyPatch, dict[str, Any]], None]


def both_drafts(name: str, drafter: Any) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and logits [3, V] of a draft, and of one after its first token and a correction."""
    reference, seen, made = heads.reference(name), list[mx.array](), []
    draw = drawing.Draws.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing.Draws, "draw", lambda self, x: seen.append(x) or draw(self, x))
        session = drafter.begin(reference.prompt, DraftContext(vocab_size=heads.VOCAB))
        for start, end in ((0, 4), (4, 6), (6, 8)):  # the prompt in two chunks
            rows = reference.arrays["rows"][start:end]
            session.see(heads.features(drafter, rows, read=READ))
            if end > 6:
                session.observe([int(reference.arrays["first_tokens"][0]), heads.CORRECTION])
            if end >= 6:
                tokens = to_list(session.propose(3).tokens)
                made.append((tokens, np.array(mx.concatenate(seen))))
                seen.clear()
    return made


def is_as_in_torch(name: str, part: str, logits: np.ndarray) -> bool:
    """True if logits [n, V] are the fixture's, and -inf for the same tokens."""
    expected = heads.reference(name).arrays[f"{part}_logits"]
    has = np.isfinite(expected)
    if logits.shape != expected.shape or not (np.isfinite(logits) == has).all():
        return False
    limit = TOLERANCE * np.abs(expected[has]).max()
    return bool(np.abs(logits[has] - expected[has]).max() <= limit)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_corrected_as_by_its_authors(name: str, tmp_path: Path) -> None:
    """Logits to 1e-4, and every token, of a draft and of another after a partial accept."""
    drafts = both_drafts(name, heads.loaded(name, tmp_path))
    for part, (tokens, logits) in zip(("first", "second"), drafts, strict=True):
        assert is_as_in_torch(name, part, logits), part
        assert tokens == heads.reference(name).arrays[f"{part}_tokens"].tolist()


def option(**options: Any) -> Change:
    """A control that loads the head otherwise; `changes` are of its config."""
    return lambda patch, given: given.update(options)


def attribute(owner: Any, name: str, wrong: Any) -> Change:
    """A control that runs it otherwise."""
    return lambda patch, given: patch.setattr(owner, name, wrong)


def after_the_text(self: CorrectedSession, places: list[int], before: mx.array) -> mx.array:
    """Every place as if the block's known token stood before it."""
    rows = mx.array(places)
    return self.head.corrected(self.logits[rows], self.states[rows], mx.array(self.tokens[-1:]))


def no_convolution(self: GroupedConvolution, part: Any, x: mx.array) -> Any:
    """The part alone."""
    return part(x)


SHARED: dict[str, Change] = {
    "layers off by one": option(layers=(2, 4, 6)),
    "the token before is the text's last": attribute(CorrectedSession, "at", after_the_text),
    "causal in the block": option(changes={"is_causal": True}),
}
MARKOV = SHARED | {
    "own place does not draft": option(changes={"sample_from_anchor": False}),
    "no bias": attribute(Markov, "bias", lambda self, states, before: mx.zeros(heads.VOCAB)),
}
CONTROLS: dict[str, dict[str, Change]] = {
    "dflash2": SHARED
    | {
        "no convolution": attribute(GroupedConvolution, "around", no_convolution),
        "no window": option(changes={"layer_types": None}),
        "a window one wider": option(changes={"sliding_window": 5}),
    },
    "dspark_qwen3": MARKOV,
    "dspark_gemma4": MARKOV
    | {
        "embeddings without their scale": option(changes={"input_embedding_scale": 1.0}),
        "no cap": option(changes={"final_logit_softcapping": None}),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_each_wrong_reading_is_noticed(name: str, tmp_path: Path) -> None:
    """With one thing wrong, one of the two drafts at least has other logits."""

    def check(control: str) -> None:
        options: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            CONTROLS[name][control](patch, options)
            changes = options.pop("changes", {})
            drafts = both_drafts(name, heads.loaded(name, tmp_path / control, options, **changes))
        parts = zip(("first", "second"), drafts, strict=True)
        assert not all(is_as_in_torch(name, part, logits) for part, (_, logits) in parts)

    each(CONTROLS[name], check)


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", ["dflash2", "dspark_qwen3"])
def test_text_is_the_targets_own(name: str, branches: int, tmp_path: Path) -> None:
    """Chains and trees change no token of a greedy text, and hold what torch drafts."""
    drafter = heads.loaded(name, tmp_path, {"branches": branches})
    model, prompt = heads.reference(name).target(), heads.reference(name).prompt
    texts = []
    for given in (None, drafter):
        steps = sd.speculate(model, prompt, given, max_tokens=12, draft_length=3)
        texts.append([step.token for step in steps])
    assert texts[0] == texts[1]
    session = drafter.begin(prompt, DraftContext(vocab_size=heads.VOCAB))
    session.see(heads.features(drafter, heads.reference(name).arrays["rows"][:6], read=READ))
    draft = session.propose(39)
    tokens, parents = to_list(draft.tokens), draft.parents or range(-1, 2)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths[i] = (*paths[parent], token)
    assert tuple(heads.reference(name).arrays["first_tokens"].tolist()) in paths.values()


@pytest.mark.parametrize("name", ["dflash2", "dspark_qwen3"])
def test_a_drawn_draft_declares_what_it_was_drawn_from(name: str, tmp_path: Path) -> None:
    """Each row is the softmax of what torch has after the tokens drafted, candidates alone."""
    drafter, reference = heads.loaded(name, tmp_path), heads.reference(name)
    context = DraftContext(sampling=Sampling(2.0), noise=Noise(3), vocab_size=heads.VOCAB)
    session = drafter.begin(reference.prompt, context)
    session.see(heads.features(drafter, reference.arrays["rows"][:6], read=READ))
    draft = session.propose(3)
    tokens, rows = to_list(draft.tokens), np.array(draft.logprobs)
    assert np.isfinite(rows[np.arange(3), tokens]).all()
    for place, before in enumerate([reference.prompt[-1], *tokens[:2]]):
        logits = np.array(session.at([place], mx.array([before])))[0] / 2
        expected = np.exp(logits) / np.exp(logits).sum()
        assert np.abs(np.exp(rows[place]) - expected).max() < 1e-5


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    """A recurrent bias is refused by name; a target that contains a DSpark is not taken for one."""
    with pytest.raises(HeadError, match="markov_head_type 'rnn'"):
        heads.loaded("dspark_qwen3", tmp_path, markov_head_type="rnn")
    assert known_kind({"model_type": "deepseek_v41", "dspark_block_size": 5}) is None
    assert known_kind({"dflash_config": {"selector_rank": 256}}) == "dflash2"
