"""Parts that compare: passes, texts, a drafter's sessions, and readings of a head's files."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from specdec_mlx.contracts import all_drafters
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.lab.probing import ProbeReport, near_tie, probe
from specdec_mlx.lab.proof.enumeration import total_variation
from specdec_mlx.lab.proof.report import Finding, Status
from specdec_mlx.lab.proof.subject import Subject, Work, first_probs
from specdec_mlx.token_ids import to_list

NUM_TOKENS = 64
FEWEST_TOKENS = 8
POSITIONS_OF_PROBE = 25

SAME = 0.1
"""Total variation that rounding explains; one token too many or too few is far above.

In float32 rounding gives 1e-4; room is left for 16-bit models.
"""
UNLIKE_ALLOWED = 0.25
"""Share of comparisons that may differ: a drafter that proposes its argmax may meet near ties."""

VARIED_TOKENS = 48  # of each text
LEAST_GAIN = 0.05  # further share of accepted tokens that is worth a word

STANDARD_ERRORS = 3.0
"""Gain of another reading, in standard errors, that is worth a word: several are tried."""


def check_widths(model: nn.Module, work: Work, probed: list[ProbeReport]) -> Finding:
    """Run the probe. It goes past the window only if the prefill fits into the time."""
    started = time.perf_counter()
    report = probe(model, past_window=False)
    seconds = (time.perf_counter() - started) / POSITIONS_OF_PROBE
    prefill = seconds * (report.window or 0)
    # The prefill takes about the time of `window` single positions.
    looks_past = report.window is not None and work.has_time(prefill)
    report = probe(model) if looks_past else report
    probed.append(report)
    status: Status = "failed"
    verdict = (
        "A pass over several positions gives other logits than one by one, beyond rounding. "
        "specdec_mlx drafts nothing there, so the text stays right and is no sooner; see "
        "specdec-mlx probe."
    )
    if report.exact:
        is_bitwise = all(row.bitwise for row in report.rows)
        how = "bit for bit" if is_bitwise else "up to rounding"
        verdict = f"A pass over several positions gives the logits of single ones, {how}."
        status = "passed"
    if report.window is not None and not looks_past:
        status = "not run" if report.exact else "failed"
        verdict += (
            f" Past the window of {report.window} tokens was not looked: it takes about "
            f"{prefill:.0f} s. Give more time (--budget), or run specdec-mlx probe."
        )
    passes = [dataclasses.asdict(row) for row in report.rows]
    numbers = {"caches": list(report.caches), "passes": passes}
    return Finding(status, verdict, numbers)


def check_greedy(subject: Subject, work: Work, probed: ProbeReport | None = None) -> Finding:
    gap = near_tie(() if probed is None else probed.differences)
    differences: list[dict[str, Any]] = []
    faults: list[dict[str, Any]] = []
    texts = tokens = drafted = decided = 0
    for i, prompt in work.each(enumerate(subject.prompts)):
        expected, gaps = _plain(subject, prompt, work)
        got = subject.text(prompt, len(expected), ties=subject.ties)
        texts, tokens = texts + 1, tokens + len(expected)
        drafted += got[-1].stats.drafted
        decided += got[-1].stats.ties
        pairs = zip_longest((item.token for item in got), expected)
        position = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        if position is not None:
            # Rounding may exchange the two greatest logits, and then both texts are right.
            is_tie = gaps[position] <= gap
            place = {"prompt": i, "token": position, "top_two_gap": gaps[position]}
            differences.append(place | {"verdict": "near tie" if is_tie else "fault"})
            faults += [] if is_tie else [place]
    numbers = {
        "texts": texts,
        "tokens": tokens,
        "draft_tokens": drafted,
        "near_tie_below": gap,
        "ties_decided": decided,
        "differences": differences,
    }
    if faults:
        verdict = (
            f"The text of prompt {faults[0]['prompt']} parts from plain decoding's at token "
            f"{faults[0]['token']}, where the two greatest logits are "
            f"{faults[0]['top_two_gap']:.2g} apart: no rounding explains that. Run specdec-mlx "
            "probe; if it passes, the rule or a cache is at fault."
        )
        return Finding("failed", verdict, numbers)
    if drafted == 0:
        verdict = "Nothing was drafted, so nothing was compared. Give other prompts (--prompts)."
        return Finding("not run", verdict, numbers)
    ties, skipped = len(differences), len(subject.prompts) - texts
    verdict = f"{texts - ties} of {texts} texts: the same tokens as by plain decoding"
    if ties:
        verdict += f"; {ties} part from it at a near tie, which rounding may turn either way"
    if subject.ties:
        verdict += f"; plain passes decided {decided} near ties"
    if skipped:
        verdict += f" ({skipped} prompts had no time)"
    return Finding("passed", f"{verdict}.", numbers)


def _plain(subject: Subject, prompt: list[int], work: Work) -> tuple[list[int], list[float]]:
    """Decode with mlx-lm's own loop until the text or the time ends.

    Returns the tokens, and the gap between the two greatest logits at each.
    """
    tokens, gaps = list[int](), list[float]()
    with closing(generate_step(mx.array(prompt), subject.model, max_tokens=NUM_TOKENS)) as steps:
        for token, logprobs in steps:
            second, best = np.sort(np.array(logprobs.astype(mx.float32)))[-2:]
            tokens.append(int(token))
            gaps.append(float(best - second))
            has_enough = len(tokens) >= FEWEST_TOKENS and not work.has_time()
            if token in subject.end_tokens or has_enough:
                break
    return tokens, gaps


def check_state(subject: Subject, work: Work) -> Finding:
    """Compare a session that saw rejections with a new session on the same text.

    A draft cache that is rolled back wrongly changes only the acceptance, and no text.
    """
    results = [_after_rejections(subject, prompt) for prompt in work.each(subject.prompts)]
    distances = [distance for distance, _ in results if distance is not None]
    rejected = sum(num_rejected for _, num_rejected in results)
    numbers = {"comparisons": len(distances), "rejected_tokens": rejected, "distances": distances}
    if not distances or not rejected:
        verdict = "The drafter proposed nothing. Give prompts whose text repeats (--prompts)."
        return Finding("not run", verdict, numbers)
    unlike = sum(distance > SAME for distance in distances)
    if unlike <= UNLIKE_ALLOWED * len(distances):
        verdict = (
            f"After {rejected} rejected tokens it drafts what it drafts on a fresh start with the "
            "same text."
        )
        return Finding("passed", verdict, numbers)
    if not depends_on_text_alone(subject.drafter):
        verdict = (
            "After rejections it drafts otherwise than on a fresh start with the same text. That "
            "is right for a drafter that learns from its own drafts, and nothing says it does not."
        )
        return Finding("not applicable", verdict, numbers)
    verdict = (
        f"In {unlike} of {len(distances)} texts it drafts otherwise than on a fresh start: its "
        "cache is out of step with the text. The text stays right, but drafts are accepted less "
        "and less. In observe(), rewind by what was rejected."
    )
    return Finding("failed", verdict, numbers)


def _after_rejections(subject: Subject, prompt: list[int]) -> tuple[float | None, int]:
    """Run rounds that accept all, some and none of their drafts.

    Returns the total variation between the next tokens of this session and of a new session (None
    if neither drafts, 1 if only one drafts), and the number of rejected tokens.
    """
    session, length = subject.begin(prompt), subject.num_asked
    tokens, rejected = list(prompt), 0
    # Every number of accepted tokens occurs once.
    for num_kept in reversed(range(length + 1)):
        drafted = to_list(session.propose(length).tokens)
        accepted, dropped = drafted[:num_kept], drafted[num_kept:]
        rejected += len(dropped)
        # The token after the rejection has to differ from the rejected token.
        choices = [token for token in prompt if [token] != dropped[:1]] or prompt
        emitted = [*accepted, choices[len(tokens) % len(choices)]]
        session.observe(emitted)
        tokens += emitted
    sessions = session, subject.begin(tokens)
    a, b = (first_probs(one.propose(length), subject.vocab_size) for one in sessions)
    if a is None or b is None:
        return None if a is b else 1.0, rejected
    return total_variation(a, b), rejected


def depends_on_text_alone(drafter: Any) -> bool:
    """True if all parts are look-ups or models, which draft the same after the same text."""
    parts = [part for part in all_drafters(drafter) if not part.drafters]
    return all(
        isinstance(part, PromptLookupDrafter | NGramDrafter) or len(part.models()) > 0
        for part in parts
    )


def check_variations(subject: Subject, drafter: HeadDrafter, work: Work) -> Finding:
    """Compare the acceptance of a head with other readings of its files.

    The text is the target's in any case, so the part passes. The verdict names a better reading.
    """
    variations = list(drafter.head.variations())
    readings = [
        replace(
            subject,
            drafter=replace(drafter, head=head, greedy=True),
            num_draft_tokens=subject.num_asked,
        )
        for head in (drafter.head, *(variation.head for variation in variations))
    ]
    drafted, accepted = np.zeros((2, len(readings)))
    texts = 0
    for prompt in work.each(subject.prompts):
        stats = [reading.text(prompt, VARIED_TOKENS)[-1].stats for reading in readings]
        drafted += [one.drafted for one in stats]
        accepted += [one.accepted for one in stats]
        texts += 1
    shares = accepted / np.maximum(drafted, 1)
    share, *others = shares.tolist()
    numbers: dict[str, Any] = {
        "texts": texts,
        "accepted_as_read": share,
        "accepted_otherwise": {
            variation.name: other for variation, other in zip(variations, others, strict=True)
        },
    }
    if not drafted[0]:
        verdict = "Nothing was drafted. Give other prompts (--prompts)."
        return Finding("not run", verdict, numbers)
    # Two-proportion test: the variance is r (1 - r) (1/n + 1/m) with the pooled share r.
    pooled = (accepted + accepted[0]) / (drafted + drafted[0])
    spread = pooled * (1 - pooled) * (1 / np.maximum(drafted, 1) + 1 / drafted[0])
    gains = shares - share
    gains[gains <= np.maximum(LEAST_GAIN, STANDARD_ERRORS * np.sqrt(spread))] = 0
    verdict = "no other reading of its files does better"
    if gains.any():
        best = int(np.argmax(gains)) - 1
        verdict = f"{others[best]:.0%} would be with {variations[best].name}: "
        verdict += variations[best].advice
    verdict = f"{share:.0%} of its tokens are accepted, and {verdict}."
    return Finding("passed", verdict, numbers)
