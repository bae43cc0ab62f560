"""Trees of look-ups: grown where a node is worth its position; elsewhere chains as without them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_logits_processors

import narrow
import specdec_mlx as sd
import tiny
from lossless import PROMPT, TOLERANCE, plain_text, spoken
from specdec_mlx.bench.cost import CostCurve, linear_cost
from specdec_mlx.bench.oracles import length_oracle
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.bench.recorded import ModelledLength, RecordedTarget, replay_text
from specdec_mlx.bench.recorded_tops import with_tops
from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.costs import RoundCosts
from specdec_mlx.draft_length.guesses import GuessHistory, PooledChances
from specdec_mlx.draft_length.trees import SIZES, Chain, Sources, TreeAccount
from specdec_mlx.draft_length.store import Learned, Tuning
from specdec_mlx.drafters.default import default_drafter
from specdec_mlx.drafters.recycling import SuccessorTable
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.drafters.tree_of import TreeOf
from specdec_mlx.errors import UnreadableError
from specdec_mlx.rounds.clock import RoundClock
from specdec_mlx.rounds.ranks import Ranks
from specdec_mlx.target.verifier import Verifier
from specdec_mlx.types import Draft, DraftContext, Evidence, Features, Guess, RoundRecord
from specdec_mlx.types.trees import chain, path_to

FREE, CHEAP, EXPENSIVE = linear_cost(0.0), linear_cost(0.02), linear_cost(1.0)
VOCAB = 6


def auto(cost: CostCurve, tuning: Tuning | None = None) -> ModelledLength:
    """The automatic length, told what a curve says instead of the clock."""
    return ModelledLength(Auto(tuning or Tuning()), cost)


class Guessing:
    """Guesses by a table of the last token."""

    def __init__(self, table: dict[int, list[int]]) -> None:
        self.table = table

    def guesses_after(self, path: Sequence[int]) -> list[Guess]:
        return [Guess(t, Evidence(3)) for t in self.table.get(path[-1] if path else 0, [])]


def account_of(price: float, first: float = 0.0) -> TreeAccount:
    """An account whose costs are measured: a node costs so much, and the first one more."""
    return TreeAccount(Learned(by_context={0: costs_of(price, first)}))


def costs_of(price: float, first: float = 0.0) -> RoundCosts:
    """Measured costs of drafts, see `account_of`."""
    costs = RoundCosts(plain=[1.0] * 3, _plain_wanted=0)  # type: ignore[arg-type]
    for size in SIZES:
        for _ in range(3):
            costs.add(size, 1.0 + first + price * size)
    return costs


def sources_of(seed: int) -> Sources:
    """A guesser of a few tokens, and two chains."""
    coins = random.Random(seed)
    table = {t: coins.sample(range(VOCAB), 2) for t in range(VOCAB)}
    known = list(AcceptanceHistory().chances([0] * 3))
    chains = [Chain(tuple(coins.randrange(VOCAB) for _ in known), known) for _ in "ab"]
    return Sources(chains, chains[0], [(Guessing(table), GuessHistory.of("SuffixDrafter"))])


def every_tree(account: TreeAccount, sources: Sources, depth: int) -> dict[tuple[int, ...], float]:
    """Every text that the sources guess, with its chance."""
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for n in range(depth):
        for path in [p for p in reach if len(p) == n]:
            for token, chance in account._chances_after(path, sources).items():
                reach[*path, token] = reach[path] * chance
    del reach[()]
    return reach


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("price", [0.001, 0.03, 0.1, 0.3])
def test_the_tree_is_worth_most_of_all_trees(seed: int, price: float) -> None:
    """No tree of the sizes that are tried has more value: the likeliest nodes of that size.

    The n likeliest nodes are a tree, since a node is never likelier than its parent. All that there
    are is tried too, at the cost of the next size.
    """
    account, sources, rate, depth = account_of(price), sources_of(seed), 1.3, 3
    account.learned.exploration_budget = 99.0
    reach = every_tree(account, sources, depth)
    likeliest = sorted(reach.values(), reverse=True)
    cost = {n: rate * price * min(size for size in SIZES if size >= n) for n in range(1, 129)}
    sizes = [n for n in (*SIZES, len(reach)) if n <= len(reach)]
    values = [sum(likeliest[:n]) - cost[n] for n in sizes]
    draft, gain = account.grow(sources, rate, SIZES[-1], depth)
    assert gain == pytest.approx(max(0.0, *values), abs=1e-9)
    parents = chain(len(draft)) if draft.parents is None else draft.parents
    texts = [tuple(draft.tokens[i] for i in path_to(n, parents)) for n in range(len(draft))]
    assert len(set(texts)) == len(texts)
    reached: list[float] = [reach[text] for text in texts]
    own = math.fsum(reached) - (cost[len(texts)] if texts else 0.0)
    assert own == pytest.approx(gain, abs=1e-9)


def test_no_node_is_deeper_and_no_tree_larger_than_wanted() -> None:
    """A tree may have more nodes than tokens are wanted, on a path it has no more."""
    account, sources = account_of(0.0), sources_of(1)
    draft, _ = account.grow(sources, 1.0, 128, 2)
    assert draft.parents is not None
    assert max(len(path_to(n, draft.parents)) for n in range(len(draft))) == 2 < len(draft)
    assert len(account.grow(sources, 1.0, 5, 3)[0]) <= 5


def test_where_every_position_is_expensive_nobody_is_asked_for_guesses() -> None:
    """What counts is a position behind the first few; not where nothing was measured yet."""
    assert account_of(0.03).forks_may_pay()
    assert not account_of(0.04).forks_may_pay()
    assert not TreeAccount(Learned()).forks_may_pay()
    assert account_of(0.0, first=0.5).forks_may_pay()


LOOK_UPS: Callable[[], tuple[Any, ...]] = lambda: (sd.SuffixDrafter(), sd.NGramDrafter())  # noqa: E731


def texts() -> list[RecordedText]:
    """Texts that repeat themselves, each time with another ending."""
    found = []
    for seed in range(4):
        coins = random.Random(seed)
        parts = [[coins.randrange(40) for _ in range(5)] for _ in range(4)]
        generated = [t for _ in range(30) for t in coins.choice(parts)]
        found.append(RecordedText(str(seed), "made up", [*parts[0], *parts[1]], generated))
    return found


def replayed(drafter: Any, cost: CostCurve) -> list[Any]:
    tuning = Tuning()
    return [
        replay_text(text, drafter, Auto(tuning), cost, max_tokens=150, vocab_size=40)
        for text in texts()
    ]


def test_trees_are_verified_where_positions_are_free() -> None:
    """Where a text forks at random, a tree needs clearly fewer passes than the best chain."""
    chains, trees = (replayed(kind(*LOOK_UPS()), FREE) for kind in (sd.BestOf, TreeOf))
    assert sum(m.passes for m in trees) < 0.85 * sum(m.passes for m in chains)


def test_where_positions_are_expensive_all_is_as_without_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same rounds, draft by draft, as the best of the same drafters.

    A replay takes its seconds from a curve, but by the host's clock it would say which of them
    count.
    """
    monkeypatch.setattr(RoundClock, "was_undisturbed", True)
    chains, trees = (replayed(kind(*LOOK_UPS()), EXPENSIVE) for kind in (sd.BestOf, TreeOf))
    assert trees == chains
    assert sum(m.drafted for m in trees) > 0


