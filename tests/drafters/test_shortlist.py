"""A shortlist of tokens: drafts from some rows of an output layer, and the target's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

import heads
import specdec_mlx as sd
import tiny
import tiny_text
from exact import COIN_RULES, ByCoupling, ByRule, Drawn, Rounds, Source, up_to
from heads import HEADS, VOCAB, Shown
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request, Schedule
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters import shortlist
from specdec_mlx.drafters.choosing.choice import DraftModel
from specdec_mlx.drafters.choosing.report import read_bytes
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.drafters.heads.drafter import HeadDrafter, anatomy_for_head
from specdec_mlx.drafters.shared_drafts import SharedSession
from specdec_mlx.drafters.shortlist import (
    REFRESH,
    SMALLEST,
    OutputLayer,
    PairCounts,
    Shortlist,
    bytes_read,
    output_layer_of,
)
from specdec_mlx.errors import MemoryFileError, TokenizerMismatchError
from specdec_mlx.lab.proof.enumeration import Tokens, pairs
from specdec_mlx.models.anatomy import anatomy_of
from specdec_mlx.options import Options
from specdec_mlx.sampling import Noise
from specdec_mlx.token_ids import to_list

PROMPT = [5, 17, 9, 33, 71, 2, 64]
SIZE = 24

target = cache(heads.target)


# The distribution of the text -----------------------------------------------------------------


def cut(probs: np.ndarray, kept: Sequence[int], total: float | None = None) -> np.ndarray:
    """Distributions [n, V] without the tokens outside of a list; total: divides them, or sums."""
    left = np.zeros_like(probs)
    left[:, kept] = probs[:, kept]
    return left / (left.sum(axis=-1, keepdims=True) if total is None else total)


@dataclass(frozen=True)
class FromList:
    """Drafts from a list that depends on the state before the draft.

    declared: makes the declared distributions of the source's and of the list.
    """

    source: Source
    length: int
    declared: Callable[[np.ndarray, list[int]], np.ndarray] = cut

    def kept(self, state: int) -> list[int]:
        size = self.source.vocab_size
        return [token for token in range(size) if token != state % size]

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        probs, kept = self.source.probs, self.kept(state)
        drawn, declared = Source(cut(probs, kept)), Source(self.declared(probs, kept))
        yield from Drawn(drawn, up_to(self.length), declared=declared).drafts(state)


WRONG: dict[str, Callable[[np.ndarray, list[int]], np.ndarray]] = {
    "q not renormalised": partial(cut, total=1.0),
    "q of all tokens": lambda probs, kept: probs,
    "q of the next list": lambda probs, kept: cut(probs, [0, *kept[1:]][:-1] or [0]),
}
DECIDING = {name: ByRule(rule) for name, rule in COIN_RULES.items()}


@in_one_test("name", [*DECIDING, "coupled"])
def test_a_text_drafted_from_lists_has_the_targets_distribution(name: str) -> None:
    """Over one round and two, on every pair of models, with another list for every round."""
    for target, draft, length, how in pairs():
        if "drawn" not in how:
            continue
        probs = 0.9 * draft.probs + 0.1 / draft.vocab_size  # so that each list has mass
        deciding = DECIDING.get(name, ByCoupling())
        if name == "coupled" and (length > 2 or draft.vocab_size > 4):
            continue
        rounds = Rounds(target, FromList(Source(probs), length), deciding)
        for num_rounds in (1, 2):
            assert rounds.total_variation(num_rounds, length + 1) < 1e-12, how


@in_one_test("wrong", WRONG)
@in_one_test("rule", DECIDING)
def test_enumeration_rejects_a_wrong_q_of_a_list(rule: str, wrong: str) -> None:
    worst = 0.0
    for target, draft, length, how in pairs():
        if "drawn" in how and draft.vocab_size > 2:
            probs = 0.9 * draft.probs + 0.1 / draft.vocab_size
            drafting = FromList(Source(probs), length, WRONG[wrong])
            rounds = Rounds(target, drafting, DECIDING[rule])
            worst = max(worst, rounds.total_variation(1, length + 1))
    assert worst > 0.01


# What is declared -----------------------------------------------------------------------------


def quantized(model: nn.Module) -> nn.Module:
    def fits(path: str, part: Any) -> bool:
        return hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0

    nn.quantize(model, group_size=32, bits=4, class_predicate=fits)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "untied": target,
    "tied": lambda: tiny.build("qwen2", vocab_size=VOCAB, tie_word_embeddings=True),
    "tied, 4 bits": lambda: quantized(
        tiny.build("qwen2", vocab_size=VOCAB, tie_word_embeddings=True)
    ),
    "untied, 4 bits": lambda: quantized(heads.target()),
    "capped": lambda: tiny.build("gemma2", vocab_size=VOCAB),
    "fewer tokens": lambda: heads.target(vocab=VOCAB - 20),
    "more tokens": lambda: heads.target(vocab=VOCAB + 20),
}
GROUPED = {"assistant of groups"}  # computes a few groups of rows without a list


def drafter(name: str, **options: Any) -> Any:
    if name in MODELS:
        return sd.ModelDrafter(MODELS[name](), **options)
    if name in HEADS:
        return HeadDrafter(heads.random_head(HEADS[name], target()), **options)
    head = heads.random_head(heads.mtp(name, vocab_size=VOCAB), target(width_of(name)))
    return HeadDrafter(head, **options)


def width_of(name: str) -> int:
    config = tiny.CONFIGS[name]
    return int(config.get("text_config", config)["hidden_size"])


def context(**given: Any) -> DraftContext:
    return DraftContext(vocab_size=VOCAB, noise=Noise(5), **given)


def listed(session: Any) -> list[int]:
    return [token for token in session.source.output_rows.ids.tolist() if token < VOCAB]


ALL = [*MODELS, *HEADS, "step3p5"]
FILTERED = sd.Sampling(temp=0.8, top_p=0.95, top_k=9, min_p=0.01)


@in_one_test("name", ALL)
def test_q_is_the_drafters_own_within_the_list(name: str) -> None:
    """Filtered and normalised there, and 0 elsewhere; each token is the draw from it."""
    plain = Shown(drafter(name, draft_vocab="off"), PROMPT, context(sampling=sd.Sampling(temp=1)))
    raw = plain.propose(1).logprobs
    given = context(sampling=FILTERED)
    shown = Shown(drafter(name, draft_vocab=SIZE), PROMPT, given)
    draft = shown.propose(4)
    kept = listed(shown.session)
    outside = [token for token in range(VOCAB) if token not in kept]
    assert raw is not None
    assert draft.logprobs is not None
    is_listed = mx.array(np.isin(range(VOCAB), kept))
    expected = FILTERED.log_distribution(mx.where(is_listed, raw, -mx.inf))
    assert mx.allclose(mx.exp(draft.logprobs[:1]), mx.exp(expected), atol=1e-5)
    assert mx.all(mx.isinf(draft.logprobs[:, mx.array(outside)]))
    assert mx.allclose(mx.exp(draft.logprobs).sum(-1), mx.ones(len(draft)), atol=1e-5)
    noise = given.draft_gumbels(0, len(draft))
    assert to_list(draft.tokens) == mx.argmax(draft.logprobs + noise, axis=-1).tolist()
    assert len(draft) >= 3


@in_one_test("name", ["untied", "tied", "eagle3", "dflash", "medusa", "eagle1"])
def test_a_list_of_all_tokens_drafts_as_without_one(name: str) -> None:
    """The same rows in another copy."""
    given, drafts = context(sampling=sd.Sampling(temp=1)), []
    for size in ("off", VOCAB):
        one = drafter(name, draft_vocab=size)
        if size == VOCAB:
            layer = one.head.output_layer() if "eagle" in name or name in HEADS else None
            layer = layer or output_layer_of(one.model)
            vars(one)["shortlist"] = Shortlist(layer, VOCAB, PairCounts())
        drafts.append(Shown(one, PROMPT, given).propose(3))
    assert to_list(drafts[0].tokens) == to_list(drafts[1].tokens)
    assert mx.allclose(mx.exp(drafts[0].logprobs), mx.exp(drafts[1].logprobs), atol=1e-5)


# Texts ----------------------------------------------------------------------------------------


def text_of(model: nn.Module, drafter: Any, **options: Any) -> list[int]:
    return [t.token for t in sd.speculate(model, PROMPT, drafter, max_tokens=40, **options)]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "a seed": {"sampler": sd.Sampling(temp=0.9, top_p=0.9), "seed": 3},
}


@in_one_test("way", WAYS)
@in_one_test("name", ["untied", "tied, 4 bits", "eagle3", "dflash", "medusa"])
def test_the_text_is_the_targets_own(name: str, way: str) -> None:
    """With lists of a few tokens, over refreshes of the list."""
    for branches in (1, 3):
        one = drafter(name, draft_vocab=8, branches=branches)
        got = text_of(target(), one, num_draft_tokens=3, **WAYS[way])
        assert got == text_of(target(), None, **WAYS[way])


def test_the_targets_own_copy_agrees_within_the_list() -> None:
    """Greedy and with a seed: each token of the target that is in the list is accepted."""
    for options in WAYS.values():
        one = sd.ModelDrafter(target(), draft_vocab=VOCAB - 10)
        tokens = list(
            sd.speculate(target(), PROMPT, one, max_tokens=40, num_draft_tokens=1, **options)
        )
        missed = [t.token for t in tokens if t.origin == "correction"]
        layer = one.shortlist
        assert layer is not None
        first = set(layer.choose(np.array(PROMPT)).tolist())
        assert not set(missed) & first
        assert tokens[-1].stats.accepted > 10


@in_one_test("name", ["untied", "eagle1"])
def test_texts_of_a_batch_share_a_list(name: str) -> None:
    """Each text is the target's own. Drafts are from the list, which has the prompts' tokens."""
    prompts = [PROMPT, [90, 91, 92], [50, 51]]
    seen: list[tuple[set[int], set[int]]] = []
    set_draft = SharedSession.set_draft

    def noted(session: SharedSession, draws: Any) -> None:
        assert session.passes.output_rows is not None
        tokens = to_list(draws.draft().tokens)
        seen.append((set(tokens), set(session.passes.output_rows.ids.tolist())))
        set_draft(session, draws)

    one = drafter(name, draft_vocab=VOCAB - 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedSession, "set_draft", noted)
        accepted, texts = batch_of(one, prompts)
    assert texts == [[t.token for t in sd.speculate(target(), p, max_tokens=20)] for p in prompts]
    assert len(seen) > 10
    assert all(tokens <= listed for tokens, listed in seen)
    assert {token for prompt in prompts for token in prompt} <= seen[-1][1]
    assert accepted > 10 or name != "untied", "the target's own copy is right within the list"


def batch_of(drafter: Any, prompts: list[list[int]]) -> tuple[int, list[list[int]]]:
    """Accepted tokens and the texts of a batch."""
    batch = BatchGeneration(target(), drafter, Options(num_draft_tokens=3), Schedule(3))
    for prompt in prompts:
        batch.insert(Request(prompt, 20, sd.Sampling()))
    texts: dict[int, list[int]] = {}
    accepted = 0
    for uid, token, *_ in batch.run():
        texts.setdefault(uid, []).append(token.token)
        accepted += token.from_draft
    return accepted, [texts[uid] for uid in sorted(texts)]


# Processors -----------------------------------------------------------------------------------


def only(*allowed: int) -> Callable[[mx.array, mx.array], mx.array]:
    keep = np.isin(range(VOCAB), allowed)
    return lambda tokens, logits: mx.where(mx.array(keep), logits, -mx.inf)


@in_one_test("temp", [0.0, 1.0])
@in_one_test("branches", [1, 3])
def test_processors_choose_among_all_tokens_by_their_ids(temp: float, branches: int) -> None:
    """Within the list they forbid and force; where they leave none of it, they are followed."""
    one = drafter("untied", draft_vocab=SIZE, branches=branches)
    sampling = sd.Sampling(temp=temp)
    first = Shown(one, PROMPT, context(sampling=sampling))
    first.propose(3)
    inside = [token for token in listed(first.session) if token not in PROMPT]
    outside = next(token for token in range(VOCAB) if token not in listed(first.session))
    for allowed in ([inside[0]], inside[:2], [outside], [outside, inside[0]]):
        given = context(sampling=sampling, logits_processors=[only(*allowed)])
        draft = Shown(one, PROMPT, given).propose(3)
        expected = [token for token in allowed if token in inside] or allowed
        assert set(to_list(draft.tokens)) <= set(expected)
        assert len(draft) >= (3 if branches == 1 else 1)
        if temp and branches == 1:
            assert draft.logprobs is not None
            assert mx.allclose(mx.exp(draft.logprobs).sum(-1), mx.ones(3), atol=1e-5)


def test_a_text_with_forced_tokens_is_the_targets_own() -> None:
    """Greedy and with a seed, with a processor whose tokens are never in the list."""
    for options in WAYS.values():
        forced = {**options, "logits_processors": [only(80, 81, 95)]}
        one = drafter("untied", draft_vocab=8)
        got = text_of(target(), one, num_draft_tokens=3, **forced)
        assert got == text_of(target(), None, **forced)


# The list -------------------------------------------------------------------------------------


def layer(size: int = 10, **options: Any) -> OutputLayer:
    return OutputLayer([nn.Linear(4, size, bias=False)], 1000, size, **options)


def test_the_list_has_the_text_then_what_follows_then_the_frequent_tokens() -> None:
    counts = PairCounts.of(np.array([[8, 6], [8, 6], [8, 7], [1, 5]]), 1, None)
    latest = np.array([8, 9])
    choose = lambda size, **more: Shortlist(layer(), size, counts).choose(latest, **more).tolist()  # noqa: E731
    assert choose(1) == [8]
    assert choose(2) == [8, 9]
    assert choose(4) == [6, 7, 8, 9]
    assert choose(5) == [5, 6, 7, 8, 9], "the most frequent token that is left"
    assert choose(6) == [0, 5, 6, 7, 8, 9], "and then by their ids"
    assert choose(3, first=[3]) == [3, 8, 9]
    assert Shortlist(layer(), 3, PairCounts()).choose(latest).tolist() == [0, 8, 9]
    some = layer(3, ids=mx.array([9, 2, 4]))
    some = replace(some, width=10)
    assert Shortlist(some, 2, counts).choose(latest, first=[3, 50]).tolist() == [2, 9]


def test_a_list_stays_in_a_draft_and_takes_new_tokens_after_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are copied only where the text has a token that is not in the list."""
    session: WritingSession = drafter("untied", draft_vocab=16).begin(PROMPT, context())
    copies: list[Any] = []
    some_rows = shortlist.some_rows
    monkeypatch.setattr(
        shortlist, "some_rows", lambda *given: copies.append(1) or some_rows(*given)
    )
    session.propose(3)
    assert set(PROMPT) <= set(listed(session))
    before = session.source.output_rows
    session.observe([90])
    session.propose(3)
    assert session.source.output_rows is before
    session.observe([90] * (REFRESH - 1))
    session.propose(3)
    assert 90 in listed(session)
    assert len(copies) == 2
    session.observe([5] * 5 * REFRESH)
    session.propose(3)
    assert len(copies) == 2, "nothing was new"


