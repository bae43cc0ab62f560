"""Draft models with a tokenizer of their own, whose text is carried over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import normalizers

import specdec_mlx as sd
import tiny
import tiny_text
from selection import FULL, in_one_test
from specdec_mlx.drafters.retokenized import MOST_OPEN, DraftText, continuation
from specdec_mlx.drafters.shared_vocabulary import (
    SharedVocabulary,
    Spelling,
    shared_between,
)
from specdec_mlx.lab import check_drafter
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
    return TOKENIZERS[name]()


@cache
def spelling_of(name: str) -> Spelling:
    return Spelling(tokenizer(name))


def shared(target: str, draft: str) -> SharedVocabulary:
    found = shared_between(tokenizer(target), tokenizer(draft))
    assert found is not None
    return found


def spelled(spelling: Spelling, ids: Sequence[int]) -> bytes:
    return b"".join(spelling.spelled[index] for index in ids)


def encoded(name: str, text: str) -> list[int]:
    return list(tokenizer(name).encode(text, add_special_tokens=False))


@in_one_test("name", TOKENIZERS)
@given(text=st.sampled_from([TEXT, "in the hat", " then", "é and 東京, the"]), place=st.data())
def test_text_is_written_as_the_tokenizer_has_it(name: str, text: str, place: Any) -> None:
    """At the beginning of a text the same ids, each of which ends where its characters do; and a
    draft of text goes on where the text ends: all of it where characters are known.
    """
    spelling, whole = spelling_of(name), encoded(name, TEXT)
    ids, ends = spelling.encode(TEXT, at_start=True)
    assert ids == whole
    for count, end in enumerate(ends, 1):
        assert spelled(spelling, ids[:count]).decode()[-end:] == TEXT[:end]
    before = whole[: place.draw(st.integers(0, len(whole)))]
    said = spelled(spelling, continuation(spelling, before, text))
    assert text.encode().startswith(said)
    assert said == text.encode() or (name == "plain" and not text.isascii())


@given(text=st.text("the cat\n", min_size=1, max_size=20).filter(lambda text: "\n" not in text[:1]))
def test_sentencepiece_puts_a_space_only_before_a_text(text: str) -> None:
    """In the middle of one nothing is added, wherever the tokens end."""
    spelling = spelling_of("sentencepiece")
    assert spelling.prepends_space
    assert spelled(spelling, spelling.encode(text)[0]) == text.encode()
    assert spelled(spelling, spelling.encode(text, at_start=True)[0]) == b" " + text.encode()


@in_one_test(("target", "draft"), PAIRS)
def test_text_read_token_by_token_is_the_text_as_it_is_encoded(target: str, draft: str) -> None:
    """After every token, though only the end of the text is ever encoded again."""
    follow = DraftText(shared(target, draft))
    said = encoded(target, TEXT * 2)
    for count, token in enumerate(said, 1):
        follow.read([token])
        assert len(follow.ids) - follow.settled <= MOST_OPEN
        if count % 5 == 0:
            whole = DraftText(shared(target, draft))
            whole.read(said[:count])
            assert follow.ids == whole.ids
    expected = encoded(draft, TEXT * 2)
    assert follow.ids[-len(expected) :] == expected
    assert follow.settled > len(expected) - MOST_OPEN


def written(vocabulary: SharedVocabulary, tokens: Sequence[int]) -> str:
    """What tokens of the target are in the draft model's eyes."""
    target, parts = vocabulary.target, [b""]
    for token in tokens:
        if token in vocabulary.to_draft and token in target.special:
            content = vocabulary.draft.special[vocabulary.to_draft[token]]
            parts += [content.encode(), b""]
        elif token in target.special:
            parts[-1] += target.special[token].encode()
        else:
            is_first = target.prepends_space and parts == [b""]
            parts[-1] += target.spelled[token].removeprefix(b" " if is_first else b"")
    return "".join(part.decode(errors="replace") for part in parts)


