"""DFlash 2 and DSpark: their blocks in chains, trees and drawn drafts; torch's are in parity."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import heads
import specdec_mlx as sd
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.heads.loading import kind_of
from specdec_mlx.errors import HeadError
from specdec_mlx.sampling import Noise, Sampling
from specdec_mlx.token_ids import to_list

READ = (1, 3, 5)  # layers that the rows of the fixtures are of


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", ["dflash2", "dspark_qwen3"])
def test_text_is_the_targets_own(name: str, branches: int, tmp_path: Path) -> None:
    """Chains and trees change no token of a greedy text, and hold what torch drafts."""
    drafter = heads.loaded(name, tmp_path, {"branches": branches})
    model, prompt = heads.reference(name).target(), heads.reference(name).prompt
    texts = []
    for given in (None, drafter):
        steps = sd.speculate(model, prompt, given, max_tokens=12, num_draft_tokens=3)
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
    source = session.source
    for place, before in enumerate([reference.prompt[-1], *tokens[:2]]):
        given = source.logits[place : place + 1], source.states[place : place + 1]
        logits = np.array(drafter.head.corrected(*given, mx.array([before])))[0] / 2
        expected = np.exp(logits) / np.exp(logits).sum()
        assert np.abs(np.exp(rows[place]) - expected).max() < 1e-5


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    """A recurrent bias is refused by name; a target that contains a DSpark is not taken for one."""
    with pytest.raises(HeadError, match="markov_head_type 'rnn'"):
        heads.loaded("dspark_qwen3", tmp_path, markov_head_type="rnn")
    assert kind_of({"model_type": "deepseek_v41", "dspark_block_size": 5}) is None
    assert kind_of({"dflash_config": {"selector_rank": 256}}) == "dflash2"
