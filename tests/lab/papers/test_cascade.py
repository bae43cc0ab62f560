"""A horizontal cascade: a model writes the first tokens of a draft, look-up the later ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from test_stepwise import WAYS

import specdec_mlx as sd
import tiny
from exact import TARGET, Drawn, Rounds, by_state, rolled
from lossless import PROMPT
from narrow import Counting
from scripted import ScriptedDrafter
from selection import cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import Draft, DraftContext, Session, Step
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.lab.papers.cascade import CascadeSession
from specdec_mlx.lab.proof.enumeration import Tokens, state_after
from specdec_mlx.sampling import Noise
from specdec_mlx.server.prefix_files import ServedStates
from specdec_mlx.server.prefixes import Prefixes
from specdec_mlx.token_ids import to_list

EXACT = 1e-6  # declared distributions come out of the session in float32


class Found(Session):
    """A first session and a look-up: drafts what it was given, finds what that leads to."""

    def __init__(self, draft: Draft, state: int, found: list[Tokens]) -> None:
        self.draft, self.state, self.found = draft, state, found

    def propose(self, limit: int) -> Draft:
        return self.draft

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        return Draft(self.found[state_after(self.state, tuple(tokens))][:limit])

    def observe(self, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True, eq=False)
class Cascaded:
    """What a session hands over for every draft that its first one may draw."""

    first: Drawn
    found: list[Tokens]
    limit: int

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        for weight, drawn, probs in self.first.drafts(state):
            logprobs = mx.log(mx.array(probs)) if drawn else None
            both = Found(Draft(drawn, logprobs), state, self.found)
            draft = CascadeSession([("first", both), ("then", both)], num_first=4).propose(
                self.limit
            )
            whole = probs if draft.probs is None else np.array(draft.probs, np.float64)
            yield weight, tuple(to_list(draft.tokens)), whole


MODEL = rolled([0.2, 0.7, 0.1])
FOUND: list[Tokens] = [(1, 1, 0), (), (2, 0), (0,), (1, 2, 2), (), (0, 0, 1)]
"""By the state that the model's tokens lead to: up to three tokens, or none."""

FIRST = {
    "one": lambda state, drafted: drafted < 1,
    "two": lambda state, drafted: drafted < 2,
    "0 to 2, by the state": by_state([1, 2, 0, 2, 1, 2, 1]),
}


@in_one_test("num_first", FIRST)
@in_one_test("name", WAYS)
def test_the_joint_distribution_is_the_targets(name: str, num_first: str) -> None:
    """Two rounds, with drafts of up to 4 tokens: how many were drawn, whether something was found
    behind them and how much depends on what was drawn.
    """
    drafting = Cascaded(Drawn(MODEL, FIRST[num_first]), FOUND, limit=4)
    lengths = {len(tokens) for state in range(7) for _, tokens, _ in drafting.drafts(state)}
    assert len(lengths) > 2
    assert Rounds(TARGET, drafting, WAYS[name]).total_variation(2, 5) < EXACT


@cache
def target(name: str, seed: int = 0) -> nn.Module:
    return tiny.build(name, seed=seed)


IN_FULL = ("mtp", 6)
LENGTHS = [("model", 6), ("model", "auto"), IN_FULL, ("medusa", 6)]


@pytest.mark.parametrize(("kind", "length"), cases(LENGTHS, *{*LENGTHS} - {IN_FULL}))
def test_greedy_text_is_the_targets_own(kind: str, length: int | str) -> None:
    """With a draft model, a head that drafts token by token, and one that drafts all at once, which
    reads the target as it does alone; and later tokens are drafted.
    """
    pair = lab.load_pair()
    prompt = pair.tokenizer.encode("for i in range(10):\n    print(i)\nfor i in range(20):\n")
    first = sd.ModelDrafter(pair.draft) if kind == "model" else lab.head(kind, pair.target)
    both = lab.Cascade(first, "prompt-lookup:min_ngram=1", num_first=2)
    expected, tokens = (
        list(sd.speculate(pair.target, prompt, one, max_tokens=48, num_draft_tokens=length))
        for one in (None, both)
    )
    assert [token.token for token in tokens] == [token.token for token in expected]
    assert length == "auto" or tokens[-1].stats.drafted > 2 * tokens[-1].stats.target_passes


