"""Beams: the likeliest continuations of a prompt, and one step of the search for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]

Continuations = Sequence[tuple[int, float]]
"""Tokens that may follow a beam, with their log-probabilities; the likeliest of them."""


@dataclass(frozen=True)
class Beam:
    """A continuation: generated tokens, the sum of their log-probabilities, and if it has ended."""

    tokens: Tokens = ()
    logprob: float = 0.0
    is_finished: bool = False


def next_beams(
    beams: Sequence[Beam],
    continuations: Mapping[Tokens, Continuations],
    num_beams: int,
    stop_tokens: frozenset[int],
) -> list[Beam] | None:
    """One step of beam search: the likeliest of all beams with one token more.

    Finished beams stay, and compete. A beam with unknown continuations, which are never likelier
    than itself, is dropped if it is less likely than all that are chosen. `continuations` are the
    `num_beams` likeliest of each open beam. None where those that are known do not decide it.
    """
    candidates = [beam for beam in beams if beam.is_finished]
    unknown = []
    for beam in beams:
        if beam.is_finished:
            continue
        if beam.tokens not in continuations:
            unknown.append(beam.logprob)
            continue
        candidates += [
            Beam((*beam.tokens, token), beam.logprob + logprob, token in stop_tokens)
            for token, logprob in continuations[beam.tokens]
        ]
    best = sorted(candidates, key=lambda beam: -beam.logprob)[:num_beams]
    if unknown and (len(best) < num_beams or best[-1].logprob <= max(unknown)):
        return None
    return best
