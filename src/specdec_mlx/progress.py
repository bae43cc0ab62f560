"""Progress bars for terminals and notebooks."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(*args: Any, disable: bool = False, **options: Any) -> Any:
    """A bar of `tqdm.auto`. It is silent where stderr is a file or a pipe."""
    from tqdm.asyncio import tqdm_asyncio  # tqdm.auto's where there is no notebook
    from tqdm.auto import tqdm

    unseen = tqdm is tqdm_asyncio and not sys.stderr.isatty()
    make: Any = tqdm
    return make(*args, disable=disable or unseen, **options)
