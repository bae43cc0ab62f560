"""Several drafters in one tree: all that they propose, verified in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    DraftSession,
    Evidence,
    OffersSeveral,
    ValuesDrafts,
    is_cheap,
    key_of,
)
from specdec_mlx.contracts.trees import ROOT, chain
from specdec_mlx.drafters.first_of import FirstOf, FirstOfSession
from specdec_mlx.token_ids import to_list


@dataclass(frozen=True, init=False)
class TreeOf(FirstOf):
    """The drafts of several drafters as one tree, merged where they agree (SpecInfer).

    (Miao et al. 2024, section 3.) The automatic draft length keeps the tokens that are worth their
    rows; a fixed one takes what each proposes. A model on which trees are not exact gets chains.
    drafters: at least one, the likelier first, else ValueError; each proposes without a model.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeOfSession:
        """Begin with each of them; ValueError for a drafter whose drafts cost time."""
        sessions = [drafter.begin(list(prompt), context) for drafter in self.drafters]
        for drafter, session in zip(self.drafters, sessions, strict=True):
            if not is_cheap(session):
                raise ValueError(
                    f"TreeOf: what {type(drafter).__name__} proposes may not be thrown away, and "
                    "of a tree one path is kept. Give drafters that look tokens up."
                )
        return TreeOfSession(self.key, sessions, [key_of(drafter) for drafter in self.drafters])


class TreeOfSession(FirstOfSession):
    """One generation, seen by all of the drafters; this session itself is asked."""

    def __init__(self, key: str, sessions: Sequence[DraftSession], keys: Sequence[str]) -> None:
        super().__init__(sessions, keys)
        self.groups: list[list[tuple[str, DraftSession]]] = [[(key, self)]]
        self._key = key

    def propose(self, limit: int) -> Draft:
        """All that they propose, the tokens of one depth before those of the next."""
        some = list(filter(len, (session.propose(limit) for session in self.sessions)))
        if len(some) < 2 or some[0].logprobs is not None:
            return some[0] if some else Draft()
        return merged([draft for draft in some if draft.logprobs is None]).head(limit)

    def propose_tree(self, limit: int, values: ValuesDrafts, may_fork: Callable[[], bool]) -> Draft:
        """The chain or tree of all their drafts that is worth most; see `contracts.branching`."""
        drafts: list[tuple[str, Draft]] = []
        for key, part in self.parts:
            most = min(limit, values.limit(key, True))
            several = part.candidates(most) if isinstance(part, OffersSeveral) else ()
            drafts += [(key, draft.first_chain()) for draft in several or [part.propose(most)]]
        known = [(key, draft) for key, draft in drafts if len(draft) and draft.logprobs is None]
        return values.grow(self._key, known, may_fork)


Text = tuple[int, ...]  # the tokens that lead to a node of a tree, its own last


def merged(drafts: Sequence[Draft]) -> Draft:
    """Drafts of point masses, at least one, as one tree, in which each text stands once."""
    texts = dict.fromkeys(text for draft in drafts for text in texts_of(draft))
    return draft_of(sorted(texts, key=len))  # stable: at a length the order of the drafts


def texts_of(draft: Draft) -> list[Text]:
    """The text of each node."""
    tokens, texts = to_list(draft.tokens), list[Text]()
    parents = chain(len(tokens)) if draft.parents is None else draft.parents
    for token, parent in zip(tokens, parents, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts


def draft_of(texts: Iterable[Text], evidence: Sequence[Evidence | int] | None = None) -> Draft:
    """The draft whose nodes have these texts, in order; a chain where they do not fork."""
    nodes = {text: node for node, text in enumerate(texts)}
    parents = [nodes.get(text[:-1], ROOT) for text in nodes]
    forks = parents != chain(len(parents))
    return Draft([text[-1] for text in nodes], None, evidence, parents if forks else None)
