"""mlx-optiq's n-gram drafts change the greedy text of a Qwen3.5 model on a CPU.

    pip install "mlx[cpu]" "mlx-optiq>=0.7" && python mlx_optiq_hybrid.py

Only the default capture of the recurrent states does so. With `capture_backend=None`, and with
`hybrid_rollback="snapshot"`, all texts are plain decoding's. It was not run with Metal.
"""

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5
from optiq.runtime.ngram_spec import ngram_generate_step

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
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
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    | {"partial_rotary_factor": 0.25},
}


def tiny_model() -> qwen3_5.Model:
    """Four layers, two of them gated delta, whose states keep most of what they have read."""
    args = {
        "model_type": "qwen3_5",
        "vocab_size": 6,
        "text_config": TEXT | {"model_type": "qwen3_5"},
    }
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(args))
    mx.random.seed(0)

    def drawn(path: str, weight: mx.array) -> mx.array:
        if path.endswith("A_log"):
            return mx.random.uniform(-3.0, -1.5, weight.shape)
        return mx.random.normal(weight.shape) * (0.3 if weight.ndim == 1 else 0.2)

    model.update(tree_map_with_path(drawn, model.parameters()))
    return model


def main() -> int:
    """Compare 10 texts for each way of taking drafts back; 1 if one differs by default."""
    model = tiny_model()
    ways = {"default": {}, "capture_backend=None": {"capture_backend": None}}
    ways["hybrid_rollback='snapshot'"] = {"hybrid_rollback": "snapshot"}
    counts = dict.fromkeys(ways, 0)
    for seed in range(10):
        mx.random.seed(seed)
        prompt = mx.random.randint(0, 6, (96,))
        plain = [int(token) for token, _ in generate_step(prompt, model, max_tokens=60)]
        for name, how in ways.items():
            steps = ngram_generate_step(prompt, model, max_tokens=60, adaptive=False, **how)
            counts[name] += plain != [int(token) for token, _ in steps]
    for name, count in counts.items():
        print(f"{name}: {count} of 10 texts differ from plain decoding's")
    return counts["default"] > 0


if __name__ == "__main__":
    raise SystemExit(main())
