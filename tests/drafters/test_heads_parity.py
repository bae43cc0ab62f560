"""Trained heads against torch: the numbers of their authors' code, on published names and shapes.

Each fixture is a checkpoint with random weights, loaded from a folder like any other. What torch
made of it is the logits of a prompt, of a draft of three tokens, and of another one after the first
token of that was accepted. A wrong state, norm, layer, order or position still gives lossless text,
only slower, so each of them is a control that the same comparison rejects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import heads
from selection import each, in_one_test
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import DraftContext, KeysValues
from specdec_mlx.drafters import drawing
from specdec_mlx.drafters.draft_sources import places_after
from specdec_mlx.drafters.heads import gemma4_assistant, mtp
from specdec_mlx.drafters.heads.mtp import MTPHead
from specdec_mlx.drafters.heads.one_pass import BlockSource, GroupedConvolution, MarkovHead
from specdec_mlx.drafters.heads.session import LayerState
from specdec_mlx.token_ids import to_list

TOLERANCE = 1e-4  # of the largest logit

MTP = ("qwen3_5", "deepseek_v3", "exaone_moe", "longcat_flash", "nemotron_h")
STACKS = ("step3p5", "mimo_v2_flash")  # several prediction layers, which draft a token each

RECURRENT = ("eagle3", "eagle1", *(f"mtp_{name}" for name in MTP))
BLOCKS = ("dflash", "dflash2", "dspark_qwen3", "dspark_gemma4")
NAMES = (*RECURRENT, *(f"mtp_{name}" for name in STACKS), *BLOCKS, "gemma4_assistant")
READS = {"eagle3": (1, 3, 4), "mtp_step3p5": (heads.NUM_LAYERS - 1,)}
READS |= dict.fromkeys(BLOCKS, (1, 3, 5))
"""Layers that the rows of a fixture are of; of others they are the state after the final norm."""

Change = Callable[[pytest.MonkeyPatch, dict[str, Any]], None]


def both_drafts(name: str, drafter: Any) -> dict[str, tuple[list[int], mx.array]]:
    """Tokens and logits of the first and the second draft of a session shown the rows."""
    seen: list[mx.array] = []
    draw = drawing.ChainDraws.draw

    def noting(self: Any, logits: mx.array) -> mx.array:
        seen.extend(mx.split(logits, len(logits)))  # of one pass they come together
        return draw(self, logits)

    reference = heads.reference(name)
    rows, read = reference.arrays["rows"], READS.get(name, ())

    def see(a: int, b: int) -> None:
        held = reference.keys_values(drafter, b)
        asked.see(heads.features(drafter, rows[a:b], read=read, keys_values=held))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing.ChainDraws, "draw", noting)
        asked = drafter.begin(reference.prompt, DraftContext(vocab_size=heads.VOCAB))
        see(0, 4)  # the prompt in two chunks
        see(4, 6)
        first = to_list(asked.propose(3).tokens)
        see(6, 8)
        asked.observe([int(reference.arrays["first_tokens"][0]), heads.CORRECTION])
        second = to_list(asked.propose(3).tokens)
    logits = mx.concatenate(seen)
    return {"first": (first, logits[:3]), "second": (second, logits[3:])}


def is_as_in_torch(name: str, part: str, logits: mx.array) -> bool:
    """True if logits [n, V] are the fixture's; -inf of tokens that the head does not have."""
    reference = heads.reference(name)
    expected = reference.arrays[f"{part}_logits"]
    got = np.array(logits)
    if "d2t" in reference.weights:
        ids = reference.weights["d2t"] + np.arange(expected.shape[-1])
        absent = np.delete(got, ids, axis=-1)
        if not np.isneginf(absent).all():
            return False
        got = got[:, ids]
    absent = np.isneginf(expected)
    if "masked_embedding.token_ordering" in reference.weights:
        got = got[:, : expected.shape[-1]]
        absent = expected == expected.min(axis=-1, keepdims=True)  # torch has a low number there
    if got.shape != expected.shape or not (np.isneginf(got) == absent).all():
        return False
    got, expected = got[~absent], expected[~absent]
    return bool(np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max())


