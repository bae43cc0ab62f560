"""Train the pair: the target on text, the draft model on the target.

    python -m benchmarks.lab.train --out my-pair

No network and no other data than Python's own; half an hour on one core with a fast BLAS
(on Linux: OpenBLAS through LD_PRELOAD, OPENBLAS_NUM_THREADS=1). The same seed, Python and library
versions give the same models up to the rounding of sums. `specdec_mlx.lab.pair` is the text.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from jaxtyping import Float, Int
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from benchmarks.lab import byte_tokens
from specdec_mlx.lab import pair as pair_module
from specdec_mlx.lab.training.fitting import forward_kl, rates, total_variation

TARGET_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
DRAFT_SHAPE = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 1}
NUM_HEADS = 4

LEARNING_RATES = {"target": 1e-3, "draft": 2e-3}
"""Peak rates of AdamW. In a race of 160 steps the target's held-out text cost 3.25 bits per byte at
0.001, 3.42 at 0.002 and 3.71 at 0.004."""

TEMPERATURES = (1.0, 0.5)
"""Temperatures at which the target writes the text that the draft model learns from."""

OPENING = 64  # tokens of the training text that the target continues in a sample

LONG_SHARE, LONGER = 0.2, 4
"""Share of the updates with long windows, the last ones, and how much longer those are."""

Batches = Iterator[mx.array]


@dataclass(frozen=True)
class Plan:
    """How long and on how much to train.

    steps, draft_steps: updates of either model. batch, window: rows and tokens of an update; the
    last fifth of the updates has windows four times as long, and fewer rows. samples,
    sample_length: rows and tokens of the text that the target writes for the draft model.
    checkpoint: updates between two snapshots.
    """

    steps: int = 1800
    draft_steps: int = 4000
    batch: int = 4
    window: int = 256
    samples: int = 128
    sample_length: int = 768
    checkpoint: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Agreement:
    """How well two models know a text, and each other on it, over its positions.

    bits_per_byte: of the target and of the draft model, in nats over ln 2; end-of-text tokens
    count as bytes. greedy: share of positions where both have the same argmax. acceptance: mean of
    sum(min(p, q)), the chance that a draft token drawn at temperature 1 is accepted.
    """

    target_bits_per_byte: float
    draft_bits_per_byte: float
    greedy: float
    acceptance: float
    num_positions: int


def train_pair(out: Path, plan: Plan) -> Agreement:
    """Train both models, write their folders, and measure them on the held-out text."""
    trained, held_out = map(byte_tokens.to_stream, pair_module.split_topics())
    target = train_target(out / "target", trained, plan)
    draft = train_draft(out / "draft", target, trained, plan)
    return agreement(target, draft, held_out, 2 * plan.window)


def train_target(out: Path, stream: np.ndarray, plan: Plan) -> llama.Model:
    """Train the target on windows of the text, by cross-entropy."""
    mx.random.seed(plan.seed)
    model = build(TARGET_SHAPE)
    batches = lengthening([stream], plan.steps, plan, np.random.default_rng(plan.seed))
    return fit(model, partial(cross_entropy, model), batches, plan.steps, out, plan)


def train_draft(out: Path, target: llama.Model, stream: np.ndarray, plan: Plan) -> llama.Model:
    """Distil the target into the draft model, on the text and on what the target itself writes."""
    mx.random.seed(plan.seed + 1)
    draft = build(DRAFT_SHAPE)
    rng = np.random.default_rng(plan.seed + 1)
    own = write_samples(target, stream, plan, rng).reshape(-1)
    batches = lengthening([stream, own], plan.draft_steps, plan, rng)
    loss = partial(distillation, draft, target)
    return fit(draft, loss, batches, plan.draft_steps, out, plan)


def build(shape: dict[str, int]) -> llama.Model:
    """A fresh llama of this shape, from the global random state."""
    return llama.Model(llama.ModelArgs.from_dict(model_config(shape)))


def model_config(shape: dict[str, int]) -> dict[str, Any]:
    """Contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **shape,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": byte_tokens.VOCAB_SIZE,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": byte_tokens.END_OF_TEXT_ID,
        "eos_token_id": byte_tokens.END_OF_TEXT_ID,
    }


