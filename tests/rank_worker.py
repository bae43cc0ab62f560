"""One rank's side of the tests of several: `python rank_worker.py JOB...`; prints JSON.

Each job is a function below, run in the same order on all ranks. All that they find is printed:
[case, what came out, what should have].
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import islice, product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

import specdec_mlx as sd
import tiny
from on_ranks import SENTENCES
from scripted import ScriptedSession
from specdec_mlx import lab
from specdec_mlx.contracts import Draft, Features
from specdec_mlx.drafters.choosing.registry import make_drafter
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.errors import DraftError, RankError
from specdec_mlx.lab.papers.early_exit import early_exit
from specdec_mlx.ranks import Ranks

GROUP = mx.distributed.init()
RANK = GROUP.rank()
HEADS = ("mtp", "eagle3")
DRAFTERS = (
    *("prompt-lookup", "ngram", "suffix", "recycling", "lookahead", "auto", "model", "cascade"),
    *("trees:recycling=true", "first of", *HEADS),
)
WAYS = list(product(((0.0, "auto"), (1.0, "coupled")), ("auto", 4)))
DRAWN = {"sampler": sd.Sampling(temp=1.0), "seed": 5}
REPEATING = [5, 9, 11, 5, 9, 11, 5, 9]
FOUND: list[tuple[str, Any, Any]] = []


def check(case: str, got: Any, expected: Any) -> None:
    FOUND.append((case, got, expected))


@cache
def pair() -> lab.Pair:
    """The lab pair, its target whole."""
    return lab.load_pair()


@cache
def sharded() -> nn.Module:
    """The lab's target, spread over the ranks."""
    target = lab.load_pair().target
    target.shard(GROUP)
    mx.eval(target.parameters())
    return target


def drafter(name: str, model: nn.Module) -> Any:
    """A drafter by name; model: the draft model. Heads read the sharded target."""
    if name in HEADS:
        return sd.load_head(lab.head_path(name), sharded())
    if name == "first of":
        return sd.drafters.FirstOf(sd.PromptLookupDrafter(), sd.ModelDrafter(model))
    return make_drafter(name, draft_model=model)


def tokens(model: nn.Module, prompt: list[int], drafting: Any = None, **options: Any) -> list[int]:
    """A generation's tokens."""
    options = {"max_tokens": 16, "probe": False} | options
    return [token.token for token in sd.speculate(model, prompt, drafting, **options)]


def plain(prompt: list[int], drafting: Any = None, **options: Any) -> list[int]:
    """Tokens of the whole target."""
    return tokens(pair().target, prompt, drafting, **options)


@cache
def prompts(num_prompts: int = 1) -> list[list[int]]:
    """Beginnings of texts that the lab pair can write."""
    step = len(SENTENCES) // (2 * num_prompts)
    return [list(pair().tokenizer.encode(SENTENCES[i * step :])) for i in range(num_prompts)]


def texts(num_prompts: int = 1, names: tuple[str, ...] = ("prompt-lookup", "model", "mtp")) -> None:
    """Texts of the lab pair; of two prompts each drafter is tried in two of the ways."""
    for i, prompt in enumerate(prompts(num_prompts)):
        for turn, name in enumerate(names, start=i):
            (temp, rule), length = WAYS[turn % 4]
            options = {"sampler": sd.Sampling(temp=temp), "rule": rule, "seed": i}
            got = tokens(
                sharded(), prompt, drafter(name, pair().draft), num_draft_tokens=length, **options
            )
            check(f"prompt {i}, temp={temp}, {name}, K={length}", got, plain(prompt, **options))


def many_texts() -> None:
    texts(2, DRAFTERS)


class ReadsCaches(sd.PromptLookupDrafter):
    """Wants keys and values, as a Gemma assistant does."""

    features = Features(caches=(0,))


def refused() -> None:
    """Drafters that no rank can run alone; the next text is right."""
    prompt = prompts()[0]
    for name, alone in (("early exit", early_exit(sharded(), 1)), ("assistant", ReadsCaches())):
        try:
            said = str(tokens(sharded(), prompt, alone))
        except DraftError as error:
            said = str(error)
        check(name, "Use a draft model" in said, True)
    check("afterwards", tokens(sharded(), prompt), plain(prompt))


