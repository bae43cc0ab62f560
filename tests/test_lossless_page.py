"""docs/lossless.md says what the enumeration says."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import generate_lossless as generator  # noqa: E402

from specdec_mlx.rules.registry import rule_names  # noqa: E402


def test_the_table_is_current():
    """What `python docs/generate_lossless.py` would write stands there already."""
    page = generator.PAGE.read_text(encoding="utf-8")
    assert generator.section(page, "enumerated") == generator.enumerated()
    assert len(generator.section(page, "draft-temp").splitlines()) == 2 + len(generator.DRAFT_TEMPS)


def test_right_and_wrong_are_told_apart_in_it():
    """Zero for the lossless rules alone, and every rule is there."""
    page = generator.PAGE.read_text(encoding="utf-8")
    for line in generator.section(page, "enumerated").splitlines()[2:]:
        name, *distances = [cell.strip() for cell in line.strip("|").split("|")][:4]
        is_exact = not name.startswith(("lossy: ", "wrong: "))
        assert all((cell == "< 1e-12") == is_exact for cell in distances), name
    assert all(f"`{name}`" in page or f'`"{name}"`' in page for name in rule_names())
