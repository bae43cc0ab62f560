"""Trees of look-ups: grown where a node is worth its position; elsewhere chains or nothing."""

from __future__ import annotations

import itertools
import random
from operator import mul
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_logits_processors

import narrow
import specdec_mlx as sd
import tiny
from benchmarks.oracles import length_oracle
from benchmarks.recorded_tops import with_tops
from lossless import PROMPT, TOLERANCE, plain_text, spoken
from selection import in_one_test
from specdec_mlx.bench.cost import CostCurve, linear_cost
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.bench.recorded import ModelledLength, RecordedTarget, replay_text
from specdec_mlx.contracts import Draft, Evidence, Features, RoundRecord
from specdec_mlx.contracts.trees import chain, path_to
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.chances import PRIORS, Chances, classes_of
from specdec_mlx.draft_length.costs import Curve
from specdec_mlx.draft_length.parts import LENGTHS
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.default import default_drafter
from specdec_mlx.drafters.recycling import SuccessorTable
from specdec_mlx.drafters.tree_of import TreeOf
from specdec_mlx.errors import UnreadableError
from specdec_mlx.rounds.clock import RoundClock
from specdec_mlx.rounds.ranks import Ranks
from specdec_mlx.target.verifier import Verifier
from specdec_mlx.token_ids import to_list

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


def texts_of(draft: Draft) -> list[tuple[int, ...]]:
    """The text up to each node."""
    parents = chain(len(draft)) if draft.parents is None else draft.parents
    tokens = to_list(draft.tokens)
    return [tuple(tokens[i] for i in path_to(n, parents)) for n in range(len(draft))]


@in_one_test(("seed", "price"), itertools.product(range(4), [0.001, 0.03, 0.1, 0.3]))
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
        sets.append([*itertools.accumulate(chances, mul)])
        for text, one in zip(texts_of(draft), sets[-1], strict=True):
            reach[text] = max(one, reach.get(text, 0.0))
    likeliest = sorted(reach.values(), reverse=True)
    values = [
        sum(one[:n]) - 1.3 * price * n
        for one in (likeliest, *sets[::3])
        for n in (*LENGTHS, len(one))
        if n <= len(one)
    ]
    found = texts_of(auto.grow("tree", drafts, lambda: True))
    assert len(set(found)) == len(found)
    assert auto._chosen_gain == pytest.approx(max(0.0, *values), abs=1e-9)
    value = sum(reach[text] for text in found) - 1.3 * price * len(found)
    assert value == pytest.approx(auto._chosen_gain, abs=1e-9)
    auto.prices.most = 5
    assert len(auto.grow("tree", drafts, lambda: True)) <= 5


def draft_of(tokens: list[int], occurrences: int) -> Draft:
    return Draft(tokens, evidence=[Evidence(occurrences)] * len(tokens))


def test_of_each_drafter_its_first_chain_is_scored() -> None:
    """Along the text, whatever was verified; of the others nothing is learned."""
    auto, before = auto_of(0.0), PRIORS["look-up"]
    drafts = [("a", draft_of([4, 5], 64)), ("a", draft_of([7, 8], 1)), ("b", draft_of([7, 3], 1))]
    auto.grow("tree", drafts, lambda: True)
    auto.record(RoundRecord(3, 0, 1, 4, tokens=[7], part="b"))
    for key, first, other in (("a", 64, 1), ("b", 1, 64)):
        odds = [weight[0] for weight in auto.tuning.of(key).chances.weights]
        scored, untouched = (classes_of(Evidence(n))[0] for n in (first, other))
        assert (odds[scored] > before[scored]) == (key == "b")
        assert odds[untouched] == before[untouched]


def test_a_chain_is_worth_as_much_in_a_tree_as_by_itself() -> None:
    """What its tokens themselves say of it counts in both."""
    drafts = [("a", draft_of([7, 8, 9, 7, 8, 9], 4))]
    lengths = []
    for known in (None, 7, 9):
        auto = auto_of(0.05, rate=1.0)
        auto.limit("a", cheap=True)
        for _ in range(20 if known else 0):
            auto.tuning.of("a").chances.learn([Evidence(4)], [False], [known or 0])
        _, alone = auto.choose(drafts)
        gain = auto._chosen_gain
        kept = auto.grow("tree", drafts, lambda: True)
        assert (len(kept), kept.parents) == (len(alone), None)
        assert auto._chosen_gain == gain
        lengths.append(len(kept))
    assert lengths[0] > lengths[2] > lengths[1]


