"""Tokens a pass of heads on later turns of a conversation: `python -m benchmarks.heads_warm`.

A turn adds a few tokens to a conversation that is in the target's caches. The head either knows
nothing of the earlier turns, or goes on from its own kept state, or reads the whole conversation.
All counts are exact, and no clock is read.

No DFlash head ships for the lab's target, so a small one is trained here first, or is taken from
the folder of an earlier run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.arguments import number
from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.heads.one_pass import DFlash
from specdec_mlx.lab import pair
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import Token, speculate
from specdec_mlx.mlx_lm_plugin.flags import Flags
from specdec_mlx.models.loading import load_model
from specdec_mlx.sequence import remember
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.models import Models
from specdec_mlx.server.requests import TextRequest, Transcript
from specdec_mlx.stats.account import SpeculationStats

LENGTHS = tuple(range(200, 1001, 72))
"""Tokens of each conversation before its later turn."""

NUM_NEW = 12
"""Tokens of the answer before, and tokens that the later turn adds to the prompt."""

NUM_DRAFT_TOKENS = 4
WHOLE = "server, whole"

BLOCK = 6  # positions of the trained DFlash head's block
WINDOW = 768  # longest text that it is trained on
ANCHORS = 32  # blocks of one training step
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
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


def trained_dflash(target: nn.Module, tokenizer: Any, folder: Path, num_steps: int) -> Path:
    """The folder of a DFlash head for the lab's target, which is trained if it is not there."""
    if not (folder / "config.json").exists():
        head = new_dflash(target)
        train_dflash(head, target, tokenizer, num_steps)
        write_dflash(head, folder)
    return folder


