"""mlx-dspark's look-up changes the greedy text of a model with sliding windows.

    pip install "mlx[cpu]" "mlx-dspark>=0.20" && python mlx_dspark_sliding_window.py

A rejected draft has to be taken back from a `RotatingKVCache` that is full. The models that the
package names have no such layers; it takes this one without a word.
"""

import mlx.core as mx
from mlx.utils import tree_map
from mlx_dspark import Target, greedy_generate, lookup_generate
from mlx_lm.models import llama


class Letters:
    """A tokenizer without special tokens."""

    eos_token_id = None
    eos_token_ids = ()
    unk_token_id = None

    def decode(self, tokens: list[int]) -> str:
        """A letter for each token."""
        return "".join(chr(97 + token) for token in tokens)

    def convert_tokens_to_ids(self, tokens: object) -> object:
        """No token is special."""
        return None if isinstance(tokens, str) else [None for _ in tokens]


def tiny_model(seed: int) -> llama.Model:
    """A layer with a window of 16 tokens and one without, with random weights."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=6,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )
    model = llama.Model(args)
    mx.random.seed(seed)
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters()))
    return model


def main() -> int:
    """Compare 20 texts with the package's own plain decoding; 1 if one differs."""
    num_wrong = num_too_long = 0
    for seed in range(20):
        target = Target(tiny_model(seed), Letters())
        prompt = mx.random.randint(0, 6, (96,)).tolist()
        how = {"prompt_ids": prompt, "max_new_tokens": 60}
        plain = greedy_generate(target, Letters(), **how).token_ids
        drafted = lookup_generate(target, Letters(), **how).token_ids
        num_wrong += plain[:60] != drafted[:60]
        num_too_long += len(drafted) > 60
    print(f"{num_wrong} of 20 texts differ from plain decoding's.")
    print(f"{num_too_long} texts are longer than asked.")
    return num_wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
