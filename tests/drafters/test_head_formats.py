"""Every published format of heads: a file in its layout loads, drafts and changes no text.

The packagings of block heads of 2026 are described twice. The config of a case has the words of its
publisher, and `block_logits` is the formula of them all in NumPy.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import heads
import specdec_mlx as sd
import tiny
from selection import cases, in_one_test
from specdec_mlx.contracts import DraftContext, FeatureRows
from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.drafters.heads.loading import FORMATS, is_head, kind_of, load_head
from specdec_mlx.drafters.heads.mtp import FAMILIES
from specdec_mlx.errors import HeadError, UnreadableError
from specdec_mlx.models.anatomy import StateReader
from specdec_mlx.token_ids import to_list
from tiny_model_folder import write_model_folder

Arrays = dict[str, np.ndarray[Any, Any]]

HEADS, KV_HEADS, WIDTH, DEPTH, RANK, BLOCK = 4, 2, 8, 2, 4, 5
"""Sizes of every tiny head: attention heads, their width, layers, rank and positions of a block."""
PROMPT = [5, 17, 9, 33, 71, 2, 64, 5, 17]
LAYER: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
}
LAYER |= {"num_hidden_layers": DEPTH, "intermediate_size": 24, "rms_norm_eps": 1e-6}
MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
FULL, SLIDING = ["full_attention"] * DEPTH, ["sliding_attention"] * DEPTH


@dataclass(frozen=True)
class Case:
    """A packaging.

    Attributes:
        target: architecture of the tiny target.
        config: config.json, without sizes of the target.
        taps: layers of the target whose outputs the head reads.
        theta: base of the rotary embedding.
        window: positions that a position sees on each side, with itself.
        before: a position sees no later positions.
        interleaved, rotated: pairs of neighbours rotate; number of channels that rotate.
        sinks, gated, plus_one, noise: parts of the formula.
        anchor: the position of the known token drafts.
        num_tokens: size of a draft vocabulary, 0 for none.
        changes: changes of the tiny target.
    """

    target: str
    config: dict[str, Any]
    taps: tuple[int, ...] = (0, 1)
    theta: float = 1e6
    window: int | None = None
    before: bool = False
    interleaved: bool = False
    rotated: int = WIDTH
    sinks: bool = False
    gated: bool = False
    plus_one: bool = False
    noise: bool = False
    anchor: bool = True
    markov: bool = True
    num_tokens: int = 0
    own_embedding: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


def speculators(proposed: int, **layer: Any) -> dict[str, Any]:
    """The config of a head of speculators, which counts its drafts and numbers layers from 1."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": proposed}
    return {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkDraftModel"],
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [proposal]},
        "transformer_layer_config": {"model_type": "qwen3", **layer},
        "aux_hidden_state_layer_ids": [1, 2],
        "mask_token_id": 1,
        "block_size": BLOCK,
        **MARKOV,
    }


WINDOWS = {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 6}
NESTED = {"mask_token_id": 1, "target_layer_ids": [0, 1]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
STANDALONE = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": BLOCK}
STANDALONE |= NESTED | MARKOV | ROPE
SPECFORGE = {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "block_size": BLOCK}
SPECFORGE |= MARKOV | ROPE | {"dflash_config": NESTED | {"projector_type": "dspark"}}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 32}
NVIDIA = {"sample_from_anchor": False, "causal": True, "attention_sink_bias": True}
NVIDIA |= NESTED | {"use_swa": True, "swa_window_size": 6}

