"""What one rank does in the tests of several: `python rank_worker.py JOB...`; prints JSON.

Each job is a function below, run in the same order on all ranks. What it returns maps the name of a
case to [what came out, what should have].
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import tiny
from specdec_mlx import (
    FirstOf,
    ModelDrafter,
    PromptLookupDrafter,
    Sampling,
    lab,
    load_head,
    speculate,
)
from specdec_mlx.drafters.heads.early_exit import early_exit
from specdec_mlx.drafters.model import ModelSession
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.errors import DraftError, RankError
from specdec_mlx.rounds.ranks import Ranks
from specdec_mlx.types import Draft, Features

GROUP = mx.distributed.init()
RANK = GROUP.rank()
LOOK_UPS = ("prompt-lookup", "ngram", "suffix", "recycling", "lookahead", "auto")
DRAFTERS = (*LOOK_UPS, "auto:trees=true,recycling=true", "model", "cascade", "first of")
LENGTHS = ("auto", 4)
NUM_TOKENS = 16
Cases = dict[str, tuple[Any, Any]]


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
    """A drafter by name; model: what a draft model is."""
    if name == "first of":
        return FirstOf(PromptLookupDrafter(), ModelDrafter(model))
    return make_drafter(name, draft_model=model)


def tokens(model: nn.Module, prompt: list[int], drafting: Any = None, **options: Any) -> list[int]:
    """A generation's tokens."""
    options = {"max_tokens": NUM_TOKENS, "probe": False} | options
    return [token.token for token in speculate(model, prompt, drafting, **options)]


def prompts(num_prompts: int) -> list[list[int]]:
    """Beginnings of texts that the lab pair can write."""
    text = (
        "The following statements are executed in the order in which they are written. "
        "An assignment statement evaluates the expression list and assigns the result. "
        "The following statements are executed in the "
    )
    step = len(text) // (2 * num_prompts)
    return [list(pair().tokenizer.encode(text[i * step :])) for i in range(num_prompts)]


def text_cases(some: Mapping[int, list[int]], num_lengths: int = 1) -> Cases:
    """Greedy and sampled texts of the lab pair, with each drafter.

    some: prompts by their number, which is the seed. num_lengths: how many of LENGTHS each drafter
        has with each prompt; with one of them they take turns from prompt to prompt.
    """
    found: Cases = {}
    for i, prompt in some.items():
        for temp, rule in ((0.0, "auto"), (1.0, "coupled")):
            options = {"sampler": Sampling(temp=temp), "rule": rule, "seed": i}
            expected = tokens(pair().target, prompt, **options)
            for turn, name in enumerate(DRAFTERS, start=i):
                for k in range(num_lengths):
                    length = LENGTHS[(turn + k) % len(LENGTHS)]
                    case = f"prompt {i}, temp={temp}, {name}, K={length}"
                    drafting = drafter(name, pair().draft)
                    got = tokens(sharded(), prompt, drafting, draft_length=length, **options)
                    found[case] = got, expected
    return found


def texts() -> Cases:
    """One prompt, by `auto` and a fixed length."""
    return text_cases({0: prompts(1)[0]}, len(LENGTHS))


def many_texts() -> Cases:
    """The first half of 20."""
    return text_cases(dict(list(enumerate(prompts(20)))[:10]))


def more_texts() -> Cases:
    """The other half."""
    return text_cases(dict(list(enumerate(prompts(20)))[10:]))


def block() -> Cases:
    """Drafts that are drawn, under the rule that uses their distribution: the same as alone."""
    found: Cases = {}
    for i, prompt in enumerate(prompts(1)):
        options = {"sampler": Sampling(temp=1.0), "rule": "block", "seed": i, "draft_length": 4}
        drafting = drafter("model", pair().draft)
        found[f"prompt {i}"] = (
            tokens(sharded(), prompt, drafting, **options),
            tokens(pair().target, prompt, drafting, **options),
        )
    return found


class Sent:
    """Counts the arrays that rank 0 sends while it is entered."""

    def __init__(self) -> None:
        self.number = 0
        self.send = Ranks.from_first

    def __enter__(self) -> Sent:
        def from_first(ranks: Ranks, *arguments: Any) -> mx.array:
            self.number += 1
            return self.send(ranks, *arguments)

        Ranks.from_first = from_first  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Ranks.from_first = self.send  # type: ignore[method-assign]


