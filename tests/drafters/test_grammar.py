"""Structured output: the text keeps to its grammar, and what the grammar forces is drafted."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from test_commands import account, text_in

import specdec_mlx as sd
from command_line import run
from selection import in_one_test
from tiny_model_folder import write_model_folder

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal in the house": {"enum": ["the cat", "the other cat", "none"]},
        "hats": {"type": "integer", "minimum": 0, "maximum": 99},
        "asleep": {"type": "boolean"},
    },
    "required": ["animal in the house", "hats", "asleep"],
    "additionalProperties": False,
}
PATTERN = r"the (cat|dog) (sat|lay) in the (hat|house|other hat), and that was (all|not all)"
LARK = 'start: "one thing: " thing " and another thing: " thing\nthing: "hat" | "cat" | "in"'
PROMPT = "the cat in the hat and the other cat in the hat"

GRAMMARS = {
    "json": sd.drafters.Grammar.json_schema(SCHEMA),
    "regex": sd.drafters.Grammar.regex(PATTERN),
    "lark": sd.drafters.Grammar.lark(LARK),
}


def fits(kind: str, text: str) -> bool:
    """Whether a text keeps to its grammar, judged without the library that enforces it."""
    if kind == "json":
        found = json.loads(text)
        return (
            list(found) == SCHEMA["required"]
            and found["animal in the house"] in SCHEMA["properties"]["animal in the house"]["enum"]
            and 0 <= found["hats"] <= 99
            and isinstance(found["asleep"], bool)
        )
    thing = "(hat|cat|in)"
    pattern = PATTERN if kind == "regex" else f"one thing: {thing} and another thing: {thing}"
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return mlx_lm.load(str(write_model_folder(tmp_path_factory.mktemp("model"))))[:2]  # type: ignore[return-value]


def told(
    pair: tuple[Any, Any],
    kind: str,
    drafter: Any,
    processor: type[sd.drafters.GrammarProcessor] = sd.drafters.GrammarProcessor,
    **options: Any,
) -> tuple[str, sd.stats.SpeculationStats]:
    """A text that keeps to a grammar, up to its end token, and how it came about."""
    tokenizer = pair[1]
    options = {"max_tokens": 150, "num_draft_tokens": 6} | options
    processors = [processor(GRAMMARS[kind], tokenizer)]
    responses = list(
        sd.stream_generate(*pair, PROMPT, drafter=drafter, logits_processors=processors, **options)
    )
    assert responses[-1].finish_reason == "stop"
    return "".join(response.text for response in responses), responses[-1].stats


FORCED, LOOK_UP = sd.drafters.GrammarDrafter(), sd.PromptLookupDrafter(min_ngram=1)
DRAFTERS: dict[str, Any] = {
    "grammar": lambda model: FORCED,
    "grammar and look-up": lambda model: sd.drafters.FirstOf(FORCED, LOOK_UP),
    "grammar and model": lambda model: sd.drafters.FirstOf(FORCED, sd.ModelDrafter(model)),
    "look-up": lambda model: LOOK_UP,
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_text_keeps_to_the_grammar_and_is_plain_decodings(kind: str, pair: tuple[Any, Any]) -> None:
    """Greedy, with the same processor; mlx-lm's own loop writes it too."""
    model, tokenizer = pair
    processors = [sd.drafters.GrammarProcessor(GRAMMARS[kind], tokenizer)]
    prompt = mx.array(tokenizer.encode(PROMPT))
    steps = generate_step(prompt, model, max_tokens=150, logits_processors=processors)
    expected = takewhile(lambda token: token not in tokenizer.eos_token_ids, (t for t, _ in steps))
    text = tokenizer.decode(list(expected))
    assert fits(kind, text)
    assert told(pair, kind, None)[0] == text
    for name, make in DRAFTERS.items():
        ours, stats = told(pair, kind, make(model), num_draft_tokens=20)
        assert ours == text
        if name == "grammar":  # forced tokens are free, the end token among them
            assert stats.accepted == stats.drafted
            assert stats.target_passes < 0.5 * stats.emitted


@pytest.mark.full
@in_one_test("rule", ["auto", "coupled"])
def test_a_seed_has_one_text_with_the_drafter_and_without(rule: str, pair: tuple[Any, Any]) -> None:
    """Sampling: the noise is keyed by position and forced tokens are a point mass, so the law is
    that of plain decoding, draw by draw."""
    texts = set()
    for seed in range(3):
        options: Any = {"sampler": sd.Sampling(temp=1.0), "seed": seed, "rule": rule}
        plain, _ = told(pair, "json", None, **options)
        ours, stats = told(pair, "json", sd.drafters.GrammarDrafter(), **options)
        assert ours == plain
        assert fits("json", ours)
        assert stats.accepted == stats.drafted > 0
        texts.add(ours)
    assert len(texts) > 1


