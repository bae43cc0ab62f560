"""Memories on the Hugging Face Hub: a file and a card that says whose token ids they are."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

from specdec_mlx.errors import MemoryFileError
from specdec_mlx.memory.store import Memory

FILE_NAME = "memory.specdec"
REPO_TYPE = "dataset"

CARD = """\
---
license: {licence}
tags:
- specdec-mlx-memory
---

# A memory for speculative decoding

Texts as token ids, to draft from with [specdec-mlx](https://github.com/specdec-mlx/specdec-mlx).
Whoever has this file can read the texts.

| | |
|---|---|
| tokenizer's fingerprint | `{tokenizer}` |
| source | {source} |
| licence | {licence} |
| texts | {texts} |
| tokens | {tokens} |
| bytes | {size} |

```
specdec-mlx memory pull {repo} FILE --tokenizer MODEL
specdec-mlx generate --model MODEL --memory FILE
```
"""

LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def push(
    memory: Memory,
    repo: str,
    *,
    source: str,
    licence: str,
    private: bool = True,
    endpoint: str | None = None,
    token: str | None = None,
) -> str:
    """Put a memory on the Hub, as a dataset, and a card beside it.

    The names of files that it was built from stay here.

    Args:
        memory: with a tokenizer.
        repo: OWNER/NAME, made if there is none.
        source: where its texts are from, in words.
        licence: as the Hub names it, such as "mit" or "other".
        private: whether only the owner may read a repository that is made.
        endpoint: of the Hub; None: `HF_ENDPOINT`, or the public one.
        token: of the Hub; None: the one that is logged in.

    Returns:
        The address of the commit.

    Raises:
        ValueError: the memory says no tokenizer, there is no source, or the licence is no name.
        MemoryFileError: the repository holds another tokenizer's memory.
        OSError: the Hub cannot be reached, or refuses.
    """
    if memory.tokenizer is None or not source.strip() or not LICENCE.fullmatch(licence):
        raise ValueError(
            f"A memory is pushed with its tokenizer, source and licence; got {memory.tokenizer!r}, "
            f"{source!r} and {licence!r}. Build it with --tokenizer, and give --source and "
            "--licence (mit, apache-2.0, other)."
        )
    api = HfApi(endpoint=endpoint, token=token)
    api.create_repo(repo, repo_type=REPO_TYPE, private=private, exist_ok=True)
    if api.file_exists(repo, FILE_NAME, repo_type=REPO_TYPE):
        _refuse_another(_fetched(repo, endpoint, token), memory.tokenizer, repo)
    with tempfile.TemporaryDirectory() as folder:
        size = memory.export(Path(folder, FILE_NAME))
        card = CARD.format(
            repo=repo,
            licence=licence,
            source=" ".join(source.split()).replace("|", "\\|"),
            tokenizer=memory.tokenizer,
            texts=len(memory.texts()),
            tokens=len(memory),
            size=size,
        )
        Path(folder, "README.md").write_text(card, encoding="utf-8")
        done = api.upload_folder(
            repo_id=repo, repo_type=REPO_TYPE, folder_path=folder, commit_message="Memory"
        )
    return str(done.commit_url)


def pull(
    repo: str,
    path: Path | str,
    tokenizer: Any,
    *,
    endpoint: str | None = None,
    token: str | None = None,
) -> Memory:
    """A memory of the Hub, put into a file here: a new one, or merged with what stands there.

    Args:
        repo: OWNER/NAME.
        path: of the file.
        tokenizer: of the model that is to be drafted for.
        endpoint: of the Hub; None: `HF_ENDPOINT`, or the public one.
        token: of the Hub; None: the one that is logged in.

    Raises:
        MemoryFileError: it is another tokenizer's memory, or none.
        OSError: the Hub cannot be reached, or has no such repository.
    """
    memory = _fetched(repo, endpoint, token)
    _refuse_another(memory, Memory(tokenizer=tokenizer).tokenizer, repo)
    memory.save(path)
    return memory


def _fetched(repo: str, endpoint: str | None, token: str | None) -> Memory:
    """The memory of a repository, of which no copy stays on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        found = hf_hub_download(
            repo, FILE_NAME, repo_type=REPO_TYPE, local_dir=folder, endpoint=endpoint, token=token
        )
        return Memory.load(found)


def _refuse_another(memory: Memory, tokenizer: str | None, repo: str) -> None:
    """Raise MemoryFileError for a memory of another tokenizer."""
    if memory.tokenizer != tokenizer:
        raise MemoryFileError(
            f"{repo} holds the memory of tokenizer {memory.tokenizer}, expected {tokenizer}: token "
            "ids mean something else there. Take one that was made with your model's tokenizer."
        )