def lengthening(
    streams: list[np.ndarray], steps: int, plan: Plan, rng: np.random.Generator
) -> Batches:
    """Batches for all steps, as many tokens in each: short windows, then long ones.

    Short windows are cheaper; the long ones teach positions that only they have.
    """
    num_long = int(LONG_SHARE * steps)
    for step in range(steps):
        longer = LONGER if step >= steps - num_long else 1
        rows = max(1, plan.batch // longer)
        yield mx.array(windows(streams, rows, longer * plan.window, rng))


def windows(
    streams: list[np.ndarray], batch: int, window: int, rng: np.random.Generator
) -> np.ndarray:
    """Pieces [batch, window] from random places of the streams, each stream as often."""
    rows = []
    for choice in rng.integers(0, len(streams), size=batch):
        stream = streams[choice]
        start = rng.integers(0, max(1, len(stream) - window))
        rows.append(stream[start : start + window])
    return np.stack(rows)


def cross_entropy(model: nn.Module, tokens: Int[mx.array, "batch window"]) -> mx.array:
    """Mean of -log p of each token after the first, in nats."""
    loss: mx.array = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")
    return loss


def distillation(
    draft: nn.Module, target: nn.Module, tokens: Int[mx.array, "batch window"]
) -> mx.array:
    """Mean over positions of KL(p || q) + TV(p, q), p the target's and q the draft's.

    The divergence teaches fast; 1 - TV = sum(min(p, q)) is what speculation lives on, the chance
    of acceptance (Leviathan et al. 2023, corollary 3.6).
    """
    p = mx.stop_gradient(nn.log_softmax(target(tokens)))
    q = nn.log_softmax(draft(tokens))
    return mx.mean(forward_kl(p, q) + total_variation(p, q))


def write_samples(
    target: nn.Module, stream: np.ndarray, plan: Plan, rng: np.random.Generator
) -> np.ndarray:
    """Text of the target's own, int32 [samples, sample_length], each row after a piece of text."""
    opening = mx.array(windows([stream], plan.samples, OPENING, rng))
    temperatures = mx.array([TEMPERATURES[i % len(TEMPERATURES)] for i in range(plan.samples)])
    cache = make_prompt_cache(target)
    pieces, tokens = [opening], opening
    for _ in tqdm(range(plan.sample_length - opening.shape[1]), "samples", mininterval=5):
        logits = target(tokens, cache=cache)[:, -1]
        tokens = mx.random.categorical(logits / temperatures[:, None])[:, None]
        mx.eval(tokens)
        pieces.append(tokens.astype(opening.dtype))
    return np.array(mx.concatenate(pieces, axis=1))


def fit(
    model: llama.Model,
    loss: Callable[[mx.array], mx.array],
    batches: Batches,
    steps: int,
    out: Path,
    plan: Plan,
) -> llama.Model:
    """Minimise a loss with AdamW, writing the model's folder now and then and at the end."""
    peak = LEARNING_RATES[out.name]
    optimizer = optim.AdamW(rates(peak, steps), betas=[0.9, 0.95], weight_decay=0.1)
    loss_and_gradients = nn.value_and_grad(model, loss)
    progress = tqdm(range(1, steps + 1), out.name, mininterval=5)
    for step in progress:
        value, gradients = loss_and_gradients(next(batches))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        progress.set_postfix(loss=f"{value.item():.3f}", refresh=False)
        if step % plan.checkpoint == 0 or step == steps:
            save(out, model)
    return model


def agreement(target: nn.Module, draft: nn.Module, stream: np.ndarray, window: int) -> Agreement:
    """Measure both models on a text, each position with at least half a window before it."""
    half = window // 2
    sums = np.zeros(4)
    count = 0
    for start in range(0, len(stream) - window, half):
        tokens = mx.array(stream[start : start + window + 1])
        p, q = (nn.log_softmax(model(tokens[None, :-1]))[0, half:] for model in (target, draft))
        sums += np.array(compare(p, q, tokens[1 + half :])).sum(axis=1)
        count += window - half
    bits, draft_bits, greedy, acceptance = (float(x) for x in sums / max(1, count))
    return Agreement(bits, draft_bits, greedy, acceptance, count)


def compare(
    target_logprobs: Float[mx.array, "n vocab"],
    draft_logprobs: Float[mx.array, "n vocab"],
    tokens: Int[mx.array, " n"],
) -> Float[mx.array, "4 n"]:
    """At each position: bits of both models, whether their argmax agrees, and sum(min(p, q))."""
    logprobs = mx.stack([target_logprobs, draft_logprobs])
    bits = -mx.take_along_axis(logprobs, tokens[None, :, None], axis=-1)[..., 0] / math.log(2)
    choices = mx.argmax(logprobs, axis=-1)
    overlap = mx.sum(mx.exp(mx.minimum(target_logprobs, draft_logprobs)), axis=-1)
    return mx.stack([bits[0], bits[1], (choices[0] == choices[1]).astype(mx.float32), overlap])


def save(folder: Path, model: llama.Model) -> None:
    """Write an mlx-lm model folder: weights in float32, configuration, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = {name: getattr(model.args, name) for name in TARGET_SHAPE}
    config = json.dumps(model_config(shape), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    byte_tokens.save_tokenizer(folder)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print what the model card says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab.train",
        description="Train the lab's pair of models on the manual that comes with Python.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    plan = Plan()
    for name, value in vars(plan).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, metavar="N")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    started = time.process_time()
    result = train_pair(out, Plan(**options))
    print(f"CPU minutes: {(time.process_time() - started) / 60:.1f}")
    for name, measured in vars(result).items():
        print(f"{name}: {measured:.4g}")


if __name__ == "__main__":
    main()
