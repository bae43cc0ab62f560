"""What notebooks show: complete, escaped, and legible without styles."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import starmap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec_mlx as sd
import tiny
import tiny_text
from scripted import OracleDrafter
from selection import in_one_test
from specdec_mlx.contracts import RoundRecord
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.replay import score_record
from specdec_mlx.lab.bench.run import bench_texts
from specdec_mlx.lab.bench.summary import Result
from specdec_mlx.lab.bench.timing import Settings
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.views.html import LOOKS, Piece, text_html

EVIL = "</pre><script>alert('&\"')</script>"


class Checker(HTMLParser):
    """Collects text and tags; every tag must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag != "br" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def a_round(drafted: int, accepted: int, seconds: float = 0.0, steady: bool = True) -> RoundRecord:
    return RoundRecord(drafted, accepted, accepted + 1, drafted + 1, seconds=seconds, steady=steady)


def account(*records: RoundRecord) -> SpeculationStats:
    stats = SpeculationStats()
    for record in records:
        stats.record(record)
    return stats


def stats_of(*rounds: tuple[int, int]) -> SpeculationStats:
    """The account of rounds (drafted, accepted)."""
    return account(*starmap(a_round, rounds))


@pytest.fixture(scope="module")
def text() -> sd.generation.Text:
    """A generation of an oracle that errs, with every origin in it."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    plain = sd.generate(model, tokenizer, [1, 2, 3], drafter=None, max_tokens=40)
    options: dict[str, Any] = {"max_tokens": 40, "num_draft_tokens": 5}
    drafter = OracleDrafter(plain.tokens, 32, wrong=0.4)
    text = sd.generate(model, tokenizer, [1, 2, 3], drafter=drafter, **options)
    assert text == plain
    assert (plain.drafter, text.tokens) == ("", plain.tokens)
    return text


def test_a_generated_text_is_a_str_that_knows_its_tokens(text: sd.generation.Text):
    """Its pieces joined; JSON, slices and sums are those of a str."""
    assert isinstance(text, str)
    assert text == "".join(piece.text for piece in text.pieces)
    assert len(text.tokens) == text.stats.emitted == 40
    assert json.loads(json.dumps({"text": text})) == {"text": str(text)}
    assert type(text + "!") is type(text[:3]) is str
    assert text.drafter == "OracleDrafter"


def test_every_token_is_shown_with_its_origin(text: sd.generation.Text):
    """One element a token, of the origin's own kind, whose title names the drafter; a legend."""
    page = Checker(text._repr_html_())
    titles = [attrs.get("title") or "" for _, attrs in page.tags]
    titles = [title for title in titles if "token " in title]
    assert len(titles) == 40
    for piece, title in zip(text.pieces, titles, strict=True):
        assert title.startswith(LOOKS[piece.origin].label)
        assert title.endswith(f"token {piece.token}")
        assert ("by OracleDrafter" in title) == (piece.origin == "draft")
    assert {piece.origin for piece in text.pieces} >= {"draft", "correction", "bonus"}
    assert len({look.tag for look in LOOKS.values()}) == len(LOOKS)
    assert "40 tokens in" in page.text
    for origin, look in LOOKS.items():
        count = sum(piece.origin == origin for piece in text.pieces)
        counted = f"{count} token{'s' if count > 1 else ''}"
        assert (f"{look.label}, {counted}: {look.meaning}" in page.text) == (count > 0)
    plain = text_html([Piece("a", 1, "plain")], stats_of((0, 0)))
    assert "plain, 1 token: no draft was there" in Checker(plain).text


def test_code_is_shown_as_it_is_and_nothing_of_a_text_is_html(text: sd.generation.Text):
    """Monospaced, every space and underscore kept, nothing drawn beneath; escaped, on hover too.

    No style sheet, no script, no fixed colour of text: the theme's colours are left alone.
    """
    code = "def _area(r):\n    return r_2\n\tpass  # __\n"
    html = text_html([Piece(code, 1, origin) for origin in LOOKS], stats_of((2, 1)))
    page = Checker(html)
    assert page.text.startswith(code * len(LOOKS))
    (pre,) = [attrs["style"] or "" for tag, attrs in page.tags if tag == "pre"]
    assert "monospace" in pre
    assert "white-space:pre-wrap" in pre
    assert {"u", "ins", "a"}.isdisjoint(tag for tag, _ in page.tags)
    assert not re.search(r"underline|text-decoration|border-bottom|box-shadow", html)
    page = Checker(text_html([Piece(EVIL, 1, "draft")], stats_of((1, 1)), drafter=EVIL))
    assert EVIL in page.text
    assert "script" not in [tag for tag, _ in page.tags]
    assert EVIL in (page.tags[1][1]["title"] or "")
    for html in (text._repr_html_(), text.stats._repr_html_()):
        assert not re.search(r"<style|<script|onclick|javascript|background:#", html)
        assert set(re.findall(r"(?<!-)\bcolor:([^;\"]+)", html)) <= {"inherit"}