FEW = make_logits_processors(logit_bias=dict.fromkeys(range(6), 1e4))


def narrow_text(model: Any, drafter: Any, **options: Any) -> list[sd.Token]:
    """A text of 6 tokens only, drafted as if positions were free."""
    options = {"draft_length": auto(FREE), "max_tokens": 80, "logits_processors": FEW} | options
    return list(sd.speculate(model, PROMPT, drafter, **options))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "mamba2"])
def test_text_with_the_default_trees_is_plain_text(name: str) -> None:
    """Greedy, of few tokens, so that there is much to look up; also where trees do not work."""
    model = tiny.build(name)
    plain, items = (narrow_text(model, one) for one in (None, default_drafter(trees=True)))
    assert spoken(items).deviation(spoken(plain)) < TOLERANCE
    stats = items[-1].stats
    assert stats.drafted > stats.accepted > 20


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_a_seeds_text_is_the_same_with_trees(rule: str) -> None:
    """Drafts of point masses, with any tree or none."""
    model = tiny.build("qwen2")
    options = {"sampler": sd.Sampling(temp=0.6), "seed": 5, "rule": rule}
    plain, items = (
        narrow_text(model, one, **options) for one in (None, default_drafter(trees=True))
    )
    assert [item.token for item in items] == [item.token for item in plain]
    assert items[-1].stats.accepted > 5