def test_earlier_turns_and_ends_are_in_the_list() -> None:
    """Tokens that a head's own text leaves out, and the tokenizer's end tokens."""
    tokenizer = tiny_text.tokenizer()
    one = drafter("eagle1", draft_vocab=16)
    ends = sorted(tokenizer.eos_token_ids)
    rows = one.shortlist.begin(DraftContext(tokenizer=tokenizer))
    assert {end for end in ends if end < VOCAB} <= set(rows.refresh().ids.tolist())
    session = one.begin(PROMPT, context(num_unseen=4))
    session.source.refresh_rows()
    assert set(PROMPT) <= set(listed(session))


def test_a_pass_of_another_thread_keeps_all_rows() -> None:
    model = target()
    head = anatomy_of(model).head_tap().module
    widths: list[int] = []
    rows = drafter("untied", draft_vocab=8).begin(PROMPT, context())
    rows.source.refresh_rows()

    def run() -> None:
        widths.append(model(mx.array([[1]])).shape[-1])

    with rows.source.output_rows.in_use():
        thread = Thread(target=run)
        thread.start()
        thread.join()
        run()
    run()
    assert widths == [VOCAB, 8, VOCAB]
    assert type(head) is nn.Linear


# The option -----------------------------------------------------------------------------------


def wide(body: int = 16, vocab: int = 4 * SMALLEST) -> nn.Module:
    """A model of many tokens, with layers of a size."""
    sizes = {"hidden_size": 16, "intermediate_size": body, "vocab_size": vocab}
    return tiny.build("qwen2", tie_word_embeddings=True, num_hidden_layers=1, **sizes)


