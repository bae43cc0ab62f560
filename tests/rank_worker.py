"""One rank's side of the tests of several: `python rank_worker.py JOB...`; prints JSON.

Each job is a function below, run in the same order on all ranks. It returns a map from the name of
a case to [what came out, what should have].
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
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
    """A drafter by name; model: the draft model."""
    if name == "first of":
        return FirstOf(PromptLookupDrafter(), ModelDrafter(model))
    return make_drafter(name, draft_model=model)


def tokens(model: nn.Module, prompt: list[int], drafting: Any = None, **options: Any) -> list[int]:
    """A generation's tokens."""
    options = {"max_tokens": 16, "probe": False} | options
    return [token.token for token in speculate(model, prompt, drafting, **options)]


def plain(prompt: list[int], drafting: Any = None, **options: Any) -> list[int]:
    """Tokens of the whole target."""
    return tokens(pair().target, prompt, drafting, **options)


@cache
def prompts(num_prompts: int = 1) -> list[list[int]]:
    """Beginnings of texts that the lab pair can write."""
    text = (
        "The following statements are executed in the order in which they are written. "
        "An assignment statement evaluates the expression list and assigns the result. "
        "The following statements are executed in the "
    )
    step = len(text) // (2 * num_prompts)
    return [list(pair().tokenizer.encode(text[i * step :])) for i in range(num_prompts)]


def text_cases(num_prompts: int, num_lengths: int) -> Cases:
    """Greedy and sampled texts of the lab pair, with each drafter."""
    found: Cases = {}
    for i, prompt in enumerate(prompts(num_prompts)):
        for temp, rule in ((0.0, "auto"), (1.0, "coupled")):
            options = {"sampler": Sampling(temp=temp), "rule": rule, "seed": i}
            expected = plain(prompt, **options)
            for turn, name in enumerate(DRAFTERS, start=i):
                for k in range(num_lengths):
                    length = LENGTHS[(turn + k) % len(LENGTHS)]
                    drafting = drafter(name, pair().draft)
                    got = tokens(sharded(), prompt, drafting, draft_length=length, **options)
                    found[f"prompt {i}, temp={temp}, {name}, K={length}"] = got, expected
    return found


def texts() -> Cases:
    """One prompt, by `auto` and a fixed length."""
    return text_cases(1, len(LENGTHS))


def many_texts() -> Cases:
    """20 prompts."""
    return text_cases(20, 1)


def block() -> Cases:
    """Drafts that are drawn, under the rule that uses their distribution: the same as alone."""
    options = {"sampler": Sampling(temp=1.0), "rule": "block", "seed": 0, "draft_length": 4}
    drafting = drafter("model", pair().draft)
    got = tokens(sharded(), prompts()[0], drafting, **options)
    return {"text": (got, plain(prompts()[0], drafting, **options))}


class ReadsCaches(PromptLookupDrafter):
    """Wants keys and values, as a Gemma assistant does."""

    features = Features(caches=(0,))


def heads() -> Cases:
    """Trained heads, whose target is read on rank 0; what no rank can run alone is refused."""
    found: Cases = {}
    prompt = prompts()[0]
    for kind, (temp, rule, length) in product(
        ("mtp", "eagle3"), ((0.0, "auto", "auto"), (1.0, "coupled", 4))
    ):
        options = {"sampler": Sampling(temp=temp), "rule": rule, "seed": 5}
        head = load_head(lab.head_path(kind), sharded())
        got = tokens(sharded(), prompt, head, draft_length=length, **options)
        found[f"{kind}, temp={temp}, K={length}"] = got, plain(prompt, **options)
    for name, alone in (("early exit", early_exit(sharded(), 1)), ("assistant", ReadsCaches())):
        try:
            said = str(tokens(sharded(), prompt, alone))
        except DraftError as error:
            said = str(error)
        found[f"{name} is refused"] = "Use a draft model" in said, True
    found["afterwards"] = tokens(sharded(), prompt), plain(prompt)
    return found


def every_rank() -> Cases:
    """Drafts that each rank draws anew: the texts of one machine, and no distribution is sent."""
    found: Cases = {}
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
        found[f"{name}, {rule}"] = got, plain(prompt, alone, **options)
        found[f"{name}, {rule}, sent"] = sent.call_count, 0
    with patch.object(Ranks, "from_first", autospec=True, side_effect=send) as sent:
        drafting = ModelDrafter(pair().draft)
        tokens(sharded(), prompt, drafting, sampler=Sampling(temp=1.0), draft_length=4)
    found["by default they are sent"] = sent.call_count > 0, True
    return found


def every_rank_fails() -> Cases:
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
    return {
        "tokens": (got if RANK == 0 else [], expected if RANK == 0 else []),
        "some were handed out": (len(got) > 3, True),
        "error": (error, "RankError" if RANK == 0 else "ArithmeticError"),
        "another drafter on each": (other, "RankError"),
        "afterwards": (tokens(sharded(), prompt, drafting), plain(prompt)),
    }


