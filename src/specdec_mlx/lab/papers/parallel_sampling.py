"""PaSS: the target drafts for itself, in one pass over its last token and look-ahead embeddings.

Of L trained embeddings the i-th stands i places behind the text, and the target's logits there
guess the token after it (parallel speculative sampling, Monea et al. 2023, arXiv 2311.13581). The
last token's own row makes the first token of a draft, which is the target's: two passes, one that
drafts and one that verifies, write two tokens at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.draft_sources import way_of_writing
from specdec_mlx.drafters.fingerprint import fingerprint
from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.model import ModelDrafter, ModelReader, check_caches_fit
from specdec_mlx.errors import HeadError
from specdec_mlx.models.anatomy import anatomy_of, change_class, setting
from specdec_mlx.token_ids import to_ids

LOOK_AHEAD = "look_ahead"  # key of a config: number of embeddings

# [n, D] in place of the embeddings of the last n tokens, in passes that this thread builds
_behind: ContextVar[mx.array | None] = ContextVar("_behind", default=None)


class LookAhead(nn.Module):  # type: ignore[misc]
    """Look-ahead embeddings [L, D], in the scale of the target's embeddings."""

    def __init__(self, target: nn.Module, number: int) -> None:
        """Begin with the mean of the target's embeddings. HeadError if they were not found."""
        super().__init__()
        anatomy = anatomy_for_head(target)
        # The mean embedding prefers no token.
        mean = anatomy.embed(mx.arange(anatomy.vocab_size)).mean(axis=0, keepdims=True)
        self.rows = mx.repeat(mean, number, axis=0)


def looking_ahead(target: nn.Module, rows: mx.array) -> AbstractContextManager[None]:
    """Replace the embeddings of the last n tokens by `rows` [n, D] in passes inside this block."""
    embedding: Any = anatomy_of(target).embedding
    if not hasattr(embedding, "looks_ahead"):
        change_class(embedding, _looking_ahead)
    return setting(_behind, rows)


@cache
def _looking_ahead(kind: type) -> type:
    """An embedding's class, whose last rows may be given."""

    def call(self: Any, ids: mx.array) -> Any:
        made, rows = kind.__call__(self, ids), _behind.get()
        if rows is None or not rows.shape[0]:
            return made
        return mx.concatenate([made[:, : -rows.shape[0]], rows[None].astype(made.dtype)], axis=1)

    members = {"__call__": call, "__module__": kind.__module__, "looks_ahead": True}
    return type(kind.__name__, (kind,), members)


@dataclass(frozen=True, eq=False)
class PaSSDrafter(ModelDrafter):
    """Drafts with the target and look-ahead embeddings. `model` is the target.

    Do not use it if a pass over L + 2 positions costs much more than a single position, or for
    several texts at once. Each draft takes a separate pass. It uses the target's caches if only one
    text is written, and otherwise its own caches.
    """

    tokenizers: str = "same"
    head: Any = None
    name: str = ""

    @property
    def key(self) -> str:
        return f"PaSS({fingerprint(self.head)}, {way_of_writing(self)})"

    def describe(self) -> str:
        return f"{self.name}: PaSS; {len(self.head.rows)} look-ahead embeddings"

    def check(self, context: DraftContext) -> None:
        """Raise HeadError if this is not the target that the drafter drafts with."""
        lent = context.target_caches
        if lent is not None and lent.model is not self.model:
            raise HeadError(f"{self.describe()}: load it for the target of this text.")
        if context.draft_cache is not None:
            check_caches_fit(self.model, context.draft_cache)

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        """False, because it uses the target's caches or temporary caches."""
        return False

    def source(self, prompt: Sequence[int], context: DraftContext) -> PaSSSource:
        return PaSSSource(self, prompt, context)


class PaSSSource(ModelReader):
    """Drafts on the target's caches and restores them. Without them it uses its own caches."""

    at_once = True

    def __init__(self, drafter: PaSSDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        super().__init__(drafter, prompt, context)
        self.rows = drafter.head.rows
        if context.target_caches is not None and context.draft_cache is None:
            self.rollback = context.target_caches.rollback

    def begin_draft(self, limit: int) -> int:
        """Make one pass for at most L + 1 tokens.

        There is no pass for a single token, because plain decoding gives this token sooner.
        """
        if limit < 2:
            return 0
        if not self.is_lent:
            self.catch_up()
        pending, length = self.in_one_pass(min(limit, 1 + len(self.rows)))
        # The last token's own row gives the first token of the draft.
        rows = self.rows[: length - 1]
        with self.undone(), looking_ahead(self.model, rows):
            logits = self.feed(to_ids([*pending, *[0] * len(rows)]))
        self.logits, self.places = logits[-length:], [0]
        return length

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Remove the embeddings from the caches. On the target's caches, the fed text too."""
        if self.is_lent:
            with self.rollback.undone():
                yield
        else:
            self.rollback.checkpoint()
            yield
            self.rollback.rewind_to(len(self.tokens))


def load_pass(files: HeadFiles, target: nn.Module, **options: Any) -> PaSSDrafter:
    """The drafter of trained look-ahead embeddings. `options` go to `ModelDrafter`."""
    head = LookAhead(target, int(files.config[LOOK_AHEAD]))
    files.load_into(head, head.rows.dtype)
    return PaSSDrafter(target, None, head=head, name=files.name, **options)
