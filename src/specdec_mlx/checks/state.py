"""Is the drafter's state in step with the text?

A draft cache rolled back wrongly changes no text, only acceptance. So a session that has been
through rejections is compared with one that begins with the same text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.nn as nn

from specdec_mlx.checks.report import Part
from specdec_mlx.checks.stand_ins import Reading
from specdec_mlx.checks.subject import Subject, Work, first_probs, total_variation
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.token_ids import to_list

NAME = "drafter's state"
SAME = 0.1
"""Total variation that rounding explains; one token too many or too few is far above.

In float32 rounding gives 1e-4; room is left for 16-bit models.
"""
UNLIKE_ALLOWED = 0.25
"""Share of comparisons that may differ: a drafter that proposes its argmax may meet near ties."""


def check_state(subject: Subject, work: Work) -> Part:
    """One comparison a prompt, after rounds that kept all, some and none of their drafts."""
    distances: list[float] = []
    rejected = 0
    for i, prompt in work.each(enumerate(subject.prompts)):
        distance, num_rejected = _compare(subject, prompt)
        rejected += num_rejected
        distances += [] if distance is None else [distance]
        work.say(f"{i + 1} texts")
    numbers = {"comparisons": len(distances), "rejected_tokens": rejected, "distances": distances}
    if not distances or not rejected:
        verdict = "The drafter proposed nothing. Give prompts whose text repeats (--prompts)."
        return Part(NAME, "not run", verdict, numbers)
    unlike = sum(distance > SAME for distance in distances)
    if unlike <= UNLIKE_ALLOWED * len(distances):
        verdict = f"After {rejected} rejected tokens it drafts what it drafts on a fresh start with"
        return Part(NAME, "passed", f"{verdict} the same text.", numbers)
    if not depends_on_text_alone(subject.drafter):
        verdict = "After rejections it drafts otherwise than on a fresh start with the same text. "
        verdict += "That is right for a drafter that learns from its own drafts, and nothing says "
        return Part(NAME, "not applicable", f"{verdict}it does not.", numbers)
    verdict = (
        f"In {unlike} of {len(distances)} texts it drafts otherwise than on a fresh start: its "
        "cache is out of step with the text. The text stays right, but drafts are accepted less "
        "and less. In observe(), rewind by what was rejected."
    )
    return Part(NAME, "failed", verdict, numbers)


def _compare(subject: Subject, prompt: list[int]) -> tuple[float | None, int]:
    """Total variation of both sessions' next tokens (None, or 1 for one); tokens rejected."""
    context = subject.context(Noise(subject.seed))
    session = subject.drafter.begin(prompt, context)
    tokens = list(prompt)
    rejected = 0
    for num_kept in reversed(range(subject.draft_length + 1)):
        drafted = to_list(session.propose(subject.draft_length).tokens)
        kept, wrong = drafted[:num_kept], drafted[num_kept:]
        rejected += len(wrong)
        choices = [token for token in prompt if [token] != wrong[:1]] or prompt
        emitted = [*kept, choices[len(tokens) % len(choices)]]
        session.observe(emitted)
        tokens += emitted
    sessions = session, subject.drafter.begin(tokens, context)
    drafts = [one.propose(subject.draft_length) for one in sessions]
    a, b = (first_probs(draft, subject.vocab_size) for draft in drafts)
    if a is None or b is None:
        return None if a is b else 1.0, rejected
    return total_variation(a, b), rejected


def depends_on_text_alone(drafter: Any) -> bool:
    """True if a drafter is known to draft the same after the same text: look-ups, and models."""
    if isinstance(drafter, PromptLookupDrafter | NGramDrafter | nn.Module):
        return True
    if isinstance(drafter, Reading):
        return depends_on_text_alone(drafter.drafter)
    entries = drafter if isinstance(drafter, tuple) else ()
    if dataclasses.is_dataclass(drafter):
        entries = tuple(getattr(drafter, field.name) for field in dataclasses.fields(drafter))
    return any(map(depends_on_text_alone, entries))