CASES: dict[str, Case] = {
    "LFM2.5": Case(
        "lfm2",
        {
            **STANDALONE,
            "architectures": ["Lfm2DSparkDraftModel"],
            "rope_theta": 1e4,
            "layer_types": FULL,
            "rope_is_neox_style": False,
            "dflash_config": NESTED | {"num_target_layers": 4},
        },
        theta=1e4,
        interleaved=True,
    ),
    "MiniCPM5": Case("llama", STANDALONE | {"projector_type": "dspark"}),
    "Nanbeige": Case(
        "nanbeige",
        SPECFORGE
        | {"dflash_config": {**NESTED, "projector_type": "dspark", "target_layer_ids": [0, 1, 2]}},
        taps=(0, 1, 2),
        changes={"num_loops": 2},
    ),
    "Nemotron Lightning": Case(
        "nemotron_h",
        {
            **STANDALONE,
            **WINDOWS,
            "rope_parameters": None,
            "rope_theta": 1e4,
            "dflash_query_causal": True,
            "attention_sink_bias": True,
            "has_embed_tokens": True,
            "has_lm_head": False,
            "dflash_config": NVIDIA,
        },
        theta=1e4,
        window=6,
        before=True,
        sinks=True,
        anchor=False,
        own_embedding=True,
    ),
    "Muse-Glimmer by DaoCloud": Case(
        "muse_glimmer",
        speculators(BLOCK, **WINDOWS, **ROPE) | {"sample_from_anchor": True},
        window=6,
        before=True,
    ),
    "Muse-Glimmer's own DFlash": Case(
        "muse_glimmer",
        {
            "model_type": "muse_glimmer_assistant",
            "architectures": ["MuseGlimmerAssistantModel"],
            "layer_types": SLIDING,
            "sliding_window": 6,
            "dflash_config": NESTED | {"block_size": BLOCK},
            **ROPE,
        },
        window=7,
        anchor=False,
        markov=False,
    ),
    "Qwen3.8 by RedHatAI": Case(
        "qwen3_5", speculators(BLOCK, **WINDOWS, **ROPE), window=6, before=True
    ),
    "Qwen3.8 by RadixArk": Case("qwen3_5", SPECFORGE | {"rope_parameters": YARN}),
    "Gemma 4 by makora": Case(
        "gemma4_text", speculators(BLOCK - 1, layer_types=FULL, **ROPE), anchor=False, num_tokens=40
    ),
    "Ornith": Case(
        "qwen3_5",
        {
            **STANDALONE,
            "architectures": ["Qwen35DSparkModel"],
            "model_type": "qwen3_5",
            "enable_qwen35_gated_q_proj": True,
            "rope_parameters": ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5},
        },
        rotated=4,
        gated=True,
        plus_one=True,
    ),
    "Bonsai in GGUF": Case("qwen3_5", {}, noise=True),
}
"""Name of a model, and of who published the head where there are several."""


@cache
def target(name: str) -> nn.Module:
    case = CASES[name]
    return tiny.build(case.target, **case.changes)


def published(name: str) -> Arrays:
    """Random tensors of a head, with the names and shapes of its publisher."""
    case, anatomy = CASES[name], anatomy_for_head(target(name))
    width, rows = anatomy.width, anatomy.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(case.taps) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(DEPTH):
        inside = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (HEADS * WIDTH * (1 + case.gated), width),
            "self_attn.k_proj.weight": (KV_HEADS * WIDTH, width),
            "self_attn.v_proj.weight": (KV_HEADS * WIDTH, width),
            "self_attn.o_proj.weight": (width, HEADS * WIDTH),
            "self_attn.q_norm.weight": (WIDTH,),
            "self_attn.k_norm.weight": (WIDTH,),
            "mlp.gate_proj.weight": (24, width),
            "mlp.up_proj.weight": (24, width),
            "mlp.down_proj.weight": (width, 24),
        }
        if case.sinks:
            inside["self_attn.attention_sink_bias"] = (HEADS,)
        shapes |= {f"layers.{i}.{part}": shape for part, shape in inside.items()}
    if case.markov:
        shapes["markov_head.markov_w1.weight"] = (rows, RANK)
        shapes["markov_head.markov_w2.weight"] = (case.num_tokens or rows, RANK)
        shapes["confidence_head.proj.weight"] = (1, width + RANK)
        shapes["confidence_head.proj.bias"] = (1,)
    if case.noise:
        shapes |= {"log_snr_embed.fc1.weight": (width, 128), "log_snr_embed.fc1.bias": (width,)}
        shapes |= {"log_snr_embed.fc2.weight": (width, width), "log_snr_embed.fc2.bias": (width,)}
    if case.own_embedding or case.noise:
        shapes["embed_tokens.weight"] = (rows, width)
    if case.num_tokens:
        shapes["lm_head.weight"] = (case.num_tokens, width)
    rng = np.random.default_rng(7)
    made: Arrays = {}
    for key, shape in shapes.items():
        values = rng.standard_normal(shape)
        matrix = values / np.sqrt(shape[-1]) if len(shape) == 2 else values
        if "norm" in key:
            matrix = 1 + 0.3 * values - case.plus_one
        made[key] = matrix.astype(np.float32)
    if case.num_tokens:
        ids = np.sort(rng.choice(rows, case.num_tokens, replace=False))
        made["d2t"] = ids - np.arange(case.num_tokens)
        made["t2d"] = np.isin(np.arange(rows), ids)
    if "muse_glimmer_assistant" in str(case.config):
        renamed = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
        for old, new in renamed.items():
            made[f"{new}weight"] = made.pop(f"{old}weight")
    return made


