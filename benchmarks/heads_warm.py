"""Tokens a pass of heads on later turns of a conversation: `python -m benchmarks.heads_warm`.

A turn adds a few tokens to a conversation that is in the target's caches. The head either knows
nothing of the earlier turns, or goes on from its own kept state, or reads the whole conversation.
All counts are exact, and no clock is read.

No DFlash head ships for the lab's target, so a small one is trained here first, or is taken from
the folder of an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from specdec_mlx.drafters.heads.drafter import HeadDrafter, anatomy_for_head
from specdec_mlx.drafters.heads.one_pass import DFlash
from specdec_mlx.lab import pair

BLOCK = 6  # positions of the trained DFlash head's block
WINDOW = 768  # longest text that it is trained on
ANCHORS = 32  # blocks of one training step
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": 257,
    "mask_token_id": 256,
    "block_size": BLOCK,
    "target_layer_ids": [1, 3],
}


def new_dflash(target: nn.Module) -> DFlash:
    return DFlash(CONFIG, anatomy_for_head(target))


def dflash(target: nn.Module, tokenizer: Any, file: Path | None, steps: int) -> HeadDrafter:
    """A DFlash head for the lab's target, from a file or from training, which writes the file."""
    head = new_dflash(target)
    if file is not None and file.exists():
        head.load_weights(str(file))
        return HeadDrafter(head)
    train_dflash(head, target, tokenizer, steps)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(file), dict(tree_flatten(head.parameters())))
    return HeadDrafter(head)


def train_dflash(head: DFlash, target: nn.Module, tokenizer: Any, steps: int) -> None:
    """Train on the lab's own training texts, towards the target's distributions."""
    mx.random.seed(0)
    texts, _ = pair.split_topics()
    tokens = mx.array([t for text in texts for t in tokenizer.encode(text)])
    optimizer = optim.AdamW(learning_rate=optim.cosine_decay(1e-3, steps, 1e-5))

    def loss_of(head: DFlash, rows: mx.array, text: mx.array, anchors: mx.array, law: mx.array):
        logits = block_logits(head, rows, text, anchors)
        return -(law * nn.log_softmax(logits, axis=-1)).sum(-1).mean()

    step_of = nn.value_and_grad(head, loss_of)
    for step in range(steps):
        start = int(mx.random.randint(0, tokens.size - WINDOW - 1).item())
        text = tokens[start : start + WINDOW]
        layers, logits = layer_outputs(target, text, head.fused)
        anchors = mx.random.randint(8, WINDOW - BLOCK - 1, (ANCHORS,))
        # The token after position t has the law of row t.
        places = anchors[:, None] + mx.arange(BLOCK - 1)
        law = mx.softmax(logits[places], axis=-1)
        loss, gradient = step_of(head, mx.concatenate(layers, axis=-1), text, anchors, law)
        optimizer.update(head, gradient)
        mx.eval(head.parameters(), optimizer.state)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def layer_outputs(
    target: nn.Module, text: mx.array, layers: Sequence[int]
) -> tuple[list[mx.array], mx.array]:
    """Outputs [n, D] of some of the target's layers, and its logits [n, V]."""
    h = target.model.embed_tokens(text[None])
    outputs = {}
    for i, layer in enumerate(target.model.layers):
        h = layer(h, "causal", None)
        outputs[i] = h[0]
    logits = target.model.embed_tokens.as_linear(target.model.norm(h))[0]
    return [outputs[i] for i in layers], logits.astype(mx.float32)


def block_logits(head: DFlash, rows: mx.array, text: mx.array, anchors: mx.array) -> mx.array:
    """Logits [A, B - 1, V] of the blocks that begin with the tokens at the anchors [A]."""
    context = head.hidden_norm(head.fc(rows))[None]
    number, n = anchors.shape[0], rows.shape[0]
    blocks = mx.full((number, BLOCK), head.mask_token)
    blocks = mx.concatenate([text[anchors][:, None], blocks[:, 1:]], axis=1)
    h = head.anatomy.embed(blocks)
    # A block sees the rows of the target before its first token, and all of itself.
    seen = mx.arange(n)[None] < anchors[:, None]
    mask = mx.concatenate([seen, mx.ones((number, BLOCK), mx.bool_)], axis=1)[:, None, None]
    for layer in head.layers:
        attention = layer.self_attn

        def split(x: mx.array, part: str, attention: Any = attention) -> mx.array:
            made = attention[part](x)
            return made.reshape(*x.shape[:2], attention.n_kv_heads, -1)

        x = layer.input_layernorm(h)
        queries, near = (
            attention.rope(norm(split(x, part)).transpose(0, 2, 1, 3), offset=anchors)
            for norm, part in ((attention.q_norm, "q_proj"), (attention.k_norm, "k_proj"))
        )
        far = attention.rope(attention.k_norm(split(context, "k_proj")).transpose(0, 2, 1, 3))
        near_values, far_values = (
            split(states, "v_proj").transpose(0, 2, 1, 3) for states in (x, context)
        )
        # All blocks read the same context, so one product serves all of them.
        together = queries.transpose(1, 0, 2, 3).reshape(1, -1, number * BLOCK, queries.shape[-1])
        to_far = together @ far.swapaxes(-1, -2)
        to_far = to_far.reshape(-1, number, BLOCK, n).swapaxes(0, 1)
        scores = mx.concatenate([to_far, queries @ near.swapaxes(-1, -2)], axis=-1)
        chances = mx.softmax(mx.where(mask, scores * attention.scale, -mx.inf), axis=-1)
        of_far = chances[..., :n].swapaxes(0, 1).reshape(1, -1, number * BLOCK, n) @ far_values
        of_far = of_far.reshape(-1, number, BLOCK, queries.shape[-1]).swapaxes(0, 1)
        made = of_far + chances[..., n:] @ near_values
        h = h + attention.o_proj(made.transpose(0, 2, 1, 3).reshape(number, BLOCK, -1))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    return head.logits(head.norm(h[:, 1:])).astype(mx.float32)


LENGTHS = tuple(range(200, 1001, 72))
"""Tokens of each conversation before its later turn."""
ANSWER = 12  # tokens of the turn before, and of the later turn's prompt


def conversations(tokenizer: Any) -> Iterator[list[int]]:
    """Beginnings of held-out texts: each of `LENGTHS`, and the tokens after it."""
    _, texts = pair.split_topics()
    rows = [list(tokenizer.encode(text)) for text in texts]
    for i, length in enumerate(LENGTHS):
        long_enough = [row for row in rows if len(row) >= length + ANSWER]
        row = long_enough[i % len(long_enough)]
        start = (len(row) - length - ANSWER) // 2
        yield row[start : start + length + ANSWER]