@in_one_test("kind", GRAMMARS)
def test_the_mask_is_that_of_a_fresh_matcher(kind: str, pair: tuple[Any, Any]) -> None:
    """At every position, in any order, whatever was shown in between; a forced token is the only
    one that it leaves.
    """
    model, tokenizer = pair
    prompt, tokens = [3, 1, 4], [*tokenizer.encode(told(pair, kind, None)[0])]
    tokens.append(tokenizer.eos_token_id)
    zeros = mx.zeros((1, model.args.vocab_size))

    def fresh() -> sd.drafters.GrammarProcessor:
        return sd.drafters.GrammarProcessor(GRAMMARS[kind], tokenizer, len(prompt))

    def allowed(processor: sd.drafters.GrammarProcessor, text: list[int]) -> list[bool]:
        shown = mx.array([*prompt, *text])
        return mx.isfinite(processor(shown, zeros))[0].tolist()  # type: ignore[no-any-return]

    one, place, num_forced = fresh(), fresh().beginning(), 0
    for length in np.random.default_rng(3).permutation(len(tokens)).tolist():
        text = tokens[:length]
        allowed(one, [*text, 0, 5])  # tokens that no grammar here allows: to be rejected
        now = allowed(one, text)
        assert now == allowed(fresh(), text)
        assert now[tokens[length]]
        place.go_to(text)
        forced = place.forced()
        num_forced += bool(forced)
        for i, token in enumerate(forced):
            assert np.flatnonzero(allowed(one, [*text, *forced[:i]])).tolist() == [token]
    assert num_forced > len(tokens) / 2


@in_one_test(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": "nothing"}'),
        ("regex", "(a"),
        ("lark", "begin: 3"),
    ],
)
def test_a_wrong_grammar_is_refused_at_once(kind: Any, text: str) -> None:
    """When it is made, not at the first token."""
    with pytest.raises(sd.errors.GrammarError):
        sd.drafters.Grammar(kind, text)


def test_what_cannot_be_followed_is_told(pair: tuple[Any, Any]) -> None:
    """A drafter without a grammar, at once; the matcher's own errors; and a mask that leaves no
    token to draw, which is an error and not a random token.
    """
    with pytest.raises(sd.errors.GrammarError, match=r"logits_processors=\[GrammarProcessor"):
        sd.stream_generate(*pair, PROMPT, drafter=sd.drafters.GrammarDrafter())
    place = sd.drafters.GrammarProcessor(GRAMMARS["regex"], pair[1]).beginning()
    place.matcher.rollback(5)  # more than there is
    with pytest.raises(sd.errors.GrammarError):
        place.go_to([1])

    class Nothing(sd.drafters.GrammarProcessor):
        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            return super().__call__(tokens, logits) - mx.inf

    with pytest.raises(sd.errors.LogitsError):
        told(pair, "regex", sd.drafters.GrammarDrafter(), Nothing)


def test_the_commands_take_a_grammar(tmp_path: Path) -> None:
    """Each flag by its effect; in a chat each answer keeps to it, on caches of earlier ones too."""
    folder = write_model_folder(tmp_path / "model")
    files = {"json": tmp_path / "schema.json", "lark": tmp_path / "rules.lark"}
    files["json"].write_text(json.dumps(SCHEMA))
    files["lark"].write_text(LARK)
    given = {"json": ("--json-schema", files["json"]), "regex": ("--regex", PATTERN)}
    given["lark"] = ("--lark", files["lark"])

    def said(name: str, *arguments: str | Path, stdin: str = "") -> str:
        done = run(name, "--model", folder, "--max-tokens", "150", *arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for kind, flags in given.items():
        for drafter in ((), ("--drafter", "none")):
            out = said("generate", "--prompt", "a cat", *flags, "--num-draft-tokens", "8", *drafter)
            assert fits(kind, text_in(out).strip())
            assert "Speculation: none" in out if drafter else account(out)[0] > 2
    out = said("chat", *given["regex"], stdin="the cat\nand the hat\nq\n")
    assert len(re.findall(PATTERN, out)) == 2
    wrong = run("generate", "--model", folder, "--prompt", "a", "--regex", "(a")
    assert wrong.returncode == 2
    assert "regex" in wrong.stderr
    assert "Traceback" not in wrong.stderr