@dataclass(frozen=True, eq=False)
class Shapes:
    """The automatic length, and the drafts that it grew."""

    inner: ModelledLength
    grown: list[Draft] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("limit", "cut", "record", "begin_tree", "choose", "outbids"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def grow(self, part, drafts, guessers, size, may_fork):
        def asks():
            self.asked.append(1)
            return may_fork()

        self.grown.append(self.inner.grow(part, drafts, guessers, size, asks))
        return self.grown[-1]


@pytest.mark.parametrize(("name", "takes"), [("llama", True), ("mamba2", False)])
def test_a_target_that_takes_no_trees_is_given_none(name: str, takes: bool) -> None:
    """It is asked once, and all that is grown after are chains."""
    model = tiny.build(name)
    length: Any = Shapes(auto(FREE))
    narrow_text(model, default_drafter(trees=True), draft_length=length)
    assert any(draft.parents is not None for draft in length.grown) == takes
    assert (len(length.asked) > 1) == takes


@pytest.mark.parametrize("on_ranks", [False, True])
def test_ranks_never_ask_whether_trees_are_exact(
    on_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find out takes passes of all ranks, and rank 0 alone would ask; so ranks draft chains."""
    asked: list[bool] = []
    takes_trees = Verifier.takes_trees

    def counted(self: Verifier) -> bool:
        asked.append(takes_trees(self))
        return asked[-1]

    monkeypatch.setattr(Verifier, "takes_trees", counted)
    if on_ranks:
        one = Ranks(mx.distributed.init(), generation_stream)
        monkeypatch.setattr("specdec_mlx.loop.ranks_of", lambda model, stream: one)
    model = tiny.build("llama")
    length: Any = Shapes(auto(FREE))
    narrow_text(model, default_drafter(trees=True), draft_length=length)
    assert length.asked
    assert any(draft.parents is not None for draft in length.grown) == (not on_ranks)
    assert bool(asked) == (not on_ranks)


def test_counts_of_a_replay_with_trees_are_those_of_a_live_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes, drafted and accepted tokens, of trees of drafters that read only the text."""
    monkeypatch.setattr(RoundClock, "was_undisturbed", True)
    model, drafter = narrow.model(), TreeOf(*LOOK_UPS())
    shapes: Any = Shapes(auto(FREE))
    for task in narrow.tasks():
        length = auto(FREE)
        shapes = Shapes(length, shapes.grown)
        items = list(sd.speculate(model, task.prompt, drafter, max_tokens=32, draft_length=shapes))
        text = RecordedText(task.id, "", list(task.prompt), [item.token for item in items])
        stats = items[-1].stats
        modelled = replay_text(
            text, drafter, Auto(Tuning()), FREE, max_tokens=32, vocab_size=narrow.VOCAB
        )
        assert (modelled.passes, modelled.drafted, modelled.accepted) == (
            stats.target_passes,
            stats.drafted,
            sum(item.from_draft for item in items),
        )
    assert any(draft.parents is not None for draft in shapes.grown)


# --- chances ------------------------------------------------------------------------------------


def test_guesses_are_learned_by_their_rank() -> None:
    """If the second guess is right each time, it becomes the likeliest; the third fades."""
    history = GuessHistory()
    guesses = [Guess(token, Evidence(2)) for token in (7, 8, 9)]
    before = history.chances(guesses, 0)
    assert before == sorted(before, reverse=True)
    for _ in range(200):
        history.learn(guesses, 0, 8)
    after = history.chances(guesses, 0)
    assert after[1] > 0.8 > 0.2 > max(after[0], after[2])
    assert history.recent < 0.01


def test_the_gradient_of_a_guess_is_that_of_its_likelihood() -> None:
    """One step moves each active weight by the same share of (right - chance)."""
    history = GuessHistory()
    guess = [Guess(7, Evidence(2))]
    chance = history.chances(guess, 3)[0]
    weights = {name: list(odds) for name, odds in history.weights.items()}
    history.learn(guess, 3, 7)
    moved = [
        after - before
        for name in weights
        for after, before in zip(history.weights[name], weights[name], strict=True)
        if after != before
    ]
    assert moved == pytest.approx([0.035 * (1 - chance)] * 6)


def test_pooled_chances_agree_with_who_agrees() -> None:
    """A token that two give the same chance is likelier than one that one does; all are chances.

    Where the greatest chances add up to more than 1, each is taken down.
    """
    pool = PooledChances()
    one, both = pool.chances({1: [0.5]})[1], pool.chances({1: [0.5, 0.5]})[1]
    assert 0 < one < both < 1
    crowd = pool.chances({1: [0.5], 2: [0.5], 3: [0.5]})
    assert crowd[1] < one
    assert pool.chances({}) == {}
    assert 0 < pool.chances({1: [1 - 1e-17, 1e-300]})[1] < 1
    for _ in range(400):
        pool.learn({1: [0.5], 2: [0.3]}, 2)
    learned = pool.chances({1: [0.5], 2: [0.3]})
    assert sum(pool.weights) != sum(PooledChances().weights)
    assert math.isfinite(sum(learned.values()))


def test_what_was_asked_is_scored_along_the_text() -> None:
    """Only places that the text went through; the next round begins anew."""
    account, sources = account_of(0.0), sources_of(2)
    account.grow(sources, 1.0, 64, 3)
    places = dict(account.asked)
    history = sources.guessers[0][1]
    learned: list[int] = []
    history.learn = lambda guesses, depth, token: learned.append(depth)  # type: ignore[method-assign]
    path = next(p for p in places if len(p) == 1 and places[p].known)
    account.follow(RoundRecord(3, 1, 2, 4, tokens=[*path, 99]))
    assert learned == [0, 1]
    assert account.asked == {}


def test_a_proposed_chain_is_as_likely_in_a_tree_as_by_itself() -> None:
    """What other drafts and its tokens themselves say of it counts in both: it is worth as much."""
    choice = Auto(Tuning())
    choice.begin_tree("tree", [])
    for key in "ab":
        choice.limit(key, cheap=True)
    for account in choice._parts.values():
        account.learned.exploration_budget = 99.0
        account.learned.by_context = {0: costs_of(0.01)}
        for _ in range(20):
            account.learned.acceptance.learn(Evidence(2), 0, accepted=False, token=8)
    given: list[Sources] = []
    tree: Any = choice._parts["tree"]
    tree.grow = lambda sources, *rest: (given.append(sources), (Draft(), -1.0))[1]
    drafts = [("a", sd.Draft([7, 8, 9])), ("b", sd.Draft([7, 5]))]
    kept = choice.grow("tree", drafts, [], (64, 64), lambda: True)
    best = given[0].best
    assert best is not None
    assert best in given[0].chains
    assert given[0].chains[0].chances[1] < given[0].chains[1].chances[1]
    reach = [math.prod(best.chances[: i + 1]) for i in range(len(kept))]
    gain = math.fsum(reach) - 0.01 * len(kept)
    assert tree.gain == pytest.approx(gain)


def test_what_was_learned_of_guesses_is_kept_in_a_file(tmp_path: Any) -> None:
    """With the rest of the tuning."""
    tuning = Tuning()
    learned = tuning.of("look-up", look_up=True)
    learned.guesses.learn([Guess(1, Evidence(1))], 0, 1)
    learned.pooled.learn({1: [0.4]}, 1)
    tuning.save(tmp_path / "tuning.json")
    loaded = Tuning.load(tmp_path / "tuning.json").of("look-up")
    assert loaded.guesses.weights == learned.guesses.weights
    assert loaded.pooled.weights == learned.pooled.weights


# --- what look-ups guess ------------------------------------------------------------------------


def session_of(drafter: Any, tokens: Sequence[int]) -> Any:
    session = drafter.begin(tokens[:2], DraftContext(vocab_size=50))
    session.observe(list(tokens[2:]))
    return session


def random_text(seed: int, n: int = 60) -> list[int]:
    coins = random.Random(seed)
    return [coins.randrange(4) for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_n_gram_guesses_are_the_most_frequent_of_the_longest_contexts(seed: int) -> None:
    """After any path: first what followed the last 3 tokens, by count, then 2, then 1."""
    text = random_text(seed)
    session = session_of(sd.NGramDrafter(), text)
    for path in ([], [1], [2, 3], [0, 1, 2, 3]):
        whole = [*text, *path]
        expected: list[int] = []
        counts: list[dict[int, int]] = []
        for width in (3, 2, 1):
            followed = [
                text[i] for i in range(width, len(text)) if text[i - width : i] == whole[-width:]
            ]
            counts.append({t: followed.count(t) for t in followed})
            new = [t for t in counts[-1] if t not in expected]
            expected += sorted(new, key=lambda t: -counts[-1][t])
        guessed = [guess.token for guess in session.guesses_after(path)]
        assert sorted(guessed) == sorted(expected[:4])
        first = next(c for c in counts if c)
        assert first[guessed[0]] == max(first.values())


@pytest.mark.parametrize("seed", range(5))
def test_suffix_guesses_are_what_followed_the_best_matches(seed: int) -> None:
    """The first is the token that it proposes; after a path those places vote that went along."""
    text = random_text(seed)
    session = session_of(sd.SuffixDrafter(), text)
    draft = session.propose(1)
    guesses = session.guesses_after([])
    assert guesses[0].token == draft.tokens[0]
    longest = guesses[0].evidence.match
    least = max(1, max(guess.evidence.match for guess in guesses) - 1)
    assert longest >= least
    for guess in guesses:
        for next_one in session.guesses_after([guess.token]):
            written = [*text[len(text) - least :], guess.token, next_one.token]
            around = [*text, *written[least:]]  # behind the end, a copy is copied again
            ends = range(len(written), len(around))
            assert any(around[i - len(written) : i] == written for i in ends)
    session.observe([guesses[0].token])
    assert session.guesses_after([])[0].token == session.propose(1).tokens[0]


def test_recycled_guesses_are_the_targets_own_in_its_order() -> None:
    """Of the last token of the path; nothing for a token that it never saw."""
    table = SuccessorTable()
    table.note(5, [9, 8, 7])
    session = sd.RecyclingDrafter(table=table).begin([1, 5], DraftContext())
    for path in ([], [3, 5]):
        assert [guess.token for guess in session.guesses_after(path)] == [9, 8, 7]  # type: ignore[attr-defined]
    assert session.guesses_after([9]) == []  # type: ignore[attr-defined]


# --- names, combinations, replay ----------------------------------------------------------------


def test_the_default_drafter_has_trees_as_an_option() -> None:
    """By name too; without it nothing of trees is made."""
    assert isinstance(make_drafter("auto:trees=true"), TreeOf)
    assert make_drafter("auto") == sd.BestOf(*LOOK_UPS())


def test_trees_compete_with_others_as_a_whole() -> None:
    """In a `BestOf` the look-ups of a tree are asked together."""
    tree = TreeOf(*LOOK_UPS())
    session: Any = sd.BestOf(tree, sd.PromptLookupDrafter()).begin([1, 2], DraftContext())
    (group,) = session.groups
    assert group[0][0] == tree.key
    assert len(group) == 2


def test_a_replay_shows_what_was_recorded_and_nothing_else() -> None:
    """The table of a replay holds the target's guesses under tokens of the text alone."""
    text = RecordedText("t", "c", [1, 2], [3, 4, 3, 5], "", [[3, 9], [4, 8], [3, 7], [5, 6]])
    table = SuccessorTable()
    drafter = sd.BestOf(sd.RecyclingDrafter(table=table), sd.NGramDrafter())
    replay_text(text, drafter, auto(FREE), FREE, max_tokens=4, vocab_size=50)
    known = {token: after.tokens for token, after in table.successors.items()}
    assert known == {2: [3, 9], 3: [5, 6], 4: [3, 7]}
    with pytest.raises(UnreadableError, match="no states"):
        RecordedTarget(text, 50).tap(Features(head_input=True))


def test_the_oracle_of_shape_takes_the_right_path_of_all_guesses() -> None:
    """It needs no more passes than trees do where positions are free, and drafts nothing wrong."""
    for text, modelled in zip(texts(), replayed(TreeOf(*LOOK_UPS()), FREE), strict=True):
        bound = length_oracle(text, TreeOf(*LOOK_UPS()), FREE, vocab_size=40, longest=150)
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