@in_one_test(("target", "draft"), PAIRS)
@given(data=st.data())
def test_any_tokens_of_the_target_can_be_followed(target: str, draft: str, data: Any) -> None:
    """Halves of characters and special tokens too; what is settled stays."""
    vocabulary = shared(target, draft)
    ids = st.lists(st.integers(0, len(tokenizer(target)) - 1), max_size=30)
    follow = DraftText(vocabulary)
    said: list[int] = []
    for tokens in data.draw(st.lists(ids, max_size=3)):
        settled = follow.ids[: follow.settled]
        follow.read(tokens)
        said += tokens
        assert follow.ids[: len(settled)] == settled
    if draft in BYTE_LEVEL and not follow.ends_in_character:
        own = vocabulary.draft
        seen = b"".join(own.spelled.get(i) or own.special[i].encode() for i in follow.ids)
        assert seen.decode() == written(vocabulary, said)


def test_special_tokens_are_the_same_by_content_or_by_role() -> None:
    """BOS and the end of a text by role, the end as a draft's last token; what only the target has
    is read as it is written, and characters that are composed otherwise as they are.
    """
    vocabulary = shared("byte-level", "sentencepiece")
    ours, theirs = tokenizer("byte-level"), tokenizer("sentencepiece")
    assert vocabulary.to_draft[ours.eos_token_id] == theirs.eos_token_id
    assert vocabulary.to_draft[ours.bos_token_id] == theirs.bos_token_id
    follow = DraftText(vocabulary)
    follow.read(encoded("byte-level", "<|bos|>a<|user|>b<|end|>c"))
    assert "".join(map(theirs.convert_ids_to_tokens, follow.ids)) == "<s>▁a<|user|>b</s>c"
    session = begun("byte-level", "sentencepiece")
    tokens = session.in_targets_tokens([*encoded("sentencepiece", "a"), theirs.eos_token_id, 5])
    assert tokens[-1] == ours.eos_token_id
    assert ours.decode(tokens[:-1]).strip() == "a"
    same = shared("byte-level", "byte-level, other merges")
    for content in SPECIAL:
        index = ours.convert_tokens_to_ids(content)
        assert same.draft.special[same.to_draft[index]] == content
    composing = bpe(single=LETTERS)
    composing.normalizer = normalizers.NFC()
    draft = Spelling(tiny_text.tokenizer(composing))
    text = DraftText(SharedVocabulary(spelling_of("byte-level"), draft, {}, ""))
    for token in encoded("byte-level", "the cafe\u0301 in the hat and the cat"):
        text.read([token])
    assert spelled(draft, text.ids).decode().endswith("the hat and the cat")


@cache
def model(seed: int, name: str = "qwen2", vocab_size: int = VOCAB) -> nn.Module:
    shape = tiny_text.SHAPE if name == "qwen2" else {}
    return tiny.build(name, seed=seed, **shape | {"vocab_size": vocab_size})


def run(target: nn.Module, drafter: Any, **options: Any) -> list[sd.generation.Token]:
    prompt = options["tokenizer"].encode(PROMPT)
    return list(sd.speculate(target, prompt, drafter, **{"max_tokens": 24} | options))


@in_one_test("length", [4, "auto"])
@in_one_test(("target", "draft"), PAIRS)
def test_greedy_text_is_the_targets_own(target: str, draft: str, length: int | str) -> None:
    """Whatever the draft model's tokens are, and whatever caches the caller has for it."""
    options = {"tokenizer": tokenizer(target), "num_draft_tokens": length}
    expected = [t.token for t in run(model(0), None, **options)]
    small = model(1, vocab_size=len(tokenizer(draft)))
    caches = [*make_prompt_cache(model(0)), *make_prompt_cache(small)]
    drafter = sd.ModelDrafter(small, tokenizer(draft))
    tokens = run(model(0), drafter, prompt_cache=caches, **options)
    assert [t.token for t in tokens] == expected
    assert length == "auto" or tokens[-1].stats.drafted > 0


class Ascii(nn.Module):
    """A model of bytes that writes printable ASCII alone; ids [256] -> the bytes' characters."""

    def __init__(self, inner: nn.Module, characters: Sequence[str]) -> None:
        super().__init__()
        self.inner = inner
        self.mask = mx.array([0.0 if ord(c) < 127 else -100.0 for c in characters])

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return self.inner(ids, cache=cache) + self.mask


