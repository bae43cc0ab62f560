"""mlx-vlm's heads do not call logits processors: a penalty is dropped without a word.

pip install "mlx[cpu]" "mlx-vlm>=0.7" && python mlx_vlm_processors.py
"""

import mlx.core as mx
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.models import qwen3_5
from mlx_vlm.speculative.drafters import qwen3_5_mtp

TEXT = {
    "model_type": "qwen3_5",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 6,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"type": "mrope", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    | {"partial_rotary_factor": 0.5},
    "full_attention_interval": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
    "num_position_embeddings": 16,
}


def main() -> int:
    """Forbid token 0 with a processor, with a head and without; 1 if it is written with one."""
    config = qwen3_5.ModelConfig(
        model_type="qwen3_5",
        text_config=qwen3_5.TextConfig(**TEXT),
        vision_config=qwen3_5.VisionConfig.from_dict(VISION),
        vocab_size=6,
        eos_token_id=[6],
    )
    mx.random.seed(0)
    model = qwen3_5.Model(config)
    text = TEXT | {"mtp_num_hidden_layers": 1}
    head = qwen3_5_mtp.Model(qwen3_5_mtp.ModelConfig.from_dict({"text_config": text}))
    forbidden = mx.array([-1e9, 0, 0, 0, 0, 0])
    num_written = {}
    for name, how in {"plain": {}, "mtp": {"draft_model": head, "draft_kind": "mtp"}}.items():
        steps = generate_step(
            mx.array([[1, 2, 3, 4, 5, 1, 2, 3]]),
            model,
            None,
            None,
            max_tokens=60,
            temperature=1.0,
            seed=0,
            logits_processors=[lambda tokens, logits: logits + forbidden],
            **how,
        )
        num_written[name] = sum(int(token) == 0 for token, _ in steps)
    print(
        f"A forbidden token is written {num_written['plain']} times without a head, "
        f"{num_written['mtp']} times with one."
    )
    return num_written["mtp"] > 0


if __name__ == "__main__":
    raise SystemExit(main())