def test_a_list_is_made_by_default_where_it_saves_half_of_a_step() -> None:
    small = sd.ModelDrafter(wide())
    assert small.shortlist is not None
    assert small.shortlist.size == SMALLEST
    assert "draft_vocab=4096" in small.key
    assert sd.ModelDrafter(wide(body=16_000)).shortlist is None, "its layers are the larger part"
    assert sd.ModelDrafter(wide(vocab=SMALLEST)).shortlist is None, "it has no more tokens"
    assert sd.ModelDrafter(wide(), draft_vocab="off").shortlist is None
    assert sd.ModelDrafter(wide(body=16_000), draft_vocab=100).shortlist is not None
    assert "draft_vocab" not in sd.ModelDrafter(wide(), draft_vocab="off").key
    big = OutputLayer([nn.Embedding(40 * SMALLEST, 2)], 1, 40 * SMALLEST)
    chosen = shortlist.make_shortlist("auto", lambda: big)
    assert chosen is not None
    assert chosen.size == 40 * SMALLEST // 16
    head = HeadDrafter(heads.random_head(HEADS["eagle1"], target()), draft_vocab=30)
    assert f"drafts 30 of {VOCAB} tokens at a time" in head.describe()


def test_only_chosen_experts_count_as_read() -> None:
    model = tiny.build("qwen3_moe")
    switches = [m for m in model.modules() if type(m).__name__ == "SwitchLinear"]
    experts = sum(m.weight.nbytes for m in switches)
    share = tiny.CONFIGS["qwen3_moe"]["num_experts_per_tok"] / switches[0].weight.shape[0]
    assert bytes_read(model) == shortlist.bytes_of(model) - experts + int(experts * share)
    assert bytes_read(target()) == shortlist.bytes_of(target())


