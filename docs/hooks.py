"""What the site needs beyond Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Send links to files outside docs/ to the repository; put the contributing guide in place.

    So every page reads the same on the site and in the repository.
    """
    files_at = f"{config.repo_url}/blob/main"
    if page.file.src_path == "contributing.md":
        text = GUIDE.read_text(encoding="utf-8").replace("](docs/", "](")
        return re.sub(r"\]\(((?:src|tests|notebooks)/[^)\s]+)\)", rf"]({files_at}/\1)", text)
    return re.sub(r"\]\(\.\./([^)\s]+)\)", rf"]({files_at}/\1)", markdown)
