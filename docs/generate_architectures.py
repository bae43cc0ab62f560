"""Write the table of architectures.md from what the tests measure, in about three minutes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tqdm import tqdm  # noqa: E402

import tiny  # noqa: E402
from lossless import Case, page  # noqa: E402

if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    rows = [Case(name).row for name in tqdm(tiny.architecture_files())]
    path = ROOT / "docs" / "architectures.md"
    path.write_text(page(path.read_text(), rows))