def heads() -> Cases:
    """Trained heads, whose target is read on rank 0; what no rank can run alone is refused."""
    found: Cases = {}
    prompt = prompts(1)[0]
    for kind, (temp, rule, length) in product(
        ("mtp", "eagle3"), ((0.0, "auto", "auto"), (1.0, "coupled", 4))
    ):
        options = {"sampler": Sampling(temp=temp), "rule": rule, "seed": 5}
        expected = tokens(pair().target, prompt, **options)
        head = load_head(lab.head_path(kind), sharded())
        got = tokens(sharded(), prompt, head, draft_length=length, **options)
        found[f"{kind}, temp={temp}, K={length}"] = got, expected
    for name, alone in (("early exit", early_exit(sharded(), 1)), ("assistant", ReadsCaches())):
        try:
            said = str(tokens(sharded(), prompt, alone))
        except DraftError as error:
            said = str(error)
        found[f"{name} is refused"] = "Use a draft model" in said, True
    found["afterwards"] = tokens(sharded(), prompt), tokens(pair().target, prompt)
    return found


class ReadsCaches(PromptLookupDrafter):
    """Wants keys and values, as a Gemma assistant does."""

    features = Features(caches=(0,))


def every_rank() -> Cases:
    """Drafts that each rank draws anew: the texts of one machine, and no distribution is sent."""
    found: Cases = {}
    prompt = prompts(1)[0]
    head = load_head(lab.head_path("mtp"), sharded())
    one_head = load_head(lab.head_path("mtp"), pair().target)
    model = ModelDrafter(pair().draft, on_every_rank=True)
    drafters = {
        "model": (model, model),
        "first of": (FirstOf(PromptLookupDrafter(), model),) * 2,
        "head": (replace(head, on_every_rank=True), one_head),
    }
    for (name, (here, alone)), (rule, length) in product(
        drafters.items(), (("block", 4), ("coupled", "auto"))
    ):
        options = {"sampler": Sampling(temp=1.0), "rule": rule, "seed": 5, "draft_length": length}
        expected = tokens(pair().target, prompt, alone, **options)
        with Sent() as sent:
            found[f"{name}, {rule}"] = tokens(sharded(), prompt, here, **options), expected
        found[f"{name}, {rule}, sent"] = sent.number, 0
    with Sent() as sent:
        options = {"sampler": Sampling(temp=1.0), "draft_length": 4}
        tokens(sharded(), prompt, ModelDrafter(pair().draft), **options)
    found["by default they are sent"] = sent.number > 0, True
    return found


def every_rank_fails() -> Cases:
    """A session that raises on rank 1, or is not there: all end, and the next text is right."""
    prompt, calls, propose = prompts(1)[0], [0], ModelSession.propose

    def raising(session: ModelSession, limit: int) -> Draft:
        calls[0] += 1
        if RANK == 1 and calls[0] == 3:
            raise ArithmeticError("propose")
        return propose(session, limit)

    ModelSession.propose = raising  # type: ignore[assignment, method-assign]
    drafting = ModelDrafter(pair().draft, on_every_rank=True)
    options = {"sampler": Sampling(temp=1.0), "seed": 5, "rule": "coupled"}
    generation = speculate(sharded(), prompt, drafting, draft_length=2, **options)
    got, error = ending(generation)
    ModelSession.propose = propose  # type: ignore[method-assign]
    expected = tokens(pair().target, prompt, max_tokens=len(got), **options)
    differing = ModelDrafter(pair().draft, on_every_rank=RANK == 0)
    _, other = ending(speculate(sharded(), prompt, differing, draft_length=2, **options))
    return {
        "tokens": (got if RANK == 0 else [], expected if RANK == 0 else []),
        "some were handed out": (len(got) > 3, True),
        "error": (error, "RankError" if RANK == 0 else "ArithmeticError"),
        "another drafter on each": (other, "RankError"),
        "afterwards": (tokens(sharded(), prompt, drafting), tokens(pair().target, prompt)),
    }