@in_one_test("name", NAMES)
def test_a_loaded_head_is_the_one_that_torch_runs(name: str, tmp_path: Path) -> None:
    """Drafts, and after a partial accept drafts again, with the same logits and tokens."""
    drafter, reference = heads.loaded(name, tmp_path), heads.reference(name)
    for part, (tokens, logits) in both_drafts(name, drafter).items():
        assert is_as_in_torch(name, part, logits), part
        assert tokens == reference.arrays[f"{part}_tokens"].tolist()
    if name in RECURRENT:  # of the prompt all positions, not just the last
        rows = heads.features(drafter, reference.arrays["rows"][:6], read=READS.get(name, ()))
        head = drafter.head
        states = head.step(head.rows(rows), mx.array(reference.prompt[1:]), head.make_cache())
        assert is_as_in_torch(name, "prefill", head.logits(states))


# Controls ----------------------------------------------------------------------------------------


def option(**options: Any) -> Change:
    """A control that loads the head otherwise."""
    return lambda patch, given: given.update(options)


def family(name: str, **changes: Any) -> Change:
    """A control that takes the layer to be written otherwise."""
    changed = replace(mtp.FAMILIES[name], **changes)
    return lambda patch, given: patch.setitem(mtp.FAMILIES, name, changed)


def with_a_rotation(config: mtp.Config, depth: int) -> mtp.Config:
    """EXAONE's layer as if no other had a window."""
    return {"is_moe_layer": [False], "layer_types": ["full_attention"]}


def without_scaled_ranks(model: Any) -> None:
    """LongCat's latent attention as DeepSeek's."""
    mtp.keep_half_of_its_layer(model)
    attention = model.model.layers[0].self_attn[0]
    attention.mla_scale_q_lora = attention.mla_scale_kv_lora = 1.0


