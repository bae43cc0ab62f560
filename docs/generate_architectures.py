"""Write the tables of architectures.md from what the tests measure, in about five minutes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tqdm import tqdm  # noqa: E402

import tiny  # noqa: E402
from lossless import Case, in_16_bits, page  # noqa: E402

if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    names = tiny.architecture_files()
    rows = [Case(name).row for name in tqdm(names)]
    halves = [in_16_bits(name) for name in tqdm(names) if name not in tiny.CANNOT_RUN]
    path = ROOT / "docs" / "architectures.md"
    path.write_text(page(path.read_text(encoding="utf-8"), rows, halves), encoding="utf-8")