@in_one_test("temp", [0.0, 0.8])
def test_the_first_tokens_are_the_models_the_later_ones_what_look_up_finds(temp: float) -> None:
    """As each would draft by itself, in a text that has every token."""
    own, context = sd.ModelDrafter(target("llama", 1)), context_of(temp)
    text = list(range(tiny.CONFIGS["llama"]["vocab_size"]))
    tokens = to_list(lab.Cascade(own, "suffix", 2).begin(text, context).propose(6).tokens)
    assert tokens[:2] == to_list(own.begin(text, context).propose(2).tokens)
    found = sd.SuffixDrafter().begin(text, DraftContext()).propose_after(tokens[:2], 4)
    assert tokens[2:] == to_list(found.tokens) != []


def context_of(temp: float) -> DraftContext:
    vocab_size = tiny.CONFIGS["llama"]["vocab_size"]
    return DraftContext(sampling=sd.Sampling(temp), noise=Noise(5), vocab_size=vocab_size)


def test_the_model_runs_for_the_first_tokens_alone() -> None:
    """Two passes a draft, the first of which reads whatever was accepted of the draft before; they
    are the draft where nothing is found, or where it is full.
    """
    model = Counting(target("llama"))
    drafter = lab.Cascade(sd.ModelDrafter(model), "prompt-lookup:min_ngram=1", num_first=2)
    tokens = list(sd.speculate(model.model, PROMPT, drafter, max_tokens=120, num_draft_tokens=8))
    stats = tokens[-1].stats
    assert stats.drafted > 3 * stats.target_passes
    assert model.num_passes <= 2 * stats.target_passes + 1  # one says how wide its logits are
    for found, limit in (((), 5), ((9,), 2)):
        both = Found(Draft([7, 8]), 0, [found] * 7)
        assert CascadeSession([("first", both), ("then", both)], 2).propose(limit).tokens == [7, 8]


def test_it_has_a_name_where_there_is_a_draft_model() -> None:
    """On the command line as `--draft-model MODEL --drafter cascade:num_first=3`, which is all
    that drafts then.
    """
    model = target("llama")
    drafter = sd.drafters.make_drafter("cascade:then=prompt-lookup,num_first=3", draft_model=model)
    assert drafter is not None
    assert drafter.key == lab.Cascade(sd.ModelDrafter(model), "prompt-lookup", 3).key
    assert drafter.key != lab.Cascade(sd.ModelDrafter(model), "prompt-lookup", 2).key
    assert DrafterChoice(["cascade"], DraftModel("M")).ordered == ["cascade"]
    with pytest.raises(ValueError, match="draft-model"):
        sd.drafters.make_drafter("cascade")


def test_a_server_keeps_the_draft_models_caches_for_the_next_turn() -> None:
    """The draft model of a cascade reads what is new alone, and what is drafted is the same."""
    model = Counting(target("llama", 1))
    drafter = lab.Cascade(sd.ModelDrafter(model), "suffix", num_first=2)
    context = replace(context_of(0.0), prefill_step_size=4)
    kept = replace(context, drafter_states=ServedStates(Prefixes(10)))
    said = [*PROMPT, 9, 31, 17]
    proposed, passes = [], []
    for known, prompt in ((kept, PROMPT), (kept, said), (context, said)):
        model.num_passes = 0
        begun: Any = drafter.begin(prompt, known)
        draft = begun.propose_while(6, lambda evidence: Step.GO_ON)
        proposed.append(to_list(draft.tokens))
        passes.append(model.num_passes)
        begun.observe([9])
        begun.close(len(prompt) + 1)
    assert proposed[1] == proposed[2]
    assert passes[1] < passes[2]


@in_one_test(
    ("options", "message"),
    [
        ({"num_first": 0}, "num_first=0"),
        ({"then": "none"}, "finds nothing"),
        ({"then": sd.ModelDrafter(nn.Linear(1, 1))}, "expected a look-up"),
        ({"then": ScriptedDrafter(lambda start, limit: [])}, "propose_after"),
        ({"first": sd.drafters.FirstOf(sd.SuffixDrafter(), sd.NGramDrafter())}, "made of several"),
        ({"first": sd.ModelDrafter(nn.Linear(1, 1), branches=2)}, "trees"),
        ({"first": sd.ModelDrafter(nn.Linear(1, 1), on_every_rank=True)}, "every rank"),
    ],
)
def test_what_cannot_be_put_together_is_refused(options: dict[str, Any], message: str) -> None:
    """In words that say what to do."""
    given = {"first": sd.NGramDrafter()} | options
    with pytest.raises(ValueError, match=message):
        lab.Cascade(**given).begin(PROMPT, context_of(0.0))