def test_where_a_target_takes_no_trees_the_best_chain_stands_in_their_place() -> None:
    drafts, auto = [("a", draft_of([1, 2], 1)), ("b", draft_of([3, 4], 64))], auto_of(0.0)
    assert auto.grow("tree", drafts, lambda: True).parents is not None
    kept = auto.grow("tree", drafts, lambda: False)
    assert (kept.tokens, kept.parents) == ([3, 4], None)
    assert len(auto.grow("tree", [], lambda: True)) == 0


LOOK_UPS = TreeOf(sd.SuffixDrafter(), sd.NGramDrafter())


def texts() -> list[RecordedText]:
    """Texts that repeat themselves, each time with another ending."""
    found = []
    for seed in range(4):
        coins = random.Random(seed)
        parts = [[coins.randrange(40) for _ in range(5)] for _ in range(4)]
        generated = [t for _ in range(30) for t in coins.choice(parts)]
        found.append(RecordedText(str(seed), "made up", [*parts[0], *parts[1]], generated))
    return found


def forking_text() -> RecordedText:
    """After each token one of two others, by a coin; the target thinks of both."""
    coins = random.Random(0)
    after = {t: coins.sample(range(40), 2) for t in range(40)}
    tops, last = list[list[int]](), 0
    for _ in range(150):
        tops.append(coins.sample(after[last], 2))
        last = tops[-1][0]
    return RecordedText("", "made up", [1, 0], [top[0] for top in tops], "", tops)


def replayed(drafter: Any, cost: CostCurve) -> list[Any]:
    tuning, options = Tuning(), {"max_tokens": 150, "vocab_size": 40}
    return [replay_text(text, drafter, Auto(tuning), cost, **options) for text in texts()]


def test_trees_are_verified_where_positions_are_free() -> None:
    """Where a text forks at random, trees need fewer passes than the best chain."""
    look_ups = (sd.SuffixDrafter(), sd.RecyclingDrafter())
    chains, trees = (
        replay_text(forking_text(), kind(*look_ups), Auto(), FREE, max_tokens=150, vocab_size=40)
        for kind in (sd.BestOf, TreeOf)
    )
    assert trees.passes < 0.92 * chains.passes


