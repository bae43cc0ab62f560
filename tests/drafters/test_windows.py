"""Windows of heads and draft models: what a row sees, and that drafts leave no trace in them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from test_heads_sessions import context, drafter, first_probs
from test_shared_drafts import Batch, plain

import heads
import specdec_mlx as sd
import tiny
from heads import VOCAB, Shown
from selection import cases, in_one_test
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.heads import loading
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.shared_drafts import SharedSession
from specdec_mlx.errors import HeadError
from specdec_mlx.token_ids import to_list
from specdec_mlx.window_cache import SINKS, WindowCache

WINDOW = 6
TEXT = [(17 * i + i * i // 3) % VOCAB for i in range(60)]


@pytest.fixture(autouse=True)
def _moves_rows_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowCache, "spare", 3)


def windowed(name: str, window: int = WINDOW, **options: Any) -> HeadDrafter:
    """A head with random weights and a window."""
    head = drafter(name).head.otherwise(window=window)
    return HeadDrafter(head, **options)


def attended(keys: np.ndarray, end: int, num_rows: int, window: int, sinks: int) -> np.ndarray:
    """Attention of the last rows before `end` to the positions that each sees, one by one."""
    rows = []
    for p in range(end - num_rows, end):
        seen = [j for j in range(p + 1) if j < sinks or p - j < window]
        shares = np.exp(keys[seen] @ keys[p])
        rows.append(shares / shares.sum() @ keys[seen])
    return np.array(rows)


@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (7, 0), (2, 4), (40, 4)])
def test_each_row_sees_the_first_positions_and_its_last(window: int, sinks: int) -> None:
    """In passes of any width, whatever was dropped between them, against a dense mask."""
    made, cache = np.random.default_rng(window), WindowCache(window, sinks)
    keys = np.zeros((0, 4), np.float32)
    moved = 0
    for width in made.choice([1, 1, 2, 5, 11, 60], 60).tolist():
        keys = np.concatenate([keys, made.standard_normal((width, 4)).astype(np.float32)])
        new = mx.array(keys[None, None, -width:])
        mask = create_attention_mask(new[0], cache)
        held, _ = cache.update_and_fetch(new, new)
        rows = mx.fast.scaled_dot_product_attention(new, held, held, scale=1.0, mask=mask)
        expected = attended(keys, len(keys), width, window, sinks)
        assert np.abs(np.array(rows)[0, 0] - expected).max() < 1e-5
        back = int(made.integers(0, width + 1))
        assert cache.trim(back) == back
        keys = keys[: len(keys) - back]
        moved += cache.num_lost > 0
        assert held.shape[2] <= sinks + window + 2 * cache.spare + width
    assert moved > 10
    assert cache.trim(cache.offset - 1) == 0, "the rows of that window are gone"
    again = WindowCache.from_state(cache.state)
    assert (again.offset, again.num_lost) == (cache.offset, cache.num_lost)
    assert mx.array_equal(again.keys, cache.keys[..., : cache._idx, :])


KINDS = ("eagle3", "eagle3 variants", "eagle1", "dflash", "qwen3_5", "deepseek_v3", "longcat_flash")


@pytest.mark.parametrize("name", cases(KINDS, "eagle3 variants", "dflash", "qwen3_5"))
def test_drafts_leave_no_trace_in_a_window(name: str) -> None:
    """After each verdict a head drafts as a head does that never drafted."""
    one = windowed(name)
    shown = Shown(one, TEXT[:9], context(), chunk=4)
    for i, length in enumerate([4, 3, 0, 5, 2, 5, 5, 1, 4, 5]):
        got = to_list(shown.propose(length).tokens)
        assert got == to_list(Shown(one, shown.text, context()).propose(length).tokens)
        shown.emit(*got[: i % 4], TEXT[i], *TEXT[20 : 20 + i % 3])
    assert len(shown.text) > 4 * WINDOW
    whole = Shown(windowed(name, 0), shown.text, context(sampling=sd.Sampling(temp=1.0)))
    limited = Shown(one, shown.text, context(sampling=sd.Sampling(temp=1.0)))
    first, second = (session.propose(1).logprobs for session in (whole, limited))
    assert not mx.allclose(first, second, atol=1e-4), "the window made no difference"


@pytest.mark.parametrize("name", ["eagle1", "qwen3_5", "dflash"])
def test_a_head_reads_the_first_rows_and_the_last(name: str) -> None:
    """States of other positions make no difference to the next draft; DFlash reads rows alone."""
    text, one = TEXT[:30], windowed(name)
    probs = first_probs(one, text)
    is_block, changed = name == "dflash", []
    for position in range(len(text) - 1):
        rows = heads.states(one, 0, len(text) - 1)
        session = one.begin(text, context(sampling=sd.Sampling(temp=1.0)))
        off = mx.zeros((len(text) - 1, 1)).at[position].add(1.0)
        layers = {layer: x + off for layer, x in rows.layers.items()}
        session.see(replace(rows, layers=layers, head_input=rows.head_input + off))
        logprobs: Any = session.propose(1).logprobs
        if mx.abs(mx.exp(logprobs) - probs).max().item() > 1e-6:
            changed.append(position)
    # A block begins one position after the last row.
    first = len(text) - WINDOW - (not is_block)
    assert changed == [*range(SINKS), *range(first, len(text) - 1)]


TREES = ("eagle3", "eagle1", "dflash")


@pytest.mark.parametrize("name", TREES)
def test_trees_in_a_window_are_those_of_a_fresh_session(name: str) -> None:
    one = windowed(name, branches=3)
    shown = Shown(one, TEXT[:20], context())
    forked = 0
    for i in range(5):
        another = Shown(one, shown.text, context())
        another.session.chances = shown.session.chances
        draft, fresh = (it.propose(8) for it in (shown, another))
        assert to_list(draft.tokens) == to_list(fresh.tokens)
        assert draft.parents == fresh.parents
        forked += draft.parents is not None
        chain = windowed(name)
        path = to_list(Shown(chain, shown.text, context()).propose(3).tokens)
        firsts = {t for t, p in zip(to_list(draft.tokens), draft.tree, strict=True) if p == -1}
        assert path[0] in firsts
        shown.emit(*to_list(draft.tokens)[:1], TEXT[i])
    assert forked > 0


def test_a_tree_sees_what_a_chain_sees() -> None:
    """Each path of a tree has the distributions of a chain over the same tokens."""
    model = tiny.build("qwen2")
    text = [t % 90 for t in TEXT[:30]]
    given = DraftContext(vocab_size=tiny.build("qwen2").args.vocab_size)
    tree = sd.ModelDrafter(model, window=WINDOW, branches=3).begin(text, given)
    draft = tree.propose(10)
    assert draft.parents is not None
    path = to_list(draft.first_chain().tokens)
    alone = sd.ModelDrafter(model, window=WINDOW).begin(text, given).propose(len(path))
    assert to_list(alone.tokens)[:1] == path[:1]
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(to_list(draft.tokens), draft.parents, strict=True)):
        paths[node] = (*paths[parent], token)
    assert any(to_list(alone.tokens)[:n] == list(p) for p in paths.values() if (n := len(p)) > 1)


# Draft models -------------------------------------------------------------------------------------


def seen_logits(model: nn.Module, text: list[int], window: int) -> Any:
    """Logits [V] after a text, from one pass with a dense mask."""
    n = len(text)
    back = mx.arange(n)[:, None] - mx.arange(n)
    mask = (back >= 0) & ((back < window) | (mx.arange(n) < SINKS))

    class Masked(KVCache):  # type: ignore[misc]
        def make_mask(self, N: int, **options: Any) -> mx.array:
            return mask

    return model(mx.array([text]), cache=[Masked() for _ in make_prompt_cache(model)])[0, -1]


def test_a_draft_model_sees_its_window_alone() -> None:
    """Token by token as from one pass with a dense mask, after drafts of any length."""
    model = tiny.build("qwen2")
    size = model.args.vocab_size
    text = [t % 90 for t in TEXT[:20]]
    session = sd.ModelDrafter(model, window=WINDOW).begin(text, DraftContext(vocab_size=size))
    for length in (3, 1, 6, 2, 8, 4):
        expected = list(text)
        for _ in range(length):
            expected.append(int(mx.argmax(seen_logits(model, expected, WINDOW))))
        draft = to_list(session.propose(length).tokens)
        assert draft == expected[len(text) :]
        more = [*draft[: length // 2], 7]
        session.observe(more)
        text += more
    whole = sd.ModelDrafter(model).begin(text, DraftContext(vocab_size=size)).propose(8)
    limited = session.propose(8)
    assert to_list(whole.tokens) != to_list(limited.tokens)


@pytest.mark.parametrize("branches", [1, 3])
def test_a_draft_model_that_chooses_positions_has_a_window(branches: int) -> None:
    """DeepSeek V3.2 reads columns of a single row's mask once the text is long."""
    target, draft = (tiny.build("deepseek_v32", seed=seed) for seed in (0, 5))
    text = [t % 90 for t in TEXT[:40]]
    drafting = sd.ModelDrafter(draft, window=24, branches=branches)
    plain_text, drafted = (
        [t.token for t in sd.speculate(target, text, one, max_tokens=12, num_draft_tokens=4)]
        for one in (None, drafting)
    )
    assert drafted == plain_text