FAMILIES = ("llama", "qwen3_moe", "qwen3_5")
MORE_FAMILIES = (
    "gpt_oss",
    "qwen2",
    "qwen3",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "ministral3",
    "minimax",
)


def family_cases(
    names: tuple[str, ...], spread: Callable[[nn.Module], None], probe: bool = False
) -> Cases:
    """Texts of tiny models that are spread over the ranks, against those that are whole."""
    found: Cases = {}
    chooser = random.Random(0)
    for name in names:
        whole, parts = tiny.build(name), tiny.build(name)
        spread(parts)
        mx.eval(parts.parameters())
        prompt = [chooser.randrange(3, 60) for _ in range(9)] * 2
        expected = tokens(whole, prompt)
        for kind, length in (("prompt-lookup", "auto"), ("ngram", 4), ("model", 2)):
            got = tokens(parts, prompt, drafter(kind, whole), draft_length=length, probe=probe)
            found[f"{name}, {kind}, K={length}"] = got, expected
    return found


def families() -> Cases:
    """Tensor-parallel."""
    return family_cases(FAMILIES, lambda model: model.shard(GROUP))


def more_families() -> Cases:
    """Others of them."""
    return family_cases(MORE_FAMILIES, lambda model: model.shard(GROUP))


def pipelined() -> Cases:
    """Pipelined, and measured first: passes of one graph must not be run in two orders."""
    return family_cases(("qwen2",), lambda model: model.model.pipeline(GROUP), probe=True)


def many_ranks() -> Cases:
    """Pipelined over more than two, one layer each; and then rank 0's caller leaves."""
    whole, parts = (tiny.build("qwen2", num_hidden_layers=4) for _ in range(2))
    parts.model.pipeline(GROUP)
    prompt = [5, 9, 11, 5, 9, 11, 5, 9]
    expected = tokens(whole, prompt)
    found: Cases = {}
    for kind, length in (("prompt-lookup", "auto"), ("model", 4), ("model", "auto")):
        got = tokens(parts, prompt, drafter(kind, whole), draft_length=length)
        found[f"{kind}, K={length}"] = got, expected
    generation = speculate(parts, prompt, ModelDrafter(whole), max_tokens=20)
    got = [token.token for token in islice(generation, 7 if RANK == 0 else None)]
    generation.close()
    found["leaving"] = got, expected[:7]
    return found


class Raising:
    """Proposes a token, and raises in the third round; in `observe` or in `propose`."""

    def __init__(self, where: str) -> None:
        self.where, self.rounds = where, 0

    def begin(self, prompt: Any, context: Any) -> Raising:
        if self.where == "begin":
            raise ArithmeticError(self.where)
        return self

    def propose(self, limit: int) -> Draft:
        self.rounds += 1
        self._raise("propose")
        return Draft([7] * min(limit, 2))

    def observe(self, emitted: Any) -> None:
        self._raise("observe")

    def _raise(self, where: str) -> None:
        if self.rounds >= 3 and where == self.where:
            raise ArithmeticError(where)


def ending(generation: Iterator[Any]) -> tuple[list[int], str]:
    """The tokens until the end, and the name of the error if it ended by one."""
    got: list[int] = []
    try:
        for token in generation:
            got.append(token.token)
    except (ArithmeticError, RankError) as error:
        return got, type(error).__name__
    return got, ""


def failures() -> Cases:
    """A drafter that raises: all ranks hand out the same tokens, and raise; then they go on."""
    found: Cases = {}
    prompt = prompts(1)[0]
    for where in ("begin", "propose", "observe"):
        cache_ = make_prompt_cache(sharded())
        generation = speculate(
            sharded(), prompt, Raising(where), max_tokens=12, draft_length=2, prompt_cache=cache_
        )
        got, error = ending(generation)
        expected = tokens(pair().target, prompt, max_tokens=max(1, len(got)))[: len(got)]
        found[f"{where}: tokens"] = got, expected
        found[f"{where}: error"] = error, "ArithmeticError" if RANK == 0 else "RankError"
        held = len(prompt) + len(got) if where != "begin" else 0
        found[f"{where}: caches"] = cache_[0].offset, held
        again = tokens(sharded(), prompt, PromptLookupDrafter())
        found[f"{where}: afterwards"] = again, tokens(pair().target, prompt)
    return found


