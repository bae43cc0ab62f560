"""Files that version 0.1.0 wrote before its records were typed are read as they are."""

from __future__ import annotations

from pathlib import Path

from specdec_mlx.draft_length.store import Tuning
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