def test_a_window_is_part_of_the_key_and_wrong_ones_are_refused() -> None:
    model = tiny.build("qwen2")
    keys = {sd.ModelDrafter(model, window=window).key for window in (None, 8, 9)}
    assert len(keys) == 3
    assert sd.ModelDrafter(model, window=0).key in keys
    assert windowed("eagle3").key != windowed("eagle3", 7).key
    with pytest.raises(ValueError, match=r"window=-1: expected an int >= 0, or None"):
        sd.ModelDrafter(model, window=-1)


@in_one_test("name", ["gemma3_text", "falcon_h1", "qwen3_5", "deepseek_v3"])
def test_text_is_the_targets_own_with_a_windowed_draft_model(name: str) -> None:
    """Also where other layers have windows or recurrent states, which stay as they are."""
    target, draft = tiny.build(name), tiny.build(name, seed=5)
    drafting = sd.ModelDrafter(draft, window=WINDOW)
    own = [type(cache) for cache in make_prompt_cache(draft)]
    kinds = [type(cache) for cache in drafting.make_cache()]
    assert [WindowCache if kind is KVCache else kind for kind in own] == kinds
    assert RotatingKVCache in kinds or name != "gemma3_text"
    texts = [
        [t.token for t in sd.speculate(target, [5, 9, 3], one, max_tokens=40, num_draft_tokens=3)]
        for one in (None, drafting)
    ]
    assert texts[0] == texts[1]


