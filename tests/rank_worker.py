"""One rank's side of the tests of several: `python rank_worker.py JOB...`; prints JSON.

Each job is a function below, run in the same order on all ranks. It notes in `FOUND`, by the name
of a case, [what came out, what should have].
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice, product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import tiny
from scripted import ScriptedSession
from specdec_mlx import (
    FirstOf,
    ModelDrafter,
    PromptLookupDrafter,
    Sampling,
    lab,
    load_head,
    speculate,
)
from specdec_mlx.contracts import Draft, Features
from specdec_mlx.drafters.heads.early_exit import early_exit
from specdec_mlx.drafters.model import ModelSession
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.errors import DraftError, RankError
from specdec_mlx.rounds.ranks import Ranks

GROUP = mx.distributed.init()
RANK = GROUP.rank()
LOOK_UPS = ("prompt-lookup", "ngram", "suffix", "recycling", "lookahead", "auto")
DRAFTERS = (*LOOK_UPS, "auto:trees=true,recycling=true", "model", "cascade", "first of")
LENGTHS = ("auto", 4)
REPEATING = [5, 9, 11, 5, 9, 11, 5, 9]
FOUND: dict[str, Any] = {}


@cache
def pair() -> lab.Pair:
    return lab.load_pair()


@cache
def sharded() -> nn.Module:
    target = lab.load_pair().target
    target.shard(GROUP)
    mx.eval(target.parameters())
    return target


def drafter(name: str, model: nn.Module) -> Any:
    if name == "first of":
        return FirstOf(PromptLookupDrafter(), ModelDrafter(model))
    return make_drafter(name, draft_model=model)


def tokens(model: nn.Module, prompt: list[int], drafting: Any = None, **options: Any) -> list[int]:
    options = {"max_tokens": 16, "probe": False} | options
    return [token.token for token in speculate(model, prompt, drafting, **options)]


def plain(prompt: list[int], drafting: Any = None, **options: Any) -> list[int]:
    return tokens(pair().target, prompt, drafting, **options)


@cache
def prompts(num_prompts: int = 1) -> list[list[int]]:
    text = (
        "The following statements are executed in the order in which they are written. "
        "An assignment statement evaluates the expression list and assigns the result. "
        "The following statements are executed in the "
    )
    step = len(text) // (2 * num_prompts)
    return [list(pair().tokenizer.encode(text[i * step :])) for i in range(num_prompts)]


def text_cases(num_prompts: int, num_lengths: int) -> None:
    for i, prompt in enumerate(prompts(num_prompts)):
        for temp, rule in ((0.0, "auto"), (1.0, "coupled")):
            options = {"sampler": Sampling(temp=temp), "rule": rule, "seed": i}
            expected = plain(prompt, **options)
            for (turn, name), k in product(enumerate(DRAFTERS, start=i), range(num_lengths)):
                length, drafting = LENGTHS[(turn + k) % len(LENGTHS)], drafter(name, pair().draft)
                got = tokens(sharded(), prompt, drafting, draft_length=length, **options)
                FOUND[f"prompt {i}, temp={temp}, {name}, K={length}"] = got, expected


texts = partial(text_cases, 1, len(LENGTHS))
many_texts = partial(text_cases, 20, 1)


def block() -> None:
    """Drafts that are drawn, under the rule that uses their distribution: the same as alone."""
    options = {"sampler": Sampling(temp=1.0), "rule": "block", "seed": 0, "draft_length": 4}
    drafting = drafter("model", pair().draft)
    got = tokens(sharded(), prompts()[0], drafting, **options)
    FOUND["text"] = got, plain(prompts()[0], drafting, **options)


class ReadsCaches(PromptLookupDrafter):
    """Wants keys and values, as a Gemma assistant does."""

    features = Features(caches=(0,))


def heads() -> None:
    """Trained heads, whose target is read on rank 0; what no rank can run alone is refused."""
    prompt = prompts()[0]
    for kind, (temp, rule, length) in product(
        ("mtp", "eagle3"), ((0.0, "auto", "auto"), (1.0, "coupled", 4))
    ):
        options = {"sampler": Sampling(temp=temp), "rule": rule, "seed": 5}
        head = load_head(lab.head_path(kind), sharded())
        got = tokens(sharded(), prompt, head, draft_length=length, **options)
        FOUND[f"{kind}, temp={temp}, K={length}"] = got, plain(prompt, **options)
    for name, alone in (("early exit", early_exit(sharded(), 1)), ("assistant", ReadsCaches())):
        try:
            said = str(tokens(sharded(), prompt, alone))
        except DraftError as error:
            said = str(error)
        FOUND[f"{name} is refused"] = "Use a draft model" in said, True
    FOUND["afterwards"] = tokens(sharded(), prompt), plain(prompt)


def every_rank() -> None:
    """Drafts that each rank draws anew: the texts of one machine, and no distribution is sent."""
    prompt = prompts()[0]
    head = load_head(lab.head_path("mtp"), sharded())
    one_head = load_head(lab.head_path("mtp"), pair().target)
    model = ModelDrafter(pair().draft, on_every_rank=True)
    drafters = {
        "model": (model, model),
        "first of": (FirstOf(PromptLookupDrafter(), model),) * 2,
        "head": (replace(head, on_every_rank=True), one_head),
    }
    send = Ranks.from_first
    for (name, (here, alone)), (rule, length) in product(
        drafters.items(), (("block", 4), ("coupled", "auto"))
    ):
        options = {"sampler": Sampling(temp=1.0), "rule": rule, "seed": 5, "draft_length": length}
        with patch.object(Ranks, "from_first", autospec=True, side_effect=send) as sent:
            got = tokens(sharded(), prompt, here, **options)
        FOUND[f"{name}, {rule}"] = got, plain(prompt, alone, **options)
        FOUND[f"{name}, {rule}, sent"] = sent.call_count, 0
    with patch.object(Ranks, "from_first", autospec=True, side_effect=send) as sent:
        drafting = ModelDrafter(pair().draft)
        tokens(sharded(), prompt, drafting, sampler=Sampling(temp=1.0), draft_length=4)
    FOUND["by default they are sent"] = sent.call_count > 0, True


def every_rank_fails() -> None:
    """A session that raises on rank 1, or is not there: all end, and the next text is right."""
    prompt, calls, propose = prompts()[0], [0], ModelSession.propose

    def raising(session: ModelSession, limit: int) -> Draft:
        calls[0] += 1
        if RANK == 1 and calls[0] == 3:
            raise ArithmeticError("propose")
        return propose(session, limit)

    drafting = ModelDrafter(pair().draft, on_every_rank=True)
    options = {"sampler": Sampling(temp=1.0), "seed": 5, "rule": "coupled"}
    with patch.object(ModelSession, "propose", raising):
        got, error = ending(speculate(sharded(), prompt, drafting, draft_length=2, **options))
    expected = plain(prompt, max_tokens=len(got), **options)
    differing = ModelDrafter(pair().draft, on_every_rank=RANK == 0)
    _, other = ending(speculate(sharded(), prompt, differing, draft_length=2, **options))
    FOUND["tokens"] = (got, expected) if RANK == 0 else ([], [])
    FOUND["some were handed out"] = len(got) > 3, True
    FOUND["error"] = error, "RankError" if RANK == 0 else "ArithmeticError"
    FOUND["another drafter on each"] = other, "RankError"
    FOUND["afterwards"] = tokens(sharded(), prompt, drafting), plain(prompt)


FAMILIES = ("llama", "qwen3_moe", "qwen3_5")
MORE_FAMILIES = (
    *("gpt_oss", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("ministral3", "minimax"),
)


def family_cases(
    names: tuple[str, ...], spread: Callable[[nn.Module], None], probe: bool = False
) -> None:
    """Texts of tiny models that are spread over the ranks, against those that are whole."""
    chooser = random.Random(0)
    for name in names:
        whole, parts = tiny.build(name), tiny.build(name)
        spread(parts)
        mx.eval(parts.parameters())
        prompt = [chooser.randrange(3, 60) for _ in range(9)] * 2
        expected = tokens(whole, prompt)
        for kind, length in (("prompt-lookup", "auto"), ("ngram", 4), ("model", 2)):
            got = tokens(parts, prompt, drafter(kind, whole), draft_length=length, probe=probe)
            FOUND[f"{name}, {kind}, K={length}"] = got, expected


families = partial(family_cases, FAMILIES, lambda model: model.shard(GROUP))
more_families = partial(family_cases, MORE_FAMILIES, lambda model: model.shard(GROUP))

# Measured first: passes of one graph must not be run in two orders.
pipelined = partial(family_cases, ("qwen2",), lambda model: model.model.pipeline(GROUP), probe=True)


def many_ranks() -> None:
    """Pipelined over more than two, one layer each; and then rank 0's caller leaves."""
    whole, parts = (tiny.build("qwen2", num_hidden_layers=4) for _ in range(2))
    parts.model.pipeline(GROUP)
    expected = tokens(whole, REPEATING)
    for kind, length in (("prompt-lookup", "auto"), ("model", 4), ("model", "auto")):
        got = tokens(parts, REPEATING, drafter(kind, whole), draft_length=length)
        FOUND[f"{kind}, K={length}"] = got, expected
    generation = speculate(parts, REPEATING, ModelDrafter(whole), max_tokens=20)
    got = [token.token for token in islice(generation, 7 if RANK == 0 else None)]
    generation.close()
    FOUND["leaving"] = got, expected[:7]


