"""mlx-lm's draft-model decoding changes the greedy text once a sliding window is full.

    pip install "mlx[cpu]" mlx-lm && python mlx_lm_sliding_window.py

A rejected draft is taken back with `trim_prompt_cache`. A full `RotatingKVCache` has overwritten
the keys and values that the shorter text needs, so that later passes attend to the wrong ones.
"""

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama

WINDOW = 16


def tiny_model(seed: int) -> llama.Model:
    """A layer with a window of 16 tokens and one without, with large random weights."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
    )
    model = llama.Model(args)
    mx.random.seed(seed)
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters()))
    return model


def main() -> int:
    """Compare 20 texts with and without a draft model; 1 if one differs."""
    num_wrong = 0
    for seed in range(20):
        model, draft_model = tiny_model(seed), tiny_model(seed + 100)
        prompt = mx.random.randint(0, 16, (40,))
        plain = [int(token) for token, _ in generate_step(prompt, model, max_tokens=40)]
        steps = speculative_generate_step(
            prompt, model, draft_model, num_draft_tokens=4, max_tokens=40
        )
        num_wrong += plain != [int(token) for token, _, _ in steps]
    print(f"{num_wrong} of 20 texts differ from plain decoding's")
    return num_wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