def test_stats_show_every_count():
    """Totals, each of the first positions, ranges of later ones, and the histogram."""
    stats = stats_of(*[(0, 0)] * 3, (4, 2), (4, 4), (2, 0))
    long = Checker(stats_of((4, 4), (11, 6))._repr_html_()).text
    assert "5 to 8: 50% \xa0 (2 of 4)" in long
    assert "9 to 11: 0% \xa0 (0 of 3)" in long
    page = Checker(stats._repr_html_())
    shown = ["12 in 6 target passes", "2.00", "6 of 10 drafted (60%)"]
    shown += ["0: 1, 2: 1, 4: 1; plain: 3"]
    for i, (accepted, drafted) in enumerate([(2, 3), (2, 3), (1, 2), (1, 2)], start=1):
        shown.append(f"{i}: {accepted / drafted:.0%} \xa0 ({accepted} of {drafted})")
    assert [words for words in shown if words not in page.text] == []


def totals(record: Record) -> list[Result]:
    return [r for r in record.results if r.category == "all"]


@pytest.mark.full
def test_a_benchmark_of_texts_from_python():
    """Kinds of text become categories; the draft model takes part, and mlx-lm's own with it."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    texts = {"code & <b>": ["a b a b"], "words": ["the one", "the other"]}
    options: dict[str, Any] = {"settings": Settings(max_tokens=12), "progress": False}
    call = (model, tokenizer, texts)
    record = bench_texts(*call, ["ngram", "model"], ["2"], draft_model=model, **options)
    assert record.categories == [*texts]
    named = [r.drafter for r in totals(record)]
    assert named == ["mlx-lm", "mlx-lm-speculation", "ngram", "model"]
    assert all(r.identical == r.texts == 3 for r in totals(record))
    assert "RecordedText" not in repr(record)
    assert "drafterKratio" in Checker(record._repr_html_()).text
    scores = score_record(record, {"ngram": sd.NGramDrafter()}, ["2"], linear_cost(0.1))
    assert "code & <b>" in Checker(scores._repr_html_()).text
    options |= {"rules": ["rejection", "block"], "temp": 1.0, "draft_model": model}
    record = bench_texts(*call, ["model"], ["2"], **options)
    assert [r.rule for r in totals(record)] == ["", "", "rejection", "block"]
    assert record.settings.temp == 1.0
    assert "drafterKruleratio" in Checker(record._repr_html_()).text


# The account of a generation, from records with known numbers -------------------------------------


def test_the_observed_speedup_is_tokens_over_their_time_in_plain_rounds():
    """The first round waits for the prompt, and a change of mode is no yardstick."""
    changing = a_round(0, 0, 5.0, steady=False)
    rounds = [a_round(0, 0, 99.0), a_round(0, 0, 1.0), changing]
    stats = account(*rounds, a_round(4, 3, 1.5), a_round(4, 0, 1.5))
    assert stats.observed_speedup == pytest.approx((1 + 1 + 4 + 1) / (1.0 + 5.0 + 1.5 + 1.5))
    for unknown in (account(a_round(0, 0, 1.0), a_round(4, 4, 1.0)), account(*rounds), account()):
        assert unknown.observed_speedup is unknown.expected_speedup is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(0, 9))
def test_all_counts_follow_from_the_rounds(pairs, too_many):
    """Emitted: one more a pass than were accepted, less what is beyond max_tokens in the last.

    The account is JSON, with the paper's rate and the share of all drafted.
    """
    rounds = [(max(pair), min(pair)) for pair in pairs]
    records = [a_round(*pair, 1.0) for pair in rounds]
    if records:
        cut = min(too_many, records[-1].accepted)
        records[-1] = replace(records[-1], emitted=records[-1].emitted - cut)
    stats = account(*records)
    assert stats.emitted == sum(record.emitted for record in records)
    assert stats.emitted + stats.cut == stats.accepted + stats.target_passes
    assert [row["emitted"] for row in stats.rows()] == [record.emitted for record in records]
    for index, name in enumerate(("drafted", "accepted")):
        assert sum(row[name] for row in stats.rows()) == getattr(stats, name)
        by_position = getattr(stats, f"{name}_at")
        assert by_position == [sum(r[index] > i for r in rounds) for i in range(len(by_position))]
    shares = [a / d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True)]
    assert stats.acceptance_by_position == shares
    said = json.loads(json.dumps(stats.as_dict()))
    judged = sum(accepted + (accepted < drafted) for drafted, accepted in rounds)
    for name, trials in (("acceptance_rate", judged), ("accepted_share", stats.drafted)):
        assert said[name] == getattr(stats, name)
        assert said[name] == pytest.approx(stats.accepted / trials if trials else 0)


@in_one_test(
    ("name", "drafter", "options", "words"),
    [
        ("qwen2", None, {}, "drafter=None"),
        ("qwen2", sd.NGramDrafter(), {"num_draft_tokens": 0}, "not worth it at these costs"),
        ("qwen2", sd.PromptLookupDrafter(8, 8), {}, "the drafter found nothing to propose"),
        ("phi3small", sd.NGramDrafter(), {}, "this model is not exact for several positions"),
    ],
)
@pytest.mark.filterwarnings("ignore:specdec_mlx. this model")
def test_the_account_says_why_nothing_was_drafted(name, drafter, options, words):
    *_, last = sd.speculate(tiny.build(name), [5, 6, 5, 6], drafter, max_tokens=8, **options)
    assert last.stats.drafted == 0
    assert str(last.stats).endswith(f"nothing drafted: {words}")
