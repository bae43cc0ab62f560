"""Trees of look-ups: merged as they are, or grown where a node is worth its position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import mul
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

import narrow
import specdec_mlx as sd
import tiny
from benchmarks.recorded_tops import with_tops
from lossless import PROMPT, TOLERANCE, plain_text, spoken
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import ROOT, Draft, DraftContext, Evidence, Features, RoundRecord
from specdec_mlx.draft_length.chances import PRIORS, Chances, classes_of
from specdec_mlx.draft_length.costs import Curve
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import LENGTHS, Auto
from specdec_mlx.errors import UnreadableError
from specdec_mlx.lab import check_drafter
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.replay import RecordedTarget, replay_text
from specdec_mlx.lab.papers.recycling import SuccessorTable
from specdec_mlx.lab.papers.tree_drafts import merged, texts_of
from specdec_mlx.lab.papers.trees_of_several import TreeOf, default_trees
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.lab.proposing import proposing
from specdec_mlx.loop import RoundClock
from specdec_mlx.target import Verifier

FREE = linear_cost(0.0)


def auto_of(price: float, rate: float = 1.3) -> Auto:
    """The automatic length, where a position costs so much."""
    auto = Auto(Tuning(Curve(((1, 1.0), (64, 1.0 + 63 * price)))))
    auto.prices.most, auto.prices.rate = 63, rate
    return auto


def chains_of(seed: int) -> list[tuple[str, Draft]]:
    """Several of each of three drafters, of few tokens, so that many begin alike."""
    coins = random.Random(seed)

    def draft() -> Draft:
        tokens = [coins.randrange(3) for _ in range(coins.randint(1, 9))]
        return Draft(tokens, evidence=[Evidence(coins.choice([1, 4, 30])) for _ in tokens])

    return [(key, draft()) for key in "abc" for _ in range(3)]


@in_one_test("seed", range(4))
@in_one_test("price", [0.001, 0.03, 0.1, 0.3])
def test_the_tree_is_worth_most_of_all_trees(seed: int, price: float) -> None:
    """No tree of the sizes that are chosen from has more value: the likeliest nodes of that size.

    The n likeliest nodes are a tree, since a node is never likelier than its parent. A token that
    several propose is as likely as the surest of them says. Whole chains are tried too.
    """
    drafts, auto = chains_of(seed), auto_of(price)
    reach: dict[tuple[int, ...], float] = {}
    sets: list[list[float]] = []
    for _, draft in drafts:
        chances = Chances.of("look-up").of_draft(draft.evidence or ())
        reaches = [*itertools.accumulate(chances, mul)]
        sets.append(reaches)
        for text, one in zip(texts_of(draft), reaches, strict=True):
            reach[text] = max(one, reach.get(text, 0.0))
    values = [
        sum(one[:n]) - 1.3 * price * n
        for one in (sorted(reach.values(), reverse=True), *sets[::3])
        for n in (*LENGTHS, len(one))
        if n <= len(one)
    ]
    found = texts_of(auto.best_tree("tree", drafts, lambda: True))
    assert len(set(found)) == len(found)
    assert auto._chosen_gain == pytest.approx(max(0.0, *values), abs=1e-9)
    value = sum(reach[text] for text in found) - 1.3 * price * len(found)
    assert value == pytest.approx(auto._chosen_gain, abs=1e-9)
    chain = auto.best_tree("tree", drafts, lambda: False)  # a target that takes no trees
    assert (chain.parents, chain) == (None, auto.choose(drafts[::3])[1])
    auto.prices.most = 5
    assert len(auto.best_tree("tree", drafts, lambda: True)) <= 5


def test_of_each_drafter_its_first_chain_is_scored() -> None:
    """Along the text, whatever was verified; of the others nothing is learned."""
    auto = auto_of(0.0)
    first, second = Evidence(64), Evidence(1)
    drafts = [
        ("a", Draft([4, 5], evidence=[first] * 2)),
        ("a", Draft([7, 8], evidence=[second] * 2)),
        ("b", Draft([7, 3], evidence=[second] * 2)),
    ]
    auto.best_tree("tree", drafts, lambda: True)
    auto.record(RoundRecord(3, 0, 1, 4, tokens=[7], part="b"))
    for key, evidence, untouched in (("a", first, second), ("b", second, first)):
        odds = [weight[0] for weight in auto.tuning.of(key).chances.weights]
        before = PRIORS["look-up"]
        assert (odds[classes_of(evidence)[0]] > before[classes_of(evidence)[0]]) == (key == "b")
        assert odds[classes_of(untouched)[0]] == before[classes_of(untouched)[0]]


chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=4)


@given(chains)
def test_a_tree_of_chains_says_what_they_say(drafts):
    """Every head of every chain stands in it once, and nothing else; parents stand first."""
    tree = merged([Draft(tokens) for tokens in drafts])
    heads = {tuple(tokens[:n]) for tokens in drafts for n in range(1, len(tokens) + 1)}
    assert sorted(texts_of(tree)) == sorted(heads)
    if tree.parents is not None:
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert set(texts_of(merged([tree, *map(Draft, drafts)]))) == heads


def test_the_first_drafters_tokens_are_tried_first():
    """At each depth; one chain stays a chain, and cutting leaves a tree."""
    tree = merged([Draft([1, 2, 3]), Draft([4]), Draft([1, 5])])
    assert tree == Draft([1, 4, 2, 5, 3], parents=[ROOT, ROOT, 0, 0, 2])
    assert texts_of(tree.head(3)) == [(1,), (4,), (1, 2)]
    assert tree.first_chain() == Draft([1, 2, 3])
    assert merged([Draft([1, 2]), Draft([1])]) == Draft([1, 2])


@FULL
def test_look_ups_in_one_tree_keep_the_contract_of_a_drafter():
    """Both of them at once; the text repeats itself, so that they have something to say."""
    check_drafter(TreeOf(sd.PromptLookupDrafter(), sd.NGramDrafter()), vocab_size=16, num_draws=100)


def test_a_draft_that_was_drawn_is_not_merged():
    """Among look-ups too: equal tokens stand side by side, each with what it was drawn from."""
    drawn, point = Draft([1], mx.log(mx.array([[0.25, 0.5, 0.25]]))), Draft([1])
    for order in [(drawn, point), (point, drawn)]:
        session: Any = TreeOf(*(sd.NGramDrafter() for _ in order)).begin([1], DraftContext())
        for part, draft in zip(session.sessions, order, strict=True):
            part.propose = lambda limit, draft=draft: draft
        tree = proposing(session, "")(4)
        assert (list(tree.tokens), tree.parents) == ([1, 1], [ROOT, ROOT])
        assert tree.logprobs is not None
        expected = [draft.logprobs[0, 1] if draft.logprobs is not None else 0.0 for draft in order]
        assert tree.logprobs[:, 1].tolist() == pytest.approx([float(x) for x in expected])


LOOK_UPS: Callable[[], tuple[Any, ...]] = lambda: (sd.SuffixDrafter(), sd.NGramDrafter())  # noqa: E731


def forking_text() -> RecordedText:
    """After each token one of two others, by a coin; the target thinks of both."""
    coins = random.Random(0)
    after = {t: coins.sample(range(40), 2) for t in range(40)}
    tops, last = list[list[int]](), 0
    for _ in range(150):
        tops.append(coins.sample(after[last], 2))
        last = tops[-1][0]
    return RecordedText("", "made up", [1, 0], [top[0] for top in tops], "", tops)


def test_trees_are_verified_where_positions_are_free() -> None:
    """Where a text forks at random, trees need fewer passes than the best chain."""
    look_ups = (sd.SuffixDrafter(), lab.RecyclingDrafter())
    chains, trees = (
        replay_text(forking_text(), kind(*look_ups), Auto(), FREE, max_tokens=150, vocab_size=40)
        for kind in (sd.BestOf, TreeOf)
    )
    assert trees.passes < 0.92 * chains.passes


@in_one_test(("slope", "most"), [(0.24, 0.9), (1.0, 1.08)])
def test_where_positions_are_expensive_trees_cost_little(slope: float, most: float) -> None:
    """Against plain decoding, with what finding that out costs; texts of 150 tokens."""
    tuning, how = Tuning(), {"max_tokens": 150, "vocab_size": 40}
    found: list[Any] = [
        replay_text(forking_text(), TreeOf(*LOOK_UPS()), Auto(tuning), linear_cost(slope), **how)
        for _ in range(4)
    ]
    assert sum(m.seconds for m in found) < most * sum(m.plain_seconds for m in found)
    assert sum(m.drafted for m in found) > 0


FEW = make_logits_processors(logit_bias=dict.fromkeys(range(6), 1e4))


class OfFreePasses(Auto):
    """The automatic length, which hears that positions are free, whatever the clock says."""

    def record(self, round_: RoundRecord) -> None:
        seconds = FREE(round_.fed)
        super().record(replace(round_, seconds=seconds, draft_seconds=0.0, verify_seconds=seconds))


def narrow_text(model: Any, drafter: Any, **options: Any) -> list[sd.generation.Token]:
    """A text of 6 tokens only, drafted as if positions were free."""
    options = {
        "num_draft_tokens": OfFreePasses(),
        "max_tokens": 80,
        "logits_processors": FEW,
    } | options
    return list(sd.speculate(model, PROMPT, drafter, **options))


class Shapes(OfFreePasses):
    """The automatic length, with whether it asked for trees, and whether it grew one."""

    num_asked = 0
    has_forked = False

    def best_tree(
        self, part: str, drafts: Sequence[tuple[str, Draft]], may_fork: Callable[[], bool]
    ) -> Draft:
        def asks() -> bool:
            self.num_asked += 1
            return may_fork()

        draft = super().best_tree(part, drafts, asks)
        self.has_forked = self.has_forked or draft.parents is not None
        return draft


TARGETS = ["llama", "gemma3_text", "deepseek_v3", "mamba2"]


@pytest.mark.parametrize("name", cases(TARGETS, "llama", "mamba2"))
def test_text_with_the_default_trees_is_plain_text(name: str) -> None:
    """Of few tokens, so that there is much to look up; a target that takes none is given none."""
    model, trees, shapes = tiny.build(name), default_trees(), Shapes()
    plain = narrow_text(model, None)
    items = narrow_text(model, trees, num_draft_tokens=shapes)
    assert spoken(items).deviation(spoken(plain)) < TOLERANCE
    stats = items[-1].stats
    assert stats.drafted > stats.accepted > 20
    assert shapes.num_asked
    assert shapes.has_forked == (name != "mamba2")


def test_ranks_never_ask_whether_trees_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out takes passes of all ranks, and rank 0 alone would ask; so ranks draft chains."""
    monkeypatch.setattr(Verifier, "takes_trees", pytest.fail)
    monkeypatch.setattr("specdec_mlx.loop.group_of", lambda model: mx.distributed.init())
    shapes, trees = Shapes(), default_trees()
    narrow_text(tiny.build("llama"), trees, num_draft_tokens=shapes)
    assert shapes.num_asked
    assert not shapes.has_forked


