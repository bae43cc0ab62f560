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
import numpy as np
import pytest

import heads
import specdec_mlx as sd
from selection import each
from specdec_mlx.drafters import drawing
from specdec_mlx.drafters.heads import dflash, gemma4_assistant, mtp_families
from specdec_mlx.drafters.heads.mtp import MTPHead
from specdec_mlx.drafters.heads.recurrent import Level
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import DraftContext, KeysValues

TOLERANCE = 1e-4
"""Of the largest logit."""

STACKS = ("mtp_step3p5", "mtp_mimo_v2_flash")
"""Several prediction layers, which draft a token each."""

RECURRENT = (
    *("eagle3", "eagle1", "mtp_qwen3_5", "mtp_deepseek_v3"),
    *("mtp_exaone_moe", "mtp_longcat_flash", "mtp_nemotron_h"),
)
NAMES = (*RECURRENT, *STACKS, "dflash", "gemma4_assistant")
READS = {"eagle3": (1, 3, 4), "dflash": (1, 3, 5), "mtp_step3p5": (heads.NUM_LAYERS - 1,)}
"""Layers that the rows of a fixture are of; of others they are the state after the final norm."""

Change = Callable[[pytest.MonkeyPatch, dict[str, Any]], None]


def load(name: str, folder: Path, **options: Any) -> Any:
    """The head of a fixture, for the target with its ends."""
    reference = heads.reference(name)
    changes = options.pop("changes", {})
    path = reference.write(folder, **changes)
    return sd.load_head(path, reference.target(), **options)