def test_a_conversation_keeps_the_window_in_the_callers_caches() -> None:
    """A draft model's caches forget too, and go on with the next turn."""
    target = tiny.build("qwen2")
    caches = [*make_prompt_cache(target), *make_prompt_cache(target)]
    options: dict[str, Any] = {"prompt_cache": caches, "max_tokens": 30, "num_draft_tokens": 3}
    one = sd.ModelDrafter(target, window=WINDOW)
    text: list[int] = []
    for turn in ([5, 9, 3], [8, 4]):
        tokens = list(sd.speculate(target, turn, one, **options))
        text += [*turn, *(t.token for t in tokens)]
    of_draft: Any = caches[len(caches) // 2 :]
    assert {type(cache) for cache in of_draft} == {WindowCache}
    assert {cache.offset for cache in of_draft} == {caches[0].offset}
    assert all(cache.num_lost for cache in of_draft)
    fresh = one.make_cache()
    target(mx.array([text]), cache=fresh)
    for cache, other in zip(of_draft, fresh, strict=True):
        # The window of the next position
        ours, theirs = (WindowCache.merge([it]).keys for it in (cache, other))
        assert mx.allclose(ours, theirs, atol=1e-4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Each text that asked for a shared draft, and the draft."""
    drafts: list[tuple[list[int], list[int]]] = []
    real = SharedSession.propose

    def propose(self: SharedSession, limit: int) -> Any:
        draft = real(self, limit)
        drafts.append((list(self.source.tokens), to_list(draft.tokens)))
        return draft

    monkeypatch.setattr(SharedSession, "propose", propose)
    return drafts


def test_a_batch_drafts_in_the_window_as_each_text_alone(
    asked: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft model, whichever texts come and go."""
    real = sd.ModelDrafter
    monkeypatch.setattr(sd, "ModelDrafter", lambda model: real(model, window=WINDOW))
    batch = Batch("qwen2", num_draft_tokens=4)
    assert batch.texts == dict(enumerate(plain("qwen2")))
    assert len(asked) > 15
    alone = real(batch.draft, window=WINDOW)
    size = batch.draft.args.vocab_size
    for text, draft in asked[::3]:
        fresh = alone.begin(text, DraftContext(vocab_size=size)).propose(len(draft))
        assert to_list(fresh.tokens) == draft


def test_a_batch_shares_the_window_of_a_head(asked: list[tuple[list[int], list[int]]]) -> None:
    """Its rows hold few slots beyond the window, and the text stays the target's."""
    head = heads.random_head(heads.HEADS["eagle3"], tiny.build("qwen2"))
    head.window = WINDOW
    batch = Batch("qwen2", head=HeadDrafter(head), num_draft_tokens=4)
    assert batch.texts == dict(enumerate(plain("qwen2")))
    assert len(asked) > 15


# Loading ------------------------------------------------------------------------------------------


def test_a_heads_window_is_what_it_was_trained_on(tmp_path: Path) -> None:
    """Unless the caller gives another, or 0 for the whole text; without meaning it is refused."""
    target = heads.reference("eagle3").target()
    folder = heads.reference("eagle3").write(tmp_path / "a", max_position_embeddings=48)
    assert sd.load_head(folder, target).head.window == 48
    assert "looks back 48 positions" in sd.load_head(folder, target).describe()
    assert sd.load_head(folder, target, window=9).head.window == 9
    whole = sd.load_head(folder, target, window=0)
    assert {type(cache) for cache in whole.head.make_cache()} == {KVCache}
    trained = heads.reference("eagle3").write(tmp_path / "b", trained_length=14)
    assert sd.load_head(trained, target).head.window == 14
    of_target = heads.reference("mtp_deepseek_v3")
    mtp = sd.load_head(of_target.write(tmp_path / "mtp"), of_target.target())
    assert not mtp.head.window, "the config describes the target"
    medusa = heads.reference("medusa").write(tmp_path / "medusa")
    with pytest.raises(HeadError, match="window has no meaning for this format"):
        sd.load_head(medusa, heads.target(), window=8)
    with pytest.raises(ValueError, match=r"window=-1"):
        sd.load_head(folder, target, window=-1)


def test_a_layer_keeps_the_window_that_it_was_trained_with(tmp_path: Path) -> None:
    """Without the first positions; the other layers get the head's window."""
    caches = windowed("eagle3 variants").head.make_cache()
    assert [(c.window, c.sinks) for c in caches] == [(WINDOW, SINKS), (5, 0)]


def test_large_heads_are_quantized_to_four_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once told; 16 leaves them, a head stored in few bits stays, and a small one as well."""
    reference = heads.reference("eagle3")
    folder, target = reference.write(tmp_path / "a"), reference.target()
    size = sum(x.nbytes for x in reference.weights.values())
    bits: dict[Any, set[int]] = {}
    for limit, choice in ((size, None), (100, None), (100, 16), (100, 8)):
        monkeypatch.setattr(loading, "LARGE_HEAD", limit)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded = sd.load_head(folder, target, draft_bits=choice)
        modules = loaded.head.modules()
        bits[limit, choice] = {part.bits for part in modules if "scales" in part}
        is_default = (limit, choice) == (100, None)
        assert ("quantized to 4 bits" in loaded.describe()) == is_default
        assert ("draft_bits=16 leaves them" in caplog.text) == is_default
    assert list(bits.values()) == [set(), {4}, set(), {8}]
    assert not any("scales" in part for part in target.modules())
    config = reference.config | {"quantization": {"group_size": 32, "bits": 8}}
    in_eight = heads.Reference(config, {}, {}).write(tmp_path / "b")
    head = sd.load_head(folder, target, draft_bits=8).head

    tensors: Any = dict(tree_flatten(head.parameters()))
    tensors["d2t"] = mx.array(reference.weights["d2t"])
    mx.save_safetensors(str(in_eight / "model.safetensors"), tensors)
    stored = sd.load_head(in_eight, target).head
    assert {part.bits for part in stored.modules() if "scales" in part} == {8}