def test_a_replay_with_trees_counts_as_a_live_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, drafted and accepted tokens, of trees of drafters that read only the text."""
    monkeypatch.setattr(RoundClock, "was_undisturbed", True)
    model, drafter = narrow.model(), TreeOf(*LOOK_UPS())
    has_forked = False
    for task in narrow.tasks():
        shapes = Shapes()
        items = list(
            sd.speculate(model, task.prompt, drafter, max_tokens=32, num_draft_tokens=shapes)
        )
        has_forked = has_forked or shapes.has_forked
        text = RecordedText(task.id, "", list(task.prompt), [item.token for item in items])
        how: Any = {"max_tokens": 32, "vocab_size": narrow.VOCAB}
        modelled, stats = replay_text(text, drafter, Auto(Tuning()), FREE, **how), items[-1].stats
        live = stats.target_passes, stats.drafted, sum(item.from_draft for item in items)
        assert (modelled.passes, modelled.drafted, modelled.accepted) == live
    assert has_forked


def test_a_replay_shows_what_was_recorded_and_nothing_else() -> None:
    """The table of a replay holds the target's guesses under tokens of the text alone."""
    text = RecordedText("t", "c", [1, 2], [3, 4, 3, 5], "", [[3, 9], [4, 8], [3, 7], [5, 6]])
    table = SuccessorTable()
    drafter = sd.BestOf(lab.RecyclingDrafter(table=table), sd.NGramDrafter())
    replay_text(text, drafter, Auto(), FREE, max_tokens=4, vocab_size=50)
    known = {place: after.texts for place, after in table.successors.items()}
    assert known == {(2,): [(3,), (9,)], (3,): [(5,), (6,), (4,), (8,)], (4,): [(3,), (7,)]}
    with pytest.raises(UnreadableError, match="no states"):
        RecordedTarget(text, 50).tap(Features(head_input=True))


def test_recorded_guesses_are_the_models_own() -> None:
    """At each generated token; the first is the greedy one."""
    model = tiny.build("llama")
    plain = plain_text(model, PROMPT, 12).tokens
    text = with_tops(model, RecordedText("t", "c", list(PROMPT), list(plain)), top=3)
    logits = model(mx.array([[*PROMPT, *plain[:-1]]]))[0, len(PROMPT) - 1 :]
    assert text.top_tokens == mx.argsort(-logits, axis=-1)[:, :3].tolist()
