"""Bounds on what drafting can bring on a recorded text.

The length oracle has the same drafter but knows how many of its tokens will be accepted, and drafts
exactly those. The text oracle knows the text, and cuts it into passes in the cheapest way.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_mlx.contracts import Drafter, Session
from specdec_mlx.draft_length.value import ValuedSession
from specdec_mlx.lab.bench.cost import CostCurve
from specdec_mlx.lab.bench.replay import greedy_context, modelled, right_path, top_rows
from specdec_mlx.lab.bench.timing import Sample
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.lab.proposing import proposing

LENGTH_ORACLE, TEXT_ORACLE = "length oracle", "text oracle"
LONGEST_DRAFT = 15  # with the pending token a pass of 16, the widest that is measured


def length_oracle(
    text: RecordedText,
    drafter: Drafter,
    cost: CostCurve,
    *,
    vocab_size: int,
    draft_seconds: float = 0.0,
    longest: int = LONGEST_DRAFT,
) -> Sample:
    """Draft exactly as many of the drafter's tokens as will be accepted.

    Of a drafter of trees it knows the shape, too: of all that its look-ups guess it drafts the path
    that is right, and nothing beside it.

    Args:
        text: the recorded text.
        drafter: whose proposals are cut.
        cost: c(m), in seconds.
        vocab_size: V.
        draft_seconds: of one draft token.
        longest: most tokens a draft.
    """
    session = drafter.begin(text.prompt, greedy_context(vocab_size))
    readers = [part for _, part in session.parts("") if part.reads_target]
    _show(readers, text, [None] * (len(text.prompt) - 1))
    done, seconds, accepted = 0, 0.0, []
    while done < len(text.generated):
        coming = text.generated[done:]
        accepted.append(_num_right(session, min(longest, len(coming) - 1), coming))
        seconds += cost(accepted[-1] + 1) + draft_seconds * accepted[-1]
        observed = coming[: accepted[-1] + 1]
        _show(readers, text, range(done, done + len(observed)))
        session.observe(observed)
        done += len(observed)
    session.close(len(text.prompt) + done)
    return modelled(text, cost, seconds, len(accepted), sum(accepted), sum(accepted))


def _num_right(session: Session, most: int, coming: Sequence[int]) -> int:
    """How many of the coming tokens a session proposes, or guesses one after the other."""
    whole = [one for group in session.groups("") for _, one in group]
    if not any(isinstance(one, ValuedSession) and one.cheap for one in whole):
        return len(right_path(proposing(session, "")(most), coming))
    drafts = [part.propose(most) for _, part in session.parts("")]
    for one in whole:
        drafts += one.candidates(most)
    return max(len(right_path(draft, coming)) for draft in drafts)


def _show(readers: Sequence[Session], text: RecordedText, places: Sequence[int | None]) -> None:
    """Show what the target thought at these places, to those who read it."""
    for reader in readers if places else ():
        reader.see(top_rows(text, places))


def text_oracle(text: RecordedText, cost: CostCurve, longest: int = LONGEST_DRAFT) -> Sample:
    """The cheapest way to cut the text into passes.

    Args:
        text: the recorded text.
        cost: c(m), in seconds.
        longest: most draft tokens in a pass; one more is the target's own.
    """
    seconds, passes = [0.0], [0]
    for n in range(1, len(text.generated) + 1):
        widths = range(1, min(longest + 1, n) + 1)
        best = min(widths, key=lambda m: seconds[n - m] + cost(m))
        seconds.append(seconds[n - best] + cost(best))
        passes.append(passes[n - best] + 1)
    drafted = len(text.generated) - passes[-1]
    return modelled(text, cost, seconds[-1], passes[-1], drafted, drafted)
