"""Several drafters in one tree: all that they propose, verified in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_mlx.token_ids import to_list
from specdec_mlx.types import (
    Checks,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    is_cheap,
    key_of,
)
from specdec_mlx.types.trees import ROOT, chain


@dataclass(frozen=True)
class TreeOf:
    """The drafts of several drafters as one tree, merged where they agree (SpecInfer).

    (Miao et al. 2024, section 3.) Where one of them is right the others cost their positions, so
    give a `draft_length` of your own: "auto" takes a draft for a chain. A model on which trees are
    not exact gets the first drafter's draft.

    drafters: at least one, the likelier first; each proposes without a model, such as
        `PromptLookupDrafter` and `NGramDrafter`. Raises ValueError for none.
    """

    drafters: tuple[Drafter, ...]

    def __init__(self, *drafters: Drafter) -> None:
        """Take the drafters in the order in which their tokens are tried."""
        if not drafters:
            raise ValueError("TreeOf() has nothing to propose. Give at least one drafter.")
        object.__setattr__(self, "drafters", drafters)

    @property
    def key(self) -> str:
        """The keys of its parts, in order."""
        return f"TreeOf({', '.join(map(key_of, self.drafters))})"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeOfSession:
        """Begin with each of them; ValueError for one whose proposals may not be thrown away."""
        sessions = [drafter.begin(prompt, context) for drafter in self.drafters]
        for drafter, session in zip(self.drafters, sessions, strict=True):
            if not is_cheap(session):
                raise ValueError(
                    f"TreeOf: what {type(drafter).__name__} proposes may not be thrown away, and "
                    "of a tree one path is kept. Give drafters that look tokens up."
                )
        return TreeOfSession(sessions)

    def check(self, context: DraftContext) -> None:
        """Let each of them refuse the target."""
        for drafter in self.drafters:
            if isinstance(drafter, Checks):
                drafter.check(context)


class TreeOfSession:
    """One generation, seen by all of the drafters."""

    cheap = True

    def __init__(self, sessions: Sequence[DraftSession]) -> None:
        """Take the sessions in the order in which their tokens are tried."""
        self.sessions = list(sessions)

    def propose(self, limit: int) -> Draft:
        """All that they propose, the tokens of one depth before those of the next."""
        drafts = [session.propose(limit) for session in self.sessions]
        some = [draft for draft in drafts if len(draft)]
        if not some or len(some) == 1 or some[0].logprobs is not None:
            return some[0] if some else Draft()
        return merged([draft for draft in some if draft.logprobs is None]).head(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell all of them."""
        for session in self.sessions:
            session.observe(tokens)

    def close(self, length: int) -> None:
        """Close those that want to know."""
        for session in self.sessions:
            if isinstance(session, Closes):
                session.close(length)


def merged(drafts: Sequence[Draft]) -> Draft:
    """Drafts as one tree, in which each text stands once; of point masses, and at least one.

    Depth by depth, and at a depth in the order of the drafts. Where it does not fork it is a chain.
    """
    texts: dict[tuple[int, ...], None] = {}
    for draft in drafts:
        for text in _texts(draft):
            texts[text] = None
    ordered = sorted(texts, key=len)  # stable: at a length the order of the drafts
    place = {text: node for node, text in enumerate(ordered)}
    parents = [place[text[:-1]] if len(text) > 1 else ROOT for text in ordered]
    tokens = [text[-1] for text in ordered]
    return Draft(tokens, parents=None if parents == chain(len(tokens)) else parents)


def _texts(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens that lead to each node, its own last."""
    tokens = to_list(draft.tokens)
    parents = chain(len(tokens)) if draft.parents is None else draft.parents
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts
