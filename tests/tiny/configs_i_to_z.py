"""Tiny configurations of the architecture files whose names start with i to z.

A configuration has every kind of layer that its architecture knows: sliding and full attention,
recurrent and attention, dense and mixture of experts. Windows and chunks are 16 tokens, so that a
test of 60 tokens wraps them.
"""

from __future__ import annotations

from typing import Any

WINDOW = 16
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def _decoder(**more: Any) -> dict[str, Any]:
    """Start from the fields that most decoders share: two layers of grouped-query attention."""
    return {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | more


def _deepseek(**more: Any) -> dict[str, Any]:
    """One dense layer and one of experts in two groups, both with latent attention."""
    return (
        _decoder(
            num_key_value_heads=4,
            moe_intermediate_size=48,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=1.5,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            moe_layer_freq=1,
            first_k_dense_replace=1,
            attention_bias=False,
            **_LATENT,
        )
        | more
    )


_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}

_LLAMA = _decoder(head_dim=16)

_MINISTRAL = _decoder(
    num_hidden_layers=3,
    head_dim=16,
    layer_types=[SLIDING, FULL, SLIDING],
    sliding_window=WINDOW,
    rope_parameters={
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.1,
    },
)

_LFM2 = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "conv_bias": True,
    "conv_L_cache": 3,
    "rope_theta": 10000.0,
    "layer_types": ["conv", FULL, "conv"],
}

_LFM2_DENSE = _LFM2 | {
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}

_QWEN2 = _decoder(tie_word_embeddings=True)

_QWEN3 = _decoder(head_dim=16)

_QWEN3_MOE = _decoder(
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    mlp_only_layers=[0],
    moe_intermediate_size=48,
    norm_topk_prob=True,
)

_GATED_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}

_QWEN3_5 = _decoder(
    **_GATED_DELTA,
    rope_parameters={
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
)

_QWEN3_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}

_LONGCAT = {
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 48,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "num_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    **_LATENT,
}

_KIMI_LINEAR = _decoder(
    num_hidden_layers=4,
    num_key_value_heads=4,
    head_dim=16,
    linear_attn_config={
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    model_max_length=512,
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=48,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    **_LATENT,
)

_MUSE = _decoder(
    num_hidden_layers=4,
    head_dim=16,
    post_norm_eps=1e-8,
    sliding_window=WINDOW,
    layer_types=[SLIDING, SLIDING, SLIDING, FULL],
    layer_rope_theta=[10000.0, 10000.0, 10000.0, 0],
    rope_parameters={"rope_theta": 10000.0},
    qk_scale_factor=3.0,
    final_logit_softcapping=20.0,
    output_multiplier=0.5,
)

_PER_TYPE_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
}

