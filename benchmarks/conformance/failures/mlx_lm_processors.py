"""mlx-lm's draft-model decoding does not show the prompt to logits processors; plain decoding does.

    pip install "mlx[cpu]" mlx-lm && python mlx_lm_processors.py

A repetition penalty therefore ignores the prompt as soon as a draft model is given.
"""

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama


def tiny_model(seed: int) -> llama.Model:
    """Two layers with random weights."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=16,
    )
    model = llama.Model(args)
    mx.random.seed(seed)
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters()))
    return model


def main() -> int:
    """Note what a processor is shown first, with and without a draft model; 1 if they differ."""
    model, draft_model, prompt = tiny_model(0), tiny_model(1), mx.arange(10)
    shown: list[int] = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        shown.append(mx.array(tokens).size)
        return logits

    list(generate_step(prompt, model, max_tokens=1, logits_processors=[note]))
    plain = shown.pop(0)
    shown.clear()
    steps = speculative_generate_step(
        prompt, model, draft_model, num_draft_tokens=4, max_tokens=1, logits_processors=[note]
    )
    list(steps)
    print(
        f"The first call shows {plain} tokens without a draft model, {max(shown)} at most with one."
    )
    return plain != max(shown)


if __name__ == "__main__":
    raise SystemExit(main())