def every_rank() -> None:
    """Drafts drawn on rank 0, whose distributions are sent, and those that each rank draws anew, of
    which none is: the texts of one machine."""
    prompt = prompts()[0]
    head = sd.load_head(lab.head_path("mtp"), sharded())
    one_head = sd.load_head(lab.head_path("mtp"), pair().target)
    sent, model = (sd.ModelDrafter(pair().draft, on_every_rank=each) for each in (False, True))
    drafters = {
        "sent": (sent, sent),
        "model": (model, model),
        "first of": (sd.drafters.FirstOf(sd.PromptLookupDrafter(), model),) * 2,
        "head": (replace(head, on_every_rank=True), one_head),
    }
    send, ways = Ranks.from_first, (("block", 4), ("coupled", "auto"))
    for (name, (here, alone)), (rule, length) in product(drafters.items(), ways):
        options = {"rule": rule, "num_draft_tokens": length, **DRAWN}
        with patch.object(Ranks, "from_first", autospec=True, side_effect=send) as sends:
            got = tokens(sharded(), prompt, here, **options)
        check(f"{name}, {rule}", got, plain(prompt, alone, **options))
        if length == 4 or name != "sent":  # "auto" may draft nothing
            check(f"{name}, {rule}, sent", sends.called, name == "sent")


def every_rank_fails() -> None:
    """A session that raises on rank 1, or is not there: all end, and the next text is right."""
    prompt, calls, propose = prompts()[0], [0], WritingSession.propose

    def raising(session: WritingSession, limit: int) -> Draft:
        calls[0] += 1
        if RANK == 1 and calls[0] == 3:
            raise ArithmeticError("propose")
        return propose(session, limit)

    drafting = sd.ModelDrafter(pair().draft, on_every_rank=True)
    options = {"num_draft_tokens": 2, "rule": "coupled", **DRAWN}
    with patch.object(WritingSession, "propose", raising):
        got, error = ending(sd.speculate(sharded(), prompt, drafting, **options))
    if RANK == 0:
        check("tokens", got, plain(prompt, max_tokens=len(got), **options))
    check("some were handed out", len(got) > 3, True)
    check("error", error, "RankError" if RANK == 0 else "ArithmeticError")
    differing = sd.ModelDrafter(pair().draft, on_every_rank=RANK == 0)
    _, other = ending(sd.speculate(sharded(), prompt, differing, **options))
    check("another drafter on each", other, "RankError")
    check("afterwards", tokens(sharded(), prompt, drafting), plain(prompt))


FAMILIES = ("llama", "qwen3_moe", "qwen3_5", "deepseek_v3", "gpt_oss")


def alike(name: str, whole: nn.Module, parts: nn.Module, *, probe: bool = False) -> None:
    """Texts of a model that is spread over the ranks, against those of one that is whole."""
    mx.eval(parts.parameters())
    for kind, length in (("ngram", 4), ("model", "auto")):
        drafting = drafter(kind, whole)
        got = tokens(parts, REPEATING, drafting, num_draft_tokens=length, probe=probe)
        check(f"{name}, {kind}, K={length}", got, tokens(whole, REPEATING))


def families() -> None:
    """Tiny models whose layers are split."""
    for name in FAMILIES:
        whole, parts = tiny.build(name), tiny.build(name)
        parts.shard(GROUP)
        alike(name, whole, parts)


def pipelined() -> None:
    """Two layers at least, one for each rank. Measured first: passes of one graph must not be run
    in two orders. Then rank 0 leaves."""
    num_layers = max(2, GROUP.size())
    whole, parts = (tiny.build("qwen2", num_hidden_layers=num_layers) for _ in range(2))
    parts.model.pipeline(GROUP)
    alike("qwen2", whole, parts, probe=True)
    left(whole, parts, REPEATING, sd.ModelDrafter(whole), 7)


def left(
    whole: nn.Module,
    parts: nn.Module,
    prompt: list[int],
    drafting: Any,
    number: int,
    leavers: tuple[int, ...] = (0,),
) -> None:
    """After `number` of 16 tokens the caller leaves, on some ranks: all end where rank 0 did, if it
    is among them, and the next turn goes on from there, as it does after the last token."""
    cache_, expected = make_prompt_cache(parts), tokens(whole, prompt, max_tokens=21)
    options = {"num_draft_tokens": 4, "prompt_cache": cache_, "max_tokens": 16}
    with closing(sd.speculate(parts, prompt, drafting, **options)) as items:
        got = [item.token for item in islice(items, number if RANK in leavers else None)]
    case = f"{len(prompt)} tokens, {leavers} after {number}"
    end = min(number, 16) if 0 in leavers else len(got)
    check(case, got, expected[:end])
    if 0 in leavers:
        held = [cache.offset for cache in cache_ if isinstance(cache, KVCache)]
        check(f"{case}, caches", held, [len(prompt) + end] * len(held))
        options = {"prompt_cache": cache_, "max_tokens": 4}
        rest = tokens(parts, expected[end : end + 1], sd.PromptLookupDrafter(), **options)
        check(f"{case}, next turn", rest, expected[end + 1 : end + 5])