class Raising(ScriptedSession):
    """A drafter, and its session, that raises at the start, or in the third round."""

    def __init__(self, where: str, error: type[Exception]) -> None:
        super().__init__(lambda emitted, limit: [7] * min(limit, 2))
        self.where, self.error = where, error

    def begin(self, prompt: Any, context: Any) -> Raising:
        self._raise("begin")
        return self

    def propose(self, limit: int) -> Draft:
        draft = super().propose(limit)
        self._raise("propose")
        return draft

    def observe(self, emitted: Any) -> None:
        self._raise("observe")

    def _raise(self, where: str) -> None:
        if where == self.where and (where == "begin" or len(self.limits) >= 3):
            raise self.error(where)


def ending(generation: Iterator[Any]) -> tuple[list[int], str]:
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
    for where, error in product(("begin", "propose", "observe"), (ArithmeticError, RuntimeError)):
        cache_, case = make_prompt_cache(sharded()), f"{where}, {error.__name__}"
        options = {"max_tokens": 12, "draft_length": 2, "prompt_cache": cache_}
        got, raised = ending(speculate(sharded(), prompt, Raising(where, error), **options))
        expected = plain(prompt, max_tokens=max(1, len(got)))[: len(got)]
        FOUND[f"{case}: tokens"] = got, expected
        FOUND[f"{case}: error"] = raised, error.__name__ if RANK == 0 else "RankError"
        held = len(prompt) + len(got) if where != "begin" else 0
        FOUND[f"{case}: caches"] = cache_[0].offset, held
        again = tokens(sharded(), prompt, PromptLookupDrafter())
        FOUND[f"{case}: afterwards"] = again, plain(prompt)