def leaving() -> Cases:
    """A caller that leaves, on all ranks or on one: none hangs, and caches end where rank 0's."""
    found: Cases = {}
    prompt = prompts(1)[0]
    expected = tokens(pair().target, prompt)
    for case, leavers in (("all", (0, 1)), ("rank 0", (0,)), ("rank 1", (1,))):
        for number in (1, 7):
            cache_ = make_prompt_cache(sharded())
            generation = speculate(
                sharded(),
                prompt,
                ModelDrafter(pair().draft),
                draft_length=4,
                prompt_cache=cache_,
                max_tokens=NUM_TOKENS,
            )
            got = []
            for token in generation:
                got.append(token.token)
                if RANK in leavers and len(got) == number:
                    break
            generation.close()
            name = f"{case} after {number}"
            found[f"{name}: tokens"] = got, expected[: len(got)]
            if 0 in leavers:
                found[f"{name}: number"] = len(got), number
                found[f"{name}: caches"] = cache_[0].offset, len(prompt) + number
            rest = (
                tokens(
                    sharded(),
                    expected[number : number + 1],
                    PromptLookupDrafter(),
                    prompt_cache=cache_,
                    max_tokens=4,
                )
                if 0 in leavers
                else []
            )
            found[f"{name}: next turn"] = rest, expected[number + 1 : number + 5][: len(rest)]
    return found


def recurrent() -> Cases:
    """Rank 0's caller leaves, on caches that can only go back to a checkpoint."""
    found: Cases = {}
    whole, parts = tiny.build("qwen3_5"), tiny.build("qwen3_5")
    parts.shard(GROUP)
    prompt = [5, 9, 11, 5, 9, 11, 5, 9]
    expected = tokens(whole, prompt)
    for number in (1, 3, 4, 6):
        cache_ = make_prompt_cache(parts)
        generation = speculate(
            parts, prompt, ModelDrafter(whole), draft_length=3, prompt_cache=cache_, max_tokens=12
        )
        got = [next(generation).token for _ in range(number)] if RANK == 0 else []
        if RANK:
            got = [token.token for token in generation]
        generation.close()
        rest = tokens(parts, expected[number : number + 1], prompt_cache=cache_, max_tokens=4)
        found[f"after {number}"] = [got, rest], [expected[:number], expected[number + 1 :][:4]]
    return found


def arguments() -> Cases:
    """Ranks that are called with different prompts say so, all of them; seeds are rank 0's."""
    try:
        tokens(sharded(), [5 + RANK, 6])
        said = ""
    except RankError as error:
        said = type(error).__name__
    options: dict[str, Any] = {"sampler": Sampling(temp=1.0)}
    prompt = prompts(1)[0]
    expected = tokens(pair().target, prompt, seed=1, **options)
    got = tokens(sharded(), prompt, PromptLookupDrafter(), seed=1 + RANK, **options)
    mx.random.seed(3 + RANK)
    unseeded = tokens(sharded(), prompt, PromptLookupDrafter(), **options)
    every = mx.distributed.all_gather(mx.array([unseeded])).tolist()
    return {
        "another prompt": (said, "RankError"),
        "another seed": (got, expected),
        "no seed": (every[0], every[-1]),
    }


def dies() -> Cases:
    """A rank that ends in the middle of a generation."""
    for n, _ in enumerate(speculate(sharded(), prompts(1)[0], PromptLookupDrafter())):
        if RANK == 1 and n == 5:
            os._exit(17)
    return {}


JOBS: dict[str, Callable[[], Cases]] = {
    job.__name__: job
    for job in (
        texts, many_texts, more_texts, block, heads, every_rank, every_rank_fails, families,
        more_families, pipelined, many_ranks, failures, leaving, recurrent, arguments, dies,
    )
}  # fmt: skip


if __name__ == "__main__":
    results = {}
    for name in sys.argv[1:]:
        began = time.perf_counter()
        results[name] = JOBS[name]()
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(json.dumps(results))
