"""Draft models with a tokenizer of their own: their text, or what they say of common tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, normalizers, trainers

import specdec_mlx as sd
import tiny
import tiny_text
from exact import NUM_STATES, ByRule, Drawn, Rounds, Source, up_to
from selection import FULL, in_one_test
from specdec_mlx.drafters.alignment import CONTEXT, MARGIN, DraftText, continuation
from specdec_mlx.drafters.retokenized import Retokenized, SharedDrafts, TextDrafts
from specdec_mlx.drafters.shared_vocabulary import SharedIds, SharedVocabulary, shared_between
from specdec_mlx.drafters.spelling import ORDINARY, Spelling, spelling_of, whole_characters
from specdec_mlx.rules.block import Block
from specdec_mlx.rules.rejection import Rejection
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.testing import check_drafter
from specdec_mlx.token_ids import to_list
from tiny_text import SPECIAL, bpe, plain, sentencepiece

LETTERS = tuple(reversed(tiny_text.BYTES))
"""The bytes in another order, so that no id means the same."""

TOKENIZERS: dict[str, Any] = {
    "byte-level": lambda: tiny_text.tokenizer(),
    "byte-level, other merges": lambda: tiny_text.tokenizer(
        bpe(merges=("a n", "an d", "Ġ t", "Ġt h", "Ġth e", "e r"), single=LETTERS)
    ),
    "bytes": lambda: tiny_text.tokenizer(bpe(merges=(), single=LETTERS)),
    "sentencepiece": lambda: tiny_text.tokenizer(
        sentencepiece(), bos_token="<s>", eos_token="</s>"
    ),
    "plain": lambda: tiny_text.tokenizer(plain(), bos_token="<s>", eos_token="</s>"),
}
BYTE_LEVEL = ("byte-level", "byte-level, other merges", "bytes")
PAIRS = [
    ("byte-level", "byte-level, other merges"),
    ("byte-level", "sentencepiece"),
    ("sentencepiece", "byte-level"),
    ("bytes", "byte-level"),
    ("byte-level", "plain"),
]
TEXT = "the cat and the other cats\nin  the hat: a (thin) hat & another one, then the end. "
VOCAB = tiny_text.VOCAB + 96
PROMPT = "the cat in the hat and the other hat"


@cache
def tokenizer(name: str) -> Any:
    return words() if name == "words" else TOKENIZERS[name]()


def words() -> Any:
    """Byte-level, with a token for nearly every word of ordinary text."""
    learned = bpe(merges=())
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=list(tiny_text.BYTES), special_tokens=list(SPECIAL)
    )
    learned.train_from_iterator(ORDINARY * 3, trainer)
    return tiny_text.tokenizer(learned)


def shared(target: str, draft: str) -> SharedVocabulary:
    found = shared_between(tokenizer(target), tokenizer(draft))
    assert found is not None
    return found


def spelled(spelling: Spelling, ids: Sequence[int]) -> bytes:
    return b"".join(spelling.spelled[index] for index in ids)


# Tokens as bytes ----------------------------------------------------------------------------------


@in_one_test("name", TOKENIZERS)
def test_bytes_in_tokens_are_those_of_the_tokenizer(name: str) -> None:
    """At the beginning of a text: the same ids, and each ends where its bytes do."""
    spelling = spelling_of(tokenizer(name))
    ids, ends = spelling.encode(TEXT.encode(), at_start=True)
    assert ids == tokenizer(name).encode(TEXT, add_special_tokens=False)
    for count, end in enumerate(ends, 1):
        assert spelled(spelling, ids[:count]).decode()[-end:] == TEXT[:end]


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(data=st.one_of(st.binary(max_size=40), st.text(max_size=30).map(str.encode)))
def test_all_bytes_can_be_written_in_byte_level_tokens(name: str, data: bytes) -> None:
    """No UTF-8 is no obstacle, at the end or in the middle."""
    spelling = spelling_of(tokenizer(name))
    ids, ends = spelling.encode(data)
    assert spelled(spelling, ids) == data
    lengths = [len(spelling.spelled[index]) for index in ids]
    assert ends == np.cumsum(lengths, dtype=int).tolist()


@given(text=st.text("the cat\n", min_size=1, max_size=20).filter(lambda text: "\n" not in text[:1]))
def test_sentencepiece_puts_a_space_only_before_a_text(text: str) -> None:
    """In the middle of one nothing is added, wherever the tokens end."""
    spelling = spelling_of(tokenizer("sentencepiece"))
    assert spelling.prepends_space
    inside, at_start = spelling.encode(text.encode()), spelling.encode(text.encode(), at_start=True)
    assert spelled(spelling, inside.ids) == text.encode()
    assert spelled(spelling, at_start.ids) == b" " + text.encode()


@given(st.text(max_size=10), st.integers(0, 3))
def test_the_half_of_a_character_is_left_out(text: str, cut: int) -> None:
    """All that is left can be read, and no more than one character is missing."""
    data = text.encode()[: max(0, len(text.encode()) - cut)]
    kept = whole_characters(data)
    kept.decode()
    assert data.startswith(kept)
    assert len(data) - len(kept) <= 3
    assert kept == data.decode(errors="ignore").encode()


def lowercase() -> Tokenizer:
    changing = bpe()
    changing.normalizer = normalizers.Lowercase()
    return changing


def test_a_tokenizer_that_changes_the_text_is_refused() -> None:
    """The error shows both: the first difference, and what does not come back."""
    draft = tiny_text.tokenizer(lowercase())
    drafter = sd.ModelDrafter(model(1), draft)
    with pytest.raises(
        sd.errors.TokenizerMismatchError, match=r"'The quick .* comes back as 'the quick"
    ):
        run(model(0), drafter, tokenizer=tokenizer("bytes"))


def test_composing_characters_is_no_reason_to_refuse() -> None:
    """What is encoded otherwise than it stood there is read as it is, and drafting goes on."""
    composing = bpe(single=LETTERS)
    composing.normalizer = normalizers.NFC()
    text = DraftText(
        SharedVocabulary(
            spelling_of(tokenizer("byte-level")), Spelling(tiny_text.tokenizer(composing)), {}, ""
        )
    )
    said = tokenizer("byte-level").encode("the cafe\u0301 in the hat and the cat")
    for token in said:
        text.read([token])
    assert spelled(text.shared.draft, text.ids).decode().endswith("the hat and the cat")


# The text in other tokens -------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_text_read_token_by_token_is_the_text_as_it_is_encoded(target: str, draft: str) -> None:
    """After every token, all that more text does not change is what the tokenizer itself writes."""
    follow = DraftText(shared(target, draft))
    said = tokenizer(target).encode(TEXT * 2, add_special_tokens=False)
    for count, token in enumerate(said, 1):
        follow.read([token])
        if count % 5 == 0:
            whole = DraftText(shared(target, draft))
            whole.read(said[:count])
            assert follow.ids == whole.ids
    expected = tokenizer(draft).encode(TEXT * 2, add_special_tokens=False)
    assert follow.ids[-len(expected) :] == expected


def written(vocabulary: SharedVocabulary, tokens: Sequence[int]) -> bytes:
    """What tokens of the target are in the draft model's eyes."""
    target, text = vocabulary.target, b""
    for token in tokens:
        if token in target.special:
            own = vocabulary.to_draft.get(token)
            contents = target.special if own is None else vocabulary.draft.special
            text += contents[token if own is None else own].encode()
        elif target.prepends_space and not text:
            text += target.spelled[token].removeprefix(b" ")
        else:
            text += target.spelled[token]
    return text


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@given(data=st.data())
def test_any_tokens_of_the_target_can_be_followed(target: str, draft: str, data: Any) -> None:
    """Halves of characters and special tokens too: what the draft model can say is all there."""
    vocabulary = shared(target, draft)
    ids = st.lists(st.integers(0, len(tokenizer(target)) - 1), max_size=30)
    follow = DraftText(vocabulary)
    said: list[int] = []
    for tokens in data.draw(st.lists(ids, max_size=3)):
        settled = follow.ids[: follow.settled]
        follow.read(tokens)
        said += tokens
        assert follow.ids[: len(settled)] == settled
    if draft in BYTE_LEVEL:
        own = vocabulary.draft
        words = [own.spelled.get(i) or own.special[i].encode() for i in follow.ids]
        assert b"".join(words) == written(vocabulary, said)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_text_taken_back_is_as_if_it_had_never_been_read(target: str, draft: str) -> None:
    """Down to any of the last tokens."""
    said = tokenizer(target).encode(TEXT, add_special_tokens=False)
    for count in range(len(said) - 6, len(said)):
        follow, other = DraftText(shared(target, draft)), DraftText(shared(target, draft))
        follow.read(said)
        follow.cut(count)
        other.read(said[:count])
        assert (follow.ids, follow.num_read) == (other.ids, other.num_read)