def test_a_list_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    model = tiny.build("qwen2", vocab_size=VOCAB, tie_word_embeddings=False)
    model.lm_head = LoRALinear.from_base(model.lm_head)
    assert sd.ModelDrafter(model).shortlist is None
    with pytest.raises(ValueError, match="rows of its output layer cannot be taken"):
        sd.ModelDrafter(model, draft_vocab=8).check(context())
    for wrong in (0, -3, 1.5, True, None):
        with pytest.raises(ValueError, match="draft_vocab"):
            shortlist.check_draft_vocab(wrong)
    with pytest.raises(ValueError, match="draft_vocab=0"):
        sd.ModelDrafter(target(), draft_vocab=0)
    for name in ("none", "atuo"):
        with pytest.raises(ValueError, match=f"{name}.*expected 'auto', 'off', a number"):
            sd.ModelDrafter(target(), draft_vocab=str(tmp_path / name))
    (tmp_path / "no").write_text("text")
    with pytest.raises(MemoryFileError, match="is not a memory"):
        _ = sd.ModelDrafter(wide(), draft_vocab=str(tmp_path / "no")).shortlist


@in_one_test("order", [(2, 2), (2, 4), (3, 4), (1, 2)])
def test_counts_come_from_a_table_and_from_a_memory(tmp_path: Path, order: Any) -> None:
    """Pairs of tokens, the most frequent follower first."""
    folder = tmp_path / str(order)
    folder.mkdir()
    texts = [[1, 2, 3, 1, 2, 4, 1, 2, 3]] * 2
    table = lab.NGramTable(min_order=order[0], max_order=order[1])
    memory = sd.Memory()
    for text in texts:
        table.add(text)
        memory.add([*text])
    table.save(folder / "table")
    memory.save(folder / "memory")
    for name in ("table", "memory") if order[0] < 3 else ("table",):
        counts = PairCounts.load(folder / name)
        assert counts.after(np.array([2])).tolist() == [3, 4]
        is_pair = (counts.firsts == 2) & (counts.seconds == 3)
        assert counts.times[is_pair].tolist() == [4]
        assert counts.seconds[counts.firsts == 2].tolist() == [3, 4]
    ids, times = PairCounts.load(folder / "memory").totals()
    assert dict(zip(ids, times, strict=True)) == {1: 4, 2: 6, 3: 4, 4: 2}
    vocab = 2 * SMALLEST
    made = sd.ModelDrafter(wide(vocab=vocab), draft_vocab=str(folder / "memory")).shortlist
    assert made is not None
    assert made.frequent[:3].tolist() == [2, 1, 3]


