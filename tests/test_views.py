"""What notebooks show: complete, escaped, and legible without styles."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

import specdec_mlx as sd
import tiny_text
from scripted import OracleDrafter
from specdec_mlx.bench.cost import linear_cost
from specdec_mlx.bench.record import Record, RecordedText
from specdec_mlx.bench.replay import Scores, score_record
from specdec_mlx.bench.run import bench_texts
from specdec_mlx.bench.timing import Settings
from specdec_mlx.contracts import RoundRecord
from specdec_mlx.notebook.views import LOOKS, Piece, text_html
from test_plots import result

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
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def stats_of(*rounds: tuple[int, int]) -> sd.stats.SpeculationStats:
    """The account of rounds (drafted, accepted)."""
    stats = sd.stats.SpeculationStats()
    for drafted, accepted in rounds:
        stats.record(RoundRecord(drafted, accepted, accepted + 1, drafted + 1))
    return stats


@pytest.fixture(scope="module")
def text() -> sd.responses.Text:
    """A generation of an oracle that errs, with every origin in it."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    plain = sd.generate(model, tokenizer, [1, 2, 3], max_tokens=40)
    drafter = OracleDrafter(plain.tokens, 32, wrong=0.4)
    return sd.generate(
        model, tokenizer, [1, 2, 3], max_tokens=40, drafter=drafter, draft_length="heuristic"
    )


def test_a_generated_text_is_a_str_that_knows_its_tokens(text: sd.responses.Text):
    """Equal to the plain text, its pieces joined; JSON, slices and sums are those of a str."""
    plain = sd.generate(
        tiny_text.model(), tiny_text.tokenizer(), [1, 2, 3], max_tokens=40, drafter=None
    )
    assert isinstance(text, str)
    assert text == plain == "".join(piece.text for piece in text.pieces)
    assert text.tokens == plain.tokens
    assert len(text.tokens) == text.stats.emitted == 40
    assert json.loads(json.dumps({"text": text})) == {"text": str(plain)}
    assert type(text + "!") is type(text[:3]) is str
    assert (text.drafter, plain.drafter) == ("OracleDrafter", "")


def test_every_token_is_shown_with_its_origin(text: sd.responses.Text):
    """One element a token, of the origin's own kind, whose title names the drafter; a legend."""
    page = Checker(text._repr_html_())
    tokens = [attrs for tag, attrs in page.tags if "token " in (attrs.get("title") or "")]
    assert len(tokens) == 40
    for piece, attrs in zip(text.pieces, tokens, strict=True):
        title = attrs["title"] or ""
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


def test_code_is_shown_as_it_is():
    """Monospaced, every space and underscore kept, and nothing drawn beneath any of them."""
    code = "def _area(r):\n    return r_2\n\tpass  # __\n"
    pieces = [Piece(code, 1, origin) for origin in LOOKS]
    html = text_html(pieces, stats_of((2, 1)))
    page = Checker(html)
    assert page.text.startswith(code * len(LOOKS))
    (pre,) = [attrs["style"] or "" for tag, attrs in page.tags if tag == "pre"]
    assert "monospace" in pre
    assert "white-space:pre-wrap" in pre
    assert {"u", "ins", "a"}.isdisjoint(tag for tag, _ in page.tags)
    assert not re.search(r"underline|text-decoration|border-bottom|box-shadow", html)


def test_text_is_escaped_and_leaves_the_themes_colours_alone(text: sd.responses.Text):
    """In the text and on hover; no style sheet, no script, no fixed colour of text."""
    html = text_html([Piece(EVIL, 1, "draft")], stats_of((1, 1)), drafter=EVIL)
    page = Checker(html)
    assert EVIL in page.text
    assert "script" not in [tag for tag, _ in page.tags]
    assert EVIL in (page.tags[1][1]["title"] or "")
    for html in (text._repr_html_(), text.stats._repr_html_()):
        assert not re.search(r"<style|<script|onclick|javascript", html)
        assert set(re.findall(r"(?<!-)\bcolor:([^;\"]+)", html)) <= {"inherit"}
        assert not re.search(r"background:#", html)


def test_stats_show_every_count():
    """Totals, each position, the histogram without the plain rounds, and which rounds drafted."""
    stats = stats_of(*[(0, 0)] * 3, (4, 2), (4, 4), (2, 0))
    page = Checker(stats._repr_html_())
    for shown in ("12 in 6 target passes", "2.00", "6 of 10 drafted (60%)"):
        assert shown in page.text
    for i, (accepted, drafted) in enumerate([(2, 3), (2, 3), (1, 2), (1, 2)], start=1):
        assert f"{i}: {accepted / drafted:.0%} \xa0 ({accepted} of {drafted})" in page.text
    assert "0: 1, 1: 0, 2: 1, 3: 0, 4: 1; plain: 3" in page.text
    assert "···━━━" in page.text


def bench(drafters: list[str], **options: Any) -> Record:
    """A benchmark of a few texts of the tiny model, which is its own draft model."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()
    texts = {"letters": ["a b a b"], "words": ["the one", "the other"]}
    options |= {"draft_model": model, "settings": Settings(max_tokens=12), "progress": False}
    return bench_texts(model, tokenizer, texts, drafters, ["2"], **options)


def test_a_benchmark_of_texts_from_python():
    """Kinds of text become categories; the draft model takes part, and mlx-lm's own with it."""
    record = bench(["ngram", "model"])
    assert record.categories == ["letters", "words"]
    everything = [r for r in record.results if r.category == "all"]
    assert [r.drafter for r in everything] == ["mlx-lm", "mlx-lm-speculation", "ngram", "model"]
    assert all(r.identical == r.texts == 3 for r in everything)
    assert "letters" in Checker(record._repr_html_()).text
    assert "drafterKratio" in Checker(record._repr_html_()).text
    assert "RecordedText" not in repr(record)
    record = bench(["model"], rules=["rejection", "block"], temp=1.0)
    everything = [r for r in record.results if r.category == "all"]
    assert [r.rule for r in everything] == ["", "", "rejection", "block"]
    assert all(r.identical is None for r in everything), "texts at temperature 1 are not compared"
    assert record.settings["temp"] == 1.0
    assert "drafterKruleratio" in Checker(record._repr_html_()).text


def test_bench_and_replay_are_tables():
    """A row for each result; a column for each category."""
    recorded = RecordedText("a", "code & <b>", [1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2, 3])
    results = [result("mlx-lm", "", "all", 1.0), result("ngram", "4", "all", 1.5)]
    record = Record(
        "specdec-mlx bench",
        {"device": "<gpu>"},
        {"vocab_size": 8, "max_tokens": 7},
        [recorded],
        results=results,
    )
    page = Checker(record._repr_html_())
    assert [tag for tag, _ in page.tags].count("tr") == 3
    assert "1.50" in page.text
    assert "<gpu>" in page.text
    scores = score_record(
        record, {"prompt-lookup": sd.PromptLookupDrafter(min_ngram=1)}, ["2"], linear_cost(0.1)
    )
    assert isinstance(scores, Scores)
    page = Checker(scores._repr_html_())
    assert "code & <b>" in page.text
