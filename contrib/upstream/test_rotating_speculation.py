# Speculative decoding has to leave the greedy text as it is when a window fills up.

import unittest

import mlx.core as mx
from mlx.utils import tree_map

from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache

WINDOW = 16


def tiny_model(seed):
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
    weights = tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters())
    model.update(weights)
    return model


class TestRotatingSpeculation(unittest.TestCase):
    def test_text_is_plain_decodings(self):
        for seed, length in enumerate((4, 14, 16, 17, 40)):
            model, draft_model = tiny_model(seed), tiny_model(seed + 100)
            prompt = mx.random.randint(0, 16, (length,))
            plain = [token for token, _ in generate_step(prompt, model, max_tokens=40)]
            steps = speculative_generate_step(
                prompt, model, draft_model, num_draft_tokens=4, max_tokens=40
            )
            with self.subTest(length=length):
                self.assertEqual([token for token, _, _ in steps], plain)

    def test_trim_takes_off_what_was_added(self):
        for num_before in range(1, 40):
            for num_added in range(2, 8):
                for num_trimmed in range(num_added):
                    case = (num_before, num_added, num_trimmed)
                    cache, expected = RotatingKVCache(WINDOW), RotatingKVCache(WINDOW)
                    rows = mx.arange(64, dtype=mx.float32).reshape(1, 1, 64, 1)
                    for one in (cache, expected):
                        for i in range(num_before):
                            one.update_and_fetch(*[rows[:, :, i : i + 1]] * 2)
                    end = num_before + num_added
                    cache.update_and_fetch(*[rows[:, :, num_before:end]] * 2)
                    self.assertEqual(cache.trim(num_trimmed), num_trimmed, case)
                    for i in range(num_before, end - num_trimmed):
                        expected.update_and_fetch(*[rows[:, :, i : i + 1]] * 2)
                    self.assertEqual(cache.offset, expected.offset, case)
                    # the next token attends to the same window
                    keys = [
                        one.update_and_fetch(*[rows[:, :, 63:64]] * 2)[0]
                        for one in (cache, expected)
                    ]
                    seen = [sorted(part.reshape(-1).tolist()) for part in keys]
                    self.assertEqual(*seen, case)


if __name__ == "__main__":
    unittest.main()
