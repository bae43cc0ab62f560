"""How drafts are drawn that a model or a head writes."""

from __future__ import annotations

from dataclasses import replace

from specdec_mlx.sampling.distribution import Sampling


def check_draft_temp(draft_temp: float | None) -> None:
    """Raise ValueError for a temperature of drafts that is none."""
    if draft_temp is not None and not draft_temp >= 0:
        raise ValueError(f"draft_temp={draft_temp!r}: expected a number >= 0, or None.")


def sampling_of_drafts(
    target: Sampling | None, *, greedy: bool, draft_temp: float | None
) -> Sampling:
    """How to draw for a target, None for an opaque sampler: its filters, at `draft_temp`."""
    if greedy or target is None or target.greedy:
        return Sampling()
    return target if draft_temp is None else replace(target, temp=draft_temp)
