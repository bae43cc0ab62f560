"""Which of several drafts to verify where only their length is given: the one that brings most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.accounts import ScoredDraft
from specdec_mlx.draft_length.agreement import compared, pooled
from specdec_mlx.draft_length.tuning import class_named
from specdec_mlx.types import Draft, Evidence, RoundRecord


class ExpectedTokens:
    """Ranks drafts by the tokens that they are expected to bring, by what their like has brought.

    For draft lengths that know nothing of costs; see `types.ChoosesDrafts`.

    Args:
        cut: (key, draft) -> how many tokens of it the draft length keeps.
    """

    def __init__(self, cut: Callable[[str, Draft], int] = lambda part, draft: len(draft)) -> None:
        """Nothing is known yet but the prior."""
        self._cut = cut
        self._histories: dict[str, AcceptanceHistory] = {}
        self._scored: dict[str, ScoredDraft] = {}
        self._best = 0.0
        self._latest: int | None = None

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[int, int]:
        """The draft that is expected to bring most, and how much of it is kept."""
        lengths = [self._cut(part, draft) for part, draft in drafts]
        together = compared([draft for _, draft in drafts])
        chances = [
            self._chances(part, tokens[:length], evidence[:length])
            for (part, _), (tokens, evidence), length in zip(drafts, together, lengths, strict=True)
        ]
        kept = [tokens[:length] for (tokens, _), length in zip(together, lengths, strict=True)]
        expected = list(map(_expected, pooled(chances, kept)))
        self._best = max(expected)
        best = expected.index(self._best)
        return best, lengths[best]

    def outbids(self, part: str, limit: int) -> bool:
        """Whether a draft of so many tokens by a draft model is expected to bring more."""
        history = self._histories.setdefault(part, AcceptanceHistory.of_draft_models())
        return _expected(history.chances([0] * limit)) > self._best

    def record(self, round_: RoundRecord) -> None:
        """Score the drafts of the latest round against what came, and a draft model's verdict."""
        history = self._histories.get(round_.part)
        if history is not None and round_.part not in self._scored:
            for i in range(min(round_.accepted + 1, round_.drafted)):
                history.learn(0, i, i < round_.accepted)
        self.observe(round_.tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        """Score the drafts that were chosen from against what came."""
        through = [part for part, draft in self._scored.items() if draft.is_through(tokens)]
        for part in through:
            del self._scored[part]
        if tokens:
            self._latest = tokens[-1]

    def _chances(
        self, part: str, tokens: list[int], evidence: Sequence[Evidence | int]
    ) -> Iterator[float]:
        """Those of the tokens of a point-mass draft; from now on it is scored."""
        history = self._histories.setdefault(part, AcceptanceHistory.of_look_ups(class_named(part)))
        self._scored[part] = ScoredDraft(
            tokens, evidence, history, looks_at_tokens=True, before=self._latest
        )
        return history.chances(evidence, tokens, self._latest)


def _expected(chances: Iterable[float]) -> float:
    """Draft tokens that are accepted on average."""
    expected, reach = 0.0, 1.0
    for chance in chances:
        reach *= chance
        expected += reach
    return expected
