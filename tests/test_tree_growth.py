"""Trees of look-ups: grown where a node is worth its position; elsewhere chains or nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
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
from specdec_mlx.bench.cost import CostCurve, linear_cost
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.bench.recorded import ModelledLength, RecordedTarget, replay_text
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.draft_length.parts import LENGTHS, Tree
from specdec_mlx.draft_length.store import Learned, Tuning
from specdec_mlx.drafters.default import default_drafter
from specdec_mlx.drafters.recycling import SuccessorTable
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.drafters.tree_of import TreeOf
from specdec_mlx.errors import UnreadableError
from specdec_mlx.rounds.clock import RoundClock
from specdec_mlx.rounds.ranks import Ranks
from specdec_mlx.target.verifier import Verifier
from specdec_mlx.types import (
    Branches,
    Draft,
    DraftContext,
    Evidence,
    Features,
    Guess,
    RoundRecord,
)
from specdec_mlx.types.trees import chain, path_to

FREE = linear_cost(0.0)
VOCAB, DEPTH = 6, 3


class Guessing:
    """Guesses by a table of the last token, down to a depth."""

    def __init__(self, table: dict[int, list[int]]) -> None:
        self.table = table

    def guesses_after(self, path: Sequence[int]) -> list[Guess]:
        known = self.table.get(path[-1] if path else 0, []) if len(path) < DEPTH else []
        return [Guess(token, Evidence(3, rank=rank)) for rank, token in enumerate(known)]


class Learning(Chances):
    """Chances that note what they learned from."""

    def learn(self, evidence: Any, place: int, right: bool, *rest: Any) -> None:
        noted.append((evidence.rank, place, right))


noted: list[tuple[int, int, bool]] = []


def tree_of(price: float, rate: float = 1.3, most: int = 63) -> Tree:
    """A part for which a node costs so much."""
    auto: Any = SimpleNamespace(rate=rate, most=most, latest=None, cost=lambda n: 1.0 + price * n)
    return Tree(auto, Learned(Chances.of("look-up")))


def sources_of(seed: int) -> tuple[list[Any], list[Any]]:
    """Two chains, and a guesser of a few tokens."""
    coins = random.Random(seed)
    table = {t: coins.sample(range(VOCAB), 2) for t in range(VOCAB)}
    known = list(Chances.of("look-up").of_draft([2] * DEPTH))
    chains = [([coins.randrange(VOCAB) for _ in known], known) for _ in "ab"]
    return chains, [(Guessing(table), Learning(Chances.of("look-up").odds))]


def texts_of(draft: Draft) -> list[tuple[int, ...]]:
    """The text up to each node."""
    parents = chain(len(draft)) if draft.parents is None else draft.parents
    return [tuple(draft.tokens[i] for i in path_to(n, parents)) for n in range(len(draft))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("price", [0.001, 0.03, 0.1, 0.3])
def test_the_tree_is_worth_most_of_all_trees(seed: int, price: float) -> None:
    """No tree of the sizes that are chosen from has more value: the likeliest nodes of that size.

    The n likeliest nodes are a tree, since a node is never likelier than its parent. All that there
    are is tried too.
    """
    tree, sources = tree_of(price), sources_of(seed)
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for n in range(DEPTH):
        for path in [p for p in reach if len(p) == n]:
            for token, chance in tree._after(path, *sources).items():
                reach[*path, token] = reach[path] * chance
    del reach[()]
    likeliest = sorted(reach.values(), reverse=True)
    sizes = [n for n in (*LENGTHS, len(reach)) if n <= len(reach)]
    values = {n: sum(likeliest[:n]) - 1.3 * price * n for n in sizes}
    draft = tree.grow(*sources, limit=63)
    found = texts_of(draft)
    assert len(set(found)) == len(found)
    assert tree.gain == pytest.approx(max(0.0, *values.values()), abs=1e-9)
    assert sum(reach[text] for text in found) - 1.3 * price * len(found) == pytest.approx(tree.gain)
    assert len(tree.grow(*sources, limit=5)) <= 5 >= len(tree_of(0.0, most=5).grow(*sources, 63))


def test_a_token_that_several_propose_has_their_mean() -> None:
    """And the chances at one place add up to 1 at most."""
    tree = tree_of(0.0)
    chains = [([7], [0.9]), ([7], [0.3]), ([8], [0.2])]
    assert tree._after((), chains, []) == pytest.approx({7: 0.6, 8: 0.2})
    crowd = tree._after((), [([n], [0.5]) for n in range(4)], [])
    assert crowd == pytest.approx(dict.fromkeys(range(4), 0.25))


def test_what_was_asked_is_scored_along_the_text() -> None:
    """Guesses at the places that the text went through; the next round begins anew."""
    tree = tree_of(0.0)
    tree.grow([], [(Guessing({0: [4, 5], 5: [1]}), Learning(Chances.of("look-up").odds))], 63)
    noted.clear()
    for _ in range(2):
        tree.follow(RoundRecord(3, 1, 2, 4, tokens=[5, 2]), True)
    assert noted == [(0, 0, False), (1, 0, True), (0, 1, False)]


def auto_with_tree(drafts: Sequence[tuple[str, Draft]]) -> Auto:
    """After plain rounds, and some that say that a position costs little."""
    auto = Auto(Tuning())
    auto.begin("tree", TreeOf(*LOOK_UPS()).begin([1, 2], DraftContext()), lambda: True)
    for key, _ in drafts:
        auto.limit(key, cheap=True)
    for drafted in (0, 0, 0, 4, 4, 16):
        part = drafts[0][0] if drafted else ""
        seconds = 1 + 0.01 * drafted
        auto.record(RoundRecord(drafted, 0, 1, 1 + drafted, [9], seconds, part=part))
    return auto


def test_a_chain_is_worth_as_much_in_a_tree_as_by_itself() -> None:
    """What its tokens themselves say of it counts in both."""
    drafts = [("a", Draft([7, 8, 9, 7, 8, 9], evidence=[Evidence(4)] * 6))]
    for known in (None, 7, 9):
        auto = auto_with_tree(drafts)
        for _ in range(20 if known else 0):
            auto.tuning.of("a").chances.learn(Evidence(4), 0, False, known)
        _, length = auto.choose(drafts)
        gain = auto._chosen_gain
        tree = auto._parts["tree"]
        kept = auto.grow("tree", drafts, [], 63, lambda: True)
        assert (len(kept), kept.parents) == (length, None)
        assert tree.gain == pytest.approx(gain)


def test_trees_that_a_target_refuses_are_not_grown_again() -> None:
    """The best chain stands in their place."""
    drafts = [("a", Draft([1, 2])), ("b", Draft([3, 4]))]
    auto, asked = auto_with_tree(drafts), list[int]()
    assert auto.grow("tree", drafts, [], 63, lambda: True).parents is not None
    for _ in range(3):
        kept = auto.grow("tree", drafts, [], 63, lambda: bool(asked.append(1)))
        assert kept.parents is None
        assert len(kept) > 0
    assert len(asked) == 1


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
    """Where a text forks at random, trees need fewer passes than the best chain."""
    chains, trees = (replayed(kind(*LOOK_UPS()), FREE) for kind in (sd.BestOf, TreeOf))
    assert sum(m.passes for m in trees) < 0.92 * sum(m.passes for m in chains)


@pytest.mark.parametrize(("slope", "most"), [(0.24, 0.55), (1.0, 1.08)])
def test_where_positions_are_expensive_trees_cost_little(
    slope: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain decoding, with what finding that out costs; texts of 150 tokens.

    A replay takes its seconds from a curve, but by the host's clock it would say which of them
    count.
    """
    monkeypatch.setattr(RoundClock, "was_undisturbed", True)
    trees = replayed(TreeOf(*LOOK_UPS()), linear_cost(slope))
    assert sum(m.seconds for m in trees) < most * sum(m.plain_seconds for m in trees)
    assert sum(m.drafted for m in trees) > 0