def write_dflash(head: DFlash, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights: Any = tree_flatten(head.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def train_dflash(head: DFlash, target: nn.Module, tokenizer: Any, steps: int) -> None:
    """Train on the lab's own training texts, towards the target's distributions."""
    mx.random.seed(0)
    texts, _ = pair.split_topics()
    tokens = mx.array([t for text in texts for t in tokenizer.encode(text)])
    optimizer = optim.AdamW(learning_rate=optim.cosine_decay(1e-3, steps, 1e-5))

    def loss_of(
        head: DFlash, rows: mx.array, text: mx.array, anchors: mx.array, law: mx.array
    ) -> mx.array:
        logits = block_logits(head, rows, text, anchors)
        per_token: mx.array = (law * nn.log_softmax(logits, axis=-1)).sum(-1)
        return -per_token.mean()

    step_of = nn.value_and_grad(head, loss_of)
    for step in range(steps):
        start: Any = mx.random.randint(0, tokens.size - WINDOW - 1).item()
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
            made: mx.array = attention[part](x)
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
    logits = head.logits(head.norm(h[:, 1:]))
    return logits.astype(mx.float32)


@dataclass
class Conversation:
    """Token ids of the first prompt, of its answer, and of what the later turn adds."""

    first: list[int]
    said: list[int]
    new: list[int]

    @property
    def whole(self) -> list[int]:
        return [*self.first, *self.said, *self.new]


def conversations(target: nn.Module, tokenizer: Any, num: int) -> Iterator[Conversation]:
    """Beginnings of held-out texts of `LENGTHS`, with plain decoding's answer."""
    _, texts = pair.split_topics()
    rows = [list(tokenizer.encode(text)) for text in texts]
    for i, length in enumerate(LENGTHS[:: -(-len(LENGTHS) // num)]):
        long_enough = [row for row in rows if len(row) >= length + NUM_NEW]
        row = long_enough[i % len(long_enough)]
        start = (len(row) - length - NUM_NEW) // 2
        first, new = row[start : start + length], row[start + length :][:NUM_NEW]
        said = [token.token for token in speculate(target, first, None, max_tokens=NUM_NEW)]
        yield Conversation(first, said, new)


@dataclass
class Count:
    """Tokens and passes of the target."""

    tokens: int = 0
    passes: int = 0

    def add(self, stats: SpeculationStats) -> None:
        self.tokens += stats.emitted
        self.passes += stats.target_passes

    @property
    def per_pass(self) -> float:
        return self.tokens / max(1, self.passes)


def in_python(
    target: nn.Module, drafter: Drafter, texts: Sequence[Conversation], max_tokens: int
) -> dict[str, Count]:
    """Counts of later turns on a prompt cache: without the head's state, with it, and anew."""
    counts = {way: Count() for way in ("cold", "kept", "whole")}

    def run(prompt: Sequence[int], number: int, cache: list[Any]) -> list[Token]:
        return list(
            speculate(
                *(target, prompt, drafter),
                max_tokens=number,
                num_draft_tokens=NUM_DRAFT_TOKENS,
                prompt_cache=cache,
            )
        )

    for text in texts:
        kept, cold = make_prompt_cache(target), make_prompt_cache(target)
        run(text.first, NUM_NEW, kept)
        for own, other in zip(cold, kept, strict=True):  # this copy has no state of a head
            own.state = other.state
        remember(cold, [*text.first, *text.said])
        turns = {
            "cold": (text.new, cold),
            "kept": (text.new, kept),
            "whole": (text.whole, make_prompt_cache(target)),
        }
        written = {way: run(prompt, max_tokens, cache) for way, (prompt, cache) in turns.items()}
        different = {tuple(token.token for token in tokens) for tokens in written.values()}
        assert len(different) == 1, "the text depends on the drafts"
        for way, tokens in written.items():
            counts[way].add(tokens[-1].stats)
    return counts


def on_server(
    head: Path, texts: Sequence[Conversation], max_tokens: int, disk: Path
) -> dict[str, Count]:
    """Counts of later turns on a server: with the conversations, after its restart, and anew."""
    choice = DrafterChoice(("model",), DraftModel(str(head)))
    flags = replace(Flags(keeps_tuning=False), choice=choice, num_draft_tokens=NUM_DRAFT_TOKENS)
    counts = {way: Count() for way in ("server", "restarted", WHOLE)}
    for way, folder in (("first", disk), ("restarted", disk), ("server", None), (WHOLE, None)):
        settings = ServerSettings(
            model=str(pair.target_path()), flags=flags, prompt_cache=folder, prompt_cache_size=12
        )
        engine = Engine(Models(settings), settings)
        engine.start()
        try:
            for text in texts if way in ("first", "server") else ():
                ask(engine, text.first, NUM_NEW)
            for text in texts if way != "first" else ():
                counts[way].add(ask(engine, text.whole, max_tokens))
        finally:
            engine.stop()
    return counts


def ask(engine: Engine, prompt: list[int], max_tokens: int) -> SpeculationStats:
    """Write a text, and return its account."""
    events: Queue[Any] = Queue()
    request = TextRequest(prompt=prompt, max_tokens=max_tokens, sampling={"temp": 0.0})
    engine.submit(request, events.put)
    written = Transcript()
    while written.ended is None:
        written.add(events.get())
    while engine.running:  # the state is stored after the last token
        sleep(0.01)
    assert written.ended.stats is not None
    return written.ended.stats


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    args = _parser().parse_args(arguments)
    target, tokenizer = load_model(pair.target_path())
    texts = list(conversations(target, tokenizer, args.conversations))
    heads = {kind: pair.head_path(kind) for kind in args.head if kind != "dflash"}
    header, rows = list[str](), list[list[str]]()
    with TemporaryDirectory() as scratch:
        if "dflash" in args.head:
            folder = args.dflash or Path(scratch, "dflash")
            heads["dflash"] = trained_dflash(target, tokenizer, folder, args.steps)
        for kind, path in heads.items():
            counts = in_python(target, load_head(path, target), texts, args.max_tokens)
            if args.server:
                counts |= on_server(path, texts, args.max_tokens, Path(scratch, f"{kind} kept"))
            whole = counts["whole"].per_pass
            shares = (count.per_pass / whole for count in counts.values())
            cells = zip(counts.values(), shares, strict=True)
            rows.append([kind, *(f"{count.per_pass:.2f} ({share:.3f})" for count, share in cells)])
            header = ["head", *counts]
    print(f"{len(texts)} conversations, {args.max_tokens} tokens each\n")
    print(markdown_table(header, rows, num_text_columns=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads_warm", description=__doc__)
    add, count = parser.add_argument, number(int, 1)
    kinds = [*pair.HEADS, "dflash"]
    add("--head", nargs="+", choices=kinds, default=kinds, help="kinds of heads (all)")
    add("--conversations", type=count, default=12, help="number of conversations (%(default)s)")
    add("--max-tokens", type=count, default=48, help="tokens of the later turn (%(default)s)")
    add("--server", action="store_true", help="also on a server, and after it started again")
    add("--dflash", type=Path, metavar="FOLDER", help="folder of the trained DFlash head")
    add("--steps", type=count, default=1500, help="training steps of that head (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
