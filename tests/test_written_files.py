"""Files that version 0.1.0 wrote before its records were typed are read as they are."""

from __future__ import annotations

from pathlib import Path

from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.lab.bench.record import load_record
from specdec_mlx.lab.bench.replay import score_record
from specdec_mlx.lab.papers.ngram_table import NGramTable
from specdec_mlx.memory import Memory

WRITTEN = Path(__file__).parent / "fixtures" / "written"


def test_a_memory_is_read() -> None:
    memory = Memory.load(WRITTEN / "memory.sdm")
    assert [list(text) for text in memory.texts()] == [[1, 2, 3, 4, 5], [7, 8, 9, 1, 2, 3]]
    assert (memory.tokenizer, memory.max_tokens) == ("0123456789abcdef", 1000)
    assert memory.remember_prompts
    assert memory.sources == {"/home/a/b.py": ("12:34", "00ff")}


def test_a_table_of_ngrams_is_read() -> None:
    table = NGramTable.load(WRITTEN / "table.sdm")
    assert (table.max_order, table.min_order, table.max_entries) == (4, 2, 1_000_000)
    assert table.counts()[1, 2] == 2


def test_a_tuning_is_read() -> None:
    tuning = Tuning.load(WRITTEN / "tuning.json")
    assert len(tuning.drafters) == 2
    (drafts, look_ups) = tuning.drafters.values()
    assert drafts.chances.weights[0] == [0.2733250430801383, 0.053107910891312234]
    assert drafts.steps.first
    assert not look_ups.steps.first
    assert tuning.cost_model().ratios[4][0] == 1.954265414503188


def test_a_benchmark_is_read_and_replayed() -> None:
    """Its samples too, which then had no tokens."""
    record = load_record(WRITTEN / "benchmark.json")
    assert [text.id for text in record.texts] == ["a0", "b1"]
    assert {len(text.generated) for text in record.texts} == {12}
    assert record.live_ratio("model", "auto", "all") == 0.8278771259833537
    assert record.settings.vocab_size == 257
    assert record.cost is not None
    assert record.cost(64) == record.cost.seconds[-1]
    assert {sample.num_tokens for sample in record.samples} == {12}
    scored = score_record(record, {"prompt-lookup": PromptLookupDrafter()}, ["4"], record.cost)
    assert [r.category for r in scored.results] == ["a", "b", "all"]
