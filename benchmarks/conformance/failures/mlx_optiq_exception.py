"""mlx-optiq leaves drafts in the caches if a logits processor raises; mlx-lm's own loops do not.

    pip install "mlx[cpu]" "mlx-optiq>=0.7" && python mlx_optiq_exception.py

The caller's cache then holds tokens that nobody has seen, so that it cannot be used again.
"""

from contextlib import suppress

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from optiq.runtime.ngram_spec import ngram_generate_step


class BrokenOff:
    """A processor that raises at its 21st call."""

    num_left = 20

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Pass logits on, or raise."""
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("broken off")
        return logits


def tiny_model() -> llama.Model:
    """Two layers with random weights."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=6,
    )
    model = llama.Model(args)
    mx.random.seed(0)
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters()))
    return model


def main() -> int:
    """Break off with a processor, and count what the cache has; 1 if it has read too much."""
    model, num_wrong = tiny_model(), 0
    for seed in range(10):
        mx.random.seed(seed)
        prompt = mx.random.randint(0, 6, (96,))
        plain = [int(token) for token, _ in generate_step(prompt, model, max_tokens=60)]
        cache, broken = make_prompt_cache(model), [BrokenOff()]
        steps = ngram_generate_step(
            prompt,
            model,
            max_tokens=60,
            adaptive=False,
            logits_processors=broken,
            prompt_cache=cache,
        )
        with suppress(RuntimeError):
            list(steps)
        known = [*prompt.tolist(), *plain]
        fresh = make_prompt_cache(model)
        model(mx.array([known[: cache[0].offset]]), cache=fresh)
        probe = mx.array([[1]])
        found, expected = model(probe, cache=cache), model(probe, cache=fresh)
        num_wrong += not mx.allclose(found, expected, atol=1e-4)
    print(f"{num_wrong} of 10 caches hold something else than the text that was written")
    return num_wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
