"""Tiny configurations of the architecture files whose names start with a to h.

Each has every kind of layer that its file alternates. Windows are 16 tokens wide, so that a
short generation wraps them.
"""

from __future__ import annotations

from typing import Any

WINDOW = 16


def _config(model_type: str, **own: Any) -> dict[str, Any]:
    """Names that most architectures share, then the architecture's own."""
    shared = {
        "model_type": model_type,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "sliding_window": WINDOW,
    }
    return shared | own


def _moe(model_type: str, **own: Any) -> dict[str, Any]:
    """Four experts, two of them per token, after one dense layer."""
    experts = {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
    return _config(model_type, **(experts | own))


def _mla(model_type: str, **own: Any) -> dict[str, Any]:
    """Multi-head latent attention with small ranks, and experts."""
    ranks = {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    return _moe(model_type, **(ranks | own))


def _layers(*kinds: str) -> list[str]:
    names = {"s": "sliding_attention", "f": "full_attention", "c": "conv_mixer"}
    return [names.get(kind, kind) for kind in kinds]


_ALTERNATING = _layers("s", "f", "s", "f")

_MAMBA = {
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

_GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
}

_GEMMA3_TEXT = _config(
    "gemma3_text",
    num_hidden_layers=3,
    sliding_window_pattern=3,
    query_pre_attn_scalar=16,
    rope_local_base_freq=10000.0,
    rope_theta=100000.0,
)

_GEMMA3N_TEXT = _config(
    "gemma3n_text",
    num_hidden_layers=6,
    layer_types=_layers("s", "f", "s", "f", "s", "f"),
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=128,
    hidden_size_per_layer_input=16,
    rope_local_base_freq=10000.0,
    final_logit_softcapping=30.0,
    activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0, 0.0, 0.0],
    altup_num_inputs=2,
    altup_coef_clip=120.0,
    altup_correct_scale=True,
    altup_active_idx=0,
    laurel_rank=8,
)

_GEMMA4_TEXT = _config(
    "gemma4_text",
    num_hidden_layers=6,
    layer_types=_layers("s", "f", "s", "f", "s", "f"),
    num_kv_shared_layers=2,
    global_head_dim=32,
    vocab_size_per_layer_input=128,
    hidden_size_per_layer_input=16,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=32,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "afm7": _config(
        "afm7",
        hidden_dim=64,
        num_layers=3,
        num_kv_reuse_layers=1,
        num_heads=4,
        num_kv_heads=2,
    ),
    "afmoe": _moe("afmoe", num_hidden_layers=4, layer_types=_ALTERNATING, num_dense_layers=1),
    "apertus": _config("apertus", post_norm=False, qk_norm=True),
    "baichuan_m1": _config(
        "baichuan_m1",
        num_hidden_layers=4,
        sliding_window_layers=[1, 3],
        conv_window=2,
        num_swa_attention_heads=8,
        num_swa_key_value_heads=2,
    ),
    "bailing_hybrid": _mla(
        "bailing_hybrid",
        num_hidden_layers=4,
        layer_group_size=2,
        group_norm_size=4,
        rope_interleave=True,
        moe_router_enable_expert_bias=True,
    ),
    "bailing_moe": _moe("bailing_moe", num_hidden_layers=3, topk_group=1, use_qk_norm=True),
    "bailing_moe_linear": _moe(
        "bailing_moe_linear",
        num_hidden_layers=4,
        layer_group_size=2,
        group_norm_size=4,
        use_qk_norm=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    "bailing_moe_v3": _mla(
        "bailing_moe_v3",
        num_hidden_layers=4,
        layer_group_size=2,
        n_group=2,
        topk_group=1,
        moe_shared_expert_intermediate_size=32,
    ),
    "bitnet": _config("bitnet", tie_word_embeddings=True),
    "cohere": _config("cohere", use_qk_norm=True, logit_scale=1.0),
    "cohere2": _config("cohere2", num_hidden_layers=4, sliding_window_pattern=2, logit_scale=1.0),
    "dbrx": {
        "model_type": "dbrx",
        "vocab_size": 128,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": _moe("deepseek"),
    "deepseek_v2": _mla(
        "deepseek_v2",
        topk_method="greedy",
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    ),
    "deepseek_v3": _mla("deepseek_v3"),
    "deepseek_v32": _mla("deepseek_v32", index_head_dim=16, index_n_heads=2, index_topk=WINDOW),
    "deepseek_v41": _mla(
        "deepseek_v41",
        num_hidden_layers=5,
        head_dim=32,
        o_groups=2,
        o_lora_rank=16,
        rms_norm_eps=1e-6,
        compress_ratios=(0, 4, 2, 2, 2),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        candidate_topk_blocks=2,
        candidate_block_size=2,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        scoring_func="sqrtsoftplus",
    ),
    "dots1": _moe("dots1", scoring_func="noaux_tc"),
    "ernie4_5": _config("ernie4_5"),
    "ernie4_5_moe": _moe(
        "ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        moe_num_shared_experts=1,
    ),
    "exaone": _config("exaone", num_layers=2),
    "exaone4": _config(
        "exaone4",
        num_hidden_layers=4,
        sliding_window_pattern="LG",
        rope_scaling={"rope_type": "default"},
    ),
    "exaone_moe": _moe(
        "exaone_moe",
        num_hidden_layers=4,
        layer_types=_ALTERNATING,
        is_moe_layer=[False, True, True, True],
    ),
    "falcon_h1": _config(
        "falcon_h1",
        attention_in_multiplier=1.0,
        attention_out_multiplier=1.0,
        embedding_multiplier=1.0,
        key_multiplier=1.0,
        lm_head_multiplier=1.0,
        mlp_multipliers=[1.0, 1.0],
        ssm_in_multiplier=1.0,
        ssm_out_multiplier=1.0,
        ssm_multipliers=[1.0, 1.0, 1.0, 1.0, 1.0],
        **_MAMBA,
    ),
    "gear": _config(
        "gear",
        num_hidden_layers=4,
        layer_types=_layers("s", "f", "c", "f"),
        conv_L_cache=3,
    ),
    "gemma": _config("gemma"),
    "gemma2": _config("gemma2", query_pre_attn_scalar=16.0),
    "gemma3": {"model_type": "gemma3", "vocab_size": 128, "text_config": _GEMMA3_TEXT},
    "gemma3_text": _GEMMA3_TEXT,
    "gemma3n": {"model_type": "gemma3n", "text_config": _GEMMA3N_TEXT},
    "gemma4": {"model_type": "gemma4", "vocab_size": 128, "text_config": _GEMMA4_TEXT},
    "gemma4_text": _GEMMA4_TEXT,
    "glm": _config("glm"),
    "glm4": _config("glm4", partial_rotary_factor=0.5),
    "glm4_moe": _moe("glm4_moe", use_qk_norm=True, partial_rotary_factor=0.5),
    "glm4_moe_lite": _mla("glm4_moe_lite"),
    "glm_moe_dsa": _mla(
        "glm_moe_dsa",
        index_head_dim=16,
        index_n_heads=2,
        index_topk=WINDOW,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "gpt2": _config(
        "gpt2", n_ctx=512, n_positions=512, n_embd=64, n_head=4, n_layer=2, num_key_value_heads=4
    ),
    "gpt_bigcode": _config(
        "gpt_bigcode",
        n_positions=512,
        n_embd=64,
        n_inner=96,
        n_head=4,
        n_layer=2,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
    ),
    "gpt_neox": _config("gpt_neox", num_key_value_heads=4, rotary_emb_base=10000, rotary_pct=0.5),
    "gpt_oss": _moe("gpt_oss", num_hidden_layers=4, layer_types=_ALTERNATING),
    "gptj": _config("gptj", n_positions=512, n_embd=64, n_head=4, n_layer=2, rotary_dim=8),
    "granite": _config("granite", **_GRANITE),
    "granitemoe": _moe("granitemoe", **_GRANITE),
    "granitemoehybrid": _moe(
        "granitemoehybrid",
        num_hidden_layers=4,
        layer_types=_layers("mamba", "attention", "mamba", "attention"),
        shared_intermediate_size=32,
        **_GRANITE,
        **_MAMBA,
    ),
    "helium": _config("helium"),
    "hunyuan": _config(
        "hunyuan",
        num_hidden_layers=4,
        moe_topk=2,
        num_experts=4,
        num_shared_expert=1,
        moe_intermediate_size=32,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 10.0},
    ),
    "hunyuan_v1_dense": _config(
        "hunyuan_v1_dense",
        use_qk_norm=True,
        rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 10.0},
    ),
}

# These norms multiply by 1 + w, but their files set w to 1: sharp attention then hides most tokens.
_NORMS_ABOUT_ONE = {r"norm\.weight$": (-0.5, 0.5)}

# Embeddings are multiplied by 8 on their way in and are the output matrix too: without these, the
# most likely next token would be the last one. A large final norm restores the spread of logits.
_NO_ECHO = {
    r"embed_tokens\.weight$": (-0.05, 0.05),
    r"(model|language_model)\.norm\.weight$": (2.0, 10.0),
}

OVERRIDES: dict[str, dict[str, tuple[float, float]]] = {
    "cohere": {r"[qk]_norm\.weight$": (0.7, 1.5)},  # 0 in the file: attention would be an average
    # The cache holds whole multiples of these steps: at 1.0 almost every value would be 0 or 1.
    "afm7": {r"quant_(key|value)_scale$": (0.03, 0.03)},
    # The gate is exp(-5 sigmoid(exp(A_log) (a + dt_bias))), and should keep most of the state.
    "bailing_moe_v3": {r"A_log$": (-0.3, 0.3), r"dt_bias$": (-5.0, -3.0)},
    "gemma": _NO_ECHO | _NORMS_ABOUT_ONE,
    "gemma2": _NO_ECHO | _NORMS_ABOUT_ONE,
    "gemma3": _NORMS_ABOUT_ONE,
    "gemma3_text": _NORMS_ABOUT_ONE,
    "gemma3n": _NO_ECHO,
}

CANNOT_RUN: dict[str, str] = {
    "bitnet": "RuntimeError: [metal_kernel] No Metal back-end. (BitLinear has no other path)",
}

NOTES: dict[str, str] = {
    "afm7": "The cache rounds keys and values to steps, and two layers' caches serve three layers.",
    "bailing_moe_v3": "n_group must exceed topk_group: the router partitions at their difference.",
    "bitnet": "The packed ternary weights stay 0, which decodes to -1 everywhere.",
    "deepseek_v32": "Past 16 tokens a query reads 16 keys: one distant token may move few logits.",
    "deepseek_v41": (
        "Its own LayerCache cannot be trimmed, and pools groups of 2 and 4 tokens: a group that is "
        "still open waits in the cache. Activations are rounded to fp8 and fp4, but 40 tokens in "
        "passes of 1 and 5 differed by no more than 1e-5 for 3 seeds."
    ),
    "gemma3n": "The last two of six layers have no cache: they read those of layers 2 and 3.",
    "gemma4": "The last two of six layers have no cache: they read those of layers 2 and 3.",
    "gemma4_text": "The last two of six layers have no cache: they read those of layers 2 and 3.",
    "glm_moe_dsa": "Past 16 tokens a query reads 16 keys: one distant token may move few logits.",
    "hunyuan": "Layers 1 and 3 reuse keys and values of 0 and 2, but each has a cache of its own.",
}