FAMILIES = ("llama", "qwen3_moe", "qwen3_5")
MORE_FAMILIES = (
    *("gpt_oss", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("ministral3", "minimax"),
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
    expected = tokens(whole, REPEATING)
    found: Cases = {}
    for kind, length in (("prompt-lookup", "auto"), ("model", 4), ("model", "auto")):
        got = tokens(parts, REPEATING, drafter(kind, whole), draft_length=length)
        found[f"{kind}, K={length}"] = got, expected
    generation = speculate(parts, REPEATING, ModelDrafter(whole), max_tokens=20)
    got = [token.token for token in islice(generation, 7 if RANK == 0 else None)]
    generation.close()
    found["leaving"] = got, expected[:7]
    return found


class Raising(ScriptedSession):
    """A drafter, and its session, that raises at the start, or in the third round."""

    def __init__(self, where: str, error: type[Exception]) -> None:
        super().__init__(lambda emitted, limit: [7] * min(limit, 2))
        self.where, self.error = where, error

    def begin(self, prompt: Any, context: Any) -> Raising:
        if self.where == "begin":
            raise self.error(self.where)
        return self

    def propose(self, limit: int) -> Draft:
        draft = super().propose(limit)
        self._raise("propose")
        return draft

    def observe(self, emitted: Any) -> None:
        self._raise("observe")

    def _raise(self, where: str) -> None:
        if len(self.limits) >= 3 and where == self.where:
            raise self.error(where)


def ending(generation: Iterator[Any]) -> tuple[list[int], str]:
    """The tokens until the end, and the name of the error if it ended by one."""
    got: list[int] = []
    try:
        for token in generation:
            got.append(token.token)
    except (ArithmeticError, RuntimeError, RankError) as error:
        return got, type(error).__name__
    return got, ""


def failures() -> Cases:
    """A drafter that raises: all ranks hand out the same tokens, and raise; then they go on."""
    found: Cases = {}
    prompt = prompts()[0]
    for where, error in product(("begin", "propose", "observe"), (ArithmeticError, RuntimeError)):
        cache_, case = make_prompt_cache(sharded()), f"{where}, {error.__name__}"
        options = {"max_tokens": 12, "draft_length": 2, "prompt_cache": cache_}
        got, raised = ending(speculate(sharded(), prompt, Raising(where, error), **options))
        expected = plain(prompt, max_tokens=max(1, len(got)))[: len(got)]
        found[f"{case}: tokens"] = got, expected
        found[f"{case}: error"] = raised, error.__name__ if RANK == 0 else "RankError"
        held = len(prompt) + len(got) if where != "begin" else 0
        found[f"{case}: caches"] = cache_[0].offset, held
        again = tokens(sharded(), prompt, PromptLookupDrafter())
        found[f"{case}: afterwards"] = again, plain(prompt)
    return found


def leaving() -> Cases:
    """A caller that leaves, on all ranks or on one: none hangs, and caches end where rank 0's."""
    found: Cases = {}
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
        found[f"{name}: tokens"] = got, expected[: len(got)]
        if 0 in leavers:
            found[f"{name}: number"] = len(got), number
            found[f"{name}: caches"] = cache_[0].offset, len(prompt) + number
            options = {"prompt_cache": cache_, "max_tokens": 4}
            last = expected[number : number + 1]
            rest = tokens(sharded(), last, PromptLookupDrafter(), **options)
            found[f"{name}: next turn"] = rest, expected[number + 1 : number + 5]
    return found


def recurrent() -> Cases:
    """Rank 0's caller leaves, on caches that can only go back to a checkpoint."""
    found: Cases = {}
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
        found[f"after {number}"] = [got, rest], [expected[:number], expected[number + 1 :][:4]]
    return found


def arguments() -> Cases:
    """Ranks that are called with different ones say so, all of them; seeds are rank 0's."""
    found: Cases = {}
    prompt = prompts()[0]
    options: dict[str, Any] = {"sampler": Sampling(temp=1.0)}
    for name, given in {
        "prompt": {"prompt_tokens": [5 + RANK, 6]},
        "max_tokens": {"prompt_tokens": [5, 6], "max_tokens": 5 + RANK},
        "drafter": {"prompt_tokens": [5, 6], "drafter": PromptLookupDrafter() if RANK else None},
    }.items():
        found[f"another {name}"] = ending(speculate(sharded(), **given)), ([], "RankError")
    got = tokens(sharded(), prompt, PromptLookupDrafter(), seed=1 + RANK, **options)
    found["another seed"] = got, plain(prompt, seed=1, **options)
    mx.random.seed(3 + RANK)
    unseeded = tokens(sharded(), prompt, PromptLookupDrafter(), **options)
    every = mx.distributed.all_gather(mx.array([unseeded])).tolist()
    return found | {"no seed": (every[0], every[-1])}


def dies() -> Cases:
    """A rank that ends in the middle of a generation."""
    for n, _ in enumerate(speculate(sharded(), prompts()[0], PromptLookupDrafter())):
        if RANK == 1 and n == 5:
            os._exit(17)
    return {}


if __name__ == "__main__":
    results = {}
    for name in sys.argv[1:]:
        began = time.perf_counter()
        results[name] = globals()[name]()
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(json.dumps(results))