def by_the_targets_head(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Not by that of each layer."""

    def by_target(self: Any, states: mx.array, rows: Any = None) -> Any:
        return self.anatomy.logits(self.norm(states))

    patch.setattr(MTPHead, "logits", by_target)


def drafts_stay(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """In the caches, so that the second draft is another; that is why there are two."""
    patch.setattr(Rollback, "rewind_to", lambda self, position: position)


def tokens_off_by_one(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """A state goes with the token before the one that it should go with."""
    step = LayerState.step

    def wrong(self: Any, states: mx.array, tokens: mx.array) -> mx.array:
        return step(self, states, mx.concatenate([tokens[:1], tokens[:-1]]))

    patch.setattr(LayerState, "step", wrong)


def context_off_by_one(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """The context stands one position nearer to the block of four."""
    rotate = nn.RoPE.__call__

    def wrong(self: Any, x: mx.array, offset: int = 0) -> mx.array:
        return rotate(self, x, offset if x.shape[-2] == 4 else offset + 1)

    patch.setattr(nn.RoPE, "__call__", wrong)


def position_moves_on(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Each token of a draft is asked from a position of its own."""
    step = gemma4_assistant.AssistantSource.next_logits

    def wrong(self: Any, token: mx.array | None, parents: Any = None) -> mx.array:
        if token is not None:
            self.read_caches = {
                k: x._replace(offset=x.offset + 1) for k, x in self.read_caches.items()
            }
        return step(self, token)

    patch.setattr(gemma4_assistant.AssistantSource, "next_logits", wrong)


class Given(nn.Module):  # type: ignore[misc]
    """An embedding that has one answer."""

    def __init__(self, states: mx.array) -> None:
        super().__init__()
        self.states = states

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.states


def assistant_inputs(change: Callable[..., tuple[mx.array, mx.array, Any]]) -> Change:
    """A control whose steps get other inputs; change: (state, embedded, caches) -> all three."""

    def apply(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
        step = gemma4_assistant.Gemma4Assistant.step

        def wrong(self: Any, state: mx.array, token: mx.array, read: Any, rows: Any) -> Any:
            ends, scale = self.anatomy, self.anatomy.width**0.5
            state, embedded, read = change(state, ends.embed(token) * scale, read)
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(self, "anatomy", replace(ends, embedding=Given(embedded / scale)))
                return step(self, state, token, read, rows)

        patch.setattr(gemma4_assistant.Gemma4Assistant, "step", wrong)

    return apply


def off_by_one(state: mx.array, x: mx.array, read: Any) -> tuple[mx.array, mx.array, Any]:
    """The position before."""
    full = read["full_attention"]
    return state, x, read | {"full_attention": full._replace(offset=full.offset - 1)}


def one_short(state: mx.array, x: mx.array, read: Any) -> tuple[mx.array, mx.array, Any]:
    """Without the last key."""
    keys, values, offset = read["sliding_attention"]
    short = KeysValues(keys[:, :, :-1], values[:, :, :-1], offset)
    return state, x, read | {"sliding_attention": short}


def of_layers(name: str) -> dict[str, Change]:
    """The controls of a prediction layer of any family."""
    one = mtp.FAMILIES[name]
    return {
        "state first": family(name, hidden_first=True),
        "state on the other side of the norm": option(pre_norm=not one.pre_norm),
        "norms shifted or not": option(norms_less_one=not one.norms_less_one),
        "tokens off by one": tokens_off_by_one,
        "drafts stay": drafts_stay,
    }


def normed_states_chained(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """As if its own norm did not belong to the head."""
    family("step3p5", pre_norm=False)(patch, given)
    given.update(pre_norm=True)


CONTROLS: dict[str, dict[str, Change]] = {f"mtp_{n}": of_layers(n) for n in (*MTP, *STACKS)}
CONTROLS["mtp_exaone_moe"]["rotated"] = family("exaone_moe", changes=with_a_rotation)
CONTROLS["mtp_longcat_flash"]["ranks"] = family("longcat_flash", adapted=without_scaled_ranks)
CONTROLS["mtp_step3p5"] |= {
    "normed states chained": normed_states_chained,
    "not chained": family("step3p5", further="side by side"),
    "first layer again": family("step3p5", further="again"),
    "target's head": by_the_targets_head,
    "window one wider": option(changes={"sliding_window": 5}),
}
CONTROLS["mtp_mimo_v2_flash"] |= {
    "chained": family("mimo_v2_flash", further="chained"),
    "first layer again": family("mimo_v2_flash", further="again"),
    "window one wider": option(changes={"sliding_window_size": 5}),
}
CONTROLS["eagle3"] = {
    "layers off by one": option(layers=(2, 4, 5)),
    "layers in another order": option(layers=(4, 3, 1)),
    "normed residual": option(changes={"norm_before_residual": True}),
    "normed state fed back": option(changes={"norm_output": True}),
    "tokens off by one": tokens_off_by_one,
    "drafts stay": drafts_stay,
}
CONTROLS["eagle1"] = {"tokens off by one": tokens_off_by_one, "drafts stay": drafts_stay}
CONTROLS["dflash"] = {
    "layers off by one": option(layers=(2, 4, 6)),
    "context off by one": context_off_by_one,
    "no window": option(changes={"layer_types": None}),
    "window one wider": option(changes={"sliding_window": 5}),
    "window both ways": option(changes={"is_causal": False}),
}
CONTROLS["gemma4_assistant"] = {
    "position moves on": position_moves_on,
    "position off by one": assistant_inputs(off_by_one),
    "last key missing": assistant_inputs(one_short),
    "state first": assistant_inputs(lambda state, x, read: (x, state, read)),
    "bare embedding": assistant_inputs(lambda state, x, read: (state, x / heads.WIDTH**0.5, read)),
    "fewer groups": option(changes={"centroid_intermediate_top_k": 4}),
}


def attribute(owner: Any, name: str, wrong: Any) -> Change:
    """A control that runs it otherwise."""
    return lambda patch, given: patch.setattr(owner, name, wrong)


def after_the_text(self: BlockSource, tokens: mx.array | None, parents: Any = None) -> mx.array:
    """Every place as if the block's known token stood before it."""
    rows = mx.array(places_after(self.places, tokens, parents))
    return self.head.corrected(self.logits[rows], self.states[rows], mx.array(self.tokens[-1:]))


def no_convolution(self: GroupedConvolution, part: Any, x: mx.array) -> Any:
    """The part alone."""
    return part(x)


CORRECTED: dict[str, Change] = {
    "layers off by one": option(layers=(2, 4, 6)),
    "the token before is the text's last": attribute(BlockSource, "next_logits", after_the_text),
    "causal in the block": option(changes={"is_causal": True}),
}
MARKOV = CORRECTED | {
    "own place does not draft": option(changes={"sample_from_anchor": False}),
    "no bias": attribute(MarkovHead, "__call__", lambda self, logits, *others: logits),
}
CONTROLS |= {
    "dflash2": CORRECTED
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
def test_the_comparison_finds_each_trap(name: str, tmp_path: Path) -> None:
    """With one thing wrong, one of the two drafts at least has other logits."""

    def check(control: str) -> None:
        options: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            CONTROLS[name][control](patch, options)
            changes = options.pop("changes", {})
            drafts = both_drafts(name, heads.loaded(name, tmp_path / control, options, **changes))
        assert not all(is_as_in_torch(name, part, logits) for part, (_, logits) in drafts.items())

    each(CONTROLS[name], check)