FEW = make_logits_processors(logit_bias=dict.fromkeys(range(6), 1e4))


def narrow_text(model: Any, drafter: Any, **options: Any) -> list[sd.Token]:
    """A text of 6 tokens only, drafted as if positions were free."""
    options = {
        "draft_length": ModelledLength(Auto(), FREE),
        "max_tokens": 80,
        "logits_processors": FEW,
    } | options
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


class Shapes(Auto):
    """The automatic length, with the drafts that it grew, and how often it asked for trees."""

    def grow(
        self,
        part: str,
        drafts: Sequence[tuple[str, Draft]],
        guessers: Sequence[tuple[str, Branches]],
        limit: int,
        may_fork: Callable[[], bool],
    ) -> Draft:
        def asks() -> bool:
            self.num_asked += 1
            return may_fork()

        draft = super().grow(part, drafts, guessers, limit, asks)
        self.has_forked = self.has_forked or draft.parents is not None
        return draft

    num_asked = 0
    has_forked = False


@pytest.mark.parametrize(("name", "takes"), [("llama", True), ("mamba2", False)])
def test_a_target_that_takes_no_trees_is_given_none(name: str, takes: bool) -> None:
    """It is asked once, and all that is grown after are chains."""
    model = tiny.build(name)
    shapes = Shapes()
    narrow_text(model, default_drafter(trees=True), draft_length=ModelledLength(shapes, FREE))
    assert shapes.has_forked == takes
    assert (shapes.num_asked > 1) == takes


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
    shapes = Shapes()
    narrow_text(model, default_drafter(trees=True), draft_length=ModelledLength(shapes, FREE))
    assert shapes.num_asked
    assert shapes.has_forked == (not on_ranks)
    assert bool(asked) == (not on_ranks)


def test_counts_of_a_replay_with_trees_are_those_of_a_live_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes, drafted and accepted tokens, of trees of drafters that read only the text."""
    monkeypatch.setattr(RoundClock, "was_undisturbed", True)
    model, drafter = narrow.model(), TreeOf(*LOOK_UPS())
    has_forked = False
    for task in narrow.tasks():
        shapes = Shapes()
        length = ModelledLength(shapes, FREE)
        items = list(sd.speculate(model, task.prompt, drafter, max_tokens=32, draft_length=length))
        has_forked = has_forked or shapes.has_forked
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
    assert has_forked


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
    assert make_drafter("auto") == sd.SuffixDrafter()


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
    replay_text(text, drafter, Auto(), FREE, max_tokens=4, vocab_size=50)
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