@cache
def twins() -> tuple[nn.Module, Any, nn.Module, Any]:
    """A model of bytes, and the same one with its vocabulary, and tokenizer, in another order."""
    shape = tiny_text.SHAPE | {"vocab_size": 256}
    target, draft = (tiny.build("qwen2", seed=0, **shape) for _ in range(2))
    weights = dict(tree_flatten(target.parameters()))
    for name, value in weights.items():
        if value.shape[0] == 256:
            weights[name] = value[mx.arange(255, -1, -1)]
    draft.load_weights(list(weights.items()))
    orders = (tiny_text.BYTES, LETTERS)
    ours, theirs = (tiny_text.tokenizer(bpe(merges=(), single=order)) for order in orders)
    return Ascii(target, orders[0]), ours, Ascii(draft, orders[1]), theirs


def test_the_target_itself_in_other_tokens_is_accepted_whole() -> None:
    """It writes the very text."""
    target, ours, draft, theirs = twins()
    options: dict[str, Any] = {"tokenizer": ours, "num_draft_tokens": 3, "max_tokens": 60}
    tokens = run(target, sd.ModelDrafter(draft, theirs), **options)
    stats = tokens[-1].stats
    assert stats.drafted > 30
    assert stats.accepted == stats.drafted


def begun(target: str, draft: str, name: str = "qwen2") -> Any:
    """A session, with the prompt observed."""
    drafter = sd.ModelDrafter(model(1, name), tokenizer(draft))
    context = sd.drafters.DraftContext(
        sampling=sd.Sampling(temp=1.0), vocab_size=VOCAB, tokenizer=tokenizer(target)
    )
    return drafter.begin(tokenizer(target).encode(PROMPT), context)


@in_one_test("name", ["qwen2", "mamba"])
def test_the_caches_hold_what_was_read(name: str) -> None:
    """After any verdict: what is said next is what a pass over all that was fed leads to."""
    session = begun("byte-level", "byte-level, other merges", name)
    said = encoded("byte-level", TEXT)
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


@FULL
@pytest.mark.parametrize("name", ["qwen2", "mamba"])
def test_the_contract_is_kept(name: str) -> None:
    """Drafts are point masses at any temperature, rejected ones leave nothing behind."""
    drafter = sd.ModelDrafter(model(1, name), tokenizer("bytes"))
    lines = check_drafter(
        drafter,
        vocab_size=VOCAB,
        tokenizer=tokenizer("byte-level"),
        prompts=[tokenizer("byte-level").encode(text) for text in ("the cat", "in the hat ")],
        num_draws=200 if name == "qwen2" else 40,
    )
    assert "point masses" in lines[4]
    assert not lines[0].startswith("protocol: 0 drafts")


@in_one_test("pair", PAIRS)
def test_an_end_token_that_is_ordinary_text_is_read_and_drafted_as_text(pair: Any) -> None:
    """A line break that ends a text, of the target, of the draft model, or the tokenizer's own end;
    the texts stay the target's.
    """
    for number in range(3):
        one, other = (TOKENIZERS[name]() for name in pair)
        ending = (one, other, one)[number]
        index = ending.encode("a\nb", add_special_tokens=False)[-2]
        if number < 2:
            ending.add_eos_token(index)
        else:
            ending._tokenizer.eos_token = "\n"
        assert Spelling(ending).spelled[index] == b"\n"
        drafter = sd.ModelDrafter(model(1), other)
        drafted = run(model(0), drafter, tokenizer=one, max_tokens=8, num_draft_tokens=3)
        plainly = run(model(0), None, tokenizer=one, max_tokens=8)
        assert [t.token for t in drafted] == [t.token for t in plainly]


@in_one_test(
    ("changes", "how", "words"),
    [(True, "any", r"'The quick .* comes back as 'the quick"), (False, "same", "has id")],
)
def test_a_tokenizer_is_refused(changes: bool, how: str, words: str) -> None:
    """That changes the text; or any other one, if asked. The error has the first difference."""
    other = bpe(single=LETTERS)
    other.normalizer = normalizers.Lowercase() if changes else None
    drafter = sd.ModelDrafter(model(1), tiny_text.tokenizer(other), tokenizers=how)
    with pytest.raises(sd.errors.TokenizerMismatchError, match=words):
        run(model(0), drafter, tokenizer=tokenizer("byte-level"))
    with pytest.raises(ValueError, match="expected one of"):
        sd.ModelDrafter(model(1), tokenizers="some")