@pytest.mark.parametrize(("slope", "most"), [(0.24, 0.55), (1.0, 1.08)])
def test_where_positions_are_expensive_trees_cost_little(
    slope: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain decoding, with what finding that out costs; texts of 150 tokens."""
    monkeypatch.setattr(RoundClock, "was_undisturbed", True)
    trees = replayed(LOOK_UPS, linear_cost(slope))
    assert sum(m.seconds for m in trees) < most * sum(m.plain_seconds for m in trees)
    assert sum(m.drafted for m in trees) > 0


FEW = make_logits_processors(logit_bias=dict.fromkeys(range(6), 1e4))


def narrow_text(model: Any, drafter: Any, **options: Any) -> list[sd.responses.Token]:
    """A text of 6 tokens only, drafted as if positions were free."""
    options = {"max_tokens": 80, "logits_processors": FEW} | options
    options = {"draft_length": ModelledLength(Auto(), FREE)} | options
    return list(sd.speculate(model, PROMPT, drafter, **options))


def drawn(rule: str) -> dict[str, Any]:
    return {"sampler": sd.Sampling(temp=0.6), "seed": 5, "rule": rule}


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [(name, {}, 20) for name in ("llama", "gemma3_text", "deepseek_v3", "mamba2")]
    + [("qwen2", drawn(rule), 5) for rule in ("match", "coupled")],
)
def test_text_with_the_default_trees_is_plain_text(
    name: str, options: dict[str, Any], least: int
) -> None:
    """Greedy, also where trees do not work, and a seed's, since drafts are point masses."""
    model, trees = tiny.build(name), default_drafter(trees=True)
    plain, items = (narrow_text(model, one, **options) for one in (None, trees))
    assert spoken(items).deviation(spoken(plain)) < TOLERANCE
    assert items[-1].stats.drafted > items[-1].stats.accepted > least


class Shapes(Auto):
    """The automatic length, with how often it grew a draft, and whether a tree was among them."""

    num_grown = 0
    has_forked = False

    def grow(self, *args: Any) -> Draft:
        draft = super().grow(*args)
        self.num_grown += len(draft) > 0
        self.has_forked = self.has_forked or draft.parents is not None
        return draft


@pytest.mark.parametrize(
    ("name", "on_ranks", "takes"),
    [("llama", False, True), ("mamba2", False, False), ("llama", True, False)],
)
def test_a_target_that_takes_no_trees_is_given_none(
    name: str, on_ranks: bool, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, and all that is grown are chains. To find out whether trees are exact takes
    passes of all ranks, and rank 0 alone would ask; so ranks never do."""
    asked: list[bool] = []
    takes_trees = Verifier.takes_trees

    def counted(self: Verifier) -> bool:
        asked.append(takes_trees(self))
        return asked[-1]

    monkeypatch.setattr(Verifier, "takes_trees", counted)
    if on_ranks:
        one = Ranks(mx.distributed.init(), generation_stream)
        monkeypatch.setattr("specdec_mlx.loop.ranks_of", lambda model, stream: one)
    shapes, drafter = Shapes(), default_drafter(trees=True)
    narrow_text(tiny.build(name), drafter, draft_length=ModelledLength(shapes, FREE))
    assert shapes.num_grown
    assert shapes.has_forked == takes
    assert bool(asked) == (not on_ranks)


def test_counts_of_a_replay_with_trees_are_those_of_a_live_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes, drafted and accepted tokens, of trees of drafters that read only the text."""
    monkeypatch.setattr(RoundClock, "was_undisturbed", True)
    model = narrow.model()
    has_forked, options = False, {"max_tokens": 32, "vocab_size": narrow.VOCAB}
    for task in narrow.tasks():
        shapes = Shapes()
        length = ModelledLength(shapes, FREE)
        items = list(sd.speculate(model, task.prompt, LOOK_UPS, max_tokens=32, draft_length=length))
        has_forked = has_forked or shapes.has_forked
        text = RecordedText(task.id, "", list(task.prompt), [item.token for item in items])
        stats, modelled = items[-1].stats, replay_text(text, LOOK_UPS, Auto(), FREE, **options)
        live = stats.target_passes, stats.drafted, sum(item.from_draft for item in items)
        assert (modelled.passes, modelled.drafted, modelled.accepted) == live
    assert has_forked


def test_a_replay_shows_what_was_recorded_and_nothing_else() -> None:
    """The table of a replay holds the target's guesses under tokens of the text alone."""
    text = RecordedText("t", "c", [1, 2], [3, 4, 3, 5], "", [[3, 9], [4, 8], [3, 7], [5, 6]])
    table = SuccessorTable()
    drafter = sd.BestOf(sd.RecyclingDrafter(table=table), sd.NGramDrafter())
    replay_text(text, drafter, Auto(), FREE, max_tokens=4, vocab_size=50)
    known = {token: after.tokens for (token,), after in table.successors.items()}
    assert known == {2: [3, 9], 3: [5, 6], 4: [3, 7]}
    with pytest.raises(UnreadableError, match="no states"):
        RecordedTarget(text, 50).tap(Features(head_input=True))


def test_the_oracle_of_shape_takes_the_right_path_of_all_guesses() -> None:
    """It needs no more passes than trees do where positions are free, and drafts nothing wrong."""
    for text, modelled in zip(texts(), replayed(LOOK_UPS, FREE), strict=True):
        bound = length_oracle(text, LOOK_UPS, FREE, vocab_size=40, longest=150)
        assert bound.drafted == bound.accepted > 0
        assert bound.passes <= modelled.passes


def test_recorded_guesses_are_the_models_own() -> None:
    """At each generated token; the first is the greedy one."""
    model = tiny.build("llama")
    plain = plain_text(model, PROMPT, 12)
    text = with_tops(model, RecordedText("t", "c", list(PROMPT), list(plain.tokens)), top=3)
    assert [tops[0] for tops in text.top_tokens] == list(plain.tokens)
    logits = model(mx.array([[*PROMPT, *plain.tokens[:-1]]]))[0, len(PROMPT) - 1 :]
    for tops, row in zip(text.top_tokens, logits, strict=True):
        assert [row[a].item() >= row[b].item() for a, b in itertools.pairwise(tops)] == [True] * 2