def write(name: str, folder: Path) -> Path:
    """A head as its publisher gives it. Returns the folder or the file to load."""
    case, anatomy = CASES[name], anatomy_for_head(target(name))
    sizes = {**LAYER, "hidden_size": anatomy.width, "vocab_size": anatomy.vocab_size}
    if case.noise:
        return write_gguf(folder / "head.gguf", sizes, published(name))
    config = dict(case.config)
    if "transformer_layer_config" in config:
        config["transformer_layer_config"] = sizes | config["transformer_layer_config"]
    else:
        config = sizes | config
    config["draft_vocab_size"] = case.num_tokens or anatomy.vocab_size
    return heads.Reference(config, published(name), {}).write(folder)


GGUF_NAMES = {
    "fc": "dspark.fc",
    "hidden_norm": "dspark.hidden_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "dspark.markov_head_a",
    "markov_head.markov_w2": "dspark.markov_head_b",
    "confidence_head.proj": "dspark.confidence_head",
    "log_snr_embed.fc1": "dspark.log_snr_fc1",
    "log_snr_embed.fc2": "dspark.log_snr_fc2",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, sizes: Mapping[str, Any], tensors: Arrays, kind: str = "dspark") -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, kind)
    integers = {
        "embedding_length": sizes["hidden_size"],
        "feed_forward_length": sizes["intermediate_size"],
        "block_count": DEPTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": WIDTH,
        "dspark.block_size": BLOCK,
        "dspark.mask_token_id": 1,
        "dspark.markov_rank": RANK,
    }
    for key, number in integers.items():
        writer.add_uint32(f"dspark.{key}", number)
    writer.add_float32("dspark.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("dspark.rope.freq_base", 1e6)
    for key, end in (("min", -9.0), ("max", 9.0)):
        writer.add_float32(f"dspark.dspark.{key}_log_snr", end)
    for key in ("log_snr_conditioning", "confidence_head", "confidence_head_with_markov"):
        writer.add_bool(f"dspark.dspark.{key}", True)
    writer.add_array("dspark.dspark.target_layers", [0, 1])
    for name, values in tensors.items():
        inside, _, ending = name.rpartition(".")
        prefix = ""
        if inside.startswith("layers."):
            _, layer, inside = inside.split(".", 2)
            prefix = f"blk.{layer}."
        writer.add_tensor(f"{prefix}{GGUF_NAMES[inside]}.{ending}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# The formula --------------------------------------------------------------------------------------


def normed(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(case: Case, x: Any, start: int) -> Any:
    """Vectors [n, heads, W] of positions from `start` on, with their first channels rotated."""
    half = case.rotated // 2
    frequencies = case.theta ** (-np.arange(half) / half)
    angles = (start + np.arange(len(x)))[:, None, None] * frequencies
    out = x.copy()
    if case.interleaved:
        first, second = slice(0, case.rotated, 2), slice(1, case.rotated, 2)
    else:
        first, second = slice(0, half), slice(half, case.rotated)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * np.cos(angles) - b * np.sin(angles)
    out[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return out


def attention(case: Case, w: Mapping[str, Any], block: Any, context: Any) -> Any:
    """Outputs [B, D] of a block of normed states [B, D] over a context [n, D] and itself."""
    start, size = len(context), len(block)
    queries, gate = (block @ w["self_attn.q_proj"].T).reshape(size, HEADS, -1), None
    if case.gated:
        queries, gate = queries[..., :WIDTH], queries[..., WIDTH:]
    queries = rotated(case, normed(queries, w["self_attn.q_norm"]), start)
    both = np.concatenate([context, block])
    keys = (both @ w["self_attn.k_proj"].T).reshape(-1, KV_HEADS, WIDTH)
    keys = rotated(case, normed(keys, w["self_attn.k_norm"]), 0)
    values = (both @ w["self_attn.v_proj"].T).reshape(-1, KV_HEADS, WIDTH)
    out = np.zeros((size, HEADS, WIDTH))
    for i in range(size):
        for head in range(HEADS):
            mine = head * KV_HEADS // HEADS
            seen = [
                j
                for j in range(start + size)
                if not (case.before and j > start + i)
                and (case.window is None or abs(start + i - j) < case.window)
            ]
            scores = np.exp(keys[seen, mine] @ queries[i, head] / np.sqrt(WIDTH))
            total = scores.sum()
            if case.sinks:
                total += np.exp(w["self_attn.attention_sink_bias"][head])
            out[i, head] = scores @ values[seen, mine] / total
    if gate is not None:
        out = out / (1 + np.exp(-gate))
    return out.reshape(size, -1) @ w["self_attn.o_proj"].T


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def block_logits(name: str, rows: Any, token: int) -> tuple[Any, Any]:
    """Logits [n, V] of a block after a token, and the bias [V, V] by the token before."""
    case, anatomy = CASES[name], anatomy_for_head(target(name))
    w: dict[str, Any] = {}
    for key, x in published(name).items():
        key = key.replace("encoder.output_norm_enc", "hidden_norm").replace("encoder.", "")
        wide = x.astype(np.float64)
        w[key.removesuffix(".weight")] = wide + 1 if case.plus_one and "norm" in key else wide
    ids = mx.arange(anatomy.vocab_size)
    embeddings = w["embed_tokens"] if case.own_embedding else np.array(anatomy.embed(ids))
    context = normed(rows @ w["fc"].T, w["hidden_norm"])
    h = embeddings[[token, *[1] * (BLOCK - 1)]].astype(np.float64)
    if case.noise:
        level = np.zeros((BLOCK, 64))
        level[0] = 1000 * 10000.0 ** (-np.arange(64) / 64)
        features = np.concatenate([np.sin(level), np.cos(level)], axis=-1)
        hidden = silu(features @ w["log_snr_embed.fc1"].T + w["log_snr_embed.fc1.bias"])
        h = h + hidden @ w["log_snr_embed.fc2"].T + w["log_snr_embed.fc2.bias"]
    for i in range(DEPTH):
        prefix = f"layers.{i}."
        layer = {k.removeprefix(prefix): x for k, x in w.items() if k.startswith(prefix)}
        h = h + attention(case, layer, normed(h, layer["input_layernorm"]), context)
        x = normed(h, layer["post_attention_layernorm"])
        gate, up = (x @ layer[f"mlp.{part}_proj"].T for part in ("gate", "up"))
        h = h + (silu(gate) * up) @ layer["mlp.down_proj"].T
    states = normed(h, w["norm"])[0 if case.anchor else 1 :]
    rows_out, size = None, anatomy.vocab_size
    if case.num_tokens:
        rows_out = (w["d2t"] + np.arange(case.num_tokens)).astype(int)
        logits = np.full((len(states), size), -np.inf)
        logits[:, rows_out] = states @ w["lm_head"].T
    else:
        logits = np.array(anatomy.logits(mx.array(states.astype(np.float32))), np.float64)
    if not case.markov:
        return logits, np.zeros((size, size))
    bias = np.zeros((size, size))
    columns = slice(None) if rows_out is None else rows_out
    bias[:, columns] = w["markov_head.markov_w1"] @ w["markov_head.markov_w2"].T
    return logits, bias


# Tests --------------------------------------------------------------------------------------------


REFERENCES = [name for name in heads.references() if name != "medusa"]
OWN_LAYERS = {name: name for name in FAMILIES if f"mtp_{name}" not in REFERENCES}
OWN_LAYERS |= {"llama_mtp": "llama", "qwen3_5_moe": "qwen3_5_moe"}
FORMATS_BY_FILE: dict[str, str] = {
    **dict.fromkeys(REFERENCES, "a fixture"),
    "medusa": "a fixture",
    "pard": "a model",
    "pard2": "a model",
    **dict.fromkeys(("mlp", "prefix-mlp"), "Hydra"),
    **dict.fromkeys(OWN_LAYERS, "prediction layers"),
    **dict.fromkeys(CASES, "a packaging"),
}
"""Name of a format, a family of prediction layers or a packaging, and how its file is made."""
IN_SHORT = (
    "eagle3",
    "gemma4_assistant",
    "prefix-mlp",
    "mimo",
    "LFM2.5",
    "Bonsai in GGUF",
    "Ornith",
)


def of_file(name: str, folder: Path) -> tuple[nn.Module, Any]:
    """A target, and the drafter that is loaded for it from a file in the format's layout."""
    match FORMATS_BY_FILE[name]:
        case "a packaging":
            return target(name), load_head(write(name, folder), target(name))
        case "a fixture":
            return heads.reference(name).target(), heads.loaded(name, folder)
        case "Hydra":
            return heads.target(), load_head(write_hydra(name, folder), heads.target())
        case "a model":
            model = tiny.build("llama", vocab_size=288)
            settings = {"pard2_target_layers": [-1, -8], "pard2": True} if name == "pard2" else {}
            return model, load_head(write_model_folder(folder, pard_token=17, **settings), model)
    family, config = FAMILIES[name], tiny.CONFIGS[OWN_LAYERS[name]]
    part = config.get("text_config", config)
    model = tiny.build(OWN_LAYERS[name])
    # A layer that was trained for a model without such layers says what it is itself.
    changes = {"layer_types": ["full_attention"]} if name == "llama_mtp" else {}
    config, make = config | changes, heads.mtp(name, **changes)
    stored = heads.as_published(heads.random_head(make, model), family, part)
    arrays = {key: np.array(x) for key, x in stored.items()}
    reference = heads.Reference(config | {"model_type": name}, arrays, {})
    return model, load_head(reference.write(folder), model)


@pytest.mark.parametrize("name", cases(FORMATS_BY_FILE, *IN_SHORT))
def test_every_format_loads_drafts_and_changes_no_text(name: str, tmp_path: Path) -> None:
    """The text is plain decoding's own, greedy and for a seed."""
    model, drafter = of_file(name, tmp_path)
    seeded = {"sampler": sd.Sampling(temp=0.8), "seed": 3}
    for options in ({}, seeded):
        texts, drafted = [], 0
        for one in (None, drafter):
            steps = list(
                sd.speculate(model, PROMPT, one, max_tokens=12, num_draft_tokens=4, **options)
            )
            texts.append([step.token for step in steps])
            drafted = steps[-1].stats.drafted
        assert texts[0] == texts[1]
        assert drafted > 8


def test_no_format_is_left_out() -> None:
    """Each format that loads, and each family of prediction layers, has a file in the table."""
    kinds = {
        kind
        for name in REFERENCES
        for kind in FORMATS
        if kind_of(heads.reference(name).config, heads.reference(name).weights) == kind
    }
    missing = {kind for kind, form in FORMATS.items() if form.loads} - kinds
    assert missing <= {"medusa", "pard", "pard2", "hydra"}
    layers = {name.removeprefix("mtp_") for name in FORMATS_BY_FILE}
    assert FAMILIES.keys() <= layers


@pytest.mark.parametrize("name", cases(CASES, *IN_SHORT[4:]))
def test_a_packaging_reads_and_drafts_what_it_says(name: str, tmp_path: Path) -> None:
    """The layers of the target, and as many tokens as its block has places for."""
    place = write(name, tmp_path)
    drafter = load_head(place, target(name))
    assert is_head(place)
    assert drafter.features.layers == CASES[name].taps
    assert drafter.head.most_drafted == (BLOCK if CASES[name].anchor else BLOCK - 1)


@pytest.mark.parametrize("name", [name for name in CASES if "RadixArk" not in name])
def test_a_packaging_drafts_what_its_formula_says(name: str, tmp_path: Path) -> None:
    """Logits of each position and the drafts of a chain, against NumPy in float64."""
    model, case = target(name), CASES[name]
    drafter = load_head(write(name, tmp_path), model)
    anatomy = anatomy_for_head(model)
    made = np.random.default_rng(1).standard_normal((8, len(case.taps), anatomy.width))
    rows = made.astype(np.float32)
    layers = {layer: mx.array(rows[:, i]) for i, layer in enumerate(case.taps)}
    session: Any = drafter.begin(PROMPT, DraftContext(vocab_size=anatomy.vocab_size))
    session.see(FeatureRows(layers, mx.zeros((8, anatomy.width))))
    tokens = to_list(session.propose(BLOCK).tokens)
    logits, bias = block_logits(name, rows.reshape(8, -1), PROMPT[-1])
    expected, before = [], PROMPT[-1]
    for row in logits:
        before = int((row + bias[before]).argmax())
        expected.append(before)
    own = np.array(session.source.logits, np.float64)
    limited = np.isfinite(logits)
    assert np.abs(own[limited] - logits[limited]).max() < 1e-4 * np.abs(logits[limited]).max()
    assert tokens == expected


# Hydra --------------------------------------------------------------------------------------------

NUM_HYDRA, NUM_BLOCKS = 3, 2


def hydra(kind: str) -> Arrays:
    """Random tensors of Hydra heads of a kind, with the published names."""
    anatomy, has_layer = anatomy_for_head(heads.target()), kind == "prefix-mlp"
    width, rows = anatomy.width, anatomy.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(NUM_HYDRA):
        for j in range(NUM_BLOCKS):
            # Dropout takes every other place.
            place = f"hydra_mlp.{i}.{2 * j + 1 if has_layer else j}."
            read = width if j else (i + 2) * width
            for part in ("linear", *(() if j else ("res_connection",))):
                shapes |= {f"{place}{part}.weight": (width, read), f"{place}{part}.bias": (width,)}
        output = f"hydra_lm_head.{i}.{'1.' if has_layer else ''}"
        shapes |= {f"{output}weight": (rows, width), f"{output}bias": (rows,)}
    if has_layer:
        layer, prefix = heads.target().layers[0], "prefix_embeding_layer."
        own: Any = tree_flatten(layer.parameters())
        shapes |= {f"{prefix}layers.0.{part}": x.shape for part, x in own}
        shapes |= {f"{prefix}norm.weight": (width,), f"{prefix}embed_tokens.weight": (rows, width)}
    rng = np.random.default_rng(3)
    return {
        name: (
            (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
            + np.float32("norm" in name)
        )
        for name, shape in shapes.items()
    }


def write_hydra(kind: str, folder: Path) -> Path:
    config = {
        "hydra_num_heads": NUM_HYDRA,
        "hydra_num_layers": NUM_BLOCKS,
        "hydra_head_arch": kind,
        "grounded_heads": True,
        "hidden_state_offset": 0,
    }
    return heads.Reference(config, hydra(kind), {}).write(folder)


def prefix_states(w: Mapping[str, Any], x: Any) -> Any:
    """States [n, D] of Llama's layer and norm over the target's states, in causal attention."""
    args, size = heads.target().args, len(x)
    eps, num_heads, num_kv = args.rms_norm_eps, args.num_attention_heads, args.num_key_value_heads
    inner, half = w["layers.0.self_attn.q_proj.weight"].shape[0], args.head_dim // 2

    def normed_by(x: Any, name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def turned(x: Any) -> Any:
        angles = np.arange(size)[:, None, None] * args.rope_theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        parts = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
        return np.concatenate(parts, axis=-1)

    read = normed_by(x, "layers.0.input_layernorm")
    q, k, v = (read @ w[f"layers.0.self_attn.{part}_proj.weight"].T for part in "qkv")
    q = turned(q.reshape(size, num_heads, -1))
    k, v = (y.reshape(size, num_kv, -1).repeat(num_heads // num_kv, axis=1) for y in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, turned(k)) / np.sqrt(args.head_dim)
    weights = np.exp(scores) * np.tri(size)
    seen = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)
    h = x + seen.reshape(size, inner) @ w["layers.0.self_attn.o_proj.weight"].T
    read = normed_by(h, "layers.0.post_attention_layernorm")
    gate, up = (read @ w[f"layers.0.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    h = h + (silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
    return normed_by(h, "norm")


@pytest.mark.parametrize("kind", ["mlp", "prefix-mlp"])
def test_hydra_drafts_what_its_formula_says(kind: str, tmp_path: Path) -> None:
    """Logits of each head and the drafts of a chain, against NumPy in float64."""
    model, anatomy = heads.target(), anatomy_for_head(heads.target())
    drafter = load_head(write_hydra(kind, tmp_path), model)
    rows = np.random.default_rng(1).standard_normal((8, anatomy.width)).astype(np.float32)
    session: Any = drafter.begin(PROMPT, DraftContext(vocab_size=anatomy.vocab_size))
    own: list[Any] = []
    make, width = session.source.next_logits, anatomy.width
    session.source.next_logits = lambda *given: own.append(make(*given)) or own[-1]
    session.see(FeatureRows({}, mx.array(rows[:5])))
    session.propose(0)
    session.see(FeatureRows({}, mx.array(rows[5:])))
    tokens = to_list(session.propose(9).tokens)
    w = {name.removeprefix("prefix_embeding_layer."): x for name, x in hydra(kind).items()}
    w = {name: x.astype(np.float64) for name, x in w.items()}
    table = np.array(model.model.embed_tokens.weight, np.float64)
    wide = rows.astype(np.float64)
    read = (prefix_states(w, wide) if kind == "prefix-mlp" else wide)[-1]
    token, expected = PROMPT[-1], []
    for i in range(NUM_HYDRA):
        read = np.concatenate([read, table[token]])
        x = read
        for j in range(NUM_BLOCKS):
            place = f"hydra_mlp.{i}.{2 * j + 1 if kind == 'prefix-mlp' else j}."
            y = silu(x @ w[f"{place}linear.weight"].T + w[f"{place}linear.bias"])
            residual = x if j else x @ w[f"{place}res_connection.weight"].T
            x = y + (residual if j else residual + w[f"{place}res_connection.bias"])
        output = f"hydra_lm_head.{i}.{'1.' if kind == 'prefix-mlp' else ''}"
        logits = x @ w[f"{output}weight"].T + w[f"{output}bias"]
        assert np.abs(np.array(own[i])[0] - logits).max() < 1e-4 * np.abs(logits).max()
        token = int(logits.argmax())
        expected.append(token)
    assert read.size == (NUM_HYDRA + 1) * width
    assert tokens == expected


def test_a_fork_of_hydra_reads_its_own_path(tmp_path: Path) -> None:
    """The logits after a node of a tree are those after a chain of its ancestors and itself."""
    model, anatomy = heads.target(), anatomy_for_head(heads.target())
    drafter = load_head(write_hydra("mlp", tmp_path), model)
    session: Any = drafter.begin(PROMPT, DraftContext(vocab_size=anatomy.vocab_size))
    source = session.source
    session.see(FeatureRows({}, mx.random.normal((8, anatomy.width), key=mx.random.key(0))))
    chains = []
    for path in ([3, 8], [4, 9]):
        source.begin_draft(3)
        source.next_logits(None)
        chains.append([source.next_logits(mx.array([token])) for token in path])
    source.begin_draft(3)
    source.next_logits(None, ())
    for depth, (tokens, parents) in enumerate((([3, 4], [-1, -1]), ([9, 8], [1, 0]))):
        rows = source.next_logits(mx.array(tokens), parents)
        expected = [chain[depth] for chain in (chains[::-1] if depth else chains)]
        assert mx.allclose(rows, mx.concatenate(expected), atol=1e-5)


def test_a_yarn_rope_in_a_head_of_specforge_counts(tmp_path: Path) -> None:
    drafter = load_head(write("Qwen3.8 by RadixArk", tmp_path), target("Qwen3.8 by RadixArk"))
    rope = drafter.head.layers[0].self_attn.rope
    assert type(rope).__name__ == "YarnRoPE"
    assert rope.mscale > 1.1


def test_a_model_with_loops_shows_each_pass_over_its_layers() -> None:
    """Outputs of layers by their place in the pass; between loops the input of the next loop."""
    model = target("Nanbeige")
    layers, norm = model.layers, model.model.norm
    reader = StateReader(model, sd.drafters.Features(layers=(0, 1, 2, 3)))
    tokens = mx.array([PROMPT])
    reader.read(lambda: model(tokens, cache=model.make_cache())[0])
    assert reader.features is not None
    h, expected = model.model.embed_tokens(tokens), []
    for step in range(4):
        h = layers[step % 2](h, "causal", None)
        expected.append(h)
        if step == 1:
            h = expected[1] = norm(h)
    for index, states in enumerate(expected):
        assert mx.allclose(reader.features.layers[index], states[0], atol=1e-4)
    with pytest.raises(UnreadableError, match="layers 0 to 3"):
        StateReader(model, sd.drafters.Features(layers=(4,)))


# Formats and models that cannot be read, by name --------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "EAGLE-4": (
        {"architectures": ["Eagle4DraftModel"], "draft_vocab_size": 90},
        ["fc.weight", "layers.0.hidden_norm.weight"],
        "holds EAGLE-4",
    ),
    "P-EAGLE by speculators": ({"speculators_model_type": "peagle"}, ["fc.weight"], "P-EAGLE"),
    "P-EAGLE of vLLM": (
        {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3},
        ["fc.weight", "mask_hidden", "midlayer.hidden_norm.weight"],
        "holds P-EAGLE",
    ),
    "Qwen3.8-Flash-Next": (
        {"model_type": "qwen4_exp", "text_config": {"model_type": "qwen4_exp_text"}},
        ["mtp.fc.weight"],
        "qwen4_exp reads all streams of its states, and mlx-lm has no qwen4_exp",
    ),
    "DeepSeek-V4": ({"model_type": "deepseek_v4"}, ["mtp.0.e_proj.weight"], "mlx-lm has no deep"),
    "GLM-5-next": (
        {"model_type": "glm5_next", "text_config": {"model_type": "glm5_next_text"}},
        ["model.layers.78.eh_proj.weight"],
        "layers of glm5_next, which mlx-lm does not have",
    ),
    "Hunyuan V4": ({"model_type": "hy_v4"}, ["model.mtp_layers.0.eh_proj.weight"], "Hunyuan V4"),
    "Inkling": ({"model_type": "inkling"}, ["model.mtp.0.eh_proj.weight"], "layers of inkling"),
    "Inkling's layer alone": ({"model_type": "inkling_mtp"}, ["eh_proj.weight"], "of inkling"),
    "PARD-2 in training": (
        {"pard2_target_layers": [-1], "pard_token": 3, "model_type": "llama"},
        ["target_proj.weight"],
        "projects the target's states into its embeddings",
    ),
    "Hydra with a layer of EAGLE": (
        {"hydra_num_heads": 4, "hydra_head_arch": "eagle-attn"},
        ["layers.0.weight"],
        "hydra_head_arch 'eagle-attn'",
    ),
    "Hydra heads that do not see each other": (
        {"hydra_num_heads": 4, "hydra_head_arch": "mlp", "grounded_heads": False},
        ["hydra_mlp.0.0.linear.weight"],
        "grounded_heads False",
    ),
    "Hydra on an earlier layer": (
        {"hydra_num_heads": 4, "grounded_heads": True, "hidden_state_offset": 1},
        ["hydra_mlp.0.0.linear.weight"],
        "hidden_state_offset 1",
    ),
    "Nemotron's NVFP4": (
        STANDALONE | {"hidden_size": 32},
        ["fc.weight", "fc.weight_scale"],
        r"a way that mlx-lm does not read \(fc.weight_scale\)",
    ),
}


@in_one_test("name", REFUSED)
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    """With what is missing. It is never taken for a head of another kind."""
    config, tensors, words = REFUSED[name]
    arrays: Arrays = {key: np.zeros((2, 2), np.float32) for key in tensors}
    folder = heads.Reference(config, arrays, {}).write(tmp_path / str([*REFUSED].index(name)))
    with pytest.raises(HeadError, match=words):
        load_head(folder, heads.target())


def test_other_gguf_files_are_refused_in_words(tmp_path: Path, monkeypatch: Any) -> None:
    """A model, a damaged file, a missing file; and any without the reader."""
    sizes = {"hidden_size": 32, "intermediate_size": 24}
    model = write_gguf(tmp_path / "model.gguf", sizes, {}, kind="llama")
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:40])
    (tmp_path / "none.gguf").write_bytes(b"")
    said = {"model": "holds 'llama'", "cut": "cannot be read", "none": "cannot be read"}
    for name, words in (said | {"nowhere": "There is no file .*nowhere.gguf"}).items():
        with pytest.raises(HeadError, match=words):
            load_head(tmp_path / f"{name}.gguf", heads.target())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(HeadError, match=r"specdec-mlx\[gguf\]"):
        load_head(model, heads.target())


def test_a_damaged_gguf_file_is_refused_or_a_head_that_works(tmp_path: Path) -> None:
    """An error of ours, or the target's own text; nothing else."""
    name, rng, refused = "Bonsai in GGUF", random.Random(0), 0
    content, model = write(name, tmp_path).read_bytes(), target(name)
    plain = [step.token for step in sd.speculate(model, PROMPT, None, max_tokens=6)]
    for case in range(16):
        # Half of the damage is in the header.
        at = rng.randrange(4000 if case % 2 else len(content))
        end = at + rng.choice([0, 1, 40, len(content)])
        (tmp_path / "damaged.gguf").write_bytes(content[:at] + rng.randbytes(5) + content[end:])
        try:
            drafter = load_head(tmp_path / "damaged.gguf", model)
        except HeadError:
            refused += 1
            continue
        drafted = sd.speculate(model, PROMPT, drafter, max_tokens=6, num_draft_tokens=3)
        assert [step.token for step in drafted] == plain, case
    assert 0 < refused < 16


def test_a_prediction_layer_of_step_3_7_is_that_of_step_3_5(tmp_path: Path) -> None:
    """Step 3.7 reads pictures; its text part names Step 3.5, whose layers mlx-lm has."""
    reference = heads.reference("mtp_step3p5")
    config = {"model_type": "step3p7", "text_config": reference.config}
    plain = load_head(reference.write(tmp_path / "plain"), reference.target())
    for start in ("", "language_model."):
        weights = {start + name: x for name, x in reference.weights.items()}
        folder = heads.Reference(config, weights, {}).write(tmp_path / f"at {start}")
        assert load_head(folder, reference.target()).key == plain.key


def test_own_targets_with_a_dspark_inside_are_no_heads() -> None:
    assert kind_of({"model_type": "deepseek_v41", "dspark_block_size": 5}) is None