def leaving() -> None:
    """On all ranks or on one, or at the end: none hangs. Also on caches that can only go back to a
    checkpoint."""
    drafting = sd.ModelDrafter(pair().draft)
    for leavers, number in (((0, 1), 7), ((0, 1), 99), ((0,), 1), ((0,), 7), ((1,), 1)):
        left(pair().target, sharded(), prompts()[0], drafting, number, leavers)
    whole, parts = tiny.build("qwen3_5"), tiny.build("qwen3_5")
    parts.shard(GROUP)
    for number in (1, 3, 4, 6):
        left(whole, parts, REPEATING, sd.ModelDrafter(whole), number)


class Raising(ScriptedSession):
    """A drafter, and its session, that raises at the start, or in the third round."""

    def __init__(self, where: str, error: type[Exception]) -> None:
        super().__init__(lambda emitted, limit: [7] * min(limit, 2))
        self.where, self.error = where, error

    def begin(self, prompt: Any, context: Any) -> Raising:
        if self.where == "begin":
            raise self.error
        return self

    def propose(self, limit: int) -> Draft:
        draft = super().propose(limit)
        if self.where == "propose" and len(self.limits) >= 3:
            raise self.error
        return draft

    def observe(self, emitted: Any) -> None:
        if self.where == "observe" and len(self.limits) >= 3:
            raise self.error


def ending(generation: Iterator[Any]) -> tuple[list[int], str]:
    """The tokens until the end, and the name of the error if it ended by one."""
    got: list[int] = []
    try:
        for token in generation:
            got.append(token.token)
    except (ArithmeticError, RuntimeError, RankError) as error:
        return got, type(error).__name__
    return got, ""


def failures() -> None:
    """A drafter that raises: all ranks hand out the same tokens, and raise; then they go on."""
    prompt = prompts()[0]
    for where, error in (
        ("begin", RuntimeError),
        ("propose", ArithmeticError),
        ("observe", RuntimeError),
    ):
        cache_, case = make_prompt_cache(sharded()), f"{where}, {error.__name__}"
        options = {"max_tokens": 12, "num_draft_tokens": 2, "prompt_cache": cache_}
        got, raised = ending(sd.speculate(sharded(), prompt, Raising(where, error), **options))
        expected, held = plain(prompt), len(prompt) + len(got) if where != "begin" else 0
        check(f"{case}: tokens", got, expected[: len(got)])
        check(f"{case}: error", raised, error.__name__ if RANK == 0 else "RankError")
        check(f"{case}: caches", cache_[0].offset, held)
        again = tokens(sharded(), prompt, sd.PromptLookupDrafter())
        check(f"{case}: afterwards", again, expected)


def arguments() -> None:
    """Ranks that are called with different ones say so, all of them; seeds are rank 0's."""
    prompt, look_up = prompts()[0], sd.PromptLookupDrafter()
    for name, given in {
        "prompt": {"prompt_tokens": [5 + RANK, 6]},
        "max_tokens": {"prompt_tokens": [5, 6], "max_tokens": 5 + RANK},
        "drafter": {"prompt_tokens": [5, 6], "drafter": look_up if RANK else None},
    }.items():
        check(f"another {name}", ending(sd.speculate(sharded(), **given)), ([], "RankError"))
    got = tokens(sharded(), prompt, look_up, **DRAWN | {"seed": 5 + RANK})
    check("another seed", got, plain(prompt, **DRAWN))
    model, given = sd.ModelDrafter(pair().draft), {"num_draft_tokens": 4, **DRAWN}
    got = tokens(sharded(), prompt, model, **given | {"seed": None if RANK else 5})
    check("a seed on rank 0 alone", got, plain(prompt, **DRAWN))
    mx.random.seed(3 + RANK)
    unseeded = tokens(sharded(), prompt, look_up, **DRAWN | {"seed": None})
    every = mx.distributed.all_gather(mx.array([unseeded])).tolist()
    check("no seed", every[0], every[-1])


def dies() -> None:
    """A rank that ends in the middle of a generation."""
    for n, _ in enumerate(sd.speculate(sharded(), prompts()[0], sd.PromptLookupDrafter())):
        if RANK == 1 and n == 5:
            os._exit(17)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        began = time.perf_counter()
        globals()[name]()
        check(name, True, True)
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(json.dumps(FOUND))
