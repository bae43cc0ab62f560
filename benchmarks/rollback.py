"""What rolling back costs: a round with rejected drafts against one without, interleaved.

`python -m benchmarks.rollback --context 8192`. A cache that was copied would show as a round
that costs far more: the keys and values of a long text are much larger than what a round reads
of them in writing a few rows.

With a recurrent model, `--model M`, rounds that reject half of their draft: states chosen among
against positions fed again.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.caches import Rollback
from specdec_mlx.exactness.recurrent_states import recurrent_states_of
from specdec_mlx.lab.demo_model import demo_model_path


def time_rounds(
    model: nn.Module, context: int, draft_length: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of rounds, interleaved, on one set of caches for each kind.

    Args:
        model: one with plain key-value caches.
        context: tokens that the caches hold.
        draft_length: K; a round is over K + 1 positions.
        repeats: rounds of each kind.

    Returns:
        "rolled back": all drafts rejected each time; "kept": none.
    """
    rollbacks = {kind: _filled(model, context) for kind in ("rolled back", "kept")}
    tokens = mx.arange(1, draft_length + 2)[None]
    seconds: dict[str, list[float]] = {kind: [] for kind in rollbacks}
    for _ in range(repeats):
        for kind, rollback in rollbacks.items():
            started = time.perf_counter()
            rollback.checkpoint()
            logits = model(tokens, cache=rollback.caches)
            mx.eval(mx.argmax(logits, axis=-1))
            rollback.advance(draft_length + 1)
            if kind == "rolled back":
                rollback.rewind_to(rollback.position - draft_length)
            seconds[kind].append(time.perf_counter() - started)
    return seconds


def time_recurrent_rounds(
    model: nn.Module, context: int, draft_length: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of two rounds on a recurrent model, interleaved: half of a draft kept, then a whole.

    Args:
        model: one whose states can be chosen among.
        context: tokens read before.
        draft_length: K.
        repeats: pairs of rounds of each kind.

    Returns:
        "states chosen", and "fed again": what was kept of the first is fed with the second; "no
        draft": two passes over one token, the measure of both.
    """
    states = {"states chosen": recurrent_states_of(model), "fed again": None, "no draft": None}
    rollbacks = {kind: Rollback(make_prompt_cache(model), states=s) for kind, s in states.items()}
    for rollback in rollbacks.values():
        mx.eval(rollback.forward(model, mx.arange(1, context + 1)))
    seconds: dict[str, list[float]] = {kind: [] for kind in rollbacks}
    for _ in range(repeats):
        for kind, rollback in rollbacks.items():
            k = 0 if kind == "no draft" else draft_length
            started, end = time.perf_counter(), rollback.position
            for num_kept in (k // 2, k):
                rollback.checkpoint()
                num_fed = end - rollback.position + 1 + k
                mx.eval(mx.argmax(rollback.forward(model, mx.arange(1, num_fed + 1)), axis=-1))
                end += 1 + num_kept
                rollback.rewind_to(end)
            seconds[kind].append(time.perf_counter() - started)
    return seconds


def _filled(model: nn.Module, context: int) -> Rollback:
    """Caches that hold `context` tokens' worth of random keys and values."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=caches))
    for cache in caches:
        keys, values = cache.keys_and_values()
        shapes = [(*x.shape[:2], context - 1, x.shape[3]) for x in (keys, values)]
        cache.update_and_fetch(*(mx.random.normal(shape).astype(keys.dtype) for shape in shapes))
    mx.eval([cache.state for cache in caches])
    return Rollback(caches)


def main() -> None:
    """Print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="with plain key-value caches (a small one), or recurrent")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    model = load(str(args.model or demo_model_path()))[0]
    is_recurrent = recurrent_states_of(model) is not None
    timed = time_recurrent_rounds if is_recurrent else time_rounds
    seconds = timed(model, args.context, args.num_draft_tokens, args.repeats)
    medians = {kind: statistics.median(taken) for kind, taken in seconds.items()}
    for kind, median in medians.items():
        print(f"{kind}: {1e3 * median:.1f} ms (median of {args.repeats})")
    first, second = list(medians.values())[:2]
    print(f"ratio: {first / second:.3f}")


if __name__ == "__main__":
    main()
