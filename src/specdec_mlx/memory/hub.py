"""Memories and tables on the Hugging Face Hub: a file and a card."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi

from specdec_mlx.errors import MemoryFileError
from specdec_mlx.memory.kept import Kept, fingerprint_of

FILE_NAMES = {"texts": "memory.specdec", "n-grams": "ngrams.specdec"}  # one in a repository

REPO_TYPE = "dataset"

CARD = """\
---
license: {licence}
tags:
- specdec-mlx-{what}
---

# A {what} for speculative decoding

{content}, to draft from with [specdec-mlx](https://github.com/specdec-mlx/specdec-mlx).
Whoever has this file can read {readable}.

| | |
|---|---|
| tokenizer's fingerprint | `{tokenizer}` |
| source | {source} |
| licence | {licence} |
{facts}
| bytes | {size} |

```
specdec-mlx memory pull {repo} FILE --tokenizer MODEL
specdec-mlx generate --model MODEL {option}
```
"""

WORDS = {
    "texts": ("Texts as token ids", "the texts", "--memory FILE"),
    "n-grams": (
        *("Counts of which token followed which few", "those few words at a time"),
        "--drafter ngram:table=FILE",
    ),
}
"""By kind, of a card: its content, what can be read in it, and the option that takes it."""

LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")

K = TypeVar("K", bound=Kept)


def push(
    kept: Kept,
    repo: str,
    *,
    source: str,
    licence: str,
    private: bool = True,
    endpoint: str | None = None,
    token: str | None = None,
) -> str:
    """Put a memory or a table and its card on the Hub, without the names of files it was built of.

    repo: OWNER/NAME of a dataset, made if there is none; private: for its owner alone. source: of
    its texts, in words. licence: as the Hub names it, such as "mit" or "other". endpoint, token:
    None for those of the environment. Returns the address of the commit. Raises ValueError for no
    tokenizer, no source, or no licence's name, MemoryFileError if the repository holds another
    tokenizer's or something else, OSError if the Hub cannot be reached, or refuses.
    """
    if kept.tokenizer is None or not source.strip() or not LICENCE.fullmatch(licence):
        raise ValueError(
            f"A {kept.what} is pushed with its tokenizer, source and licence; got "
            f"{kept.tokenizer!r}, {source!r} and {licence!r}. Build it with --tokenizer, and give "
            "--source and --licence (mit, apache-2.0, other)."
        )
    api = HfApi(endpoint=endpoint, token=token)
    api.create_repo(repo, repo_type=REPO_TYPE, private=private, exist_ok=True)
    found = _kind_in(api, repo)
    if found == kept.kind:
        _fetched(api, repo, type(kept), kept.tokenizer)
    elif found is not None:
        raise MemoryFileError(
            f"{repo} holds {found!r}, and is to hold {kept.kind!r}: it was left as it is. Push to "
            "another repository."
        )
    with tempfile.TemporaryDirectory() as folder:
        size = kept.export(Path(folder, FILE_NAMES[kept.kind]))
        words = dict(zip(("content", "readable", "option"), WORDS[kept.kind], strict=True))
        words |= {"repo": repo, "licence": licence, "what": kept.what, "tokenizer": kept.tokenizer}
        words["source"] = " ".join(source.split()).replace("|", "\\|")
        words["facts"] = "\n".join(f"| {name} | {value} |" for name, value in kept.facts().items())
        card = CARD.format(size=size, **words)
        Path(folder, "README.md").write_text(card, encoding="utf-8")
        done = api.upload_folder(
            repo_id=repo,
            repo_type=REPO_TYPE,
            folder_path=folder,
            allow_patterns=["README.md", FILE_NAMES[kept.kind]],  # not the lock
            commit_message=kept.what.capitalize(),
        )
    return str(done.commit_url)


def pull(
    repo: str,
    path: Path | str,
    tokenizer: Any,
    kinds: Sequence[type[K]],
    *,
    endpoint: str | None = None,
    token: str | None = None,
) -> K:
    """Put a memory or a table of the Hub into a file here, new or merged with what stands there.

    kinds: classes that it may be of. Raises MemoryFileError for another tokenizer's or none of
    these, OSError if the Hub cannot be reached, or has no such repository.
    """
    api = HfApi(endpoint=endpoint, token=token)
    found = _kind_in(api, repo)
    kind = next((kind for kind in kinds if kind.kind == found), None)
    if kind is None:
        raise MemoryFileError(
            f"{repo} holds {found or 'nothing to draft from'!r}, expected "
            f"{' or '.join(repr(kind.kind) for kind in kinds)}. Name a repository that was made "
            "with specdec-mlx memory push."
        )
    kept = _fetched(api, repo, kind, fingerprint_of(tokenizer))
    kept.save(path)
    return kept


def _kind_in(api: HfApi, repo: str) -> str | None:
    there = (api.file_exists(repo, name, repo_type=REPO_TYPE) for name in FILE_NAMES.values())
    return next((kind for kind, is_there in zip(FILE_NAMES, there, strict=True) if is_there), None)


def _fetched(api: HfApi, repo: str, kind: type[K], tokenizer: str | None) -> K:
    """The content of a repository; MemoryFileError for another tokenizer's."""
    name = FILE_NAMES[kind.kind]
    with tempfile.TemporaryDirectory() as folder:
        found = api.hf_hub_download(repo, name, repo_type=REPO_TYPE, local_dir=folder)
        kept = kind.load(found)
    if kept.tokenizer != tokenizer:
        raise MemoryFileError(
            f"{repo} holds the {kept.what} of tokenizer {kept.tokenizer}, expected {tokenizer}: "
            "token ids mean something else there. Take one that was made with your model's "
            "tokenizer."
        )
    return kept
