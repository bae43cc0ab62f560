"""`ties="plain"`: where rounding could exchange two tokens, a plain pass decides."""

from __future__ import annotations

import random
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

import specdec_mlx as sd
import tiny
import tiny_text
from scripted import OracleDrafter, OracleTrees, ScriptedDrafter
from selection import FULL, cases, in_one_test
from specdec_mlx.caches import Rollback, leaves
from specdec_mlx.exactness.ties import lead, margins, moved_filters, tie_bound
from specdec_mlx.loop import Token, speculate
from specdec_mlx.sampling import Sampling
from specdec_mlx.target import Verifier
from tiny import REPRESENTATIVE

VOCAB, SIZE, NUM_TOKENS = 128, 64, 32


def shortened(array: mx.array) -> mx.array:
    """Float32 numbers with 10 bits after the point, as TF32 has them."""
    bits = array.view(mx.uint32)
    return (((bits + 0x1000) >> 13) << 13).view(mx.float32)


class Rounding(nn.Module):  # type: ignore[misc]
    """A target whose next token follows from the last three. A GPU's kernels round its wide rows.

    Its cache holds tokens, which no kernel rounds.
    """

    def __init__(self, *, shortens: bool = True) -> None:
        super().__init__()
        keys = mx.random.split(mx.random.key(0), 4)
        self.layers = [nn.Identity()]
        self.tables = [mx.random.normal((VOCAB, SIZE), key=key) for key in keys[:3]]
        self.head = mx.random.normal((SIZE, VOCAB), key=keys[3])
        self.shortens = shortens

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        entry = ids.astype(mx.float32)[:, None, :, None]
        tokens, _ = cache[0].update_and_fetch(entry, entry)
        tokens, num = tokens[:, 0, :, 0].astype(mx.uint32), ids.shape[1]
        tokens = mx.pad(tokens, [(0, 0), (2, 0)])
        states = mx.tanh(
            sum(self.tables[i][tokens[:, tokens.shape[1] - num - i :][:, :num]] for i in range(3))
        )
        # One product for each row, so that rows round alike unless they are shortened.
        head = shortened(self.head) if self.shortens and num > 1 else self.head
        rows = [states[:, i : i + 1] for i in range(num)]
        if self.shortens and num > 1:
            rows = [shortened(row) for row in rows]
        return mx.concatenate([row @ head for row in rows], axis=1)


@cache
def target(*, shortens: bool = True) -> nn.Module:
    return Rounding(shortens=shortens)


def written(number: int, ties: str | None, temp: float, **how: Any) -> tuple[list[int], Token]:
    """A text with drafts of which one token in five is wrong, and its last token."""
    text, how = plain(number, temp, **how), {"num_draft_tokens": 4, "probe": False} | how
    drafter = how.pop("drafter", None) or OracleDrafter(text, VOCAB, wrong=0.2, seed=number)
    tokens = list(generated(number, drafter, temp, ties=ties, **how))
    return [token.token for token in tokens], tokens[-1]


def generated(number: int, drafter: Any, temp: float, **how: Any) -> list[Token]:
    prompt = random.Random(number).choices(range(VOCAB), k=8)
    how = {"max_tokens": NUM_TOKENS, "sampler": Sampling(temp), "seed": number} | how
    return list(speculate(how.pop("model", None) or target(), prompt, drafter, **how))


def plain(number: int, temp: float, **how: Any) -> list[int]:
    how = {name: how[name] for name in ("sampler", "logits_processors", "model") if name in how}
    return [token.token for token in generated(number, None, temp, **how)]


@pytest.mark.parametrize(
    ("temp", "numbers"),
    [
        (0.0, range(12, 16)),
        (0.8, range(22, 25)),
        pytest.param(0.0, range(200), marks=FULL),
        pytest.param(0.8, range(200), marks=FULL),
    ],
)
def test_a_text_is_that_of_plain_decoding_where_wide_rows_are_rounded(
    temp: float, numbers: range
) -> None:
    """All of them, where fewer are without the option; and few rounds end at a tie."""
    same, ties = {None: 0, "plain": 0}, 0
    for number in numbers:
        for choice in same:
            text, last = written(number, choice, temp)
            same[choice] += text == plain(number, temp)
            ties += last.stats.ties
    assert same[None] < same["plain"] == len(numbers)
    assert 0 < ties < len(numbers) * NUM_TOKENS / 20


FILTERS = {
    "top_p": Sampling(0.8, top_p=0.9),
    "min_p": Sampling(0.8, min_p=0.05),
    "top_k": Sampling(0.8, top_k=5),
    "xtc": Sampling(0.8, xtc_probability=0.5),
}


@in_one_test("name", FILTERS)
def test_filters_move_with_the_bound(name: str) -> None:
    """One law keeps at least the tokens that the other keeps."""
    rows = mx.random.normal((4, VOCAB), key=mx.random.key(1))
    for bound in (0.0, 0.05, 1.0):
        looser, stricter = moved_filters(FILTERS[name], bound, VOCAB)
        some, fewer = (law.log_distribution(rows) > -mx.inf for law in (looser, stricter))
        if name != "xtc":
            assert mx.all(some | ~fewer).item()
        text, _ = written(5, "plain", 0.8, sampler=FILTERS[name])
        assert text == plain(5, 0.8, sampler=FILTERS[name])