def test_counts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny_text.tokenizer()
    memory = sd.Memory(tokenizer=tokenizer)
    memory.add([1, 2, 3])
    memory.save(tmp_path / "memory")
    one = sd.ModelDrafter(wide(), draft_vocab=str(tmp_path / "memory"))
    one.check(DraftContext(tokenizer=tokenizer))
    other = tiny_text.tokenizer(tiny_text.bpe((), tiny_text.SPECIAL[:2]))
    with pytest.raises(TokenizerMismatchError, match="draft_vocab"):
        one.check(DraftContext(tokenizer=other))


def test_the_option_reaches_a_head_and_a_model(tmp_path: Path) -> None:
    model = lab.load_pair().target
    head = sd.load_head(lab.head_path("eagle3"), model, draft_vocab=50)
    assert isinstance(head, HeadDrafter)
    assert head.shortlist is not None
    assert head.shortlist.size == 50
    made: Any = DraftModel(str(lab.head_path("eagle3"))).make("model:draft_vocab=60", model)
    assert made.shortlist.size == 60
    made = DraftModel(str(lab.draft_path()), vocab=70).make()
    assert made.shortlist.size == 70
    made = DraftModel(str(lab.draft_path()), vocab="off").make("model:draft_vocab=80")
    assert made.shortlist.size == 80, "the option of a drafter is nearer than the flag"
    assert anatomy_for_head(model).vocab_size > 80


def test_the_report_prices_a_draft_token_by_the_bytes_that_it_reads() -> None:
    """Qwen3.8-27B's output rows in 4 bits, a head of 0.24 GB, and models with and without tying."""
    target = {"vocab_size": 248_320, "hidden_size": 5120, "quantization": {"bits": 4}}
    matrix = 248_320 * 5120 * 4.5 / 8
    reads, with_list = read_bytes(target, {}, 240_000_000, is_head=True)
    assert reads == 240_000_000 + int(matrix)
    assert with_list == pytest.approx(240_000_000 + matrix / 16, rel=1e-3)
    own = {"draft_vocab_size": 32_000}
    assert read_bytes(target, own, 900, is_head=True) == (900, 900)
    draft = target | {"tie_word_embeddings": False}
    assert read_bytes({}, draft, 2 * 10**9, is_head=False)[0] == 2 * 10**9 - int(matrix)
    assert read_bytes({}, target, 2 * 10**9, is_head=False) == (2 * 10**9, 2 * 10**9)