def both_drafts(
    name: str, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[list[int], mx.array]]:
    """Tokens and logits of the first and the second draft of a session shown the rows."""
    seen: list[mx.array] = []
    draw = drawing.Draws.draw

    def noting(self: Any, logits: mx.array) -> mx.array:
        seen.extend(mx.split(logits, len(logits)))  # of one pass they come together
        return draw(self, logits)

    reference = heads.reference(name)
    rows = reference.arrays["rows"]
    context = DraftContext(vocab_size=heads.VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr(drawing.Draws, "draw", noting)
        asked = drafter.begin(reference.prompt, context)
        shown = [
            heads.features(
                drafter,
                rows[a:b],
                read=READS.get(name, ()),
                keys_values=reference.keys_values(drafter, b),
            )
            for a, b in SHOWN
        ]
        asked.see(shown[0])
        asked.see(shown[1])
        first = to_list(asked.propose(3).tokens)
        asked.see(shown[2])
        asked.observe([int(reference.arrays["first_tokens"][0]), heads.CORRECTION])
        second = to_list(asked.propose(3).tokens)
    return {
        "first": (first, mx.concatenate(seen[:3])),
        "second": (second, mx.concatenate(seen[3:])),
    }


SHOWN = ((0, 4), (4, 6), (6, 8))
"""Positions shown: the prompt in two chunks, and those kept after the first draft."""


def is_as_in_torch(name: str, part: str, logits: mx.array) -> bool:
    """Whether logits [n, V] are the fixture's; of tokens that the head does not have, -inf."""
    reference = heads.reference(name)
    expected = reference.arrays[f"{part}_logits"]
    got = np.array(logits)
    if "d2t" in reference.weights:
        ids = reference.weights["d2t"] + np.arange(expected.shape[-1])
        absent = np.delete(got, ids, axis=-1)
        if not np.isneginf(absent).all():
            return False
        got = got[:, ids]
    if "masked_embedding.token_ordering" in reference.weights:
        got = got[:, : expected.shape[-1]]
        absent = expected == expected.min(axis=-1, keepdims=True)  # torch has a low number there
        if not (np.isneginf(got) == absent).all():
            return False
        got = np.where(absent, expected, got)
    limit = TOLERANCE * np.abs(expected).max()
    return bool(got.shape == expected.shape and np.abs(got - expected).max() <= limit)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_head_is_the_one_that_torch_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, and after a partial accept drafts again, with the same logits and tokens."""
    drafts = both_drafts(name, load(name, tmp_path), monkeypatch)
    for part, (tokens, logits) in drafts.items():
        assert is_as_in_torch(name, part, logits), part
        assert tokens == heads.reference(name).arrays[f"{part}_tokens"].tolist()


@pytest.mark.parametrize("name", RECURRENT)
def test_the_prompt_is_read_as_torch_reads_it(name: str, tmp_path: Path) -> None:
    """Logits of all of its positions, not just of the last."""
    drafter, reference = load(name, tmp_path), heads.reference(name)
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
    changed = replace(mtp_families.FAMILIES[name], **changes)
    return lambda patch, given: patch.setitem(mtp_families.FAMILIES, name, changed)


def together(*changes: Change) -> Change:
    """A control of several parts."""

    def change(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
        for part in changes:
            part(patch, given)

    return change


def with_a_rotation(config: mtp_families.Config, depth: int) -> mtp_families.Config:
    """EXAONE's layer as if no other had a window."""
    return {"layer_types": ["full_attention"]}


def without_scaled_ranks(model: Any) -> None:
    """LongCat's latent attention as DeepSeek's."""
    mtp_families.keep_half_of_its_layer(model)
    attention = model.model.layers[0].self_attn[0]
    attention.mla_scale_q_lora = attention.mla_scale_kv_lora = 1.0


def by_the_targets_head(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Not by that of each layer."""
    patch.setattr(MTPHead, "logits", lambda self, states: self.ends.logits(self.norm(states)))


def tokens_off_by_one(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """A state goes with the token before the one that it should go with."""
    step = Level.step

    def wrong(self: Any, states: mx.array, tokens: mx.array) -> mx.array:
        return step(self, states, mx.concatenate([tokens[:1], tokens[:-1]]))

    patch.setattr(Level, "step", wrong)


def drafted_entries_stay(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """What was drafted is not taken back out of the caches."""
    patch.setattr(Rollback, "rewind_to", lambda self, position: position)


def context_off_by_one(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """The context stands one position nearer to the block."""
    keys_and_values = dflash._keys_and_values

    def wrong(attention: Any, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        is_block = x.shape[1] == 4
        return keys_and_values(attention, x, offset if is_block else offset + 1)

    patch.setattr(dflash, "_keys_and_values", wrong)


def position_moves_on(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Each token of a draft is asked from a position of its own."""
    step = gemma4_assistant.AssistantSession.next_logits

    def wrong(self: Any, token: mx.array | None) -> mx.array:
        if token is not None:
            self.held = {k: x._replace(offset=x.offset + 1) for k, x in self.held.items()}
        return step(self, token)

    patch.setattr(gemma4_assistant.AssistantSession, "next_logits", wrong)


def caches_of(**changes: Callable[[KeysValues], KeysValues]) -> Change:
    """A control that reads one of the caches otherwise."""

    def change(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
        begin = gemma4_assistant.AssistantSession.begin_draft

        def wrong(self: Any, limit: int) -> int:
            length = begin(self, limit)
            self.held |= {kind: f(self.held[kind]) for kind, f in changes.items()}
            return length

        patch.setattr(gemma4_assistant.AssistantSession, "begin_draft", wrong)

    return change


def assistant_inputs(change: Callable[..., tuple[mx.array, mx.array]]) -> Change:
    """A control whose steps get other inputs; change: (self, state, embedded) -> both."""

    def apply(patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
        step = gemma4_assistant.Gemma4Assistant.step

        def wrong(self: Any, state: mx.array, token: mx.array, read: Any) -> Any:
            ends, scale = self.ends, self.ends.width**0.5
            state, embedded = change(state, ends.embed(token) * scale)
            self.ends = replace(ends, embed=lambda _: embedded / scale)
            try:
                return step(self, state, token, read)
            finally:
                self.ends = ends

        patch.setattr(gemma4_assistant.Gemma4Assistant, "step", wrong)

    return apply


def off_by_one(kv: KeysValues) -> KeysValues:
    """The position before."""
    return kv._replace(offset=kv.offset - 1)


def one_short(kv: KeysValues) -> KeysValues:
    """Without the last key."""
    return kv._replace(keys=kv.keys[:, :, :-1], values=kv.values[:, :, :-1])


CONTROLS: dict[str, tuple[str, Change]] = {
    "Qwen norms not shifted": ("mtp_qwen3_5", option(norms_less_one=False)),
    "DeepSeek norms shifted": ("mtp_deepseek_v3", option(norms_less_one=True)),
    "Qwen before the final norm": ("mtp_qwen3_5", option(pre_norm=True)),
    "DeepSeek before the final norm": ("mtp_deepseek_v3", option(pre_norm=True)),
    "Qwen, state first": ("mtp_qwen3_5", family("qwen3_5", hidden_first=True)),
    "DeepSeek, state first": ("mtp_deepseek_v3", family("deepseek_v3", hidden_first=True)),
    "EXAONE, state first": ("mtp_exaone_moe", family("exaone_moe", hidden_first=True)),
    "EXAONE, rotated": ("mtp_exaone_moe", family("exaone_moe", derived=with_a_rotation)),
    "EXAONE before the final norm": ("mtp_exaone_moe", option(pre_norm=True)),
    "EXAONE, tokens off by one": ("mtp_exaone_moe", tokens_off_by_one),
    "LongCat, state first": ("mtp_longcat_flash", family("longcat_flash", hidden_first=True)),
    "LongCat before the final norm": ("mtp_longcat_flash", option(pre_norm=True)),
    "LongCat, ranks not scaled": (
        "mtp_longcat_flash",
        family("longcat_flash", adapted=without_scaled_ranks),
    ),
    "Nemotron, state first": ("mtp_nemotron_h", family("nemotron_h", hidden_first=True)),
    "Nemotron before the final norm": ("mtp_nemotron_h", option(pre_norm=True)),
    "Nemotron, norms shifted": ("mtp_nemotron_h", option(norms_less_one=True)),
    "Nemotron, tokens off by one": ("mtp_nemotron_h", tokens_off_by_one),
    "Step, state first": ("mtp_step3p5", family("step3p5", hidden_first=True)),
    "Step after the final norm": ("mtp_step3p5", option(pre_norm=False)),
    "Step, normed states chained": (
        "mtp_step3p5",
        together(family("step3p5", pre_norm=False), option(pre_norm=True)),
    ),
    "Step, norms not shifted": ("mtp_step3p5", option(norms_less_one=False)),
    "Step, not chained": ("mtp_step3p5", family("step3p5", further="side by side")),
    "Step, first layer again": ("mtp_step3p5", family("step3p5", further="again")),
    "Step, target's head": ("mtp_step3p5", by_the_targets_head),
    "Step, tokens off by one": ("mtp_step3p5", tokens_off_by_one),
    "Step, window one wider": ("mtp_step3p5", option(changes={"sliding_window": 5})),
    "MiMo-V2, state first": ("mtp_mimo_v2_flash", family("mimo_v2_flash", hidden_first=True)),
    "MiMo-V2 before the final norm": ("mtp_mimo_v2_flash", option(pre_norm=True)),
    "MiMo-V2, chained": ("mtp_mimo_v2_flash", family("mimo_v2_flash", further="chained")),
    "MiMo-V2, first layer again": ("mtp_mimo_v2_flash", family("mimo_v2_flash", further="again")),
    "MiMo-V2, tokens off by one": ("mtp_mimo_v2_flash", tokens_off_by_one),
    "MiMo-V2, window one wider": ("mtp_mimo_v2_flash", option(changes={"sliding_window_size": 5})),
    "EAGLE-3, layers off by one": ("eagle3", option(layers=(2, 4, 5))),
    "EAGLE-3, layers in another order": ("eagle3", option(layers=(4, 3, 1))),
    "EAGLE-3, normed residual": ("eagle3", option(changes={"norm_before_residual": True})),
    "EAGLE-3, normed state fed back": ("eagle3", option(changes={"norm_output": True})),
    "EAGLE-3, tokens off by one": ("eagle3", tokens_off_by_one),
    "EAGLE-1, tokens off by one": ("eagle1", tokens_off_by_one),
    "DeepSeek, tokens off by one": ("mtp_deepseek_v3", tokens_off_by_one),
    "DFlash, layers off by one": ("dflash", option(layers=(2, 4, 6))),
    "DFlash, context off by one": ("dflash", context_off_by_one),
    "DFlash, no window": ("dflash", option(changes={"layer_types": None})),
    "DFlash, window one wider": ("dflash", option(changes={"sliding_window": 5})),
    "DFlash, window both ways": ("dflash", option(changes={"is_causal": False})),
    "Gemma, position moves on": ("gemma4_assistant", position_moves_on),
    "Gemma, position off by one": ("gemma4_assistant", caches_of(full_attention=off_by_one)),
    "Gemma, last key missing": ("gemma4_assistant", caches_of(sliding_attention=one_short)),
    "Gemma, state first": ("gemma4_assistant", assistant_inputs(lambda state, x: (x, state))),
    "Gemma, bare embedding": (
        "gemma4_assistant",
        assistant_inputs(lambda state, x: (state, x / heads.WIDTH**0.5)),
    ),
    "Gemma, fewer groups": (
        "gemma4_assistant",
        option(changes={"centroid_intermediate_top_k": 4}),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_finds_each_trap(name: str, tmp_path: Path) -> None:
    """With one thing wrong, one of the two drafts at least has other logits."""

    def check(control: str) -> None:
        options: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            CONTROLS[control][1](patch, options)
            drafts = both_drafts(name, load(name, tmp_path / control, **options), patch)
        assert not all(is_as_in_torch(name, part, logits) for part, (_, logits) in drafts.items())

    traps = [control for control, (of, _) in CONTROLS.items() if of == name]
    assert traps
    each(traps, check)


@pytest.mark.parametrize("name", [*RECURRENT, *STACKS])
def test_drafted_entries_that_stay_are_found_by_the_second_draft(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by the first, which is why there are two."""
    drafter = load(name, tmp_path)
    drafted_entries_stay(monkeypatch, {})
    drafts = both_drafts(name, drafter, monkeypatch)
    assert is_as_in_torch(name, "first", drafts["first"][1])
    assert not is_as_in_torch(name, "second", drafts["second"][1])