def test_a_draw_that_needs_the_filters_where_they_are_is_a_tie() -> None:
    """The noise draws a token that a filter hardly excludes, or hardly keeps."""
    logits = mx.array([[2.0, 1.0, 0.999, 0.0]])
    noise = mx.array([[-9.0, -9.0, 9.0, -9.0]])
    for top_k, sampling in ((2, Sampling(1.0, top_k=2)), (3, Sampling(1.0, top_k=3))):
        token = sampling.draw(logits, noise)
        next_token: Any = SimpleNamespace(
            sampling=sampling, gumbels=SimpleNamespace(at=lambda *about: noise)
        )
        rows: Any = SimpleNamespace(logprobs=logits, tokens=token)
        assert token.item() == (0 if top_k == 2 else 2)
        assert margins(rows, 0, next_token, 0.01).item() == 0


@pytest.fixture
def all_are_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_mlx.target.tie_bound", lambda model, kernels: 1e9)


@pytest.mark.parametrize("name", cases(REPRESENTATIVE, "llama", "gpt_oss", "mamba2", "rwkv7"))
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_plain_passes_decide_a_text_by_themselves(name: str, temp: float, all_are_ties) -> None:
    """If all rows are ties, each token comes from a plain pass, and the caches end in order."""
    model, penalty = tiny.build(name), make_logits_processors(repetition_penalty=1.3)
    caches = make_prompt_cache(model)
    how = {"model": model, "logits_processors": penalty}
    text, last = written(3, "plain", temp, prompt_cache=caches, probe=True, **how)
    assert text == plain(3, temp, **how)
    stats = last.stats
    assert stats.ties == sum(drafted > 0 for drafted, _ in stats.rounds) > 0
    assert stats.accepted == 0
    assert stats.tokens_per_pass < 1
    again = plain_caches(model, text)
    for one, other in zip(leaves(caches), leaves(again), strict=True):
        assert getattr(one, "offset", 0) == getattr(other, "offset", 0)


def plain_caches(model: nn.Module, text: list[int]) -> list[Any]:
    """Caches after the prompt and the text of `written(3, ...)`."""
    caches = make_prompt_cache(model)
    prompt = random.Random(3).choices(range(VOCAB), k=8)
    model(mx.array([[*prompt, *text]]), cache=caches)
    return caches


def test_a_pass_without_a_draft_is_over_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a rejection on recurrent caches, from which several tokens are fed again."""
    monkeypatch.setattr("specdec_mlx.target.tie_bound", lambda model, kernels: 1e-30)
    model, widths, alone = tiny.build("rwkv7"), list[int](), list[bool]()
    wrong = ScriptedDrafter(lambda start, limit: [1] * limit if start % 2 else [])
    launch, forward = Verifier.launch, Rollback.forward

    def launching(self: Any, pending: Any, draft: Any, *about: Any) -> Any:
        widths.clear()
        launched = launch(self, pending, draft, *about)
        if not len(draft):
            alone.append(widths[-1] == 1)
            replays.append(len(widths) > 1)
        return launched

    def feeding(self: Any, model: Any, tokens: mx.array, *about: Any, **more: Any) -> mx.array:
        widths.append(tokens.shape[0])
        return forward(self, model, tokens, *about, **more)

    replays: list[bool] = []
    monkeypatch.setattr(Verifier, "launch", launching)
    monkeypatch.setattr(Rollback, "forward", feeding)
    generated(3, wrong, 0.0, model=model, ties="plain", num_draft_tokens=3)
    assert all(alone)
    assert any(replays)


def test_a_device_that_rounds_rows_alike_has_no_ties() -> None:
    """The measured bound is 0, and nothing is looked for."""
    model = target(shortens=False)
    assert tie_bound(model) == 0 < tie_bound(target())
    text, last = written(1, "plain", 0.0, model=model)
    assert text == plain(1, 0.0, model=model)
    assert last.stats.ties == 0
    assert last.stats.accepted > 10


def test_trees_are_cut_to_chains(all_are_ties: None) -> None:
    model = tiny.build("qwen2")
    text = plain(2, 0.0, model=model)
    trees = OracleTrees(text, VOCAB)
    found, last = written(2, "plain", 0.0, model=model, drafter=trees, probe=True)
    assert found == text
    assert last.stats.ties > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unseeded": ({"sampler": Sampling(0.8), "seed": None}, "without a seed"),
    "drafts decide": ({"sampler": Sampling(0.8), "rule": "block"}, "rule='block'"),
    "lossy": ({"rule": "lenient"}, "rule='lenient'"),
    "opaque": ({"sampler": lambda rows: mx.argmax(rows, axis=-1)}, "of your own"),
    "remembers": ({"logits_processors": [lambda tokens, logits: logits]}, "of your own"),
    "unknown": ({"ties": "wide"}, 'None or "plain"'),
}


@in_one_test("name", REFUSED)
def test_what_has_no_plain_text_is_refused_in_words(name: str) -> None:
    how, words = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        generated(0, OracleDrafter([], VOCAB), 0.0, **{"ties": "plain"} | how)


def test_batches_have_no_such_option() -> None:
    with pytest.raises(ValueError, match="None for several texts"):
        model, tokenizer = tiny.build("qwen2", **tiny_text.SHAPE), tiny_text.tokenizer()
        how: dict[str, Any] = {"max_tokens": 2, "ties": "plain"}
        list(sd.batch_stream_generate(model, tokenizer, ["a", "b"], **how))


@in_one_test("rule", ["auto", "match", "rejection", "block"])
def test_rules_that_emit_the_targets_own_draws_are_taken(rule: str) -> None:
    text, _ = written(13, "plain", 0.0, rule=rule)
    assert text == plain(13, 0.0)


def test_the_account_names_ties(all_are_ties: None) -> None:
    _, last = written(2, "plain", 0.0)
    assert f"near ties decided by a plain pass: {last.stats.ties}" in str(last.stats)
    assert last.stats.as_dict()["ties"] == last.stats.ties > 0
    assert lead(mx.array([[1.0, 4.0, 2.5]])).tolist() == [1.5]
