"""DFlash 2 and DSpark: their blocks in chains, trees and drawn drafts; torch's are in parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_stepwise import stepping

import heads
import specdec_mlx as sd
from specdec_mlx.contracts import DraftContext, Step
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


BLOCK, NUM_ROWS, RANK = 3, 5, 6
ONE_LAYER = {
    "hidden_size": heads.WIDTH, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "vocab_size": heads.VOCAB, "rope_theta": 10000.0, "model_type": "qwen3",
    "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": 96,
    "target_layer_ids": list(READ), "markov_rank": RANK, "enable_confidence_head": True,
}  # fmt: skip


def one_layer(with_code: bool) -> heads.Reference:
    """A DSpark head with one layer and random weights, as DeepSpec names them."""
    made = np.random.default_rng(2)
    width, sizes = heads.WIDTH, {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
    shapes = {f"layers.0.mlp.{name}_proj": size for name, size in sizes.items()}
    for name, size in {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}.items():
        shapes[f"layers.0.self_attn.{name}_proj"] = size
    norms = ["norm", "hidden_norm", "layers.0.input_layernorm"]
    norms += ["layers.0.post_attention_layernorm"]
    shapes |= dict.fromkeys(norms, (width,))
    shapes |= dict.fromkeys((f"layers.0.self_attn.{name}_norm" for name in "qk"), (8,))
    shapes |= {"fc": (width, 3 * width), "markov_head.markov_w1": (heads.VOCAB, RANK)}
    shapes |= {"markov_head.markov_w2": (heads.VOCAB, RANK)}
    shapes |= {"confidence_head.proj": (1, width + RANK * with_code)}
    weights = {f"{name}.weight": 0.4 * made.standard_normal(size) for name, size in shapes.items()}
    weights |= {name: 1 + x for name, x in weights.items() if x.ndim == 1}
    weights["confidence_head.proj.bias"] = np.array([0.3])
    in_float32 = {name: x.astype(np.float32) for name, x in weights.items()}
    return heads.Reference(ONE_LAYER | {"confidence_head_with_markov": with_code}, in_float32, {})


def block_states(weights: Any, rows: np.ndarray, block: np.ndarray) -> np.ndarray:
    """States [B, D] of a block of embeddings [B, D], after fused rows [n, 3 D] of the target."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        normed: np.ndarray = x / scale * weights[f"{name}.weight"]
        return normed

    def rotated(x: np.ndarray, start: int) -> np.ndarray:
        angles = np.arange(start, start + len(x))[:, None] / 10000.0 ** (np.arange(4) / 4)
        cos, sin, (a, b) = np.cos(angles)[:, None], np.sin(angles)[:, None], np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def project(x: np.ndarray, name: str) -> np.ndarray:
        made: np.ndarray = x @ weights[f"layers.0.{name}_proj.weight"].T
        return made

    context = norm(rows @ weights["fc.weight"].T, "hidden_norm")
    x = norm(block, "layers.0.input_layernorm")
    both = np.concatenate([context, x])
    at = "layers.0.self_attn."
    q = rotated(norm(project(x, "self_attn.q").reshape(len(x), 4, 8), f"{at}q_norm"), len(context))
    k = rotated(norm(project(both, "self_attn.k").reshape(len(both), 2, 8), f"{at}k_norm"), 0)
    v = project(both, "self_attn.v").reshape(len(both), 2, 8)
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, 2, 1)) / np.sqrt(8)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    seen = np.einsum("hij,jhd->ihd", shares, np.repeat(v, 2, 1)).reshape(len(x), -1)
    h = block + project(seen, "self_attn.o")
    y = norm(h, "layers.0.post_attention_layernorm")
    gate = project(y, "mlp.gate")
    return norm(h + project(gate / (1 + np.exp(-gate)) * project(y, "mlp.up"), "mlp.down"), "norm")


@pytest.mark.parametrize("with_code", [True, False])
def test_the_confidence_is_that_of_numpy(with_code: bool, tmp_path: Path) -> None:
    """sigmoid(w [state, W1(token before)] + b) at each position, as evidence for the length."""
    reference, target = one_layer(with_code), heads.target()
    drafter = sd.load_head(reference.write(tmp_path), target)
    made = np.random.default_rng(4).standard_normal((NUM_ROWS, 3 * heads.WIDTH))
    rows, prompt = made.astype(np.float32), [7, 3, 9, 11, 5, 20]
    session = drafter.begin(prompt, DraftContext(vocab_size=heads.VOCAB))
    session.see(heads.features(drafter, rows, read=READ))
    asked: list[list[float]] = []

    def goes_on(evidence: Any) -> Step:
        asked.append([known.confidence for known in evidence])
        return Step.GO_ON

    draft = session.propose_while(BLOCK, goes_on)
    tokens, w = to_list(draft.tokens), reference.weights
    embed = np.array(target.model.embed_tokens.weight)
    states = block_states(w, rows, embed[[prompt[-1], 96, 96]])
    before = [prompt[-1], *tokens[:-1]]
    code = w["markov_head.markov_w1.weight"][before]
    inputs = np.concatenate([states, code], -1) if with_code else states
    logits = inputs @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    expected = 1 / (1 + np.exp(-logits))
    assert asked[-1] == pytest.approx(expected.tolist(), rel=1e-4)
    assert [known.confidence for known in draft.evidence or ()] == asked[-1]
    assert np.ptp(expected) > 0.05
    assert "estimates its confidence" in drafter.describe()


def test_a_low_confidence_shortens_drafts_where_a_row_is_dear(tmp_path: Path) -> None:
    """The same head with its estimate moved down or up, at costs that were measured."""
    lengths = []
    for bias in (-6.0, 6.0):
        reference = heads.reference("dspark_qwen3")
        weights = {**reference.weights, "confidence_head.proj.bias": np.array([bias], np.float32)}
        folder = heads.Reference(reference.config, weights, {}).write(tmp_path / str(bias))
        drafter = sd.load_head(folder, reference.target())
        session: Any = drafter.begin(reference.prompt, DraftContext(vocab_size=heads.VOCAB))
        session.see(heads.features(drafter, reference.arrays["rows"][:6], read=READ))
        session.now, session.step = 0.0, 0.02
        _, _, ask = stepping(session, slope=0.3)
        lengths.append(len(ask(BLOCK)))
    assert lengths == [1, BLOCK]


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    """A recurrent bias is refused by name; a target that contains a DSpark is not taken for one."""
    with pytest.raises(HeadError, match="markov_head_type 'rnn'"):
        heads.loaded("dspark_qwen3", tmp_path, markov_head_type="rnn")
    assert kind_of({"model_type": "deepseek_v41", "dspark_block_size": 5}) is None
    assert kind_of({"dflash_config": {"selector_rank": 256}}) == "dflash2"
