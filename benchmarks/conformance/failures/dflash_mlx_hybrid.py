"""dflash-mlx cannot verify on a Qwen3.5 model with fewer key heads than value heads on a CPU.

    pip install "mlx[cpu]" dflash-mlx && python dflash_mlx_hybrid.py

Its recurrence without Metal does not repeat the key heads. It was not run with Metal.
"""

import mlx.core as mx
from dflash_mlx.engine.target_ops import resolve_target_ops
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import make_prompt_cache

TEXT = {
    "model_type": "qwen3_5",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 6,
    "max_position_embeddings": 512,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    | {"partial_rotary_factor": 0.25},
}


def main() -> int:
    """Verify five tokens after a prompt; 1 if it raises."""
    mx.random.seed(0)
    args = {"model_type": "qwen3_5", "vocab_size": 6, "text_config": TEXT}
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(args))
    model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))  # mlx-lm's own pass works
    operations = resolve_target_ops(model)
    operations.install_speculative_hooks(model)
    cache = operations.make_cache(model, enable_speculative_linear_cache=True)
    operations.verify_block(
        target_model=model, verify_ids=mx.array([[1, 2, 3]]), target_cache=cache
    )
    for layer in cache:
        if hasattr(layer, "arm_rollback"):
            layer.arm_rollback(prefix_len=3)
    try:
        operations.verify_block(
            target_model=model, verify_ids=mx.array([[1, 2, 3, 4, 5]]), target_cache=cache
        )
    except ValueError as error:
        print(f"A pass over five tokens raises: {error}")
        return 1
    print("The pass works.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