_SHAPES: dict[str, dict[str, Any]] = {
    "internlm2": _decoder(),
    "internlm3": _decoder(qkv_bias=True),
    "iquestloopcoder": _decoder(head_dim=16, loop_num=2, loop_window_size=WINDOW),
    "jamba": _decoder(
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=8,
        mamba_expand=2,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "kimi_k25": {"text_config": _deepseek()},
    "kimi_k3": {
        "text_config": {key: v for key, v in _KIMI_LINEAR.items() if key != "head_dim"}
        | {
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
            },
            "attn_res_block_size": 2,
            "hidden_act": "situ",
            "activation_situ_beta": 1.5,
            "activation_situ_linear_beta": 2.0,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 40,
            "latent_moe_use_norm": True,
        }
    },
    "kimi_linear": _KIMI_LINEAR,
    "kimi_vl": {"text_config": _deepseek()},
    "Klear": _decoder(
        attention_bias=False,
        mlp_only_layers=[0],
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        n_shared_experts=1,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    ),
    "laguna": _decoder(
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=WINDOW,
        rope_parameters=_PER_TYPE_ROPE,
        layer_types=[FULL, SLIDING, SLIDING],
        num_attention_heads_per_layer=[4, 2, 2],
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=40,
        moe_routed_scaling_factor=1.5,
        moe_router_logit_softcapping=5.0,
    ),
    "lfm2-vl": {"text_config": _LFM2_DENSE | {"model_type": "lfm2", "tie_word_embeddings": False}},
    "lfm2": _LFM2_DENSE,
    "lfm2_moe": _LFM2
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "lille-130m": {
        "block_size": 512,
        "layer_norm_eps": 1e-5,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_heads": 2,
        "n_layer": 2,
        "rope_theta": 10000.0,
        "vocab_size": 128,
    },
    "llama": _decoder(
        num_hidden_layers=3,
        head_dim=16,
        layer_types=[SLIDING, FULL, SLIDING],
        sliding_window=WINDOW,
    ),
    "llama4": {
        "text_config": _decoder(
            model_type="llama4_text",
            num_hidden_layers=4,
            head_dim=16,
            attention_bias=False,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=80,
            num_experts_per_tok=1,
            num_local_experts=4,
            rope_scaling=None,
            use_qk_norm=True,
            floor_scale=8,
        )
    },
    "llama4_text": _decoder(
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size_mlp=80,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
    ),
    "longcat_flash": _LONGCAT | {"attention_method": "MLA"},
    "longcat_flash_ngram": _LONGCAT
    | {"ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": True,
        "use_conv_bias": True,
        "time_step_rank": 6,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 24,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": True,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 10.0],
        "time_step_rank": "auto",
    },
    "mellum": _decoder(
        num_hidden_layers=3,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        sliding_window=WINDOW,
        layer_types=[SLIDING, SLIDING, FULL],
        rope_parameters=_PER_TYPE_ROPE,
    ),
    "mimo": _decoder(),
    "mimo_v2_flash": _decoder(
        num_hidden_layers=3,
        num_experts_per_tok=2,
        hybrid_layer_pattern=[0, 1, 1],
        moe_layer_freq=[0, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        moe_intermediate_size=48,
        n_shared_experts=None,
        n_routed_experts=4,
        routed_scaling_factor=None,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        layernorm_epsilon=1e-5,
        swa_rope_theta=1000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        head_dim=24,
        v_head_dim=16,
        swa_head_dim=24,
        swa_v_head_dim=16,
        partial_rotary_factor=0.334,
        attention_value_scale=0.7,
    ),
    "minicpm": _decoder(dim_model_base=32, scale_depth=1.4, scale_emb=2.0),
    "minicpm3": _decoder(
        num_key_value_heads=4,
        dim_model_base=32,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        scale_depth=1.4,
        scale_emb=2.0,
        rope_scaling={
            "type": "longrope",
            "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.0, 2.5],
        },
    ),
    "minimax": _decoder(
        head_dim=24,
        rotary_dim=8,
        num_experts_per_tok=2,
        num_local_experts=4,
        shared_intermediate_size=0,
    ),
    "minimax_m3_vl": {
        "text_config": _decoder(
            num_hidden_layers=3,
            intermediate_size=48,
            dense_intermediate_size=96,
            shared_intermediate_size=40,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_layer_freq=[0, 1, 1],
            sparse_attention_config={
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 8,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 6,
                "sparse_local_block": 3,
                "sparse_attention_freq": [0, 1, 1],
            },
        )
    },
    "ministral3": _MINISTRAL,
    "mistral3": {"text_config": _MINISTRAL | {"model_type": "ministral3"}},
    "mistral4": _deepseek(
        rope_parameters={
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "mixtral": _decoder(num_local_experts=4, num_experts_per_tok=2),
    "muse_glimmer": _MUSE,
    "muse_spark": {
        "text_config": _MUSE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 40,
            "moe_intermediate_size": 48,
        }
    },
    "nanbeige": _decoder(head_dim=16, num_loops=2),
    "nanochat": _decoder(),
    "nemotron-nas": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.5}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "nemotron": _decoder(hidden_act="relu2", norm_eps=1e-5),
    "nemotron_h": _decoder(
        attention_bias=False,
        mamba_num_heads=4,
        mamba_head_dim=24,
        mamba_proj_bias=False,
        ssm_state_size=16,
        conv_kernel=4,
        n_groups=2,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        hybrid_override_pattern=["M", "E", "*", "M", "-"],
        head_dim=16,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=40,
        n_group=1,
        n_routed_experts=4,
        n_shared_experts=1,
        topk_group=1,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    ),
    "olmo": {
        "d_model": 64,
        "n_layers": 2,
        "mlp_hidden_size": 192,
        "n_heads": 4,
        "vocab_size": 128,
        "embedding_size": 128,
    },
    "olmo2": _decoder(),
    "olmo3": _decoder(
        num_hidden_layers=4,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        sliding_window=WINDOW,
    ),
    "olmoe": _decoder(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    "olmo_hybrid": _decoder(
        num_hidden_layers=4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=True,
        attention_bias=False,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL],
    ),
    "openelm": {
        "head_dim": 16,
        "num_transformer_layers": 2,
        "model_dim": 64,
        "vocab_size": 128,
        "ffn_dim_divisor": 16,
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 1.5],
    },
    "phi": _decoder(num_key_value_heads=4, partial_rotary_factor=0.5, layer_norm_eps=1e-5),
    "phi3": _decoder(partial_rotary_factor=0.5),
    "phi3small": {
        "hidden_size": 32,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 100352,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": _decoder(
        num_local_experts=4,
        num_experts_per_tok=2,
        original_max_position_embeddings=512,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.5] * 8,
            "short_mscale": 1.1,
            "long_mscale": 1.2,
        },
    ),
    "phixtral": {
        "num_vocab": 128,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
    },
    "pixtral": {"text_config": _LLAMA | {"model_type": "llama"}},
    "plamo": _decoder(n_shared_head=2),
    "plamo2": _decoder(
        num_hidden_layers=4,
        hidden_size_per_head=16,
        attention_window_size=WINDOW,
        full_attention_idx=[1],
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_num_heads=6,
        mamba_step=2,
        mamba_chunk_size=8,
    ),
    "plamo3": _decoder(
        num_hidden_layers=4,
        head_dim=16,
        window_size=WINDOW,
        sliding_window_pattern=4,
        rope_local_theta=1000.0,
    ),
    "prism_hadamard_qwen35": {
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 512,
            }
        ],
        "text_config": _QWEN3_5 | {"intermediate_size": 512},
    },
    "qwen": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "kv_channels": 16,
        "max_position_embeddings": 512,
        "intermediate_size": 192,
        "vocab_size": 128,
    },
    "qwen2": _QWEN2,
    "qwen2_moe": _decoder(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=40,
    ),
    "qwen2_vl": {"text_config": _QWEN2 | {"model_type": "qwen2"}},
    "qwen3": _QWEN3,
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": _QWEN3_5 | _QWEN3_EXPERTS},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _decoder(
        **_GATED_DELTA,
        **_QWEN3_EXPERTS,
        mlp_only_layers=[0],
        partial_rotary_factor=0.25,
    ),
    "qwen3_vl": {"text_config": _QWEN3 | {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": _QWEN3_MOE | {"model_type": "qwen3_moe"}},
    "recurrent_gemma": _decoder(
        num_hidden_layers=3,
        num_key_value_heads=1,
        attention_bias=True,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "rwkv7": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 12,
        "gate_low_rank_dim": 20,
        "decay_low_rank_dim": 16,
    },
    "seed_oss": _decoder(head_dim=16, attention_bias=True, attention_out_bias=True),
    "smollm3": _decoder(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
    "solar_open": _deepseek(
        num_key_value_heads=2, head_dim=16, partial_rotary_factor=0.5, use_qk_norm=True
    ),
    "spark2_5": _decoder(
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=WINDOW,
        rope_parameters=_PER_TYPE_ROPE,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
    ),
    "stablelm": _decoder(
        use_qkv_bias=True, partial_rotary_factor=0.25, layer_norm_eps=1e-5, qk_layernorm=True
    ),
    "starcoder2": _decoder(tie_word_embeddings=True),
    "step3p5": _decoder(
        num_hidden_layers=4,
        num_attention_groups=2,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=[FULL, SLIDING, SLIDING, SLIDING],
        rope_theta=[10000.0, 1000.0, 1000.0, 1000.0],
        partial_rotary_factors=[0.5, 1.0, 1.0, 1.0],
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 3},
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=48,
        share_expert_dim=40,
        moe_layers_enum="1,2,3",
        swiglu_limits=[0, 0, 7.0, 7.0],
        swiglu_limits_shared=[0, 0, 0, 16.0],
    ),
    "talkie": _decoder(head_dim=16),
    "telechat3": _decoder(),
    "youtu_llm": _decoder(num_key_value_heads=4, **_LATENT),
}

CONFIGS: dict[str, dict[str, Any]] = {
    name: {"model_type": name} | shape for name, shape in _SHAPES.items()
}
"""A configuration per architecture file, in the words of a model's config.json."""

CANNOT_RUN: dict[str, str] = {
    "muse_spark": "RuntimeError: [metal_kernel] No Metal back-end. "
    "Its norms, rotary embedding and routing are Metal kernels without an alternative.",
    "olmo": "SystemExit: 1. The file exits at import where the package ai2-olmo is missing. "
    "Past that, a pass of two or more tokens raises ValueError: it adds the mask 'causal' to an "
    "array of scores. Single tokens run.",
}
"""Architectures that fail on the CPU, with the exception that they raise there."""

OVERRIDES: dict[str, dict[str, tuple[float, float]]] = {
    "prism_hadamard_qwen35": {r"\.signs$": (1.0, 1.0)},
    "rwkv7": {r"w_lora.*bias$": (-4.0, -2.0)},  # the state keeps about 0.97 of itself at each step
}
"""Per architecture: a regular expression searched in a parameter's path, and its range."""

NOTES: dict[str, str] = {
    "iquestloopcoder": "Four caches for two layers: a KVCache for each layer, then a "
    "RotatingKVCache for each layer of the second loop.",
    "llama4": "One expert per token is all that the file supports. A chunked layer sees nothing "
    "before a multiple of 16: across it, only the full layer carries a change (0.04).",
    "longcat_flash_ngram": "The first of three caches for two layers holds the last two token ids.",
    "mistral3": "The wrapper has no make_cache: its sliding layers get a KVCache and a mask.",
    "muse_spark": "Activations are bfloat16 in parts: with the kernels replaced by float32 "
    "arithmetic, passes of different widths differ by 0.002.",
    "nanbeige": "Four caches for two layers: each of two loops has its own.",
    "nemotron-nas": "Three caches for four layers. The second cache belongs to an attention that "
    "is a linear layer: it stays empty, at offset 0.",
    "nemotron_h": "Three caches for five layers: those of experts and dense layers have none.",
    "phi3small": "Inexact. A pass of several tokens sees its own future in the block-sparse layer, "
    "which adds a boolean mask to its scores. Passes of 5 tokens differ from single tokens by 0.3 "
    "to 1.3, of 2 by 0.2. Blocks are 32 tokens, the least that the file allows. The vocabulary "
    "has 100352 tokens since the model writes -inf up to that token without a check of bounds.",
    "plamo3": "Inexact past the window. A pass of several tokens attends to 17 keys, a single "
    "token to 16. Passes of 5 tokens differ from single tokens by 1.1 to 3.8, from the first "
    "position past the window on; until there, by 0.",
    "prism_hadamard_qwen35": "The packed layer, model.layers.0.mlp.down_proj, has weights of zero.",
    "rwkv7": "The weakest memory: a token moves the logits 10 tokens later by 0.03 to 0.05.",
}
"""What a test of the architecture must know, with measured numbers."""