def leaving() -> None:
    """A caller that leaves, on all ranks or on one: none hangs, and caches end where rank 0's."""
    prompt = prompts()[0]
    expected = plain(prompt)
    for (case, leavers), number in product(
        (("all", (0, 1)), ("rank 0", (0,)), ("rank 1", (1,))), (1, 7)
    ):
        cache_, drafting = make_prompt_cache(sharded()), ModelDrafter(pair().draft)
        options = {"draft_length": 4, "prompt_cache": cache_, "max_tokens": 16}
        generation = speculate(sharded(), prompt, drafting, **options)
        taken = islice(generation, number if RANK in leavers else None)
        got = [token.token for token in taken]
        generation.close()
        name = f"{case} after {number}"
        FOUND[f"{name}: tokens"] = got, expected[: len(got)]
        if 0 in leavers:
            FOUND[f"{name}: number"] = len(got), number
            FOUND[f"{name}: caches"] = cache_[0].offset, len(prompt) + number
            options = {"prompt_cache": cache_, "max_tokens": 4}
            last = expected[number : number + 1]
            rest = tokens(sharded(), last, PromptLookupDrafter(), **options)
            FOUND[f"{name}: next turn"] = rest, expected[number + 1 : number + 5]


def recurrent() -> None:
    """Rank 0's caller leaves, on caches that can only go back to a checkpoint."""
    whole, parts = tiny.build("qwen3_5"), tiny.build("qwen3_5")
    parts.shard(GROUP)
    expected = tokens(whole, REPEATING)
    for number in (1, 3, 4, 6):
        cache_ = make_prompt_cache(parts)
        options = {"draft_length": 3, "prompt_cache": cache_, "max_tokens": 12}
        generation = speculate(parts, REPEATING, ModelDrafter(whole), **options)
        got = [token.token for token in islice(generation, None if RANK else number)]
        generation.close()
        rest = tokens(parts, expected[number : number + 1], prompt_cache=cache_, max_tokens=4)
        FOUND[f"after {number}"] = [got, rest], [expected[:number], expected[number + 1 :][:4]]


def arguments() -> None:
    """Ranks that are called with different ones say so, all of them; seeds are rank 0's."""
    prompt = prompts()[0]
    options: dict[str, Any] = {"sampler": Sampling(temp=1.0)}
    for name, given in {
        "prompt": {"prompt_tokens": [5 + RANK, 6]},
        "max_tokens": {"prompt_tokens": [5, 6], "max_tokens": 5 + RANK},
        "drafter": {"prompt_tokens": [5, 6], "drafter": PromptLookupDrafter() if RANK else None},
    }.items():
        FOUND[f"another {name}"] = ending(speculate(sharded(), **given)), ([], "RankError")
    got = tokens(sharded(), prompt, PromptLookupDrafter(), seed=1 + RANK, **options)
    FOUND["another seed"] = got, plain(prompt, seed=1, **options)
    mx.random.seed(3 + RANK)
    unseeded = tokens(sharded(), prompt, PromptLookupDrafter(), **options)
    every = mx.distributed.all_gather(mx.array([unseeded])).tolist()
    FOUND["no seed"] = every[0], every[-1]


def dies() -> None:
    for n, _ in enumerate(speculate(sharded(), prompts()[0], PromptLookupDrafter())):
        if RANK == 1 and n == 5:
            os._exit(17)


if __name__ == "__main__":
    results = {}
    for name in sys.argv[1:]:
        began = time.perf_counter()
        globals()[name]()
        results[name], FOUND = FOUND, {}
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(json.dumps(results))