@pytest.mark.parametrize("num_texts", [5, 50])
def test_a_round_encodes_a_window_and_not_the_text(
    num_texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes at the end of a long text as of a short one."""
    vocabulary = shared("byte-level", "byte-level, other merges")
    follow = DraftText(vocabulary)
    said = tokenizer("byte-level").encode(TEXT * num_texts, add_special_tokens=False)
    follow.read(said[:-30])
    sizes: list[int] = []
    encode = Spelling.encode
    monkeypatch.setattr(
        Spelling,
        "encode",
        lambda self, data, **options: sizes.append(len(data)) or encode(self, data, **options),
    )
    for place in range(-30, 0, 3):
        follow.read(said[place : place + 3 or None])
        continuation(vocabulary.target, said[:place], b"the cat and the hat")
    longest = max(map(len, vocabulary.draft.spelled.values()))
    assert len(sizes) >= 20
    assert max(sizes) <= (CONTEXT + MARGIN + 3) * longest + 20


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.sampled_from([TEXT, "in the hat", " then", "é and 東京, the"]), place=st.data())
def test_a_draft_of_text_goes_on_where_the_text_ends(name: str, text: str, place: Any) -> None:
    """Its tokens spell the draft from its beginning, all of it where characters are known."""
    spelling = spelling_of(tokenizer(name))
    before = tokenizer(name).encode(TEXT, add_special_tokens=False)
    before = before[: place.draw(st.integers(0, len(before)))]
    ids = continuation(spelling, before, text.encode())
    assert text.encode().startswith(spelled(spelling, ids))
    if name != "plain" or text.isascii():
        assert spelled(spelling, ids) == text.encode()


def test_a_draft_is_written_as_the_target_would() -> None:
    """ " the" is one token behind a word, though the draft alone begins with a half of it."""
    target = spelling_of(tokenizer("byte-level"))
    before = tokenizer("byte-level").encode("and", add_special_tokens=False)
    ids = continuation(target, before, b" the \xe6\x9d")
    assert [target.spelled[i] for i in ids] == [b" the", b" "]
    assert spelled(target, continuation(target, before, b"\xe6\x9d")) == b"\xe6\x9d"


def test_special_tokens_are_the_same_by_content_or_by_role() -> None:
    """BOS and the end of a text by role; what only the target has is read as it is written."""
    vocabulary = shared("byte-level", "sentencepiece")
    ours, theirs = tokenizer("byte-level"), tokenizer("sentencepiece")
    assert vocabulary.to_draft[ours.eos_token_id] == theirs.eos_token_id
    assert vocabulary.to_draft[ours.bos_token_id] == theirs.bos_token_id
    follow = DraftText(vocabulary)
    follow.read(ours.encode("<|bos|>a<|user|>b<|end|>c", add_special_tokens=False))
    assert follow.ids.count(theirs.bos_token_id) == 1
    written = [theirs.convert_ids_to_tokens(i) for i in follow.ids]
    assert "".join(written) == "<s>▁a<|user|>b</s>c"
    same = shared("byte-level", "byte-level, other merges")
    for content in tiny_text.SPECIAL:
        index = ours.convert_tokens_to_ids(content)
        assert same.draft.special[same.to_draft[index]] == content


# Generations --------------------------------------------------------------------------------------


@cache
def model(seed: int, name: str = "qwen2", vocab_size: int = VOCAB) -> nn.Module:
    shape = tiny_text.SHAPE if name == "qwen2" else {}
    return tiny.build(name, seed=seed, **shape | {"vocab_size": vocab_size})


def run(target: nn.Module, drafter: Any, **options: Any) -> list[sd.responses.Token]:
    tokenizer_ = options["tokenizer"]
    prompt = options.pop("prompt", None) or tokenizer_.encode(PROMPT)
    return list(sd.speculate(target, prompt, drafter, **{"max_tokens": 24} | options))


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_greedy_text_is_the_targets_own(target: str, draft: str) -> None:
    """Whatever the draft model's tokens are."""
    for length in (4, "auto"):
        options = {"tokenizer": tokenizer(target), "draft_length": length}
        expected = [t.token for t in run(model(0), None, **options)]
        drafter = sd.ModelDrafter(model(1, vocab_size=len(tokenizer(draft))), tokenizer(draft))
        tokens = run(model(0), drafter, **options)
        assert [t.token for t in tokens] == expected
        assert length == "auto" or tokens[-1].stats.drafted > 0


@cache
def twins() -> tuple[nn.Module, Any, nn.Module, Any]:
    """A model of bytes, and the same one with its vocabulary, and tokenizer, in another order."""
    shape = tiny_text.SHAPE | {"vocab_size": 256}
    target, draft = (tiny.build("qwen2", seed=0, **shape) for _ in range(2))
    weights = dict(tree_flatten(target.parameters()))
    mirrored = mx.arange(255, -1, -1)
    for name, value in weights.items():
        if value.shape[0] == 256:
            weights[name] = value[mirrored]
    draft.load_weights(list(weights.items()))
    ours, theirs = (
        tiny_text.tokenizer(bpe(merges=(), single=single)) for single in (tiny_text.BYTES, LETTERS)
    )
    return target, ours, draft, theirs


@in_one_test("temp", [0.0, 1.0])
def test_the_target_itself_in_other_tokens_is_accepted_whole(temp: float) -> None:
    """The very text where it is greedy, the very distribution where it is drawn."""
    target, ours, draft, theirs = twins()
    options: dict[str, Any] = {"tokenizer": ours, "draft_length": 3, "max_tokens": 60}
    sampler = sd.Sampling(temp=temp)
    tokens = run(target, sd.ModelDrafter(draft, theirs), sampler=sampler, seed=1, **options)
    stats = tokens[-1].stats
    assert stats.drafted > 30
    assert stats.accepted == stats.drafted


def begun(drafts: str, target: str, draft: str, temp: float = 1.0, name: str = "qwen2") -> Any:
    """A session and its context, with the prompt observed."""
    drafter = sd.ModelDrafter(model(1, name), tokenizer(draft), tokenizers=drafts)
    context = sd.DraftContext(
        sampling=sd.Sampling(temp=temp, top_p=0.95),
        noise=Noise(3),
        vocab_size=VOCAB,
        tokenizer=tokenizer(target),
    )
    return drafter.begin(tokenizer(target).encode(PROMPT), context), context


@in_one_test("name", ["qwen2", "mamba"])
@in_one_test("drafts", ["text", "shared"])
def test_the_caches_hold_what_was_read(drafts: str, name: str) -> None:
    """After any verdict: what is said next is what a pass over all that was fed leads to."""
    session, _ = begun(drafts, "byte-level", "byte-level, other merges", name=name)
    said = tokenizer("byte-level").encode(TEXT, add_special_tokens=False)
    for place in range(0, 40, 5):
        draft = session.propose(4)
        proposed = to_list(draft.tokens)
        kept = place // 5 % (len(proposed) + 1)
        session.observe([*proposed[:kept], *said[place : place + place % 4 + 1]])
        pending = session.catch_up()
        assert session.rollback.position == len(session.fed)
        assert [*session.fed, *pending] == session.text.ids
        caches = make_prompt_cache(session.model)
        alone = session.model(mx.array([session.text.ids]), cache=caches)[0, -1]
        logits = session.feed(pending)[-1]
        assert mx.allclose(logits, alone, atol=1e-3)


@in_one_test("name", ["qwen2", "mamba"])
@in_one_test("end", [0, 2])
def test_the_callers_caches_end_with_the_text(name: str, end: int) -> None:
    """In the draft model's tokens, wherever the caller stops; a later turn goes on from there."""
    target, ours = model(0), tokenizer("byte-level")
    draft_model, theirs = model(1, name), tokenizer("sentencepiece")
    caches = [*make_prompt_cache(target), *(draft_caches := make_prompt_cache(draft_model))]
    drafter = sd.ModelDrafter(draft_model, theirs, tokenizers="text")
    prompt = ours.encode(PROMPT)
    stream = sd.speculate(
        target, prompt, drafter, tokenizer=ours, draft_length=3, prompt_cache=caches, max_tokens=20
    )
    tokens = [token.token for _, token in zip(range(20 - end), stream, strict=False)]
    stream.close()
    text = DraftText(shared("byte-level", "sentencepiece"))
    text.read([*prompt, *tokens])
    alone = make_prompt_cache(draft_model)
    draft_model(mx.array([text.ids]), cache=alone)
    after = mx.array([[7, 8, 9]])
    got, expected = (draft_model(after, cache=c) for c in (draft_caches, alone))
    assert mx.allclose(got, expected, atol=1e-3)


@FULL
@pytest.mark.parametrize("drafts", ["text", "shared"])
@pytest.mark.parametrize("name", ["qwen2", "mamba"])
def test_the_contract_is_kept(drafts: str, name: str) -> None:
    """Draws follow what is declared for them, rejected drafts leave nothing behind."""
    drafter = sd.ModelDrafter(model(1, name), tokenizer("bytes"), tokenizers=drafts)
    lines = check_drafter(
        drafter,
        vocab_size=VOCAB,
        tokenizer=tokenizer("byte-level"),
        prompts=[tokenizer("byte-level").encode(text) for text in ("the cat", "in the hat ")],
        num_draws=200 if name == "qwen2" else 40,
    )
    assert ("chi-square" in lines[4]) == (drafts == "shared")
    assert not lines[0].startswith("protocol: 0 drafts")


def test_enough_common_tokens_are_drawn_from_and_else_text_is_written() -> None:
    """By what ordinary text is written in; always text where nothing is drawn."""
    kinds = {"byte-level": SharedDrafts, "words": TextDrafts}
    for draft, kind in kinds.items():
        target = "byte-level, other merges"
        assert isinstance(begun("any", target, draft)[0], kind), shared(target, draft).coverage
        assert isinstance(begun("shared", target, draft)[0], SharedDrafts)
        assert isinstance(begun("text", target, draft)[0], TextDrafts)
        assert isinstance(begun("shared", target, draft, temp=0.0)[0], TextDrafts)


# What is drawn from common tokens ----------------------------------------------------------------


def test_what_is_declared_is_the_draft_models_distribution_given_a_common_token() -> None:
    """Under the target's temperature and top-p, by token of the same bytes; in float64."""
    session, context = begun("shared", "byte-level", "byte-level, other merges", temp=0.7)
    declared = np.array(session.propose(1).logprobs[0], np.float64)
    ids = DraftText(session.shared)
    ids.read(tokenizer("byte-level").encode(PROMPT))
    logits = np.array(session.model(mx.array([ids.ids]))[0, -1], np.float64)
    expected = np.full(VOCAB, -np.inf)
    theirs = tokenizer("byte-level, other merges").get_vocab()
    for token, index in tokenizer("byte-level").get_vocab().items():
        if token in theirs:
            expected[index] = logits[theirs[token]]
    assert np.isfinite(expected).sum() == len(session.shared.to_draft)
    law = context.sampling.log_distribution(mx.array(expected.astype(np.float32)))
    np.testing.assert_allclose(np.exp(declared), np.exp(np.array(law)), atol=1e-5)
    assert np.exp(declared).sum() == pytest.approx(1, abs=1e-5)
    assert np.isinf(declared).sum() > VOCAB - len(session.shared.to_draft)


COMMON = SharedIds(np.array([3, 0, 0, 1]), np.array([0.0, 0.0, -np.inf, 0.0]))
"""Four of the target's tokens, of which the draft model, with five, has all but the third."""


def drawn_from(common: SharedIds, scale: float = 1.0) -> Source:
    """What a draft model of five tokens says about the common ones, in each state."""
    logits = np.random.default_rng(5).normal(size=(NUM_STATES, 5))
    weights = np.exp(common.logits(logits))
    return Source(scale * weights / weights.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("rule", [Rejection(), Block()])
@pytest.mark.parametrize("num_draft", [1, 2])
def test_texts_keep_the_targets_distribution(rule: Any, num_draft: int) -> None:
    """Every outcome of two rounds, in float64, with a token that is never drafted."""
    target = Source(np.random.default_rng(6).dirichlet(np.ones(4), NUM_STATES))
    drafting = Drawn(drawn_from(COMMON), up_to(num_draft))
    assert Rounds(target, drafting, ByRule(rule)).total_variation(2, num_draft + 2) < 1e-12


class Forced(sd.DraftContext):
    """A context whose noise has given tokens drawn."""

    wanted: tuple[int, ...]

    def draft_gumbels(self, start: int, n: int, first: int = 0) -> mx.array:
        wanted = mx.array(self.wanted[first : first + n])
        return 1e6 * (mx.arange(self.vocab_size)[None] == wanted[:, None])


class Enumerated:
    """All drafts of a session after one prompt, as it hands them over."""

    def __init__(self, num_draft: int, peeks: bool = False) -> None:
        self.num_draft, self.peeks = num_draft, peeks

    def drafts(self, state: int) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
        """Only asked where the text begins."""
        assert state == 0
        for wanted in product(range(1, 4), repeat=self.num_draft):
            context = Forced(sampling=sd.Sampling(temp=1.0), noise=Noise(0), vocab_size=4)
            object.__setattr__(context, "wanted", wanted)
            vocabulary = shared("sentencepiece", "byte-level")
            session = SharedDrafts(model(1), vocabulary, [1, 2, 3], context, sd.Sampling(temp=1.0))
            draft = session.propose(self.num_draft)
            assert tuple(to_list(draft.tokens)) == wanted
            rows = np.exp(np.array(draft.logprobs, np.float64))
            rows /= rows.sum(axis=-1, keepdims=True)
            chance = rows[range(len(wanted)), wanted].prod()
            if self.peeks and wanted[0] == 1:  # and goes no further after that very token
                if wanted == (1,) * len(wanted):
                    yield rows[0, 1], (), rows[:0]
                continue
            yield chance, wanted, rows


@in_one_test("rule", [Rejection(), Block()])
def test_texts_keep_it_with_all_that_a_session_can_draft(rule: Any) -> None:
    """One of the target's four tokens is no common one; a draft dropped for its token is found."""
    target = Source(np.random.default_rng(6).dirichlet(np.ones(4), NUM_STATES))
    assert Rounds(target, Enumerated(2), ByRule(rule)).total_variation(1, 3) < 1e-12
    assert Rounds(target, Enumerated(2, peeks=True), ByRule(rule)).total_variation(1, 3) > 1e-3


WRONG = {
    "not normalised": drawn_from(COMMON, scale=0.8),
    "ids of other tokens": drawn_from(SharedIds(np.array([1, 0, 0, 3]), COMMON.floor)),
    "all tokens": drawn_from(SharedIds(np.array([3, 0, 2, 1]), np.zeros(4))),
}


@pytest.mark.parametrize("rule", [Rejection(), Block()])
@pytest.mark.parametrize("wrong", WRONG)
def test_another_distribution_than_was_drawn_from_is_found(rule: Any, wrong: str) -> None:
    """The same enumeration, with the declared distribution off in one way."""
    target = Source(np.random.default_rng(6).dirichlet(np.ones(4), NUM_STATES))
    drafting = Drawn(drawn_from(COMMON), up_to(2), declared=WRONG[wrong])
    assert Rounds(target, drafting, ByRule(rule)).total_variation(2, 4) > 1e-3


# What users see -----------------------------------------------------------------------------------


def test_another_tokenizer_is_said_in_one_line_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the first difference; nothing is said where they are the same."""
    ours, theirs = TOKENIZERS["byte-level"](), TOKENIZERS["sentencepiece"]()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            run(model(0), sd.ModelDrafter(model(1), theirs), tokenizer=ours, max_tokens=2)
        run(model(0), sd.ModelDrafter(model(1), TOKENIZERS["byte-level"]()), tokenizer=ours)
    (record,) = caplog.records
    assert "has a tokenizer of its own (token " in record.getMessage()
    assert "\n" not in record.getMessage()


def test_the_same_tokenizer_may_be_asked_for() -> None:
    """Then another one is refused, as it is where it cannot be read; other words are an error."""
    drafter = sd.ModelDrafter(model(1), tokenizer("plain"), tokenizers="same")
    with pytest.raises(sd.errors.TokenizerMismatchError, match="has id"):
        run(model(0), drafter, tokenizer=tokenizer("bytes"))
    with pytest.raises(ValueError, match="expected one of"):
        sd.ModelDrafter(model(1), tokenizers="some")


def test_an_end_that_the_draft_model_writes_is_the_targets_end() -> None:
    """The last token of a draft; after it nothing is drafted."""
    session, _ = begun("text", "byte-level", "sentencepiece")
    ours, theirs = tokenizer("byte-level"), tokenizer("sentencepiece")
    ids = [*theirs.encode("the cat", add_special_tokens=False), theirs.eos_token_id, 5]
    tokens = session.in_targets_tokens(ids)
    assert tokens[-1] == ours.eos_token_id
    assert ours.decode(tokens[:-1]).strip() == "the cat"
    assert isinstance(session, Retokenized)
