"""What the site needs beyond Markdown."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](?P<latex>.+?)\\[)\]]</\1>', re.S)
NAME_BEFORE_BRACKET = re.compile(r'<mo>([a-z]+)</mo>(?=<mo stretchy="false">&#x00028;)')
"""An operator is drawn with room around it, which max(x) must not have."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Send links to files outside docs/ to the repository; put the contributing guide in place.

    So every page reads the same on the site and in the repository.
    """
    files_at = f"{config.repo_url}/blob/main"
    if page.file.src_path == "contributing.md":
        text = GUIDE.read_text(encoding="utf-8").replace("](docs/", "](")
        return re.sub(r"\]\(((?:src|tests|notebooks)/[^)\s]+)\)", rf"]({files_at}/\1)", text)
    return re.sub(r"\]\(\.\./([^)\s]+)\)", rf"]({files_at}/\1)", markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Write formulas as MathML, which browsers draw themselves: no script, nothing to fetch."""
    return FORMULA.sub(lambda match: mathml(match["latex"], match[1] == "div"), content)


def mathml(latex: str, on_its_own_line: bool) -> str:
    """A formula for the browser. latex: as arithmatex leaves it, with HTML's escapes."""
    drawn = convert(html.unescape(latex), display="block" if on_its_own_line else "inline")
    return NAME_BEFORE_BRACKET.sub(r"<mi>\1</mi>", drawn)
